//! An open volume: its streams start, resume with lost targets, are reopened, and end.

use riopipe_order::attribute::StreamId;
use riopipe_order::engine::EngineKind;
use riopipe_session::wire as rio;

use super::server::Server;
use super::stream::{Setup, Stream};
use super::{Client, RecoveryGoal, Refused, State, is_fenced};
use crate::core::Core;
use crate::oracle::Drives;

impl Client {
    /// Runs the open volume: acknowledges, starts streams, resumes with targets, reopens, closes.
    pub(super) fn run(&mut self, drives: &Drives<'_>, core: &mut Core) {
        if !matches!(self.state, State::Running) || self.volume.is_none() {
            return;
        }
        let all = self.servers.iter().all(Server::is_claimed);
        for stream in self.streams.iter_mut().flatten() {
            if stream.is_reader {
                continue;
            }
            // Reopening the stream would fail: another owner has the volume.
            self.fenced |= stream.fenced;
            if let Some((server, status)) = stream.take_refused() {
                self.fenced |= is_fenced(status);
                if status.is(rio::status::LOG_FAILED) {
                    self.refused = Some(Refused::LogFailed(usize::from(server)));
                }
            }
        }
        // The library connects a reader again that has failed, or to which a target owes an answer.
        if let Some(last) = self.streams.last_mut()
            && last.as_ref().is_some_and(Stream::is_to_be_replaced)
            && let Some(mut reader) = last.take()
        {
            reader.drop_connections(core);
        }
        if all && self.recovery.is_none() && core.now >= self.retry_at {
            self.acknowledge(core);
            if self.recovery.is_none() {
                self.start_streams(core);
            }
            if let Some(stream) = self.failed_stream(core).filter(|_| self.recovery.is_none()) {
                self.reopen(stream, core);
            }
        }
        if self.recovery.is_some() {
            return self.continue_recovery(drives, core);
        }
        if self.closing {
            self.close_and_release(drives, core);
        }
    }

    pub(super) fn acknowledge(&mut self, core: &mut Core) {
        let Some(volume) = &self.volume else { return };
        let streams: Vec<StreamId> = volume.state.pending_streams().collect();
        // Another attempt after a refusal would fail: another owner has the volume.
        if streams.is_empty() || self.fenced {
            return;
        }
        for stream in &streams {
            core.oracle.acknowledged(stream.0);
        }
        self.begin_recovery(RecoveryGoal::Acknowledge(streams), core);
    }

    pub(super) fn start_streams(&mut self, core: &mut Core) {
        let Some(volume) = &self.volume else { return };
        for id in 0..self.streams.len() as u16 {
            if self.streams[usize::from(id)].is_some() {
                continue;
            }
            let start = volume.state.mark(StreamId(id));
            let setup = Setup {
                id,
                generation: volume.generation,
                start,
                era: volume.era,
                topology: &volume.topology,
                nsids: &volume.nsids,
                shared: &volume.shared,
                engine: match volume.engine {
                    EngineKind::Barrier if core.scenario.volume.orderless.contains(&id) => {
                        EngineKind::None
                    }
                    engine => engine,
                },
                is_reader: usize::from(id) + 1 == self.streams.len(),
            };
            let mut stream = Stream::new(&setup, core);
            stream.opened_before = self.opened_before.contains(&id);
            stream.recovered = self.recovered.get(&id).copied();
            self.streams[usize::from(id)] = Some(stream);
        }
    }

    /// A stream to be reopened.
    pub(super) fn failed_stream(&self, core: &Core) -> Option<u16> {
        // A file system does not reopen a stream: its process ends.
        if self.fenced || core.program_runs {
            return None;
        }
        let failed = |stream: &Option<Stream>| {
            stream.as_ref().is_some_and(|stream| !stream.is_reader && stream.has_failed())
        };
        self.streams.iter().position(failed).map(|at| at as u16)
    }

    pub(super) fn reopen(&mut self, id: u16, core: &mut Core) {
        if !core.is_logged() {
            return self.begin_anew(id, core);
        }
        if let Some(Some(stream)) = self.streams.get_mut(usize::from(id)) {
            stream.drop_connections(core);
        }
        self.begin_recovery(RecoveryGoal::Reopen(id), core);
    }

    pub(super) fn close_and_release(&mut self, drives: &Drives<'_>, core: &mut Core) {
        self.close_streams(drives, core);
        let closed = |stream: &Option<Stream>| match stream {
            Some(stream) => stream.is_reader || stream.is_closed(),
            None => false,
        };
        let all = self.servers.iter().all(Server::is_claimed);
        if !self.streams.iter().all(closed) || !all {
            return;
        }
        for stream in self.streams.iter_mut().flatten() {
            stream.drop_connections(core);
        }
        self.begin_release(core);
        self.continue_release(core);
    }
}
