//! The requests of an owner to the targets of its open volume, apart from its streams: recovering single
//! streams, and releasing the volume.
//!
//! A [`StreamsRecovery`] and a [`VolumeRelease`] decide each step. This file passes them the managers of
//! the targets, sleeps until a target answers, and makes the errors.

use std::sync::atomic::Ordering;
use std::time::Duration;

use riopipe_net::now_ns;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_session::initiator::manager::Absence;
use riopipe_session::initiator::opening::{Mode, Opening, OpeningError};
use riopipe_session::initiator::volume::streams::{
    StreamsRecovery, StreamsRecoveryError, VolumeRelease,
};

use crate::addr::TargetAddr;
use crate::call_error::CallError;
use crate::error::{AcknowledgeError, CloseError, RecoverError, UnreachableReason};
use crate::lock::lock;
use crate::open_volume::OpenVolume;
use crate::recovery::{Steps, StreamRecovery, streams_of};
use crate::time::nanos;

/// The longest sleep until the next check, if there is no deadline.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// The result of [`OpenVolume::recover`].
struct RecoveredStreams {
    streams: Vec<StreamRecovery>,
    steps: Steps,
}

impl RecoverError {
    /// The error for a target that is unreachable, for now or for good.
    pub(crate) fn absent(target: &TargetAddr, absence: Absence) -> Self {
        let (target, why) = (target.clone(), absence.why);
        if absence.for_good {
            Self::Lost { target, why }
        } else {
            Self::Unreachable { target, why: why.into() }
        }
    }
}

impl OpenVolume {
    /// Finds the prefix of one stream, and undoes the fresh writes beyond it. The connections of the
    /// stream must be closed.
    pub(crate) fn recover_stream(&self, stream: StreamId) -> Result<StreamRecovery, RecoverError> {
        let mode = Mode::Reopen { generation: self.generation, streams: vec![stream] };
        let RecoveredStreams { mut streams, steps } = self.recover(mode)?;
        // The list has the one stream of the request.
        let recovery =
            streams.pop().unwrap_or_else(|| StreamRecovery::none(stream, Seq::default()));
        tracing::info!(volume = %self.name, %recovery, %steps, "an ordered stream was recovered");
        Ok(recovery)
    }

    /// Makes the targets drop the list of in-place updates of a stream, because the caller has
    /// acknowledged it.
    pub(crate) fn acknowledge_stream(&self, stream: StreamId) -> Result<(), AcknowledgeError> {
        if lock(&self.state).pending(stream).is_none() {
            return Err(AcknowledgeError::NotPending { stream });
        }
        let mode = Mode::Acknowledge { generation: self.generation, streams: vec![stream] };
        match self.recover(mode) {
            Ok(_) => {}
            // The targets have dropped the list already: the answer to an earlier request was lost.
            Err(RecoverError::Opening { error: OpeningError::NotPending { .. }, .. }) => {}
            Err(error) => return Err(error.into()),
        }
        lock(&self.state).on_updates_acknowledged(stream);
        Ok(())
    }

    /// Runs a recovery of the streams in `mode` to its end.
    fn recover(&self, mode: Mode) -> Result<RecoveredStreams, RecoverError> {
        let _one_at_a_time = lock(&self.recovery_lock);
        for server in &self.servers {
            if let Some(absence) = server.target.absence() {
                return Err(RecoverError::absent(&server.name, absence));
            }
        }
        let attempt = lock(&self.state).next_attempt();
        let opening = Opening::new(self.opening_config.clone(), mode, attempt)
            .map_err(|error| self.recover_error(error.into()))?;
        let timeout_ns = nanos(self.connect_options.timeout);
        let mut recovery = StreamsRecovery::new(opening, attempt, timeout_ns, now_ns());
        let result = loop {
            let seen = self.signal.count();
            let advanced = recovery.advance(now_ns(), |server, work| {
                self.servers[server].target.with_manager(work);
            });
            if advanced.is_err() || recovery.is_over() {
                break advanced;
            }
            let now = now_ns();
            let sleep_ns = recovery.deadline(now).map(|at| at.saturating_sub(now));
            let sleep = sleep_ns.map_or(SLEEP_MAX, Duration::from_nanos);
            self.signal.wait(seen, sleep.min(SLEEP_MAX));
        };
        for server in &self.servers {
            server.target.with_manager(&mut |manager| StreamsRecovery::close_drives_queue(manager));
        }
        result.map_err(|error| self.recover_error(error))?;
        let (outcome, steps) = recovery.finish();
        let streams = streams_of(&outcome, &self.topology);
        Ok(RecoveredStreams { streams, steps: steps.into() })
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
                source: CallError::of(source, self.connect_options.timeout),
            },
            StreamsRecoveryError::Opening(error) => RecoverError::Opening {
                volume: self.name.clone(),
                target: error.server().map(|server| self.server_name(server)),
                error,
            },
        }
    }

    /// Releases the volume on all targets on which it is claimed. Waits for `timeout` at most.
    pub(crate) fn release(&self, timeout: Duration) -> Result<(), CloseError> {
        let is_claimed = self.servers.iter().map(|server| server.is_claimed).collect();
        let mut release = VolumeRelease::new(self.id, is_claimed);
        let deadline = now_ns().saturating_add(nanos(timeout));
        loop {
            let seen = self.signal.count();
            let released = release.advance(now_ns(), |server, work| {
                self.servers[server].target.with_manager(work);
            });
            match released {
                Ok(true) => {
                    self.is_released.store(true, Ordering::Release);
                    return Ok(());
                }
                Ok(false) => {}
                Err(error) => return Err(self.close_error(error)),
            }
            let remaining = Duration::from_nanos(deadline.saturating_sub(now_ns()));
            if remaining.is_zero() {
                let server = release.first_unanswered().unwrap_or(0);
                let source = self.absence_or(server, CallError::TimedOut(timeout));
                return Err(CloseError::Call { target: self.server_name(server), source });
            }
            self.signal.wait(seen, remaining);
        }
    }

    /// The absence of a server as an error; `other` if the server is not absent.
    fn absence_or(&self, server: usize, other: CallError) -> CallError {
        match self.servers[server].target.absence() {
            Some(absence) => CallError::Unreachable(absence.why),
            None => other,
        }
    }

    fn close_error(&self, error: StreamsRecoveryError) -> CloseError {
        let (server, source) = match error {
            StreamsRecoveryError::Unreachable { server } => {
                (server, self.absence_or(server, CallError::Closed))
            }
            StreamsRecoveryError::Call { server, source, .. } => {
                (server, CallError::of(source, self.connect_options.timeout))
            }
            StreamsRecoveryError::Opening(error) => {
                (error.server().unwrap_or(0), CallError::Opening(error))
            }
        };
        CloseError::Call { target: self.server_name(server), source }
    }
}
