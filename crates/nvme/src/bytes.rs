//! Little-endian fields in byte slices, and fixed-size text fields.
//!
//! `at` is the byte offset of a field in its structure. The callers check the length of the whole
//! structure first. So an offset beyond the slice is a programming error, and never the peer's.

use alloc::string::String;

/// A structure that is shorter than its specification demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} takes {need} bytes, {have} were received")]
pub struct ShortData {
    /// The structure, as an error message names it.
    pub what: &'static str,
    /// Its length by the specification, in bytes.
    pub need: usize,
    /// The length that was received, in bytes.
    pub have: usize,
}

/// The first `N` bytes of `data`.
///
/// # Errors
/// [`ShortData`], which names the structure `what`.
pub(crate) fn whole<'a, const N: usize>(
    data: &'a [u8],
    what: &'static str,
) -> Result<&'a [u8; N], ShortData> {
    data.first_chunk::<N>().ok_or(ShortData { what, need: N, have: data.len() })
}

/// The `N` bytes at offset `at`.
#[inline(always)]
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

/// The 16-bit number at offset `at`.
#[inline(always)]
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

/// The 32-bit number at offset `at`.
#[inline(always)]
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

/// The 64-bit number at offset `at`.
#[inline(always)]
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// Copies `field` to offset `at`.
#[inline(always)]
pub(crate) fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

/// Writes a 16-bit number at offset `at`.
#[inline(always)]
pub(crate) fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    put(bytes, at, &value.to_le_bytes());
}

/// Writes a 32-bit number at offset `at`.
#[inline(always)]
pub(crate) fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    put(bytes, at, &value.to_le_bytes());
}

/// Writes a 64-bit number at offset `at`.
#[inline(always)]
pub(crate) fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    put(bytes, at, &value.to_le_bytes());
}

/// Writes an ASCII field padded with `pad`. Identify strings are padded with spaces, NQNs and
/// addresses with NULs (Base §1.4.2). Text that is longer than the field is cut.
pub(crate) fn put_text(bytes: &mut [u8], at: usize, len: usize, text: &str, pad: u8) {
    let field = &mut bytes[at..at + len];
    field.fill(pad);
    let text_len = text.len().min(len);
    field[..text_len].copy_from_slice(&text.as_bytes()[..text_len]);
}

/// An ASCII field without its padding. Each byte that is not printable ASCII becomes `?`, so that a
/// hostile name cannot send control sequences to a terminal (trap T18).
pub(crate) fn text_at(bytes: &[u8], at: usize, len: usize) -> String {
    let field = &bytes[at..at + len];
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(len);
    let printable = |&byte: &u8| match byte {
        b' '..=b'~' => char::from(byte),
        _ => '?',
    };
    let text: String = field[..end].iter().map(printable).collect();
    String::from(text.trim_end_matches(' '))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_padded_cut_and_cleaned() {
        let mut b = [0xffu8; 8];
        put_text(&mut b, 1, 6, "ab", b' ');
        assert_eq!(&b, b"\xffab    \xff");
        assert_eq!(text_at(&b, 1, 6), "ab");
        put_text(&mut b, 1, 6, "abcdefgh", 0);
        assert_eq!(&b, b"\xffabcdef\xff");
        assert_eq!(text_at(b"a\x1b[2J\x00zz", 0, 8), "a?[2J");
    }

    #[test]
    fn a_short_structure_is_named() {
        let e = whole::<16>(&[0; 3], "completion").unwrap_err();
        assert_eq!(alloc::format!("{e}"), "completion takes 16 bytes, 3 were received");
    }
}
