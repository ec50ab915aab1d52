//! The decision whether a volume may be claimed, and with which generation.
//!
//! The initiator asks every target of the volume for its status. [`plan`] checks the statuses: the
//! volume must have no other owner (trap T8), and each log that the labels name must be there and
//! valid (traps T19, T20, T24). The initiator then claims the volume on all targets with the same
//! generation.

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::EngineKind;
use riopipe_order::probe::{self, Plant, Rare};

use crate::target::limits::LEASE_MS_MAX;
use crate::wire::{self, VolumeStatus};

/// The options for claiming a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intent {
    /// The engine that will run.
    pub engine: EngineKind,
    /// Whether the claim fences an owner that is connected or may still come back (traps T8, T25).
    pub take_over: bool,
    /// Whether the claim gives up a log that is missing, damaged, or older than the labels (T19,
    /// T24, T26).
    pub accept_lost_log: bool,
    /// The largest generation on any of the volume's labels. The labels must have been read over
    /// the same associations that report the statuses: only then a log with a lower generation was
    /// already in its place when the labels were read.
    pub label_generation: u32,
    /// The number of streams of the volume.
    pub streams: u16,
    /// How long a target keeps the volume for this owner after it has lost the owner's association,
    /// milliseconds (trap T25). [`lease_ms`] computes it.
    pub lease_ms: u32,
}

/// The lease that an owner needs that waits `loss_ms` milliseconds for a lost target and sends Keep
/// Alive at least every `keep_alive_ms`, in milliseconds.
///
/// The lease is long enough: when it has run out on the target, the owner has noticed the loss,
/// too, and waits for the target no more. An owner that can't continue after a loss needs no lease:
/// its `loss_ms` is 0, or its engine has no replay (trap T25).
///
/// No target grants more than [`LEASE_MS_MAX`]. An owner that waits longer than that may find that
/// another initiator has the volume (trap T28).
#[must_use]
pub fn lease_ms(engine: EngineKind, loss_ms: u64, keep_alive_ms: u32) -> u32 {
    if !engine.capabilities().can_replay || loss_ms == 0 {
        return 0;
    }
    let lease_ms = loss_ms.saturating_add(u64::from(keep_alive_ms));
    u32::try_from(lease_ms).map_or(LEASE_MS_MAX, |lease_ms| lease_ms.min(LEASE_MS_MAX))
}

/// The decision to claim the volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The generation of the new owner: higher than any on record (trap T8).
    pub generation: u32,
    /// The largest released mark of each stream among all targets (trap T1).
    pub released: Vec<Seq>,
    /// The first target whose log has entries to recover, and the number of these entries. The log
    /// of an owner that is connected counts as empty, because its content is known only after the
    /// owner is fenced.
    pub unrecovered: Option<(usize, u32)>,
}

/// Why a volume can't be claimed. `target` is the number of a target of the volume, counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// The volume has an owner that is connected (trap T8), or whose lease runs (trap T25).
    #[error("owned by {owner}{}", Advice(*.lease_left_ms))]
    Owned {
        /// The target that reports this.
        target: usize,
        /// The owner's host NQN, and its address if it is known.
        owner: String,
        /// The rest of the lease of an owner whose connection is lost, milliseconds; 0 if the owner
        /// is connected.
        lease_left_ms: u32,
    },
    /// The log is of another boot, and was lost with it (trap T19).
    #[error(
        "the ordering log did not survive the target's last boot (a file: log does not survive \
         power loss), so the writes in flight are unknown; to accept that, start the target and \
         open the volume once with accept_lost_log"
    )]
    LogLost {
        /// The target that reports this.
        target: usize,
    },
    /// Partitions of the log can't be read (trap T19).
    #[error(
        "the target's ordering log is damaged, so the writes in flight are unknown (the target has \
         reported the damage); put the right log back, or open with accept_lost_log: then nothing \
         is undone on any target, and the writes in doubt are listed"
    )]
    LogDamaged {
        /// The target that reports this.
        target: usize,
    },
    /// By its labels, the volume has partitions on the target. The target does not know the volume.
    #[error(
        "the target's ordering log does not know the volume: a blank or replaced log is not \
         used as \"nothing to undo\"; to accept the loss, open with accept_lost_log"
    )]
    LogMissing {
        /// The target.
        target: usize,
    },
    /// By its labels, the volume has partitions on the target. The target was started without any
    /// log.
    #[error(
        "the target was started without an ordering log, and by its labels the volume has one \
         there: start the target with that log; if that log is lost, open with accept_lost_log"
    )]
    NoLog {
        /// The target.
        target: usize,
    },
    /// By its labels, the volume has no log on the target, because that log was given up. The
    /// target has a log with entries of the volume all the same: the one that was given up is back.
    #[error(
        "the target's ordering log was given up when it was lost, and it is back with {entries} \
         entries of the volume: start the target without it, or, to use it again, open with \
         accept_lost_log: nothing is undone then, and the writes in doubt are listed"
    )]
    LogGivenUp {
        /// The target.
        target: usize,
        /// The number of entries.
        entries: u32,
    },
    /// The generation of the log is lower than the one of the labels. Every claim is durable in all
    /// logs before it is on any label, so this log is not the one that the last owner has written
    /// (trap T24).
    #[error(
        "the target's ordering log is older than the volume's labels (generation {have}, the \
         labels have {label}): an older copy was put back, or a power cut has undone its last \
         changes, and the writes in flight are unknown. Put the right log back; to accept the \
         loss, open the volume once with accept_lost_log: then nothing is undone on any target, \
         and the writes in doubt are listed"
    )]
    LogBehind {
        /// The target.
        target: usize,
        /// The log's generation of the volume.
        have: u32,
        /// The largest generation on any label.
        label: u32,
    },
    /// The target knows the volume with another number of streams.
    #[error("the target's ordering log has {have} streams for the volume, its labels have {want}")]
    Streams {
        /// The target.
        target: usize,
        /// The number of streams in the log.
        have: u16,
        /// The number of streams on the labels.
        want: u16,
    },
    /// The target reports marks that no stream can reach.
    #[error("the target reports groups beyond any that can exist: its log is not valid")]
    Marks {
        /// The target.
        target: usize,
    },
    /// The volume has the highest possible generation already.
    #[error("the volume's generation counter is used up")]
    Generations,
}

/// The advice in the message about an owner. It depends on the rest of the owner's lease,
/// milliseconds, which is 0 if the owner is connected.
struct Advice(u32);

impl core::fmt::Display for Advice {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0 {
            0 => f.write_str("; if that owner is gone for good, open with take_over"),
            lease_left_ms => write!(
                f,
                ", whose connection is lost and which may come back for another {} s; wait for \
                 that with wait_for_lease, or, if that owner is gone for good, open with take_over",
                lease_left_ms.div_ceil(1000)
            ),
        }
    }
}

impl ClaimError {
    /// The target that the error concerns; `None` if it concerns all targets.
    #[must_use]
    pub const fn target(&self) -> Option<usize> {
        match self {
            Self::Owned { target, .. }
            | Self::LogLost { target }
            | Self::LogDamaged { target }
            | Self::LogMissing { target }
            | Self::NoLog { target }
            | Self::LogGivenUp { target, .. }
            | Self::LogBehind { target, .. }
            | Self::Marks { target }
            | Self::Streams { target, .. } => Some(*target),
            Self::Generations => None,
        }
    }
}

/// Whether a target's log of the volume is older than the labels, whose largest generation is
/// `label_generation` (trap T24). A newer log is valid: a claim may have been interrupted before it
/// wrote the labels.
#[must_use]
pub fn is_behind(status: &VolumeStatus, label_generation: u32) -> bool {
    status.known
        && !status.unlogged
        && status.generation < label_generation
        && !probe::is_bug_planted(Plant::T24LabelUnchecked)
}

/// Decides whether the volume may be claimed. `statuses` has the number and the status of each
/// target that has the extension. `needs_log` returns for the number of a target whether the labels
/// name a log there.
///
/// # Errors
/// The first reason found for which the volume can't be claimed.
pub fn plan(
    intent: &Intent,
    statuses: &[(usize, VolumeStatus)],
    needs_log: impl Fn(usize) -> bool,
) -> Result<Plan, ClaimError> {
    let mut generation = intent.label_generation;
    let mut released = alloc::vec![Seq::ZERO; usize::from(intent.streams)];
    let mut unrecovered = None;
    for (target, status) in statuses {
        let target = *target;
        generation = generation.max(status.generation);
        if status.owned && !status.own && !intent.take_over {
            let lease_left_ms = status.lease_left_ms;
            return Err(ClaimError::Owned { target, owner: status.owner_text(), lease_left_ms });
        }
        if !needs_log(target) {
            if status.known && !status.unlogged && status.live_entries > 0 {
                probe::count_rare(Rare::LogRefused);
                return Err(ClaimError::LogGivenUp { target, entries: status.live_entries });
            }
            continue;
        }
        if !check_log(intent, target, status)? {
            continue;
        }
        // The log of a connected owner is in use. Whether it has entries to recover is known only
        // after that owner is fenced.
        let is_at_rest = !status.owned || status.own || status.lease_left_ms > 0;
        if status.unrecovered && is_at_rest {
            unrecovered = unrecovered.or(Some((target, status.live_entries)));
        }
        if status.streams != intent.streams {
            let (have, want) = (status.streams, intent.streams);
            return Err(ClaimError::Streams { target, have, want });
        }
        if status.released.iter().any(|mark| *mark > wire::SEQ_MAX) {
            return Err(ClaimError::Marks { target });
        }
        for (largest, mark) in released.iter_mut().zip(&status.released) {
            *largest = (*largest).max(*mark);
        }
    }
    let generation = generation.checked_add(1).ok_or(ClaimError::Generations)?;
    Ok(Plan { generation, released, unrecovered })
}

/// Checks the log that the labels name on a target. Returns whether the target has a log of the
/// volume whose content counts; false if the log is missing and its loss is accepted.
///
/// # Errors
/// The log is missing, lost or older than the labels, and its loss is not accepted.
fn check_log(intent: &Intent, target: usize, status: &VolumeStatus) -> Result<bool, ClaimError> {
    let is_missing = !status.known || status.unlogged;
    if is_missing {
        if intent.accept_lost_log || probe::is_bug_planted(Plant::T19BlankLog) {
            return Ok(false);
        }
        probe::count_rare(Rare::LogRefused);
        return Err(ClaimError::LogMissing { target });
    }
    let can_be_given_up = status.damaged && intent.accept_lost_log;
    if status.log_lost && !can_be_given_up {
        probe::count_rare(Rare::LogRefused);
        return Err(if status.damaged {
            ClaimError::LogDamaged { target }
        } else {
            ClaimError::LogLost { target }
        });
    }
    if is_behind(status, intent.label_generation) {
        probe::count_rare(Rare::LogBehind);
        if !intent.accept_lost_log {
            let (have, label) = (status.generation, intent.label_generation);
            return Err(ClaimError::LogBehind { target, have, label });
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn intent() -> Intent {
        Intent {
            engine: EngineKind::Rio,
            take_over: false,
            accept_lost_log: false,
            label_generation: 1,
            streams: 2,
            lease_ms: 45_000,
        }
    }

    fn status(generation: u32, released: [u64; 2]) -> VolumeStatus {
        VolumeStatus {
            generation,
            known: true,
            streams: 2,
            released: released.map(Seq).to_vec(),
            ..VolumeStatus::default()
        }
    }

    #[test]
    fn t8_the_generation_is_above_all_and_marks_are_the_largest() {
        let statuses = [(0, status(7, [5, 0])), (1, status(3, [4, 9]))];
        let plan = plan(&intent(), &statuses, |_| true).unwrap();
        assert_eq!(plan.generation, 8);
        assert_eq!(plan.released, [Seq(5), Seq(9)]);
    }

    #[test]
    fn t19_a_log_that_was_given_up_and_is_back_with_entries_is_refused() {
        let back = VolumeStatus { live_entries: 3, ..status(1, [5, 0]) };
        let plan = |status: &VolumeStatus| plan(&intent(), &[(0, status.clone())], |_| false);
        assert_eq!(plan(&back), Err(ClaimError::LogGivenUp { target: 0, entries: 3 }));
        // Without entries, and a volume that never had a log there.
        assert!(plan(&status(1, [5, 0])).is_ok());
        assert!(plan(&VolumeStatus { unlogged: true, ..back }).is_ok());
    }

    #[test]
    fn errors_name_the_target() {
        assert_eq!(ClaimError::LogLost { target: 3 }.target(), Some(3));
        assert_eq!(ClaimError::Generations.target(), None);
        let last = [(0, status(u32::MAX, [0, 0]))];
        assert_eq!(plan(&intent(), &last, |_| true), Err(ClaimError::Generations));
    }

    #[test]
    fn t8_a_living_owner_is_not_displaced_by_accident() {
        let mut owned = status(7, [0, 0]);
        owned.owned = true;
        owned.owner = "nqn.x".into();
        let statuses = [(0, status(7, [0, 0])), (1, owned)];
        assert!(matches!(
            plan(&intent(), &statuses, |_| true),
            Err(ClaimError::Owned { target: 1, .. })
        ));
        let take = Intent { take_over: true, ..intent() };
        assert!(plan(&take, &statuses, |_| true).is_ok());
    }

    #[test]
    fn t25_an_unreachable_owner_is_reported_with_its_lease() {
        let mut unreachable = status(7, [0, 0]);
        (unreachable.owned, unreachable.lease_left_ms, unreachable.owner) =
            (true, 31_001, "nqn.x".into());
        (unreachable.unrecovered, unreachable.live_entries) = (true, 3);
        let statuses = [(0, unreachable)];
        let error = plan(&intent(), &statuses, |_| true).unwrap_err();
        let text = alloc::string::ToString::to_string(&error);
        for word in ["owned by nqn.x", "another 32 s", "wait_for_lease", "take_over"] {
            assert!(text.contains(word), "{text}");
        }
        let take = Intent { take_over: true, ..intent() };
        assert_eq!(plan(&take, &statuses, |_| true).unwrap().unrecovered, Some((0, 3)));
    }

    #[test]
    fn t25_a_lease_covers_the_time_for_which_an_owner_waits() {
        assert_eq!(lease_ms(EngineKind::Rio, 30_000, 15_000), 45_000);
        assert_eq!(lease_ms(EngineKind::Rio, u64::MAX, 15_000), LEASE_MS_MAX);
        assert_eq!(lease_ms(EngineKind::Rio, u32::MAX.into(), 0), LEASE_MS_MAX);
        assert_eq!(
            lease_ms(EngineKind::Rio, 0, 15_000),
            0,
            "an owner that does not wait needs no lease"
        );
        assert_eq!(lease_ms(EngineKind::Sync, 30_000, 15_000), 0, "without replay");
        assert_eq!(lease_ms(EngineKind::None, 30_000, 15_000), 0);
    }

    #[test]
    fn t19_live_entries_are_reported() {
        let mut live = status(1, [0, 0]);
        (live.unrecovered, live.live_entries) = (true, 3);
        let found = |s: VolumeStatus, take_over| {
            let intent = Intent { take_over, ..intent() };
            plan(&intent, &[(0, status(1, [0, 0])), (1, s)], |_| true).unwrap().unrecovered
        };
        assert_eq!(found(live.clone(), false), Some((1, 3)));
        live.owned = true;
        assert_eq!(found(live.clone(), true), None, "the log of a connected owner can't be judged");
        live.own = true;
        assert_eq!(found(live, false), Some((1, 3)));
        assert_eq!(found(status(1, [0, 0]), false), None);
    }

    #[test]
    fn t24_a_log_older_than_any_label_is_lost() {
        let of = |logs: [u32; 2], label_generation, logged: [bool; 2]| {
            let statuses = [(0, status(logs[0], [0, 0])), (1, status(logs[1], [0, 0]))];
            let intent = Intent { label_generation, ..intent() };
            plan(&intent, &statuses, |target| logged[target]).map(|plan| plan.generation)
        };
        assert_eq!(of([7, 7], 7, [true; 2]), Ok(8));
        assert_eq!(of([8, 7], 7, [true; 2]), Ok(9), "a claim that was cut off before its labels");
        let behind = ClaimError::LogBehind { target: 1, have: 6, label: 7 };
        assert_eq!(behind.target(), Some(1));
        assert_eq!(of([7, 6], 7, [true; 2]), Err(behind));
        assert_eq!(of([7, 0], 7, [true, false]), Ok(8), "no log is due there");
    }

    #[test]
    fn t26_an_older_log_that_is_given_up_still_has_its_marks() {
        let statuses = [(0, status(7, [4, 0])), (1, status(6, [3, 9]))];
        let intent = Intent { label_generation: 7, accept_lost_log: true, ..intent() };
        let plan = plan(&intent, &statuses, |_| true).unwrap();
        assert_eq!((plan.generation, plan.released), (8, vec![Seq(4), Seq(9)]));
    }

    #[test]
    fn t19_a_lost_log_is_never_taken_for_nothing_to_undo() {
        let with = |change: fn(&mut VolumeStatus)| {
            let mut s = status(1, [0, 0]);
            change(&mut s);
            plan(&intent(), &[(0, s)], |_| true).unwrap_err()
        };
        assert_eq!(with(|s| s.log_lost = true), ClaimError::LogLost { target: 0 });
        assert_eq!(with(|s| s.known = false), ClaimError::LogMissing { target: 0 });
        let given_up = Intent { accept_lost_log: true, ..intent() };
        let mut unknown = status(0, [0, 0]);
        unknown.known = false;
        let statuses = [(0, unknown), (1, status(3, [4, 9]))];
        assert_eq!(plan(&given_up, &statuses, |_| true).unwrap().released, [Seq(4), Seq(9)]);
        assert_eq!(with(|s| s.released[1] = Seq(u64::MAX)), ClaimError::Marks { target: 0 });
        let last = [(0, status(1, [wire::SEQ_MAX.0, 0]))];
        assert_eq!(plan(&intent(), &last, |_| true).unwrap().released[0], wire::SEQ_MAX);
        assert!(matches!(with(|s| s.streams = 3), ClaimError::Streams { have: 3, want: 2, .. }));
    }
}
