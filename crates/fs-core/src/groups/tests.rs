use std::collections::{BTreeMap, BTreeSet};
use std::vec;

use proptest::prelude::*;

use super::*;
use crate::block::BLOCK_BYTES;
use crate::format::group_desc::GroupFlags;
use crate::testing;
use alloc::boxed::Box;

/// Five small groups, of which the last is cut, and all but the first are not initialised.
fn small() -> (Layout, BTreeMap<BlockNo, Arc<Block>>) {
    let layout = Layout {
        blocks: 5 * 512 - 100,
        inodes: 5 * 64,
        blocks_per_group: 512,
        inodes_per_group: 64,
        groups: 5,
        reserved_gdt_blocks: 2,
        reserved_blocks: 20,
        flex_groups: 1,
        ..testing::layout()
    };
    let mut blocks = BTreeMap::new();
    let mut table = Box::new([0; BLOCK_BYTES]);
    for group in 0..layout.groups {
        let head = layout.superblock_blocks(group);
        let first = layout.first_block(group).0 + u64::from(head);
        let mut desc = GroupDesc {
            block_bitmap: BlockNo(first),
            inode_bitmap: BlockNo(first + 1),
            inode_table: BlockNo(first + 2),
            free_blocks: layout.blocks_in_group(group) - head - 6,
            free_inodes: 64,
            used_dirs: 0,
            flags: GroupFlags::INODE_UNINIT | GroupFlags::BLOCK_UNINIT,
            block_bitmap_csum: 0,
            inode_bitmap_csum: 0,
            itable_unused: 64,
        };
        if group == 0 {
            let mut bits = slots::Slots::new(512);
            bits.take(0, head + 6);
            let bitmap = bits.encode();
            desc.seal_block_bitmap(&layout, &bitmap);
            blocks.insert(desc.block_bitmap, Arc::from(bitmap));
            let mut bits = slots::Slots::new(64);
            bits.take(0, 10);
            let bitmap = bits.encode();
            desc.seal_inode_bitmap(&layout, &bitmap);
            blocks.insert(desc.inode_bitmap, Arc::from(bitmap));
            desc.flags = GroupFlags::empty();
            desc.free_inodes = 54;
            desc.itable_unused = 54;
            desc.used_dirs = 2;
        }
        let (_, offset) = layout.descriptor_at(group);
        desc.encode(&layout, group, &mut table[offset..]);
    }
    blocks.insert(BlockNo(1), Arc::from(table));
    (layout, blocks)
}

fn reader(
    blocks: &BTreeMap<BlockNo, Arc<Block>>,
) -> impl Fn(BlockNo) -> Result<Arc<Block>, FsError> {
    |at| blocks.get(&at).cloned().ok_or(FsError::DamagedBlock { what: "block", block: at })
}

#[derive(Clone, Debug)]
enum Step {
    Allocate { goal: u64, want: u32, claim: Claim },
    Fail,
    Free { which: usize, cut: u32 },
    Reuse,
    Inode { is_dir: bool, parent: u32 },
    FailInode,
    FreeInode { which: usize },
    Commit,
    Reserve { blocks: u32 },
    AllocateReserved { want: u32 },
    Claim { at: u64, blocks: u32 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let claim = prop_oneof![Just(Claim::User), Just(Claim::Root), Just(Claim::WriteBack)];
    let step = prop_oneof![
        4 => (0u64..2600, prop_oneof![1u32..20, 1u32..600], claim)
            .prop_map(|(goal, want, claim)| Step::Allocate { goal, want, claim }),
        1 => Just(Step::Fail),
        4 => (any::<usize>(), 0u32..40).prop_map(|(which, cut)| Step::Free { which, cut }),
        2 => Just(Step::Reuse),
        4 => (any::<bool>(), 1u32..320).prop_map(|(is_dir, parent)| Step::Inode { is_dir, parent }),
        1 => Just(Step::FailInode),
        2 => any::<usize>().prop_map(|which| Step::FreeInode { which }),
        1 => Just(Step::Commit),
        1 => (1u32..100).prop_map(|blocks| Step::Reserve { blocks }),
        1 => (1u32..100).prop_map(|want| Step::AllocateReserved { want }),
        1 => (0u64..2600, 1u32..30).prop_map(|(at, blocks)| Step::Claim { at, blocks }),
    ];
    proptest::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn groups_do_as_sets_do(steps in steps()) {
        let (layout, mut drive) = small();
        let groups = Groups::open(&layout, &reader(&drive)).expect("valid");
        let mut free: BTreeSet<u64> =
            (0..layout.blocks).filter(|at| !groups.is_system_block(BlockNo(*at), 1)).collect();
        prop_assert_eq!(free.len() as u64, groups.counts().free_blocks);
        prop_assert_eq!(layout.blocks - groups.system_blocks(), free.len() as u64);
        let mut blocked: BTreeSet<u64> = BTreeSet::new();
        let mut runs: Vec<(BlockNo, u32)> = Vec::new();
        let mut inodes: Vec<(Ino, bool)> = Vec::new();
        let mut blocked_inodes: BTreeSet<Ino> = BTreeSet::new();
        let mut batches: Vec<FreedBatch> = Vec::new();
        let mut reserved = 0u32;
        let all_free_inodes = groups.counts().free_inodes;
        // Inodes whose block of the table has content: on the drive, or rendered.
        let mut ready: BTreeSet<BlockNo> = BTreeSet::new();
        ready.insert(groups.inode_place(Ino(1)).block);
        for step in steps {
            let read = reader(&drive);
            match step {
                Step::Allocate { goal, want, claim } => {
                    let floor = match claim {
                        Claim::User => 20 + layout.blocks / 50,
                        Claim::Root => layout.blocks / 50,
                        Claim::WriteBack => 0,
                    };
                    let left = (free.len() as u64).saturating_sub(u64::from(reserved) + floor);
                    match groups.allocate_blocks(BlockNo(goal), want, claim, 0, &read) {
                        Ok((at, len)) => {
                            prop_assert!(len > 0 && len <= want && u64::from(len) <= left);
                            for block in at.0..at.0 + u64::from(len) {
                                prop_assert!(free.remove(&block), "{} was not free", block);
                            }
                            runs.push((at, len));
                        }
                        Err(error) => {
                            prop_assert_eq!(error, FsError::NoSpace);
                            prop_assert_eq!(left, 0);
                        }
                    }
                }
                Step::Fail => {
                    if let Some((at, len)) = runs.pop() {
                        groups.unallocate_blocks(at, len);
                        free.extend(at.0..at.0 + u64::from(len));
                    }
                }
                Step::Free { which, cut } => {
                    if !runs.is_empty() {
                        let which = which % runs.len();
                        let (at, len) = runs.swap_remove(which);
                        let freed = len - cut.min(len - 1);
                        if freed < len {
                            runs.push((BlockNo(at.0 + u64::from(freed)), len - freed));
                        }
                        groups.prepare_free_blocks(at, freed, &read).expect("in use");
                        let mut batch = FreedBatch::default();
                        groups.free_blocks(at, freed, &mut batch);
                        prop_assert_eq!(
                            batch.blocks().map(|run| run.1).sum::<u32>(), freed
                        );
                        // A second time has no effect, and is refused if it is prepared.
                        groups.prepare_free_blocks(at, freed, &read).expect_err("free");
                        groups.free_blocks(at, freed, &mut batch);
                        prop_assert_eq!(
                            batch.blocks().map(|run| run.1).sum::<u32>(), freed
                        );
                        blocked.extend(at.0..at.0 + u64::from(freed));
                        batches.push(batch);
                    }
                }
                Step::Reuse => {
                    if !batches.is_empty() {
                        let batch = batches.remove(0);
                        for (at, len) in batch.blocks() {
                            for block in at.0..at.0 + u64::from(len) {
                                if blocked.remove(&block) {
                                    free.insert(block);
                                }
                            }
                        }
                        for ino in batch.inodes() {
                            blocked_inodes.remove(&ino);
                        }
                        groups.reuse(batch);
                    }
                }
                Step::Inode { is_dir, parent } => {
                    match groups.allocate_inode(Ino(parent), is_dir, &read) {
                        Ok(ino) => {
                            prop_assert!(ino >= layout.first_ino && ino.0 <= layout.inodes);
                            prop_assert!(!blocked_inodes.contains(&ino));
                            prop_assert!(!inodes.iter().any(|(other, _)| *other == ino));
                            let place = groups.inode_place(ino);
                            prop_assert_eq!(place.is_fresh, !ready.contains(&place.block));
                            inodes.push((ino, is_dir));
                        }
                        Err(error) => {
                            prop_assert_eq!(error, FsError::NoSpace);
                            prop_assert_eq!(
                                inodes.len() + blocked_inodes.len(), all_free_inodes as usize
                            );
                        }
                    }
                }
                Step::FailInode => {
                    if let Some((ino, is_dir)) = inodes.pop() {
                        groups.unallocate_inode(ino, is_dir);
                    }
                }
                Step::FreeInode { which } => {
                    if !inodes.is_empty() {
                        let which = which % inodes.len();
                        let (ino, is_dir) = inodes.swap_remove(which);
                        groups.prepare_free_inode(ino, &read).expect("in use");
                        let mut batch = FreedBatch::default();
                        groups.free_inode(ino, is_dir, &mut batch);
                        groups.prepare_free_inode(ino, &read).expect_err("free");
                        blocked_inodes.insert(ino);
                        batches.push(batch);
                    }
                }
                Step::Commit => {
                    drop(read);
                    ready.extend(inodes.iter().map(|(ino, _)| groups.inode_place(*ino).block));
                    let rendered = groups.render();
                    for (at, block) in rendered {
                        if block.iter().all(|byte| *byte == 0) && at != BlockNo(1) {
                            prop_assert!(ready.insert(at), "{} was ready", at);
                        }
                        prop_assert!(groups.is_system_block(at, 1));
                        drive.insert(at, Arc::from(block));
                    }
                    prop_assert!(groups.render().is_empty());
                    for ino in (1..=layout.inodes).map(Ino) {
                        let place = groups.inode_place(ino);
                        prop_assert_eq!(place.is_fresh, !ready.contains(&place.block));
                    }
                    let read = reader(&drive);
                    let again = Groups::open(&layout, &read).expect("rendered");
                    prop_assert_eq!(again.counts().free_blocks, groups.counts().free_blocks);
                    prop_assert_eq!(again.counts().free_inodes, groups.counts().free_inodes);
                    prop_assert_eq!(
                        again.directories.into_inner(), groups.directories.load(Ordering::Relaxed)
                    );
                    for group in 0..layout.groups {
                        again.groups[group as usize]
                            .load_blocks(&layout, group, &groups.system, &read)
                            .expect("rendered");
                        again.groups[group as usize]
                            .load_inodes(&layout, group, &read)
                            .expect("rendered");
                        prop_assert_eq!(
                            again.groups[group as usize].table_ready.load(Ordering::Relaxed),
                            groups.groups[group as usize].table_ready.load(Ordering::Relaxed)
                        );
                    }
                }
                Step::Reserve { blocks } => {
                    let floor = 20 + layout.blocks / 50;
                    let left = (free.len() as u64).saturating_sub(u64::from(reserved) + floor);
                    let is_done = groups.reserve(blocks, Claim::User).is_ok();
                    prop_assert_eq!(is_done, u64::from(blocks) <= left);
                    if is_done {
                        reserved += blocks;
                    }
                }
                Step::AllocateReserved { want } => {
                    let mut missing = want.min(reserved);
                    while missing > 0 {
                        let (at, len) = groups
                            .allocate_blocks(BlockNo(0), missing, Claim::User, missing, &read)
                            .expect("reserved blocks are there");
                        groups.unreserve(u64::from(len));
                        reserved -= len;
                        missing -= len;
                        for block in at.0..at.0 + u64::from(len) {
                            prop_assert!(free.remove(&block));
                        }
                        runs.push((at, len));
                    }
                }
                Step::Claim { at, blocks } => {
                    let are_files = !groups.is_system_block(BlockNo(at), blocks);
                    let claimed = groups.claim_blocks(BlockNo(at), blocks, &read);
                    prop_assert_eq!(claimed.is_ok(), are_files);
                    if let Ok(claimed) = claimed {
                        let mut expected = 0;
                        for block in at..at + u64::from(blocks) {
                            if free.remove(&block) || blocked.remove(&block) {
                                expected += 1;
                                runs.push((BlockNo(block), 1));
                            }
                        }
                        prop_assert_eq!(claimed, expected);
                        // A claim may take what is reserved.
                        if (free.len() as u64) < u64::from(reserved) {
                            return Ok(());
                        }
                    }
                }
            }
            let counts = groups.counts();
            prop_assert_eq!(counts.free_blocks as usize, free.len() + blocked.len());
            prop_assert_eq!(counts.unreserved_blocks + u64::from(reserved), counts.free_blocks);
            prop_assert_eq!(counts.free_inodes as usize, all_free_inodes as usize - inodes.len());
            prop_assert_eq!(
                groups.has_blocked(),
                !blocked.is_empty() || !blocked_inodes.is_empty()
            );
        }
    }
}

#[test]
fn threads_never_get_the_same_block_or_inode() {
    let (layout, drive) = small();
    let groups = Groups::open(&layout, &reader(&drive)).expect("valid");
    let before = groups.counts();
    let owners: Vec<AtomicU32> = (0..layout.blocks).map(|_| AtomicU32::new(0)).collect();
    let inode_owners: Vec<AtomicU32> = (0..=layout.inodes).map(|_| AtomicU32::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let (groups, owners, inode_owners) = (&groups, &owners, &inode_owners);
            let read = reader(&drive);
            scope.spawn(move || {
                let mut mine: Vec<(BlockNo, u32)> = vec![];
                let mut my_inodes = vec![];
                let mut seed = 17 + thread;
                for _ in 0..20_000 {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let dice = seed >> 16;
                    let goal = groups.rotor(thread as u16, 4);
                    match dice % 8 {
                        0..3 => {
                            let want = 1 + dice / 8 % 40;
                            match groups.allocate_blocks(goal, want, Claim::WriteBack, 0, &read) {
                                Ok((at, len)) => {
                                    for block in at.0..at.0 + u64::from(len) {
                                        let before = owners[block as usize]
                                            .swap(thread + 1, Ordering::Relaxed);
                                        assert_eq!(before, 0, "block {block}");
                                    }
                                    mine.push((at, len));
                                }
                                Err(error) => assert_eq!(error, FsError::NoSpace),
                            }
                        }
                        3..6 if !mine.is_empty() => {
                            let (at, len) = mine.swap_remove(dice as usize % mine.len());
                            for block in at.0..at.0 + u64::from(len) {
                                owners[block as usize].store(0, Ordering::Relaxed);
                            }
                            if dice & 64 == 0 {
                                groups.unallocate_blocks(at, len);
                            } else {
                                groups.prepare_free_blocks(at, len, &read).expect("in use");
                                let mut batch = FreedBatch::default();
                                groups.free_blocks(at, len, &mut batch);
                                groups.reuse(batch);
                            }
                        }
                        6 => match groups.allocate_inode(Ino(2 + dice % 300), false, &read) {
                            Ok(ino) => {
                                let before = inode_owners[ino.0 as usize]
                                    .swap(thread + 1, Ordering::Relaxed);
                                assert_eq!(before, 0, "inode {ino}");
                                my_inodes.push(ino);
                            }
                            Err(error) => assert_eq!(error, FsError::NoSpace),
                        },
                        7 if !my_inodes.is_empty() => {
                            let ino: Ino = my_inodes.swap_remove(dice as usize % my_inodes.len());
                            inode_owners[ino.0 as usize].store(0, Ordering::Relaxed);
                            let mut batch = FreedBatch::default();
                            groups.free_inode(ino, false, &mut batch);
                            groups.reuse(batch);
                        }
                        _ => {}
                    }
                }
                for (at, len) in mine {
                    for block in at.0..at.0 + u64::from(len) {
                        owners[block as usize].store(0, Ordering::Relaxed);
                    }
                    groups.unallocate_blocks(at, len);
                }
                for ino in my_inodes {
                    inode_owners[ino.0 as usize].store(0, Ordering::Relaxed);
                    groups.unallocate_inode(ino, false);
                }
            });
        }
    });
    assert_eq!(groups.counts(), before);
    assert!(!groups.has_blocked());
}

#[test]
fn a_right_to_blocks_always_finds_them_when_threads_compete() {
    let (layout, drive) = small();
    let groups = Groups::open(&layout, &reader(&drive)).expect("valid");
    std::thread::scope(|scope| {
        for thread in 0..4u16 {
            let groups = &groups;
            let read = reader(&drive);
            scope.spawn(move || {
                for _ in 0..500 {
                    let Ok(()) = groups.reserve(400, Claim::WriteBack) else { continue };
                    let mut mine = vec![];
                    let mut missing = 400;
                    while missing > 0 {
                        let goal = groups.rotor(thread, 4);
                        let (at, len) = groups
                            .allocate_blocks(goal, missing, Claim::WriteBack, missing, &read)
                            .expect("reserved");
                        missing -= len;
                        groups.unreserve(u64::from(len));
                        mine.push((at, len));
                    }
                    for (at, len) in mine {
                        groups.unallocate_blocks(at, len);
                    }
                }
            });
        }
    });
}

#[test]
fn damage_is_found() {
    let (layout, drive) = small();
    let damaged = |block| Err(FsError::DamagedBlock { what: "group descriptor", block });
    // A descriptor with a wrong checksum, and ones with structures at impossible places.
    let edits: [fn(&mut GroupDesc); 4] = [
        |desc| desc.inode_table = BlockNo(5 * 512),
        |desc| desc.block_bitmap = desc.inode_bitmap,
        |desc| desc.block_bitmap = BlockNo(0),
        |desc| desc.free_blocks = 600,
    ];
    for edit in edits {
        let mut drive = drive.clone();
        let table = Arc::make_mut(drive.get_mut(&BlockNo(1)).expect("there"));
        let mut desc = GroupDesc::decode(&layout, &table[128..]);
        edit(&mut desc);
        desc.encode(&layout, 2, &mut table[128..]);
        assert_eq!(Groups::open(&layout, &reader(&drive)).map(|_| ()), damaged(BlockNo(1)));
    }
    let mut wrong = drive.clone();
    Arc::make_mut(wrong.get_mut(&BlockNo(1)).expect("there"))[128] ^= 1;
    assert_eq!(Groups::open(&layout, &reader(&wrong)).map(|_| ()), damaged(BlockNo(1)));

    // A journal in blocks of which the descriptor counts some as free, or that are the format's.
    let mut groups = Groups::open(&layout, &reader(&drive)).expect("undamaged");
    let first = layout.first_block(2).0;
    let journal = (first..first + 512).map(BlockNo).filter(|&at| !groups.is_system_block(at, 1));
    let journal: Vec<BlockNo> = journal.collect();
    assert_eq!(groups.add_journal(Ino(8), &journal), damaged(BlockNo(1)));
    let mut groups = Groups::open(&layout, &reader(&drive)).expect("undamaged");
    let what = "block list (blocks of the format)";
    let shared = Err(FsError::DamagedInode { what, ino: Ino(8) });
    assert_eq!(groups.add_journal(Ino(8), &[BlockNo(0)]), shared);

    // A bitmap without one of the format's own blocks: with a wrong checksum, with a wrong count, and
    // with neither.
    for (csum_seed, other) in [(layout.csum_seed, 0), (None, 0), (None, 63)] {
        let layout = Layout { csum_seed, ..layout.clone() };
        let mut wrong = drive.clone();
        let table = Arc::make_mut(wrong.get_mut(&BlockNo(1)).expect("there"));
        let desc = GroupDesc::decode(&layout, &table[..]);
        let bitmap = Arc::make_mut(wrong.get_mut(&desc.block_bitmap).expect("there"));
        bitmap[0] ^= 2;
        bitmap[other] |= 0x80;
        let read = reader(&wrong);
        let groups = Groups::open(&layout, &read).expect("descriptors are good");
        let found = groups.allocate_blocks(BlockNo(5), 1, Claim::User, 0, &read);
        // With checksums, the other groups need no bitmap on the drive, and serve. The free blocks of
        // this one do not count.
        if csum_seed.is_some() {
            assert_ne!(layout.group_of_block(found.expect("free").0), 0);
            let counts = groups.counts();
            let lost = u64::from(desc.free_blocks);
            assert_eq!(counts.free_blocks - counts.unreserved_blocks, lost);
        } else {
            found.expect_err("all groups are damaged");
        }
        let error = groups.prepare_free_blocks(BlockNo(300), 1, &read);
        let what = "block bitmap";
        assert_eq!(error, Err(FsError::DamagedBlock { what, block: desc.block_bitmap }));
    }
}

#[test]
fn blocks_of_an_inode_table_below_the_last_inode_get_zeroes() {
    let (layout, drive) = small();
    let groups = Groups::open(&layout, &reader(&drive)).expect("valid");
    let read = reader(&drive);
    // A file of group 2, whose inode table has four blocks of 16 inodes.
    let parent = Ino(2 * 64 + 1);
    let inodes: Vec<Ino> =
        (0..40).map(|_| groups.allocate_inode(parent, false, &read).expect("free")).collect();
    assert_eq!((inodes[0], inodes[39]), (parent, Ino(parent.0 + 39)));
    for ino in &inodes[5..39] {
        groups.unallocate_inode(*ino, false);
    }
    let table = groups.inode_place(parent).block;
    let zeroes: Vec<BlockNo> = groups
        .render()
        .into_iter()
        .filter(|(_, block)| block.iter().all(|byte| *byte == 0))
        .map(|(at, _)| at)
        .collect();
    // The caller has rendered inodes into the first block and the third.
    assert_eq!(zeroes, [BlockNo(table.0 + 1)]);
    assert!(!groups.inode_place(inodes[39]).is_fresh);
    assert!(groups.inode_place(Ino(parent.0 + 63)).is_fresh);
}

#[test]
fn an_inode_and_blocks_are_claimed_once() {
    let (layout, drive) = small();
    let groups = Groups::open(&layout, &reader(&drive)).expect("valid");
    let read = reader(&drive);
    let ino = Ino(3 * 64 + 7);
    assert_eq!(groups.claim_inode(ino, true, &read), Ok(true));
    assert_eq!(groups.claim_inode(ino, true, &read), Ok(false));
    assert_eq!(groups.is_inode_used(ino, &read), Ok(true));
    // A group with an inode in use has both bitmaps.
    let rendered: BTreeMap<_, _> = groups.render().into_iter().collect();
    let desc = GroupDesc::decode(&layout, &rendered[&BlockNo(1)][3 * 64..]);
    assert!(!desc.flags.intersects(GroupFlags::BLOCK_UNINIT | GroupFlags::INODE_UNINIT));
    assert!(rendered.contains_key(&desc.block_bitmap));
    assert_eq!((desc.used_dirs, desc.free_inodes, desc.itable_unused), (1, 63, 57));
    for ino in [Ino(0), Ino(layout.inodes + 1)] {
        groups.claim_inode(ino, false, &read).expect_err("no such inode");
    }
    assert_eq!(groups.claim_blocks(BlockNo(1000), 20, &read), Ok(20));
    assert_eq!(groups.claim_blocks(BlockNo(990), 34, &read), Ok(14));
    groups.claim_blocks(BlockNo(1000), 25, &read).expect_err("a bitmap");
}

proptest! {
    #[test]
    fn no_descriptors_and_bitmaps_panic(
        edits in proptest::collection::vec((0usize..320, any::<u8>()), 0..12),
        bits in proptest::collection::vec((0usize..64, any::<u8>()), 0..4),
        with_csum in any::<bool>(),
    ) {
        let (layout, mut drive) = small();
        let layout = Layout {
            csum_seed: if with_csum { layout.csum_seed } else { None },
            ..layout
        };
        for (n, block) in drive.values_mut().enumerate() {
            let block = Arc::make_mut(block);
            for (at, byte) in if n == 0 { &edits } else { &bits } {
                block[*at] = *byte;
            }
        }
        // Each descriptor has a right checksum.
        let table = Arc::make_mut(drive.get_mut(&BlockNo(1)).expect("there"));
        for group in 0..layout.groups {
            let offset = layout.descriptor_at(group).1;
            let desc = GroupDesc::decode(&layout, &table[offset..]);
            desc.encode(&layout, group, &mut table[offset..]);
        }
        let empty = Arc::new([0; BLOCK_BYTES]);
        let read = |at| Ok(drive.get(&at).cloned().unwrap_or_else(|| Arc::clone(&empty)));
        let Ok(groups) = Groups::open(&layout, &read) else { return Ok(()) };
        let mut batch = FreedBatch::default();
        for n in 0..5 {
            let goal = BlockNo(512 * n);
            if let Ok((at, len)) = groups.allocate_blocks(goal, 100, Claim::User, 0, &read) {
                prop_assert!(!groups.is_system_block(at, len));
                groups.free_blocks(at, len, &mut batch);
            }
            let parent = Ino(1 + 64 * n as u32);
            if let Ok(ino) = groups.allocate_inode(parent, true, &read) {
                prop_assert!(ino >= layout.first_ino);
                groups.free_inode(ino, true, &mut batch);
            }
            let _ = groups.claim_blocks(goal, 512, &read);
        }
        let _ = groups.render();
        groups.reuse(batch);
    }
}
