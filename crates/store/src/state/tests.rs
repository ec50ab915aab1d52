//! Random transactions against a simple model, with a crash at any point: any prefix of the records
//! that is not shorter than the durable one, and any subset of the data that is not durable.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use riopipe_testkit::Random;

use super::*;

type Model = BTreeMap<String, Vec<u8>>;

const LBA: u64 = 1000;
const BLOCKS: u64 = 48;

const LIMITS: Limits = Limits {
    inline: 6000,
    record: 1 << 20,
    snapshot: 1 << 20,
    queue: 1 << 20,
    log_queue: 100,
    group: 3,
};

const ENOUGH: LogSpace = LogSpace { blocks: 1 << 20, free: 1 << 20, queued: 0 };

/// A store with a data stream and a log that a crash can cut.
struct World {
    random: Random,
    state: State,
    /// The durable content of the blocks.
    drive: BTreeMap<u64, Vec<u8>>,
    /// The groups that are taken out and not submitted.
    taken: VecDeque<Group>,
    /// The writes that are not durable: seq, block, content.
    in_flight: Vec<(u64, u64, Vec<u8>)>,
    seq: u64,
    /// The log. The Lsn of a record is its index.
    log: Vec<(u64, Entry)>,
    log_durable: usize,
    /// The model after each number.
    models: Vec<Model>,
    is_checkpoint_queued: bool,
    /// A read that has begun: the object, the offset, the plan.
    slow_read: Option<(String, usize, ReadPlan)>,
    slow_reads: usize,
    accepted: usize,
    full: usize,
    checkpoints: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let state = State::new(LBA, BLOCKS, LIMITS);
        let mut world = Self {
            random: Random(seed),
            state,
            drive: BTreeMap::new(),
            taken: VecDeque::new(),
            in_flight: Vec::new(),
            seq: 0,
            log: Vec::new(),
            log_durable: 0,
            models: vec![Model::new()],
            is_checkpoint_queued: false,
            slow_read: None,
            slow_reads: 0,
            accepted: 0,
            full: 0,
            checkpoints: 0,
        };
        world.checkpoint();
        world.append();
        world.log_durable = 1;
        world.is_checkpoint_queued = false;
        world
    }

    fn bytes(&mut self, max: u64) -> Vec<u8> {
        let len = self.random.below(max);
        let first = self.random.next() as u8;
        (0..len).map(|at| first.wrapping_add((at / 13) as u8) | 1).collect()
    }

    fn transaction(&mut self) {
        let mut model = self.models.last().cloned().unwrap_or_default();
        let mut ops = Vec::new();
        let mut expected = Ok(());
        for _ in 0..1 + self.random.below(3) {
            let name = format!("object{}", self.random.below(5));
            let max = if self.random.one_in(3) { 30_000 } else { 5000 };
            match self.random.below(6) {
                0 | 1 => {
                    let bytes = self.bytes(max);
                    model.insert(name.clone(), bytes.clone());
                    ops.push(Op::Put { name, bytes });
                }
                2 => {
                    if model.remove(&name).is_none() && expected.is_ok() {
                        expected = Err(Refused::<()>::Unknown { name: name.clone() });
                    }
                    ops.push(Op::Remove { name });
                }
                _ => {
                    let bytes = self.bytes(max);
                    let size = model.get(&name).map_or(0, Vec::len);
                    let offset = self.random.below(size as u64 + 2);
                    match model.get_mut(&name) {
                        _ if expected.is_err() => {}
                        None => expected = Err(Refused::Unknown { name: name.clone() }),
                        Some(_) if offset > size as u64 => {
                            let (name, size) = (name.clone(), size as u64);
                            expected = Err(Refused::Range { name, offset, len: bytes.len(), size });
                        }
                        Some(object) => {
                            let at = offset as usize;
                            object.resize(size.max(at + bytes.len()), 0);
                            object[at..at + bytes.len()].copy_from_slice(&bytes);
                        }
                    }
                    ops.push(Op::Write { name, offset, bytes });
                }
            }
        }
        let drive = &self.drive;
        let mut read = |lba, into: &mut [u8]| {
            into.copy_from_slice(&drive[&lba]);
            Ok(())
        };
        match self.state.prepare(&ops, ENOUGH, &mut read) {
            Ok(number) => {
                assert_eq!(expected, Ok(()));
                assert_eq!(number as usize, self.models.len());
                self.models.push(model);
                self.accepted += 1;
            }
            // The space may be used up before the wrong change.
            Err(Refused::Space { .. }) => self.full += 1,
            Err(refused) => assert_eq!(Err(refused), expected),
        }
    }

    fn checkpoint(&mut self) {
        if self.is_checkpoint_queued {
            return;
        }
        self.is_checkpoint_queued = true;
        self.state.checkpoint();
        self.models.push(self.models.last().cloned().unwrap_or_default());
        self.checkpoints += 1;
    }

    fn send(&mut self) {
        self.taken.extend(self.state.next_group());
        if self.random.one_in(2)
            && let Some(group) = self.taken.pop_front()
        {
            self.seq += 1;
            for (lba, held) in &group.blocks {
                let mut bytes = vec![0; BLOCK];
                held.copy(0, &mut bytes);
                self.in_flight.push((self.seq, *lba, bytes));
            }
            self.state.on_submitted(&group, self.seq);
        }
    }

    fn data_durable(&mut self) {
        let first = self.in_flight.first().map_or(self.seq, |(seq, ..)| *seq);
        let seq = first + self.random.below(self.seq - first + 1);
        let (durable, rest) = self.in_flight.drain(..).partition(|(of, ..)| *of <= seq);
        self.in_flight = rest;
        let durable: Vec<(u64, u64, Vec<u8>)> = durable;
        self.drive.extend(durable.into_iter().map(|(_, lba, bytes)| (lba, bytes)));
        self.state.on_data_durable(seq);
    }

    fn append(&mut self) {
        while let Some((number, entry)) = self.state.next_record() {
            self.state.on_appended(number, self.log.len() as u64);
            self.log.push((number, entry));
            if self.random.one_in(3) {
                break;
            }
        }
    }

    fn log_durable(&mut self) {
        let left = self.log.len() - self.log_durable;
        let last = self.log_durable;
        self.log_durable += self.random.index(left + 1);
        let newly = &self.log[last..self.log_durable];
        if newly.iter().any(|(_, entry)| matches!(entry, Entry::Checkpoint(_))) {
            self.is_checkpoint_queued = false;
        }
        self.state.on_log_durable(self.log_durable as u64);
    }

    /// Carries out a read.
    fn read(&self, plan: &ReadPlan) -> Vec<u8> {
        let mut bytes = vec![0; plan.parts.len() * BLOCK];
        for (part, into) in plan.parts.iter().zip(bytes.chunks_mut(BLOCK)) {
            match part {
                Part::Held(held) => held.copy(0, into),
                Part::Home(lba) => match self.drive.get(lba) {
                    Some(content) => into.copy_from_slice(content),
                    None => into.fill(0xEE),
                },
            }
        }
        bytes.drain(..plan.skip);
        bytes.truncate(plan.len);
        bytes
    }

    /// Reads all objects.
    fn content(&self) -> Model {
        let plan = |name: &str| self.state.plan_read(name, None).unwrap();
        self.state.objects().map(|(name, _)| (name.into(), self.read(&plan(name)))).collect()
    }

    /// Ends the read that has begun earlier, and begins another one.
    fn slow_read(&mut self) {
        let model = self.models.last().unwrap();
        if let Some((name, offset, plan)) = self.slow_read.take() {
            let bytes = self.read(&plan);
            if self.state.is_current(&name, &plan) {
                let end = offset + plan.len;
                assert!(model[&name][offset..end] == bytes, "{name} from {offset} to {end}");
                self.slow_reads += 1;
            }
        }
        let name = format!("object{}", self.random.below(5));
        let size = model.get(&name).map_or(0, Vec::len);
        let offset = self.random.index(size + 1);
        let len = self.random.index(size - offset + 2);
        match self.state.plan_read(&name, Some((offset as u64, len))) {
            Ok(plan) => self.slow_read = Some((name, offset, plan)),
            Err(ReadRefused::Unknown) => assert!(!model.contains_key(&name)),
            Err(ReadRefused::Range { .. }) => assert!(offset + len > size),
        }
    }

    fn crash(&mut self) {
        self.taken.clear();
        self.slow_read = None;
        for (_, lba, bytes) in std::mem::take(&mut self.in_flight) {
            match self.random.below(3) {
                0 => {}
                1 => drop(self.drive.insert(lba, bytes)),
                // Undo zeroes fresh blocks of groups that are not durable.
                _ => drop(self.drive.insert(lba, vec![0; BLOCK])),
            }
        }
        let left = self.log.len() - self.log_durable;
        let kept = self.log_durable + self.random.index(left + 1);
        self.log.truncate(kept);
        self.log_durable = kept;
        let is_snapshot = |(_, entry): &(u64, Entry)| matches!(entry, Entry::Checkpoint(_));
        let snapshot = self.log.iter().rposition(is_snapshot).unwrap();
        for (_, entry) in &self.log[snapshot..] {
            match entry {
                Entry::Checkpoint(bytes) => {
                    self.state = State::of_snapshot(bytes, LIMITS).unwrap();
                }
                Entry::Transaction(bytes) => self.state.replay(bytes).unwrap(),
            }
        }
        let last = self.log.last().unwrap().0 as usize;
        self.models.truncate(last + 1);
        // A new opening numbers the groups of its stream anew.
        self.seq = 0;
        self.is_checkpoint_queued = false;
    }
}

#[test]
fn after_any_crash_the_objects_are_those_of_a_prefix_of_the_transactions() {
    let (mut accepted, mut full, mut checkpoints, mut crashes) = (0, 0, 0, 0);
    let mut slow_reads = 0;
    for seed in 0..300 {
        let mut world = World::new(seed);
        for step in 0..250 {
            match world.random.below(20) {
                0..=6 => world.transaction(),
                7..=10 => world.send(),
                11 | 12 => world.data_durable(),
                13..=15 => world.append(),
                16 | 17 => world.log_durable(),
                18 => world.slow_read(),
                _ if world.random.one_in(4) => {
                    world.crash();
                    crashes += 1;
                }
                _ if world.random.one_in(2) => world.checkpoint(),
                _ => {}
            }
            let content = world.content();
            let model = world.models.last().unwrap();
            assert!(&content == model, "seed {seed}, step {step}");
        }
        accepted += world.accepted;
        full += world.full;
        checkpoints += world.checkpoints;
        slow_reads += world.slow_reads;
    }
    // The test has met all of it.
    assert!(slow_reads > 500, "{slow_reads}");
    assert!(accepted > 10_000 && full > 1000 && checkpoints > 1000 && crashes > 500);
}

#[test]
fn a_table_that_is_full_takes_no_new_object_and_still_removes_old_ones() {
    let limits = Limits { snapshot: HEAD_BYTES + 100, ..LIMITS };
    let mut state = State::new(LBA, BLOCKS, limits);
    let mut prepare = |op: Op| state.prepare::<()>(&[op], ENOUGH, &mut |_, _| Err(()));
    let put = |name: &str| Op::Put { name: name.into(), bytes: vec![1; 10] };
    assert_eq!(prepare(put("one")), Ok(1));
    assert_eq!(prepare(put("two")), Ok(2));
    assert_eq!(prepare(put("three")), Ok(3));
    // Each object has 26 bytes and its name.
    let (bytes, max) = (HEAD_BYTES + 4 * 26 + 3 + 3 + 5 + 4, HEAD_BYTES + 100);
    assert_eq!(prepare(put("four")), Err(Refused::TableFull { bytes, max }));
    assert_eq!(prepare(Op::Remove { name: "one".into() }), Ok(4));
    assert_eq!(prepare(put("four")), Ok(5));
}

#[test]
fn a_refused_transaction_leaves_no_trace() {
    let mut state = State::new(LBA, 4, LIMITS);
    let put = |name: &str, len| Op::Put { name: name.into(), bytes: vec![1; len] };
    let mut prepare = |ops: &[Op], log| state.prepare::<()>(ops, log, &mut |_, _| Err(()));
    assert_eq!(prepare(&[put("a", 4097)], ENOUGH), Ok(1));
    let space = Refused::Space { needed: 3, free: 2, pending: 0 };
    assert_eq!(prepare(&[put("b", 1), put("c", 4097)], ENOUGH), Err(space));
    let unknown = Refused::Unknown { name: "b".into() };
    assert_eq!(prepare(&[put("c", 1), Op::Remove { name: "b".into() }], ENOUGH), Err(unknown));
    let none = LogSpace { free: ENOUGH.blocks / 4, ..ENOUGH };
    assert_eq!(prepare(&[put("c", 1)], none), Err(Refused::Log));
    let busy = LogSpace { queued: 101, ..ENOUGH };
    assert_eq!(prepare(&[put("c", 1)], busy), Err(Refused::Busy));
    assert_eq!(prepare(&[put("", 1)], ENOUGH), Err(Refused::Name { bytes: 0 }));
    let long = "x".repeat(256);
    assert_eq!(prepare(&[put(&long, 1)], ENOUGH), Err(Refused::Name { bytes: 256 }));
    assert_eq!(prepare(&[put("c", 8192)], ENOUGH), Ok(2), "two blocks are still free");
    // What is freed is pending until the record is durable.
    assert_eq!(prepare(&[Op::Remove { name: "a".into() }], ENOUGH), Ok(3));
    let space = Refused::Space { needed: 1, free: 0, pending: 2 };
    assert_eq!(prepare(&[put("d", 1)], ENOUGH), Err(space));
    assert_eq!(state.free_blocks(), (0, 2));
    let group = state.next_group().unwrap();
    state.on_submitted(&group, 7);
    state.on_data_durable(6);
    let (number, _) = state.next_record().unwrap();
    state.on_appended(number, 10);
    assert_eq!(state.next_record(), None, "its data is not durable");
    state.on_data_durable(7);
    for lsn in [11, 12] {
        let (number, _) = state.next_record().unwrap();
        state.on_appended(number, lsn);
    }
    state.on_log_durable(12);
    assert_eq!(state.free_blocks(), (0, 2), "the record of the removal is at 12");
    state.on_log_durable(13);
    assert_eq!(state.free_blocks(), (2, 0));
}

#[test]
fn a_log_of_other_bytes_is_refused() {
    let mut state = State::new(LBA, BLOCKS, LIMITS);
    assert_eq!(state.replay(b"another program's record"), Err(Malformed));
    assert!(State::of_snapshot(b"", LIMITS).is_err());
    let store = |lbas: Vec<u64>, size| Change::Store {
        name: "a".into(),
        size,
        first: 0,
        is_last: true,
        lbas,
        inline: None,
    };
    // Blocks outside of the place, blocks that are taken, and a size that does not fit.
    assert_eq!(state.replay(&record::encode(1, &[store(vec![5], 10)])), Err(Malformed));
    assert_eq!(state.replay(&record::encode(1, &[store(vec![LBA, LBA], 5000)])), Err(Malformed));
    assert_eq!(state.replay(&record::encode(1, &[store(vec![LBA + 3], 5000)])), Err(Malformed));
    let gone = record::encode(1, &[Change::Remove { name: "gone".into() }]);
    assert_eq!(state.replay(&gone), Err(Malformed));
}
