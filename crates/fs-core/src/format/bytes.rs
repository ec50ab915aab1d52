//! Little-endian numbers in bytes. The offsets are constants of the format, or were checked by the
//! caller: a number that does not fit into the slice panics.

/// The 16-bit number at `at`.
pub(crate) fn u16_at(data: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([data[at], data[at + 1]])
}

/// The 32-bit number at `at`.
pub(crate) fn u32_at(data: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]])
}

/// The 64-bit number at `at`.
pub(crate) fn u64_at(data: &[u8], at: usize) -> u64 {
    u64::from(u32_at(data, at)) | u64::from(u32_at(data, at + 4)) << 32
}

/// Writes the 16-bit number at `at`.
pub(crate) fn set_u16(data: &mut [u8], at: usize, value: u16) {
    data[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

/// Writes the 32-bit number at `at`.
pub(crate) fn set_u32(data: &mut [u8], at: usize, value: u32) {
    data[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// Writes the 64-bit number at `at`.
pub(crate) fn set_u64(data: &mut [u8], at: usize, value: u64) {
    data[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// A number of which the low bits lie at `low` and the high ones at `high`, 16 bits each.
pub(crate) fn u16_pair(data: &[u8], low: usize, high: usize) -> u32 {
    u32::from(u16_at(data, low)) | u32::from(u16_at(data, high)) << 16
}

/// A number of which the low bits lie at `low` and the high ones at `high`, 32 bits each.
pub(crate) fn u32_pair(data: &[u8], low: usize, high: usize) -> u64 {
    u64::from(u32_at(data, low)) | u64::from(u32_at(data, high)) << 32
}

/// The low 16 bits.
pub(crate) const fn low16(value: u32) -> u16 {
    (value & 0xffff) as u16
}

/// The high 16 bits.
pub(crate) const fn high16(value: u32) -> u16 {
    (value >> 16) as u16
}

/// The low 32 bits.
pub(crate) const fn low32(value: u64) -> u32 {
    (value & 0xffff_ffff) as u32
}

/// The high 32 bits.
pub(crate) const fn high32(value: u64) -> u32 {
    (value >> 32) as u32
}
