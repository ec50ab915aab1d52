//! The state that all connections of a target share, and the end of its service.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use riopipe_order::region::RegionError;
use riopipe_session::target::Shared;

use crate::log::{Log, WatchedPart};

/// The state that all connections of all reactors share, behind its lock.
pub(crate) type SharedState = Arc<Mutex<Shared<WatchedPart>>>;

/// Locks the shared state, also after a panic of a thread that held the lock. The state is then
/// still consistent, because every change of it is complete before anything that could panic.
pub(crate) fn lock(shared: &SharedState) -> MutexGuard<'_, Shared<WatchedPart>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time limit for writing back a log without volumes when the target stops. A disk that takes
/// longer has failed, or will fail soon.
const BASE_WRITE_BACK_TIME: Duration = Duration::from_secs(60);

/// The time limit has a second more for each of this many bytes of volumes. Even a slow disk writes
/// more in a second.
const WRITE_BACK_BYTES_PER_SECOND: usize = 32 << 20;

/// The time limit for writing back the bytes in `used`.
fn write_back_time_max(used: &[Range<usize>]) -> Duration {
    let bytes: usize = used.iter().map(ExactSizeIterator::len).sum();
    BASE_WRITE_BACK_TIME + Duration::from_secs((bytes / WRITE_BACK_BYTES_PER_SECOND) as u64)
}

/// Ends the service of a log in order, and writes the log back. After that the log is valid in
/// every later boot (trap T24). A write-back that exceeds the time limit continues in the
/// background.
pub(crate) fn end_service(shared: &SharedState, log: &Arc<Log>) -> Result<(), RegionError> {
    let (shared, log) = (Arc::clone(shared), Arc::clone(log));
    let used = lock(&shared).volumes().log_used();
    run_within(write_back_time_max(&used), move || {
        lock(&shared).end_service(riopipe_platform::now_ns(), || log.sync(&used))
    })
}

/// Runs an operation that may hang, in a thread of its own. Waits at most `limit` for its result.
fn run_within(
    limit: Duration,
    operation: impl FnOnce() -> Result<(), RegionError> + Send + 'static,
) -> Result<(), RegionError> {
    let (result_sender, result_receiver) = mpsc::channel();
    let thread = std::thread::Builder::new().name("log-end".into()).spawn(move || {
        // Sending fails if the time limit has passed, because nothing receives any more.
        let _ = result_sender.send(operation());
    });
    thread.map_err(|error| RegionError::new(format!("no thread for it: {error}")))?;
    result_receiver.recv_timeout(limit).unwrap_or_else(|_| {
        Err(RegionError::new(format!("its disk has not taken it within {} s", limit.as_secs_f64())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_for_a_write_back_grows_with_its_bytes() {
        assert_eq!(write_back_time_max(std::slice::from_ref(&(0..8192))), BASE_WRITE_BACK_TIME);
        let used = [0..8192, 8192..(16 << 30) + 8192, 32 << 30..48 << 30];
        assert_eq!(write_back_time_max(&used), BASE_WRITE_BACK_TIME + Duration::from_secs(1024));
    }

    #[test]
    fn an_operation_that_hangs_ends_at_its_time_limit() {
        let (_hold, held) = mpsc::channel::<()>();
        let error = run_within(Duration::from_millis(1), move || {
            let _ = held.recv();
            Ok(())
        });
        assert!(error.unwrap_err().to_string().contains("not taken it"));
        let failed = || Err(RegionError::new("no"));
        assert_eq!(run_within(BASE_WRITE_BACK_TIME, failed), failed());
        assert_eq!(run_within(BASE_WRITE_BACK_TIME, || Ok(())), Ok(()));
    }
}
