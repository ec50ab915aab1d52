//! An ordered volume as a plain block device, for programs and kernels that know nothing of streams.
//!
//! A [`Device`] takes writes, reads, flushes and zeroes of an open [`Volume`](riopipe::Volume).
//! [`PlainDevice`](riopipe_session::initiator::plain_device::PlainDevice) decides what each of them
//! asks of the volume's streams, and when it is done. This crate has the threads and the buffers.
//!
//! - [`Device::drive`] is the device as a drive of a target. [`NvmeTarget`] serves it to NVMe/TCP hosts,
//!   such as the Linux kernel's.
//! - [`NbdServer`] serves it over NBD.
//!
//! docs/attach.md has what a host may count on.
//!
//! # Threads
//!
//! Each stream has a thread, which submits groups and waits for marks. Some threads read. A request
//! comes in the thread of a queue, and its result goes back to the queue that has submitted it.

mod device;
mod drive;
mod error;
mod inbox;
mod nbd;
mod nvme;
mod reads;
mod shared;
mod stream_thread;

pub use device::{Acknowledged, Device, DeviceOptions};
pub use drive::{VolumeDrive, VolumeQueue};
pub use error::{CloseError, DeviceError};
pub use nbd::{NbdAddress, NbdError, NbdServer};
pub use nvme::{NvmeOptions, NvmeTarget};
pub use riopipe_target::{StartError, StopError};
