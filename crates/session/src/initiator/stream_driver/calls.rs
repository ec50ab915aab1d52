//! The owner's calls that wait: for marks, and for the end of the stream.
//!
//! A call begins with `begin_…`. Then the shell drives rounds, and after each round it calls the
//! `…_step` function, until that returns how the call has ended.

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Payload;

use super::{ReportedMarks, StreamDriver};
use crate::initiator::stream::TargetRefusal;

/// The condition that ends a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The group and all earlier groups are complete on all targets.
    Complete(Seq),
    /// The group and all earlier groups are durable. The drives are flushed for that, unless a
    /// later group has requested a flush.
    Durable(Seq),
    /// There is space for groups again, and no group that the stream follows must become durable
    /// first.
    Space,
    /// Nothing is in flight.
    Idle,
    /// The complete, durable or released mark has moved since the marks were last reported to the
    /// owner, or the end of a submitted read has not been taken yet.
    Moved,
    /// A submitted read has ended and its end has not been taken yet, or no read is in flight.
    ReadEnded,
    /// Another thread has interrupted the owner.
    Woken,
}

/// How a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// The condition holds.
    Reached,
    /// Another thread has interrupted the owner.
    Woken,
    /// The deadline has passed.
    Deadline,
}

/// The error that a wait is for a group that was never submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("group {seq} has not been submitted; the last one is {last}")]
pub struct NotSubmitted {
    /// The group waited for.
    pub seq: Seq,
    /// The last submitted group.
    pub last: Seq,
}

/// The marks of a stream that was closed. All its groups are durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// The last group, which is durable.
    pub last: Seq,
    /// The targets' logs have dropped the groups up to this one.
    pub released: Seq,
}

/// The condition for which the close of a stream waits, in this order.
#[derive(Clone, Copy, Debug)]
pub(super) enum Closing {
    /// All submitted groups up to this one are durable.
    GroupsDurable(Seq),
    /// Nothing is in flight, and all redirected updates are home.
    StreamIdle,
    /// Every target has confirmed the released mark. `last` is the last group.
    MarksConfirmed { last: Seq },
}

impl<P: Payload + AsRef<[u8]>> StreamDriver<P> {
    /// Begins a wait. The caller then drives the stream until [`reached`](Self::reached).
    ///
    /// # Errors
    /// The group was never submitted.
    pub fn begin_wait(&mut self, until: Until) -> Result<(), NotSubmitted> {
        let last = self.session.engine().last_admitted();
        match until {
            Until::Complete(seq) | Until::Durable(seq) if seq > last => {
                Err(NotSubmitted { seq, last })
            }
            Until::Durable(seq) => {
                self.session.ask_durable(seq);
                self.has_unsent = true;
                Ok(())
            }
            Until::Complete(_)
            | Until::Space
            | Until::Idle
            | Until::Moved
            | Until::ReadEnded
            | Until::Woken => Ok(()),
        }
    }

    /// Whether the condition holds, as of the last [`marks`](Self::marks).
    #[inline]
    #[must_use]
    pub fn reached(&self, until: Until) -> bool {
        let (marks, engine) = (self.session.marks(), self.session.engine());
        match until {
            Until::Complete(seq) => marks.complete >= seq,
            Until::Durable(seq) => marks.durable >= seq,
            Until::Space if self.session.must_wait_for_followed() => false,
            Until::Space => {
                let is_idle = engine.is_idle() && !engine.awaits_reads();
                engine.payload_freed_up_to() > self.freed_up_to || is_idle
            }
            Until::Idle => engine.is_idle(),
            Until::Moved => {
                self.present_marks() != self.last_reported || self.reads.untaken_ends > 0
            }
            Until::ReadEnded => self.reads.untaken_ends > 0 || self.reads.in_flight_count == 0,
            Until::Woken => self.attention.is_woken(),
        }
    }

    /// Checks whether a wait has ended, as of the last [`marks`](Self::marks). The condition is
    /// checked first, then an interrupt, then the deadline. An interrupt that does not end this
    /// wait ends the next one. `now` is called only if there is a deadline.
    pub fn wait_step(
        &mut self,
        until: Until,
        deadline: Option<u64>,
        now: impl FnOnce() -> u64,
    ) -> Option<WaitEnd> {
        if self.reached(until) {
            if until == Until::Woken {
                self.attention.clear_woken();
            }
            return Some(WaitEnd::Reached);
        }
        if self.attention.clear_woken() {
            return Some(WaitEnd::Woken);
        }
        match deadline {
            Some(deadline) if now() >= deadline => Some(WaitEnd::Deadline),
            _ => None,
        }
    }

    /// As [`wait_step`](Self::wait_step), but an interrupt does not end the wait. It ends the next
    /// one.
    pub fn wait_step_unwoken(
        &self,
        until: Until,
        deadline: Option<u64>,
        now: impl FnOnce() -> u64,
    ) -> Option<WaitEnd> {
        if self.reached(until) {
            return Some(WaitEnd::Reached);
        }
        match deadline {
            Some(deadline) if now() >= deadline => Some(WaitEnd::Deadline),
            _ => None,
        }
    }

    /// Interrupts the owner: ends its present wait, or its next one if it does not wait now.
    pub fn wake(&mut self) {
        self.attention.wake();
    }

    /// The marks now, as of the last [`marks`](Self::marks).
    fn present_marks(&self) -> ReportedMarks {
        ReportedMarks { marks: self.session.marks(), released: self.session.engine().released() }
    }

    /// Records that the marks have been reported to the owner; see [`Until::Moved`].
    #[inline]
    pub fn marks_reported(&mut self) {
        self.last_reported = self.present_marks();
    }

    /// Begins to close the stream. All submitted groups become durable. Then the targets durably
    /// record the released mark, so that their logs may drop the groups. The caller then drives the
    /// stream and calls [`close_step`](Self::close_step).
    pub fn begin_close(&mut self) {
        let last = self.session.engine().last_admitted();
        self.session.ask_durable(last);
        self.session.ask_home(last);
        self.session.set_closing(true);
        self.has_unsent = true;
        self.closing = Some(Closing::GroupsDurable(last));
    }

    /// Ends the close before it is done. The stream continues.
    pub fn give_up_close(&mut self) {
        self.closing = None;
        self.session.set_closing(false);
        self.session.give_up_marks();
    }

    /// Continues the close, after [`marks`](Self::marks). Returns `Some` when the stream is closed.
    /// The shell then closes the connections.
    ///
    /// # Errors
    /// A target could not record the mark.
    pub fn close_step(&mut self) -> Result<Option<Closed>, TargetRefusal> {
        loop {
            match self.closing {
                Some(Closing::GroupsDurable(seq)) if self.reached(Until::Durable(seq)) => {
                    self.closing = Some(Closing::StreamIdle);
                }
                // The engine may have inserted a flush of its own, as a group after the one that
                // was the last. So the driver reads the last group again.
                Some(Closing::StreamIdle)
                    if self.reached(Until::Idle)
                        && self.session.engine().oldest_redirected().is_none() =>
                {
                    let last = self.session.marks().durable;
                    self.session.send_marks();
                    self.has_unsent = true;
                    self.closing = Some(Closing::MarksConfirmed { last });
                }
                Some(Closing::MarksConfirmed { last }) if self.session.marks_confirmed()? => {
                    self.closing = None;
                    self.session.set_closed();
                    let released = self.session.engine().released();
                    return Ok(Some(Closed { last, released }));
                }
                Some(_) | None => return Ok(None),
            }
        }
    }
}
