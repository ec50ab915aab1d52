//! Staging a group: its writes, its tag, and its end.

use riopipe_order::attribute::Seq;
use riopipe_order::engine::{Op, Place, Write};

use crate::error::{SubmitError, Why};
use crate::piece::{Buf, Piece};
use crate::stream::Stream;

/// A group being staged on a stream. Nothing of it exists until it is submitted; it is then taken
/// whole, or refused whole with its buffers handed back. The group's end is the submission, so it
/// can't be forgotten.
#[derive(Debug)]
#[must_use = "a group that is not submitted is not written"]
pub struct Group<'a> {
    stream: &'a mut Stream,
    pub(crate) writes: Vec<Write<Piece>>,
    pub(crate) bufs: Vec<Buf>,
    tag: u64,
}

impl<'a> Group<'a> {
    pub(crate) fn new(stream: &'a mut Stream) -> Self {
        let (writes, bufs) = stream.spare_lists();
        Self { stream, writes, bufs, tag: 0 }
    }

    /// Writes `data` at volume block `lba`.
    ///
    /// `place` says whether the old content may be lost (T11): [`Place::Fresh`] only if no state
    /// that the volume may still recover to needs it.
    pub fn write(mut self, lba: u64, data: Buf, place: Place) -> Self {
        self.writes.push(Write { lba, blocks: data.blocks(), op: Op::Write(place, data.piece()) });
        self.bufs.push(data);
        self
    }

    /// Makes `blocks` at `lba` read as zeroes. Their old content must be as dispensable as for
    /// [`Place::Fresh`].
    pub fn discard(mut self, lba: u64, blocks: u32) -> Self {
        self.writes.push(Write { lba, blocks, op: Op::Discard });
        self
    }

    /// The caller's tag: a log sequence number, a transaction id. Recovery returns the tag of the
    /// last group that survived.
    pub fn tag(mut self, tag: u64) -> Self {
        self.tag = tag;
        self
    }

    /// Submits the group and returns at once. It is sent with the next [`Stream::poll`] or
    /// [`Stream::wait`], or when enough has gathered.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; nothing was taken.
    pub fn submit(self) -> Result<Seq, SubmitError> {
        self.end(false)
    }

    /// Submits the group with a joint FLUSH of every drive that the stream has dirtied: once it is
    /// durable, so is everything before it. Returns at once.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; nothing was taken.
    pub fn submit_durable(self) -> Result<Seq, SubmitError> {
        self.end(true)
    }

    fn end(self, durable: bool) -> Result<Seq, SubmitError> {
        let Self { stream, writes, bufs, tag } = self;
        match stream.check(&writes) {
            Ok(()) => stream.admit(writes, bufs, tag, durable),
            Err(why) => Err(refused(why, writes, bufs)),
        }
    }
}

/// The pieces go before the buffers they point into are handed back.
pub(crate) fn refused(why: Why, writes: Vec<Write<Piece>>, bufs: Vec<Buf>) -> SubmitError {
    drop(writes);
    SubmitError { why, bufs }
}
