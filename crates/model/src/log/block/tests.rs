//! A log on a device that loses its power at every possible moment.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use proptest::prelude::*;
use riopipe_nvme::digest::soft as crc32c;
use riopipe_order::attribute::{Attribute, Seq, StreamId, VolumeId};
use riopipe_order::entry::{Origin, PartitionId, Position};
use riopipe_order::ordering_log::{StreamLog, partition_bytes};

use super::*;
use crate::seed::Seed;

/// Blocks in memory with a power cut on demand. Each block of the writes in flight is then either
/// there as a whole or not at all (assumption M1), independently of the others (assumption M4).
struct Fake(Mutex<State>);

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    /// Writes that have begun and not completed.
    in_flight: Vec<(usize, Vec<u8>)>,
    /// Number of waits for writes so far.
    writes: u64,
    /// Number of waits that still succeed; after them the device is dead.
    left: u64,
    seed: u64,
    is_volatile: bool,
    flushes: u64,
    flush_fails: bool,
    failure: FlushFailure,
}

impl Fake {
    fn new(len: usize) -> Arc<Self> {
        let bytes = vec![FOREIGN; len];
        Arc::new(Self(Mutex::new(State { bytes, left: u64::MAX, ..State::default() })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl Blocks for Arc<Fake> {
    type Mirror = Vec<u8>;
    type ReadError = ();

    fn is_volatile(&self) -> bool {
        self.state().is_volatile
    }

    fn read(&self, range: Range<usize>) -> Result<Vec<u8>, ()> {
        assert!(range.start.is_multiple_of(BLOCK_BYTES) && range.end.is_multiple_of(BLOCK_BYTES));
        Ok(self.state().bytes[range].to_vec())
    }

    fn begin_write(
        &self,
        at: usize,
        bytes: &[u8],
        durability: Durability,
    ) -> Result<(), RegionError> {
        let mut state = self.state();
        assert!(at.is_multiple_of(BLOCK_BYTES) && bytes.len().is_multiple_of(BLOCK_BYTES));
        assert!(!bytes.is_empty() && (state.is_volatile || durability == Durability::AfterFlush));
        let twice = |(other, there): &(usize, Vec<u8>)| {
            *other < at + bytes.len() && at < other + there.len()
        };
        assert!(!state.in_flight.iter().any(twice), "a block twice in flight (M4)");
        if state.left == 0 {
            return Err(RegionError::new("no power"));
        }
        state.in_flight.push((at, bytes.to_vec()));
        Ok(())
    }

    fn complete(&self) -> Result<(), RegionError> {
        let mut state = self.state();
        if state.left == 0 {
            return Err(RegionError::new("no power"));
        }
        state.writes += 1;
        state.left -= 1;
        let dying = state.left == 0;
        let mut seed = Seed::new(state.seed);
        for (at, bytes) in core::mem::take(&mut state.in_flight) {
            for (to, block) in (at..).step_by(BLOCK_BYTES).zip(bytes.chunks_exact(BLOCK_BYTES)) {
                if !dying || seed.below(2) == 1 {
                    state.bytes[to..to + BLOCK_BYTES].copy_from_slice(block);
                }
            }
        }
        if dying { Err(RegionError::new("the power went")) } else { Ok(()) }
    }

    fn flush(&self) -> Result<(), RegionError> {
        let mut state = self.state();
        assert!(state.in_flight.is_empty(), "a FLUSH covers only what has completed (M2)");
        state.flushes += 1;
        if state.flush_fails { Err(RegionError::new("the cache is gone")) } else { Ok(()) }
    }

    fn with_flush_lock<T>(&self, f: impl FnOnce(&mut FlushFailure) -> T) -> T {
        let mut failure = core::mem::take(&mut self.state().failure);
        let done = f(&mut failure);
        self.state().failure = failure;
        done
    }
}

/// The contents that `MemRegion::forgetful` allows after a crash: for each word its durable value,
/// or any stored since the last fence.
#[derive(Default)]
struct Allowed {
    words: BTreeMap<usize, Vec<u64>>,
}

/// A part together with this account.
struct Watched {
    part: BlockPart<Arc<Fake>>,
    allowed: Arc<Mutex<Allowed>>,
}

impl Watched {
    fn open(fake: &Arc<Fake>) -> Self {
        let part = BlockPart::read(Arc::clone(fake), PART).unwrap();
        Self { part, allowed: Arc::default() }
    }
}

impl Region for Watched {
    fn len(&self) -> usize {
        self.part.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.part.read(offset, into);
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let mut old = vec![0; bytes.len()];
        self.part.read(offset, &mut old);
        let mut allowed = self.allowed.lock().unwrap();
        for (i, (new, old)) in bytes.chunks_exact(8).zip(old.chunks_exact(8)).enumerate() {
            let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
            let values = allowed.words.entry(offset + 8 * i).or_insert_with(|| vec![word(old)]);
            values.push(word(new));
        }
        self.part.write(offset, bytes);
    }

    fn write_word(&mut self, offset: usize, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }

    fn fence(&mut self) -> Result<(), RegionError> {
        self.part.fence()?;
        let mut allowed = self.allowed.lock().unwrap();
        // A fence that succeeds although it left something volatile would be the worst failure.
        let bytes = &self.part.blocks.state().bytes[PART];
        for (&offset, values) in &allowed.words {
            assert_eq!(word_at(bytes, offset), *values.last().unwrap(), "word {offset}");
        }
        allowed.words.clear();
        Ok(())
    }
}

fn word_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

/// Twelve blocks: enough for dirty blocks with gaps between them.
const SLOTS: u32 = 700;
/// Not at the start of the device, and followed by another part in the next block.
const START: usize = 3 * BLOCK_BYTES;
const PART: Range<usize> = START..START + partition_bytes(SLOTS);
const DEVICE: usize = PART.end.next_multiple_of(BLOCK_BYTES) + 2 * BLOCK_BYTES;
const FOREIGN: u8 = 0xa5;
const ID: PartitionId = PartitionId { volume: VolumeId([7; 16]), stream: StreamId(3) };

fn attribute(seq: u64) -> Attribute {
    Attribute { tag: seq ^ 0xfeed, ..riopipe_testkit::attribute(seq, seq * 8) }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Append(u8),
    Persist(u8),
    Fence,
    Release(u8),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (1..120u8).prop_map(Op::Append),
        4 => any::<u8>().prop_map(Op::Persist),
        3 => Just(Op::Fence),
        1 => (0..200u8).prop_map(Op::Release),
    ];
    proptest::collection::vec(op, 1..40)
}

/// The calls made on the log, and those that a fence has confirmed.
#[derive(Default)]
struct Expected {
    /// By seq: position, and whether persisted.
    entries: BTreeMap<u64, (Position, bool)>,
    /// The same, as of the last fence that succeeded.
    fenced: BTreeMap<u64, (Position, bool)>,
    released: Seq,
    last: u64,
    /// Entries from this seq on belong to this binding, and may be marked persisted.
    bound_from: u64,
}

/// Makes the calls `ops` until the power is cut.
fn live(log: &mut StreamLog<Watched>, expected: &mut Expected, ops: &[Op]) {
    for &op in ops {
        match op {
            Op::Append(count) => {
                for _ in 0..count {
                    if log.free_slots() == 0 {
                        break;
                    }
                    // A full ring first writes its head mark; the power cut may happen then.
                    let Ok(position) = log.append(&attribute(expected.last + 1)) else {
                        return;
                    };
                    expected.last += 1;
                    expected.entries.insert(expected.last, (position, false));
                }
            }
            Op::Persist(which) => {
                // A write is submitted, and so completed, only when its entry is durable.
                let from = expected.bound_from.max(expected.released.0 + 1);
                let can: Vec<u64> = expected.fenced.range(from..).map(|(&seq, _)| seq).collect();
                if !can.is_empty() {
                    let entry =
                        expected.entries.get_mut(&can[usize::from(which) % can.len()]).unwrap();
                    log.persist(entry.0);
                    entry.1 = true;
                }
            }
            Op::Fence => match log.fence() {
                Ok(()) => expected.fenced.clone_from(&expected.entries),
                Err(_) => return,
            },
            Op::Release(back) => {
                // Only durable entries are ever released (trap T1).
                let fenced = expected.fenced.last_key_value().map_or(0, |(&seq, _)| seq);
                let mark = Seq(fenced.saturating_sub(u64::from(back)));
                expected.released = expected.released.max(mark);
                log.release(mark);
            }
        }
    }
}

/// Checks everything that must hold of the device's bytes and of the log read from them. Later
/// checks take the found log as the truth.
fn judge(fake: &Arc<Fake>, allowed: &Allowed, mirror: &[u8], expected: &mut Expected) {
    let bytes = fake.state().bytes.clone();
    for offset in (0..PART.len()).step_by(8) {
        let now = word_at(&bytes[PART], offset);
        match allowed.words.get(&offset) {
            Some(values) => assert!(values.contains(&now), "word {offset}: {now:x} of {values:x?}"),
            // The fence wrote the word as it is in the mirror.
            None => assert_eq!(now, word_at(mirror, offset), "word {offset} was fenced"),
        }
    }
    for (at, &byte) in bytes.iter().enumerate() {
        if !(PART.start..PART.end.next_multiple_of(BLOCK_BYTES)).contains(&at) {
            assert_eq!(byte, FOREIGN, "byte {at} belongs to another part");
        }
    }
    let part = BlockPart::read(Arc::clone(fake), PART).unwrap();
    let (_, found) = StreamLog::open(part, ID, crc32c).unwrap();
    assert!(found.released <= expected.released);
    let mut listed = BTreeMap::new();
    for entry in &found.entries {
        let seq = entry.attribute.seq;
        assert_eq!(entry.attribute, attribute(seq.0), "an entry that was never appended");
        listed.insert(seq.0, (entry.position, entry.persisted));
    }
    for (seq, fenced) in expected.fenced.range(expected.released.0 + 1..) {
        let there = listed.get(seq);
        assert!(there.is_some(), "{seq} was fenced, and is lost");
        assert!(
            there >= Some(fenced),
            "{seq} was marked persisted and fenced, and is not persisted"
        );
    }
    for (seq, there) in &listed {
        assert!(expected.entries.get(seq) >= Some(there), "{seq} was never persisted");
    }
    // Behind a torn append there may be entries that were never fenced: a resumed log drops them.
    let appended = expected.entries.range(found.released.0 + 1..);
    let whole = appended.map_while(|(seq, _)| listed.get_key_value(seq));
    expected.fenced = whole.map(|(&seq, &there)| (seq, there)).collect();
    expected.entries = listed;
}

/// Two runs on one device, with the power cut at write `first` of the first and write `second` of
/// the second (0: no cut). Returns the number of writes of each.
fn two_runs(ops: [&[Op]; 2], first: u64, second: u64, seed: u64) -> [u64; 2] {
    let fake = Fake::new(DEVICE);
    StreamLog::format(Watched::open(&fake), ID, 1, crc32c).unwrap();
    let mut expected = Expected::default();
    let mut writes = [0; 2];
    for (index, (ops, dies_at)) in ops.into_iter().zip([first, second]).enumerate() {
        {
            let mut state = fake.state();
            state.writes = 0;
            state.left = if dies_at == 0 { u64::MAX } else { dies_at };
            state.seed = seed;
        }
        let mut log = StreamLog::open(Watched::open(&fake), ID, crc32c).unwrap().0;
        // The power cut may also hit the binding.
        if log.resume(Origin { generation: 1, incarnation: index as u32 + 1 }).is_ok() {
            expected.entries.clone_from(&expected.fenced);
            expected.bound_from = expected.last + 1;
            live(&mut log, &mut expected, ops);
        }
        writes[index] = fake.state().writes;
        let Watched { part, allowed } = log.into_region();
        judge(
            &fake,
            &allowed.lock().unwrap(),
            &part.mirror[part.part_in_mirror.clone()],
            &mut expected,
        );
    }
    writes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// M5 on a device: the power is cut at every write, and any part of it may be lost.
    #[test]
    fn a_power_cut_at_any_write_leaves_what_a_forgetful_region_may(
        first in ops(), second in ops(), seed in any::<u64>(),
    ) {
        let ops = [&first[..], &second];
        let [writes, _] = two_runs(ops, 0, 0, seed);
        for cut in 1..=writes {
            let [_, writes] = two_runs(ops, cut, 0, seed ^ cut);
            let again = 1 + (seed ^ cut) % writes.max(1);
            two_runs(ops, cut, again, seed.rotate_left(17) ^ cut);
        }
    }
}

#[test]
fn a_cut_loses_any_subset_of_the_blocks_in_flight() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..64u64 {
        let fake = Fake::new(DEVICE);
        let mut part = BlockPart::read(Arc::clone(&fake), PART).unwrap();
        part.write(0, &[1; 3 * BLOCK_BYTES]);
        fake.state().left = 1;
        fake.state().seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        part.fence().unwrap_err();
        let bytes = fake.state().bytes.clone();
        let there = [0, 1, 2].map(|block| bytes[START + block * BLOCK_BYTES] == 1);
        seen.insert(there);
    }
    assert_eq!(seen.len(), 8, "{seen:?}");
}

#[test]
fn adjacent_blocks_are_written_together() {
    let mut dirty = DirtyBlocks::none_of(200);
    let mut runs = Vec::new();
    dirty.take_runs(&mut runs);
    assert!(runs.is_empty());
    dirty.mark(70, 70);
    dirty.mark(63, 64);
    dirty.mark(199, 199);
    dirty.mark(0, 0);
    dirty.mark(70, 70);
    dirty.take_runs(&mut runs);
    let blocks = |first: usize, end: usize| first * BLOCK_BYTES..end * BLOCK_BYTES;
    assert_eq!(runs, [blocks(0, 1), blocks(63, 65), blocks(70, 71), blocks(199, 200)]);
    dirty.take_runs(&mut runs);
    assert!(runs.is_empty(), "each is written once");
    dirty.mark(10, 10);
    dirty.mark(10 + GAP_BLOCKS_MAX + 1, 10 + GAP_BLOCKS_MAX + 1);
    dirty.take_runs(&mut runs);
    assert_eq!(runs, [blocks(10, 12 + GAP_BLOCKS_MAX)], "a small gap does not split a write");
}

#[test]
fn the_common_fence_is_one_write() {
    let fake = Fake::new(DEVICE);
    let mut log = StreamLog::format(Watched::open(&fake), ID, 1, crc32c).unwrap();
    log.resume(Origin { generation: 1, incarnation: 1 }).unwrap();
    let before = fake.state().writes;
    // Fewer entries than it takes to write a head mark as well.
    for seq in 1..=20 {
        let position = log.append(&attribute(seq)).unwrap();
        log.fence().unwrap();
        log.persist(position);
        log.fence().unwrap();
        log.fence().unwrap();
    }
    assert_eq!(fake.state().writes - before, 40, "one for each fence with dirty blocks");
}

#[test]
fn a_failed_fence_stops_the_log_for_good() {
    let fake = Fake::new(DEVICE);
    let mut log = StreamLog::format(Watched::open(&fake), ID, 1, crc32c).unwrap();
    log.resume(Origin { generation: 1, incarnation: 1 }).unwrap();
    log.append(&attribute(1)).unwrap();
    fake.state().left = 1;
    log.fence().unwrap_err();
    // The device works again. Writes in between may be lost, so the log still accepts nothing.
    fake.state().left = u64::MAX;
    let writes = fake.state().writes;
    assert!(log.fence().is_err() && log.append(&attribute(2)).is_err());
    let mut part = log.into_region().part;
    part.write(0, &[1; 8]);
    assert!(part.fence().is_err(), "the part itself refuses, too");
    assert_eq!(fake.state().writes, writes);
}

#[test]
fn a_volatile_cache_is_flushed_with_each_fence_and_on_opening() {
    let fake = Fake::new(DEVICE);
    make_content_durable(&fake).unwrap();
    assert_eq!(fake.state().flushes, 0, "with power-loss protection there is nothing to flush");
    fake.state().is_volatile = true;
    make_content_durable(&fake).unwrap();
    assert_eq!(fake.state().flushes, 1);
    let mut part = BlockPart::read(Arc::clone(&fake), PART).unwrap();
    part.write(0, &[1; 8]);
    part.fence().unwrap();
    assert_eq!(fake.state().flushes, 1, "one write is durable by itself");
    part.write(0, &[2; 8]);
    part.write(9 * BLOCK_BYTES, &[2; 8]);
    part.fence().unwrap();
    assert_eq!(fake.state().writes, 2);
    assert_eq!(fake.state().flushes, 2);
    fake.state().flush_fails = true;
    assert!(make_content_durable(&fake).is_err());
}

#[test]
fn t22_after_a_failed_flush_every_part_refuses() {
    for (is_volatile, goes_on) in [(true, false), (false, true)] {
        let fake = Fake::new(DEVICE);
        fake.state().is_volatile = is_volatile;
        let mut first = BlockPart::read(Arc::clone(&fake), 0..BLOCK_BYTES).unwrap();
        let mut other = BlockPart::read(Arc::clone(&fake), BLOCK_BYTES..2 * BLOCK_BYTES).unwrap();
        first.write(0, &[1; 8]);
        fake.state().left = 1;
        first.fence().unwrap_err();
        // The device works again, but the cached writes of other parts may be lost.
        fake.state().left = u64::MAX;
        other.write(0, &[2; 8]);
        let fenced = other.fence();
        assert_eq!(fenced.is_ok(), goes_on, "{fenced:?}");
        assert!(first.fence().is_err());
    }
}
