//! Scans of a directory.

use alloc::vec::Vec;
use core::ops::ControlFlow;

use super::hash::Hasher;
use super::leaf::{Leaf, RawEntry};
use super::tree::Path;
use super::view::{LeafBlock, View};
use super::{DirItem, FileKind, is_dot, is_valid};
use crate::block::BLOCK_BYTES;
use crate::error::FsError;

type Sink<'s> = &'s mut dyn FnMut(DirItem<'_>) -> ControlFlow<()>;

/// The cookies up to the first entry after `.` and `..`. The key of an entry is added.
const DOTS: u64 = 2;

/// The positions among names with the same hashes.
const POSITIONS: u64 = 256;

/// An entry of a batch, which is sorted before it is handed on.
struct Item {
    /// The hashes of the name: 31 bits of the major one, 24 of the minor one, and 8 zero bits for
    /// the position.
    key: u64,
    /// The block, counted in the batch.
    block: u32,
    /// The entry in the block.
    offset: u16,
}

/// The entries of a leaf and of those after it that share a hash with it.
#[derive(Default)]
struct Batch {
    items: Vec<Item>,
    blocks: Vec<LeafBlock>,
}

/// Hands the entries on in the order of their hashes.
pub(super) fn by_hash(
    view: &View<'_>,
    cookie: u64,
    sink: Sink<'_>,
) -> Result<ControlFlow<()>, FsError> {
    if cookie < DOTS {
        let parent = view.parent()?;
        let dots = [(view.ino, &b"."[..]), (parent, b"..")];
        for ((ino, name), next_cookie) in dots.into_iter().zip(1..) {
            let item = DirItem { ino, kind: FileKind::DIRECTORY, name, next_cookie };
            if cookie < next_cookie && sink(item).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
    }
    let first = cookie.saturating_sub(DOTS);
    // A larger key is none of an entry.
    let Ok(hash @ 0..=0x7fff_ffff) = u32::try_from(first >> 32) else {
        return Ok(ControlFlow::Continue(()));
    };
    let mut batch = Batch::default();
    if !view.is_tree() {
        let hasher = Hasher::of_new(view.blocks.layout());
        view.parent()?;
        // `.` and `..` are the first two entries.
        batch.collect(view, &hasher, view.leaf(0)?, 2, first, |_| true)?;
        return batch.hand_on(view, first, sink);
    }
    let root = view.root()?;
    let mut path = Path::probe(view, &root, hash << 1)?;
    loop {
        let mut more;
        loop {
            let leaf = view.leaf(path.leaf()?)?;
            batch.collect(view, &root.hasher, leaf, 0, first, |hash| path.contains(hash))?;
            let continues = path.continues();
            more = path.advance(view)?;
            if !continues || !more {
                break;
            }
        }
        if batch.hand_on(view, first, sink)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        if !more {
            return Ok(ControlFlow::Continue(()));
        }
    }
}

impl Batch {
    /// Adds the entries of a block whose key may be `first` or above, without the first `skip`.
    fn collect(
        &mut self,
        view: &View<'_>,
        hasher: &Hasher,
        block: LeafBlock,
        skip: usize,
        first: u64,
        in_range: impl Fn(u32) -> bool,
    ) -> Result<(), FsError> {
        let number = self.blocks.len() as u32;
        let leaf = block.leaf(view);
        for raw in leaf.used().skip(skip) {
            let raw = raw?;
            check_name(&leaf, &raw)?;
            let hash = hasher.hash(raw.name);
            // A name in the wrong leaf could make a scan go back.
            if !in_range(hash.major) {
                return Err(leaf.damaged());
            }
            let key = u64::from(hash.major >> 1) << 32 | u64::from(hash.minor & 0xffff_ff00);
            if key + POSITIONS > first {
                self.items.push(Item { key, block: number, offset: raw.offset as u16 });
            }
        }
        self.blocks.push(block);
        Ok(())
    }

    /// Hands the entries from key `first` on to the sink, and empties the batch.
    fn hand_on(
        &mut self,
        view: &View<'_>,
        first: u64,
        sink: Sink<'_>,
    ) -> Result<ControlFlow<()>, FsError> {
        let blocks = &self.blocks;
        let raw =
            |item: &Item| blocks[item.block as usize].leaf(view).decode(usize::from(item.offset));
        let name = |item: &Item| raw(item).map_or(&b""[..], |raw| raw.name);
        self.items.sort_unstable_by(|a, b| a.key.cmp(&b.key).then_with(|| name(a).cmp(name(b))));
        let (mut last, mut position) = (None, 0);
        for item in &self.items {
            position = if last == Some(item.key) { position + 1 } else { 0 };
            last = Some(item.key);
            let key = item.key + position.min(POSITIONS - 1);
            if key < first {
                continue;
            }
            let RawEntry { name, kind, ino, .. } = raw(item)?;
            let next_cookie = DOTS + key + 1;
            if sink(DirItem { ino: crate::Ino(ino), kind, name, next_cookie }).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        self.items.clear();
        self.blocks.clear();
        Ok(ControlFlow::Continue(()))
    }
}

/// Hands the entries on in the order of the blocks. The cookie is the offset in the directory.
pub(super) fn by_position(
    view: &View<'_>,
    cookie: u64,
    sink: Sink<'_>,
) -> Result<ControlFlow<()>, FsError> {
    const BLOCK: u64 = BLOCK_BYTES as u64;
    if cookie == 0 {
        view.parent()?;
    }
    let Ok(first) = u32::try_from(cookie / BLOCK) else { return Ok(ControlFlow::Continue(())) };
    for logical in first..view.len {
        let start = u64::from(logical) * BLOCK;
        let block = view.leaf(logical)?;
        let leaf = block.leaf(view);
        for raw in leaf.used() {
            let raw = raw?;
            let offset = start + raw.offset as u64;
            if offset < cookie {
                continue;
            }
            if !is_dots_place(offset) {
                check_name(&leaf, &raw)?;
            }
            let next_cookie = offset + raw.bytes as u64;
            let RawEntry { name, kind, ino, .. } = raw;
            if sink(DirItem { ino: crate::Ino(ino), kind, name, next_cookie }).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Whether `.` or `..` is at this offset of the directory.
const fn is_dots_place(offset: u64) -> bool {
    offset == 0 || offset == super::leaf::PARENT_OFFSET as u64
}

/// Refuses a name that no file may have.
fn check_name(leaf: &Leaf<'_>, raw: &RawEntry<'_>) -> Result<(), FsError> {
    if is_valid(raw.name) && !is_dot(raw.name) { Ok(()) } else { Err(leaf.damaged()) }
}
