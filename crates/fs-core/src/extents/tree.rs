//! Changing the entries of an extent tree: splitting nodes, growing and shrinking the tree.

use alloc::vec::Vec;

use crate::block::{BlockKind, BlockNo, MetaBlocks};
use crate::error::FsError;
use crate::extents::Extent;
use crate::extents::node::{self, MAX_DEPTH, Node, NodeMut, ROOT_MAX, Raw};
use crate::extents::view::{Leaf, Level, Path, View, damaged, node_in};
use crate::open_inode::OpenInode;

/// The 512-byte sectors of a block, as an inode counts them.
pub(super) const SECTORS: u64 = 8;

/// An extent tree to change.
pub(super) struct Tree<'t, 'i> {
    pub(super) inode: &'t mut OpenInode<'i>,
    pub(super) blocks: &'t mut (dyn MetaBlocks + 't),
}

impl<'t, 'i> Tree<'t, 'i> {
    /// The tree to read.
    pub(super) fn view(&self) -> Result<View<'_>, FsError> {
        View::new(self.inode.ino, self.inode.disk, &*self.blocks)
    }

    /// The leaf for `logical`. It must be dropped before the leaf is edited, or the edit copies it.
    pub(super) fn descend(&self, logical: u32) -> Result<Leaf<'_>, FsError> {
        self.view()?.descend(logical)
    }

    fn kind(&self) -> BlockKind {
        BlockKind::ExtentNode(self.inode.seed(self.blocks.layout()))
    }

    fn edit(&mut self, level: Level) -> Result<NodeMut<'_>, FsError> {
        let ino = self.inode.ino;
        let bytes = match level.at {
            None => &mut self.inode.disk.i_block[..],
            Some(at) => {
                let kind = self.kind();
                &mut self.blocks.edit(at, kind)?[..]
            }
        };
        NodeMut::parse(bytes).ok_or_else(|| damaged(ino, level.at))
    }

    fn root(&mut self) -> Result<NodeMut<'_>, FsError> {
        self.edit(Level::default())
    }

    /// Allocates a block for a node.
    fn allocate(&mut self, goal: BlockNo, depth: usize) -> Result<BlockNo, FsError> {
        let at = self.blocks.allocate(goal)?;
        let kind = self.kind();
        NodeMut::init(&mut self.blocks.create(at, kind)?[..], depth);
        self.charge(1)?;
        Ok(at)
    }

    /// Adds the sectors of blocks to the inode.
    pub(super) fn charge(&mut self, blocks: u32) -> Result<(), FsError> {
        let sectors = self.inode.disk.sectors.saturating_add(SECTORS * u64::from(blocks));
        if sectors > self.blocks.layout().max_sectors() {
            return Err(FsError::FileTooLarge);
        }
        self.inode.disk.sectors = sectors;
        Ok(())
    }

    fn free(&mut self, at: BlockNo) {
        self.blocks.free_meta(at);
        self.inode.disk.sectors = self.inode.disk.sectors.saturating_sub(SECTORS);
    }

    /// Replaces the extents from `from` on, up to `to`, of the leaf of `path`. The new ones lie in
    /// the same range of the file, between the extents before and after.
    pub(super) fn splice(
        &mut self,
        path: &Path,
        from: usize,
        to: usize,
        new: &[Extent],
    ) -> Result<(), FsError> {
        let mut leaf = self.edit(path.leaf())?;
        let kept = leaf.len() - (to - from);
        if kept == 0 && new.is_empty() && path.depth > 0 {
            self.remove_node(path)?;
            return self.collapse();
        }
        // Those that fit go in place. Each of the others splits the leaf, or finds it split.
        let now = new.len().min(leaf.max() - kept);
        let mut raw = [[0; 12]; 5];
        for (raw, extent) in raw.iter_mut().zip(&new[..now]) {
            *raw = node::encode(extent);
        }
        let old_key = (leaf.len() > 0).then(|| leaf.read().key(0));
        leaf.splice(from, to, &raw[..now]);
        let key = (leaf.len() > 0).then(|| leaf.read().key(0));
        if let Some(key) = key.filter(|_| key != old_key) {
            self.set_keys(path, path.depth, key)?;
        }
        for extent in &new[now..] {
            self.add(extent)?;
        }
        if new.len() < to - from {
            self.join_nodes(path)?;
            self.collapse()?;
        }
        Ok(())
    }

    /// Adds an extent.
    fn add(&mut self, extent: &Extent) -> Result<(), FsError> {
        let mut path = self.descend(extent.logical)?.path;
        let mut raw = node::encode(extent);
        let mut goal = extent.physical;
        let mut level = path.depth;
        let mut position = path.leaf().index;
        loop {
            let mut node = self.edit(path.levels[level])?;
            if node.len() < node.max() {
                node.splice(position, position, &[raw]);
                return match position {
                    0 => self.set_keys(&path, level, node::key_of(&raw)),
                    _ => Ok(()),
                };
            }
            let Some(at) = path.levels[level].at else {
                self.grow(&mut path, goal)?;
                level += 1;
                continue;
            };
            let right = self.split(at, position, &raw, goal)?;
            if position == 0 {
                self.set_keys(&path, level, node::key_of(&raw))?;
            }
            // The node is not the root, so there is a level above.
            level -= 1;
            position = path.levels[level].index + 1;
            (raw, goal) = right;
        }
    }

    /// Moves the upper entries of a full node to a new one, and adds `raw` at `position`. Returns
    /// the entry for the parent, and the new block.
    fn split(
        &mut self,
        at: BlockNo,
        position: usize,
        raw: &Raw,
        goal: BlockNo,
    ) -> Result<(Raw, BlockNo), FsError> {
        let kind = self.kind();
        let old = self.blocks.get(at, kind)?;
        let node = node_in(self.inode.ino, at, &old)?;
        // A file that grows at its end leaves full nodes behind.
        let middle = if position == node.len() { position } else { node.len() / 2 };
        let right = self.allocate(goal, node.depth())?;
        let mut new = self.edit(Level { at: Some(right), index: 0 })?;
        new.append(node.entries(middle));
        drop(old);
        if position > middle || position == middle && new.len() == 0 {
            new.splice(position - middle, position - middle, &[*raw]);
        }
        let key = new.read().key(0);
        let mut left = self.edit(Level { at: Some(at), index: 0 })?;
        let had = left.len();
        left.truncate(middle);
        if position < middle || position == middle && middle < had {
            left.splice(position, position, &[*raw]);
        }
        Ok((node::encode_child(key, right), right))
    }

    /// Moves the entries of the root to a new node below it.
    fn grow(&mut self, path: &mut Path, goal: BlockNo) -> Result<(), FsError> {
        if path.depth == MAX_DEPTH {
            return Err(damaged(self.inode.ino, None));
        }
        let root = self.inode.disk.i_block;
        let node = Node::parse(&root).ok_or_else(|| damaged(self.inode.ino, None))?;
        let child = self.allocate(goal, node.depth())?;
        self.edit(Level { at: Some(child), index: 0 })?.append(node.entries(0));
        let mut new = NodeMut::init(&mut self.inode.disk.i_block, node.depth() + 1);
        // The root is full, so it has a first entry.
        new.append(&node::encode_child(node.key(0), child));
        path.levels.copy_within(0..=path.depth, 1);
        path.levels[0].index = 0;
        path.levels[1].at = Some(child);
        path.depth += 1;
        Ok(())
    }

    /// Sets the keys of the nodes above `level` on a path, whose first entry now begins at `key`.
    fn set_keys(&mut self, path: &Path, level: usize, key: u32) -> Result<(), FsError> {
        for above in path.levels[..level].iter().rev() {
            let mut node = self.edit(*above)?;
            if above.index >= node.len() {
                return Err(damaged(self.inode.ino, above.at));
            }
            node.set_key(above.index, key);
            if above.index > 0 {
                break;
            }
        }
        Ok(())
    }

    /// Frees the leaf of a path, whose entries are no longer used, and the nodes above that are then
    /// empty.
    fn remove_node(&mut self, path: &Path) -> Result<(), FsError> {
        for level in (0..=path.depth).rev() {
            let Level { at, index } = path.levels[level];
            if level < path.depth {
                let mut node = self.edit(path.levels[level])?;
                if index >= node.len() {
                    return Err(damaged(self.inode.ino, at));
                }
                if node.len() > 1 {
                    node.splice(index, index + 1, &[]);
                    let key = node.read().key(0);
                    return if index == 0 { self.set_keys(path, level, key) } else { Ok(()) };
                }
            }
            match at {
                Some(at) => self.free(at),
                None => _ = NodeMut::init(&mut self.inode.disk.i_block, 0),
            }
        }
        Ok(())
    }

    /// Joins the leaf of a path, which lost entries, with the one after or before it in their parent
    /// if both are rather empty, and so the nodes above.
    fn join_nodes(&mut self, path: &Path) -> Result<(), FsError> {
        for level in (1..=path.depth).rev() {
            let (node, parent) = (path.levels[level], path.levels[level - 1]);
            let after = self.join_pair(node, parent, parent.index)?;
            // The node is then gone, and the levels above still lead to its parent.
            let before =
                !after && parent.index > 0 && self.join_pair(node, parent, parent.index - 1)?;
            if !after && !before {
                break;
            }
        }
        Ok(())
    }

    /// Joins the children at entry `left` of `parent` and at the next one, of which one is `node`.
    /// Returns whether it did.
    fn join_pair(&mut self, node: Level, parent: Level, left: usize) -> Result<bool, FsError> {
        let view = self.view()?;
        let (held, held_parent) = (view.load(node)?, view.load(parent)?);
        let (here, above) = (view.parse(&held, node)?, view.parse(&held_parent, parent)?);
        if left + 1 >= above.len() || here.len() > here.max() / 2 {
            return Ok(false);
        }
        let ((left_at, left_block), (right_at, right_block)) =
            (view.child(&above, left)?, view.child(&above, left + 1)?);
        let first = node_in(self.inode.ino, left_at, &left_block)?;
        let second = node_in(self.inode.ino, right_at, &right_block)?;
        // Some space is left, so that the next entry does not split the node again.
        if first.len() + second.len() > first.max() * 3 / 4 {
            return Ok(false);
        }
        drop((held, held_parent, left_block));
        self.edit(Level { at: Some(left_at), index: 0 })?.append(second.entries(0));
        self.edit(parent)?.splice(left + 1, left + 2, &[]);
        drop(right_block);
        self.free(right_at);
        Ok(true)
    }

    /// Makes the tree lower while all entries of the root's only child fit in the root.
    fn collapse(&mut self) -> Result<(), FsError> {
        loop {
            let root = self.root()?;
            if root.len() != 1 || root.read().depth() == 0 {
                return Ok(());
            }
            let (at, child) = {
                let view = self.view()?;
                view.child(&view.root()?, 0)?
            };
            let node = node_in(self.inode.ino, at, &child)?;
            if node.len() > ROOT_MAX {
                return Ok(());
            }
            NodeMut::init(&mut self.inode.disk.i_block, node.depth()).append(node.entries(0));
            self.free(at);
        }
    }

    /// Adds `by` to the keys of all entries from block `from` on.
    pub(super) fn shift_keys(&mut self, from: u32, by: i64) -> Result<(), FsError> {
        self.shift_below(Level::default(), from, by)
    }

    /// Adds `by` to the keys of a node and of those below it. The depth of the nodes
    /// falls by one with each call, so it ends.
    fn shift_below(&mut self, level: Level, from: u32, by: i64) -> Result<(), FsError> {
        let ino = self.inode.ino;
        let mut node = self.edit(level)?;
        let depth = node.read().depth();
        let moved = from.checked_sub(1).map_or(0, |before| node.read().position(before));
        for i in moved..node.len() {
            let key = u32::try_from(i64::from(node.read().key(i)) + by);
            node.set_key(i, key.map_err(|_| damaged(ino, level.at))?);
        }
        if depth > 0 {
            // The child before may have entries that move, too.
            let children: Vec<_> =
                (moved.saturating_sub(1)..node.len()).map(|i| node.read().child(i)).collect();
            for at in children {
                if at.0 == 0 || !self.blocks.layout().contains(at) {
                    return Err(damaged(ino, level.at));
                }
                if self.child_depth(at)? + 1 != depth {
                    return Err(damaged(ino, Some(at)));
                }
                self.shift_below(Level { at: Some(at), index: 0 }, from, by)?;
            }
        }
        Ok(())
    }

    fn child_depth(&self, at: BlockNo) -> Result<usize, FsError> {
        let block = self.blocks.get(at, self.kind())?;
        let node = node_in(self.inode.ino, at, &block)?;
        Ok(node.depth())
    }
}
