//! How bytes travel: TCP sockets, and waiting for them.
//!
//! Everything here is non-blocking and knows nothing of NVMe: a [`Socket`] sends slices that lie
//! anywhere and receives into one large [`RecvBuf`]; a [`Poller`] tells which of many sockets have
//! something to say, and a [`Waker`] interrupts it from another thread; a [`Waiter`] decides, when
//! there is nothing to do, whether to look again at once or to sleep, so that a busy loop is fast
//! and an idle one costs nothing; an [`Owned`] lets two threads drive one connection by turns.
//!
//! What makes loopback TCP fast, and so shapes this crate: many messages per system call in either
//! direction, large receives, one answer per receive, `TCP_NODELAY` always, and no sleep while the
//! other side is about to answer (a wake-up costs more than four round trips).
//!
//! This crate parses nothing and starts no thread.

mod clock;
mod connect;
mod cores;
mod listener;
mod owned;
mod poller;
mod recv_buf;
mod socket;
mod sync;
mod waiter;
mod wake;

pub use clock::{CpuClock, fine_timers, now_ns, process_cpu_ns, thread_cpu_ns};
pub use connect::{ConnectError, Connecting, connect, resolve};
pub use cores::{PinError, allowed_cores, pin_to_core};
pub use listener::{AcceptError, ListenError, Listener};
pub use owned::{Owned, Taken};
pub use poller::{Event, Interest, Poller, PollerError, Waker, wait_readable, wait_writable};
pub use recv_buf::{BufFull, RecvBuf};
pub use socket::{LinkError, Received, SetCongestionError, Socket, SocketOptions};
pub use waiter::{Next, SpinPolicy, Waiter, relax};
