//! The simulated cluster: machines, initiators, the network between them, and the faults.
//!
//! A run has two phases. In the first phase the workload runs while faults strike. Then faults
//! stop, all processes that are down start again, and everything submitted must end within bounds
//! (promise P8).

use std::collections::HashSet;

use riopipe_order::attribute::Seq;
use riopipe_order::log_region::NewVolume;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::topology::{MemberInfo, ServerInfo, Topology};

use crate::client::claimant::{self, Claimant};
use crate::client::plain_host::{self, HostAnswer, PlainHost};
use crate::client::{Client, SECOND_VOLUME};
use crate::core::{Core, Ev, MS, Trace, US};
use crate::device::{self, DeviceCounts};
use crate::drive::LABEL_BLOCKS;
use crate::fs::{self, FsCounts};
use crate::log_store::{KeptLog, LogStoreKind};
use crate::machine::{self, Machine, Out, new_volume};
use crate::network::{Chunk, Direction};
use crate::oracle::{Drives, Promise, Violation, Where};
use crate::rng::Rng;
use crate::scenario::{Fault, Scenario};

mod engines;
mod faults;
mod operator;
mod process;
pub(crate) mod second_volume;

use second_volume::{SecondVolume, Side};

/// The first phase ends at the latest after this number of events.
const SAFETY_EVENTS: u64 = 12_000;
/// The second phase must end within this number of events.
const LIVENESS_EVENTS: u64 = 60_000;
/// The second phase must also end within this time, ns.
const LIVENESS_NS: u64 = 30_000 * MS;

/// The planned crash of a machine's process, which takes place when the crash injector stops it.
#[derive(Clone, Copy, Debug)]
struct PlannedCrash {
    power: bool,
    down_us: u32,
}

/// The end of a target after a clean stop.
#[derive(Clone, Copy, Debug, Default)]
struct Stop {
    off: bool,
    cut: u32,
    down_us: u32,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The broken promise, if there is one.
    pub violation: Option<Violation>,
    /// The number of events.
    pub events: u64,
    /// The number of crashes of targets and initiators.
    pub crashes: u64,
    /// The number of recoveries that were begun.
    pub recoveries: u64,
    /// The work of a file system on the volume.
    pub fs: FsCounts,
    /// The work of a plain device on the volume.
    pub device: DeviceCounts,
}

/// The cluster.
pub struct World {
    core: Core,
    machines: Vec<Machine>,
    /// On each machine, the places of the volumes in its log.
    volumes: Vec<Vec<NewVolume>>,
    clients: Vec<Client>,
    second_volume: Option<SecondVolume>,
    plain_hosts: Vec<PlainHost>,
    claimants: Vec<Claimant>,
    /// The faults that have not struck yet.
    faults: Vec<Fault>,
    /// The initiator that may not take the volume over from an owner.
    standby: Option<usize>,
    /// The initiator that releases the volume, and the time after which the volume is opened again,
    /// µs.
    releasing: Option<(usize, u32)>,
    planned_crashes: Vec<Option<PlannedCrash>>,
    stops: Vec<Stop>,
    /// Copies of logs, each with the generations of the volumes in it.
    copies: Vec<Option<(Vec<u32>, KeptLog)>>,
    /// Logs that the operator has decided to give up.
    given_up: Vec<bool>,
    /// On each machine, the connection of the owner's association that the target ended last.
    ended: Vec<Option<usize>>,
    crashes: u64,
    /// The power cuts of targets.
    power_cuts: u64,
    /// A drive was made to fail an operation.
    has_drive_fault: bool,
    faults_stopped_at: Option<(u64, u64)>,
    over: bool,
}

/// Runs a scenario to its end. Writes the events to `trace`.
#[must_use]
pub fn run(scenario: &Scenario, trace: Option<Trace>) -> Outcome {
    match World::new(scenario, trace) {
        Ok(world) if scenario.fs.is_some() => fs::run(world, scenario).0,
        Ok(world) if scenario.device.is_some() => device::run(world, scenario),
        Ok(world) => world.run(),
        Err(what) => impossible(what),
    }
}

/// Runs a scenario with a file system to its end. Returns the content of the volume, too, in which
/// the file system was unmounted if no promise was broken.
#[must_use]
pub fn run_file_system(scenario: &Scenario, trace: Option<Trace>) -> (Outcome, Vec<u8>) {
    match World::new(scenario, trace) {
        Ok(world) => fs::run(world, scenario),
        Err(what) => (impossible(what), Vec::new()),
    }
}

/// The result of a scenario that is none.
fn impossible(what: String) -> Outcome {
    let violation = Some(Violation { promise: Promise::P8, what });
    Outcome { violation, ..Outcome::default() }
}

/// The place of each block of the volume.
fn map(scenario: &Scenario) -> Result<Vec<Where>, String> {
    let volume = &scenario.volume;
    let members = volume.members.iter().map(|(machine, _)| MemberInfo {
        server: *machine as u16,
        start: u64::from(volume.first),
        blocks: u64::from(scenario.machines[*machine].blocks.saturating_sub(volume.first)),
        request_blocks_max: volume.request_blocks,
        volatile: false,
    });
    let servers = scenario.machines.iter().map(|_| ServerInfo { slots: volume.slots });
    let topology = Topology::new(members.collect(), servers.collect(), volume.unit)
        .map_err(|e| e.to_string())?;
    let mut map = Vec::new();
    topology.for_each_extent(0, topology.blocks() as u32, |extent| {
        let (machine, drive) = volume.members[usize::from(extent.member.0)];
        for lba in extent.lba..extent.lba + u64::from(extent.blocks) {
            map.push(Where { machine, drive, lba: lba as u32 });
        }
    });
    Ok(map)
}

impl World {
    fn new(scenario: &Scenario, trace: Option<Trace>) -> Result<Self, String> {
        let traced = trace.is_some();
        let mut core = Core::new(scenario.clone(), map(scenario)?, trace);
        let mut rng = Rng::new(scenario.seed ^ 0x5eed);
        let mut second_volume = SecondVolume::of(scenario)?;
        let second = second_volume.as_ref().map(|second| (second.side.id, &second.side.volume));
        let all: Vec<_> = [(core.id, &scenario.volume)].into_iter().chain(second).collect();
        let volumes_of =
            |machine| all.iter().map(move |(id, volume)| new_volume(*id, volume, machine));
        let volumes: Vec<Vec<NewVolume>> =
            (0..scenario.machines.len()).map(|machine| volumes_of(machine).collect()).collect();
        let machines = scenario.machines.iter().zip(&volumes).enumerate();
        let machines = machines.map(|(index, (spec, volumes))| {
            let starts = all.iter().map(|(_, volume)| Seq(volume.start));
            let volumes: Vec<_> = volumes.iter().cloned().zip(starts).collect();
            Machine::new(index, spec, &volumes, rng.fork(index as u64), traced)
        });
        let mut machines: Vec<Machine> = machines.collect();
        let is_of_second =
            |at, drive| second_volume.as_ref().is_some_and(|second| second.has(at, drive));
        mark_outside(&mut machines, &mut core, |at, drive| !is_of_second(at, drive));
        machine::label(&mut machines, (core.id, core.name), &scenario.volume);
        for log in &scenario.logs {
            let blocks = core.map.iter().skip(log.first as usize).take(log.blocks as usize);
            blocks.for_each(|at| machines[at.machine].env.drives[at.drive].may_tear(at.lba));
        }
        if let Some(SecondVolume { side, .. }) = &mut second_volume {
            let members = side.volume.members.clone();
            core.swap(side);
            mark_outside(&mut machines, &mut core, |at, drive| members.contains(&(at, drive)));
            machine::label(&mut machines, (core.id, core.name), &core.scenario.volume);
            core.swap(side);
        }
        Ok(Self {
            standby: None,
            releasing: None,
            planned_crashes: vec![None; machines.len()],
            stops: vec![Stop::default(); machines.len()],
            copies: machines.iter().map(|_| None).collect(),
            given_up: vec![false; machines.len()],
            ended: vec![None; machines.len()],
            core,
            machines,
            volumes,
            clients: (0..2).map(Client::new).collect(),
            second_volume,
            plain_hosts: Vec::new(),
            claimants: Vec::new(),
            faults: scenario.faults.clone(),
            crashes: 0,
            power_cuts: 0,
            has_drive_fault: false,
            faults_stopped_at: None,
            over: false,
        })
    }

    fn run(mut self) -> Outcome {
        self.begin();
        while self.step() {}
        self.outcome()
    }

    /// Plans the first events.
    pub(crate) fn begin(&mut self) {
        for machine in 0..self.machines.len() {
            self.core.after(0, Ev::StartMachine(machine));
        }
        self.core.after(US, Ev::StartClient(0));
        if self.second_volume.is_some() {
            self.core.after(US, Ev::StartClient(SECOND_VOLUME));
        }
    }

    /// Handles the next event. Returns false if the run is over.
    pub(crate) fn step(&mut self) -> bool {
        if self.over || self.core.oracle.violation().is_some() {
            return false;
        }
        self.strike_due();
        let Some(ev) = self.core.next_event() else { return false };
        self.note_holders();
        self.handle(ev);
        if matches!(ev, Ev::TickClient { .. }) || self.core.events.is_multiple_of(1024) {
            self.supervise();
        }
        self.check_second_volume();
        true
    }

    /// The result so far.
    pub(crate) fn outcome(&self) -> Outcome {
        Outcome {
            violation: self.core.oracle.violation().cloned(),
            events: self.core.events,
            crashes: self.crashes,
            recoveries: u64::from(self.core.recoveries.0),
            ..Outcome::default()
        }
    }

    fn handle(&mut self, ev: Ev) {
        match ev {
            Ev::Arrive { conn, up: true } => self.arrive_up(conn),
            Ev::Arrive { conn, up: false } => self.arrive_down(conn),
            Ev::Drive { machine, drive } => {
                self.machines[machine].env.now = self.core.now;
                self.machines[machine].poll_drive(drive);
                self.settle(machine);
            }
            Ev::WakeCore { machine, core } => {
                self.machines[machine].env.now = self.core.now;
                self.machines[machine].wake(core);
                self.settle(machine);
            }
            Ev::Space { machine, conn } => {
                self.machines[machine].env.now = self.core.now;
                self.machines[machine].has_space(conn);
                self.settle(machine);
            }
            Ev::StartMachine(machine) => self.start_machine(machine),
            Ev::StartClient(SECOND_VOLUME)
            | Ev::TickClient { client: SECOND_VOLUME, .. }
            | Ev::WakeClient { client: SECOND_VOLUME, .. }
            | Ev::WakeStreams { client: SECOND_VOLUME, .. }
            | Ev::Act { client: SECOND_VOLUME, .. } => {
                self.with_second_volume(|client, drives, core| deliver(client, ev, drives, core));
            }
            Ev::WakeClient { client, .. } if client >= claimant::FIRST => {
                self.claimants[client - claimant::FIRST].wake(&mut self.core);
            }
            Ev::WakeClient { client, .. } if client >= plain_host::FIRST => {
                self.plain_hosts[client - plain_host::FIRST].wake(&mut self.core);
            }
            Ev::StartClient(client)
            | Ev::TickClient { client, .. }
            | Ev::WakeClient { client, .. }
            | Ev::WakeStreams { client, .. }
            | Ev::Act { client, .. } => {
                let Self { clients, core, machines, .. } = self;
                deliver(&mut clients[client], ev, &Drives(machines), core);
            }
            Ev::Heal => {}
            Ev::WakePlainHost(plain_host) => {
                self.plain_hosts[plain_host].begin_next(&mut self.core)
            }
        }
    }

    fn arrive_up(&mut self, conn: usize) {
        let chunk = match self.core.net.arrive(conn, Direction::Up, self.core.now) {
            Err(later) => return self.core.at(later, Ev::Arrive { conn, up: true }),
            Ok(None) => return,
            Ok(Some(chunk)) => chunk,
        };
        let at = self.core.net.conn(conn).machine;
        let machine = &mut self.machines[at];
        machine.env.now = self.core.now;
        match (chunk, self.core.net.conn(conn).server) {
            (Chunk::Open, _) if machine.is_accepting() => {
                machine.open(conn);
                self.core.net.conn_mut(conn).server = Some(at);
            }
            (Chunk::Bytes(bytes), Some(_)) => {
                let client = self.core.net.conn(conn).from;
                if client == SECOND_VOLUME
                    && let Some(SecondVolume { side: Side { oracle, .. }, client: it, .. }) =
                        &mut self.second_volume
                    && it.era() == Some(oracle.current())
                    && it.holds(at).is_some()
                {
                    oracle.received(client, at, self.core.now);
                }
                let Core { oracle, now, .. } = &mut self.core;
                if client < SECOND_VOLUME {
                    // The next process of the initiator has no lease before it owns the volume. A
                    // process that was lost does not extend a lease before it has resumed.
                    let owner = &self.clients[client];
                    if owner.era() == Some(oracle.current()) && owner.holds(at).is_some() {
                        oracle.received(client, at, *now);
                    }
                } else if (plain_host::FIRST..claimant::FIRST).contains(&client) {
                    self.plain_hosts[client - plain_host::FIRST].bytes_arrived(oracle, *now);
                }
                machine.receive(conn, bytes);
            }
            (Chunk::End, Some(_)) => {
                self.core.net.conn_mut(conn).server = None;
                machine.hang_up(conn);
            }
            // A machine without power sends nothing.
            (Chunk::Open | Chunk::Bytes(_), _) if !machine.is_powered() => return,
            // The machine's kernel answers that no process listens.
            (Chunk::Open | Chunk::Bytes(_), _) => return self.core.refuse(conn),
            (Chunk::End, None) => return,
        }
        self.settle(at);
    }

    fn arrive_down(&mut self, conn: usize) {
        let chunk = match self.core.net.arrive(conn, Direction::Down, self.core.now) {
            Err(later) => return self.core.at(later, Ev::Arrive { conn, up: false }),
            Ok(None) => return,
            Ok(Some(chunk)) => chunk,
        };
        let Some(end) = self.core.net.conn(conn).client else { return };
        if end.client >= claimant::FIRST {
            let claimant = &mut self.claimants[end.client - claimant::FIRST];
            return match chunk {
                Chunk::Bytes(bytes) => claimant.receive(conn, &bytes, &mut self.core),
                _ => claimant.close(&mut self.core),
            };
        }
        if end.client >= plain_host::FIRST {
            let plain_host = &mut self.plain_hosts[end.client - plain_host::FIRST];
            match chunk {
                Chunk::Bytes(bytes) => {
                    let answer = plain_host.receive(end.role, conn, &bytes, &mut self.core);
                    let (at, content, free) = (plain_host.at, plain_host.content, plain_host.free);
                    let must_accept = plain_host.must_accept;
                    let since = free.then_some(plain_host.generation);
                    let held_count = plain_host.held_count;
                    let oracle = &mut self.core.oracle;
                    match answer {
                        None => {}
                        Some(HostAnswer::Written) => oracle.plain_write_done(at, content, free),
                        Some(HostAnswer::Flushed) => oracle.plain_flush_done(at, content),
                        Some(HostAnswer::Read(found)) => {
                            oracle.plain_read_done(at, found, since, held_count);
                        }
                        Some(HostAnswer::Refused) => oracle.plain_write_refused(at, must_accept),
                    }
                }
                _ => plain_host.close(&mut self.core),
            }
            return;
        }
        let arrives = |client: &mut Client, drives: &Drives<'_>, core: &mut Core| {
            if !client.is_up() || client.incarnation() != end.incarnation {
                return;
            }
            match chunk {
                Chunk::Bytes(bytes) => client.receive(end.role, conn, &bytes, drives, core),
                Chunk::End => client.hung_up(end.role, conn, drives, core),
                Chunk::Open => {}
            }
        };
        if end.client == SECOND_VOLUME {
            self.with_second_volume(arrives);
        } else {
            let Self { clients, core, machines, .. } = self;
            arrives(&mut clients[end.client], &Drives(machines), core);
        }
    }

    /// Carries out the effects that a machine's sessions have left.
    fn settle(&mut self, at: usize) {
        let Self { core, machines, second_volume, volumes, plain_hosts, .. } = self;
        let machine = &mut machines[at];
        machine.env.now = core.now;
        for plain_host in plain_hosts.iter_mut().filter(|plain_host| plain_host.at.machine == at) {
            plain_host.machine_steps(&mut core.oracle, core.now);
        }
        machine.work();
        if let Some(by) = machine.extension_sent.take() {
            core.oracle.extension_was_sent(at, &by);
        }
        let in_log = volumes[at].iter().filter(|volume| volume.streams > 0).count();
        if let Some((volumes, most)) = machine.remembers(in_log) {
            core.oracle.remembers(at, volumes, most);
        }
        for out in machine.out.drain(..) {
            match out {
                Out::Send(conn, bytes) => core.send(conn, Direction::Down, bytes),
                Out::End(conn) => core.end(conn, Direction::Down),
                Out::Close(conn) => {
                    core.net.conn_mut(conn).server = None;
                    core.end(conn, Direction::Down);
                }
                Out::Refuse(conn) => {
                    core.net.conn_mut(conn).server = None;
                    core.refuse(conn);
                }
                Out::Wake(time, index) => core.at(time, Ev::WakeCore { machine: at, core: index }),
                Out::Poll(time, drive) => core.at(time, Ev::Drive { machine: at, drive }),
                Out::Space(time, conn) => core.at(time, Ev::Space { machine: at, conn }),
            }
        }
        let mut reported = Vec::new();
        for (number, drive) in machine.env.drives.iter_mut().enumerate() {
            reported.extend(drive.take_reported().into_iter().map(|event| (number, event)));
            for _ in 0..drive.take_late() {
                probe::count_rare(Rare::LateWrite);
            }
        }
        for (number, event) in reported {
            let oracle = match second_volume {
                Some(second) if second.has(at, number) => &mut second.side.oracle,
                _ => &mut core.oracle,
            };
            oracle.drive_reports((at, number), &event, core.now, &Drives(machines));
        }
        let machine = &mut machines[at];
        for line in machine.env.trace_lines.take() {
            core.trace(|| format!("target {at}: {line}"));
        }
        if machine.has_stopped() {
            let planned = self.planned_crashes[at]
                .take()
                .unwrap_or(PlannedCrash { power: false, down_us: 1000 });
            self.crash_machine(at, planned);
        } else if machine.is_stopped() {
            self.end_machine(at);
        }
    }

    /// The last steps of a clean stop of a target.
    fn end_machine(&mut self, at: usize) {
        let Stop { off, cut, down_us } = self.stops[at];
        let machine = &mut self.machines[at];
        if cut > 0 {
            machine.stop_after(cut - 1, true);
        }
        let ended = machine.end_service();
        let power = off || machine.has_stopped();
        self.core.trace(|| format!("target {at} has ended its service: {ended:?}"));
        self.crash_machine(at, PlannedCrash { power, down_us });
    }

    fn start_machine(&mut self, at: usize) {
        let machine = &mut self.machines[at];
        if machine.is_up() {
            return;
        }
        if machine.has_late_operations() && !probe::is_bug_planted(Plant::T8ServeNoWait) {
            // The drives are locked as long as writes of the last process are in flight (trap T8).
            return self.core.after(20 * US, Ev::StartMachine(at));
        }
        machine.env.now = self.core.now;
        match machine.start(&self.volumes[at], core::mem::take(&mut self.given_up[at])) {
            Ok(problems) => {
                self.core.trace(|| format!("target {at} starts"));
                if machine.log_generations(&self.volumes[at]).is_some() && machine.has_its_log() {
                    self.each_oracle(|oracle, _| oracle.log_works(at));
                }
                if let Some(problem) = problems.first()
                    && self.machines[at].right_log.is_none()
                {
                    let what =
                        format!("target {at}: a crash alone makes its log unreadable: {problem}");
                    self.core.oracle.broken(Promise::P8, what);
                }
            }
            Err(why) => {
                self.core.trace(|| format!("target {at} does not start: {why}"));
                if self.machines[at].right_log.is_some() {
                    self.put_log_back(at);
                } else if self.machines[at].store.kind() == LogStoreKind::File {
                    // Both copies of its header were being written back.
                    if self.core.is_logged() {
                        self.each_oracle(|oracle, _| oracle.log_lost(at));
                    }
                    self.given_up[at] = true;
                }
                self.core.after(MS, Ev::StartMachine(at));
            }
        }
        self.settle(at);
    }

    fn crash_machine(&mut self, at: usize, planned: PlannedCrash) {
        let kind = if planned.power { "loses its power" } else { "is killed" };
        self.core.trace(|| format!("target {at} {kind}"));
        self.note_crash();
        for conn in 0..self.core.net.len() {
            if self.core.net.conn(conn).server != Some(at) {
                continue;
            }
            self.core.net.conn_mut(conn).server = None;
            if planned.power {
                // An initiator that sends to the machine after it is back learns that the
                // connection is unknown.
                self.core.net.cut(conn, Direction::Down);
            } else if let Some(time) = self.core.net.reset(conn, Direction::Down, self.core.now) {
                self.core.at(time, Ev::Arrive { conn, up: false });
            }
        }
        self.power_cuts += u64::from(planned.power);
        let machine = &mut self.machines[at];
        if planned.power {
            if machine.store.kind() == LogStoreKind::File
                && !machine.has_stopped_cleanly()
                && self.core.is_logged()
            {
                self.each_oracle(|oracle, now| oracle.log_fails(at, now));
            }
            self.each_oracle(|oracle, _| oracle.loses_power(at));
            self.machines[at].power_cut();
            self.core.oracle.has_lost_power(at, &Drives(&self.machines));
        } else {
            machine.kill();
        }
        self.planned_crashes[at] = None;
        self.core.after(u64::from(planned.down_us) * US, Ev::StartMachine(at));
    }

    fn crash_client(&mut self, at: usize, notified: bool) {
        if !self.clients[at].is_up() {
            return;
        }
        self.core.trace(|| format!("initiator {at} dies"));
        self.note_crash();
        self.break_connections(at, notified);
        self.clients[at].kill();
    }

    fn break_connections(&mut self, client: usize, notified: bool) {
        for conn in 0..self.core.net.len() {
            if self.core.net.conn(conn).client.is_none_or(|end| end.client != client) {
                continue;
            }
            self.core.net.conn_mut(conn).client = None;
            if !notified {
                self.core.net.cut(conn, Direction::Up);
            } else if let Some(time) = self.core.net.reset(conn, Direction::Up, self.core.now) {
                self.core.at(time, Ev::Arrive { conn, up: true });
            }
        }
    }

    fn note_crash(&mut self) {
        self.crashes += 1;
        if self.clients.iter().any(Client::is_opening) {
            probe::count_rare(Rare::CrashInRecovery);
        }
        if self.clients.iter().any(Client::is_replaying) {
            probe::count_rare(Rare::CrashInReplay);
        }
    }
}

/// Delivers an event to an initiator, if it still exists.
fn deliver(client: &mut Client, ev: Ev, drives: &Drives<'_>, core: &mut Core) {
    let is_running =
        |client: &Client, incarnation| client.is_up() && client.incarnation() == incarnation;
    match ev {
        Ev::StartClient(_) if !client.is_up() => client.start(core),
        Ev::TickClient { incarnation, .. } if is_running(client, incarnation) => {
            client.tick(drives, core)
        }
        Ev::WakeClient { incarnation, server, .. } if is_running(client, incarnation) => {
            client.wake(server, drives, core);
        }
        Ev::WakeStreams { incarnation, .. } if is_running(client, incarnation) => {
            client.wake_streams(drives, core)
        }
        Ev::Act { incarnation, stream, .. } if is_running(client, incarnation) => {
            client.act(stream, drives, core)
        }
        _ => {}
    }
}

/// Writes a recognisable content into every block of these drives outside of the volume's data
/// area.
fn mark_outside(machines: &mut [Machine], core: &mut Core, of: impl Fn(usize, usize) -> bool) {
    let inside: HashSet<(usize, usize, u32)> =
        core.map.iter().map(|at| (at.machine, at.drive, at.lba)).collect();
    let volume = &core.scenario.volume;
    let area = volume.first - volume.prepare..volume.first;
    let has_area = volume.members.clone();
    for (machine, is) in machines.iter_mut().enumerate() {
        let blocks = is.spec().blocks;
        let drives = is.env.drives.iter_mut().enumerate();
        for (drive, drives) in drives.filter(|(drive, _)| of(machine, *drive)) {
            for lba in
                (LABEL_BLOCKS..blocks).filter(|lba| !inside.contains(&(machine, drive, *lba)))
            {
                if area.contains(&lba) && has_area.contains(&(machine, drive)) {
                    continue;
                }
                let content = core.oracle.next_number();
                drives.preset(lba, content);
                core.oracle.outside(Where { machine, drive, lba }, content);
            }
        }
    }
}
