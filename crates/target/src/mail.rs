//! What crosses from one reactor to another: connections to take over, and wake-ups.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use riopipe_net::Waker;
use riopipe_session::target::ConnId;

use crate::link::Link;

/// One message to a reactor.
pub(crate) enum Mail {
    /// An I/O queue that is this reactor's from now on.
    Adopt(Box<Link>),
    /// A connection, if this reactor has it, should look at what was left for it.
    Notice(ConnId),
}

/// The mailboxes of all reactors.
pub(crate) struct Mailboxes {
    boxes: Vec<Mailbox>,
}

struct Mailbox {
    mail: Mutex<Vec<Mail>>,
    waker: Waker,
    /// I/O queues that the reactor carries.
    queues: AtomicUsize,
}

impl Mailboxes {
    pub(crate) fn new(wakers: Vec<Waker>) -> Self {
        let boxes = wakers.into_iter().map(|waker| Mailbox {
            mail: Mutex::default(),
            waker,
            queues: AtomicUsize::new(0),
        });
        Self { boxes: boxes.collect() }
    }

    pub(crate) fn send(&self, reactor: usize, mail: Mail) {
        let mailbox = &self.boxes[reactor];
        mailbox.mail.lock().unwrap_or_else(PoisonError::into_inner).push(mail);
        mailbox.waker.wake();
    }

    /// Tells whichever reactor has the connection: only it knows.
    pub(crate) fn notify(&self, conn: ConnId) {
        for reactor in 0..self.boxes.len() {
            self.send(reactor, Mail::Notice(conn));
        }
    }

    pub(crate) fn take(&self, reactor: usize) -> Vec<Mail> {
        let mailbox = &self.boxes[reactor];
        std::mem::take(&mut *mailbox.mail.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How many reactors there are.
    pub(crate) fn reactors(&self) -> usize {
        self.boxes.len()
    }

    pub(crate) fn wake_all(&self) {
        for mailbox in &self.boxes {
            mailbox.waker.wake();
        }
    }

    /// Chooses the reactor with the fewest I/O queues for one more.
    pub(crate) fn place_queue(&self) -> usize {
        let load = |i: &usize| self.boxes[*i].queues.load(Ordering::Relaxed);
        let reactor = (0..self.boxes.len()).min_by_key(load).unwrap_or(0);
        self.boxes[reactor].queues.fetch_add(1, Ordering::Relaxed);
        reactor
    }

    /// An I/O queue of the reactor is gone.
    pub(crate) fn queue_gone(&self, reactor: usize) {
        self.boxes[reactor].queues.fetch_sub(1, Ordering::Relaxed);
    }
}
