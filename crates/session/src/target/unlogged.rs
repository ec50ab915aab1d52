//! Volumes without a log: nothing but the target's memory knows of them, so it must not grow with
//! what peers claim (T28).
//!
//! A volume without a log is remembered until another volume gets one of its namespaces. So no two
//! of them have a namespace in common, and there are never more of them than namespaces, whatever
//! ids are claimed, however they are left. Claims for namespaces that are guarded are refused
//! anyway (T21): that is the bound that a claimant meets.
//!
//! What is forgotten with such a volume is its generation and its last owner, which keep an old
//! owner from coming back (T8, T25). Instead the target notes of each namespace whether a volume
//! has had it. A volume that it does not know may be resumed, as after a restart of the target,
//! only if nobody else has had its namespaces in this life of the target.

use alloc::collections::BTreeSet;

use riopipe_order::log_region::MemberNamespace;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::Region;

use super::claims::{Refusal, Volumes};
use super::volume::{Log, Volume};
use crate::wire::{self, Claim};

/// The namespaces that a volume has had in this life of the target.
#[derive(Debug, Default)]
pub(super) struct Taken(BTreeSet<u32>);

impl Taken {
    /// A claim has been granted for volumes of these namespaces, which exist.
    pub(super) fn note(&mut self, members: &[MemberNamespace]) {
        self.0.extend(members.iter().map(|member| member.nsid));
    }

    fn any(&self, members: &[MemberNamespace]) -> bool {
        members.iter().any(|member| self.0.contains(&member.nsid))
    }
}

impl<R: Region> Volumes<R> {
    /// Whether an owner may go on with a volume without a log that the target does not know: it
    /// knew it in an earlier life, and nobody else has been there in this one (T25).
    pub(super) fn check_unknown_resume(&self, claim: &Claim) -> Result<(), Refusal> {
        if self.taken.any(&claim.members) && !probe::planted(Plant::T28ForgottenResumes) {
            return Err((wire::status::LEASE_OVER.with_dnr(), 0));
        }
        Ok(())
    }

    /// A claim has been granted: what had its namespaces before is nobody's, and forgotten if
    /// nothing but memory knows of it.
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

    /// How many volumes the target remembers, those of its log among them.
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
