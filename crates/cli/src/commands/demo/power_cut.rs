//! The second part of the demo: the power is cut in the middle of writing, and comes back.
//!
//! Groups are written as fast as possible, each with its number in every block; now and then one is
//! requested to be durable. Then the power of both targets is cut, and the drives lose unflushed
//! blocks at random. The remaining content is read block by block.
//!
//! The power is cut after a number of groups, not after a time, since the number of groups in a
//! time depends on the machine. The writer stays inside the volume until the power is gone: at the
//! end of the volume it stops and waits.

use std::{
    collections::VecDeque,
    error::Error,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use riopipe::{
    BLOCK_BYTES, Buf, ConnectOptions, EngineKind, Marks, OpenOptions, Place, Seq, Stream,
    StreamOptions, SubmitError, SubmitErrorKind, Until, Volume,
};
use riopipe_lab::{
    terminal::{Colour, Terminal},
    units,
};
use serde::Serialize;

use crate::{
    connect::{open_failure, stream_failure},
    failure::Failure,
    own_targets::OwnTargets,
};

/// Number of groups that are written before the power cut: many times the capacity of a drive's
/// cache, and a small part of the demo's volume.
const GROUPS: u64 = 20_000;
/// Interval in groups between two requests for durability; the writer does not wait for them.
const DURABLE_EVERY: u64 = 500;
/// Interval in which a writer without space checks whether the power is gone.
const REST: Duration = Duration::from_millis(1);
/// Number of blocks per read.
const READ_BLOCKS: u64 = 128;

/// The content after a power cut.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct CutView {
    /// Number of groups that had been submitted before the power cut.
    pub submitted: u64,
    /// Number of groups that were reported durable to the writer.
    pub confirmed: u64,
    /// All groups up to this one are complete.
    pub prefix: u64,
    /// Number of groups beyond the prefix with at least one block.
    pub beyond: u64,
    /// The last group of the stream according to recovery; `rio` only.
    pub recovered: Option<u64>,
    /// Number of blocks that recovery zeroed.
    pub undone_blocks: u64,
    /// Time from the first connection until the volume could be written again, in ms.
    pub recovery_ms: f64,
}

impl CutView {
    /// Whether the content is a prefix with all confirmed groups.
    #[must_use]
    pub(super) fn is_prefix(&self) -> bool {
        self.beyond == 0
            && self.prefix >= self.confirmed
            && self.recovered.is_none_or(|k| k == self.prefix)
    }

    /// The result on one line.
    #[must_use]
    pub(super) fn text(&self, engine: &str, terminal: &Terminal) -> String {
        let found = match (self.beyond, self.is_prefix()) {
            (0, true) => terminal.paint(Colour::Green, "a prefix, nothing beyond it"),
            (0, false) => terminal.paint(Colour::Red, "confirmed groups are MISSING"),
            (n, _) => terminal.paint(
                Colour::Red,
                &format!(
                    "a HOLE: group {} is not whole, of {n} from there on something is",
                    self.prefix + 1,
                ),
            ),
        };
        let recovery = match self.recovered {
            Some(_) => format!(
                "; recovery took {}, {} blocks undone",
                units::time(self.recovery_ms * 1e6),
                self.undone_blocks
            ),
            None => String::new(),
        };
        format!(
            "  {engine:<5} {} groups submitted, {} confirmed durable, {} whole: {found}{recovery}\n",
            self.submitted, self.confirmed, self.prefix,
        )
    }
}

/// The time of the power cut, and a hook before each group.
#[derive(Clone, Copy)]
struct Course<'a> {
    /// Number of groups before the cut; fewer if the volume has no space for more.
    cut_after: u64,
    /// Only tests use it, to slow the writer down.
    before_group: &'a (dyn Fn() + Sync),
}

/// Writes with `engine`, cuts the power, and reads the content.
pub(super) fn cut(own: &mut OwnTargets, engine: EngineKind, seed: u64) -> Result<CutView, Failure> {
    cut_on(own, engine, seed, Course { cut_after: GROUPS, before_group: &|| () })
}

fn cut_on(
    own: &mut OwnTargets,
    engine: EngineKind,
    seed: u64,
    course: Course<'_>,
) -> Result<CutView, Failure> {
    let options = OpenOptions {
        engine: Some(engine),
        // No retry of the writer may outlive the power cut.
        connect: ConnectOptions { loss_timeout: Duration::ZERO, ..ConnectOptions::default() },
        // The writer that lost the power never released the volume.
        take_over: true,
        ..OpenOptions::default()
    };
    let written = {
        let (volume, _) = Volume::open(own.volume(), own.members(), &options)
            .map_err(|error| open_failure(&error))?;
        let stream =
            volume.stream(0, &StreamOptions::default()).map_err(|error| stream_failure(&error))?;
        let blocks = volume.blocks();
        let gone = AtomicBool::new(false);
        thread::scope(|scope| {
            let (too_early, is_time) = mpsc::channel();
            let gone = &gone;
            let writer = scope.spawn(move || write(stream, blocks, seed, course, too_early, gone));
            // Nothing is ever sent: this ends when the writer has dropped its end.
            let _ = is_time.recv();
            let cut = own.power_cut(seed);
            gone.store(true, Ordering::Relaxed);
            let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            cut.and(written)
        })?
    };
    let begun = Instant::now();
    let (volume, recovery) = Volume::open(own.volume(), own.members(), &options)
        .map_err(|error| open_failure(&error))?;
    let mut stream =
        volume.stream(0, &StreamOptions::default()).map_err(|error| stream_failure(&error))?;
    let recovery_ms = begun.elapsed().as_secs_f64() * 1e3;
    let (prefix, beyond) = read_back(&mut stream, seed, written.submitted)?;
    let of_stream = recovery.streams.iter().find(|found| found.stream.0 == 0);
    let view = CutView {
        submitted: written.submitted,
        confirmed: written.confirmed,
        prefix,
        beyond,
        recovered: of_stream.filter(|_| engine.capabilities().keeps_log).map(|found| found.tag),
        undone_blocks: of_stream.map_or(0, |found| found.undone_blocks()),
        recovery_ms,
    };
    stream.close().map_err(|error| Failure::storage(&error))?;
    volume.close().map_err(|error| Failure::storage(&error))?;
    Ok(view)
}

struct Written {
    submitted: u64,
    confirmed: u64,
}

/// Number of blocks of group `n`, as file systems write their journals: two, then one.
fn group_blocks(n: u64) -> u64 {
    1 + n % 2
}

/// The first block of group `n`, counted from 1.
fn first_block(n: u64) -> u64 {
    let before = n - 1;
    before + before.div_ceil(2)
}

/// Writes until the stream fails, which the power cut causes; drops `too_early` when it is time for
/// that.
fn write(
    mut stream: Stream,
    blocks: u64,
    seed: u64,
    course: Course<'_>,
    too_early: mpsc::Sender<()>,
    gone: &AtomicBool,
) -> Result<Written, Failure> {
    // Groups before this mark have not been reported.
    let mut asked: VecDeque<(Seq, u64)> = VecDeque::new();
    let mut done = Written { submitted: 0, confirmed: 0 };
    let mut too_early = Some(too_early);
    loop {
        let n = done.submitted + 1;
        let fits = first_block(n) + group_blocks(n) <= blocks;
        if n > course.cut_after || !fits {
            too_early = None;
        }
        let marks = if fits {
            (course.before_group)();
            let durable = n.is_multiple_of(DURABLE_EVERY);
            match submit(&mut stream, seed, n, durable) {
                Ok(Some(seq)) => {
                    done.submitted = n;
                    asked.extend(durable.then_some((seq, n)));
                    if !n.is_multiple_of(16) {
                        continue;
                    }
                    stream.poll().map_err(Box::from)
                }
                Ok(None) => stream.wait(Until::Space, None).map_err(Box::from),
                Err(error) => Err(error),
            }
        } else {
            rest(&mut stream, gone)
        };
        match marks {
            Ok(marks) => {
                let is_durable = |&(seq, _): &(Seq, u64)| seq <= marks.durable;
                while let Some((_, n)) = asked.front().copied().filter(is_durable) {
                    done.confirmed = n;
                    asked.pop_front();
                }
            }
            Err(error) if too_early.is_some() => {
                return Err(Failure::storage(&*error));
            }
            // Any failure comes from the power cut.
            Err(_) => return Ok(done),
        }
    }
}

/// Submits group `n`; `None` if there is no space for it yet.
fn submit(
    stream: &mut Stream,
    seed: u64,
    n: u64,
    durable: bool,
) -> Result<Option<Seq>, Box<dyn Error>> {
    let mut buf = stream.buf(group_blocks(n) as usize * BLOCK_BYTES)?;
    stamp(&mut buf, seed, n);
    let group = stream.group().write(first_block(n), buf, Place::Fresh).tag(n);
    let submitted = if durable { group.submit_durable() } else { group.submit() };
    match submitted {
        Ok(seq) => Ok(Some(seq)),
        Err(SubmitError { kind: SubmitErrorKind::Full(_), .. }) => Ok(None),
        Err(SubmitError { kind, .. }) => Err(kind.into()),
    }
}

/// Waits a moment for the power cut; fails once the power is gone.
fn rest(stream: &mut Stream, gone: &AtomicBool) -> Result<Marks, Box<dyn Error>> {
    if gone.load(Ordering::Relaxed) {
        return Err("the power is gone".into());
    }
    thread::sleep(REST);
    Ok(stream.poll()?)
}

/// Puts the number of the group, and the seed of the run, into every block.
fn stamp(buf: &mut Buf, seed: u64, n: u64) {
    for block in buf.chunks_exact_mut(BLOCK_BYTES) {
        block.fill(0);
        block[..8].copy_from_slice(&n.to_le_bytes());
        block[8..16].copy_from_slice(&(seed ^ MARK).to_le_bytes());
    }
}

const MARK: u64 = u64::from_le_bytes(*b"rio demo");

/// Reads all blocks that may have been written: the end of the complete groups, and the number of
/// visible ones beyond.
fn read_back(stream: &mut Stream, seed: u64, submitted: u64) -> Result<(u64, u64), Failure> {
    let (mut prefix, mut beyond) = (0, 0);
    let mut bytes = Vec::new();
    let (mut read_to, mut first_read) = (0, 0);
    let end = first_block(submitted + 1);
    let mut n = 1;
    while n <= submitted {
        let mut there = 0;
        for block in first_block(n)..first_block(n + 1) {
            if block >= read_to {
                let blocks = READ_BLOCKS.min(end - block);
                bytes.resize(blocks as usize * BLOCK_BYTES, 0);
                stream.read(block, &mut bytes, None).map_err(|error| Failure::storage(&error))?;
                (first_read, read_to) = (block, block + blocks);
            }
            let at = (block - first_read) as usize * BLOCK_BYTES;
            let mut expected = [0; 16];
            expected[..8].copy_from_slice(&n.to_le_bytes());
            expected[8..].copy_from_slice(&(seed ^ MARK).to_le_bytes());
            there += u64::from(bytes[at..at + 16] == expected);
        }
        if there == group_blocks(n) && prefix + 1 == n {
            prefix = n;
        } else if there > 0 {
            beyond += 1;
        }
        n += 1;
    }
    Ok((prefix, beyond))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::own_targets::{Plan, file_log};

    fn targets() -> OwnTargets {
        let plan = Plan {
            volume: "speeds",
            targets: 2,
            drive: "ssd:flash,size=24M,lazy".to_owned(),
            log: file_log(2 << 20),
            ..Plan::default()
        };
        OwnTargets::start(&plan).unwrap()
    }

    /// Number of groups that fit into the volume.
    fn space(own: &OwnTargets) -> u64 {
        let (volume, _) =
            Volume::open(own.volume(), own.members(), &OpenOptions::default()).unwrap();
        let space = (1..).take_while(|&n| first_block(n) + group_blocks(n) <= volume.blocks());
        let space = space.last().unwrap();
        volume.close().unwrap();
        space
    }

    /// The power cut does not depend on the writer's speed. A writer that is ten times as fast gets
    /// ten times as far, a faster one fills the volume, and a slow one takes longer.
    #[test]
    fn the_power_cut_does_not_depend_on_the_writers_speed() {
        let space = space(&targets());
        let usual = space / 20;
        let slow = || thread::sleep(Duration::from_micros(200));
        let courses: [(u64, &(dyn Fn() + Sync)); 4] =
            [(usual, &|| ()), (10 * usual, &|| ()), (10 * space, &|| ()), (usual / 2, &slow)];
        for (seed, (cut_after, before_group)) in (1..).zip(courses) {
            let mut own = targets();
            // In this order, as in the demo: `none` leaves no entries in a log.
            for engine in [EngineKind::Rio, EngineKind::None] {
                let view = cut_on(&mut own, engine, seed, Course { cut_after, before_group });
                let view = view.unwrap();
                assert!(view.submitted >= cut_after.min(space), "{view:?}");
                assert!(view.submitted <= space, "{view:?}");
                assert!(view.is_prefix() || !engine.capabilities().keeps_order, "{view:?}");
            }
        }
    }

    #[test]
    fn groups_follow_each_other_without_gaps() {
        let mut at = 0;
        for n in 1..100 {
            assert_eq!(first_block(n), at, "group {n}");
            at += group_blocks(n);
        }
    }

    #[test]
    fn a_hole_or_a_loss_is_not_a_prefix() {
        let good = CutView {
            submitted: 100,
            confirmed: 50,
            prefix: 60,
            beyond: 0,
            recovered: Some(60),
            undone_blocks: 3,
            recovery_ms: 1.0,
        };
        assert!(good.is_prefix());
        assert!(!CutView { beyond: 1, ..good.clone() }.is_prefix());
        assert!(!CutView { confirmed: 61, ..good.clone() }.is_prefix());
        assert!(!CutView { recovered: Some(59), ..good }.is_prefix());
    }
}
