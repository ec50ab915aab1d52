//! An initiator's process: a small model of the library's work on real sockets.
//!
//! It attaches to every target, opens the volume (and recovers it if needed), runs its streams,
//! resumes with lost targets, reopens streams that failed, and closes with a clean stop.

mod application;
pub mod claimant;
mod command_text;
mod committer;
mod duties;
mod following;
mod opening;
pub mod plain_host;
pub(crate) mod process;
mod recovery;
mod reports;
mod running;
mod server;
mod stream;
mod streams;
mod unlogged;
mod watchers;
mod wire;

use std::collections::{BTreeMap, BTreeSet};

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Cause, EngineKind};
use riopipe_order::probe::{self, Rare};
use riopipe_order::topology::Topology;
use riopipe_session::initiator::opening::OpeningConfig;
use riopipe_session::initiator::stream_driver::{BackgroundConfig, BackgroundDriver, StreamShared};
use riopipe_session::initiator::volume::block_ownership::BlockOwnershipChecker;
use riopipe_session::initiator::volume::opening::VolumeOpening;
use riopipe_session::initiator::volume::state::VolumeState;
use riopipe_session::initiator::volume::streams::{StreamsRecovery, VolumeRelease};
use riopipe_session::wire as rio;

use self::following::WokenStreams;
use self::server::{Server, TargetEvent};
use self::stream::{Stream, StreamMessage};
use crate::core::{Core, Ev, MS, US};
use crate::network::{ClientEnd, Role};
use crate::oracle::{Drives, Era};

/// The owner of a second volume, where initiators of the first are counted from 0.
pub const SECOND_VOLUME: usize = 2;
/// The interval at which an initiator's clocks are checked, ns.
const TICK_NS: u64 = MS;

/// The outcome of an attempt to open the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A log is lost, or another log is in its place (trap T19).
    Log(usize),
    /// A log is older than the labels (trap T24).
    OldLog,
    /// The drives are not the volume's, by their labels (trap T19).
    Drives,
    /// A log store has failed: its target has to be started again.
    LogFailed(usize),
    /// The volume has another owner.
    Owned,
    /// Any other error. The initiator tries again.
    Other,
}

struct Volume {
    generation: u32,
    era: Era,
    /// The engine that runs.
    engine: EngineKind,
    /// For each target, whether it has the extension.
    has_extension: Vec<bool>,
    topology: Topology,
    nsids: Vec<u32>,
    shared: StreamShared,
    /// The streams that another one has woken.
    woken: WokenStreams,
    /// The description of the volume for the recovery of its streams.
    config: OpeningConfig,
    state: VolumeState,
    ownership_checker: BlockOwnershipChecker,
}

/// The purpose of a recovery of streams.
enum RecoveryGoal {
    /// Reopen a stream that failed.
    Reopen(u16),
    /// Acknowledge the in-place lists of these streams.
    Acknowledge(Vec<StreamId>),
}

/// A recovery of streams that is in progress.
struct Recovery {
    machine: StreamsRecovery,
    goal: RecoveryGoal,
    /// The time at which it began, ns.
    asked_at: u64,
}

enum State {
    /// The volume is being opened, or the next attempt is planned.
    Opening,
    /// The volume is open.
    Running,
    /// The volume is being released.
    Releasing(VolumeRelease),
    /// The volume is closed, or another owner has it.
    Over,
}

/// An initiator's process.
pub struct Client {
    index: usize,
    incarnation: u32,
    /// The time at which this process began, ns.
    began: u64,
    up: bool,
    take_over: bool,
    accept_lost: bool,
    servers: Vec<Server>,
    state: State,
    opening: Option<Box<VolumeOpening>>,
    /// The time at which the opening in progress began to read the drives, ns.
    began_polling: u64,
    recovery: Option<Recovery>,
    /// A dry run of the opening has been made.
    dry_run_made: bool,
    /// The time at which the opening or the recovery is woken next, ns.
    opening_wakes_at: u64,
    retry_at: u64,
    volume: Option<Volume>,
    streams: Vec<Option<Stream>>,
    background: BackgroundDriver,
    /// The time at which the next thread wakes, as far as that is planned, ns.
    wakes_at: u64,
    /// The owner does not call its streams, once no work is left, until they are durable.
    leaves: bool,
    /// Streams without a log that were opened before.
    opened_before: BTreeSet<u16>,
    /// The last result of recovery for each stream: the last group of its prefix, and the tag of
    /// that group.
    recovered: BTreeMap<u16, (Seq, u64)>,
    /// The number of times in a row that the volume's drives refused one of the streams.
    guarded: u32,
    refused: Option<Refused>,
    fenced: bool,
    broken: bool,
    closing: bool,
    released: bool,
}

impl Client {
    /// An initiator that does not run.
    #[must_use]
    pub fn new(index: usize) -> Self {
        Self {
            index,
            incarnation: 0,
            began: 0,
            up: false,
            take_over: false,
            accept_lost: false,
            servers: Vec::new(),
            state: State::Over,
            opening: None,
            began_polling: 0,
            recovery: None,
            dry_run_made: false,
            opening_wakes_at: 0,
            retry_at: 0,
            volume: None,
            streams: Vec::new(),
            background: BackgroundDriver::new(BackgroundConfig::default()),
            wakes_at: 0,
            leaves: false,
            opened_before: BTreeSet::new(),
            recovered: BTreeMap::new(),
            guarded: 0,
            refused: None,
            fenced: false,
            broken: false,
            closing: false,
            released: false,
        }
    }

    /// Whether it runs.
    #[must_use]
    pub const fn is_up(&self) -> bool {
        self.up
    }

    /// Whether it has closed the volume, or knows that it is not the owner any more.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Whether it has released the volume after a clean stop.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        matches!(self.state, State::Over) && self.released
    }

    /// The progress of the process, formatted for people.
    #[must_use]
    pub fn describe(&self, core: &Core) -> String {
        if !self.up {
            return "down".into();
        }
        let phase = self.opening.as_ref().and_then(|opening| opening.recovery());
        let phase = phase.or(self.recovery.as_ref().map(|it| it.machine.driver().opening()));
        let state = match (&self.state, phase) {
            (_, Some(opening)) => format!("opening ({})", opening.phase().name()),
            (State::Opening, None) => "attaching".into(),
            (State::Running, None) => "running".into(),
            (State::Releasing(..), None) => "releasing".into(),
            (State::Over, None) => "over".into(),
        };
        let streams: Vec<String> =
            self.streams.iter().flatten().map(|s| s.describe(core)).collect();
        let up: Vec<bool> = self.servers.iter().map(Server::is_claimed).collect();
        format!("{state}, targets {up:?}, streams [{}]", streams.join(", "))
    }

    /// Whether it can't continue, and has to be started again.
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether it was fenced.
    #[must_use]
    pub const fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Whether it recovers a volume or a stream now.
    #[must_use]
    pub fn is_opening(&self) -> bool {
        self.recovery.is_some()
            || self.opening.as_ref().is_some_and(|opening| opening.recovery().is_some())
    }

    /// Whether one of its streams replays now.
    #[must_use]
    pub fn is_replaying(&self) -> bool {
        self.streams.iter().flatten().any(Stream::is_replaying)
    }

    /// The connection over which it owns the volume on a machine, as far as it knows.
    #[must_use]
    pub fn holds(&self, machine: usize) -> Option<usize> {
        let running = matches!(self.state, State::Running) && !self.fenced;
        let server = self.servers.get(machine).filter(|server| running && server.is_claimed())?;
        server.admin_conn()
    }

    /// The controller of a machine through which it owns, or owned, the volume there.
    pub fn cntlid(&mut self, machine: usize) -> Option<u16> {
        self.servers.get_mut(machine)?.cntlid()
    }

    /// The number of its process.
    #[must_use]
    pub const fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// Its era, once it has opened the volume.
    #[must_use]
    pub fn era(&self) -> Option<Era> {
        self.volume.as_ref().map(|volume| volume.era)
    }

    /// The reason for the last refusal of the volume.
    pub fn take_refused(&mut self) -> Option<Refused> {
        self.refused.take()
    }

    /// Sets whether it may fence an owner.
    pub fn set_may_take_over(&mut self, yes: bool) {
        self.take_over = yes;
    }

    /// Whether it would give up a log that is lost.
    #[must_use]
    pub const fn accepts_lost(&self) -> bool {
        self.accept_lost
    }

    /// Sets whether it may give up a log that is lost.
    pub fn set_may_accept_lost(&mut self, yes: bool) {
        self.accept_lost = yes;
    }

    fn end(&self) -> ClientEnd {
        ClientEnd { client: self.index, incarnation: self.incarnation, role: Role::Admin(0) }
    }

    fn hostid(&self) -> [u8; 16] {
        [0x11 * (self.index as u8 + 1); 16]
    }

    fn hostnqn(&self) -> String {
        format!("nqn.2026-01.io.example:host{}", self.index)
    }

    /// Starts the process.
    pub fn start(&mut self, core: &mut Core) {
        self.incarnation += 1;
        self.began = core.now;
        self.up = true;
        let machines = core.scenario.machines.len() as u16;
        self.servers = (0..machines).map(Server::new).collect();
        self.state = State::Opening;
        self.opening = None;
        self.recovery = None;
        self.dry_run_made = false;
        self.opening_wakes_at = 0;
        self.retry_at = 0;
        self.volume = None;
        // The last one is the reader of the volume.
        self.streams = (0..=core.scenario.volume.streams).map(|_| None).collect();
        let spec = core.scenario.client;
        let (unreachable_ns, flush_ns) =
            (u64::from(spec.not_calling_us) * US, u64::from(spec.flush_us) * US);
        self.background = BackgroundDriver::new(BackgroundConfig { unreachable_ns, flush_ns });
        self.wakes_at = 0;
        self.leaves = core.rng.one_in(2);
        self.opened_before.clear();
        self.recovered.clear();
        self.guarded = 0;
        self.refused = None;
        self.fenced = false;
        self.broken = false;
        self.closing = false;
        self.released = false;
        let index = self.index;
        core.trace(|| format!("initiator {index} starts"));
        let (client, incarnation) = (self.index, self.incarnation);
        core.after(0, Ev::TickClient { client, incarnation });
    }

    /// Ends the process at its present point.
    pub fn kill(&mut self) {
        self.up = false;
        self.servers.clear();
        self.streams.clear();
        self.opening = None;
        self.recovery = None;
        self.volume = None;
        self.state = State::Over;
    }

    /// Requests that everything becomes durable and is closed.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Whether streams have steps left, or are in the middle of one.
    #[must_use]
    pub fn has_work(&self, core: &Core) -> bool {
        !matches!(self.state, State::Running)
            || core.program_runs
            || self.recovery.is_some()
            || self.streams.iter().flatten().any(|s| s.has_failed() || s.has_work(core))
    }

    /// Whether its owner has left streams that are not durable yet, and waits for the background
    /// driver to make them durable (trap T1).
    #[must_use]
    pub fn has_left(&self, core: &Core) -> bool {
        self.leaves
            && !self.closing
            && core.is_logged()
            && self.streams.iter().flatten().any(|s| s.has_begun() && !s.is_durable(core))
    }

    /// Checks the clocks.
    pub fn tick(&mut self, drives: &Drives<'_>, core: &mut Core) {
        core.after(TICK_NS, Ev::TickClient { client: self.index, incarnation: self.incarnation });
        self.advance(drives, core);
        self.check_watchers(core);
    }

    /// Handles a deadline for one of its targets.
    pub fn wake(&mut self, server: u16, drives: &Drives<'_>, core: &mut Core) {
        let (end, at) = (self.end(), usize::from(server));
        if self.opening_wakes_at <= core.now {
            self.opening_wakes_at = 0;
        }
        self.servers[at].wake(end, core);
        self.take_events(at, core);
        self.advance(drives, core);
    }

    /// Handles the events of one of its targets.
    fn take_events(&mut self, at: usize, core: &mut Core) {
        if matches!(self.state, State::Opening) {
            return;
        }
        while let Some(event) = self.servers[at].event(core) {
            match event {
                // A recovery that has asked this target for something notices the loss by itself.
                TargetEvent::Lost { since } => {
                    let server = at as u16;
                    self.post(|| StreamMessage::AssociationEnded { server, since });
                }
                TargetEvent::Resumed => self.target_resumed(at, core),
                TargetEvent::Refused(why, cause) => self.not_resumed(at, &why, cause, core),
                TargetEvent::Connection(stream, wire, queue) => {
                    match self.streams.get_mut(usize::from(stream.0)) {
                        Some(Some(stream)) => {
                            // Only streams with one queue to each server make new connections.
                            let link = at as u16;
                            stream.post(StreamMessage::Connected { link, wire, queue });
                        }
                        _ => wire.close(core),
                    }
                }
            }
        }
    }

    /// Receives bytes of one of its connections.
    pub fn receive(
        &mut self,
        role: Role,
        conn: usize,
        bytes: &[u8],
        drives: &Drives<'_>,
        core: &mut Core,
    ) {
        match role {
            Role::Admin(server) | Role::Undo(server) => {
                let (end, at) = (self.end(), usize::from(server));
                self.servers[at].received(conn, bytes, end, core);
                self.take_events(at, core);
                self.advance(drives, core);
            }
            Role::Stream { stream, server } => {
                if let Some(manager) = self.servers[usize::from(server)].manager() {
                    manager.note_received(core.now);
                }
                self.arrives(stream, conn, Some(bytes), drives, core);
            }
        }
    }

    /// Handles the end of one of its connections.
    pub fn hung_up(&mut self, role: Role, conn: usize, drives: &Drives<'_>, core: &mut Core) {
        match role {
            Role::Admin(server) | Role::Undo(server) => {
                let (end, at) = (self.end(), usize::from(server));
                self.servers[at].closed(conn, end, core);
                self.take_events(at, core);
            }
            Role::Stream { stream, .. } => self.arrives(stream, conn, None, drives, core),
        }
        self.advance(drives, core);
    }

    /// Notes that the volume is claimed again on the target.
    fn target_resumed(&mut self, server: usize, core: &mut Core) {
        if self.era() == Some(core.oracle.current()) {
            core.oracle.resumed(self.index, server, core.now);
        }
    }

    /// Notes that this owner has lost the target for good.
    fn not_resumed(&mut self, server: usize, why: &str, cause: Cause, core: &mut Core) {
        core.trace(|| format!("initiator: cannot resume on target {server}: {why}"));
        self.fenced |= matches!(cause, Cause::Status(code) if is_fenced(Status(code)));
        if cause == Cause::Changed {
            probe::count_rare(Rare::Changed);
        }
        // The process opens the volume again, as a program with this error does.
        self.broken |= !self.fenced;
        let server = server as u16;
        self.post(|| StreamMessage::GiveUp { server, cause });
    }

    /// Continues all work that can continue.
    fn advance(&mut self, drives: &Drives<'_>, core: &mut Core) {
        match &self.state {
            State::Opening => {
                if self.opening.is_none() && core.now >= self.retry_at {
                    self.begin_opening(core);
                }
                self.continue_opening(drives, core);
            }
            State::Running => self.run(drives, core),
            State::Releasing(_) => self.continue_release(core),
            State::Over => {}
        }
        self.advance_streams(drives, core);
    }
}

/// Whether a status means that another owner has the volume.
fn is_fenced(status: Status) -> bool {
    use rio::status::{LEASE_OVER, NOT_OWNER, STALE_GENERATION};
    [STALE_GENERATION, NOT_OWNER, LEASE_OVER].iter().any(|one| status.is(*one))
}
