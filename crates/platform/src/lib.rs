//! Services of the machine in one place: clocks, event descriptors, sleeping threads, CRC32C with the
//! processor's instructions, random bytes, files with secrets.
//!
//! The pure crates can't use them; the time and the checksum are their arguments.

mod clock;
mod crc;
mod event;
mod limits;
mod private_file;
mod random;
mod sleeper;

pub use clock::{CpuClock, fine_timers, now_ns, process_cpu_ns, thread_cpu_ns};
pub use crc::crc32c;
pub use event::EventFd;
pub use limits::{descriptors_max, raise_descriptors_max};
pub use private_file::{PrivateFileError, check_private_file, read_private_file};
pub use random::random_bytes;
pub use sleeper::{Sleeper, wake_all};
