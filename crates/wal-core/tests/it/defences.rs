//! The defences of the format and the writer: for each, a history that fails without it.

use proptest::prelude::*;
use riopipe_nvme::digest::soft;
use riopipe_testkit::Random;
use riopipe_wal_core::format::{BlockError, HEADER_BYTES, Header, PAYLOAD_BYTES};
use riopipe_wal_core::opening::{Changed, FindError, Settling, Unsettled};
use riopipe_wal_core::reading::ReadError;
use riopipe_wal_core::record::Kind;
use riopipe_wal_core::{BLOCK_BYTES, Lsn};

use super::world::{Below, LOG, ONE_BLOCK, START, World, bytes};

/// Writes `count` groups of one block each, none of them durable.
fn one_block_groups(world: &mut World, count: u64) {
    for number in 0..count {
        world.append(Kind::Data, &bytes(ONE_BLOCK, number));
        assert_eq!(world.commit(), 1);
        world.advance(99, 0, 0);
    }
}

/// Completes the blocks of these groups in flight, and loses the others.
fn crash_keeping(world: &mut World, kept: &[usize]) {
    let flying = std::mem::take(&mut world.flying);
    for (i, group) in flying.into_iter().enumerate() {
        if kept.contains(&i) {
            world.arrive(group.writes);
        }
    }
}

#[test]
fn a_hole_ends_the_log_with_any_blocks_behind_it() {
    let mut world = World::new(40, Below::Any);
    one_block_groups(&mut world, 4);
    crash_keeping(&mut world, &[0, 2, 3]);
    let end = world.find().unwrap();
    assert_eq!(end.number, 2, "the first block, and the one before the hole");
    world.reopen();
}

#[test]
fn blocks_of_an_earlier_opening_behind_a_hole_are_not_part_of_the_log() {
    let mut world = World::new(40, Below::Any);
    one_block_groups(&mut world, 4);
    crash_keeping(&mut world, &[0, 2, 3]);
    world.reopen();
    // The new block fills the hole, and has the length of the block that was lost there.
    one_block_groups(&mut world, 1);
    world.advance(9, 9, 9);
    crash_keeping(&mut world, &[]);
    assert_eq!(world.find().unwrap().number, 3, "the blocks behind have an older epoch");
    world.reopen();
}

#[test]
fn blocks_of_the_lap_before_are_not_the_end_of_the_log() {
    let mut world = World::new(16, Below::Any);
    for number in 0..100 {
        world.append(Kind::Data, &bytes(ONE_BLOCK, number));
        world.settle();
        world.trim(world.confirmed);
        world.crash(&mut Random(number), true);
        assert_eq!(world.find().unwrap().lsn, world.confirmed);
    }
    world.reopen();
}

#[test]
fn blocks_of_another_log_are_not_taken_for_this_one() {
    let mut world = World::new(40, Below::Any);
    one_block_groups(&mut world, 1);
    // In the place of the next block: all fields are right but the log's number.
    let last = Header::parse(&world.flying[0].writes[0].1[..], LOG, soft).unwrap();
    let foreign = Header { log: LOG + 1, number: last.number + 1, lsn: last.end(), ..last };
    let mut block = [0; BLOCK_BYTES];
    foreign.seal(&mut block, soft);
    let lba = world.ring.lba(foreign.number);
    crash_keeping(&mut world, &[0]);
    world.arrive(vec![(lba, Box::new(block))]);
    assert_eq!(world.find().unwrap().number, foreign.number);
    world.reopen();
}

#[test]
fn a_torn_block_ends_the_log() {
    let mut world = World::new(40, Below::Any);
    one_block_groups(&mut world, 1);
    crash_keeping(&mut world, &[0]);
    world.block(1)[HEADER_BYTES + 2000..].fill(0);
    assert_eq!(world.find().unwrap().number, 1);
    world.reopen();
}

#[test]
fn a_record_cut_by_a_crash_is_not_continued_by_another() {
    for below in [Below::Rio, Below::Any] {
        let mut world = World::new(80, below);
        // Two groups, of which the second never completes.
        world.append(Kind::Data, &bytes(6 * ONE_BLOCK, 1));
        assert_eq!(world.commit(), 2);
        let before = world.confirmed;
        world.advance(1, 1, 1);
        assert_eq!(world.confirmed, before, "a part of a record is not durable");
        crash_keeping(&mut world, &[]);
        world.reopen();
        let next = world.append(Kind::Data, &bytes(6 * ONE_BLOCK, 2));
        world.settle();
        assert!(world.confirmed > next);
        world.crash(&mut Random(1), true);
        world.reopen();
    }
}

#[test]
fn t11_a_block_is_written_again_only_after_the_trim_is_released() {
    let mut world = World::new(16, Below::Rio);
    while world.writer.free_blocks() > 0 {
        world.append(Kind::Data, &bytes(ONE_BLOCK, 3));
        world.settle();
    }
    let first = world.model[2].lsn;
    world.append(Kind::Data, &bytes(ONE_BLOCK, 4));
    world.trim(first);
    // The trim is written by itself, since there is no space for anything else.
    assert_eq!(world.commit(), 1);
    assert_eq!(world.writer.free_blocks(), 0, "submitted is not enough");
    world.advance(99, 0, 0);
    assert_eq!((world.commit(), world.writer.free_blocks()), (0, 0), "complete is not enough");
    world.advance(0, 99, 0);
    assert_eq!((world.commit(), world.writer.free_blocks()), (0, 0), "nor durable");
    world.advance(0, 0, 99);
    assert!(world.writer.free_blocks() > 0);
    world.settle();
    world.crash(&mut Random(3), true);
    world.reopen();
}

#[test]
fn a_full_log_can_always_be_trimmed() {
    let mut world = World::new(16, Below::Rio);
    for number in 0..200 {
        world.append(Kind::Data, &bytes(ONE_BLOCK, number));
        world.settle();
        if !world.queue.is_empty() {
            // One block at a time: the least that a trim can free.
            let next = world.model.iter().map(|r| r.lsn).find(|lsn| *lsn > world.trim).unwrap();
            world.trim(next);
            world.settle();
        }
    }
    world.crash(&mut Random(3), true);
    world.reopen();
}

/// Marks as drives with a volatile cache allow them: durable up to the last group with a FLUSH.
fn advance_as_flushed(world: &mut World) {
    let flush = world.flying.iter().rfind(|group| group.flush).map(|group| group.seq);
    let durable = flush.map_or(0, |seq| seq - world.marks.durable);
    world.advance(99, durable, durable);
}

#[test]
fn a_trimmed_log_gets_space_though_no_caller_waits() {
    for blocks_left in [0, 1] {
        let mut world = World::new(16, Below::Rio);
        world.waits = true;
        while world.writer.free_blocks() > blocks_left {
            world.append(Kind::Data, &bytes(ONE_BLOCK, 3));
            world.settle();
        }
        world.waits = false;
        let first = world.model[2].lsn;
        world.trim(first);
        // With a block left, records carry the trim; else it is written by itself.
        for seed in 0..2 {
            world.append(Kind::Data, &bytes(ONE_BLOCK, seed));
        }
        for _ in 0..8 {
            world.commit();
            advance_as_flushed(&mut world);
        }
        assert_eq!(world.queue.len(), 0, "{blocks_left} blocks were left");
    }
}

#[test]
fn a_damaged_block_is_not_taken_for_the_end_of_the_log() {
    let mut world = World::new(80, Below::Any);
    for number in 0..7 {
        world.append(Kind::Data, &bytes(ONE_BLOCK, number));
        world.settle();
    }
    // The binary search reads it, and would continue below it.
    world.block(5)[100] ^= 1;
    assert_eq!(world.find(), Err(FindError::Damaged { number: 5 }));
}

#[test]
fn with_a_tag_even_a_damaged_last_block_is_detected() {
    let mut world = World::new(40, Below::Rio);
    one_block_groups(&mut world, 3);
    world.settle();
    let last = world.find().unwrap().number - 1;
    world.block(last).fill(0);
    assert_eq!(world.find(), Err(FindError::Damaged { number: last }));
}

#[test]
fn a_log_that_has_lost_all_its_blocks_is_no_interrupted_creation() {
    let mut world = World::new(16, Below::Any);
    let block = *world.block(0);
    // Block 0 was never written: its place is empty, or has a block of another log.
    for before in [[0; BLOCK_BYTES], {
        let mut other = block;
        let header = Header::parse(&block, LOG, soft).unwrap();
        Header { log: LOG + 1, ..header }.seal(&mut other, soft);
        other
    }] {
        *world.block(0) = before;
        assert_eq!(world.find(), Err(FindError::CreationCut));
    }
    for at in [HEADER_BYTES - 1, 4] {
        *world.block(0) = block;
        world.block(0)[at] ^= 1;
        assert_eq!(world.find(), Err(FindError::Lost), "byte {at}");
    }
    // The volume's tag shows that there was a group.
    let mut world = World::new(16, Below::Rio);
    world.block(0).fill(0);
    assert_eq!(world.find(), Err(FindError::Lost));
}

#[test]
fn a_damaged_block_is_named_when_it_is_read() {
    let mut world = World::new(40, Below::Rio);
    for number in 0..12 {
        world.append(Kind::Data, &bytes(ONE_BLOCK, number));
        world.settle();
    }
    let end = world.find().unwrap();
    world.block(2)[HEADER_BYTES + 5] ^= 1;
    let error = ReadError::Block { number: 2, error: BlockError::Torn };
    assert_eq!(world.read(&end, Lsn::ZERO), Err(error));
}

#[test]
fn blocks_read_after_a_crash_are_made_durable_before_others_follow() {
    let history = |careful: bool| {
        let mut world = World::new(40, Below::Any);
        one_block_groups(&mut world, 1);
        // It reaches the drive's cache, and the writing machine crashes.
        crash_keeping(&mut world, &[0]);
        let end = world.find().unwrap();
        assert_eq!(end.unsettled(), 1..2);
        world.go_on(end, careful);
        world.append(Kind::Data, b"after the crash");
        world.settle();
        // The power is cut, and the content of the cache is lost.
        world.lose_caches();
        world
    };
    history(true).reopen();
    let careless = history(false);
    assert!(careless.find().is_err(), "without that, confirmed records are lost");
}

/// A drive drops its cache while the log is opened: a FLUSH of another stream fails.
#[test]
fn blocks_that_a_drive_loses_during_opening_are_not_written_again() {
    let mut world = World::new(40, Below::Any);
    one_block_groups(&mut world, 2);
    crash_keeping(&mut world, &[0, 1]);
    let end = world.find().unwrap();
    let blocks: Vec<_> = end.to_settle().collect();
    assert_eq!(blocks, [Unsettled::Block(1), Unsettled::Block(2)]);
    let content = |world: &mut World, number| *world.block(number);
    let [one, two] = [1, 2].map(|number| content(&mut world, number));
    let check = |all: [&[u8]; 2]| {
        let mut settling = Settling::new(end, LOG, soft);
        blocks.iter().zip(all).try_for_each(|(which, block)| settling.check(*which, block))
    };
    assert_eq!(check([&one, &two]), Ok(()));
    // Each of them reads as it was before, or as an earlier version of itself.
    let nothing = [0; BLOCK_BYTES];
    assert_eq!(check([&nothing, &two]), Err(Changed));
    assert_eq!(check([&one, &nothing]), Err(Changed));
    let header = Header::parse(&two, LOG, soft).unwrap();
    let mut shorter = two;
    Header { used: header.used - 1, ..header }.seal(&mut shorter, soft);
    assert_eq!(check([&one, &shorter]), Err(Changed));
    // Opened again, the log ends earlier.
    world.lose_caches();
    assert_eq!(world.find().unwrap().number, 1);
}

#[test]
fn a_log_whose_creation_was_cut_is_made_durable_with_its_anchor() {
    let mut world = World::new(16, Below::Any);
    let to_settle = |world: &World| -> Vec<u64> {
        let all = world.find().unwrap().to_settle();
        all.map(|unsettled| unsettled.lba(START - 1, world.ring)).collect()
    };
    assert_eq!(to_settle(&world), [START - 1, START]);
    // A block that follows shows that both were durable.
    one_block_groups(&mut world, 1);
    crash_keeping(&mut world, &[0]);
    assert_eq!(to_settle(&world), [START + 1]);
}

#[test]
fn writes_in_flight_stay_within_the_window_of_opening() {
    let mut world = World::new(40, Below::Rio);
    for number in 0..100 {
        world.append(Kind::Data, &bytes(ONE_BLOCK, number));
        world.commit();
        world.advance(99, 0, 0);
    }
    let blocks: usize = world.flying.iter().map(|group| group.writes.len()).sum();
    assert_eq!(blocks as u64, world.ring.window());
    assert!(world.flying.iter().any(|group| group.flush), "a FLUSH without a waiting caller");
    world.advance(0, 99, 99);
    assert!(world.commit() > 0);
}

#[test]
fn t19_blocks_of_another_ring_are_refused() {
    let mut world = World::new(16, Below::Any);
    let mut header = Header {
        log: LOG,
        number: 99,
        epoch: 1,
        follows: 1,
        lsn: Lsn(0),
        used: 0,
        first: None,
        trim: Lsn(0),
        oldest: 0,
        checkpoint: None,
        settled: 99,
    };
    for _ in 0..2 {
        let mut block = [0; BLOCK_BYTES];
        header.seal(&mut block, soft);
        world.arrive(vec![(world.ring.lba(header.number), Box::new(block))]);
        (header.number, header.settled) = (100, 100);
    }
    // They would need more blocks than the ring has.
    assert_eq!(world.find().unwrap().number, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Blocks are input, too (T19): for any content, opening and reading end with valid records or
    /// with an error.
    #[test]
    fn t19_no_block_of_a_log_makes_its_reader_panic(
        headers in prop::collection::vec(any::<([u64; 8], [u16; 2], bool)>(), 1..20),
        small in any::<bool>(),
    ) {
        let mut world = World::new(16, Below::Any);
        for (place, (words, [used, first], has_checkpoint)) in headers.into_iter().enumerate() {
            // Small numbers sometimes agree by chance.
            let [number, epoch, follows, lsn, trim, oldest, checkpoint, settled] =
                words.map(|word| if small { word % 24 } else { word });
            let used = used % (PAYLOAD_BYTES as u16 + 1);
            let header = Header {
                log: LOG,
                number,
                epoch: epoch % 2,
                follows: follows % 2,
                lsn: Lsn(lsn),
                used,
                first: Some(first % PAYLOAD_BYTES as u16),
                trim: Lsn(trim),
                oldest,
                checkpoint: has_checkpoint.then_some(Lsn(checkpoint)),
                settled,
            };
            let mut block = [first as u8; BLOCK_BYTES];
            header.seal(&mut block, soft);
            let lba = if small { world.ring.lba(number) } else { world.ring.lba(place as u64) };
            world.arrive(vec![(lba, Box::new(block))]);
        }
        if let Ok(end) = world.find() {
            let _ = world.read(&end, end.trim);
            let _ = world.read(&end, Lsn(end.lsn.0 / 2));
            world.open(&end);
            world.append(Kind::Data, b"goes on");
            world.commit();
        }
    }
}

#[test]
fn a_group_is_submitted_with_its_flush_once_callers_are_known_to_wait() {
    let mut world = World::new(80, Below::Any);
    let mut groups_of_a_record = |waits: bool| {
        world.waits = false;
        world.append(Kind::Data, b"one");
        let before_the_wait = world.commit();
        world.waits = waits;
        let groups = before_the_wait + world.commit();
        world.advance(9, 9, 9);
        groups
    };
    assert_eq!(groups_of_a_record(true), 2, "the record, then a FLUSH for it");
    assert_eq!(groups_of_a_record(true), 1, "both at once");
    assert_eq!(groups_of_a_record(false), 1, "the last FLUSH without a waiting caller");
    assert_eq!(groups_of_a_record(true), 2);
}
