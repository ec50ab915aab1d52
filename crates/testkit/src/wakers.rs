//! Wakers of tasks, and one poll of a future.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Polls a future once.
pub fn poll<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(waker))
}

/// A waker that records that it has been woken.
#[derive(Debug, Default)]
pub struct Flag(AtomicBool);

impl Flag {
    /// Whether it has been woken.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A waker that panics.
#[derive(Debug)]
pub struct Panicking;

impl Wake for Panicking {
    fn wake(self: Arc<Self>) {
        panic!("a waker that panics on purpose");
    }
}

/// A task that is dropped with its last waker, together with what it owns.
#[derive(Debug)]
pub struct Task<T> {
    _owns: T,
}

impl<T: Send + Sync + 'static> Task<T> {
    /// The only waker of a task that owns `owns`.
    pub fn waker(owns: T) -> Waker {
        Waker::from(Arc::new(Self { _owns: owns }))
    }
}

impl<T: Send + Sync + 'static> Wake for Task<T> {
    fn wake(self: Arc<Self>) {}
}
