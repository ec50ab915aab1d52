//! Serving a device over NBD (Network Block Device), which many programs and the Linux kernel take.
//!
//! The protocol is that of <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>: fixed
//! newstyle negotiation with `NBD_OPT_GO` and `NBD_OPT_EXPORT_NAME`, and simple replies. There is no
//! encryption and no authentication.

mod connection;
mod protocol;
mod server;

pub use server::{NbdAddress, NbdError, NbdServer};
