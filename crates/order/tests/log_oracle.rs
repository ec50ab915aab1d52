//! The ordering log against a naive oracle. After any appends, persists, releases, replays,
//! settlements and crashes, a scan finds every live durable entry and nothing that was never
//! appended.

mod common;

use std::collections::{BTreeMap, VecDeque};

use common::{Choices, ID, MARK, MARKS, crc32c, write};
use proptest::prelude::*;
use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Seq};
use riopipe_order::entry::{Origin, Position};
use riopipe_order::ordering_log::{AppendError, Scan, StreamLog, partition_bytes};
use riopipe_order::region::MemRegion;

#[derive(Clone, Copy)]
struct Known {
    attribute: Attribute,
    origin: Origin,
    durable: bool,
    /// A crash has left the entry behind a torn one. It may still go, because nothing was submitted
    /// for it.
    loose: bool,
    /// Whether its persist word was stored, and whether a fence followed.
    persisted: bool,
    persist_durable: bool,
}

/// The content that a log must remember, kept as simply as possible.
struct Oracle {
    /// Everything appended in live generations, by position.
    entries: BTreeMap<u64, Known>,
    /// Occupied slots, oldest first, with the seq whose release frees them.
    occupied: VecDeque<(u64, Seq)>,
    released: Seq,
    /// The largest mark that is surely durable.
    released_durable: Seq,
    /// The last mark of the owner. The owner outlives the target's crashes.
    owner_released: Seq,
    /// The entries that the owner has sent and not released, in order. It replays them when the log
    /// is resumed.
    sent: Vec<Attribute>,
    /// Every group's tag that was ever given.
    tags: BTreeMap<Seq, u64>,
    /// The newest group whose tag the log must not lose.
    tag_known: Seq,
    seq: u64,
    /// The next entry's index in group `seq`.
    index: u16,
    ordinal: u32,
    origin: Origin,
    settled: bool,
    /// Slots that may be torn beside the unfenced ones, because no change has cleaned up yet.
    repairing: usize,
    appends: u64,
    seen: Seen,
}

/// Counts of the rare paths of a run.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    laps: u64,
    crashes: u64,
    /// Live entries that a resumed log gave up, since a torn one lay before them.
    cut: u64,
    adopted: u64,
    replayed: u64,
    settled: u64,
    /// Crashes while the log was resumed, settled, emptied or started.
    in_change: u64,
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
        self.owner_released = self.owner_released.max(mark);
        self.sent.retain(|sent| sent.seq_end() > mark);
    }

    /// Checks the result of a scan after a crash (or live).
    fn check(&self, scan: &Scan, live: bool) {
        assert!(scan.released >= self.released_durable && scan.released <= self.released);
        assert!(!live || scan.released == self.released);
        assert_eq!((scan.origin, scan.settled), (self.origin, self.settled));
        let mut last = None;
        for found in &scan.entries {
            assert!(last < Some(found.position), "in position order, each once");
            last = Some(found.position);
            let known = self.entries.get(&found.position.0);
            let known = known.unwrap_or_else(|| panic!("{found:?} was never appended"));
            assert_eq!((found.attribute, found.origin), (known.attribute, known.origin));
            assert!(found.attribute.seq_end() > scan.released);
            assert!(known.persisted || !found.persisted, "{found:?} was never persisted");
            assert!(!known.persist_durable || found.persisted, "{found:?} lost its persist word");
        }
        for (&position, known) in &self.entries {
            if known.attribute.seq_end() > scan.released && !has(scan, position) {
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
        let GroupTag { seq, tag } = scan.newest_tag;
        assert!((self.tag_due(scan.released)..=scan.released).contains(&seq), "tag of {seq}");
        assert!(seq == Seq::ZERO || self.tags[&seq] == tag, "group {seq} never had tag {tag:#x}");
    }

    /// The newest group up to `released` whose tag must be known.
    fn tag_due(&self, released: Seq) -> Seq {
        let durable = self.entries.values().filter(|known| known.durable);
        let released = durable.map(|k| k.attribute.seq_end()).filter(|seq| *seq <= released);
        released.max().unwrap_or_default().max(self.tag_known)
    }

    /// The entries that a crash left are durable now, and the others are gone.
    fn absorb(&mut self, scan: &Scan) {
        self.tag_known = scan.newest_tag.seq;
        let mut behind_hole = false;
        self.entries.retain(|&position, known| {
            let found = scan.entries.iter().find(|e| e.position == Position(position));
            let lost = found.is_none() && known.attribute.seq_end() > scan.released;
            behind_hole |= lost || known.loose;
            assert!(!behind_hole || !known.durable, "a fenced entry behind a torn one");
            (known.durable, known.loose) = (!behind_hole, behind_hole);
            known.persisted = found.is_some_and(|e| e.persisted);
            known.persist_durable = known.persisted;
            found.is_some()
        });
        (self.released, self.released_durable) = (scan.released, scan.released);
    }

    /// A change of the log is durable.
    fn changed(&mut self, change: Change) {
        match change {
            Change::Resume(origin) => {
                self.origin = origin;
                let before = self.entries.len();
                self.entries.retain(|_, known| known.durable);
                self.seen.cut += (before - self.entries.len()) as u64;
            }
            Change::Start(origin, released) => {
                self.tag_known = self.tag_due(released);
                (self.origin, self.settled) = (origin, false);
                (self.released, self.released_durable) = (released, released);
                self.owner_released = released;
                (self.seq, self.index) = (released.0 + 1, 0);
                self.entries.clear();
                self.sent.clear();
            }
            Change::Settle(k, tag) => {
                (self.released, self.released_durable, self.tag_known) = (k, k, k);
                self.tags.insert(k, tag);
                self.settled = true;
                self.seen.settled += 1;
            }
            Change::Forget => self.entries.clear(),
        }
    }
}

fn has(scan: &Scan, position: u64) -> bool {
    scan.entries.iter().any(|e| e.position == Position(position))
}

/// A change of a log between two bindings, or at the beginning of one.
#[derive(Clone, Copy, Debug)]
enum Change {
    Resume(Origin),
    Start(Origin, Seq),
    Settle(Seq, u64),
    Forget,
}

impl Change {
    fn choose(oracle: &Oracle, scan: &Scan, choices: &mut Choices) -> Self {
        let Origin { generation, incarnation } = oracle.origin;
        let resumed = Origin { generation, incarnation: incarnation + 1 };
        let started = Origin { generation: generation + 1, ..resumed };
        let ends: Vec<Seq> = scan.entries.iter().map(|e| e.attribute.seq_end()).collect();
        match choices.below(8) {
            0 | 1 if scan.settled => Self::Start(started, scan.released),
            2..=4 if scan.settled => Self::Forget,
            _ if scan.settled => Self::Settle(scan.released, scan.newest_tag.tag),
            0..=4 => Self::Resume(resumed),
            5 => Self::Start(started, ends.last().copied().unwrap_or(scan.released)),
            _ => match choices.below(ends.len() + 1) {
                0 => Self::Settle(scan.released, scan.newest_tag.tag),
                // The tag of a group that this log may never have seen.
                end => Self::Settle(ends[end - 1], 0x7a6 + end as u64),
            },
        }
    }

    fn apply(self, log: &mut StreamLog<MemRegion>) -> bool {
        match self {
            Self::Resume(origin) => log.resume(origin).is_ok(),
            Self::Start(origin, released) => log.start(origin, released).is_ok(),
            Self::Settle(k, tag) => log.settle(k, tag).is_ok(),
            Self::Forget => log.remove_entries().is_ok(),
        }
    }

    /// Whether an interrupted change has become durable.
    fn shows(self, oracle: &Oracle, after: &Scan) -> bool {
        match self {
            Self::Resume(origin) | Self::Start(origin, _) => after.origin == origin,
            Self::Settle(..) => after.settled && !oracle.settled,
            Self::Forget => after.entries.is_empty(),
        }
    }
}

fn run(slots: u32, mut choices: Choices, steps: usize) -> Oracle {
    let origin = Origin { generation: 1, incarnation: 1 };
    let region = MemRegion::forgetful(partition_bytes(slots));
    let mut log = StreamLog::format(region, ID, 1, crc32c).unwrap();
    log.start(origin, Seq::ZERO).unwrap();
    let near_wrap = u64::from(u32::MAX) - 20;
    let mut oracle = Oracle {
        entries: BTreeMap::new(),
        occupied: VecDeque::new(),
        released: Seq::ZERO,
        released_durable: Seq::ZERO,
        owner_released: Seq::ZERO,
        sent: Vec::new(),
        tags: BTreeMap::new(),
        tag_known: Seq::ZERO,
        seq: if choices.below(2) == 0 { 1 } else { near_wrap },
        index: 0,
        ordinal: if choices.below(2) == 0 { 1 } else { u32::MAX - 9 },
        origin,
        settled: false,
        repairing: 0,
        appends: 0,
        seen: Seen::default(),
    };
    for _ in 0..steps {
        match choices.below(17) {
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
            14 => {
                let scan = log.scan().unwrap();
                oracle.check(&scan, true);
                assert_eq!((log.newest_tag(), log.is_settled()), (scan.newest_tag, false));
            }
            15 => {
                // The connection is lost, but the target lives on.
                log.resume(oracle.origin).unwrap();
                oracle.fenced();
                oracle.released_durable = oracle.released;
                replay(&mut log, &mut oracle, usize::MAX);
            }
            _ => log = crash(log, &mut oracle, &mut choices),
        }
        assert_eq!(log.free_slots() as usize, slots as usize - oracle.occupied.len());
    }
    oracle.seen.laps = oracle.appends / u64::from(slots);
    oracle
}

/// Some group between the last released and the last appended one.
fn mark(oracle: &Oracle, choices: &mut Choices) -> Seq {
    let span = oracle.seq.saturating_sub(oracle.released.0 + 1).min(12);
    oracle.released.plus(choices.below(span as usize + 1) as u64)
}

fn append(log: &mut StreamLog<MemRegion>, oracle: &mut Oracle, choices: &mut Choices) {
    let span = [1, 1, 1, 2, 256][choices.below(5)];
    // Some groups have two entries.
    let two = oracle.index > 0 || choices.below(3) == 0;
    let mut attribute = Attribute {
        span: if two { 1 } else { span },
        num: if two { 2 } else { 1 },
        index: oracle.index,
        ..write(oracle.seq, oracle.ordinal)
    };
    if choices.below(6) == 0 {
        (attribute.kind, attribute.lba, attribute.blocks) = (Kind::Flush, 0, 0);
        attribute.flags = Flags::FLUSH;
    }
    let free = log.free_slots();
    if send(log, oracle, &attribute).is_some() {
        assert!(free > 0);
        oracle.sent.push(attribute);
        if two && oracle.index == 0 {
            oracle.index = 1;
        } else {
            (oracle.seq, oracle.index) = (oracle.seq + u64::from(attribute.span), 0);
        }
    } else {
        assert_eq!(free, 0);
    }
}

/// Appends an entry that is not in the log; `None` if that is full.
fn send(
    log: &mut StreamLog<MemRegion>,
    oracle: &mut Oracle,
    attribute: &Attribute,
) -> Option<Position> {
    let fences = log.region().fences();
    let result = log.append(attribute);
    if log.region().fences() > fences {
        // Space was freed: the mark is durable, and all before it.
        oracle.fenced();
        oracle.released_durable = oracle.released;
    }
    let position = match result {
        Ok(position) => position,
        Err(AppendError::Full { .. }) => return None,
        Err(error) => panic!("{error}"),
    };
    let known = Known {
        attribute: *attribute,
        origin: oracle.origin,
        durable: false,
        loose: false,
        persisted: false,
        persist_durable: false,
    };
    let clash = oracle.entries.insert(position.0, known);
    assert!(clash.is_none_or(|old| !old.durable), "{position:?} is used twice");
    oracle.occupied.push_back((position.0, attribute.seq_end()));
    oracle.tags.insert(attribute.seq_end(), attribute.tag);
    oracle.appends += 1;
    oracle.ordinal = oracle.ordinal.wrapping_add(1);
    Some(position)
}

/// Sends again, in order, the entries that the owner has not released, up to `count` of them.
fn replay(log: &mut StreamLog<MemRegion>, oracle: &mut Oracle, count: usize) {
    for (ordinal, sent) in (1..).zip(oracle.sent.clone()).take(count) {
        let again = Attribute { ordinal, ..sent };
        let same =
            |known: &Known| (known.attribute.seq, known.attribute.index) == (sent.seq, sent.index);
        let there = oracle.entries.iter().find(|(_, known)| same(known));
        if let Some((&position, known)) = there
            && known.attribute.seq_end() > oracle.released
        {
            let bytes = log.region().bytes().to_vec();
            assert_eq!(log.append(&again), Ok(Position(position)), "{sent:?} is there already");
            assert_eq!(log.region().bytes(), bytes, "an adopted entry is not written");
            oracle.seen.adopted += 1;
        } else {
            assert!(send(log, oracle, &again).is_some(), "T13: what was in the log fits again");
            oracle.seen.replayed += 1;
        }
    }
}

fn persist(log: &mut StreamLog<MemRegion>, oracle: &mut Oracle, choices: &mut Choices) {
    let fenced = |p: &u64| oracle.entries.get(p).is_some_and(|e| e.durable);
    let live: Vec<u64> = oracle.occupied.iter().map(|&(p, _)| p).filter(fenced).collect();
    if !live.is_empty() {
        let position = live[choices.below(live.len())];
        log.persist(Position(position));
        oracle.entries.get_mut(&position).unwrap().persisted = true;
    }
}

/// Cuts the power, opens, checks, and changes the log until it is bound again. The power may fail
/// once more in the middle of that.
fn crash(
    log: StreamLog<MemRegion>,
    oracle: &mut Oracle,
    choices: &mut Choices,
) -> StreamLog<MemRegion> {
    oracle.seen.crashes += 1;
    let mut region = log.into_region().crash(choices.below(1 << 16) as u64);
    loop {
        let (log, scan) = StreamLog::open(region, ID, crc32c).expect("a crash damages nothing");
        oracle.check(&scan, false);
        assert_eq!((log.newest_tag(), log.is_settled()), (scan.newest_tag, scan.settled));
        oracle.absorb(&scan);
        let change = Change::choose(oracle, &scan, choices);
        let mut faulty = log.into_region();
        if let fault @ 1..=3 = choices.below(8) {
            faulty.fail_fences_after(fault as u64 - 1);
        }
        let (mut log, _) = StreamLog::open(faulty, ID, crc32c).expect("reading changes nothing");
        if !change.apply(&mut log) {
            // Either the old log or the new one.
            oracle.seen.in_change += 1;
            oracle.repairing = log.slots() as usize;
            region = log.into_region().crash(choices.below(1 << 16) as u64);
            let after = StreamLog::open(region.clone(), ID, crc32c).expect("still no damage").1;
            if change.shows(oracle, &after) {
                oracle.changed(change);
            }
            continue;
        }
        // Settling leaves torn slots as they are.
        let cleans = !matches!(change, Change::Settle(..));
        oracle.repairing = if cleans { 0 } else { log.slots() as usize };
        oracle.changed(change);
        oracle.check(&log.scan().unwrap(), true);
        oracle.occupied = oracle.entries.iter().map(|(p, e)| (*p, e.attribute.seq_end())).collect();
        match change {
            Change::Resume(_) => {
                log.release(oracle.owner_released);
                oracle.note_release(oracle.owner_released);
                let again = choices.below(4) == 3;
                let count = if again { choices.below(8) } else { usize::MAX };
                replay(&mut log, oracle, count);
                if again {
                    return crash(log, oracle, choices);
                }
            }
            Change::Start(..) => assert_eq!(log.free_slots(), log.slots()),
            Change::Settle(..) | Change::Forget => {
                assert_eq!(log.append(&write(oracle.seq, 1)), Err(AppendError::Unbound));
                region = log.into_region();
                continue;
            }
        }
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

    /// T18/T19: any bytes, even with good checksums, can be read without a panic, and a log that
    /// was opened can be used.
    #[test]
    fn t19_any_bytes_are_scanned(
        damage in proptest::collection::vec((0..partition_bytes(6), any::<u8>()), 0..30),
        wide in proptest::option::of((0..partition_bytes(6) / 8, any::<u64>())),
        fix_marks in any::<bool>(),
        fix_entries in any::<bool>(),
    ) {
        let origin = Origin { generation: 1, incarnation: 1 };
        let mut log = StreamLog::format(MemRegion::new(partition_bytes(6)), ID, 1, crc32c).unwrap();
        log.start(origin, Seq::ZERO).unwrap();
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
        let (marks, entries) = region.bytes_mut().split_at_mut(MARKS);
        for mark in marks.chunks_exact_mut(MARK).filter(|_| fix_marks) {
            let check = crc32c(0, &mark[4..]);
            mark[..4].copy_from_slice(&check.to_le_bytes());
        }
        for entry in entries.chunks_exact_mut(64).filter(|_| fix_entries) {
            let check = crc32c(ID.seed(crc32c), &entry[12..]);
            entry[8..12].copy_from_slice(&check.to_le_bytes());
        }
        if let Ok((mut log, scan)) = StreamLog::open(region, ID, crc32c) {
            prop_assert!(scan.entries.len() <= 6);
            let origin = Origin { generation: scan.origin.generation, incarnation: u32::MAX };
            if log.resume(origin).is_ok() {
                let appended = (0..7).take_while(|_| log.append(&write(20, 1)).is_ok());
                prop_assert!(appended.count() <= 6);
                prop_assert_eq!(log.free_slots(), 0);
                log.fence().unwrap();
                log.scan().unwrap();
            }
            log.start(origin, Seq(30)).unwrap();
            prop_assert_eq!(log.free_slots(), 6);
            prop_assert!(log.scan().unwrap().is_clean());
        }
    }
}

/// The property above proves nothing if its runs stay in the harmless part of the space.
#[test]
fn the_property_reaches_what_it_is_about() {
    let mut seen = Seen::default();
    for seed in 0_u16..60 {
        let choices =
            (0..4000_u32).map(|i| (i * 40503 + u32::from(seed) * 65497) as u16 ^ (i * i) as u16);
        let run = run(6, Choices::new(choices.collect()), 400).seen;
        seen.laps += run.laps;
        seen.crashes += run.crashes;
        seen.cut += run.cut;
        seen.adopted += run.adopted;
        seen.replayed += run.replayed;
        seen.settled += run.settled;
        seen.in_change += run.in_change;
    }
    let Seen { laps, crashes, cut, adopted, replayed, settled, in_change } = seen;
    let all = [laps, crashes, cut, adopted, replayed, settled, in_change];
    assert!(all.iter().all(|count| *count > 20), "{seen:?}");
}
