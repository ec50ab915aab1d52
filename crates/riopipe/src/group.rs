//! Staging a group: its writes, its tag, and its end.

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

    /// Submits the group and returns at once. It is sent with the next [`Stream::poll`] or
    /// [`Stream::wait`], or when enough has gathered.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; nothing was taken.
    pub fn submit(self) -> Result<Seq, SubmitError> {
        self.stream.admit(self.tag, false)
    }

    /// Submits the group with a joint FLUSH of every drive that the stream has dirtied: once it is
    /// durable, so is everything before it. Returns at once.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; nothing was taken.
    pub fn submit_durable(self) -> Result<Seq, SubmitError> {
        self.stream.admit(self.tag, true)
    }
}
