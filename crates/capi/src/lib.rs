//! The C interface of [`riopipe`].
//!
//! `include/riopipe.h` declares it, and documents each function for its callers. `docs/c-api.md` is the introduction.
//! This crate translates pointers, numbers and texts, and decides nothing.
//!
//! For bindings of other languages that are written in Rust it has [`Failure`], the codes and texts of all errors, and
//! [`Staged`], a group that is not bound to a stream before it is submitted.
//!
//! # Safety
//!
//! All functions of this interface have the same contract. The caller ensures the following:
//!
//! - A pointer to an object of the library (`riop_volume *`, …) is null, or came from this library and was not freed.
//! - A text is null, or ends with a zero byte. A pointer to a number or to a structure is null, or points to memory
//!   that the function may read (`const`) or write. A pointer with a length or a count points to that much memory.
//! - A structure with a field `size` has so many bytes.
//! - A pointer to an error pointer is null, or the error pointer is null or points to an error of this library.
//! - No other thread uses such memory during the call. Two calls at the same time may use the same object of the
//!   library. If that is not allowed for the object, one of them returns [`RIOP_BUSY`]. But no call may use an object
//!   that another call frees.
//!
//! As far as this can be checked, it is: null pointers, objects of another kind, objects in use. No panic leaves the
//! library: each function runs inside of `guard`, and returns [`RIOP_PANIC`].

mod buf;
mod codes;
mod error;
mod extent;
mod failure;
mod group;
mod handle;
mod info;
mod members;
mod memory;
mod options;
mod reader;
mod recovery;
mod stream;
mod submitted_read;
mod text;
mod time;
mod version;
mod volume;
mod watch;

pub use buf::*;
pub use codes::*;
pub use error::*;
pub use extent::*;
pub use failure::Failure;
pub use group::*;
pub use handle::Handle;
pub use info::*;
pub use members::*;
pub use options::*;
pub use reader::*;
pub use recovery::*;
pub use stream::*;
pub use submitted_read::*;
pub use text::*;
pub use time::{RIOP_FOREVER, RiopMarks};
pub use version::*;
pub use volume::*;
pub use watch::*;
