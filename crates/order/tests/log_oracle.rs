//! The ordering log against a naive oracle: whatever is appended, persisted, released and lost in
//! crashes, a scan finds every live durable entry and nothing that was never appended.

mod common;

use std::collections::{BTreeMap, VecDeque};

use common::{Choices, ID, crc32c, write};
use proptest::prelude::*;
use riopipe_order::attribute::{Attribute, Flags, Kind, Seq};
use riopipe_order::entry::{Life, Position};
use riopipe_order::ordering_log::{AppendError, Scan, StreamLog, partition_bytes};
use riopipe_order::region::MemRegion;

#[derive(Clone, Copy)]
struct Known {
    attribute: Attribute,
    life: Life,
    durable: bool,
    /// Whether its persist word was stored, and whether a fence followed.
    persisted: bool,
    persist_durable: bool,
}

/// What a log must remember, kept in the plainest way.
struct Oracle {
    /// Everything appended in live generations, by position.
    entries: BTreeMap<u64, Known>,
    /// Occupied slots, oldest first, with the seq whose release frees them.
    occupied: VecDeque<(u64, Seq)>,
    released: Seq,
    /// The largest mark that is surely durable.
    released_durable: Seq,
    seq: u64,
    ordinal: u32,
    life: Life,
    /// Slots that an interrupted binding may have left half repaired.
    repairing: usize,
    appends: u64,
    crashes: u64,
    laps: u64,
}

impl Oracle {
    fn fenced(&mut self) {
        for entry in self.entries.values_mut() {
            entry.durable = true;
            entry.persist_durable = entry.persisted;
        }
    }

    fn note_release(&mut self, mark: Seq) {
        self.released = self.released.max(mark);
        while self.occupied.front().is_some_and(|&(_, seq)| seq <= self.released) {
            self.occupied.pop_front();
        }
    }

    /// Checks what a scan found after a crash (or live), and forgets what was lost.
    fn check(&mut self, scan: &Scan, live: bool) {
        assert!(scan.released >= self.released_durable && scan.released <= self.released);
        assert!(!live || scan.released == self.released);
        assert_eq!(scan.life, self.life);
        let mut last = None;
        for found in &scan.entries {
            assert!(last < Some(found.position), "in position order, each once");
            last = Some(found.position);
            let known = self.entries.get(&found.position.0);
            let known = known.unwrap_or_else(|| panic!("{found:?} was never appended"));
            assert_eq!((found.attribute, found.life), (known.attribute, known.life));
            assert!(found.attribute.seq_end() > scan.released);
            assert!(known.persisted || !found.persisted, "{found:?} was never persisted");
            assert!(!known.persist_durable || found.persisted, "{found:?} lost its persist word");
        }
        let found = |position| scan.entries.iter().any(|e| e.position == Position(position));
        for (&position, known) in &self.entries {
            if known.attribute.seq_end() > scan.released && !found(position) {
                assert!(!known.durable && !live, "entry {position} is gone: {:?}", known.attribute);
            }
        }
        let unfenced = self.entries.values().filter(|known| !known.durable).count();
        let torn = scan.torn as usize;
        assert!(
            torn <= unfenced + self.repairing,
            "{torn} torn slots, {unfenced} unfenced entries, {} slots in repair",
            self.repairing
        );
    }
}

fn run(slots: u32, mut choices: Choices, steps: usize) -> Oracle {
    let life = Life { generation: 1, incarnation: 1 };
    let region = MemRegion::forgetful(partition_bytes(slots));
    let mut log = StreamLog::format(region, ID, 1, crc32c).unwrap();
    log.start(life, Seq::ZERO).unwrap();
    let near_wrap = u64::from(u32::MAX) - 20;
    let mut oracle = Oracle {
        entries: BTreeMap::new(),
        occupied: VecDeque::new(),
        released: Seq::ZERO,
        released_durable: Seq::ZERO,
        seq: if choices.below(2) == 0 { 1 } else { near_wrap },
        ordinal: if choices.below(2) == 0 { 1 } else { u32::MAX - 9 },
        life,
        repairing: 0,
        appends: 0,
        crashes: 0,
        laps: 0,
    };
    for _ in 0..steps {
        match choices.below(16) {
            0..=6 => append(&mut log, &mut oracle, &mut choices),
            7 | 8 => {
                if log.fence().is_ok() {
                    oracle.fenced();
                }
            }
            9 | 10 => persist(&mut log, &mut oracle, &mut choices),
            11 | 12 => {
                let mark = mark(&oracle, &mut choices);
                log.release(mark);
                oracle.note_release(mark);
            }
            13 => {
                let mark = mark(&oracle, &mut choices);
                let fences = log.region().fences();
                oracle.note_release(mark);
                if log.release_now(mark).is_ok() {
                    oracle.released_durable = oracle.released;
                    if log.region().fences() > fences {
                        oracle.fenced();
                    }
                }
            }
            14 => oracle.check(&log.scan().unwrap(), true),
            _ => log = crash(log, &mut oracle, &mut choices),
        }
        assert_eq!(log.free() as usize, slots as usize - oracle.occupied.len());
    }
    oracle.laps = oracle.appends / u64::from(slots);
    oracle
}

/// Some group between the last released and the last appended one.
fn mark(oracle: &Oracle, choices: &mut Choices) -> Seq {
    let span = oracle.seq.saturating_sub(oracle.released.0 + 1).min(12);
    oracle.released.plus(choices.below(span as usize + 1) as u64)
}

fn append(log: &mut StreamLog<MemRegion>, oracle: &mut Oracle, choices: &mut Choices) {
    let span = [1, 1, 1, 2, 256][choices.below(5)];
    let same_group = choices.below(3) == 0;
    let mut attribute = Attribute {
        span: if same_group { 1 } else { span },
        num: if same_group { 2 } else { 1 },
        ..write(oracle.seq, oracle.ordinal)
    };
    if choices.below(6) == 0 {
        (attribute.kind, attribute.lba, attribute.blocks) = (Kind::Flush, 0, 0);
        attribute.flags = Flags::FLUSH;
    }
    let fences = log.region().fences();
    let free = log.free();
    let result = log.append(&attribute);
    if log.region().fences() > fences {
        // Room was made: the mark is durable, and all before it.
        oracle.fenced();
        oracle.released_durable = oracle.released;
    }
    match result {
        Ok(position) => {
            assert!(free > 0);
            let clash = oracle.entries.get(&position.0).copied();
            assert!(clash.is_none_or(|old| !old.durable), "{position:?} is used twice");
            oracle.entries.insert(
                position.0,
                Known {
                    attribute,
                    life: oracle.life,
                    durable: false,
                    persisted: false,
                    persist_durable: false,
                },
            );
            oracle.occupied.push_back((position.0, attribute.seq_end()));
            oracle.appends += 1;
            oracle.ordinal = oracle.ordinal.wrapping_add(1);
            if !same_group {
                oracle.seq += u64::from(attribute.span);
            }
        }
        Err(AppendError::Full { .. }) => assert_eq!(free, 0),
        Err(AppendError::Region(_)) => {}
        Err(error) => panic!("{error}"),
    }
}

fn persist(log: &mut StreamLog<MemRegion>, oracle: &mut Oracle, choices: &mut Choices) {
    let current: Vec<u64> = oracle
        .occupied
        .iter()
        .map(|&(position, _)| position)
        .filter(|p| oracle.entries.get(p).is_some_and(|e| e.durable && e.life == oracle.life))
        .collect();
    if !current.is_empty() {
        let position = current[choices.below(current.len())];
        log.persist(Position(position));
        oracle.entries.get_mut(&position).unwrap().persisted = true;
    }
}

/// Cuts the power, opens, checks, and binds again in one of the two ways, perhaps with the power
/// failing once more in the middle of that.
fn crash(
    log: StreamLog<MemRegion>,
    oracle: &mut Oracle,
    choices: &mut Choices,
) -> StreamLog<MemRegion> {
    oracle.crashes += 1;
    let seed = choices.below(1 << 16) as u64;
    let mut region = log.into_region().crash(seed);
    loop {
        let (mut log, scan) = StreamLog::open(region, ID, crc32c).expect("a crash damages nothing");
        oracle.check(&scan, false);
        // What the crash left is durable now; what it took is gone.
        let found = |position| scan.entries.iter().find(|e| e.position == Position(position));
        oracle.entries.retain(|&position, known| {
            known.durable = true;
            let found = found(position);
            known.persisted = found.is_some_and(|e| e.persisted);
            known.persist_durable = known.persisted;
            found.is_some()
        });
        (oracle.released, oracle.released_durable) = (scan.released, scan.released);
        oracle.life.incarnation += 1;
        let keep = choices.below(3) != 0;
        let mut faulty = log.into_region();
        if let fault @ 1..=3 = choices.below(8) {
            faulty.fail_fences_after(fault as u64 - 1);
        }
        log = StreamLog::open(faulty, ID, crc32c).expect("reading changes nothing").0;
        let last = scan.entries.last().map_or(scan.released, |e| e.attribute.seq_end());
        let bound = if keep {
            log.resume(oracle.life)
        } else {
            oracle.life.generation += 1;
            log.start(oracle.life, last)
        };
        if bound.is_err() {
            // Either the old binding or the new one counts.
            oracle.repairing = log.slots() as usize;
            let after = log.into_region().crash(seed ^ 1);
            let (log, scan) = StreamLog::open(after, ID, crc32c).expect("still no damage");
            oracle.life = scan.life;
            if scan.entries.is_empty() && !keep && scan.released == last {
                oracle.entries.clear();
                oracle.released = last;
            }
            region = log.into_region();
            oracle.life.incarnation = oracle.life.incarnation.max(scan.life.incarnation);
            oracle.released_durable = oracle.released_durable.min(scan.released);
            continue;
        }
        oracle.repairing = 0;
        if !keep {
            oracle.entries.clear();
            (oracle.released, oracle.released_durable) = (last, last);
        }
        oracle.seq = oracle.seq.max(last.0 + 1);
        // Slots from the first live entry on are occupied, holes included.
        let free = log.free();
        let occupied = u64::from(log.slots() - free);
        let next = scan.entries.last().map_or(0, |e| e.position.0 + 1);
        oracle.occupied = (next.saturating_sub(occupied)..next)
            .map(|p| (p, found(p).map_or(Seq::ZERO, |e| e.attribute.seq_end())))
            .collect();
        if !keep {
            assert_eq!(free, log.slots());
            oracle.occupied.clear();
        }
        log.fence().unwrap();
        return log;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn the_log_keeps_what_it_promised(
        slots in 4_u32..20,
        choices in proptest::collection::vec(any::<u16>(), 0..1500),
    ) {
        run(slots, Choices::new(choices), 300);
    }

    /// T18/T19: whatever the bytes are, even with good checksums, reading them ends well, and a
    /// log that was opened can be used.
    #[test]
    fn t19_any_bytes_are_scanned(
        damage in proptest::collection::vec((0..partition_bytes(6), any::<u8>()), 0..30),
        wide in proptest::option::of((0..partition_bytes(6) / 8, any::<u64>())),
        fix_marks in any::<bool>(),
        fix_entries in any::<bool>(),
    ) {
        let life = Life { generation: 1, incarnation: 1 };
        let mut log = StreamLog::format(MemRegion::new(partition_bytes(6)), ID, 1, crc32c).unwrap();
        log.start(life, Seq::ZERO).unwrap();
        for i in 1..=9 {
            log.append(&write(i, i as u32)).unwrap();
            log.fence().unwrap();
            log.release_now(Seq(i.saturating_sub(4))).unwrap();
        }
        let mut region = log.into_region();
        for (at, byte) in damage {
            region.bytes_mut()[at] = byte;
        }
        if let Some((word, value)) = wide {
            region.bytes_mut()[8 * word..8 * word + 8].copy_from_slice(&value.to_le_bytes());
        }
        for (i, line) in region.bytes_mut().chunks_exact_mut(64).enumerate() {
            if i < 2 && fix_marks {
                let check = crc32c(0, &line[4..]);
                line[..4].copy_from_slice(&check.to_le_bytes());
            } else if i >= 2 && fix_entries {
                let check = crc32c(ID.seed(crc32c), &line[12..]);
                line[8..12].copy_from_slice(&check.to_le_bytes());
            }
        }
        if let Ok((mut log, scan)) = StreamLog::open(region, ID, crc32c) {
            prop_assert!(scan.entries.len() <= 6);
            let life = Life { generation: scan.life.generation, incarnation: u32::MAX };
            if log.resume(life).is_ok() {
                let appended = (0..7).take_while(|_| log.append(&write(20, 1)).is_ok());
                prop_assert!(appended.count() <= 6);
                prop_assert_eq!(log.free(), 0);
                log.fence().unwrap();
                log.scan().unwrap();
            }
            log.start(life, Seq(30)).unwrap();
            prop_assert_eq!(log.free(), 6);
            prop_assert!(log.scan().unwrap().is_clean());
        }
    }
}

/// The property above is worth nothing if its runs stay in the harmless part of the space.
#[test]
fn the_property_reaches_laps_and_crashes() {
    let (mut laps, mut crashes) = (0, 0);
    for seed in 0_u16..40 {
        let choices =
            (0..4000_u32).map(|i| (i * 40503 + u32::from(seed) * 65497) as u16 ^ (i * i) as u16);
        let oracle = run(6, Choices::new(choices.collect()), 400);
        laps = laps.max(oracle.laps);
        crashes = crashes.max(oracle.crashes);
    }
    assert!(laps > 8 && crashes > 8, "{laps} laps, {crashes} crashes");
}
