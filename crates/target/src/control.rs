//! The order that all reactors have been given.

use crate::mail::Mailboxes;
use crate::sync::{AtomicU8, Ordering};

/// What all reactors are told to do.
#[derive(Debug)]
pub(crate) struct Control(AtomicU8);

/// Go on; finish what is under way and end; end as if killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
#[repr(u8)]
pub(crate) enum Order {
    Run = 0,
    Finish = 1,
    Die = 2,
}

impl Control {
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(Order::Run as u8))
    }

    /// Gives an order to all, asleep or not.
    pub(crate) fn give<M>(&self, order: Order, mail: &Mailboxes<M>) {
        self.0.fetch_max(order as u8, Ordering::Release);
        mail.wake_all();
    }

    pub(crate) fn order(&self) -> Order {
        match self.0.load(Ordering::Acquire) {
            0 => Order::Run,
            1 => Order::Finish,
            _ => Order::Die,
        }
    }
}
