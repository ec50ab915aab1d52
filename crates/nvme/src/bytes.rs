//! Little-endian fields in byte slices, and fixed-size text fields.
//!
//! Every caller has checked the length of the whole structure before. An offset beyond the slice is
//! a programming error here, never the peer's.

use alloc::string::String;

/// A structure that is shorter than its specification demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} takes {need} bytes, {have} were received")]
pub struct ShortData {
    /// The structure, as an error message names it.
    pub what: &'static str,
    /// Its length by the specification, in bytes.
    pub need: usize,
    /// The length at hand, in bytes.
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

#[inline(always)]
pub(crate) fn array<const N: usize>(b: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&b[at..at + N]);
    out
}

#[inline(always)]
pub(crate) fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(b, at))
}

#[inline(always)]
pub(crate) fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(b, at))
}

#[inline(always)]
pub(crate) fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(b, at))
}

#[inline(always)]
pub(crate) fn put(b: &mut [u8], at: usize, bytes: &[u8]) {
    b[at..at + bytes.len()].copy_from_slice(bytes);
}

#[inline(always)]
pub(crate) fn put16(b: &mut [u8], at: usize, v: u16) {
    put(b, at, &v.to_le_bytes());
}

#[inline(always)]
pub(crate) fn put32(b: &mut [u8], at: usize, v: u32) {
    put(b, at, &v.to_le_bytes());
}

#[inline(always)]
pub(crate) fn put64(b: &mut [u8], at: usize, v: u64) {
    put(b, at, &v.to_le_bytes());
}

/// Writes an ASCII field padded with `pad`. Identify strings are padded with spaces, NQNs and
/// addresses with NULs (Base §1.4.2). Text that is longer than the field is cut.
pub(crate) fn put_text(b: &mut [u8], at: usize, len: usize, text: &str, pad: u8) {
    let field = &mut b[at..at + len];
    field.fill(pad);
    let n = text.len().min(len);
    field[..n].copy_from_slice(&text.as_bytes()[..n]);
}

/// An ASCII field without its padding. Each byte that is not printable ASCII becomes `?`, so that a
/// hostile name cannot send control sequences to a terminal (T18).
pub(crate) fn text_at(b: &[u8], at: usize, len: usize) -> String {
    let field = &b[at..at + len];
    let end = field.iter().position(|&c| c == 0).unwrap_or(len);
    let text: String = field[..end]
        .iter()
        .map(|&c| if (0x20..0x7f).contains(&c) { char::from(c) } else { '?' })
        .collect();
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
