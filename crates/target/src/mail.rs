//! Messages between the cores of the reactors.
//!
//! A reactor that has a message for another one puts it into the other's mailbox, and wakes its
//! poller. The receiver takes all messages after its poller was woken.

use riopipe_session::target::{ConnId, Message, TargetEnv};

use crate::sync::{Mutex, PoisonError, Waker};

/// The mailboxes of all reactors.
pub(crate) struct Mailboxes<M> {
    /// One mailbox for each reactor, by the reactor's index.
    boxes: Vec<Mailbox<M>>,
}

struct Mailbox<M> {
    messages: Mutex<Vec<M>>,
    waker: Waker,
}

impl<M> Mailboxes<M> {
    pub(crate) fn new(wakers: Vec<Waker>) -> Self {
        let boxes =
            wakers.into_iter().map(|waker| Mailbox { messages: Mutex::new(Vec::new()), waker });
        Self { boxes: boxes.collect() }
    }

    /// Sends a message to a reactor, and wakes it.
    pub(crate) fn send(&self, reactor: usize, message: M) {
        let mailbox = &self.boxes[reactor];
        mailbox.messages.lock().unwrap_or_else(PoisonError::into_inner).push(message);
        mailbox.waker.wake();
    }

    /// Takes all messages for a reactor, in the order in which they were sent.
    pub(crate) fn take(&self, reactor: usize) -> Vec<M> {
        let mut messages =
            self.boxes[reactor].messages.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *messages)
    }

    /// Number of reactors.
    pub(crate) fn reactor_count(&self) -> usize {
        self.boxes.len()
    }

    /// Wakes all reactors.
    pub(crate) fn wake_all(&self) {
        for mailbox in &self.boxes {
            mailbox.waker.wake();
        }
    }
}

impl<E: TargetEnv, T> Mailboxes<Message<E, T>> {
    /// Notifies all reactors of news for a connection.
    pub(crate) fn notify(&self, conn: ConnId) {
        for (reactor, message) in Message::notices(conn, self.reactor_count()) {
            self.send(reactor, message);
        }
    }

    /// Informs the other reactors that reactor `index` moves no connection to them any more.
    pub(crate) fn announce_end(&self, index: usize) {
        for (reactor, message) in Message::moves_ended(index, self.reactor_count()) {
            self.send(reactor, message);
        }
    }
}
