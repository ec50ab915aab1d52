//! What waits for the committer: framed records, and requests.

use std::sync::mpsc::SyncSender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use riopipe::crc32c;
use riopipe_net::Waker;
use riopipe_wal_core::Lsn;
use riopipe_wal_core::record::{FRAME_BYTES, Frame, Kind};

use crate::error::{AppendError, ReadError, WalFailure};
use crate::marks::Marks;

/// A reader's request for blocks of the ring that do not go round its end.
#[derive(Debug)]
pub(crate) struct ReadRequest {
    /// The first one's place in the ring.
    pub(crate) place: u64,
    /// Bytes to be read.
    pub(crate) bytes: usize,
    /// Where the bytes go.
    pub(crate) reply: SyncSender<Result<Vec<u8>, ReadError>>,
}

/// What is asked of the committer besides records.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    /// Records that begin below this are waited for.
    pub(crate) wanted: Lsn,
    /// Records below this are to be dropped.
    pub(crate) trim: Lsn,
    pub(crate) reads: Vec<ReadRequest>,
    /// No more records come, and the log is to be closed once all are durable.
    pub(crate) close: bool,
    /// The log is to end as it is.
    pub(crate) abandon: bool,
}

#[derive(Debug)]
struct State {
    records: Vec<u8>,
    /// The Lsn of the next record.
    end: Lsn,
    requests: Requests,
    over: Option<WalFailure>,
    /// The committer sleeps, and nobody has woken it yet.
    asleep: bool,
    /// Appenders that wait for room.
    waiting: usize,
}

/// Records and requests on their way to the committer.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    room: Condvar,
    waker: Waker,
    bounds: Bounds,
    /// Whether the committer has to know what is waited for: then it asks for a FLUSH.
    flushes: bool,
}

/// How much a queue takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Bytes of records in all.
    pub(crate) queue_bytes: usize,
    /// Bytes of one record.
    pub(crate) record_bytes: usize,
}

impl Queue {
    pub(crate) fn new(waker: Waker, end: Lsn, trim: Lsn, bounds: Bounds, flushes: bool) -> Self {
        let requests = Requests { wanted: end, trim, ..Requests::default() };
        let (records, over) = (Vec::new(), None);
        let state = State { records, end, requests, over, asleep: false, waiting: 0 };
        let (state, room) = (Mutex::new(state), Condvar::new());
        Self { state, room, waker, bounds, flushes }
    }

    /// Adds a record that consists of these parts; waits for room at most for `patience`.
    pub(crate) fn append(
        &self,
        kind: Kind,
        parts: [&[u8]; 2],
        patience: Duration,
        marks: &Marks,
    ) -> Result<Lsn, AppendError> {
        let len = parts[0].len() + parts[1].len();
        if len > self.bounds.record_bytes {
            return Err(AppendError::TooLarge { bytes: len, max: self.bounds.record_bytes });
        }
        // Outside of the lock: this is what takes time.
        let sum = crc32c(crc32c(0, parts[0]), parts[1]);
        let total = FRAME_BYTES + len;
        let mut state = lock(&self.state);
        let mut since = None;
        loop {
            if let Some(over) = &state.over {
                return Err(over.clone().into());
            }
            // One that is larger than the queue goes alone.
            if state.records.is_empty() || state.records.len() + total <= self.bounds.queue_bytes {
                break;
            }
            let waited = since.get_or_insert_with(Instant::now).elapsed();
            let left = patience.saturating_sub(waited);
            if left.is_zero() {
                drop(state);
                return Err(match marks.progress().is_full {
                    true => AppendError::LogFull { waited },
                    false => AppendError::Busy { waited },
                });
            }
            state.waiting += 1;
            state = self.room.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
        let lsn = state.end;
        state.records.extend_from_slice(&Frame::encode(kind, len, sum, lsn, crc32c));
        state.records.extend_from_slice(parts[0]);
        state.records.extend_from_slice(parts[1]);
        state.end = lsn.plus(total);
        self.notify(state);
        Ok(lsn)
    }

    /// Where the next record will be.
    pub(crate) fn end(&self) -> Lsn {
        lock(&self.state).end
    }

    /// Bytes of records that wait.
    pub(crate) fn len(&self) -> usize {
        lock(&self.state).records.len()
    }

    /// Somebody waits until the record at `lsn` is durable.
    pub(crate) fn want(&self, lsn: Lsn) {
        if !self.flushes {
            return;
        }
        let mut state = lock(&self.state);
        if state.requests.wanted <= lsn {
            state.requests.wanted = lsn.plus(1);
            self.notify(state);
        }
    }

    /// Asks something of the committer.
    pub(crate) fn ask(&self, request: impl FnOnce(&mut Requests)) -> Result<(), WalFailure> {
        let mut state = lock(&self.state);
        if let Some(over) = state.over.clone().filter(|_| !state.requests.close) {
            return Err(over);
        }
        request(&mut state.requests);
        if state.requests.close {
            // From here on nobody appends; what waits is still written.
            let _ = state.over.get_or_insert(WalFailure::Closed);
            self.room.notify_all();
        }
        self.notify(state);
        Ok(())
    }

    fn notify(&self, mut state: MutexGuard<'_, State>) {
        if std::mem::take(&mut state.asleep) {
            drop(state);
            self.waker.wake();
        }
    }

    /// The committer takes what is asked, and, if it has `room` bytes of its own left, the records.
    pub(crate) fn take(&self, records: &mut Vec<u8>, wants_records: bool) -> Requests {
        let mut state = lock(&self.state);
        if wants_records && !state.records.is_empty() {
            if records.is_empty() {
                std::mem::swap(records, &mut state.records);
            } else {
                records.append(&mut state.records);
            }
            if state.waiting > 0 {
                self.room.notify_all();
            }
        }
        let Requests { wanted, trim, close, abandon, .. } = state.requests;
        Requests { wanted, trim, close, abandon, reads: std::mem::take(&mut state.requests.reads) }
    }

    /// The committer is about to sleep: false if something has come that it would look at.
    pub(crate) fn may_sleep(&self, seen: &Requests, wants_records: bool) -> bool {
        let mut state = lock(&self.state);
        let Requests { wanted, trim, close, abandon, reads } = &state.requests;
        let is_quiet = reads.is_empty()
            && (*wanted, *trim) == (seen.wanted, seen.trim)
            && (*close, *abandon) == (seen.close, seen.abandon)
            && (state.records.is_empty() || !wants_records);
        state.asleep = is_quiet;
        is_quiet
    }

    /// The log is over: nobody appends or asks any more. Readers that wait are told.
    pub(crate) fn end_with(&self, why: &WalFailure) {
        let mut state = lock(&self.state);
        let over = state.over.insert(why.clone()).clone();
        state.requests.close = false;
        let reads = std::mem::take(&mut state.requests.reads);
        drop(state);
        self.room.notify_all();
        for read in reads {
            // One that does not wait any more needs no answer.
            let _ = read.reply.try_send(Err(over.clone().into()));
        }
    }
}

/// Locks; a panic of another thread while it held the lock leaves nothing half-done here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
