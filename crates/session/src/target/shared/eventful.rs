//! Events of which controllers inform their hosts, and the errors of controllers.

use alloc::vec::Vec;

use riopipe_nvme::log_page::ErrorEntry;
use riopipe_order::region::Region;

use super::{Controller, Notice, Shared};
use crate::target::events::Events;
use crate::target::ids::ConnId;

impl<R: Region> Shared<R> {
    /// Notes that the namespace with this id was added or removed, or that its size or its attributes
    /// have changed. Each controller informs its host, if the host has enabled that (AEN *Namespace
    /// Attribute Changed*), and lists the namespace in its Changed Namespace List. Returns the
    /// connections to wake.
    pub fn namespace_changed(&mut self, nsid: u32) -> Vec<ConnId> {
        self.note_namespace_change(nsid);
        self.take_conns_to_wake()
    }

    pub(super) fn note_namespace_change(&mut self, nsid: u32) {
        self.note_event(
            |controller| !controller.discovery,
            |events| events.namespace_changed(nsid),
        );
    }

    /// Notes that the discovery log page has changed. Persistent discovery controllers inform their
    /// hosts. Returns the connections to wake.
    pub fn discovery_changed(&mut self) -> Vec<ConnId> {
        self.note_discovery_change();
        self.take_conns_to_wake()
    }

    pub(super) fn note_discovery_change(&mut self) {
        self.discovery_generation += 1;
        self.note_event(|controller| controller.discovery, Events::discovery_changed);
    }

    fn note_event(&mut self, concerns: fn(&Controller) -> bool, note: impl Fn(&mut Events)) {
        let mut admins = Vec::new();
        for controller in self.controllers.values_mut().filter(|other| concerns(other)) {
            note(&mut controller.events);
            admins.push(controller.admin);
        }
        for admin in admins {
            self.leave_notice(admin, Notice::Event);
        }
    }

    /// Adds errors to the log of a controller.
    pub(in crate::target) fn add_errors(
        &mut self,
        cntlid: u16,
        (skipped, errors): (u64, Vec<ErrorEntry>),
    ) {
        if let Some(controller) = self.controllers.get_mut(&cntlid) {
            controller.errors.add(skipped, &errors);
        }
    }
}
