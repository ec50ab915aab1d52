//! Opening the volume, reopening a stream, acknowledging in-place lists: the commands of an
//! [`Opening`] go out, its results come in.

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Member, StreamId};
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::probe::{self, Rare};
use riopipe_order::topology::{MemberInfo, ServerInfo, Topology};
use riopipe_session::claim::{ClaimError, Intent};
use riopipe_session::initiator::known::{DriveOfVolume, KnownTarget};
use riopipe_session::initiator::manager::ManagerConfig;
use riopipe_session::initiator::opening::{
    Mode, Opening, OpeningConfig, OpeningError, OpeningMember, OpeningServer, Outcome, Phase,
    Ticket,
};
use riopipe_session::initiator::reconnect::BackOff;
use riopipe_session::initiator::stream::{FlushFailures, ReplayBoard};
use riopipe_session::initiator::stream_driver::StreamShared;
use riopipe_session::wire as rio;

use super::labels::Labels;
use super::ledger::Ledger;
use super::server::Server;
use super::{Client, Errand, Refused, State, Volume, is_fenced, words};
use crate::core::{Core, MS, US};
use crate::oracle::{Drives, Era, Opened, Recovered, Where};

/// How long an initiator waits for a missing target before it tries without, ns.
const PATIENCE_NS: u64 = 15 * MS;
/// A loss that a target has noticed, its initiator notices within this time: it is asked for a
/// sign of life and given up.
const NOTICED_MS: u32 = 100;
/// How long it waits before it tries to reach a target again, at least at first, and as a rule at
/// most, ns.
const RETRY_NS: u64 = 20 * US;
const RETRY_NS_MAX: u64 = 3 * MS;

impl Client {
    pub(super) fn opening_done(
        &mut self,
        ticket: Ticket,
        answer: Result<Vec<u8>, Status>,
        core: &mut Core,
    ) {
        let Some((opening, _)) = &mut self.opening else { return };
        self.answered_at = core.now;
        let answer = answer.as_deref().map_err(|status| *status);
        if let Err(error) = opening.done(ticket, answer) {
            self.opening_failed(&error, core);
        }
    }

    pub(super) fn opening_failed(&mut self, error: &OpeningError, core: &mut Core) {
        core.trace(|| format!("initiator: the volume can't be opened: {error}"));
        self.opening = None;
        self.labels = Labels::default();
        self.retry_at = core.now + 2 * MS;
        self.refused = Some(match error {
            OpeningError::Claim(ClaimError::Owned { .. }) => Refused::Owned,
            OpeningError::Claim(
                ClaimError::LogLost { target }
                | ClaimError::LogDamaged { target }
                | ClaimError::LogMissing { target },
            ) => Refused::Log(*target),
            OpeningError::Claim(ClaimError::LogBehind { .. }) => Refused::OldLog,
            OpeningError::Refused { server, status, .. } if status.is(rio::status::LOG_FAILED) => {
                Refused::LogFailed(*server)
            }
            // Lost once more, since somebody has accepted that.
            OpeningError::Refused { server, status, .. }
                if self.accept_lost && status.is(rio::status::LOG_LOST) =>
            {
                Refused::Log(*server)
            }
            OpeningError::TakenOver { .. } => Refused::Owned,
            _ => Refused::Other,
        });
        if let OpeningError::Refused { status, .. } = error
            && matches!(self.state, State::Running)
        {
            self.fenced |= is_fenced(*status);
        }
        if matches!((error, &self.state), (OpeningError::TakenOver { .. }, State::Running)) {
            self.fenced = true;
        }
    }

    /// A stream's recovery that waits too long for an answer is begun anew. The connections stay,
    /// and the answer comes when it comes (T23).
    pub(super) fn lose_patience(&mut self, core: &mut Core) {
        let patience = u64::from(core.scenario.client.patience_us) * US;
        let waits = self.opening.is_some() && matches!(self.state, State::Running);
        // Whose answers are all missing is lost soon, and has no room for many more questions.
        let asked = self.servers.iter_mut().any(Server::owes_much);
        if waits && !asked && patience > 0 && core.now > self.answered_at + patience {
            core.trace(|| "initiator: no answer comes; the attempt is given up".into());
            self.opening = None;
            self.retry_at = core.now;
        }
    }

    pub(super) fn attach(&mut self, since: u64, tried: bool, drives: &Drives<'_>, core: &mut Core) {
        if self.opening.is_some() {
            return self.open(drives, core);
        }
        if core.now < self.retry_at {
            return;
        }
        let all = self.servers.iter().all(Server::is_up);
        // T20: a target that does not come is missing, and nothing is opened without it.
        let impatient = !tried && core.now > since + PATIENCE_NS;
        let some = self.servers.iter().any(Server::is_up);
        if !(all || impatient && some) {
            return;
        }
        if !all {
            self.state = State::Attaching { since, tried: true };
        }
        if all && !self.read_labels(core) {
            return;
        }
        let intent = Intent {
            engine: core.engine(),
            take_over: self.take_over,
            accept_lost_log: self.accept_lost,
            label_generation: self.labels.generation,
            streams: core.scenario.volume.streams,
            lease_ms: lease_ms(core),
        };
        self.begin(Mode::Open(intent), Errand::Open, core);
        self.open(drives, core);
    }

    pub(super) fn begin(&mut self, mode: Mode, errand: Errand, core: &mut Core) {
        // To open the volume, its labels were read there just now.
        if !matches!(errand, Errand::Open) {
            self.close_drives(core);
        }
        self.attempts += 1;
        (self.asked_at, self.answered_at) = (core.now, core.now);
        match Opening::new(self.config(core), mode, self.attempts) {
            Ok(opening) => {
                if !matches!(errand, Errand::Acknowledge(_)) {
                    core.recoveries = (core.recoveries.0 + 1, core.events);
                }
                self.opening = Some((opening, errand));
            }
            Err(error) => self.opening_failed(&error, core),
        }
    }

    pub(super) fn config(&self, core: &Core) -> OpeningConfig {
        let spec = &core.scenario;
        let servers = self.servers.iter().enumerate().map(|(machine, server)| {
            let members = spec.volume.members.iter().enumerate();
            let members = members.filter(|(_, (at, _))| *at == machine);
            let controller = server.controller().filter(|_| server.is_up());
            OpeningServer {
                present: controller.is_some(),
                speaks: true,
                logged: core.is_logged(),
                transfer_bytes_max: controller.map_or(1 << 20, |c| c.mdts_bytes as usize),
                members: members
                    .map(|(member, (_, drive))| OpeningMember {
                        place: MemberNamespace {
                            member: Member(member as u8),
                            nsid: *drive as u32 + 1,
                        },
                        start: u64::from(spec.volume.first),
                        blocks: u64::from(spec.machines[machine].blocks - spec.volume.first),
                        volatile: controller.is_some_and(|c| c.vwc),
                    })
                    .collect(),
            }
        });
        OpeningConfig { volume: core.id, servers: servers.collect() }
    }

    /// Gives out the opening's commands, and takes its results.
    pub(super) fn open(&mut self, drives: &Drives<'_>, core: &mut Core) {
        let end = self.end();
        loop {
            let Some((opening, _)) = &mut self.opening else { return };
            let phase = opening.phase();
            if self.is_relabeling(phase, core) {
                return;
            }
            let Some((opening, _)) = &mut self.opening else { return };
            match phase {
                Phase::Claimed => core.label_generation = opening.generation(),
                Phase::Over => return self.opened(drives, core),
                _ => {}
            }
            if opening.phase().is_pause() {
                if let Err(error) = opening.go_on() {
                    return self.opening_failed(&error, core);
                }
                continue;
            }
            let io = matches!(opening.phase(), Phase::Undo | Phase::Flush);
            for (at, server) in self.servers.iter_mut().enumerate() {
                if io && !server.is_ready_for_io(end, core)
                    || opening.put_off(at).is_some() && core.now < self.retry_at
                {
                    continue;
                }
                while let Some((ticket, call)) = opening.next(at) {
                    let index = self.index;
                    if opening.phase() == Phase::Claim {
                        core.oracle.claims(opening.generation(), self.take_over);
                        let gone = |(on, status): &(usize, rio::VolumeStatus)| {
                            *on == at && (!status.known || status.unlogged || status.damaged)
                        };
                        if self.accept_lost && opening.statuses().iter().any(gone) {
                            core.oracle.log_given_up(at);
                        }
                    }
                    core.trace(|| {
                        format!("initiator {index}: target {at}: {}", words::call(&call))
                    });
                    server.opening_call(ticket, &call, end, core);
                    if opening.put_off(at).is_some() {
                        // A moment later.
                        self.retry_at = core.now + MS / 4;
                        break;
                    }
                }
            }
            return;
        }
    }

    pub(super) fn opened(&mut self, drives: &Drives<'_>, core: &mut Core) {
        let Some((opening, errand)) = self.opening.take() else { return };
        let generation = opening.generation();
        let slots = opening.statuses().iter().map(|(_, status)| status.slots).collect();
        let outcome = opening.into_outcome();
        match errand {
            Errand::Open => {
                self.found = found(&outcome, core);
                core.trace(|| format!("initiator: recovered: {:?}", self.found));
                let opened = Opened {
                    client: self.index,
                    took: self.take_over,
                    began: self.began,
                    now: core.now,
                };
                let era = core.oracle.recovered(opened, generation, &self.found, drives);
                self.volume = self.volume(generation, era, slots, core);
                self.manage(generation, core);
                self.close_drives(core);
                self.state = State::Running;
                self.labels = Labels::default();
                self.accept_lost = false;
                self.take_over = false;
            }
            Errand::Reopen(stream) => {
                let found = found(&outcome, core);
                core.trace(|| format!("initiator: reopened: {found:?}"));
                probe::hit(Rare::Reopened);
                self.close_drives(core);
                if let (Some(volume), Some(found)) = (&mut self.volume, found.first()) {
                    core.oracle.reopened((volume.era, self.asked_at), found, drives);
                    volume.ledger.forget(stream, found.last);
                    self.found.retain(|other| other.stream != stream);
                    self.found.push(found.clone());
                }
                self.streams[usize::from(stream)] = None;
                self.background.remove(StreamId(stream));
            }
            Errand::Acknowledge(streams) => {
                for stream in streams {
                    self.found.iter_mut().filter(|f| f.stream == stream.0).for_each(|f| {
                        f.in_place.clear();
                    });
                }
            }
        }
        self.run(drives, core);
    }

    /// The queues to the drives are not needed any more.
    pub(super) fn close_drives(&mut self, core: &mut Core) {
        let end = self.end();
        for server in &mut self.servers {
            server.close_drives(end, core);
        }
    }

    /// From now on the targets' associations are kept, and the volume is claimed again where it was
    /// lost (P7).
    fn manage(&mut self, generation: u32, core: &mut Core) {
        let config = self.config(core);
        let spec = core.scenario.client;
        let first_ns = (u64::from(spec.retry_us) * US).max(RETRY_NS);
        let back_off = BackOff { first_ns, max_ns: first_ns.max(RETRY_NS_MAX) };
        for (machine, server) in self.servers.iter_mut().enumerate() {
            let members = core.scenario.volume.members.iter().zip(0..);
            let members = members.filter(|((at, _), _)| *at == machine);
            let blocks = u64::from(core.scenario.machines[machine].blocks);
            let drives = members.map(|((_, drive), index)| DriveOfVolume {
                nsid: *drive as u32 + 1,
                index,
                blocks,
            });
            let claim = rio::Claim {
                volume: core.id,
                generation,
                create: false,
                give_up: false,
                take_over: false,
                unlogged: !core.is_logged(),
                resume: true,
                streams: core.scenario.volume.streams,
                slots: 0,
                lease_ms: lease_ms(core),
                members: config.servers[machine].members.iter().map(|m| m.place).collect(),
            };
            let seed = core.rng.u64();
            server.manage(|controller| ManagerConfig {
                known: KnownTarget::new(core.id, generation, controller, drives),
                claim: Some(claim),
                loss_ns: u64::from(spec.loss_ms) * MS,
                back_off,
                seed,
            });
        }
    }

    pub(super) fn volume(
        &self,
        generation: u32,
        era: Era,
        slots: Vec<u32>,
        core: &Core,
    ) -> Option<Volume> {
        let spec = &core.scenario;
        let members = spec.volume.members.iter().map(|(machine, _)| MemberInfo {
            server: *machine as u16,
            start: u64::from(spec.volume.first),
            blocks: u64::from(spec.machines[*machine].blocks - spec.volume.first),
            request_blocks_max: spec.volume.request_blocks,
            volatile: self.servers[*machine].controller().is_some_and(|c| c.vwc),
        });
        let servers = slots.into_iter().map(|slots| ServerInfo { slots });
        let topology =
            Topology::new(members.collect(), servers.collect(), spec.volume.unit).ok()?;
        let released = self.found.iter().map(|found| found.last).collect();
        Some(Volume {
            generation,
            era,
            nsids: spec.volume.members.iter().map(|(_, drive)| *drive as u32 + 1).collect(),
            shared: StreamShared {
                flush_failures: FlushFailures::new(topology.members().len()),
                replay_board: ReplayBoard::new(topology.servers().len()),
            },
            topology,
            ledger: Ledger::new(core.map.len(), released),
        })
    }
}

/// For how long the targets keep the volume for an initiator that they have lost.
pub(super) fn lease_ms(core: &Core) -> u32 {
    let spec = core.scenario.client;
    let keep_alive_ms = spec.keep_alive_ms.max(NOTICED_MS);
    riopipe_session::claim::lease_ms(core.engine(), spec.loss_ms.into(), keep_alive_ms)
}

/// What the oracle has to know of a recovery.
fn found(outcome: &Outcome, core: &Core) -> Vec<Recovered> {
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
