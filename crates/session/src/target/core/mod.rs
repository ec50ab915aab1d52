//! One core of a target: everything that is decided between sockets and drives.
//!
//! A target runs one [`TargetCore`] per processor core, each with connections of its own. A core
//! knows no socket, no drive, no clock and no thread. Its shell reports events to it and carries
//! out its actions:
//!
//! - in: [`accepted`](TargetCore::accepted), [`received`](TargetCore::received),
//!   [`sent`](TargetCore::sent), [`blocked`](TargetCore::blocked), [`closed`](TargetCore::closed),
//!   [`device_done`](TargetCore::device_done), [`message`](TargetCore::message),
//!   [`timeout`](TargetCore::timeout), [`stop`](TargetCore::stop);
//! - out: [`next_action`](TargetCore::next_action), [`input`](TargetCore::input),
//!   [`outgoing`](TargetCore::outgoing), [`deadline`](TargetCore::deadline),
//!   [`is_at_rest`](TargetCore::is_at_rest); operations of drives go out through the [`TargetEnv`].
//!
//! A shell works in rounds. In each it reads the clock, calls `timeout`, hands in the events since
//! the last round, and then carries out the actions of `next_action` until there are none left. All
//! operations that came back from the drives in one round are one batch. In any order of the calls,
//! none of them is answered before all of them are in the log, with one fence for each stream (T7).
//!
//! Cores share [`Shared`](super::Shared) behind a lock, two counters ([`Places`], [`QueueCounts`]),
//! and send each other the rest in [`Message`]s. The real target (crate `riopipe-target`) carries
//! them between threads, the simulator in an order that its seed decides.

mod action;
mod bounded;
mod connection;
mod message;
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
use crate::outbox::Outbox;

pub use action::Action;
pub use bounded::BoundedDevice;
use connection::Receives;
pub use connection::{Connection, Interest, Transport};
pub use message::Message;
pub use places::{Place, Places, QueueCounts};
use stopping::Stopping;

/// Longest time between two checks of every connection's time limits, ns.
const TICK_NS: u64 = 100_000_000;
/// Largest age of the last check of the log's store when an action relies on it, ns.
const WATCH_NS: u64 = 100_000_000;
/// How long no connection is accepted after descriptors, or places for connections, ran out, ns.
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
}

/// The number of a connection in one core, for as long as the core has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnKey(pub u32);

/// The shell's treatment of input on a connection.
#[derive(Debug)]
pub enum Input<'a, T> {
    /// Receive it, and report it ([`TargetCore::received`]).
    Wanted(&'a mut T),
    /// Receive it and drop it: the connection is being closed.
    Dropped(&'a mut T),
    /// Leave it in the socket: too much waits to be sent (T28). Or there is no such connection.
    Left,
}

/// The decisions of one core of a target about its connections. The shell around it carries them
/// out.
pub struct TargetCore<E: TargetEnv, T> {
    config: CoreConfig,
    /// A slab: a connection's place in it is its key.
    connections: Vec<Option<Box<Connection<E, T>>>>,
    /// Free places in `connections`.
    free: Vec<u32>,
    /// The place of each connection, so that a notice costs no search (T28).
    by_id: BTreeMap<ConnId, u32>,
    /// Connections whose device operations have come back in this batch.
    batch: Vec<u32>,
    /// Connections that have changed since the shell last asked for actions.
    touched: Vec<u32>,
    /// How many connections at the start of `touched` have no action left.
    handled: usize,
    accept: Accept,
    /// The time before which no connection's time limits are checked.
    next_tick: u64,
    /// The time before which the log's store is not checked.
    next_watch: u64,
    stopping: Stopping,
}

/// Whether connections are accepted.
#[derive(Debug, Default)]
struct Accept {
    /// The shell has been asked to listen.
    listens: bool,
    /// The time before which no connection is accepted.
    paused_until: Option<u64>,
    /// All places for connections were taken at the last request for one.
    is_full: bool,
}

impl<E: TargetEnv, T: Transport> TargetCore<E, T> {
    /// A core without connections.
    #[must_use]
    pub fn new(config: CoreConfig) -> Self {
        let stopping = Stopping::new(config.queues.cores());
        Self {
            config,
            connections: Vec::new(),
            free: Vec::new(),
            by_id: BTreeMap::new(),
            batch: Vec::new(),
            touched: Vec::new(),
            handled: 0,
            accept: Accept::default(),
            next_tick: 0,
            next_watch: 0,
            stopping,
        }
    }

    /// The index of the core.
    #[must_use]
    pub const fn index(&self) -> usize {
        self.config.index
    }

    /// Begins a round: checks everything that depends on time. Call it in each round before
    /// anything else, and when the [`deadline`](Self::deadline) has come.
    pub fn timeout(&mut self, env: &mut E) {
        let now = env.now();
        if now >= self.next_watch {
            self.next_watch = now + WATCH_NS;
            env.watch_log();
        }
        if now >= self.next_tick {
            self.tick(env);
        }
        if self.stopping.is_asked() {
            self.end_idle_connections(env);
        }
    }

    /// Checks every connection's time limits.
    fn tick(&mut self, env: &mut E) {
        let now = env.now();
        self.next_tick = now + TICK_NS;
        if self.accept.paused_until.is_some_and(|at| at <= now) {
            self.accept.paused_until = None;
        }
        for at in 0..self.connections.len() as u32 {
            if let Some(connection) = self.get(at)
                && connection.tick(env)
            {
                self.touch(at);
            }
        }
    }

    /// When [`timeout`](Self::timeout) is due next, ns on the environment's clock. It reads every
    /// connection.
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        let connections = self.connections.iter().flatten().filter_map(|it| it.deadline());
        let first = connections.chain(self.accept.paused_until).min();
        // Time limits are not checked more often: a shell that woke up before would spin until
        // then.
        let first = first.map(|at| at.max(self.next_tick));
        first.into_iter().chain(self.stopping.deadline(now)).min()
    }

    /// A place for one more connection. Ask for it before a socket is accepted. So a peer waits in
    /// the kernel's queue, which has a bound of its own, and costs nothing here (T28). `None`:
    /// nothing is accepted for now; [`Action::Listen`] asks for the next attempt.
    pub fn place(&mut self, env: &mut E) -> Option<Place> {
        if !self.listens() {
            return None;
        }
        let place = self.config.places.take();
        if place.is_none() {
            // A place may become free on any core, and that core does not inform this one. So it
            // tries again after a while.
            if !core::mem::replace(&mut self.accept.is_full, true) {
                env.log(Event::Full { connections: self.config.places.max() });
            }
            self.pause_accepting(env.now());
        }
        place
    }

    /// Notes that nothing can be accepted, for example without descriptors. It is tried again after
    /// a while.
    pub fn pause_accepting(&mut self, now: u64) {
        self.accept.paused_until = Some(now + ACCEPT_PAUSE_NS);
    }

    /// Whether connections are accepted.
    const fn listens(&self) -> bool {
        self.config.listens && !self.stopping.is_asked() && self.accept.paused_until.is_none()
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
        let connection = Connection::new(place, transport, local, self.config.crc, env.now());
        self.take_in(Box::new(connection))
    }

    /// Gives a connection a place in this core. The connection gets a new key, and its socket is
    /// watched anew, also if it comes from another core.
    fn take_in(&mut self, mut connection: Box<Connection<E, T>>) -> ConnKey {
        let at = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() as u32 - 1
        });
        connection.session.set_key(u64::from(at));
        connection.watched = None;
        connection.is_touched = false;
        self.by_id.insert(connection.id(), at);
        self.connections[at as usize] = Some(connection);
        self.touch(at);
        ConnKey(at)
    }

    /// Takes a connection out, to be dropped or moved to another core.
    fn take_out(&mut self, at: u32) -> Option<Box<Connection<E, T>>> {
        let connection = self.connections.get_mut(at as usize)?.take()?;
        self.by_id.remove(&connection.id());
        self.free.push(at);
        Some(connection)
    }

    #[inline]
    fn get(&mut self, at: u32) -> Option<&mut Connection<E, T>> {
        self.connections.get_mut(at as usize)?.as_deref_mut()
    }

    /// Puts a connection on the list of those for which [`next_action`](Self::next_action) has to
    /// find actions.
    #[inline]
    fn touch(&mut self, at: u32) {
        if let Some(Some(connection)) = self.connections.get_mut(at as usize)
            && !core::mem::replace(&mut connection.is_touched, true)
        {
            self.touched.push(at);
        }
    }

    /// The shell's part of a connection.
    #[must_use]
    pub fn transport(&self, key: ConnKey) -> Option<&T> {
        self.connections.get(key.0 as usize)?.as_deref().map(Connection::transport)
    }

    /// The treatment of input on a connection.
    #[inline]
    pub fn input(&mut self, key: ConnKey) -> Input<'_, T> {
        let Some(connection) = self.get(key.0) else {
            return Input::Left;
        };
        match connection.receives() {
            Receives::Wanted => Input::Wanted(connection.transport_mut()),
            Receives::Dropped => Input::Dropped(connection.transport_mut()),
            Receives::Left => Input::Left,
        }
    }

    /// Notes that bytes have come in. They are in the transport's input.
    #[inline]
    pub fn received(&mut self, key: ConnKey, env: &mut E) {
        if let Some(connection) = self.get(key.0) {
            connection.receive(env);
            self.touch(key.0);
        }
    }

    /// The bytes that a connection has to send now. None while a batch of its device operations is
    /// being handed in: the answers may have to wait for the log until the batch ends (T7).
    #[inline]
    pub fn outgoing(&mut self, key: ConnKey) -> Option<(&mut T, &Outbox<E::Buf>)> {
        self.get(key.0)?.sends()
    }

    /// Notes that the socket has taken the first `bytes` bytes of the outgoing ones.
    #[inline]
    pub fn sent(&mut self, key: ConnKey, bytes: usize, env: &mut E) {
        if let Some(connection) = self.get(key.0) {
            connection.sent(bytes, env);
            self.touch(key.0);
        }
    }

    /// Notes that the socket takes no more bytes for now. Once it does, the shell continues with
    /// [`outgoing`](Self::outgoing).
    pub fn blocked(&mut self, key: ConnKey, env: &mut E) {
        if let Some(connection) = self.get(key.0) {
            connection.blocked(env.now());
            self.touch(key.0);
        }
    }

    /// Notes that the connection has ended, or its socket has failed: no bytes come or go any more.
    pub fn closed(&mut self, key: ConnKey, why: &str, env: &mut E) {
        if let Some(connection) = self.get(key.0) {
            connection.socket_ended(why, env);
            self.touch(key.0);
        }
    }

    /// Takes in the result of a device operation that was in flight, as
    /// [`BlockDevice::poll`](riopipe_order::block_device::BlockDevice::poll) has returned it.
    #[inline]
    pub fn device_done(&mut self, op: OpId, result: Result<Option<E::Buf>, IoError>, env: &mut E) {
        let at = op.key() as u32;
        if let Some(connection) = self.get(at) {
            connection.device_done(op, result, env);
            if !core::mem::replace(&mut connection.in_batch, true) {
                self.batch.push(at);
            }
        }
    }

    /// Settles the batch of this round: each connection settles its own operations, with one fence,
    /// and may then answer them (T7).
    fn end_batch(&mut self, env: &mut E) {
        for i in 0..self.batch.len() {
            let at = self.batch[i];
            if let Some(connection) = self.get(at) {
                connection.batch_ended(env);
                self.touch(at);
            }
        }
        self.batch.clear();
    }

    /// Takes in a message from another core or from this one.
    pub fn message(&mut self, message: Message<E, T>, env: &mut E) {
        match message {
            Message::Adopt(connection) => {
                let id = connection.id();
                self.take_in(connection);
                // A notice that was sent while the connection was in transit found it on neither
                // core.
                self.notice(id, env);
            }
            Message::Notice(id) => self.notice(id, env),
            Message::MovesEnded(core) => self.stopping.moves_ended(core),
        }
    }

    /// Makes a connection read its notices, if this core has it.
    fn notice(&mut self, id: ConnId, env: &mut E) {
        if let Some(&at) = self.by_id.get(&id)
            && let Some(connection) = self.get(at)
        {
            connection.noticed(env);
            self.touch(at);
        }
    }
}
