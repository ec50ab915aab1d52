//! A part of a log on a block device: a mirror in memory, written to the device block by block.
//!
//! A store changes the mirror, and marks the 4 KiB blocks that it touches as dirty. A fence writes
//! all dirty blocks to the device, and waits until they are durable. This way,
//!
//! - no block of a log is written again while an earlier write of the block is in flight, because a
//!   drive may execute the two writes in either order (assumption M4),
//! - the device only gets whole blocks, which a power cut does not tear (assumption M1).
//!
//! Most fences write one block, which has the last append or one of the last persist words.
//!
//! A part need not begin or end at a block. Its mirror does:
//!
//! ```text
//! device offset:  0 ... mirror_start
//!                       |
//!    device   ----------[ block ][ block ][ block ]----------
//!    mirror             [ 0 .................. len ]
//!    part                   [ part_in_mirror ]
//! ```

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_order::block_device::BLOCK_BYTES;
use riopipe_order::probe::{self, Plant};
use riopipe_order::region::{Region, RegionError};

/// Two dirty blocks with at most this many clean blocks between them are written by one command,
/// together with the clean ones. 16 KiB more cost a drive about 5 µs. A second command costs more,
/// and may have to wait for the first. The persist words and the appends of one batch are close
/// together, so they usually are one write.
const GAP_BLOCKS_MAX: usize = 4;

/// When a completed write is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// As soon as it has completed.
    OnCompletion,
    /// After the next FLUSH, if the device has a volatile cache.
    AfterFlush,
}

/// The device under a log, shared by the log's parts. It only carries out operations, and decides
/// nothing.
pub trait Blocks {
    /// Bytes in memory, with the alignment that the device needs.
    type Mirror: AsRef<[u8]> + AsMut<[u8]>;
    /// The error of a failed read.
    type ReadError;

    /// Whether the device has a volatile write cache. Then a completed write is not durable yet.
    fn is_volatile(&self) -> bool;

    /// Reads whole blocks: the bytes in `range` of the device.
    ///
    /// # Errors
    /// The device could not read the blocks.
    fn read(&self, range: Range<usize>) -> Result<Self::Mirror, Self::ReadError>;

    /// Begins to write whole blocks at byte `offset` of the device. The write may land before or
    /// after other writes in flight (assumption M4).
    ///
    /// # Errors
    /// The device refused the write, or had failed before.
    fn begin_write(
        &self,
        offset: usize,
        bytes: &[u8],
        durability: Durability,
    ) -> Result<(), RegionError>;

    /// Waits until the writes that this part has begun have completed.
    ///
    /// # Errors
    /// One of the writes failed. Even then, none is in flight any more.
    fn complete(&self) -> Result<(), RegionError>;

    /// Makes all completed writes durable (FLUSH).
    ///
    /// # Errors
    /// The device could not flush. Completed writes of every part may be lost.
    fn flush(&self) -> Result<(), RegionError>;

    /// Calls `f` with the record of failed FLUSHes, under a lock that all parts of the device
    /// share. So the calls of the parts run one after the other.
    fn with_flush_lock<T>(&self, f: impl FnOnce(&mut FlushFailure) -> T) -> T;
}

/// The record of failed FLUSHes of a device.
///
/// A part holds the record while a FLUSH is in flight, or a write with
/// [`Durability::OnCompletion`]. So no success of an operation that began before a failure is
/// accepted after that failure.
#[derive(Debug, Default)]
pub struct FlushFailure {
    /// The first failure of a FLUSH, or of a write with [`Durability::OnCompletion`]. Writes of
    /// every part may be lost by the failure, and the next FLUSH would not report the loss (trap
    /// T22).
    first: Option<RegionError>,
}

/// Makes the content of a device durable. Must be called before any of the content is used. The
/// last process may have died between a write and the FLUSH after it. The written data can then be
/// read, although a power cut would still destroy it.
///
/// # Errors
/// The device could not flush.
pub fn make_content_durable<B: Blocks>(blocks: &B) -> Result<(), RegionError> {
    if !blocks.is_volatile() || probe::is_bug_planted(Plant::T7UseUnfenced) {
        return Ok(());
    }
    blocks.flush()
}

/// One part of a log on the device `B`.
#[derive(Debug)]
pub struct BlockPart<B: Blocks> {
    blocks: B,
    /// The content of the part's blocks, with changes that no fence has written yet.
    mirror: B::Mirror,
    /// The device offset of the mirror's first byte.
    mirror_start: usize,
    /// The part's range in the mirror, in bytes.
    part_in_mirror: Range<usize>,
    dirty: DirtyBlocks,
    /// The ranges of the mirror that a fence writes, in bytes. The vector stays, so that a fence
    /// allocates no memory.
    runs: Vec<Range<usize>>,
    /// The failure of a fence. After it, the stores since the last successful fence may or may not
    /// be durable. So no later fence may succeed, because a success would report them as durable
    /// (promise P6).
    failed_fence: Option<RegionError>,
}

impl<B: Blocks> BlockPart<B> {
    /// Reads the part of a log that has the bytes `part` of a device. No other part may lie in the
    /// same blocks, because a fence of one part would write old bytes of the other part.
    ///
    /// # Errors
    /// The device could not read the blocks.
    pub fn read(blocks: B, part: Range<usize>) -> Result<Self, B::ReadError> {
        let start = part.start / BLOCK_BYTES * BLOCK_BYTES;
        let end = part.end.next_multiple_of(BLOCK_BYTES);
        Ok(Self {
            mirror: blocks.read(start..end)?,
            blocks,
            dirty: DirtyBlocks::none_of((end - start) / BLOCK_BYTES),
            mirror_start: start,
            part_in_mirror: part.start - start..part.end - start,
            runs: Vec::new(),
            failed_fence: None,
        })
    }

    /// The range in the mirror of `len` bytes at the part's byte `offset`.
    ///
    /// # Panics
    /// If the bytes are not aligned words inside the part.
    #[inline]
    fn in_mirror(&self, offset: usize, len: usize) -> Range<usize> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.part_in_mirror.len());
        assert!(
            fits && offset.is_multiple_of(8) && len.is_multiple_of(8),
            "{len} bytes at {offset} are not aligned words of a part of {} bytes",
            self.part_in_mirror.len()
        );
        let start = self.part_in_mirror.start + offset;
        start..start + len
    }

    /// Writes `runs` to the device, and waits until they are durable.
    fn write_runs_durably(&self) -> Result<(), RegionError> {
        if !self.blocks.is_volatile() {
            return self.write_and_wait(Durability::AfterFlush);
        }
        self.blocks.with_flush_lock(|failure| {
            if let Some(error) = &failure.first {
                return Err(error.clone());
            }
            // A single write costs less with `OnCompletion` than with a FLUSH after it. Several
            // writes cost less with one FLUSH after them.
            let result = if self.runs.len() == 1 {
                self.write_and_wait(Durability::OnCompletion)
            } else {
                self.write_and_wait(Durability::AfterFlush).and_then(|()| self.blocks.flush())
            };
            result.inspect_err(|error| failure.first = Some(error.clone()))
        })
    }

    /// Writes `runs` to the device, and waits until all of these writes have completed.
    fn write_and_wait(&self, durability: Durability) -> Result<(), RegionError> {
        let mirror = self.mirror.as_ref();
        let begun = self.runs.iter().try_for_each(|run| {
            let offset = self.mirror_start + run.start;
            self.blocks.begin_write(offset, &mirror[run.clone()], durability)
        });
        if probe::is_bug_planted(Plant::M4LogBlockInFlight) {
            return begun;
        }
        // Wait also after a failure: the writes that have begun still read the mirror's memory.
        let completed = self.blocks.complete();
        begun.and(completed)
    }
}

impl<B: Blocks> Region for BlockPart<B> {
    fn len(&self) -> usize {
        self.part_in_mirror.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.mirror.as_ref()[self.in_mirror(offset, into.len())]);
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let range = self.in_mirror(offset, bytes.len());
        self.dirty.mark(range.start / BLOCK_BYTES, (range.end - 1) / BLOCK_BYTES);
        self.mirror.as_mut()[range].copy_from_slice(bytes);
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }

    fn fence(&mut self) -> Result<(), RegionError> {
        if let Some(error) = &self.failed_fence {
            return Err(error.clone());
        }
        self.dirty.take_runs(&mut self.runs);
        if self.runs.is_empty() {
            return Ok(());
        }
        self.write_runs_durably().inspect_err(|error| self.failed_fence = Some(error.clone()))
    }
}

/// The blocks of a mirror that were changed since the last [`take_runs`](Self::take_runs).
#[derive(Debug)]
struct DirtyBlocks {
    /// A bit for each block of the mirror.
    bits: Vec<u64>,
    /// The lowest block that may be dirty. It is above `last` if no block is dirty.
    first: usize,
    /// The highest block that may be dirty.
    last: usize,
}

impl DirtyBlocks {
    /// The dirty blocks of an unchanged mirror of `blocks` blocks: none.
    fn none_of(blocks: usize) -> Self {
        Self { bits: vec![0; blocks.div_ceil(64)], first: usize::MAX, last: 0 }
    }

    /// Marks the blocks `first` to `last`, both included, as dirty.
    #[inline]
    fn mark(&mut self, first: usize, last: usize) {
        for block in first..=last {
            self.bits[block / 64] |= 1 << (block % 64);
        }
        self.first = self.first.min(first);
        self.last = self.last.max(last);
    }

    /// Replaces the content of `runs` by the ranges of bytes that have the dirty blocks, in order.
    /// No block is dirty afterwards.
    fn take_runs(&mut self, runs: &mut Vec<Range<usize>>) {
        runs.clear();
        if self.first > self.last {
            return;
        }
        for index in self.first / 64..=self.last / 64 {
            let mut word = core::mem::take(&mut self.bits[index]);
            while word != 0 {
                let block = index * 64 + word.trailing_zeros() as usize;
                // Clears the lowest bit.
                word &= word - 1;
                let start = block * BLOCK_BYTES;
                let end = start + BLOCK_BYTES;
                match runs.last_mut() {
                    Some(run) if start - run.end <= GAP_BLOCKS_MAX * BLOCK_BYTES => run.end = end,
                    _ => runs.push(start..end),
                }
            }
        }
        (self.first, self.last) = (usize::MAX, 0);
    }
}

#[cfg(test)]
mod tests;
