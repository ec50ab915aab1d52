//! Reading a volume from any thread, beside its streams.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use riopipe_net::{SpinPolicy, Waiter};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_session::initiator::volume::state::ReserveError;

use crate::error::{ReadError, StreamError};
use crate::failure::Exhausted;
use crate::lock::lock;
use crate::options::ReaderOptions;
use crate::reading::{ReadExtent, Reads};
use crate::shared::Inner;
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
///   [`Watch`](crate::Watch) could read from the marks (P9). While a target is unreachable, or while
///   requests are replayed to it, the read waits.
/// - Of groups in flight: of each block the old content or the new, in any mixture. There is no
///   order among blocks, also not those of one group: to read a group whole, wait until it is
///   complete.
/// - Complete groups that are not durable may be lost in a crash. Before something outside of the
///   volume depends on the data that was read, wait until it is durable.
/// - A stream that failed and is [reopened](crate::Stream::reopen) has its groups beyond the prefix
///   undone; reads before that may have returned their data.
///
/// The volume stays open as long as it has a reader, unless it is [closed](crate::Volume::close).
#[derive(Clone, Debug)]
pub struct Reader(Arc<Pool>);

/// The sessions of a reader. Each call takes one for its duration.
#[derive(Debug)]
struct Pool {
    volume: Arc<Inner>,
    options: ReaderOptions,
    state: Mutex<State>,
    /// Notified when a session is put back, or when there is one fewer.
    freed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The sessions that no call uses.
    idle: Vec<Session>,
    /// Number of sessions that exist or are being made.
    made: usize,
    /// Limit of `made`. It falls if a target grants no queues for more.
    max: usize,
}

/// Connections to all targets, for one call at a time.
#[derive(Debug)]
struct Session {
    id: StreamId,
    shell: StreamShell,
    handle: Arc<StreamHandle>,
    waiter: Waiter,
    volume: Arc<Inner>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shell.close_connections();
        self.volume.forget_stream(self.id, &self.handle);
        lock(&self.volume.state).on_reader_closed(self.id);
    }
}

impl Session {
    /// Connects a new session to all targets, within `timeout` or the volume's own connect timeout,
    /// whichever is shorter.
    fn start(pool: &Pool, timeout: Option<Duration>) -> Result<Self, StartError> {
        let volume = &pool.volume;
        let (id, qids) = lock(&volume.state).reserve_reader().map_err(|error| match error {
            ReserveError::NoQueue { server, queues } => {
                StartError::NoQueue(volume.server_name(server), queues)
            }
            // No other error prevents a reader from starting.
            _ => StartError::Other(Exhausted::Descriptors.into()),
        })?;
        let started = StreamHandle::new(Seq::ZERO).map_err(|_| Exhausted::Descriptors.into());
        let started = started.and_then(|handle| {
            let timeout = timeout.unwrap_or(volume.connect.timeout).min(volume.connect.timeout);
            match start_reading(volume, id, &qids, &pool.options, timeout, &handle) {
                Ok(shell) => Ok((shell, handle)),
                Err(error) => {
                    volume.forget_stream(id, &handle);
                    Err(error)
                }
            }
        });
        let (shell, handle) = started.map_err(|error| {
            lock(&volume.state).on_reader_closed(id);
            StartError::Other(error)
        })?;
        let spin_ns = nanos(volume.connect.spin);
        let waiter = Waiter::new(SpinPolicy { spin_ns, steady: false });
        Ok(Self { id, shell, handle, waiter, volume: Arc::clone(volume) })
    }
}

/// Why a session could not be made.
enum StartError {
    /// The target has no queue left for it: its number of queues is this.
    NoQueue(crate::TargetAddr, u16),
    Other(StreamError),
}

impl Reader {
    pub(crate) fn new(volume: Arc<Inner>, options: &ReaderOptions) -> Self {
        let max = options.concurrent.clamp(1, 64);
        let options =
            ReaderOptions { queue_depth: options.queue_depth.clamp(1, 1024), ..options.clone() };
        let state = Mutex::new(State { idle: Vec::new(), made: 0, max });
        Self(Arc::new(Pool { volume, options, state, freed: Condvar::new() }))
    }

    /// Reads whole blocks at volume block `lba` into `into`, and waits for them for `timeout` at most;
    /// `None` means without limit. The possible content is described [above](Self#the-data-that-a-read-returns).
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
        if volume.is_closed() {
            return Err(ReadError::Closed);
        }
        if reads.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let left = || timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        // The errors of a session as those of this call.
        let own_error = |error| match (error, timeout) {
            // A session knows only the rest of the timeout. The caller knows the whole.
            (ReadError::Deadline(_), Some(timeout)) => ReadError::Deadline(timeout),
            (ReadError::Failed(failure), _) => {
                ReadError::Target { target: failure.target, cause: failure.cause }
            }
            (error, _) => error,
        };
        let mut session = self.0.take(&left).map_err(own_error)?;
        let result = reads.run(&mut session.shell, &mut session.waiter, left());
        let has_failed = matches!(result, Err(ReadError::Failed(_)));
        // A session with reads in flight is dropped: in the pool, no thread would receive their
        // data, and streams could not replay until then (P9).
        let is_usable = !has_failed && !session.shell.driver.has_unanswered_reads();
        self.0.put_back(is_usable.then_some(session));
        result.map_err(own_error)
    }
}

impl Pool {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes a session that no thread uses, or makes a new one if the bound allows it; else waits.
    fn take(&self, left: &dyn Fn() -> Option<Duration>) -> Result<Session, ReadError> {
        let mut state = self.state();
        loop {
            if let Some(session) = state.idle.pop() {
                return Ok(session);
            }
            if state.made < state.max {
                state.made += 1;
                drop(state);
                let error = match Session::start(self, left()) {
                    Ok(session) => return Ok(session),
                    Err(error) => error,
                };
                self.put_back(None);
                if let Some(left @ Duration::ZERO) = left() {
                    return Err(ReadError::Deadline(left));
                }
                state = self.state();
                match error {
                    // The targets have queues for no more sessions. The call waits for one of
                    // those.
                    StartError::NoQueue(..) if state.made > 0 => state.max = state.made,
                    StartError::NoQueue(target, queues) => {
                        return Err(StreamError::NoQueue { target, queues }.into());
                    }
                    StartError::Other(StreamError::Target { target, source, .. }) => {
                        return Err(ReadError::Call { target, source });
                    }
                    StartError::Other(error) => return Err(error.into()),
                }
                continue;
            }
            state = match left() {
                Some(left) if left.is_zero() => return Err(ReadError::Deadline(left)),
                Some(left) => {
                    let waited = self.freed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.freed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Puts a session back that is free; `None`: one fewer exists.
    fn put_back(&self, session: Option<Session>) {
        let mut state = self.state();
        match session {
            Some(session) => state.idle.push(session),
            None => state.made -= 1,
        }
        drop(state);
        self.freed.notify_one();
    }
}
