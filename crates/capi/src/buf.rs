//! Buffers for writes.

use std::ffi::{c_int, c_void};
use std::ptr;

use riopipe::Buf;

use crate::error::{RiopError, guard, guard_value};
use crate::handle::{self, Handle, kind};
use crate::memory::{place, put};
use crate::stream::RiopStream;

/// The size of a block, bytes.
pub const RIOP_BLOCK_BYTES: u32 = 4096;
const _: () = assert!(RIOP_BLOCK_BYTES as usize == riopipe::BLOCK_BYTES);

/// See `riop_buf` in `riopipe.h`.
pub type RiopBuf = Handle<Buf>;

kind!(Buf, b"riop-buf", "riop_buf");

/// Takes a buffer from a stream.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_buf_new(
    stream: *mut RiopStream,
    length: usize,
    buf: *mut *mut RiopBuf,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let mut open = handle::exclusive(stream)?;
            let buf = place(buf, "buf")?;
            let taken = open.stream.buf(length)?;
            put(buf, handle::new(taken));
            Ok(())
        })
    }
}

/// The bytes of a buffer; null if it is no buffer.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_buf_data(buf: *mut RiopBuf) -> *mut c_void {
    // SAFETY: the caller keeps the rules.
    guard_value(ptr::null_mut(), || Ok(unsafe { handle::exclusive(buf) }?.as_mut_ptr().cast()))
}

/// The length of a buffer, bytes; 0 if it is no buffer.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_buf_length(buf: *const RiopBuf) -> usize {
    // SAFETY: the caller keeps the rules.
    guard_value(0, || Ok(unsafe { handle::shared(buf) }?.len()))
}

/// Frees a buffer that no group has taken.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_buf_free(buf: *mut RiopBuf) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(ptr::null_mut(), || handle::free(buf)) }
}
