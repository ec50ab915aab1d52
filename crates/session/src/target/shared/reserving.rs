//! The reservations of all namespaces, and what they mean for the associations of the hosts.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_nvme::reservation::{Keys, Kind, ReportEntry};
use riopipe_order::region::Region;

use super::notices::FenceEnd;
use super::{Notice, Shared};
use crate::target::block_locks::LockTicket;
use crate::target::ids::ConnId;
use crate::target::reservations::{Access, Change, HostId, Informed};
use crate::target::reserved_access::ReservedAccess;

impl<R: Region> Shared<R> {
    /// Changes the reservations of a namespace for the host of `conn`. If other hosts lose access by
    /// that, returns a ticket: `conn` gets a
    /// [`Notice::BlocksLocked`](super::Notice::BlocksLocked) when none of their operations that had
    /// begun before can change a block any more (trap T8).
    pub(in crate::target) fn change_reservations(
        &mut self,
        conn: ConnId,
        ns_index: usize,
        (host, change, keys): (HostId, Change, Keys),
    ) -> Result<Option<LockTicket>, Status> {
        let namespace = self.reservations.entry(ns_index).or_default();
        let informed = namespace.change(host, change, keys)?;
        self.inform_of_reservations(ns_index, &informed);
        let mut have_lost = false;
        for controller in self.controllers.values() {
            let access = self.access_of(controller.hostid, ns_index);
            have_lost |= controller.access.set(ns_index, access);
        }
        if !have_lost {
            return Ok(None);
        }
        let ticket = self.next_ticket();
        let end = FenceEnd::Lock { conn, ticket };
        let fence = self.raise_drain(ns_index, &(0..u64::MAX), Some(conn), end);
        Ok(fence.map(|_| ticket))
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
