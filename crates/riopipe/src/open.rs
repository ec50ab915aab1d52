//! Opening a volume, or inspecting it.
//!
//! 1. Start the threads of the targets, which set up the associations ([`Targets`]).
//! 2. Run the [`VolumeOpening`] to its end ([`run_opening`]). It decides each request: it reads the
//!    labels, claims the volume, and recovers it. This file reports its progress, saves the data
//!    that it is about to zero, and sleeps until a target answers.
//! 3. Make the [`OpenVolume`], and pass each association to a manager ([`open_volume`]).

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use riopipe_metrics::Start;
use riopipe_net::now_ns;
use riopipe_order::engine::EngineKind;
use riopipe_order::log_region::LogKind;
use riopipe_session::claim::Plan;
use riopipe_session::engine_choice::Hindrance;
use riopipe_session::initiator::manager::ManagerConfig;
use riopipe_session::initiator::opening::{OpeningError, Progress};
use riopipe_session::initiator::reconnect::BackOff;
use riopipe_session::initiator::stream::{FlushFailures, ReadBarrier};
use riopipe_session::initiator::volume::block_ownership::BlockOwnershipChecker;
use riopipe_session::initiator::volume::error::VolumeOpenError;
use riopipe_session::initiator::volume::members::{Layout, LeaseTimes, MembersError};
use riopipe_session::initiator::volume::opening::{
    OpenedVolume, OpeningEvent, OwnerWait, Purpose, VolumeChange, VolumeOpening,
    VolumeOpeningConfig,
};
use riopipe_session::initiator::volume::saving::SaveStep;
use riopipe_session::initiator::volume::state::VolumeState;
use riopipe_session::stages::Stages;
use riopipe_session::wire::VolumeStatus;

use crate::addr::MemberAddr;
use crate::association::Targets;
use crate::background::BackgroundThread;
use crate::call_error::CallError;
use crate::error::{OpenError, RecoverError};
use crate::failure::Exhausted;
use crate::following::{StreamHandles, shared_following};
use crate::identity::ConnectOptions;
use crate::info::{MemberInfo, OpeningState, Outlook, VolumeInfo};
use crate::open_volume::{OpenVolume, Server};
use crate::recovery::EngineUnavailable;
use crate::recovery::{Recovery, streams_of};
use crate::target::VolumeServer;
use crate::time::nanos;
use crate::undone::{SaveError, UndoneFileWriter};

/// The attempt that claims a volume: the first over its connections. Later ones are counted (trap
/// T23).
const FIRST_ATTEMPT: u32 = 0;
/// The longest sleep until the next check, if there is no deadline.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// The options for claiming a volume, or for inspecting it.
pub(crate) struct OpenRequest<'a> {
    pub(crate) engine: Option<EngineKind>,
    pub(crate) take_over: bool,
    /// How long to wait until an owner that is unreachable loses its lease.
    pub(crate) wait_for_lease: Duration,
    pub(crate) accept_lost_log: bool,
    pub(crate) check_ownership: bool,
    pub(crate) connect: &'a ConnectOptions,
    /// The file in which data that is about to be zeroed is saved.
    pub(crate) save_undone: Option<&'a Path>,
    /// A change of the volume that the new owner makes.
    pub(crate) change: VolumeChange,
    pub(crate) progress: &'a mut dyn FnMut(Progress),
}

/// The result of [`open`].
pub(crate) struct Opened {
    pub(crate) volume: Arc<OpenVolume>,
    pub(crate) background: Arc<BackgroundThread>,
    pub(crate) recovery: Recovery,
}

/// Claims the volume, and recovers every stream that needs it. If the volume is owned, waits for
/// the end of the lease as `request` allows.
pub(crate) fn open(
    name: &str,
    members: &[MemberAddr],
    request: &mut OpenRequest<'_>,
) -> Result<Opened, OpenError> {
    let background = BackgroundThread::new().map_err(|_| Exhausted::Descriptors)?;
    let finished = run_opening(Some(name), members, Purpose::Claim, request)?;
    let recovery = recovery_report(&finished);
    if !recovery.is_nothing() {
        tracing::info!(%recovery, "a crash was recovered from");
    }
    let volume = open_volume(finished, members, request, &background);
    Ok(Opened { volume, background, recovery })
}

/// Reports what opening would find. If the volume is owned, waits as `request` allows. Nothing is
/// changed.
pub(crate) fn dry_run(
    name: &str,
    members: &[MemberAddr],
    request: &mut OpenRequest<'_>,
) -> Result<Recovery, OpenError> {
    let finished = run_opening(Some(name), members, Purpose::DryRun, request)?;
    Ok(Recovery { dry_run: true, ..recovery_report(&finished) })
}

/// Inspects a volume without claiming it, and decides what opening it would meet. `name` is the name
/// that it must have, if the caller requests one.
pub(crate) fn inspect(
    name: Option<&str>,
    members: &[MemberAddr],
    connect: &ConnectOptions,
) -> Result<(VolumeInfo, Outlook), OpenError> {
    let mut request = OpenRequest {
        engine: None,
        take_over: false,
        wait_for_lease: Duration::ZERO,
        accept_lost_log: false,
        check_ownership: false,
        connect,
        save_undone: None,
        change: VolumeChange::default(),
        progress: &mut |_| (),
    };
    let FinishedOpening { targets, mut opened, .. } =
        run_opening(name, members, Purpose::Inspect, &mut request)?;
    let decision = opened.outlook.take().unwrap_or_else(|| Ok(Plan::default()));
    let volume = &opened.members.head.name;
    let outlook = outlook(volume, members, &targets, connect.timeout, &opened, decision);
    Ok((volume_info(&opened, members), outlook))
}

/// The decision about an opening, with the error that the opening would return.
fn outlook(
    volume: &str,
    members: &[MemberAddr],
    targets: &Targets,
    timeout: Duration,
    opened: &OpenedVolume,
    decision: Result<Plan, VolumeOpenError>,
) -> Outlook {
    let fallback = opened.fallback.map(|hindrance| engine_unavailable(targets, hindrance));
    let (state, refusal, unrecovered) = match decision {
        Ok(Plan { unrecovered: Some((_, entries)), .. }) => {
            (OpeningState::Unrecovered, None, entries)
        }
        Ok(_) => (OpeningState::Free, None, 0),
        Err(error) => {
            let error = open_error(volume, members, targets, timeout, error, None);
            (OpeningState::of_refusal(&error), Some(error), 0)
        }
    };
    Outlook { state, refusal, unrecovered, engine: opened.engine, fallback }
}

fn opening_config(
    name: Option<&str>,
    targets: &Targets,
    purpose: Purpose,
    request: &OpenRequest<'_>,
) -> VolumeOpeningConfig {
    let to_ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
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
            loss_ms: to_ms(connect.loss_timeout),
            keep_alive_ms: connect.keep_alive_ms(),
            timeout_ms: to_ms(connect.timeout),
        },
        save_undone: request.save_undone.is_some(),
        change: request.change.clone(),
        timeout_ns: nanos(connect.timeout),
        attempt: FIRST_ATTEMPT,
        layout: Layout::default(),
        crc32c: crate::crc32c,
    }
}

/// The result of [`run_opening`].
struct FinishedOpening {
    targets: Targets,
    opened: OpenedVolume,
    /// The file with the zeroed data, if there is one.
    saved: Option<PathBuf>,
}

/// Opens the volume, or inspects it.
fn run_opening(
    name: Option<&str>,
    members: &[MemberAddr],
    purpose: Purpose,
    request: &mut OpenRequest<'_>,
) -> Result<FinishedOpening, OpenError> {
    let targets = Targets::start(members, request.connect)?;
    let config = opening_config(name, &targets, purpose, request);
    let mut opening = VolumeOpening::new(config, now_ns());
    let mut undone_saver = UndoneSaver::new(request.save_undone);
    let result = loop {
        let seen = targets.signal.count();
        opening.advance(now_ns(), &mut &targets);
        while let Some(event) = opening.event() {
            report_event(event, name, &targets, request);
        }
        if let Some(result) = opening.take_result() {
            break result;
        }
        if let Some(step) = opening.save_step() {
            let has_succeeded = undone_saver.run_step(step);
            opening.save_step_done(has_succeeded, now_ns(), &mut &targets);
            continue;
        }
        let now = now_ns();
        let sleep = opening.deadline(now).map(|at| Duration::from_nanos(at.saturating_sub(now)));
        targets.signal.wait(seen, sleep.unwrap_or(SLEEP_MAX).min(SLEEP_MAX));
    };
    match result {
        Ok(opened) => Ok(FinishedOpening { targets, opened, saved: undone_saver.saved }),
        Err(error) => {
            let save_error = undone_saver.discard();
            let volume = name.unwrap_or_default();
            let timeout = request.connect.timeout;
            Err(open_error(volume, members, &targets, timeout, error, save_error))
        }
    }
}

/// Reports an event of the opening to the caller, or to the log of the program.
fn report_event(
    event: OpeningEvent,
    name: Option<&str>,
    targets: &Targets,
    request: &mut OpenRequest<'_>,
) {
    match event {
        OpeningEvent::Progress(progress) => (request.progress)(progress),
        OpeningEvent::Owned { server, owner, lease_left_ms, give_up_ns } => {
            let target = targets.name(server);
            let lease_left_s = lease_left_ms.div_ceil(1000);
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

/// Saves the data that is about to be zeroed in a file, in the steps that the opening requests.
struct UndoneSaver<'a> {
    /// The path of the file. `None`: the caller wants no file.
    path: Option<&'a Path>,
    /// The file, while it is being written.
    writer: Option<UndoneFileWriter>,
    /// The path of the file, once it is finished.
    saved: Option<PathBuf>,
    /// The error of the step that failed.
    error: Option<SaveError>,
}

impl<'a> UndoneSaver<'a> {
    fn new(path: Option<&'a Path>) -> Self {
        Self { path, writer: None, saved: None, error: None }
    }

    /// Runs a step. Returns whether it succeeded.
    fn run_step(&mut self, step: SaveStep) -> bool {
        let result = match (step, self.writer.take(), self.path) {
            (SaveStep::Begin { volume, name, generation, extents }, None, Some(path)) => {
                UndoneFileWriter::create(path, volume, &name, generation, &extents)
                    .map(|writer| self.writer = Some(writer))
            }
            (SaveStep::Blocks(bytes), Some(writer), _) => {
                writer.append(&bytes).map(|writer| self.writer = Some(writer))
            }
            (SaveStep::Finish, Some(writer), _) => {
                writer.finish().map(|path| self.saved = Some(path))
            }
            _ => return false,
        };
        self.error = result.err();
        self.error.is_none()
    }

    /// Removes an unfinished file, because nothing will be zeroed. Returns the error of the step
    /// that failed, if one did.
    fn discard(self) -> Option<SaveError> {
        if let Some(writer) = self.writer {
            writer.discard();
        }
        self.error
    }
}

/// Turns the error of the opening into the error that the library returns. The opening counts the
/// volume's members and targets; the library's errors name their addresses instead, which come from
/// `members` and `targets`. `timeout` is the time limit of a request. `save_error` is the error of
/// the [`UndoneSaver`], which knows why it could not save.
fn open_error(
    volume: &str,
    members: &[MemberAddr],
    targets: &Targets,
    timeout: Duration,
    error: VolumeOpenError,
    save_error: Option<SaveError>,
) -> OpenError {
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
        VolumeOpenError::Members(MembersError::NothingToGrow { member, blocks, needed }) => {
            OpenError::NothingToGrow { member: members[member].clone(), blocks, needed }
        }
        VolumeOpenError::Name => OpenError::Name,
        VolumeOpenError::Members(MembersError::Shrunk { member, blocks, needed }) => {
            OpenError::Shrunk { member: members[member].clone(), blocks, needed }
        }
        VolumeOpenError::Engine { engine, hindrance } => {
            let why = engine_unavailable(targets, hindrance);
            OpenError::Engine { engine, volume: volume.into(), why }
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
        VolumeOpenError::NotSaved => {
            RecoverError::from(save_error.unwrap_or(SaveError::NoFile)).into()
        }
    }
}

/// The reason why the requested or preferred engine can't run, with the address of the target.
fn engine_unavailable(targets: &Targets, hindrance: Hindrance) -> EngineUnavailable {
    match hindrance {
        Hindrance::Target(lacking) => {
            EngineUnavailable::Target { target: targets.name(lacking.target), lack: lacking.what }
        }
        Hindrance::MadeFor(engine) => EngineUnavailable::MadeFor(engine),
        Hindrance::LogGivenUp { target } => {
            EngineUnavailable::LogGivenUp { target: targets.name(target) }
        }
    }
}

/// The report of the recovery. Logs a warning if the volume runs with another engine than its own.
fn recovery_report(finished: &FinishedOpening) -> Recovery {
    let FinishedOpening { targets, opened, saved } = finished;
    let volume = &opened.members.head.name;
    let fallback = opened.fallback.map(|hindrance| engine_unavailable(targets, hindrance));
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
        saved: saved.clone(),
        fallback,
    }
}

/// The properties of the volume. `addrs` are the addresses of its members.
fn volume_info(opened: &OpenedVolume, addrs: &[MemberAddr]) -> VolumeInfo {
    let members = &opened.members;
    let member_infos = (0..).zip(addrs).map(|(member, addr)| member_info(opened, addr, member));
    VolumeInfo {
        name: members.head.name.clone(),
        id: members.head.volume,
        block_size: members.head.block_size,
        blocks: opened.topology.blocks(),
        unit_blocks: members.head.unit_blocks,
        streams: members.head.streams,
        generation: members.label_generation(),
        engine: members.head.engine,
        members: member_infos.collect(),
    }
}

fn member_info(opened: &OpenedVolume, addr: &MemberAddr, member: usize) -> MemberInfo {
    let OpenedVolume { members, statuses, .. } = opened;
    let (place, namespace) = (&members.places[member], &members.namespaces[member]);
    let controller = &members.controllers[place.target];
    // Only targets with Rio's extension have a status.
    let status: Option<&VolumeStatus> =
        statuses.iter().find(|(target, _)| *target == place.target).map(|(_, status)| status);
    let log = match &controller.extension {
        None => "foreign",
        Some(extension) if extension.log_in_memory => "mem",
        Some(extension) => extension.log_kind.map_or("none", LogKind::name),
    };
    let other_owner = status.filter(|status| status.owned && !status.own);
    MemberInfo {
        addr: addr.clone(),
        nqn: controller.subnqn.clone(),
        nguid: namespace.nguid.iter().map(|byte| format!("{byte:02x}")).collect(),
        blocks: namespace.blocks,
        volatile: controller.vwc,
        log: log.into(),
        slots: status.map_or(0, |status| status.slots),
        owner: other_owner.map(|status| status.owner.clone()),
        owner_address: other_owner
            .map(|status| status.owner_address.clone())
            .filter(|address| !address.is_empty()),
        unrecovered: status.map_or(0, |status| status.live_entries),
        log_lost: status.is_some_and(|status| members.is_log_lost(place.target, status)),
        unused_blocks: members.unused_blocks(member),
    }
}

/// Passes an association to a manager, and returns the server. `index` is the number of the target.
fn managed_server(
    targets: &Targets,
    index: usize,
    opened: &OpenedVolume,
    request: &OpenRequest<'_>,
) -> Arc<Server> {
    let subnqn = opened.members.controllers[index].subnqn.clone();
    let claim = opened.resume_claim(index);
    let server = Server {
        name: targets.name(index),
        addr: MemberAddr { nqn: Some(subnqn), ..targets.addrs[index].clone() },
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
    let volume = opened.members.head.name.clone();
    server.target.begin_managing(config, VolumeServer { volume, index });
    Arc::new(server)
}

/// Makes the shared state of the open volume. From now on lost associations are set up again.
fn open_volume(
    finished: FinishedOpening,
    addrs: &[MemberAddr],
    request: &OpenRequest<'_>,
    background: &BackgroundThread,
) -> Arc<OpenVolume> {
    let FinishedOpening { targets, opened, .. } = finished;
    let info = volume_info(&opened, addrs);
    let members = &opened.members;
    let granted_queues = members.controllers.iter().map(|controller| controller.queues).collect();
    let has_logs = opened.engine.capabilities().keeps_log;
    let mut state =
        VolumeState::new(members.head.streams, granted_queues, opened.engine, FIRST_ATTEMPT);
    let mut checker = BlockOwnershipChecker::default();
    for stream in streams_of(&opened.outcome, &opened.topology) {
        state.on_stream_recovered(stream.stream, stream.last, stream.pending());
        checker.on_recovered(stream.stream, stream.last);
    }
    let checks_ownership = (request.check_ownership || cfg!(debug_assertions)) && has_logs;
    let servers = (0..targets.len()).map(|index| managed_server(&targets, index, &opened, request));
    let servers = servers.collect();
    let stream_handles = StreamHandles::default();
    Arc::new(OpenVolume {
        name: info.name.clone(),
        id: info.id,
        engine: opened.engine,
        generation: opened.generation,
        flush_failures: FlushFailures::new(opened.topology.members().len()),
        read_barrier: ReadBarrier::new(opened.topology.servers().len()),
        stream_numbers: Arc::default(),
        redirections: Arc::default(),
        following: shared_following(&stream_handles, background.waker()),
        stream_handles,
        opening_config: opened.opening_config(),
        nsids: members.namespaces.iter().map(|namespace| namespace.nsid).collect(),
        topology: opened.topology,
        servers,
        connect_options: request.connect.clone(),
        state: Mutex::new(state),
        ownership_checker: checks_ownership.then(|| Mutex::new(checker)),
        stages: Arc::new(Stages::of_initiator()),
        opened_at: Start::now(),
        recovery_lock: Mutex::default(),
        is_released: AtomicBool::new(false),
        signal: Arc::clone(&targets.signal),
        info,
    })
}
