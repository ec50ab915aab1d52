//! Opening the volume: the connections and the clock of a [`VolumeOpening`], and its reports to the
//! oracle.

use riopipe_order::attribute::StreamId;
use riopipe_order::following::SharedFollowing;
use riopipe_order::topology::Topology;
use riopipe_session::claim::ClaimError;
use riopipe_session::initiator::association::AssociationConfig;
use riopipe_session::initiator::manager::ManagerConfig;
use riopipe_session::initiator::opening::{Call, OpeningError, Outcome, Phase};
use riopipe_session::initiator::reconnect::BackOff;
use riopipe_session::initiator::stream::{
    FlushFailures, ReadBarrier, Redirections, SharedRedirections,
};
use riopipe_session::initiator::stream_driver::StreamShared;
use riopipe_session::initiator::volume::block_ownership::BlockOwnershipChecker;
use riopipe_session::initiator::volume::error::VolumeOpenError;
use riopipe_session::initiator::volume::members::{Layout, LeaseTimes, MemberPlace, MembersError};
use riopipe_session::initiator::volume::opening::{
    OpenedVolume, OpeningEvent, OwnerWait, Purpose, VolumeChange, VolumeOpening,
    VolumeOpeningConfig,
};
use riopipe_session::initiator::volume::ranges::to_acknowledge;
use riopipe_session::initiator::volume::state::VolumeState;
use riopipe_session::label::AssembleError;
use riopipe_session::wire as rio;

use super::following::{FollowingState, WokenStreams};
use super::server::{ANSWER_NS, Targets, association};
use super::{Client, Refused, State, Volume, command_text, is_fenced};
use crate::core::{Core, Ev, MS, US};
use crate::machine::subnqn;
use crate::oracle::{Drives, Opened, Recovered, Where};
use riopipe_platform::crc32c;

/// The initiator notices within this time a loss that a target has noticed: it sends a keep-alive,
/// and gives the target up.
const NOTICED_MS: u64 = 100;
/// The shortest time until a refused opening is tried again, ns.
const RETRY_NS: u64 = 2 * MS;
/// The first pause before a target is tried again, ns. The pause grows, usually up to the maximum.
const BACK_OFF_NS: u64 = 20 * US;
const BACK_OFF_NS_MAX: u64 = 3 * MS;
/// One of this number of openings begins with a dry run. The next constants: the same for openings
/// that wait for the owner, the length of that wait, ns, and the same for openings that save the
/// blocks that they will zero.
const DRY_RUN_ONE_IN: u64 = 8;
const WAIT_ONE_IN: u64 = 8;
const WAIT_NS: u64 = 20 * MS;
const SAVE_ONE_IN: u64 = 4;
/// The maximum number of calls of the opening at one moment. More means that its deadline is wrong.
const ROUNDS_MAX: usize = 1000;

impl Client {
    fn targets(&self, core: &Core) -> Vec<AssociationConfig> {
        let spec = core.scenario.client;
        let target = |machine: usize| AssociationConfig {
            keep_alive_ms: spec.keep_alive_ms,
            header_digest: spec.digests,
            data_digest: Some(spec.digests),
            ..association(self.hostnqn(), self.hostid(), subnqn(machine))
        };
        (0..core.scenario.machines.len()).map(target).collect()
    }

    /// Begins to open the volume. Sometimes a dry run of the recovery comes first, and the volume
    /// is opened after that. An initiator that waits for an owner to end asks again by itself
    /// (trap T25).
    pub(super) fn begin_opening(&mut self, core: &mut Core) {
        let dry_run = !core::mem::take(&mut self.dry_run_made) && core.rng.one_in(DRY_RUN_ONE_IN);
        self.dry_run_made = dry_run;
        let waits = core.rng.one_in(WAIT_ONE_IN);
        let for_ns = if waits { WAIT_NS } else { 0 };
        let save_undone = core.rng.one_in(SAVE_ONE_IN);
        let (spec, volume) = (core.scenario.client, &core.scenario.volume);
        let place = |(machine, drive): &(usize, usize)| MemberPlace {
            target: *machine,
            nsid: *drive as u32 + 1,
        };
        let config = VolumeOpeningConfig {
            name: Some(core.name.into()),
            places: volume.members.iter().map(place).collect(),
            targets: self.servers.len(),
            purpose: if dry_run { Purpose::DryRun } else { Purpose::Claim },
            engine: None,
            take_over: self.take_over,
            accept_lost_log: self.accept_lost,
            wait: OwnerWait { for_ns, ask_ns: RETRY_NS, report_ns: RETRY_NS },
            lease: LeaseTimes {
                loss_ms: spec.loss_ms.into(),
                keep_alive_ms: spec.keep_alive_ms,
                timeout_ms: NOTICED_MS,
            },
            save_undone,
            change: VolumeChange::default(),
            timeout_ns: ANSWER_NS,
            attempt: 0,
            layout: Layout {
                start: (volume.first - volume.prepare).into(),
                request_blocks_max: volume.request_blocks,
            },
            crc32c,
        };
        self.opening = Some(Box::new(VolumeOpening::new(config, core.now)));
        self.began_polling = core.now;
        let (end, targets) = (self.end(), self.targets(core));
        for (server, target) in self.servers.iter_mut().zip(targets) {
            server.attach(target, end, core);
        }
    }

    /// Continues the opening of the volume.
    pub(super) fn continue_opening(&mut self, drives: &Drives<'_>, core: &mut Core) {
        let end = self.end();
        for _ in 0..ROUNDS_MAX {
            let Some(opening) = &mut self.opening else { return };
            opening.advance(core.now, &mut Targets(&mut self.servers));
            self.servers.iter_mut().for_each(|server| server.carry(end, core));
            self.handle_events(core);
            let Some(opening) = &mut self.opening else { return };
            if opening.save_step().is_some() {
                opening.save_step_done(true, core.now, &mut Targets(&mut self.servers));
                continue;
            }
            match opening.take_result() {
                None => {}
                Some(Ok(opened)) => {
                    self.opening = None;
                    if opened.generation == 0 {
                        core.trace(|| {
                            format!("initiator: would be recovered: {:?}", opened.outcome)
                        });
                        return self.retry_at = core.now;
                    }
                    return self.opened(opened, drives, core);
                }
                Some(Err(error)) => {
                    self.opening = None;
                    return self.opening_failed(&error, core);
                }
            }
            let Some(due) = opening.deadline(core.now) else { return };
            if due > core.now {
                if self.opening_wakes_at <= core.now || due < self.opening_wakes_at {
                    self.opening_wakes_at = due;
                    let (client, incarnation) = (self.index, self.incarnation);
                    core.at(due, Ev::WakeClient { client, incarnation, server: 0 });
                }
                return;
            }
        }
        debug_assert!(false, "the opening's deadline does not move");
    }

    fn handle_events(&mut self, core: &mut Core) {
        let (index, take_over) = (self.index, self.take_over);
        let Some(opening) = &mut self.opening else { return };
        while let Some(event) = opening.event() {
            match event {
                OpeningEvent::Progress(progress) => {
                    if progress.phase == Phase::Ask && progress.done == 0 {
                        core.recoveries = (core.recoveries.0 + 1, core.events);
                    }
                    // The logs are read once the labels carry the new owner's generation.
                    if let (Phase::List, Some(recovery)) = (progress.phase, opening.recovery()) {
                        // A dry run has no generation.
                        core.label_generation = core.label_generation.max(recovery.generation());
                    }
                }
                OpeningEvent::Sent { server, call } => {
                    note_sent(index, server, &call, core);
                    if let Some(claim) = claim_of(&call) {
                        core.oracle.claims(claim.generation, take_over);
                        let statuses = opening.recovery().map_or(&[][..], |it| it.statuses());
                        let is_lost = |(on, status): &(usize, rio::VolumeStatus)| {
                            *on == server && (!status.known || status.unlogged || status.damaged)
                        };
                        if claim.give_up && statuses.iter().any(is_lost) {
                            core.oracle.log_given_up(server);
                        }
                    }
                }
                // The opening asks for the volume again, and then reads the drives again.
                OpeningEvent::Owned { .. } => self.began_polling = core.now,
                OpeningEvent::Releases { generation } if take_over => {
                    core.oracle.releases_claim(generation);
                }
                OpeningEvent::Releases { .. } | OpeningEvent::Claimed { .. } => {}
            }
        }
    }

    fn opening_failed(&mut self, error: &VolumeOpenError, core: &mut Core) {
        core.trace(|| format!("initiator: the volume can't be opened: {error}"));
        self.retry_at = core.now + RETRY_NS + core.retry();
        let refused = match error {
            VolumeOpenError::Opening(error) => self.why_refused(error),
            VolumeOpenError::Members(MembersError::Assemble(AssembleError::LogDue {
                given,
                ..
            })) => Refused::Log(core.scenario.volume.members[*given].0),
            VolumeOpenError::Members(_) => Refused::Drives,
            _ => Refused::Other,
        };
        self.refused = Some(refused);
    }

    /// The meaning of a refusal for the operator.
    pub(super) fn why_refused(&self, error: &OpeningError) -> Refused {
        match error {
            OpeningError::Claim(ClaimError::Owned { .. }) | OpeningError::TakenOver { .. } => {
                Refused::Owned
            }
            OpeningError::Claim(
                ClaimError::LogLost { target }
                | ClaimError::LogDamaged { target }
                | ClaimError::LogMissing { target }
                | ClaimError::LogGivenUp { target, .. }
                | ClaimError::NoLog { target },
            ) => Refused::Log(*target),
            OpeningError::Claim(ClaimError::LogBehind { .. }) => Refused::OldLog,
            OpeningError::Refused { server, status, .. } if status.is(rio::status::LOG_FAILED) => {
                Refused::LogFailed(*server)
            }
            // Another loss, after the operator has accepted one.
            OpeningError::Refused { server, status, .. }
                if self.accept_lost && status.is(rio::status::LOG_LOST) =>
            {
                Refused::Log(*server)
            }
            _ => Refused::Other,
        }
    }

    /// Whether a refusal from a target of an open volume means that the volume has another owner.
    pub(super) fn is_fenced_by(error: &OpeningError) -> bool {
        match error {
            OpeningError::TakenOver { .. } => true,
            OpeningError::Refused { status, .. } => is_fenced(*status),
            _ => false,
        }
    }

    /// Begins to use the opened volume.
    fn opened(&mut self, volume: OpenedVolume, drives: &Drives<'_>, core: &mut Core) {
        let all = found(&volume.outcome, core);
        core.trace(|| format!("initiator: recovered: {all:?}"));
        let opened = Opened {
            client: self.index,
            took: self.take_over,
            began: self.began,
            now: core.now,
            labels_read: self.began_polling,
        };
        let era = core.oracle.recovered(opened, volume.generation, &all, drives);
        if core.is_logged() {
            self.recovered = all.iter().map(|it| (it.stream, (it.last, it.tag))).collect();
        }
        let streams = volume.members.head.streams;
        let queues = volume.members.controllers.iter().map(|controller| controller.queues);
        let mut state = VolumeState::new(streams, queues.collect(), volume.engine, 0);
        let mut ownership_checker = BlockOwnershipChecker::default();
        settle_streams(&volume.outcome, &volume.topology, &mut state, &mut ownership_checker);
        let end = self.end();
        let spec = core.scenario.client;
        let first_ns = (u64::from(spec.retry_us) * US).max(BACK_OFF_NS);
        let back_off = BackOff { first_ns, max_ns: first_ns.max(BACK_OFF_NS_MAX) };
        for target in 0..self.servers.len() {
            let config = ManagerConfig {
                known: volume.known_target(target),
                claim: volume.resume_claim(target),
                loss_ns: u64::from(spec.loss_ms) * MS,
                back_off,
                seed: core.rng.u64(),
            };
            self.servers[target].manage(config, end, core);
        }
        let has_extension = volume.members.controllers.iter().map(|it| it.extension.is_some());
        let woken = WokenStreams::default();
        let shell = FollowingState::new(&woken);
        self.volume = Some(Volume {
            generation: volume.generation,
            era,
            engine: volume.engine,
            has_extension: has_extension.collect(),
            nsids: volume.members.namespaces.iter().map(|namespace| namespace.nsid).collect(),
            shared: StreamShared {
                flush_failures: FlushFailures::new(volume.topology.members().len()),
                read_barrier: ReadBarrier::new(volume.topology.servers().len()),
                stream_numbers: std::sync::Arc::default(),
                redirections: std::sync::Arc::<LockedRedirections>::default(),
                following: std::sync::Arc::new(SharedFollowing::new(Box::new(shell))),
            },
            woken,
            config: volume.opening_config(),
            topology: volume.topology,
            state,
            ownership_checker,
        });
        self.state = State::Running;
        self.accept_lost = false;
        self.take_over = false;
        self.run(drives, core);
    }
}

/// The blocks that the streams of an initiator's process have redirected.
#[derive(Debug, Default)]
struct LockedRedirections(std::sync::Mutex<Redirections>);

impl SharedRedirections for LockedRedirections {
    fn with(&self, change: &mut dyn FnMut(&mut Redirections)) {
        change(&mut self.0.lock().expect("the simulator has one thread"));
    }
}

/// Sets the mark from which each stream resumes: the end of its prefix.
fn settle_streams(
    outcome: &Outcome,
    topology: &Topology,
    state: &mut VolumeState,
    ownership_checker: &mut BlockOwnershipChecker,
) {
    for found in &outcome.streams {
        let (stream, last): (StreamId, _) = (found.plan.stream, found.plan.k);
        state.on_stream_recovered(stream, last, to_acknowledge(topology, found));
        ownership_checker.on_recovered(stream, last);
    }
}

/// Notes a command that a recovery has sent.
pub(super) fn note_sent(index: usize, server: usize, call: &Call, core: &mut Core) {
    core.trace(|| format!("initiator {index}: target {server}: {}", command_text::call(call)));
    match call {
        Call::Io { .. } => core.undos = (core.undos.0 + 1, core.events),
        Call::Admin { sqe, send, .. } if sqe.opcode() == rio::ADMIN_SETTLE => {
            let settlement = rio::list::Settle::decode(send);
            for stream in settlement.iter().flat_map(|settlement| &settlement.streams) {
                core.oracle.settles(stream.stream.0);
            }
        }
        Call::Admin { .. } => {}
    }
}

/// The claim in a command, if there is one.
fn claim_of(call: &Call) -> Option<rio::Claim> {
    match call {
        Call::Admin { sqe, send, .. } if sqe.opcode() == rio::ADMIN_CLAIM => {
            rio::Claim::decode(send)
        }
        _ => None,
    }
}

/// The result of a recovery, for the oracle.
pub(super) fn found(outcome: &Outcome, core: &Core) -> Vec<Recovered> {
    let members = &core.scenario.volume.members;
    let blocks = |extent: &riopipe_order::recovery::DriveExtent| {
        let (machine, drive) = members[usize::from(extent.member.0)];
        let first = extent.lba as u32;
        (first..first + extent.blocks as u32).map(move |lba| Where { machine, drive, lba })
    };
    let streams = outcome.streams.iter().map(|stream| Recovered {
        stream: stream.plan.stream.0,
        last: stream.plan.k,
        tag: stream.plan.tag,
        in_place: stream
            .plan
            .in_place
            .iter()
            .chain(&stream.plan.in_doubt)
            .flat_map(|update| blocks(&update.extent))
            .collect(),
    });
    streams.collect()
}
