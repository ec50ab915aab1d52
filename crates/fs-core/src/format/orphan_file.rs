//! Orphans on the drive: inodes that a crash must not forget. They have no name any more but were
//! still open, or a truncate of them was not finished.
//!
//! An image has them in one of two forms, or in both. The list begins in the superblock
//! (`s_last_orphan`), and each inode has the next one in `i_dtime`. The orphan file (the feature
//! `orphan_file`) has the numbers in its blocks, with zeroes between them; the feature
//! `orphan_present` is set while it may have any.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::block::{BLOCK_BYTES, Block, BlockNo, Ino};
use crate::error::FsError;
use crate::format::bytes::{set_u32, u32_at};
use crate::format::layout::Layout;

/// The orphans for which a block of the orphan file has space.
pub const ORPHANS_PER_BLOCK: usize = (BLOCK_BYTES - TAIL_BYTES) / 4;

/// The end of a block: magic number and checksum.
const TAIL_BYTES: usize = 8;
const MAGIC: u32 = 0x0b10_ca04;
const MAGIC_AT: usize = BLOCK_BYTES - TAIL_BYTES;
pub(super) const CHECKSUM_AT: usize = BLOCK_BYTES - 4;

/// The inodes in a block of the orphan file, which was verified as a
/// [`BlockKind::OrphanFile`](crate::block::BlockKind::OrphanFile).
///
/// # Errors
/// [`FsError::DamagedBlock`]: the magic number is missing, or a number is not one of an inode for
/// files.
pub fn orphans(layout: &Layout, at: BlockNo, block: &Block) -> Result<Vec<Ino>, FsError> {
    let damaged = || FsError::DamagedBlock { what: "orphan file", block: at };
    if u32_at(block, MAGIC_AT) != MAGIC {
        return Err(damaged());
    }
    let numbers = (0..ORPHANS_PER_BLOCK).map(|n| u32_at(block, 4 * n)).filter(|ino| *ino != 0);
    numbers.map(|ino| check(layout, Ino(ino)).ok_or_else(damaged)).collect()
}

/// Fills a block of the orphan file: with orphans, as many as it has space for, and zeroes. Its
/// checksum is not set. Returns the orphans for which there is no space.
pub fn fill<'a>(block: &mut Block, orphans: &'a [Ino]) -> &'a [Ino] {
    let (here, rest) = orphans.split_at(orphans.len().min(ORPHANS_PER_BLOCK));
    block.fill(0);
    for (n, ino) in here.iter().enumerate() {
        set_u32(block, 4 * n, ino.0);
    }
    set_u32(block, MAGIC_AT, MAGIC);
    rest
}

/// The inodes of the list that begins with `first`, which is 0 if it is empty. `next` returns the
/// inode after one, its `i_dtime`.
///
/// # Errors
/// `next` fails; or [`FsError::DamagedInode`]: a number is not one of an inode for files, or comes
/// twice.
pub fn walk_list(
    layout: &Layout,
    first: Ino,
    mut next: impl FnMut(Ino) -> Result<Ino, FsError>,
) -> Result<Vec<Ino>, FsError> {
    let mut list = Vec::new();
    let mut seen = BTreeSet::new();
    let mut at = first;
    while at != Ino(0) {
        if check(layout, at).is_none() || !seen.insert(at) {
            return Err(FsError::DamagedInode { what: "place in the orphan list", ino: at });
        }
        list.push(at);
        at = next(at)?;
    }
    Ok(list)
}

/// The inode, if it is one for files.
fn check(layout: &Layout, ino: Ino) -> Option<Ino> {
    (ino >= layout.first_ino && ino.0 <= layout.inodes).then_some(ino)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockKind;
    use crate::format::checksum::{seal, verify};
    use crate::testing::layout;

    #[test]
    fn a_block_keeps_its_orphans() {
        let layout = layout();
        let (at, kind) = (BlockNo(77), BlockKind::OrphanFile(5));
        let all: Vec<Ino> = (20..20 + ORPHANS_PER_BLOCK as u32 + 3).map(Ino).collect();
        let mut block = [0xaa; BLOCK_BYTES];
        assert_eq!(fill(&mut block, &all), &all[ORPHANS_PER_BLOCK..]);
        seal(&layout, at, kind, &mut block);
        verify(&layout, at, kind, &block).expect("sealed");
        assert_eq!(orphans(&layout, at, &block), Ok(all[..ORPHANS_PER_BLOCK].to_vec()));
        assert!(fill(&mut block, &all[..2]).is_empty());
        verify(&layout, at, kind, &block).expect_err("not sealed");
        assert_eq!(orphans(&layout, at, &block), Ok(all[..2].to_vec()));
    }

    #[test]
    fn damage_is_found() {
        let layout = layout();
        let damaged = Err(FsError::DamagedBlock { what: "orphan file", block: BlockNo(7) });
        let mut block = [0; BLOCK_BYTES];
        assert_eq!(orphans(&layout, BlockNo(7), &block), damaged);
        for ino in [3, layout.inodes + 1] {
            fill(&mut block, &[Ino(ino)]);
            assert_eq!(orphans(&layout, BlockNo(7), &block), damaged);
        }
    }

    #[test]
    fn a_list_is_walked_to_its_end_and_a_circle_is_refused() {
        let layout = layout();
        let walk = |next: &[(u32, u32)]| {
            walk_list(&layout, Ino(next[0].0), |ino| {
                let at = next.iter().find(|pair| pair.0 == ino.0);
                Ok(Ino(at.ok_or(FsError::Stale(ino))?.1))
            })
        };
        assert_eq!(walk(&[(0, 0)]), Ok(Vec::new()));
        assert_eq!(walk(&[(20, 30), (30, 0)]), Ok([Ino(20), Ino(30)].to_vec()));
        assert_eq!(walk(&[(20, 31)]), Err(FsError::Stale(Ino(31))));
        let damaged = |ino| Err(FsError::DamagedInode { what: "place in the orphan list", ino });
        assert_eq!(walk(&[(20, 30), (30, 20)]), damaged(Ino(20)));
        assert_eq!(walk(&[(20, 2)]), damaged(Ino(2)));
    }
}
