//! The reservations of all namespaces, and what they mean for the associations of the hosts.

use alloc::sync::Arc;
use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_nvme::reservation::{Keys, Kind, ReportEntry};
use riopipe_order::region::Region;

use super::notices::FenceEnd;
use super::{Notice, Shared};
use crate::target::block_locks::LockTicket;
use crate::target::ids::ConnId;
use crate::target::reservations::{Access, Change, Host, HostId, Informed};
use crate::target::reserved_access::ReservedAccess;
use crate::wire;

impl<R: Region> Shared<R> {
    /// Changes the reservations of a namespace for the host of `conn`, at time `now` in ns. The second
    /// result is that of [`await_reservations`](Self::await_reservations).
    pub(in crate::target) fn change_reservations(
        &mut self,
        conn: ConnId,
        ns_index: usize,
        (change, keys): (Change, Keys),
        now: u64,
    ) -> (Result<(), Status>, Option<LockTicket>) {
        let changed = self.carry_out_change(conn, ns_index, (change, keys), now);
        (changed, self.await_reservations(conn, ns_index))
    }

    fn carry_out_change(
        &mut self,
        conn: ConnId,
        ns_index: usize,
        (change, keys): (Change, Keys),
        now: u64,
    ) -> Result<(), Status> {
        let entry = self.conns.get(&conn).ok_or(Status::INTERNAL)?;
        let controller = self.controllers.get(&entry.cntlid).ok_or(Status::INTERNAL)?;
        let (hostid, association) = (controller.hostid, controller.association);
        let host = Host { id: hostid, nqn: controller.hostnqn.clone() };
        if change.takes_access() && !self.is_open_to(ns_index, association, now) {
            return Err(wire::status::GUARDED.with_dnr());
        }
        let namespace = self.reservations.entry(ns_index).or_default();
        let was_held = namespace.is_held();
        let informed = namespace.change(&host, change, keys)?;
        let is_held = namespace.is_held();
        self.inform_of_reservations(ns_index, &informed);
        if was_held || is_held {
            self.update_access(ns_index);
        }
        Ok(())
    }

    /// Whether no other association owns the volume of the namespace. Frees the volume if its lease
    /// has run out (trap T25).
    fn is_open_to(&mut self, ns_index: usize, association: u64, now: u64) -> bool {
        let namespaces = Arc::clone(&self.namespaces);
        let namespace = namespaces.at(ns_index);
        if !namespace.state.may_write(association) && namespace.state.is_lease_over(now) {
            self.free_namespace(namespace.config.nsid, now);
        }
        namespace.state.may_write(association)
    }

    /// Gives each association the access that the reservations of a namespace allow. If any has lost
    /// access, raises a fence, which ends when none of the operations that hosts without access had
    /// begun before can change a block any more (trap T8).
    fn update_access(&mut self, ns_index: usize) {
        let mut have_lost = false;
        for controller in self.controllers.values() {
            let access = self.access_of(controller.hostid, ns_index);
            have_lost |= controller.access.set(ns_index, access);
        }
        if have_lost {
            let end = FenceEnd::Reservation { ns_index, waiting: Vec::new() };
            // A read in flight fails when it comes back, so a host that may write is not awaited.
            self.raise_drain(ns_index, &(0..u64::MAX), end, |_, controller| {
                !controller.access.reservations_allow_writes(ns_index)
            });
        }
    }

    /// If operations of hosts without access may still change blocks of the namespace, returns a
    /// ticket: `conn` gets a [`Notice::BlocksLocked`](super::Notice::BlocksLocked) when they can't any
    /// more. Every command about reservations waits for that, also one that changes nothing. A host
    /// may have repeated its Acquire, because it has lost the connection of the first one, or may find
    /// by a Report that a reservation is made.
    pub(in crate::target) fn await_reservations(
        &mut self,
        conn: ConnId,
        ns_index: usize,
    ) -> Option<LockTicket> {
        self.fence_of_reservations(ns_index)?;
        let ticket = self.next_ticket();
        self.fence_of_reservations(ns_index)?.push((conn, ticket));
        Some(ticket)
    }

    fn inform_of_reservations(&mut self, ns_index: usize, informed: &[Informed]) {
        let nsid = self.namespaces.at(ns_index).config.nsid;
        let mut admins = Vec::new();
        for controller in self.controllers.values_mut().filter(|other| !other.discovery) {
            for (_, change) in informed.iter().filter(|(host, _)| *host == controller.hostid) {
                controller.events.reservation_changed(nsid, *change);
                admins.push(controller.admin);
            }
        }
        for admin in admins {
            self.leave_notice(admin, Notice::Event);
        }
    }

    fn access_of(&self, host: HostId, ns_index: usize) -> Access {
        self.reservations.get(&ns_index).map_or(Access::FULL, |namespace| namespace.access(host))
    }

    /// The access of a new association of this host.
    pub(super) fn initial_access(&self, host: HostId) -> ReservedAccess {
        let access = ReservedAccess::default();
        for (&ns_index, namespace) in &self.reservations {
            access.set(ns_index, namespace.access(host));
        }
        access
    }

    /// The content of Reservation Report for a namespace.
    pub(in crate::target) fn reservation_report(
        &self,
        ns_index: usize,
    ) -> (u32, Option<Kind>, Vec<ReportEntry>) {
        self.reservations
            .get(&ns_index)
            .map_or((0, None, Vec::new()), |namespace| namespace.report())
    }
}
