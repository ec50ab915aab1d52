//! The operator: starts all processes that are down, decides how to answer the volume's refusals,
//! ends the first phase, and closes the volume at the end.

use super::{LIVENESS_EVENTS, LIVENESS_NS, PlannedCrash, SAFETY_EVENTS, World};
use crate::client::{Client, Refused};
use crate::core::{Ev, MS, US};
use crate::oracle::{Drives, Promise};

impl World {
    /// Does the operator's work: starts all processes that are down, decides how to answer the
    /// volume's refusals, and closes the volume at the end.
    pub(super) fn supervise(&mut self) {
        if !self.core.oracle.has_lost_log() {
            // The volume was recovered without it. The next loss needs another decision.
            self.clients.iter_mut().for_each(|client| client.set_may_accept_lost(false));
        }
        for at in 0..self.clients.len() {
            match self.clients[at].take_refused() {
                None => {}
                // A standby initiator waits until the volume is free.
                Some(Refused::Owned) => {
                    let waits = self.standby == Some(at) && self.owner().is_some();
                    self.clients[at].set_may_take_over(!waits);
                }
                Some(Refused::Log(machine)) => self.log_refused(at, machine),
                // Only an operator does that. Otherwise the volume stays closed (promise P8).
                Some(Refused::OldLog) => self.put_logs_back(),
                Some(Refused::LogFailed(machine)) => self.repair_log(machine),
                Some(Refused::Drives) => self.put_drives_back(),
                Some(Refused::Other) => {}
            }
            if self.clients[at].is_broken() {
                self.crash_client(at, true);
                self.core.after(MS, Ev::StartClient(at));
            }
        }
        self.supervise_release();
        self.supervise_second_volume();
        let Some((events, time)) = self.faults_stopped_at else {
            if self.core.events > SAFETY_EVENTS || self.faults.is_empty() && self.is_idle() {
                self.stop_faults();
            } else if self.is_idle() {
                self.strike_next();
            }
            return;
        };
        if self.core.events > events + LIVENESS_EVENTS || self.core.now > time + LIVENESS_NS {
            let what = self.describe();
            self.core.oracle.broken(Promise::P8, what);
            return;
        }
        self.finish();
    }

    /// Opens a released volume again after a while.
    fn supervise_release(&mut self) {
        let Some((client, for_us)) = self.releasing else { return };
        if self.clients[client].is_over() {
            let closed = self.clients[client].is_closed();
            self.core.trace(|| format!("the volume is released: {closed}"));
            if closed {
                self.check_closed();
            }
            self.crash_client(client, true);
            let next = self.core.rng.index(2);
            if !self.clients[1 - client].is_up() {
                self.core.after(u64::from(for_us) * US, Ev::StartClient(next));
            }
            self.releasing = None;
        } else if self.owner() != Some(client) {
            self.releasing = None;
        }
    }

    /// An owner that has closed the volume with a clean stop leaves nothing to recover (trap T1).
    fn check_closed(&mut self) {
        if !self.core.oracle.is_free() {
            return;
        }
        for (at, machine) in self.machines.iter().enumerate() {
            if machine.right_log.is_some() {
                continue;
            }
            if let Some((stream, entries)) = machine.left_to_recover(&self.volumes[at]) {
                let what = format!(
                    "the volume was closed with a clean stop, and target {at} has {entries} entries \
                     of stream {stream} to recover"
                );
                self.core.oracle.broken(Promise::P8, what);
            }
        }
    }

    /// Whether the workload has ended.
    pub(super) fn is_idle(&self) -> bool {
        let writes = self.plain_hosts.iter().any(|plain_host| !plain_host.is_over())
            || self.claimants.iter().any(|claimant| !claimant.is_over());
        self.owner().is_some_and(|owner| !writes && !self.clients[owner].has_work(&self.core))
    }

    /// The owner of the volume.
    pub(super) fn owner(&self) -> Option<usize> {
        let current = self.core.oracle.current();
        let is_owner = |client: &Client| client.is_up() && client.era() == Some(current);
        self.clients.iter().position(is_owner).filter(|_| current > 0)
    }

    pub(super) fn log_refused(&mut self, client: usize, machine: usize) {
        // Before a log is given up, the operator searches for replaced drives: they may be the
        // cause.
        if self.machines.iter().any(|machine| machine.replaced_drive().is_some()) {
            return self.put_drives_back();
        }
        if self.machines.iter().any(|machine| machine.right_log.is_some()) {
            return self.put_logs_back();
        }
        self.core.trace(|| format!("the lost log of target {machine} is given up"));
        self.core.oracle.log_lost(machine);
        self.clients[client].set_may_accept_lost(true);
        self.give_up_log(machine);
    }

    /// Makes the log of a target anew, if it is not the right one.
    pub(super) fn give_up_log(&mut self, machine: usize) {
        self.given_up[machine] = true;
        if self.machines[machine].is_up() {
            self.crash_machine(machine, PlannedCrash { power: false, down_us: 100 });
        }
    }

    pub(super) fn repair_log(&mut self, machine: usize) {
        self.core.trace(|| format!("the log store of target {machine} is repaired"));
        self.machines[machine].store.heal();
        if self.machines[machine].is_up() {
            self.crash_machine(machine, PlannedCrash { power: false, down_us: 500 });
        }
    }

    pub(super) fn put_logs_back(&mut self) {
        (0..self.machines.len()).for_each(|machine| self.put_log_back(machine));
    }

    pub(super) fn put_log_back(&mut self, machine: usize) {
        let Some(log) = self.machines[machine].right_log.take() else { return };
        self.core.trace(|| format!("target {machine} gets its log back"));
        if self.machines[machine].is_up() {
            self.crash_machine(machine, PlannedCrash { power: false, down_us: 100 });
        }
        self.machines[machine].store.put_back(log);
    }

    /// Finds the drives that were replaced by others, and puts them back.
    pub(super) fn put_drives_back(&mut self) {
        for at in 0..self.machines.len() {
            if self.machines[at].replaced_drive().is_none() {
                continue;
            }
            self.core.trace(|| format!("machine {at} gets its drive back"));
            if self.machines[at].is_up() {
                self.crash_machine(at, PlannedCrash { power: true, down_us: 100 });
            }
            self.machines[at].put_drive_back();
            self.each_oracle(|oracle, now| oracle.drive_changes(at, now));
        }
    }

    /// Stops the faults.
    pub(super) fn stop_faults(&mut self) {
        self.core.trace(|| "faults stop".into());
        self.faults_stopped_at = Some((self.core.events, self.core.now));
        self.core.faults_stopped = true;
        self.faults.clear();
        if let Some(standby) = self.standby.take().filter(|at| self.owner() != Some(*at)) {
            self.crash_client(standby, true);
        }
        self.core.net.heal();
        self.put_drives_back();
        for at in 0..self.machines.len() {
            self.put_log_back(at);
            let machine = &mut self.machines[at];
            machine.env.drives.iter_mut().for_each(|drive| drive.heal());
            machine.store.heal();
            machine.env.crash_injector.reset();
            self.planned_crashes[at] = None;
        }
    }

    /// The second phase: the owner of the volume finishes and closes it.
    pub(super) fn finish(&mut self) {
        match self.owner() {
            Some(owner) if self.clients[owner].is_over() => {
                if self.clients[owner].is_closed() {
                    if !self.second_volume_is_done() {
                        return;
                    }
                    self.check_closed();
                    let Self { core, machines, .. } = self;
                    core.oracle.check_end(&Drives(machines));
                    core.trace(|| "the volume is closed".into());
                    self.over = true;
                } else {
                    self.clients[owner].kill();
                    self.core.after(MS, Ev::StartClient(owner));
                }
            }
            Some(owner) if self.clients[owner].is_fenced() => {
                self.crash_client(owner, true);
                self.core.after(MS, Ev::StartClient(owner));
            }
            Some(owner) => {
                let client = &mut self.clients[owner];
                if !client.has_work(&self.core) && !client.has_left(&self.core) {
                    client.close();
                }
            }
            None => {
                let trying =
                    |client: &Client| client.is_up() && !client.is_fenced() && !client.is_over();
                let opens = |client: &Client| trying(client) && client.era().is_none();
                if self.clients.iter().all(opens) {
                    // Each might take the volume from the other, again and again.
                    self.crash_client(1, true);
                } else if !self.clients.iter().any(opens) {
                    self.crash_client(0, true);
                    self.clients[0].set_may_take_over(true);
                    self.core.after(MS, Ev::StartClient(0));
                }
            }
        }
    }

    pub(super) fn describe(&mut self) -> String {
        let mut text = String::from("faults have stopped, but not all work ends:");
        for (at, client) in self.clients.iter().enumerate() {
            text.push_str(&format!(" initiator {at}: {};", client.describe(&self.core)));
        }
        for (at, machine) in self.machines.iter().enumerate() {
            let up = if machine.is_up() { "up" } else { "down" };
            text.push_str(&format!(" target {at}: {up};"));
        }
        text + &self.describe_second_volume()
    }
}
