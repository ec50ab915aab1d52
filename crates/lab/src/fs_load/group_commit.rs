//! Group commit: threads that come while a log is written share the next write of it.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A log that threads write together. One of them, the *leader*, writes for all that wait. It has
/// the log for itself meanwhile.
pub(super) struct GroupCommit<L> {
    state: Mutex<State<L>>,
    /// Notified when a leader has ended.
    ended: Condvar,
}

struct State<L> {
    /// The log, unless a leader writes to it.
    log: Option<L>,
    /// The records that wait, and the number of the batch in which they will be.
    waiting: usize,
    batch: u64,
    /// The last batch that is written.
    done: u64,
    /// The kind of an error that has ended the log.
    failed: Option<io::ErrorKind>,
}

impl<L> GroupCommit<L> {
    pub(super) fn new(log: L) -> Self {
        let state = State { log: Some(log), waiting: 0, batch: 1, done: 0, failed: None };
        Self { state: Mutex::new(state), ended: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<L>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a record, and returns when its batch is written. `write` writes this number of records,
    /// if the thread becomes the leader.
    ///
    /// # Errors
    /// That of `write`, for the leader. Later all threads get its kind.
    pub(super) fn commit(
        &self,
        write: impl FnOnce(&mut L, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut state = self.lock();
        state.waiting += 1;
        let batch = state.batch;
        loop {
            if let Some(kind) = state.failed {
                return Err(kind.into());
            }
            if state.done >= batch {
                return Ok(());
            }
            if let Some(log) = state.log.take() {
                return self.lead(state, log, write);
            }
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Writes the records that wait.
    fn lead(
        &self,
        mut state: MutexGuard<'_, State<L>>,
        mut log: L,
        write: impl FnOnce(&mut L, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        // The records that come from now on are in the next batch.
        let count = std::mem::take(&mut state.waiting);
        let batch = state.batch;
        state.batch += 1;
        drop(state);
        let written = write(&mut log, count);
        let mut state = self.lock();
        state.log = Some(log);
        match &written {
            Ok(()) => state.done = batch,
            Err(error) => state.failed = Some(error.kind()),
        }
        self.ended.notify_all();
        written
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_leader_writes_for_all_that_have_come_meanwhile() {
        let log = GroupCommit::new(Vec::new());
        let note = |counts: &mut Vec<usize>, count| {
            counts.push(count);
            Ok(())
        };
        thread::scope(|scope| {
            let (begun, has_begun) = mpsc::channel();
            let (end, may_end) = mpsc::channel::<()>();
            let log = &log;
            let first = scope.spawn(move || {
                log.commit(|counts, count| {
                    begun.send(()).unwrap();
                    may_end.recv().unwrap();
                    note(counts, count)
                })
            });
            has_begun.recv().unwrap();
            let others = [(); 3].map(|()| scope.spawn(move || log.commit(note)));
            while log.lock().waiting < 3 {
                thread::yield_now();
            }
            end.send(()).unwrap();
            first.join().unwrap().unwrap();
            for other in others {
                other.join().unwrap().unwrap();
            }
        });
        assert_eq!(log.lock().log, Some(vec![1, 3]));
    }

    #[test]
    fn an_error_ends_the_log_for_all() {
        let log = GroupCommit::new(());
        let full = |(): &mut (), _| Err(io::ErrorKind::StorageFull.into());
        assert_eq!(log.commit(full).unwrap_err().kind(), io::ErrorKind::StorageFull);
        let later = log.commit(|(), _| panic!("the log has ended"));
        assert_eq!(later.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
