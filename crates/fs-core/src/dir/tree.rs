//! Directories with a hash tree.

use alloc::vec::Vec;

use super::hash::Hasher;
use super::index::{self, Node, Root};
use super::leaf::{self, Builder, Leaf, Slot};
use super::view::{self, LeafBlock, View};
use super::{Entry, FoundAt, is_dot};
use crate::block::{BLOCK_BYTES, Block, BlockNo, MetaBlocks};
use crate::error::FsError;
use crate::format::inode::InodeFlags;
use crate::open_inode::OpenInode;

/// The way from the root of a tree to one leaf.
#[derive(Clone)]
pub(super) struct Path {
    root: Node,
    root_slot: usize,
    /// The node below the root, if the tree has two levels of index blocks.
    node: Option<(Node, usize)>,
    /// The leaves that it has come by.
    leaves: u32,
}

impl Path {
    /// The way to the first leaf that may have names with `hash`.
    pub(super) fn probe(view: &View<'_>, root: &Root, hash: u32) -> Result<Self, FsError> {
        let root_slot = root.index.search(hash);
        let node = if root.has_nodes {
            let node = view.node(root.index.child(root_slot)?)?;
            let slot = node.search(hash);
            Some((node, slot))
        } else {
            None
        };
        let path = Self { root: root.index.clone(), root_slot, node, leaves: 1 };
        path.check_order()?;
        Ok(path)
    }

    /// The index block that names the leaf, and the pair there.
    fn last(&self) -> (&Node, usize) {
        self.node.as_ref().map_or((&self.root, self.root_slot), |(node, slot)| (node, *slot))
    }

    /// The number of the leaf in the directory.
    pub(super) fn leaf(&self) -> Result<u32, FsError> {
        let (node, slot) = self.last();
        node.child(slot)
    }

    /// The lowest hash of the leaf. The lowest bit is set if the leaf before has it, too.
    fn low(&self) -> u32 {
        match self.last() {
            (node, slot) if slot > 0 => node.hash(slot),
            _ if self.root_slot > 0 => self.root.hash(self.root_slot),
            _ => 0,
        }
    }

    /// The lowest hash of the next leaf, if there is one. The lowest bit is set if this leaf has
    /// it, too.
    fn high(&self) -> Option<u32> {
        let (node, slot) = self.last();
        node.hash_after(slot).or_else(|| self.root.hash_after(self.root_slot))
    }

    /// Whether a name with `hash` may be in the leaf.
    pub(super) fn contains(&self, hash: u32) -> bool {
        self.low() & !1 <= hash && self.high().is_none_or(|high| hash < high)
    }

    /// Whether the next leaf has names with a hash that this leaf has, too.
    pub(super) fn continues(&self) -> bool {
        self.high().is_some_and(|high| high & 1 == 1)
    }

    /// Whether the next leaf, too, may have names with `hash`.
    fn continues_with(&self, hash: u32) -> bool {
        self.high() == Some(hash | 1)
    }

    /// Goes to the next leaf. Returns whether there is one.
    pub(super) fn advance(&mut self, view: &View<'_>) -> Result<bool, FsError> {
        if let Some((node, slot)) = &mut self.node
            && *slot + 1 < node.count
        {
            *slot += 1;
        } else if self.root_slot + 1 < self.root.count {
            self.root_slot += 1;
            if let Some(node) = &mut self.node {
                *node = (view.node(self.root.child(self.root_slot)?)?, 0);
            }
        } else {
            return Ok(false);
        }
        self.check_order()?;
        // In a damaged tree many pairs may lead to the same leaf.
        self.leaves += 1;
        if self.leaves > view.len {
            return Err(self.last().0.damaged());
        }
        Ok(true)
    }

    /// The hashes of an index never decrease. A scan relies on it to come to an end.
    fn check_order(&self) -> Result<(), FsError> {
        if self.high().is_some_and(|high| high < self.low()) {
            return Err(self.last().0.damaged());
        }
        Ok(())
    }
}

/// The entry of `name`.
pub(super) fn find(view: &View<'_>, name: &[u8]) -> Result<Option<FoundAt>, FsError> {
    let root = view.root()?;
    let hash = root.hasher.hash(name).major;
    let mut path = Path::probe(view, &root, hash)?;
    loop {
        let block = view.leaf(path.leaf()?)?;
        if let Some(found) = block.leaf(view).find(name)? {
            return Ok(Some(FoundAt { at: block.at, found }));
        }
        if !path.continues_with(hash) || !path.advance(view)? {
            return Ok(None);
        }
    }
}

/// Whether `test` holds for any leaf.
pub(super) fn any_leaf(
    view: &View<'_>,
    test: impl Fn(Leaf<'_>) -> Result<bool, FsError>,
) -> Result<bool, FsError> {
    let mut path = Path::probe(view, &view.root()?, 0)?;
    loop {
        if test(view.leaf(path.leaf()?)?.leaf(view))? {
            return Ok(true);
        }
        if !path.advance(view)? {
            return Ok(false);
        }
    }
}

/// Adds an entry.
pub(super) fn insert(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    name: &[u8],
    entry: Entry,
) -> Result<(), FsError> {
    let view = View::new(inode.ino, inode.disk, &*blocks)?;
    let root = view.root()?;
    let hasher = root.hasher;
    let hash = hasher.hash(name).major;
    let path = Path::probe(&view, &root, hash)?;
    let block = view.leaf(path.leaf()?)?;
    let slot = block.leaf(&view).slot(name)?;
    check_next_leaves(&view, &path, hash, name)?;
    match slot {
        Slot::Exists => Err(FsError::Exists),
        Slot::At(offset) => {
            let (at, kind) = (block.at, view.leaf_kind());
            // The block may be edited in place if it is not shared.
            drop(block);
            leaf::insert(blocks.edit(at, kind)?, offset, name, entry);
            Ok(())
        }
        Slot::Full { used } if leaf::is_sparse(blocks.layout(), used, name) => {
            let content = compact(&view, &block, name, entry)?;
            let (at, kind) = (block.at, view.leaf_kind());
            *blocks.edit(at, kind)? = content;
            Ok(())
        }
        Slot::Full { .. } => {
            let path = if path.last().0.is_full() {
                grow_index(inode, blocks, &path)?;
                let view = View::new(inode.ino, inode.disk, &*blocks)?;
                Path::probe(&view, &view.root()?, hash)?
            } else {
                path
            };
            split(inode, blocks, &path, &hasher, (name, hash, entry))
        }
    }
}

/// Refuses a name that one of the leaves after the one of `path` has.
fn check_next_leaves(view: &View<'_>, path: &Path, hash: u32, name: &[u8]) -> Result<(), FsError> {
    if !path.continues_with(hash) {
        return Ok(());
    }
    let mut path = path.clone();
    while path.continues_with(hash) && path.advance(view)? {
        if view.leaf(path.leaf()?)?.leaf(view).find(name)?.is_some() {
            return Err(FsError::Exists);
        }
    }
    Ok(())
}

/// The content of a block of entries without the space between them, and with one more entry.
///
/// Entries move, so it serves only for directories that are scanned in the order of the hashes.
pub(super) fn compact(
    view: &View<'_>,
    block: &LeafBlock,
    name: &[u8],
    entry: Entry,
) -> Result<Block, FsError> {
    let leaf = block.leaf(view);
    let mut content = [0; BLOCK_BYTES];
    let mut builder = Builder::new(leaf::area(view.blocks.layout()), &mut content);
    for raw in leaf.used() {
        let raw = raw?;
        builder.push(raw.name, raw.entry()).ok_or(leaf.damaged())?;
    }
    builder.push(name, entry).ok_or(leaf.damaged())?;
    builder.finish();
    Ok(content)
}

/// Makes space for one more pair in the last index block of `path`, which is full.
fn grow_index(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    path: &Path,
) -> Result<(), FsError> {
    if path.node.is_some() && path.root.is_full() {
        // A third level would need the feature `large_dir`.
        return Err(FsError::NoSpace);
    }
    let (logical, at) = view::append(inode, blocks)?;
    let kind = View::new(inode.ino, inode.disk, &*blocks)?.index_kind();
    let checksums = blocks.layout().csum_seed.is_some();
    if let Some((node, _)) = &path.node {
        let half = node.count / 2;
        index::create_node(checksums, blocks.create(at, kind)?, node, half);
        index::truncate(blocks.edit(node.at, kind)?, node, half);
        let root = blocks.edit(path.root.at, kind)?;
        index::insert(root, &path.root, path.root_slot, node.hash(half), logical);
    } else {
        index::create_node(checksums, blocks.create(at, kind)?, &path.root, 0);
        index::set_single_node(blocks.edit(path.root.at, kind)?, logical);
    }
    Ok(())
}

/// Splits the leaf of `path` and adds an entry. The index has space for one more leaf.
fn split(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    path: &Path,
    hasher: &Hasher,
    (name, hash, entry): (&[u8], u32, Entry),
) -> Result<(), FsError> {
    let (logical, upper_at) = view::append(inode, blocks)?;
    let view = View::new(inode.ino, inode.disk, &*blocks)?;
    let (leaf_kind, index_kind) = (view.leaf_kind(), view.index_kind());
    let lower_block = view.leaf(path.leaf()?)?;
    let lower_at = lower_block.at;
    let leaf = lower_block.leaf(&view);

    // With the new entry, so that both halves have space.
    let mut entries = Vec::with_capacity(BLOCK_BYTES / 16);
    let mut bytes = leaf::entry_bytes(name.len());
    entries.push((hash, name, entry));
    for raw in leaf.used() {
        let raw = raw?;
        let hash = hasher.hash(raw.name).major;
        if !path.contains(hash) {
            return Err(leaf.damaged());
        }
        bytes += leaf::entry_bytes(raw.name.len());
        entries.push((hash, raw.name, raw.entry()));
    }
    if !path.contains(hash) || entries.len() < 2 {
        return Err(leaf.damaged());
    }
    // Not stable: names with the same hash have no order among themselves.
    entries.sort_unstable_by_key(|&(hash, ..)| hash);
    let mut below = 0;
    let middle = entries.iter().take_while(|(_, name, _)| {
        below += leaf::entry_bytes(name.len());
        below <= bytes / 2
    });
    let middle = middle.count().clamp(1, entries.len() - 1);
    let (lower, upper) = entries.split_at(middle);
    let first = upper[0].0;
    let shared = lower[middle - 1].0 == first;

    let fill = |half: &[(u32, &[u8], Entry)]| -> Result<Block, FsError> {
        let mut content = [0; BLOCK_BYTES];
        let mut builder = Builder::new(leaf::area(view.blocks.layout()), &mut content);
        for &(_, name, entry) in half {
            builder.push(name, entry).ok_or(leaf.damaged())?;
        }
        builder.finish();
        Ok(content)
    };
    let (lower, upper) = (fill(lower)?, fill(upper)?);
    *blocks.edit(lower_at, leaf_kind)? = lower;
    *blocks.create(upper_at, leaf_kind)? = upper;
    let (node, slot) = path.last();
    let pair = first | u32::from(shared);
    index::insert(blocks.edit(node.at, index_kind)?, node, slot, pair, logical);
    Ok(())
}

/// Turns a directory of one block into a hash tree with one leaf.
pub(super) fn from_list(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
) -> Result<(), FsError> {
    let view = View::new(inode.ino, inode.disk, &*blocks)?;
    let list = view.leaf(0)?;
    let parent = list.leaf(&view).parent()?;
    let mut content = [0; BLOCK_BYTES];
    let mut builder = Builder::new(leaf::area(blocks.layout()), &mut content);
    for raw in list.leaf(&view).used().skip(2) {
        let raw = raw?;
        if is_dot(raw.name) {
            return Err(list.leaf(&view).damaged());
        }
        builder.push(raw.name, raw.entry()).ok_or(list.leaf(&view).damaged())?;
    }
    builder.finish();
    let root_at: BlockNo = list.at;
    let (leaf_kind, index_kind) = (view.leaf_kind(), view.index_kind());
    drop(list);

    let (logical, at) = view::append(inode, blocks)?;
    *blocks.create(at, leaf_kind)? = content;
    let hasher = Hasher::of_new(blocks.layout());
    let checksums = blocks.layout().csum_seed.is_some();
    // The block is no block of entries any more.
    let root = blocks.create(root_at, index_kind)?;
    index::create_root(checksums, root, &hasher, [inode.ino, parent], logical);
    inode.disk.flags.insert(InodeFlags::INDEX);
    Ok(())
}
