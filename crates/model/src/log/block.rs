//! The part of a log that rests on a device: a mirror in memory, written out block by block.
//!
//! Stores go to the mirror and note which 4 KiB blocks they touched; a fence hands all of these to
//! the device at once and waits until they are durable. So no block of a log is ever written again
//! while it is in flight (M4), and the device sees whole blocks only (M1). The common fence, an
//! append behind the last one or a persist word among the last few, is one write of one block.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_order::block_device::BLOCK_SIZE;
use riopipe_order::probe::{self, Plant};
use riopipe_order::region::{Region, RegionError};

/// Clean blocks between two dirty ones that are written along with them: 16 KiB more cost a drive
/// 5 µs or so, another command (and, one after the other, another latency) more than that. So
/// the persist words and the appends of one batch, which lie close together, are one write.
const GAP_BLOCKS_MAX: usize = 4;

/// The device under a log, shared by the log's parts: raw effects, in which nothing is decided.
pub trait Blocks {
    /// Bytes in memory, as the device likes them aligned.
    type Mirror: AsRef<[u8]> + AsMut<[u8]>;
    /// Why blocks can't be read.
    type ReadError;

    /// Completed is not durable here: there is a volatile cache.
    fn is_volatile(&self) -> bool;

    /// The bytes in `range`, which is whole blocks.
    ///
    /// # Errors
    /// The device could not read them.
    fn read(&self, range: Range<usize>) -> Result<Self::Mirror, Self::ReadError>;

    /// Begins to write whole blocks at byte `at`. With `durable`, the write is durable by itself
    /// when it has completed. What else is in flight may land before or after it (M4).
    ///
    /// # Errors
    /// The device did not take it, or has failed already.
    fn begin_write(&self, at: usize, bytes: &[u8], durable: bool) -> Result<(), RegionError>;

    /// Waits until the writes that this part has begun have completed.
    ///
    /// # Errors
    /// One of them failed. Nothing is in flight any more, whatever is said.
    fn complete(&self) -> Result<(), RegionError>;

    /// Makes durable all that has completed (FLUSH).
    ///
    /// # Errors
    /// The device could not; what any part has written may be gone.
    fn flush(&self) -> Result<(), RegionError>;

    /// Runs `f` while no other part runs one.
    fn exclusively<T>(&self, f: impl FnOnce(&mut FlushFailure) -> T) -> T;
}

/// The first failure of a FLUSH, or of a write that was to be durable by itself: what any part had
/// written before it may be gone, and the next FLUSH wouldn't tell (T22).
///
/// It is held during each of them, so that none that began before is believed after.
#[derive(Debug, Default)]
pub struct FlushFailure(Option<RegionError>);

/// Makes durable what a device holds, before anything in it is believed: the last process may have
/// died between a write and its FLUSH, and what it wrote is still read, and lost with the power.
///
/// # Errors
/// The device could not.
pub fn open<B: Blocks>(blocks: &B) -> Result<(), RegionError> {
    if !blocks.is_volatile() || probe::planted(Plant::T7TrustUnfenced) {
        return Ok(());
    }
    blocks.flush()
}

/// One part of a log on `B`.
#[derive(Debug)]
pub struct BlockPart<B: Blocks> {
    blocks: B,
    /// The blocks that the part lies in, as last written.
    mirror: B::Mirror,
    /// Where the mirror begins on the device, in bytes.
    base: usize,
    /// The part, in bytes of the mirror.
    part: Range<usize>,
    dirty: Dirty,
    /// What the next fence writes; kept to be used again.
    runs: Vec<Range<usize>>,
    /// The first failure: what was written since the fence before it may or may not be there, so
    /// nothing can be vouched for any more (P6).
    failed: Option<RegionError>,
}

impl<B: Blocks> BlockPart<B> {
    /// The bytes in `part` of a device, read from there. Its blocks must be no other part's: one's
    /// block would go out with the other's half-made change.
    ///
    /// # Errors
    /// The device could not read them.
    pub fn read(blocks: B, part: Range<usize>) -> Result<Self, B::ReadError> {
        let start = part.start / BLOCK_SIZE * BLOCK_SIZE;
        let end = part.end.next_multiple_of(BLOCK_SIZE);
        Ok(Self {
            mirror: blocks.read(start..end)?,
            blocks,
            dirty: Dirty::none_of((end - start) / BLOCK_SIZE),
            base: start,
            part: part.start - start..part.end - start,
            runs: Vec::new(),
            failed: None,
        })
    }

    /// The place in the mirror of `len` bytes at the part's byte `offset`.
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

    /// Writes the runs, and waits until they are durable.
    fn write_runs(&self) -> Result<(), RegionError> {
        if !self.blocks.is_volatile() {
            return self.write_and_wait(false);
        }
        self.blocks.exclusively(|failure| {
            if let Some(error) = &failure.0 {
                return Err(error.clone());
            }
            // One write that is durable by itself spares a command.
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
        self.dirty.note(at.start / BLOCK_SIZE, (at.end - 1) / BLOCK_SIZE);
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

/// Which blocks have been written to since they were taken last: a bit for each, and the bounds
/// between which bits can be set.
#[derive(Debug)]
struct Dirty {
    bits: Vec<u64>,
    /// `first > last`: none.
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

    /// The dirty blocks as ranges of bytes, in order, into `runs`; none is dirty afterwards.
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
                let end = (block + 1) * BLOCK_SIZE;
                match runs.last_mut() {
                    Some(run) if block * BLOCK_SIZE - run.end <= GAP_BLOCKS_MAX * BLOCK_SIZE => {
                        run.end = end;
                    }
                    _ => runs.push(end - BLOCK_SIZE..end),
                }
            }
        }
        (self.first, self.last) = (usize::MAX, 0);
    }
}

#[cfg(test)]
mod tests;
