//! A volume that is open: its streams start, have lost targets back, are reopened, and end.

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_session::initiator::opening::Mode;
use riopipe_session::wire as rio;

use super::server::Server;
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
        let all = self.servers.iter().all(Server::is_claimed);
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
        if self.closing {
            self.wind_up(drives, core);
        }
    }

    pub(super) fn acknowledge(&mut self, core: &mut Core) {
        let pending = self.found.iter().filter(|found| !found.in_place.is_empty());
        let streams: Vec<StreamId> = pending.map(|found| StreamId(found.stream)).collect();
        let Some(volume) = self.volume.as_ref().filter(|_| !streams.is_empty()) else { return };
        for stream in &streams {
            core.oracle.acknowledged(stream.0);
        }
        let generation = volume.generation;
        let mode = Mode::Acknowledge { generation, streams: streams.clone() };
        self.begin(mode, Errand::Acknowledge(streams), core);
    }

    pub(super) fn start_streams(&mut self, core: &mut Core) {
        let Some(volume) = &self.volume else { return };
        for id in 0..self.streams.len() as u16 {
            if self.streams[usize::from(id)].is_some() {
                continue;
            }
            let start = self.found.iter().find(|f| f.stream == id).map_or(Seq::ZERO, |f| f.last);
            let setup = Setup {
                id,
                generation: volume.generation,
                start,
                era: volume.era,
                topology: &volume.topology,
                nsids: &volume.nsids,
                shared: &volume.shared,
            };
            let mut stream = Stream::new(&setup, core);
            stream.anew = self.anew.contains(&id);
            self.streams[usize::from(id)] = Some(stream);
        }
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
            stream.drop_connections(core);
        }
        let mode = Mode::Reopen { generation, streams: vec![StreamId(id)] };
        self.begin(mode, Errand::Reopen(id), core);
    }

    pub(super) fn wind_up(&mut self, drives: &Drives<'_>, core: &mut Core) {
        self.close_streams(drives, core);
        let closed = |stream: &Option<Stream>| stream.as_ref().is_some_and(Stream::is_closed);
        let all = self.servers.iter().all(Server::is_claimed);
        if !self.streams.iter().all(closed) || !all {
            return;
        }
        for stream in self.streams.iter_mut().flatten() {
            stream.drop_connections(core);
        }
        core.oracle.gives_back();
        let end = self.end();
        for server in &mut self.servers {
            server.release(rio::release_command(core.id, false), end, core);
        }
        self.state = State::Releasing(self.servers.len(), true);
    }
}
