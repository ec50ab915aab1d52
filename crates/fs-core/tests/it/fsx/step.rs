//! The random operations of [`fsx`](super).

use riopipe_fs_core::fs::mode;

use super::{FILES, PAGE};
use crate::enumerate::random::Random;

/// An operation. All its numbers are fixed, so that a list of operations can be shortened.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Write {
        file: usize,
        at: u64,
        len: u64,
        byte: u8,
    },
    /// Writes to every second page.
    WriteApart {
        file: usize,
        at: u64,
        pages: u64,
        byte: u8,
    },
    Read {
        file: usize,
        at: u64,
        len: u64,
    },
    Truncate {
        file: usize,
        size: u64,
    },
    Fallocate {
        file: usize,
        how: i32,
        at: u64,
        len: u64,
    },
    Seek {
        file: usize,
        at: u64,
    },
    Fsync {
        file: usize,
        data_only: bool,
    },
    Barrier {
        file: usize,
    },
    Sync,
    Tick,
    /// Forgets the file, lets idle inodes go, and finds it again.
    Forget {
        file: usize,
    },
    /// Deletes the file, and makes a new one. `open`: it is read and written in between.
    Renew {
        file: usize,
        open: bool,
    },
    /// Unmounts and mounts.
    Remount,
    /// Syncs all, or each file, and mounts without an unmount.
    Crash {
        each: bool,
        seed: u64,
    },
    /// Syncs all. From here on, each content of each file may be there after a crash.
    Watch,
    /// A crash without a sync: in a call, or behind it.
    Cut {
        during: Call,
        /// The storage fails after so many groups.
        groups: Option<u64>,
        seed: u64,
    },
}

/// A call in which the storage is cut.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    Fsync { file: usize },
    Sync,
    Tick,
}

/// A random list of operations.
pub(super) fn steps(seed: u64, count: usize) -> Vec<Step> {
    let mut random = Random(seed);
    let max = [60_000, 60_000, 260_000, 260_000, 500_000, 3_000_000][random.below(6) as usize];
    let mut steps = Vec::new();
    while steps.len() < count {
        let step = random_step(&mut random, max, 1000);
        steps.push(step);
        if matches!(step, Step::Watch) {
            for _ in 0..random.below(12) {
                // No step that ends the watch.
                steps.push(random_step(&mut random, max, 980));
            }
            steps.push(cut(&mut random));
        }
    }
    steps.truncate(count);
    steps
}

fn cut(random: &mut Random) -> Step {
    let during = match random.below(4) {
        0 | 1 => Call::Fsync { file: random.below(FILES as u64) as usize },
        2 => Call::Sync,
        _ => Call::Tick,
    };
    let groups = (random.below(2) == 0).then(|| random.below(8));
    Step::Cut { during, groups, seed: random.below(u64::MAX) }
}

/// An operation of the first `kinds` of 1000.
fn random_step(random: &mut Random, max: u64, kinds: u64) -> Step {
    let file = random.below(FILES as u64) as usize;
    let at = match random.below(3) {
        0 => random.below(max / PAGE) * PAGE,
        1 => random.below(20_000),
        _ => random.below(max),
    };
    let len = match random.below(6) {
        0 => 1 + random.below(100),
        1 => 1 + random.below(3 * PAGE),
        2 => PAGE,
        3 => PAGE * (1 + random.below(20)),
        4 => 1 + random.below(max / 4),
        _ => 1 + random.below(2 * PAGE),
    };
    let byte = 1 + random.below(255) as u8;
    match random.below(kinds) {
        0..280 => Step::Write { file, at, len, byte },
        280..300 => Step::WriteApart { file, at, pages: 1 + random.below(40), byte },
        300..520 => Step::Read { file, at, len },
        520..600 => Step::Truncate { file, size: if random.below(8) == 0 { 0 } else { at } },
        600..800 => {
            const MODES: [i32; 9] = [
                0,
                mode::KEEP_SIZE,
                mode::PUNCH_HOLE | mode::KEEP_SIZE,
                mode::PUNCH_HOLE | mode::KEEP_SIZE,
                mode::ZERO_RANGE,
                mode::ZERO_RANGE | mode::KEEP_SIZE,
                mode::COLLAPSE_RANGE,
                mode::COLLAPSE_RANGE,
                mode::INSERT_RANGE,
            ];
            let how = MODES[random.below(9) as usize];
            let is_shift = how & (mode::COLLAPSE_RANGE | mode::INSERT_RANGE) != 0;
            let (mut at, mut len) = (at, len);
            if is_shift && random.below(10) > 0 {
                at -= at % PAGE;
                len = PAGE * (1 + random.below(12));
            }
            Step::Fallocate { file, how, at, len }
        }
        800..880 => Step::Seek { file, at },
        880..940 => Step::Fsync { file, data_only: random.below(2) == 0 },
        940..950 => Step::Barrier { file },
        950..960 => Step::Sync,
        960..970 => Step::Tick,
        970..980 => Step::Forget { file },
        980..986 => Step::Renew { file, open: random.below(2) == 0 },
        986..990 => Step::Remount,
        990..997 => Step::Watch,
        997..1000 => Step::Crash { each: random.below(2) == 0, seed: random.below(u64::MAX) },
        _ => unreachable!("below 1000"),
    }
}
