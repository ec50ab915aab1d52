//! The thread that owns a log's stream: it packs queued records, submits groups, moves the marks,
//! and reads for other threads. It sleeps on its queue and on the stream at once: in a wait for the
//! stream, which the queue interrupts.

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
use crate::queue::{Queue, Requests};

/// The committer's state.
pub(crate) struct Committer {
    pub(crate) stream: Stream,
    pub(crate) ring: Ring,
    /// The log's number.
    pub(crate) log: u64,
    pub(crate) writer: Writer,
    pub(crate) queue: Arc<Queue>,
    pub(crate) marks: Arc<Marks>,
    /// Records taken from the queue, of which `packed` bytes are packed.
    pub(crate) records: Vec<u8>,
    pub(crate) packed: usize,
    /// Largest number of bytes of records in a group.
    pub(crate) group_bytes: usize,
    /// A packed group that the stream had no space for.
    pub(crate) refused: Option<(Group, Vec<Buf>)>,
    /// A caller waits for the records that begin below this Lsn.
    pub(crate) wanted: Lsn,
}

/// The reason for the end of the committer.
enum End {
    Closed,
    Abandoned,
}

/// Reports the end of the log to all waiting callers, also if its thread panics.
struct Over {
    queue: Arc<Queue>,
    marks: Arc<Marks>,
}

impl Over {
    fn report(&self, why: WalFailure) {
        self.queue.end_with(&why);
        self.marks.end(why);
    }
}

impl Drop for Over {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report(WalFailure::Flaw("its thread has panicked".into()));
        }
    }
}

impl Committer {
    /// Runs until the log is closed, abandoned, or failed.
    pub(crate) fn run(mut self) {
        let over = Over { queue: Arc::clone(&self.queue), marks: Arc::clone(&self.marks) };
        let end = self.serve();
        // The stream is closed before any caller gets the result, so that the log can be opened
        // again.
        let why = match end {
            Ok(End::Closed) => self.close(),
            // The stream is dropped as it is: opening the log will find the durable records again.
            Ok(End::Abandoned) => {
                drop(self.stream);
                WalFailure::Closed
            }
            Err(failure) => {
                drop(self.stream);
                failure
            }
        };
        if why != WalFailure::Closed {
            tracing::error!(error = %why, "a log has failed");
        }
        over.report(why);
    }

    /// All is submitted: waits until it is durable, and closes the stream.
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

    fn serve(&mut self) -> Result<End, WalFailure> {
        loop {
            self.poll_stream()?;
            // While there are enough records here for a group, others stay in the queue, where
            // their appenders wait for space.
            let wants_records = self.waiting().len() < self.group_bytes;
            if wants_records {
                self.records.drain(..std::mem::take(&mut self.packed));
            }
            let requests = self.queue.take_work(&mut self.records, wants_records);
            if requests.abandon {
                return Ok(End::Abandoned);
            }
            if let Some(lsn) = requests.trim {
                self.trim(lsn);
            }
            self.wanted = requests.wanted;
            let submitted = self.submit()?;
            for read in requests.reads.iter() {
                let mut bytes = vec![0; read.bytes];
                let result = self.stream.read(self.ring.lba(read.place), &mut bytes, None);
                // A reader that has stopped waiting needs no answer.
                let _ = read.reply.try_send(result.map(|()| bytes).map_err(Into::into));
            }
            let is_packed = self.waiting().is_empty() && self.refused.is_none();
            if requests.close && is_packed && self.queue.len() == 0 {
                return Ok(End::Closed);
            }
            if submitted {
                // The next round sends the submitted groups.
                continue;
            }
            self.publish();
            let wants_records = self.waiting().len() < self.group_bytes;
            if self.queue.may_sleep(&Requests { reads: Vec::new(), ..requests }, wants_records) {
                self.sleep()?;
            }
        }
    }

    /// Sleeps until the stream's marks move, or there is something new in the queue; with a group
    /// that was refused, until there may be space for it.
    fn sleep(&mut self) -> Result<(), WalFailure> {
        let until = if self.refused.is_some() { Until::Space } else { Until::Moved };
        match self.stream.wait(until, None) {
            Ok(_) | Err(WaitError::Woken) => Ok(()),
            Err(WaitError::Failed(failure)) => Err(failure.into()),
            // A wait for these has no other error.
            Err(error) => Err(WalFailure::Flaw(error.to_string())),
        }
    }

    /// The records that are not packed.
    fn waiting(&self) -> &[u8] {
        &self.records[self.packed..]
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
        self.writer.on_marks(marks, self.wanted);
        if self.publish() > 1 {
            // Woken appenders usually append again: their records then go into one group.
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Publishes the log's progress; returns the number of callers that have waited for it.
    pub(crate) fn publish(&self) -> usize {
        self.marks.publish(Progress::of(&self.writer, self.waiting().len()))
    }

    /// Submits all groups that are due now; returns whether there were any.
    fn submit(&mut self) -> Result<bool, WalFailure> {
        let mut any = false;
        loop {
            let (group, bufs) = match self.refused.take() {
                Some(refused) => refused,
                None => match self.pack()? {
                    Some(packed) => packed,
                    None => return Ok(any),
                },
            };
            let extents = self.ring.extents(group.first, group.blocks);
            let mut staged = self.stream.group().tag(group.first + group.blocks);
            for (Extent { lba, .. }, buf) in extents.into_iter().zip(bufs) {
                // Fresh: no state that the volume may still recover to needs the block's old
                // content. The writer guarantees that (T11).
                staged = staged.write(lba, buf, Place::Fresh);
            }
            match if group.flush { staged.submit_durable() } else { staged.submit() } {
                Ok(seq) => {
                    self.writer.on_submitted(&group, seq.0);
                    any = true;
                }
                Err(SubmitError { kind: SubmitErrorKind::Full(_), bufs }) => {
                    self.refused = Some((group, bufs));
                    return Ok(any);
                }
                Err(SubmitError { kind: SubmitErrorKind::Poisoned(failure), .. }) => {
                    return Err(failure.into());
                }
                Err(error) => return Err(WalFailure::Refused(error.kind)),
            }
        }
    }

    /// Packs the next group, if one is due.
    fn pack(&mut self) -> Result<Option<(Group, Vec<Buf>)>, WalFailure> {
        let Some(group) = self.writer.plan(self.waiting().len(), self.wanted) else {
            return Ok(None);
        };
        let extents = self.ring.extents(group.first, group.blocks);
        let used = extents.into_iter().filter(|extent| extent.blocks > 0);
        let bufs = used.map(|extent| self.stream.buf(extent.blocks as usize * BLOCK_BYTES));
        let mut bufs = bufs.collect::<Result<Vec<Buf>, _>>()?;
        let mut parts = bufs.iter_mut();
        let mut part = || parts.next().map_or(&mut [][..], |buf| &mut buf[..]);
        self.writer.pack(&group, &self.records[self.packed..], [part(), part()]);
        self.packed += group.bytes;
        Ok(Some((group, bufs)))
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
