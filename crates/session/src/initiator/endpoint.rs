//! The calls by which a program drives the connections to one target.
//!
//! An [`Association`](super::association::Association) decides about these connections. Once the
//! volume is open, an [`AssociationManager`](super::manager::AssociationManager) owns the
//! association and decides. The program around them has the sockets and the clock, and drives both
//! by the same calls.

use alloc::string::String;

use riopipe_order::attribute::StreamId;

use crate::outbox::Outbox;

/// A connection of an association that belongs to no stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ControlQueue {
    /// The queue to the discovery service at the same address. It exists only until the subsystem
    /// is known.
    Discovery,
    /// The admin queue.
    Admin,
    /// I/O queue [`DRIVES_QUEUE`](super::association::DRIVES_QUEUE): labels, undo, and saving data
    /// that will be undone.
    Drives,
}

impl ControlQueue {
    /// All control queues, in the order in which the program must serve their connections.
    pub const ALL: [Self; 3] = [Self::Discovery, Self::Admin, Self::Drives];
}

/// A connection that must be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConnectionId {
    /// A connection of the association.
    Control(ControlQueue),
    /// A connection of a stream.
    Stream(StreamId),
}

/// Why no connection could be made. The text is from the program that tried, and names the address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConnectFailure(pub String);

/// How a connection ended, as the program that has the socket reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The target closed it.
    Closed,
    /// It broke, for example by a reset. The text is from the program that has the socket.
    Broken(String),
}

/// The calls by which a program drives the connections to one target; see the [module](self). All
/// times are nanoseconds of one monotonic clock.
pub trait Endpoint {
    /// A piece of the data of a write.
    type Piece;

    /// The connection that the program must make now.
    #[must_use]
    fn wants_connection(&self) -> Option<ConnectionId>;

    /// Handles a [requested](Self::wants_connection) connection that was made. `is_local`: whether
    /// it stays on this machine.
    fn connected(&mut self, connection: ConnectionId, is_local: bool, now: u64);

    /// Handles a [requested](Self::wants_connection) connection that cannot be made.
    fn connect_failed(&mut self, connection: ConnectionId, failure: ConnectFailure, now: u64);

    /// Whether a queue needs its connection. If not, the program sends the contents of the queue's
    /// [outbox](Self::outbox), as far as the connection takes them at once, and closes the
    /// connection.
    #[must_use]
    fn is_open(&self, queue: ControlQueue) -> bool;

    /// The bytes that the next PDU in `buf` needs. `buf` has the bytes that a queue has received
    /// and not taken.
    #[must_use]
    fn need(&self, queue: ControlQueue, buf: &[u8]) -> usize;

    /// The bytes to be sent on a queue's connection, in order.
    fn outbox(&mut self, queue: ControlQueue) -> &mut Outbox<Self::Piece>;

    /// Takes the whole PDUs at the start of `bytes`, which arrived on a queue's connection; returns
    /// their length in bytes. The rest must be passed again with the bytes that follow it.
    fn received(&mut self, queue: ControlQueue, bytes: &[u8], now: u64) -> usize;

    /// Handles the end of a queue's connection that the program has not closed itself.
    fn closed(&mut self, queue: ControlQueue, end: ConnectionEnd, now: u64);

    /// Does the work that is due at `now`: sends Keep Alive, gives up answers that have been
    /// missing for too long, and begins the next attempt after a pause.
    fn timeout(&mut self, now: u64);

    /// When [`timeout`](Self::timeout) has work to do, ns; `None`: only after another event.
    #[must_use]
    fn deadline(&self) -> Option<u64>;
}
