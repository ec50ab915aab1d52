//! Buffers that every medium accepts: aligned to the block size.

use std::alloc::{self, Layout};
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use riopipe_order::block_device::BLOCK_BYTES;

/// Size classes kept for reuse: 4 KiB, 8 KiB, … 1 MiB.
const CLASSES: usize = 9;
/// Largest number of bytes that a thread keeps for reuse in each class.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// Owned bytes, aligned to [`BLOCK_BYTES`] and initialised.
///
/// A freed buffer is kept for reuse by the thread that freed it, up to 4 MiB for each power of two,
/// so that a busy queue allocates nothing.
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
    /// A multiple of the block size; a power of two if it is of a size class.
    capacity: usize,
}

// SAFETY: the buffer is owned, plain memory; it may be used and freed on any thread.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> AlignedBuf {
        let mut buf = AlignedBuf::recycled(len);
        buf.fill(0);
        buf
    }

    /// As [`zeroed`](Self::zeroed); `None` if there is not so much memory.
    pub fn try_zeroed(len: usize) -> Option<AlignedBuf> {
        let (mut buf, reused) = AlignedBuf::take(len)?;
        // New memory is zero already.
        if reused {
            buf.fill(0);
        }
        Some(buf)
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> AlignedBuf {
        let mut buf = AlignedBuf::recycled(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// A buffer of `len` bytes with arbitrary old content, for a caller that overwrites all of
    /// them.
    pub(crate) fn recycled(len: usize) -> AlignedBuf {
        match AlignedBuf::take(len) {
            Some((buf, _)) => buf,
            None => alloc::handle_alloc_error(layout(len).unwrap_or(Layout::new::<u8>())),
        }
    }

    /// A buffer of `len` bytes, and whether it was used before: else it is zero. `None`: there is
    /// not so much memory.
    fn take(len: usize) -> Option<(AlignedBuf, bool)> {
        let capacity = len.checked_next_multiple_of(BLOCK_BYTES)?.max(BLOCK_BYTES);
        let capacity = match class(capacity) {
            Some(class) => BLOCK_BYTES << class,
            None => capacity,
        };
        let kept = class(capacity).and_then(|class| {
            POOL.try_with(|pool| pool.borrow_mut().0[class].pop()).ok().flatten()
        });
        let reused = kept.is_some();
        let start = match kept {
            Some(start) => start,
            // SAFETY: the layout's size is not zero. Zeroed, so that the bytes are initialised
            // from the start and for every later use.
            None => NonNull::new(unsafe { alloc::alloc_zeroed(layout(capacity)?) })?,
        };
        Some((AlignedBuf { start, len, capacity }, reused))
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        let kept = class(self.capacity).is_some_and(|class| {
            // While a thread ends, its pool may be gone already; the memory is then freed.
            POOL.try_with(|pool| {
                let list = &mut pool.borrow_mut().0[class];
                let space = list.len() < KEPT_BYTES_MAX / self.capacity;
                if space {
                    list.push(self.start);
                }
                space
            })
            .unwrap_or(false)
        });
        if !kept {
            // SAFETY: allocated in `take` with this very layout, and not kept.
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

/// The class whose buffers hold `capacity` bytes, if there is one.
fn class(capacity: usize) -> Option<usize> {
    let class = (capacity / BLOCK_BYTES).next_power_of_two().trailing_zeros() as usize;
    (class < CLASSES).then_some(class)
}

/// `None`: the buffer would exceed the address space.
fn layout(capacity: usize) -> Option<Layout> {
    Layout::from_size_align(capacity, BLOCK_BYTES).ok()
}

/// Frees memory that was allocated for a buffer of this capacity.
///
/// # Safety
/// It was allocated with the layout of this capacity, and nothing uses it any more.
unsafe fn free(start: NonNull<u8>, capacity: usize) {
    let layout = layout(capacity).expect("it was allocated with this layout");
    // SAFETY: as the caller promises.
    unsafe { alloc::dealloc(start.as_ptr(), layout) };
}

struct Pool([Vec<NonNull<u8>>; CLASSES]);

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
    static POOL: RefCell<Pool> = const { RefCell::new(Pool([const { Vec::new() }; CLASSES])) };
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
            // Miri ends a test that asks for more memory than there is; the other two are no layouts.
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
