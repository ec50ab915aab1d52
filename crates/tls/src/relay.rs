//! The thread between the network and the program's sockets.

use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use riopipe_net::{Event, Interest, Poller, PollerError, Socket, Waker, now_ns};

use crate::link::{Link, LinkEnd, MOVED_BYTES_MAX, Turn, Watched};

/// The time for the last bytes of a connection after the program has ended it, ns.
const LINGER_NS: u64 = 2_000_000_000;
/// The time after which the relay tries again when the kernel has no memory for a watch.
const RETRY: Duration = Duration::from_millis(100);

/// A relay: one thread for any number of connections. To drop it ends them all, and waits for their last bytes,
/// for 2 s at most.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// The links that the thread has not taken over yet.
    new: Mutex<Vec<Link>>,
    is_ending: AtomicBool,
}

impl Relay {
    /// Starts the thread.
    ///
    /// # Errors
    /// No descriptors or threads are left.
    pub fn start() -> io::Result<Self> {
        let poller = Poller::new().map_err(|error| error.source)?;
        let (waker, shared) = (poller.waker(), Arc::<Shared>::default());
        let links = Links {
            poller,
            shared: Arc::clone(&shared),
            places: Vec::new(),
            free: Vec::new(),
            ready: Vec::new(),
            ending: Vec::new(),
            scratch: vec![0; MOVED_BYTES_MAX].into(),
        };
        let thread = std::thread::Builder::new().name("riopipe-tls".into());
        let thread = Some(thread.spawn(move || links.run())?);
        Ok(Self { shared, waker, thread })
    }

    /// Adds the link that `make` makes of the relay's end of a new pair of sockets. Returns the program's end.
    pub(crate) fn add(
        &self,
        peer: SocketAddr,
        local: SocketAddr,
        make: impl FnOnce(UnixStream, (SocketAddr, Arc<LinkEnd>)) -> Link,
    ) -> io::Result<(Socket, Arc<LinkEnd>)> {
        let (inner, program) = UnixStream::pair()?;
        inner.set_nonblocking(true)?;
        let end = Link::new_end();
        let socket = Socket::relayed(program, peer, local, Arc::clone(&end) as _)?;
        let link = make(inner, (peer, Arc::clone(&end)));
        self.shared.new.lock().unwrap_or_else(PoisonError::into_inner).push(link);
        self.waker.wake();
        Ok((socket, end))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by the thread.
            let _ = thread.join();
        }
    }
}

/// The links of the thread.
struct Links {
    poller: Poller,
    shared: Arc<Shared>,
    places: Vec<Option<Box<Link>>>,
    free: Vec<usize>,
    /// The places of links that can go on without an event.
    ready: Vec<usize>,
    /// The places of links that the program has ended, with their time limits, ns.
    ending: Vec<(u64, usize)>,
    scratch: Box<[u8]>,
}

impl Links {
    fn run(mut self) {
        let mut events: Vec<Event> = Vec::new();
        let mut end_ns = None;
        loop {
            if self.shared.is_ending.load(Ordering::Acquire) {
                let end_ns = *end_ns.get_or_insert_with(|| now_ns() + LINGER_NS);
                if now_ns() >= end_ns || self.places.iter().all(Option::is_none) {
                    return;
                }
            }
            let new = std::mem::take(
                &mut *self.shared.new.lock().unwrap_or_else(PoisonError::into_inner),
            );
            for link in new {
                let at = self.free.pop().unwrap_or_else(|| {
                    self.places.push(None);
                    self.places.len() - 1
                });
                self.places[at] = Some(Box::new(link));
                self.turn(at);
            }
            for at in std::mem::take(&mut self.ready) {
                self.turn(at);
            }
            self.end_late();
            let timeout = match self.ready.is_empty() {
                true => self
                    .ending
                    .iter()
                    .map(|(at_ns, _)| *at_ns)
                    .chain(end_ns)
                    .min()
                    .map(|at_ns| Duration::from_nanos(at_ns.saturating_sub(now_ns()))),
                false => Some(Duration::ZERO),
            };
            if let Err(error) = self.poller.wait(&mut events, timeout) {
                tracing::error!(%error, "the relay of TLS cannot wait for events");
                std::thread::sleep(RETRY);
            }
            for event in &events {
                self.turn((event.token / 2) as usize);
            }
        }
    }

    /// Lets a link move its bytes.
    fn turn(&mut self, at: usize) {
        // An event of this round may be for a link that has ended in this round.
        let Some(Some(link)) = self.places.get_mut(at) else { return };
        let was_ending = link.is_ending();
        let turn = link.turn(&mut self.scratch);
        if turn == Turn::Over {
            return self.remove(at);
        }
        if !was_ending && link.is_ending() {
            self.ending.push((now_ns() + LINGER_NS, at));
        }
        if turn == Turn::HasMore && !self.ready.contains(&at) {
            self.ready.push(at);
        }
        if let Err(error) = watch(&self.poller, link, at) {
            tracing::error!(%error, "a connection with TLS cannot be watched, and is dropped");
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) {
        // The poller stops watching a descriptor when it is closed.
        self.places[at] = None;
        self.free.push(at);
        self.ending.retain(|(_, ending)| *ending != at);
        self.ready.retain(|ready| *ready != at);
    }

    /// Ends the links whose time for the last bytes is over.
    fn end_late(&mut self) {
        if self.ending.is_empty() {
            return;
        }
        let now = now_ns();
        let late = |(at_ns, at): &(u64, usize)| (*at_ns <= now).then_some(*at);
        for at in self.ending.iter().filter_map(late).collect::<Vec<_>>() {
            self.remove(at);
        }
    }
}

/// Has the poller watch what a link waits for. A descriptor for which nothing is awaited is not watched at
/// all: the kernel reports the end of a connection in any case, and again and again.
fn watch(poller: &Poller, link: &mut Link, at: usize) -> Result<(), PollerError> {
    let wanted = link.interest();
    let Watched { outer, inner } = link.watched;
    let change = |fd, token, from: Option<Interest>, to| match (from, to) {
        (None, None) => Ok(()),
        (None, Some(to)) => poller.add(fd, token, to),
        (Some(_), None) => poller.remove(fd),
        (Some(from), Some(to)) if from == to => Ok(()),
        (Some(_), Some(to)) => poller.modify(fd, token, to),
    };
    change(link.inner_fd(), 2 * at as u64, inner, wanted.inner)?;
    if let Some(fd) = link.outer_fd() {
        change(fd, 2 * at as u64 + 1, outer, wanted.outer)?;
    }
    link.watched = wanted;
    Ok(())
}
