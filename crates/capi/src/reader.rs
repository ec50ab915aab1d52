//! Readers: any thread reads a volume beside its streams.

use std::ffi::{c_int, c_void};
use std::ptr;

use riopipe::Reader;

use crate::error::{RiopError, guard};
use crate::handle::{self, Handle, kind};
use crate::memory::{array_mut, place, put};
use crate::options::{self, RiopReaderOptions};
use crate::time::limit;
use crate::volume::RiopVolume;

/// See `riop_reader` in `riopipe.h`.
pub type RiopReader = Handle<Reader>;

kind!(Reader, b"riop-rea", "riop_reader");

/// Makes a reader of a volume.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_reader_new(
    volume: *const RiopVolume,
    options: *const RiopReaderOptions,
    reader: *mut *mut RiopReader,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let volume = handle::shared(volume)?;
            let options = options::reader(options)?;
            let reader = place(reader, "reader")?;
            put(reader, handle::new(volume.reader(&options)));
            Ok(())
        })
    }
}

/// Reads blocks, with all groups that were complete when the read began.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_reader_read(
    reader: *const RiopReader,
    lba: u64,
    into: *mut c_void,
    length: usize,
    timeout_ms: i64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let reader = handle::shared(reader)?;
            // The read only writes to this memory.
            let into = array_mut(into.cast::<u8>(), length, "into")?;
            Ok(reader.read(lba, into, limit(timeout_ms))?)
        })
    }
}

/// Frees a reader.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_reader_free(reader: *mut RiopReader) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(ptr::null_mut(), || handle::free(reader)) }
}
