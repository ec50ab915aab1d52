//! The findings of a recovery after a crash, and its actions.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::EngineKind;
use riopipe_order::topology::Topology;
use riopipe_session::engine_choice::Lack;
use riopipe_session::initiator::opening::{Outcome, StreamOutcome};
pub use riopipe_session::initiator::volume::ranges::{BlockRange, InPlaceRange};
use riopipe_session::initiator::volume::ranges::{listed_ranges, volume_ranges};
use riopipe_session::initiator::volume::recovery::StepTimes;

use crate::addr::TargetAddr;
use crate::create_error::lack_text;

/// The findings and actions of the recovery of a volume, when it was opened or by hand.
///
/// Its `Display` is a report for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// The name of the volume.
    pub volume: String,
    /// Whether this only reports what recovery would do: nothing was changed.
    pub dry_run: bool,
    /// The findings for each stream; empty for a volume without ordering logs.
    pub streams: Vec<StreamRecovery>,
    /// The duration of each step.
    pub steps: Steps,
    /// The number of log slots with a torn entry: the crash left only a part of it.
    pub torn: u64,
    /// The file with the zeroed data, if [`save_undone`](crate::RecoverOptions::save_undone) named
    /// one and blocks were zeroed.
    pub saved: Option<PathBuf>,
    /// Why the volume runs with engine `sync`, if it was created for engine `rio` (trap T17).
    pub fallback: Option<EngineUnavailable>,
}

/// The findings and actions of the recovery of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamRecovery {
    /// The stream.
    pub stream: StreamId,
    /// The recovered seq: every group up to it is wholly there, and no fresh block of a later one
    /// (promise P1). Blocks that later groups extended may have the content that these groups wrote
    /// ([`Place::Extend`](crate::Place::Extend)).
    pub last: Seq,
    /// The caller's tag of that group; 0 if it has none.
    pub tag: u64,
    /// The number of live log entries on all targets.
    pub found: u32,
    /// Number of groups that were not released before the crash and are kept.
    pub kept: u64,
    /// Number of groups beyond `last` of which an entry was found.
    pub dropped: u64,
    /// Requests that this process has sent again to targets that had been lost (promise P7). Only a
    /// reopened stream has them: a new owner has no request to send again.
    pub replayed: u64,
    /// The zeroed blocks: fresh blocks of groups beyond `last`, in volume blocks.
    pub undone: Vec<BlockRange>,
    /// In-place updates beyond `last`. These blocks were left alone. They may hold the old content,
    /// the new, or, where a fresh write beyond `last` touched them too, zeroes (trap T11).
    pub in_place: Vec<InPlaceRange>,
    /// Whether a target's ordering log was given up: then nothing was undone, on any target, and
    /// groups beyond `last` may have been durable and confirmed (trap T26).
    pub log_given_up: bool,
    /// Fresh and extending writes beyond `last` that were left because a log was given up: these
    /// blocks may hold the old content or the new. Writes that only the lost log recorded are in no
    /// list.
    pub in_doubt: Vec<InPlaceRange>,
    /// Whether the lists of in-place updates and of writes in doubt wait for
    /// [`Volume::acknowledge`](crate::Volume::acknowledge); until then the stream can't be opened.
    pub acknowledge: bool,
}

/// The durations of the steps of an opening.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Connecting to all targets and reading the labels.
    pub connect: Duration,
    /// Claiming the volume on all targets, which waits until the requests of a former owner have
    /// ended.
    pub claim: Duration,
    /// Reading all lists.
    pub list: Duration,
    /// Merging the lists into one order for each stream, and deciding the recovered seqs.
    pub decide: Duration,
    /// Reading and saving the data that is about to be zeroed.
    pub save: Duration,
    /// Zeroing fresh blocks beyond the prefixes.
    pub undo: Duration,
    /// Flushing the drives.
    pub flush: Duration,
    /// Recording the prefixes, and shortening the logs.
    pub settle: Duration,
}

impl Recovery {
    /// Whether there was nothing to recover: no log had live entries, torn slots, or a list to
    /// acknowledge.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.torn == 0 && self.streams.iter().all(StreamRecovery::is_nothing)
    }

    /// The findings for stream `id`; `None` if the volume has no such stream or no ordering logs.
    #[must_use]
    pub fn stream(&self, id: u16) -> Option<&StreamRecovery> {
        self.streams.iter().find(|stream| stream.stream == StreamId(id))
    }
}

impl StreamRecovery {
    /// Whether no log had live entries of the stream, or a list of it to acknowledge.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.found == 0 && !self.acknowledge
    }

    /// The blocks that wait to be acknowledged, if there are any: in-place updates, and writes in
    /// doubt.
    pub(crate) fn pending(&self) -> Option<Vec<InPlaceRange>> {
        self.acknowledge.then(|| self.in_place.iter().chain(&self.in_doubt).copied().collect())
    }

    /// The number of blocks that were zeroed.
    #[must_use]
    pub fn undone_blocks(&self) -> u64 {
        self.undone.iter().map(|range| range.blocks).sum()
    }

    /// The findings for a stream without log entries. It continues after group `last`.
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
        Self {
            tag: plan.tag,
            found: plan.found,
            kept: plan.kept,
            dropped: plan.dropped,
            undone: volume_ranges(topology, &plan.undo),
            in_place: listed_ranges(topology, &plan.in_place),
            log_given_up: plan.log_given_up,
            in_doubt: listed_ranges(topology, &plan.in_doubt),
            acknowledge: outcome.pending,
            ..Self::none(plan.stream, plan.k)
        }
    }
}

impl Steps {
    /// The sum of all times.
    #[must_use]
    pub fn total(&self) -> Duration {
        let recovered = self.list + self.decide + self.save + self.undo + self.flush + self.settle;
        self.connect + self.claim + recovered
    }
}

impl From<StepTimes> for Steps {
    fn from(times: StepTimes) -> Self {
        Self {
            connect: Duration::from_nanos(times.connect),
            claim: Duration::from_nanos(times.claim),
            list: Duration::from_nanos(times.list),
            decide: Duration::from_nanos(times.decide),
            save: Duration::from_nanos(times.save),
            undo: Duration::from_nanos(times.undo),
            flush: Duration::from_nanos(times.flush),
            settle: Duration::from_nanos(times.settle),
        }
    }
}

/// The findings for each stream, from the outcome of a recovery.
pub(crate) fn streams_of(outcome: &Outcome, topology: &Topology) -> Vec<StreamRecovery> {
    outcome.streams.iter().map(|stream| StreamRecovery::new(stream, topology)).collect()
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.volume;
        if self.is_nothing() {
            write!(f, "volume \"{name}\": nothing to recover")?;
            if self.streams.iter().any(|stream| stream.log_given_up) {
                write!(f, "; a log was given up, and groups that only it recorded are not known")?;
            }
        } else {
            match self.dry_run {
                true => {
                    write!(
                        f,
                        "volume \"{name}\" would be recovered (dry run, nothing is changed):"
                    )?;
                }
                false => write!(f, "volume \"{name}\" recovered:")?,
            }
            for stream in self.streams.iter().filter(|stream| !stream.is_nothing()) {
                f.write_str("\n  ")?;
                stream.describe(f, self.dry_run)?;
            }
            if self.torn > 0 {
                write!(f, "\n  {} torn log entries counted as absent", self.torn)?;
            }
            if let Some(path) = &self.saved {
                write!(f, "\n  the zeroed data is saved in {}", path.display())?;
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
        self.describe(f, false)
    }
}

impl StreamRecovery {
    /// Writes what recovery has found and done, or, in a dry run, what it would do.
    fn describe(&self, f: &mut fmt::Formatter<'_>, is_dry_run: bool) -> fmt::Result {
        let Self { stream, last, tag, found, kept, dropped, replayed, .. } = self;
        let would_be = if is_dry_run { "would be " } else { "" };
        write!(
            f,
            "stream {stream}: {found} entries found; whole up to group {last} (tag {tag}), {kept} \
             groups {would_be}kept, {dropped} beyond {would_be}dropped, {} blocks {would_be}undone",
            self.undone_blocks()
        )?;
        if *replayed > 0 {
            write!(f, ", {replayed} requests replayed before")?;
        }
        if !self.in_place.is_empty() {
            let blocks: u64 = self.in_place.iter().map(|update| update.range.blocks).sum();
            write!(f, ", {blocks} blocks of in-place updates {would_be}left as they are")?;
        }
        if self.log_given_up {
            let blocks: u64 = self.in_doubt.iter().map(|write| write.range.blocks).sum();
            write!(
                f,
                "; a log was given up, so nothing is undone on any target, and groups beyond may have \
                 been durable: {blocks} blocks of fresh or extending writes are in doubt, and all \
                 writes that only the lost log recorded"
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
        let mut separator = "";
        for (name, duration) in steps {
            if !duration.is_zero() {
                write!(f, "{separator} {name} {:.1}", duration.as_secs_f64() * 1e3)?;
                separator = ",";
            }
        }
        Ok(())
    }
}

/// Why engine `rio` can't run on a volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineUnavailable {
    /// A target lacks Rio's extension or an ordering log.
    #[error("on target {target}: {}", lack_text(*.lack))]
    Target {
        /// The target.
        target: TargetAddr,
        /// The feature that it lacks.
        lack: Lack,
    },
    /// The volume was created for this other engine, so it has no log partitions.
    #[error("it was created for engine {0}, without space in the ordering logs")]
    MadeFor(EngineKind),
    /// The volume's log on the target was given up, and its labels name none there since. The target
    /// has a log now.
    #[error(
        "on target {target}: the volume's ordering log there was given up; to give it space in the \
         log that the target has now, open it once with accept_lost_log"
    )]
    LogGivenUp {
        /// The target.
        target: TargetAddr,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn the_report_shows_the_findings_or_that_there_are_none() {
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
        assert!(!text.contains("would"), "{text}");
        recovery.dry_run = true;
        let text = recovery.to_string();
        for part in ["would be recovered", "groups would be kept", "3 blocks would be undone"] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }
}
