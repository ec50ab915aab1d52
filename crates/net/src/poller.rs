//! Waiting for many descriptors at once, and being woken from another thread.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::epoll_wait::{epoll_wait, timespec};
use crate::sync::Event as WakeEvent;
use crate::wake::Wake;

/// The largest number of events that one call of [`Poller::wait`] takes from the kernel. The next call
/// takes the rest.
pub const EVENTS_MAX: usize = 64;

/// The token of the waker. Callers may not use it.
const WAKER_TOKEN: u64 = u64::MAX;

/// The reason why waiting failed. The process lacks descriptors, or there is a bug.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {source}")]
pub struct PollerError {
    /// The operation that failed.
    pub what: &'static str,
    /// The kernel's error.
    pub source: io::Error,
}

/// The events to report. Errors and hang-ups are always reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Something can be received.
    Read,
    /// Something can be sent.
    Write,
    /// Both events.
    Both,
}

/// An event of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The token with which the descriptor was added.
    pub token: u64,
    /// Data, the end of the connection or an error can be received.
    pub readable: bool,
    /// Data can be sent, or sending will return the error.
    pub writable: bool,
}

/// An epoll instance with a waker. It is level-triggered (except [`add_edge`](Poller::add_edge)):
/// an event is reported again until it is handled, and the end of a connection until the descriptor
/// is removed or closed.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    wake: Arc<Wake>,
}

/// Interrupts a [`Poller`]'s wait from any thread. Cheap to clone, and cheap to call if the poller
/// has been woken already.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Wake>);

impl Poller {
    /// # Errors
    /// [`PollerError`], if the process has no descriptors left.
    pub fn new() -> Result<Self, PollerError> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(failed("create a poller"))?;
        let wake = Wake::new(WakeEvent::new().map_err(failed("create a waker"))?);
        epoll::add(&epoll, wake.event(), EventData::new_u64(WAKER_TOKEN), EventFlags::IN)
            .map_err(failed("watch the waker"))?;
        Ok(Self { epoll, wake: Arc::new(wake) })
    }

    /// A handle that interrupts [`wait`](Poller::wait).
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.wake))
    }

    /// Whether a [`Waker`] has called since the last [`wait`](Poller::wait). This costs one load, so a
    /// loop can poll it without a system call. Only `wait` resets it, also with a timeout of zero.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.wake.is_pending()
    }

    /// Watches a descriptor. Closing it ends the watch, as long as no duplicate of it is open.
    ///
    /// # Errors
    /// [`PollerError`], if it is watched already, or is a plain file.
    ///
    /// # Panics
    /// On the reserved token `u64::MAX`.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<(), PollerError> {
        assert_ne!(token, WAKER_TOKEN, "this token is the waker's");
        epoll::add(&self.epoll, fd, EventData::new_u64(token), event_flags(interest))
            .map_err(failed("watch a descriptor"))
    }

    /// Watches a descriptor that is never read, such as a drive's eventfd. Each change is reported
    /// once (edge-triggered).
    ///
    /// # Errors
    /// [`PollerError`], if it is watched already, or is a plain file.
    ///
    /// # Panics
    /// On the reserved token `u64::MAX`.
    pub fn add_edge(&self, fd: impl AsFd, token: u64) -> Result<(), PollerError> {
        assert_ne!(token, WAKER_TOKEN, "this token is the waker's");
        epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN | EventFlags::ET)
            .map_err(failed("watch a descriptor"))
    }

    /// Changes the events to report.
    ///
    /// # Errors
    /// [`PollerError`], if the descriptor is not watched.
    ///
    /// # Panics
    /// On the reserved token `u64::MAX`.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<(), PollerError> {
        assert_ne!(token, WAKER_TOKEN, "this token is the waker's");
        epoll::modify(&self.epoll, fd, EventData::new_u64(token), event_flags(interest))
            .map_err(failed("change the watch on a descriptor"))
    }

    /// Ends a watch.
    ///
    /// # Errors
    /// [`PollerError`], if the descriptor is not watched.
    pub fn remove(&self, fd: impl AsFd) -> Result<(), PollerError> {
        epoll::delete(&self.epoll, fd).map_err(failed("end the watch on a descriptor"))
    }

    /// Waits until an event occurs, a [`Waker`] calls, or `timeout` (`None`: no limit; zero: no
    /// wait) has passed. Fills `events` (cleared first) and returns whether it was woken.
    ///
    /// A signal ends the wait early, without events: callers loop anyway, and a program that is
    /// asked to stop should check at once.
    ///
    /// # Errors
    /// [`PollerError`], only on a bug.
    pub fn wait(
        &self,
        events: &mut Vec<Event>,
        timeout: Option<Duration>,
    ) -> Result<bool, PollerError> {
        events.clear();
        let no_event = epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let mut kernel_events = [no_event; EVENTS_MAX];
        let count = match epoll_wait(self.epoll.as_fd(), &mut kernel_events, timeout) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(error) => return Err(failed("wait for events")(error)),
        };
        let mut was_woken = false;
        for event in &kernel_events[..count] {
            // The braces copy the field, because the struct is packed.
            let (token, flags) = ({ event.data }.u64(), event.flags);
            if token == WAKER_TOKEN {
                self.wake.receive();
                was_woken = true;
                continue;
            }
            // After an error or a hang-up, the caller's receive or send returns the error. So both are
            // reported as possible.
            let is_broken = flags.intersects(EventFlags::ERR | EventFlags::HUP);
            events.push(Event {
                token,
                readable: is_broken || flags.intersects(EventFlags::IN | EventFlags::RDHUP),
                writable: is_broken || flags.contains(EventFlags::OUT),
            });
        }
        Ok(was_woken)
    }
}

impl AsFd for Poller {
    /// The epoll descriptor. It is readable when [`Poller::wait`] would return, so that a poller
    /// can be part of another event loop.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Waker {
    /// Makes the poller's current wait return, or the next one. Several calls before that count as
    /// one.
    pub fn wake(&self) {
        self.0.notify();
    }
}

/// Waits until one descriptor can be read, or has ended or failed. Returns false after `timeout` and
/// after a signal.
///
/// # Errors
/// The kernel is out of memory.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    wait_one(fd, PollFlags::IN, timeout)
}

/// Waits until one descriptor can be written, or has failed. Returns false after `timeout` and after a
/// signal.
///
/// # Errors
/// The kernel is out of memory.
pub fn wait_writable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    wait_one(fd, PollFlags::OUT, timeout)
}

fn wait_one(fd: BorrowedFd<'_>, events: PollFlags, timeout: Duration) -> io::Result<bool> {
    match poll(&mut [PollFd::from_borrowed_fd(fd, events)], Some(&timespec(timeout))) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// The events of an interest, in the kernel's format.
fn event_flags(interest: Interest) -> EventFlags {
    let read = EventFlags::IN | EventFlags::RDHUP;
    match interest {
        Interest::Read => read,
        Interest::Write => EventFlags::OUT,
        Interest::Both => read | EventFlags::OUT,
    }
}

/// Makes the function that turns an error of the kernel into the error of an operation.
fn failed<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> PollerError {
    move |source| PollerError { what, source: source.into() }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::socket::tests::pair;

    const SOON: Option<Duration> = Some(Duration::from_secs(60));

    #[test]
    fn reports_readable_and_writable_descriptors() {
        let poller = Poller::new().unwrap();
        let (near, far) = pair();
        let mut events = Vec::new();
        poller.add(&near, 1, Interest::Read).unwrap();
        poller.add(&far, 2, Interest::Read).unwrap();
        assert!(!poller.wait(&mut events, Some(Duration::ZERO)).unwrap());
        assert_eq!(events, []);

        near.send([&b"x"[..]]).unwrap();
        poller.wait(&mut events, SOON).unwrap();
        let read = Event { token: 2, readable: true, writable: false };
        assert_eq!(events, [read]);
        // Level-triggered: unread, so reported again.
        poller.wait(&mut events, SOON).unwrap();
        assert_eq!(events, [read]);

        poller.modify(&far, 7, Interest::Both).unwrap();
        poller.wait(&mut events, SOON).unwrap();
        assert_eq!(events, [Event { token: 7, readable: true, writable: true }]);
        poller.remove(&far).unwrap();
        poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert_eq!(events, []);
        assert!(poller.remove(&far).is_err(), "not watched any more");
        assert!(poller.add(&near, 3, Interest::Read).is_err(), "already watched");
    }

    #[test]
    fn the_end_of_a_connection_is_readable() {
        let poller = Poller::new().unwrap();
        let (near, far) = pair();
        poller.add(&near, 5, Interest::Read).unwrap();
        drop(far);
        let mut events = Vec::new();
        poller.wait(&mut events, SOON).unwrap();
        assert_eq!(events.len(), 1);
        assert!(events[0].token == 5 && events[0].readable);
    }

    #[test]
    fn an_edge_is_reported_once_per_change() {
        let poller = Poller::new().unwrap();
        let drive = WakeEvent::new().unwrap();
        poller.add_edge(&drive, 9).unwrap();
        let mut events = Vec::new();
        for _ in 0..2 {
            drive.signal();
            poller.wait(&mut events, SOON).unwrap();
            assert_eq!(events.len(), 1);
            assert!(events[0].token == 9 && events[0].readable);
            poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
            assert_eq!(events, [], "reported already");
        }
    }

    #[test]
    fn short_timeouts_end_and_take_their_time() {
        let poller = Poller::new().unwrap();
        let mut events = Vec::new();
        for wait in [1_500_000, 300_000, 2_000_000] {
            let start = crate::now_ns();
            assert!(!poller.wait(&mut events, Some(Duration::from_nanos(wait))).unwrap());
            assert!(crate::now_ns() - start >= wait, "returned before its time");
        }
    }

    #[test]
    fn a_wake_before_the_wait_is_not_lost() {
        let poller = Poller::new().unwrap();
        let waker = poller.waker();
        assert!(!poller.is_woken());
        waker.wake();
        waker.wake();
        assert!(poller.is_woken());
        let mut events = Vec::new();
        assert!(poller.wait(&mut events, SOON).unwrap());
        assert!(!poller.is_woken());
        assert!(
            !poller.wait(&mut events, Some(Duration::ZERO)).unwrap(),
            "two wakes before the wait are one"
        );
        waker.wake();
        assert!(poller.wait(&mut events, SOON).unwrap());
    }

    #[test]
    fn no_wake_is_ever_lost_across_threads() {
        // Each waker thread increments its count and wakes; the poller's thread may sleep and must
        // still see every count. A lost wake-up shows as the 10 s limit.
        const THREADS: u64 = 3;
        const EACH: u64 = 5_000;
        let poller = Poller::new().unwrap();
        let work = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (waker, work) = (poller.waker(), Arc::clone(&work));
                std::thread::spawn(move || {
                    for i in 0..EACH {
                        work.fetch_add(1, Ordering::SeqCst);
                        waker.wake();
                        if i % 64 == 0 {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut events = Vec::new();
        while work.load(Ordering::SeqCst) < THREADS * EACH {
            assert!(poller.wait(&mut events, SOON).unwrap(), "a wake was lost");
        }
        for thread in threads {
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_poller_is_part_of_another_event_loop() {
        let poller = Poller::new().unwrap();
        assert!(!wait_readable(poller.as_fd(), Duration::ZERO).unwrap());
        poller.waker().wake();
        assert!(wait_readable(poller.as_fd(), Duration::from_secs(10)).unwrap());
    }

    #[test]
    #[should_panic(expected = "the waker's")]
    fn the_wakers_token_is_reserved() {
        let (near, _far) = pair();
        let _ = Poller::new().unwrap().add(&near, u64::MAX, Interest::Read);
    }
}
