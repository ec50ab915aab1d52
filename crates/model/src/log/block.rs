//! A part of a log on a block device: a mirror in memory, written to the device block by block.
//!
//! A store goes to the mirror and marks the 4 KiB blocks that it touches as dirty. A fence writes
//! all dirty blocks to the device at once and waits until they are durable. So no block of a log is
//! written again while it is in flight (M4), and the device only sees whole blocks (M1). The common
//! fence covers an append behind the last one, or a persist word among the last few: one write of
//! one block.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_order::block_device::BLOCK_BYTES;
use riopipe_order::probe::{self, Plant};
use riopipe_order::region::{Region, RegionError};

/// Largest gap of clean blocks between two dirty ones that is written along with them, in blocks.
/// 16 KiB more cost a drive about 5 µs; a second command costs more, and, if it must wait for the
/// first, a second latency. So the persist words and the appends of one batch, which are close
/// together, are one write.
const GAP_BLOCKS_MAX: usize = 4;

/// The device under a log, shared by the log's parts. It has raw effects only and decides nothing.
pub trait Blocks {
    /// Bytes in memory, with the alignment that the device needs.
    type Mirror: AsRef<[u8]> + AsMut<[u8]>;
    /// The error of a failed read.
    type ReadError;

    /// Whether the device has a volatile write cache: a completed write is then not yet durable.
    fn is_volatile(&self) -> bool;

    /// Reads the bytes in `range`, which is whole blocks.
    ///
    /// # Errors
    /// The device could not read the blocks.
    fn read(&self, range: Range<usize>) -> Result<Self::Mirror, Self::ReadError>;

    /// Begins to write whole blocks at byte `at`. With `durable`, the write itself is durable when
    /// it completes. It may land before or after other writes in flight (M4).
    ///
    /// # Errors
    /// The device refused the write, or had failed before.
    fn begin_write(&self, at: usize, bytes: &[u8], durable: bool) -> Result<(), RegionError>;

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

    /// Runs `f` while no other part runs its own.
    fn exclusively<T>(&self, f: impl FnOnce(&mut FlushFailure) -> T) -> T;
}

/// The first failure of a FLUSH, or of a write that was to be durable by itself. Earlier writes of
/// every part may be lost, and the next FLUSH would not report that (T22).
///
/// Each of these operations holds it, so that none that began before the failure is accepted after
/// it.
#[derive(Debug, Default)]
pub struct FlushFailure(Option<RegionError>);

/// Makes the content of a device durable, before anything on it is used. The last process may
/// have died between a write and its FLUSH: its data can be read, and a power cut would still take
/// it.
///
/// # Errors
/// The device could not flush.
pub fn open<B: Blocks>(blocks: &B) -> Result<(), RegionError> {
    if !blocks.is_volatile() || probe::planted(Plant::T7UseUnfenced) {
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
    /// Offset of the mirror on the device, in bytes.
    base: usize,
    /// The part's range in the mirror, in bytes.
    part: Range<usize>,
    dirty: Dirty,
    /// The blocks that the next fence writes; kept for its allocation.
    runs: Vec<Range<usize>>,
    /// The first failure. Writes since the fence before it may or may not be durable, so no fence
    /// may succeed any more (P6).
    failed: Option<RegionError>,
}

impl<B: Blocks> BlockPart<B> {
    /// A part with the bytes in `part` of a device, read from there. No other part may lie in the
    /// same blocks: each would write the other's unfinished changes.
    ///
    /// # Errors
    /// The device could not read the blocks.
    pub fn read(blocks: B, part: Range<usize>) -> Result<Self, B::ReadError> {
        let start = part.start / BLOCK_BYTES * BLOCK_BYTES;
        let end = part.end.next_multiple_of(BLOCK_BYTES);
        Ok(Self {
            mirror: blocks.read(start..end)?,
            blocks,
            dirty: Dirty::none_of((end - start) / BLOCK_BYTES),
            base: start,
            part: part.start - start..part.end - start,
            runs: Vec::new(),
            failed: None,
        })
    }

    /// The range in the mirror of `len` bytes at the part's byte `offset`.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> Range<usize> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.part.len());
        assert!(
            fits && offset.is_multiple_of(8) && len.is_multiple_of(8),
            "{len} bytes at {offset} are not aligned words of a part of {} bytes",
            self.part.len()
        );
        self.part.start + offset..self.part.start + offset + len
    }

    /// Writes the dirty blocks, and waits until they are durable.
    fn write_runs(&self) -> Result<(), RegionError> {
        if !self.blocks.is_volatile() {
            return self.write_and_wait(false);
        }
        self.blocks.exclusively(|failure| {
            if let Some(error) = &failure.0 {
                return Err(error.clone());
            }
            // A single write can be durable by itself, which saves a FLUSH.
            let alone = self.runs.len() == 1;
            let written = self.write_and_wait(alone);
            let durable = if alone { written } else { written.and_then(|()| self.blocks.flush()) };
            durable.inspect_err(|error| failure.0 = Some(error.clone()))
        })
    }

    fn write_and_wait(&self, durable: bool) -> Result<(), RegionError> {
        let mirror = self.mirror.as_ref();
        let begun = self.runs.iter().try_for_each(|run| {
            self.blocks.begin_write(self.base + run.start, &mirror[run.clone()], durable)
        });
        if probe::planted(Plant::M4LogBlockInFlight) {
            return begun;
        }
        begun.and(self.blocks.complete())
    }
}

impl<B: Blocks> Region for BlockPart<B> {
    fn len(&self) -> usize {
        self.part.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.mirror.as_ref()[self.at(offset, into.len())]);
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let at = self.at(offset, bytes.len());
        self.dirty.note(at.start / BLOCK_BYTES, (at.end - 1) / BLOCK_BYTES);
        self.mirror.as_mut()[at].copy_from_slice(bytes);
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }

    fn fence(&mut self) -> Result<(), RegionError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.dirty.take_runs(&mut self.runs);
        if self.runs.is_empty() {
            return Ok(());
        }
        self.write_runs().inspect_err(|error| self.failed = Some(error.clone()))
    }
}

/// The blocks that were written to since the last [`take_runs`](Self::take_runs): a bit for each,
/// and the bounds of the bits that may be set.
#[derive(Debug)]
struct Dirty {
    bits: Vec<u64>,
    /// `first > last`: no block is dirty.
    first: usize,
    last: usize,
}

impl Dirty {
    fn none_of(blocks: usize) -> Self {
        Self { bits: vec![0; blocks.div_ceil(64)], first: usize::MAX, last: 0 }
    }

    #[inline]
    fn note(&mut self, first: usize, last: usize) {
        for block in first..=last {
            self.bits[block / 64] |= 1 << (block % 64);
        }
        self.first = self.first.min(first);
        self.last = self.last.max(last);
    }

    /// Moves the dirty blocks, as ranges of bytes in order, into `runs`; no block is dirty
    /// afterwards.
    fn take_runs(&mut self, runs: &mut Vec<Range<usize>>) {
        runs.clear();
        if self.first > self.last {
            return;
        }
        for index in self.first / 64..=self.last / 64 {
            let mut word = core::mem::take(&mut self.bits[index]);
            while word != 0 {
                let block = index * 64 + word.trailing_zeros() as usize;
                word &= word - 1;
                let end = (block + 1) * BLOCK_BYTES;
                match runs.last_mut() {
                    Some(run) if block * BLOCK_BYTES - run.end <= GAP_BLOCKS_MAX * BLOCK_BYTES => {
                        run.end = end;
                    }
                    _ => runs.push(end - BLOCK_BYTES..end),
                }
            }
        }
        (self.first, self.last) = (usize::MAX, 0);
    }
}

#[cfg(test)]
mod tests;
