// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls of RioFS that other file systems do not have: order without waiting. `riofs.h` beside this
//! file explains them. Copy this file into a program; it needs only the standard library.
//!
//! ```ignore
//! mod riofs;
//!
//! log.write_all(record)?;
//! riofs::fdatabarrier(&log)?; // waits for no drive
//! table.write_all_at(page, offset)?;
//! table.sync_data()?; // the table is durable, so the log is, too
//! ```

use std::ffi::{c_int, c_uint, c_ulong};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;

/// Orders the data of a file, its fields and the names that lead to it.
pub const IOC_BARRIER: u32 = 0x72a0;
/// Orders the data of a file and the fields that are needed to read it.
pub const IOC_DATA_BARRIER: u32 = 0x72a1;
/// Makes the whole file system durable.
pub const IOC_SYNCFS: u32 = 0x72a2;

/// The way in which a call was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// RioFS has done it.
    RioFs,
    /// It is not RioFS, or the kernel is older than 6.16. The file was made durable instead, by
    /// `fsync`, `fdatasync` or `syncfs`: the order is the same, and the call has waited.
    Durable,
}

mod c {
    use std::ffi::{c_int, c_uint, c_ulong};

    unsafe extern "C" {
        pub(super) fn ioctl(fd: c_int, command: c_ulong, ...) -> c_int;
        pub(super) fn sync_file_range(fd: c_int, offset: i64, len: i64, flags: c_uint) -> c_int;
        pub(super) fn fsync(fd: c_int) -> c_int;
        pub(super) fn fdatasync(fd: c_int) -> c_int;
        pub(super) fn syncfs(fd: c_int) -> c_int;
    }
}

/// `SYNC_FILE_RANGE_WAIT_BEFORE`, `_WRITE` and `_WAIT_AFTER`.
const WRITE_AND_WAIT: c_uint = 1 | 2 | 4;
/// `ENOTTY`, which has no [`ErrorKind`].
const ENOTTY: i32 = 25;

/// A barrier for a file: its data, its fields and its names. All that was written to it before is
/// durable before later changes of any file that a later call makes durable, and before later
/// writes of this file. Changes through shared mappings are included.
///
/// # Errors
/// As `fsync`. Nothing is known about the order.
pub fn fbarrier(file: impl AsFd) -> Result<Done> {
    barrier(file.as_fd().as_raw_fd(), IOC_BARRIER, c::fsync)
}

/// A barrier for the data of a file, and the fields that are needed to read it.
///
/// # Errors
/// As [`fbarrier`].
pub fn fdatabarrier(file: impl AsFd) -> Result<Done> {
    barrier(file.as_fd().as_raw_fd(), IOC_DATA_BARRIER, c::fdatasync)
}

/// Makes the file system of an open file durable, and waits for it. Pages of *other* files that were
/// changed through mappings need their own `msync` or `fsync` before.
///
/// # Errors
/// As `fsync`.
pub fn syncfs(file: impl AsFd) -> Result<Done> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: these calls take an open descriptor and no memory.
    check(unsafe { c::syncfs(fd) })?;
    // SAFETY: as above. It writes changed pages on any version of the kernel.
    check(unsafe { c::fsync(fd) })?;
    match command(fd, IOC_SYNCFS) {
        Ok(()) => Ok(Done::RioFs),
        Err(error) if is_unknown(&error) => Ok(Done::Durable),
        Err(error) => Err(error),
    }
}

fn barrier(fd: c_int, barrier: u32, sync: unsafe extern "C" fn(c_int) -> c_int) -> Result<Done> {
    if pages_can_be_written() {
        // SAFETY: the call takes an open descriptor and no memory.
        match check(unsafe { c::sync_file_range(fd, 0, 0, WRITE_AND_WAIT) }) {
            Ok(()) => match command(fd, barrier) {
                Ok(()) => return Ok(Done::RioFs),
                Err(error) if is_unknown(&error) => {}
                Err(error) => return Err(error),
            },
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            Err(error) => return Err(error),
        }
    }
    // SAFETY: as above.
    check(unsafe { sync(fd) })?;
    Ok(Done::Durable)
}

fn command(fd: c_int, command: u32) -> Result<()> {
    // SAFETY: the commands take an open descriptor and no memory.
    check(unsafe { c::ioctl(fd, c_ulong::from(command)) })
}

fn check(returned: c_int) -> Result<()> {
    if returned == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Whether an ioctl has failed because it is not known.
fn is_unknown(error: &Error) -> bool {
    error.raw_os_error() == Some(ENOTTY)
        || matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput)
}

/// Whether `sync_file_range` waits until a FUSE file system has the pages: since Linux 6.16.
pub fn pages_can_be_written() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        let mut number = || numbers.next().and_then(|text| text.parse().ok()).unwrap_or(0_u32);
        let version = (number(), number());
        version >= (6, 16)
    })
}
