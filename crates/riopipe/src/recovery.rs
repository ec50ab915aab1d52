//! What a crash has left, and what recovery made of it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::recovery::{DriveExtent, InPlace};
use riopipe_order::topology::Topology;
use riopipe_session::initiator::opening::{Outcome, Phase, StreamOutcome};

/// What opening, recovering or reopening has found and done.
///
/// It prints as a report for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// The volume.
    pub volume: String,
    /// Whether this tells only what recovery would do: nothing was changed.
    pub dry_run: bool,
    /// What was found of each stream; of a volume without ordering logs, none.
    pub streams: Vec<StreamRecovery>,
    /// How long each step took.
    pub steps: Steps,
    /// Slots of the logs with bytes that are no whole entry: torn by the crash.
    pub torn: u64,
    /// The file that keeps what was zeroed, if one was asked for and there was anything.
    pub saved: Option<PathBuf>,
    /// Why another engine runs than the volume was made for, if so (T17).
    pub fallback: Option<String>,
}

/// What was found of one stream, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamRecovery {
    /// The stream.
    pub stream: StreamId,
    /// Its last group: every group up to it is wholly there, and no fresh block of a later one
    /// (P1).
    pub last: Seq,
    /// The caller's tag of that group; 0 if it has none.
    pub tag: u64,
    /// Log entries found, on all targets.
    pub found: u32,
    /// Groups that were not released before the crash and are kept.
    pub kept: u64,
    /// Groups beyond `last` of which something was found.
    pub dropped: u64,
    /// Requests that this process has sent again to targets that had been lost (P7): a reopened
    /// stream's. A new owner has nothing to send again.
    pub replayed: u64,
    /// What was zeroed: fresh blocks of groups beyond `last`, in volume blocks.
    pub undone: Vec<BlockRange>,
    /// In-place updates beyond `last`: these blocks were left alone and may hold the old content,
    /// the new, or, where a fresh write beyond `last` touched them too, zeroes (T11).
    pub in_place: Vec<InPlaceRange>,
    /// Whether a target's ordering log was given up: then nothing was undone, on any target, and
    /// groups beyond `last` may have been durable and confirmed (T26).
    pub log_given_up: bool,
    /// Fresh writes beyond `last` that were left because of that: these blocks may hold the old
    /// content or the new. What only the lost log knew is in no list.
    pub in_doubt: Vec<InPlaceRange>,
    /// Whether the lists of in-place updates and of what is in doubt wait for
    /// [`Volume::acknowledge`](crate::Volume::acknowledge); until then the stream can't be opened.
    pub acknowledge: bool,
}

/// Blocks of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRange {
    /// The first one.
    pub lba: u64,
    /// How many.
    pub blocks: u64,
}

/// A write that may or may not be there: an in-place update, or one in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InPlaceRange {
    /// Its group; of merged groups the first.
    pub seq: Seq,
    /// Where.
    pub range: BlockRange,
}

/// How long the steps of an opening took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Connecting to all targets and reading the labels.
    pub connect: Duration,
    /// Taking the volume on all targets, which waits for what a former owner had under way.
    pub claim: Duration,
    /// Reading all lists.
    pub list: Duration,
    /// Merging them into one order per stream, and deciding.
    pub decide: Duration,
    /// Reading and keeping what is about to be zeroed.
    pub save: Duration,
    /// Zeroing fresh blocks beyond the prefixes.
    pub undo: Duration,
    /// Flushing the drives.
    pub flush: Duration,
    /// Recording the prefixes, and shortening the logs.
    pub settle: Duration,
}

impl Recovery {
    /// Whether there was nothing to recover: all logs were at rest.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.torn == 0 && self.streams.iter().all(StreamRecovery::is_nothing)
    }

    /// What was found of one stream.
    #[must_use]
    pub fn stream(&self, id: u16) -> Option<&StreamRecovery> {
        self.streams.iter().find(|stream| stream.stream == StreamId(id))
    }
}

impl StreamRecovery {
    /// Whether the stream was at rest on all targets.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.found == 0 && !self.acknowledge
    }

    /// What waits to be acknowledged: in-place updates, and fresh writes in doubt.
    pub(crate) fn pending(&self) -> Vec<InPlaceRange> {
        self.in_place.iter().chain(&self.in_doubt).copied().collect()
    }

    /// Blocks that were zeroed.
    #[must_use]
    pub fn undone_blocks(&self) -> u64 {
        self.undone.iter().map(|range| range.blocks).sum()
    }

    /// Of a stream without logs: it goes on after `last`.
    pub(crate) fn none(stream: StreamId, last: Seq) -> Self {
        Self {
            stream,
            last,
            tag: 0,
            found: 0,
            kept: 0,
            dropped: 0,
            replayed: 0,
            undone: Vec::new(),
            in_place: Vec::new(),
            log_given_up: false,
            in_doubt: Vec::new(),
            acknowledge: false,
        }
    }

    pub(crate) fn new(outcome: &StreamOutcome, topology: &Topology) -> Self {
        let plan = &outcome.plan;
        let listed = |updates: &[InPlace]| {
            let of = |update: &InPlace| {
                let (seq, ranges) = (update.seq, volume_ranges(topology, &[update.extent]));
                ranges.into_iter().map(move |range| InPlaceRange { seq, range })
            };
            updates.iter().flat_map(of).collect()
        };
        Self {
            tag: plan.tag,
            found: plan.found,
            kept: plan.kept,
            dropped: plan.dropped,
            undone: volume_ranges(topology, &plan.undo),
            in_place: listed(&plan.in_place),
            log_given_up: plan.log_given_up,
            in_doubt: listed(&plan.in_doubt),
            acknowledge: outcome.pending,
            ..Self::none(plan.stream, plan.k)
        }
    }
}

/// The volume blocks of some extents of drives: sorted, neighbours joined.
pub(crate) fn volume_ranges(topology: &Topology, extents: &[DriveExtent]) -> Vec<BlockRange> {
    let unit = u64::from(topology.unit_blocks());
    let mut ranges = Vec::new();
    for extent in extents {
        let start = topology.member(extent.member).start;
        let (mut lba, end) = (extent.lba, extent.lba + extent.blocks);
        while lba < end {
            // Within a stripe unit a drive's neighbours are the volume's.
            let blocks = (unit - (lba - start) % unit).min(end - lba);
            // What lies outside the volume was refused before (T19).
            if let Some(first) = topology.volume_block(extent.member, lba) {
                ranges.push(BlockRange { lba: first, blocks });
            }
            lba += blocks;
        }
    }
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let joins = next.lba <= last.lba + last.blocks;
        if joins {
            last.blocks = last.blocks.max(next.lba + next.blocks - last.lba);
        }
        joins
    });
    ranges
}

impl Steps {
    pub(crate) fn add(&mut self, phase: Phase, took: Duration) {
        let step = match phase {
            Phase::Ask | Phase::Claim | Phase::AskAgain | Phase::Claimed => &mut self.claim,
            Phase::List => &mut self.list,
            // What was decided is only looked at, and kept.
            Phase::Decided => &mut self.save,
            Phase::Undo => &mut self.undo,
            Phase::Flush => &mut self.flush,
            Phase::Settle | Phase::Over => &mut self.settle,
        };
        *step += took;
    }

    /// All of them together.
    #[must_use]
    pub fn total(&self) -> Duration {
        let recovered = self.list + self.decide + self.save + self.undo + self.flush + self.settle;
        self.connect + self.claim + recovered
    }
}

pub(crate) fn streams_of(outcome: &Outcome, topology: &Topology) -> Vec<StreamRecovery> {
    outcome.streams.iter().map(|stream| StreamRecovery::new(stream, topology)).collect()
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.volume;
        if self.is_nothing() {
            write!(f, "volume \"{name}\": nothing to recover")?;
            if self.streams.iter().any(|stream| stream.log_given_up) {
                write!(f, "; a log was given up, and what only that one knew can't be told")?;
            }
        } else {
            let would = if self.dry_run { " (a dry run: nothing was changed)" } else { "" };
            write!(f, "volume \"{name}\" recovered{would}:")?;
            for stream in self.streams.iter().filter(|stream| !stream.is_nothing()) {
                write!(f, "\n  {stream}")?;
            }
            if self.torn > 0 {
                write!(f, "\n  {} torn log entries counted as absent", self.torn)?;
            }
            if let Some(path) = &self.saved {
                write!(f, "\n  what was zeroed is kept in {}", path.display())?;
            }
            write!(f, "\n  {}", self.steps)?;
        }
        if let Some(why) = &self.fallback {
            write!(f, "\n  runs with engine sync: {why}")?;
        }
        Ok(())
    }
}

impl fmt::Display for StreamRecovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stream, last, tag, found, kept, dropped, replayed, .. } = self;
        write!(
            f,
            "stream {stream}: {found} entries found; whole up to group {last} (tag {tag}), {kept} \
             groups kept, {dropped} beyond dropped, {} blocks undone",
            self.undone_blocks()
        )?;
        if *replayed > 0 {
            write!(f, ", {replayed} requests replayed before")?;
        }
        if !self.in_place.is_empty() {
            let blocks: u64 = self.in_place.iter().map(|update| update.range.blocks).sum();
            write!(f, ", {blocks} blocks of in-place updates left as they are")?;
        }
        if self.log_given_up {
            let blocks: u64 = self.in_doubt.iter().map(|write| write.range.blocks).sum();
            write!(
                f,
                "; a log was given up, so nothing is undone on any target, and groups beyond may have \
                 been durable: {blocks} blocks of fresh writes are in doubt, and what only the lost \
                 log knew"
            )?;
        }
        if self.acknowledge {
            write!(f, " (to be acknowledged before the stream can be opened)")?;
        }
        Ok(())
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = [
            ("connect", self.connect),
            ("claim", self.claim),
            ("list", self.list),
            ("decide", self.decide),
            ("save", self.save),
            ("undo", self.undo),
            ("flush", self.flush),
            ("settle", self.settle),
        ];
        write!(f, "took {:.1} ms:", self.total().as_secs_f64() * 1e3)?;
        let taken = steps.into_iter().filter(|(_, took)| !took.is_zero());
        for (i, (name, took)) in taken.enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma} {name} {:.1}", took.as_secs_f64() * 1e3)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riopipe_order::attribute::Member;
    use riopipe_order::topology::{MemberInfo, ServerInfo};

    fn striped() -> Topology {
        let member = MemberInfo {
            server: 0,
            start: 256,
            blocks: 64,
            request_blocks_max: 32,
            volatile: false,
        };
        Topology::new(vec![member, member], vec![ServerInfo { slots: 8 }], 4).unwrap()
    }

    #[test]
    fn extents_of_drives_are_told_in_volume_blocks() {
        let at = |member, lba, blocks| DriveExtent { member: Member(member), lba, blocks };
        // Blocks 2–5 of drive 0 are the volume's 2, 3 and 8, 9; 0–3 of drive 1 its 4–7.
        let ranges = volume_ranges(&striped(), &[at(0, 258, 4), at(1, 256, 4)]);
        assert_eq!(ranges, [BlockRange { lba: 2, blocks: 8 }]);
        let ranges = volume_ranges(&striped(), &[at(0, 258, 4)]);
        assert_eq!(ranges, [BlockRange { lba: 2, blocks: 2 }, BlockRange { lba: 8, blocks: 2 }]);
    }

    #[test]
    fn the_report_says_what_was_found_and_when_there_was_nothing() {
        let mut recovery = Recovery { volume: "v".into(), ..Recovery::default() };
        assert!(recovery.is_nothing());
        assert_eq!(recovery.to_string(), "volume \"v\": nothing to recover");
        recovery.streams.push(StreamRecovery {
            tag: 99,
            found: 5,
            kept: 2,
            dropped: 1,
            undone: vec![BlockRange { lba: 8, blocks: 3 }],
            ..StreamRecovery::none(StreamId(3), Seq(17))
        });
        recovery.steps.undo = Duration::from_millis(4);
        let text = recovery.to_string();
        for part in ["stream 3", "group 17", "tag 99", "5 entries", "3 blocks undone", "undo 4.0"] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }
}
