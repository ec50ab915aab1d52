//! What one core of a target tells another.

use alloc::boxed::Box;

use riopipe_order::probe::{self, Plant};

use super::super::env::TargetEnv;
use super::super::shared::ConnId;
use super::connection::Connection;

/// A message from one core to another, or to itself.
///
/// The shell carries messages from one core to another in the order in which they were sent, each
/// once. Messages of different senders may arrive in any order.
pub enum Message<E: TargetEnv, T> {
    /// The connection is an I/O queue that is the receiver's from now on.
    Adopt(Box<Connection<E, T>>),
    /// Something was left for this connection
    /// ([`TargetEnv::notify`](super::super::TargetEnv::notify)). Every core is told: only the core
    /// that has the connection knows.
    Notice(ConnId),
    /// The core with this index stops: it gives no connection to another core any more. Told by
    /// every core to all others. A core that ends without having stopped must be spoken for, or the
    /// others wait for it.
    WindsUp(usize),
}

impl<E: TargetEnv, T> Message<E, T> {
    /// The messages by which `cores` cores are told that something was left for a connection, each
    /// with its receiver: all cores, the sender included.
    pub fn notices(conn: ConnId, cores: usize) -> impl Iterator<Item = (usize, Self)> {
        let told = |core: &usize| *core == 0 || !probe::planted(Plant::T8NoticeLost);
        (0..cores).filter(told).map(move |core| (core, Self::Notice(conn)))
    }

    /// The messages by which a core tells all others of `cores` cores that it winds up, each with
    /// its receiver.
    pub fn winding_up(index: usize, cores: usize) -> impl Iterator<Item = (usize, Self)> {
        (0..cores).filter(move |core| *core != index).map(move |core| (core, Self::WindsUp(index)))
    }
}
