//! Reading a volume from any thread, beside its streams.
//!
//! A [`Reader`] shares a pool of sessions with its clones. A session is a set of connections to all
//! targets. Each read takes an idle session for its duration, or makes a new one while there are
//! fewer than the limit, or else waits for one.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use riopipe_net::{AdaptiveSpin, SpinPolicy};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_session::initiator::volume::state::ReserveError;

use crate::error::{ReadError, StreamError};
use crate::failure::Exhausted;
use crate::lock::lock;
use crate::open_volume::OpenVolume;
use crate::options::{QUEUE_DEPTH_MAX, ReaderOptions};
use crate::reading::{ReadExtent, Reads};
use crate::start::start_reading;
use crate::stream_handle::StreamHandle;
use crate::stream_shell::StreamShell;
use crate::time::nanos;

/// Reads an open volume from any thread. Clone it to share it. It has connections of its own, so
/// that its reads do not wait for a stream, and no stream waits for them.
///
/// # The data that a read returns
///
/// - Of every stream: each group that was complete when the read began, as its owner or a
///   [`Watch`](crate::Watch) could read from the marks (promise P9). While a target is unreachable,
///   or while requests are replayed to it, the read waits.
/// - Of groups in flight: of each block the old content or the new, in any mixture. There is no
///   order among blocks, also not those of one group: to read a group whole, wait until it is
///   complete.
/// - Complete groups that are not durable may be lost in a crash. Before something outside of the
///   volume depends on the data that was read, wait until it is durable.
/// - Reads do not wait for a stream that has [failed](Self::has_failed_stream).
/// - A stream that failed and is [reopened](crate::Stream::reopen) has its groups beyond the prefix
///   undone; reads before that may have returned their data.
///
/// The volume stays open as long as it has a reader, unless it is [closed](crate::Volume::close).
#[derive(Clone, Debug)]
pub struct Reader(Arc<SessionPool>);

/// The largest number of sessions, as [`ReaderOptions::concurrent`] promises.
const SESSION_COUNT_MAX: usize = 64;

/// The sessions of a reader.
#[derive(Debug)]
struct SessionPool {
    volume: Arc<OpenVolume>,
    options: ReaderOptions,
    sessions: Mutex<Sessions>,
    /// Notified when a session has become idle, or when there is one fewer.
    changed: Condvar,
}

#[derive(Debug)]
struct Sessions {
    /// The sessions that no call uses.
    idle: Vec<Session>,
    /// The number of sessions that exist or are being made.
    count: usize,
    /// The limit of `count`. It is lowered if a target has no queues for more sessions.
    count_max: usize,
}

/// Connections to all targets. One call at a time uses them.
#[derive(Debug)]
struct Session {
    /// The number of the reader among the streams. A session is a stream that only reads.
    id: StreamId,
    shell: StreamShell,
    handle: Arc<StreamHandle>,
    /// Decides whether a wait polls again or sleeps.
    spin: AdaptiveSpin,
    volume: Arc<OpenVolume>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shell.close_connections();
        self.volume.remove_stream_from_targets(self.id, &self.handle);
        lock(&self.volume.state).on_reader_closed(self.id);
    }
}

impl Session {
    /// Connects a new session to all targets, within `timeout` or the volume's own connect timeout,
    /// whichever is shorter.
    fn start(pool: &SessionPool, timeout: Option<Duration>) -> Result<Self, SessionError> {
        let volume = &pool.volume;
        let (id, qids) = lock(&volume.state).reserve_reader().map_err(|error| match error {
            ReserveError::NoQueue { server, queues } => {
                SessionError::NoQueue { target: volume.server_name(server), queues }
            }
            // A reader gets no other error of a reservation.
            _ => SessionError::Other(Exhausted::Descriptors.into()),
        })?;
        let connect_timeout = volume.connect_options.timeout;
        let timeout = timeout.unwrap_or(connect_timeout).min(connect_timeout);
        let started = Self::connect(pool, id, &qids, timeout);
        let (shell, handle) = started.map_err(|error| {
            lock(&volume.state).on_reader_closed(id);
            SessionError::Other(error)
        })?;
        let spin_ns = nanos(volume.connect_options.spin);
        let spin = AdaptiveSpin::new(SpinPolicy { spin_ns, steady: false });
        Ok(Self { id, shell, handle, spin, volume: Arc::clone(volume) })
    }

    fn connect(
        pool: &SessionPool,
        id: StreamId,
        qids: &[u16],
        timeout: Duration,
    ) -> Result<(StreamShell, Arc<StreamHandle>), StreamError> {
        let volume = &pool.volume;
        let handle = StreamHandle::new(Seq::ZERO, volume.servers.len())
            .map_err(|_| Exhausted::Descriptors)?;
        match start_reading(volume, id, qids, &pool.options, timeout, &handle) {
            Ok(shell) => Ok((shell, handle)),
            Err(error) => {
                volume.remove_stream_from_targets(id, &handle);
                Err(error)
            }
        }
    }
}

/// Why a session could not be made.
enum SessionError {
    /// The target has no I/O queue left for the session.
    NoQueue {
        target: crate::TargetAddr,
        /// The number of I/O queues that the target grants.
        queues: u16,
    },
    Other(StreamError),
}

impl Reader {
    pub(crate) fn new(volume: Arc<OpenVolume>, options: &ReaderOptions) -> Self {
        let count_max = options.concurrent.clamp(1, SESSION_COUNT_MAX);
        let queue_depth = options.queue_depth.clamp(1, QUEUE_DEPTH_MAX);
        let options = ReaderOptions { queue_depth, ..options.clone() };
        let sessions = Mutex::new(Sessions { idle: Vec::new(), count: 0, count_max });
        Self(Arc::new(SessionPool { volume, options, sessions, changed: Condvar::new() }))
    }

    /// Whether a stream has failed since the volume was opened. Reads do not wait for the replay of a stream
    /// that has failed, and may return older data than it had delivered. If this is false when a read has
    /// ended, that read has waited for all streams.
    #[must_use]
    pub fn has_failed_stream(&self) -> bool {
        self.0.volume.read_barrier.has_failed_stream()
    }

    /// Reads whole blocks at volume block `lba` into `into`, and waits for them for `timeout` at
    /// most; `None` means without limit. The possible content is described
    /// [above](Self#the-data-that-a-read-returns).
    ///
    /// # Errors
    /// [`ReadError`]; the content of the buffer is not defined then.
    pub fn read(
        &self,
        lba: u64,
        into: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<(), ReadError> {
        self.read_many(&mut [ReadExtent { lba, into }], timeout)
    }

    /// As [`read`](Self::read), for several extents at once: in one round trip, as far as the queue
    /// depth allows.
    ///
    /// # Errors
    /// [`ReadError`]; the content of the buffers is not defined then.
    pub fn read_many(
        &self,
        extents: &mut [ReadExtent<'_>],
        timeout: Option<Duration>,
    ) -> Result<(), ReadError> {
        let volume = &self.0.volume;
        let extents = extents.iter_mut().map(|extent| (extent.lba, &mut *extent.into));
        let mut reads = Reads::new(extents, volume.topology.blocks())?;
        if volume.is_released() {
            return Err(ReadError::Closed);
        }
        if reads.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let remaining = || timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        let mut session = self.0.take(&remaining).map_err(|error| call_error(error, timeout))?;
        let result = reads.run(&mut session.shell, &mut session.spin, remaining());
        let has_failed = matches!(result, Err(ReadError::Failed(_)));
        // A session with reads in flight may not go back to the pool. There no thread would receive
        // their data, and streams do not replay while reads are in flight (promise P9).
        if has_failed || session.shell.driver.has_unanswered_reads() {
            self.0.discard(session);
        } else {
            self.0.put_back(session);
        }
        result.map_err(|error| call_error(error, timeout))
    }
}

/// The error of a call with this timeout, for an error of its session.
fn call_error(error: ReadError, timeout: Option<Duration>) -> ReadError {
    match (error, timeout) {
        // The session only knows the remaining time. The caller expects its own timeout in the
        // error.
        (ReadError::Deadline(_), Some(timeout)) => ReadError::Deadline(timeout),
        (ReadError::Failed(failure), _) => {
            ReadError::Target { target: failure.target, cause: failure.cause }
        }
        (error, _) => error,
    }
}

impl SessionPool {
    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        lock(&self.sessions)
    }

    /// Takes an idle session, or makes a new one if the limit allows it, or else waits for one.
    /// `remaining` returns the time that the call may still take.
    fn take(&self, remaining: &dyn Fn() -> Option<Duration>) -> Result<Session, ReadError> {
        let mut sessions = self.sessions();
        loop {
            if let Some(session) = sessions.idle.pop() {
                return Ok(session);
            }
            if sessions.count < sessions.count_max {
                sessions.count += 1;
                // Other calls must be able to put sessions back while this call connects.
                drop(sessions);
                let error = match Session::start(self, remaining()) {
                    Ok(session) => return Ok(session),
                    Err(error) => error,
                };
                self.uncount_session();
                if let Some(time @ Duration::ZERO) = remaining() {
                    return Err(ReadError::Deadline(time));
                }
                sessions = self.sessions();
                sessions.on_start_error(error)?;
                continue;
            }
            sessions = match remaining() {
                Some(time) if time.is_zero() => return Err(ReadError::Deadline(time)),
                Some(time) => {
                    let waited = self.changed.wait_timeout(sessions, time);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(sessions).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Makes a session idle.
    fn put_back(&self, session: Session) {
        self.sessions().idle.push(session);
        self.changed.notify_one();
    }

    /// Drops a session that can't be used any more.
    fn discard(&self, session: Session) {
        drop(session);
        self.uncount_session();
    }

    /// Records that there is one session fewer. Another call may make a new one.
    fn uncount_session(&self) {
        self.sessions().count -= 1;
        self.changed.notify_one();
    }
}

impl Sessions {
    /// Handles an error of a session that could not be made. Returns the error of the call, or
    /// success if the call may wait for another session.
    fn on_start_error(&mut self, error: SessionError) -> Result<(), ReadError> {
        match error {
            // The targets have no queues for more sessions than there are. The call waits for one
            // of these.
            SessionError::NoQueue { .. } if self.count > 0 => {
                self.count_max = self.count;
                Ok(())
            }
            SessionError::NoQueue { target, queues } => {
                Err(StreamError::NoQueue { target, queues }.into())
            }
            SessionError::Other(StreamError::Target { target, source, .. }) => {
                Err(ReadError::Call { target, source })
            }
            SessionError::Other(error) => Err(error.into()),
        }
    }
}
