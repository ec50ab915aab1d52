//! The reservations of one namespace (Base §8.19): which hosts are registered, which of them holds a
//! reservation, and which hosts may read and write because of it.
//!
//! Hosts are known by their host identifiers, so a reservation outlives associations. It is kept in
//! memory: it ends with the process of the target (RESCAP bit 0 is clear).

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_nvme::reservation::{Keys, Kind, Notification, ReportEntry};

use super::limits::{REGISTRANTS_MAX, REGISTRANTS_OF_NQN_MAX};

/// A host identifier.
pub(super) type HostId = [u8; 16];

/// A host that sends a command about reservations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    pub(super) id: HostId,
    /// Its name. Only the number of registrations with the same name depends on it.
    pub(super) nqn: String,
}

/// A registered host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Registrant {
    host: HostId,
    nqn: String,
    key: u64,
}

/// A reservation that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    kind: Kind,
    /// The holder. If all registrants are holders, the one that made the reservation.
    host: HostId,
}

/// The reservations of a namespace.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    /// In the order in which they registered.
    registrants: Vec<Registrant>,
    held: Option<Held>,
    generation: u32,
}

/// A change that a host requests. The keys are those of the command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Register with the other key.
    Register,
    /// End the registration.
    Unregister {
        /// The current key does not matter.
        any_key: bool,
    },
    /// Take the other key instead of the current one.
    Replace {
        /// Neither the current key nor a registration matters.
        any_key: bool,
    },
    /// Make a reservation of this type.
    Acquire(Kind),
    /// End the registrations with the other key, and take over a reservation that they hold.
    Preempt(Kind),
    /// End the reservation, which must be of this type.
    Release(Kind),
    /// End the reservation and all registrations.
    Clear,
}

impl Change {
    /// Whether the change may take access from others that no reservation has excluded before.
    pub(super) const fn takes_access(self) -> bool {
        matches!(self, Self::Acquire(_) | Self::Preempt(_))
    }
}

/// A host that is to be informed of a change.
pub(super) type Informed = (HostId, Notification);

/// The access that a host has because of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) may_read: bool,
    pub(super) may_write: bool,
}

impl Access {
    pub(super) const FULL: Self = Self { may_read: true, may_write: true };
}

/// The status of everything that a reservation does not allow.
pub(super) const CONFLICT: Status = Status::RESERVATION_CONFLICT.with_dnr();

impl Reservations {
    /// Carries out a change for a host. Returns the hosts to inform of it.
    ///
    /// # Errors
    /// The status with which the command fails. Nothing has changed then.
    pub(super) fn change(
        &mut self,
        host: &Host,
        change: Change,
        keys: Keys,
    ) -> Result<Vec<Informed>, Status> {
        let held_before = self.held;
        let is_informed =
            held_before.is_some() || matches!(change, Change::Preempt(_) | Change::Clear);
        let before: Vec<HostId> = match is_informed {
            true => self.registrants.iter().map(|registrant| registrant.host).collect(),
            // No host loses anything by the change.
            false => Vec::new(),
        };
        self.carry_out(host, change, keys)?;
        Ok(self.informed(host.id, change, &before, held_before))
    }

    /// Whether a reservation is held.
    pub(super) const fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// The other hosts that are to be informed of a change by `host`.
    fn informed(
        &self,
        host: HostId,
        change: Change,
        before: &[HostId],
        held_before: Option<Held>,
    ) -> Vec<Informed> {
        let is_gone = |other: HostId| self.registrant(other).is_none();
        let others = before.iter().copied().filter(|other| *other != host);
        let gone = others.clone().filter(|other| is_gone(*other));
        let mut informed: Vec<Informed> = match change {
            Change::Clear => {
                gone.map(|other| (other, Notification::ReservationPreempted)).collect()
            }
            Change::Preempt(_) => {
                gone.map(|other| (other, Notification::RegistrationPreempted)).collect()
            }
            _ => Vec::new(),
        };
        // The registrants that have shared a reservation which has ended, or is of another type now.
        let was_shared = held_before.is_some_and(|held| held.kind.admits_registrants());
        let has_ended = held_before.map(|held| held.kind) != self.held.map(|held| held.kind);
        if was_shared && has_ended && change != Change::Clear {
            let left = others.filter(|other| !is_gone(*other));
            informed.extend(left.map(|other| (other, Notification::ReservationReleased)));
        }
        informed
    }

    fn carry_out(&mut self, from: &Host, change: Change, keys: Keys) -> Result<(), Status> {
        let host = from.id;
        let counts = match change {
            Change::Register => self.register(from, keys.other).map(|()| true),
            Change::Unregister { any_key } => {
                self.check_key(host, keys.current, any_key)?;
                self.unregister(|registrant| registrant.host == host);
                Ok(true)
            }
            Change::Replace { any_key } => self.replace(from, keys, any_key).map(|()| true),
            Change::Acquire(kind) => {
                self.check_key(host, keys.current, false)?;
                self.acquire(host, kind).map(|()| false)
            }
            Change::Preempt(kind) => {
                self.check_key(host, keys.current, false)?;
                self.preempt(host, kind, keys.other).map(|()| true)
            }
            Change::Release(kind) => {
                self.check_key(host, keys.current, false)?;
                self.release(host, kind).map(|()| false)
            }
            Change::Clear => {
                self.check_key(host, keys.current, false)?;
                (self.held, self.registrants) = (None, Vec::new());
                Ok(true)
            }
        };
        if counts? {
            self.generation = self.generation.wrapping_add(1);
        }
        Ok(())
    }

    fn registrant(&self, host: HostId) -> Option<&Registrant> {
        self.registrants.iter().find(|registrant| registrant.host == host)
    }

    /// Checks that a host is registered with this key.
    fn check_key(&self, host: HostId, key: u64, any_key: bool) -> Result<(), Status> {
        match self.registrant(host) {
            Some(registrant) if any_key || registrant.key == key => Ok(()),
            _ => Err(CONFLICT),
        }
    }

    fn register(&mut self, host: &Host, key: u64) -> Result<(), Status> {
        // A key of 0 means something else when a reservation is preempted.
        if key == 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        match self.registrant(host.id) {
            Some(registrant) if registrant.key == key => Ok(()),
            Some(_) => Err(CONFLICT),
            None if self.is_full_for(&host.nqn) => Err(Status::INTERNAL),
            None => {
                self.registrants.push(Registrant { host: host.id, nqn: host.nqn.clone(), key });
                Ok(())
            }
        }
    }

    /// Whether no further host with this name may register. A host may have many identifiers, and must
    /// not use up the registrations of all others (trap T28).
    fn is_full_for(&self, nqn: &str) -> bool {
        let of_nqn = self.registrants.iter().filter(|registrant| registrant.nqn == nqn).count();
        self.registrants.len() >= REGISTRANTS_MAX || of_nqn >= REGISTRANTS_OF_NQN_MAX
    }

    fn replace(&mut self, from: &Host, keys: Keys, any_key: bool) -> Result<(), Status> {
        let host = from.id;
        if any_key && self.registrant(host).is_none() {
            return self.register(from, keys.other);
        }
        self.check_key(host, keys.current, any_key)?;
        if keys.other == 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        for registrant in self.registrants.iter_mut().filter(|other| other.host == host) {
            registrant.key = keys.other;
        }
        Ok(())
    }

    fn is_holder(&self, held: Held, host: HostId) -> bool {
        held.host == host || held.kind.is_held_by_all() && self.registrant(host).is_some()
    }

    fn acquire(&mut self, host: HostId, kind: Kind) -> Result<(), Status> {
        match self.held {
            None => {
                self.held = Some(Held { kind, host });
                Ok(())
            }
            Some(held) if held.kind == kind && self.is_holder(held, host) => Ok(()),
            Some(_) => Err(CONFLICT),
        }
    }

    fn preempt(&mut self, host: HostId, kind: Kind, key: u64) -> Result<(), Status> {
        match self.held {
            Some(held) if held.kind.is_held_by_all() && key == 0 => {
                self.held = Some(Held { kind, host });
                self.registrants.retain(|registrant| registrant.host == host);
                Ok(())
            }
            Some(held)
                if !held.kind.is_held_by_all()
                    && self.registrant(held.host).is_some_and(|holder| holder.key == key) =>
            {
                // The reservation passes to the host, and there is always one.
                self.held = Some(Held { kind, host });
                self.registrants.retain(|other| other.key != key || other.host == host);
                Ok(())
            }
            Some(held) if !held.kind.is_held_by_all() && key == 0 => {
                Err(Status::INVALID_FIELD.with_dnr())
            }
            _ if self.registrants.iter().any(|registrant| registrant.key == key) => {
                self.unregister(|registrant| registrant.key == key);
                Ok(())
            }
            _ => Err(CONFLICT),
        }
    }

    fn release(&mut self, host: HostId, kind: Kind) -> Result<(), Status> {
        match self.held {
            Some(held) if self.is_holder(held, host) => {
                if held.kind != kind {
                    return Err(CONFLICT);
                }
                self.held = None;
                Ok(())
            }
            // A host that holds nothing has nothing to release.
            _ => Ok(()),
        }
    }

    /// Ends registrations, and a reservation whose last holder is gone.
    fn unregister(&mut self, is_it: impl Fn(&Registrant) -> bool) {
        self.registrants.retain(|registrant| !is_it(registrant));
        let Some(held) = self.held else { return };
        if self.registrant(held.host).is_some() {
            return;
        }
        self.held = match self.registrants.first() {
            Some(first) if held.kind.is_held_by_all() => Some(Held { host: first.host, ..held }),
            _ => None,
        };
    }

    /// The access of a host.
    pub(super) fn access(&self, host: HostId) -> Access {
        let Some(held) = self.held else { return Access::FULL };
        let is_registered = self.registrant(host).is_some();
        if self.is_holder(held, host) || held.kind.admits_registrants() && is_registered {
            return Access::FULL;
        }
        Access { may_read: held.kind.admits_readers(), may_write: false }
    }

    /// The generation, the type of the reservation, and the registrants, for Reservation Report.
    pub(super) fn report(&self) -> (u32, Option<Kind>, Vec<ReportEntry>) {
        let entry = |registrant: &Registrant| ReportEntry {
            holds: self.held.is_some_and(|held| self.is_holder(held, registrant.host)),
            key: registrant.key,
            hostid: registrant.host,
        };
        let kind = self.held.map(|held| held.kind);
        (self.generation, kind, self.registrants.iter().map(entry).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: u64) -> Host {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        Host { id, nqn: alloc::format!("nqn.2014-08.org.nvmexpress:uuid:host-{number}") }
    }

    #[test]
    fn t28_the_number_of_registrants_is_limited() {
        let mut reservations = Reservations::default();
        let keys = Keys { current: 0, other: 1 };
        for number in 0..REGISTRANTS_MAX as u64 {
            let registered = reservations.change(&host(number), Change::Register, keys);
            assert_eq!(registered, Ok(Vec::new()));
        }
        let one_more = host(REGISTRANTS_MAX as u64);
        let refused = reservations.change(&one_more, Change::Register, keys);
        assert_eq!(refused, Err(Status::INTERNAL));
        let replace = Change::Replace { any_key: true };
        assert_eq!(reservations.change(&one_more, replace, keys), Err(Status::INTERNAL));
        let unregister = Change::Unregister { any_key: true };
        assert_eq!(reservations.change(&host(0), unregister, keys), Ok(Vec::new()));
        assert_eq!(reservations.change(&one_more, Change::Register, keys), Ok(Vec::new()));
    }

    /// A host that connects with many identifiers leaves registrations to others.
    #[test]
    fn t28_the_number_of_registrants_with_one_name_is_limited() {
        let mut reservations = Reservations::default();
        let keys = Keys { current: 0, other: 1 };
        let same_name = |number| Host { nqn: host(0).nqn, ..host(number) };
        for number in 0..REGISTRANTS_OF_NQN_MAX as u64 {
            let registered = reservations.change(&same_name(number), Change::Register, keys);
            assert_eq!(registered, Ok(Vec::new()));
        }
        let one_more = same_name(REGISTRANTS_OF_NQN_MAX as u64);
        for change in [Change::Register, Change::Replace { any_key: true }] {
            assert_eq!(reservations.change(&one_more, change, keys), Err(Status::INTERNAL));
        }
        assert_eq!(reservations.change(&host(5000), Change::Register, keys), Ok(Vec::new()));
    }
}
