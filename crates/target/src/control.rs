//! The shutdown request that all reactors of a target share.

use crate::mail::Mailboxes;
use crate::sync::{AtomicU8, Ordering};

/// The strongest shutdown request so far, as the number of a [`Shutdown`].
#[derive(Debug)]
pub(crate) struct Control(AtomicU8);

/// A shutdown request, from the weakest to the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
#[repr(u8)]
pub(crate) enum Shutdown {
    /// None: the reactors run.
    None = 0,
    /// Commands in flight finish, then the reactors end.
    Graceful = 1,
    /// The reactors end at once, as if the process were killed.
    Immediate = 2,
}

impl Control {
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(Shutdown::None as u8))
    }

    /// Requests a shutdown of all reactors, and wakes them.
    pub(crate) fn request<M>(&self, shutdown: Shutdown, mailboxes: &Mailboxes<M>) {
        self.0.fetch_max(shutdown as u8, Ordering::Release);
        mailboxes.wake_all();
    }

    /// The strongest request so far.
    pub(crate) fn shutdown(&self) -> Shutdown {
        match self.0.load(Ordering::Acquire) {
            0 => Shutdown::None,
            1 => Shutdown::Graceful,
            // `request` stores no value beyond the last one.
            _ => Shutdown::Immediate,
        }
    }
}
