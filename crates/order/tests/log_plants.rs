//! Each plant of the ordering log does what its name promises, and each rare path is counted.
#![cfg(feature = "probe")]

mod common;

use common::{ID, MARKS, ORIGIN, append_all, crc32c, fresh, lose, reopen, seqs, write};
use riopipe_order::attribute::Seq;
use riopipe_order::entry::Position;
use riopipe_order::ordering_log::StreamLog;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::MemRegion;

/// A log of four slots in its second lap: entry 5 over entry 1, of whose words only some arrived.
fn half_an_entry(words: std::ops::Range<usize>) -> MemRegion {
    let mut log = fresh(4);
    append_all(&mut log, 1..=4);
    log.persist(Position(0));
    log.release_now(Seq(4)).unwrap();
    let before = log.region().bytes().to_vec();
    log.append(&write(5, 5)).unwrap();
    let mut region = log.into_region();
    for word in (0..8).filter(|word| !words.contains(word)) {
        let at = MARKS + 8 * word;
        region.bytes_mut()[at..at + 8].copy_from_slice(&before[at..at + 8]);
    }
    region
}

fn count(rare: Rare) -> u64 {
    probe::counts()[rare as usize]
}

/// Plants are set for the whole process, so this is one test.
#[test]
fn plants_and_rare_paths_are_where_they_belong() {
    // Half an entry: the new position and group, the old blocks.
    let half = half_an_entry(1..4);
    let torn = reopen(half.clone()).1;
    assert_eq!((seqs(&torn), torn.torn, count(Rare::TornEntry)), (vec![], 1, 1));
    probe::plant(Some(Plant::T7NoChecksum));
    let accepted = reopen(half).1;
    assert_eq!((seqs(&accepted), accepted.torn), (vec![5], 0));
    assert_eq!(accepted.entries[0].attribute.lba, write(1, 1).lba, "undo would hit another's");

    // A whole entry under the persist word of the one before.
    probe::plant(None);
    let stale_word = half_an_entry(1..8);
    assert!(!reopen(stale_word.clone()).1.entries[0].persisted);
    assert!(count(Rare::InvalidPersist) > 0);
    probe::plant(Some(Plant::T7AnyPersistWord));
    assert!(reopen(stale_word).1.entries[0].persisted);

    // A slot is needed again, and its mark is not durable.
    probe::plant(None);
    assert_eq!(count(Rare::LogLap), 2, "one for each log of four slots");
    assert!(count(Rare::StaleEntry) > 0, "entries of their first lap");
    let needs_a_slot = || {
        let mut log = fresh(8);
        append_all(&mut log, 1..=8);
        log.release(Seq(1));
        let fences = log.region().fences();
        log.append(&write(9, 9)).unwrap();
        (log.region().fences() - fences, log)
    };
    let made = count(Rare::MarkForSpace);
    assert_eq!((needs_a_slot().0, count(Rare::MarkForSpace)), (1, made + 1));
    probe::plant(Some(Plant::T1ReuseBeforeMark));
    let (fences, mut log) = needs_a_slot();
    assert_eq!(fences, 0);
    let after = |seed| StreamLog::open(log.region().crash(seed), ID, crc32c);
    assert!((0..50).any(|seed| after(seed).is_err()), "what is alive is overwritten");
    assert!(log.append(&write(10, 10)).is_err(), "a live slot is not");

    probe::plant(None);

    // A replay, and the hole before it.
    let mut log = fresh(8);
    append_all(&mut log, 1..=2);
    let before = log.region().clone();
    log.append(&write(3, 3)).unwrap();
    log.append(&write(4, 4)).unwrap();
    let cut = lose(&before, log.region(), &[2, 3], 3);
    assert_eq!(seqs(&reopen(cut.clone()).1), [1, 2, 4]);
    for (plant, position) in [(None, 1), (Some(Plant::T6CountTwice), 2)] {
        probe::plant(plant);
        let (mut log, _) = reopen(cut.clone());
        log.resume(ORIGIN).unwrap();
        assert_eq!(log.append(&write(2, 1)), Ok(Position(position)), "{plant:?}");
    }
    assert_eq!((count(Rare::Cut), count(Rare::Adopted)), (2, 1));
    probe::plant(None);
}
