//! The store's thread: it owns the data stream, submits data, and appends the records whose data is
//! durable. It also ends checkpoints.
//!
//! The thread sleeps in a wait for the stream. Callers interrupt the wait when they have data for
//! it, and the log does when the record is durable that the thread waits for.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use riopipe::{BLOCK_BYTES, Buf, Place, Stream, StreamWaker, Until, WaitError};
use riopipe_wal::{Durable, Lsn};

use crate::error::StoreFailure;
use crate::shared::{Checkpoint, Locked, Shared};
use crate::state::{EMPTY, Group, Held};

/// Wakes the thread when a record of the log is durable.
struct WakeThread(StreamWaker);

impl Wake for WakeThread {
    fn wake(self: Arc<Self>) {
        self.0.wake();
    }
}

/// The thread's state.
pub(crate) struct Orderer {
    pub(crate) stream: Stream,
    pub(crate) shared: Arc<Shared>,
    /// The record that the thread waits for.
    awaited: Option<(Lsn, Durable)>,
}

/// Reports the end of the thread, also after a panic.
struct EndReporter(Arc<Shared>);

impl Drop for EndReporter {
    fn drop(&mut self) {
        let mut locked = self.0.lock();
        if std::thread::panicking() {
            let failure = StoreFailure::Other("its thread has panicked".into());
            self.0.fail(&mut locked, failure);
        }
        let _ = locked.failure.get_or_insert(StoreFailure::Closed);
        locked.has_ended = true;
        self.0.moved.notify_all();
    }
}

impl Orderer {
    pub(crate) fn new(stream: Stream, shared: Arc<Shared>) -> Self {
        Self { stream, shared, awaited: None }
    }

    /// Runs until the store is closed, dropped, or has failed.
    pub(crate) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _end = EndReporter(Arc::clone(&shared));
        let result = self.serve();
        let Self { stream, .. } = self;
        // The stream is closed before the end is reported, so that the store can be opened again.
        let result = match result {
            Ok(true) => stream.close().map(|_| ()).map_err(StoreFailure::from),
            Ok(false) => {
                drop(stream);
                Ok(())
            }
            Err(failure) => {
                drop(stream);
                Err(failure)
            }
        };
        if let Err(failure) = result {
            shared.fail(&mut shared.lock(), failure);
        }
    }

    /// Returns whether the stream is to be closed; false: the store was dropped.
    fn serve(&mut self) -> Result<bool, StoreFailure> {
        loop {
            let marks = self.stream.poll()?;
            let shared = Arc::clone(&self.shared);
            let mut groups = Vec::new();
            {
                let mut locked = shared.lock();
                if locked.abandon {
                    return Ok(false);
                }
                if let Some(failure) = &locked.failure
                    && !matches!(failure, StoreFailure::Closed)
                {
                    return Err(failure.clone());
                }
                locked.state.on_data_durable(marks.durable.0);
                shared.append(&mut locked)?;
                locked.state.on_log_durable(shared.wal.stat().durable.0);
                self.end_checkpoint(&mut locked)?;
                while let Some(group) = locked.state.next_group() {
                    groups.push(group);
                }
                if locked.close && locked.state.is_queue_empty() && !locked.is_checkpointing {
                    return Ok(true);
                }
            }
            shared.moved.notify_all();
            if groups.is_empty() {
                match self.stream.wait(Until::Moved, None) {
                    Ok(_) | Err(WaitError::Woken) => {}
                    Err(WaitError::Failed(failure)) => return Err(failure.into()),
                    Err(error) => return Err(StoreFailure::Other(error.to_string())),
                }
            }
            for group in groups {
                let seq = self.submit(&group)?;
                shared.lock().state.on_submitted(&group, seq);
            }
        }
    }

    /// Submits a group, and waits for space if the stream has none.
    fn submit(&mut self, group: &Group) -> Result<u64, StoreFailure> {
        let other = |error: &dyn std::fmt::Display| StoreFailure::Other(error.to_string());
        // Adjacent blocks are one write.
        let adjacent = |a: &(u64, Held), b: &(u64, Held)| a.0 + 1 == b.0;
        let mut bufs: Vec<(u64, Buf)> = Vec::new();
        for run in group.blocks.chunk_by(adjacent) {
            let buf = self.stream.buf(run.len() * BLOCK_BYTES);
            let mut buf = buf.map_err(|error| other(&error))?;
            for ((_, held), block) in run.iter().zip(buf.chunks_exact_mut(BLOCK_BYTES)) {
                held.copy(0, block);
            }
            bufs.push((run[0].0, buf));
        }
        let mut staged = self.stream.group();
        for (lba, buf) in bufs {
            // Fresh: the state gives a block only if no state to which the volume may recover needs
            // its content (trap T11).
            staged = staged.write(lba, buf, Place::Fresh);
        }
        let seq = match group.is_durable {
            true => staged.submit_durable_or_wait(None),
            false => staged.submit_or_wait(None),
        };
        seq.map(|seq| seq.0).map_err(|error| other(&error))
    }

    /// Takes the next step of a checkpoint whose record is in the log, if it is due.
    fn end_checkpoint(&mut self, locked: &mut Locked) -> Result<(), StoreFailure> {
        loop {
            let Some(checkpoint) = locked.checkpoint else { return Ok(()) };
            let (Checkpoint::Snapshot(lsn) | Checkpoint::Trim(lsn)) = checkpoint;
            if !self.is_durable(lsn)? {
                return Ok(());
            }
            locked.checkpoint = match checkpoint {
                Checkpoint::Snapshot(lsn) => {
                    let wal = &self.shared.wal;
                    wal.trim(lsn).map_err(|error| StoreFailure::Other(error.to_string()))?;
                    // The trim needs a record to travel with.
                    Some(Checkpoint::Trim(wal.append(&EMPTY)?))
                }
                Checkpoint::Trim(_) => {
                    locked.is_checkpointing = false;
                    locked.checkpoints += 1;
                    None
                }
            };
        }
    }

    /// Whether this record is durable. If it is not, the log wakes the thread when it is.
    fn is_durable(&mut self, lsn: Lsn) -> Result<bool, StoreFailure> {
        let wal = &self.shared.wal;
        if self.awaited.as_ref().is_none_or(|(of, _)| *of != lsn) {
            self.awaited = Some((lsn, wal.durable(lsn)));
        }
        let Some((_, durable)) = &mut self.awaited else { return Ok(false) };
        let waker = Waker::from(Arc::new(WakeThread(self.shared.waker.clone())));
        match Pin::new(durable).poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => Ok(false),
            Poll::Ready(result) => {
                self.awaited = None;
                result.map_err(|error| StoreFailure::Other(error.to_string()))?;
                Ok(true)
            }
        }
    }
}
