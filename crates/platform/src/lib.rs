//! Services of the machine in one place: clocks, event descriptors, CRC32C with the processor's
//! instructions.
//!
//! The pure crates can't use them; the time and the checksum are their arguments.

mod clock;
mod crc;
mod event;

pub use clock::{CpuClock, fine_timers, now_ns, process_cpu_ns, thread_cpu_ns};
pub use crc::crc32c;
pub use event::EventFd;
