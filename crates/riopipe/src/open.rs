//! Opening a volume, or inspecting it: the threads, files and messages around a [`VolumeOpening`].

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use riopipe_metrics::Start;
use riopipe_net::now_ns;
use riopipe_order::engine::EngineKind;
use riopipe_order::log_region::LogKind;
use riopipe_session::engine_choice::Hindrance;
use riopipe_session::initiator::attach::Namespace;
use riopipe_session::initiator::manager::ManagerConfig;
use riopipe_session::initiator::opening::{OpeningError, Progress};
use riopipe_session::initiator::reconnect::BackOff;
use riopipe_session::initiator::stream::{FlushFailures, ReadBarrier};
use riopipe_session::initiator::volume::block_ownership::BlockOwnershipChecker;
use riopipe_session::initiator::volume::error::VolumeOpenError;
use riopipe_session::initiator::volume::members::{Layout, LeaseTimes, MemberPlace, MembersError};
use riopipe_session::initiator::volume::opening::{
    OpenedVolume, OpeningEvent, OwnerWait, Purpose, VolumeOpening, VolumeOpeningConfig,
};
use riopipe_session::initiator::volume::saving::SaveStep;
use riopipe_session::initiator::volume::state::VolumeState;
use riopipe_session::stages::Stages;
use riopipe_session::wire::VolumeStatus;

use crate::addr::MemberAddr;
use crate::association::Targets;
use crate::background::Background;
use crate::call_error::CallError;
use crate::error::{OpenError, RecoverError};
use crate::failure::Exhausted;
use crate::identity::ConnectOptions;
use crate::info::{MemberInfo, VolumeInfo};
use crate::recovery::EngineUnavailable;
use crate::recovery::{Recovery, streams_of};
use crate::shared::{Inner, Server};
use crate::target::Owner;
use crate::time::nanos;
use crate::undone::{SaveError, Saving};

/// The attempt that claims a volume: the first over its connections. Later ones are counted (T23).
const FIRST_ATTEMPT: u32 = 0;
/// The longest sleep between two polls.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// The options for claiming a volume, or for inspecting it.
pub(crate) struct OpenRequest<'a> {
    pub(crate) engine: Option<EngineKind>,
    pub(crate) take_over: bool,
    /// How long to wait for an owner that may still come back.
    pub(crate) wait_for_lease: Duration,
    pub(crate) accept_lost_log: bool,
    pub(crate) check_ownership: bool,
    pub(crate) connect: &'a ConnectOptions,
    /// The file in which data that is about to be zeroed is saved.
    pub(crate) save_undone: Option<&'a Path>,
    pub(crate) progress: &'a mut dyn FnMut(Progress),
}

/// Claims the volume, and recovers every stream that needs it; waits for a while if it is owned.
pub(crate) fn open(
    name: &str,
    members: &[MemberAddr],
    request: &mut OpenRequest<'_>,
) -> Result<(Arc<Inner>, Arc<Background>, Recovery), OpenError> {
    let background = Background::new().map_err(|_| Exhausted::Descriptors)?;
    let (targets, opened, saved) = run(Some(name), members, Purpose::Claim, request)?;
    let recovery = recovery(&opened, &targets, saved);
    if !recovery.is_nothing() {
        tracing::info!(%recovery, "a crash was recovered from");
    }
    Ok((inner(&targets, members, opened, request), background, recovery))
}

/// Reports what opening would find, after a wait if the volume is owned. Nothing is changed.
pub(crate) fn dry_run(
    name: &str,
    members: &[MemberAddr],
    request: &mut OpenRequest<'_>,
) -> Result<Recovery, OpenError> {
    let (targets, opened, saved) = run(Some(name), members, Purpose::DryRun, request)?;
    Ok(Recovery { dry_run: true, ..recovery(&opened, &targets, saved) })
}

/// Inspects a volume without claiming it.
pub(crate) fn inspect(
    members: &[MemberAddr],
    connect: &ConnectOptions,
) -> Result<VolumeInfo, OpenError> {
    let mut request = OpenRequest {
        engine: None,
        take_over: false,
        wait_for_lease: Duration::ZERO,
        accept_lost_log: true,
        check_ownership: false,
        connect,
        save_undone: None,
        progress: &mut |_| (),
    };
    let (_, opened, _) = run(None, members, Purpose::Inspect, &mut request)?;
    Ok(info(&opened, members))
}

fn config(
    name: Option<&str>,
    targets: &Targets,
    purpose: Purpose,
    request: &OpenRequest<'_>,
) -> VolumeOpeningConfig {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let connect = request.connect;
    VolumeOpeningConfig {
        name: name.map(Into::into),
        places: targets.places.clone(),
        targets: targets.len(),
        purpose,
        engine: request.engine,
        take_over: request.take_over,
        accept_lost_log: request.accept_lost_log,
        wait: OwnerWait::of(nanos(request.wait_for_lease)),
        lease: LeaseTimes {
            loss_ms: millis(connect.loss_timeout),
            keep_alive_ms: connect.keep_alive_ms(),
            timeout_ms: millis(connect.timeout),
        },
        save_undone: request.save_undone.is_some(),
        timeout_ns: nanos(connect.timeout),
        attempt: FIRST_ATTEMPT,
        layout: Layout::default(),
        crc32c: crate::crc32c,
    }
}

/// Opens the volume, or inspects it. Returns its targets, the findings, and the file that keeps the
/// zeroed data.
fn run(
    name: Option<&str>,
    members: &[MemberAddr],
    purpose: Purpose,
    request: &mut OpenRequest<'_>,
) -> Result<(Targets, OpenedVolume, Option<PathBuf>), OpenError> {
    let targets = Targets::start(members, request.connect)?;
    let mut opening = VolumeOpening::new(config(name, &targets, purpose, request), now_ns());
    let mut keeping = Keeping { path: request.save_undone, file: None, saved: None, failed: None };
    let result = loop {
        let seen = targets.signal.count();
        opening.advance(now_ns(), &mut &targets);
        while let Some(event) = opening.event() {
            match event {
                OpeningEvent::Progress(progress) => (request.progress)(progress),
                OpeningEvent::Owned { server, owner, lease_left_ms, give_up_ns } => {
                    let (target, lease_left_s) =
                        (targets.name(server), lease_left_ms.div_ceil(1000));
                    let give_up_in_s = give_up_ns / 1_000_000_000;
                    tracing::warn!(
                        volume = name, %target, %owner, lease_left_s, give_up_in_s,
                        "the volume is owned; waiting until its owner releases it, or its lease runs out"
                    );
                }
                OpeningEvent::Sent { .. }
                | OpeningEvent::Claimed { .. }
                | OpeningEvent::Releases { .. } => {}
            }
        }
        if let Some(result) = opening.take_result() {
            break result;
        }
        if let Some(step) = opening.save_step() {
            let done = keeping.step(step);
            opening.save_step_done(done, now_ns(), &mut &targets);
            continue;
        }
        let now = now_ns();
        let sleep = opening.deadline(now).map(|at| Duration::from_nanos(at.saturating_sub(now)));
        targets.signal.wait(seen, sleep.unwrap_or(SLEEP_MAX).min(SLEEP_MAX));
    };
    match result {
        Ok(opened) => Ok((targets, opened, keeping.saved)),
        Err(error) => {
            let failed = keeping.discard();
            Err(open_error(name.unwrap_or_default(), members, &targets, request, error, failed))
        }
    }
}

/// The file that keeps the data that is about to be zeroed.
struct Keeping<'a> {
    path: Option<&'a Path>,
    file: Option<Saving>,
    saved: Option<PathBuf>,
    failed: Option<SaveError>,
}

impl Keeping<'_> {
    /// Does a step. Returns whether it succeeded.
    fn step(&mut self, step: SaveStep) -> bool {
        let done = match (step, self.file.take(), self.path) {
            (SaveStep::Begin { volume, extents }, None, Some(path)) => {
                Saving::begin(path, volume, &extents).map(|file| self.file = Some(file))
            }
            (SaveStep::Blocks(bytes), Some(file), _) => {
                file.append(&bytes).map(|file| self.file = Some(file))
            }
            (SaveStep::Finish, Some(file), _) => file.finish().map(|path| self.saved = Some(path)),
            _ => return false,
        };
        self.failed = done.err();
        self.failed.is_none()
    }

    /// Nothing will be zeroed: removes the file, and returns the error that it met, if any.
    fn discard(self) -> Option<SaveError> {
        if let Some(file) = self.file {
            file.discard();
        }
        self.failed
    }
}

fn open_error(
    volume: &str,
    members: &[MemberAddr],
    targets: &Targets,
    request: &OpenRequest<'_>,
    error: VolumeOpenError,
    keeping: Option<SaveError>,
) -> OpenError {
    let timeout = request.connect.timeout;
    match error {
        VolumeOpenError::Attach(failed) => targets.attach_error(failed).into(),
        VolumeOpenError::NoNamespace { member } => {
            let have = targets.nsids(targets.places[member].target);
            OpenError::NoNamespace { member: members[member].clone(), have }
        }
        VolumeOpenError::Call { server, doing, source } => {
            let (target, source) = (targets.name(server), CallError::of(source, timeout));
            OpenError::Call { target, doing, source }
        }
        VolumeOpenError::Members(MembersError::Assemble(error)) => {
            OpenError::Assemble { members: members.to_vec(), error }
        }
        VolumeOpenError::Members(MembersError::Shrunk { member, blocks, needed }) => {
            OpenError::Shrunk { member: members[member].clone(), blocks, needed }
        }
        VolumeOpenError::Engine { engine, hindrance } => {
            OpenError::Engine { engine, volume: volume.into(), why: hindered(targets, hindrance) }
        }
        VolumeOpenError::Topology(error) => error.into(),
        VolumeOpenError::Opening(OpeningError::Claim(error)) => OpenError::Claim {
            volume: volume.into(),
            target: error.target().map(|target| targets.name(target)),
            error,
        },
        VolumeOpenError::Opening(error) => {
            let target = error.server().map(|server| targets.name(server));
            RecoverError::Opening { volume: volume.into(), target, error }.into()
        }
        VolumeOpenError::Save { server, source } => {
            let (target, source) = (targets.name(server), CallError::of(source, timeout));
            RecoverError::from(SaveError::Read { target, source }).into()
        }
        VolumeOpenError::NotSaved => match keeping {
            Some(error) => RecoverError::from(error).into(),
            None => RecoverError::from(SaveError::NoFile).into(),
        },
    }
}

/// Why engine `rio` can't run.
fn hindered(targets: &Targets, hindrance: Hindrance) -> EngineUnavailable {
    match hindrance {
        Hindrance::Target(lacking) => {
            EngineUnavailable::Target { target: targets.name(lacking.target), lack: lacking.what }
        }
        Hindrance::MadeFor(engine) => EngineUnavailable::MadeFor(engine),
    }
}

fn recovery(opened: &OpenedVolume, targets: &Targets, saved: Option<PathBuf>) -> Recovery {
    let volume = &opened.members.head.name;
    let fallback = opened.fallback.map(|hindrance| hindered(targets, hindrance));
    if let Some(why) = &fallback {
        let engine = opened.engine;
        tracing::warn!(%volume, %why, "falling back to engine {engine} and its promise");
    }
    Recovery {
        volume: volume.clone(),
        dry_run: false,
        streams: streams_of(&opened.outcome, &opened.topology),
        steps: opened.steps.into(),
        torn: opened.outcome.counts.torn,
        saved,
        fallback,
    }
}

fn info(opened: &OpenedVolume, addrs: &[MemberAddr]) -> VolumeInfo {
    let OpenedVolume { members, statuses, .. } = opened;
    let of = |target: usize| statuses.iter().find(|(at, _)| *at == target).map(|(_, s)| s);
    let member = |(addr, (place, namespace)): (&MemberAddr, (&MemberPlace, &Namespace))| {
        let controller = &members.controllers[place.target];
        let status: Option<&VolumeStatus> = of(place.target);
        MemberInfo {
            addr: addr.clone(),
            nqn: controller.subnqn.clone(),
            nguid: namespace.nguid.iter().map(|b| format!("{b:02x}")).collect(),
            blocks: namespace.blocks,
            volatile: controller.vwc,
            log: match &controller.extension {
                None => "foreign",
                Some(extension) => extension.log_kind.map_or("none", LogKind::name),
            }
            .into(),
            slots: status.map_or(0, |s| s.slots),
            owner: status.filter(|s| s.owned && !s.own).map(|s| s.owner.clone()),
            unrecovered: status.map_or(0, |s| s.live_entries),
            log_lost: status.is_some_and(|status| members.is_log_lost(place.target, status)),
        }
    };
    let all = addrs.iter().zip(members.places.iter().zip(&members.namespaces));
    VolumeInfo {
        name: members.head.name.clone(),
        id: members.head.volume,
        block_size: members.head.block_size,
        blocks: opened.topology.blocks(),
        unit_blocks: members.head.unit_blocks,
        streams: members.head.streams,
        generation: members.label_generation(),
        engine: members.head.engine,
        members: all.map(member).collect(),
    }
}

fn inner(
    targets: &Targets,
    addrs: &[MemberAddr],
    opened: OpenedVolume,
    request: &OpenRequest<'_>,
) -> Arc<Inner> {
    let info = info(&opened, addrs);
    let members = &opened.members;
    let granted = members.controllers.iter().map(|controller| controller.queues).collect();
    let logged = opened.engine.capabilities().keeps_log;
    let mut state = VolumeState::new(members.head.streams, granted, logged, FIRST_ATTEMPT);
    let mut ownership = BlockOwnershipChecker::default();
    for found in streams_of(&opened.outcome, &opened.topology) {
        state.on_stream_recovered(found.stream, found.last, found.pending());
        ownership.on_recovered(found.stream, found.last);
    }
    let checks = (request.check_ownership || cfg!(debug_assertions)) && logged;
    let servers = (0..targets.len()).map(|index| {
        let controller = &members.controllers[index];
        let claim = opened.resume_claim(index);
        let server = Server {
            name: targets.name(index),
            addr: MemberAddr {
                nqn: Some(controller.subnqn.clone()),
                ..targets.addrs[index].clone()
            },
            is_claimed: claim.is_some(),
            target: Arc::clone(targets.get(index)),
        };
        let config = ManagerConfig {
            known: opened.known_target(index),
            claim,
            loss_ns: nanos(request.connect.loss_timeout),
            back_off: BackOff::default(),
            // The low bits of the clock differ from process to process.
            seed: now_ns(),
        };
        let volume = info.name.clone();
        server.target.manage(config, Owner { volume, index });
        Arc::new(server)
    });
    let servers = servers.collect();
    Arc::new(Inner {
        name: info.name.clone(),
        id: info.id,
        engine: opened.engine,
        generation: opened.generation,
        flush_failures: FlushFailures::new(opened.topology.members().len()),
        read_barrier: ReadBarrier::new(opened.topology.servers().len()),
        opening: opened.opening_config(),
        nsids: members.namespaces.iter().map(|namespace| namespace.nsid).collect(),
        topology: opened.topology,
        servers,
        connect: request.connect.clone(),
        state: Mutex::new(state),
        ownership: checks.then(|| Mutex::new(ownership)),
        stages: Arc::new(Stages::of_initiator()),
        opened: Start::now(),
        recovering: Mutex::default(),
        closed: AtomicBool::new(false),
        signal: Arc::clone(&targets.signal),
        info,
    })
}
