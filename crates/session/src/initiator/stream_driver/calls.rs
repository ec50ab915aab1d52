//! The owner's calls that wait: for marks, for a read, and for the end of the stream.
//!
//! A call begins with `begin_…`. Then the shell drives rounds, and after each round it calls the
//! `…_step` function, until that returns how the call has ended.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Payload;

use super::{ReportedMarks, StreamDriver};
use crate::initiator::stream::{ReadExtent, ReadPartFailure, TargetRefusal};

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
    /// owner.
    Moved,
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

/// Why a read has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// A target has answered with an error, or was given up.
    Status {
        /// The place of the first part that failed: bytes from the start of the read.
        offset: usize,
        /// The status that the target sent.
        status: Status,
    },
    /// The answer did not come in time.
    Deadline,
}

/// The read of an owner's call.
#[derive(Debug, Default)]
pub(super) struct ReadCall {
    /// The extents of a read that has not been started, because writes of this stream to them are
    /// not complete. Empty once the read has been started.
    unstarted: Vec<ReadExtent>,
    /// Whether the read has begun and not ended.
    in_flight: bool,
    /// When the read is given up, ns.
    deadline: Option<u64>,
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
            Until::Complete(_) | Until::Space | Until::Idle | Until::Moved | Until::Woken => Ok(()),
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
            Until::Moved => self.present_marks() != self.last_reported,
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

    /// Begins a read of some extents, none of them empty. The caller has checked that they lie on
    /// the volume. The read is given up at `deadline`. An earlier read that has not ended is given
    /// up now. The caller then drives the stream and calls [`read_step`](Self::read_step).
    pub fn begin_read(&mut self, extents: &[ReadExtent], deadline: Option<u64>, now: u64) {
        self.give_up_read();
        self.session.begin_read(now);
        self.read.unstarted.extend_from_slice(extents);
        self.read.deadline = deadline;
        self.read.in_flight = true;
    }

    /// Gives up the read in flight, if there is one. Data that still arrives for it is dropped.
    pub fn give_up_read(&mut self) {
        self.read.unstarted.clear();
        self.read.deadline = None;
        if core::mem::take(&mut self.read.in_flight) {
            self.session.give_up_read();
        }
    }

    /// Whether a read command has no answer yet, also one of a read that was given up. A stream
    /// that only reads must be driven until then, because no stream can replay before the answer
    /// (promise P9).
    #[must_use]
    pub fn has_unanswered_reads(&self) -> bool {
        self.session.has_unanswered_reads()
    }

    /// Whether the read must wait for writes of this stream.
    fn read_must_wait(&self) -> bool {
        let must_wait =
            |extent: &ReadExtent| self.session.read_must_wait(extent.lba, extent.blocks);
        self.read.unstarted.iter().any(must_wait)
    }

    /// When the read in flight is given up, ns; `None`: there is no read, or it has no deadline.
    pub(super) fn read_deadline(&self) -> Option<u64> {
        self.read.deadline
    }

    /// Continues the read. The caller calls this once after [`begin_read`](Self::begin_read) and
    /// after each round. Returns how the read ended, if it has.
    ///
    /// The read starts only when all writes of this stream to its blocks are complete (promise P9).
    pub fn read_step(&mut self, now: u64) -> Option<Result<(), ReadFailure>> {
        if !self.read.unstarted.is_empty() && !self.read_must_wait() {
            let extents = core::mem::take(&mut self.read.unstarted);
            self.session.start_read(&extents);
            self.has_unsent = true;
        }
        if self.read.unstarted.is_empty() && !self.session.is_reading() {
            self.read.in_flight = false;
            self.read.deadline = None;
            let read_failure = |part: ReadPartFailure| ReadFailure::Status {
                offset: part.offset,
                status: part.status,
            };
            return Some(self.session.read_result().map_err(read_failure));
        }
        if self.read.deadline.is_some_and(|deadline| now >= deadline) {
            self.give_up_read();
            return Some(Err(ReadFailure::Deadline));
        }
        None
    }

    /// Whether the read can continue only after an answer arrives.
    #[must_use]
    pub fn read_waits(&self) -> bool {
        if self.read.unstarted.is_empty() {
            self.session.is_reading()
        } else {
            self.read_must_wait()
        }
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
