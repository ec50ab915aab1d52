//! Volumes without a log. The target knows them only in memory, so their number must have a limit:
//! otherwise hosts could fill the memory with claims (trap T28).
//!
//! The target remembers a volume without a log until another volume gets one of its namespaces. So
//! no two of these volumes have a namespace in common, and there are never more of them than
//! namespaces.
//!
//! A remembered volume has its generation and its last owner, which keep a fenced owner from coming
//! back (traps T8, T25). When the target forgets the volume, it forgets both. It still knows for
//! each namespace whether a volume has had it. An owner may resume an unknown volume only if no
//! other volume has had the namespaces in this incarnation of the target. Such an owner has claimed
//! the volume in an earlier incarnation.

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

    /// Whether a volume has had any of these namespaces.
    fn has_any_of(&self, members: &[MemberNamespace]) -> bool {
        members.iter().any(|member| self.0.contains(&member.nsid))
    }
}

impl<R: Region> Volumes<R> {
    /// Checks whether an owner may resume a volume without a log that the target does not know: no
    /// other volume may have had its namespaces in this incarnation of the target (trap T25).
    pub(super) fn check_resume_of_unknown(&self, claim: &Claim) -> Result<(), Refusal> {
        if self.used_namespaces.has_any_of(&claim.members)
            && !probe::is_bug_planted(Plant::T28ForgottenResumes)
        {
            return Err(Refusal::do_not_retry(wire::status::LEASE_OVER));
        }
        Ok(())
    }

    /// After a granted claim, forgets the other volumes that have had the claimed namespaces,
    /// except those that are guarded or recorded in the log.
    pub(super) fn forget_predecessors(&mut self, claim: &Claim) {
        let Self { list, target_log, .. } = self;
        list.retain(|volume| {
            let stays = volume.id == claim.volume
                || volume.is_guarded()
                || is_recorded(target_log, volume)
                || !claim.members.iter().any(|member| volume.has_member(member.nsid));
            if !stays {
                probe::count_rare(Rare::Forgotten);
            }
            stays || probe::is_bug_planted(Plant::T28RememberAll)
        });
        self.used_namespaces.note(&claim.members);
    }

    /// The number of volumes that the target knows, with those of its log.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.list.len()
    }
}

/// Whether the directory of the log has a record of the volume.
fn is_recorded<R: Region>(target_log: &TargetLog<R>, volume: &Volume<R>) -> bool {
    match target_log {
        TargetLog::None => false,
        TargetLog::Live { region, .. } => region.volume(volume.id).is_some(),
        TargetLog::Lost(header) => header.volumes.iter().any(|record| record.id == volume.id),
    }
}
