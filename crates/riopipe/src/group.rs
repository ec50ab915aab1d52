//! A group of writes on a stream: beginning, staging and submitting it.

use std::time::Duration;

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Op, Place, Write};

use crate::error::SubmitError;
use crate::piece::Buf;
use crate::staged::Staged;
use crate::stream::Stream;

/// A group that is being staged on a stream. Nothing of it is sent or logged until it is submitted.
/// It is then admitted whole, or refused whole, and the error has its buffers. The submission ends
/// the group, so no group lacks its boundary.
#[derive(Debug)]
#[must_use = "a group that is not submitted is not written"]
pub struct Group<'a> {
    // The stream has the lists, so that staging a write moves only two words.
    stream: &'a mut Stream,
    tag: u64,
    follower: Option<StreamId>,
}

impl Stream {
    /// Begins a group. Its writes are staged in this process until it is submitted.
    pub fn group(&mut self) -> Group<'_> {
        Group::new(self)
    }
}

impl<'a> Group<'a> {
    fn new(stream: &'a mut Stream) -> Self {
        stream.unstage();
        Self { stream, tag: 0, follower: None }
    }

    /// Adds a write of `data` at volume block `lba`.
    ///
    /// `place` declares whether the old content of the blocks is still needed (trap T11):
    ///
    /// - [`Place::Fresh`]: no state to which the volume may still recover needs the old content.
    /// - [`Place::Extend`]: for each of these states, `data` serves as well as the old content,
    ///   block by block.
    /// - [`Place::InPlace`]: in all other cases.
    ///
    /// The stream keeps the buffer until it needs no replay of the write.
    #[inline]
    pub fn write(self, lba: u64, mut data: Buf, place: Place) -> Self {
        let Staged { writes, bufs } = self.stream.staged.get_mut();
        writes.push(Write { lba, blocks: data.blocks(), op: Op::Write(place, data.first_piece()) });
        bufs.push(data);
        self
    }

    /// Adds a request that makes `blocks` blocks from volume block `lba` on read as zeroes. As with
    /// [`Place::Fresh`], no state to which the volume may still recover may need their old content.
    pub fn discard(self, lba: u64, blocks: u32) -> Self {
        self.stream.staged.get_mut().writes.push(Write { lba, blocks, op: Op::Discard });
        self
    }

    /// Sets the caller's tag of the group, such as a log sequence number or a transaction id; 0 by
    /// default. Recovery returns the tag of the last group of the prefix.
    pub fn tag(mut self, tag: u64) -> Self {
        self.tag = tag;
        self
    }

    /// Lets another stream of the same volume *follow* the group: of the groups that are submitted to
    /// that stream later, none survives a crash without this group and all groups before it in its
    /// own stream. If such a later group is durable, they are durable, too. The other stream must be
    /// open, and may belong to another thread. [`Stream::id`] returns its id.
    ///
    /// A group has one follower; the last call counts. The group is sent at once.
    ///
    /// - With engine `opimq` no stream waits, if the drive can keep the order: the group is on one
    ///   drive and has no discard, no earlier group of its stream waits or is being flushed, and the
    ///   drive has answered the follower before.
    /// - Otherwise, and with all other engines, the group is flushed, as a
    ///   [durable](Self::submit_durable) one. Until it is durable, the follower takes no group:
    ///   [`SubmitErrorKind::Full`] with [`Bound::Followed`](crate::Bound::Followed). So
    ///   [`submit_or_wait`](Self::submit_or_wait) waits.
    ///
    /// If one of the two streams fails while the group is not durable, the other one fails, too
    /// (promise P6), except a stream whose group is flushed: it goes on when only the follower fails.
    ///
    /// ```no_run
    /// # fn log(mut data: riopipe::Stream, mut journal: riopipe::Stream)
    /// #     -> Result<(), Box<dyn std::error::Error>> {
    /// use riopipe::Place;
    ///
    /// let (page, record) = (data.buf(4096)?, journal.buf(4096)?);
    /// let follower = journal.id();
    /// data.group().write(900, page, Place::InPlace).follower(follower).submit()?;
    /// // The record is there only if the page is.
    /// journal.group().write(0, record, Place::InPlace).submit_durable_or_wait(None)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// [`SubmitErrorKind::Full`]: crate::SubmitErrorKind::Full
    pub fn follower(mut self, stream: StreamId) -> Self {
        self.follower = Some(stream);
        self
    }

    /// Submits the group and returns its seq at once, without waiting. The group leaves with the
    /// stream's next [`send`](Stream::send), [`poll`](Stream::poll), [`wait`](Stream::wait), read
    /// or durable group, or when 64 groups have gathered ([all cases](Stream#when-bytes-leave)). So
    /// groups that are submitted one after another leave together.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; no write was admitted.
    pub fn submit(self) -> Result<Seq, SubmitError> {
        self.stream.submit_staged(self.tag, self.follower, false)
    }

    /// Submits the group with a joint FLUSH of all drives that the stream has written since its
    /// last one, and returns the group's seq. When this group is durable, all earlier groups are
    /// durable, too. The call sends this group and all earlier ones, and does not wait for answers.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; no write was admitted.
    pub fn submit_durable(self) -> Result<Seq, SubmitError> {
        self.stream.submit_staged(self.tag, self.follower, true)
    }

    /// As [`submit`](Self::submit). If the replay memory or a log is full, waits for space, for
    /// `timeout` at most. `None` means without limit; if a target stays unreachable, the stream
    /// fails, and this ends.
    ///
    /// # Errors
    /// [`SubmitError`] with the buffers; no write was admitted. [`SubmitErrorKind::Full`] if there
    /// was no space in time.
    ///
    /// [`SubmitErrorKind::Full`]: crate::SubmitErrorKind::Full
    pub fn submit_or_wait(self, timeout: Option<Duration>) -> Result<Seq, SubmitError> {
        self.stream.submit_staged_or_wait(self.tag, self.follower, false, timeout)
    }

    /// As [`submit_durable`](Self::submit_durable). If there is no space, waits for it as
    /// [`submit_or_wait`](Self::submit_or_wait) does.
    ///
    /// # Errors
    /// As [`submit_or_wait`](Self::submit_or_wait).
    pub fn submit_durable_or_wait(self, timeout: Option<Duration>) -> Result<Seq, SubmitError> {
        self.stream.submit_staged_or_wait(self.tag, self.follower, true, timeout)
    }
}
