//! The store of a modelled drive's blocks. In memory there is one frame for each block, allocated
//! and freed by number. With a file there are frames for incoming data and for old contents.

use std::io;
use std::sync::Arc;

use riopipe_model::ssd::Pages;
use riopipe_order::block_device::BLOCK_BYTES;

use crate::buf::AlignedBuf;

use crate::copy::copy_block;
use crate::mapping::Mapping;

/// A frame's number. [`ZEROES`] stands for a block of zeroes that needs no frame.
pub(crate) type Frame = u32;

/// Not a frame: the block reads as zeroes.
pub(crate) const ZEROES: Frame = u32::MAX;

/// A pool of frames in one reserved mapping; memory is allocated as frames are first used.
///
/// The caller that has allocated a frame owns its bytes until it frees it. So [`Bytes`] needs no
/// lock, unlike the pool.
pub(crate) struct Frames {
    bytes: Arc<Bytes>,
    free: Vec<Frame>,
    /// Frames from here on were never used.
    fresh: Frame,
    count: Frame,
}

impl Frames {
    /// `count` frames, the first `prefault` of them with their memory allocated.
    pub(crate) fn new(count: u32, prefault: u32) -> io::Result<Frames> {
        assert!(count < ZEROES && prefault <= count);
        let mapping = Mapping::anonymous(count as usize * BLOCK_BYTES)?;
        mapping.prefault(prefault as usize * BLOCK_BYTES)?;
        Ok(Frames { bytes: Arc::new(Bytes(mapping)), free: Vec::new(), fresh: 0, count })
    }

    /// The frames' memory.
    pub(crate) fn bytes(&self) -> &Arc<Bytes> {
        &self.bytes
    }

    /// Allocates a frame with arbitrary content, if one is left.
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

    /// Frees a frame; [`ZEROES`] is allowed.
    #[inline]
    pub(crate) fn release(&mut self, frame: Frame) {
        if frame != ZEROES {
            debug_assert!(frame < self.fresh);
            self.free.push(frame);
        }
    }
}

/// The frames' memory, shared by the owners of frames.
pub(crate) struct Bytes(Mapping);

impl Bytes {
    /// Fills a frame that the caller owns.
    #[inline]
    pub(crate) fn fill(&self, frame: Frame, block: &[u8]) {
        assert_eq!(block.len(), BLOCK_BYTES);
        // SAFETY: `address` is inside the mapping and page-aligned; the caller owns the frame, so
        // nothing else accesses it.
        unsafe { copy_block(self.address(frame), block.as_ptr()) }
    }

    /// Copies a block out that the caller owns (or holds the drive's lock for).
    #[inline]
    pub(crate) fn copy_out(&self, frame: Frame, to: &mut [u8]) {
        assert_eq!(to.len(), BLOCK_BYTES);
        if frame == ZEROES {
            return to.fill(0);
        }
        // SAFETY: as in `fill`; only its owner writes a frame.
        unsafe {
            std::ptr::copy_nonoverlapping(self.address(frame), to.as_mut_ptr(), BLOCK_BYTES);
        }
    }

    fn address(&self, frame: Frame) -> *mut u8 {
        let offset = frame as usize * BLOCK_BYTES;
        assert!(offset + BLOCK_BYTES <= self.0.len());
        self.0.start().wrapping_add(offset)
    }
}

/// Number of frames beyond the drive's own and the losable ones: for writes in flight.
const IN_FLIGHT_FRAMES: u64 = 1 << 17;

/// The blocks of a modelled drive.
///
/// In memory it works as a flash translation layer: a write brings a new frame, and its block then
/// refers to that. With a file, the newest content is in the file, in its place, and old contents
/// are in frames.
pub struct DrivePages {
    frames: Frames,
    home: Home,
}

enum Home {
    Memory(Vec<Frame>),
    File(Mapping),
}

impl DrivePages {
    /// `blocks` blocks of zeroes in memory, of which at most `losable` older contents are kept.
    pub(crate) fn in_memory(blocks: u64, losable: u64, prefault: bool) -> io::Result<Self> {
        let own = u32::try_from(blocks + losable).map_err(|_| too_large())?;
        let count = u32::try_from(blocks + losable + IN_FLIGHT_FRAMES)
            .ok()
            .filter(|count| *count < ZEROES)
            .ok_or_else(too_large)?;
        let frames = Frames::new(count, if prefault { own } else { 0 })?;
        Ok(Self { frames, home: Home::Memory(vec![ZEROES; blocks as usize]) })
    }

    /// The blocks of a mapped file, of which at most `losable` older contents are kept.
    pub(crate) fn in_file(file: Mapping, losable: u64) -> io::Result<Self> {
        let blocks = (file.len() / BLOCK_BYTES) as u64;
        if blocks >= u64::from(ZEROES) {
            return Err(too_large());
        }
        let count = u32::try_from(losable + IN_FLIGHT_FRAMES).map_err(|_| too_large())?;
        Ok(Self { frames: Frames::new(count, 0)?, home: Home::File(file) })
    }

    /// The frames' memory, to fill those that [`DrivePages::allocate`] has handed out.
    pub(crate) fn bytes(&self) -> &Arc<Bytes> {
        self.frames.bytes()
    }

    /// A frame for an incoming block. `None`: too many are in flight.
    pub(crate) fn allocate(&mut self) -> Option<Frame> {
        self.frames.allocate()
    }
}

impl Pages for DrivePages {
    type Page = Frame;
    type Buf = AlignedBuf;
    const ZEROES: Frame = ZEROES;

    fn blocks(&self) -> u64 {
        match &self.home {
            Home::Memory(map) => map.len() as u64,
            Home::File(file) => (file.len() / BLOCK_BYTES) as u64,
        }
    }

    #[inline]
    fn exchange(&mut self, lba: u64, page: Frame, keep: bool) -> Option<Frame> {
        let file = match &mut self.home {
            Home::Memory(map) => return Some(std::mem::replace(&mut map[lba as usize], page)),
            Home::File(file) => place(file, lba),
        };
        let mut old = [0u8; BLOCK_BYTES];
        // SAFETY: `file` is a whole block inside the mapping, and the drive's lock is held.
        unsafe { std::ptr::copy_nonoverlapping(file, old.as_mut_ptr(), BLOCK_BYTES) };
        let kept = match page {
            page if !keep => page,
            ZEROES if old.iter().all(|byte| *byte == 0) => return Some(ZEROES),
            // Zeroes come without a frame.
            ZEROES => self.frames.allocate()?,
            page => page,
        };
        let mut new = [0u8; BLOCK_BYTES];
        self.frames.bytes().copy_out(page, &mut new);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(new.as_ptr(), file, BLOCK_BYTES) };
        if keep {
            self.frames.bytes().fill(kept, &old);
        }
        Some(kept)
    }

    #[inline]
    fn release(&mut self, page: Frame) {
        self.frames.release(page);
    }

    fn read(&self, lba: u64, blocks: u64) -> AlignedBuf {
        let mut buf = AlignedBuf::recycled(blocks as usize * BLOCK_BYTES);
        for (lba, block) in (lba..).zip(buf.chunks_exact_mut(BLOCK_BYTES)) {
            match &self.home {
                Home::Memory(map) => self.frames.bytes().copy_out(map[lba as usize], block),
                // SAFETY: `place` is a whole block inside the mapping, and the drive's lock is
                // held, so that nothing writes it.
                Home::File(file) => unsafe {
                    std::ptr::copy_nonoverlapping(
                        place(file, lba),
                        block.as_mut_ptr(),
                        block.len(),
                    );
                },
            }
        }
        buf
    }
}

fn place(file: &Mapping, lba: u64) -> *mut u8 {
    let offset = lba as usize * BLOCK_BYTES;
    assert!(offset + BLOCK_BYTES <= file.len());
    file.start().wrapping_add(offset)
}

fn too_large() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_handed_out_once_until_freed() {
        let mut frames = Frames::new(3, 1).unwrap();
        let all: Vec<_> = std::iter::from_fn(|| frames.allocate()).collect();
        assert_eq!(all, [0, 1, 2]);
        frames.release(1);
        frames.release(ZEROES);
        assert_eq!(frames.allocate(), Some(1));
        assert_eq!(frames.allocate(), None);

        let mut block = vec![9; BLOCK_BYTES];
        frames.bytes().fill(1, &[7; BLOCK_BYTES]);
        frames.bytes().copy_out(1, &mut block);
        assert!(block.iter().all(|b| *b == 7));
        frames.bytes().copy_out(ZEROES, &mut block);
        assert!(block.iter().all(|b| *b == 0));
    }
}
