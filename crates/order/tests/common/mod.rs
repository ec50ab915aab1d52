//! Shared parts of the tests of this crate.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod table_gate;

pub(crate) use riopipe_nvme::digest::soft as crc32c;
use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::entry::{Origin, PartitionId};
use riopipe_order::ordering_log::{LoggedEntry, Scan, StreamLog, partition_bytes};
use riopipe_order::region::MemRegion;

/// The partition that most tests use.
pub(crate) const ID: PartitionId = PartitionId { volume: VolumeId([7; 16]), stream: StreamId(3) };

/// A one-block write that is a group of its own.
pub(crate) fn write(seq: u64, ordinal: u32) -> Attribute {
    Attribute {
        seq: Seq(seq),
        span: 1,
        num: 1,
        index: 0,
        ordinal,
        member: Member(0),
        kind: Kind::Write,
        flags: Flags::BOUNDARY,
        lba: 1000 + seq % 1000,
        blocks: 1,
        tag: !seq,
    }
}

/// Bytes of one copy of a partition's mark, and of both.
pub(crate) const MARK: usize = 128;
pub(crate) const MARKS: usize = 2 * MARK;

/// The owner and incarnation with which [`fresh`] binds.
pub(crate) const ORIGIN: Origin = Origin { generation: 5, incarnation: 9 };

/// A new log that a crash can make forget.
pub(crate) fn fresh(slots: u32) -> StreamLog<MemRegion> {
    let region = MemRegion::forgetful(partition_bytes(slots));
    let mut log = StreamLog::format(region, ID, 1, crc32c).unwrap();
    log.start(ORIGIN, Seq::ZERO).unwrap();
    log
}

pub(crate) fn reopen(region: MemRegion) -> (StreamLog<MemRegion>, Scan) {
    StreamLog::open(region, ID, crc32c).unwrap()
}

pub(crate) fn seqs(scan: &Scan) -> Vec<u64> {
    scan.entries.iter().map(|e| e.attribute.seq.0).collect()
}

pub(crate) fn append_all(log: &mut StreamLog<MemRegion>, range: std::ops::RangeInclusive<u64>) {
    for seq in range {
        log.append(&write(seq, seq as u32)).unwrap();
    }
    log.fence().unwrap();
}

/// The part of a log that a crash must keep, or replace as a whole: its mark, and the live entries
/// up to the first hole. Nothing was submitted for entries behind a hole, so they may stay or go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct State {
    released: Seq,
    newest_tag: GroupTag,
    settled: bool,
    origin: Origin,
    entries: Vec<LoggedEntry>,
}

impl State {
    pub(crate) fn of(scan: &Scan) -> Self {
        let Scan { released, newest_tag, settled, origin, .. } = *scan;
        let mut entries = scan.entries.clone();
        let first = entries.first().map_or(0, |e| e.position.0);
        let whole = entries.iter().zip(first..).take_while(|(e, at)| e.position.0 == *at).count();
        entries.truncate(whole);
        Self { released, newest_tag, settled, origin, entries }
    }
}

/// Lets the power fail at every fence of `change`, with many outcomes each. The log is then as it
/// was before or as it is after. Once `change` has returned, it is as after, for good. Returns the
/// number of fences.
pub(crate) fn old_or_new<E>(
    before: &MemRegion,
    change: impl Fn(&mut StreamLog<MemRegion>) -> Result<(), E>,
) -> u64 {
    let old = State::of(&reopen(before.clone()).1);
    let (mut log, _) = reopen(before.clone());
    assert!(change(&mut log).is_ok());
    let new = State::of(&reopen(log.region().crash(0)).1);
    let fences = log.region().fences() - before.fences();
    for done in 0..=fences {
        let mut faulty = before.clone();
        faulty.fail_fences_after(done);
        let (mut log, _) = reopen(faulty);
        assert_eq!(change(&mut log).is_ok(), done == fences);
        for seed in 0..60 {
            let found = State::of(&reopen(log.region().crash(seed)).1);
            assert!(
                found == new || found == old && done < fences,
                "{done} of {fences} fences, seed {seed}: a third state\n{found:#?}\n{old:#?}\n{new:#?}"
            );
        }
    }
    fences
}

/// A possible result of a crash of `after`, whose slots `batch` were not fenced since `before`.
/// Each of them arrived not at all, wholly or in part, by the digits of `outcome` to base 3.
pub(crate) fn lose(
    before: &MemRegion,
    after: &MemRegion,
    batch: &[usize],
    outcome: u32,
) -> MemRegion {
    let mut region = before.crash(0);
    for (i, slot) in batch.iter().enumerate() {
        let words = match outcome / 3_u32.pow(i as u32) % 3 {
            0 => 0..0,
            1 => 0..64,
            _ => 8..40,
        };
        let range = MARKS + 64 * slot + words.start..MARKS + 64 * slot + words.end;
        region.bytes_mut()[range.clone()].copy_from_slice(&after.bytes()[range]);
    }
    region
}

/// A log of 8 slots in its second lap after a crash: full, one entry persisted, the last batch of
/// four open. There are 81 outcomes.
pub(crate) fn torn(outcome: u32) -> MemRegion {
    let mut log = fresh(8);
    append_all(&mut log, 1..=8);
    log.release_now(Seq(5)).unwrap();
    let position = log.append(&write(9, 9)).unwrap();
    log.fence().unwrap();
    log.persist(position);
    log.fence().unwrap();
    let before = log.region().clone();
    for seq in 10..=13 {
        log.append(&write(seq, seq as u32)).unwrap();
    }
    lose(&before, log.region(), &[1, 2, 3, 4], outcome)
}

/// Choices made by a test case, one after the other.
pub(crate) struct Choices {
    bytes: Vec<u16>,
    at: usize,
}

impl Choices {
    pub(crate) fn new(bytes: Vec<u16>) -> Self {
        Self { bytes, at: 0 }
    }

    /// One of `0..n`; always 0 once the choices are used up, so that runs end.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        let choice = self.bytes.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        usize::from(choice) % n.max(1)
    }
}
