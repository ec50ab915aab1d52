//! What the owner's calls wait for: marks, a read, the end of the stream.

use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Payload;

use super::StreamDriver;
use crate::initiator::stream::BindRefused;

/// What to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The group and all before it are complete on all targets.
    Complete(Seq),
    /// The group and all before it are durable. If no group submitted since asked for that, the
    /// drives are flushed.
    Durable(Seq),
    /// There is room for groups again.
    Room,
    /// Nothing is under way.
    Idle,
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
            Until::Complete(_) | Until::Room | Until::Idle => Ok(()),
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
            Until::Room => engine.kept_after() > self.forgotten || engine.is_idle(),
            Until::Idle => engine.is_idle(),
        }
    }

    /// Begins a read of volume blocks, which the caller has made sure lie on the volume. An earlier
    /// read that has not ended is given up. Then drive the stream and ask
    /// [`read_step`](Self::read_step).
    pub fn begin_read(&mut self, lba: u64, blocks: u32) {
        self.read = Some((lba, blocks));
    }

    /// Goes on with the read; to be asked once after [`begin_read`](Self::begin_read) and after
    /// each round. How it ended, if it has: where it failed, in bytes from its start, and why.
    ///
    /// Its own writes come first (P9): it starts only when no incomplete one touches its blocks.
    pub fn read_step(&mut self) -> Option<Result<(), (usize, Status)>> {
        if let Some((lba, blocks)) = self.read {
            if self.session.read_must_wait(lba, blocks) {
                return None;
            }
            self.read = None;
            self.session.start_read(lba, blocks);
            self.unsent = true;
        }
        (!self.session.is_reading()).then(|| self.session.read_result())
    }

    /// Whether the read can go on only when something comes.
    #[must_use]
    pub fn read_waits(&self) -> bool {
        match self.read {
            Some((lba, blocks)) => self.session.read_must_wait(lba, blocks),
            None => self.session.is_reading(),
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
