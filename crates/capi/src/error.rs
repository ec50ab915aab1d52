//! Errors as C has them, and the guard around each function.

use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::codes::RIOP_OK;
use crate::failure::Failure;
use crate::handle::{self, Handle, kind};
use crate::memory::cstring;

/// Why a call failed.
#[derive(Debug)]
pub struct ErrorDetail {
    code: c_int,
    is_retryable: bool,
    can_reopen: bool,
    pub(crate) members: c_int,
    text: CString,
}

/// See `riop_error` in `riopipe.h`.
pub type RiopError = Handle<ErrorDetail>;

kind!(ErrorDetail, b"riop-err", "riop_error");

/// Makes an error of a failure.
pub(crate) fn new(failure: Failure) -> *mut RiopError {
    let Failure { code, is_retryable, can_reopen, members, text } = failure;
    handle::new(ErrorDetail { code, is_retryable, can_reopen, members, text: cstring(text) })
}

/// Runs the body of a function: catches panics, and returns the code. On failure, puts an error into `*error`, in the
/// place of an earlier one.
///
/// # Safety
/// `error` is null, or `*error` is null or points to an error of this library. See the [rules](crate#safety).
pub(crate) unsafe fn guard(
    error: *mut *mut RiopError,
    call: impl FnOnce() -> Result<(), Failure>,
) -> c_int {
    // An object that a panic has left in the middle of a call can't be used any more: `handle` sees to that.
    let failure = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return RIOP_OK,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::of_panic(panic),
    };
    let code = failure.code;
    if !error.is_null() {
        // SAFETY: `error` points to a pointer, by the contract of this function.
        let earlier = unsafe { ptr::replace(error, new(failure)) };
        // SAFETY: it is null or an error of this library, by the contract of this function.
        let _ = unsafe { handle::free(earlier) };
    }
    code
}

/// As [`guard`], for a function that returns a value and no code: `otherwise` if it fails or panics.
pub(crate) fn guard_value<R>(otherwise: R, call: impl FnOnce() -> Result<R, Failure>) -> R {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.unwrap_or(otherwise),
        Err(panic) => {
            // It drops the panic safely.
            Failure::of_panic(panic);
            otherwise
        }
    }
}

/// The code of an error; `RIOP_OK` for null.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_error_code(error: *const RiopError) -> c_int {
    // SAFETY: the caller keeps the rules.
    guard_value(RIOP_OK, || Ok(unsafe { handle::shared(error) }?.code))
}

/// The text of an error; the empty text for null.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_error_text(error: *const RiopError) -> *const c_char {
    // SAFETY: the caller keeps the rules.
    guard_value(c"".as_ptr(), || Ok(unsafe { handle::shared(error) }?.text.as_ptr()))
}

/// Whether the same call may succeed later, if only time passes.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_error_is_retryable(error: *const RiopError) -> c_int {
    // SAFETY: the caller keeps the rules.
    guard_value(0, || Ok(unsafe { handle::shared(error) }?.is_retryable.into()))
}

/// Whether the failed stream may be reopened.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_error_can_reopen(error: *const RiopError) -> c_int {
    // SAFETY: the caller keeps the rules.
    guard_value(0, || Ok(unsafe { handle::shared(error) }?.can_reopen.into()))
}

/// Frees an error.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_error_free(error: *mut RiopError) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(ptr::null_mut(), || handle::free(error)) }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::codes::{RIOP_FULL, RIOP_PANIC};

    fn text(error: *const RiopError) -> String {
        // SAFETY: the error is one of this library, and its text ends with a zero byte.
        unsafe { CStr::from_ptr(riop_error_text(error)) }.to_str().unwrap().to_owned()
    }

    /// A panic ends inside of the guard, and is an error with a code.
    #[test]
    fn no_panic_leaves_the_guard() {
        let mut error = ptr::null_mut();
        // SAFETY: the error pointer is null or an error of this library.
        let code = unsafe { guard(&raw mut error, || panic!("number {}", 7)) };
        assert_eq!(code, RIOP_PANIC);
        assert!(text(error).contains("number 7"), "{}", text(error));
        // A payload that panics when it is dropped.
        struct Bad;
        impl Drop for Bad {
            fn drop(&mut self) {
                panic!("again");
            }
        }
        // SAFETY: as above.
        let code = unsafe { guard(&raw mut error, || std::panic::panic_any(Bad)) };
        assert_eq!(code, RIOP_PANIC);
        // SAFETY: as above.
        assert_eq!(unsafe { guard(ptr::null_mut(), || panic!("without a place")) }, RIOP_PANIC);
        assert_eq!(guard_value(3, || panic!("without an error")), 3);
        // SAFETY: the error is one of this library.
        unsafe { assert_eq!(riop_error_free(error), RIOP_OK) };
    }

    #[test]
    fn a_new_error_takes_the_place_of_the_earlier_one_and_success_changes_nothing() {
        let mut error = ptr::null_mut();
        for number in 0..3 {
            let failure = || Err(Failure::new(RIOP_FULL, format!("failure\0 {number}")));
            // SAFETY: the error pointer is null or an error of this library.
            unsafe { assert_eq!(guard(&raw mut error, failure), RIOP_FULL) };
        }
        // SAFETY: as above.
        unsafe { assert_eq!(guard(&raw mut error, || Ok(())), RIOP_OK) };
        // A zero byte would end the text.
        assert_eq!(text(error), "failure? 2");
        // SAFETY: as above.
        unsafe {
            assert_eq!((riop_error_code(error), riop_error_is_retryable(error)), (RIOP_FULL, 0));
            riop_error_free(error);
            assert_eq!((riop_error_code(ptr::null()), riop_error_can_reopen(ptr::null())), (0, 0));
            assert_eq!(riop_error_free(ptr::null_mut()), RIOP_OK);
        }
        assert_eq!(text(ptr::null()), "");
    }
}
