//! The loop of one thread: it executes the decisions of its [`TargetCore`] with sockets, drives,
//! messages and the clock.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use riopipe_media::Queue;
use riopipe_net::{
    AdaptiveSpin, Event, IdleStep, Interest, Listener, Poller, PollerError, Received, RecvBuf,
    Socket, SpinPolicy,
};
use riopipe_session::target::{self, Action, ConnKey, CoreConfig, Input, Message, TargetCore};

use crate::control::{Control, Shutdown};
use crate::devices::{Devices, DevicesParts, Mail};
use crate::tcp::{RECEIVES_PER_TURN, Tcp};

/// The poller's token of the first listener; the others follow. The token of a connection is its key,
/// which is far below.
const LISTENER: u64 = 1 << 62;
/// The token of the first drive with an event descriptor; the others follow.
const DRIVE: u64 = 1 << 61;

/// Time in ns for which a socket is polled directly after it was active: the reactor tries to receive
/// without asking `epoll_wait` first, which saves a system call.
const HOT_NS: u64 = 500_000;
/// Largest number of directly polled sockets; with more, one `epoll_wait` is cheaper.
const HOT_MAX: usize = 8;
/// Number of rounds over these sockets between two polls of all others.
const ROUNDS_PER_POLL: u32 = 16;

/// The parts of a reactor.
pub(crate) struct Parts {
    pub(crate) core: CoreConfig,
    pub(crate) poller: Poller,
    pub(crate) queues: Vec<Box<dyn Queue>>,
    /// The first reactor listens for all.
    pub(crate) listeners: Vec<Listener>,
    pub(crate) devices: DevicesParts,
    pub(crate) control: Arc<Control>,
    pub(crate) spin: SpinPolicy,
}

/// A reactor: a thread of the target, with its core, its sockets and its drive queues.
pub(crate) struct Reactor {
    core: TargetCore<Devices, Tcp>,
    poller: Poller,
    devices: Devices,
    listeners: Vec<Listener>,
    /// The connections whose sockets are polled directly, because they were active a moment ago.
    hot: Vec<ConnKey>,
    mail: Arc<Mail>,
    control: Arc<Control>,
    spin: AdaptiveSpin,
}

impl Reactor {
    pub(crate) fn new(parts: Parts) -> Result<Self, PollerError> {
        let mail = Arc::clone(&parts.devices.mail);
        let devices = Devices::new(parts.queues, parts.devices);
        for (i, fd) in devices.event_fds().enumerate() {
            // SAFETY: the queue owns the descriptor and lives as long as the reactor, whose
            // poller only watches it.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            parts.poller.add_edge(fd, DRIVE + i as u64)?;
        }
        Ok(Self {
            core: TargetCore::new(parts.core),
            poller: parts.poller,
            devices,
            listeners: parts.listeners,
            hot: Vec::new(),
            mail,
            control: parts.control,
            spin: AdaptiveSpin::new(parts.spin),
        })
    }

    /// Runs until it is asked to end and everything is drained.
    pub(crate) fn run(mut self) -> Result<(), PollerError> {
        let mut events = Vec::new();
        let mut rounds = 0;
        loop {
            self.begin_round();
            match self.control.shutdown() {
                Shutdown::None => {}
                Shutdown::Immediate => return Ok(()),
                Shutdown::Graceful => {
                    self.core.stop(&mut self.devices);
                    self.listeners.clear();
                    // Before it sleeps: nothing that would wake it may be left.
                    self.finish_round();
                    if self.core.is_at_rest() && self.devices.in_flight() == 0 {
                        return Ok(());
                    }
                }
            }
            let mut busy = false;
            if self.poller.is_woken() {
                busy |= self.poll_sockets(&mut events, Some(Duration::ZERO))?;
            }
            for i in 0..self.hot.len() {
                busy |= self.receive(self.hot[i]);
            }
            rounds += 1;
            if self.hot.is_empty() || rounds >= ROUNDS_PER_POLL {
                rounds = 0;
                busy |= self.poll_sockets(&mut events, Some(Duration::ZERO))?;
            }
            busy |= self.poll_drives();
            self.finish_round();
            if busy {
                self.spin.on_work();
                continue;
            }
            match self.spin.on_idle(self.devices.now) {
                IdleStep::Poll => self.spin.relax(),
                IdleStep::Sleep => {
                    self.hot.clear();
                    let timeout = self.until_next_deadline();
                    if self.poll_sockets(&mut events, timeout)? {
                        self.spin.on_work();
                    }
                    self.finish_round();
                }
            }
        }
    }

    /// Reads the clock, and lets the core check its time limits.
    fn begin_round(&mut self) {
        self.devices.now = riopipe_platform::now_ns();
        self.core.timeout(&mut self.devices);
    }

    /// Asks the poller for events, and handles them. Returns whether there were any.
    fn poll_sockets(
        &mut self,
        events: &mut Vec<Event>,
        timeout: Option<Duration>,
    ) -> Result<bool, PollerError> {
        let woken = self.poller.wait(events, timeout)?;
        if timeout != Some(Duration::ZERO) {
            self.begin_round();
        }
        // The messages are read after the poll has reset the wake-up. A message that comes later
        // wakes again, so none is missed. The wake-up counts as work even without a message: it may
        // be for a shutdown request, which is then read before the reactor sleeps.
        let mut has_work = woken;
        if woken {
            for message in self.mail.take(self.core.index()) {
                self.core.message(message, &mut self.devices);
            }
        }
        for event in events.iter() {
            if event.token >= LISTENER {
                has_work |= self.accept((event.token - LISTENER) as usize);
            } else if event.token >= DRIVE {
                has_work = true;
            } else {
                let key = ConnKey(event.token as u32);
                if event.writable {
                    self.send(key);
                }
                if event.readable {
                    has_work |= self.receive(key);
                    self.poll_directly(key);
                }
            }
        }
        Ok(has_work)
    }

    /// Polls the connection's socket directly from now on, if not too many are polled so already.
    fn poll_directly(&mut self, key: ConnKey) {
        if !self.hot.contains(&key) && self.hot.len() < HOT_MAX {
            self.hot.push(key);
        }
    }

    /// Accepts all connections that wait at a listener, as far as the core has places for them.
    /// Returns whether there was one.
    fn accept(&mut self, listener: usize) -> bool {
        let mut any = false;
        loop {
            let Some(listener) = self.listeners.get(listener) else {
                return any;
            };
            let Some(place) = self.core.place(&mut self.devices) else {
                return any;
            };
            match listener.accept() {
                Ok(Some(socket)) => {
                    any = true;
                    let tcp = Tcp::new(socket, self.devices.now);
                    tracing::debug!(peer = %tcp.peer(), conn = place.id().0, "accepted");
                    let local = tcp.local();
                    self.core.accepted(place, tcp, local, &mut self.devices);
                }
                Ok(None) => return any,
                Err(error) => {
                    // An error may last. So the next attempt is made a while later.
                    tracing::error!(%error, "accept failed");
                    self.core.pause_accepting(self.devices.now);
                    return any;
                }
            }
        }
    }

    /// Receives from a connection, a few times at most, so that others get their turn. Returns
    /// whether there was anything.
    #[inline]
    fn receive(&mut self, key: ConnKey) -> bool {
        let mut any = false;
        for _ in 0..RECEIVES_PER_TURN {
            let received = match self.core.input(key) {
                Input::Wanted(tcp) => tcp.fill(self.devices.now),
                Input::Dropped(tcp) => {
                    if !tcp.discard() {
                        self.core.closed(key, "the host closed the connection", &mut self.devices);
                    }
                    return any;
                }
                Input::Left => return any,
            };
            match received {
                Ok(Received::Bytes(n)) => {
                    any = true;
                    self.core.received(key, &mut self.devices);
                    self.send(key);
                    // A short receive has emptied the socket: another one would return nothing.
                    if n < RecvBuf::DEFAULT_CAPACITY / 4 {
                        return any;
                    }
                }
                Ok(Received::WouldBlock) => return any,
                Ok(Received::Closed) => {
                    self.core.closed(key, "the host closed the connection", &mut self.devices);
                    return true;
                }
                Err(error) => {
                    self.core.closed(key, &error.to_string(), &mut self.devices);
                    return true;
                }
            }
        }
        any
    }

    /// Sends as much as the kernel takes.
    #[inline]
    fn send(&mut self, key: ConnKey) {
        while let Some((tcp, output)) = self.core.outgoing(key) {
            match tcp.socket().send(output.slices()) {
                Ok(0) => return self.core.blocked(key, &mut self.devices),
                Ok(sent) => self.core.sent(key, sent, &mut self.devices),
                Err(error) => self.core.closed(key, &error.to_string(), &mut self.devices),
            }
        }
    }

    /// Passes the results of finished drive operations to the core. Returns whether there were any.
    fn poll_drives(&mut self) -> bool {
        let core = &mut self.core;
        self.devices.poll(|devices, op, result| core.device_done(op, result, devices)) > 0
    }

    /// Executes the actions of the core.
    fn finish_round(&mut self) {
        while let Some(action) = self.core.next_action(&mut self.devices) {
            match action {
                Action::Listen(on) => self.watch_listeners(on),
                Action::Send(key) => self.send(key),
                Action::FinishSending(key) => {
                    if let Some(tcp) = self.core.transport(key) {
                        tcp.socket().finish_sending();
                    }
                }
                Action::Watch { key, interest, is_new } => self.watch(key, interest, is_new),
                Action::HandOver { core, connection } => {
                    if let Err(error) = self.poller.remove(connection.transport().socket()) {
                        tracing::error!(%error, "a connection is watched twice");
                    }
                    self.mail.send(core, Message::Adopt(connection));
                }
                Action::EndMoves => self.mail.reactor_ends(self.core.index()),
                Action::Drop(connection) => drop(connection),
            }
        }
        let (core, now) = (&self.core, self.devices.now);
        self.hot.retain(|key| {
            core.transport(*key).is_some_and(|tcp| now.saturating_sub(tcp.active) < HOT_NS)
        });
    }

    /// Begins to watch the listeners for connections, or stops it.
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

    /// Watches a connection's socket for what the core wants.
    fn watch(&mut self, key: ConnKey, interest: target::Interest, is_new: bool) {
        let Some(tcp) = self.core.transport(key) else { return };
        let interest = match interest {
            target::Interest::Read => Interest::Read,
            target::Interest::Write => Interest::Write,
            target::Interest::Both => Interest::Both,
        };
        let (socket, token): (&Socket, u64) = (tcp.socket(), key.0.into());
        if !is_new {
            if let Err(error) = self.poller.modify(socket, token, interest) {
                tracing::error!(%error, "a connection is no longer watched");
            }
            return;
        }
        if let Err(error) = self.poller.add(socket, token, interest) {
            tracing::error!(%error, "a connection cannot be watched and is dropped");
            self.core.closed(key, "it cannot be watched", &mut self.devices);
        }
        self.poll_directly(key);
    }

    /// The time until the core or a drive must be called even if nothing happens.
    fn until_next_deadline(&self) -> Option<Duration> {
        let now = self.devices.now;
        let next = self.core.deadline(now).into_iter().chain(self.devices.next_deadline()).min()?;
        Some(Duration::from_nanos(next.saturating_sub(now)))
    }
}

impl Drop for Reactor {
    /// The other reactors must not wait for one that has ended, for any reason.
    fn drop(&mut self) {
        self.mail.reactor_ends(self.core.index());
    }
}
