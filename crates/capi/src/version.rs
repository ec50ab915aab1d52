//! The version of the library.

use std::ffi::{CStr, c_char};

const TEXT: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a version has no zero byte"),
    };

/// The parts of the version as numbers.
const fn number(part: &str) -> u32 {
    match u32::from_str_radix(part, 10) {
        Ok(number) => number,
        Err(_) => panic!("the parts of a version are numbers"),
    }
}

/// The version of the header: the major number. The library has the one of [`riop_version`].
pub const RIOP_VERSION_MAJOR: u32 = 0;
/// The version of the header: the minor number.
pub const RIOP_VERSION_MINOR: u32 = 1;
/// The version of the header: the last number.
pub const RIOP_VERSION_PATCH: u32 = 0;

/// The version of the library: major << 16 | minor << 8 | patch.
#[unsafe(no_mangle)]
pub extern "C" fn riop_version() -> u32 {
    const MAJOR: u32 = number(env!("CARGO_PKG_VERSION_MAJOR"));
    const MINOR: u32 = number(env!("CARGO_PKG_VERSION_MINOR"));
    const PATCH: u32 = number(env!("CARGO_PKG_VERSION_PATCH"));
    MAJOR << 16 | MINOR << 8 | PATCH
}

/// The version of the library as text, such as `"0.1.0"`. It is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn riop_version_text() -> *const c_char {
    TEXT.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_the_version_of_the_package() {
        let header = RIOP_VERSION_MAJOR << 16 | RIOP_VERSION_MINOR << 8 | RIOP_VERSION_PATCH;
        assert_eq!(riop_version(), header);
        assert_eq!(TEXT.to_str(), Ok(env!("CARGO_PKG_VERSION")));
    }
}
