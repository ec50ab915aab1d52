//! One core of a target: everything that is decided between sockets and drives.
//!
//! A target runs one [`TargetCore`] for each processor core, and each has connections of its own. A
//! `TargetCore` has no socket, no drive, no clock and no thread. The *shell* around it reports
//! events to it and carries out its actions:
//!
//! - in: [`accepted`](TargetCore::accepted), [`received`](TargetCore::received),
//!   [`sent`](TargetCore::sent), [`blocked`](TargetCore::blocked), [`closed`](TargetCore::closed),
//!   [`device_done`](TargetCore::device_done), [`message`](TargetCore::message),
//!   [`timeout`](TargetCore::timeout), [`stop`](TargetCore::stop);
//! - out: [`next_action`](TargetCore::next_action), [`input`](TargetCore::input),
//!   [`outgoing`](TargetCore::outgoing), [`deadline`](TargetCore::deadline),
//!   [`is_at_rest`](TargetCore::is_at_rest); operations of drives go out through the [`TargetEnv`].
//!
//! A shell works in rounds:
//!
//! 1. Read the clock and call `timeout`.
//! 2. Report the events since the last round.
//! 3. Carry out the actions of `next_action` until there are none left.
//!
//! All operations that come back from the drives in one round are one batch. Their persist words
//! share one fence of the log for each stream, and no completion is sent before that fence (trap
//! T7).
//!
//! Cores share [`Shared`](super::Shared) behind a lock, two counters ([`Places`], [`QueueCounts`]),
//! and send each other the rest in [`Message`]s. The real target (crate `riopipe-target`) carries
//! them between threads, the simulator in an order that its seed decides.

mod action;
mod bounded;
mod connection;
mod message;
mod pending;
mod places;
mod stopping;

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use riopipe_nvme::Crc32c;
use riopipe_order::block_device::IoError;

use super::env::{Event, TargetEnv};
use super::identity::LocalAddress;
use super::ids::{ConnId, OpId};
use crate::auth::tls::KeyOwner;
use crate::outbox::Outbox;

pub use action::Action;
pub use bounded::BoundedDevice;
use connection::InputTreatment;
pub use connection::{Connection, Interest, Transport};
pub use message::Message;
use pending::Pending;
pub use pending::PendingLimits;
pub use places::{Place, Places, QueueCounts};
use stopping::Stopping;

/// The longest time between two checks of the connections' time limits, ns.
const TICK_NS: u64 = 100_000_000;
/// The longest time between two checks that the log's store still exists, ns.
const LOG_CHECK_NS: u64 = 100_000_000;
/// How long no connection is accepted after the descriptors or the places for connections have run
/// out, ns.
const ACCEPT_PAUSE_NS: u64 = 100_000_000;

/// The configuration of a core.
pub struct CoreConfig {
    /// The index of the core, counted from 0.
    pub index: usize,
    /// Whether it accepts connections.
    pub listens: bool,
    /// How long commands may take to finish once the target stops, ns.
    pub grace_ns: u64,
    /// CRC32C, for digests.
    pub crc: Crc32c,
    /// Places for connections, of all cores.
    pub places: Arc<Places>,
    /// How many I/O queues each core carries.
    pub queues: Arc<QueueCounts>,
    /// The limits on connections that are not admitted.
    pub pending: PendingLimits,
}

/// The number of a connection in one core. It is valid as long as the core has the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnKey(pub u32);

/// The shell's treatment of input on a connection.
#[derive(Debug)]
pub enum Input<'a, T> {
    /// Receive it, and report it ([`TargetCore::received`]).
    Wanted {
        /// The shell's part of the connection.
        transport: &'a mut T,
        /// The memory for the next bytes, if they are known to be data of a command. The shell may
        /// receive bytes there, and those behind them in the transport's input. Otherwise empty.
        data_space: &'a mut [u8],
    },
    /// Receive it and drop it: the connection is being closed.
    Dropped(&'a mut T),
    /// Leave it in the socket: too much waits to be sent (trap T28). Or there is no such
    /// connection.
    StaysInSocket,
}

/// The decisions of one core of a target about its connections. The shell around it carries them
/// out.
pub struct TargetCore<E: TargetEnv, T> {
    config: CoreConfig,
    /// The connections. The key of a connection is its place in this list.
    connections: Vec<Option<Box<Connection<E, T>>>>,
    /// The places in `connections` that are free.
    free_places: Vec<u32>,
    /// The place of each connection in `connections`, so that a notice needs no search (trap T28).
    place_of: BTreeMap<ConnId, u32>,
    /// The places of the connections whose device operations have come back in this batch.
    conns_in_batch: Vec<u32>,
    /// The places of the connections that have changed and may need an action.
    changed: Vec<u32>,
    /// How many connections at the start of `changed` need no action any more.
    handled_count: usize,
    accept: Accept,
    /// The connections that are not admitted.
    pending: Pending,
    /// The time up to which all input has been read, ns; `None` if the shell does not report it.
    input_read_until_ns: Option<u64>,
    /// The time before which no connection's time limits are checked.
    next_tick_ns: u64,
    /// The time before which the log's store is not checked.
    next_log_check_ns: u64,
    stopping: Stopping,
}

/// Whether connections are accepted.
#[derive(Debug, Default)]
struct Accept {
    /// The shell has been asked to listen.
    listens: bool,
    /// The time before which no connection is accepted.
    paused_until_ns: Option<u64>,
    /// All places for connections were taken at the last request for one.
    is_full: bool,
}

impl<E: TargetEnv, T: Transport> TargetCore<E, T> {
    /// A core without connections.
    #[must_use]
    pub fn new(config: CoreConfig) -> Self {
        let stopping = Stopping::new(config.queues.core_count());
        Self {
            connections: Vec::new(),
            free_places: Vec::new(),
            place_of: BTreeMap::new(),
            conns_in_batch: Vec::new(),
            changed: Vec::new(),
            handled_count: 0,
            accept: Accept::default(),
            pending: Pending::new(config.pending),
            input_read_until_ns: None,
            next_tick_ns: 0,
            next_log_check_ns: 0,
            stopping,
            config,
        }
    }

    /// The index of the core.
    #[must_use]
    pub const fn index(&self) -> usize {
        self.config.index
    }

    /// The number of connections that the core has.
    #[must_use]
    pub fn connection_count(&self) -> usize {
        self.place_of.len()
    }

    /// Begins a round: checks everything that depends on time. The shell calls this first in each
    /// round, and begins a round when the [`deadline`](Self::deadline) has come.
    pub fn timeout(&mut self, env: &mut E) {
        let now = env.now();
        if now >= self.next_log_check_ns {
            self.next_log_check_ns = now + LOG_CHECK_NS;
            env.watch_log();
        }
        if now >= self.next_tick_ns {
            self.tick(env);
        }
        if self.stopping.is_asked() {
            self.end_idle_connections(env);
        }
    }

    /// Notes that everything has been received that had arrived at time `at_ns`. Without this call, each
    /// round is taken to have received everything.
    ///
    /// A time limit has passed only if the input of that time has been read. So a target that was
    /// stopped for a while, or whose machine is busy, closes no connection because of its own delay.
    pub fn input_read(&mut self, at_ns: u64) {
        self.input_read_until_ns = Some(at_ns);
    }

    /// Checks every connection's time limits.
    fn tick(&mut self, env: &mut E) {
        let now = env.now();
        let read_until = self.input_read_until_ns.unwrap_or(now);
        self.next_tick_ns = now + TICK_NS;
        if self.accept.paused_until_ns.is_some_and(|at| at <= now) {
            self.accept.paused_until_ns = None;
        }
        for at in 0..self.connections.len() as u32 {
            if let Some(connection) = self.get(at)
                && connection.tick(read_until, env)
            {
                self.mark_changed(at);
            }
        }
    }

    /// The time at which [`timeout`](Self::timeout) is due next, ns on the environment's clock.
    /// This function reads every connection.
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        let of_connections =
            self.connections.iter().flatten().filter_map(|connection| connection.deadline());
        let first = of_connections.chain(self.accept.paused_until_ns).min();
        // Time limits are checked only at the next tick. If the shell woke up earlier, it would
        // spin until then.
        let at_tick = first.map(|at_ns| at_ns.max(self.next_tick_ns));
        at_tick.into_iter().chain(self.stopping.deadline(now)).min()
    }

    /// Takes a place for a connection that waits to be accepted. If there is none, a connection that
    /// is not admitted gives way. The shell calls this before it accepts a socket. So a
    /// peer without a place waits in the kernel's queue, which has a limit of its own (trap T28).
    /// `None` means that nothing must be accepted now. [`Action::Listen`] then reports when to try
    /// again.
    pub fn place(&mut self, env: &mut E) -> Option<Place> {
        let place = self.next_place();
        if place.is_none() && self.accepts_connections() {
            // A connection that is not admitted gives way. Its place is free after this round.
            if let Some(at) = self.pending.oldest_of_largest() {
                self.displace(at, env);
                return None;
            }
            // A place may become free on any core, which does not inform this core. So this core
            // tries again after a while.
            if !core::mem::replace(&mut self.accept.is_full, true) {
                env.log(Event::Full { connections: self.config.places.max() });
            }
            self.pause_accepting(env.now());
        }
        place
    }

    /// Takes a place for a connection that may wait behind the one that was just accepted. Without
    /// a free place nothing else happens: no connection gives way to one that may not exist.
    pub fn next_place(&self) -> Option<Place> {
        if self.accepts_connections() { self.config.places.take() } else { None }
    }

    /// Notes that no connection can be accepted, for example because there are no descriptors. The
    /// core accepts connections again after a while.
    pub fn pause_accepting(&mut self, now: u64) {
        self.accept.paused_until_ns = Some(now + ACCEPT_PAUSE_NS);
    }

    /// Whether connections are accepted.
    const fn accepts_connections(&self) -> bool {
        self.config.listens && !self.stopping.is_asked() && self.accept.paused_until_ns.is_none()
    }

    /// Takes in a connection that was accepted, at the address `local` of this machine.
    pub fn accepted(
        &mut self,
        place: Place,
        transport: T,
        local: Option<LocalAddress>,
        env: &mut E,
    ) -> ConnKey {
        self.accept.is_full = false;
        let address = transport.peer_address();
        let connection = Connection::new(place, transport, local, self.config.crc, env.now());
        let key = self.take_in(Box::new(connection));
        let entry = self.pending.add(address, key.0);
        if let Some(connection) = self.get(key.0) {
            connection.pending_entry = Some(entry);
        }
        if let Some(at) = self.pending.excess(entry) {
            self.displace(at, env);
        }
        key
    }

    /// Ends a connection that is not admitted, because another one needs its place. The connection has
    /// nothing in flight, so it is dropped in this round.
    #[cold]
    fn displace(&mut self, at: u32, env: &mut E) {
        let Some(connection) = self.get(at) else { return };
        connection.displace(env);
        self.admit(at);
        self.mark_changed(at);
    }

    /// Notes that a connection does not count as one that is not admitted any more.
    fn admit(&mut self, at: u32) {
        if let Some(Some(connection)) = self.connections.get_mut(at as usize)
            && let Some(entry) = connection.pending_entry.take()
        {
            self.pending.remove(entry);
        }
    }

    /// Gives a connection a place in this core. The connection gets a new key. Its socket is not
    /// watched here yet, even if the connection comes from another core.
    fn take_in(&mut self, mut connection: Box<Connection<E, T>>) -> ConnKey {
        let at = self.free_places.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() as u32 - 1
        });
        connection.session.set_key(u64::from(at));
        connection.watched_for = None;
        connection.is_in_changed_list = false;
        self.place_of.insert(connection.id(), at);
        self.connections[at as usize] = Some(connection);
        self.mark_changed(at);
        ConnKey(at)
    }

    /// Takes a connection out, to be dropped or moved to another core.
    fn take_out(&mut self, at: u32) -> Option<Box<Connection<E, T>>> {
        self.admit(at);
        let connection = self.connections.get_mut(at as usize)?.take()?;
        self.place_of.remove(&connection.id());
        self.free_places.push(at);
        Some(connection)
    }

    #[inline]
    fn get(&mut self, at: u32) -> Option<&mut Connection<E, T>> {
        self.connections.get_mut(at as usize)?.as_deref_mut()
    }

    /// Puts a connection on the list of changed connections, for which
    /// [`next_action`](Self::next_action) finds the actions.
    #[inline]
    fn mark_changed(&mut self, at: u32) {
        if let Some(Some(connection)) = self.connections.get_mut(at as usize)
            && !core::mem::replace(&mut connection.is_in_changed_list, true)
        {
            self.changed.push(at);
        }
    }

    /// The shell's part of a connection.
    #[must_use]
    pub fn transport(&self, key: ConnKey) -> Option<&T> {
        self.connections.get(key.0 as usize)?.as_deref().map(Connection::transport)
    }

    /// The way in which the shell must treat input on a connection.
    #[inline]
    pub fn input(&mut self, key: ConnKey) -> Input<'_, T> {
        let Some(connection) = self.get(key.0) else {
            return Input::StaysInSocket;
        };
        match connection.input_treatment() {
            InputTreatment::Wanted => {
                let (transport, data_space) = connection.input_parts();
                Input::Wanted { transport, data_space }
            }
            InputTreatment::Dropped => Input::Dropped(connection.transport_mut()),
            InputTreatment::StaysInSocket => Input::StaysInSocket,
        }
    }

    /// Notes that TLS secures a connection, whose host has proved to have the key of `owner`. The shell calls
    /// this before it reports the first byte of the connection as received.
    pub fn secured(&mut self, key: ConnKey, owner: KeyOwner) {
        if let Some(connection) = self.get(key.0) {
            connection.session.secured(owner);
        }
    }

    /// Notes that bytes have been received: `data_bytes` bytes in the memory for data
    /// ([`Input::Wanted`]), and those behind them in the transport's input.
    ///
    /// # Panics
    /// If `data_bytes` is more than that memory had.
    #[inline]
    pub fn received(&mut self, key: ConnKey, data_bytes: usize, env: &mut E) {
        if let Some(connection) = self.get(key.0) {
            if data_bytes > 0 {
                connection.data_arrived(data_bytes);
            }
            connection.receive(env);
            if connection.is_newly_admitted() {
                self.admit(key.0);
            }
            self.mark_changed(key.0);
        }
    }

    /// The bytes that a connection must send now. `None` while results of its device operations are
    /// being reported, because the completions must wait for the fence at the end of the batch
    /// (trap T7).
    #[inline]
    pub fn outgoing(&mut self, key: ConnKey) -> Option<(&mut T, &Outbox<E::Buf>)> {
        self.get(key.0)?.bytes_to_send()
    }

    /// Notes that the socket has taken the first `bytes` bytes of the outgoing ones.
    #[inline]
    pub fn sent(&mut self, key: ConnKey, bytes: usize, env: &mut E) {
        if let Some(connection) = self.get(key.0) {
            connection.sent(bytes, env);
            self.mark_changed(key.0);
        }
    }

    /// Notes that the socket takes no more bytes at present. When the socket takes bytes again, the
    /// shell continues with [`outgoing`](Self::outgoing).
    pub fn blocked(&mut self, key: ConnKey, env: &mut E) {
        if let Some(connection) = self.get(key.0) {
            connection.blocked(env);
            self.mark_changed(key.0);
        }
    }

    /// Notes that the peer has ended the connection, or the socket has failed. No bytes can be
    /// received or sent any more.
    pub fn closed(&mut self, key: ConnKey, why: &str, env: &mut E) {
        if let Some(connection) = self.get(key.0) {
            connection.socket_ended(why, env);
            self.mark_changed(key.0);
        }
    }

    /// Takes in the result of a device operation that was in flight, as
    /// [`BlockDevice::poll`](riopipe_order::block_device::BlockDevice::poll) has returned it.
    #[inline]
    pub fn device_done(&mut self, op: OpId, result: Result<Option<E::Buf>, IoError>, env: &mut E) {
        let at = op.key() as u32;
        if let Some(connection) = self.get(at) {
            connection.device_done(op, result, env);
            if !core::mem::replace(&mut connection.has_unsettled_results, true) {
                self.conns_in_batch.push(at);
            }
        }
    }

    /// Ends the batch of this round: each connection fences the persist words of its operations
    /// once, and then sends their completions (trap T7).
    fn end_batch(&mut self, env: &mut E) {
        for i in 0..self.conns_in_batch.len() {
            let at = self.conns_in_batch[i];
            if let Some(connection) = self.get(at) {
                connection.batch_ended(env);
                self.mark_changed(at);
            }
        }
        self.conns_in_batch.clear();
    }

    /// Takes in a message from another core or from this one.
    pub fn message(&mut self, message: Message<E, T>, env: &mut E) {
        match message {
            Message::Adopt(connection) => {
                let id = connection.id();
                self.take_in(connection);
                // A notice that was sent while the connection moved has found it on neither core,
                // so the connection reads its notices now.
                self.notice(id, env);
            }
            Message::Notice(id) => self.notice(id, env),
            Message::MovesEnded(core) => self.stopping.moves_ended(core),
        }
    }

    /// Makes a connection read its notices, if this core has it.
    fn notice(&mut self, id: ConnId, env: &mut E) {
        if let Some(&at) = self.place_of.get(&id)
            && let Some(connection) = self.get(at)
        {
            connection.noticed(env);
            // An exponentiation may have been the last step of an authentication.
            if connection.is_newly_admitted() {
                self.admit(at);
            }
            self.mark_changed(at);
        }
    }
}
