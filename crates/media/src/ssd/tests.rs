//! Power cuts against an oracle that uses only the numbered assumptions, and no data structure of
//! the drive.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use riopipe_order::block_device::{Cause, Operation};

use crate::drive::Done;
use crate::medium::{LockWait, Medium, Reserve};
use crate::watched::Watched;

const BLOCKS: u64 = 6;

/// Flash whose cache can lose only the last few blocks.
const FORGIVING: Profile = Profile { losable_blocks: 5, ..FLASH };

#[derive(Debug, Clone)]
enum Act {
    Write { lba: u64, blocks: u64 },
    Zero { lba: u64, blocks: u64 },
    Flush,
    Wait { ns: u64 },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let extent = || (0..BLOCKS).prop_flat_map(|lba| (Just(lba), 1..=BLOCKS - lba));
    let act = prop_oneof![
        5 => extent().prop_map(|(lba, blocks)| Act::Write { lba, blocks }),
        1 => extent().prop_map(|(lba, blocks)| Act::Zero { lba, blocks }),
        1 => Just(Act::Flush),
        // From a moment to the time of a whole FLUSH.
        4 => prop_oneof![0..30_000u64, 0..2_500_000u64].prop_map(|ns| Act::Wait { ns }),
    ];
    prop::collection::vec(act, 1..60)
}

/// One write of one block in the oracle's books. Each of its bytes has the same value.
struct Put {
    op: u64,
    lba: u64,
    value: u8,
    /// Its position in the order of completions, if it has completed.
    completed: Option<usize>,
    durable: bool,
}

/// The conditions that must hold, by the numbered assumptions alone.
struct Oracle {
    profile: &'static Profile,
    puts: Vec<Put>,
    /// Flushes in flight, each with the writes that had completed when it was submitted.
    flushes: Vec<(u64, Vec<usize>)>,
    completions: usize,
}

impl Oracle {
    fn complete(&mut self, op: u64) {
        if let Some(index) = self.flushes.iter().position(|(flush, _)| *flush == op) {
            let (_, covered) = self.flushes.remove(index);
            covered.into_iter().for_each(|put| self.puts[put].durable = true);
        }
        for put in self.puts.iter_mut().filter(|put| put.op == op) {
            put.completed = Some(self.completions);
            put.durable = self.profile.plp;
            self.completions += 1;
        }
        // Writes that the drive has written back by itself: all but the last few.
        let kept = self.completions.saturating_sub(self.profile.losable_blocks as usize);
        for put in &mut self.puts {
            put.durable |= put.completed.is_some_and(|place| place < kept);
        }
    }

    fn flush(&mut self, op: u64) {
        let completed = self.puts.iter().enumerate().filter(|(_, put)| put.completed.is_some());
        self.flushes.push((op, completed.map(|(index, _)| index).collect()));
    }

    /// The content of the block while the power is on.
    fn now(&self, lba: u64) -> u8 {
        let here = self.puts.iter().filter(|put| put.lba == lba && put.completed.is_some());
        here.max_by_key(|put| put.completed).map_or(0, |put| put.value)
    }

    /// The contents that the block may have after a power cut: the newest durable write, any write
    /// that completed after it, and any that has not completed.
    fn allowed(&self, lba: u64) -> BTreeSet<u8> {
        let here: Vec<_> = self.puts.iter().filter(|put| put.lba == lba).collect();
        let newest = here.iter().filter(|put| put.durable).max_by_key(|put| put.completed);
        let floor = newest.and_then(|put| put.completed);
        let mut allowed: BTreeSet<u8> = here
            .iter()
            .filter(|put| put.completed.is_none() || put.completed >= floor)
            .map(|put| put.value)
            .collect();
        if newest.is_none() {
            allowed.insert(0);
        }
        allowed
    }
}

/// The number of times that each outcome was seen: a test of loss without a loss would prove
/// nothing.
#[derive(Default, Debug)]
struct Seen {
    lost: u64,
    kept: u64,
    landed: u64,
}

fn model(profile: &'static Profile, in_file: bool, seed: u64) -> Model {
    if !in_file {
        return in_memory(profile, Order::NONE, BLOCKS, seed, false).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drive").display().to_string();
    let size = Some(BLOCKS * BLOCK_BYTES as u64);
    let at_once = LockWait::within(Duration::ZERO);
    let medium = Medium::file(&path, size, Reserve::Try, false, at_once).unwrap();
    super::in_file(profile, Order::NONE, Arc::new(Watched::new(medium)), seed).unwrap()
}

fn zeroes(lba: u64, blocks: u64) -> Command<u32> {
    Command::Zeroes { what: Operation::WriteZeroes, lba, blocks }
}

fn contents(model: &mut Model, queue: QueueId, now: u64) -> Vec<u8> {
    let mut done = Vec::new();
    model.submit(now, queue, u64::MAX, Command::Read { lba: 0, blocks: BLOCKS });
    model.advance(u64::MAX);
    model.take_done(queue, &mut done);
    let buf = done.pop().unwrap().result.unwrap().unwrap();
    buf.chunks_exact(BLOCK_BYTES)
        .map(|block| {
            assert!(block.iter().all(|byte| *byte == block[0]), "a torn block");
            block[0]
        })
        .collect()
}

fn check(profile: &'static Profile, in_file: bool, acts: &[Act], seed: u64) -> Seen {
    let mut drive = model(profile, in_file, seed);
    let queue = drive.open_queue();
    let mut oracle = Oracle { profile, puts: Vec::new(), flushes: Vec::new(), completions: 0 };
    let mut now = 0;
    let mut done: Vec<Done> = Vec::new();
    for (op, act) in acts.iter().enumerate() {
        let op = op as u64;
        let value = match act {
            Act::Write { .. } => op as u8 + 1,
            _ => 0,
        };
        match *act {
            Act::Write { lba, blocks } => {
                let bytes = vec![value; blocks as usize * BLOCK_BYTES];
                write(&mut drive, now, queue, op, lba, &bytes).unwrap();
            }
            Act::Zero { lba, blocks } => drive.submit(now, queue, op, zeroes(lba, blocks)),
            Act::Flush => {
                oracle.flush(op);
                drive.submit(now, queue, op, Command::Flush);
            }
            Act::Wait { ns } => {
                now += ns;
                drive.advance(now);
            }
        }
        if let Act::Write { lba, blocks } | Act::Zero { lba, blocks } = *act {
            oracle.puts.extend((lba..lba + blocks).map(|lba| Put {
                op,
                lba,
                value,
                completed: None,
                durable: false,
            }));
        }
        drive.take_done(queue, &mut done);
        for done in done.drain(..) {
            done.result.unwrap();
            oracle.complete(done.op);
        }
    }

    let unfinished = oracle.puts.iter().any(|put| put.completed.is_none());
    let cut = drive.power_cut(now, seed);
    assert!(cut.in_flight > 0 || !unfinished);
    drive.take_done(queue, &mut done);
    assert_eq!(done.len() as u64, cut.in_flight, "everything in flight is answered");
    for done in done.drain(..) {
        assert_eq!(done.result.unwrap_err().cause(), &Cause::PowerLost);
    }
    drive.submit(now, queue, 0, Command::Flush);
    drive.take_done(queue, &mut done);
    assert!(done.pop().unwrap().result.is_err(), "a drive without power refuses");

    drive.power_on();
    let after = contents(&mut drive, queue, now);
    for (lba, value) in (0..BLOCKS).zip(&after) {
        let allowed = oracle.allowed(lba);
        assert!(allowed.contains(value), "block {lba} holds {value}, allowed are {allowed:?}");
    }
    let again = drive.power_cut(now, seed + 1);
    assert_eq!(
        (again.blocks_lost, again.blocks_landed),
        (0, 0),
        "the result of the first cut is durable"
    );
    drive.power_on();
    assert_eq!(contents(&mut drive, queue, now), after);
    Seen { lost: cut.blocks_lost, kept: cut.blocks_kept, landed: cut.blocks_landed }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_power_cut_loses_only_what_may_be_lost(
        acts in acts(),
        seed: u64,
        in_file: bool,
        profile in prop::sample::select(vec![&FLASH, &FORGIVING, &OPTANE]),
    ) {
        check(profile, in_file, &acts, seed / 2);
    }

    #[test]
    fn with_power_the_last_completed_write_is_read(acts in acts(), in_file: bool) {
        let mut drive = model(&FLASH, in_file, 1);
        let queue = drive.open_queue();
        let mut oracle =
            Oracle { profile: &FLASH, puts: Vec::new(), flushes: Vec::new(), completions: 0 };
        for (op, act) in (0..).zip(&acts) {
            if let Act::Write { lba, blocks } | Act::Zero { lba, blocks } = *act {
                let value = if matches!(act, Act::Write { .. }) { op as u8 + 1 } else { 0 };
                if value > 0 {
                    let bytes = vec![value; blocks as usize * BLOCK_BYTES];
                    write(&mut drive, 0, queue, op, lba, &bytes).unwrap();
                } else {
                    drive.submit(0, queue, op, zeroes(lba, blocks));
                }
                let put = |lba| Put { op, lba, value, completed: None, durable: false };
                oracle.puts.extend((lba..lba + blocks).map(put));
            }
        }
        let mut done = Vec::new();
        drive.advance(u64::MAX);
        drive.take_done(queue, &mut done);
        done.iter().for_each(|done| oracle.complete(done.op));
        let expected: Vec<_> = (0..BLOCKS).map(|lba| oracle.now(lba)).collect();
        prop_assert_eq!(contents(&mut drive, queue, 0), expected);
    }
}

/// Every outcome that the assumptions allow occurs.
#[test]
fn a_power_cut_loses_keeps_and_lands() {
    let acts = |flushed| {
        let mut acts = vec![
            Act::Write { lba: 0, blocks: 3 },
            Act::Write { lba: 1, blocks: 3 },
            Act::Wait { ns: 50_000 },
        ];
        if flushed {
            acts.extend([Act::Flush, Act::Wait { ns: 5_000_000 }]);
        }
        acts.extend([Act::Write { lba: 0, blocks: 2 }, Act::Write { lba: 0, blocks: 1 }]);
        acts
    };
    for in_file in [false, true] {
        let mut sum = Seen::default();
        for seed in 0..100 {
            let seen = check(&FLASH, in_file, &acts(false), seed);
            sum.lost += seen.lost;
            sum.kept += seen.kept;
            sum.landed += seen.landed;
        }
        assert!(sum.lost > 0 && sum.kept > 0 && sum.landed > 0, "{sum:?}");
        for profile in [&FLASH, &OPTANE] {
            let lost = (0..100).map(|seed| check(profile, in_file, &acts(true), seed).lost);
            assert_eq!(lost.sum::<u64>(), 0, "flushed, or with power-loss protection");
        }
    }
}

#[test]
fn writes_in_flight_to_one_block_land_in_either_order() {
    // M4.
    let mut ends = BTreeSet::new();
    for seed in 0..200 {
        let mut drive = model(&OPTANE, false, seed);
        let queue = drive.open_queue();
        write(&mut drive, 0, queue, 1, 0, &[1; BLOCK_BYTES]).unwrap();
        write(&mut drive, 0, queue, 2, 0, &[2; BLOCK_BYTES]).unwrap();
        drive.power_cut(1, seed);
        drive.power_on();
        ends.insert(contents(&mut drive, queue, 1)[0]);
    }
    assert_eq!(ends, BTreeSet::from([0, 1, 2]));
}

#[test]
fn a_flush_covers_only_what_had_completed() {
    // M2: the write completes while the flush is executed, and may still be lost.
    let mut lost = 0;
    for seed in 0..50 {
        let mut drive = model(&FLASH, false, seed);
        let queue = drive.open_queue();
        write(&mut drive, 0, queue, 1, 0, &[1; BLOCK_BYTES]).unwrap();
        drive.submit(1, queue, 2, Command::Flush);
        drive.advance(10_000_000);
        let mut done = Vec::new();
        assert_eq!(drive.take_done(queue, &mut done), 2);
        lost += drive.power_cut(10_000_000, seed).blocks_lost;
    }
    assert!(lost > 0);
}

#[test]
fn the_same_seed_gives_the_same_drive() {
    let run = || {
        let mut drive = model(&FLASH, false, 5);
        let queue = drive.open_queue();
        for op in 0..100 {
            let bytes = [op as u8; BLOCK_BYTES];
            write(&mut drive, op * 1000, queue, op, op % BLOCKS, &bytes).unwrap();
        }
        let mut done = Vec::new();
        drive.advance(90_000);
        drive.take_done(queue, &mut done);
        let ops: Vec<_> = done.iter().map(|done| done.op).collect();
        let cut = drive.power_cut(95_000, 9);
        drive.power_on();
        (ops, cut, contents(&mut drive, queue, 95_000))
    };
    assert_eq!(run(), run());
}
