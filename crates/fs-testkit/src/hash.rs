//! Hashes of blocks, by which tests find equal images.

use riopipe_fs_core::Block;

/// The hash of a block's content.
#[must_use]
pub fn hash_of(block: &Block) -> u64 {
    let mut hash = 0x9e37_79b9_7f4a_7c15_u64;
    for word in block.as_chunks::<8>().0 {
        hash = (hash ^ u64::from_le_bytes(*word)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 29;
    }
    hash
}

/// The hash of a block's place and content.
#[must_use]
pub const fn mix(at: u64, hash: u64) -> u64 {
    let mixed = (hash ^ at.wrapping_mul(0xc4ce_b9fe_1a85_ec53)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}
