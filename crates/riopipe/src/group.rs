//! Staging a group: its writes, its tag, and its end.

use std::time::Duration;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::{Op, Place, Write};

use crate::error::SubmitError;
use crate::piece::{Buf, Piece};
use crate::stream::Stream;

/// A group being staged on a stream. Nothing of it exists until it is submitted; it is then taken
/// whole, or refused whole with its buffers handed back. The group's end is the submission, so it
/// can't be forgotten.
#[derive(Debug)]
#[must_use = "a group that is not submitted is not written"]
pub struct Group<'a> {
    // The stream has the lists, so that staging a write moves nothing but two words.
    stream: &'a mut Stream,
    tag: u64,
}

/// The writes of the group that a stream stages, and their buffers.
#[derive(Debug, Default)]
pub(crate) struct Staged {
    /// Dropped before the buffers that their pieces are of.
    pub(crate) writes: Vec<Write<Piece>>,
    pub(crate) bufs: Vec<Buf>,
}

// SAFETY: each piece is all of a buffer in `bufs`, which is not `Send` because the counts of its
// buffer take one thread at a time. All pieces of these buffers are here: they come with the buffer
// (`Group::write`) and leave with it (`Stream::admit`, `Stream::unstage`), within one call on the
// stream. So they change threads together.
unsafe impl Send for Staged {}

impl<'a> Group<'a> {
    pub(crate) fn new(stream: &'a mut Stream) -> Self {
        stream.unstage();
        Self { stream, tag: 0 }
    }

    /// Writes `data` at volume block `lba`.
    ///
    /// `place` says what becomes of the old content (T11):
    ///
    /// - [`Place::Fresh`] only if no state that the volume may still recover to needs it;
    /// - [`Place::Extend`] only if `data` serves as well as it for each of these states, block by
    ///   block;
    /// - [`Place::InPlace`] otherwise.
    #[inline]
    pub fn write(self, lba: u64, mut data: Buf, place: Place) -> Self {
        let Staged { writes, bufs } = self.stream.staged.get_mut();
        writes.push(Write { lba, blocks: data.blocks(), op: Op::Write(place, data.piece()) });
        bufs.push(data);
        self
    }

    /// Makes `blocks` at `lba` read as zeroes. Their old content must be as dispensable as for
    /// [`Place::Fresh`].
    pub fn discard(self, lba: u64, blocks: u32) -> Self {
        self.stream.staged.get_mut().writes.push(Write { lba, blocks, op: Op::Discard });
        self
    }

    /// The caller's tag: a log sequence number, a transaction id. Recovery returns the tag of the
    /// last group that survived.
    pub fn tag(mut self, tag: u64) -> Self {
        self.tag = tag;
        self
    }

    /// Submits the group and returns at once. It leaves with the stream's next
    /// [`send`](Stream::send), [`poll`](Stream::poll), [`wait`](Stream::wait), read or durable
    /// group, or when 64 groups have gathered ([all cases](Stream#when-bytes-leave)): so groups that
    /// are submitted one after another go together.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; nothing was taken.
    pub fn submit(self) -> Result<Seq, SubmitError> {
        self.stream.admit(self.tag, false)
    }

    /// Submits the group with a joint FLUSH of every drive that the stream has dirtied: once it is
    /// durable, so is everything before it. It and all before it are sent at once; returns without
    /// waiting for answers.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; nothing was taken.
    pub fn submit_durable(self) -> Result<Seq, SubmitError> {
        self.stream.admit(self.tag, true)
    }

    /// As [`submit`](Self::submit); if there is no room now, waits for room, at most for `timeout`.
    /// `None`: as long as it takes; a target that stays away makes the stream fail.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; nothing was taken. [`SubmitErrorKind::Full`] if there was no
    /// room in time.
    ///
    /// [`SubmitErrorKind::Full`]: crate::SubmitErrorKind::Full
    pub fn submit_or_wait(self, timeout: Option<Duration>) -> Result<Seq, SubmitError> {
        self.stream.admit_or_wait(self.tag, false, timeout)
    }

    /// As [`submit_durable`](Self::submit_durable), and waits for room as
    /// [`submit_or_wait`](Self::submit_or_wait) does.
    ///
    /// # Errors
    /// As [`submit_or_wait`](Self::submit_or_wait).
    pub fn submit_durable_or_wait(self, timeout: Option<Duration>) -> Result<Seq, SubmitError> {
        self.stream.admit_or_wait(self.tag, true, timeout)
    }
}
