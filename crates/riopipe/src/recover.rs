//! The requests of the owner of an open volume to its targets beside its streams: the waiting and
//! the messages around a [`StreamsRecovery`] and a [`VolumeRelease`].

use std::sync::atomic::Ordering;
use std::time::Duration;

use riopipe_net::now_ns;
use riopipe_order::attribute::StreamId;
use riopipe_session::initiator::manager::Absence;
use riopipe_session::initiator::opening::{Mode, Opening, OpeningError};
use riopipe_session::initiator::volume::streams::{
    StreamsRecovery, StreamsRecoveryError, VolumeRelease,
};

use crate::addr::TargetAddr;
use crate::call_error::CallError;
use crate::error::{AcknowledgeError, CloseError, RecoverError, UnreachableReason};
use crate::lock::lock;
use crate::recovery::{Steps, StreamRecovery, streams_of};
use crate::shared::Inner;
use crate::time::nanos;

/// The longest sleep between two polls.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

impl RecoverError {
    /// A target is unreachable, or will not come back.
    pub(crate) fn absent(target: &TargetAddr, absence: Absence) -> Self {
        let (target, why) = (target.clone(), absence.why);
        if absence.for_good {
            Self::Lost { target, why }
        } else {
            Self::Unreachable { target, why: why.into() }
        }
    }
}

impl Inner {
    /// Finds the prefix of one stream, whose connections are closed, and undoes all beyond it.
    pub(crate) fn recover_stream(&self, stream: StreamId) -> Result<StreamRecovery, RecoverError> {
        let mode = Mode::Reopen { generation: self.generation, streams: vec![stream] };
        let (mut found, steps) = self.recover(mode)?;
        // Recovery of one stream was requested.
        let found = found.pop().unwrap_or_else(|| StreamRecovery::none(stream, Default::default()));
        tracing::info!(volume = %self.name, recovery = %found, %steps, "an ordered stream was recovered");
        Ok(found)
    }

    /// Drops the list of in-place updates of a stream: the caller has acknowledged it.
    pub(crate) fn acknowledge_stream(&self, stream: StreamId) -> Result<(), AcknowledgeError> {
        if lock(&self.state).pending(stream).is_none() {
            return Err(AcknowledgeError::NotPending { stream });
        }
        let mode = Mode::Acknowledge { generation: self.generation, streams: vec![stream] };
        match self.recover(mode) {
            Ok(_) => {}
            // The list has been acknowledged, and the answer was lost.
            Err(RecoverError::Opening { error: OpeningError::NotPending { .. }, .. }) => {}
            Err(error) => return Err(error.into()),
        }
        lock(&self.state).on_updates_acknowledged(stream);
        Ok(())
    }

    fn recover(&self, mode: Mode) -> Result<(Vec<StreamRecovery>, Steps), RecoverError> {
        let _one_at_a_time = lock(&self.recovering);
        for server in &self.servers {
            if let Some(absence) = server.target.absence() {
                return Err(RecoverError::absent(&server.name, absence));
            }
        }
        let attempt = lock(&self.state).next_attempt();
        let opening = Opening::new(self.opening.clone(), mode, attempt)
            .map_err(|error| self.recover_error(error.into()))?;
        let timeout = nanos(self.connect.timeout);
        let mut recovery = StreamsRecovery::new(opening, attempt, timeout, now_ns());
        let ended = loop {
            let seen = self.signal.count();
            let advanced = recovery.advance(now_ns(), |server, work| {
                self.servers[server].target.with_manager(work);
            });
            if advanced.is_err() || recovery.is_over() {
                break advanced;
            }
            let now = now_ns();
            let sleep = recovery.deadline(now).map(|at| at.saturating_sub(now));
            self.signal.wait(seen, sleep.map_or(SLEEP_MAX, Duration::from_nanos).min(SLEEP_MAX));
        };
        for server in &self.servers {
            server.target.with_manager(&mut |manager| StreamsRecovery::close_drives_queue(manager));
        }
        ended.map_err(|error| self.recover_error(error))?;
        let (outcome, steps) = recovery.finish();
        Ok((streams_of(&outcome, &self.topology), steps.into()))
    }

    fn recover_error(&self, error: StreamsRecoveryError) -> RecoverError {
        match error {
            StreamsRecoveryError::Unreachable { server } => {
                let server = &self.servers[server];
                match server.target.absence() {
                    Some(absence) => RecoverError::absent(&server.name, absence),
                    None => RecoverError::Unreachable {
                        target: server.name.clone(),
                        why: UnreachableReason::Passed,
                    },
                }
            }
            StreamsRecoveryError::Call { server, doing, source } => RecoverError::Call {
                target: self.server_name(server),
                doing,
                source: CallError::of(source, self.connect.timeout),
            },
            StreamsRecoveryError::Opening(error) => RecoverError::Opening {
                volume: self.name.clone(),
                target: error.server().map(|server| self.server_name(server)),
                error,
            },
        }
    }

    /// Releases the volume on all its targets.
    pub(crate) fn release(&self, timeout: Duration) -> Result<(), CloseError> {
        let speaks = self.servers.iter().map(|server| server.is_claimed).collect();
        let mut release = VolumeRelease::new(self.id, speaks);
        let deadline = now_ns().saturating_add(nanos(timeout));
        loop {
            let seen = self.signal.count();
            let released = release.advance(now_ns(), |server, work| {
                self.servers[server].target.with_manager(work);
            });
            match released {
                Ok(true) => {
                    self.closed.store(true, Ordering::Release);
                    return Ok(());
                }
                Ok(false) => {}
                Err(error) => return Err(self.close_error(error)),
            }
            let left = Duration::from_nanos(deadline.saturating_sub(now_ns()));
            if left.is_zero() {
                let server = release.first_unanswered().unwrap_or(0);
                let absence = self.servers[server].target.absence();
                let timed_out = CallError::TimedOut(timeout);
                let source =
                    absence.map_or(timed_out, |absence| CallError::Unreachable(absence.why));
                return Err(CloseError::Call { target: self.server_name(server), source });
            }
            self.signal.wait(seen, left);
        }
    }

    fn close_error(&self, error: StreamsRecoveryError) -> CloseError {
        let (server, source) = match error {
            StreamsRecoveryError::Unreachable { server } => {
                let absence = self.servers[server].target.absence();
                let source = absence.map_or(CallError::Closed, |a| CallError::Unreachable(a.why));
                (server, source)
            }
            StreamsRecoveryError::Call { server, source, .. } => {
                (server, CallError::of(source, self.connect.timeout))
            }
            StreamsRecoveryError::Opening(error) => {
                (error.server().unwrap_or(0), CallError::Opening(error))
            }
        };
        CloseError::Call { target: self.server_name(server), source }
    }
}
