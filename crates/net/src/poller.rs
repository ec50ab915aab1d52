//! Waiting for many descriptors at once, and being woken from another thread.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::sync::Event as WakeEvent;
use crate::wake::Wake;

/// Events taken from the kernel per call; the rest come with the next.
const EVENTS_MAX: usize = 64;

/// The waker's own token. Callers may not use it.
const WAKE: u64 = u64::MAX;

/// Why waiting failed. Only a lack of descriptors or a bug does this.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {source}")]
pub struct PollerError {
    /// What was tried.
    pub what: &'static str,
    /// What the kernel said.
    pub source: io::Error,
}

/// What to be told of. Errors and hang-ups are always told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Something can be received.
    Read,
    /// Something can be sent.
    Write,
    /// Both.
    Both,
}

/// What happened to one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The token it was added with.
    pub token: u64,
    /// Something, an end or an error can be received.
    pub readable: bool,
    /// Something can be sent, or sending will tell the error.
    pub writable: bool,
}

/// An epoll instance with a waker. Level-triggered (but see [`add_edge`](Poller::add_edge)):
/// what is not dealt with is told again, and so is
/// the end of a connection, until the descriptor is removed or closed.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    wake: Arc<Wake>,
}

/// Interrupts a [`Poller`]'s wait from any thread. Cheap to clone, and cheap to call when the
/// poller has been woken already.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Wake>);

impl Poller {
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> Result<Self, PollerError> {
        // SAFETY: takes a flag, returns a new descriptor or -1.
        let epoll = own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
            .map_err(failed("create a poller"))?;
        let event = WakeEvent::new().map_err(failed("create a waker"))?;
        let poller = Self { epoll, wake: Arc::new(Wake::new(event)) };
        poller
            .control(libc::EPOLL_CTL_ADD, poller.wake.event().as_fd(), WAKE, libc::EPOLLIN as u32)
            .map_err(failed("watch the waker"))?;
        Ok(poller)
    }

    /// A handle that interrupts [`wait`](Poller::wait).
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.wake))
    }

    /// Whether a [`Waker`] has called since the last [`wait`](Poller::wait): one load, for loops
    /// that spin and would rather not ask the kernel each time. Does not reset it: `wait` with a
    /// timeout of zero does.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.wake.is_called()
    }

    /// Watches a descriptor. Closing it ends the watch by itself, as long as no duplicate of it is
    /// open.
    ///
    /// # Errors
    /// When it is watched already, or is a plain file.
    ///
    /// # Panics
    /// On the reserved token `u64::MAX`.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<(), PollerError> {
        assert_ne!(token, WAKE, "this token is the waker's");
        self.control(libc::EPOLL_CTL_ADD, fd.as_fd(), token, mask(interest))
            .map_err(failed("watch a descriptor"))
    }

    /// Watches a descriptor that is never read, such as a drive's eventfd: told once each time
    /// something new has come, not as long as something is there (edge-triggered).
    ///
    /// # Errors
    /// When it is watched already, or is a plain file.
    ///
    /// # Panics
    /// On the reserved token `u64::MAX`.
    pub fn add_edge(&self, fd: impl AsFd, token: u64) -> Result<(), PollerError> {
        assert_ne!(token, WAKE, "this token is the waker's");
        let bits = (libc::EPOLLIN | libc::EPOLLET) as u32;
        self.control(libc::EPOLL_CTL_ADD, fd.as_fd(), token, bits)
            .map_err(failed("watch a descriptor"))
    }

    /// Changes what to be told of.
    ///
    /// # Errors
    /// When the descriptor is not watched.
    ///
    /// # Panics
    /// On the reserved token `u64::MAX`.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<(), PollerError> {
        assert_ne!(token, WAKE, "this token is the waker's");
        self.control(libc::EPOLL_CTL_MOD, fd.as_fd(), token, mask(interest))
            .map_err(failed("change the watch on a descriptor"))
    }

    /// Ends a watch.
    ///
    /// # Errors
    /// When the descriptor is not watched.
    pub fn remove(&self, fd: impl AsFd) -> Result<(), PollerError> {
        self.control(libc::EPOLL_CTL_DEL, fd.as_fd(), 0, 0)
            .map_err(failed("end the watch on a descriptor"))
    }

    /// Waits until something happens, a [`Waker`] calls, or `timeout` (`None`: for ever; zero:
    /// just looks) has passed; fills `events` (cleared first) and tells whether it was woken.
    ///
    /// Returns early, with nothing, when a signal arrives: callers loop anyway, and a program that
    /// is asked to stop should look at once.
    ///
    /// # Errors
    /// Only on a bug.
    pub fn wait(
        &self,
        events: &mut Vec<Event>,
        timeout: Option<Duration>,
    ) -> Result<bool, PollerError> {
        events.clear();
        let mut raw = [libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX];
        let count = match epoll_wait(self.epoll.as_fd(), &mut raw, timeout) {
            Ok(count) => count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
            Err(e) => return Err(failed("wait for events")(e)),
        };
        let mut woken = false;
        for event in &raw[..count] {
            let (token, bits) = (event.u64, event.events);
            if token == WAKE {
                self.wake.hear();
                woken = true;
                continue;
            }
            // An error or a hang-up is told as both: the receive or the send will say which.
            let broken = bits & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0;
            events.push(Event {
                token,
                readable: broken || bits & (libc::EPOLLIN | libc::EPOLLRDHUP) as u32 != 0,
                writable: broken || bits & libc::EPOLLOUT as u32 != 0,
            });
        }
        Ok(woken)
    }

    fn control(&self, op: i32, fd: BorrowedFd<'_>, token: u64, bits: u32) -> io::Result<()> {
        let mut event = libc::epoll_event { events: bits, u64: token };
        // SAFETY: both descriptors are open (borrowed), `event` outlives the call.
        let code =
            unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), op, fd.as_raw_fd(), &raw mut event) };
        if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsFd for Poller {
    /// The epoll descriptor: readable when [`Poller::wait`] would return, so that one poller can
    /// hang in another event loop.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Waker {
    /// Makes the poller's current wait return, or the next one if none is under way. Calls before
    /// the poller has noticed count as one.
    pub fn wake(&self) {
        self.0.call();
    }
}

/// Waits until one descriptor can be read (or has ended or failed); false after `timeout` or when a
/// signal arrives.
///
/// # Errors
/// Only when the kernel is out of memory.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    wait_one(fd, libc::POLLIN, timeout)
}

/// Waits until one descriptor can be written (or has failed); false after `timeout` or when a
/// signal arrives.
///
/// # Errors
/// Only when the kernel is out of memory.
pub fn wait_writable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    wait_one(fd, libc::POLLOUT, timeout)
}

fn wait_one(fd: BorrowedFd<'_>, events: i16, timeout: Duration) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    // SAFETY: `poll` is one valid entry and outlives the call.
    match unsafe { libc::poll(&raw mut poll, 1, milliseconds(timeout)) } {
        -1 => match io::Error::last_os_error() {
            e if e.kind() == io::ErrorKind::Interrupted => Ok(false),
            e => Err(e),
        },
        n => Ok(n > 0),
    }
}

/// With nanoseconds where the kernel has `epoll_pwait2` (5.11), else with milliseconds.
fn epoll_wait(
    epoll: BorrowedFd<'_>,
    into: &mut [libc::epoll_event],
    timeout: Option<Duration>,
) -> io::Result<usize> {
    static NO_PWAIT2: AtomicBool = AtomicBool::new(false);
    let whole_ms = timeout.is_none_or(|t| t.subsec_nanos() % 1_000_000 == 0);
    if !whole_ms && !NO_PWAIT2.load(Ordering::Relaxed) {
        let time = timeout.unwrap_or_default();
        let time = libc::timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        // SAFETY: the kernel's signature is (epfd, events, maxevents, timeout, sigmask,
        // sigsetsize); `into` and `time` outlive the call and no signal mask is given. Called by
        // number since older C libraries lack the wrapper.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                epoll.as_raw_fd(),
                into.as_mut_ptr(),
                into.len() as libc::c_int,
                &raw const time,
                std::ptr::null::<libc::sigset_t>(),
                0usize,
            )
        };
        if count >= 0 {
            return Ok(count as usize);
        }
        let error = io::Error::last_os_error();
        // EPERM: sandboxes that know the call only as unknown.
        if !matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) {
            return Err(error);
        }
        NO_PWAIT2.store(true, Ordering::Relaxed);
    }
    let timeout = timeout.map_or(-1, milliseconds);
    // SAFETY: `into` is a valid place for that many events and outlives the call.
    let count = unsafe {
        libc::epoll_wait(epoll.as_raw_fd(), into.as_mut_ptr(), into.len() as libc::c_int, timeout)
    };
    if count >= 0 { Ok(count as usize) } else { Err(io::Error::last_os_error()) }
}

/// Rounded up: a deadline must have passed when the wait returns, or callers would spin.
fn milliseconds(time: Duration) -> i32 {
    i32::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
}

fn mask(interest: Interest) -> u32 {
    let read = (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
    let write = libc::EPOLLOUT as u32;
    match interest {
        Interest::Read => read,
        Interest::Write => write,
        Interest::Both => read | write,
    }
}

fn own(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn failed(what: &'static str) -> impl FnOnce(io::Error) -> PollerError {
    move |source| PollerError { what, source }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::socket::tests::pair;

    const SOON: Option<Duration> = Some(Duration::from_secs(60));

    #[test]
    fn tells_who_can_be_read_and_written() {
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
        // Level-triggered: unread, hence told again.
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
    fn an_edge_is_told_once_and_again_when_more_comes() {
        let poller = Poller::new().unwrap();
        let drive = WakeEvent::new().unwrap();
        poller.add_edge(&drive, 9).unwrap();
        let mut events = Vec::new();
        for _ in 0..2 {
            drive.ring();
            poller.wait(&mut events, SOON).unwrap();
            assert_eq!(events.len(), 1);
            assert!(events[0].token == 9 && events[0].readable);
            poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
            assert_eq!(events, [], "told already");
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
    fn milliseconds_are_rounded_up() {
        let ms = |ns| milliseconds(Duration::from_nanos(ns));
        assert_eq!([ms(0), ms(1), ms(1_000_000), ms(1_000_001)], [0, 1, 1, 2]);
        assert_eq!(milliseconds(Duration::MAX), i32::MAX);
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
        // Each waker thread counts up and wakes; the poller's thread sleeps for as long as it
        // likes and must still see every count. A lost wake-up shows as the 10 s limit.
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
    fn a_poller_hangs_in_another_event_loop() {
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
