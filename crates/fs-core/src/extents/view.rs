//! Reading an extent tree.

use alloc::sync::Arc;
use core::ops::{ControlFlow, Range};

use crate::block::{Block, BlockKind, BlockNo, Ino, MetaBlocks};
use crate::error::FsError;
use crate::extents::node::{MAX_DEPTH, Node};
use crate::extents::{END, Extent};
use crate::format::inode::{DiskInode, I_BLOCK_BYTES, InodeFlags};
use crate::format::layout::Layout;

/// One node of a path.
#[derive(Clone, Copy, Default)]
pub(super) struct Level {
    /// Its block; `None` for the root.
    pub(super) at: Option<BlockNo>,
    /// Above the leaf: the entry of the next node of the path. In the leaf: the number of entries
    /// that begin at the block that was searched, or before.
    pub(super) index: usize,
}

/// The nodes from the root to a leaf.
#[derive(Clone, Copy)]
pub(super) struct Path {
    /// The first `depth + 1` are used.
    pub(super) levels: [Level; MAX_DEPTH + 1],
    /// The number of levels below the root.
    pub(super) depth: usize,
    /// The first logical block of the next leaf, or the end of the largest file.
    pub(super) high: u64,
}

impl Path {
    /// The leaf.
    pub(super) const fn leaf(&self) -> Level {
        self.levels[self.depth]
    }
}

/// The bytes of a node.
pub(super) enum Held<'a> {
    Root(&'a [u8; I_BLOCK_BYTES]),
    Block(Arc<Block>),
}

impl Held<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Held::Root(bytes) => &bytes[..],
            Held::Block(block) => &block[..],
        }
    }
}

/// An extent tree to read.
pub(super) struct View<'a> {
    ino: Ino,
    root: &'a [u8; I_BLOCK_BYTES],
    blocks: &'a dyn MetaBlocks,
    kind: BlockKind,
}

/// A leaf, and the path to it.
pub(super) struct Leaf<'a> {
    pub(super) path: Path,
    held: Held<'a>,
    ino: Ino,
    layout: &'a Layout,
}

impl<'a> View<'a> {
    pub(super) fn new(
        ino: Ino,
        disk: &'a DiskInode,
        blocks: &'a dyn MetaBlocks,
    ) -> Result<Self, FsError> {
        if !disk.flags.contains(InodeFlags::EXTENTS) {
            return Err(FsError::NotSupported);
        }
        // Most trees are only a root, which needs no seed.
        let is_root_only = disk.i_block[6..8] == [0, 0];
        let seed = if is_root_only { 0 } else { blocks.layout().inode_seed(ino, disk.generation) };
        let kind = BlockKind::ExtentNode(seed);
        Ok(Self { ino, root: &disk.i_block, blocks, kind })
    }

    /// The root. It is small, so all of it is checked each time.
    pub(super) fn root(&self) -> Result<Node<'a>, FsError> {
        let node = Node::parse(self.root).filter(|node| node.is_sound(self.blocks.layout()));
        node.ok_or_else(|| damaged(self.ino, None))
    }

    /// The bytes of a node of a path.
    pub(super) fn load(&self, level: Level) -> Result<Held<'a>, FsError> {
        Ok(match level.at {
            None => Held::Root(self.root),
            Some(at) => Held::Block(self.blocks.get(at, self.kind)?),
        })
    }

    /// The node of a path that has these bytes.
    pub(super) fn parse<'b>(&self, held: &'b Held<'_>, level: Level) -> Result<Node<'b>, FsError> {
        Node::parse(held.bytes()).ok_or_else(|| damaged(self.ino, level.at))
    }

    /// The child at entry `i` of `parent`, which exists.
    pub(super) fn child(
        &self,
        parent: &Node<'_>,
        i: usize,
    ) -> Result<(BlockNo, Arc<Block>), FsError> {
        let at = parent.child(i);
        if at.0 == 0 || !self.blocks.layout().contains(at) {
            return Err(damaged(self.ino, None));
        }
        let block = self.blocks.get(at, self.kind)?;
        let node = node_in(self.ino, at, &block)?;
        if node.depth() + 1 != parent.depth() || node.key(0) != parent.key(i) {
            return Err(damaged(self.ino, Some(at)));
        }
        Ok((at, block))
    }

    /// The leaf with the last extent that begins at `logical` or before; the first leaf if there is
    /// none.
    pub(super) fn descend(&self, logical: u32) -> Result<Leaf<'a>, FsError> {
        let mut path = Path { levels: Default::default(), depth: self.root()?.depth(), high: END };
        let mut held = Held::Root(self.root);
        for level in 0..=path.depth {
            let at = path.levels[level].at;
            let node = self.parse(&held, path.levels[level])?;
            let position = node.position(logical);
            let next = if level == path.depth { position } else { position.max(1) };
            if next < node.len() {
                let key = u64::from(node.key(next));
                if key >= path.high {
                    return Err(damaged(self.ino, at));
                }
                if level < path.depth {
                    path.high = key;
                }
            }
            if level == path.depth {
                path.levels[level].index = position;
                break;
            }
            let index = position.saturating_sub(1);
            let (child, block) = self.child(&node, index)?;
            path.levels[level].index = index;
            path.levels[level + 1].at = Some(child);
            held = Held::Block(block);
        }
        Ok(Leaf { path, held, ino: self.ino, layout: self.blocks.layout() })
    }

    /// Calls `each` with the extents of the range, in order.
    pub(super) fn for_each(
        &self,
        range: Range<u64>,
        each: &mut dyn FnMut(Extent) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, FsError> {
        let end = range.end.min(END);
        let mut next = range.start;
        while let Some(logical) = u32::try_from(next).ok().filter(|_| next < end) {
            let leaf = self.descend(logical)?;
            for i in leaf.position().saturating_sub(1)..leaf.len() {
                let extent = leaf.extent(i)?;
                if u64::from(extent.logical) >= end {
                    return Ok(ControlFlow::Continue(()));
                }
                if extent.end() <= next {
                    continue;
                }
                next = next.max(u64::from(extent.logical));
                let piece = extent.part(next, extent.end().min(end));
                if each(piece).is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                next = piece.end();
            }
            next = next.max(leaf.path.high);
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Calls `each` with the blocks of the nodes, parents first.
    pub(super) fn nodes(
        &self,
        each: &mut dyn FnMut(BlockNo) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, FsError> {
        self.nodes_below(&self.root()?, each)
    }

    /// The depth of the nodes falls by one with each call, so it ends.
    fn nodes_below(
        &self,
        node: &Node<'_>,
        each: &mut dyn FnMut(BlockNo) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, FsError> {
        if node.depth() == 0 {
            return Ok(ControlFlow::Continue(()));
        }
        for i in 0..node.len() {
            // Keys that rise, and that each child has too, make sure that no child comes twice.
            if i > 0 && node.key(i) <= node.key(i - 1) {
                return Err(damaged(self.ino, None));
            }
            let (at, block) = self.child(node, i)?;
            if each(at).is_break() {
                return Ok(ControlFlow::Break(()));
            }
            let child = node_in(self.ino, at, &block)?;
            if self.nodes_below(&child, each)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

impl Leaf<'_> {
    fn node(&self) -> Node<'_> {
        Node::parse(self.held.bytes()).expect("descend parsed it")
    }

    /// The number of extents in the leaf.
    pub(super) fn len(&self) -> usize {
        self.node().len()
    }

    /// The number of extents in the leaf that begin at the block that was searched, or before.
    pub(super) const fn position(&self) -> usize {
        self.path.leaf().index
    }

    /// Extent `i`, which exists: checked, also against the next one.
    pub(super) fn extent(&self, i: usize) -> Result<Extent, FsError> {
        let node = self.node();
        let extent = node.extent(i);
        let next = if i + 1 < node.len() { u64::from(node.key(i + 1)) } else { self.path.high };
        if !is_sound(self.layout, &extent, next) {
            return Err(self.damaged());
        }
        Ok(extent)
    }

    /// The extent before the position that was searched, or at it.
    pub(super) fn before(&self) -> Result<Option<Extent>, FsError> {
        self.position().checked_sub(1).map(|i| self.extent(i)).transpose()
    }

    /// The extent after the position that was searched, if it is in this leaf.
    pub(super) fn after(&self) -> Result<Option<Extent>, FsError> {
        (self.position() < self.len()).then(|| self.extent(self.position())).transpose()
    }

    /// The first logical block of the next extent, or the end of the largest file.
    pub(super) fn next(&self) -> u64 {
        let node = self.node();
        if self.position() < node.len() {
            u64::from(node.key(self.position()))
        } else {
            self.path.high
        }
    }

    /// The error of a damaged leaf.
    pub(super) fn damaged(&self) -> FsError {
        damaged(self.ino, self.path.leaf().at)
    }
}

/// The error of a damaged node: in block `at`, or the root.
pub(super) const fn damaged(ino: Ino, at: Option<BlockNo>) -> FsError {
    match at {
        Some(block) => FsError::DamagedBlock { what: "extent node", block },
        None => FsError::DamagedInode { what: "extent tree", ino },
    }
}

/// The node in block `at`.
pub(super) fn node_in(ino: Ino, at: BlockNo, block: &Block) -> Result<Node<'_>, FsError> {
    Node::parse(&block[..]).ok_or_else(|| damaged(ino, Some(at)))
}

/// Whether an extent lies in the file system, and ends before `next` in the file.
pub(super) fn is_sound(layout: &Layout, extent: &Extent, next: u64) -> bool {
    extent.len > 0
        && extent.end() <= next
        && extent.physical.0 > 0
        && extent.physical.0 + u64::from(extent.len) <= layout.blocks
}
