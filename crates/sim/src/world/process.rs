//! The process of a program that uses the volume beside the events, as seen from the world.

use super::World;
use crate::client::Client;
use crate::core::{Core, Ev, US};
use crate::oracle::{Drives, Promise};

impl World {
    /// Access to the state that all parts share.
    pub(crate) const fn core_mut(&mut self) -> &mut Core {
        &mut self.core
    }

    /// The state that all parts share.
    pub(crate) const fn core(&self) -> &Core {
        &self.core
    }

    /// The owner of the volume and the number of its process, once a program may use all streams.
    pub(crate) fn usable_owner(&self) -> Option<(usize, u32)> {
        let owner = self.owner()?;
        let client = &self.clients[owner];
        client.is_usable().then(|| (owner, client.incarnation()))
    }

    /// Ends the process of an owner that can't open its streams. It is started again.
    pub(crate) fn end_failed_owner(&mut self) {
        if let Some(owner) = self.owner().filter(|owner| self.clients[*owner].has_failed_stream()) {
            self.end_process(owner, self.clients[owner].incarnation(), 1_000);
        }
    }

    /// Whether this process of an initiator still runs.
    pub(crate) fn is_running(&self, client: usize, incarnation: u32) -> bool {
        let client = &self.clients[client];
        client.is_up() && client.incarnation() == incarnation
    }

    /// Calls an initiator.
    pub(crate) fn with_client<R>(
        &mut self,
        client: usize,
        call: impl FnOnce(&mut Client, &Drives<'_>, &mut Core) -> R,
    ) -> R {
        let Self { clients, core, machines, .. } = self;
        call(&mut clients[client], &Drives(machines), core)
    }

    /// The program ends its process, whose streams can't be used any more. It is started again
    /// after a while, unless another initiator has the volume.
    pub(crate) fn end_process(&mut self, client: usize, incarnation: u32, down_us: u32) {
        if !self.is_running(client, incarnation) {
            return;
        }
        let is_owner = self.owner() == Some(client);
        self.releasing.take_if(|(at, _)| *at == client);
        self.crash_client(client, true);
        if is_owner || !self.clients.iter().any(Client::is_up) {
            self.core.after(u64::from(down_us) * US, Ev::StartClient(client));
        }
    }

    /// The program closes the volume. It is opened again after a while.
    pub(crate) fn release(&mut self, client: usize, for_us: u32) {
        if self.releasing.is_none() {
            self.clients[client].close();
            self.releasing = Some((client, for_us));
        }
    }

    /// Whether the process still closes the volume.
    pub(crate) fn is_releasing(&self, client: usize, incarnation: u32) -> bool {
        self.releasing.is_some_and(|(at, _)| at == client)
            && self.is_running(client, incarnation)
            && !self.clients[client].has_failed_stream()
    }

    /// The faults stop now, if they have not stopped before.
    pub(crate) fn end_faults(&mut self) {
        if self.faults_stopped_at.is_none() {
            self.stop_faults();
        }
    }

    /// Whether the faults have stopped.
    pub(crate) const fn have_faults_stopped(&self) -> bool {
        self.faults_stopped_at.is_some()
    }

    /// The number of power cuts of targets so far.
    pub(crate) const fn power_cuts(&self) -> u64 {
        self.power_cuts
    }

    /// Whether a drive was made to fail an operation. It loses then what it had not made durable.
    pub(crate) const fn has_drive_fault(&self) -> bool {
        self.has_drive_fault
    }

    /// Whether the run has ended well.
    pub(crate) const fn is_over(&self) -> bool {
        self.over
    }

    /// Reports a broken promise of the program.
    pub(crate) fn broken(&mut self, promise: Promise, what: String) {
        self.core.oracle.broken(promise, what);
    }

    /// Sets a block of the volume before the first event.
    pub(crate) fn preset(&mut self, block: usize, bytes: &[u8]) {
        let name = self.core.oracle.next_number();
        self.core.block_bytes.record(name, bytes);
        let at = self.core.map[block];
        self.machines[at.machine].env.drives[at.drive].preset(at.lba, name);
        self.core.oracle.preset(block, name);
    }

    /// The content of all blocks of the volume, as a reader of the drives finds them now.
    pub(crate) fn image(&self) -> Vec<u8> {
        let content = |at: &crate::oracle::Where| {
            self.machines[at.machine].env.drives[at.drive].block(at.lba)
        };
        let names: Vec<_> = self.core.map.iter().map(content).collect();
        let mut bytes = crate::block::bytes(&names);
        self.core.block_bytes.fill_in(&mut bytes);
        bytes
    }
}
