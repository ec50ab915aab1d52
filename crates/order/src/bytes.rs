//! Fields at byte offsets of the structures in a log. All numbers are little endian.
//!
//! The callers know the length of each structure. An offset beyond the slice is a programming
//! error.

/// The little-endian number of 8 bytes at offset `at`.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes_at(bytes, at))
}

/// The little-endian number of 4 bytes at offset `at`.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(bytes, at))
}

/// The little-endian number of 2 bytes at offset `at`.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes_at(bytes, at))
}

/// The `N` bytes at offset `at`.
pub(crate) fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes were sliced")
}

/// Copies `field` to the offset `at`.
pub(crate) fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}
