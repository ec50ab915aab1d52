//! The thread for the exponentiations of authentication. One of them takes up to tens of milliseconds, and a
//! reactor serves other connections meanwhile.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use riopipe_session::auth::dh::DhJob;
use riopipe_session::target::{ConnId, Shared};

use crate::devices::ReactorMailboxes;
use crate::log::WatchedPart;
use crate::shared::{SharedState, lock};

/// A job, and the connection that waits for it.
type Work = (ConnId, DhJob);

/// The way to the thread. It begins with the first job, and ends with the last reactor.
///
/// The number of jobs that wait is bounded by the number of connections, because each connection has at
/// most one.
pub(crate) struct Exponents {
    shared: SharedState,
    mailboxes: Arc<ReactorMailboxes>,
    thread: Mutex<Option<Sender<Work>>>,
}

impl Exponents {
    pub(crate) fn new(shared: SharedState, mailboxes: Arc<ReactorMailboxes>) -> Arc<Self> {
        Arc::new(Self { shared, mailboxes, thread: Mutex::new(None) })
    }

    /// Has a job carried out. Its result goes to the connection.
    pub(crate) fn submit(&self, conn: ConnId, job: DhJob) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            *thread = self.start();
        }
        let left = match &*thread {
            Some(sender) => sender.send((conn, job)).err().map(|error| error.0),
            None => Some((conn, job)),
        };
        drop(thread);
        if let Some((conn, job)) = left {
            // There is no thread. The reactor itself is slower, and right.
            carry_out(&Arc::downgrade(&self.shared), &self.mailboxes, conn, job);
        }
    }

    fn start(&self) -> Option<Sender<Work>> {
        let (sender, receiver) = channel();
        // A job that is running when the target stops must not keep the state alive.
        let (shared, mailboxes) = (Arc::downgrade(&self.shared), Arc::clone(&self.mailboxes));
        let thread = std::thread::Builder::new()
            .name("authentication".into())
            .spawn(move || run(&receiver, &shared, &mailboxes));
        match thread {
            Ok(_) => Some(sender),
            Err(error) => {
                tracing::warn!(%error, "no thread for authentication: the reactors do its work");
                None
            }
        }
    }
}

fn run(
    receiver: &Receiver<Work>,
    shared: &Weak<Mutex<Shared<WatchedPart>>>,
    mailboxes: &ReactorMailboxes,
) {
    while let Ok((conn, job)) = receiver.recv() {
        carry_out(shared, mailboxes, conn, job);
    }
}

fn carry_out(
    shared: &Weak<Mutex<Shared<WatchedPart>>>,
    mailboxes: &ReactorMailboxes,
    conn: ConnId,
    job: DhJob,
) {
    let done = job.run();
    if let Some(shared) = shared.upgrade() {
        lock(&shared).leave_dh_done(conn, done);
        mailboxes.notify(conn);
    }
}
