//! The volumes that stand in the way of the removal of a namespace, and the places of members when
//! namespaces come.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use riopipe_order::attribute::VolumeId;
use riopipe_order::region::Region;

use super::places::LabelledDrive;
use super::{Volume, Volumes};

/// A volume that would lose a member, or part of its recovery, with a namespace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("namespace {nsid} is a member of volume {volume}, {usage}")]
pub struct VolumeInUse {
    /// The namespace.
    pub nsid: u32,
    /// The volume.
    pub volume: VolumeId,
    /// The reason why the volume needs the namespace.
    pub usage: VolumeUse,
}

/// The reason why a volume needs its members.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeUse {
    /// A host has claimed it, and is connected.
    #[error("which host {hostnqn} at {address} has open: close it there first")]
    Open {
        /// The name of the host.
        hostnqn: String,
        /// The address from which it is connected; empty if there is none.
        address: String,
    },
    /// It is reserved for an owner that is not connected (trap T25).
    #[error("which is reserved for {owner} for {lease_left_ms} ms more: wait, or close it there")]
    Reserved {
        /// The name of the owner.
        owner: String,
        /// The rest of the lease, ms.
        lease_left_ms: u32,
    },
    /// Its log has entries to recover, or is lost, or its owner is changing.
    #[error("which is to be recovered first (`rio volume recover`)")]
    Unrecovered,
}

impl<R: Region> Volume<R> {
    /// The reason why the volume needs its members at time `now`, ns; `None` if nothing is lost
    /// as long as all members are there when it is opened next.
    fn usage(&self, now: u64) -> Option<VolumeUse> {
        if !self.is_guarded() || self.freeable_from().is_some_and(|from| from <= now) {
            return None;
        }
        if let Some(owner) = self.lease.owner() {
            let (hostnqn, address) = (owner.hostnqn.clone(), owner.address.clone());
            return Some(VolumeUse::Open { hostnqn, address });
        }
        Some(match self.lease.reserved_for(now) {
            Some(reserved) => VolumeUse::Reserved {
                owner: reserved.owner_name.to_string(),
                lease_left_ms: reserved.lease_left_ms,
            },
            None => VolumeUse::Unrecovered,
        })
    }
}

impl<R: Region> Volumes<R> {
    /// The volumes that need one of these namespaces at time `now`, ns.
    pub(in crate::target) fn in_use(&self, nsids: &[u32], now: u64) -> Vec<VolumeInUse> {
        let mut found = Vec::new();
        for &nsid in nsids {
            for volume in self.list.iter().filter(|volume| volume.has_member(nsid)) {
                if let Some(usage) = volume.usage(now) {
                    found.push(VolumeInUse { nsid, volume: volume.id, usage });
                }
            }
        }
        found
    }

    /// The volumes that a host has open, or that are reserved for their owner, each with its use.
    pub(in crate::target) fn open_volumes(&self, now: u64) -> Vec<(VolumeId, VolumeUse)> {
        let is_open = |usage: &VolumeUse| *usage != VolumeUse::Unrecovered;
        let usage =
            |volume: &Volume<R>| volume.usage(now).filter(is_open).map(|usage| (volume.id, usage));
        self.list.iter().filter_map(usage).collect()
    }

    /// The volumes that this association has open at time `now`, ns, each with the address from which
    /// its owner is connected.
    pub(in crate::target) fn open_by(&self, association: u64, now: u64) -> Vec<(VolumeId, String)> {
        let is_owner = |volume: &&Volume<R>| {
            volume.lease.owner().is_some_and(|owner| owner.association == association)
        };
        let open = |volume: &Volume<R>| match volume.usage(now)? {
            VolumeUse::Open { address, .. } => Some((volume.id, address)),
            VolumeUse::Reserved { .. } | VolumeUse::Unrecovered => None,
        };
        self.list.iter().filter(is_owner).filter_map(open).collect()
    }

    /// The associations of the owners of volumes with a member among these namespaces.
    pub(in crate::target) fn owners_of(&self, nsids: &[u32]) -> Vec<u64> {
        let is_member = |volume: &&Volume<R>| nsids.iter().any(|nsid| volume.has_member(*nsid));
        let volumes = self.list.iter().filter(is_member);
        volumes.filter_map(|volume| volume.lease.owner()).map(|owner| owner.association).collect()
    }

    /// Notes the members at namespaces that have come, by the labels of their drives. All places
    /// and guards that were known before stay, unless another member is there now.
    pub(in crate::target) fn locate_added(&mut self, found: &[LabelledDrive]) {
        let before: Vec<_> = self
            .list
            .iter_mut()
            .map(|volume| {
                let places = core::mem::take(&mut volume.other_places);
                (places, core::mem::take(&mut volume.also_guarded))
            })
            .collect();
        self.locate_members(found);
        let is_taken =
            |nsid: u32| found.iter().any(|drive| drive.is_own && drive.place.nsid == nsid);
        for (volume, (places, guarded)) in self.list.iter_mut().zip(before) {
            let places = places.into_iter().filter(|place| !is_taken(place.nsid));
            let new_places: Vec<_> =
                places.filter(|place| !volume.other_places.contains(place)).collect();
            volume.other_places.extend(new_places);
            let new_guards: Vec<_> =
                guarded.into_iter().filter(|nsid| !volume.also_guarded.contains(nsid)).collect();
            volume.also_guarded.extend(new_guards);
        }
    }
}
