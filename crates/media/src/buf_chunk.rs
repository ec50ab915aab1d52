//! Memory from which many buffers are cut.

use std::ptr::NonNull;
use std::sync::Arc;

use riopipe_order::block_device::BLOCK_BYTES;

use crate::AlignedBuf;
use crate::mapping::Mapping;

/// 512 KiB of memory, from which [`AlignedBuf`]s are cut one after the other. The memory is freed
/// when the chunk and all buffers of it are dropped.
///
/// A buffer that is allocated by itself touches two new pages, because the allocator keeps its own
/// words beside it, and is zeroed twice, by the kernel and by the allocator. All pages of a chunk
/// are allocated and zeroed by one call, which takes a tenth of a millisecond.
pub struct BufChunk {
    memory: Arc<Mapping>,
    /// The number of bytes that were cut.
    used: usize,
}

impl BufChunk {
    /// The size of a chunk, bytes.
    pub const BYTES: usize = 512 << 10;

    /// A zeroed chunk; `None` if there is not so much memory.
    pub fn allocate() -> Option<Self> {
        let memory = Mapping::anonymous(Self::BYTES).ok()?;
        memory.populate(Self::BYTES);
        Some(Self { memory: Arc::new(memory), used: 0 })
    }

    /// Cuts a zeroed buffer of `len` bytes; `None` if the rest of the chunk is smaller.
    ///
    /// # Panics
    /// `len` is 0, or not a multiple of the block size.
    pub fn cut(&mut self, len: usize) -> Option<AlignedBuf> {
        assert!(len > 0 && len.is_multiple_of(BLOCK_BYTES), "a buffer has whole blocks");
        if len > self.memory.len() - self.used {
            return None;
        }
        // SAFETY: the bytes from `used` on lie inside the mapping, as checked above.
        let start = unsafe { self.memory.start().add(self.used) };
        self.used += len;
        let start = NonNull::new(start)?;
        // SAFETY: `len` bytes from `start` on lie inside the mapping, which begins at a page. They
        // are zeroed. No other buffer has them, because `used` only grows.
        Some(unsafe { AlignedBuf::in_mapping(start, len, Arc::clone(&self.memory)) })
    }
}

impl std::fmt::Debug for BufChunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BufChunk({} of {} bytes used)", self.used, Self::BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no madvise")]
    fn buffers_are_apart_and_outlive_their_chunk() {
        let mut chunk = BufChunk::allocate().unwrap();
        let mut bufs: Vec<AlignedBuf> =
            (0..3).map(|_| chunk.cut(2 * BLOCK_BYTES).unwrap()).collect();
        for (nth, buf) in bufs.iter_mut().enumerate() {
            assert!(buf.iter().all(|byte| *byte == 0));
            buf.fill(nth as u8 + 1);
        }
        let memory = Arc::downgrade(&chunk.memory);
        drop(chunk);
        for (nth, buf) in bufs.iter().enumerate() {
            assert_eq!(buf.as_ptr() as usize % BLOCK_BYTES, 0);
            assert!(buf.len() == 2 * BLOCK_BYTES && buf.iter().all(|byte| *byte == nth as u8 + 1));
        }
        let last = bufs.pop();
        std::thread::spawn(move || drop(bufs)).join().unwrap();
        assert!(memory.upgrade().is_some(), "a buffer is left");
        drop(last);
        assert!(memory.upgrade().is_none(), "the memory is freed");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no madvise")]
    fn a_chunk_has_an_end() {
        let mut chunk = BufChunk::allocate().unwrap();
        assert!(chunk.cut(BufChunk::BYTES - BLOCK_BYTES).is_some());
        assert!(chunk.cut(2 * BLOCK_BYTES).is_none());
        assert!(chunk.cut(BLOCK_BYTES).is_some());
        assert!(chunk.cut(BLOCK_BYTES).is_none());
    }
}
