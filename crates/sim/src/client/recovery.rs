//! Requests of the volume's owner to its targets beside its streams: it reopens a stream,
//! acknowledges in-place lists, and releases the volume.

use riopipe_order::attribute::StreamId;
use riopipe_order::probe::{self, Rare};
use riopipe_session::initiator::opening::{Mode, Opening};
use riopipe_session::initiator::volume::ranges::to_acknowledge;
use riopipe_session::initiator::volume::streams::{
    StreamsRecovery, StreamsRecoveryError, VolumeRelease,
};

use super::opening::{found, note_sent};
use super::server::{ANSWER_NS, Server};
use super::{Client, Recovery, RecoveryGoal, State};
use crate::core::{Core, Ev, MS, US};
use crate::oracle::Drives;

/// The time until a recovery that has failed is begun again, ns.
const RETRY_NS: u64 = 2 * MS;
/// The maximum number of calls of a recovery at one moment. More means that its deadline is wrong.
const ROUNDS_MAX: usize = 1000;

impl Client {
    /// Begins to recover streams, or to acknowledge their lists.
    pub(super) fn begin_recovery(&mut self, goal: RecoveryGoal, core: &mut Core) {
        let Some(volume) = &mut self.volume else { return };
        let generation = volume.generation;
        let mode = match &goal {
            RecoveryGoal::Reopen(stream) => {
                Mode::Reopen { generation, streams: vec![StreamId(*stream)] }
            }
            RecoveryGoal::Acknowledge(streams) => {
                Mode::Acknowledge { generation, streams: streams.clone() }
            }
        };
        let attempt = volume.state.next_attempt();
        let Ok(opening) = Opening::new(volume.config.clone(), mode, attempt) else { return };
        if matches!(goal, RecoveryGoal::Reopen(_)) {
            core.recoveries = (core.recoveries.0 + 1, core.events);
        }
        // An owner with a short limit begins the recovery again; the connections stay (trap T23).
        // Slow drives can exceed the limit each time, so it does not outlast the faults.
        let limit = u64::from(core.scenario.client.wait_limit_us) * US;
        let timeout = if limit == 0 || core.faults_stopped { ANSWER_NS } else { limit };
        let machine = StreamsRecovery::new(opening, attempt, timeout, core.now);
        self.recovery = Some(Recovery { machine, goal, asked_at: core.now });
    }

    /// Continues the recovery.
    pub(super) fn continue_recovery(&mut self, drives: &Drives<'_>, core: &mut Core) {
        let (end, index) = (self.end(), self.index);
        for _ in 0..ROUNDS_MAX {
            let Self { recovery, servers, .. } = self;
            let Some(Recovery { machine, .. }) = recovery else { return };
            let advanced = machine.advance(core.now, |at, work| {
                if let Some(manager) = servers[at].manager() {
                    work(manager);
                }
            });
            for (server, call) in machine.take_sent() {
                note_sent(index, server, &call, core);
            }
            let (over, due) = (machine.is_over(), machine.deadline(core.now));
            if advanced.is_err() || over {
                servers
                    .iter_mut()
                    .filter_map(Server::manager)
                    .for_each(StreamsRecovery::close_drives_queue);
            }
            servers.iter_mut().for_each(|server| server.carry(end, core));
            if let Err(error) = advanced {
                self.recovery = None;
                return self.recovery_failed(&error, core);
            }
            if over {
                return self.recovered(drives, core);
            }
            let Some(due) = due else { return };
            if due > core.now {
                if self.opening_wakes_at <= core.now || due < self.opening_wakes_at {
                    self.opening_wakes_at = due;
                    core.at(
                        due,
                        Ev::WakeClient { client: index, incarnation: self.incarnation, server: 0 },
                    );
                }
                return;
            }
        }
        debug_assert!(false, "the recovery's deadline does not move");
    }

    fn recovery_failed(&mut self, error: &StreamsRecoveryError, core: &mut Core) {
        core.trace(|| format!("initiator: the attempt to recover has ended: {error}"));
        // A recovery finds the same prefix from any point. It begins again once all targets are
        // reachable.
        self.retry_at = core.now + RETRY_NS;
        if let StreamsRecoveryError::Opening(error) = error {
            self.fenced |= Self::is_fenced_by(error);
            self.refused = Some(self.why_refused(error));
        }
    }

    fn recovered(&mut self, drives: &Drives<'_>, core: &mut Core) {
        let Some(Recovery { machine, goal, asked_at }) = self.recovery.take() else { return };
        let Some(volume) = &mut self.volume else { return };
        let (outcome, _) = machine.finish();
        match goal {
            RecoveryGoal::Reopen(stream) => {
                let all = found(&outcome, core);
                core.trace(|| format!("initiator: reopened: {all:?}"));
                probe::count_rare(Rare::Reopened);
                if let (Some(recovered), Some(found)) = (all.first(), outcome.streams.first()) {
                    core.oracle.reopened((volume.era, asked_at), recovered, drives);
                    let (id, last) = (found.plan.stream, found.plan.k);
                    self.recovered.insert(id.0, (last, found.plan.tag));
                    volume.ownership_checker.on_recovered(id, last);
                    volume.shared.redirections.with(&mut |redirections| redirections.forget(id));
                    volume.state.on_stream_recovered(
                        id,
                        last,
                        to_acknowledge(&volume.topology, found),
                    );
                }
                self.streams[usize::from(stream)] = None;
                self.background.remove(StreamId(stream));
            }
            RecoveryGoal::Acknowledge(streams) => {
                streams.into_iter().for_each(|stream| volume.state.on_updates_acknowledged(stream));
            }
        }
        self.run(drives, core);
    }

    /// Begins to release the volume.
    pub(super) fn begin_release(&mut self, core: &mut Core) {
        core.oracle.releases(self.index);
        let has_extension =
            self.volume.as_ref().map_or_else(Vec::new, |volume| volume.has_extension.clone());
        self.state = State::Releasing(VolumeRelease::new(core.id, has_extension));
    }

    /// Continues the release.
    pub(super) fn continue_release(&mut self, core: &mut Core) {
        let end = self.end();
        let Self { index, state, servers, .. } = self;
        let State::Releasing(release) = state else { return };
        let advanced = release.advance(core.now, |at, work| {
            if let Some(manager) = servers[at].manager() {
                work(manager);
            }
        });
        for server in release.take_released() {
            core.oracle.released(*index, server);
        }
        servers.iter_mut().for_each(|server| server.carry(end, core));
        match advanced {
            Ok(false) => {}
            Ok(true) => (self.released, self.state) = (true, State::Over),
            Err(error) => {
                core.trace(|| format!("initiator: the volume is not released: {error}"));
                self.state = State::Over;
            }
        }
    }
}
