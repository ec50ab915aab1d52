//! Content of a log that no program of this version would have written: refused, or skipped, but
//! never used (T7, T19).

mod common;

use common::{ID, MARK, MARKS, append_all, crc32c, fresh, reopen, seqs};
use riopipe_order::attribute::Seq;
use riopipe_order::entry::{ENTRY_BYTES, Position};
use riopipe_order::ordering_log::{LogError, StreamLog};
use riopipe_order::region::MemRegion;

/// Makes the entry in a slot one of a later version, whole.
fn make_newer(region: &mut MemRegion, slot: usize) {
    let seed = ID.seed(crc32c);
    let entry = &mut region.bytes_mut()[MARKS + slot * ENTRY_BYTES..][..ENTRY_BYTES];
    entry[47] = (entry[47] & 0xf0) | 9;
    let check = crc32c(seed, &entry[12..]);
    entry[8..12].copy_from_slice(&check.to_le_bytes());
}

#[test]
fn t19_an_entry_of_a_later_version_matters_as_long_as_it_is_alive() {
    let mut log = fresh(4);
    append_all(&mut log, 1..=4);
    log.release_now(Seq(2)).unwrap();
    let region = log.into_region();
    for (slot, alive) in [(0, false), (1, false), (2, true), (3, true)] {
        let mut newer = region.clone();
        make_newer(&mut newer, slot);
        match StreamLog::open(newer, ID, crc32c) {
            Ok((_, scan)) => {
                assert!(!alive, "slot {slot} was passed over");
                assert_eq!((seqs(&scan), scan.stale), (vec![3, 4], 2), "slot {slot}");
            }
            Err(LogError::NewerEntry { position, kind: 9, .. }) => {
                assert!(alive && position == Position(slot as u64), "slot {slot}: {position:?}");
            }
            Err(error) => panic!("slot {slot}: {error}"),
        }
    }
}

#[test]
fn t19_an_entry_in_another_ones_slot_is_no_entry() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=2);
    let mut region = log.into_region();
    let entry = MARKS..MARKS + ENTRY_BYTES;
    region.bytes_mut().copy_within(entry, MARKS + 3 * ENTRY_BYTES);
    let scan = reopen(region).1;
    assert_eq!((seqs(&scan), scan.torn, scan.stale), (vec![1, 2], 1, 0));
}

#[test]
fn t7_a_mark_in_the_others_place_is_cleared_before_it_is_written_over() {
    let fences = |corrupt: fn(&mut MemRegion)| {
        let mut log = fresh(8);
        append_all(&mut log, 1..=2);
        let mut region = log.into_region();
        corrupt(&mut region);
        let (mut log, _) = reopen(region);
        let before = log.region().fences();
        log.release_now(Seq(1)).unwrap();
        log.region().fences() - before
    };
    // Four marks were written, so the fifth goes over the second copy.
    let misplaced = |region: &mut MemRegion| {
        let mark = &mut region.bytes_mut()[MARK..2 * MARK];
        mark[8] += 1;
        let check = crc32c(0, &mark[4..]);
        mark[..4].copy_from_slice(&check.to_le_bytes());
    };
    let torn = |region: &mut MemRegion| region.bytes_mut()[MARK + 9] ^= 1;
    assert_eq!((fences(|_| {}), fences(torn), fences(misplaced)), (1, 2, 2));
}
