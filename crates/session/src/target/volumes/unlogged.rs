//! Volumes without a log. Only the target's memory knows them, so that memory must not grow with
//! the claims of peers (T28).
//!
//! A volume without a log is remembered until another volume gets one of its namespaces. So no two
//! of them have a namespace in common, and there are never more of them than namespaces, with any
//! ids that are claimed. Claims for namespaces that are guarded are refused anyway (T21).
//!
//! The generation and the last owner of a volume keep an old owner from coming back (T8, T25). The
//! target forgets both together with the volume. Instead it notes for each namespace whether a volume
//! has had it. An owner may resume a volume that the target does not know, as after a restart of
//! the target, only if no other volume has had its namespaces in this incarnation of the target.

use alloc::collections::BTreeSet;

use riopipe_order::log_region::MemberNamespace;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::Region;

use super::Volumes;
use super::refusal::Refusal;
use super::volume::{TargetLog, Volume};
use crate::wire::{self, Claim};

/// The namespaces that a volume has had in this incarnation of the target.
#[derive(Debug, Default)]
pub(super) struct UsedNamespaces(BTreeSet<u32>);

impl UsedNamespaces {
    /// Notes that a claim has been granted for a volume of these namespaces, which exist.
    pub(super) fn note(&mut self, members: &[MemberNamespace]) {
        self.0.extend(members.iter().map(|member| member.nsid));
    }

    fn has_any_of(&self, members: &[MemberNamespace]) -> bool {
        members.iter().any(|member| self.0.contains(&member.nsid))
    }
}

impl<R: Region> Volumes<R> {
    /// Checks whether an owner may resume a volume without a log that the target does not know. It
    /// may if no other volume has had the namespaces in this incarnation of the target. An earlier
    /// incarnation knew the volume then (T25).
    pub(super) fn check_unknown_resume(&self, claim: &Claim) -> Result<(), Refusal> {
        if self.used_namespaces.has_any_of(&claim.members)
            && !probe::planted(Plant::T28ForgottenResumes)
        {
            return Err(Refusal::do_not_retry(wire::status::LEASE_OVER));
        }
        Ok(())
    }

    /// After a granted claim, frees the volumes that had its namespaces before. Forgets those that
    /// only memory knows.
    pub(super) fn forget_predecessors(&mut self, claim: &Claim) {
        let Self { list, target_log, .. } = self;
        list.retain(|volume| {
            let stays = volume.id == claim.volume
                || volume.is_guarded()
                || is_recorded(target_log, volume)
                || !claim.members.iter().any(|member| volume.has_member(member.nsid));
            if !stays {
                probe::hit(Rare::Forgotten);
            }
            stays || probe::planted(Plant::T28RememberAll)
        });
        self.used_namespaces.note(&claim.members);
    }

    /// The number of volumes that the target remembers, those of its log among them.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.list.len()
    }
}

/// Whether the log's directory has the volume.
fn is_recorded<R: Region>(target_log: &TargetLog<R>, volume: &Volume<R>) -> bool {
    match target_log {
        TargetLog::None => false,
        TargetLog::Live { region, .. } => region.volume(volume.id).is_some(),
        TargetLog::Lost(header) => header.volumes.iter().any(|record| record.id == volume.id),
    }
}
