//! One target of an open volume: its association is kept alive, and set up again when it is lost
//! (P7).
//!
//! ```text
//! Standing → Unreachable: rest → attach → open drives → read labels → claim → Standing
//!                          ↑________________ a failure that may pass ____|
//!                         → Refused: its properties have changed, the volume has another owner,
//!                                    or the target had released the volume before the loss
//! ```
//!
//! A target that comes back is checked again before any command is sent to its drives: identity,
//! log region, volatility and the labels on its drives (T19, T27). Then the volume is claimed again
//! (T8, T25).
//! Streams request connections with [`request`](AssociationManager::request), and none is made
//! before the new association stands; [`ManagerEvent::Back`] comes before the first of them. All
//! connections of an association end with it ([`ManagerEvent::Lost`]).
//!
//! The program drives it as it drives an [`Association`], as an [`Endpoint`]. After each call the
//! program takes the [events](AssociationManager::next_event). All times are nanoseconds of one
//! monotonic clock.

mod cause;
mod recognise;

use alloc::collections::VecDeque;

use riopipe_order::attribute::StreamId;
use riopipe_order::engine::Cause;
use riopipe_order::probe::{self, Plant};

pub use self::cause::UnreachableCause;
use super::association::{
    Association, AssociationState, ConnectFailure, ConnectionEnd, ControlQueue,
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
    /// How the same owner claims the volume again there; `None` where the target does not speak the
    /// extension.
    pub claim: Option<Claim>,
    /// The time for which the streams wait for a lost target, ns. The manager tries to reach it
    /// after that, too. 0: it does not try at all.
    pub loss_ns: u64,
    /// The pauses between attempts, and between requests of a stream.
    pub back_off: BackOff,
    /// Makes the waits of different initiators differ: any number that does.
    pub seed: u64,
}

/// An event of the association with one target.
#[derive(Debug)]
pub enum ManagerEvent {
    /// The association is lost, and with it all that belongs to it, also a connection that is being
    /// made. Every stream must get this event before any later event is handled. A target counts
    /// its controllers anew in each incarnation, so a late Connect may get into the next
    /// association before anything has been checked again there (T27).
    Lost {
        /// The cause.
        why: UnreachableCause,
    },
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
    /// The target is lost to this owner, and the manager does not try to reach it again: every
    /// stream must give it up.
    Refused {
        /// The cause.
        why: UnreachableCause,
        /// The same, as a cause for the streams.
        cause: Cause,
    },
    /// A stream's connection exists: the stream gets the connection that was reported last, and
    /// this queue to open on it.
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
    /// The time of the loss, ns.
    pub since: u64,
    /// The cause of the last failure.
    pub why: UnreachableCause,
    /// The manager does not try to reach it any more.
    pub for_good: bool,
}

#[derive(Debug)]
enum State {
    /// The association stands, and the volume is claimed.
    Standing,
    Unreachable(Absence, Return),
    Refused(Absence),
    /// The volume is closed.
    Over,
}

/// The progress of setting up the association again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Return {
    /// The attempt that runs, or that is due after a pause.
    attempt: u32,
    step: Step,
    /// The streams have got the event that they need not wait any longer.
    given_up: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing is done before this time.
    Rest(u64),
    Attach,
    OpenDrives,
    /// The label of the volume's drive with this number on this target is being read.
    Label(usize),
    Claim,
}

/// The cause of a failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Failure {
    /// A later attempt may succeed.
    Passing(UnreachableCause),
    /// A later attempt cannot succeed.
    Final(UnreachableCause, Cause),
}

/// The manager of the association with one target of an open volume; see the [module](self).
#[derive(Debug)]
pub struct AssociationManager<P> {
    config: ManagerConfig,
    association: Association<P>,
    /// The number of associations so far.
    number: u32,
    state: State,
    /// The connections that streams have requested.
    requests: ReconnectQueue,
    /// The request for which a connection is being made.
    serving: Option<ConnectRequest>,
    events: VecDeque<ManagerEvent>,
    /// The state of the pseudo-random numbers, which vary the pauses between attempts.
    chance: u64,
    /// The target has released the volume: it is not claimed again there.
    released: bool,
}

impl<P: AsRef<[u8]> + Clone> AssociationManager<P> {
    /// The manager of an association that stands, with the volume claimed and no open question.
    #[must_use]
    pub fn new(association: Association<P>, config: ManagerConfig) -> Self {
        let mut manager = Self {
            association,
            number: 1,
            state: State::Standing,
            requests: ReconnectQueue::new(config.back_off),
            serving: None,
            events: VecDeque::new(),
            chance: config.seed,
            released: false,
            config,
        };
        manager.association.close_drives();
        manager.set_answer_limit();
        manager
    }

    /// Without replay, giving up a target that hangs has no advantage.
    fn set_answer_limit(&mut self) {
        if self.config.loss_ns == 0 {
            self.association.extend_answer_limit();
        }
    }

    /// The next pseudo-random number.
    fn chance(&mut self) -> u64 {
        // Numerical Recipes' linear congruential generator; its upper half is good enough here.
        self.chance = self
            .chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.chance >> 32
    }

    /// The association, while it stands: for questions, and for the queue to the drives. The caller
    /// takes the answers to its own questions. None of them comes after the association was lost;
    /// its successor has another [number](Self::number).
    pub fn association(&mut self) -> Option<&mut Association<P>> {
        self.is_standing().then_some(&mut self.association)
    }

    /// The number of the association with the target, from 1.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
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
            State::Unreachable(absence, _) | State::Refused(absence) => Some(absence),
            State::Standing | State::Over => None,
        }
    }

    /// The next event. Events must be handled in order.
    pub fn next_event(&mut self) -> Option<ManagerEvent> {
        self.events.pop_front()
    }

    /// A stream requests a connection. It is made when the association stands, and after a pause if
    /// earlier connections failed. An earlier request of the stream is dropped.
    pub fn request(&mut self, request: ConnectRequest, now: u64) {
        if matches!(self.state, State::Refused(_) | State::Over) {
            return;
        }
        self.serving = self.serving.filter(|serving| serving.stream != request.stream);
        let chance = self.chance();
        self.requests.request(request, chance, now);
    }

    /// The target has answered that it has released the volume. When this association is lost, none
    /// follows it: it would claim the volume, and nothing would release it any more (T25).
    pub fn set_released(&mut self) {
        self.released = true;
    }

    /// Whether the target has [released](Self::set_released) the volume.
    #[must_use]
    pub const fn is_released(&self) -> bool {
        self.released
    }

    /// The volume is closed. The target gets a release at once, so that it keeps no lease (T25).
    /// The contents of the admin queue's outbox must be sent before the connection is closed.
    pub fn stop(&mut self, now: u64) {
        let owns = self.is_standing() && !self.released;
        if let Some(claim) = self.config.claim.as_ref().filter(|_| owns) {
            let release = wire::release_command(claim.volume, false);
            // If the release cannot be sent, the end of the connection has nearly the same effect.
            let _ = self.association.ask(ControlQueue::Admin, 0, release, Data::None, now);
        }
        self.association.hang_up();
        self.state = State::Over;
        self.serving = None;
    }

    /// Continues as far as the association's state allows: notices a loss, or takes the next step
    /// of setting the association up again.
    fn go_on(&mut self, now: u64) {
        let step = match &self.state {
            State::Standing => {
                if let AssociationState::Lost(error) = self.association.state() {
                    let why = error.clone().into();
                    self.lost(why, now);
                }
                return;
            }
            State::Unreachable(_, Return { step: Step::Rest(_), .. })
            | State::Refused(_)
            | State::Over => return,
            State::Unreachable(_, back) => back.step,
        };
        match self.next_step(step, now) {
            Ok(Some(next)) => self.set_step(next),
            Ok(None) => self.stands_again(now),
            Err(Failure::Passing(why)) => self.failed(why, now),
            Err(Failure::Final(why, cause)) => self.refuse(why, cause),
        }
    }

    /// Records the step of setting up the association again.
    fn set_step(&mut self, next: Step) {
        if let State::Unreachable(_, back) = &mut self.state {
            back.step = next;
        }
    }

    /// The association is lost.
    fn lost(&mut self, why: UnreachableCause, now: u64) {
        self.events.push_back(ManagerEvent::Lost { why: why.clone() });
        let absence = Absence { since: now, why: why.clone(), for_good: false };
        let step = Step::Rest(self.rest(1, now));
        self.state = State::Unreachable(absence, Return { attempt: 1, step, given_up: false });
        if self.released && !probe::planted(Plant::T25ClaimedAgain) {
            self.refuse(UnreachableCause::Released, Cause::Disconnected);
        } else if self.config.loss_ns == 0 {
            self.refuse(why, Cause::Disconnected);
        }
    }

    /// An attempt has failed, and there will be another.
    fn failed(&mut self, why: UnreachableCause, now: u64) {
        self.association.hang_up();
        let State::Unreachable(absence, back) = &mut self.state else { return };
        absence.why = why;
        back.attempt = back.attempt.saturating_add(1);
        let attempt = back.attempt;
        let until = self.rest(attempt, now);
        self.set_step(Step::Rest(until));
    }

    /// The end of the pause before an attempt, ns.
    fn rest(&mut self, attempt: u32, now: u64) -> u64 {
        if probe::planted(Plant::P8NeverAgain) && attempt > 1 {
            return u64::MAX;
        }
        let chance = self.chance();
        now.saturating_add(self.config.back_off.after(attempt, chance))
    }

    /// The target is lost to this owner.
    fn refuse(&mut self, why: UnreachableCause, cause: Cause) {
        self.association.hang_up();
        let State::Unreachable(absence, _) = &self.state else { return };
        let absence = Absence { why: why.clone(), for_good: true, ..absence.clone() };
        self.state = State::Refused(absence);
        self.requests = ReconnectQueue::new(self.config.back_off);
        self.serving = None;
        self.events.push_back(ManagerEvent::Refused { why, cause });
    }

    /// The new association stands.
    fn stands_again(&mut self, now: u64) {
        self.association.close_drives();
        self.set_answer_limit();
        let State::Unreachable(absence, back) = &self.state else { return };
        let unreachable_ns = now.saturating_sub(absence.since);
        self.events.push_back(ManagerEvent::Back { unreachable_ns, attempts: back.attempt });
        self.number = self.number.wrapping_add(1);
        self.state = State::Standing;
    }
}

impl<P: AsRef<[u8]> + Clone> Endpoint for AssociationManager<P> {
    type Piece = P;

    fn wants_connection(&self) -> Option<ConnectionId> {
        self.association.wants_connection().or_else(|| {
            let serving = self.serving.filter(|_| self.is_standing())?;
            Some(ConnectionId::Stream(serving.stream))
        })
    }

    /// A stream's connection belongs to the [`ManagerEvent::StreamConnection`] that follows; if
    /// none does, it is of no use any more.
    fn connected(&mut self, connection: ConnectionId, is_local: bool, now: u64) {
        match connection {
            ConnectionId::Control(_) => {
                self.association.connected(connection, is_local, now);
                self.go_on(now);
            }
            ConnectionId::Stream(stream) => {
                if self.wants_connection() == Some(connection)
                    && let Some(request) = self.serving
                    && let Some(queue) = self.association.io_queue(request.qid, request.depth)
                {
                    self.serving = None;
                    self.events.push_back(ManagerEvent::StreamConnection { stream, queue });
                }
            }
        }
    }

    fn connect_failed(&mut self, connection: ConnectionId, failure: ConnectFailure, now: u64) {
        match connection {
            ConnectionId::Control(_) => {
                self.association.connect_failed(connection, failure, now);
                self.go_on(now);
            }
            ConnectionId::Stream(stream) => {
                if let Some(request) = self.serving.filter(|serving| serving.stream == stream) {
                    self.serving = None;
                    let chance = self.chance();
                    self.requests.failed(request, chance, now);
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
        self.go_on(now);
        used
    }

    fn closed(&mut self, queue: ControlQueue, end: ConnectionEnd, now: u64) {
        self.association.closed(queue, end, now);
        self.go_on(now);
    }

    fn timeout(&mut self, now: u64) {
        self.association.timeout(now);
        self.go_on(now);
        if self.is_standing() && self.serving.is_none() {
            self.serving = self.requests.next(now);
        }
        let State::Unreachable(absence, back) = &mut self.state else { return };
        let unreachable_ns = now.saturating_sub(absence.since);
        if unreachable_ns >= self.config.loss_ns && !core::mem::replace(&mut back.given_up, true) {
            self.events.push_back(ManagerEvent::GivenUp { unreachable_ns });
        }
        if matches!(back.step, Step::Rest(until) if until <= now) {
            back.step = Step::Attach;
            self.association = Association::new(self.association.config().clone());
        }
    }

    fn deadline(&self) -> Option<u64> {
        let own_deadline = match &self.state {
            State::Standing if self.serving.is_none() => self.requests.deadline(),
            State::Unreachable(absence, back) => {
                let given_up = absence.since.saturating_add(self.config.loss_ns);
                let next_attempt = match back.step {
                    Step::Rest(until) => Some(until),
                    _ => None,
                };
                next_attempt.into_iter().chain((!back.given_up).then_some(given_up)).min()
            }
            _ => None,
        };
        own_deadline.into_iter().chain(self.association.deadline()).min()
    }
}

#[cfg(test)]
mod tests;
