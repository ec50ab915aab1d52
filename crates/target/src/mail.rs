//! What crosses from one reactor to another: connections to take over, and wake-ups.

use riopipe_session::target::ConnId;

use crate::link::Link;
use crate::sync::{AtomicUsize, Mutex, Ordering, PoisonError, Waker};

/// One message to a reactor.
pub(crate) enum Mail {
    /// An I/O queue that is this reactor's from now on.
    Adopt(Box<Link>),
    /// A connection, if this reactor has it, should look at what was left for it.
    Notice(ConnId),
}

/// A reactor, as its mail knows it.
pub(crate) trait Reader {
    /// Takes a connection over.
    fn adopt(&mut self, link: Box<Link>) -> ConnId;
    /// Has a connection, if it is here, look at what was left for it.
    fn notice(&mut self, id: ConnId);
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
            mail: Mutex::new(Vec::new()),
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

    /// Hands a reactor its mail.
    pub(crate) fn read(&self, reactor: usize, reader: &mut impl Reader) {
        let mailbox = &self.boxes[reactor];
        let mail =
            std::mem::take(&mut *mailbox.mail.lock().unwrap_or_else(PoisonError::into_inner));
        for mail in mail {
            match mail {
                Mail::Adopt(link) => {
                    let id = reader.adopt(link);
                    // A notice that was posted while the connection was on its way found it on
                    // neither reactor.
                    reader.notice(id);
                }
                Mail::Notice(id) => reader.notice(id),
            }
        }
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
