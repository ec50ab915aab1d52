//! Volume opening: attach to all its targets, find its drives, check their labels, claim the volume
//! on all targets, recover the state that a crash has left, and mark the labels as the new owner's.
//!
//! ```text
//! attaching → labels → (statuses, if the volume is only inspected)
//!                    → claiming and recovering, with its pauses:
//!                        claimed: the labels are rewritten
//!                        decided: data that will be zeroed is saved, if the caller requests that
//!                    → over
//! ```
//!
//! The program has the targets' associations, new ones when it begins: it makes their connections,
//! carries their bytes, and calls them when their deadlines are due. It calls
//! [`advance`](VolumeOpening::advance) when an answer has arrived from a target or
//! [`deadline`](VolumeOpening::deadline) is due, and then sends the contents of the outboxes. It
//! saves the data that will be zeroed ([`save_step`](VolumeOpening::save_step)), and takes the
//! [`result`](VolumeOpening::take_result).
//!
//! If the volume is owned, the opening asks for it again, for the time that the caller allows
//! (T25), each time over new associations. When an attempt fails after the volume may have been
//! claimed, it is released.

mod steps;

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;
use riopipe_order::engine::EngineKind;
use riopipe_order::topology::Topology;

use super::calls::{Associations, Targets};
use super::error::VolumeOpenError;
use super::members::{Layout, LeaseTimes, MemberPlace, Members};
use super::recovery::{RecoveryDriver, StepTimes};
use super::saving::{SaveStep, Saving};
use crate::engine_choice::Hindrance;
use crate::initiator::attach::{Controller, Namespace};
use crate::initiator::known::KnownTarget;
use crate::initiator::opening::{Call, Opening, OpeningConfig, Outcome, Progress, Ticket};
use crate::label::Found;
use crate::label_work::Relabel;
use crate::wire::{Claim, VolumeStatus};

/// The purpose of an opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To inspect it: nothing is changed, and an owner may be active.
    Inspect,
    /// To report the result that a recovery would have: nothing is changed.
    DryRun,
    /// To claim it, and to recover every stream that needs it.
    Take,
}

/// The options for opening a volume.
#[derive(Clone, Debug)]
pub struct VolumeOpeningConfig {
    /// Its name; `None`: any.
    pub name: Option<String>,
    /// The places of its members, in its order.
    pub places: Vec<MemberPlace>,
    /// The number of its targets.
    pub targets: usize,
    /// The purpose.
    pub purpose: Purpose,
    /// The engine that the caller insists on; `None`: the one that the volume was made for.
    pub engine: Option<EngineKind>,
    /// Whether an owner that is connected, or may still come back, is fenced (T8, T25).
    pub take_over: bool,
    /// Whether a log that is lost, damaged or older than the labels is given up (T19, T24, T26).
    pub accept_lost_log: bool,
    /// The wait for an owner that may still come back (T25).
    pub wait: OwnerWait,
    /// The time for which the new owner may be unreachable.
    pub lease: LeaseTimes,
    /// Whether the program saves the data that will be zeroed.
    pub save_undone: bool,
    /// The limit for an answer to recovery, and for putting its commands off, ns.
    pub timeout_ns: u64,
    /// The number of the attempt (T23).
    pub attempt: u32,
    /// The layout of the volume's blocks on its drives.
    pub layout: Layout,
    /// CRC32C, for the labels.
    pub crc32c: Crc32c,
}

/// The times of waiting for a volume that is owned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerWait {
    /// The whole time, ns; 0: the volume is refused at once.
    pub for_ns: u64,
    /// The pause before it is requested again, ns.
    pub ask_ns: u64,
    /// The time between two reports to the caller that it waits, ns.
    pub report_ns: u64,
}

impl OwnerWait {
    /// A wait of `for_ns` that asks every half second and reports every 5 seconds.
    #[must_use]
    pub const fn of(for_ns: u64) -> Self {
        Self { for_ns, ask_ns: 500_000_000, report_ns: 5_000_000_000 }
    }
}

/// An event of an opening that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpeningEvent {
    /// The progress of recovery.
    Progress(Progress),
    /// A command of recovery goes to a target.
    Sent {
        /// The target.
        server: usize,
        /// The command.
        call: Call,
    },
    /// The volume is this owner's on all targets, with this generation; its labels are next.
    Claimed {
        /// The owner's generation.
        generation: u32,
    },
    /// The attempt has failed: a claim that may have been made with this generation is released.
    Releases {
        /// The generation.
        generation: u32,
    },
    /// The volume is owned, and the program will ask for it again.
    Owned {
        /// The target that reports this.
        server: usize,
        /// The owner's host NQN.
        owner: String,
        /// The rest of its lease, ms; 0 if the owner is active.
        lease_left_ms: u32,
        /// The rest of the wait, ns.
        give_up_ns: u64,
    },
}

/// A volume that was claimed and recovered, or inspected.
#[derive(Debug)]
pub struct OpenedVolume {
    /// The volume's drives and labels.
    pub members: Members,
    /// The engine that runs.
    pub engine: EngineKind,
    /// Why that is not the engine for which the volume was made, if so (T17).
    pub fallback: Option<Hindrance>,
    /// The owner's generation; 0 if the volume was only inspected.
    pub generation: u32,
    /// The volume's status on the targets that have the extension, by target.
    pub statuses: Vec<(usize, VolumeStatus)>,
    /// The layout of the members on the targets.
    pub topology: Topology,
    /// The findings and actions of recovery.
    pub outcome: Outcome,
    /// The time of each step.
    pub steps: StepTimes,
    /// The lease that the owner has requested, ms.
    pub lease_ms: u32,
}

impl OpenedVolume {
    /// The description of the volume for the recovery of its streams.
    #[must_use]
    pub fn opening_config(&self) -> OpeningConfig {
        self.members.opening_config()
    }

    /// The claim with which the owner claims the volume again on a target that it has lost (P7).
    #[must_use]
    pub fn resume_claim(&self, target: usize) -> Option<Claim> {
        self.members.resume_claim(target, self.generation, self.lease_ms)
    }

    /// The state that must be found again on a target that was lost (T27).
    #[must_use]
    pub fn known_target(&self, target: usize) -> KnownTarget {
        self.members.known_target(target, self.generation)
    }
}

/// The purpose of a question to a target.
#[derive(Clone, Copy, Debug)]
enum Question {
    /// A member's label.
    Label(usize),
    /// Its state of the volume.
    Status,
    /// A command of recovery.
    Recovery(Ticket),
    /// A step of rewriting the labels.
    Relabel,
    /// Blocks that will be saved, from this byte of the whole on.
    Saved(usize),
    /// To release the volume.
    Release,
}

#[derive(Debug)]
enum Step {
    Attaching,
    Labels(Labels),
    /// Each target is asked for its state of the volume.
    Status {
        statuses: Vec<(usize, VolumeStatus)>,
    },
    Recovering,
    /// The labels are rewritten. `asked`: whether a step is in flight.
    Relabeling {
        work: Relabel,
        asked: bool,
    },
    /// Data that will be zeroed is being saved, since this time, ns.
    Saving {
        saving: Saving,
        state: SaveState,
        since: u64,
    },
    /// The volume is being released.
    Releasing(VolumeOpenError),
    /// The program will ask for the volume again at this time, ns.
    Waiting {
        until: u64,
    },
    Over,
}

#[derive(Debug, PartialEq, Eq)]
enum SaveState {
    /// The next step is to be found.
    Next,
    /// Blocks are being read.
    Reading,
    /// The program has to do this step.
    Due(SaveStep),
    /// The program does the step.
    Doing,
}

/// The labels, while they are read.
#[derive(Debug)]
struct Labels {
    controllers: Vec<Controller>,
    namespaces: Vec<Namespace>,
    /// For each member, whether its label has been requested.
    asked: Vec<bool>,
    found: Vec<Option<Found>>,
}

/// Opening a volume; see the [module](self).
#[derive(Debug)]
pub struct VolumeOpening {
    config: VolumeOpeningConfig,
    targets: Targets<Question>,
    step: Step,
    members: Option<Members>,
    engine: EngineKind,
    fallback: Option<Hindrance>,
    /// The places of the volume's blocks.
    map: Option<Topology>,
    driver: Option<RecoveryDriver>,
    /// The times that the driver does not measure: connecting, and saving in a dry run, ns.
    steps: StepTimes,
    /// When the opening began, and when this attempt began, ns.
    began: u64,
    attempt_began: u64,
    /// The time of the last [`Owned`](OpeningEvent::Owned) event, ns.
    reported: Option<u64>,
    /// The last progress of recovery that was reported.
    progress: Option<Progress>,
    /// The opening must continue at once, with a clock that is read anew.
    at_once: bool,
    /// The clock has been read since the prefixes were decided.
    decided: bool,
    events: VecDeque<OpeningEvent>,
    result: Option<Result<OpenedVolume, VolumeOpenError>>,
}

impl VolumeOpening {
    /// An opening that begins at `now`, ns.
    #[must_use]
    pub fn new(config: VolumeOpeningConfig, now: u64) -> Self {
        Self {
            targets: Targets::new(config.targets),
            step: Step::Attaching,
            members: None,
            engine: EngineKind::None,
            fallback: None,
            map: None,
            driver: None,
            steps: StepTimes::default(),
            began: now,
            attempt_began: now,
            reported: None,
            progress: None,
            at_once: false,
            decided: false,
            events: VecDeque::new(),
            result: None,
            config,
        }
    }

    /// When [`advance`](Self::advance) is due at the latest, ns, if nothing arrives before.
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        if self.at_once {
            return Some(now);
        }
        match (&self.step, &self.driver) {
            (Step::Waiting { until }, _) => Some(*until),
            (Step::Recovering, Some(driver)) => driver.deadline(now),
            _ => None,
        }
    }

    /// Continues with answers that have arrived, and with work that is due.
    pub fn advance(&mut self, now: u64, a: &mut impl Associations) {
        self.at_once = false;
        if let Err(error) = self.go_on(now, a) {
            self.fail(error, now, a);
        }
        if matches!(self.step, Step::Releasing(_)) {
            self.released(now, a);
        }
    }

    /// The next event.
    pub fn event(&mut self) -> Option<OpeningEvent> {
        self.events.pop_front()
    }

    /// The next step for the program to save the data that will be zeroed. It reports the step's
    /// end with [`saved`](Self::saved).
    pub fn save_step(&mut self) -> Option<SaveStep> {
        let Step::Saving { state, .. } = &mut self.step else { return None };
        if !matches!(state, SaveState::Due(_)) {
            return None;
        }
        match core::mem::replace(state, SaveState::Doing) {
            SaveState::Due(step) => Some(step),
            _ => None,
        }
    }

    /// The program has done a step of saving the data that will be zeroed, or could not do it.
    pub fn saved(&mut self, done: bool, now: u64, a: &mut impl Associations) {
        if let Step::Saving { state, .. } = &mut self.step
            && *state == SaveState::Doing
        {
            *state = SaveState::Next;
            if !done {
                self.fail(VolumeOpenError::NotSaved, now, a);
            }
        }
        self.advance(now, a);
    }

    /// The result of the opening, once. The associations of a claimed volume continue. The
    /// associations of a volume that was inspected, or could not be opened, have been closed.
    pub fn take_result(&mut self) -> Option<Result<OpenedVolume, VolumeOpenError>> {
        self.result.take()
    }

    /// The progress of recovery so far, while it runs.
    #[must_use]
    pub fn recovery(&self) -> Option<&Opening> {
        self.driver.as_ref().map(RecoveryDriver::opening)
    }
}
