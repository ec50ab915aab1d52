//! A volume that is open: its streams start, have lost targets back, are reopened, and end.

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::Cause;
use riopipe_order::probe::{self, Rare};
use riopipe_session::initiator::known::Changed;
use riopipe_session::initiator::opening::Mode;
use riopipe_session::initiator::stream::CONTROL_COMMANDS;
use riopipe_session::wire as rio;

use super::server::{Purpose, Server};
use super::stream::{Setup, Stream};
use super::{Client, Errand, Refused, State, is_fenced};
use crate::core::Core;
use crate::oracle::Drives;

impl Client {
    /// The volume is open: acknowledges, starts streams, has targets back, reopens, closes.
    pub(super) fn run(&mut self, drives: &Drives<'_>, core: &mut Core) {
        if self.opening.is_some() {
            return self.open(drives, core);
        }
        if !matches!(self.state, State::Running) || self.volume.is_none() {
            return;
        }
        let all = self.servers.iter().all(|server| server.is_up() && server.claimed);
        self.resume_targets(drives, core);
        for stream in self.streams.iter_mut().flatten() {
            // To reopen it would be in vain: another owner has the volume.
            self.fenced |= stream.fenced;
            if let Some((server, status)) = stream.take_refused() {
                self.fenced |= is_fenced(status);
                if status.is(rio::status::LOG_FAILED) {
                    self.refused = Some(Refused::LogFailed(usize::from(server)));
                }
            }
        }
        if all && core.now >= self.retry_at {
            self.acknowledge(core);
            if self.opening.is_some() {
                return self.open(drives, core);
            }
            self.start_streams(core);
            if let Some(stream) = self.failed_stream() {
                self.reopen(stream, core);
                return self.open(drives, core);
            }
        }
        self.rejoin_streams(core);
        if self.closing {
            self.wind_up(core);
        }
    }

    /// Connects streams again to targets that have them back (P7).
    pub(super) fn rejoin_streams(&mut self, core: &mut Core) {
        let end = self.end();
        let depth = core.scenario.client.depth + CONTROL_COMMANDS + 1;
        for stream in self.streams.iter_mut().flatten() {
            for at in stream.wants_rejoin(core) {
                let server = &self.servers[usize::from(at)];
                if server.is_up()
                    && server.claimed
                    && let Some(queue) = server.io_queue(stream.next_qid(at), depth as u16)
                {
                    stream.rejoin(at, server.association, queue, end, core);
                }
            }
        }
    }

    pub(super) fn acknowledge(&mut self, core: &mut Core) {
        let pending = self.found.iter().filter(|found| !found.in_place.is_empty());
        let streams: Vec<StreamId> = pending.map(|found| StreamId(found.stream)).collect();
        // To ask again after a refusal would be in vain: another owner has the volume.
        let asks = !streams.is_empty() && !self.fenced;
        let Some(volume) = self.volume.as_ref().filter(|_| asks) else { return };
        for stream in &streams {
            core.oracle.acknowledged(stream.0);
        }
        let generation = volume.generation;
        let mode = Mode::Acknowledge { generation, streams: streams.clone() };
        self.begin(mode, Errand::Acknowledge(streams), core);
    }

    pub(super) fn start_streams(&mut self, core: &mut Core) {
        let end = self.end();
        let Some(volume) = &self.volume else { return };
        for id in 0..self.streams.len() as u16 {
            if self.streams[usize::from(id)].is_some() {
                continue;
            }
            let start = self.found.iter().find(|f| f.stream == id).map_or(Seq::ZERO, |f| f.last);
            let depth = core.scenario.client.depth + CONTROL_COMMANDS + 1;
            let queues = self.servers.iter().map(|s| s.io_queue(id + 2, depth as u16));
            let Some(queues) = queues.collect::<Option<Vec<_>>>() else { return };
            let setup = Setup {
                id,
                generation: volume.generation,
                start,
                era: volume.era,
                topology: &volume.topology,
                nsids: &volume.nsids,
                shared: &volume.shared,
                board: &volume.board,
                engine: self.engine,
            };
            let mut stream = Stream::new(&setup, queues, core);
            stream.anew = self.anew.contains(&id);
            let associations: Vec<u32> = self.servers.iter().map(|s| s.association).collect();
            stream.start(&associations, end, core);
            self.streams[usize::from(id)] = Some(stream);
        }
    }

    /// Claims the volume again from targets that have come back (P7).
    pub(super) fn resume_targets(&mut self, drives: &Drives<'_>, core: &mut Core) {
        let Some(volume) = &self.volume else { return };
        let config = self.config(core);
        let mut back = Vec::new();
        for (at, server) in self.servers.iter_mut().enumerate() {
            if !server.is_up() || server.claimed || server.claiming || self.fenced || self.broken {
                continue;
            }
            if let Some(changed) = server.changed(drives) {
                core.trace(|| format!("initiator: target {at} is not what it was: {changed}"));
                let cause = if matches!(changed, Changed::Overtaken(_)) {
                    self.fenced = true;
                    Cause::Status(rio::status::STALE_GENERATION.code())
                } else {
                    probe::hit(Rare::Changed);
                    // As a program does that is told so: the volume is opened again.
                    self.broken = true;
                    Cause::Changed
                };
                for stream in self.streams.iter_mut().flatten() {
                    stream.give_up(at as u16, cause, core);
                }
                continue;
            }
            if !config.servers[at].speaks {
                back.push(at);
                continue;
            }
            let claim = rio::Claim {
                volume: core.id,
                generation: volume.generation,
                create: false,
                give_up: false,
                take_over: false,
                unlogged: !core.is_logged(),
                resume: true,
                streams: core.scenario.volume.streams,
                slots: 0,
                lease_ms: super::opening::lease_ms(core),
                members: config.servers[at].members.iter().map(|m| m.place).collect(),
            };
            server.claiming = true;
            server.call(Purpose::Resume, rio::claim_command(), &claim.encode(), 0, core);
        }
        // A target of another make knows of no owner (T17).
        back.into_iter().for_each(|server| self.has_back(server, core));
    }

    pub(super) fn failed_stream(&self) -> Option<u16> {
        if self.fenced {
            return None;
        }
        let failed = |stream: &Option<Stream>| stream.as_ref().is_some_and(Stream::has_failed);
        self.streams.iter().position(failed).map(|at| at as u16)
    }

    pub(super) fn reopen(&mut self, id: u16, core: &mut Core) {
        if !core.is_logged() {
            return self.begin_anew(id, core);
        }
        let Some(volume) = &self.volume else { return };
        let generation = volume.generation;
        if let Some(Some(stream)) = self.streams.get_mut(usize::from(id)) {
            stream.drop_wires(core);
        }
        let mode = Mode::Reopen { generation, streams: vec![StreamId(id)] };
        self.begin(mode, Errand::Reopen(id), core);
    }

    pub(super) fn wind_up(&mut self, core: &mut Core) {
        for stream in self.streams.iter_mut().flatten() {
            stream.close(core);
        }
        let closed = |stream: &Option<Stream>| stream.as_ref().is_some_and(Stream::is_closed);
        let all = self.servers.iter().all(|server| server.is_up() && server.claimed);
        if !self.streams.iter().all(closed) || !all {
            return;
        }
        for stream in self.streams.iter_mut().flatten() {
            stream.drop_wires(core);
        }
        core.oracle.gives_back();
        let speaks = |server: &Server| server.controller().is_some_and(|c| c.extension.is_some());
        let mut asked = 0;
        for server in self.servers.iter_mut().filter(|server| speaks(server)) {
            let release = rio::release_command(core.id, false);
            server.call(Purpose::Release, release, &[], 0, core);
            asked += 1;
        }
        self.released = asked == 0;
        self.state = if asked == 0 { State::Over } else { State::Releasing(asked, true) };
    }
}
