//! The thread of the background work.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::Fs;

use super::convert::now;

/// The pause after an error. The file system is read-only then.
const ERROR_PAUSE: Duration = Duration::from_secs(5);

/// The longest pause between two calls. [`Fs::set_waker`] ends it when a commit is due earlier.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The thread that calls [`Fs::tick`] when it is due. Dropping it stops the thread.
pub struct Ticker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_stopped: bool,
    /// The file system has work before its time.
    is_woken: bool,
}

impl Ticker {
    /// Starts the thread.
    ///
    /// # Errors
    /// This process can't start a thread.
    pub fn start(fs: Arc<Fs>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let woken = Arc::downgrade(&shared);
        fs.set_waker(Arc::new(move || {
            if let Some(shared) = woken.upgrade() {
                shared.state.lock().unwrap_or_else(PoisonError::into_inner).is_woken = true;
                shared.changed.notify_all();
            }
        }));
        let own = Arc::clone(&shared);
        let run = move || {
            let mut has_failed = false;
            loop {
                let pause = match fs.tick(now()) {
                    Ok(next) => until(next),
                    Err(error) => {
                        if !has_failed {
                            tracing::error!(%error, "the file system is read-only from now on");
                        }
                        has_failed = true;
                        ERROR_PAUSE
                    }
                };
                let state = own.state.lock().unwrap_or_else(PoisonError::into_inner);
                let is_idle = |state: &mut State| !state.is_stopped && !state.is_woken;
                let waited = own.changed.wait_timeout_while(state, pause, is_idle);
                let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
                state.is_woken = false;
                if state.is_stopped {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("riofs-tick".to_owned()).spawn(run)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Stops the thread, and waits until it has ended.
    pub fn stop(self) {}
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).is_stopped = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic has been reported already.
            let _ = thread.join();
        }
    }
}

/// The time until `at`, at most [`PAUSE_MAX`].
fn until(at: Time) -> Duration {
    let now = now();
    let nanos = i128::from(at.seconds - now.seconds) * 1_000_000_000 + i128::from(at.nanos)
        - i128::from(now.nanos);
    Duration::from_nanos(nanos.clamp(1_000_000, PAUSE_MAX.as_nanos() as i128) as u64)
}
