//! What the owner's calls wait for: marks, a read, the end of the stream.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Payload;

use super::StreamDriver;
use crate::initiator::stream::{BindRefused, ReadExtent};

/// What to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The group and all before it are complete on all targets.
    Complete(Seq),
    /// The group and all before it are durable. If no group submitted since asked for that, the
    /// drives are flushed.
    Durable(Seq),
    /// There is room for groups again.
    Space,
    /// Nothing is under way.
    Idle,
    /// A mark has moved since the owner was told the marks last: complete, durable or released.
    Moved,
    /// Another thread has called: nothing else ends the wait.
    Woken,
}

/// How a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// What was waited for is so.
    Reached,
    /// Another thread has called.
    Woken,
    /// It took too long.
    Deadline,
}

/// A group that is waited for was never submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("group {seq} has not been submitted; the last one is {last}")]
pub struct NotSubmitted {
    /// The group waited for.
    pub seq: Seq,
    /// The last one submitted.
    pub last: Seq,
}

/// Why a read has ended without all that was to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// A target has answered with an error, or answers no more.
    Status {
        /// What could not be read: so many bytes behind the first byte of the first extent.
        offset: usize,
        /// The answer.
        status: Status,
    },
    /// It was not answered in time.
    Deadline,
}

/// The read of an owner's call.
#[derive(Debug, Default)]
pub(super) struct ReadCall {
    /// What is to be read as soon as no own write there is incomplete.
    waiting: Vec<ReadExtent>,
    under_way: bool,
    deadline: Option<u64>,
}

/// A stream that has been closed in good order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// The last group, which is durable.
    pub last: Seq,
    /// Up to here the targets' logs have forgotten the stream.
    pub released: Seq,
}

/// How far the close of a stream is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Closing {
    /// Until everything that was submitted is durable.
    Durable(Seq),
    /// Until nothing is under way.
    Idle,
    /// Until every target has confirmed how far the stream is released.
    Marks { last: Seq },
}

impl<P: Payload + AsRef<[u8]>> StreamDriver<P> {
    /// Begins to wait; then drive the stream until [`reached`](Self::reached).
    ///
    /// # Errors
    /// The group was never submitted.
    pub fn begin_wait(&mut self, until: Until) -> Result<(), NotSubmitted> {
        let last = self.session.engine().last();
        match until {
            Until::Complete(seq) | Until::Durable(seq) if seq > last => {
                Err(NotSubmitted { seq, last })
            }
            Until::Durable(seq) => {
                self.session.ask_durable(seq);
                self.unsent = true;
                Ok(())
            }
            Until::Complete(_) | Until::Space | Until::Idle | Until::Moved | Until::Woken => Ok(()),
        }
    }

    /// Whether it is so, as of the last [`marks`](Self::marks).
    #[inline]
    #[must_use]
    pub fn reached(&self, until: Until) -> bool {
        let (marks, engine) = (self.session.marks(), self.session.engine());
        match until {
            Until::Complete(seq) => marks.complete >= seq,
            Until::Durable(seq) => marks.durable >= seq,
            Until::Space => engine.kept_after() > self.forgotten || engine.is_idle(),
            Until::Idle => engine.is_idle(),
            Until::Moved => (marks, engine.released()) != self.told,
            Until::Woken => self.attention.is_woken(),
        }
    }

    /// Goes on with a wait, as of the last [`marks`](Self::marks). How it ended, if it has: what is
    /// waited for comes before another thread's call, and that before the deadline. A call that is
    /// not what ends the wait is kept for the next one. `now` is asked only if there is a deadline.
    pub fn wait_step(
        &mut self,
        until: Until,
        deadline: Option<u64>,
        now: impl FnOnce() -> u64,
    ) -> Option<WaitEnd> {
        if self.reached(until) {
            if until == Until::Woken {
                self.attention.take_woken();
            }
            return Some(WaitEnd::Reached);
        }
        if self.attention.take_woken() {
            return Some(WaitEnd::Woken);
        }
        deadline.is_some_and(|deadline| now() >= deadline).then_some(WaitEnd::Deadline)
    }

    /// As [`wait_step`](Self::wait_step), of a call that other threads' calls do not end: they are
    /// kept for the next wait.
    pub fn wait_step_unwoken(
        &self,
        until: Until,
        deadline: Option<u64>,
        now: impl FnOnce() -> u64,
    ) -> Option<WaitEnd> {
        if self.reached(until) {
            return Some(WaitEnd::Reached);
        }
        deadline.is_some_and(|deadline| now() >= deadline).then_some(WaitEnd::Deadline)
    }

    /// Another thread calls the owner: its wait ends, or the next one does.
    pub fn wake(&mut self) {
        self.attention.wake();
    }

    /// The owner is told the marks and how far the stream is released: see [`Until::Moved`].
    #[inline]
    pub fn tell(&mut self) {
        self.told = (self.session.marks(), self.session.engine().released());
    }

    /// Begins a read of some extents, none of them empty, which the caller has made sure lie on the
    /// volume; it is given up at `deadline`. An earlier read that has not ended is given up. Then
    /// drive the stream and ask [`read_step`](Self::read_step).
    pub fn begin_read(&mut self, extents: &[ReadExtent], deadline: Option<u64>) {
        self.give_up_read();
        self.read.waiting.extend_from_slice(extents);
        self.read.deadline = deadline;
        self.read.under_way = true;
    }

    /// Gives up the read under way, if there is one. What still comes of it is dropped.
    pub fn give_up_read(&mut self) {
        self.read.waiting.clear();
        self.read.deadline = None;
        if core::mem::take(&mut self.read.under_way) {
            self.session.give_up_read();
        }
    }

    /// Whether a target still owes the answer to a read that was given up. A stream that only reads is
    /// not to be left alone then: others can't replay before that answer has come (P9).
    #[must_use]
    pub fn owes_reads(&self) -> bool {
        self.session.owes_reads()
    }

    /// Whether a read waits for own writes.
    fn read_must_wait(&self) -> bool {
        let must_wait =
            |extent: &ReadExtent| self.session.read_must_wait(extent.lba, extent.blocks);
        self.read.waiting.iter().any(must_wait)
    }

    pub(super) fn read_deadline(&self) -> Option<u64> {
        self.read.deadline
    }

    /// Goes on with the read; to be asked once after [`begin_read`](Self::begin_read) and after
    /// each round. How it ended, if it has.
    ///
    /// Its own writes come first (P9): it starts only when no incomplete one touches its blocks.
    pub fn read_step(&mut self, now: u64) -> Option<Result<(), ReadFailure>> {
        if !self.read.waiting.is_empty() && !self.read_must_wait() {
            let extents = core::mem::take(&mut self.read.waiting);
            self.session.start_read(&extents);
            self.unsent = true;
        }
        if self.read.waiting.is_empty() && !self.session.is_reading() {
            self.read.under_way = false;
            self.read.deadline = None;
            let failed = |(offset, status)| ReadFailure::Status { offset, status };
            return Some(self.session.read_result().map_err(failed));
        }
        if self.read.deadline.is_some_and(|deadline| now >= deadline) {
            self.give_up_read();
            return Some(Err(ReadFailure::Deadline));
        }
        None
    }

    /// Whether the read can go on only when something comes.
    #[must_use]
    pub fn read_waits(&self) -> bool {
        match self.read.waiting.is_empty() {
            false => self.read_must_wait(),
            true => self.session.is_reading(),
        }
    }

    /// Begins to close the stream in good order: everything submitted becomes durable, and the
    /// targets are told durably that their logs may forget it. Then drive the stream and ask
    /// [`close_step`](Self::close_step).
    pub fn begin_close(&mut self) {
        let last = self.session.engine().last();
        self.session.ask_durable(last);
        self.unsent = true;
        self.closing = Some(Closing::Durable(last));
    }

    /// Gives the close up: the stream goes on.
    pub fn give_up_close(&mut self) {
        self.closing = None;
        self.session.give_up_marks();
    }

    /// Goes on with the close, after [`marks`](Self::marks). `Some` when the stream is closed: the
    /// shell closes its connections.
    ///
    /// # Errors
    /// A target that could not take the mark.
    pub fn close_step(&mut self) -> Result<Option<Closed>, BindRefused> {
        loop {
            match self.closing {
                Some(Closing::Durable(seq)) if self.reached(Until::Durable(seq)) => {
                    self.closing = Some(Closing::Idle);
                }
                // A flush that the engine put in itself counts, too: the last group may have moved.
                Some(Closing::Idle) if self.reached(Until::Idle) => {
                    let last = self.session.marks().durable;
                    self.session.send_marks();
                    self.unsent = true;
                    self.closing = Some(Closing::Marks { last });
                }
                Some(Closing::Marks { last }) if self.session.marks_confirmed()? => {
                    self.closing = None;
                    let released = self.session.engine().released();
                    return Ok(Some(Closed { last, released }));
                }
                Some(_) | None => return Ok(None),
            }
        }
    }
}
