//! The question to all reactors whether they still run their loops: for a watchdog.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::mail::Mailboxes;

/// The last question, and the last answer of each reactor.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    /// The number of the last question.
    asked: AtomicU64,
    /// By reactor: the number of the last question that it has seen.
    answered: Vec<AtomicU64>,
}

impl Heartbeat {
    /// No question yet, for this number of reactors.
    pub(crate) fn new(reactors: usize) -> Self {
        Self {
            asked: AtomicU64::new(0),
            answered: (0..reactors).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Asks all reactors, and wakes them.
    pub(crate) fn ask<M>(&self, mailboxes: &Mailboxes<M>) {
        self.asked.fetch_add(1, Ordering::Release);
        mailboxes.wake_all();
    }

    /// Answers for a reactor. Its loop calls this when it was woken.
    pub(crate) fn answer(&self, reactor: usize) {
        self.answered[reactor].store(self.asked.load(Ordering::Acquire), Ordering::Release);
    }

    /// Whether all reactors have answered the last question.
    pub(crate) fn have_all_answered(&self) -> bool {
        let asked = self.asked.load(Ordering::Acquire);
        self.answered.iter().all(|answered| answered.load(Ordering::Acquire) == asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reactor_that_does_not_answer_is_noticed() {
        let (heartbeat, nowhere) = (Heartbeat::new(2), Mailboxes::<()>::new(Vec::new()));
        assert!(heartbeat.have_all_answered(), "nothing was asked");
        heartbeat.ask(&nowhere);
        heartbeat.answer(0);
        assert!(!heartbeat.have_all_answered(), "reactor 1 is silent");
        heartbeat.answer(1);
        assert!(heartbeat.have_all_answered());
        heartbeat.ask(&nowhere);
        assert!(!heartbeat.have_all_answered(), "earlier answers do not count");
    }
}
