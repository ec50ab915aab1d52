//! The loop of one thread: it executes the decisions of its [`TargetCore`] with sockets, drives,
//! messages and the clock.
//!
//! Each round of the loop
//!
//! 1. reads the clock, and checks for a shutdown request,
//! 2. receives from the connections that were active a moment ago, and now and then asks the poller
//!    for all others, for messages, and for new connections,
//! 3. takes the completions of the drives,
//! 4. executes the actions that the core has decided on meanwhile, such as sending.
//!
//! A reactor without work polls for a while, and then sleeps in the poller.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use riopipe_media::Queue;
use riopipe_net::{
    AdaptiveSpin, Event, Filled, IdleStep, Interest, Poller, PollerError, Received, RecvBuf,
    Socket, SpinPolicy,
};
use riopipe_session::target::{
    self, Action, ConnKey, CoreConfig, Input, Message, TargetCore, Transport,
};

use crate::control::{Control, Shutdown};
use crate::devices::{Devices, DevicesParts, ReactorMailboxes};
use crate::heartbeat::Heartbeat;
use crate::queue_requests::{AskedRequest, Port, QueueRequest, RequestReceiver};
use crate::sweep::Sweep;
use crate::tcp::{RECEIVES_MAX, Tcp};
use crate::tls::TlsService;

/// The poller's token of the first drive with an event descriptor; the other drives follow.
///
/// The poller returns a token with each event. Tokens below this one are keys of connections, which
/// have 32 bits.
const FIRST_DRIVE_TOKEN: u64 = 1 << 61;
/// The poller's token of the first listener; the other listeners follow.
const FIRST_LISTENER_TOKEN: u64 = 1 << 62;

/// Time in ns for which a socket is polled directly after it was active: the reactor tries to
/// receive without asking `epoll_wait` first, which saves a system call.
const HOT_NS: u64 = 500_000;
/// Largest number of directly polled sockets; with more, one `epoll_wait` is cheaper.
const HOT_MAX: usize = 8;
/// Number of rounds over the directly polled sockets between two polls of all sockets.
const ROUNDS_PER_POLL: u32 = 16;

/// The things that a reactor is made of.
pub(crate) struct ReactorParts {
    pub(crate) core: CoreConfig,
    pub(crate) poller: Poller,
    /// A queue for each drive, in the order of the namespaces.
    pub(crate) queues: Vec<Box<dyn Queue>>,
    /// All ports of the target for the first reactor, none for the others.
    pub(crate) ports: Vec<Port>,
    /// `None` if no port has TLS.
    pub(crate) tls: Option<Arc<TlsService>>,
    pub(crate) devices: DevicesParts,
    pub(crate) control: Arc<Control>,
    pub(crate) heartbeat: Arc<Heartbeat>,
    pub(crate) requests: RequestReceiver,
    pub(crate) spin: SpinPolicy,
}

/// A port at which this reactor accepts connections.
struct ServedPort {
    port: Port,
    /// Connections are accepted. Before, they wait in the kernel's queue.
    is_open: bool,
}

/// A reactor: a thread of the target, with its core, its sockets and its drive queues.
pub(crate) struct Reactor {
    core: TargetCore<Devices, Tcp>,
    poller: Poller,
    devices: Devices,
    /// The ports. Each stays in its place, because the poller's token of a listener is that.
    ports: Vec<Option<ServedPort>>,
    /// The listeners are watched for connections.
    is_listening: bool,
    tls: Option<Arc<TlsService>>,
    /// The connections whose sockets are polled directly, because they were active in the last
    /// [`HOT_NS`].
    hot: Vec<ConnKey>,
    /// The last attempt to accept a connection has failed.
    is_accept_failing: bool,
    mailboxes: Arc<ReactorMailboxes>,
    control: Arc<Control>,
    heartbeat: Arc<Heartbeat>,
    requests: RequestReceiver,
    /// The requests to remove a queue that has operations in flight.
    removals: Vec<AskedRequest>,
    spin: AdaptiveSpin,
    sweep: Sweep,
}

impl Reactor {
    pub(crate) fn new(parts: ReactorParts) -> Result<Self, PollerError> {
        let mailboxes = Arc::clone(&parts.devices.mailboxes);
        let devices = Devices::new(parts.queues, parts.devices);
        for (index, fd) in devices.event_fds().enumerate() {
            // SAFETY: the queue owns the descriptor, and lives as long as the reactor. The poller
            // only watches the descriptor.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            parts.poller.add_edge(fd, FIRST_DRIVE_TOKEN + index as u64)?;
        }
        Ok(Self {
            core: TargetCore::new(parts.core),
            poller: parts.poller,
            devices,
            ports: parts
                .ports
                .into_iter()
                .map(|port| Some(ServedPort { port, is_open: true }))
                .collect(),
            is_listening: false,
            tls: parts.tls,
            hot: Vec::new(),
            is_accept_failing: false,
            mailboxes,
            control: parts.control,
            heartbeat: parts.heartbeat,
            requests: parts.requests,
            removals: Vec::new(),
            spin: AdaptiveSpin::new(parts.spin),
            sweep: Sweep::default(),
        })
    }

    /// Runs until the target shuts down: at once, or when all work is finished.
    pub(crate) fn run(mut self) -> Result<(), PollerError> {
        let mut events = Vec::new();
        let mut rounds_since_poll = 0;
        loop {
            self.begin_round();
            match self.control.shutdown() {
                Shutdown::None => {}
                Shutdown::Immediate => return Ok(()),
                Shutdown::Graceful => {
                    if self.try_to_end() {
                        return Ok(());
                    }
                }
            }
            let mut has_worked = false;
            if self.poller.is_woken() {
                has_worked |= self.poll_sockets(&mut events, Some(Duration::ZERO))?;
            }
            for i in 0..self.hot.len() {
                has_worked |= self.receive(self.hot[i]);
            }
            rounds_since_poll += 1;
            if self.hot.is_empty() || rounds_since_poll >= ROUNDS_PER_POLL {
                rounds_since_poll = 0;
                has_worked |= self.poll_sockets(&mut events, Some(Duration::ZERO))?;
            }
            has_worked |= self.poll_drives();
            self.finish_round();
            if has_worked {
                self.spin.on_work();
                continue;
            }
            match self.spin.on_idle(self.devices.now) {
                IdleStep::Poll => self.spin.relax(),
                IdleStep::Sleep => self.sleep(&mut events)?,
            }
        }
    }

    /// Stops accepting connections and work. Returns whether the reactor has finished all its work,
    /// and may end.
    fn try_to_end(&mut self) -> bool {
        self.core.stop(&mut self.devices);
        self.ports.clear();
        // The actions of the core are executed here, before the reactor may sleep. No event would
        // wake it for them.
        self.finish_round();
        self.core.is_at_rest() && self.devices.in_flight() == 0
    }

    /// Sleeps until a socket, a drive, a message or a time limit needs the reactor.
    fn sleep(&mut self, events: &mut Vec<Event>) -> Result<(), PollerError> {
        self.hot.clear();
        let timeout = self.time_until_deadline();
        if self.poll_sockets(events, timeout)? {
            self.spin.on_work();
        }
        self.finish_round();
        Ok(())
    }

    /// Reads the clock once for the whole round, and lets the core check its time limits.
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
        let polled_at = self.devices.now;
        let woken = self.poller.wait(events, timeout)?;
        if timeout != Some(Duration::ZERO) {
            self.begin_round();
        }
        // The poll has reset the wake-up before the messages are taken. So no message is missed: a
        // later message wakes the reactor again. A wake-up counts as work even without a message,
        // because it may be for a shutdown request. The next round reads the request before the
        // reactor sleeps.
        let mut has_work = woken;
        if woken {
            self.heartbeat.answer(self.core.index());
            self.take_requests();
            for message in self.mailboxes.take(self.core.index()) {
                self.core.message(message, &mut self.devices);
            }
        }
        for event in events.iter() {
            if event.token >= FIRST_LISTENER_TOKEN {
                has_work |= self.accept((event.token - FIRST_LISTENER_TOKEN) as usize);
            } else if event.token >= FIRST_DRIVE_TOKEN {
                // The round polls all drives anyway.
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
        // A wait that a signal has ended reports nothing, even if there is input. Only a poll without a
        // wait never ends so.
        if timeout == Some(Duration::ZERO) || !events.is_empty() {
            let sockets = self.core.connection_count();
            if let Some(read_until) = self.sweep.polled(polled_at, events.len(), sockets) {
                self.core.input_read(read_until);
            }
        }
        Ok(has_work)
    }

    /// Carries out the requests to add and remove queues.
    #[cold]
    fn take_requests(&mut self) {
        while let Ok((request, answer)) = self.requests.try_recv() {
            match request {
                QueueRequest::Add { index, queue, counters } => {
                    let watched = match self.devices.add_drive(index, queue, counters) {
                        // SAFETY: the queue owns the descriptor, and `devices` has the queue until
                        // the poller is asked no more, or the queue closes the descriptor, which
                        // ends the watch. The poller only watches the descriptor.
                        Some(fd) => self.poller.add_edge(
                            unsafe { BorrowedFd::borrow_raw(fd) },
                            FIRST_DRIVE_TOKEN + index as u64,
                        ),
                        None => Ok(()),
                    };
                    // The answer of a request that was given up has no receiver any more.
                    let _ = answer.send(watched.map_err(|error| error.to_string()));
                }
                removal @ QueueRequest::Remove { .. } => self.removals.push((removal, answer)),
                QueueRequest::AddPort(port) => {
                    let added = self.add_port(port).map_err(|error| error.to_string());
                    let _ = answer.send(added);
                }
                QueueRequest::OpenPorts(ids) => {
                    for served in self.ports.iter_mut().flatten() {
                        served.is_open |= ids.contains(&served.port.id);
                    }
                    let _ = answer.send(Ok(()));
                }
                QueueRequest::RemovePorts(ids) => {
                    self.remove_ports(&ids);
                    let _ = answer.send(Ok(()));
                }
            }
        }
        self.remove_idle_queues();
    }

    /// Adds a port, which is not open yet.
    fn add_port(&mut self, port: Port) -> Result<(), PollerError> {
        let at = self.ports.iter().position(Option::is_none).unwrap_or_else(|| {
            self.ports.push(None);
            self.ports.len() - 1
        });
        if self.is_listening {
            let token = FIRST_LISTENER_TOKEN + at as u64;
            self.poller.add(&port.listener, token, Interest::Read)?;
        }
        self.ports[at] = Some(ServedPort { port, is_open: false });
        Ok(())
    }

    /// Closes the listeners of ports. Connections that wait there to be accepted are reset.
    fn remove_ports(&mut self, ids: &[u16]) {
        for slot in &mut self.ports {
            let Some(served) = slot.take_if(|served| ids.contains(&served.port.id)) else {
                continue;
            };
            if self.is_listening
                && let Err(error) = self.poller.remove(&served.port.listener)
            {
                tracing::error!(%error, "a closed listener is watched");
            }
        }
    }

    /// Drops the queues that are to be removed and have no operation in flight.
    fn remove_idle_queues(&mut self) {
        let devices = &mut self.devices;
        self.removals.retain(|(request, answer)| match request {
            QueueRequest::Remove { index } if !devices.remove_drive(*index) => true,
            _ => {
                let _ = answer.send(Ok(()));
                false
            }
        });
    }

    /// From now on polls the connection's socket directly, unless too many sockets are polled so.
    fn poll_directly(&mut self, key: ConnKey) {
        if !self.hot.contains(&key) && self.hot.len() < HOT_MAX {
            self.hot.push(key);
        }
    }

    /// Accepts all connections that wait at the port in place `at`, as far as the core has places for
    /// them. Returns whether any was accepted.
    fn accept(&mut self, at: usize) -> bool {
        let mut has_accepted = false;
        loop {
            let Some(Some(ServedPort { port, is_open: true })) = self.ports.get(at) else {
                return has_accepted;
            };
            let (portid, listener) = (port.id, &port.listener);
            // The event shows that one connection waits, and no more.
            let place = match has_accepted {
                false => self.core.place(&mut self.devices),
                true => self.core.next_place(),
            };
            let Some(place) = place else { return has_accepted };
            match listener.accept() {
                Ok(Some(socket)) => {
                    let secured = match (port.tls, &self.tls) {
                        (None, _) => Ok((socket, None)),
                        (Some(demand), Some(tls)) => tls.accept(socket, demand),
                        (Some(_), None) => Err(std::io::Error::other("TLS was not started")),
                    };
                    let (socket, end) = match secured {
                        Ok(accepted) => accepted,
                        Err(error) => {
                            self.pause_accepting(&error);
                            return has_accepted;
                        }
                    };
                    has_accepted = true;
                    if std::mem::take(&mut self.is_accept_failing) {
                        tracing::info!("connections are accepted again");
                    }
                    let tcp = Tcp::new(socket, end, self.devices.now);
                    tracing::debug!(peer = %tcp.peer(), conn = place.id().0, "accepted");
                    let local = tcp.local(portid);
                    self.core.accepted(place, tcp, local, &mut self.devices);
                }
                Ok(None) => return has_accepted,
                Err(error) => {
                    self.pause_accepting(&error);
                    return has_accepted;
                }
            }
        }
    }

    /// Lets connections wait after one could not be accepted. The reason may last, so the next attempt is
    /// made a while later. It is logged once, until a connection is accepted.
    #[cold]
    fn pause_accepting(&mut self, error: &dyn std::error::Error) {
        if !std::mem::replace(&mut self.is_accept_failing, true) {
            tracing::error!(%error, "accept failed; connections wait");
        }
        self.core.pause_accepting(self.devices.now);
    }

    /// Receives from a connection until its socket is empty, but at most [`RECEIVES_MAX`] times, so
    /// that the other connections are served, too. Returns whether anything was received.
    #[inline]
    fn receive(&mut self, key: ConnKey) -> bool {
        let mut has_received = false;
        for _ in 0..RECEIVES_MAX {
            let (received, owner) = match self.core.input(key) {
                Input::Wanted { transport, data_space } => {
                    let received = transport.fill(data_space, self.devices.now);
                    (received, transport.newly_secured())
                }
                Input::Dropped(tcp) => {
                    if !tcp.discard() {
                        self.core.closed(key, "the host closed the connection", &mut self.devices);
                    }
                    return has_received;
                }
                Input::StaysInSocket => return has_received,
            };
            // The handshake may have ended between the call of the socket and this question, so the answer counts
            // also if no byte has come yet.
            if let Some(owner) = owner {
                self.core.secured(key, owner);
            }
            match received {
                Ok(Filled { received: Received::Bytes(count), outside_bytes, is_full }) => {
                    has_received = true;
                    self.core.received(key, outside_bytes, &mut self.devices);
                    if let Some(hostnqn) = self.devices.connected_host.take() {
                        self.note_host(key, &hostnqn);
                    }
                    self.send(key);
                    // A short receive has emptied the socket: another one would return nothing.
                    if !is_full && count < RecvBuf::DEFAULT_CAPACITY / 4 {
                        return has_received;
                    }
                }
                Ok(Filled { received: Received::WouldBlock, .. }) => return has_received,
                Ok(Filled { received: Received::Closed, .. }) => {
                    self.core.closed(key, "the host closed the connection", &mut self.devices);
                    return true;
                }
                Err(error) => {
                    self.core.closed(key, &error.to_string(), &mut self.devices);
                    return true;
                }
            }
        }
        has_received
    }

    /// Counts the bytes of a connection for its host from now on.
    #[cold]
    fn note_host(&self, key: ConnKey, hostnqn: &str) {
        if let Some(tcp) = self.core.transport(key) {
            self.devices.hosts().on_connected(hostnqn, tcp.traffic());
        }
    }

    /// Sends the output of a connection, as much as the kernel takes.
    #[inline]
    fn send(&mut self, key: ConnKey) {
        while let Some((tcp, output)) = self.core.outgoing(key) {
            match tcp.socket().send(output.slices()) {
                Ok(0) => return self.core.blocked(key, &mut self.devices),
                Ok(sent) => {
                    tcp.traffic().add_sent(sent);
                    self.core.sent(key, sent, &mut self.devices);
                }
                Err(error) => self.core.closed(key, &error.to_string(), &mut self.devices),
            }
        }
    }

    /// Passes the results of finished drive operations to the core. Returns whether there were any.
    fn poll_drives(&mut self) -> bool {
        let core = &mut self.core;
        self.devices.poll(|devices, op, result| core.device_done(op, result, devices)) > 0
    }

    /// Executes the actions of the core. Then ends the direct polling of sockets that have not been
    /// active for [`HOT_NS`].
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
                    self.mailboxes.send(core, Message::Adopt(connection));
                }
                Action::EndMoves => self.mailboxes.announce_end(self.core.index()),
                Action::Drop(connection) => drop(connection),
            }
        }
        if !self.removals.is_empty() {
            self.remove_idle_queues();
        }
        let (core, now) = (&self.core, self.devices.now);
        self.hot.retain(|key| {
            core.transport(*key).is_some_and(|tcp| now.saturating_sub(tcp.last_receive) < HOT_NS)
        });
    }

    /// Begins to watch the listeners for connections, or stops watching them.
    fn watch_listeners(&mut self, on: bool) {
        self.is_listening = on;
        for (index, served) in self.ports.iter().enumerate() {
            let Some(ServedPort { port: Port { listener, .. }, .. }) = served else { continue };
            let result = if on {
                self.poller.add(listener, FIRST_LISTENER_TOKEN + index as u64, Interest::Read)
            } else {
                self.poller.remove(listener)
            };
            if let Err(error) = result {
                tracing::error!(%error, "a listener is no longer watched");
            }
        }
    }

    /// Watches a connection's socket for the events in `interest`. `is_new`: the poller does not
    /// watch the socket yet.
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

    /// The time until the core or a drive must be called even if no event comes; `None` if neither
    /// has a deadline.
    fn time_until_deadline(&self) -> Option<Duration> {
        let now = self.devices.now;
        let core_deadline = self.core.deadline(now);
        let drive_deadline = self.devices.next_deadline();
        let earliest = core_deadline.into_iter().chain(drive_deadline).min()?;
        Some(Duration::from_nanos(earliest.saturating_sub(now)))
    }
}

impl Drop for Reactor {
    /// Announces the end of the reactor, whatever its reason: the other reactors must not wait for
    /// connections from it.
    fn drop(&mut self) {
        self.mailboxes.announce_end(self.core.index());
    }
}
