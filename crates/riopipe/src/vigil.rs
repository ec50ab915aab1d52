//! Who tells targets that their host lives while a volume is being opened, made or looked at: then
//! one target may be slow, and the others must not take the silence for the host's end.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use riopipe_net::now_ns;

use crate::association::Caller;
use crate::shared::lock;

/// How long to wait before looking again at an admin queue that somebody uses: whoever waits for
/// an answer there tells the target himself.
const IN_USE_NS: u64 = 100_000_000;
/// The longest sleep, so that an association that is added is seen.
const SLEEP_NS_MAX: u64 = 1_000_000_000;

/// One thread that tells the targets of all associations it is given; until it is dropped.
#[derive(Debug)]
pub(crate) struct Vigil {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Watched {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    admins: Vec<Arc<Mutex<Caller>>>,
    over: bool,
}

impl Vigil {
    pub(crate) fn begin() -> Self {
        let watched = Arc::new(Watched::default());
        let own = Arc::clone(&watched);
        let thread = std::thread::Builder::new().name("riopipe-vigil".into());
        let thread = thread.spawn(move || own.run()).inspect_err(|error| {
            tracing::error!(%error, "no thread to keep the targets' connections alive");
        });
        Self { watched, thread: thread.ok() }
    }

    /// From now on this one's target is told, too.
    pub(crate) fn add(&self, admin: Arc<Mutex<Caller>>) {
        lock(&self.watched.state).admins.push(admin);
        self.watched.changed.notify_all();
    }
}

impl Drop for Vigil {
    fn drop(&mut self) {
        lock(&self.watched.state).over = true;
        self.watched.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panics nowhere; if it did, there is nothing left to do.
            let _ = thread.join();
        }
    }
}

impl Watched {
    fn run(&self) {
        let mut state = lock(&self.state);
        while !state.over {
            let now = now_ns();
            let next = state.admins.iter().map(|admin| attend(admin, now)).min();
            let sleep = next.unwrap_or(u64::MAX).saturating_sub(now_ns()).min(SLEEP_NS_MAX);
            let sleep = Duration::from_nanos(sleep);
            let waited = self.changed.wait_timeout(state, sleep);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Tells one target if that is due; returns when to look again.
fn attend(admin: &Mutex<Caller>, now: u64) -> u64 {
    let Ok(mut admin) = admin.try_lock() else { return now.saturating_add(IN_USE_NS) };
    match admin.keep_alive_next() {
        None => u64::MAX,
        Some(next) if now < next => next,
        Some(_) => match admin.keep_alive().and_then(|()| admin.look()) {
            Ok(()) => admin.keep_alive_next().unwrap_or(u64::MAX),
            // Whoever uses it next learns why.
            Err(_) => u64::MAX,
        },
    }
}
