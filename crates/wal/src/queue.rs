//! The queue of the committer: framed records, and requests.
//!
//! Any thread adds records and requests. The committer takes all of them at once. Before it sleeps,
//! it announces that ([`may_sleep`](Queue::may_sleep)), and the next caller then wakes it.

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
    /// Callers wait for the records that begin below this Lsn.
    pub(crate) awaited: Lsn,
    /// Records below this Lsn are to be dropped. The committer tries that once for each request.
    pub(crate) trim: Option<Lsn>,
    /// The reads that are not done.
    pub(crate) reads: Vec<ReadRequest>,
    /// Whether the log is to be closed when all records are durable. No more records are accepted.
    pub(crate) close: bool,
    /// Whether the log is to end at once.
    pub(crate) abandon: bool,
}

/// The content of the queue.
#[derive(Debug)]
struct QueueState {
    /// The framed records that the committer has not taken.
    records: Vec<u8>,
    /// The Lsn of the next record.
    end: Lsn,
    requests: Requests,
    /// The reason why no record is accepted any more; `None` while records are accepted.
    end_reason: Option<WalFailure>,
    /// Whether the committer sleeps and has not been woken yet.
    is_committer_asleep: bool,
    /// Number of appenders that wait for space.
    waiting_appenders: usize,
}

/// Records and requests for the committer.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    /// Notified when there may be space for records, or the log has ended.
    space: Condvar,
    /// Wakes the committer.
    waker: StreamWaker,
    bounds: Bounds,
    /// Whether the committer needs to know which records callers wait for. It asks the drives for a
    /// FLUSH for such records.
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
        let state = QueueState {
            records: Vec::new(),
            end,
            requests: Requests { awaited: end, ..Requests::default() },
            end_reason: None,
            is_committer_asleep: false,
            waiting_appenders: 0,
        };
        let state = Mutex::new(state);
        Self { state, space: Condvar::new(), waker, bounds, needs_flush_requests }
    }

    /// Adds a record that consists of these parts, and returns its Lsn. Waits at most `timeout` for
    /// space.
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
        // The checksum is computed outside of the lock, since it takes time.
        let sum = crc32c(crc32c(0, parts[0]), parts[1]);
        let framed_len = FRAME_BYTES + len;
        let mut state = self.wait_for_space(framed_len, timeout, marks)?;
        let lsn = state.end;
        state.records.extend_from_slice(&Frame::encode(kind, len, sum, lsn, crc32c));
        state.records.extend_from_slice(parts[0]);
        state.records.extend_from_slice(parts[1]);
        state.end = lsn.plus(framed_len);
        self.wake_committer(state);
        Ok(lsn)
    }

    /// Waits at most `timeout` until the queue has space for `framed_len` bytes. Returns the locked
    /// queue, which has the space.
    fn wait_for_space(
        &self,
        framed_len: usize,
        timeout: Duration,
        marks: &Marks,
    ) -> Result<MutexGuard<'_, QueueState>, AppendError> {
        let mut state = lock(&self.state);
        let mut wait_start = None;
        loop {
            if let Some(reason) = &state.end_reason {
                return Err(reason.clone().into());
            }
            // A record larger than the queue is queued alone.
            let queued = state.records.len();
            if queued == 0 || queued + framed_len <= self.bounds.queue_bytes {
                return Ok(state);
            }
            let waited = wait_start.get_or_insert_with(Instant::now).elapsed();
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
        if state.requests.awaited <= lsn {
            state.requests.awaited = lsn.plus(1);
            self.wake_committer(state);
        }
    }

    /// Adds a request to the committer. Fails if the log has ended.
    pub(crate) fn request(
        &self,
        add_request: impl FnOnce(&mut Requests),
    ) -> Result<(), WalFailure> {
        let mut state = lock(&self.state);
        // A log that is being closed has an end reason already, but still serves requests.
        if let Some(reason) = &state.end_reason
            && !state.requests.close
        {
            return Err(reason.clone());
        }
        add_request(&mut state.requests);
        if state.requests.close {
            // From here on no record is accepted. Queued records are still written.
            let _ = state.end_reason.get_or_insert(WalFailure::Closed);
            self.space.notify_all();
        }
        self.wake_committer(state);
        Ok(())
    }

    /// Wakes the committer if it sleeps.
    fn wake_committer(&self, mut state: MutexGuard<'_, QueueState>) {
        if std::mem::take(&mut state.is_committer_asleep) {
            drop(state);
            self.waker.wake();
        }
    }

    /// Takes the requests for the committer. If `wants_records` is set, also moves the queued
    /// records to the end of `records`.
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
        // `awaited`, `close` and `abandon` hold for the rest of the log's life, so they also stay
        // here.
        let requests = &mut state.requests;
        Requests {
            awaited: requests.awaited,
            trim: requests.trim.take(),
            reads: std::mem::take(&mut requests.reads),
            close: requests.close,
            abandon: requests.abandon,
        }
    }

    /// Announces that the committer sleeps, if there is nothing new for it. `handled` are the
    /// requests that it has handled. Returns whether it may sleep.
    pub(crate) fn may_sleep(&self, handled: &Requests, wants_records: bool) -> bool {
        let mut state = lock(&self.state);
        let Requests { awaited, trim, close, abandon, reads } = &state.requests;
        let has_new_requests = !reads.is_empty()
            || trim.is_some()
            || *awaited != handled.awaited
            || *close != handled.close
            || *abandon != handled.abandon;
        let has_new_records = wants_records && !state.records.is_empty();
        let may_sleep = !has_new_requests && !has_new_records;
        state.is_committer_asleep = may_sleep;
        may_sleep
    }

    /// Ends the queue: no more records are accepted, and waiting readers get the reason.
    pub(crate) fn terminate(&self, reason: &WalFailure) {
        let mut state = lock(&self.state);
        state.end_reason = Some(reason.clone());
        state.requests.close = false;
        let reads = std::mem::take(&mut state.requests.reads);
        drop(state);
        self.space.notify_all();
        for read in reads {
            // A reader that has stopped waiting needs no answer.
            let _ = read.reply.try_send(Err(reason.clone().into()));
        }
    }
}
