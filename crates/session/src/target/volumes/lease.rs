//! The lease of a volume: its owner, and how long the target keeps the volume for it (T8, T25).
//!
//! An owner with an association keeps its volume until it releases it. When the target loses the
//! association, or is started again, the target keeps the volume for the owner until the lease has
//! run out, by the target's clock. Even then nothing changes before another host wants the volume
//! or one of its drives. Until then, the owner may still come back.

use alloc::format;
use alloc::string::String;

use riopipe_order::attribute::VolumeId;
use riopipe_order::log_region::{VolumeRecord, VolumeState};
use riopipe_order::probe::{self, Plant};

/// Nanoseconds per millisecond.
const MS: u64 = 1_000_000;

/// The owner of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The association.
    pub association: u64,
    /// Its controller.
    pub cntlid: u16,
    /// The host's name.
    pub hostnqn: String,
    /// The host's id.
    pub hostid: [u8; 16],
}

/// The lease of a volume.
#[derive(Debug)]
pub(super) enum Lease {
    /// No owner.
    Vacant,
    /// An owner with an association.
    Held(Owner),
    /// An owner whose association is lost.
    Lost(Lost),
}

/// An owner whose association is lost, or that had the volume in an earlier incarnation of the
/// target.
#[derive(Debug)]
pub(super) struct Lost {
    /// Its name.
    name: String,
    /// The association that was lost, until all of its operations have come back.
    draining: Option<u64>,
    /// The end of its lease, ns of the environment's clock.
    until: u64,
}

impl Lease {
    /// The lease of the owner of an earlier incarnation of the target. The target begins to serve
    /// at `now`.
    pub(super) fn from_record(record: &VolumeRecord, now: u64) -> Self {
        match record.state {
            VolumeState::Closed => Self::Vacant,
            VolumeState::Owned => Self::Lost(Lost {
                // The log has only the identifier of the owner.
                name: format!("the host with id {}", VolumeId(record.owner)),
                draining: None,
                until: end_of_lease(now, record.lease_ms),
            }),
        }
    }

    /// Notes that the target has lost association `association`. Returns whether that was the owner's.
    pub(super) fn association_lost(&mut self, association: u64, lease_ms: u32, now: u64) -> bool {
        match self {
            Self::Held(owner) if owner.association == association => {
                let name = core::mem::take(&mut owner.hostnqn);
                let until = end_of_lease(now, lease_ms);
                *self = Self::Lost(Lost { name, draining: Some(association), until });
                true
            }
            _ => false,
        }
    }

    /// Notes that every operation of association `association` has come back. Returns whether that was a
    /// lost owner's.
    pub(super) fn association_drained(&mut self, association: u64) -> bool {
        match self {
            Self::Lost(lost) if lost.draining == Some(association) => {
                lost.draining = None;
                true
            }
            _ => false,
        }
    }

    /// Ends the lease of an owner that has released the volume. Its operations have come back.
    /// Something of the volume is left to recover, so the volume is not free yet.
    pub(super) fn end(&mut self) {
        if let Self::Held(owner) = self {
            let name = core::mem::take(&mut owner.hostnqn);
            // Time 0, so that the lease is over on every core: another core's clock may be a little
            // behind.
            *self = Self::Lost(Lost { name, draining: None, until: 0 });
        }
    }

    /// The owner, if it has an association.
    pub(super) const fn owner(&self) -> Option<&Owner> {
        match self {
            Self::Held(owner) => Some(owner),
            Self::Vacant | Self::Lost(_) => None,
        }
    }

    /// Whether the owner is present, with association `association`.
    pub(super) fn is_held_by(&self, association: u64) -> bool {
        self.owner().is_some_and(|owner| owner.association == association)
    }

    /// Whether there is no owner, not even one whose lease is over.
    pub(super) const fn is_vacant(&self) -> bool {
        matches!(self, Self::Vacant)
    }

    /// Whether the volume is kept for its owner: another host must take it over explicitly.
    pub(super) fn is_kept(&self, now: u64) -> bool {
        match self {
            Self::Vacant => false,
            Self::Held(_) => true,
            Self::Lost(lost) => now < lost.until && !probe::planted(Plant::T25LeaseWithConnection),
        }
    }

    /// The end of the lease of a lost owner: from this time on, the volume may be freed. `None` while
    /// operations of the owner may be in flight.
    pub(super) const fn freeable_from(&self) -> Option<u64> {
        match self {
            Self::Lost(Lost { draining: None, until, .. }) => Some(*until),
            _ => None,
        }
    }

    /// The name of the host for which the volume is kept, and the remaining milliseconds of the
    /// lease if its association is lost.
    pub(super) fn kept_for(&self, now: u64) -> Option<(&str, u32)> {
        match self {
            Self::Held(owner) => Some((&owner.hostnqn, 0)),
            Self::Lost(lost) if self.is_kept(now) => {
                let left = (lost.until - now).div_ceil(MS);
                Some((&lost.name, u32::try_from(left).unwrap_or(u32::MAX)))
            }
            Self::Vacant | Self::Lost(_) => None,
        }
    }
}

/// The end of a lease that begins to run at `now`.
fn end_of_lease(now: u64, lease_ms: u32) -> u64 {
    now.saturating_add(u64::from(lease_ms) * MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> Lease {
        Lease::Held(Owner { association: 7, cntlid: 1, hostnqn: "nqn.x".into(), hostid: [1; 16] })
    }

    #[test]
    fn t25_a_lost_owner_keeps_its_volume_until_the_lease_is_over() {
        let mut lease = held();
        assert_eq!(lease.kept_for(0), Some(("nqn.x", 0)));
        assert!(!lease.association_lost(8, 2, 100), "another's association");
        assert!(lease.association_lost(7, 2, 100));
        assert!(lease.owner().is_none() && !lease.is_held_by(7) && !lease.is_vacant());
        assert_eq!(lease.kept_for(100), Some(("nqn.x", 2)));
        assert_eq!(lease.kept_for(100 + 2 * MS - 1), Some(("nqn.x", 1)));
        assert!(lease.is_kept(100 + 2 * MS - 1));
        assert!(!lease.is_kept(100 + 2 * MS));
        assert_eq!(lease.kept_for(100 + 2 * MS), None);
        assert_eq!(lease.freeable_from(), None, "a write of it may still be in flight");
        assert!(lease.association_drained(7) && !lease.association_drained(7));
        assert_eq!(lease.freeable_from(), Some(100 + 2 * MS));
    }

    #[test]
    fn t25_leases_of_any_length_end_some_time() {
        for (now, lease_ms) in [(0, 0), (u64::MAX, u32::MAX), (1, u32::MAX)] {
            let mut lease = held();
            assert!(lease.association_lost(7, lease_ms, now));
            assert!(!lease.is_kept(now.saturating_add(u64::from(u32::MAX) * MS)));
        }
    }
}
