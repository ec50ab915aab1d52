//! Targets that are this project's own sessions, and a program that carries bytes between them and
//! the initiators.

use std::collections::BTreeMap;

use riopipe_order::engine::EngineKind;
use riopipe_session::initiator::association::{
    Association, AssociationConfig, ConnectFailure, ConnectionEnd, ControlQueue,
};
use riopipe_session::initiator::endpoint::{ConnectionId, Endpoint};
use riopipe_session::initiator::volume::creation::{VolumeCreation, VolumeCreationConfig};
use riopipe_session::initiator::volume::error::{VolumeCreateError, VolumeOpenError};
use riopipe_session::initiator::volume::members::{Layout, LeaseTimes, MemberPlace};
use riopipe_session::initiator::volume::opening::{
    OpenedVolume, OpeningEvent, OwnerWait, Purpose, VolumeChange, VolumeOpening,
    VolumeOpeningConfig,
};
use riopipe_session::initiator::volume::saving::SaveStep;
use riopipe_session::label::Label;

use crate::peer::{HOSTID, HOSTNQN};
use crate::world::{NOW, SUBNQN, VOLUME, World, crc};

pub(crate) const S: u64 = 1_000_000_000;
/// How long targets may owe an answer.
pub(crate) const TIMEOUT: u64 = 10 * S;

/// Connections of one program: which link of a target's world each is.
#[derive(Default)]
pub(crate) struct Wires(BTreeMap<(usize, ControlQueue), Wire>);

struct Wire {
    link: usize,
    rx: Vec<u8>,
}

/// The associations of a program, one for each target.
pub(crate) type Attached = Vec<Association<Vec<u8>>>;

/// Advances a program, beside which something may happen to the targets.
pub(crate) type Beside<'a, T> = dyn FnMut(u64, &mut Attached, &mut [World]) -> Option<T> + 'a;

/// Targets, whose clock stands unless a test moves it.
pub(crate) struct Cluster {
    pub(crate) worlds: Vec<World>,
    pub(crate) now: u64,
    /// Targets that refuse every connection.
    pub(crate) down: Vec<bool>,
    /// A target whose answers never arrive.
    pub(crate) mute: Option<usize>,
}

impl Cluster {
    /// So many targets with three drives each.
    pub(crate) fn new(targets: usize) -> Self {
        let worlds = (0..targets).map(|_| World::new(&[false; 3])).collect();
        Self { worlds, now: NOW, down: vec![false; targets], mute: None }
    }

    /// Carries everything between one association and its target; whether anything moved.
    pub(crate) fn carry(
        &mut self,
        target: usize,
        association: &mut impl Endpoint<Piece = Vec<u8>>,
        wires: &mut Wires,
    ) -> bool {
        let now = self.now;
        let mut moved = false;
        for queue in ControlQueue::ALL {
            let Some(wire) = wires.0.get_mut(&(target, queue)) else { continue };
            let world = &mut self.worlds[target];
            if !association.is_open(queue) {
                world.hang_up(wire.link);
                wires.0.remove(&(target, queue));
                moved = true;
                continue;
            }
            let out = association.outbox(queue);
            let bytes: Vec<u8> = out.slices().flatten().copied().collect();
            out.consume(bytes.len());
            if !bytes.is_empty() {
                moved = true;
                world.send(wire.link, &bytes);
            }
            if world.links[wire.link].closed.is_some() {
                moved = true;
                wires.0.remove(&(target, queue));
                association.closed(queue, ConnectionEnd::Closed, now);
                continue;
            }
            if self.mute == Some(target) {
                continue;
            }
            let came = world.take_answers(wire.link);
            if !came.is_empty() {
                moved = true;
                wire.rx.extend(came);
                let used = association.received(queue, &wire.rx, now);
                wire.rx.drain(..used);
            }
        }
        while let Some(connection @ ConnectionId::Control(queue)) = association.wants_connection() {
            moved = true;
            if self.down[target] {
                let refused = ConnectFailure("no program listens".into());
                association.connect_failed(connection, refused, now);
                continue;
            }
            let link = self.worlds[target].accept();
            wires.0.insert((target, queue), Wire { link, rx: Vec::new() });
            association.connected(connection, true, now);
        }
        moved
    }

    /// One connection ends, and its program learns of it.
    pub(crate) fn cut_one(&mut self, target: usize, queue: ControlQueue, wires: &Wires) {
        if let Some(wire) = wires.0.get(&(target, queue)) {
            self.worlds[target].hang_up(wire.link);
        }
    }

    /// The connections of a program end.
    pub(crate) fn cut(&mut self, wires: &mut Wires) {
        for ((target, _), wire) in std::mem::take(&mut wires.0) {
            self.worlds[target].hang_up(wire.link);
        }
    }

    pub(crate) fn go_to(&mut self, now: u64) {
        self.now = self.now.max(now);
        for world in &mut self.worlds {
            world.host.now = self.now;
            world.tick();
        }
    }

    /// A block of a drive of a target, its first byte.
    pub(crate) fn byte(&self, target: usize, drive: usize, lba: u64) -> u8 {
        self.worlds[target].host.drives[drive].block(lba)[0]
    }
}

fn associations(host: &str, id: [u8; 16], targets: usize) -> Vec<Association<Vec<u8>>> {
    let config = AssociationConfig {
        host_nqn: host.into(),
        host_id: id,
        secrets: None,
        subnqn: Some(SUBNQN.into()),
        keep_alive_ms: 15_000,
        report_ns: None,
        header_digest: false,
        data_digest: Some(false),
        crc,
        data_max: 1 << 20,
        io_queues: 16,
        answer_ns: TIMEOUT,
    };
    (0..targets).map(|_| Association::new(config.clone())).collect()
}

/// The members of the tests' volumes: of each target another drive, since the identifiers of their
/// first ones are the same.
pub(crate) fn places(targets: usize) -> Vec<MemberPlace> {
    (0..targets).map(|target| MemberPlace { target, nsid: target as u32 + 1 }).collect()
}

pub(crate) fn creating(targets: usize) -> VolumeCreationConfig {
    VolumeCreationConfig {
        name: "logs".into(),
        volume: VOLUME,
        places: places(targets),
        targets,
        unit_blocks: 16,
        streams: 2,
        engine: None,
        slots: 64,
        prepare_blocks: None,
        force: false,
        crc32c: crc,
    }
}

pub(crate) fn opening(targets: usize) -> VolumeOpeningConfig {
    VolumeOpeningConfig {
        name: Some("logs".into()),
        places: places(targets),
        targets,
        purpose: Purpose::Claim,
        engine: None,
        take_over: false,
        accept_lost_log: false,
        wait: OwnerWait::of(0),
        lease: LeaseTimes { loss_ms: 0, keep_alive_ms: 15_000, timeout_ms: 10_000 },
        save_undone: false,
        change: VolumeChange::default(),
        timeout_ns: TIMEOUT,
        attempt: 0,
        layout: Layout::default(),
        crc32c: crc,
    }
}

/// An opening, and the host that does it.
pub(crate) struct By {
    config: VolumeOpeningConfig,
    host: (&'static str, [u8; 16]),
}

impl From<VolumeOpeningConfig> for By {
    fn from(config: VolumeOpeningConfig) -> Self {
        Self { config, host: (HOSTNQN, HOSTID) }
    }
}

/// Another initiator's.
pub(crate) fn rival(config: VolumeOpeningConfig) -> By {
    By { config, host: ("nqn.2014-08.org.nvmexpress:uuid:rival", *b"scripted-host-02") }
}

/// The result of an opening, and the events that its program got.
pub(crate) struct Run {
    pub(crate) result: Result<OpenedVolume, VolumeOpenError>,
    pub(crate) associations: Vec<Association<Vec<u8>>>,
    pub(crate) events: Vec<OpeningEvent>,
    pub(crate) saved: Vec<SaveStep>,
    pub(crate) wires: Wires,
}

/// A volume that was opened, and the connections of its owner.
pub(crate) struct Opened {
    pub(crate) volume: OpenedVolume,
    pub(crate) associations: Vec<Association<Vec<u8>>>,
    pub(crate) wires: Wires,
}

impl Run {
    pub(crate) fn opened(self) -> Opened {
        let Self { result, associations, wires, .. } = self;
        Opened { volume: result.expect("it opens"), associations, wires }
    }

    pub(crate) fn error(self) -> VolumeOpenError {
        self.result.expect_err("it does not open")
    }
}

impl Cluster {
    pub(crate) fn create(
        &mut self,
        config: VolumeCreationConfig,
    ) -> Result<Label, VolumeCreateError> {
        self.create_with(config, &mut |_, _, _| true).expect("it ends")
    }

    /// Creates a volume; `None` if the initiator dies before, after so many rounds.
    pub(crate) fn create_until(
        &mut self,
        config: VolumeCreationConfig,
        rounds: usize,
    ) -> Option<Result<Label, VolumeCreateError>> {
        self.create_with(config, &mut |_, _, round| round < rounds)
    }

    /// Creates a volume; `each` is called before every round, and returns whether the initiator
    /// lives on.
    pub(crate) fn create_with(
        &mut self,
        config: VolumeCreationConfig,
        each: &mut dyn FnMut(&mut Self, &Wires, usize) -> bool,
    ) -> Option<Result<Label, VolumeCreateError>> {
        let targets = config.targets;
        let mut creation = match VolumeCreation::new(config) {
            Ok(creation) => creation,
            Err(error) => return Some(Err(error)),
        };
        let mut associations = associations(HOSTNQN, HOSTID, targets);
        let mut wires = Wires::default();
        for round in 0.. {
            if !each(self, &wires, round) {
                break;
            }
            let mut moved = self.carry_all(&mut associations, &mut wires);
            creation.advance(self.now, &mut associations);
            moved |= self.carry_all(&mut associations, &mut wires);
            if let Some(result) = creation.take_result() {
                self.carry_all(&mut associations, &mut wires);
                self.cut(&mut wires);
                return Some(result);
            }
            if !moved {
                let due = associations.iter().filter_map(Association::deadline).min();
                self.go_to(due.expect("something is to come"));
                associations.iter_mut().for_each(|association| association.timeout(self.now));
            }
        }
        self.cut(&mut wires);
        None
    }

    fn carry_all(&mut self, all: &mut [Association<Vec<u8>>], wires: &mut Wires) -> bool {
        let mut moved = false;
        for (target, association) in all.iter_mut().enumerate() {
            moved |= self.carry(target, association, wires);
        }
        moved
    }

    pub(crate) fn open(&mut self, config: impl Into<By>) -> Run {
        self.open_with(config, &mut |_, _, _| true)
    }

    /// Opens; `each` is called with every event, and returns whether there is space to keep blocks.
    pub(crate) fn open_with(
        &mut self,
        config: impl Into<By>,
        each: &mut dyn FnMut(&mut Self, &Wires, &OpeningEvent) -> bool,
    ) -> Run {
        let config: By = config.into();
        let (host, id) = config.host;
        let mut associations = associations(host, id, config.config.targets);
        let mut opening = VolumeOpening::new(config.config, self.now);
        let (mut wires, mut events, mut saved) = (Wires::default(), Vec::new(), Vec::new());
        let mut good = true;
        loop {
            let mut moved = self.carry_all(&mut associations, &mut wires);
            opening.advance(self.now, &mut associations);
            moved |= self.carry_all(&mut associations, &mut wires);
            while let Some(event) = opening.event() {
                good &= each(self, &wires, &event);
                events.push(event);
            }
            while let Some(step) = opening.save_step() {
                let fails = matches!(step, SaveStep::Blocks(_)) && !good;
                saved.push(step);
                opening.save_step_done(!fails, self.now, &mut associations);
                moved = true;
            }
            if let Some(result) = opening.take_result() {
                self.carry_all(&mut associations, &mut wires);
                return Run { result, associations, events, saved, wires };
            }
            if !moved {
                let due = associations.iter().filter_map(Association::deadline);
                let due = due.chain(opening.deadline(self.now)).min();
                self.go_to(due.expect("something is to come"));
                associations.iter_mut().for_each(|association| association.timeout(self.now));
            }
        }
    }

    /// Opens as long as `lives` returns true; then the initiator dies. Returns whether the opening
    /// ended before.
    pub(crate) fn open_until(
        &mut self,
        config: VolumeOpeningConfig,
        lives: &mut dyn FnMut(&mut Self) -> bool,
    ) -> bool {
        let mut associations = associations(HOSTNQN, HOSTID, config.targets);
        let mut opening = VolumeOpening::new(config, self.now);
        let mut wires = Wires::default();
        while lives(self) {
            let mut moved = self.carry_all(&mut associations, &mut wires);
            opening.advance(self.now, &mut associations);
            moved |= self.carry_all(&mut associations, &mut wires);
            if opening.take_result().is_some() {
                self.cut(&mut wires);
                return true;
            }
            if !moved {
                let due = associations.iter().filter_map(Association::deadline);
                let due = due.chain(opening.deadline(self.now)).min();
                self.go_to(due.expect("something is to come"));
                associations.iter_mut().for_each(|association| association.timeout(self.now));
            }
        }
        self.cut(&mut wires);
        false
    }

    /// Runs an operation until it has a result; `None` if the initiator dies before, after so many
    /// rounds.
    pub(crate) fn run<T>(
        &mut self,
        targets: usize,
        rounds: usize,
        advance: &mut dyn FnMut(u64, &mut Attached) -> Option<T>,
    ) -> Option<T> {
        self.run_beside(targets, rounds, &mut |now, attached, _| advance(now, attached))
    }

    /// As [`run`](Self::run), while something else happens to the targets.
    pub(crate) fn run_beside<T>(
        &mut self,
        targets: usize,
        rounds: usize,
        advance: &mut Beside<'_, T>,
    ) -> Option<T> {
        let mut associations = associations(HOSTNQN, HOSTID, targets);
        let mut wires = Wires::default();
        let mut result = None;
        for _ in 0..rounds {
            let mut moved = self.carry_all(&mut associations, &mut wires);
            result = advance(self.now, &mut associations, &mut self.worlds);
            moved |= self.carry_all(&mut associations, &mut wires);
            if result.is_some() {
                break;
            }
            if !moved {
                let due = associations.iter().filter_map(Association::deadline).min();
                self.go_to(due.expect("something is to come"));
                associations.iter_mut().for_each(|association| association.timeout(self.now));
            }
        }
        self.cut(&mut wires);
        result
    }

    /// Makes a volume of so many targets.
    pub(crate) fn with_volume(targets: usize) -> Self {
        let mut cluster = Self::new(targets);
        let label = cluster.create(creating(targets)).expect("it is made");
        assert_eq!(label.engine, EngineKind::Rio);
        cluster
    }
}
