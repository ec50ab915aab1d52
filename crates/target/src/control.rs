//! The order that all reactors have been given, and how far they are with it.

use crate::mail::Mailboxes;
use crate::sync::{AtomicU8, AtomicUsize, Ordering};

/// What all reactors are told to do, and how many have begun to.
#[derive(Debug)]
pub(crate) struct Control {
    order: AtomicU8,
    winding_up: AtomicUsize,
}

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
        Self { order: AtomicU8::new(Order::Run as u8), winding_up: AtomicUsize::new(0) }
    }

    /// Gives an order to all, asleep or not.
    pub(crate) fn give(&self, order: Order, mail: &Mailboxes) {
        self.order.fetch_max(order as u8, Ordering::Release);
        mail.wake_all();
    }

    /// One more reactor moves no connection to another any more.
    pub(crate) fn winds_up(&self, mail: &Mailboxes) {
        self.winding_up.fetch_add(1, Ordering::AcqRel);
        mail.wake_all();
    }

    /// Whether no connection can be on its way to a reactor except in its mail. Asked before the
    /// mail is read.
    pub(crate) fn all_wind_up(&self, mail: &Mailboxes) -> bool {
        self.winding_up.load(Ordering::Acquire) == mail.reactors()
    }

    pub(crate) fn order(&self) -> Order {
        match self.order.load(Ordering::Acquire) {
            0 => Order::Run,
            1 => Order::Finish,
            _ => Order::Die,
        }
    }
}
