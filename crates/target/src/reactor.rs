//! The loop of one core: sockets, drives, mail, time.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use riopipe_media::Queue;
use riopipe_net::{
    AcceptError, Event, Interest, Listener, Next, Poller, PollerError, SpinPolicy, Waiter,
};
use riopipe_session::stages::Stages;
use riopipe_session::target::ConnId;

use crate::control::{Control, Order};
use crate::counters::Counters;
use crate::devices::{Devices, SharedState};
use crate::link::Link;
use crate::log::Log;
use crate::mail::{Mail, Mailboxes, Reader};
use crate::places::{Place, Places};

/// Tokens of the poller: connections count from 0.
const LISTENER: u64 = 1 << 62;
const DRIVE: u64 = 1 << 61;

/// Sockets that were active so recently are looked at directly while spinning: an `epoll_wait`
/// would only add a system call.
const HOT_NS: u64 = 500_000;
/// Hot sockets at most; with more, asking for all at once is cheaper.
const HOT_MAX: usize = 8;
/// Rounds over hot sockets between two looks at all the others.
const ROUNDS_PER_LOOK: u32 = 16;
/// How often every connection's clock is looked at while there is work.
const TICK_NS: u64 = 100_000_000;
/// How old the last look at the log's file may be when something is done that relies on it.
const WATCH_NS: u64 = 100_000_000;
/// How long nothing is accepted for want of descriptors, or of places for connections.
const ACCEPT_PAUSE_NS: u64 = 100_000_000;

/// What a reactor is made of.
pub(crate) struct Parts {
    pub(crate) index: usize,
    pub(crate) poller: Poller,
    pub(crate) queues: Vec<Box<dyn Queue>>,
    /// The first reactor listens for all.
    pub(crate) listeners: Vec<Listener>,
    pub(crate) shared: SharedState,
    pub(crate) mail: Arc<Mailboxes>,
    pub(crate) control: Arc<Control>,
    pub(crate) spin: SpinPolicy,
    pub(crate) next_conn: Arc<AtomicU64>,
    /// Of all reactors.
    pub(crate) places: Arc<Places>,
    pub(crate) log: Option<Arc<Log>>,
    /// Commands may take so long to finish once the target stops.
    pub(crate) grace_ns: u64,
    /// Its own.
    pub(crate) counters: Arc<Counters>,
    pub(crate) stages: Arc<Stages>,
}

pub(crate) struct Reactor {
    index: usize,
    poller: Poller,
    devices: Devices,
    listeners: Vec<Listener>,
    accept_after: Option<u64>,
    /// All places for connections were taken when it last asked for one.
    is_full: bool,
    places: Arc<Places>,
    links: Vec<Option<Box<Link>>>,
    /// Free places in `links`.
    free: Vec<usize>,
    /// Where each connection is in `links`: a notice must not cost a search (T28).
    by_id: HashMap<ConnId, usize>,
    /// Links that something was done to in this round.
    touched: Vec<usize>,
    hot: Vec<usize>,
    mail: Arc<Mailboxes>,
    control: Arc<Control>,
    waiter: Waiter,
    next_conn: Arc<AtomicU64>,
    log: Option<Arc<Log>>,
    next_watch: u64,
    next_tick: u64,
    grace_ns: u64,
    /// Stopping: everything still there then is cut off.
    stop_at: Option<u64>,
}

impl Reactor {
    pub(crate) fn new(parts: Parts) -> Result<Self, PollerError> {
        let mail = Arc::clone(&parts.mail);
        let Parts { queues, shared, counters, stages, .. } = parts;
        let devices = Devices::new(queues, shared, mail, counters, stages);
        for (i, listener) in parts.listeners.iter().enumerate() {
            parts.poller.add(listener, LISTENER + i as u64, Interest::Read)?;
        }
        for (i, fd) in devices.event_fds().enumerate() {
            // SAFETY: the queue owns the descriptor and lives as long as the reactor, whose
            // poller only watches it.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            parts.poller.add_edge(fd, DRIVE + i as u64)?;
        }
        Ok(Self {
            index: parts.index,
            poller: parts.poller,
            devices,
            listeners: parts.listeners,
            accept_after: None,
            is_full: false,
            places: parts.places,
            links: Vec::new(),
            free: Vec::new(),
            by_id: HashMap::new(),
            touched: Vec::new(),
            hot: Vec::new(),
            mail: parts.mail,
            control: parts.control,
            waiter: Waiter::new(parts.spin),
            next_conn: parts.next_conn,
            log: parts.log,
            next_watch: 0,
            next_tick: 0,
            grace_ns: parts.grace_ns,
            stop_at: None,
        })
    }

    /// Runs until told to end and everything is drained.
    pub(crate) fn run(mut self) -> Result<(), PollerError> {
        let mut events = Vec::new();
        let mut rounds = 0;
        loop {
            self.devices.now = riopipe_media::now();
            self.watch_log();
            match self.control.order() {
                Order::Run => {}
                Order::Die => return Ok(()),
                Order::Finish => {
                    if self.wind_up() {
                        return Ok(());
                    }
                }
            }
            let mut busy = false;
            if self.poller.is_woken() {
                busy |= self.look(&mut events, Some(Duration::ZERO))?;
            }
            for i in 0..self.hot.len() {
                busy |= self.receive(self.hot[i]);
            }
            rounds += 1;
            if self.hot.is_empty() || rounds >= ROUNDS_PER_LOOK {
                rounds = 0;
                busy |= self.look(&mut events, Some(Duration::ZERO))?;
            }
            busy |= self.poll_drives();
            self.finish_round();
            if self.devices.now >= self.next_tick {
                self.tick();
            }
            if busy {
                self.waiter.worked();
                continue;
            }
            match self.waiter.idle(self.devices.now) {
                Next::Look => self.waiter.relax(),
                Next::Sleep => {
                    self.hot.clear();
                    let timeout = self.until_next_deadline();
                    if self.look(&mut events, timeout)? {
                        self.waiter.worked();
                    }
                    self.finish_round();
                }
            }
        }
    }

    /// Asks which sockets have something; deals with it. Says whether there was anything.
    fn look(
        &mut self,
        events: &mut Vec<Event>,
        timeout: Option<Duration>,
    ) -> Result<bool, PollerError> {
        let woken = self.poller.wait(events, timeout)?;
        if timeout != Some(Duration::ZERO) {
            self.devices.now = riopipe_media::now();
            self.watch_log();
        }
        // Whichever look takes the wake-up reads the mail, and after it: else one is slept over. It
        // counts as work even without mail, so that the order it may be for is asked for once more
        // before anybody sleeps.
        let mut any = woken;
        if woken {
            self.read_mail();
        }
        for event in events.iter() {
            if event.token >= LISTENER {
                any |= self.accept((event.token - LISTENER) as usize);
            } else if event.token >= DRIVE {
                any = true;
            } else {
                let at = event.token as usize;
                if event.writable {
                    self.send(at);
                }
                if event.readable {
                    any |= self.receive(at);
                    self.warm(at);
                }
            }
        }
        Ok(any)
    }

    fn warm(&mut self, at: usize) {
        if !self.hot.contains(&at) && self.hot.len() < HOT_MAX {
            self.hot.push(at);
        }
    }

    fn accept(&mut self, listener: usize) -> bool {
        if self.accept_after.is_some() {
            return false;
        }
        let mut any = false;
        loop {
            let Some(listener) = self.listeners.get(listener) else {
                return any;
            };
            let Some(place) = self.places.take() else {
                self.full();
                return any;
            };
            match listener.accept() {
                Ok(Some(socket)) => {
                    any = true;
                    self.is_full = false;
                    self.add(socket, place);
                }
                Ok(None) => return any,
                Err(error) => {
                    tracing::error!(%error, "accept failed");
                    if matches!(error, AcceptError::Exhausted { .. }) {
                        self.pause_accepting();
                        return any;
                    }
                }
            }
        }
    }

    /// There is no place for another connection. Whoever knocks waits in the kernel's queue, which
    /// has a bound of its own. Places come free on any reactor, and none tells this one: it looks
    /// again after a while.
    fn full(&mut self) {
        if !self.is_full {
            self.is_full = true;
            let max = self.places.max();
            tracing::warn!(
                "{max} connections are open, no more are accepted until one ends: raise \
                 `connections` in the configuration, or find out who opens so many"
            );
        }
        self.pause_accepting();
    }

    fn pause_accepting(&mut self) {
        self.accept_after = Some(self.devices.now + ACCEPT_PAUSE_NS);
        self.watch_listeners(false);
    }

    fn watch_listeners(&mut self, on: bool) {
        for (i, listener) in self.listeners.iter().enumerate() {
            let done = if on {
                self.poller.add(listener, LISTENER + i as u64, Interest::Read)
            } else {
                self.poller.remove(listener)
            };
            if let Err(error) = done {
                tracing::error!(%error, "a listener is no longer watched");
            }
        }
    }

    fn add(&mut self, socket: riopipe_net::Socket, place: Place) {
        let peer = socket.peer();
        let id = ConnId(self.next_conn.fetch_add(1, Ordering::Relaxed));
        tracing::debug!(%peer, conn = id.0, "accepted");
        self.take_in(Box::new(Link::new(socket, id, 0, place, self.devices.now)));
    }

    fn take_in(&mut self, mut link: Box<Link>) {
        let at = self.free.pop().unwrap_or_else(|| {
            self.links.push(None);
            self.links.len() - 1
        });
        link.conn.set_key(at as u64);
        link.watching = Interest::Read;
        if let Err(error) = self.poller.add(link.socket(), at as u64, Interest::Read) {
            tracing::error!(%error, "a connection cannot be watched and is dropped");
            link.end("it cannot be watched", &mut self.devices);
        }
        self.by_id.insert(link.conn.id(), at);
        self.links[at] = Some(link);
        self.warm(at);
        self.touched.push(at);
    }

    #[inline]
    fn receive(&mut self, at: usize) -> bool {
        let Some(link) = self.links.get_mut(at).and_then(Option::as_mut) else {
            return false;
        };
        let any = link.receive(&mut self.devices);
        if any || link.blocked || link.is_ending() {
            self.touched.push(at);
        }
        any
    }

    fn send(&mut self, at: usize) {
        if let Some(link) = self.links.get_mut(at).and_then(Option::as_mut) {
            link.send(&mut self.devices);
            self.touched.push(at);
        }
    }

    fn read_mail(&mut self) {
        let mail = Arc::clone(&self.mail);
        mail.read(self.index, self);
    }

    fn poll_drives(&mut self) -> bool {
        let (links, touched) = (&mut self.links, &mut self.touched);
        let from = touched.len();
        let count = self.devices.poll(|devices, op, result| {
            let at = op.key() as usize;
            if let Some(link) = links.get_mut(at).and_then(Option::as_mut) {
                link.conn.device_done(op, result, devices, &mut link.output);
                if touched[from..].last() != Some(&at) {
                    touched.push(at);
                }
            }
        });
        if count == 0 {
            return false;
        }
        for i in from..self.touched.len() {
            let at = self.touched[i];
            if let Some(link) = self.links.get_mut(at).and_then(Option::as_mut) {
                link.conn.settled(&mut self.devices, &mut link.output);
                link.send(&mut self.devices);
            }
        }
        true
    }

    /// Sees to the links that something was done to.
    fn finish_round(&mut self) {
        while let Some(at) = self.touched.pop() {
            let Some(link) = self.links.get_mut(at).and_then(Option::as_mut) else {
                continue;
            };
            let interest = link.interest();
            if interest != link.watching {
                link.watching = interest;
                if let Err(error) = self.poller.modify(link.socket(), at as u64, interest) {
                    tracing::error!(%error, "a connection is no longer watched");
                }
            }
            if link.placed.is_none() && link.conn.qid().is_some_and(|qid| qid != 0) {
                let reactor = self.mail.place_queue();
                link.placed = Some(reactor);
                let stays = self.stop_at.is_some() || link.is_ending() || !link.conn.is_quiet();
                if reactor != self.index && !stays {
                    self.move_to(at, reactor);
                    continue;
                }
            }
            self.drop_if_over(at);
        }
        let (links, now) = (&self.links, self.devices.now);
        self.hot.retain(|at| {
            links[*at].as_ref().is_some_and(|link| now.saturating_sub(link.active) < HOT_NS)
        });
    }

    fn move_to(&mut self, at: usize, reactor: usize) {
        if let Some(link) = self.links[at].take() {
            self.free.push(at);
            self.by_id.remove(&link.conn.id());
            if let Err(error) = self.poller.remove(link.socket()) {
                tracing::error!(%error, "a connection is watched twice");
            }
            self.mail.send(reactor, Mail::Adopt(link));
        }
    }

    fn drop_if_over(&mut self, at: usize) {
        let now = self.devices.now;
        if let Some(link) = self.links[at].take_if(|link| link.is_over(now)) {
            if let Some(reactor) = link.placed {
                self.mail.queue_gone(reactor);
            }
            self.by_id.remove(&link.conn.id());
            self.free.push(at);
        }
    }

    /// Looks at every connection's clock.
    fn tick(&mut self) {
        self.next_tick = self.devices.now + TICK_NS;
        if self.accept_after.is_some_and(|at| at <= self.devices.now) {
            self.accept_after = None;
            self.watch_listeners(true);
        }
        for at in 0..self.links.len() {
            if let Some(link) = &mut self.links[at] {
                if let Err(closed) = link.conn.tick(&mut self.devices, &mut link.output) {
                    link.end(&closed.to_string(), &mut self.devices);
                    link.send(&mut self.devices);
                }
                self.drop_if_over(at);
            }
        }
    }

    /// Looks whether the log is still there, if the last look is too long ago. Each reactor does,
    /// before it takes anything in: others may sleep. Whoever sees that it is gone tells all.
    #[inline]
    fn watch_log(&mut self) {
        if self.devices.now >= self.next_watch {
            self.next_watch = self.devices.now + WATCH_NS;
            if let Some(log) = &self.log {
                log.watch();
            }
        }
    }

    fn until_next_deadline(&self) -> Option<Duration> {
        let links = self.links.iter().flatten().filter_map(|link| link.next_deadline());
        let deadlines =
            links.chain(self.devices.next_deadline()).chain(self.accept_after).chain(self.stop_at);
        let next = deadlines.min()?;
        Some(Duration::from_nanos(next.saturating_sub(self.devices.now)))
    }

    /// Stopping: takes nothing new, lets what is under way finish, ends the connections. Says
    /// whether everything has come to rest.
    fn wind_up(&mut self) -> bool {
        if self.stop_at.is_none() {
            self.stop_at = Some(self.devices.now + self.grace_ns);
            if self.accept_after.take().is_none() {
                self.watch_listeners(false);
            }
            self.listeners.clear();
            // From now on this reactor moves no connection to another.
            self.control.winds_up(&self.mail);
        }
        // Read before the mail: once all are winding up, no connection is on its way.
        let all = self.control.all_wind_up(&self.mail);
        self.read_mail();
        let cut_off = self.stop_at.is_some_and(|at| at <= self.devices.now);
        for at in 0..self.links.len() {
            if let Some(link) = &mut self.links[at] {
                if !link.is_ending() && (cut_off || link.is_quiet()) {
                    link.end("the target stops", &mut self.devices);
                    link.send(&mut self.devices);
                }
                // Its last words are out, or will never be: a host that doesn't read doesn't
                // keep the target from stopping.
                if link.is_ending() && link.conn.is_drained() && (cut_off || link.output.is_empty())
                {
                    self.links[at] = None;
                }
            }
        }
        all && self.links.iter().all(Option::is_none) && self.devices.in_flight() == 0
    }
}

impl Reader for Reactor {
    fn adopt(&mut self, link: Box<Link>) -> ConnId {
        let id = link.conn.id();
        self.take_in(link);
        id
    }

    fn notice(&mut self, id: ConnId) {
        if let Some(&at) = self.by_id.get(&id)
            && let Some(link) = &mut self.links[at]
        {
            if let Err(closed) = link.conn.noticed(&mut self.devices, &mut link.output) {
                link.end(&closed.to_string(), &mut self.devices);
            }
            link.send(&mut self.devices);
            self.touched.push(at);
        }
    }
}

impl Drop for Reactor {
    /// However a reactor ends, the others must not wait for it.
    fn drop(&mut self) {
        if self.stop_at.is_none() {
            self.control.winds_up(&self.mail);
        }
    }
}
