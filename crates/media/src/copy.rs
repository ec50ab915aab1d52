//! Copies of whole blocks into memory that is not read soon.
//!
//! A drive in memory is far larger than the caches. An ordinary copy first reads each line of the
//! destination from memory, only to overwrite it. Streaming stores skip that, and leave the caches
//! to other data: 175 ns instead of 424 ns for a random block of 1 GiB (docs/media.md). Wider
//! streaming stores (AVX2, AVX-512) take the same time as those of SSE2, which every x86-64 has, so
//! nothing is detected at run time.

use riopipe_order::block_device::BLOCK_BYTES;

/// Copies one block, and makes the copy visible to other threads before any later store of this
/// thread. Streaming stores alone are not ordered.
///
/// # Safety
///
/// The conditions of [`copy_block_unpublished`].
#[inline]
pub(crate) unsafe fn copy_block(to: *mut u8, from: *const u8) {
    // SAFETY: the caller's promise.
    unsafe { copy_block_unpublished(to, from) };
    publish_copies();
}

/// Copies one block without waiting until memory has all of it. Before [`publish_copies`] is
/// called, no thread, this one included, may read the destination or write it in another way.
///
/// # Safety
///
/// `to` must be valid for writing [`BLOCK_BYTES`] bytes and aligned to 16, `from` valid for reading
/// as many. The two may not overlap. No other thread may access `to` until this thread has called
/// [`publish_copies`].
#[inline]
pub(crate) unsafe fn copy_block_unpublished(to: *mut u8, from: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        // Each round copies a cache line of 64 bytes.
        for offset in (0..BLOCK_BYTES).step_by(64) {
            // SAFETY: all offsets are inside the block; `to` is aligned to 16; loads need no
            // alignment; SSE2 is part of x86-64.
            unsafe {
                let from = from.add(offset).cast::<__m128i>();
                let to = to.add(offset).cast::<__m128i>();
                let a = _mm_loadu_si128(from);
                let b = _mm_loadu_si128(from.add(1));
                let c = _mm_loadu_si128(from.add(2));
                let d = _mm_loadu_si128(from.add(3));
                _mm_stream_si128(to, a);
                _mm_stream_si128(to.add(1), b);
                _mm_stream_si128(to.add(2), c);
                _mm_stream_si128(to.add(3), d);
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, BLOCK_BYTES)
    }
}

/// Makes all copies of this thread visible before any later store of this thread.
#[inline]
pub(crate) fn publish_copies() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::AlignedBuf;

    #[test]
    fn copies_one_block_and_no_more() {
        let source: Vec<u8> = (0..=BLOCK_BYTES).map(|i| (i * 7 + i / 256) as u8).collect();
        let mut to = AlignedBuf::zeroed(3 * BLOCK_BYTES);
        // SAFETY: the middle block of three, aligned; the source has a block from 1 on.
        unsafe { copy_block(to.as_mut_ptr().add(BLOCK_BYTES), source.as_ptr().add(1)) };
        assert_eq!(&to[BLOCK_BYTES..2 * BLOCK_BYTES], &source[1..]);
        assert!(to[..BLOCK_BYTES].iter().all(|b| *b == 0));
        assert!(to[2 * BLOCK_BYTES..].iter().all(|b| *b == 0));
    }
}
