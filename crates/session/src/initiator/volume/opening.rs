//! Volume opening: attach to all targets of a volume, find its drives, check their labels, claim
//! the volume on all targets, write the new owner's generation into the labels, and recover the
//! state that a crash has left.
//!
//! ```text
//! attaching → reading labels → reading statuses, if the volume is only inspected → ended
//!                            → recovering, with two pauses:                      → ended
//!                                after the claim: the labels are rewritten
//!                                after the decision: data that will be zeroed is saved,
//!                                  if the caller requests that
//! any step that fails → releasing the volume → ended with the error
//!                                            → waiting for the present owner → attaching
//! ```
//!
//! The program owns the associations with the targets, and begins with new ones. It makes their
//! connections, carries their bytes, and calls them when their deadlines are due. It calls
//! [`advance`](VolumeOpening::advance) when an answer has arrived from a target or
//! [`deadline`](VolumeOpening::deadline) is due, and then sends the contents of the outboxes. It
//! saves the data that will be zeroed ([`save_step`](VolumeOpening::save_step)), and takes the
//! [`result`](VolumeOpening::take_result).
//!
//! If the volume has an owner, the opening makes further attempts for the time that the caller
//! allows (trap T25), each over new associations. If an attempt fails after the volume may have
//! been claimed, the opening releases the volume.

mod failing;
mod recovering;
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
use crate::claim::Plan;
use crate::engine_choice::Hindrance;
use crate::initiator::attach::{Controller, Namespace};
use crate::initiator::known::KnownTarget;
use crate::initiator::opening::{Call, Opening, OpeningConfig, Outcome, Progress, Ticket};
use crate::label::Found;
use crate::label_work::{LabelEdit, Relabel};
use crate::wire::{Claim, VolumeStatus};

/// The purpose of an opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To inspect the volume, and to decide what an opening would meet: nothing is changed, and an
    /// owner may be active.
    Inspect,
    /// To report the result that a recovery would have: nothing is changed.
    DryRun,
    /// To claim the volume, and to recover every stream that needs recovery.
    Claim,
}

/// The options for opening a volume.
#[derive(Clone, Debug)]
pub struct VolumeOpeningConfig {
    /// The name of the volume; `None`: any.
    pub name: Option<String>,
    /// The place of each member, in the order of the volume.
    pub places: Vec<MemberPlace>,
    /// The number of the volume's targets.
    pub targets: usize,
    /// Whether the volume is claimed, or only inspected.
    pub purpose: Purpose,
    /// The engine that the caller insists on; `None`: the engine for which the volume was made.
    pub engine: Option<EngineKind>,
    /// Whether an owner that is connected, or may still come back, is fenced (traps T8, T25).
    pub take_over: bool,
    /// Whether a log that is lost, damaged or older than the labels is given up (traps T19, T24,
    /// T26).
    pub accept_lost_log: bool,
    /// The time for which the opening waits for an owner that may still come back (trap T25).
    pub wait: OwnerWait,
    /// The times from which the new owner's lease follows.
    pub lease: LeaseTimes,
    /// Whether the program saves the data that will be zeroed.
    pub save_undone: bool,
    /// A change of the volume that the new owner makes, with [`Purpose::Claim`].
    pub change: VolumeChange,
    /// The limit for an answer to recovery, and for putting its commands off, ns.
    pub timeout_ns: u64,
    /// The number of the attempt (trap T23).
    pub attempt: u32,
    /// The layout of the volume's blocks on its drives.
    pub layout: Layout,
    /// CRC32C, for the labels.
    pub crc32c: Crc32c,
}

/// A change of a volume that its new owner makes when it writes the labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeChange {
    /// The new name; `None`: it stays.
    pub name: Option<String>,
    /// Whether the volume grows to the size of its smallest drive. It keeps the data that it has:
    /// blocks are only added at its end.
    pub grow: bool,
}

/// The times of waiting for a volume that is owned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerWait {
    /// The whole time, ns; 0: the volume is refused at once.
    pub for_ns: u64,
    /// The pause between two attempts, ns.
    pub ask_ns: u64,
    /// The time between two [`Owned`](OpeningEvent::Owned) events, ns.
    pub report_ns: u64,
}

impl OwnerWait {
    /// A wait of `for_ns` with an attempt every half second and a report every 5 seconds.
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
    /// The volume has been claimed on all targets with this generation. The labels are written
    /// next.
    Claimed {
        /// The owner's generation.
        generation: u32,
    },
    /// The attempt has failed. The volume is released, because it may have been claimed with this
    /// generation.
    Releases {
        /// The generation.
        generation: u32,
    },
    /// The volume has an owner. Another attempt will be made after a pause.
    Owned {
        /// The target that reports this.
        server: usize,
        /// The owner's host NQN.
        owner: String,
        /// The rest of the owner's lease, ms; 0 if the owner is active.
        lease_left_ms: u32,
        /// The time for which the opening will still wait, ns.
        give_up_ns: u64,
    },
}

/// A volume that was claimed and recovered, or inspected.
#[derive(Debug)]
pub struct OpenedVolume {
    /// The volume's drives and labels.
    pub members: Members,
    /// The decision about an opening, if the volume was only inspected; else `None`.
    pub outlook: Option<Outlook>,
    /// The engine that runs, or that an opening would run.
    pub engine: EngineKind,
    /// The reason, if that is not the engine for which the volume was made (trap T17).
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

/// The decision about an opening of a volume that was inspected: the plan of the claim, or the error
/// with which the opening would be refused before it has changed anything.
pub type Outlook = Result<Plan, VolumeOpenError>;

impl OpenedVolume {
    /// The description of the volume for the recovery of its streams.
    #[must_use]
    pub fn opening_config(&self) -> OpeningConfig {
        self.members.opening_config(false)
    }

    /// The claim with which the owner claims the volume again on a target that it has lost (promise
    /// P7).
    #[must_use]
    pub fn resume_claim(&self, target: usize) -> Option<Claim> {
        self.members.resume_claim(target, self.generation, self.lease_ms)
    }

    /// The state that must be found again on a target that was lost (trap T27).
    #[must_use]
    pub fn known_target(&self, target: usize) -> KnownTarget {
        self.members.known_target(target, self.generation)
    }
}

/// The purpose of a question to a target.
#[derive(Clone, Copy, Debug)]
enum Question {
    /// To read the label of this member.
    Label(usize),
    /// To read the target's state of the volume.
    Status,
    /// A command of recovery.
    Recovery(Ticket),
    /// A step of rewriting the labels.
    Relabel,
    /// To read blocks that will be saved. The number is their offset in the buffer of [`Saving`],
    /// bytes.
    ReadForSaving(usize),
    /// To release the volume.
    Release,
}

/// The step of the opening that runs.
#[derive(Debug)]
enum Step {
    /// The associations with the targets are being set up.
    Attaching,
    /// The labels of all members are being read.
    ReadingLabels(LabelReading),
    /// Each target is asked for its state of the volume.
    ReadingStatuses {
        statuses: Vec<(usize, VolumeStatus)>,
        /// The error for which an opening refuses the labels, if there is one.
        refusal: Option<VolumeOpenError>,
    },
    /// The driver claims the volume and recovers it.
    Recovering,
    /// The labels are being rewritten; recovery pauses.
    Relabeling {
        work: Relabel,
        /// Whether a command of `work` has no answer yet.
        in_flight: bool,
    },
    /// Data that will be zeroed is being saved; recovery pauses.
    Saving {
        saving: Saving,
        state: SaveState,
        /// When saving began, ns.
        since: u64,
    },
    /// The attempt has failed with this error, and the volume is being released.
    Releasing(VolumeOpenError),
    /// The volume has an owner. The next attempt begins at `until`, ns.
    Waiting { until: u64 },
    /// The result is known.
    Ended,
}

/// The progress of the present step of saving.
#[derive(Debug, PartialEq, Eq)]
enum SaveState {
    /// The last step is done, and the next one has not begun.
    Idle,
    /// Blocks are being read.
    Reading,
    /// The program must take this step with [`VolumeOpening::save_step`].
    Due(SaveStep),
    /// The program has taken the step, and has not reported its end.
    Taken,
}

/// The labels of all members, while they are being read.
#[derive(Debug)]
struct LabelReading {
    controllers: Vec<Controller>,
    namespaces: Vec<Namespace>,
    /// For each member, whether its label has been requested.
    requested: Vec<bool>,
    /// For each member whose label has been read, the label and the drive.
    found: Vec<Option<Found>>,
}

/// Opening a volume; see the [module](self).
#[derive(Debug)]
pub struct VolumeOpening {
    config: VolumeOpeningConfig,
    targets: Targets<Question>,
    step: Step,
    /// The members, from the check of their labels on.
    members: Option<Members>,
    /// The engine that runs, and the reason if it is not the engine of the labels; both are chosen
    /// before the claim.
    engine: EngineKind,
    fallback: Option<Hindrance>,
    /// The decision of an inspection.
    outlook: Option<Outlook>,
    /// The change of the labels, which is decided before the claim.
    label_edit: LabelEdit,
    /// The places of the volume's blocks on its drives.
    block_map: Option<Topology>,
    /// The recovery of this attempt; `None` before the labels have been checked.
    driver: Option<RecoveryDriver>,
    /// The times that the driver does not measure: connecting, and saving in a dry run.
    step_times: StepTimes,
    /// When the opening began, and when this attempt began, ns.
    opening_began: u64,
    attempt_began: u64,
    /// The time of the last [`Owned`](OpeningEvent::Owned) event, ns.
    last_owned_report: Option<u64>,
    /// The last progress of recovery that was reported.
    last_progress: Option<Progress>,
    /// Whether [`advance`](Self::advance) is due at once, because a step needs a new clock value.
    advance_at_once: bool,
    /// Whether the clock has been read since the recovered seqs were decided.
    clock_read_since_decision: bool,
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
            outlook: None,
            label_edit: LabelEdit::default(),
            block_map: None,
            driver: None,
            step_times: StepTimes::default(),
            opening_began: now,
            attempt_began: now,
            last_owned_report: None,
            last_progress: None,
            advance_at_once: false,
            clock_read_since_decision: false,
            events: VecDeque::new(),
            result: None,
            config,
        }
    }

    /// When [`advance`](Self::advance) is due at the latest, ns, if nothing arrives before.
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        if self.advance_at_once {
            return Some(now);
        }
        match (&self.step, &self.driver) {
            (Step::Waiting { until }, _) => Some(*until),
            (Step::Recovering, Some(driver)) => driver.deadline(now),
            _ => None,
        }
    }

    /// Continues with answers that have arrived, and with work that is due at `now`, ns.
    pub fn advance(&mut self, now: u64, associations: &mut impl Associations) {
        self.advance_at_once = false;
        if let Err(error) = self.run_steps(now, associations) {
            self.release_after_failure(error, now, associations);
        }
        if matches!(self.step, Step::Releasing(_)) {
            self.continue_release(now, associations);
        }
    }

    /// The next event.
    pub fn event(&mut self) -> Option<OpeningEvent> {
        self.events.pop_front()
    }

    /// The next step for the program to save the data that will be zeroed. The program reports
    /// the end of the step with [`save_step_done`](Self::save_step_done).
    pub fn save_step(&mut self) -> Option<SaveStep> {
        let Step::Saving { state, .. } = &mut self.step else { return None };
        if !matches!(state, SaveState::Due(_)) {
            return None;
        }
        match core::mem::replace(state, SaveState::Taken) {
            SaveState::Due(step) => Some(step),
            _ => None,
        }
    }

    /// Takes the result of the step that [`save_step`](Self::save_step) returned last, and
    /// continues. If the program could not do the step, the attempt fails.
    pub fn save_step_done(
        &mut self,
        succeeded: bool,
        now: u64,
        associations: &mut impl Associations,
    ) {
        if let Step::Saving { state, .. } = &mut self.step
            && *state == SaveState::Taken
        {
            *state = SaveState::Idle;
            if !succeeded {
                self.release_after_failure(VolumeOpenError::NotSaved, now, associations);
            }
        }
        self.advance(now, associations);
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
