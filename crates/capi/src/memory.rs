//! Arguments that are pointers: texts, structures with a size, places for results. This module and `handle` do
//! everything that is `unsafe` beside the calls themselves.

use std::ffi::{CStr, CString, c_char};
use std::mem::{MaybeUninit, size_of};
use std::ptr;

use crate::codes::{RIOP_ARGUMENT, RIOP_OPTION};
use crate::failure::Failure;

/// A larger structure is no structure of a later version.
const SIZE_MAX: usize = 4096;

/// A structure of numbers and pointers without padding, whose first field is its size in bytes. Zeroes in all other
/// fields are valid, and mean that nothing is requested.
///
/// # Safety
/// The structure is `repr(C)` and begins with a `usize`. All of its bits may have any value.
pub(crate) unsafe trait Structure: Copy {
    /// The name of the structure in C.
    const NAME: &'static str;
}

/// A text for C. A zero byte would end it, so it is replaced.
pub(crate) fn cstring(text: String) -> CString {
    CString::new(text).unwrap_or_else(|error| {
        let mut bytes = error.into_vec();
        bytes.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b'?');
        CString::new(bytes).expect("the zero bytes have been replaced")
    })
}

/// The text of an argument.
///
/// # Safety
/// `text` is null, or ends with a zero byte and does not change during the call.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str, Failure> {
    // SAFETY: as the caller has promised.
    unsafe { text_or_null(text, name) }?.ok_or_else(|| null(name))
}

/// As [`text()`]; `None` for null.
///
/// # Safety
/// As [`text()`].
pub(crate) unsafe fn text_or_null<'a>(
    text: *const c_char,
    name: &str,
) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the text is not null, and ends with a zero byte, as the caller has promised.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str().map_err(|_| argument(format!("{name} is not UTF-8")))?;
    Ok(Some(text))
}

/// The values of an array.
///
/// # Safety
/// `first` is null, or points to `count` values that do not change during the call.
pub(crate) unsafe fn array<'a, T>(
    first: *const T,
    count: usize,
    name: &str,
) -> Result<&'a [T], Failure> {
    check_array(first, count, name)?;
    match count {
        0 => Ok(&[]),
        // SAFETY: the pointer is aligned and not null, and the array is not larger than any object can be. The caller
        // has promised the rest.
        _ => Ok(unsafe { std::slice::from_raw_parts(first, count) }),
    }
}

/// The values of an array that the call writes.
///
/// # Safety
/// `first` is null, or points to memory for `count` values, which no other code uses during the call. The memory may
/// be uninitialised if the caller of this function only writes to it.
pub(crate) unsafe fn array_mut<'a, T>(
    first: *mut T,
    count: usize,
    name: &str,
) -> Result<&'a mut [T], Failure> {
    check_array(first, count, name)?;
    match count {
        0 => Ok(&mut []),
        // SAFETY: as in `array`.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(first, count) }),
    }
}

fn check_array<T>(first: *const T, count: usize, name: &str) -> Result<(), Failure> {
    if count == 0 {
        return Ok(());
    }
    if first.is_null() {
        return Err(null(name));
    }
    let fits =
        count.checked_mul(size_of::<T>()).is_some_and(|bytes| isize::try_from(bytes).is_ok());
    if !fits || !first.is_aligned() {
        return Err(argument(format!("{name} is not aligned, or longer than any memory")));
    }
    Ok(())
}

/// The address of a place for a result.
pub(crate) fn place<T>(place: *mut T, name: &str) -> Result<*mut T, Failure> {
    if place.is_null() {
        return Err(null(name));
    }
    if !place.is_aligned() {
        return Err(argument(format!("{name} is not aligned")));
    }
    Ok(place)
}

/// Writes a result, unless the caller does not want it.
///
/// # Safety
/// `place` is null, or points to memory for the value.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: as the caller has promised. The memory may be unaligned in a foreign structure.
        unsafe { ptr::write_unaligned(place, value) };
    }
}

/// Reads a structure of options; all zeroes for null. The structure of an earlier version is shorter: the fields that
/// it lacks are zero. The structure of a later version is longer: the fields that this version does not know must be
/// zero.
///
/// # Safety
/// `options` is null, or points to a structure with so many bytes as its first field has.
pub(crate) unsafe fn read<T: Structure>(options: *const T) -> Result<T, Failure> {
    let mut known = MaybeUninit::<T>::zeroed();
    if !options.is_null() {
        // SAFETY: as the caller has promised.
        let size = unsafe { checked_size(options) }?;
        // SAFETY: the structure has `size` bytes, of which no more are copied than `T` has.
        let later = unsafe {
            let bytes = options.cast::<u8>();
            ptr::copy_nonoverlapping(bytes, known.as_mut_ptr().cast(), size.min(size_of::<T>()));
            array(bytes.add(size_of::<T>().min(size)), size.saturating_sub(size_of::<T>()), T::NAME)
        }?;
        if later.iter().any(|byte| *byte != 0) {
            return Err(Failure::new(
                RIOP_OPTION,
                format!("{} has an option that this version of the library does not know", T::NAME),
            ));
        }
    }
    // SAFETY: all bytes are initialised, and all of their values are valid.
    Ok(unsafe { known.assume_init() })
}

/// Writes a structure of results, as far as the caller's structure reaches, and zeroes behind it. The caller's `size`
/// stays as it is.
///
/// # Safety
/// `results` is null, or points to a structure with so many bytes as its first field has.
pub(crate) unsafe fn write<T: Structure>(results: *mut T, values: &T) -> Result<(), Failure> {
    let results = place(results, T::NAME)?;
    // SAFETY: as the caller has promised.
    let size = unsafe { checked_size(results) }?;
    let begin = size_of::<usize>();
    let end = size.min(size_of::<T>());
    // SAFETY: the structure has `size` bytes, and `values` has at least `end`.
    unsafe {
        let (to, from) = (results.cast::<u8>(), ptr::from_ref(values).cast::<u8>());
        ptr::copy_nonoverlapping(from.add(begin), to.add(begin), end - begin);
        ptr::write_bytes(to.add(end), 0, size - end);
    }
    Ok(())
}

/// Checks that a structure for results has a valid size, before the call does anything.
///
/// # Safety
/// As [`write()`].
pub(crate) unsafe fn check_results<T: Structure>(results: *mut T) -> Result<(), Failure> {
    // SAFETY: as the caller has promised.
    unsafe { checked_size(place(results, T::NAME)?) }.map(|_| ())
}

/// # Safety
/// `structure` points to a structure that begins with a `usize`.
unsafe fn checked_size<T: Structure>(structure: *const T) -> Result<usize, Failure> {
    if !structure.is_aligned() {
        return Err(argument(format!("{} is not aligned", T::NAME)));
    }
    // SAFETY: the pointer is aligned, and the structure begins with its size, as the caller has promised.
    let size = unsafe { structure.cast::<usize>().read() };
    if !(size_of::<usize>()..=SIZE_MAX).contains(&size) {
        return Err(argument(format!(
            "the field `size` of {} is {size}; it must be sizeof({})",
            T::NAME,
            T::NAME
        )));
    }
    Ok(size)
}

/// The failure of a null pointer.
pub(crate) fn null(name: &str) -> Failure {
    argument(format!("{name} is null"))
}

/// The failure of an argument that is invalid in itself.
pub(crate) fn argument(text: String) -> Failure {
    Failure::new(RIOP_ARGUMENT, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(C)]
    struct Now {
        size: usize,
        a: u32,
        b: u32,
    }

    // SAFETY: it is `repr(C)`, begins with a `usize`, and has only numbers.
    unsafe impl Structure for Now {
        const NAME: &'static str = "now";
    }

    #[repr(C)]
    struct Later {
        now: Now,
        c: u64,
    }

    fn read_of<T>(structure: &T) -> Result<Now, Failure> {
        // SAFETY: all structures of these tests have at least so many bytes as their size.
        unsafe { read(ptr::from_ref(structure).cast()) }
    }

    #[test]
    fn options_of_an_earlier_and_a_later_version_are_read() {
        let now = Now { size: 16, a: 1, b: 2 };
        assert_eq!(read_of(&now).unwrap(), now);
        // An earlier version had no `b`, and what is behind `a` is not its own.
        assert_eq!(read_of(&Now { size: 12, ..now }).unwrap(), Now { size: 12, a: 1, b: 0 });
        assert_eq!(read_of(&Now { size: 8, ..now }).unwrap(), Now { size: 8, a: 0, b: 0 });
        let mut later = Later { now: Now { size: 24, ..now }, c: 0 };
        assert_eq!(read_of(&later).unwrap(), later.now);
        later.c = 1 << 63;
        assert_eq!(read_of(&later).unwrap_err().code, RIOP_OPTION);
        for size in [0, 7, SIZE_MAX + 1, usize::MAX] {
            assert_eq!(read_of(&Now { size, ..now }).unwrap_err().code, RIOP_ARGUMENT, "{size}");
        }
        // SAFETY: null is allowed.
        let default: Now = unsafe { read(ptr::null()) }.unwrap();
        assert_eq!((default.a, default.b), (0, 0));
    }

    #[test]
    fn results_are_written_as_far_as_the_callers_structure_reaches() {
        let values = Now { size: 0, a: 1, b: 2 };
        let mut later = Later { now: Now { size: 12, a: 7, b: 7 }, c: 7 };
        // SAFETY: the structure has so many bytes as its size, here and below.
        unsafe { write(&raw mut later.now, &values) }.unwrap();
        assert_eq!((later.now, later.c), (Now { size: 12, a: 1, b: 7 }, 7));
        later.now.size = 24;
        // SAFETY: as above; the pointer is to all of it.
        unsafe { write((&raw mut later).cast::<Now>(), &values) }.unwrap();
        assert_eq!((later.now, later.c), (Now { size: 24, a: 1, b: 2 }, 0));
        later.now.size = 3;
        // SAFETY: as above.
        let refused = unsafe { write((&raw mut later).cast::<Now>(), &values) };
        assert_eq!(refused.unwrap_err().code, RIOP_ARGUMENT);
    }

    #[test]
    fn arrays_and_texts_are_checked_as_far_as_possible() {
        let values = [1_u64, 2];
        // SAFETY: the pointers are null, or to so many values; the checks come before any access.
        unsafe {
            assert_eq!(array(values.as_ptr(), 2, "a").unwrap(), values);
            assert_eq!(array::<u64>(ptr::null(), 0, "a").unwrap(), [0_u64; 0]);
            assert!(array::<u64>(ptr::null(), 1, "a").is_err());
            assert!(array(values.as_ptr(), usize::MAX / 8, "a").is_err());
            assert!(array(values.as_ptr().byte_add(1), 1, "a").is_err());
            assert_eq!(text(c"a".as_ptr(), "t").unwrap(), "a");
            assert!(text(ptr::null(), "t").unwrap_err().text.contains("t is null"));
            assert!(text(c"\xff".as_ptr(), "t").is_err());
            assert_eq!(text_or_null(ptr::null(), "t").unwrap(), None);
        }
    }
}
