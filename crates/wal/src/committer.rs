//! The thread that owns a log's stream: it packs queued records, submits groups, publishes the
//! log's progress, and reads for other threads.
//!
//! ```text
//! append ──▶ Queue ──▶ records ── pack ──▶ group ── submit ──▶ Stream
//!                                                                │ marks
//! durable ◀── Marks ◀───────────────── publish ◀─────────────────┘
//! ```
//!
//! The thread sleeps in a wait for the stream. The queue interrupts the wait when it has something
//! new.

use std::sync::Arc;
use std::time::Duration;

use riopipe::{
    BLOCK_BYTES, Buf, Place, ReadError as StreamReadError, Stream, SubmitError, SubmitErrorKind,
    Until, WaitError,
};
use riopipe_wal_core::Lsn;
use riopipe_wal_core::reading::{ReadError as BlocksError, locate};
use riopipe_wal_core::ring::{Extent, Ring};
use riopipe_wal_core::writer::{Group, Marks as StreamMarks, Writer};

use crate::error::WalFailure;
use crate::marks::{Marks, Progress};
use crate::queue::{Queue, ReadRequest, Requests};

/// The committer's state.
pub(crate) struct Committer {
    pub(crate) stream: Stream,
    pub(crate) ring: Ring,
    /// The log's number.
    pub(crate) log: u64,
    pub(crate) writer: Writer,
    pub(crate) queue: Arc<Queue>,
    pub(crate) marks: Arc<Marks>,
    /// Records taken from the queue.
    pub(crate) records: Vec<u8>,
    /// Number of bytes at the front of `records` that are packed.
    pub(crate) packed_bytes: usize,
    /// Largest number of bytes of records in a group.
    pub(crate) group_bytes: usize,
    /// A packed group that the stream had no space for.
    pub(crate) refused_group: Option<PackedGroup>,
    /// Callers wait for the records that begin below this Lsn.
    pub(crate) awaited: Lsn,
}

/// A group whose blocks are filled.
pub(crate) struct PackedGroup {
    group: Group,
    /// The blocks, in the extents of the ring that have any.
    bufs: Vec<Buf>,
}

/// The request that ends the committer.
enum EndRequest {
    /// All records are submitted. The stream is to be closed when they are durable.
    Close,
    /// The log ends at once.
    Abandon,
}

/// Reports the end of the log to all waiting callers, also if its thread panics.
struct EndReporter {
    queue: Arc<Queue>,
    marks: Arc<Marks>,
}

impl EndReporter {
    fn report(&self, reason: WalFailure) {
        self.queue.terminate(&reason);
        self.marks.end(reason);
    }
}

impl Drop for EndReporter {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report(WalFailure::Flaw("its thread has panicked".into()));
        }
    }
}

impl Committer {
    /// Runs until the log is closed, abandoned, or failed.
    pub(crate) fn run(mut self) {
        let queue = Arc::clone(&self.queue);
        let end_reporter = EndReporter { queue, marks: Arc::clone(&self.marks) };
        let result = self.serve();
        // The stream is closed before any caller gets the result, so that the log can be opened
        // again.
        let reason = match result {
            Ok(EndRequest::Close) => self.close(),
            // The stream is dropped as it is. Opening the log will find the durable records again.
            Ok(EndRequest::Abandon) => {
                drop(self.stream);
                WalFailure::Closed
            }
            Err(failure) => {
                drop(self.stream);
                failure
            }
        };
        if reason != WalFailure::Closed {
            tracing::error!(error = %reason, "a log has failed");
        }
        end_reporter.report(reason);
    }

    /// Waits until all submitted groups are durable, and closes the stream. Returns the reason of
    /// the log's end.
    fn close(self) -> WalFailure {
        let Self { stream, mut writer, marks, .. } = self;
        match stream.close() {
            Ok(last) => {
                let (complete, durable, released) = (last.0, last.0, last.0);
                writer.on_marks(StreamMarks { complete, durable, released }, Lsn::ZERO);
                marks.publish(Progress::of(&writer, 0));
                WalFailure::Closed
            }
            Err(failure) => failure.into(),
        }
    }

    /// Serves the queue until a caller requests the end of the log.
    fn serve(&mut self) -> Result<EndRequest, WalFailure> {
        loop {
            self.poll_stream()?;
            let wants_records = self.wants_records();
            if wants_records {
                self.records.drain(..std::mem::take(&mut self.packed_bytes));
            }
            let requests = self.queue.take_work(&mut self.records, wants_records);
            if requests.abandon {
                return Ok(EndRequest::Abandon);
            }
            if let Some(lsn) = requests.trim {
                self.trim(lsn);
            }
            self.awaited = requests.awaited;
            let has_submitted = self.submit()?;
            for read in requests.reads.iter() {
                self.answer_read(read);
            }
            let is_all_submitted =
                self.unpacked_records().is_empty() && self.refused_group.is_none();
            if requests.close && is_all_submitted && self.queue.len() == 0 {
                return Ok(EndRequest::Close);
            }
            if has_submitted {
                // The next round sends the submitted groups.
                continue;
            }
            self.publish();
            let wants_records = self.wants_records();
            if self.queue.may_sleep(&Requests { reads: Vec::new(), ..requests }, wants_records) {
                self.sleep()?;
            }
        }
    }

    /// Reads blocks for another thread.
    fn answer_read(&mut self, read: &ReadRequest) {
        let mut bytes = vec![0; read.bytes];
        let result = self.stream.read(self.ring.lba(read.place), &mut bytes, None);
        // A reader that has stopped waiting needs no answer.
        let _ = read.reply.try_send(result.map(|()| bytes).map_err(Into::into));
    }

    /// Whether there are not enough records here for a group. Otherwise further records stay in the
    /// queue, where their appenders wait for space.
    fn wants_records(&self) -> bool {
        self.unpacked_records().len() < self.group_bytes
    }

    /// Sleeps until the stream's marks move, or there is something new in the queue. If the stream
    /// has refused a group, sleeps until the stream may have space for the group.
    fn sleep(&mut self) -> Result<(), WalFailure> {
        let until = if self.refused_group.is_some() { Until::Space } else { Until::Moved };
        match self.stream.wait(until, None) {
            Ok(_) | Err(WaitError::Woken) => Ok(()),
            Err(WaitError::Failed(failure)) => Err(failure.into()),
            // A wait for marks or space has no other error.
            Err(error) => Err(WalFailure::Flaw(error.to_string())),
        }
    }

    /// The records that are not packed.
    fn unpacked_records(&self) -> &[u8] {
        &self.records[self.packed_bytes..]
    }

    /// Sends and receives, and publishes the log's progress.
    fn poll_stream(&mut self) -> Result<(), WalFailure> {
        let marks = self.stream.poll()?;
        let released = self.stream.released();
        let marks = StreamMarks {
            complete: marks.complete.0,
            durable: marks.durable.0,
            released: released.0,
        };
        self.writer.on_marks(marks, self.awaited);
        if self.publish() > 1 {
            // Woken callers usually append again. After the yield, their records go into one group.
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Publishes the log's progress; returns the number of callers that have waited for it.
    pub(crate) fn publish(&self) -> usize {
        self.marks.publish(Progress::of(&self.writer, self.unpacked_records().len()))
    }

    /// Submits all groups that are due now. Returns whether any was submitted.
    fn submit(&mut self) -> Result<bool, WalFailure> {
        let mut has_submitted = false;
        loop {
            let next_group = match self.refused_group.take() {
                Some(refused) => Some(refused),
                None => self.pack()?,
            };
            let Some(PackedGroup { group, bufs }) = next_group else {
                return Ok(has_submitted);
            };
            let extents = self.ring.extents(group.first, group.blocks);
            let mut staged = self.stream.group().tag(group.first + group.blocks);
            for (Extent { lba, .. }, buf) in extents.into_iter().zip(bufs) {
                // The blocks are fresh: no state to which the volume may recover needs their old
                // content. The writer guarantees that (trap T11).
                staged = staged.write(lba, buf, Place::Fresh);
            }
            let result = if group.flush { staged.submit_durable() } else { staged.submit() };
            match result {
                Ok(seq) => {
                    self.writer.on_submitted(&group, seq.0);
                    has_submitted = true;
                }
                Err(SubmitError { kind: SubmitErrorKind::Full(_), bufs }) => {
                    self.refused_group = Some(PackedGroup { group, bufs });
                    return Ok(has_submitted);
                }
                Err(SubmitError { kind: SubmitErrorKind::Poisoned(failure), .. }) => {
                    return Err(failure.into());
                }
                Err(error) => return Err(WalFailure::Refused(error.kind)),
            }
        }
    }

    /// Packs the next group, if one is due.
    fn pack(&mut self) -> Result<Option<PackedGroup>, WalFailure> {
        let Some(group) = self.writer.plan(self.unpacked_records().len(), self.awaited) else {
            return Ok(None);
        };
        let extents = self.ring.extents(group.first, group.blocks);
        let used = extents.into_iter().filter(|extent| extent.blocks > 0);
        let bufs = used.map(|extent| self.stream.buf(extent.blocks as usize * BLOCK_BYTES));
        let mut bufs = bufs.collect::<Result<Vec<Buf>, _>>()?;
        let mut remaining_bufs = bufs.iter_mut();
        let mut next_part = || remaining_bufs.next().map_or(&mut [][..], |buf| &mut buf[..]);
        let parts = [next_part(), next_part()];
        self.writer.pack(&group, &self.records[self.packed_bytes..], parts);
        self.packed_bytes += group.bytes;
        Ok(Some(PackedGroup { group, bufs }))
    }

    /// Drops the records below `lsn`, as requested. If that fails, the caller may request it again.
    fn trim(&mut self, lsn: Lsn) {
        if lsn <= self.writer.trimmed() || self.writer.may_trim(lsn).is_err() {
            return;
        }
        let oldest = match self.writer.block_of(lsn) {
            Some(number) => Ok(number),
            None => self.locate(lsn),
        };
        match oldest {
            Ok(number) => {
                self.writer.trim(lsn, number);
                self.publish();
            }
            Err(error) => {
                tracing::error!(%lsn, %error, "a log can't be trimmed: its blocks can't be read");
            }
        }
    }

    /// Finds the block that holds the byte `lsn`, which an earlier opening of the log has written.
    fn locate(&mut self, lsn: Lsn) -> Result<u64, BlocksError<StreamReadError>> {
        let (ring, stream) = (self.ring, &mut self.stream);
        let mut read = |place: u64, bytes: &mut [u8]| stream.read(ring.lba(place), bytes, None);
        let blocks = self.writer.blocks();
        locate(ring, self.log, riopipe::crc32c, lsn, blocks, &mut read)
    }
}

/// Longest wait for the thread of an abandoned log when the log is dropped. The thread only has to
/// finish its current call.
pub(crate) const END_TIMEOUT: Duration = Duration::from_secs(5);
