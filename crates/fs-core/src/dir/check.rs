//! Checks the invariants of a directory, for tests.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::ControlFlow;

use super::hash::Hasher;
use super::index::Node;
use super::view::View;
use super::{Entry, is_dot};
use crate::block::{Ino, MetaBlocks};
use crate::extents;
use crate::format::inode::DiskInode;

/// All entries but `.` and `..`, after a check of everything that e2fsck checks.
pub(super) fn check(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
) -> BTreeMap<Vec<u8>, Entry> {
    let view = View::new(ino, disk, blocks).unwrap();
    view.parent().unwrap();
    let mut all = u64::from(view.len);
    let mut count = |_| {
        all += 1;
        ControlFlow::Continue(())
    };
    let _ = extents::blocks_of_tree(ino, disk, blocks, &mut count).unwrap();
    assert_eq!(disk.sectors, all * 8);
    let mut names = BTreeMap::new();
    if !view.is_tree() {
        for logical in 0..view.len {
            collect(&view, logical, 0, None, None, &mut names);
        }
        return names;
    }
    let root = view.root().unwrap();
    let mut seen = BTreeSet::from([0]);
    let index = &root.index;
    for slot in 0..index.count {
        let low = if slot == 0 { 0 } else { index.hash(slot) };
        let high = index.hash_after(slot);
        let child = index.child(slot).unwrap();
        assert!(seen.insert(child));
        if root.has_nodes {
            let node = view.node(child).unwrap();
            leaves(&view, &root.hasher, &node, low, high, &mut seen, &mut names);
        } else {
            collect(&view, child, low, high, Some(&root.hasher), &mut names);
        }
    }
    assert_eq!(seen.len() as u32, view.len, "each block is used once");
    names
}

fn leaves(
    view: &View<'_>,
    hasher: &Hasher,
    node: &Node,
    node_low: u32,
    node_high: Option<u32>,
    seen: &mut BTreeSet<u32>,
    names: &mut BTreeMap<Vec<u8>, Entry>,
) {
    for slot in 0..node.count {
        let low = if slot == 0 { node_low } else { node.hash(slot) };
        let high = node.hash_after(slot).or(node_high);
        assert!(low >= node_low && node_high.is_none_or(|high| low <= high));
        let child = node.child(slot).unwrap();
        assert!(seen.insert(child));
        collect(view, child, low, high, Some(hasher), names);
    }
}

fn collect(
    view: &View<'_>,
    logical: u32,
    low: u32,
    high: Option<u32>,
    hasher: Option<&Hasher>,
    names: &mut BTreeMap<Vec<u8>, Entry>,
) {
    let block = view.leaf(logical).unwrap();
    for raw in block.leaf(view).used() {
        let raw = raw.unwrap();
        if hasher.is_none() && is_dot(raw.name) {
            assert_eq!(logical, 0);
            continue;
        }
        if let Some(hasher) = hasher {
            let hash = hasher.hash(raw.name).major;
            // The lowest bit of a limit is the permission to share the hash.
            assert!(hash >= low & !1, "{hash:x} in {low:x}..{high:x?}");
            assert!(high.is_none_or(|high| hash < high), "{hash:x} in {low:x}..{high:x?}");
        }
        assert!(names.insert(raw.name.to_vec(), raw.entry()).is_none(), "a name is there twice");
    }
}
