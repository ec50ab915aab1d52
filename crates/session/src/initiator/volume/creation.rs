//! Volume creation: checks everything first, then makes the log partitions, then writes the labels.
//!
//! ```text
//! attaching → reading labels → reading old statuses → making partitions → counting slots
//!           → reading labels again → writing labels → releasing → dropping old volumes → ended
//!
//! making partitions → dropping an old volume → making partitions: a log is full, or refuses
//!
//! dropping an old volume: claim it → its target forgets it
//! ```
//!
//! An *old volume* is a volume to which some of the drives belonged before.
//!
//! The old volumes keep their partitions until the new labels are written. So a crash leaves the old
//! volume or the new one, or, between two labels, drives that make no volume. There are two
//! exceptions: a log has no space beside the old volume, or the old volume waits for recovery there.
//! Then the old volume is dropped from that log first. A crash or a failure after that leaves the
//! old volume with a lost log.
//!
//! A creation that cannot succeed should leave the old volume its log. So the checks that need no
//! log come before the first claim. Where a log is full, an old volume is dropped first only if, by
//! the numbers in the target's refusal, that may make enough space. The space may still be too
//! small, because the free bytes may not be adjacent. A volume that keeps its drives guarded is
//! dropped first in any case: the space is not known until that volume is dropped.
//!
//! An old volume whose log is older than its labels is not dropped first: the claim would make that
//! log count as the newest (T24). Where it takes the space, the creation is refused.
//!
//! Only its owner may drop a volume, so an old volume is claimed first (T18). No owner is displaced
//! (T8). An old volume that cannot be dropped stays in the log: the new volume does not depend on
//! it.
//!
//! The program drives a creation like a [`VolumeOpening`](super::opening::VolumeOpening). A creation
//! has no deadline of its own. If it fails after partitions were made, it asks the targets to forget
//! the new volume.

mod old_volumes;

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::command::Cqe;
use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::engine::EngineKind;
use riopipe_order::entry::ENTRY_BYTES;
use riopipe_order::log_region::{MemberNamespace, PARTITION_ALIGN};
use riopipe_order::topology::{
    MemberInfo as MemberLayout, ServerInfo as ServerLayout, Topology, TopologyError,
};

use self::old_volumes::{Dropping, OldState, OldVolume};
use super::calls::{Associations, TargetAnswer, Targets};
use super::error::{CallFailure, Nonsense, VolumeCreateError, VolumeOptionsError};
use super::labels;
use super::members::{MemberPlace, members_on, namespaces};
use crate::claim;
use crate::engine_choice::{Choice, Lacking, choose_for_new};
use crate::initiator::association::ControlQueue;
use crate::initiator::attach::{Controller, Namespace};
use crate::initiator::queue_pair::Data;
use crate::label::{DATA_START, Label, MEMBERS_MAX, MemberId, NAME_MAX};
use crate::label_work::{self, LabelIo};
use crate::target::limits::{LOG_SLOTS_MAX, STREAM_SLOTS_MAX};
use crate::wire::{
    BLOCK_BYTES, Claim, STATUS_LEN, STREAMS_MAX, VolumeStatus, claim_command, release_command,
    status, status_command,
};

/// The generation with which a volume is made.
const FIRST_GENERATION: u32 = 1;
/// The most members on one target.
const MEMBERS_ON_TARGET_MAX: usize = 16;
/// The most blocks of a stripe unit.
const UNIT_BLOCKS_MAX: u32 = 1 << 20;

/// The options for a new volume.
#[derive(Clone, Debug)]
pub struct VolumeCreationConfig {
    /// The name of the volume.
    pub name: String,
    /// The id of the volume. It is random, so that no two volumes have the same id.
    pub volume: VolumeId,
    /// The place of each member, in the order of the volume.
    pub places: Vec<MemberPlace>,
    /// The number of the volume's targets.
    pub targets: usize,
    /// The number of blocks of a stripe unit.
    pub unit_blocks: u32,
    /// The number of streams.
    pub streams: u16,
    /// The engine of the volume; `None`: `rio` if it can run on every target, else `sync` (T17).
    pub engine: Option<EngineKind>,
    /// The number of log slots per stream and target; 0: as many as fit.
    pub slots: u32,
    /// Whether volumes to which the drives belong are given up with all their data. A volume that
    /// has an owner is never given up.
    pub force: bool,
    /// CRC32C, for the labels.
    pub crc32c: Crc32c,
}

/// The purpose of a question to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    /// To read the label of this member.
    Label(usize),
    /// To read the state of an old volume on a target. The number is an index of `old_volumes`.
    OldStatus(usize),
    /// To claim an old volume on a target. The number is an index of `old_volumes`.
    ClaimOld(usize),
    /// To make the target forget a volume. The status of the answer does not matter.
    Forget,
    /// To claim the new volume, which makes the partitions.
    Claim,
    /// To read the number of slots of the new partitions.
    Status,
    /// A step of writing a label.
    WriteLabel,
    /// To release the new volume.
    Release,
}

/// The step of the creation that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The associations with the targets are being set up.
    Attaching,
    /// The labels are read, to check whether the drives belong to a volume.
    ReadingLabels,
    /// The targets of drives that belong to a volume are asked whether it has an owner.
    ReadingOldStatuses,
    /// The targets forget old volumes whose log is lost. Those cannot be claimed.
    ForgettingLost,
    /// The targets make partitions in their logs, one after the other, from this one on.
    MakingPartitions(usize),
    /// The targets are asked for the number of slots of the new partitions.
    CountingSlots,
    /// The labels are read again, because another initiator may have made a volume of the same drives
    /// after the first reading. Once the partitions are made, no other initiator can do that.
    ReadingLabelsAgain,
    /// The labels are being written.
    WritingLabels,
    /// The targets release the new volume.
    Releasing,
    /// The next old volume is chosen and dropped.
    DroppingOld(Dropping),
    /// That old volume is being claimed.
    ClaimingOld(Dropping),
    /// The targets on which it was claimed forget it.
    ForgettingOld(Dropping),
    /// Creation has failed, and the targets forget the new volume.
    Failing,
    /// The result is known.
    Ended,
}

/// The drives, once their targets have reported them.
#[derive(Debug)]
struct Drives {
    controllers: Vec<Controller>,
    namespaces: Vec<Namespace>,
    /// For each member, whether its label has been requested.
    requested: Vec<bool>,
    /// For each member whose label has been read, the label of the volume that it belongs to.
    labels: Vec<Option<Option<Label>>>,
}

/// The creation of a volume; see the [module](self).
#[derive(Debug)]
pub struct VolumeCreation {
    config: VolumeCreationConfig,
    targets: Targets<Question>,
    step: Step,
    /// The drives, once all targets are attached.
    drives: Option<Drives>,
    /// The label of member 0 of the new volume, once all targets are attached.
    label: Option<Label>,
    /// The old volumes, all of which are given up.
    given_up: Vec<VolumeId>,
    /// The same volumes, with one item for each target on which they have drives.
    old_volumes: Vec<OldVolume>,
    /// The steps of writing labels that are not done, and whether the first one is in flight.
    label_writes: VecDeque<LabelIo>,
    write_in_flight: bool,
    /// Whether partitions may have been made on some target. If the creation fails, the targets
    /// must then forget them.
    may_have_partitions: bool,
    /// The reason why the engine is not `rio`, until the caller takes it.
    fallback: Option<Lacking>,
    /// The error to be reported when the targets have forgotten the new volume.
    error: Option<VolumeCreateError>,
    result: Option<Result<Label, VolumeCreateError>>,
}

impl VolumeCreationConfig {
    /// Checks all that can be checked before any target is asked.
    fn check(&self) -> Result<(), VolumeCreateError> {
        let (name, places) = (&self.name, &self.places);
        if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
            return Err(VolumeCreateError::Name);
        }
        if places.is_empty() || places.len() > MEMBERS_MAX {
            return Err(VolumeOptionsError::Members.into());
        }
        let on = |target| places.iter().filter(|place| place.target == target).count();
        if places.iter().any(|place| on(place.target) > MEMBERS_ON_TARGET_MAX) {
            return Err(VolumeOptionsError::MembersOnTarget.into());
        }
        if !(1..=STREAMS_MAX).contains(&self.streams) {
            return Err(VolumeOptionsError::Streams.into());
        }
        if !(1..=UNIT_BLOCKS_MAX).contains(&self.unit_blocks) {
            return Err(VolumeOptionsError::UnitBlocks.into());
        }
        Ok(())
    }

    /// Checks that a volume can use these namespaces, and that no two are the same.
    fn check_drives(&self, namespaces: &[Namespace]) -> Result<(), VolumeCreateError> {
        let needed = DATA_START + u64::from(self.unit_blocks);
        for (member, (place, namespace)) in self.places.iter().zip(namespaces).enumerate() {
            let before = self.places.iter().zip(namespaces).take(member);
            for (earlier, other) in before {
                if earlier == place {
                    return Err(VolumeCreateError::DuplicateMember { member });
                }
                if namespace.nguid != [0; 16] && other.nguid == namespace.nguid {
                    return Err(VolumeCreateError::SameNguid { member });
                }
            }
            if namespace.block_size != BLOCK_BYTES as u32 || namespace.metadata != 0 {
                let size = namespace.block_size;
                return Err(VolumeCreateError::BlockSize { member, size });
            }
            if namespace.blocks < needed {
                let blocks = namespace.blocks;
                return Err(VolumeCreateError::TooSmall { member, blocks, needed });
            }
        }
        Ok(())
    }

    /// The label of member 0. `drives` have been checked.
    fn label(&self, drives: &Drives, engine: EngineKind) -> Result<Label, TopologyError> {
        let unit = u64::from(self.unit_blocks);
        let units = |n: &Namespace| (n.blocks - DATA_START) / unit * unit;
        let blocks = drives.namespaces.iter().map(units).min().unwrap_or(0);
        let member = |(place, namespace): (&MemberPlace, &Namespace)| {
            let extension = drives.controllers[place.target].extension;
            let region = extension.filter(|_| engine.capabilities().keeps_log);
            MemberId { nguid: namespace.nguid, region: region.map_or([0; 16], |e| e.region) }
        };
        // The same check that opening will make.
        let members = self.places.iter().map(|place| MemberLayout {
            server: place.target as u16,
            start: DATA_START,
            blocks,
            request_blocks_max: 1,
            volatile: false,
        });
        let servers = alloc::vec![ServerLayout { slots: 0 }; drives.controllers.len()];
        Topology::new(members.collect(), servers, self.unit_blocks)?;
        Ok(Label {
            volume: self.volume,
            name: self.name.clone(),
            block_size: BLOCK_BYTES as u32,
            unit_blocks: self.unit_blocks,
            data_blocks: blocks,
            streams: self.streams,
            engine,
            index: 0,
            generation: FIRST_GENERATION,
            sequence: 1,
            members: self.places.iter().zip(&drives.namespaces).map(member).collect(),
        })
    }

    /// Checks the number of slots that the caller requests. The targets check it too, but by then
    /// an old volume may have been dropped.
    fn check_requested_slots(&self) -> Result<(), VolumeCreateError> {
        let share = LOG_SLOTS_MAX / u64::from(self.streams);
        let most = u32::try_from(share).unwrap_or(u32::MAX).min(STREAM_SLOTS_MAX);
        let slots = self.slots;
        for target in 0..self.targets {
            self.check_slots_suffice(target, slots)?;
            if slots > most {
                return Err(VolumeCreateError::TooManySlots { target, slots, most });
            }
        }
        Ok(())
    }

    /// Checks that `slots` log slots per stream on a target are enough.
    fn check_slots_suffice(&self, target: usize, slots: u32) -> Result<(), VolumeCreateError> {
        let needed = self.min_slots(target);
        if slots < needed {
            return Err(VolumeCreateError::TooFewSlots { target, slots, needed });
        }
        Ok(())
    }

    /// The fewest slots per stream on a target: more than the slots that are reserved for flush
    /// entries (T13).
    fn min_slots(&self, target: usize) -> u32 {
        2 * members_on(&self.places, target).len() as u32 + 2
    }

    /// The claim that makes partitions in a target's log.
    fn claim(&self, target: usize, keeps_log: bool) -> Claim {
        Claim {
            volume: self.volume,
            generation: FIRST_GENERATION,
            create: true,
            give_up: false,
            take_over: false,
            unlogged: !keeps_log,
            resume: false,
            streams: self.streams,
            slots: self.slots,
            lease_ms: 0,
            members: members_on(&self.places, target),
        }
    }
}

impl VolumeCreation {
    /// A creation with these options, which [`advance`](Self::advance) begins.
    ///
    /// # Errors
    /// The options make no volume. No target has got a command.
    pub fn new(config: VolumeCreationConfig) -> Result<Self, VolumeCreateError> {
        config.check()?;
        Ok(Self {
            targets: Targets::new(config.targets),
            step: Step::Attaching,
            drives: None,
            label: None,
            given_up: Vec::new(),
            old_volumes: Vec::new(),
            label_writes: VecDeque::new(),
            write_in_flight: false,
            may_have_partitions: false,
            fallback: None,
            error: None,
            result: None,
            config,
        })
    }

    /// The reason why the volume is made for engine `sync`, if the caller did not request that
    /// engine. It is returned once (T17).
    pub fn take_fallback(&mut self) -> Option<Lacking> {
        self.fallback.take()
    }

    /// The result, once: the label of member 0.
    pub fn take_result(&mut self) -> Option<Result<Label, VolumeCreateError>> {
        self.result.take()
    }

    /// Continues with the answers that have arrived.
    pub fn advance(&mut self, now: u64, associations: &mut impl Associations) {
        match self.run_steps(now, associations) {
            // A target that fails now keeps its partitions of an old volume. That does not affect
            // the new volume.
            Err(_) if self.is_new_volume_made() => self.end_with_label(associations),
            Err(error) => self.clean_up_after_failure(error, now, associations),
            Ok(()) => {}
        }
        if self.step == Step::Failing {
            // The content of the answers does not matter.
            while self.targets.next_answer(associations).is_some() {}
            self.targets.drop_answers_of_lost_targets(associations);
            if !self.targets.has_pending_answers() {
                self.targets.close_associations(associations);
                self.step = Step::Ended;
                self.result = self.error.take().map(Err);
            }
        }
    }

    /// Handles failures and answers of targets. Then runs steps until one must wait for a target.
    fn run_steps(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        if matches!(self.step, Step::Failing | Step::Ended) {
            // The creation has failed or has its result already.
            return Ok(());
        }
        if self.step != Step::Attaching
            && let Some((target, error)) = self.targets.first_lost(associations)
        {
            return Err(self.call_error(target, error.into()));
        }
        if let Some((target, error)) = self.targets.first_failed_drives_queue(associations) {
            return Err(match self.step {
                Step::ReadingLabels => VolumeCreateError::Attach(alloc::vec![(target, error)]),
                _ => self.call_error(target, error.into()),
            });
        }
        while let Some(answer) = self.targets.next_answer(associations) {
            self.on_answer(answer)?;
        }
        while self.run_step(now, associations)? {}
        Ok(())
    }

    /// Handles the answer to a question.
    fn on_answer(&mut self, answer: TargetAnswer<Question>) -> Result<(), VolumeCreateError> {
        let TargetAnswer { target, purpose: question, cqe, page } = answer;
        let answer = cqe.status();
        if question == Question::Claim
            && let Some(dropping) = self.old_volumes_to_drop(target, cqe)
        {
            self.step = Step::DroppingOld(dropping);
            return Ok(());
        }
        match question {
            Question::Forget => return Ok(()),
            Question::ClaimOld(at) => {
                let claimed = answer.is_ok();
                self.old_volumes[at].state =
                    if claimed { OldState::Claimed } else { OldState::Nothing };
            }
            Question::Claim if answer.is(status::LOG_DIRECTORY_FULL) => {
                let volumes = cqe.result() as u32;
                return Err(VolumeCreateError::LogDirectoryFull { target, volumes });
            }
            Question::Claim if answer.is(status::LOG_TOO_SMALL) => {
                let (need, free) = (cqe.result() as u32, (cqe.result() >> 32) as u32);
                return Err(VolumeCreateError::LogTooSmall { target, need, free });
            }
            Question::Claim if answer.is(status::TOO_MANY_SLOTS) => {
                let (slots, most) = (self.config.slots, cqe.result() as u32);
                return Err(VolumeCreateError::TooManySlots { target, slots, most });
            }
            _ if !answer.is_ok() => {
                return Err(self.call_error(target, CallFailure::Status(answer)));
            }
            Question::Label(member) => {
                // Only the label itself matters here, so the identity of the drive is left out.
                let label = label_work::found([0; 16], None, &page, self.config.crc32c).label;
                if let Some(drives) = &mut self.drives {
                    drives.labels[member] = Some(label.ok());
                }
            }
            Question::OldStatus(at) => {
                let status = self.decode_status(target, &page)?;
                if status.owned {
                    let (member, volume) = self.first_member_of(self.old_volumes[at].volume);
                    return Err(VolumeCreateError::Owned { member, volume, owner: status.owner });
                }
                let old = &mut self.old_volumes[at];
                let is_behind = claim::is_behind(&status, old.generation);
                old.generation = old.generation.max(status.generation);
                (old.streams, old.slots) = (status.streams, status.slots);
                old.state = if status.log_lost {
                    OldState::Lost
                } else if status.known && !status.unlogged {
                    let guards = status.unrecovered || status.kept;
                    OldState::Partitions { guards, is_behind }
                } else {
                    OldState::Nothing
                };
            }
            Question::Status => {
                let slots = self.decode_status(target, &page)?.slots;
                self.config.check_slots_suffice(target, slots)?;
            }
            Question::WriteLabel => {
                self.write_in_flight = false;
                self.label_writes.pop_front();
            }
            Question::Claim | Question::Release => {}
        }
        Ok(())
    }

    /// Runs the present step as far as possible. Returns whether the next call may do more.
    fn run_step(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        match self.step {
            Step::Attaching => return self.continue_attaching(now, associations),
            Step::ReadingLabels => {
                if !self.read_labels(now, associations)? {
                    return Ok(false);
                }
                self.begin_old_statuses(now, associations)?;
                self.step = Step::ReadingOldStatuses;
            }
            Step::ReadingOldStatuses if !self.targets.has_pending_answers() => {
                self.send_forget_old(OldState::Lost, now, associations);
                self.step = Step::ForgettingLost;
            }
            Step::ForgettingLost if !self.targets.has_pending_answers() => {
                self.step = Step::MakingPartitions(0)
            }
            Step::DroppingOld(dropping) => {
                match (self.claim_next_old(dropping, now, associations), dropping) {
                    (true, _) => self.step = Step::ClaimingOld(dropping),
                    (false, Dropping::First { target, .. }) => {
                        self.step = Step::MakingPartitions(target);
                    }
                    (false, Dropping::All) => self.end_with_label(associations),
                }
            }
            Step::ClaimingOld(dropping) if !self.targets.has_pending_answers() => {
                self.send_forget_old(OldState::Claimed, now, associations);
                self.step = Step::ForgettingOld(dropping);
            }
            Step::ForgettingOld(dropping) if !self.targets.has_pending_answers() => {
                self.step = match dropping {
                    Dropping::First { target, .. } => Step::MakingPartitions(target),
                    Dropping::All => Step::DroppingOld(dropping),
                };
            }
            Step::MakingPartitions(target) if !self.targets.has_pending_answers() => {
                let next = self.targets_with_extension().find(|at| *at >= target);
                self.step = match next {
                    Some(target) => {
                        self.make_partitions(target, now, associations)?;
                        Step::MakingPartitions(target + 1)
                    }
                    None => {
                        self.count_slots(now, associations)?;
                        Step::CountingSlots
                    }
                };
            }
            Step::CountingSlots if !self.targets.has_pending_answers() => {
                if let Some(drives) = &mut self.drives {
                    drives.requested.fill(false);
                    drives.labels.fill(None);
                }
                self.step = Step::ReadingLabelsAgain;
            }
            Step::ReadingLabelsAgain => {
                if !self.read_labels(now, associations)? {
                    return Ok(false);
                }
                self.check_still_free()?;
                self.step = Step::WritingLabels;
            }
            Step::WritingLabels => {
                if !self.write_labels(now, associations)? {
                    return Ok(false);
                }
                for target in self.targets_with_extension().collect::<Vec<_>>() {
                    let release = release_command(self.config.volume, false);
                    let to = (target, ControlQueue::Admin);
                    let sent = self.targets.ask(
                        associations,
                        to,
                        release,
                        Data::None,
                        Question::Release,
                        now,
                    );
                    sent.map_err(|source| failed_call(target, RELEASING, source))?;
                }
                self.step = Step::Releasing;
            }
            // While the new volume has an owner, no other volume of its drives can be claimed.
            Step::Releasing if !self.targets.has_pending_answers() => {
                self.step = Step::DroppingOld(Dropping::All)
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Once all targets are attached, checks their drives, chooses the engine, and opens the drives
    /// queues. Returns whether that is done.
    fn continue_attaching(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let Some(attached) = self.targets.attach_results(associations) else { return Ok(false) };
        let controllers = attached.map_err(VolumeCreateError::Attach)?;
        let namespaces = namespaces(&self.config.places, &controllers)
            .map_err(|member| VolumeCreateError::NoNamespace { member })?;
        self.config.check_drives(&namespaces)?;
        let extensions = controllers.iter().map(|controller| controller.extension);
        let Choice { engine, fallback } =
            choose_for_new(self.config.engine, extensions).map_err(|lacking| {
                // An engine can be refused only if the caller insists on it.
                let engine = self.config.engine.unwrap_or(EngineKind::PREFERRED);
                VolumeCreateError::Engine { engine, lacking }
            })?;
        self.fallback = fallback;
        let members = namespaces.len();
        let (requested, labels) = (alloc::vec![false; members], alloc::vec![None; members]);
        let drives = Drives { controllers, namespaces, requested, labels };
        self.label = Some(self.config.label(&drives, engine)?);
        self.drives = Some(drives);
        if self.config.slots != 0 && self.keeps_log() {
            self.config.check_requested_slots()?;
        }
        self.targets.open_drives_queues(associations, now);
        self.step = Step::ReadingLabels;
        Ok(true)
    }

    /// Reads the labels of all members. Returns whether all have been read.
    fn read_labels(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let Some(drives) = &mut self.drives else { return Ok(false) };
        for (member, place) in self.config.places.iter().enumerate() {
            if drives.requested[member]
                || !self.targets.is_drives_queue_ready(associations, place.target)
            {
                continue;
            }
            let io = LabelIo::Read { member };
            labels::send(
                &mut self.targets,
                associations,
                &self.config.places,
                io,
                Question::Label(member),
                now,
            )
            .map_err(|(target, source)| failed_call(target, labels::READING, source))?;
            drives.requested[member] = true;
        }
        Ok(drives.labels.iter().all(Option::is_some))
    }

    /// Lists the old volumes, and asks their targets whether they have owners. If old volumes may not
    /// be given up, the first drive that belongs to one is an error.
    fn begin_old_statuses(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        for member in 0..self.config.places.len() {
            let Some(old) = self.present_label(member).cloned() else { continue };
            if !self.config.force {
                return Err(VolumeCreateError::InUse { member, volume: old.name });
            }
            if self.given_up.contains(&old.volume) {
                continue;
            }
            self.given_up.push(old.volume);
            for target in self.targets_with_extension().collect::<Vec<_>>() {
                let members = self.old_members(&old, target);
                if members.is_empty() {
                    continue;
                }
                let (volume, streams, slots) = (old.volume, old.streams, 0);
                let labels =
                    (0..self.config.places.len()).filter_map(|member| self.present_label(member));
                let same_volume = labels.filter(|label| label.volume == volume);
                let generation = same_volume.map(|label| label.generation).max().unwrap_or(0);
                let state = OldState::Nothing;
                self.old_volumes.push(OldVolume {
                    target,
                    volume,
                    members,
                    generation,
                    streams,
                    slots,
                    state,
                });
                let purpose = Question::OldStatus(self.old_volumes.len() - 1);
                let (to, data) = ((target, ControlQueue::Admin), Data::Read(STATUS_LEN as u32));
                self.targets
                    .ask(associations, to, status_command(volume), data, purpose, now)
                    .map_err(|source| failed_call(target, ASKING_OLD, source))?;
            }
        }
        Ok(())
    }

    /// The drives of an old volume on a target, as the claim of the old volume needs them. A crash
    /// during an earlier creation may have left a drive without the label. Such a drive is found by
    /// its identity (NGUID), first among the drives of the new volume.
    fn old_members(&self, old: &Label, target: usize) -> Vec<MemberNamespace> {
        let Some(drives) = &self.drives else { return Vec::new() };
        let mut places = alloc::vec![None; old.members.len()];
        for (place, label) in self.config.places.iter().zip(&drives.labels) {
            if let Some(Some(label)) = label
                && label.volume == old.volume
                && let Some(found) = places.get_mut(usize::from(label.index))
            {
                *found = Some(*place);
            }
        }
        let given = self.config.places.iter().zip(&drives.namespaces);
        for (found, id) in places.iter_mut().zip(&old.members).filter(|(found, _)| found.is_none())
        {
            let given = given.clone().find(|(_, namespace)| namespace.nguid == id.nguid);
            let others = || {
                let mut all = drives.controllers[target].namespaces.iter();
                let other = all.find(|namespace| namespace.nguid == id.nguid)?;
                Some(MemberPlace { target, nsid: other.nsid })
            };
            *found = given.map(|(place, _)| *place).or_else(others);
        }
        let here = |(at, place): (usize, Option<MemberPlace>)| {
            let place = place.filter(|place| place.target == target)?;
            Some(MemberNamespace { member: Member(at as u8), nsid: place.nsid })
        };
        places.into_iter().enumerate().filter_map(here).collect()
    }

    /// The old volumes of which one is dropped from a target's log after the target has refused the
    /// partitions; `None` if that cannot help. Each old volume is dropped only once.
    fn old_volumes_to_drop(&self, target: usize, refusal: Cqe) -> Option<Dropping> {
        let guards = refusal.status().is(status::GUARDED);
        let dropping = Dropping::First { target, only_guarding: guards };
        let may_help = guards || self.may_make_space(target, refusal);
        let mut olds = self.old_volumes.iter();
        (may_help && olds.any(|old| old.is_due(dropping))).then_some(dropping)
    }

    /// Whether a target's log that has refused the partitions may have enough space once all old
    /// volumes are dropped from it.
    fn may_make_space(&self, target: usize, refusal: Cqe) -> bool {
        let all = Dropping::First { target, only_guarding: false };
        let olds = || self.old_volumes.iter().filter(|old| old.is_due(all));
        let (answer, result) = (refusal.status(), refusal.result());
        if answer.is(status::LOG_TOO_SMALL) {
            // `free` is the size of the largest gap, so no gap is larger. `n` volumes that go leave
            // at most `n + 1` gaps around them.
            let (need, free) = (result as u32, (result >> 32) as u32);
            let gaps = (olds().count() as u64 + 1) * u64::from(free);
            u64::from(need) <= gaps + olds().map(OldVolume::bytes).sum::<u64>()
        } else if answer.is(status::TOO_MANY_SLOTS) {
            // `most` is the number of free slots divided by `streams`, rounded down. So this is the
            // largest number of free slots that the target may have.
            let (most, streams) = (result as u32, u64::from(self.config.streams));
            let left = streams * (u64::from(most) + 1) - 1;
            // 0: the target chooses the number. Its partitions are then whole pages.
            let slots = match self.config.slots {
                0 => self.config.min_slots(target).max(SLOTS_OF_A_PAGE),
                slots => slots,
            };
            streams * u64::from(slots) <= left + olds().map(OldVolume::slots).sum::<u64>()
        } else {
            answer.is(status::LOG_DIRECTORY_FULL)
        }
    }

    /// Claims the next old volume that is to be dropped, on all its targets. A target that refuses
    /// keeps the old volume. Returns whether there was one.
    ///
    /// Old volumes are claimed one after the other. After a creation that a crash has cut off, two
    /// old volumes may have the same drives, and a target refuses the claim of one while the other
    /// has an owner (T21).
    fn claim_next_old(
        &mut self,
        dropping: Dropping,
        now: u64,
        associations: &mut impl Associations,
    ) -> bool {
        let next = self.old_volumes.iter().find(|old| old.is_due(dropping));
        let Some(volume) = next.map(|old| old.volume) else { return false };
        for (at, old) in self.old_volumes.iter_mut().enumerate() {
            if old.volume != volume || !old.is_due(dropping) {
                continue;
            }
            // If no answer arrives, nothing more is done about this volume.
            old.state = OldState::Nothing;
            // Without a higher generation it cannot be claimed.
            let Some(generation) = old.generation.checked_add(1) else { continue };
            let claim = Claim::plain(volume, generation, old.streams, old.members.clone());
            let (bytes, to) = (claim.encode(), (old.target, ControlQueue::Admin));
            let (data, purpose) = (Data::Bytes(&bytes), Question::ClaimOld(at));
            // A target that can't get a command is lost, and the next question reports that.
            let _ = self.targets.ask(associations, to, claim_command(), data, purpose, now);
        }
        true
    }

    /// Sends the command to forget for every old volume that is in this state.
    fn send_forget_old(&mut self, state: OldState, now: u64, associations: &mut impl Associations) {
        for old in self.old_volumes.iter_mut().filter(|old| old.state == state) {
            old.state = OldState::Nothing;
            let to = (old.target, ControlQueue::Admin);
            let sqe = release_command(old.volume, true);
            // A target that can't get a command is lost, and the next question reports that.
            let _ = self.targets.ask(associations, to, sqe, Data::None, Question::Forget, now);
        }
    }

    /// Whether the volume's engine has entries in the targets' logs.
    fn keeps_log(&self) -> bool {
        self.label.as_ref().is_some_and(|label| label.engine.capabilities().keeps_log)
    }

    /// Claims the new volume on a target, which makes the partitions if the engine keeps a log.
    fn make_partitions(
        &mut self,
        target: usize,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        let claim = self.config.claim(target, self.keeps_log()).encode();
        self.may_have_partitions = true;
        let (to, data) = ((target, ControlQueue::Admin), Data::Bytes(&claim));
        let sent = self.targets.ask(associations, to, claim_command(), data, Question::Claim, now);
        sent.map_err(|source| failed_call(target, MAKING_PARTITIONS, source))
    }

    /// Asks each target for the number of slots in its partitions, if the volume has a log.
    fn count_slots(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        if !self.keeps_log() {
            return Ok(());
        }
        for target in 0..self.targets.len() {
            let (to, data) = ((target, ControlQueue::Admin), Data::Read(STATUS_LEN as u32));
            let sqe = status_command(self.config.volume);
            let sent = self.targets.ask(associations, to, sqe, data, Question::Status, now);
            sent.map_err(|source| failed_call(target, ASKING, source))?;
        }
        Ok(())
    }

    /// Checks that no other volume was made of the drives since the first reading of the labels. Then
    /// lists the writes of the new labels.
    fn check_still_free(&mut self) -> Result<(), VolumeCreateError> {
        let Some(label) = &self.label else { return Ok(()) };
        for member in 0..self.config.places.len() {
            if let Some(old) = self.present_label(member)
                && !self.given_up.contains(&old.volume)
            {
                return Err(VolumeCreateError::InUse { member, volume: old.name.clone() });
            }
            // The first copy replaces the older copy of the old label, and counts as newer than the
            // other. So a crash leaves the newest label of the old volume, or the new label. With an
            // earlier label of the old volume, an older copy of a log would count as the newest
            // (T24).
            let last = self.present_label(member).map_or(0, |old| old.sequence);
            let last = if last > u32::MAX - 2 { 0 } else { last };
            let copies = [last + 1, last + 2].map(|sequence| {
                let copy = Label { index: member as u16, sequence, ..label.clone() };
                (Label::block_of(sequence), copy.encode(self.config.crc32c))
            });
            self.label_writes.extend(labels::first_labels(member, copies));
        }
        Ok(())
    }

    /// Writes both copies of every label, one step after the other. Returns whether that is done.
    fn write_labels(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let Some(io) = self.label_writes.front() else { return Ok(true) };
        let target = self.config.places[labels::member_of(io)].target;
        let failed = |source| failed_call(target, labels::WRITING, source);
        if !self.write_in_flight && self.targets.is_drives_queue_ready(associations, target) {
            let (io, places) = (io.clone(), &self.config.places);
            labels::send(&mut self.targets, associations, places, io, Question::WriteLabel, now)
                .map_err(|(_, source)| failed(source))?;
            self.write_in_flight = true;
        }
        Ok(false)
    }

    /// Sends the command to forget a volume to every target. A target that does not know the volume
    /// answers with an error, which does not matter.
    fn send_forget(&mut self, volume: VolumeId, now: u64, associations: &mut impl Associations) {
        for target in self.targets_with_extension().collect::<Vec<_>>() {
            let (to, sqe) = ((target, ControlQueue::Admin), release_command(volume, true));
            // A target that can't get a command is lost, and the next question reports that.
            let _ = self.targets.ask(associations, to, sqe, Data::None, Question::Forget, now);
        }
    }

    /// Begins to undo the creation after it has failed with `error`: the targets forget the new
    /// volume if they may have partitions of it. [`advance`](Self::advance) then reports the error.
    fn clean_up_after_failure(
        &mut self,
        error: VolumeCreateError,
        now: u64,
        associations: &mut impl Associations,
    ) {
        self.targets.drop_pending_answers();
        // Once every label is written, the new volume exists, and keeps its partitions.
        let is_labelled = matches!(self.step, Step::Releasing);
        if self.may_have_partitions && !is_labelled {
            self.send_forget(self.config.volume, now, associations);
        }
        self.error = Some(error);
        self.step = Step::Failing;
    }

    /// Whether the new volume is made, and only old volumes have still to be dropped.
    fn is_new_volume_made(&self) -> bool {
        matches!(
            self.step,
            Step::DroppingOld(Dropping::All)
                | Step::ClaimingOld(Dropping::All)
                | Step::ForgettingOld(Dropping::All)
        )
    }

    /// Ends the creation with the new label as its result.
    fn end_with_label(&mut self, associations: &mut impl Associations) {
        self.targets.drop_pending_answers();
        self.targets.close_associations(associations);
        self.step = Step::Ended;
        self.result = self.label.take().map(Ok);
    }

    /// Decodes the volume status that a target has sent.
    fn decode_status(&self, target: usize, page: &[u8]) -> Result<VolumeStatus, VolumeCreateError> {
        let nonsense = CallFailure::Nonsense(Nonsense::VolumeStatus);
        VolumeStatus::decode(page).ok_or_else(|| self.call_error(target, nonsense))
    }

    /// The error that a lost or failing target causes at this step.
    fn call_error(&self, target: usize, source: CallFailure) -> VolumeCreateError {
        let doing = match self.step {
            Step::Attaching | Step::ReadingLabels | Step::ReadingLabelsAgain => labels::READING,
            Step::ReadingOldStatuses | Step::ForgettingLost => ASKING_OLD,
            Step::DroppingOld(_) | Step::ClaimingOld(_) | Step::ForgettingOld(_) => DROPPING_OLD,
            Step::MakingPartitions(_) => MAKING_PARTITIONS,
            Step::CountingSlots => ASKING,
            Step::WritingLabels => labels::WRITING,
            Step::Releasing | Step::Failing | Step::Ended => RELEASING,
        };
        failed_call(target, doing, source)
    }

    /// The targets that have the extension.
    fn targets_with_extension(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.targets.len()).filter(|target| self.has_extension(*target))
    }

    /// Whether a target has the extension.
    fn has_extension(&self, target: usize) -> bool {
        let controller = self.drives.as_ref().and_then(|drives| drives.controllers.get(target));
        controller.is_some_and(|controller| controller.extension.is_some())
    }

    /// The label that was read from a member's drive, if there was one.
    fn present_label(&self, member: usize) -> Option<&Label> {
        self.drives.as_ref()?.labels.get(member)?.as_ref()?.as_ref()
    }

    /// The first member whose drive belongs to an old volume, and the name of that volume.
    fn first_member_of(&self, volume: VolumeId) -> (usize, String) {
        let labels =
            (0..self.config.places.len()).filter_map(|at| Some((at, self.present_label(at)?)));
        let mut named = labels.filter(|(_, label)| label.volume == volume);
        named.next().map(|(at, label)| (at, label.name.clone())).unwrap_or_default()
    }
}

/// The fewest slots per stream that a target chooses: a partition of one page.
const SLOTS_OF_A_PAGE: u32 = (PARTITION_ALIGN / ENTRY_BYTES) as u32;

const ASKING: &str = "asking for the volume's state";
const ASKING_OLD: &str = "asking for the old volume's state";
const DROPPING_OLD: &str = "dropping the old volume from its log";
const MAKING_PARTITIONS: &str = "making space in its log";
const RELEASING: &str = "releasing the volume";

fn failed_call(target: usize, doing: &'static str, source: CallFailure) -> VolumeCreateError {
    VolumeCreateError::Call { target, doing, source }
}
