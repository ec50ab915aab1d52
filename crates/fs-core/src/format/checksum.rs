//! The checksums of metadata blocks.

use crate::block::{BLOCK_BYTES, Block, BlockKind, BlockNo};
use crate::error::FsError;
use crate::format::bytes::{set_u16, set_u32, u16_at, u32_at};
use crate::format::layout::Layout;
use crate::format::orphan_file::{CHECKSUM_AT as ORPHAN_CHECKSUM, ORPHANS_PER_BLOCK};

/// The bytes at the end of a block of directory entries that have the form of an unused entry, and
/// have the checksum: inode 0, length 12, no name, type 0xde, checksum.
pub const DIR_TAIL_BYTES: usize = 12;

/// The type in the entry at the end of a block of directory entries.
pub const DIR_TAIL_TYPE: u8 = 0xde;

/// Checks the checksum of a metadata block that was read. Only facts that the checksum needs are
/// checked; those that read the block check the others. Without `metadata_csum`, everything passes.
///
/// # Errors
/// [`FsError::DamagedBlock`].
pub fn verify(layout: &Layout, at: BlockNo, kind: BlockKind, block: &Block) -> Result<(), FsError> {
    let Some(seed) = layout.csum_seed else { return Ok(()) };
    let (what, good) = match kind {
        BlockKind::ExtentNode(seed) => (
            "extent node",
            extent_tail(block)
                .is_some_and(|tail| u32_at(block, tail) == layout.crc(seed, &block[..tail])),
        ),
        BlockKind::DirLeaf(seed) => (
            "directory",
            has_dir_tail(block)
                && u32_at(block, BLOCK_BYTES - 4) == dir_leaf_checksum(layout, seed, block),
        ),
        BlockKind::DirIndex(seed) => (
            "directory index",
            dir_index_tail(block).is_some_and(|(entries, tail)| {
                u32_at(block, tail + 4) == dir_index_checksum(layout, seed, block, entries, tail)
            }),
        ),
        BlockKind::Xattr => {
            ("attributes", u32_at(block, XATTR_CHECKSUM) == xattr_checksum(layout, seed, at, block))
        }
        BlockKind::OrphanFile(seed) => (
            "orphan file",
            u32_at(block, ORPHAN_CHECKSUM) == orphan_checksum(layout, seed, at, block),
        ),
        BlockKind::Plain => return Ok(()),
    };
    if good { Ok(()) } else { Err(FsError::DamagedBlock { what, block: at }) }
}

/// Sets the checksum of a metadata block that is about to be written. A block of directory entries
/// gets the whole entry at its end. A block that lacks the space of its checksum stays unchanged;
/// [`verify`] refuses it later.
pub fn seal(layout: &Layout, at: BlockNo, kind: BlockKind, block: &mut Block) {
    let Some(seed) = layout.csum_seed else { return };
    match kind {
        BlockKind::ExtentNode(seed) => {
            if let Some(tail) = extent_tail(block) {
                let checksum = layout.crc(seed, &block[..tail]);
                set_u32(block, tail, checksum);
            }
        }
        BlockKind::DirLeaf(seed) => {
            let tail = BLOCK_BYTES - DIR_TAIL_BYTES;
            set_u32(block, tail, 0);
            set_u16(block, tail + 4, DIR_TAIL_BYTES as u16);
            block[tail + 6] = 0;
            block[tail + 7] = DIR_TAIL_TYPE;
            let checksum = dir_leaf_checksum(layout, seed, block);
            set_u32(block, tail + 8, checksum);
        }
        BlockKind::DirIndex(seed) => {
            if let Some((entries, tail)) = dir_index_tail(block) {
                let checksum = dir_index_checksum(layout, seed, block, entries, tail);
                set_u32(block, tail + 4, checksum);
            }
        }
        BlockKind::Xattr => {
            let checksum = xattr_checksum(layout, seed, at, block);
            set_u32(block, XATTR_CHECKSUM, checksum);
        }
        BlockKind::OrphanFile(seed) => {
            let checksum = orphan_checksum(layout, seed, at, block);
            set_u32(block, ORPHAN_CHECKSUM, checksum);
        }
        BlockKind::Plain => {}
    }
}

/// The offset of the checksum of an extent node: after the last entry that has space. `None` if the
/// number of entries is larger than fits.
fn extent_tail(block: &Block) -> Option<usize> {
    let tail = 12 + 12 * usize::from(u16_at(block, 4));
    (tail + 4 <= BLOCK_BYTES).then_some(tail)
}

/// Whether a block of directory entries ends with the entry for the checksum.
fn has_dir_tail(block: &Block) -> bool {
    let tail = BLOCK_BYTES - DIR_TAIL_BYTES;
    u32_at(block, tail) == 0
        && usize::from(u16_at(block, tail + 4)) == DIR_TAIL_BYTES
        && block[tail + 6] == 0
        && block[tail + 7] == DIR_TAIL_TYPE
}

fn dir_leaf_checksum(layout: &Layout, seed: u32, block: &Block) -> u32 {
    layout.crc(seed, &block[..BLOCK_BYTES - DIR_TAIL_BYTES])
}

/// The end of the used entries of a block of a hash tree, and the offset of the 8 bytes that have
/// its checksum: after the last entry that has space. `None` if the block is neither a root nor an
/// inner node, or has more entries than fit.
fn dir_index_tail(block: &Block) -> Option<(usize, usize)> {
    // An inner node begins with an unused entry of the whole block, and the root with "." and "..".
    let entries = match usize::from(u16_at(block, 4)) {
        BLOCK_BYTES => 8,
        12 if usize::from(u16_at(block, 16)) == BLOCK_BYTES - 12 && block[0x1d] == 8 => 0x20,
        _ => return None,
    };
    let limit = usize::from(u16_at(block, entries));
    let count = usize::from(u16_at(block, entries + 2));
    let tail = entries + 8 * limit;
    (count <= limit && tail + 8 <= BLOCK_BYTES).then_some((entries + 8 * count, tail))
}

fn dir_index_checksum(
    layout: &Layout,
    seed: u32,
    block: &Block,
    entries: usize,
    tail: usize,
) -> u32 {
    let seed = layout.crc(seed, &block[..entries]);
    let seed = layout.crc(seed, &block[tail..tail + 4]);
    layout.crc(seed, &[0; 4])
}

/// The offset of the checksum in a block of attributes.
const XATTR_CHECKSUM: usize = 16;

fn xattr_checksum(layout: &Layout, seed: u32, at: BlockNo, block: &Block) -> u32 {
    let seed = layout.crc(seed, &at.0.to_le_bytes());
    let seed = layout.crc(seed, &block[..XATTR_CHECKSUM]);
    let seed = layout.crc(seed, &[0; 4]);
    layout.crc(seed, &block[XATTR_CHECKSUM + 4..])
}

/// The checksum of a block of the orphan file covers its number and its orphans.
fn orphan_checksum(layout: &Layout, seed: u32, at: BlockNo, block: &Block) -> u32 {
    let seed = layout.crc(seed, &at.0.to_le_bytes());
    layout.crc(seed, &block[..4 * ORPHANS_PER_BLOCK])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::layout;
    use proptest::prelude::*;

    fn block_of(fill: &[(usize, &[u8])]) -> Block {
        let mut block = [0; BLOCK_BYTES];
        for (at, bytes) in fill {
            block[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
        block
    }

    fn samples() -> [(BlockKind, Block); 7] {
        [
            (BlockKind::ExtentNode(7), block_of(&[(0, &[0x0a, 0xf3, 0, 0, 84, 1])])),
            (BlockKind::DirLeaf(7), block_of(&[(0, &[0, 0, 0, 0, 0xf4, 0x0f])])),
            (
                BlockKind::DirIndex(7),
                block_of(&[
                    (4, &[12, 0, 1, 2, b'.']),
                    (16, &[0xf4, 0x0f, 2, 2, b'.', b'.']),
                    (0x1d, &[8]),
                    (0x20, &[0xfb, 1, 1, 0]),
                ]),
            ),
            (BlockKind::DirIndex(7), block_of(&[(4, &[0, 16]), (8, &[0xfe, 1, 1, 0])])),
            (BlockKind::Xattr, block_of(&[(0, &[0, 0, 2, 0xea])])),
            (BlockKind::OrphanFile(7), block_of(&[(0, &[12])])),
            (BlockKind::Plain, [3; BLOCK_BYTES]),
        ]
    }

    #[test]
    fn a_sealed_block_passes_and_a_changed_one_does_not() {
        let layout = layout();
        for (kind, mut block) in samples() {
            seal(&layout, BlockNo(9), kind, &mut block);
            verify(&layout, BlockNo(9), kind, &block).expect("sealed");
            block[1] ^= 1;
            assert_eq!(
                verify(&layout, BlockNo(9), kind, &block).is_err(),
                kind != BlockKind::Plain,
                "{kind:?}"
            );
        }
    }

    #[test]
    fn without_metadata_csum_nothing_is_checked_or_changed() {
        let layout = Layout { csum_seed: None, ..layout() };
        for (kind, block) in samples() {
            let mut sealed = block;
            seal(&layout, BlockNo(9), kind, &mut sealed);
            assert_eq!(sealed, block);
            verify(&layout, BlockNo(9), kind, &block).expect("no checksum");
        }
    }

    proptest! {
        #[test]
        fn no_content_panics(
            fill in proptest::collection::vec((0usize..64, any::<u8>()), 0..40),
            base in prop_oneof![Just(0u8), Just(0xff), any::<u8>()],
            sample in 0usize..7,
        ) {
            let layout = layout();
            let (kind, mut block) = samples()[sample];
            if base != 0 {
                block = [base; BLOCK_BYTES];
            }
            for (at, byte) in fill {
                block[at] = byte;
            }
            let _ = verify(&layout, BlockNo(9), kind, &block);
            seal(&layout, BlockNo(9), kind, &mut block);
        }
    }
}
