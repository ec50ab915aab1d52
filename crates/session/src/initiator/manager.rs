//! The association manager of one target of an open volume: keeps the association alive, and sets
//! it up again when it is lost (promise P7).
//!
//! ```text
//! Standing → Unreachable: pause → attach → open drives queue → read labels → claim → Standing
//!                          ↑_______________ a failure that may pass ___________|
//!                         → Refused: its properties have changed, the volume has another owner,
//!                                    or the target had released the volume before the loss
//! ```
//!
//! The manager checks a target that comes back before it sends any command to the drives: identity,
//! log region, volatility and the labels on the drives. Another drive or another log in their place
//! would break the promises of the volume (traps T19, T27). Then the manager claims the volume
//! again, so that no other owner can write (traps T8, T25).
//!
//! Streams request connections with [`request`](AssociationManager::request). The manager requests
//! none from the program before the new association stands. [`ManagerEvent::Back`] comes before the
//! first of these connections. All connections of an association end with it
//! ([`ManagerEvent::Lost`]).
//!
//! The program drives the manager as an [`Endpoint`], like an [`Association`]. After each call the
//! program takes the [events](AssociationManager::next_event). All times are nanoseconds of one
//! monotonic clock.

mod cause;
mod recognise;

use alloc::collections::VecDeque;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{StreamId, VolumeId};
use riopipe_order::engine::Cause;
use riopipe_order::probe::{self, Plant};

pub use self::cause::UnreachableCause;
use super::association::{
    AskError, Association, AssociationError, AssociationState, ConnectFailure, ConnectionEnd,
    ControlQueue,
};
use super::attach::Controller;
use super::endpoint::{ConnectionId, Endpoint};
use super::known::KnownTarget;
use super::queue_pair::{Data, IoQueue};
use super::reconnect::{BackOff, ConnectRequest, ReconnectQueue};
use crate::outbox::Outbox;
use crate::wire::{self, Claim};

/// The configuration of an association manager.
#[derive(Clone, Debug)]
pub struct ManagerConfig {
    /// The properties that must be found again when the target comes back.
    pub known: KnownTarget,
    /// The claim by which the same owner claims the volume again on the target; `None` if the
    /// target does not have the extension.
    pub claim: Option<Claim>,
    /// The time for which the streams wait for a lost target, ns, from its last sign of life on. After
    /// that the streams fail, but the manager continues its attempts. With 0 the streams fail at once,
    /// and the manager makes no attempt.
    pub loss_ns: u64,
    /// The pauses between attempts, and between requests of a stream.
    pub back_off: BackOff,
    /// The seed of the pseudo-random numbers, by which the pauses of different initiators differ.
    pub seed: u64,
}

/// An event of the association with one target.
#[derive(Debug)]
pub enum ManagerEvent {
    /// The association is lost, and with it all its connections, also one that is being made. Every
    /// stream must get this event before any later event is handled. Else a stream could send a
    /// Connect of the lost association after the target has started again. A target numbers its
    /// controllers from the beginning at each start, so this Connect could join the next association
    /// before the target has been checked again (trap T27).
    Lost {
        /// The cause.
        why: UnreachableCause,
        /// The time from which the loss counts, ns: see [`Absence::since`].
        since: u64,
    },
    /// The association has ended after the target had released the volume. That is no loss: the
    /// volume is being closed, and nothing is missing. Every stream and reader must give the target
    /// up.
    Ended,
    /// A new association stands, and the volume is claimed.
    Back {
        /// The time for which the target was unreachable, ns.
        unreachable_ns: u64,
        /// The number of attempts.
        attempts: u32,
    },
    /// The target has been unreachable for longer than the streams wait: they fail. The manager
    /// still tries to reach it, and the streams can be reopened when it is back.
    GivenUp {
        /// The time for which it has been unreachable, ns.
        unreachable_ns: u64,
    },
    /// This owner cannot use the target any more, and the manager makes no further attempt. Every
    /// stream must give the target up.
    Refused {
        /// The cause.
        why: UnreachableCause,
        /// The cause in the form that streams report.
        cause: Cause,
    },
    /// The connection that a stream has requested exists: it is the one that the program reported
    /// last. The stream opens this queue on it.
    StreamConnection {
        /// The stream.
        stream: StreamId,
        /// The queue.
        queue: IoQueue,
    },
}

/// Why a target is unreachable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absence {
    /// The time from which the loss counts, ns: the last sign of life of the target. That is the end
    /// of its connection, or the last byte that it sent before it fell silent. If the program itself
    /// did not run for a while, silence counts from one [limit](silence_limit_ns) before it was
    /// noticed at the earliest.
    pub since: u64,
    /// The cause of the last failure.
    pub why: UnreachableCause,
    /// Whether the manager makes no further attempt.
    pub for_good: bool,
    /// Whether the target has been unreachable for longer than the streams wait.
    pub given_up: bool,
}

/// The shortest silence of a target that counts as a loss, ns. A target that is only slow must not
/// lose its streams.
pub const SILENCE_MIN_NS: u64 = 3_000_000_000;

/// The time for which a target may send nothing until it counts as lost, ns. Half of the loss timeout
/// remains for attempts to reach the target again. A target that is silent for as long as an answer
/// may take (`answer_ns`) is lost in any case.
#[must_use]
pub fn silence_limit_ns(loss_ns: u64, answer_ns: u64) -> u64 {
    (loss_ns / 2).max(SILENCE_MIN_NS).min(answer_ns)
}

#[derive(Debug)]
enum State {
    /// The association stands, and the volume is claimed.
    Standing,
    /// The association is lost, and the manager sets up another one.
    Unreachable { absence: Absence, reattachment: Reattachment },
    /// This owner cannot use the target any more.
    Refused(Absence),
    /// The volume is closed.
    Stopped,
}

/// The progress of setting up the association again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reattachment {
    /// The number of the attempt that runs, or that is due after a pause, from 1.
    attempt: u32,
    step: Step,
}

/// A step of setting up the association again, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The manager waits until this time, ns.
    Pause { until: u64 },
    /// The new association is being set up.
    Attach,
    /// The drives queue is being opened.
    OpenDrives,
    /// A label is being read: that of the drive with this index among the volume's drives on this
    /// target.
    ReadLabel(usize),
    /// The volume is being claimed.
    Claim,
}

/// The cause of a failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Failure {
    /// A later attempt may succeed.
    Passing(UnreachableCause),
    /// A later attempt cannot succeed. Streams report `stream_cause`.
    Final { why: UnreachableCause, stream_cause: Cause },
}

/// The manager of the association with one target of an open volume; see the [module](self).
#[derive(Debug)]
pub struct AssociationManager<P> {
    config: ManagerConfig,
    association: Association<P>,
    /// The number of associations so far that stood.
    association_number: u32,
    state: State,
    /// The connections that streams have requested.
    requests: ReconnectQueue,
    /// The request for which a connection is being made.
    current_request: Option<ConnectRequest>,
    events: VecDeque<ManagerEvent>,
    /// The state of the pseudo-random numbers, which vary the pauses between attempts.
    random_state: u64,
    /// The release of the volume on the target.
    release: Release,
}

/// The release of the volume on the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Release {
    /// It has not been requested.
    NotRequested,
    /// It has been requested over the association with this number, and not been answered.
    Requested { association_number: u32 },
    /// The target has refused it with this status.
    Refused(Status),
    /// The target has released the volume. The manager does not claim it again there.
    Done,
}

/// The number of the question that requests the release.
const RELEASE_QUESTION: u64 = u64::MAX;

impl<P: AsRef<[u8]> + Clone> AssociationManager<P> {
    /// The manager of an association that stands, with the volume claimed and no open question.
    #[must_use]
    pub fn new(association: Association<P>, config: ManagerConfig) -> Self {
        let mut manager = Self {
            association,
            association_number: 1,
            state: State::Standing,
            requests: ReconnectQueue::new(config.back_off),
            current_request: None,
            events: VecDeque::new(),
            random_state: config.seed,
            release: Release::NotRequested,
            config,
        };
        manager.association.close_drives();
        manager.set_limits();
        manager
    }

    /// Sets the limits of an association that stands.
    fn set_limits(&mut self) {
        let answer_ns = self.association.config().answer_ns;
        self.association.limit_silence(silence_limit_ns(self.config.loss_ns, answer_ns));
        if self.config.loss_ns == 0 {
            // The streams cannot replay. The loss of the association would end them, although a
            // target that answers Keep Alive may still answer a question.
            self.association.extend_answer_limit();
        }
    }

    /// Takes in that the target has sent something to a stream at `at`, ns. Only the last such time
    /// matters, and it may be reported late: at the next [`timeout`](Endpoint::timeout).
    pub fn note_received(&mut self, at: u64) {
        if self.is_standing() {
            self.association.note_received(at);
        }
    }

    /// The next pseudo-random number.
    fn next_random(&mut self) -> u64 {
        // A linear congruential generator with Knuth's constants (MMIX). Its upper half is random
        // enough for pauses.
        self.random_state = self
            .random_state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.random_state >> 32
    }

    /// The association, while it stands: for questions, and for the queue to the drives. The caller
    /// takes the answers to its own questions. None of them comes after the association was lost;
    /// its successor has another [number](Self::association_number).
    pub fn association(&mut self) -> Option<&mut Association<P>> {
        self.is_standing().then_some(&mut self.association)
    }

    /// The NQN of the subsystem.
    #[must_use]
    pub fn subnqn(&self) -> &str {
        self.association.subnqn()
    }

    /// The number of the association with the target, from 1.
    #[must_use]
    pub const fn association_number(&self) -> u32 {
        self.association_number
    }

    /// Whether the association stands, with the volume claimed.
    #[must_use]
    pub const fn is_standing(&self) -> bool {
        matches!(self.state, State::Standing)
    }

    /// The controller of the present association; `None` until a new attempt has attached to it.
    #[must_use]
    pub const fn controller(&self) -> Option<&Controller> {
        self.association.controller()
    }

    /// Why the target is unreachable, if it is.
    #[must_use]
    pub const fn absence(&self) -> Option<&Absence> {
        match &self.state {
            State::Unreachable { absence, .. } | State::Refused(absence) => Some(absence),
            State::Standing | State::Stopped => None,
        }
    }

    /// The next event. Events must be handled in order.
    pub fn next_event(&mut self) -> Option<ManagerEvent> {
        self.events.pop_front()
    }

    /// Takes a stream's request for a connection. The connection is made when the association
    /// stands, and after a pause if earlier connections failed. An earlier request of the stream is
    /// dropped.
    pub fn request(&mut self, request: ConnectRequest, now: u64) {
        if matches!(self.state, State::Refused(_) | State::Stopped) {
            return;
        }
        if self.current_request.is_some_and(|current| current.stream == request.stream) {
            self.current_request = None;
        }
        let random = self.next_random();
        self.requests.request(request, random, now);
    }

    /// Requests that the target releases the `volume`, unless that has been requested over this
    /// association, or the target has released it. The manager takes the answer itself, in the
    /// moment in which it arrives: an end of the connection after that is no loss.
    ///
    /// # Errors
    /// [`AskError`]: the request could not be sent.
    pub fn request_release(&mut self, volume: VolumeId, now: u64) -> Result<(), AskError> {
        let requested = Release::Requested { association_number: self.association_number };
        if self.release == requested || self.is_released() || !self.is_standing() {
            return Ok(());
        }
        let release = wire::release_command(volume, false);
        let queue = ControlQueue::Admin;
        self.association.ask(queue, RELEASE_QUESTION, release, Data::None, now)?;
        self.release = requested;
        Ok(())
    }

    /// Takes the answer to the request for a release, if it has arrived.
    fn take_release_answer(&mut self) {
        if !matches!(self.release, Release::Requested { .. }) || !self.is_standing() {
            return;
        }
        if let Some(answer) = self.association.take_answer(RELEASE_QUESTION) {
            let status = answer.cqe.status();
            self.release = if status.is_ok() { Release::Done } else { Release::Refused(status) };
        }
    }

    /// The status with which the target has refused to release the volume. From then on the release
    /// may be requested again.
    pub fn take_release_refusal(&mut self) -> Option<Status> {
        let Release::Refused(status) = self.release else { return None };
        self.release = Release::NotRequested;
        Some(status)
    }

    /// Records that the target has released the volume. If this association is lost, the manager
    /// sets up no other one: it would claim the volume, and nothing would release it any more
    /// (trap T25).
    pub fn set_released(&mut self) {
        self.release = Release::Done;
    }

    /// Whether the target has released the volume.
    #[must_use]
    pub fn is_released(&self) -> bool {
        self.release == Release::Done
    }

    /// Ends the association because the volume is closed. First sends a release, so that the target
    /// keeps the volume for no owner (trap T25). The program must send the contents of the admin
    /// queue's outbox before it closes the connection.
    pub fn stop(&mut self, now: u64) {
        let owns_volume = self.is_standing() && !self.is_released();
        if let Some(claim) = &self.config.claim
            && owns_volume
        {
            let release = wire::release_command(claim.volume, false);
            // If the release cannot be sent, the end of the connection has nearly the same effect.
            let _ = self.association.ask(ControlQueue::Admin, 0, release, Data::None, now);
        }
        self.association.close();
        self.state = State::Stopped;
        self.current_request = None;
    }

    /// Handles a loss of the association, or continues to set it up again.
    fn run_step(&mut self, now: u64) {
        let step = match &self.state {
            State::Standing => {
                if let AssociationState::Lost(error) = self.association.state() {
                    let error = error.clone();
                    self.on_loss(error, now);
                }
                return;
            }
            State::Unreachable { reattachment, .. } => reattachment.step,
            State::Refused(_) | State::Stopped => return,
        };
        if matches!(step, Step::Pause { .. }) {
            // Only the clock ends a pause; see `timeout`.
            return;
        }
        match self.next_step(step, now) {
            Ok(Some(next)) => self.set_step(next),
            Ok(None) => self.finish_reattachment(now),
            Err(Failure::Passing(why)) => self.on_failed_attempt(why, now),
            Err(Failure::Final { why, stream_cause }) => self.refuse(why, stream_cause),
        }
    }

    /// Records the step of setting up the association again.
    fn set_step(&mut self, next: Step) {
        if let State::Unreachable { reattachment, .. } = &mut self.state {
            reattachment.step = next;
        }
    }

    /// Reports the loss of the association, and begins the pause before the first attempt. Makes no
    /// attempt if the volume was released or streams cannot replay.
    fn on_loss(&mut self, error: AssociationError, now: u64) {
        let since = self.time_of_loss(&error, now);
        let why = UnreachableCause::from(error);
        let (for_good, given_up) = (false, false);
        let absence = Absence { since, why: why.clone(), for_good, given_up };
        if self.is_released() && !probe::is_bug_planted(Plant::T25ClaimedAgain) {
            let why = UnreachableCause::Released;
            self.state = State::Refused(Absence { why, for_good: true, ..absence });
            self.drop_requests();
            self.events.push_back(ManagerEvent::Ended);
            return;
        }
        self.events.push_back(ManagerEvent::Lost { why: why.clone(), since });
        let step = Step::Pause { until: self.end_of_pause(1, now) };
        self.state =
            State::Unreachable { absence, reattachment: Reattachment { attempt: 1, step } };
        if self.config.loss_ns == 0 {
            self.refuse(why, Cause::Disconnected);
        }
    }

    /// The time from which a loss counts that is noticed at `now`, ns; see [`Absence::since`].
    fn time_of_loss(&self, error: &AssociationError, now: u64) -> u64 {
        match (error, self.association.silence_ns()) {
            (AssociationError::Silent(_), Some(silence_ns)) => {
                self.association.last_received().max(now.saturating_sub(silence_ns))
            }
            _ => now,
        }
    }

    /// Ends a failed attempt, and begins the pause before the next one.
    fn on_failed_attempt(&mut self, why: UnreachableCause, now: u64) {
        self.association.close();
        let State::Unreachable { absence, reattachment } = &mut self.state else { return };
        absence.why = why;
        reattachment.attempt = reattachment.attempt.saturating_add(1);
        let attempt = reattachment.attempt;
        let until = self.end_of_pause(attempt, now);
        self.set_step(Step::Pause { until });
    }

    /// The end of the pause before an attempt, ns.
    fn end_of_pause(&mut self, attempt: u32, now: u64) -> u64 {
        if probe::is_bug_planted(Plant::P8NeverAgain) && attempt > 1 {
            return u64::MAX;
        }
        let random = self.next_random();
        now.saturating_add(self.config.back_off.after(attempt, random))
    }

    /// Gives the target up: drops all requests, and reports that this owner cannot use the target
    /// any more.
    fn refuse(&mut self, why: UnreachableCause, stream_cause: Cause) {
        self.association.close();
        let State::Unreachable { absence, .. } = &self.state else { return };
        let absence = Absence { why: why.clone(), for_good: true, ..absence.clone() };
        self.state = State::Refused(absence);
        self.drop_requests();
        self.events.push_back(ManagerEvent::Refused { why, cause: stream_cause });
    }

    /// Drops the streams' requests for connections.
    fn drop_requests(&mut self) {
        self.requests = ReconnectQueue::new(self.config.back_off);
        self.current_request = None;
    }

    /// Reports that the new association stands and the volume is claimed.
    fn finish_reattachment(&mut self, now: u64) {
        self.association.close_drives();
        self.set_limits();
        let State::Unreachable { absence, reattachment } = &self.state else { return };
        let unreachable_ns = now.saturating_sub(absence.since);
        self.events
            .push_back(ManagerEvent::Back { unreachable_ns, attempts: reattachment.attempt });
        self.association_number = self.association_number.wrapping_add(1);
        self.state = State::Standing;
    }
}

impl<P: AsRef<[u8]> + Clone> Endpoint for AssociationManager<P> {
    type Piece = P;

    fn wants_connection(&self) -> Option<ConnectionId> {
        // The association's own connections come first.
        if let Some(connection) = self.association.wants_connection() {
            return Some(connection);
        }
        match self.current_request {
            Some(request) if self.is_standing() => Some(ConnectionId::Stream(request.stream)),
            _ => None,
        }
    }

    /// A connection for a stream belongs to the [`ManagerEvent::StreamConnection`] that follows. If
    /// no such event follows, the connection is not needed any more.
    fn connected(&mut self, connection: ConnectionId, is_local: bool, now: u64) {
        match connection {
            ConnectionId::Control(_) => {
                self.association.connected(connection, is_local, now);
                self.run_step(now);
            }
            ConnectionId::Stream(stream) => {
                if self.wants_connection() == Some(connection)
                    && let Some(request) = self.current_request
                    && let Some(queue) = self.association.io_queue(request.qid, request.depth)
                {
                    self.current_request = None;
                    self.events.push_back(ManagerEvent::StreamConnection { stream, queue });
                }
            }
        }
    }

    fn connect_failed(&mut self, connection: ConnectionId, failure: ConnectFailure, now: u64) {
        match connection {
            ConnectionId::Control(_) => {
                self.association.connect_failed(connection, failure, now);
                self.run_step(now);
            }
            ConnectionId::Stream(stream) => {
                if let Some(request) = self.current_request
                    && request.stream == stream
                {
                    self.current_request = None;
                    let random = self.next_random();
                    self.requests.failed(request, random, now);
                }
            }
        }
    }

    fn is_open(&self, queue: ControlQueue) -> bool {
        self.association.is_open(queue)
    }

    fn need(&self, queue: ControlQueue, buf: &[u8]) -> usize {
        self.association.need(queue, buf)
    }

    fn outbox(&mut self, queue: ControlQueue) -> &mut Outbox<P> {
        self.association.outbox(queue)
    }

    fn received(&mut self, queue: ControlQueue, bytes: &[u8], now: u64) -> usize {
        let used = self.association.received(queue, bytes, now);
        self.take_release_answer();
        self.run_step(now);
        used
    }

    fn closed(&mut self, queue: ControlQueue, end: ConnectionEnd, now: u64) {
        self.association.closed(queue, end, now);
        self.run_step(now);
    }

    fn timeout(&mut self, now: u64) {
        self.association.timeout(now);
        self.run_step(now);
        if self.is_standing() && self.current_request.is_none() {
            self.current_request = self.requests.next(now);
        }
        let State::Unreachable { absence, reattachment } = &mut self.state else { return };
        let unreachable_ns = now.saturating_sub(absence.since);
        if unreachable_ns >= self.config.loss_ns && !absence.given_up {
            absence.given_up = true;
            self.events.push_back(ManagerEvent::GivenUp { unreachable_ns });
        }
        if let Step::Pause { until } = reattachment.step
            && until <= now
        {
            reattachment.step = Step::Attach;
            self.association = Association::new(self.association.config().clone());
        }
    }

    fn deadline(&self) -> Option<u64> {
        let own_deadline = match &self.state {
            State::Standing if self.current_request.is_none() => self.requests.deadline(),
            State::Unreachable { absence, reattachment } => {
                let next_attempt = match reattachment.step {
                    Step::Pause { until } => Some(until),
                    _ => None,
                };
                let give_up_at = match absence.given_up {
                    false => Some(absence.since.saturating_add(self.config.loss_ns)),
                    true => None,
                };
                [next_attempt, give_up_at].into_iter().flatten().min()
            }
            _ => None,
        };
        [own_deadline, self.association.deadline()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests;
