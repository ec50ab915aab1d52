//! The ordering log against the traps of the design, one by one.

mod common;

use std::cell::Cell;

use common::{ID, MARK, MARKS, ORIGIN, append_all, crc32c, fresh, reopen, seqs, write};
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::entry::{Origin, PartitionId, Position};
use riopipe_order::ordering_log::{
    AppendError, BindError, Damage, LogError, StreamLog, partition_bytes,
};
use riopipe_order::region::{MemRegion, Region, RegionError};

#[test]
fn what_was_appended_is_found() {
    let mut log = fresh(8);
    let written = Attribute {
        seq: Seq(u64::from(u32::MAX) + 17),
        span: 256,
        num: 1,
        index: 0,
        ordinal: u32::MAX,
        member: Member(255),
        kind: Kind::Discard,
        flags: Flags(Flags::KNOWN & !Flags::EXTEND.0 & !Flags::REDIRECTED.0),
        lba: (1 << 48) - (1 << 16),
        blocks: 1 << 16,
        tag: u64::MAX,
    };
    let extension = Attribute {
        kind: Kind::Write,
        flags: Flags(Flags::KNOWN & !Flags::IN_PLACE.0),
        ..write(written.seq_end().0 + 2, 0)
    };
    let flush = Attribute {
        kind: Kind::Flush,
        lba: 0,
        blocks: 0,
        num: u16::MAX,
        index: u16::MAX - 1,
        ..write(written.seq_end().0 + 1, 0)
    };
    let positions = [written, flush, extension].map(|a| log.append(&a).unwrap());
    log.fence().unwrap();
    log.persist(positions[1]);
    log.fence().unwrap();
    let (_, scan) = reopen(log.into_region().crash(1));
    let found: Vec<_> = scan.entries.iter().map(|e| (e.attribute, e.persisted)).collect();
    assert_eq!(found, [(written, false), (flush, true), (extension, false)]);
    assert!(scan.entries.iter().all(|e| e.origin == ORIGIN));
    assert!(!scan.is_clean());
}

#[test]
fn what_is_durable_may_stay_in_the_log() {
    let mut log = fresh(8);
    let redirected = Attribute {
        flags: Flags::IN_PLACE.with(Flags::REDIRECTED),
        ordinal: 0xf1e2_d3c4,
        ..write(2, 0)
    };
    assert_eq!(redirected.prepared_block(), Some(0xf1e2_d3c4));
    for attribute in [write(1, 1), redirected, Attribute { num: 2, ..write(3, 3) }] {
        log.append(&attribute).unwrap();
    }
    log.fence().unwrap();
    log.persist_up_to(Seq(2));
    log.append(&Attribute { num: 2, index: 1, ..write(3, 4) }).unwrap();
    log.fence().unwrap();
    let persisted = |region: MemRegion| {
        let (_, scan) = reopen(region);
        assert_eq!(scan.released, Seq::ZERO);
        assert!(scan.entries.iter().any(|entry| entry.attribute == redirected));
        scan.entries.iter().map(|entry| entry.persisted).collect::<Vec<_>>()
    };
    assert_eq!(persisted(log.region().clone().crash(1)), [true, true, false, false]);
    log.persist_up_to(Seq(3));
    log.fence().unwrap();
    assert_eq!(persisted(log.region().clone().crash(2)), [true; 4]);
    // A crash before the fence may lose the record, of any of the entries.
    log.append(&write(4, 5)).unwrap();
    log.fence().unwrap();
    log.persist_up_to(Seq(4));
    let kept = (0..20).map(|seed| persisted(log.region().clone().crash(seed))[4]);
    let kept: Vec<bool> = kept.collect();
    assert!(kept.contains(&true) && kept.contains(&false));
}

#[test]
fn t1_a_slot_is_reused_only_after_the_mark_is_durable() {
    for seed in 0..200 {
        let mut log = fresh(8);
        append_all(&mut log, 1..=8);
        assert_eq!(log.free_slots(), 0);
        log.release(Seq(1));
        // The ninth entry needs the slot of the first; its crash must not take any of 2..=8.
        log.append(&write(9, 9)).unwrap();
        let (_, scan) = reopen(log.into_region().crash(seed));
        assert!(scan.released <= Seq(1));
        let found = seqs(&scan);
        let expected = scan.released.0 + 1..=8;
        assert!(expected.clone().all(|seq| found.contains(&seq)), "seed {seed}: {found:?}");
        assert!(scan.torn <= 1);
    }
}

#[test]
fn t1_a_lazy_release_frees_slots_in_memory_and_costs_no_fence() {
    let mut log = fresh(64);
    append_all(&mut log, 1..=10);
    let fences = log.region().fences();
    log.release(Seq(7));
    assert_eq!(log.region().fences(), fences);
    assert_eq!(log.free_slots(), 64 - 3);
    let (_, scan) = reopen(log.region().crash(3));
    assert_eq!(seqs(&scan), (1..=10).collect::<Vec<_>>(), "not durable yet");
    log.release_now(Seq(7)).unwrap();
    let (_, scan) = reopen(log.region().crash(3));
    assert_eq!(seqs(&scan), [8, 9, 10]);
    assert_eq!(scan.released, Seq(7));
}

#[test]
fn t1_a_mark_rides_along_with_a_fence_once_it_frees_an_eighth_of_the_ring() {
    let mut log = fresh(64);
    append_all(&mut log, 1..=10);
    log.release(Seq(7));
    log.fence().unwrap();
    assert_eq!(reopen(log.region().crash(3)).1.released, Seq::ZERO, "not worth a mark yet");
    log.release(Seq(8));
    log.fence().unwrap();
    assert_eq!(reopen(log.region().crash(3)).1.released, Seq(8));
    // So appends never stop for a fence of their own, however often they come around.
    for seq in 11..=500 {
        let fences = log.region().fences();
        log.append(&write(seq, seq as u32)).unwrap();
        assert_eq!(log.region().fences(), fences, "the append of group {seq}");
        log.fence().unwrap();
        log.release(Seq(seq));
    }
}

#[test]
fn t1_marks_never_go_back() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=4);
    log.release_now(Seq(3)).unwrap();
    log.release_now(Seq(2)).unwrap();
    assert_eq!(log.released(), Seq(3));
    assert_eq!(reopen(log.into_region()).1.released, Seq(3));
}

#[test]
fn t5_scan_survives_the_wrap_of_ordinal_and_wire_seq() {
    let mut log = fresh(8);
    let first = u64::from(u32::MAX) - 5;
    for i in 0..12 {
        log.append(&write(first + i, (u32::MAX - 5).wrapping_add(i as u32))).unwrap();
        log.fence().unwrap();
        if i >= 4 {
            log.release(Seq(first + i - 4));
        }
    }
    log.release_now(Seq(first + 7)).unwrap();
    let scan = reopen(log.into_region().crash(0)).1;
    assert_eq!(seqs(&scan), (first + 8..first + 12).collect::<Vec<_>>());
    let ordinals: Vec<_> = scan.entries.iter().map(|e| e.attribute.ordinal).collect();
    assert_eq!(ordinals, [2, 3, 4, 5], "in order, over the wrap");
}

#[test]
fn t7_a_torn_entry_is_never_valid() {
    // An entry of the second lap over one of the first, any subset of whose words arrived.
    let mut log = fresh(4);
    append_all(&mut log, 1..=4);
    log.release_now(Seq(4)).unwrap();
    let before = log.region().bytes().to_vec();
    log.append(&Attribute { member: Member(9), lba: 77, ..write(5, 5) }).unwrap();
    let after = log.region().bytes().to_vec();
    for subset in 0_u32..256 {
        let mut region = MemRegion::new(before.len());
        region.bytes_mut().copy_from_slice(&before);
        for word in (0..8).filter(|word| subset & (1 << word) != 0) {
            let at = MARKS + 8 * word;
            region.bytes_mut()[at..at + 8].copy_from_slice(&after[at..at + 8]);
        }
        let (_, scan) = reopen(region);
        // Words that both laps share (the tag is not among them) do not matter.
        let differs = |word: u32| {
            let at = MARKS + 8 * word as usize;
            before[at..at + 8] != after[at..at + 8]
        };
        let whole = (1..8).all(|word| subset & (1 << word) != 0 || !differs(word));
        let untouched = (1..8).all(|word| subset & (1 << word) == 0 || !differs(word));
        assert_eq!(seqs(&scan), if whole { vec![5] } else { vec![] }, "words {subset:#010b}");
        assert_eq!(scan.torn, u32::from(!whole && !untouched), "words {subset:#010b}");
    }
}

#[test]
fn t7_an_entry_of_an_older_lap_is_never_valid() {
    let mut log = fresh(4);
    append_all(&mut log, 1..=4);
    let old = log.region().bytes()[MARKS..].to_vec();
    log.release_now(Seq(4)).unwrap();
    append_all(&mut log, 5..=8);
    // The second lap never reached the medium: its slots still hold the first lap, whole, with
    // groups beyond the mark by its bytes.
    log.start(ORIGIN, Seq::ZERO).unwrap();
    let mut region = log.into_region();
    region.bytes_mut()[MARKS..].copy_from_slice(&old);
    let (_, scan) = reopen(region);
    assert_eq!(seqs(&scan), []);
    assert_eq!(scan.stale, 4);
    assert!(scan.is_clean());
}

#[test]
fn t7_a_persist_word_of_an_older_lap_is_not_valid() {
    let mut log = fresh(4);
    for seq in 1..=4 {
        let position = log.append(&write(seq, seq as u32)).unwrap();
        log.fence().unwrap();
        log.persist(position);
    }
    log.fence().unwrap();
    let stale = log.region().bytes()[MARKS..MARKS + 8].to_vec();
    assert_ne!(stale, [0; 8]);
    log.release_now(Seq(4)).unwrap();
    log.append(&write(5, 5)).unwrap();
    // All words of the new entry arrived but the first.
    let mut region = log.into_region();
    region.bytes_mut()[MARKS..MARKS + 8].copy_from_slice(&stale);
    let (_, scan) = reopen(region);
    assert_eq!(seqs(&scan), [5]);
    assert!(!scan.entries[0].persisted);
}

#[test]
fn t7_a_stamp_of_another_incarnation_is_not_valid() {
    let mut stamps = std::collections::BTreeSet::new();
    for generation in 0..20 {
        for incarnation in 0..20 {
            for position in 0..50 {
                let origin = Origin { generation, incarnation };
                stamps.insert(origin.stamp(Position(position)));
            }
        }
    }
    assert_eq!(stamps.len(), 20 * 20 * 50);
    assert!(!stamps.contains(&0));
}

#[test]
fn t7_the_generation_floor_buries_older_entries() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=5);
    let mut next = ORIGIN;
    next.generation += 1;
    log.start(next, Seq(3)).unwrap();
    let (mut log, scan) = reopen(log.into_region().crash(0));
    assert_eq!((seqs(&scan), scan.released, scan.stale), (vec![], Seq(3), 5));
    assert!(scan.is_clean());
    let old = log.start(ORIGIN, Seq(3));
    assert_eq!(old, Err(BindError::Generation { given: 5, current: 6 }));
    log.start(next, Seq(3)).unwrap();
    append_all(&mut log, 4..=4);
    assert_eq!(seqs(&log.scan().unwrap()), [4]);
}

#[test]
fn t7_start_cleans_up_after_a_torn_append() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=2);
    log.append(&write(3, 3)).unwrap();
    let mut region = log.into_region();
    region.bytes_mut()[MARKS + 2 * 64 + 20] ^= 1;
    let (mut log, scan) = reopen(region);
    assert_eq!((seqs(&scan), scan.torn), (vec![1, 2], 1));
    assert!(!scan.is_clean());
    log.start(ORIGIN, Seq(2)).unwrap();
    assert!(reopen(log.into_region()).1.is_clean());
}

#[test]
fn t13_a_full_log_refuses_exactly_when_no_slot_is_free() {
    let mut log = fresh(6);
    append_all(&mut log, 1..=6);
    for round in 0..20 {
        let full = AppendError::Full { slots: 6, released: Seq(round) };
        let before = log.region().bytes().to_vec();
        assert_eq!(log.append(&write(7 + round, 0)), Err(full));
        assert_eq!(log.region().bytes(), before, "a refused append leaves no trace");
        assert_eq!(log.free_slots(), 0);
        log.release(Seq(round + 1));
        assert_eq!(log.free_slots(), 1);
        log.append(&write(7 + round, 0)).unwrap();
    }
    // Released out of order is not released: the oldest slot is in the way.
    log.release(Seq(25));
    assert_eq!(log.free_slots(), 5);
}

#[test]
fn t13_nothing_is_appended_before_a_binding_or_after_a_fault() {
    let region = MemRegion::new(partition_bytes(4));
    let mut log = StreamLog::format(region, ID, 1, crc32c).unwrap();
    assert_eq!(log.append(&write(1, 1)), Err(AppendError::Unbound));
    log.start(ORIGIN, Seq::ZERO).unwrap();
    let mut region = log.into_region();
    region.fail_fences_after(3);
    let (mut log, _) = reopen(region);
    log.start(ORIGIN, Seq::ZERO).unwrap();
    log.append(&write(1, 1)).unwrap();
    assert!(log.fence().is_err());
    assert!(matches!(log.append(&write(2, 2)), Err(AppendError::Region(_))));
    assert!(log.fence().is_err(), "a fault is for good");
    assert!(log.release_now(Seq(1)).is_err());
}

#[test]
fn what_does_not_fit_an_entry_is_not_appended() {
    let mut log = fresh(4);
    let good = write(1, 1);
    let bad = [
        Attribute { blocks: 0, ..good },
        Attribute { blocks: (1 << 16) + 1, ..good },
        Attribute { lba: 1 << 48, ..good },
        Attribute { lba: (1 << 48) - 1, blocks: 2, ..good },
        Attribute { span: 0, ..good },
        Attribute { span: 257, ..good },
        Attribute { seq: Seq(u64::MAX), ..good },
        Attribute { num: 0, ..good },
        Attribute { index: 1, ..good },
        Attribute { flags: Flags(0x20), ..good },
        Attribute { flags: Flags::PLACE, ..good },
        Attribute { flags: Flags::EXTEND, kind: Kind::Discard, ..good },
        Attribute { kind: Kind::Flush, ..good },
        Attribute { kind: Kind::Flush, blocks: 0, ..good },
        Attribute { kind: Kind::Flush, lba: 0, ..good },
    ];
    for bad in bad {
        assert!(matches!(log.append(&bad), Err(AppendError::Unloggable { .. })), "{bad:?}");
    }
    assert_eq!(log.free_slots(), 4);
}

#[test]
fn t19_a_blank_partition_is_refused() {
    let region = MemRegion::new(partition_bytes(8));
    let error = StreamLog::open(region, ID, crc32c).unwrap_err();
    assert_eq!(error, LogError::Blank { id: ID });
    assert!(error.to_string().contains("accept_lost_log"));
}

#[test]
fn t19_another_partitions_log_is_refused_by_name() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=3);
    let region = log.into_region();
    let stream = PartitionId { stream: StreamId(4), ..ID };
    let volume = PartitionId { volume: VolumeId([8; 16]), ..ID };
    for expected in [stream, volume] {
        let error = StreamLog::open(region.clone(), expected, crc32c).unwrap_err();
        assert_eq!(error, LogError::Foreign { found: ID, expected });
    }
}

#[test]
fn t19_another_partitions_entries_are_not_entries() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=3);
    let entries = log.region().bytes()[MARKS..].to_vec();
    let other = PartitionId { stream: StreamId(4), ..ID };
    let region = MemRegion::new(partition_bytes(8));
    let mut log = StreamLog::format(region, other, 1, crc32c).unwrap();
    log.start(ORIGIN, Seq::ZERO).unwrap();
    let mut region = log.into_region();
    region.bytes_mut()[MARKS..].copy_from_slice(&entries);
    let (_, scan) = StreamLog::open(region, other, crc32c).unwrap();
    assert_eq!((scan.entries.len(), scan.torn), (0, 3));
    assert!(!scan.is_clean());
}

#[test]
fn t19_a_newer_version_and_a_newer_entry_are_refused() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=2);
    let region = log.into_region();

    let mut newer = region.clone();
    for copy in [0, MARK] {
        let mark = &mut newer.bytes_mut()[copy..copy + MARK];
        mark[4] = 2;
        let check = crc32c(0, &mark[4..]);
        mark[..4].copy_from_slice(&check.to_le_bytes());
    }
    let error = StreamLog::open(newer, ID, crc32c).unwrap_err();
    assert_eq!(error, LogError::Newer { version: 2 });

    for (at, bits) in [(47, 4 ^ 1), (47, 5 ^ 1), (47, 15 ^ 1), (59, 0x80), (59, 0x20), (59, 0x14)] {
        let mut newer = region.clone();
        let entry = &mut newer.bytes_mut()[MARKS + 64..MARKS + 128];
        entry[at] ^= bits;
        let check = crc32c(ID.seed(crc32c), &entry[12..]);
        entry[8..12].copy_from_slice(&check.to_le_bytes());
        let error = StreamLog::open(newer, ID, crc32c).unwrap_err();
        assert!(matches!(error, LogError::NewerEntry { position: Position(1), .. }), "{error}");
    }
}

#[test]
fn t19_a_resized_or_tiny_partition_is_refused() {
    let bytes = fresh(8).into_region().bytes().to_vec();
    let mut longer = MemRegion::new(bytes.len() + 64);
    longer.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
    let error = StreamLog::open(longer, ID, crc32c).unwrap_err();
    assert_eq!(error, LogError::Resized { found: 8, expected: 9 });
    let tiny = MemRegion::new(MARKS + 3 * 64);
    assert!(matches!(StreamLog::open(tiny, ID, crc32c), Err(LogError::TooSmall { .. })));
    assert!(StreamLog::format(MemRegion::new(8), ID, 1, crc32c).is_err());
}

#[test]
fn t19_a_lost_mark_is_noticed() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=8);
    log.release_now(Seq(6)).unwrap();
    append_all(&mut log, 9..=12);
    let region = log.into_region();
    // Without its newest mark the log would seem to begin at group 1, of which nothing is left.
    let mut found = 0;
    for copy in [0, MARK] {
        let mut damaged = region.clone();
        damaged.bytes_mut()[copy + 17] ^= 1;
        match StreamLog::open(damaged, ID, crc32c) {
            Ok((_, scan)) => assert_eq!(seqs(&scan), [7, 8, 9, 10, 11, 12]),
            Err(LogError::Damaged { what: Damage::MarkLost(_), .. }) => found += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(found, 1);
    let mut damaged = region;
    damaged.bytes_mut()[17] ^= 1;
    damaged.bytes_mut()[MARK + 17] ^= 1;
    assert!(matches!(
        StreamLog::open(damaged, ID, crc32c),
        Err(LogError::Damaged { what: Damage::NoMark, .. })
    ));
}

#[test]
fn t19_no_flipped_bit_goes_unnoticed() {
    // Entries of two laps, batches of three, some persisted; the last batch is open.
    let mut log = fresh(8);
    for batch in 0_u64..4 {
        let positions: Vec<_> =
            (1..=3).map(|i| log.append(&write(3 * batch + i, 0)).unwrap()).collect();
        log.fence().unwrap();
        log.persist(positions[1]);
        log.fence().unwrap();
        log.release_now(Seq((3 * batch).saturating_sub(2))).unwrap();
    }
    let truth = log.scan().unwrap();
    let persisted: Vec<_> = truth.entries.iter().map(|e| e.persisted).collect();
    assert_eq!(persisted, [true, false, false, true, false], "in and before the last batch");
    let region = log.into_region();
    let last_proven = Position(truth.entries.last().unwrap().position.0 - 2);
    for bit in 0..region.len() * 8 {
        let mut damaged = region.clone();
        damaged.bytes_mut()[bit / 8] ^= 1 << (bit % 8);
        let Ok((_, scan)) = StreamLog::open(damaged, ID, crc32c) else {
            continue;
        };
        assert!(!scan.is_clean(), "bit {bit}");
        for entry in &truth.entries {
            let found = scan.entries.iter().find(|e| e.position == entry.position);
            match found {
                Some(found) => {
                    assert_eq!(found.attribute, entry.attribute, "bit {bit}");
                    assert!(found.persisted <= entry.persisted, "bit {bit} made it durable");
                    assert!(
                        found.persisted == entry.persisted || entry.position >= last_proven,
                        "bit {bit} made {entry:?} less durable than it was"
                    );
                }
                None => assert!(
                    scan.torn == 1 && entry.position >= last_proven,
                    "bit {bit} hid {entry:?}"
                ),
            }
        }
        let older = scan.entries.len() > truth.entries.len();
        assert!(!older || scan.released < truth.released, "bit {bit}: {scan:?}");
    }
}

#[test]
fn t19_entries_of_a_binding_that_the_marks_do_not_know_are_noticed() {
    for newer in [Origin { incarnation: 10, ..ORIGIN }, Origin { generation: 6, ..ORIGIN }] {
        let mut log = fresh(8);
        let marks = log.region().bytes()[..MARKS].to_vec();
        log.start(newer, Seq::ZERO).unwrap();
        append_all(&mut log, 1..=1);
        let mut region = log.into_region();
        region.bytes_mut()[..MARKS].copy_from_slice(&marks);
        let lost = Damage::MarkLost(Position(0));
        assert!(
            matches!(StreamLog::open(region, ID, crc32c),
                Err(LogError::Damaged { what, .. }) if what == lost),
            "{newer:?}"
        );
    }
}

/// A region whose medium loses its content while it is read.
struct Failing<'a> {
    region: &'a mut MemRegion,
    has_failed: Cell<bool>,
}

impl Region for Failing<'_> {
    fn len(&self) -> usize {
        self.region.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        match self.has_failed.get() {
            true => into.fill(0),
            false => self.region.read(offset, into),
        }
    }

    fn check(&self) -> Result<(), RegionError> {
        match self.has_failed.get() {
            true => Err(RegionError::new("its pages are gone")),
            false => Ok(()),
        }
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.region.write(offset, bytes);
    }

    fn write_word(&mut self, offset: usize, value: u64) {
        self.region.write_word(offset, value);
    }

    fn fence(&mut self) -> Result<(), RegionError> {
        self.region.fence()
    }
}

#[test]
fn t19_a_medium_that_fails_while_it_is_read_is_not_taken_for_an_empty_log() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=3);
    log.fence().unwrap();
    let mut region = log.into_region();
    let failing = Failing { region: &mut region, has_failed: Cell::new(false) };
    let (log, scan) = StreamLog::open(failing, ID, crc32c).unwrap();
    assert_eq!(scan.entries.len(), 3);
    log.region().has_failed.set(true);
    assert!(matches!(log.scan(), Err(LogError::Region(_))), "{:?}", log.scan());
}
