//! A log of byte records on the blocks of an ordered volume: all of its decisions, without I/O.
//!
//! Records go into a *ring* of blocks. [`writer`] packs them into groups of new blocks, decides
//! when a group begins and when it asks for a FLUSH, and determines the blocks that may be
//! overwritten. [`opening`] finds the end of the log after a crash, [`reading`] turns blocks into
//! records. [`format`](mod@format) is the format on the drives; `docs/wal-format.md` describes it.
//!
//! Nothing here reads a clock, opens a socket or starts a thread: data that is read and written is
//! an argument. The crate `riopipe-wal` adds threads and I/O.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(test)]
extern crate std;

pub mod format;
pub mod opening;
pub mod reading;
pub mod record;
pub mod ring;
pub mod writer;

pub use riopipe_nvme::digest::Crc32c;
pub use riopipe_session::wire::BLOCK_BYTES;

/// A log sequence number: the number of bytes of framed records before this one, since the log's
/// creation. It grows with each record, is never used twice, and identifies a record by its first
/// byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// The log's first byte.
    pub const ZERO: Self = Self(0);

    /// The Lsn `bytes` bytes later. It saturates: no real log gets near the largest number, but a
    /// damaged block may contain it.
    #[must_use]
    pub fn plus(self, bytes: usize) -> Self {
        Self(self.0.saturating_add(bytes as u64))
    }
}

impl core::fmt::Display for Lsn {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}
