//! The part of a log that rests on a device: a mirror in memory, written out block by block.
//!
//! Stores go to the mirror and note which 4 KiB blocks they touched; a fence hands all of these to
//! the device at once and waits until they are durable. So no block of a log is ever written again
//! while it is in flight (M4), and the device sees whole blocks only (M1). The common fence, an
//! append behind the last one or a persist word among the last few, is one write of one block.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use riopipe_order::block_device::BLOCK_SIZE;
use riopipe_order::region::{Region, RegionError};

use crate::buf::AlignedBuf;

/// Clean blocks between two dirty ones that are written along with them: 16 KiB more cost a drive
/// 5 µs or so, another command (and, one after the other, another latency) more than that. So
/// the persist words and the appends of one batch, which lie close together, are one write.
const GAP_BLOCKS_MAX: usize = 4;

/// What blocks rest on.
pub(super) trait Blocks {
    /// Fills `into` from byte `offset` on; both are whole blocks.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes `runs` of `bytes`, whose first byte is the device's byte `base`; all of it is
    /// durable when it returns. Nothing is under way any more when it returns, whatever it says.
    fn write(&self, bytes: &[u8], base: u64, runs: &[Range<usize>]) -> Result<(), RegionError>;
}

/// One part of a log on `B`.
pub(super) struct BlockPart<B> {
    blocks: Arc<B>,
    /// The blocks that the part lies in, as last written.
    mirror: AlignedBuf,
    /// Where the mirror begins on the device, in bytes.
    base: u64,
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
    /// The bytes in `part` of `blocks`, read from there.
    pub(super) fn read(blocks: Arc<B>, part: Range<usize>) -> io::Result<Self> {
        let start = part.start / BLOCK_SIZE * BLOCK_SIZE;
        let end = part.end.next_multiple_of(BLOCK_SIZE);
        let mut mirror = AlignedBuf::zeroed(end - start);
        blocks.read(start as u64, &mut mirror)?;
        Ok(Self {
            blocks,
            dirty: Dirty::none_of((end - start) / BLOCK_SIZE),
            mirror,
            base: start as u64,
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
}

impl<B: Blocks> Region for BlockPart<B> {
    fn len(&self) -> usize {
        self.part.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.mirror[self.at(offset, into.len())]);
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let at = self.at(offset, bytes.len());
        self.dirty.note(at.start / BLOCK_SIZE, (at.end - 1) / BLOCK_SIZE);
        self.mirror[at].copy_from_slice(bytes);
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
        self.blocks
            .write(&self.mirror, self.base, &self.runs)
            .inspect_err(|error| self.failed = Some(error.clone()))
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
            let mut word = std::mem::take(&mut self.bits[index]);
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
