//! Watches: other threads read the marks of a stream, and wait for them.

use std::ffi::c_int;
use std::ptr;

use riopipe::{Seq, Watch};

use crate::error::{RiopError, guard};
use crate::handle::{self, Handle, kind};
use crate::memory::{argument, place, put};
use crate::stream::{RIOP_UNTIL_COMPLETE, RIOP_UNTIL_DURABLE, RiopStream};
use crate::time::{RiopMarks, limit};

/// See `riop_watch` in `riopipe.h`.
pub type RiopWatch = Handle<Watch>;

kind!(Watch, b"riop-wat", "riop_watch");

/// Makes a watch of a stream.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_watch_new(
    stream: *mut RiopStream,
    watch: *mut *mut RiopWatch,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let open = handle::exclusive(stream)?;
            let watch = place(watch, "watch")?;
            put(watch, handle::new(open.stream.watch()));
            Ok(())
        })
    }
}

/// Reads the marks.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_watch_marks(
    watch: *const RiopWatch,
    marks: *mut RiopMarks,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let watch = handle::shared(watch)?;
            put(place(marks, "marks")?, watch.marks().into());
            Ok(())
        })
    }
}

/// Reads the released mark.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_watch_released(
    watch: *const RiopWatch,
    seq: *mut u64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let watch = handle::shared(watch)?;
            put(place(seq, "seq")?, watch.released().0);
            Ok(())
        })
    }
}

/// Waits for a mark.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_watch_wait(
    watch: *const RiopWatch,
    until: u32,
    seq: u64,
    timeout_ms: i64,
    marks: *mut RiopMarks,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let watch = handle::shared(watch)?;
            let reached = match until {
                RIOP_UNTIL_COMPLETE => watch.wait_complete(Seq(seq), limit(timeout_ms)),
                RIOP_UNTIL_DURABLE => watch.wait_durable(Seq(seq), limit(timeout_ms)),
                _ => {
                    let text = "a watch waits for RIOP_UNTIL_COMPLETE or RIOP_UNTIL_DURABLE";
                    return Err(argument(text.into()));
                }
            };
            put(marks, reached?.into());
            Ok(())
        })
    }
}

/// Frees a watch.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_watch_free(watch: *mut RiopWatch) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(ptr::null_mut(), || handle::free(watch)) }
}
