//! The index blocks of a hash tree.
//!
//! The root is block 0 of the directory. To a reader that knows no hash trees it is a block of
//! entries: `.`, and a `..` that is as long as the rest of the block. Its index begins at byte 32. A node
//! below the root is one unused entry for such a reader; its index begins at byte 8.
//!
//! An index is a list of pairs (hash, block), ordered by hash. The block has the names from this
//! hash on, up to the next pair. The first pair has no hash, but two numbers of 16 bits in its place:
//! how many pairs there may be and how many there are. The lowest bit of a hash is set if the block
//! before has names with the same hash. With checksums, the last 8 bytes have the checksum.

use alloc::sync::Arc;

use super::hash::Hasher;
use super::view::View;
use crate::block::{BLOCK_BYTES, Block, BlockNo, Ino};
use crate::error::FsError;
use crate::format::bytes::{set_u16, set_u32, u16_at, u32_at};

/// The bytes of a pair.
const PAIR: usize = 8;
/// The bytes for the checksum.
const TAIL: usize = 8;
/// The beginning of the index of the root.
const ROOT_BASE: usize = 32;
/// The beginning of the index of a node below the root.
const NODE_BASE: usize = 8;
/// The description of the tree in the root.
const INFO: usize = 24;
/// The length of the description.
const INFO_BYTES: u8 = 8;
/// The bits of a pair that number a block.
const BLOCK_MASK: u32 = 0x0fff_ffff;

/// The index of a block, to be read.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) at: BlockNo,
    block: Arc<Block>,
    base: usize,
    /// The number of pairs, at least 1.
    pub(super) count: usize,
    limit: usize,
}

/// The root of a hash tree.
pub(super) struct Root {
    pub(super) hasher: Hasher,
    /// Whether there are nodes between the root and the leaves.
    pub(super) has_nodes: bool,
    pub(super) parent: Ino,
    pub(super) index: Node,
}

/// How many pairs fit in an index that begins at `base`.
const fn limit(checksums: bool, base: usize) -> usize {
    let tail = if checksums { TAIL } else { 0 };
    (BLOCK_BYTES - base - tail) / PAIR
}

const fn damaged(at: BlockNo) -> FsError {
    FsError::DamagedBlock { what: "index of a directory", block: at }
}

impl Root {
    pub(super) fn decode(view: &View<'_>, at: BlockNo, block: Arc<Block>) -> Result<Self, FsError> {
        let parent = u32_at(&block[..], 12);
        let dot = u32_at(&block[..], 0) != 0 && block[4..8] == [12, 0, 1, 2] && block[8] == b'.';
        let dots = parent != 0
            && parent <= view.blocks.layout().inodes
            && usize::from(u16_at(&block[..], 16)) == BLOCK_BYTES - 12
            && block[18..22] == [2, 2, b'.', b'.'];
        let levels = block[INFO + 6];
        let info = u32_at(&block[..], INFO) == 0
            && block[INFO + 5] == INFO_BYTES
            && block[INFO + 7] & 1 == 0;
        if !dot || !dots || !info || levels > 1 {
            return Err(damaged(at));
        }
        let hasher = Hasher::of_root(view.blocks.layout(), view.ino, block[INFO + 4])?;
        let index = Node::with_base(view, at, block, ROOT_BASE)?;
        Ok(Self { hasher, has_nodes: levels == 1, parent: Ino(parent), index })
    }
}

impl Node {
    pub(super) fn decode(view: &View<'_>, at: BlockNo, block: Arc<Block>) -> Result<Self, FsError> {
        if u32_at(&block[..], 0) != 0 || usize::from(u16_at(&block[..], 4)) != BLOCK_BYTES {
            return Err(damaged(at));
        }
        Self::with_base(view, at, block, NODE_BASE)
    }

    fn with_base(
        view: &View<'_>,
        at: BlockNo,
        block: Arc<Block>,
        base: usize,
    ) -> Result<Self, FsError> {
        let limit = limit(view.blocks.layout().csum_seed.is_some(), base);
        let count = usize::from(u16_at(&block[..], base + 2));
        if usize::from(u16_at(&block[..], base)) != limit || count == 0 || count > limit {
            return Err(damaged(at));
        }
        Ok(Self { at, block, base, count, limit })
    }

    pub(super) const fn is_full(&self) -> bool {
        self.count == self.limit
    }

    pub(super) const fn damaged(&self) -> FsError {
        damaged(self.at)
    }

    /// The hash of pair `slot`, from 1 on, below [`count`](Self::count).
    pub(super) fn hash(&self, slot: usize) -> u32 {
        debug_assert!(0 < slot && slot < self.count);
        u32_at(&self.block[..], self.base + slot * PAIR)
    }

    /// The hash of the pair after `slot`, if there is one.
    pub(super) fn hash_after(&self, slot: usize) -> Option<u32> {
        (slot + 1 < self.count).then(|| self.hash(slot + 1))
    }

    /// The block of pair `slot`, which is below [`count`](Self::count). It is never block 0.
    pub(super) fn child(&self, slot: usize) -> Result<u32, FsError> {
        debug_assert!(slot < self.count);
        let child = u32_at(&self.block[..], self.base + slot * PAIR + 4) & BLOCK_MASK;
        if child == 0 { Err(self.damaged()) } else { Ok(child) }
    }

    /// The last pair whose hash is not above `hash`.
    pub(super) fn search(&self, hash: u32) -> usize {
        let (mut low, mut high) = (1, self.count);
        while low < high {
            let middle = (low + high) / 2;
            if self.hash(middle) <= hash {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low - 1
    }
}

/// Fills a block with the root of a tree that has one leaf, block `leaf` of the directory.
pub(super) fn create_root(
    checksums: bool,
    block: &mut Block,
    hasher: &Hasher,
    [dot, parent]: [Ino; 2],
    leaf: u32,
) {
    block.fill(0);
    set_u32(block, 0, dot.0);
    block[4..9].copy_from_slice(&[12, 0, 1, 2, b'.']);
    set_u32(block, 12, parent.0);
    set_u16(block, 16, (BLOCK_BYTES - 12) as u16);
    block[18..22].copy_from_slice(&[2, 2, b'.', b'.']);
    block[INFO + 4] = hasher.function as u8;
    block[INFO + 5] = INFO_BYTES;
    set_u16(block, ROOT_BASE, limit(checksums, ROOT_BASE) as u16);
    set_u16(block, ROOT_BASE + 2, 1);
    set_u32(block, ROOT_BASE + 4, leaf);
}

/// Fills a block with a node that has the pairs of `from` from `first` on.
pub(super) fn create_node(checksums: bool, block: &mut Block, from: &Node, first: usize) {
    block.fill(0);
    set_u16(block, 4, BLOCK_BYTES as u16);
    // A root has fewer pairs than a node, so all of them fit.
    let pairs = &from.block[from.base + first * PAIR..from.base + from.count * PAIR];
    block[NODE_BASE..NODE_BASE + pairs.len()].copy_from_slice(pairs);
    set_u16(block, NODE_BASE, limit(checksums, NODE_BASE) as u16);
    set_u16(block, NODE_BASE + 2, (from.count - first) as u16);
}

/// Makes `child` the only block of the root, one level below it.
pub(super) fn set_single_node(block: &mut Block, child: u32) {
    block[INFO + 6] = 1;
    block[ROOT_BASE + 4..].fill(0);
    set_u16(block, ROOT_BASE + 2, 1);
    set_u32(block, ROOT_BASE + 4, child);
}

/// Removes the pairs of `node` from `count` on.
pub(super) fn truncate(block: &mut Block, node: &Node, count: usize) {
    block[node.base + count * PAIR..node.base + node.count * PAIR].fill(0);
    set_u16(block, node.base + 2, count as u16);
}

/// Adds a pair after pair `slot` of `node`, which is not full.
pub(super) fn insert(block: &mut Block, node: &Node, slot: usize, hash: u32, child: u32) {
    let at = node.base + (slot + 1) * PAIR;
    let end = node.base + node.count * PAIR;
    block.copy_within(at..end, at + PAIR);
    set_u32(block, at, hash);
    set_u32(block, at + 4, child);
    set_u16(block, node.base + 2, (node.count + 1) as u16);
}
