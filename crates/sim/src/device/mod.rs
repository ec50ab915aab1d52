//! A plain block device on the simulated volume, under all faults of the cluster.
//!
//! The device is the real [`PlainDevice`](riopipe_session::initiator::plain_device::PlainDevice), as
//! `rio volume attach` runs it. A random host uses it: writes, also of the same blocks at the same time,
//! with and without FUA, flushes, requests for zeroes, and reads. When the process of the device dies, or
//! the device fails, the volume is attached again, by this initiator or by another one, and recovered. The
//! host's model judges what it finds. Then the host goes on.
//!
//! The oracle of the cluster judges each block meanwhile. The duties that the device has as a caller of
//! the volume (traps T11 and T15) are checked at each submission.

mod counts;
mod host;
mod shell;

pub use self::counts::DeviceCounts;
use self::host::{Kept, Model, Request};
use self::shell::{Found, Names, ReadRequest, Shell, find};
use crate::block;
use crate::oracle::Promise;
use crate::rng::Rng;
use crate::scenario::{DeviceSpec, Scenario};
use crate::world::{Outcome, World};

/// The requests of the host after the faults.
const LAST_REQUESTS: u32 = 20;
/// The blocks of a read, when the whole device is read.
const READ_BLOCKS: u32 = 16;
/// The blocks of which a host writes most often some again.
const HOT_BLOCKS: u64 = 6;

/// Runs a scenario with a device.
pub(crate) fn run(mut world: World, scenario: &Scenario) -> Outcome {
    let Some(spec) = scenario.device else { return world.outcome() };
    world.core_mut().program_runs = true;
    world.begin();
    let blocks = world.core().map.len();
    let mut user = User {
        model: Model::new(blocks),
        names: Names::new(),
        rng: Rng::new(spec.seed),
        left: spec.requests,
        is_last_phase: false,
        has_failed: false,
        replays: 0,
        power_cuts: 0,
        counts: DeviceCounts::default(),
        spec,
        world,
    };
    user.run();
    Outcome { device: user.counts, ..user.world.outcome() }
}

/// The end of an attached device.
enum End {
    /// Its process has died, or it has failed.
    Crashed,
    /// It was detached in order.
    Detached,
    /// The run is over.
    Over,
}

/// The host, its model, and the cluster.
struct User {
    spec: DeviceSpec,
    world: World,
    model: Model,
    names: Names,
    rng: Rng,
    /// The requests that are left.
    left: u32,
    /// The faults have stopped, and the host does its last requests.
    is_last_phase: bool,
    /// The device has failed since the volume was attached.
    has_failed: bool,
    /// The replays when the volume was attached.
    replays: u32,
    /// The power cuts of targets when the volume was attached.
    power_cuts: u64,
    counts: DeviceCounts,
}

impl User {
    fn run(&mut self) {
        while let Some((client, incarnation)) = self.wait_for_owner() {
            let end = self.use_volume(client, incarnation);
            let down_us = *self.rng.pick(&[10, 200, 5_000]);
            match end {
                End::Over => return,
                End::Crashed => {
                    self.counts.cut += self.model.in_flight.len() as u64;
                    self.world.end_process(client, incarnation, down_us);
                }
                End::Detached if self.is_last_phase && self.left == 0 => {
                    self.world.core_mut().program_runs = false;
                    return self.finish();
                }
                End::Detached => {
                    if self.world.is_running(client, incarnation) {
                        self.world.release(client, down_us);
                    }
                    while self.world.is_releasing(client, incarnation) && self.world.step() {}
                    // Another owner may have taken the volume meanwhile.
                    self.world.end_process(client, incarnation, down_us);
                }
            }
        }
    }

    fn broken(&mut self, promise: Promise, what: String) -> End {
        self.world.broken(promise, what);
        End::Over
    }

    /// Handles events until an initiator has opened the volume.
    fn wait_for_owner(&mut self) -> Option<(usize, u32)> {
        loop {
            self.world.end_failed_owner();
            if let Some(owner) = self.world.usable_owner() {
                return Some(owner);
            }
            if !self.world.step() {
                if !self.world.is_over() {
                    self.world.broken(Promise::P8, "no initiator opens the volume".into());
                }
                return None;
            }
        }
    }

    /// The device was detached for the last time: the volume is closed.
    fn finish(&mut self) {
        while self.world.step() {}
        if self.world.core().oracle.violation().is_some() {
            return;
        }
        if !self.world.is_over() {
            self.world.broken(Promise::P8, "the volume is not closed".into());
            return;
        }
        let found = find(&self.names, 0, &block::names(&self.world.image()));
        if let Err(what) = self.model.check_all(&found) {
            self.world.broken(Promise::P5, format!("after the last end: {what}"));
        }
    }

    fn use_volume(&mut self, client: usize, incarnation: u32) -> End {
        let rng = Rng::new(self.rng.u64());
        let shell = Shell::new((client, incarnation), &self.spec, rng, &mut self.world);
        let Ok(mut shell) = shell else { return End::Crashed };
        shell.names = core::mem::take(&mut self.names);
        let end = self.use_shell(&mut shell);
        self.names = shell.names;
        self.counts += shell.counts;
        end
    }

    fn use_shell(&mut self, shell: &mut Shell) -> End {
        self.counts.attached += 1;
        self.world.core_mut().trace(|| "the volume is attached".into());
        let found = match self.read_all(shell) {
            Ok(found) => found,
            Err(end) => return end,
        };
        // A failed device confirms nothing. When a connection is made again, the target gets all writes
        // again that are not durable, in their order: if the process dies meanwhile, older content is
        // there.
        let power_cuts = self.world.power_cuts();
        let (replays, _) = self.world.core().replays;
        let has_drive_fault = self.world.has_drive_fault();
        let has_lost = core::mem::take(&mut self.has_failed)
            | (replays > self.replays)
            | has_drive_fault
            | (power_cuts > self.power_cuts);
        let kept = if has_lost { Kept::Durable } else { Kept::Completed };
        (self.power_cuts, self.replays) = (power_cuts, replays);
        self.counts.lived_on += u64::from(kept == Kept::Completed);
        if let Err(what) = self.model.attached(&found, kept, has_drive_fault) {
            return self.broken(Promise::P2, format!("after it was attached ({kept:?}): {what}"));
        }
        loop {
            if self.left == 0 {
                if self.is_last_phase {
                    return self.detach(shell);
                }
                self.world.end_faults();
            }
            if !self.is_last_phase && self.world.have_faults_stopped() {
                self.is_last_phase = true;
                self.left = LAST_REQUESTS;
            }
            self.left -= 1;
            self.request(shell);
            let pauses = if self.rng.percent(self.spec.pauses.into()) { 40 } else { 2 };
            for _ in 0..self.rng.below(pauses) {
                if let Err(end) = self.step(shell) {
                    return end;
                }
            }
            while self.model.in_flight.len() >= usize::from(self.spec.depth) {
                if let Err(end) = self.step(shell) {
                    return end;
                }
            }
            if shell.failure.is_some() {
                return self.use_failed(shell);
            }
            if self.rng.percent(self.spec.detaches.into()) {
                return self.detach(shell);
            }
        }
    }

    /// The device has failed. The host tries some more requests, and ends it.
    fn use_failed(&mut self, shell: &mut Shell) -> End {
        self.has_failed = true;
        for _ in 0..self.rng.below(6) {
            self.request(shell);
            for _ in 0..self.rng.below(200) {
                if let Err(end) = self.step(shell) {
                    return end;
                }
            }
        }
        if let Err(end) = self.work(shell) {
            return end;
        }
        if self.model.in_flight.values().any(|request| !matches!(request, Request::Read(_))) {
            let what = format!("the device has failed, and keeps {:?}", self.model.in_flight);
            return self.broken(Promise::P8, what);
        }
        End::Crashed
    }

    /// Handles an event, and the work of the device that follows.
    fn step(&mut self, shell: &mut Shell) -> Result<(), End> {
        if !self.world.step() {
            return Err(End::Over);
        }
        self.work(shell)
    }

    fn work(&mut self, shell: &mut Shell) -> Result<(), End> {
        if !shell.is_alive(&self.world) {
            return Err(End::Crashed);
        }
        shell.run(&mut self.world);
        for ended in shell.take_ended() {
            let (token, is_done) = (ended.token, ended.is_done);
            self.world.core_mut().trace(|| format!("request {token} has ended: {is_done}"));
            match self.model.ended(token, is_done) {
                Err(what) => return Err(self.broken(Promise::P6, what)),
                Ok(request) if is_done => {
                    self.counts.requests += 1;
                    self.counts.flushes += u64::from(matches!(request, Request::Flush(_)));
                    let is_fua = matches!(request, Request::Change { is_fua: true, .. });
                    self.counts.fua += u64::from(is_fua);
                }
                Ok(_) => {}
            }
        }
        if let Some(ended) = shell.continue_reads(&mut self.world) {
            self.counts.reads += 1;
            self.counts.reads_in_doubt += u64::from(ended.found.is_none());
            let (token, first) = (ended.request.token, ended.request.first);
            self.world.core_mut().trace(|| format!("read {token} from {first}: {:?}", ended.found));
            // A drive that fails a FLUSH has lost writes before anyone learns of it.
            let kept = match self.world.has_drive_fault() {
                true => Kept::Durable,
                false => Kept::Completed,
            };
            let has_failed = shell.failure.is_some();
            let found = ended.found.as_deref();
            if let Err(what) = self.model.read_ended((token, first), found, (kept, has_failed)) {
                return Err(self.broken(Promise::P9, what));
            }
        }
        Ok(())
    }

    /// Reads the whole device.
    fn read_all(&mut self, shell: &mut Shell) -> Result<Vec<Found>, End> {
        let blocks = self.world.core().map.len() as u32;
        let mut found = Vec::new();
        for first in (0..blocks).step_by(READ_BLOCKS as usize) {
            let blocks = READ_BLOCKS.min(blocks - first);
            shell.read(ReadRequest { token: 0, first, blocks });
            loop {
                if !shell.is_alive(&self.world) || shell.failure.is_some() {
                    return Err(End::Crashed);
                }
                shell.run(&mut self.world);
                if let Some(ended) = shell.continue_reads(&mut self.world) {
                    match ended.found {
                        Some(part) => found.extend(part),
                        None => return Err(End::Crashed),
                    }
                    break;
                }
                if !self.world.step() {
                    return Err(End::Over);
                }
            }
        }
        Ok(found)
    }

    /// Waits until nothing is in flight, and flushes.
    fn detach(&mut self, shell: &mut Shell) -> End {
        self.world.core_mut().trace(|| "the volume is detached".into());
        let token = self.model.flush();
        shell.device.flush(token);
        if let Err(end) = self.work(shell) {
            return end;
        }
        while !self.model.in_flight.is_empty() {
            if let Err(end) = self.step(shell) {
                return end;
            }
            if shell.failure.is_some() {
                return self.use_failed(shell);
            }
        }
        shell.end(&mut self.world);
        self.counts.detached += 1;
        End::Detached
    }

    /// Draws a request, and begins it.
    fn request(&mut self, shell: &mut Shell) {
        self.world.core_mut().note_call();
        let DeviceSpec { flushes, fua, zeroes, reads, hot, longest, .. } = self.spec;
        let blocks = self.world.core().map.len() as u64;
        let kind = self.rng.below(100) as u8;
        if kind < flushes {
            let token = self.model.flush();
            self.world.core_mut().trace(|| format!("request {token}: flush"));
            return shell.device.flush(token);
        }
        let wanted = self.rng.range(1, u64::from(longest));
        let from = match self.rng.percent(hot.into()) {
            true => self.rng.below(HOT_BLOCKS.min(blocks)),
            false => self.rng.below(blocks),
        };
        let kind = kind - flushes;
        if kind < reads {
            let (first, blocks) = (from as u32, wanted.min(blocks - from).min(8) as u32);
            // There is one thread that reads.
            if shell.reads() < 3 {
                let token = self.model.read();
                self.world.core_mut().trace(|| format!("request {token}: read {first}+{blocks}"));
                shell.read(ReadRequest { token, first, blocks });
            }
            return;
        }
        let is_fua = self.rng.percent(fua.into());
        if kind - reads < zeroes {
            // Some are for the whole device.
            let whole = self.rng.one_in(12);
            let (from, wanted) = if whole { (0, blocks) } else { (from, wanted) };
            let count = wanted.min(blocks - from);
            let token = self.model.change((from as u32, count as u32), true, is_fua);
            let text = || format!("request {token}: zero {from}+{count}, FUA {is_fua}");
            self.world.core_mut().trace(text);
            return shell.device.zero(token, from, count, is_fua);
        }
        let count = wanted.min(blocks - from) as u32;
        let token = self.model.change((from as u32, count), false, is_fua);
        let text = || format!("request {token}: write {from}+{count}, FUA {is_fua}");
        self.world.core_mut().trace(text);
        shell.device.write(token, from, count, (token, from), is_fua);
    }
}
