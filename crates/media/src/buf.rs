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

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> AlignedBuf {
        let mut buf = AlignedBuf::recycled(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// A buffer of `len` bytes with arbitrary old content, for a caller that overwrites all of
    /// them.
    pub(crate) fn recycled(len: usize) -> AlignedBuf {
        let capacity = len.next_multiple_of(BLOCK_BYTES).max(BLOCK_BYTES);
        let capacity = match class(capacity) {
            Some(class) => BLOCK_BYTES << class,
            None => capacity,
        };
        let kept = class(capacity).and_then(|class| {
            POOL.try_with(|pool| pool.borrow_mut().0[class].pop()).ok().flatten()
        });
        let start = kept.unwrap_or_else(|| {
            let layout = layout(capacity);
            // SAFETY: the layout's size is not zero. Zeroed, so that the bytes are initialised
            // from the start and for every later use.
            let start = unsafe { alloc::alloc_zeroed(layout) };
            NonNull::new(start).unwrap_or_else(|| alloc::handle_alloc_error(layout))
        });
        AlignedBuf { start, len, capacity }
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
            // SAFETY: allocated in `recycled` with this very layout, and not kept.
            unsafe { alloc::dealloc(self.start.as_ptr(), layout(self.capacity)) };
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

fn layout(capacity: usize) -> Layout {
    // A length without a valid layout exceeds the address space.
    Layout::from_size_align(capacity, BLOCK_BYTES).expect("a buffer of at most isize::MAX bytes")
}

struct Pool([Vec<NonNull<u8>>; CLASSES]);

impl Drop for Pool {
    fn drop(&mut self) {
        for (class, list) in self.0.iter().enumerate() {
            for start in list {
                // SAFETY: kept by `AlignedBuf::drop`, allocated with the layout of the class, and
                // owned by nothing else.
                unsafe { alloc::dealloc(start.as_ptr(), layout(BLOCK_BYTES << class)) };
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
    fn empty_is_fine() {
        assert!(AlignedBuf::zeroed(0).is_empty());
    }
}
