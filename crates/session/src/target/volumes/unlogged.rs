//! Volumes without a log. Only the target's memory knows them, so that memory must not grow with
//! the claims of peers (T28).
//!
//! A volume without a log is remembered until another volume gets one of its namespaces. So no two
//! of them have a namespace in common, and there are never more of them than namespaces, with any
//! ids that are claimed. Claims for namespaces that are guarded are refused anyway (T21).
//!
//! With such a volume the target forgets its generation and its last owner. These would keep an old
//! owner from coming back (T8, T25). Instead the target notes for each namespace whether a volume
//! has had it. An owner may resume a volume that the target does not know, as after a restart of
//! the target, only if no other volume has had its namespaces in this incarnation of the target.

use alloc::collections::BTreeSet;

use riopipe_order::log_region::MemberNamespace;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::Region;

use super::Volumes;
use super::volume::{Log, Refusal, Volume};
use crate::wire::{self, Claim};

/// The namespaces that a volume has had in this incarnation of the target.
#[derive(Debug, Default)]
pub(super) struct Taken(BTreeSet<u32>);

impl Taken {
    /// Notes that a claim has been granted for a volume of these namespaces, which exist.
    pub(super) fn note(&mut self, members: &[MemberNamespace]) {
        self.0.extend(members.iter().map(|member| member.nsid));
    }

    fn any(&self, members: &[MemberNamespace]) -> bool {
        members.iter().any(|member| self.0.contains(&member.nsid))
    }
}

impl<R: Region> Volumes<R> {
    /// Whether an owner may resume a volume without a log that the target does not know: the target
    /// knew it in an earlier incarnation, and no other volume has had its namespaces in this one
    /// (T25).
    pub(super) fn check_unknown_resume(&self, claim: &Claim) -> Result<(), Refusal> {
        if self.taken.any(&claim.members) && !probe::planted(Plant::T28ForgottenResumes) {
            return Err((wire::status::LEASE_OVER.with_dnr(), 0));
        }
        Ok(())
    }

    /// After a granted claim, frees the volumes that had its namespaces before. Forgets those that
    /// only memory knows.
    pub(super) fn forget_predecessors(&mut self, claim: &Claim) {
        let Self { list, log, .. } = self;
        list.retain(|volume| {
            let kept = volume.id == claim.volume
                || volume.is_guarded()
                || is_recorded(log, volume)
                || !claim.members.iter().any(|member| volume.has(member.nsid));
            if !kept {
                probe::hit(Rare::Forgotten);
            }
            kept || probe::planted(Plant::T28RememberAll)
        });
        self.taken.note(&claim.members);
    }

    /// The number of volumes that the target remembers, those of its log among them.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.list.len()
    }
}

/// Whether the log's directory has the volume.
fn is_recorded<R: Region>(log: &Log<R>, volume: &Volume<R>) -> bool {
    match log {
        Log::None => false,
        Log::Live { region, .. } => region.volume(volume.id).is_some(),
        Log::Lost(header) => header.volumes.iter().any(|record| record.id == volume.id),
    }
}
