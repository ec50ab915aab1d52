//! The drives of a volume: finding them on their targets, checking them against their labels, and
//! deriving the volume's layout from them.

use alloc::vec::Vec;

use riopipe_order::attribute::Member;
use riopipe_order::engine::EngineKind;
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::topology::{
    MemberInfo as MemberLayout, ServerInfo as ServerLayout, Topology, TopologyError,
};
use riopipe_order::write_order::DriveOrder;

use crate::claim::{is_behind, lease_ms};
use crate::engine_choice::MemberOrder;
use crate::initiator::attach::{Controller, Namespace};
use crate::initiator::known::{DriveOfVolume, KnownTarget};
use crate::initiator::opening::{OpeningConfig, OpeningMember, OpeningServer};
use crate::label::{AssembleError, DATA_START, Found, Label, log_due};
use crate::label_work;
use crate::wire::{BLOCK_BYTES, Claim, ORDERED_BYTES_MAX, VolumeStatus};

/// The layout of a volume's blocks on its drives, beside the part that the labels give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// First block behind the labels on every drive: of the prepare area, if the volume has one, and
    /// else of the data area.
    pub start: u64,
    /// Largest number of blocks of one request, also if the target takes larger ones.
    pub request_blocks_max: u32,
}

impl Default for Layout {
    /// [`DATA_START`], and 128 KiB: larger requests are not faster, and smaller ones share the
    /// connection better.
    fn default() -> Self {
        Self { start: DATA_START, request_blocks_max: 32 }
    }
}

/// The place of a member of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberPlace {
    /// Its target, counted from 0 as the volume's targets are.
    pub target: usize,
    /// Its namespace there.
    pub nsid: u32,
}

/// The time for which an owner may be unreachable (trap T25).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    /// The time for which an owner waits for a lost target, ms; 0: a loss is a failure at once.
    pub loss_ms: u64,
    /// The Keep Alive timeout of its associations, ms.
    pub keep_alive_ms: u32,
    /// The time for which it waits for an answer, ms.
    pub timeout_ms: u64,
}

impl LeaseTimes {
    /// The lease that an owner with this engine requests, ms.
    ///
    /// The owner may notice the loss of a connection later than the target, and its loss timeout
    /// begins only then. So the lease is the loss timeout and the time in which the owner is sure
    /// to notice. It sends a Keep Alive each third of `keep_alive_ms`, and waits `timeout_ms` for
    /// the answer. One `timeout_ms` is enough, because the program serves the association also
    /// while it makes a connection.
    #[must_use]
    pub fn lease_ms(&self, engine: EngineKind) -> u32 {
        let notice_ms = u64::from(self.keep_alive_ms / 3).saturating_add(self.timeout_ms);
        let notice_ms = u32::try_from(notice_ms).unwrap_or(u32::MAX).max(self.keep_alive_ms);
        lease_ms(engine, self.loss_ms, notice_ms)
    }
}

/// Why drives do not form a volume that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MembersError {
    /// The labels do not form a volume.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// A drive has fewer blocks than its label requires.
    #[error("member {member} has {blocks} blocks, fewer than the {needed} that its label requires")]
    Shrunk {
        /// The member.
        member: usize,
        /// The number of blocks of the drive.
        blocks: u64,
        /// The number of blocks that the label requires.
        needed: u64,
    },
    /// A volume that is to grow has a drive without more space.
    #[error("member {member} has {blocks} blocks; for one more stripe unit it needs {needed}")]
    NothingToGrow {
        /// The member with the smallest drive.
        member: usize,
        /// The number of blocks of the drive.
        blocks: u64,
        /// The number of blocks that every drive needs at least.
        needed: u64,
    },
}

/// The members of a volume, in its order, with the controllers of their targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// The targets' controllers, as they were when the volume was opened.
    pub controllers: Vec<Controller>,
    /// The place of each member.
    pub places: Vec<MemberPlace>,
    /// The namespace of each member.
    pub namespaces: Vec<Namespace>,
    /// The label of each member.
    pub labels: Vec<Label>,
    /// The fields that are the same in all labels.
    pub head: Label,
    /// The layout of the blocks.
    pub layout: Layout,
}

impl Members {
    /// The members, after a check of the labels that were found on their drives. `name` is the
    /// volume that the caller requests, if it requests one. With `accept_lost_log`, a target may
    /// have another log than the one that the labels name (traps T19, T20).
    ///
    /// # Errors
    /// [`MembersError`]: the first error found.
    pub fn check(
        name: Option<&str>,
        controllers: Vec<Controller>,
        places: &[MemberPlace],
        namespaces: Vec<Namespace>,
        found: Vec<Found>,
        accept_lost_log: bool,
        layout: Layout,
    ) -> Result<Self, MembersError> {
        let head = label_work::check_labels(name, &found, accept_lost_log)?;
        let labels: Vec<Label> = found.into_iter().filter_map(|f| f.label.ok()).collect();
        for (member, (namespace, label)) in namespaces.iter().zip(&labels).enumerate() {
            let (blocks, needed) = (namespace.blocks, layout.blocks_needed(label));
            if blocks < needed {
                return Err(MembersError::Shrunk { member, blocks, needed });
            }
        }
        Ok(Self { controllers, places: places.to_vec(), namespaces, labels, head, layout })
    }

    /// The members as far as they can be shown: as [`check`](Self::check), but a log that is not the
    /// one of the labels, and labels that were copied from other drives, are accepted. Also returns
    /// the error for which an opening refuses the volume, if there is one.
    ///
    /// # Errors
    /// The members can't be shown.
    pub fn check_for_inspection(
        name: Option<&str>,
        controllers: Vec<Controller>,
        places: &[MemberPlace],
        namespaces: Vec<Namespace>,
        mut found: Vec<Found>,
        layout: Layout,
    ) -> Result<(Self, Option<MembersError>), MembersError> {
        let refusal = label_work::check_labels(name, &found, false).err();
        // Each copied label is in the way of the next check.
        while let Err(AssembleError::Copied { given }) =
            label_work::check_labels(name, &found, true)
        {
            let drive = &mut found[given];
            let due = drive.label.as_ref().ok().and_then(|label| label.members.get(given));
            let Some(due) = due else { break };
            drive.nguid = due.nguid;
        }
        let members = Self::check(name, controllers, places, namespaces, found, true, layout)?;
        Ok((members, refusal.map(MembersError::from)))
    }

    /// The number of blocks of a member's drive that the volume does not use. Each member gives as
    /// many stripe units as the smallest one has.
    #[must_use]
    pub fn unused_blocks(&self, member: usize) -> u64 {
        let unit = u64::from(self.head.unit_blocks.max(1));
        let stripes = self.labels.iter().map(|label| label.data_blocks / unit).min().unwrap_or(0);
        let used = self.data_start().saturating_add(stripes.saturating_mul(unit));
        self.namespaces.get(member).map_or(0, |namespace| namespace.blocks.saturating_sub(used))
    }

    /// The number of blocks of each member's data area after the volume has grown to the size of its
    /// smallest drive: all whole stripe units there.
    ///
    /// # Errors
    /// [`MembersError::NothingToGrow`]: no member has space for another stripe unit, or not every
    /// one does. It names the smallest drive.
    pub fn grown_data_blocks(&self) -> Result<u64, MembersError> {
        let blocks = self.namespaces.iter().map(|namespace| namespace.blocks).enumerate();
        let (member, blocks) = blocks.min_by_key(|(_, blocks)| *blocks).unwrap_or_default();
        let unit_blocks = u64::from(self.head.unit_blocks.max(1));
        let grown = blocks.saturating_sub(self.data_start()) / unit_blocks * unit_blocks;
        let used = self.labels.iter().map(|label| label.data_blocks).min().unwrap_or(0);
        if grown <= used / unit_blocks * unit_blocks {
            let needed = self.data_start().saturating_add(used).saturating_add(unit_blocks);
            return Err(MembersError::NothingToGrow { member, blocks, needed });
        }
        Ok(grown)
    }

    /// The largest generation on any label (trap T24).
    #[must_use]
    pub fn label_generation(&self) -> u32 {
        label_work::max_generation(&self.labels)
    }

    /// Whether the labels name a log on a target.
    #[must_use]
    pub fn is_logged(&self, target: usize) -> bool {
        let labels = self.places.iter().zip(&self.labels);
        labels
            .filter(|(place, _)| place.target == target)
            .any(|(_, label)| log_due(label).is_some())
    }

    /// The members on a target: their numbers in the volume, and their namespaces.
    #[must_use]
    pub fn members_on(&self, target: usize) -> Vec<MemberNamespace> {
        members_on(&self.places, target)
    }

    /// For each target, whether the volume has partitions in its log by the labels, or gets them with
    /// a claim that accepts the loss of a log.
    #[must_use]
    pub fn logged_targets(&self, accept_lost_log: bool) -> Vec<bool> {
        let accepts = accept_lost_log && self.head.engine.capabilities().keeps_log;
        let controllers = self.controllers.iter().enumerate();
        let is_logged = |(target, controller): (usize, &Controller)| match accepts {
            // The labels will name the log that the target has now, or none.
            true => region_of(controller).is_some(),
            false => self.is_logged(target),
        };
        controllers.map(is_logged).collect()
    }

    /// The description of the volume for its recovery. With `accept_lost_log`, the claim gives up
    /// the logs that are lost.
    #[must_use]
    pub fn opening_config(&self, accept_lost_log: bool) -> OpeningConfig {
        let logged = self.logged_targets(accept_lost_log);
        let servers = self.controllers.iter().enumerate().map(|(at, controller)| {
            let member = |place: MemberNamespace| OpeningMember {
                place,
                start: self.data_start(),
                blocks: self.labels[usize::from(place.member.0)].data_blocks,
                prepare_blocks: self.head.prepare_blocks,
                volatile: controller.vwc,
            };
            OpeningServer {
                present: true,
                has_extension: controller.extension.is_some(),
                logged: logged[at],
                loses_log: self.is_logged(at) && !logged[at],
                has_log: region_of(controller).is_some(),
                transfer_bytes_max: controller.mdts_bytes as usize,
                members: self.members_on(at).into_iter().map(member).collect(),
            }
        });
        OpeningConfig { volume: self.head.volume, servers: servers.collect() }
    }

    /// The topology of the members on the targets, whose logs have as many slots as `statuses`
    /// report.
    ///
    /// # Errors
    /// The labels describe no volume.
    pub fn topology(&self, statuses: &[(usize, VolumeStatus)]) -> Result<Topology, TopologyError> {
        let slots = |target| statuses.iter().find(|(at, _)| *at == target).map(|(_, s)| s.slots);
        self.topology_with_slots(|target| slots(target).unwrap_or(0))
    }

    /// The topology of the volume's blocks, which does not depend on the slots in the logs.
    ///
    /// # Errors
    /// The labels describe no volume.
    pub fn block_map(&self) -> Result<Topology, TopologyError> {
        self.topology_with_slots(|_| 1)
    }

    /// The topology of the members, with `slots(target)` log slots for a stream on each target.
    fn topology_with_slots(&self, slots: impl Fn(usize) -> u32) -> Result<Topology, TopologyError> {
        let servers = (0..self.controllers.len()).map(|at| ServerLayout { slots: slots(at) });
        let members = self.places.iter().zip(&self.labels).map(|(place, label)| {
            let controller = &self.controllers[place.target];
            MemberLayout {
                server: place.target as u16,
                start: self.data_start(),
                blocks: label.data_blocks,
                request_blocks_max: (controller.mdts_bytes.min(ORDERED_BYTES_MAX)
                    / BLOCK_BYTES as u32)
                    .clamp(1, self.layout.request_blocks_max.max(1)),
                volatile: controller.vwc,
            }
        });
        let topology = Topology::new(members.collect(), servers.collect(), self.head.unit_blocks)?;
        Ok(topology.with_prepare_area(self.head.prepare_blocks, self.head.streams))
    }

    /// The first block of the data area on every drive.
    fn data_start(&self) -> u64 {
        self.layout.start.saturating_add(self.head.prepare_blocks.into())
    }

    /// The claim with which an owner of the volume claims it again on a target that it has lost
    /// (promise P7); `None` where the target does not have the extension.
    #[must_use]
    pub fn resume_claim(&self, target: usize, generation: u32, lease_ms: u32) -> Option<Claim> {
        self.controllers[target].extension.map(|_| Claim {
            volume: self.head.volume,
            generation,
            create: false,
            give_up: false,
            take_over: false,
            unlogged: !self.is_logged(target),
            resume: true,
            streams: self.head.streams,
            slots: 0,
            lease_ms,
            members: self.members_on(target),
        })
    }

    /// The properties that must be found again on a target that was lost (traps T19, T27).
    #[must_use]
    pub fn known_target(&self, target: usize, generation: u32) -> KnownTarget {
        let drives = self.members_on(target).into_iter().map(|place| {
            let label = &self.labels[usize::from(place.member.0)];
            DriveOfVolume {
                nsid: place.nsid,
                index: label.index,
                blocks: self.layout.blocks_needed(label),
            }
        });
        KnownTarget::new(self.head.volume, generation, &self.controllers[target], drives)
    }

    /// Whether the content of a target's log for the volume is lost, or older than the labels (T19,
    /// T24).
    #[must_use]
    pub fn is_log_lost(&self, target: usize, status: &VolumeStatus) -> bool {
        let is_behind_labels = self.is_logged(target) && is_behind(status, self.label_generation());
        status.log_lost || is_behind_labels
    }
}

/// The members on a target: their numbers in the volume, and their namespaces.
pub(super) fn members_on(places: &[MemberPlace], target: usize) -> Vec<MemberNamespace> {
    let places = places.iter().enumerate().filter(|(_, place)| place.target == target);
    let numbered = |(at, place): (usize, &MemberPlace)| MemberNamespace {
        member: Member(at as u8),
        nsid: place.nsid,
    };
    places.map(numbered).collect()
}

/// The namespace of each member.
///
/// # Errors
/// The first member whose target has no such namespace.
pub(super) fn namespaces(
    places: &[MemberPlace],
    controllers: &[Controller],
) -> Result<Vec<Namespace>, usize> {
    let find = |(member, place): (usize, &MemberPlace)| {
        let namespaces = &controllers[place.target].namespaces;
        namespaces.iter().find(|n| n.nsid == place.nsid).cloned().ok_or(member)
    };
    places.iter().enumerate().map(find).collect()
}

/// The orders that the drives of the volume keep by themselves. A drive that is not there keeps
/// none.
pub(super) fn member_orders(
    places: &[MemberPlace],
    controllers: &[Controller],
) -> Vec<MemberOrder> {
    let order_of = |place: &MemberPlace| {
        let namespaces = &controllers[place.target].namespaces;
        let namespace = namespaces.iter().find(|namespace| namespace.nsid == place.nsid);
        let order = namespace.map_or(DriveOrder::None, |namespace| namespace.order);
        MemberOrder { target: place.target, order }
    };
    places.iter().map(order_of).collect()
}

/// The log region of a target: `None` if it has no log.
pub(super) fn region_of(controller: &Controller) -> Option<[u8; 16]> {
    let extension = controller.extension.filter(|e| e.log_kind.is_some());
    extension.map(|extension| extension.region)
}

impl Layout {
    /// The number of blocks that the drive with this label must have: all before the data area, and
    /// the data area.
    fn blocks_needed(&self, label: &Label) -> u64 {
        let prepare_blocks = u64::from(label.prepare_blocks);
        self.start.saturating_add(prepare_blocks).saturating_add(label.data_blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t25_a_lease_covers_the_time_until_the_owner_has_noticed_the_loss() {
        let times = LeaseTimes { loss_ms: 30_000, keep_alive_ms: 15_000, timeout_ms: 10_000 };
        assert_eq!(times.lease_ms(EngineKind::Rio), 45_000, "5 s and 10 s");
        let slow = LeaseTimes { timeout_ms: 60_000, ..times };
        assert_eq!(slow.lease_ms(EngineKind::Rio), 95_000);
        let hasty = LeaseTimes { timeout_ms: 10, ..times };
        assert_eq!(hasty.lease_ms(EngineKind::Rio), 45_000, "never below the Keep Alive timeout");
        assert_eq!(LeaseTimes { loss_ms: 0, ..times }.lease_ms(EngineKind::Rio), 0);
    }
}
