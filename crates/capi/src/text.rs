//! Texts that the caller frees.

use std::ffi::{CString, c_char};

use serde_json::to_string;

use crate::error::guard_value;
use crate::failure::Failure;
use crate::memory::{cstring, place};

/// Puts a value as JSON into `*json`.
///
/// # Safety
/// `json` is null, or points to a place for a pointer.
pub(crate) unsafe fn put_json(
    json: *mut *mut c_char,
    value: &impl serde::Serialize,
) -> Result<(), Failure> {
    let json = place(json, "json")?;
    let text = cstring(to_string(value)?);
    // SAFETY: the pointer is not null, and the caller has promised the rest.
    unsafe { json.write(text.into_raw()) };
    Ok(())
}

/// Frees a text that a function has put into a `char **`.
///
/// # Safety
/// See the [rules](crate#safety). The text is null, or came from such a function and is unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_text_free(text: *mut c_char) {
    guard_value((), || {
        if !text.is_null() {
            // SAFETY: `into_raw` of a `CString` made the pointer, and the caller keeps the rules.
            drop(unsafe { CString::from_raw(text) });
        }
        Ok(())
    });
}
