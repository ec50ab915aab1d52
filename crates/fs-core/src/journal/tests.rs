//! A journal against a model of a drive: commits, revokes, checkpoints and tail updates in any
//! order, with a crash between any two steps and in recovery.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::format::tests_support::superblock;
use super::format::{Header, JournalSuperblock, MAGIC, block_type};
use super::main_journal::{Checkpoint, MainJournal};
use super::recovery::{LogEnd, Recovery, recover};
use crate::block::{BLOCK_BYTES, Block, BlockNo};
use crate::format::layout::Layout;
use crate::storage::{BlockWrite, Placement};
use crate::testing::layout;
use crate::tid::Tid;

/// Where the blocks of the journal lie: not one after another.
fn journal_blocks(len: u32) -> Vec<BlockNo> {
    (0..u64::from(len)).map(|n| BlockNo(5000 + n * 7)).collect()
}

/// The content of version `value` of a block. Some begin with the magic number.
fn content(value: u64) -> Block {
    let mut block = [0; BLOCK_BYTES];
    block[8..16].copy_from_slice(&value.to_le_bytes());
    block[BLOCK_BYTES - 1] = 1;
    if value.is_multiple_of(3) {
        block[..4].copy_from_slice(&MAGIC.to_be_bytes());
    }
    block
}

fn value_of(block: &Block) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&block[8..16]);
    let value = u64::from_le_bytes(bytes);
    if *block == [0; BLOCK_BYTES] {
        return 0;
    }
    assert!(*block == content(value), "a block of one version");
    value
}

/// A drive with one stream. Groups are released one after another.
#[derive(Clone, Default)]
struct Drive {
    blocks: BTreeMap<BlockNo, Arc<Block>>,
    /// The groups that are not released.
    groups: VecDeque<Vec<BlockWrite>>,
    /// The number of groups so far.
    submitted: u64,
}

impl Drive {
    fn submit(&mut self, writes: Vec<BlockWrite>) -> u64 {
        self.groups.push_back(writes);
        self.submitted += 1;
        self.submitted
    }

    fn released(&self) -> u64 {
        self.submitted - self.groups.len() as u64
    }

    fn release(&mut self) {
        for write in self.groups.pop_front().into_iter().flatten() {
            self.blocks.insert(write.at, write.data);
        }
    }

    /// The content that a read returns: with all groups.
    fn read(&self, at: BlockNo) -> Arc<Block> {
        let newest = self.groups.iter().rev().flatten().find(|write| write.at == at);
        let newest = newest.map(|write| &write.data).or_else(|| self.blocks.get(&at));
        newest.cloned().unwrap_or_else(|| Arc::new([0; BLOCK_BYTES]))
    }

    /// A crash after which `kept` groups are there. Of the later ones, fresh blocks are undone or
    /// were never written, and each block in place has its old content or a newer one.
    fn crash(&mut self, kept: usize, chance: &mut dyn FnMut() -> bool) {
        for _ in 0..kept {
            self.release();
        }
        let mut stopped = BTreeSet::new();
        for write in core::mem::take(&mut self.groups).into_iter().flatten() {
            let is_there = chance();
            match write.placement {
                Placement::Fresh if is_there => {
                    self.blocks.remove(&write.at);
                }
                // Two writes of a stream to one block are done in their order.
                Placement::InPlace if is_there && !stopped.contains(&write.at) => {
                    self.blocks.insert(write.at, write.data);
                }
                Placement::InPlace => {
                    stopped.insert(write.at);
                }
                Placement::Fresh => {}
            }
        }
        self.submitted = 0;
    }
}

/// A change of a block.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A transaction has this version.
    Logged(u64),
    /// A transaction has revoked it.
    Revoked,
    /// It was written without the journal after it was revoked.
    Data(u64),
}

/// A file system that consists of a journal and some blocks.
struct Model {
    layout: Layout,
    len: u32,
    drive: Drive,
    journal: MainJournal,
    /// The changes of each block.
    history: BTreeMap<BlockNo, Vec<(Tid, Event)>>,
    /// The commits that are not durable, and their groups.
    commits: VecDeque<(Tid, u64)>,
    checkpoint: Option<(Checkpoint, u64)>,
    tail: Option<u64>,
    durable: Tid,
    next_value: u64,
    laps: u64,
}

const RING: u32 = 40;

fn open(layout: &Layout, drive: &Drive, len: u32) -> (JournalSuperblock, Recovery) {
    let blocks = journal_blocks(len);
    let raw = drive.read(blocks[0]);
    let superblock = JournalSuperblock::decode(layout, &raw, len).expect("a superblock");
    let mut read = |n: u32| Ok(drive.read(blocks[n as usize]));
    let recovery = recover(layout, &superblock, &mut read).expect("recovered");
    (superblock, recovery)
}

impl Model {
    fn new(layout: Layout, first_sequence: u32) -> Self {
        let mut drive = Drive::default();
        let mut first = superblock(RING);
        first.set_sequence(first_sequence);
        drive.blocks.insert(journal_blocks(RING)[0], Arc::new(first.encode(&layout)));
        let (superblock, recovery) = open(&layout, &drive, RING);
        let blocks = journal_blocks(RING);
        let journal = MainJournal::with_minimum(RING - 1, &layout, &superblock, blocks, &recovery)
            .expect("large enough");
        Self {
            layout,
            len: RING,
            drive,
            // A number was left out.
            durable: Tid(journal.next().0.saturating_sub(2)),
            journal,
            history: BTreeMap::new(),
            commits: VecDeque::new(),
            checkpoint: None,
            tail: None,
            next_value: 1,
            laps: 0,
        }
    }

    fn value(&mut self) -> u64 {
        self.next_value += 1;
        self.next_value - 1
    }

    fn last_event(&self, at: BlockNo) -> Option<(Tid, Event)> {
        self.history.get(&at).and_then(|events| events.last()).copied()
    }

    /// Commits versions of some blocks and revokes others. A block may be in both lists.
    fn commit(&mut self, blocks: &BTreeSet<u64>, revoked: &BTreeSet<u64>) {
        let tid = self.journal.next();
        if !self.journal.has_space(blocks.len(), revoked.len()).expect("it fits") {
            return;
        }
        let blocks: Vec<(BlockNo, u64)> =
            blocks.iter().map(|&at| (BlockNo(at), self.value())).collect();
        let revoked: Vec<BlockNo> = revoked.iter().map(|&at| BlockNo(at)).collect();
        for &at in &revoked {
            self.history.entry(at).or_default().push((tid, Event::Revoked));
        }
        for &(at, value) in &blocks {
            self.history.entry(at).or_default().push((tid, Event::Logged(value)));
        }
        let blocks: Vec<_> =
            blocks.iter().map(|&(at, value)| (at, Arc::new(content(value)))).collect();
        let before = self.journal.used();
        let commit = self.journal.encode_commit(tid, &blocks, &revoked, 7).expect("it fits");
        let needed = commit.body.len() + 1;
        assert_eq!(self.journal.used(), before + needed);
        self.laps += needed as u64;
        if let Some(start) = commit.start {
            self.drive.submit(vec![start]);
        }
        // A body may be more than one group.
        let mut body = commit.body;
        let rest = body.split_off(body.len() / 2);
        self.drive.submit(body);
        self.drive.submit(rest);
        let group = self.drive.submit(vec![commit.commit]);
        self.commits.push_back((tid, group));
    }

    /// Releases some groups, and reports it to the journal.
    fn release(&mut self, groups: usize) {
        for _ in 0..groups {
            self.drive.release();
        }
        let released = self.drive.released();
        while self.commits.front().is_some_and(|&(_, group)| group <= released) {
            let (tid, _) = self.commits.pop_front().expect("there is one");
            self.journal.on_commit_durable(tid);
            self.durable = tid;
        }
        if let Some((checkpoint, _)) = self.checkpoint.take_if(|(_, group)| *group <= released) {
            self.journal.on_checkpoint_released(checkpoint);
        }
        if self.tail.take_if(|group| *group <= released).is_some() {
            self.journal.on_tail_released();
        }
    }

    fn checkpoint(&mut self, max: usize) {
        let plan = self.journal.plan_checkpoint(max);
        assert!(plan.writes.len() <= max);
        if plan.is_empty() {
            return;
        }
        assert!(self.checkpoint.is_none(), "one at a time");
        let numbers: BTreeSet<BlockNo> = plan.writes.iter().map(|write| write.at).collect();
        assert_eq!(numbers.len(), plan.writes.len(), "each block once");
        let group = self.drive.submit(plan.writes.clone());
        self.checkpoint = Some((plan, group));
    }

    fn tail(&mut self) {
        if let Some(write) = self.journal.tail_update() {
            assert_eq!(write.placement, Placement::InPlace);
            let group = self.drive.submit(vec![write]);
            self.tail = Some(group);
        }
    }

    /// Writes a revoked block as data, on another stream, if it may be used again.
    fn data(&mut self, at: u64) {
        let at = BlockNo(at);
        if let Some((tid, Event::Revoked)) = self.last_event(at)
            && tid <= self.durable
            && !self.journal.is_written_home(at)
        {
            let value = self.value();
            self.history.entry(at).or_default().push((tid, Event::Data(value)));
            self.drive.blocks.insert(at, Arc::new(content(value)));
        }
    }

    /// The value that a block must have after transaction `tid`; `None`: any.
    fn expected(&self, at: BlockNo, tid: Tid) -> Option<u64> {
        let events = self.history.get(&at)?;
        match events.iter().rev().find(|(event, _)| *event <= tid) {
            None => Some(0),
            Some((_, Event::Logged(value) | Event::Data(value))) => Some(*value),
            Some((_, Event::Revoked)) => None,
        }
    }

    /// Reads see the newest versions.
    fn check_reads(&self) {
        for &at in self.history.keys() {
            let block = self.journal.committed(at).unwrap_or_else(|| self.drive.read(at));
            if let Some(expected) = self.expected(at, self.journal.next()) {
                assert_eq!(value_of(&block), expected, "block {at}");
            }
        }
    }

    fn unmount(&mut self) {
        while !self.journal.is_all_home() || self.tail.is_some() {
            self.checkpoint(usize::MAX);
            self.release(usize::from(u8::MAX));
            self.tail();
        }
        if let Some(write) = self.journal.empty() {
            self.drive.submit(vec![write]);
        }
        self.release(usize::from(u8::MAX));
        self.journal.on_tail_released();
        assert_eq!(self.journal.used(), 0);
        let (_, recovery) = open(&self.layout, &self.drive, self.len);
        // The number stays if nothing was written since the mount.
        assert_eq!(recovery.end, LogEnd::Empty);
        assert!([0, 1].map(|plus| self.next_on_drive(plus)).contains(&recovery.next));
        self.check_state(Tid(self.journal.next().0 - 1));
    }

    fn next_on_drive(&self, plus: u64) -> u32 {
        Tid(self.journal.next().0 + plus).on_drive()
    }

    fn check_state(&self, tid: Tid) {
        for &at in self.history.keys() {
            if let Some(expected) = self.expected(at, tid) {
                assert_eq!(value_of(&self.drive.read(at)), expected, "block {at} after {tid}");
            }
        }
    }

    /// Crashes, recovers, possibly crashes in recovery, and mounts.
    fn crash(&mut self, kept: usize, chance: &mut dyn FnMut() -> bool) {
        self.drive.crash(kept % (self.drive.groups.len() + 1), chance);
        loop {
            let (superblock, recovery) = open(&self.layout, &self.drive, self.len);
            // `next` leaves out a number.
            let back = u64::from(self.next_on_drive(1).wrapping_sub(recovery.next));
            let recovered = Tid((self.journal.next().0 - 1).saturating_sub(back));
            assert!(
                self.durable <= recovered && recovered < self.journal.next(),
                "{} <= {recovered} < {}",
                self.durable,
                self.journal.next()
            );
            let blocks = journal_blocks(self.len);
            let mut writes = Vec::new();
            for home in &recovery.homes {
                let mut read = |n: u32| Ok(self.drive.read(blocks[n as usize]));
                let data = recovery.load(home, &mut read).expect("loaded");
                writes.push(BlockWrite { at: home.at, data, placement: Placement::InPlace });
            }
            self.drive.submit(writes);
            if chance() {
                self.drive.crash(0, chance);
                continue;
            }
            self.drive.release();
            self.check_state(recovered);
            let emptied = recovery.emptied(&superblock).encode(&self.layout);
            let data = Arc::new(emptied);
            self.drive.submit(vec![BlockWrite {
                at: blocks[0],
                data,
                placement: Placement::InPlace,
            }]);
            if chance() {
                self.drive.crash(0, chance);
                let (superblock, recovery) = open(&self.layout, &self.drive, self.len);
                if superblock.start() == 0 {
                    assert_eq!(recovery.end, LogEnd::Empty);
                } else {
                    continue;
                }
            }
            self.drive.release();
            let (superblock, recovery) = open(&self.layout, &self.drive, self.len);
            assert_eq!(recovery.transactions, 0);
            self.journal =
                MainJournal::with_minimum(RING - 1, &self.layout, &superblock, blocks, &recovery)
                    .expect("large enough");
            for events in self.history.values_mut() {
                events.retain(|(tid, _)| *tid <= recovered);
                // The next mount's numbers are larger.
                for (tid, _) in events {
                    *tid = Tid(0);
                }
            }
            self.history.retain(|_, events| !events.is_empty());
            self.durable = Tid(self.journal.next().0.saturating_sub(2));
            (self.commits, self.checkpoint, self.tail) = (VecDeque::new(), None, None);
            return;
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Commit(BTreeSet<u64>, BTreeSet<u64>),
    Release(usize),
    Checkpoint(usize),
    Tail,
    Data(u64),
    Unmount,
    Crash(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let block = 1u64..14;
    let some = |max| proptest::collection::btree_set(1u64..14, 0..max);
    prop_oneof![
        8 => (some(7), some(4)).prop_map(|(blocks, revoked)| Step::Commit(blocks, revoked)),
        8 => (0usize..9).prop_map(Step::Release),
        5 => (1usize..20).prop_map(Step::Checkpoint),
        5 => Just(Step::Tail),
        3 => block.prop_map(Step::Data),
        1 => Just(Step::Unmount),
        1 => (0usize..30, any::<u64>()).prop_map(|(kept, seed)| Step::Crash(kept, seed)),
    ]
}

#[derive(Clone, Debug)]
enum Damage {
    Byte(usize, u8),
    Zeroes,
    Other(usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    // Most fields are at the beginning and at the end.
    let offset = prop_oneof![0..64_usize, BLOCK_BYTES - 8..BLOCK_BYTES, 0..BLOCK_BYTES];
    prop_oneof![
        4 => (offset, 1..=u8::MAX).prop_map(|(offset, bits)| Damage::Byte(offset, bits)),
        1 => Just(Damage::Zeroes),
        1 => (1..RING as usize).prop_map(Damage::Other),
    ]
}

/// A sequence of bits.
fn bits(mut seed: u64) -> impl FnMut() -> bool {
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (seed >> 40) & 1 == 1
    }
}

fn layouts() -> [Layout; 3] {
    let without = Layout { csum_seed: None, ..layout() };
    let is_32bit = Layout { is_64bit: false, ..without.clone() };
    [layout(), without, is_32bit]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Traps T9, T11 and T15 for the journal.
    #[test]
    fn a_crash_at_any_point_leaves_a_state_between(
        shape in 0usize..3,
        first in prop_oneof![Just(1u32), Just(u32::MAX - 5), any::<u32>()],
        steps in proptest::collection::vec(step(), 1..120),
        kept in 0usize..30,
        seed in any::<u64>(),
    ) {
        let mut model = Model::new(layouts()[shape].clone(), first);
        for step in steps {
            match step {
                Step::Commit(blocks, revoked) => model.commit(&blocks, &revoked),
                Step::Release(groups) => model.release(groups),
                Step::Checkpoint(max) => model.checkpoint(max),
                Step::Tail => model.tail(),
                Step::Data(at) => model.data(at),
                Step::Unmount => model.unmount(),
                Step::Crash(kept, seed) => model.crash(kept, &mut bits(seed)),
            }
            model.check_reads();
        }
        model.crash(kept, &mut bits(seed));
    }

    /// Damage ends the log or is an error; with checksums it never changes what is recovered.
    #[test]
    fn a_damaged_log_is_never_replayed_wrongly(
        shape in 0usize..3,
        commits in proptest::collection::vec(
            (proptest::collection::btree_set(1u64..14, 0..7),
             proptest::collection::btree_set(1u64..14, 0..4)),
            1..6,
        ),
        damage in proptest::collection::vec(
            (1usize..RING as usize, damage()), 1..4,
        ),
    ) {
        let layout = layouts()[shape].clone();
        let mut model = Model::new(layout.clone(), 1);
        // Another lap is in the ring before.
        for n in 0..12 {
            model.commit(&BTreeSet::from([1 + n]), &BTreeSet::new());
            model.release(usize::from(u8::MAX));
        }
        model.unmount();
        for (blocks, revoked) in &commits {
            model.commit(blocks, revoked);
        }
        model.release(usize::from(u8::MAX));
        let places = journal_blocks(RING);
        let raw = model.drive.read(places[0]);
        let first = JournalSuperblock::decode(&layout, &raw, RING).expect("one").sequence();
        for (at, damage) in damage {
            let mut block = *model.drive.read(places[at]);
            match damage {
                Damage::Byte(offset, bits) => block[offset] ^= bits,
                Damage::Zeroes => block = [0; BLOCK_BYTES],
                Damage::Other(other) => {
                    let other = *model.drive.read(places[other]);
                    // Blocks of jbd2 do not have their place. A commit block of the log ends its
                    // transaction wherever it is, also before all copies.
                    let ends = |header: Header| {
                        header.block_type == block_type::COMMIT && header.sequence >= first
                    };
                    if !Header::decode(&other).is_some_and(ends) {
                        block = other;
                    }
                }
            }
            model.drive.blocks.insert(places[at], Arc::new(block));
        }

        let raw = model.drive.read(places[0]);
        let superblock = JournalSuperblock::decode(&layout, &raw, RING).expect("a superblock");
        let mut read = |n: u32| Ok(model.drive.read(places[n as usize]));
        let Ok(recovery) = recover(&layout, &superblock, &mut read) else { return Ok(()) };
        let load = |home| recovery.load(home, &mut read).expect("loaded");
        let homes: Vec<Arc<Block>> = recovery.homes.iter().map(load).collect();
        if layout.csum_seed.is_none() {
            return Ok(());
        }
        for (home, block) in recovery.homes.iter().zip(homes) {
            model.drive.blocks.insert(home.at, block);
        }
        let before = superblock.sequence().wrapping_sub(1);
        model.check_state(Tid(recovery.last.unwrap_or(before).into()));
    }
}
