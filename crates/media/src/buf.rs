//! Buffers that every medium accepts: aligned to the block size.
//!
//! Each thread keeps freed buffers in a pool, by size class, and takes new buffers from there. The
//! size classes are 4 KiB, 8 KiB, … 1 MiB. Larger buffers are allocated and freed each time. Buffers
//! that are cut from a [`BufChunk`](crate::BufChunk) are in no pool.

use std::alloc::{self, Layout};
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use riopipe_order::block_device::BLOCK_BYTES;

use crate::mapping::Mapping;

/// Number of size classes. Class `n` has buffers of `BLOCK_BYTES << n` bytes.
const CLASS_COUNT: usize = 9;
/// Largest number of bytes that a thread keeps for reuse in each class.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// Owned bytes, aligned to [`BLOCK_BYTES`] and initialised.
///
/// A freed buffer is kept for reuse by the thread that freed it, up to 4 MiB for each power of two,
/// so that a busy queue allocates nothing.
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
    /// Number of allocated bytes: the size of a size class, or a larger multiple of the block size.
    capacity: usize,
    /// The memory of the chunk from which the buffer was cut; `None` if it was allocated by itself.
    chunk: Option<Arc<Mapping>>,
}

// SAFETY: the buffer is owned, plain memory; it may be used and freed on any thread.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> AlignedBuf {
        let mut buf = AlignedBuf::with_any_content(len);
        buf.fill(0);
        buf
    }

    /// As [`zeroed`](Self::zeroed); `None` if there is not so much memory.
    pub fn try_zeroed(len: usize) -> Option<AlignedBuf> {
        match AlignedBuf::take(len)? {
            Taken::New(buf) => Some(buf),
            Taken::Reused(mut buf) => {
                buf.fill(0);
                Some(buf)
            }
        }
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> AlignedBuf {
        let mut buf = AlignedBuf::with_any_content(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// A buffer of `len` bytes with any content, such as that of a freed buffer. The caller overwrites
    /// all of them before anything reads them.
    pub fn with_any_content(len: usize) -> AlignedBuf {
        match AlignedBuf::take(len) {
            Some(Taken::New(buf) | Taken::Reused(buf)) => buf,
            None => alloc::handle_alloc_error(layout(len).unwrap_or(Layout::new::<u8>())),
        }
    }

    /// A buffer that was cut from a mapping.
    ///
    /// # Safety
    /// The `len` bytes from `start` on are initialised memory of the mapping, aligned to the block
    /// size, and nothing else uses them as long as the buffer exists.
    pub(crate) unsafe fn in_mapping(start: NonNull<u8>, len: usize, mapping: Arc<Mapping>) -> Self {
        Self { start, len, capacity: len, chunk: Some(mapping) }
    }

    /// A buffer of `len` bytes, from the pool if it has one. `None`: there is not so much memory.
    fn take(len: usize) -> Option<Taken> {
        let blocks_len = len.checked_next_multiple_of(BLOCK_BYTES)?.max(BLOCK_BYTES);
        let class = class_for(blocks_len);
        let capacity = match class {
            Some(class) => BLOCK_BYTES << class,
            None => blocks_len,
        };
        if let Some(start) = class.and_then(take_from_pool) {
            return Some(Taken::Reused(AlignedBuf { start, len, capacity, chunk: None }));
        }
        // SAFETY: the layout's size is not zero. The memory is zeroed, so that the bytes are
        // initialised from the start and for every later use.
        let start = NonNull::new(unsafe { alloc::alloc_zeroed(layout(capacity)?) })?;
        Some(Taken::New(AlignedBuf { start, len, capacity, chunk: None }))
    }
}

/// A buffer for a new use.
enum Taken {
    /// Newly allocated: all its bytes are zero.
    New(AlignedBuf),
    /// From the pool: its bytes are arbitrary.
    Reused(AlignedBuf),
}

/// Takes memory of size class `class` from this thread's pool, if there is any.
fn take_from_pool(class: usize) -> Option<NonNull<u8>> {
    POOL.try_with(|pool| pool.borrow_mut().0[class].pop()).ok().flatten()
}

/// Keeps memory of `capacity` bytes in this thread's pool, if there is space for it. Returns
/// whether the memory was kept.
fn keep_in_pool(start: NonNull<u8>, capacity: usize) -> bool {
    let Some(class) = class_for(capacity) else { return false };
    // While a thread ends, its pool may be gone already.
    let kept = POOL.try_with(|pool| {
        let list = &mut pool.borrow_mut().0[class];
        let has_space = list.len() < KEPT_BYTES_MAX / capacity;
        if has_space {
            list.push(start);
        }
        has_space
    });
    kept.unwrap_or(false)
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.chunk.is_none() && !keep_in_pool(self.start, self.capacity) {
            // SAFETY: the memory was allocated in `take` with the layout of this capacity, because it
            // is of no chunk, and the pool has not kept it.
            unsafe { free(self.start, self.capacity) };
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` points to `capacity >= len` initialised bytes that this buffer owns.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for AlignedBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

/// The smallest size class whose buffers hold `len` bytes; `None` if `len` is too large for all of
/// them. `len` is a multiple of the block size.
fn class_for(len: usize) -> Option<usize> {
    let class = (len / BLOCK_BYTES).next_power_of_two().trailing_zeros() as usize;
    if class < CLASS_COUNT { Some(class) } else { None }
}

/// The layout of a buffer of this capacity; `None` if it would exceed the address space.
fn layout(capacity: usize) -> Option<Layout> {
    Layout::from_size_align(capacity, BLOCK_BYTES).ok()
}

/// Frees memory that was allocated for a buffer of this capacity.
///
/// # Safety
/// The memory was allocated with the layout of this capacity, and nothing uses it any more.
unsafe fn free(start: NonNull<u8>, capacity: usize) {
    let layout = layout(capacity).expect("it was allocated with this layout");
    // SAFETY: as the caller promises.
    unsafe { alloc::dealloc(start.as_ptr(), layout) };
}

/// The memory that a thread keeps for reuse, by size class.
struct Pool([Vec<NonNull<u8>>; CLASS_COUNT]);

impl Drop for Pool {
    fn drop(&mut self) {
        for (class, list) in self.0.iter().enumerate() {
            for start in list {
                // SAFETY: kept by `AlignedBuf::drop`, allocated with the layout of the class, and
                // owned by nothing else.
                unsafe { free(*start, BLOCK_BYTES << class) };
            }
        }
    }
}

thread_local! {
    static POOL: RefCell<Pool> = const { RefCell::new(Pool([const { Vec::new() }; CLASS_COUNT])) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_zeroed_and_reused() {
        let mut buf = AlignedBuf::zeroed(5000);
        assert_eq!(buf.len(), 5000);
        assert_eq!(buf.as_ptr() as usize % BLOCK_BYTES, 0);
        buf.fill(7);
        let address = buf.as_ptr();
        drop(buf);
        let again = AlignedBuf::zeroed(8192);
        assert_eq!(again.as_ptr(), address, "the pool reuses the buffer");
        assert!(again.iter().all(|byte| *byte == 0), "and zeroes it");
    }

    #[test]
    fn moves_between_threads_and_outgrows_the_classes() {
        let big = AlignedBuf::copy_of(&vec![3; 3 << 20]);
        let small = AlignedBuf::copy_of(b"small");
        std::thread::spawn(move || {
            assert_eq!(&small[..], b"small");
            assert_eq!(big[(3 << 20) - 1], 3);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_buffer_that_is_too_large_is_refused() {
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            // Miri ends a test that asks for more memory than there is; the other two are no
            // layouts.
            if cfg!(miri) && len == 1 << 60 {
                continue;
            }
            assert!(AlignedBuf::try_zeroed(len).is_none(), "{len}");
        }
        let mut buf = AlignedBuf::try_zeroed(3 << 12).unwrap();
        buf.fill(7);
        drop(buf);
        let again = AlignedBuf::try_zeroed(4 << 12).unwrap();
        assert!(again.iter().all(|byte| *byte == 0), "a reused buffer is zero, too");
    }

    #[test]
    fn empty_is_fine() {
        assert!(AlignedBuf::zeroed(0).is_empty());
    }
}
