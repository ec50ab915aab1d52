//! Transport of bytes: TCP sockets, and waiting for them.
//!
//! Everything here is non-blocking and independent of NVMe. A [`Socket`] sends slices from any
//! place and receives into one large [`RecvBuf`]. A [`Poller`] reports which of many sockets are
//! ready, and a [`Waker`] interrupts it from another thread. An [`AdaptiveSpin`] decides, when there is
//! nothing to do, whether to poll again at once or to sleep, so that a busy loop is fast and an
//! idle one costs nothing. An [`Owned`] lets two threads use one connection in turns.
//!
//! Loopback TCP is fast under these conditions, which shape this crate: many messages per system
//! call in both directions, large receives, one answer per receive, `TCP_NODELAY` always, and no
//! sleep shortly before an answer (a wake-up costs more than four round trips).
//!
//! This crate parses nothing but addresses, and starts no thread.

mod adaptive_spin;
mod address;
mod connect;
mod cores;
mod epoll_wait;
mod listener;
mod owned;
mod poller;
mod recv_buf;
mod socket;
mod sync;
mod wake;

pub use adaptive_spin::{AdaptiveSpin, IdleStep, SpinPolicy, relax};
pub use address::{HostPort, ParseAddressError};
pub use connect::{ConnectError, Connecting, connect, resolve};
pub use cores::{PinError, allowed_cores, current_core, pin_to_core};
pub use listener::{AcceptError, ListenError, Listener};
pub use owned::{Owned, Taken};
pub use poller::{
    EVENTS_MAX, Event, Interest, Poller, PollerError, Waker, wait_readable, wait_writable,
};
pub use recv_buf::{BufFull, Filled, RecvBuf};
pub use riopipe_platform::now_ns;
pub use socket::{LinkError, Received, Relay, SetCongestionError, Socket, SocketOptions};
