//! The store of a modelled drive's blocks.
//!
//! A *frame* is 4096 bytes of memory with a number. The data of a write arrives in frames.
//!
//! | | newest content of a block | older contents that a power cut may restore |
//! |---|---|---|
//! | drive in memory | in a frame, which a map names | in frames |
//! | drive in a file | in the file, in the block's place | in frames |

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use riopipe_model::ssd::{ExchangeError, Pages};
use riopipe_order::block_device::{BLOCK_BYTES, Cause};

use crate::buf::AlignedBuf;
use crate::copy::copy_block;
use crate::error::cause_of;
use crate::mapping::Mapping;
use crate::medium::allocate;
use crate::watched::Watched;

/// A frame's number. [`ZEROES`] stands for a block of zeroes that needs no frame.
pub(crate) type Frame = u32;

/// Not a frame: the block reads as zeroes.
pub(crate) const ZEROES: Frame = u32::MAX;

/// A pool of frames in one reserved mapping. The memory of a frame is allocated when the frame is
/// first used.
///
/// A frame belongs to the caller that has allocated it, until the frame is released. So the bytes
/// of frames ([`FrameMemory`]) need no lock. The pool needs one.
pub(crate) struct FramePool {
    memory: Arc<FrameMemory>,
    /// The released frames.
    free: Vec<Frame>,
    /// The first frame that was never allocated. All frames behind it were not, either.
    next_unused: Frame,
    /// Number of frames.
    count: u32,
}

impl FramePool {
    /// A pool of `count` frames, the first `prefault` of which get their memory now.
    pub(crate) fn new(count: u32, prefault: u32) -> io::Result<FramePool> {
        assert!(count < ZEROES && prefault <= count);
        let mapping = Mapping::anonymous(count as usize * BLOCK_BYTES)?;
        mapping.prefault(prefault as usize * BLOCK_BYTES)?;
        let memory = Arc::new(FrameMemory(mapping));
        Ok(FramePool { memory, free: Vec::new(), next_unused: 0, count })
    }

    /// The frames' memory.
    pub(crate) fn memory(&self) -> &Arc<FrameMemory> {
        &self.memory
    }

    /// Allocates a frame with arbitrary content; `None` if no frame is left.
    #[inline]
    pub(crate) fn allocate(&mut self) -> Option<Frame> {
        if let Some(frame) = self.free.pop() {
            return Some(frame);
        }
        if self.next_unused == self.count {
            return None;
        }
        let frame = self.next_unused;
        self.next_unused += 1;
        Some(frame)
    }

    /// Frees a frame; [`ZEROES`] is allowed.
    #[inline]
    pub(crate) fn release(&mut self, frame: Frame) {
        if frame != ZEROES {
            debug_assert!(frame < self.next_unused);
            self.free.push(frame);
        }
    }
}

/// The bytes of all frames, shared by the owners of frames.
pub(crate) struct FrameMemory(Mapping);

impl FrameMemory {
    /// Fills a frame that the caller owns.
    #[inline]
    pub(crate) fn fill(&self, frame: Frame, block: &[u8]) {
        assert_eq!(block.len(), BLOCK_BYTES);
        // SAFETY: `address` is inside the mapping and page-aligned; the caller owns the frame, so
        // nothing else accesses it.
        unsafe { copy_block(self.address(frame), block.as_ptr()) }
    }

    /// Copies the content of a frame to `to`. The caller owns the frame, or has the drive's lock.
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

    /// The address of a frame's first byte.
    fn address(&self, frame: Frame) -> *mut u8 {
        let offset = frame as usize * BLOCK_BYTES;
        assert!(offset + BLOCK_BYTES <= self.0.len());
        self.0.start().wrapping_add(offset)
    }
}

/// Number of frames for the data of writes in flight. The drive's blocks and their older contents
/// have frames beside these.
const IN_FLIGHT_FRAMES: u64 = 1 << 17;

/// The blocks of a modelled drive, in memory or in a file.
pub struct DrivePages {
    frames: FramePool,
    newest: NewestContents,
}

/// The newest completed content of each block.
enum NewestContents {
    /// The frame of each block, as the map of a flash translation layer. A write brings a frame,
    /// and the block then refers to that frame.
    InFrames(Vec<Frame>),
    /// The file with all blocks in their places.
    InFile(BlockFile),
}

/// A file with a drive's blocks, through the page cache.
///
/// A block is read and written with one system call. The kernel copies the block from one page, so
/// a process that is killed meanwhile leaves the old content or the new one (assumption M1). With
/// a mapping the process itself would copy, and a kill would stop it in the middle of a block.
/// And a file without space is an error here, where a mapping would end the process.
pub(crate) struct BlockFile {
    file: Arc<Watched>,
    blocks: u64,
}

/// The content of one block, in one page.
#[repr(align(4096))]
struct BlockBytes([u8; BLOCK_BYTES]);

impl BlockFile {
    pub(crate) fn new(file: Arc<Watched>) -> Self {
        let blocks = file.len / BLOCK_BYTES as u64;
        Self { file, blocks }
    }

    /// Reads whole blocks from `lba` on.
    fn read(&self, lba: u64, into: &mut [u8]) -> Result<(), Cause> {
        self.file
            .file
            .read_exact_at(into, lba * BLOCK_BYTES as u64)
            .map_err(|error| self.cause(&error))
    }

    fn write(&self, lba: u64, content: &BlockBytes) -> Result<(), Cause> {
        let offset = lba * BLOCK_BYTES as u64;
        self.file.file.write_all_at(&content.0, offset).map_err(|error| self.cause(&error))
    }

    /// Makes a block read as zeroes. On a full disk a hole does that, which needs no space. Without
    /// it, a stream whose write found no space could never be undone (P8, T10).
    fn write_zeroes(&self, lba: u64) -> Result<(), Cause> {
        self.write(lba, &BlockBytes([0; BLOCK_BYTES])).or_else(|cause| {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let offset = lba * BLOCK_BYTES as u64;
            let punched = allocate(&self.file.file, mode, offset, BLOCK_BYTES as u64);
            if matches!(cause, Cause::NoSpace(_)) && punched.is_ok() { Ok(()) } else { Err(cause) }
        })
    }

    /// The cause that an error of the system stands for.
    #[cold]
    fn cause(&self, error: &io::Error) -> Cause {
        match (error.raw_os_error(), self.file.check()) {
            (Some(errno), _) => cause_of(errno),
            // The end of the file comes too early.
            (None, Err(gone)) => Cause::Vanished(gone),
            (None, Ok(())) => Cause::Failed(error.to_string()),
        }
    }
}

impl DrivePages {
    /// `blocks` blocks of zeroes in memory. At most `losable` older contents are kept. `prefault`
    /// allocates the memory for the contents of all blocks now.
    pub(crate) fn in_memory(blocks: u64, losable: u64, prefault: bool) -> io::Result<Self> {
        let content_frames = u32::try_from(blocks + losable).map_err(|_| too_large())?;
        let count = u32::try_from(blocks + losable + IN_FLIGHT_FRAMES).map_err(|_| too_large())?;
        // The highest number is no frame.
        if count == ZEROES {
            return Err(too_large());
        }
        let frames = FramePool::new(count, if prefault { content_frames } else { 0 })?;
        let newest = NewestContents::InFrames(vec![ZEROES; blocks as usize]);
        Ok(Self { frames, newest })
    }

    /// The blocks of a file. At most `losable` older contents are kept.
    pub(crate) fn in_file(file: BlockFile, losable: u64) -> io::Result<Self> {
        let blocks = file.blocks;
        if blocks >= u64::from(ZEROES) {
            return Err(too_large());
        }
        let count = u32::try_from(losable + IN_FLIGHT_FRAMES).map_err(|_| too_large())?;
        let frames = FramePool::new(count, 0)?;
        Ok(Self { frames, newest: NewestContents::InFile(file) })
    }

    /// The frames' memory, to fill those that [`DrivePages::allocate`] has handed out.
    pub(crate) fn frame_memory(&self) -> &Arc<FrameMemory> {
        self.frames.memory()
    }

    /// Allocates a frame for an incoming block. `None`: too many are in flight.
    pub(crate) fn allocate(&mut self) -> Option<Frame> {
        self.frames.allocate()
    }
}

impl Pages for DrivePages {
    type Page = Frame;
    type Buf = AlignedBuf;
    const ZEROES: Frame = ZEROES;

    fn blocks(&self) -> u64 {
        match &self.newest {
            NewestContents::InFrames(map) => map.len() as u64,
            NewestContents::InFile(file) => file.blocks,
        }
    }

    #[inline]
    fn exchange(&mut self, lba: u64, page: Frame, keep_old: bool) -> Result<Frame, ExchangeError> {
        let file = match &mut self.newest {
            NewestContents::InFrames(map) => {
                return Ok(std::mem::replace(&mut map[lba as usize], page));
            }
            NewestContents::InFile(file) => file,
        };
        let frames = Arc::clone(self.frames.memory());
        let write_new = || match page {
            ZEROES => file.write_zeroes(lba),
            page => {
                let mut content = BlockBytes([0; BLOCK_BYTES]);
                frames.copy_out(page, &mut content.0);
                file.write(lba, &content)
            }
        };
        if !keep_old {
            write_new().map_err(ExchangeError::Medium)?;
            return Ok(page);
        }
        let mut old_content = [0; BLOCK_BYTES];
        file.read(lba, &mut old_content).map_err(ExchangeError::Medium)?;
        // The frame of the new content is free once the content is in the file. It then takes the
        // old content. Zeroes have come without a frame.
        let frame_for_old = match page {
            ZEROES if old_content.iter().all(|byte| *byte == 0) => return Ok(ZEROES),
            ZEROES => self.frames.allocate().ok_or(ExchangeError::OutOfPages)?,
            page => page,
        };
        if let Err(cause) = write_new() {
            if page == ZEROES {
                self.frames.release(frame_for_old);
            }
            return Err(ExchangeError::Medium(cause));
        }
        self.frames.memory().fill(frame_for_old, &old_content);
        Ok(frame_for_old)
    }

    #[inline]
    fn release(&mut self, page: Frame) {
        self.frames.release(page);
    }

    fn read(&self, lba: u64, blocks: u64) -> Result<AlignedBuf, Cause> {
        let mut buf = AlignedBuf::with_any_content(blocks as usize * BLOCK_BYTES);
        match &self.newest {
            NewestContents::InFrames(map) => {
                for (lba, block) in (lba..).zip(buf.chunks_exact_mut(BLOCK_BYTES)) {
                    self.frames.memory().copy_out(map[lba as usize], block);
                }
            }
            NewestContents::InFile(file) => file.read(lba, &mut buf)?,
        }
        Ok(buf)
    }
}

/// The error of a drive that needs more frames than there are numbers.
fn too_large() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_handed_out_once_until_freed() {
        let mut frames = FramePool::new(3, 1).unwrap();
        let all: Vec<_> = std::iter::from_fn(|| frames.allocate()).collect();
        assert_eq!(all, [0, 1, 2]);
        frames.release(1);
        frames.release(ZEROES);
        assert_eq!(frames.allocate(), Some(1));
        assert_eq!(frames.allocate(), None);

        let mut block = vec![9; BLOCK_BYTES];
        frames.memory().fill(1, &[7; BLOCK_BYTES]);
        frames.memory().copy_out(1, &mut block);
        assert!(block.iter().all(|b| *b == 7));
        frames.memory().copy_out(ZEROES, &mut block);
        assert!(block.iter().all(|b| *b == 0));
    }
}
