//! The demo's second half: the power goes in the middle of writing, and comes back.
//!
//! Groups are written as fast as they go, each with its number in every block; every so often one is
//! asked to be durable. Then the power of both targets is cut, and the drives lose whatever they had
//! not flushed, each block or not, at random. What is there afterwards is read block by block.

use std::{
    collections::VecDeque,
    thread,
    time::{Duration, Instant},
};

use riopipe::{
    BLOCK_BYTES, Buf, ConnectOptions, EngineKind, OpenOptions, Place, Seq, Stream, StreamOptions,
    SubmitError, Until, Volume, Why,
};
use riopipe_lab::{
    terminal::{Colour, Terminal},
    units,
};
use serde::Serialize;

use crate::{
    connect::{open_failure, stream_failure},
    failure::{Code, Failure},
    own_targets::OwnTargets,
};

/// How long groups are written before the power goes.
const RUN: Duration = Duration::from_millis(250);
/// How often a group is asked to be durable; nobody waits for it.
const DURABLE_EVERY: u64 = 500;
/// Blocks of one read.
const READ_BLOCKS: u64 = 128;

/// What a power cut left.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct CutView {
    /// Groups that had been submitted when the power went.
    pub submitted: u64,
    /// Groups of which the writer had been told that they are durable.
    pub confirmed: u64,
    /// Every group up to this is wholly there.
    pub prefix: u64,
    /// Groups beyond the prefix of which at least one block is there.
    pub beyond: u64,
    /// The group at which recovery said that the stream ends; `rio` only.
    pub recovered: Option<u64>,
    /// Blocks that recovery zeroed.
    pub undone_blocks: u64,
    /// From the first connection until the volume could be written again, ms.
    pub recovery_ms: f64,
}

impl CutView {
    /// Whether what is there is a prefix that holds all that was confirmed.
    #[must_use]
    pub(super) fn is_prefix(&self) -> bool {
        self.beyond == 0
            && self.prefix >= self.confirmed
            && self.recovered.is_none_or(|k| k == self.prefix)
    }

    /// One line.
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

/// Writes with `engine`, cuts the power, and looks at what is there.
pub(super) fn cut(own: &mut OwnTargets, engine: EngineKind, seed: u64) -> Result<CutView, Failure> {
    let options = OpenOptions {
        engine: Some(engine),
        // Nothing of the writer is to outlive the power cut.
        connect: ConnectOptions { loss_timeout: Duration::ZERO, ..ConnectOptions::default() },
        ..OpenOptions::default()
    };
    let written = {
        let (volume, _) = Volume::open(own.volume(), own.members(), &options)
            .map_err(|error| open_failure(&error))?;
        let stream =
            volume.stream(0, &StreamOptions::default()).map_err(|error| stream_failure(&error))?;
        let blocks = volume.blocks();
        thread::scope(|scope| {
            let writer = scope.spawn(move || write(stream, blocks, seed));
            thread::sleep(RUN);
            let cut = own.power_cut(seed);
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
    let (prefix, beyond) = look(&mut stream, seed, written.submitted)?;
    let of_stream = recovery.streams.iter().find(|found| found.stream.0 == 0);
    let view = CutView {
        submitted: written.submitted,
        confirmed: written.confirmed,
        prefix,
        beyond,
        recovered: of_stream.filter(|_| engine == EngineKind::Rio).map(|found| found.tag),
        undone_blocks: of_stream.map_or(0, |found| found.undone_blocks()),
        recovery_ms,
    };
    let close = |error: &dyn std::error::Error| Failure::new(Code::Storage, error.to_string());
    stream.close().map_err(|error| close(&error))?;
    volume.close().map_err(|error| close(&error))?;
    Ok(view)
}

struct Written {
    submitted: u64,
    confirmed: u64,
}

/// Blocks of group `n`, as file systems write their journals: two, then one.
fn group_blocks(n: u64) -> u64 {
    1 + n % 2
}

/// The first block of group `n`, counted from 1.
fn first_block(n: u64) -> u64 {
    let before = n - 1;
    before + before.div_ceil(2)
}

/// Writes until the stream fails, which it does when the power goes.
fn write(mut stream: Stream, blocks: u64, seed: u64) -> Result<Written, Failure> {
    // Nothing was told of any group before this mark.
    let mut asked: VecDeque<(Seq, u64)> = VecDeque::new();
    let mut done = Written { submitted: 0, confirmed: 0 };
    loop {
        let n = done.submitted + 1;
        if first_block(n) + 2 > blocks {
            return Err(Failure::new(Code::Failed, "the volume is full before the power is cut"));
        }
        let mut buf = stream.buf(group_blocks(n) as usize * BLOCK_BYTES);
        stamp(&mut buf, seed, n);
        let group = stream.group().write(first_block(n), buf, Place::Fresh).tag(n);
        let durable = n.is_multiple_of(DURABLE_EVERY);
        let submitted = if durable { group.submit_durable() } else { group.submit() };
        let marks = match submitted {
            Ok(seq) => {
                done.submitted = n;
                asked.extend(durable.then_some((seq, n)));
                if !n.is_multiple_of(16) {
                    continue;
                }
                stream.poll().map_err(|_| ())
            }
            Err(SubmitError { why: Why::Full(_), .. }) => {
                stream.wait(Until::Room, None).map_err(|_| ())
            }
            Err(_) => Err(()),
        };
        // However it fails, it is the power.
        let Ok(marks) = marks else { return Ok(done) };
        while let Some((_, n)) = asked.front().copied().filter(|(seq, _)| *seq <= marks.durable) {
            done.confirmed = n;
            asked.pop_front();
        }
    }
}

/// The number in every block, and whose run it is.
fn stamp(buf: &mut Buf, seed: u64, n: u64) {
    for block in buf.chunks_exact_mut(BLOCK_BYTES) {
        block.fill(0);
        block[..8].copy_from_slice(&n.to_le_bytes());
        block[8..16].copy_from_slice(&(seed ^ MARK).to_le_bytes());
    }
}

const MARK: u64 = u64::from_le_bytes(*b"rio demo");

/// Reads all that may have been written: how far groups are whole, and how many are visible beyond.
fn look(stream: &mut Stream, seed: u64, submitted: u64) -> Result<(u64, u64), Failure> {
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
                stream
                    .read(block, &mut bytes)
                    .map_err(|error| Failure::new(Code::Storage, error.to_string()))?;
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

    #[test]
    fn groups_follow_each_other_without_gaps() {
        let mut at = 0;
        for n in 1..100 {
            assert_eq!(first_block(n), at, "group {n}");
            at += group_blocks(n);
        }
    }

    #[test]
    fn a_hole_and_a_loss_are_no_prefix() {
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
