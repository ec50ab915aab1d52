//! The faults, and their moments.

use super::{PlannedCrash, Stop, World};
use crate::client::claimant::Claimant;
use crate::client::plain_host::PlainHost;
use crate::client::{Client, SECOND_VOLUME};
use crate::core::{Ev, US};
use crate::drive::LABEL_BLOCKS;
use crate::log_store::KeptLog;
use crate::network::{ClientEnd, Direction, Role};
use crate::oracle::Where;
use crate::scenario::{Ends, Fault, What, When};

impl World {
    /// Carries out the faults that are due.
    pub(super) fn strike_due(&mut self) {
        let core = &self.core;
        let due = |fault: &Fault| match fault.when {
            When::Event(at) => core.events >= u64::from(at),
            When::Recovery(nth, after) => reached(core.recoveries, nth, after, core.events),
            When::Replay(nth, after) => reached(core.replays, nth, after, core.events),
            When::Undo(nth, after) => reached(core.undos, nth, after, core.events),
            When::Call(nth, after) => reached(core.calls, nth, after, core.events),
            When::Group(kind, nth, after) => {
                reached(core.groups[kind as usize], nth, after, core.events)
            }
        };
        if let Some(at) = self.faults.iter().position(due) {
            let fault = self.faults.remove(at);
            self.strike(fault.what);
            self.strike_due();
        }
    }

    /// Carries out the next fault before its moment, because no other work is left.
    pub(super) fn strike_next(&mut self) {
        let due = |fault: &Fault| matches!(fault.when, When::Event(_));
        match self.faults.iter().position(due) {
            Some(at) => {
                let fault = self.faults.remove(at);
                self.strike(fault.what);
            }
            // Faults that wait for a recovery or replay that never comes are dropped.
            None => self.faults.clear(),
        }
    }

    fn strike(&mut self, what: What) {
        self.core.trace(|| format!("fault: {what:?}"));
        match what {
            What::Kill { machine, effects, fences, down_us } => {
                self.planned(machine, effects, fences, PlannedCrash { power: false, down_us });
            }
            What::PowerCut { machine, effects, fences, down_us } => {
                self.planned(machine, effects, fences, PlannedCrash { power: true, down_us });
            }
            What::KillAll { down_us } => self.kill_all(false, down_us),
            What::BlackOut { down_us } => self.kill_all(true, down_us),
            What::KillClient { down_us } => {
                let client = self.owner().unwrap_or(0);
                if self.clients[client].is_up() {
                    self.crash_client(client, true);
                    self.core.after(u64::from(down_us) * US, Ev::StartClient(client));
                }
            }
            What::Cut { nth, ends } => {
                if let Some(conn) = self.nth(nth) {
                    self.cut(conn, ends);
                }
            }
            What::CutUndo => {
                let undo = |end: &ClientEnd| matches!(end.role, Role::Undo(_));
                let net = &self.core.net;
                let there: Vec<usize> = net.find(|c| c.client.as_ref().is_some_and(undo)).collect();
                there.into_iter().for_each(|conn| self.cut(conn, Ends::Both));
            }
            What::Stall { nth, up, for_us } => {
                if let Some(conn) = self.nth(nth) {
                    let until = self.core.now + u64::from(for_us) * US;
                    self.core.net.stall(
                        conn,
                        if up { Direction::Up } else { Direction::Down },
                        until,
                    );
                }
            }
            What::Lag { machine, by_us, for_us } => {
                let until = self.core.now + u64::from(for_us) * US;
                let net = &mut self.core.net;
                let admin = |end: &ClientEnd| end.role == Role::Admin(machine as u16);
                let late: Vec<usize> =
                    net.find(|conn| conn.client.as_ref().is_some_and(admin)).collect();
                for conn in late {
                    net.lag(conn, Direction::Down, until, u64::from(by_us) * US);
                }
            }
            What::LateStreams { by_us, for_us } => {
                let until = self.core.now + u64::from(for_us) * US;
                self.core.net.lag_streams(until, u64::from(by_us) * US);
            }
            What::TakeOver { for_us } => self.take_over(for_us),
            What::Standby => self.start_standby(),
            What::Unreachable { for_us } => {
                let client = self.owner().unwrap_or(0);
                self.partition(client, None, for_us);
                let net = &self.core.net;
                let is_its_end = |end: &ClientEnd| end.client == client;
                let there: Vec<usize> =
                    net.find(|c| c.client.as_ref().is_some_and(is_its_end)).collect();
                there.into_iter().for_each(|conn| self.cut(conn, Ends::Both));
            }
            What::Partition { machine, for_us } => {
                let client = self.owner().unwrap_or(0);
                self.partition(client, Some(machine), for_us);
            }
            What::Drive { machine, drive, fault } => {
                self.has_drive_fault = true;
                self.machines[machine].env.drives[drive].plan_fault(fault);
            }
            What::Log { machine, fences } => {
                self.each_oracle(|oracle, now| oracle.log_fails(machine, now));
                self.machines[machine].store.fail_fence_after(fences);
            }
            What::BlankLog { machine } => {
                if self.may_replace_log(machine) {
                    let log = self.machines[machine].store.replace();
                    self.keep_right_log(machine, log);
                }
            }
            What::Stop { machine, off, cut, down_us } => {
                if self.machines[machine].is_accepting() {
                    self.stops[machine] = Stop { off, cut, down_us };
                    self.machines[machine].stop();
                    self.settle(machine);
                }
            }
            What::CopyLog { machine } => {
                let target = &self.machines[machine];
                let generations = target.log_generations(&self.volumes[machine]);
                self.copies[machine] =
                    generations.map(|generations| (generations, target.store.copy()));
            }
            What::OldLog { machine } => {
                let second = self.second_volume.as_ref().map(|it| it.side.label_generation);
                let now = [self.core.label_generation].into_iter().chain(second);
                let older = |(generations, _): &mut (Vec<u32>, _)| {
                    generations.iter().zip(now).all(|(copied, now)| *copied < now)
                };
                if let Some((_, copy)) = self.copies[machine].take_if(older)
                    && self.may_replace_log(machine)
                {
                    let log = self.machines[machine].store.replace_with(copy);
                    self.keep_right_log(machine, log);
                }
            }
            What::Unprotect { machine, drive, down_us } => {
                self.each_oracle(|oracle, now| oracle.drive_changes(machine, now));
                if self.machines[machine].is_up() {
                    self.crash_machine(machine, PlannedCrash { power: false, down_us });
                }
                self.machines[machine].env.drives[drive].unprotect();
            }
            What::WrongDrive { machine, drive, whose } => {
                let target = &self.machines[machine];
                if target.is_accepting() && target.replaced_drive().is_none() {
                    self.crash_machine(machine, PlannedCrash { power: true, down_us: 200 });
                    self.machines[machine].replace_drive(drive, whose);
                    self.each_oracle(|oracle, now| oracle.drive_is_replaced(machine, now));
                }
            }
            What::Claimant { machine, drive, volumes } => {
                let mut claimant = Claimant::new(self.claimants.len(), machine, drive, volumes);
                claimant.start(&mut self.core);
                self.claimants.push(claimant);
            }
            What::Release { for_us } => {
                if let Some(owner) = self.owner().filter(|_| self.releasing.is_none()) {
                    self.clients[owner].close();
                    self.releasing = Some((owner, for_us));
                }
            }
            What::CorruptLog { machine, how, bit } => {
                if self.may_replace_log(machine) {
                    if self.machines[machine].is_up() {
                        self.crash_machine(machine, PlannedCrash { power: false, down_us: 200 });
                    }
                    let right = self.machines[machine].store.copy();
                    self.machines[machine].store.corrupt(how, bit);
                    self.keep_right_log(machine, right);
                }
            }
            What::PlainHost { machine, drive, lba, more, forgets } => {
                let content = self.core.oracle.next_number();
                // A host that overwrites labels cannot be defended against.
                let at = Where { machine, drive, lba: lba.max(LABEL_BLOCKS) };
                let mut plain_host =
                    PlainHost::new(self.plain_hosts.len(), at, content, more, forgets);
                plain_host.start(&mut self.core);
                self.plain_hosts.push(plain_host);
            }
        }
    }

    fn may_replace_log(&self, machine: usize) -> bool {
        let second = self.second_volume.iter().map(|it| &it.client);
        let giving_up = self.clients.iter().chain(second).any(Client::accepts_lost);
        self.machines[machine].right_log.is_none() && !giving_up
    }

    /// Notes that another log is in the place of a machine's log, and keeps the right one.
    fn keep_right_log(&mut self, machine: usize, log: KeptLog) {
        self.each_oracle(|oracle, now| oracle.log_fails(machine, now));
        if self.machines[machine].is_up() {
            self.crash_machine(machine, PlannedCrash { power: false, down_us: 200 });
        }
        self.machines[machine].right_log = Some(log);
    }

    fn kill_all(&mut self, power: bool, down_us: u32) {
        if self.second_volume.as_ref().is_some_and(|it| it.client.is_up()) {
            self.crash_second_volume(!power);
            self.core.after(u64::from(down_us) * US, Ev::StartClient(SECOND_VOLUME));
        }
        for machine in 0..self.machines.len() {
            if self.machines[machine].is_up() {
                self.crash_machine(machine, PlannedCrash { power, down_us });
            }
        }
        for client in 0..self.clients.len() {
            if self.clients[client].is_up() {
                self.crash_client(client, !power);
                self.core.after(u64::from(down_us) * US, Ev::StartClient(client));
            }
        }
    }

    fn planned(&mut self, machine: usize, effects: u32, fences: bool, planned: PlannedCrash) {
        if !self.machines[machine].is_up() {
            return;
        }
        if effects == 0 && !fences {
            self.crash_machine(machine, planned);
        } else {
            self.planned_crashes[machine] = Some(planned);
            self.machines[machine].stop_after(effects, fences);
        }
    }

    /// The `nth` open connection.
    fn nth(&self, nth: u32) -> Option<usize> {
        let there: Vec<usize> =
            self.core.net.find(|conn| conn.client.is_some() && conn.server.is_some()).collect();
        (!there.is_empty()).then(|| there[nth as usize % there.len()])
    }

    fn cut(&mut self, conn: usize, ends: Ends) {
        let now = self.core.now;
        if ends != Ends::Client
            && let Some(time) = self.core.net.reset(conn, Direction::Up, now)
        {
            self.core.at(time, Ev::Arrive { conn, up: true });
        }
        if ends != Ends::Server
            && let Some(time) = self.core.net.reset(conn, Direction::Down, now)
        {
            self.core.at(time, Ev::Arrive { conn, up: false });
        }
        match ends {
            Ends::Both => {}
            // The bytes that it has sent may still arrive, much later.
            Ends::Client => {
                let until = now + self.core.rng.below(20_000) * US;
                self.core.net.stall(conn, Direction::Up, until);
                self.core.net.cut(conn, Direction::Up);
            }
            Ends::Server => self.core.net.cut(conn, Direction::Down),
        }
    }

    /// Stops everything between an initiator and a machine (or all) for a while.
    fn partition(&mut self, client: usize, machine: Option<usize>, for_us: u32) {
        let until = self.core.now + u64::from(for_us) * US;
        self.core.net.partition(client, machine, until);
        self.core.at(until, Ev::Heal);
    }

    fn start_standby(&mut self) {
        let Some(owner) = self.owner() else { return };
        let other = 1 - owner;
        if !self.clients[other].is_up() {
            self.standby = Some(other);
            self.clients[other].set_may_take_over(false);
            self.core.after(100 * US, Ev::StartClient(other));
        }
    }

    fn take_over(&mut self, for_us: u32) {
        let Some(owner) = self.owner() else { return };
        let other = 1 - owner;
        if self.clients[other].is_up() {
            // The other initiator has been fenced, and gives up.
            self.crash_client(other, true);
        }
        self.partition(owner, None, for_us);
        self.standby = None;
        self.clients[other].set_may_take_over(true);
        self.core.after(100 * US, Ev::StartClient(other));
    }
}

fn reached(begun: (u32, u64), nth: u32, after: u32, events: u64) -> bool {
    begun.0 > nth + 1 || begun.0 == nth + 1 && events >= begun.1 + u64::from(after)
}
