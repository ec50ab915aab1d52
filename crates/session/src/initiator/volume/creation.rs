//! Volume creation: check everything first, then make partitions in the logs, then label the
//! drives.
//!
//! ```text
//! attaching → labels → (asking for old volumes) → making partitions → counting slots
//!           → labels again → writing labels → releasing → (dropping old volumes) → over
//! ```
//!
//! The volumes that the drives belonged to keep their partitions until the new labels are written.
//! So a crash leaves the old volume or the new one, or, between two labels, drives that make no
//! volume. Only if a log has no space beside the old volume, or the old volume waits for recovery
//! there, it is dropped from that log first. A crash just after that leaves the old volume with a
//! log that is lost. So does a creation that fails after that.
//!
//! A creation that cannot succeed should leave the old volume its log. So the checks that need no
//! log come before the first claim. Where a log is full, an old volume is dropped first only if, by
//! the numbers in the target's refusal, that may make enough space. The space may still be too
//! small, because the free bytes may not be adjacent. A volume that keeps its drives guarded is
//! dropped first in any case: the space is not known until that volume is dropped.
//!
//! Only its owner may drop a volume, so an old volume is claimed first (T18). No owner is displaced
//! (T8). An old volume that cannot be dropped stays in the log: the new volume does not depend on
//! it.
//!
//! The program drives it like a [`VolumeOpening`](super::opening::VolumeOpening). It has no
//! deadline of its own. When it fails after partitions were made, it asks the targets to forget the
//! volume.

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::command::Cqe;
use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::engine::EngineKind;
use riopipe_order::entry::ENTRY_BYTES;
use riopipe_order::log_region::{MemberNamespace, PARTITION_ALIGN};
use riopipe_order::ordering_log::partition_bytes;
use riopipe_order::topology::{
    MemberInfo as MemberLayout, ServerInfo as ServerLayout, Topology, TopologyError,
};

use super::calls::{Associations, Targets};
use super::error::{CallFailure, Nonsense, VolumeCreateError, VolumeOptionsError};
use super::labels;
use super::members::{MemberPlace, members_on, namespaces};
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
    /// Its name.
    pub name: String,
    /// Its id: random, so that no two volumes have the same.
    pub volume: VolumeId,
    /// The places of its members, in its order.
    pub places: Vec<MemberPlace>,
    /// The number of its targets.
    pub targets: usize,
    /// The blocks of a stripe unit.
    pub unit_blocks: u32,
    /// The number of streams.
    pub streams: u16,
    /// The engine of the volume; `None`: `rio` where every target can, else `sync` (T17).
    pub engine: Option<EngineKind>,
    /// The number of log slots per stream and target; 0: as many as fit.
    pub slots: u32,
    /// Whether to give up the volumes that the drives belong to, with all their data, unless they
    /// have an owner.
    pub force: bool,
    /// CRC32C, for the labels.
    pub crc32c: Crc32c,
}

/// The purpose of a question to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    /// A member's label.
    Label(usize),
    /// The state of an old volume on a target.
    OldStatus(usize),
    /// To become the owner of an old volume on a target.
    ClaimOld(usize),
    /// To forget a volume. The status of the answer does not matter.
    Forget,
    /// Partitions in its log.
    Claim,
    /// The partitions that it has made.
    Status,
    /// A step of writing a label.
    Write,
    /// To release the volume.
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Attaching,
    /// The labels are read, to check whether the drives belong to a volume.
    Labels,
    /// The targets of drives that belong to a volume are asked whether it has an owner.
    OldStatuses,
    /// The targets forget old volumes whose log is lost. Those cannot be claimed.
    ForgettingLost,
    /// The targets make partitions in their logs, one after the other, from this one on.
    MakingPartitions(usize),
    CountingSlots,
    /// The labels are read again: between the first reading and the making of partitions, another
    /// volume may have been made of the same drives. From then on no other initiator writes there.
    LabelsAgain,
    WritingLabels,
    Releasing,
    /// Old volumes are dropped, one after the other.
    DroppingOld(Dropping),
    /// One is being claimed.
    ClaimingOld(Dropping),
    /// The targets on which it was claimed forget it.
    ForgettingOld(Dropping),
    /// Creation has failed, and the targets forget the volume.
    Failing,
    Over,
}

/// The old volumes that are dropped now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dropping {
    /// One, on a target whose log has refused the partitions. Then that target is asked again,
    /// because it may be enough to drop this one. `guards`: only one that keeps its drives guarded.
    First { target: usize, guards: bool },
    /// All, on all targets: the new volume is made.
    All,
}

/// The drives, once their targets have reported them.
#[derive(Debug)]
struct Drives {
    controllers: Vec<Controller>,
    namespaces: Vec<Namespace>,
    /// For each member, whether its label has been requested.
    asked: Vec<bool>,
    /// For each member whose label has been read, the label of the volume that it belongs to.
    labels: Vec<Option<Option<Label>>>,
}

/// A volume that drives belonged to, on one target.
#[derive(Debug)]
struct Old {
    target: usize,
    volume: VolumeId,
    /// Its drives there.
    members: Vec<MemberNamespace>,
    /// Its largest generation that is known.
    generation: u32,
    streams: u16,
    /// The log slots per stream.
    slots: u32,
    state: OldState,
}

impl Old {
    /// Whether it is one of those to be dropped.
    fn is_due(&self, dropping: Dropping) -> bool {
        let OldState::Partitions { guards } = self.state else { return false };
        match dropping {
            Dropping::First { target, guards: guarding } => {
                self.target == target && (guards || !guarding)
            }
            Dropping::All => true,
        }
    }

    /// The log slots of all its streams.
    fn slots(&self) -> u64 {
        u64::from(self.streams) * u64::from(self.slots)
    }

    /// The bytes of its partitions. The counts are a target's, and any may come (T18).
    fn bytes(&self) -> u64 {
        let entries = u64::from(self.slots) * ENTRY_BYTES as u64;
        let partition = partition_bytes(0) as u64 + entries;
        u64::from(self.streams) * partition.next_multiple_of(PARTITION_ALIGN as u64)
    }
}

/// The state of an old volume in the log of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OldState {
    /// Nothing, as far as is known.
    Nothing,
    /// Partitions that cannot be used. They are forgotten without a claim.
    Lost,
    /// Partitions. `guards`: something in them waits for recovery, and keeps the drives guarded
    /// (T21).
    Partitions { guards: bool },
    /// Partitions of a volume that has been claimed.
    Claimed,
}

/// The creation of a volume; see the [module](self).
#[derive(Debug)]
pub struct VolumeCreation {
    config: VolumeCreationConfig,
    targets: Targets<Question>,
    step: Step,
    drives: Option<Drives>,
    label: Option<Label>,
    /// The volumes that the drives belonged to, and that are given up.
    given_up: Vec<VolumeId>,
    /// The same volumes, by target.
    olds: Vec<Old>,
    /// The writes still to be done, and whether one of their steps is in flight.
    writes: VecDeque<LabelIo>,
    writing: bool,
    /// Whether partitions may have been made on some target. If the creation fails, the targets
    /// must then forget them.
    may_have_partitions: bool,
    fallback: Option<Lacking>,
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

    /// Whether the namespaces are of a kind that a volume can use, and all different.
    fn check_drives(&self, namespaces: &[Namespace]) -> Result<(), VolumeCreateError> {
        let needed = DATA_START + u64::from(self.unit_blocks);
        for (member, (place, namespace)) in self.places.iter().zip(namespaces).enumerate() {
            let before = self.places.iter().zip(namespaces).take(member);
            for (earlier, other) in before {
                if earlier == place {
                    return Err(VolumeCreateError::Twice { member });
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
    fn check_slots(&self) -> Result<(), VolumeCreateError> {
        let share = LOG_SLOTS_MAX / u64::from(self.streams);
        let most = u32::try_from(share).unwrap_or(u32::MAX).min(STREAM_SLOTS_MAX);
        let slots = self.slots;
        for target in 0..self.targets {
            self.check_enough(target, slots)?;
            if slots > most {
                return Err(VolumeCreateError::TooManySlots { target, slots, most });
            }
        }
        Ok(())
    }

    /// Checks that `have` slots per stream on a target are enough.
    fn check_enough(&self, target: usize, have: u32) -> Result<(), VolumeCreateError> {
        let need = self.fewest_slots(target);
        if have < need {
            return Err(VolumeCreateError::TooFewSlots { target, have, need });
        }
        Ok(())
    }

    /// The fewest slots per stream on a target: more than the slots that are reserved for flush
    /// entries (T13).
    fn fewest_slots(&self, target: usize) -> u32 {
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
            olds: Vec::new(),
            writes: VecDeque::new(),
            writing: false,
            may_have_partitions: false,
            fallback: None,
            error: None,
            result: None,
            config,
        })
    }

    /// The reason why the volume is made for engine `sync` although the caller did not request
    /// that, if so, once (T17).
    pub fn take_fallback(&mut self) -> Option<Lacking> {
        self.fallback.take()
    }

    /// The result, once: the label of member 0.
    pub fn take_result(&mut self) -> Option<Result<Label, VolumeCreateError>> {
        self.result.take()
    }

    /// Continues with the answers that have arrived.
    pub fn advance(&mut self, now: u64, a: &mut impl Associations) {
        match self.go_on(now, a) {
            // The volume is made. A target that fails now only keeps its partitions of an old
            // volume.
            Err(_) if self.is_made() => self.finish(a),
            Err(error) => self.fail(error, now, a),
            Ok(()) => {}
        }
        if self.step == Step::Failing {
            while self.targets.answer(a).is_some() {}
            self.targets.forget_lost(a);
            if !self.targets.is_owed() {
                self.targets.hang_up(a);
                self.step = Step::Over;
                self.result = self.error.take().map(Err);
            }
        }
    }

    /// Handles failures and answers, and then does everything that can be done now.
    fn go_on(&mut self, now: u64, a: &mut impl Associations) -> Result<(), VolumeCreateError> {
        if matches!(self.step, Step::Failing | Step::Over) {
            return Ok(());
        }
        if self.step != Step::Attaching
            && let Some((target, error)) = self.targets.lost(a)
        {
            return Err(self.call_failed(target, error.into()));
        }
        if let Some((target, error)) = self.targets.drives_failed(a) {
            return Err(match self.step {
                Step::Labels => VolumeCreateError::Attach(alloc::vec![(target, error)]),
                _ => self.call_failed(target, error.into()),
            });
        }
        while let Some((target, question, cqe, page)) = self.targets.answer(a) {
            self.take(target, question, cqe, &page)?;
        }
        while self.step(now, a)? {}
        Ok(())
    }

    /// Takes in an answer.
    fn take(
        &mut self,
        target: usize,
        question: Question,
        cqe: Cqe,
        page: &[u8],
    ) -> Result<(), VolumeCreateError> {
        let answer = cqe.status();
        if question == Question::Claim
            && let Some(dropping) = self.may_drop_old(target, cqe)
        {
            self.step = Step::DroppingOld(dropping);
            return Ok(());
        }
        match question {
            Question::Forget => return Ok(()),
            Question::ClaimOld(at) => {
                let claimed = answer.is_ok();
                self.olds[at].state = if claimed { OldState::Claimed } else { OldState::Nothing };
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
                return Err(self.call_failed(target, CallFailure::Status(answer)));
            }
            Question::Label(member) => {
                // Only the label itself matters here, so the identity of the drive is left out.
                let label = label_work::found([0; 16], None, page, self.config.crc32c).label;
                if let Some(drives) = &mut self.drives {
                    drives.labels[member] = Some(label.ok());
                }
            }
            Question::OldStatus(at) => {
                let status = self.decoded(target, page)?;
                if status.owned {
                    let (member, volume) = self.name_of(self.olds[at].volume);
                    return Err(VolumeCreateError::Owned { member, volume, owner: status.owner });
                }
                let old = &mut self.olds[at];
                old.generation = old.generation.max(status.generation);
                (old.streams, old.slots) = (status.streams, status.slots);
                old.state = if status.log_lost {
                    OldState::Lost
                } else if status.known && !status.unlogged {
                    OldState::Partitions { guards: status.unrecovered || status.kept }
                } else {
                    OldState::Nothing
                };
            }
            Question::Status => {
                let have = self.decoded(target, page)?.slots;
                self.config.check_enough(target, have)?;
            }
            Question::Write => {
                self.writing = false;
                self.writes.pop_front();
            }
            Question::Claim | Question::Release => {}
        }
        Ok(())
    }

    /// Does all that can be done now. Returns whether there may be more to do.
    fn step(&mut self, now: u64, a: &mut impl Associations) -> Result<bool, VolumeCreateError> {
        match self.step {
            Step::Attaching => return self.attach(now, a),
            Step::Labels => {
                if !self.read_labels(now, a)? {
                    return Ok(false);
                }
                self.ask_for_owners(now, a)?;
                self.step = Step::OldStatuses;
            }
            Step::OldStatuses if !self.targets.is_owed() => {
                self.forget_olds(OldState::Lost, now, a);
                self.step = Step::ForgettingLost;
            }
            Step::ForgettingLost if !self.targets.is_owed() => {
                self.step = Step::MakingPartitions(0)
            }
            Step::DroppingOld(dropping) => {
                match (self.claim_next_old(dropping, now, a), dropping) {
                    (true, _) => self.step = Step::ClaimingOld(dropping),
                    (false, Dropping::First { target, .. }) => {
                        self.step = Step::MakingPartitions(target);
                    }
                    (false, Dropping::All) => self.finish(a),
                }
            }
            Step::ClaimingOld(dropping) if !self.targets.is_owed() => {
                self.forget_olds(OldState::Claimed, now, a);
                self.step = Step::ForgettingOld(dropping);
            }
            Step::ForgettingOld(dropping) if !self.targets.is_owed() => {
                self.step = match dropping {
                    Dropping::First { target, .. } => Step::MakingPartitions(target),
                    Dropping::All => Step::DroppingOld(dropping),
                };
            }
            Step::MakingPartitions(target) if !self.targets.is_owed() => {
                let next = self.speaking().find(|at| *at >= target);
                self.step = match next {
                    Some(target) => {
                        self.make_partitions(target, now, a)?;
                        Step::MakingPartitions(target + 1)
                    }
                    None => {
                        self.count_slots(now, a)?;
                        Step::CountingSlots
                    }
                };
            }
            Step::CountingSlots if !self.targets.is_owed() => {
                if let Some(drives) = &mut self.drives {
                    drives.asked.fill(false);
                    drives.labels.fill(None);
                }
                self.step = Step::LabelsAgain;
            }
            Step::LabelsAgain => {
                if !self.read_labels(now, a)? {
                    return Ok(false);
                }
                self.check_still_free()?;
                self.step = Step::WritingLabels;
            }
            Step::WritingLabels => {
                if !self.write_labels(now, a)? {
                    return Ok(false);
                }
                for target in self.speaking().collect::<Vec<_>>() {
                    let release = release_command(self.config.volume, false);
                    let to = (target, ControlQueue::Admin);
                    let asked =
                        self.targets.ask(a, to, release, Data::None, Question::Release, now);
                    asked.map_err(|source| call(target, RELEASING, source))?;
                }
                self.step = Step::Releasing;
            }
            // While the new volume has an owner, no other volume of its drives can be claimed.
            Step::Releasing if !self.targets.is_owed() => {
                self.step = Step::DroppingOld(Dropping::All)
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Once all targets are attached, checks their drives, chooses the engine, and opens the queues
    /// to the drives. Returns whether that is done.
    fn attach(&mut self, now: u64, a: &mut impl Associations) -> Result<bool, VolumeCreateError> {
        let Some(attached) = self.targets.attached(a) else { return Ok(false) };
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
        let (asked, labels) = (alloc::vec![false; members], alloc::vec![None; members]);
        let drives = Drives { controllers, namespaces, asked, labels };
        self.label = Some(self.config.label(&drives, engine)?);
        self.drives = Some(drives);
        if self.config.slots != 0 && self.keeps_log() {
            self.config.check_slots()?;
        }
        self.targets.open_drives(a, now);
        self.step = Step::Labels;
        Ok(true)
    }

    /// Reads the labels of all members. Returns whether all have been read.
    fn read_labels(
        &mut self,
        now: u64,
        a: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let Some(drives) = &mut self.drives else { return Ok(false) };
        for (member, place) in self.config.places.iter().enumerate() {
            if drives.asked[member] || !self.targets.is_ready(a, place.target) {
                continue;
            }
            let io = LabelIo::Read { member };
            labels::ask(
                &mut self.targets,
                a,
                &self.config.places,
                io,
                Question::Label(member),
                now,
            )
            .map_err(|(target, source)| call(target, labels::READING, source))?;
            drives.asked[member] = true;
        }
        Ok(drives.labels.iter().all(Option::is_some))
    }

    /// Refuses drives that belong to a volume. If that volume is to be given up, asks whether it
    /// has an owner.
    fn ask_for_owners(
        &mut self,
        now: u64,
        a: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        for member in 0..self.config.places.len() {
            let Some(old) = self.old(member).cloned() else { continue };
            if !self.config.force {
                return Err(VolumeCreateError::InUse { member, volume: old.name });
            }
            if self.given_up.contains(&old.volume) {
                continue;
            }
            self.given_up.push(old.volume);
            for target in self.speaking().collect::<Vec<_>>() {
                let members = self.old_members(&old, target);
                if members.is_empty() {
                    continue;
                }
                let (volume, streams, slots) = (old.volume, old.streams, 0);
                let labels = (0..self.config.places.len()).filter_map(|member| self.old(member));
                let same = labels.filter(|label| label.volume == volume);
                let generation = same.map(|label| label.generation).max().unwrap_or(0);
                let state = OldState::Nothing;
                self.olds.push(Old { target, volume, members, generation, streams, slots, state });
                let what = Question::OldStatus(self.olds.len() - 1);
                let (to, data) = ((target, ControlQueue::Admin), Data::Read(STATUS_LEN as u32));
                self.targets
                    .ask(a, to, status_command(volume), data, what, now)
                    .map_err(|source| call(target, ASKING_OLD, source))?;
            }
        }
        Ok(())
    }

    /// The drives of an old volume on a target, as its claim names them. A drive without the label
    /// is found by its identity, first among the drives of the new volume: a crash may have come
    /// before its label was written.
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

    /// After a target has refused the partitions: which old volume is dropped from its log, if that
    /// may help. Each is dropped once.
    fn may_drop_old(&self, target: usize, refusal: Cqe) -> Option<Dropping> {
        let guards = refusal.status().is(status::GUARDED);
        let dropping = Dropping::First { target, guards };
        let may_help = guards || self.may_make_space(target, refusal);
        let mut olds = self.olds.iter();
        (may_help && olds.any(|old| old.is_due(dropping))).then_some(dropping)
    }

    /// Whether the log of a target that has refused the partitions may have space once the old
    /// volumes are dropped from it.
    fn may_make_space(&self, target: usize, refusal: Cqe) -> bool {
        let all = Dropping::First { target, guards: false };
        let olds = || self.olds.iter().filter(|old| old.is_due(all));
        let (answer, result) = (refusal.status(), refusal.result());
        if answer.is(status::LOG_TOO_SMALL) {
            // `free` is the largest gap. Each volume that goes joins two gaps.
            let (need, free) = (result as u32, (result >> 32) as u32);
            let gaps = (olds().count() as u64 + 1) * u64::from(free);
            u64::from(need) <= gaps + olds().map(Old::bytes).sum::<u64>()
        } else if answer.is(status::TOO_MANY_SLOTS) {
            // The target's number of slots for each stream is rounded down.
            let (most, streams) = (result as u32, u64::from(self.config.streams));
            let left = streams * (u64::from(most) + 1) - 1;
            // A target that chooses gives whole pages.
            let slots = match self.config.slots {
                0 => self.config.fewest_slots(target).max(SLOTS_OF_A_PAGE),
                slots => slots,
            };
            streams * u64::from(slots) <= left + olds().map(Old::slots).sum::<u64>()
        } else {
            answer.is(status::LOG_DIRECTORY_FULL)
        }
    }

    /// Claims the next old volume that is to be dropped. A target that refuses keeps it. Only one
    /// at a time: after a creation that was cut off, two old volumes may have the same drives, and
    /// the owner of one keeps the other from being claimed (T21). Returns whether there was one.
    fn claim_next_old(&mut self, dropping: Dropping, now: u64, a: &mut impl Associations) -> bool {
        let next = self.olds.iter().find(|old| old.is_due(dropping));
        let Some(volume) = next.map(|old| old.volume) else { return false };
        for (at, old) in self.olds.iter_mut().enumerate() {
            if old.volume != volume || !old.is_due(dropping) {
                continue;
            }
            // The state until the target has answered. It stays if no answer comes.
            old.state = OldState::Nothing;
            let Some(generation) = old.generation.checked_add(1) else { continue };
            let claim = Claim::plain(volume, generation, old.streams, old.members.clone());
            let (bytes, to) = (claim.encode(), (old.target, ControlQueue::Admin));
            let (data, what) = (Data::Bytes(&bytes), Question::ClaimOld(at));
            let _ = self.targets.ask(a, to, claim_command(), data, what, now);
        }
        true
    }

    /// Makes the targets forget the old volumes in this state.
    fn forget_olds(&mut self, state: OldState, now: u64, a: &mut impl Associations) {
        for old in self.olds.iter_mut().filter(|old| old.state == state) {
            old.state = OldState::Nothing;
            let to = (old.target, ControlQueue::Admin);
            let sqe = release_command(old.volume, true);
            // A target that can't get a command is lost, and the next question reports that.
            let _ = self.targets.ask(a, to, sqe, Data::None, Question::Forget, now);
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
        a: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        let claim = self.config.claim(target, self.keeps_log()).encode();
        self.may_have_partitions = true;
        let (to, data) = ((target, ControlQueue::Admin), Data::Bytes(&claim));
        let asked = self.targets.ask(a, to, claim_command(), data, Question::Claim, now);
        asked.map_err(|source| call(target, MAKING_PARTITIONS, source))
    }

    /// Asks each target for the number of slots in its partitions, if the volume has a log.
    fn count_slots(
        &mut self,
        now: u64,
        a: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        if !self.keeps_log() {
            return Ok(());
        }
        for target in 0..self.targets.len() {
            let (to, data) = ((target, ControlQueue::Admin), Data::Read(STATUS_LEN as u32));
            let sqe = status_command(self.config.volume);
            let asked = self.targets.ask(a, to, sqe, data, Question::Status, now);
            asked.map_err(|source| call(target, ASKING, source))?;
        }
        Ok(())
    }

    /// Checks that no other volume was made of the drives meanwhile, then lists the writes to be
    /// done.
    fn check_still_free(&mut self) -> Result<(), VolumeCreateError> {
        let Some(label) = &self.label else { return Ok(()) };
        for member in 0..self.config.places.len() {
            if let Some(old) = self.old(member)
                && !self.given_up.contains(&old.volume)
            {
                return Err(VolumeCreateError::InUse { member, volume: old.name.clone() });
            }
            let copies = [1, 2].map(|sequence| {
                let copy = Label { index: member as u16, sequence, ..label.clone() };
                (Label::block_of(sequence), copy.encode(self.config.crc32c))
            });
            self.writes.extend(labels::first_labels(member, copies));
        }
        Ok(())
    }

    /// Writes both copies of every label, one step after the other. Returns whether that is done.
    fn write_labels(
        &mut self,
        now: u64,
        a: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let Some(io) = self.writes.front() else { return Ok(true) };
        let target = self.config.places[labels::member_of(io)].target;
        let failed = |source| call(target, labels::WRITING, source);
        if !self.writing && self.targets.is_ready(a, target) {
            let (io, places) = (io.clone(), &self.config.places);
            labels::ask(&mut self.targets, a, places, io, Question::Write, now)
                .map_err(|(_, source)| failed(source))?;
            self.writing = true;
        }
        Ok(false)
    }

    /// Makes the targets forget a volume. A target that never knew it reports that, which has the
    /// same result.
    fn forget(&mut self, volume: VolumeId, now: u64, a: &mut impl Associations) {
        for target in self.speaking().collect::<Vec<_>>() {
            let (to, sqe) = ((target, ControlQueue::Admin), release_command(volume, true));
            // A target that can't get a command is lost, and the next question reports that.
            let _ = self.targets.ask(a, to, sqe, Data::None, Question::Forget, now);
        }
    }

    /// Creation has failed: the targets must forget the volume.
    fn fail(&mut self, error: VolumeCreateError, now: u64, a: &mut impl Associations) {
        self.targets.forget();
        // Once every label is written, the volume exists, and keeps its partitions.
        let is_labelled = matches!(self.step, Step::Releasing);
        if self.may_have_partitions && !is_labelled {
            self.forget(self.config.volume, now, a);
        }
        self.error = Some(error);
        self.step = Step::Failing;
    }

    /// Whether the volume is made, and only old ones are left to be dropped.
    fn is_made(&self) -> bool {
        matches!(
            self.step,
            Step::DroppingOld(Dropping::All)
                | Step::ClaimingOld(Dropping::All)
                | Step::ForgettingOld(Dropping::All)
        )
    }

    /// The volume is made.
    fn finish(&mut self, a: &mut impl Associations) {
        self.targets.forget();
        self.targets.hang_up(a);
        self.step = Step::Over;
        self.result = self.label.take().map(Ok);
    }

    /// The volume status that a target has sent.
    fn decoded(&self, target: usize, page: &[u8]) -> Result<VolumeStatus, VolumeCreateError> {
        let nonsense = CallFailure::Nonsense(Nonsense::VolumeStatus);
        VolumeStatus::decode(page).ok_or_else(|| self.call_failed(target, nonsense))
    }

    /// The error that a lost or failing target causes at this step.
    fn call_failed(&self, target: usize, source: CallFailure) -> VolumeCreateError {
        let doing = match self.step {
            Step::Attaching | Step::Labels | Step::LabelsAgain => labels::READING,
            Step::OldStatuses | Step::ForgettingLost => ASKING_OLD,
            Step::DroppingOld(_) | Step::ClaimingOld(_) | Step::ForgettingOld(_) => DROPPING_OLD,
            Step::MakingPartitions(_) => MAKING_PARTITIONS,
            Step::CountingSlots => ASKING,
            Step::WritingLabels => labels::WRITING,
            Step::Releasing | Step::Failing | Step::Over => RELEASING,
        };
        call(target, doing, source)
    }

    /// The targets that have the extension.
    fn speaking(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.targets.len()).filter(|target| self.speaks(*target))
    }

    /// Whether a target has the extension.
    fn speaks(&self, target: usize) -> bool {
        let controller = self.drives.as_ref().and_then(|drives| drives.controllers.get(target));
        controller.is_some_and(|controller| controller.extension.is_some())
    }

    /// The label of the volume that a member belongs to.
    fn old(&self, member: usize) -> Option<&Label> {
        self.drives.as_ref()?.labels.get(member)?.as_ref()?.as_ref()
    }

    /// The first member that belongs to an old volume, and the name of that volume.
    fn name_of(&self, volume: VolumeId) -> (usize, String) {
        let labels = (0..self.config.places.len()).filter_map(|at| Some((at, self.old(at)?)));
        let mut named = labels.filter(|(_, label)| label.volume == volume);
        named.next().map(|(at, label)| (at, label.name.clone())).unwrap_or_default()
    }
}

/// The slots of a stream whose partition is as short as a target chooses.
const SLOTS_OF_A_PAGE: u32 = (PARTITION_ALIGN / ENTRY_BYTES) as u32;

const ASKING: &str = "asking for the volume's state";
const ASKING_OLD: &str = "asking for the old volume's state";
const DROPPING_OLD: &str = "dropping the old volume from its log";
const MAKING_PARTITIONS: &str = "making space in its log";
const RELEASING: &str = "releasing the volume";

fn call(target: usize, doing: &'static str, source: CallFailure) -> VolumeCreateError {
    VolumeCreateError::Call { target, doing, source }
}
