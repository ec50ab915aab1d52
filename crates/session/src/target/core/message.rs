//! The messages between the cores of a target.

use alloc::boxed::Box;

use riopipe_order::probe::{self, Plant};

use super::super::env::TargetEnv;
use super::super::ids::ConnId;
use super::connection::Connection;

/// A message from one core to another, or to itself.
///
/// The shell carries messages from one core to another in the order in which they were sent, each
/// once. Messages of different senders may arrive in any order.
pub enum Message<E: TargetEnv, T> {
    /// The connection is an I/O queue that belongs to the receiver from now on.
    Adopt(Box<Connection<E, T>>),
    /// A notice was left for this connection
    /// ([`TargetEnv::notify`](super::super::TargetEnv::notify)). Every core receives the message,
    /// because only the core that has the connection knows it.
    Notice(ConnId),
    /// The core with this index stops: it moves no connection to another core any more. Every core
    /// sends this to all others. If a core ends without having stopped, its shell must send it for
    /// the core, or the others wait for it.
    MovesEnded(usize),
}

impl<E: TargetEnv, T> Message<E, T> {
    /// The messages that inform `cores` cores of a notice for a connection, each with its receiver:
    /// all cores, the sender included.
    pub fn notices(conn: ConnId, cores: usize) -> impl Iterator<Item = (usize, Self)> {
        let receives = |core: &usize| *core == 0 || !probe::is_bug_planted(Plant::T8NoticeLost);
        (0..cores).filter(receives).map(move |core| (core, Self::Notice(conn)))
    }

    /// The messages that inform all others of `cores` cores that a core moves no connection any
    /// more, each with its receiver.
    pub fn moves_ended(index: usize, cores: usize) -> impl Iterator<Item = (usize, Self)> {
        (0..cores)
            .filter(move |core| *core != index)
            .map(move |core| (core, Self::MovesEnded(index)))
    }
}
