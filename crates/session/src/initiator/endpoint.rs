//! The owner of the connections to one target: an [`Association`](super::association::Association),
//! or the [`AssociationManager`](super::manager::AssociationManager) that it becomes. The program
//! around them has the sockets and the clock, and drives both by the same calls.

use alloc::string::String;

use riopipe_order::attribute::StreamId;

use crate::outbox::Outbox;

/// A connection of an association that belongs to no stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ControlQueue {
    /// The queue to the discovery service of the same address, while no subsystem is named.
    Discovery,
    /// The admin queue.
    Admin,
    /// I/O queue [`DRIVES_QUEUE`](super::association::DRIVES_QUEUE): labels, undo, and saving data
    /// that will be undone.
    Drives,
}

impl ControlQueue {
    /// All control queues, in the order in which their connections must be served.
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

/// No connection could be made. The text is from the program that tried, and names the address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConnectFailure(pub String);

/// How a connection ended, as the program that has the socket reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The target closed it, and nothing broke.
    Closed,
    /// It broke. The text is from the program that has the socket.
    Broken(String),
}

/// The calls by which a program drives the connections to one target; see the [module](self). All
/// times are nanoseconds of one monotonic clock.
pub trait Endpoint {
    /// A payload: data that is written over a queue.
    type Piece;

    /// The connection that must be made now.
    #[must_use]
    fn wants_connection(&self) -> Option<ConnectionId>;

    /// A connection that was [requested](Self::wants_connection) has been made. `is_local`: it does
    /// not leave this machine.
    fn connected(&mut self, connection: ConnectionId, is_local: bool, now: u64);

    /// A connection that was [requested](Self::wants_connection) cannot be made.
    fn connect_failed(&mut self, connection: ConnectionId, failure: ConnectFailure, now: u64);

    /// Whether a queue has a use for its connection. If not, the program sends the contents of the
    /// queue's [outbox](Self::outbox), as far as the connection takes them at once, and closes it.
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

    /// A queue's connection has ended, and this side has not closed it.
    fn closed(&mut self, queue: ControlQueue, end: ConnectionEnd, now: u64);

    /// Time has passed: sends Keep Alive, gives up answers that have been missing for too long, and
    /// continues work that was put off.
    fn timeout(&mut self, now: u64);

    /// When [`timeout`](Self::timeout) has work to do, ns; `None`: not before another event.
    #[must_use]
    fn deadline(&self) -> Option<u64>;
}
