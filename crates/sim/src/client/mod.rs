//! An initiator's process: what the library does on real sockets, in small.
//!
//! It attaches to every target, opens the volume (recovering it if needed), runs its streams, has
//! lost targets back, reopens streams that failed, and closes in good order.

mod application;
pub mod claimant;
mod committer;
pub mod intruder;
mod ledger;
mod opening;
mod recovery;
mod reports;
mod running;
mod server;
mod stream;
mod streams;
mod unlogged;
mod watchers;
mod wire;
mod words;

use std::collections::{BTreeMap, BTreeSet};

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Cause, EngineKind};
use riopipe_order::probe::{self, Rare};
use riopipe_order::topology::Topology;
use riopipe_session::initiator::opening::OpeningConfig;
use riopipe_session::initiator::stream_driver::{BackgroundConfig, BackgroundDriver, StreamShared};
use riopipe_session::initiator::volume::handover::HandoverLedger;
use riopipe_session::initiator::volume::opening::VolumeOpening;
use riopipe_session::initiator::volume::state::VolumeState;
use riopipe_session::initiator::volume::streams::{StreamsRecovery, VolumeRelease};
use riopipe_session::wire as rio;

use self::server::{News, Server};
use self::stream::{Mail, Stream};
use crate::core::{Core, Ev, MS, US};
use crate::network::{ClientEnd, Role};
use crate::oracle::{Drives, Era};

/// The owner of a second volume, where initiators of the first are counted from 0.
pub const NEIGHBOUR: usize = 2;
/// How often an initiator's clocks are looked at, ns.
const TICK_NS: u64 = MS;

/// How an attempt to open the volume ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A log is not the one that is due, or lost (T19).
    Log(usize),
    /// A log is older than the labels (T24).
    OldLog,
    /// The drives are not the volume's, by their labels (T19).
    Drives,
    /// A log store has failed: its target has to be started again.
    LogFailed(usize),
    /// Somebody else has the volume.
    Owned,
    /// Anything else; to be tried again.
    Other,
}

struct Volume {
    generation: u32,
    era: Era,
    /// The engine that runs.
    engine: EngineKind,
    /// Of each target, whether it speaks the extension.
    speaks: Vec<bool>,
    topology: Topology,
    nsids: Vec<u32>,
    shared: StreamShared,
    /// The volume as the recovery of its streams sees it.
    config: OpeningConfig,
    state: VolumeState,
    ledger: HandoverLedger,
}

/// What a recovery of streams is for.
enum RecoveryGoal {
    /// One that failed is reopened.
    Reopen(u16),
    /// The in-place lists of these are acknowledged.
    Acknowledge(Vec<StreamId>),
}

/// A recovery of streams that is on its way.
struct Recovery {
    machine: StreamsRecovery,
    goal: RecoveryGoal,
    /// When it was begun, ns.
    asked_at: u64,
}

enum State {
    /// The volume is being opened, or is tried again after a while.
    Opening,
    /// Running.
    Running,
    /// Giving the volume back.
    Releasing(VolumeRelease),
    /// The volume is closed, or another owner has it.
    Over,
}

/// An initiator's process.
pub struct Client {
    index: usize,
    life: u32,
    /// When this life began, ns.
    began: u64,
    up: bool,
    take_over: bool,
    accept_lost: bool,
    servers: Vec<Server>,
    state: State,
    opening: Option<Box<VolumeOpening>>,
    /// When the opening on its way began to look at the drives, ns.
    began_looking: u64,
    recovery: Option<Recovery>,
    /// It was looked what opening would do.
    looked: bool,
    /// When one of these is woken next.
    opening_wakes_at: u64,
    retry_at: u64,
    volume: Option<Volume>,
    streams: Vec<Option<Stream>>,
    background: BackgroundDriver,
    /// When the next thread wakes, as far as is planned.
    wakes_at: u64,
    /// Once there is nothing left to do, its owner leaves the streams alone until they are durable.
    leaves: bool,
    /// Streams without a log that have had a life already.
    anew: BTreeSet<u16>,
    /// What recovery has found of each stream last: the last group of its prefix, and that one's tag.
    recovered: BTreeMap<u16, (Seq, u64)>,
    /// How often in a row one of them was kept out from the volume's drives.
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
            life: 0,
            began: 0,
            up: false,
            take_over: false,
            accept_lost: false,
            servers: Vec::new(),
            state: State::Over,
            opening: None,
            began_looking: 0,
            recovery: None,
            looked: false,
            opening_wakes_at: 0,
            retry_at: 0,
            volume: None,
            streams: Vec::new(),
            background: BackgroundDriver::new(BackgroundConfig::default()),
            wakes_at: 0,
            leaves: false,
            anew: BTreeSet::new(),
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

    /// Whether it has closed the volume, or has learnt that it is not the owner any more.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Whether it has given the volume back in good order.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        matches!(self.state, State::Over) && self.released
    }

    /// How far it is, for people.
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

    /// Whether it can't go on, and has to be started again.
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether it was overtaken.
    #[must_use]
    pub const fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Whether it recovers a volume or stream right now.
    #[must_use]
    pub fn is_opening(&self) -> bool {
        self.recovery.is_some()
            || self.opening.as_ref().is_some_and(|opening| opening.recovery().is_some())
    }

    /// Whether one of its streams replays something right now.
    #[must_use]
    pub fn is_replaying(&self) -> bool {
        self.streams.iter().flatten().any(Stream::is_replaying)
    }

    /// Whether it has the volume on a machine, as far as it knows, and over which connection.
    #[must_use]
    pub fn holds(&self, machine: usize) -> Option<usize> {
        let running = matches!(self.state, State::Running) && !self.fenced;
        let server = self.servers.get(machine).filter(|server| running && server.is_claimed())?;
        server.admin_conn()
    }

    /// Over which of a machine's controllers it has, or had, the volume there.
    pub fn cntlid(&mut self, machine: usize) -> Option<u16> {
        self.servers.get_mut(machine)?.cntlid()
    }

    /// Which life it is in.
    #[must_use]
    pub const fn life(&self) -> u32 {
        self.life
    }

    /// Its era, once it has opened the volume.
    #[must_use]
    pub fn era(&self) -> Option<Era> {
        self.volume.as_ref().map(|volume| volume.era)
    }

    /// Why the volume was last refused to it.
    pub fn take_refused(&mut self) -> Option<Refused> {
        self.refused.take()
    }

    /// Whether it may fence a living owner.
    pub fn may_take_over(&mut self, yes: bool) {
        self.take_over = yes;
    }

    /// Whether it would give up a log that is lost.
    #[must_use]
    pub const fn accepts_lost(&self) -> bool {
        self.accept_lost
    }

    /// Whether it may give up a log that is lost.
    pub fn may_accept_lost(&mut self, yes: bool) {
        self.accept_lost = yes;
    }

    fn end(&self) -> ClientEnd {
        ClientEnd { client: self.index, life: self.life, role: Role::Admin(0) }
    }

    fn hostid(&self) -> [u8; 16] {
        [0x11 * (self.index as u8 + 1); 16]
    }

    fn hostnqn(&self) -> String {
        format!("nqn.2026-01.io.example:host{}", self.index)
    }

    /// Starts the process.
    pub fn start(&mut self, core: &mut Core) {
        self.life += 1;
        self.began = core.now;
        self.up = true;
        let machines = core.scenario.machines.len() as u16;
        self.servers = (0..machines).map(Server::new).collect();
        self.state = State::Opening;
        self.opening = None;
        self.recovery = None;
        self.looked = false;
        self.opening_wakes_at = 0;
        self.retry_at = 0;
        self.volume = None;
        // The last one is the reader of the volume.
        self.streams = (0..=core.scenario.volume.streams).map(|_| None).collect();
        let spec = core.scenario.client;
        let (away_ns, flush_ns) = (u64::from(spec.away_us) * US, u64::from(spec.flush_us) * US);
        self.background = BackgroundDriver::new(BackgroundConfig { away_ns, flush_ns });
        self.wakes_at = 0;
        self.leaves = core.rng.one_in(2);
        self.anew.clear();
        self.recovered.clear();
        self.guarded = 0;
        self.refused = None;
        self.fenced = false;
        self.broken = false;
        self.closing = false;
        self.released = false;
        let index = self.index;
        core.trace(|| format!("initiator {index} starts"));
        let (client, life) = (self.index, self.life);
        core.after(0, Ev::TickClient { client, life });
    }

    /// The process dies.
    pub fn kill(&mut self) {
        self.up = false;
        self.servers.clear();
        self.streams.clear();
        self.opening = None;
        self.recovery = None;
        self.volume = None;
        self.state = State::Over;
    }

    /// Everything is to be made durable and closed.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Whether streams have steps to do, or are in the middle of one.
    #[must_use]
    pub fn has_work(&self, core: &Core) -> bool {
        !matches!(self.state, State::Running)
            || self.recovery.is_some()
            || self.streams.iter().flatten().any(|s| s.has_failed() || s.has_work(core))
    }

    /// Whether its owner has left streams that are not durable yet, and waits for the background
    /// driver to see to that (T1).
    #[must_use]
    pub fn has_left(&self, core: &Core) -> bool {
        self.leaves
            && !self.closing
            && core.is_logged()
            && self.streams.iter().flatten().any(|s| s.has_begun() && !s.is_durable(core))
    }

    /// Time goes by.
    pub fn tick(&mut self, drives: &Drives<'_>, core: &mut Core) {
        core.after(TICK_NS, Ev::TickClient { client: self.index, life: self.life });
        self.advance(drives, core);
        self.check_watchers(core);
    }

    /// Something is due at one of its targets.
    pub fn wake(&mut self, server: u16, drives: &Drives<'_>, core: &mut Core) {
        let (end, at) = (self.end(), usize::from(server));
        if self.opening_wakes_at <= core.now {
            self.opening_wakes_at = 0;
        }
        self.servers[at].wake(end, core);
        self.hear(at, core);
        self.advance(drives, core);
    }

    /// Acts on what has happened at one of its targets.
    fn hear(&mut self, at: usize, core: &mut Core) {
        if matches!(self.state, State::Opening) {
            return;
        }
        while let Some(news) = self.servers[at].news(core) {
            match news {
                // A recovery that has asked something there notices that by itself.
                News::Lost => {
                    let server = at as u16;
                    self.post(|| Mail::AssociationEnded { server });
                }
                News::Back => self.has_back(at, core),
                News::Refused(why, cause) => self.not_resumed(at, &why, cause, core),
                News::Connection(stream, wire, queue) => {
                    match self.streams.get_mut(usize::from(stream.0)) {
                        Some(Some(stream)) => {
                            let server = at as u16;
                            stream.post(Mail::Connected { server, wire, queue });
                        }
                        _ => wire.close(core),
                    }
                }
            }
        }
    }

    /// Bytes have come over one of its connections.
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
                self.hear(at, core);
                self.advance(drives, core);
            }
            Role::Stream { stream, .. } => {
                self.arrives(stream, conn, Some(bytes), drives, core);
            }
        }
    }

    /// One of its connections has ended.
    pub fn hung_up(&mut self, role: Role, conn: usize, drives: &Drives<'_>, core: &mut Core) {
        match role {
            Role::Admin(server) | Role::Undo(server) => {
                let (end, at) = (self.end(), usize::from(server));
                self.servers[at].closed(conn, end, core);
                self.hear(at, core);
            }
            Role::Stream { stream, .. } => self.arrives(stream, conn, None, drives, core),
        }
        self.advance(drives, core);
    }

    /// The target has the volume claimed again.
    fn has_back(&mut self, server: usize, core: &mut Core) {
        if self.era() == Some(core.oracle.current()) {
            core.oracle.resumed(self.index, server, core.now);
        }
    }

    /// The target is lost to this owner.
    fn not_resumed(&mut self, server: usize, why: &str, cause: Cause, core: &mut Core) {
        core.trace(|| format!("initiator: target {server} does not have it back: {why}"));
        self.fenced |= matches!(cause, Cause::Status(code) if is_fenced(Status(code)));
        if cause == Cause::Changed {
            probe::hit(Rare::Changed);
        }
        // As a program does that is told so: the volume is opened again.
        self.broken |= !self.fenced;
        let server = server as u16;
        self.post(|| Mail::GiveUp { server, cause });
    }

    /// Goes on with whatever can go on.
    fn advance(&mut self, drives: &Drives<'_>, core: &mut Core) {
        match &self.state {
            State::Opening => {
                if self.opening.is_none() && core.now >= self.retry_at {
                    self.begin_opening(core);
                }
                self.go_on_opening(drives, core);
            }
            State::Running => self.run(drives, core),
            State::Releasing(_) => self.go_on_releasing(core),
            State::Over => {}
        }
        self.tend_streams(drives, core);
    }
}

/// Whether a status says that another owner has the volume.
fn is_fenced(status: Status) -> bool {
    use rio::status::{LEASE_OVER, NOT_OWNER, STALE_GENERATION};
    [STALE_GENERATION, NOT_OWNER, LEASE_OVER].iter().any(|one| status.is(*one))
}
