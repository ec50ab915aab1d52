//! Opening a volume: attach, check every label, ask every target, take it, and recover what a crash
//! has left.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use riopipe_metrics::Start;
use riopipe_net::now_ns;
use riopipe_nvme::command::Sqe;
use riopipe_order::engine::EngineKind;
use riopipe_order::topology::Topology;
use riopipe_session::claim::{ClaimError, Intent, lease_ms};
use riopipe_session::initiator::association::DRIVES_QUEUE;
use riopipe_session::initiator::known::{DriveOfVolume, KnownTarget};
use riopipe_session::initiator::manager::ManagerConfig;
use riopipe_session::initiator::opening::{Mode, Opening, OpeningError, Phase, Progress};
use riopipe_session::initiator::reconnect::BackOff;
use riopipe_session::initiator::stream::{FlushFailures, ReplayBoard};
use riopipe_session::label::DATA_START;
use riopipe_session::stages::Stages;
use riopipe_session::wire::{self, Claim, LogKind, VolumeStatus};

use crate::addr::MemberAddr;
use crate::assemble::{Assembled, members_on};
use crate::association::Association;
use crate::background::Background;
use crate::errand::{Errand, ErrandError, Lines};
use crate::error::{CallError, OpenError, RecoverError};
use crate::identity::ConnectOptions;
use crate::recover::save_undone;
use crate::recovery::{Recovery, streams_of};
use crate::shared::{Inner, Server, SharedLedger, Streams};
use crate::stream::nanos;
use crate::target::{CallData, Owner};

/// The attempt that takes a volume: the first over its connections. Later ones are counted (T23).
const FIRST_ATTEMPT: u32 = 0;
/// How often an owned volume is asked for again, and how often somebody is told of it.
const ASK_AGAIN: Duration = Duration::from_millis(500);
const TELL_EVERY: Duration = Duration::from_secs(5);

/// How a volume is to be taken, or looked at.
pub(crate) struct Way<'a> {
    pub(crate) engine: Option<EngineKind>,
    pub(crate) take_over: bool,
    /// How long to wait for an owner that may still come back.
    pub(crate) wait_for_lease: Duration,
    pub(crate) accept_lost_log: bool,
    pub(crate) check_handover: bool,
    pub(crate) connect: &'a ConnectOptions,
    /// Keep what is about to be zeroed in this file.
    pub(crate) save_undone: Option<&'a Path>,
    pub(crate) progress: &'a mut dyn FnMut(Progress),
}

/// Which engine is to run, and why it is not the volume's own if it isn't (T17).
fn choose_engine(
    assembled: &Assembled,
    wanted: Option<EngineKind>,
) -> Result<(EngineKind, Option<String>), OpenError> {
    let engine = wanted.unwrap_or(assembled.set.head.engine);
    if engine != EngineKind::Rio {
        return Ok((engine, None));
    }
    let foreign = assembled.targets.associations.iter().find(|association| {
        association.controller.extension.is_none_or(|e| e.log_kind == LogKind::None)
    });
    let why = match foreign {
        Some(target) => {
            format!(
                "target {} does not speak Rio's extension or has no ordering log",
                target.name()
            )
        }
        None if assembled.set.head.engine != EngineKind::Rio => {
            format!(
                "it was made for engine {}, without room in the ordering logs",
                assembled.set.head.engine
            )
        }
        None => return Ok((engine, None)),
    };
    if wanted.is_some() {
        let volume = assembled.set.head.name.clone();
        return Err(OpenError::Engine { engine, volume, why });
    }
    tracing::warn!(volume = %assembled.set.head.name, %why, "falling back to engine sync and its promise");
    Ok((EngineKind::Sync, Some(why)))
}

fn intent(assembled: &Assembled, engine: EngineKind, way: &Way<'_>) -> Intent {
    Intent {
        engine,
        take_over: way.take_over,
        accept_lost_log: way.accept_lost_log,
        label_generation: assembled.set.label_generation(),
        streams: assembled.set.head.streams,
        lease_ms: lease_of(engine, way.connect),
    }
}

/// For how long the targets keep the volume for an owner that they have lost (T25).
fn lease_of(engine: EngineKind, connect: &ConnectOptions) -> u32 {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    // After that long at most, this side knows of a loss that the target has noticed.
    let keep_alive = connect.keep_alive_ms();
    let noticed = u64::from(keep_alive / 3).saturating_add(millis(connect.timeout));
    let noticed = u32::try_from(noticed).unwrap_or(u32::MAX).max(keep_alive);
    lease_ms(engine, millis(connect.loss_timeout), noticed)
}

/// Takes the volume, and recovers every stream that needs it; waits for a while if it is owned.
pub(crate) fn open(
    name: &str,
    members: &[MemberAddr],
    way: &mut Way<'_>,
) -> Result<(Arc<Inner>, Recovery), OpenError> {
    patiently(name, way, |way| open_now(name, members, way))
}

/// Tells what opening would find, after a while if the volume is owned. Nothing is changed.
pub(crate) fn dry_run(
    name: &str,
    members: &[MemberAddr],
    way: &mut Way<'_>,
) -> Result<Recovery, OpenError> {
    patiently(name, way, |way| dry_run_now(name, members, way))
}

/// Tries again while the volume is owned, for as long as the caller wants to wait (T25).
fn patiently<T>(
    name: &str,
    way: &mut Way<'_>,
    mut attempt: impl FnMut(&mut Way<'_>) -> Result<T, OpenError>,
) -> Result<T, OpenError> {
    let began = Instant::now();
    let mut told = None;
    loop {
        let result = attempt(way);
        let left = way.wait_for_lease.saturating_sub(began.elapsed());
        let Err(OpenError::Claim {
            target,
            error: ClaimError::Owned { owner, lease_left_ms, .. },
            ..
        }) = &result
        else {
            return result;
        };
        if left.is_zero() {
            return result;
        }
        if told.is_none_or(|told: Instant| told.elapsed() >= TELL_EVERY) {
            told = Some(Instant::now());
            let lease_left_s = lease_left_ms.div_ceil(1000);
            let give_up_in_s = left.as_secs();
            tracing::warn!(
                volume = %name, %target, %owner, lease_left_s, give_up_in_s,
                "the volume is owned; waiting for its owner to go, or for its lease to run out"
            );
        }
        std::thread::sleep(ASK_AGAIN.min(left));
    }
}

fn open_now(
    name: &str,
    members: &[MemberAddr],
    way: &mut Way<'_>,
) -> Result<(Arc<Inner>, Recovery), OpenError> {
    let began = Instant::now();
    let mut assembled = Assembled::new(Some(name), members, way.accept_lost_log, way.connect)?;
    let connected = began.elapsed();
    let (engine, fallback) = choose_engine(&assembled, way.engine)?;
    let mode = Mode::Open(intent(&assembled, engine, way));
    let taken = take(&mut assembled, name, mode, way).and_then(|mut taken| {
        taken.recovery.steps.connect = connected;
        taken.recovery.fallback = fallback;
        Ok((background(name)?, taken))
    });
    match taken {
        Ok((background, taken)) => {
            let recovery = taken.recovery.clone();
            if !recovery.is_nothing() {
                tracing::info!(%recovery, "a crash was recovered from");
            }
            Ok((inner(assembled, engine, taken, background, way), recovery))
        }
        Err(error) => {
            release(&mut assembled);
            Err(error)
        }
    }
}

fn dry_run_now(
    name: &str,
    members: &[MemberAddr],
    way: &mut Way<'_>,
) -> Result<Recovery, OpenError> {
    let began = Instant::now();
    let mut assembled = Assembled::new(Some(name), members, way.accept_lost_log, way.connect)?;
    let connected = began.elapsed();
    let (engine, fallback) = choose_engine(&assembled, way.engine)?;
    let mode = Mode::DryRun(intent(&assembled, engine, way));
    let taken = take(&mut assembled, name, mode, way)?;
    let mut recovery = Recovery { dry_run: true, fallback, ..taken.recovery };
    recovery.steps.connect = connected;
    Ok(recovery)
}

/// A volume that has been taken and recovered, or looked at.
struct Taken {
    generation: u32,
    statuses: Vec<(usize, VolumeStatus)>,
    topology: Topology,
    recovery: Recovery,
}

fn take(
    assembled: &mut Assembled,
    name: &str,
    mode: Mode,
    way: &mut Way<'_>,
) -> Result<Taken, OpenError> {
    let volume = assembled.set.head.volume;
    let associations = &assembled.targets.associations;
    let names: Vec<String> = associations.iter().map(Association::name).collect();
    let regions: Vec<[u8; 16]> = associations
        .iter()
        .map(|association| association.controller.extension.map_or([0; 16], |e| e.region))
        .collect();
    let regions = way.accept_lost_log.then_some(&regions[..]);
    let nsids: Vec<u32> = assembled.set.namespaces.iter().map(|n| n.nsid).collect();
    let fault = |error| open_error(name, error, |at| names[at].clone());
    let is_dry = matches!(mode, Mode::DryRun(_));
    // Where the volume's blocks are does not depend on the room in the logs.
    let room: Vec<_> = (0..names.len())
        .map(|at| (at, VolumeStatus { slots: 1, ..VolumeStatus::default() }))
        .collect();
    let map = assembled.topology(&room)?;
    let opening = Opening::new(assembled.opening(), mode, FIRST_ATTEMPT)
        .map_err(|error| fault(ErrandError::Opening(error)))?;
    let Assembled { targets, drives, set } = assembled;
    let lines = targets
        .associations
        .iter()
        .zip(&*drives)
        .map(|(association, drives)| Lines { target: Arc::clone(association.target()), drives });
    let mut errand = Errand::new(opening, lines.collect(), way.connect.timeout);
    let mut saved = None;
    loop {
        let phase = errand.run(way.progress).map_err(fault)?;
        if phase == Phase::Claimed {
            set.relabel(&mut errand, regions)?;
        }
        let saves = phase == Phase::Decided || is_dry && phase == Phase::Over;
        if let (true, Some(path)) = (saves, way.save_undone) {
            let began = Instant::now();
            saved =
                save_undone(&mut errand, volume, &map, &nsids, path).map_err(RecoverError::from)?;
            if is_dry {
                errand.steps.save = began.elapsed();
            }
        }
        if phase == Phase::Over {
            break;
        }
        errand.go_on().map_err(fault)?;
    }
    let Errand { opening, steps, .. } = errand;
    let generation = opening.generation();
    let statuses = opening.statuses().to_vec();
    let outcome = opening.into_outcome();
    let recovery = Recovery {
        volume: name.into(),
        dry_run: is_dry,
        streams: streams_of(&outcome, &map),
        steps,
        torn: outcome.counts.torn,
        saved,
        fallback: None,
    };
    let topology = assembled.topology(&statuses)?;
    Ok(Taken { generation, statuses, topology, recovery })
}

fn open_error(name: &str, error: ErrandError, target: impl Fn(usize) -> String) -> OpenError {
    match error {
        ErrandError::Opening(OpeningError::Claim(error)) => OpenError::Claim {
            volume: name.into(),
            target: error.target().map_or_else(String::new, target),
            error,
        },
        ErrandError::Call { target, doing, source } => OpenError::Call { target, doing, source },
        error => RecoverError::of(name, error, target).into(),
    }
}

/// What looks after the volume's idle streams.
fn background(name: &str) -> Result<Arc<Background>, OpenError> {
    Background::new(name).map_err(|_| {
        let source = CallError::Nonsense("this process has no descriptors left");
        OpenError::Call { target: name.into(), doing: "watching its connections", source }
    })
}

fn inner(
    assembled: Assembled,
    engine: EngineKind,
    taken: Taken,
    background: Arc<Background>,
    way: &Way<'_>,
) -> Arc<Inner> {
    let Taken { generation, statuses, topology, recovery } = taken;
    let info = assembled.info(&statuses, topology.blocks());
    let opening = assembled.opening();
    let Assembled { targets, set, drives } = assembled;
    // Their queue is free again for a stream's own recovery.
    drop(drives);
    let nsids = set.namespaces.iter().map(|n| n.nsid).collect();
    let mut marks = vec![Default::default(); usize::from(set.head.streams)];
    let mut streams = Streams::default();
    let ledger = (way.check_handover || cfg!(debug_assertions)) && engine == EngineKind::Rio;
    let ledger = ledger.then(SharedLedger::default);
    for found in &recovery.streams {
        marks[usize::from(found.stream.0)] = found.last;
        if let Some(ledger) = &ledger {
            ledger.restarted(found.stream, found.last);
        }
        if found.acknowledge {
            streams.pending.insert(found.stream, found.pending());
        }
    }
    let mut servers = Vec::new();
    let members: Vec<_> = (0..targets.associations.len())
        .map(|at| members_on(&targets, &set.namespaces, at))
        .collect();
    for (index, association) in targets.associations.into_iter().enumerate() {
        let controller = &association.controller;
        let queues = DRIVES_QUEUE + 1..=controller.queues;
        streams.free.push(queues.collect::<BTreeSet<_>>());
        let claim = controller.extension.map(|_| Claim {
            volume: set.head.volume,
            generation,
            create: false,
            give_up: false,
            take_over: false,
            unlogged: !set.logged(index),
            resume: true,
            streams: set.head.streams,
            slots: 0,
            lease_ms: lease_of(engine, way.connect),
            members: members[index].clone(),
        });
        let drives = members[index].iter().map(|place| {
            let label = &set.labels[usize::from(place.member.0)];
            let blocks = DATA_START.saturating_add(label.data_blocks);
            DriveOfVolume { nsid: place.nsid, index: label.index, blocks }
        });
        let known = KnownTarget::new(set.head.volume, generation, controller, drives);
        let server = Server {
            name: association.name(),
            addr: association.addr.clone(),
            queues_granted: controller.queues,
            is_claimed: claim.is_some(),
            target: Arc::clone(association.target()),
        };
        let config = ManagerConfig {
            known,
            claim,
            loss_ns: nanos(way.connect.loss_timeout),
            back_off: BackOff::default(),
            // The low bits of the clock differ from process to process.
            seed: now_ns(),
        };
        let owner =
            Owner { volume: set.head.name.clone(), index, streams: Arc::clone(&background) };
        server.target.manage(config, owner);
        servers.push(Arc::new(server));
    }
    Arc::new(Inner {
        name: info.name.clone(),
        id: info.id,
        engine,
        generation,
        flush_failures: FlushFailures::new(topology.members().len()),
        replay_board: ReplayBoard::new(topology.servers().len()),
        topology,
        opening,
        nsids,
        servers,
        connect: way.connect.clone(),
        marks: Mutex::new(marks),
        streams: Mutex::new(streams),
        ledger,
        background,
        stages: Arc::new(Stages::of_initiator()),
        opened: Start::now(),
        recovering: Mutex::new(FIRST_ATTEMPT),
        info,
    })
}

/// Gives back what was claimed; a target that can't be told notices when the connection closes.
fn release(assembled: &mut Assembled) {
    let volume = assembled.set.head.volume;
    for association in &mut assembled.targets.associations {
        if association.controller.extension.is_some() {
            let release: Sqe = wire::release_command(volume, false);
            let _ = association.ask(release, CallData::None);
        }
    }
}
