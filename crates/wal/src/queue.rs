//! The queue of the committer: framed records, and requests.

use std::sync::mpsc::SyncSender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use riopipe::{StreamWaker, crc32c};
use riopipe_wal_core::Lsn;
use riopipe_wal_core::record::{FRAME_BYTES, Frame, Kind};

use crate::error::{AppendError, ReadError, WalFailure};
use crate::lock::lock;
use crate::marks::Marks;

/// A reader's request for blocks of the ring that do not cross its end.
#[derive(Debug)]
pub(crate) struct ReadRequest {
    /// Place of the first block in the ring.
    pub(crate) place: u64,
    /// Number of bytes to read.
    pub(crate) bytes: usize,
    /// The channel for the bytes.
    pub(crate) reply: SyncSender<Result<Vec<u8>, ReadError>>,
}

/// The requests to the committer other than records.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    /// A caller waits for the records that begin below this Lsn.
    pub(crate) wanted: Lsn,
    /// Records below this Lsn are to be dropped. The committer tries it once for each request.
    pub(crate) trim: Option<Lsn>,
    /// The reads that are not done.
    pub(crate) reads: Vec<ReadRequest>,
    /// No more records are accepted. The log is to be closed when all are durable.
    pub(crate) close: bool,
    /// The log is to end without waiting.
    pub(crate) abandon: bool,
}

/// The content of the queue.
#[derive(Debug)]
struct State {
    /// The framed records that the committer has not taken.
    records: Vec<u8>,
    /// The Lsn of the next record.
    end: Lsn,
    requests: Requests,
    /// Why no record is accepted any more, if so.
    ended: Option<WalFailure>,
    /// Whether the committer sleeps and has not been woken yet.
    asleep: bool,
    /// Number of appenders that wait for space.
    waiting_appenders: usize,
}

/// Records and requests for the committer.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    space: Condvar,
    waker: StreamWaker,
    bounds: Bounds,
    /// Whether the committer needs to know which records callers wait for: it then asks for a
    /// FLUSH.
    needs_flush_requests: bool,
}

/// The limits of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Bytes of all queued records.
    pub(crate) queue_bytes: usize,
    /// Bytes of one record.
    pub(crate) record_bytes: usize,
}

impl Queue {
    pub(crate) fn new(
        waker: StreamWaker,
        end: Lsn,
        bounds: Bounds,
        needs_flush_requests: bool,
    ) -> Self {
        let requests = Requests { wanted: end, ..Requests::default() };
        let (records, ended) = (Vec::new(), None);
        let state = State { records, end, requests, ended, asleep: false, waiting_appenders: 0 };
        let (state, space) = (Mutex::new(state), Condvar::new());
        Self { state, space, waker, bounds, needs_flush_requests }
    }

    /// Adds a record that consists of these parts; waits at most `timeout` for space.
    pub(crate) fn append(
        &self,
        kind: Kind,
        parts: [&[u8]; 2],
        timeout: Duration,
        marks: &Marks,
    ) -> Result<Lsn, AppendError> {
        let len = parts[0].len() + parts[1].len();
        if len > self.bounds.record_bytes {
            return Err(AppendError::TooLarge { bytes: len, max: self.bounds.record_bytes });
        }
        // Outside of the lock, since it takes time.
        let sum = crc32c(crc32c(0, parts[0]), parts[1]);
        let total = FRAME_BYTES + len;
        let mut state = lock(&self.state);
        let mut since = None;
        loop {
            if let Some(over) = &state.ended {
                return Err(over.clone().into());
            }
            // A record larger than the queue is queued alone.
            if state.records.is_empty() || state.records.len() + total <= self.bounds.queue_bytes {
                break;
            }
            let waited = since.get_or_insert_with(Instant::now).elapsed();
            let left = timeout.saturating_sub(waited);
            if left.is_zero() {
                drop(state);
                return Err(match marks.progress().is_full {
                    true => AppendError::LogFull { waited },
                    false => AppendError::Busy { waited },
                });
            }
            state.waiting_appenders += 1;
            state = self.space.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting_appenders -= 1;
        }
        let lsn = state.end;
        state.records.extend_from_slice(&Frame::encode(kind, len, sum, lsn, crc32c));
        state.records.extend_from_slice(parts[0]);
        state.records.extend_from_slice(parts[1]);
        state.end = lsn.plus(total);
        self.wake_committer(state);
        Ok(lsn)
    }

    /// The Lsn of the next record.
    pub(crate) fn end(&self) -> Lsn {
        lock(&self.state).end
    }

    /// Bytes of queued records.
    pub(crate) fn len(&self) -> usize {
        lock(&self.state).records.len()
    }

    /// Reports that a caller waits until the record at `lsn` is durable.
    pub(crate) fn request_durable(&self, lsn: Lsn) {
        if !self.needs_flush_requests {
            return;
        }
        let mut state = lock(&self.state);
        if state.requests.wanted <= lsn {
            state.requests.wanted = lsn.plus(1);
            self.wake_committer(state);
        }
    }

    /// Makes a request to the committer.
    pub(crate) fn request(
        &self,
        add_request: impl FnOnce(&mut Requests),
    ) -> Result<(), WalFailure> {
        let mut state = lock(&self.state);
        if let Some(over) = state.ended.clone().filter(|_| !state.requests.close) {
            return Err(over);
        }
        add_request(&mut state.requests);
        if state.requests.close {
            // From here on no record is accepted; queued ones are still written.
            let _ = state.ended.get_or_insert(WalFailure::Closed);
            self.space.notify_all();
        }
        self.wake_committer(state);
        Ok(())
    }

    /// Wakes the committer if it sleeps.
    fn wake_committer(&self, mut state: MutexGuard<'_, State>) {
        if std::mem::take(&mut state.asleep) {
            drop(state);
            self.waker.wake();
        }
    }

    /// Takes the requests for the committer, and, if `wants_records`, the records.
    pub(crate) fn take_work(&self, records: &mut Vec<u8>, wants_records: bool) -> Requests {
        let mut state = lock(&self.state);
        if wants_records && !state.records.is_empty() {
            if records.is_empty() {
                std::mem::swap(records, &mut state.records);
            } else {
                records.append(&mut state.records);
            }
            if state.waiting_appenders > 0 {
                self.space.notify_all();
            }
        }
        let Requests { wanted, close, abandon, .. } = state.requests;
        let trim = state.requests.trim.take();
        Requests { wanted, trim, close, abandon, reads: std::mem::take(&mut state.requests.reads) }
    }

    /// Called by the committer before it sleeps, with the requests that it has handled. Returns false
    /// if there is something new for it.
    pub(crate) fn may_sleep(&self, handled: &Requests, wants_records: bool) -> bool {
        let mut state = lock(&self.state);
        let Requests { wanted, trim, close, abandon, reads } = &state.requests;
        let is_quiet = reads.is_empty()
            && trim.is_none()
            && *wanted == handled.wanted
            && (*close, *abandon) == (handled.close, handled.abandon)
            && (state.records.is_empty() || !wants_records);
        state.asleep = is_quiet;
        is_quiet
    }

    /// Ends the queue: no more records are accepted, and waiting readers get the reason.
    pub(crate) fn end_with(&self, why: &WalFailure) {
        let mut state = lock(&self.state);
        let over = state.ended.insert(why.clone()).clone();
        state.requests.close = false;
        let reads = std::mem::take(&mut state.requests.reads);
        drop(state);
        self.space.notify_all();
        for read in reads {
            // A reader that has stopped waiting needs no answer.
            let _ = read.reply.try_send(Err(over.clone().into()));
        }
    }
}
