//! The lease of a volume: its owner, and how long the target reserves the volume for the owner (T8,
//! T25).
//!
//! ```text
//! Vacant ──claim──→ Held ──association lost──→ Lost ──lease has run out──→ Vacant
//!    ↑                │                          │
//!    └────release─────┘          Held ←──claim───┘
//! ```
//!
//! When the target loses the association of an owner, or is started again, it reserves the volume
//! for the owner until the lease has run out by the target's clock. The volume is then freed only
//! when another host claims it, or writes one of its drives. Until that moment the owner may still
//! come back.

use alloc::format;
use alloc::string::String;

use riopipe_order::attribute::VolumeId;
use riopipe_order::log_region::{VolumeRecord, VolumeState};
use riopipe_order::probe::{self, Plant};

/// Nanoseconds per millisecond.
const NS_PER_MS: u64 = 1_000_000;

/// The owner of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The number of the host's association.
    pub association: u64,
    /// The controller of that association.
    pub cntlid: u16,
    /// The host's name.
    pub hostnqn: String,
    /// The address of its admin queue, as text; empty if there is none.
    pub address: String,
    /// The host's id.
    pub hostid: [u8; 16],
}

/// The lease of a volume.
#[derive(Debug)]
pub(super) enum Lease {
    /// The volume has no owner.
    Vacant,
    /// The owner has an association.
    Held(Owner),
    /// The association of the owner is lost.
    Lost(LostOwner),
}

/// An owner whose association is lost, or that had the volume in an earlier incarnation of the
/// target.
#[derive(Debug)]
pub(super) struct LostOwner {
    /// The name of the host.
    name: String,
    /// The address that it had; empty if it is not known.
    address: String,
    /// The lost association, until all of its operations have come back.
    draining_association: Option<u64>,
    /// The end of the lease, ns of the environment's clock.
    lease_end_ns: u64,
}

/// The reservation of a volume for its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reserved<'a> {
    /// The name of the owner's host.
    pub(super) owner_name: &'a str,
    /// The address that it has, or had; empty if it is not known.
    pub(super) owner_address: &'a str,
    /// The rest of the lease, milliseconds; 0 if the owner has an association.
    pub(super) lease_left_ms: u32,
}

impl Lease {
    /// The lease of a volume that the log's directory records, from an earlier incarnation of the
    /// target. The lease of an owner begins to run at `now`.
    pub(super) fn from_record(record: &VolumeRecord, now: u64) -> Self {
        match record.state {
            VolumeState::Closed => Self::Vacant,
            VolumeState::Owned => Self::Lost(LostOwner {
                // The log has only the host identifier of the owner, not its name.
                name: format!("the host with id {}", VolumeId(record.owner)),
                address: String::new(),
                draining_association: None,
                lease_end_ns: end_of_lease(now, record.lease_ms),
            }),
        }
    }

    /// Notes that the target has lost this association. Returns whether it was the one of the
    /// owner.
    pub(super) fn on_association_lost(
        &mut self,
        association: u64,
        lease_ms: u32,
        now: u64,
    ) -> bool {
        match self {
            Self::Held(owner) if owner.association == association => {
                let name = core::mem::take(&mut owner.hostnqn);
                let address = core::mem::take(&mut owner.address);
                let lease_end_ns = end_of_lease(now, lease_ms);
                *self = Self::Lost(LostOwner {
                    name,
                    address,
                    draining_association: Some(association),
                    lease_end_ns,
                });
                true
            }
            _ => false,
        }
    }

    /// Notes that every operation of this association has come back. Returns whether it was the
    /// lost association of the owner.
    pub(super) fn on_association_drained(&mut self, association: u64) -> bool {
        match self {
            Self::Lost(lost) if lost.draining_association == Some(association) => {
                lost.draining_association = None;
                true
            }
            _ => false,
        }
    }

    /// Ends the lease of an owner that has released the volume, and whose operations have come
    /// back. The volume does not become vacant yet, because something of it is left to recover.
    pub(super) fn end(&mut self) {
        if let Self::Held(owner) = self {
            let name = core::mem::take(&mut owner.hostnqn);
            let address = core::mem::take(&mut owner.address);
            // The lease ends at time 0, so that it is over on every core. The clock of another core
            // may be a little behind.
            let (draining_association, lease_end_ns) = (None, 0);
            *self = Self::Lost(LostOwner { name, address, draining_association, lease_end_ns });
        }
    }

    /// The owner, if it has an association.
    pub(super) const fn owner(&self) -> Option<&Owner> {
        match self {
            Self::Held(owner) => Some(owner),
            Self::Vacant | Self::Lost(_) => None,
        }
    }

    /// Whether the owner has this association.
    pub(super) fn is_held_by(&self, association: u64) -> bool {
        self.owner().is_some_and(|owner| owner.association == association)
    }

    /// Whether the volume has no owner, not even one whose lease has run out.
    pub(super) const fn is_vacant(&self) -> bool {
        matches!(self, Self::Vacant)
    }

    /// Whether the volume is reserved for its owner, so that another host must take it over
    /// explicitly.
    pub(super) fn is_reserved(&self, now: u64) -> bool {
        match self {
            Self::Vacant => false,
            Self::Held(_) => true,
            Self::Lost(lost) => {
                now < lost.lease_end_ns && !probe::is_bug_planted(Plant::T25LeaseWithConnection)
            }
        }
    }

    /// The time, ns, from which the volume may be freed: the end of the lease of a lost owner.
    /// `None` while operations of the owner may be in flight, and for a volume without a lost
    /// owner.
    pub(super) const fn freeable_from(&self) -> Option<u64> {
        match self {
            Self::Lost(LostOwner { draining_association: None, lease_end_ns, .. }) => {
                Some(*lease_end_ns)
            }
            _ => None,
        }
    }

    /// The owner for which the volume is reserved, and the rest of its lease; `None` if the volume
    /// is not reserved.
    pub(super) fn reserved_for(&self, now: u64) -> Option<Reserved<'_>> {
        match self {
            Self::Held(owner) => Some(Reserved {
                owner_name: &owner.hostnqn,
                owner_address: &owner.address,
                lease_left_ms: 0,
            }),
            Self::Lost(lost) if self.is_reserved(now) => {
                let left_ms = (lost.lease_end_ns - now).div_ceil(NS_PER_MS);
                let lease_left_ms = u32::try_from(left_ms).unwrap_or(u32::MAX);
                let (owner_name, owner_address) = (&lost.name, &lost.address);
                Some(Reserved { owner_name, owner_address, lease_left_ms })
            }
            Self::Vacant | Self::Lost(_) => None,
        }
    }
}

/// The end of a lease that begins to run at `now`, ns.
fn end_of_lease(now: u64, lease_ms: u32) -> u64 {
    now.saturating_add(u64::from(lease_ms) * NS_PER_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> Lease {
        Lease::Held(Owner {
            association: 7,
            cntlid: 1,
            hostnqn: "nqn.x".into(),
            address: "a:1".into(),
            hostid: [1; 16],
        })
    }

    fn reserved(lease_left_ms: u32) -> Option<Reserved<'static>> {
        Some(Reserved { owner_name: "nqn.x", owner_address: "a:1", lease_left_ms })
    }

    #[test]
    fn t25_a_lost_owner_keeps_its_volume_until_the_lease_is_over() {
        let mut lease = held();
        assert_eq!(lease.reserved_for(0), reserved(0));
        assert!(!lease.on_association_lost(8, 2, 100), "another's association");
        assert!(lease.on_association_lost(7, 2, 100));
        assert!(lease.owner().is_none() && !lease.is_held_by(7) && !lease.is_vacant());
        assert_eq!(lease.reserved_for(100), reserved(2));
        assert_eq!(lease.reserved_for(100 + 2 * NS_PER_MS - 1), reserved(1));
        assert!(lease.is_reserved(100 + 2 * NS_PER_MS - 1));
        assert!(!lease.is_reserved(100 + 2 * NS_PER_MS));
        assert_eq!(lease.reserved_for(100 + 2 * NS_PER_MS), None);
        assert_eq!(lease.freeable_from(), None, "a write of it may still be in flight");
        assert!(lease.on_association_drained(7) && !lease.on_association_drained(7));
        assert_eq!(lease.freeable_from(), Some(100 + 2 * NS_PER_MS));
    }

    #[test]
    fn t25_leases_of_any_length_end_some_time() {
        for (now, lease_ms) in [(0, 0), (u64::MAX, u32::MAX), (1, u32::MAX)] {
            let mut lease = held();
            assert!(lease.on_association_lost(7, lease_ms, now));
            assert!(!lease.is_reserved(now.saturating_add(u64::from(u32::MAX) * NS_PER_MS)));
        }
    }
}
