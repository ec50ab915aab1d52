//! The ANA states of the ports, and the controllers that they concern.

use alloc::vec::Vec;

use riopipe_nvme::ana::{self, AnaState};
use riopipe_nvme::command::Status;
use riopipe_order::attribute::VolumeId;
use riopipe_order::region::Region;

use super::{Controller, Notice, Shared};
use crate::target::ana::{ANA_GROUP_MAX, PortState};
use crate::target::events::Events;
use crate::target::ids::ConnId;
use crate::target::reserved_access::ReservedAccess;

impl<R: Region> Shared<R> {
    /// Sets the state of a group at a port. From now on the controllers of the port carry out, or
    /// refuse, I/O commands by it. Commands that are at a drive come back, and those that wait are
    /// checked when they go on. The hosts are informed, if they have enabled that. Returns the connections
    /// to wake.
    pub fn set_ana_state(&mut self, state: PortState) -> Vec<ConnId> {
        if self.ana.set(state) {
            self.after_ana_change(state.port);
        }
        self.take_conns_to_wake()
    }

    /// Sets the states of all groups at all ports: those that are not named are *optimized*. Returns the
    /// connections to wake.
    pub fn set_ana_states(&mut self, states: &[PortState]) -> Vec<ConnId> {
        self.change_ana_states(states);
        self.take_conns_to_wake()
    }

    pub(super) fn change_ana_states(&mut self, states: &[PortState]) {
        let is_named = |other: &PortState| {
            states.iter().any(|state| (state.port, state.group) == (other.port, other.group))
        };
        let mut wanted: Vec<PortState> = self.ana.not_optimized();
        wanted.retain(|other| !is_named(other));
        wanted.iter_mut().for_each(|other| other.state = AnaState::Optimized);
        wanted.extend_from_slice(states);
        for state in wanted {
            if self.ana.set(state) {
                self.after_ana_change(state.port);
            }
        }
    }

    /// The states that are not *optimized*.
    #[must_use]
    pub fn ana_states(&self) -> Vec<PortState> {
        self.ana.not_optimized()
    }

    /// The log page Asymmetric Namespace Access of a controller.
    pub(in crate::target) fn ana_page(&self, cntlid: u16, groups_only: bool) -> Option<Vec<u8>> {
        let port = self.controllers.get(&cntlid)?.port;
        let (changes, groups) = self.ana.page(port, &self.namespaces);
        let mut page = ana::encode(changes, &groups, groups_only);
        // nvme-cli reads as much as there could be, in parts. A part may not begin behind the end.
        let most = ana::HEADER_LEN
            + ANA_GROUP_MAX as usize * ana::DESCRIPTOR_LEN
            + self.namespaces.highest_valid_id() as usize * 4;
        if page.len() < most {
            page.resize(most, 0);
        }
        Some(page)
    }

    /// The status of the ANA state with which an association is refused that needs all members of a
    /// volume here.
    pub(in crate::target) fn path_refusal_of(
        &self,
        volume: VolumeId,
        access: &ReservedAccess,
    ) -> Option<Status> {
        let members = self.volumes.find(volume).into_iter().flat_map(|volume| &volume.members);
        let found = members.filter_map(|member| self.namespaces.find(member.nsid));
        found.map(|(ns_index, _)| ns_index).find_map(|ns_index| access.path_refusal(ns_index))
    }

    /// Gives an association the access that the states of its port allow.
    pub(super) fn apply_ana(&self, port: u16, access: &ReservedAccess) {
        for (index, group) in self.namespaces.groups() {
            access.set_ana(index, self.ana.get(port, group));
        }
    }

    /// Notes that namespaces have come or gone, so that the log pages of all ports have changed.
    pub(super) fn after_ana_groups_changed(&mut self) {
        let mut ports: Vec<u16> =
            self.controllers.values().map(|controller| controller.port).collect();
        ports.sort_unstable();
        ports.dedup();
        for port in ports {
            self.ana.note_change(port);
            self.give_ana_access(port);
        }
    }

    fn give_ana_access(&self, port: u16) {
        for controller in self.controllers.values().filter(|other| other.port == port) {
            self.apply_ana(port, &controller.access);
        }
    }

    fn after_ana_change(&mut self, port: u16) {
        self.give_ana_access(port);
        let concerns = |controller: &Controller| !controller.discovery && controller.port == port;
        let mut admins = Vec::new();
        for controller in self.controllers.values_mut().filter(|other| concerns(other)) {
            Events::ana_changed(&mut controller.events);
            admins.push(controller.admin);
        }
        for admin in admins {
            self.leave_notice(admin, Notice::Event);
        }
    }
}
