//! Draining a target: no new host comes, and those that are there end their work.
//!
//! A host that has a volume open here may connect again, because it needs that to close the volume.
//! Hosts learn of it as of a normal shutdown of the NVM subsystem.

use alloc::vec::Vec;

use riopipe_order::attribute::VolumeId;
use riopipe_order::region::Region;

use super::{Notice, Shared};
use crate::target::ids::ConnId;
use crate::target::volumes::VolumeUse;

/// A volume that has an owner, with a connection or without one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("volume {volume}, {usage}")]
pub struct OpenVolume {
    /// The volume.
    pub volume: VolumeId,
    /// Its owner.
    pub usage: VolumeUse,
}

impl<R: Region> Shared<R> {
    /// Takes no new hosts from now on, and informs those that are there. The caller must wake the
    /// connections ([`take_conns_to_wake`](Self::take_conns_to_wake)).
    pub fn drain(&mut self) {
        if core::mem::replace(&mut self.is_draining, true) {
            return;
        }
        let admins: Vec<ConnId> =
            self.controllers.values().map(|controller| controller.admin).collect();
        for admin in admins {
            self.leave_notice(admin, Notice::Draining);
        }
    }

    /// Whether a host may begin an association at time `now`, ns.
    pub(super) fn takes_host(&self, hostnqn: &str, now: u64) -> bool {
        let is_owner = |open: &OpenVolume| match &open.usage {
            VolumeUse::Open { hostnqn: owner, .. } | VolumeUse::Reserved { owner, .. } => {
                owner == hostnqn
            }
            VolumeUse::Unrecovered => false,
        };
        !self.is_draining || self.open_volumes(now).iter().any(is_owner)
    }

    /// The volumes that have an owner at time `now`, ns: one that is connected, or one that may
    /// come back within its lease.
    #[must_use]
    pub fn open_volumes(&self, now: u64) -> Vec<OpenVolume> {
        let open = self.volumes.open_volumes(now).into_iter();
        open.map(|(volume, usage)| OpenVolume { volume, usage }).collect()
    }
}
