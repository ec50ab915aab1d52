//! The options of a creation, the checks that need no target's log, and the label and the claims
//! that follow from the options.

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_order::topology::{
    MemberInfo as MemberLayout, ServerInfo as ServerLayout, Topology, TopologyError,
};

use super::super::error::{VolumeCreateError, VolumeOptionsError};
use super::super::members::{MemberPlace, members_on};
use super::Drives;
use crate::initiator::attach::Namespace;
use crate::label::{DATA_START, Label, MEMBERS_MAX, MemberId, is_valid_name};
use crate::target::limits::{LOG_SLOTS_MAX, STREAM_SLOTS_MAX};
use crate::wire::{BLOCK_BYTES, Claim, STREAMS_MAX};

/// The generation with which a volume is made.
const FIRST_GENERATION: u32 = 1;
/// The most members on one target.
const MEMBERS_ON_TARGET_MAX: usize = 16;
/// The most blocks of a stripe unit.
const UNIT_BLOCKS_MAX: u32 = 1 << 20;

/// The fewest blocks of the prepare area for each stream: the largest request must fit, and another
/// one beside it.
const PREPARE_BLOCKS_MIN: u32 = 64;
/// The number of blocks of the prepare area that a stream gets without a choice of the caller: 4 MiB.
const PREPARE_BLOCKS_USEFUL: u32 = 1024;
/// Without a choice of the caller the prepare area takes this part of a drive at most.
const PREPARE_SHARE: u64 = 16;

/// The number of blocks of the smallest drive.
fn smallest_drive(namespaces: &[Namespace]) -> u64 {
    namespaces.iter().map(|namespace| namespace.blocks).min().unwrap_or(0)
}

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
    /// The engine of the volume; `None`: `rio` if it can run on every target, else `sync` (trap
    /// T17).
    pub engine: Option<EngineKind>,
    /// The number of log slots per stream and target; 0: as many as fit.
    pub slots: u32,
    /// The number of blocks of the prepare area on each drive, for engine `horae`; `None`: as many as
    /// are useful, 0: none.
    pub prepare_blocks: Option<u32>,
    /// Whether volumes to which the drives belong are given up with all their data. A volume that
    /// has an owner is never given up.
    pub force: bool,
    /// CRC32C, for the labels.
    pub crc32c: Crc32c,
}

impl VolumeCreationConfig {
    /// Checks all that can be checked before any target is asked.
    pub(super) fn check(&self) -> Result<(), VolumeCreateError> {
        if !is_valid_name(&self.name) {
            return Err(VolumeCreateError::Name);
        }
        if self.places.is_empty() || self.places.len() > MEMBERS_MAX {
            return Err(VolumeOptionsError::Members.into());
        }
        let mut targets = self.places.iter().map(|place| place.target);
        if targets.any(|target| self.member_count(target) > MEMBERS_ON_TARGET_MAX) {
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

    /// The number of the volume's members on a target.
    fn member_count(&self, target: usize) -> usize {
        self.places.iter().filter(|place| place.target == target).count()
    }

    /// Checks that a volume can use these namespaces, and that no two are the same.
    /// `namespaces[i]` is the namespace of member `i`.
    pub(super) fn check_drives(&self, namespaces: &[Namespace]) -> Result<(), VolumeCreateError> {
        let needed = DATA_START + u64::from(self.unit_blocks);
        for (member, (place, namespace)) in self.places.iter().zip(namespaces).enumerate() {
            for (earlier_place, earlier) in self.places.iter().zip(namespaces).take(member) {
                if earlier_place == place {
                    return Err(VolumeCreateError::DuplicateMember { member });
                }
                let has_nguid = namespace.nguid != [0; 16];
                if has_nguid && earlier.nguid == namespace.nguid {
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
    ///
    /// # Errors
    /// The members make no volume.
    pub(super) fn label(
        &self,
        drives: &Drives,
        engine: EngineKind,
    ) -> Result<Label, TopologyError> {
        let prepare_blocks = self.prepare_blocks_per_member(engine, &drives.namespaces);
        let data_blocks = self.data_blocks_per_member(prepare_blocks, &drives.namespaces);
        self.check_topology(data_blocks, drives.controllers.len())?;
        let keeps_log = engine.capabilities().keeps_log;
        let member_id = |(place, namespace): (&MemberPlace, &Namespace)| {
            let extension = drives.controllers[place.target].extension;
            let log_region = extension.filter(|_| keeps_log).map(|extension| extension.region);
            MemberId { nguid: namespace.nguid, region: log_region.unwrap_or([0; 16]) }
        };
        Ok(Label {
            volume: self.volume,
            name: self.name.clone(),
            block_size: BLOCK_BYTES as u32,
            unit_blocks: self.unit_blocks,
            data_blocks,
            prepare_blocks,
            streams: self.streams,
            engine,
            index: 0,
            generation: FIRST_GENERATION,
            sequence: 1,
            members: self.places.iter().zip(&drives.namespaces).map(member_id).collect(),
        })
    }

    /// The number of blocks of the prepare area on each member. Without a choice of the caller each
    /// stream gets [`PREPARE_BLOCKS_USEFUL`], and the area at most one
    /// [`PREPARE_SHARE`]th of the smallest drive. A drive too small for that has none.
    fn prepare_blocks_per_member(&self, engine: EngineKind, namespaces: &[Namespace]) -> u32 {
        if engine != EngineKind::Horae {
            return 0;
        }
        let streams = u32::from(self.streams);
        let chosen = self.prepare_blocks.unwrap_or_else(|| {
            let share = smallest_drive(namespaces) / PREPARE_SHARE;
            let useful = streams * PREPARE_BLOCKS_USEFUL;
            useful.min(u32::try_from(share).unwrap_or(u32::MAX))
        });
        let is_usable = chosen >= streams * PREPARE_BLOCKS_MIN;
        if is_usable { chosen / streams * streams } else { 0 }
    }

    /// Checks the size of the prepare area that the caller requests for this engine.
    pub(super) fn check_prepare_area(&self, engine: EngineKind) -> Result<(), VolumeCreateError> {
        let needed = u32::from(self.streams) * PREPARE_BLOCKS_MIN;
        match self.prepare_blocks {
            None | Some(0) => Ok(()),
            Some(_) if engine != EngineKind::Horae => {
                Err(VolumeOptionsError::PrepareArea { engine }.into())
            }
            Some(blocks) if blocks < needed => {
                Err(VolumeCreateError::PrepareAreaTooSmall { blocks, needed })
            }
            Some(_) => Ok(()),
        }
    }

    /// The number of data blocks on each member: the whole stripe units of the smallest drive.
    fn data_blocks_per_member(&self, prepare_blocks: u32, namespaces: &[Namespace]) -> u64 {
        let unit_blocks = u64::from(self.unit_blocks);
        let taken = DATA_START + u64::from(prepare_blocks);
        smallest_drive(namespaces).saturating_sub(taken) / unit_blocks * unit_blocks
    }

    /// Checks that the members make a volume, as opening the volume will check it.
    fn check_topology(&self, data_blocks: u64, targets: usize) -> Result<(), TopologyError> {
        let members = self.places.iter().map(|place| MemberLayout {
            server: place.target as u16,
            start: DATA_START,
            blocks: data_blocks,
            request_blocks_max: 1,
            volatile: false,
        });
        let servers = alloc::vec![ServerLayout { slots: 0 }; targets];
        Topology::new(members.collect(), servers, self.unit_blocks).map(|_| ())
    }

    /// Checks the number of slots that the caller requests. The targets check it too, but by then
    /// an old volume may have been dropped.
    pub(super) fn check_requested_slots(&self) -> Result<(), VolumeCreateError> {
        let streams_share = LOG_SLOTS_MAX / u64::from(self.streams);
        let most = u32::try_from(streams_share).unwrap_or(u32::MAX).min(STREAM_SLOTS_MAX);
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
    pub(super) fn check_slots_suffice(
        &self,
        target: usize,
        slots: u32,
    ) -> Result<(), VolumeCreateError> {
        let needed = self.min_slots(target);
        if slots < needed {
            return Err(VolumeCreateError::TooFewSlots { target, slots, needed });
        }
        Ok(())
    }

    /// The fewest slots per stream on a target. The log reserves slots for the flush entries of
    /// each member, and a stream needs more slots than these (trap T13).
    pub(super) fn min_slots(&self, target: usize) -> u32 {
        2 * self.member_count(target) as u32 + 2
    }

    /// The claim that makes partitions in a target's log.
    pub(super) fn claim(&self, target: usize, keeps_log: bool) -> Claim {
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
