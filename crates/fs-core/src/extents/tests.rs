use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::ControlFlow;

use proptest::prelude::*;

use super::node::{NODE_MAX, TEST_NODE_MAX, encode, encode_child};
use super::*;
use crate::block::{BLOCK_BYTES, BlockKind};
use crate::format::checksum;
use crate::testing::MemBlocks;

const INO: Ino = Ino(12);

/// A file, and a model of it: the block of the drive for each block of the file, and whether it is
/// unwritten.
struct File {
    disk: DiskInode,
    blocks: MemBlocks,
    model: BTreeMap<u32, (u64, bool)>,
    used: BTreeSet<u64>,
    next: u64,
}

impl File {
    fn new(node_max: usize) -> Self {
        TEST_NODE_MAX.set(node_max);
        let mut disk = DiskInode::zeroed();
        init(&mut OpenInode { ino: INO, disk: &mut disk });
        Self {
            disk,
            blocks: MemBlocks::new(),
            model: BTreeMap::new(),
            used: BTreeSet::new(),
            next: 100_000,
        }
    }

    fn kind(&self) -> BlockKind {
        BlockKind::ExtentNode(self.blocks.layout.inode_seed(INO, self.disk.generation))
    }

    fn depth(&self) -> usize {
        Node::parse(&self.disk.i_block).expect("a root").depth()
    }

    /// Free blocks of the drive: those after the block before `logical`, if they are free.
    fn place(&mut self, logical: u32, len: u32) -> BlockNo {
        let before = logical.checked_sub(1).and_then(|before| self.model.get(&before));
        if let Some((physical, _)) = before {
            let range = physical + 1..physical + 1 + u64::from(len);
            if self.used.range(range.clone()).next().is_none() && range.end < self.next {
                return BlockNo(range.start);
            }
        }
        self.next += u64::from(len) + 1;
        BlockNo(self.next - 1 - u64::from(len))
    }

    fn change(
        &mut self,
        change: impl FnOnce(&mut OpenInode<'_>, &mut dyn MetaBlocks) -> Result<(), FsError>,
    ) -> Result<(), FsError> {
        change(&mut OpenInode { ino: INO, disk: &mut self.disk }, &mut self.blocks)
    }

    /// Compares all with the model.
    fn check(&mut self) {
        let mut found = BTreeMap::new();
        let mut extents = Vec::new();
        let mut node_count = 0;
        let flow = for_each(INO, &self.disk, &self.blocks, 0..END, &mut |extent| {
            extents.push(extent);
            for i in 0..extent.len {
                let physical = extent.physical.0 + u64::from(i);
                found.insert(extent.logical + i, (physical, extent.unwritten));
            }
            ControlFlow::Continue(())
        });
        assert_eq!(flow, Ok(ControlFlow::Continue(())));
        assert_eq!(found, self.model);
        let mut nodes = Vec::new();
        let flow = blocks_of_tree(INO, &self.disk, &self.blocks, &mut |at| {
            nodes.push(at);
            node_count += 1;
            ControlFlow::Continue(())
        });
        assert_eq!(flow, Ok(ControlFlow::Continue(())));
        assert_eq!(node_count, self.blocks.len(), "a node was lost");
        for at in nodes {
            let block = self.blocks.get(at, self.kind()).expect("a node");
            assert_eq!(check_node(&self.blocks.layout, at, &block, &|_, _| true), Ok(()));
        }
        assert_eq!(self.disk.sectors, 8 * (node_count + self.model.len()) as u64);
        let used: BTreeSet<_> = self.model.values().map(|(physical, _)| *physical).collect();
        let freed: BTreeSet<_> = self.used.difference(&used).map(|at| BlockNo(*at)).collect();
        assert_eq!(self.blocks.freed_data, freed);
        self.blocks.freed_data.clear();
        self.used = used;
        let mut at = 0;
        for extent in extents {
            if extent.logical > at {
                let hole = Run::Hole { logical: at, len: extent.logical - at };
                assert_eq!(lookup(INO, &self.disk, &self.blocks, at), Ok(hole));
            }
            let run = lookup(INO, &self.disk, &self.blocks, extent.logical);
            assert_eq!(run, Ok(Run::Mapped(extent)));
            at = extent.end() as u32;
        }
        if at == u32::MAX {
            return;
        }
        let hole = Run::Hole { logical: at, len: u32::MAX - at };
        assert_eq!(lookup(INO, &self.disk, &self.blocks, at), Ok(hole));
    }

    fn model_insert(&mut self, extent: &Extent) {
        for i in 0..extent.len {
            let physical = extent.physical.0 + u64::from(i);
            self.model.insert(extent.logical + i, (physical, extent.unwritten));
            self.used.insert(physical);
        }
    }

    fn insert(&mut self, extent: Extent) -> Result<(), FsError> {
        let end = extent.end() as u32;
        let is_hole = self.model.range(extent.logical..end).next().is_none();
        let result = self.change(|inode, blocks| insert(inode, blocks, extent));
        if result.is_ok() {
            assert!(is_hole);
            self.model_insert(&extent);
        } else if result != Err(FsError::NoSpace) {
            assert!(!is_hole && matches!(result, Err(FsError::DamagedInode { .. })), "{result:?}");
            return Ok(());
        }
        result
    }

    fn apply(&mut self, op: &Op) -> Result<(), FsError> {
        match *op {
            Op::Insert { logical, len, unwritten } => {
                let physical = self.place(logical, len);
                self.insert(Extent { logical, len, physical, unwritten })?;
            }
            Op::Alternate { logical, count } => {
                for i in 0..count {
                    let (logical, physical) = (logical + 2 * i, self.place(0, 1));
                    self.insert(Extent { logical, len: 1, physical, unwritten: false })?;
                }
            }
            Op::Remove { first, len } => {
                let end = u64::from(first) + u64::from(len);
                self.change(|inode, blocks| remove(inode, blocks, first, end))?;
                self.model.retain(|at, _| *at < first || u64::from(*at) >= end);
            }
            Op::RemoveSome { first, budget } => {
                let mut end = END;
                while end > u64::from(first) {
                    let before = end;
                    self.change(|inode, blocks| {
                        end = remove_some(
                            inode,
                            blocks,
                            first,
                            end,
                            Budget { blocks: budget, ..Budget::ALL },
                        )?;
                        Ok(())
                    })?;
                    assert!(end < before);
                    let had = self.model.len();
                    self.model.retain(|at, _| u64::from(*at) < end);
                    assert!((had - self.model.len()) as u64 <= budget);
                    self.check();
                }
            }
            Op::Mark { first, len, unwritten } => {
                let mark = if unwritten { mark_unwritten } else { mark_written };
                self.change(|inode, blocks| mark(inode, blocks, first, len))?;
                for (_, entry) in self.model.range_mut(first..first + len) {
                    entry.1 = unwritten;
                }
            }
            Op::Shift { from, by } => {
                let gap = from.saturating_sub(by.unsigned_abs() as u32)..from;
                let beyond = self.model.range(from..).next().is_some();
                let refused = by < 0
                    && (u64::from(from) < by.unsigned_abs()
                        || beyond && self.model.range(gap).next().is_some());
                let result = self.change(|inode, blocks| shift(inode, blocks, from, by));
                if refused {
                    assert_eq!(result, Err(FsError::Invalid));
                    return Ok(());
                }
                result?;
                let moved = self.model.split_off(&from);
                self.model.extend(
                    moved.into_iter().map(|(at, to)| {
                        (u32::try_from(i64::from(at) + by).expect("in the file"), to)
                    }),
                );
            }
            Op::Replace { logical, len, unwritten, fresh } => {
                let physical = match self.model.get(&logical) {
                    // Often a part of the range lies there already.
                    Some((physical, _)) if !fresh => {
                        let range = *physical..*physical + u64::from(len);
                        let inside = |at: &u32| (logical..logical + len).contains(at);
                        let other =
                            |(at, (to, _)): (&u32, &(u64, bool))| range.contains(to) && !inside(at);
                        if self.model.iter().any(other) || range.end >= self.next {
                            self.place(0, len)
                        } else {
                            BlockNo(range.start)
                        }
                    }
                    _ => self.place(0, len),
                };
                let extent = Extent { logical, len, physical, unwritten };
                self.change(|inode, blocks| replace(inode, blocks, extent))?;
                self.model_insert(&extent);
                self.check();
                let before = self.disk.clone();
                self.change(|inode, blocks| replace(inode, blocks, extent))?;
                assert_eq!(self.disk, before);
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert { logical: u32, len: u32, unwritten: bool },
    Alternate { logical: u32, count: u32 },
    Remove { first: u32, len: u32 },
    RemoveSome { first: u32, budget: u64 },
    Mark { first: u32, len: u32, unwritten: bool },
    Shift { from: u32, by: i64 },
    Replace { logical: u32, len: u32, unwritten: bool, fresh: bool },
}

fn op(size: u32) -> impl Strategy<Value = Op> {
    let (at, len) = (0..size, 1..12_u32);
    prop_oneof![
        8 => (at.clone(), len.clone(), any::<bool>())
            .prop_map(|(logical, len, unwritten)| Op::Insert { logical, len, unwritten }),
        2 => (at.clone(), 1..60_u32)
            .prop_map(|(logical, count)| Op::Alternate { logical, count }),
        4 => (at.clone(), prop_oneof![4 => len.clone(), 1 => 0..size])
            .prop_map(|(first, len)| Op::Remove { first, len }),
        1 => (at.clone(), 1..90_u64)
            .prop_map(|(first, budget)| Op::RemoveSome { first, budget }),
        4 => (at.clone(), prop_oneof![4 => len.clone(), 1 => 0..size], any::<bool>())
            .prop_map(|(first, len, unwritten)| Op::Mark { first, len, unwritten }),
        1 => (at.clone(), -20..20_i64).prop_map(|(from, by)| Op::Shift { from, by }),
        2 => (at, len, any::<bool>(), any::<bool>()).prop_map(|(logical, len, unwritten, fresh)| {
            Op::Replace { logical, len, unwritten, fresh }
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn the_tree_maps_as_a_model_does(
        node_max in prop_oneof![4..9_usize, Just(NODE_MAX)],
        ops in prop::collection::vec((op(500), prop::option::weighted(0.2, 0..4_u64)), 1..120),
    ) {
        let mut file = File::new(node_max);
        for (op, budget) in ops {
            let before = budget.map(|budget| {
                let kept = (file.disk.clone(), file.blocks.clone(), file.model.clone());
                file.blocks.budget = budget;
                (kept, file.used.clone())
            });
            let result = file.apply(&op);
            file.blocks.budget = u64::MAX;
            match (result, before) {
                (Ok(()), _) => {}
                // A file of small nodes reaches the limit of the depth.
                (Err(FsError::DamagedInode { .. }), _) if file.depth() == 5 => return Ok(()),
                (Err(error), Some(((disk, blocks, model), used))) => {
                    prop_assert_eq!(error, FsError::NoSpace);
                    (file.disk, file.blocks, file.model, file.used) = (disk, blocks, model, used);
                }
                (Err(error), None) => prop_assert!(false, "{}", error),
            }
            file.check();
        }
        let (flow, kind) = (ControlFlow::Continue(()), file.kind());
        let walked = blocks_of_tree(INO, &file.disk, &file.blocks, &mut |at| {
            let block = file.blocks.sealed(at);
            assert_eq!(checksum::verify(&file.blocks.layout, at, kind, &block), Ok(()));
            flow
        });
        prop_assert_eq!(walked, Ok(flow));
        file.change(|inode, blocks| remove(inode, blocks, 0, END)).expect("nothing is cut");
        file.model.clear();
        file.check();
        prop_assert_eq!(file.depth(), 0);
    }

    /// Bytes of nodes change at random: each call ends, without a panic.
    #[test]
    fn a_damaged_tree_is_refused_or_read(
        extents in 1..60_u32,
        damage in prop::collection::vec((0..80_usize, 0..60_usize, any::<u8>()), 1..6),
        ops in prop::collection::vec(op(120), 1..8),
    ) {
        let mut file = File::new(4);
        file.apply(&Op::Alternate { logical: 0, count: extents }).expect("there is space");
        let mut nodes = Vec::new();
        let _ = blocks_of_tree(INO, &file.disk, &file.blocks, &mut |at| {
            nodes.push(at);
            ControlFlow::Continue(())
        });
        for (node, at, byte) in damage {
            let kind = file.kind();
            match nodes.get(node % (nodes.len() + 1)) {
                Some(node) => file.blocks.edit(*node, kind).expect("a node")[at] = byte,
                None => file.disk.i_block[at] = byte,
            }
        }
        let mut steps = 0;
        let _ = for_each(INO, &file.disk, &file.blocks, 0..END, &mut |_| {
            steps += 1;
            ControlFlow::Continue(())
        });
        let _ = blocks_of_tree(INO, &file.disk, &file.blocks, &mut |_| ControlFlow::Continue(()));
        prop_assert!(steps < 10_000);
        for op in ops {
            let mut blocks = Reckless(file.blocks.clone());
            let inode = &mut OpenInode { ino: INO, disk: &mut file.disk };
            let _ = match op {
                Op::Insert { logical, len, unwritten } => {
                    let physical = BlockNo(100);
                    insert(inode, &mut blocks, Extent { logical, len, physical, unwritten })
                }
                Op::Alternate { logical, .. } => {
                    lookup(inode.ino, inode.disk, &blocks, logical).map(drop)
                }
                Op::Remove { first, len } => {
                    remove(inode, &mut blocks, first, u64::from(first) + u64::from(len))
                }
                Op::RemoveSome { first, budget } => {
                    remove_some(inode, &mut blocks, first, END, Budget { blocks: budget, ..Budget::ALL }).map(drop)
                }
                Op::Mark { first, len, unwritten: true } => {
                    mark_unwritten(inode, &mut blocks, first, len)
                }
                Op::Mark { first, len, .. } => mark_written(inode, &mut blocks, first, len),
                Op::Shift { from, by } => shift(inode, &mut blocks, from, by),
                Op::Replace { logical, len, unwritten, .. } => {
                    let physical = BlockNo(100);
                    replace(inode, &mut blocks, Extent { logical, len, physical, unwritten })
                }
            };
            file.blocks = blocks.0;
        }
    }
}

/// Metadata blocks that take any block to be freed, since a damaged tree may free one twice.
struct Reckless(MemBlocks);

impl MetaBlocks for Reckless {
    fn layout(&self) -> &Layout {
        self.0.layout()
    }

    fn get(&self, at: BlockNo, kind: BlockKind) -> Result<alloc::sync::Arc<Block>, FsError> {
        self.0.get(at, kind)
    }

    fn edit(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        self.0.edit(at, kind)
    }

    fn create(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        self.0.create(at, kind)
    }

    fn allocate(&mut self, goal: BlockNo) -> Result<BlockNo, FsError> {
        self.0.allocate(goal)
    }

    fn free_meta(&mut self, _at: BlockNo) {}

    fn free_data(&mut self, _first: BlockNo, _blocks: u32) {}
}

#[test]
fn a_tree_of_real_nodes_grows_to_depth_3_and_shrinks_to_0() {
    let mut file = File::new(NODE_MAX);
    let count = 4 * 340 * 340 + 10;
    for i in 0..count {
        let extent = Extent {
            logical: 2 * i,
            len: 1,
            physical: BlockNo(100_000 + 2 * u64::from(i)),
            unwritten: false,
        };
        file.change(|inode, blocks| insert(inode, blocks, extent)).expect("there is space");
    }
    assert_eq!(file.depth(), 3);
    for i in [0, 1, 12_345, count - 1] {
        let run = lookup(INO, &file.disk, &file.blocks, 2 * i).expect("a tree");
        assert!(matches!(run, Run::Mapped(Extent { len: 1, .. })));
        let run = lookup(INO, &file.disk, &file.blocks, 2 * i + 1).expect("a tree");
        assert!(matches!(run, Run::Hole { .. }));
    }
    // Appending leaves full nodes behind.
    assert_eq!(file.blocks.len() as u32, 4 * 340 + 1 + 5 + 1);
    file.change(|inode, blocks| remove(inode, blocks, 1, END)).expect("nothing is cut");
    assert_eq!((file.depth(), file.blocks.len(), file.disk.sectors), (0, 0, 8));
}

#[test]
fn nodes_that_lose_most_entries_are_joined() {
    let mut file = File::new(NODE_MAX);
    file.apply(&Op::Alternate { logical: 0, count: 5 * 340 }).expect("there is space");
    assert_eq!((file.depth(), file.blocks.len()), (2, 6));
    // One of 20 extents is left in each range of 40 blocks.
    for first in (0..3400).step_by(40) {
        file.apply(&Op::Remove { first, len: 38 }).expect("nothing is cut");
    }
    file.check();
    assert_eq!((file.depth(), file.blocks.len()), (1, 1));
}

#[test]
fn an_inode_that_cannot_count_more_sectors_is_too_large() {
    let mut file = File::new(NODE_MAX);
    file.disk.sectors = file.blocks.layout.max_sectors() - 8;
    let extent = Extent { logical: 0, len: 2, physical: BlockNo(100_000), unwritten: false };
    let result = file.change(|inode, blocks| insert(inode, blocks, extent));
    assert_eq!(result, Err(FsError::FileTooLarge));
}

#[test]
fn a_long_file_that_grows_is_few_extents() {
    let mut file = File::new(NODE_MAX);
    for i in 0..100_000 {
        let physical = BlockNo(100_000 + u64::from(i));
        let extent = Extent { logical: i, len: 1, physical, unwritten: false };
        file.change(|inode, blocks| insert(inode, blocks, extent)).expect("there is space");
    }
    let run = lookup(INO, &file.disk, &file.blocks, 32_768).expect("a tree");
    let physical = BlockNo(132_768);
    let extent = Extent { logical: 32_768, len: 32_768, physical, unwritten: false };
    assert_eq!(run, Run::Mapped(extent));
    assert_eq!((file.depth(), file.blocks.len()), (0, 0));
}

#[test]
fn long_extents_are_split_and_converted() {
    let mut file = File::new(NODE_MAX);
    let extent = Extent { logical: 10, len: 100_000, physical: BlockNo(100_000), unwritten: false };
    file.insert(extent).expect("there is space");
    file.check();
    for unwritten in [true, false, true] {
        file.apply(&Op::Mark { first: 0, len: 200_000, unwritten }).expect("there is space");
        file.check();
    }
    let run = lookup(INO, &file.disk, &file.blocks, 10).expect("a tree");
    assert!(matches!(run, Run::Mapped(Extent { len: 32_767, unwritten: true, .. })));
}

#[test]
fn the_end_of_the_largest_file_is_the_limit() {
    let mut file = File::new(NODE_MAX);
    let extent = Extent { logical: u32::MAX - 1, len: 1, physical: BlockNo(7), unwritten: false };
    file.insert(extent).expect("the last block");
    file.check();
    assert_eq!(lookup(INO, &file.disk, &file.blocks, u32::MAX), Err(FsError::FileTooLarge));
    for bad in [
        Extent { logical: u32::MAX, ..extent },
        Extent { logical: 0, len: 0, ..extent },
        Extent { logical: 0, physical: BlockNo(0), ..extent },
        Extent { logical: 0, physical: BlockNo(file.blocks.layout.blocks), ..extent },
    ] {
        let result = file.change(|inode, blocks| insert(inode, blocks, bad));
        assert_eq!(result, Err(FsError::Invalid));
    }
    let result = file.change(|inode, blocks| shift(inode, blocks, 5, 1));
    assert_eq!(result, Err(FsError::FileTooLarge));
    let result = file.change(|inode, blocks| shift(inode, blocks, 5, i64::MAX));
    assert!(result.is_err());
}

/// A root of depth 1 with two leaves, whose bytes a test damages.
fn two_leaves() -> File {
    let mut file = File::new(4);
    file.apply(&Op::Alternate { logical: 0, count: 6 }).expect("there is space");
    file.check();
    assert_eq!((file.depth(), file.blocks.len()), (1, 2));
    file
}

fn walk(file: &File) -> Result<ControlFlow<()>, FsError> {
    for_each(INO, &file.disk, &file.blocks, 0..END, &mut |_| ControlFlow::Continue(()))
}

#[test]
fn damaged_roots_are_refused() {
    for (at, bytes) in [
        // Magic, entries, max, depth.
        (0, &[0][..]),
        (2, &[5]),
        (2, &[0]),
        (4, &[5]),
        (4, &[0]),
        (6, &[2]),
        (6, &[0]),
        (6, &[6]),
        // The second child's key is that of the first one; then the pointers.
        (24, &[0, 0, 0, 0]),
        (28, &[0, 0, 0, 0]),
        (28, &[0, 0, 0, 0xff]),
        (32, &[1]),
    ] {
        let mut file = two_leaves();
        file.disk.i_block[at..at + bytes.len()].copy_from_slice(bytes);
        assert!(walk(&file).is_err(), "{at} {bytes:?}");
    }
}

#[test]
fn damaged_nodes_are_refused() {
    let mut file = two_leaves();
    let second = Node::parse(&file.disk.i_block).expect("a root").child(1);
    let kind = file.kind();
    let good = *file.blocks.get(second, kind).expect("a node");
    let raw = |logical, len, physical| {
        encode(&Extent { logical, len, physical: BlockNo(physical), unwritten: false })
    };
    for (at, bytes) in [
        (0, &[0][..]),
        (2, &[5]),
        (2, &[0]),
        (4, &[0x55, 1]),
        (6, &[1]),
        (12, &[5]),
        (12, &raw(8, 0, 7)),
        (12, &raw(8, 3, 7)),
        (12, &raw(8, 1, 0)),
        (12, &raw(8, 1, 1 << 40)),
        (24, &raw(7, 1, 7)),
        (24, &raw(8, 1, 7)),
        (24, &raw(u32::MAX, 1, 7)),
    ] {
        let mut block = good;
        block[at..at + bytes.len()].copy_from_slice(bytes);
        file.blocks.set(second, kind, block);
        // The whole node is checked when it is read; a walk sees what concerns the way through it.
        let seen = check_node(&file.blocks.layout, second, &block, &|_, _| true).is_err();
        assert!(seen || walk(&file).is_err(), "{at} {bytes:?}");
    }
    // The node is its own child.
    let mut block = [0; BLOCK_BYTES];
    NodeMut::init(&mut block[..], 1).splice(0, 0, &[encode_child(8, second)]);
    file.blocks.set(second, kind, block);
    NodeMut::parse(&mut file.disk.i_block).expect("a root").set_depth(2);
    assert!(walk(&file).is_err());
}

#[test]
fn an_inode_without_extents_is_not_supported() {
    let mut disk = DiskInode::zeroed();
    let mut blocks = MemBlocks::new();
    assert_eq!(lookup(INO, &disk, &blocks, 0), Err(FsError::NotSupported));
    let inode = &mut OpenInode { ino: INO, disk: &mut disk };
    assert_eq!(remove(inode, &mut blocks, 0, END), Err(FsError::NotSupported));
}
