//! Memory for blocks, one frame each, handed out and taken back by number.

use std::io;

use riopipe_order::block_device::BLOCK_SIZE;

use crate::copy::copy_block;
use crate::mapping::Mapping;

/// A frame's number. [`ZEROES`] stands for a block of zeroes that needs no frame.
pub(crate) type Frame = u32;

/// Not a frame: the block reads as zeroes.
pub(crate) const ZEROES: Frame = u32::MAX;

/// A pool of frames in one reserved mapping; memory is taken as frames are first used.
///
/// Who has allocated a frame owns its bytes until it gives it back; that makes [`Bytes`] usable
/// without the lock that guards the pool.
pub(crate) struct Frames {
    bytes: std::sync::Arc<Bytes>,
    free: Vec<Frame>,
    /// Frames from here on have never been used.
    fresh: Frame,
    count: Frame,
}

impl Frames {
    /// `count` frames, the first `prefault` of them with memory already there.
    pub(crate) fn new(count: u32, prefault: u32) -> io::Result<Frames> {
        assert!(count < ZEROES && prefault <= count);
        let mapping = Mapping::anonymous(count as usize * BLOCK_SIZE)?;
        mapping.prefault(prefault as usize * BLOCK_SIZE)?;
        Ok(Frames { bytes: std::sync::Arc::new(Bytes(mapping)), free: Vec::new(), fresh: 0, count })
    }

    /// The frames' memory.
    pub(crate) fn bytes(&self) -> &std::sync::Arc<Bytes> {
        &self.bytes
    }

    /// A frame with arbitrary content, if one is left.
    #[inline]
    pub(crate) fn allocate(&mut self) -> Option<Frame> {
        self.free.pop().or_else(|| {
            let frame = self.fresh;
            (frame < self.count).then(|| {
                self.fresh += 1;
                frame
            })
        })
    }

    /// Whether the next [`Frames::allocate`] would find none.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.free.is_empty() && self.fresh == self.count
    }

    /// Takes a frame back ([`ZEROES`] is fine, too).
    #[inline]
    pub(crate) fn release(&mut self, frame: Frame) {
        if frame != ZEROES {
            debug_assert!(frame < self.fresh);
            self.free.push(frame);
        }
    }
}

/// The frames' memory, shared by those who own some of the frames.
pub(crate) struct Bytes(Mapping);

impl Bytes {
    /// Fills a frame that the caller owns.
    #[inline]
    pub(crate) fn fill(&self, frame: Frame, block: &[u8]) {
        assert_eq!(block.len(), BLOCK_SIZE);
        // SAFETY: `address` is inside the mapping and page-aligned; the caller owns the frame, so
        // nobody else touches it.
        unsafe { copy_block(self.address(frame), block.as_ptr()) }
    }

    /// Copies a block that the caller owns (or holds the drive's lock for) out.
    #[inline]
    pub(crate) fn copy_out(&self, frame: Frame, to: &mut [u8]) {
        assert_eq!(to.len(), BLOCK_SIZE);
        if frame == ZEROES {
            return to.fill(0);
        }
        // SAFETY: as in `fill`; nobody writes to a frame that somebody else owns.
        unsafe {
            std::ptr::copy_nonoverlapping(self.address(frame), to.as_mut_ptr(), BLOCK_SIZE);
        }
    }

    fn address(&self, frame: Frame) -> *mut u8 {
        let offset = frame as usize * BLOCK_SIZE;
        assert!(offset + BLOCK_SIZE <= self.0.len());
        self.0.start().wrapping_add(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_handed_out_once_until_given_back() {
        let mut frames = Frames::new(3, 1).unwrap();
        let all: Vec<_> = std::iter::from_fn(|| frames.allocate()).collect();
        assert_eq!(all, [0, 1, 2]);
        frames.release(1);
        frames.release(ZEROES);
        assert_eq!(frames.allocate(), Some(1));
        assert_eq!(frames.allocate(), None);

        let mut block = vec![9; BLOCK_SIZE];
        frames.bytes().fill(1, &[7; BLOCK_SIZE]);
        frames.bytes().copy_out(1, &mut block);
        assert!(block.iter().all(|b| *b == 7));
        frames.bytes().copy_out(ZEROES, &mut block);
        assert!(block.iter().all(|b| *b == 0));
    }
}
