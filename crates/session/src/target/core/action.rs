//! The actions of a core that its shell carries out.

use alloc::boxed::Box;

use riopipe_order::probe::{self, Rare};

use super::super::env::TargetEnv;
use super::connection::{Connection, Interest, Transport};
use super::{ConnKey, TargetCore};

/// An action that the shell carries out for a core.
pub enum Action<E: TargetEnv, T> {
    /// Accept connections from now on, or stop accepting until the next such action.
    Listen(bool),
    /// Send the bytes of [`outgoing`](TargetCore::outgoing), until there are no more, or the socket
    /// takes no more ([`blocked`](TargetCore::blocked)), or it fails
    /// ([`closed`](TargetCore::closed)).
    Send(ConnKey),
    /// All of the connection's bytes are sent. Close its sending direction.
    FinishSending(ConnKey),
    /// Watch the connection's socket for `interest` from now on.
    Watch {
        /// The connection.
        key: ConnKey,
        /// The events to watch for.
        interest: Interest,
        /// Whether this core has not watched the socket before.
        is_new: bool,
    },
    /// Stop watching the connection's socket, and send the connection to another core, as
    /// [`Message::Adopt`](super::Message::Adopt).
    HandOver {
        /// The other core.
        core: usize,
        /// The connection.
        connection: Box<Connection<E, T>>,
    },
    /// This core stops, and hands over no more connections. Inform all others, by
    /// [`Message::MovesEnded`](super::Message::MovesEnded) with its index.
    EndMoves,
    /// The connection is over: its socket is to be closed.
    Drop(Box<Connection<E, T>>),
}

impl<E: TargetEnv, T: Transport> TargetCore<E, T> {
    /// The next action of this round; `None` when all is done. First it ends the batch of the device
    /// operations of this round.
    ///
    /// Each action is to be carried out before the next is asked for.
    pub fn next_action(&mut self, env: &mut E) -> Option<Action<E, T>> {
        self.end_batch(env);
        let listens = self.listens();
        if core::mem::replace(&mut self.accept.listens, listens) != listens {
            return Some(Action::Listen(listens));
        }
        while let Some(&at) = self.touched.get(self.handled) {
            // The same connection is asked again until nothing is to be done for it.
            if let Some(action) = self.action_for(at, env.now()) {
                return Some(action);
            }
            self.handled += 1;
            if let Some(connection) = self.get(at) {
                connection.is_touched = false;
            }
        }
        self.touched.clear();
        self.handled = 0;
        self.stopping.must_inform_others(self.config.index).then_some(Action::EndMoves)
    }

    /// The next action for a connection that has changed; `None` if none is left.
    fn action_for(&mut self, at: u32, now: u64) -> Option<Action<E, T>> {
        let key = ConnKey(at);
        let stop = self.stopping.phase(now);
        let connection = self.get(at)?;
        if connection.may_send() {
            return Some(Action::Send(key));
        }
        if connection.must_finish_sending() {
            return Some(Action::FinishSending(key));
        }
        if connection.may_be_dropped(now, stop) {
            let connection = self.take_out(at)?;
            if let Some(core) = connection.counted_by {
                self.config.queues.remove(core);
            }
            return Some(Action::Drop(connection));
        }
        if let Some(core) = self.count_queue(at)
            && core != self.config.index
        {
            probe::hit(Rare::HandedOver);
            return self.take_out(at).map(|connection| Action::HandOver { core, connection });
        }
        let connection = self.get(at)?;
        let interest = connection.interest();
        if connection.watched != Some(interest) {
            let is_new = connection.watched.replace(interest).is_none();
            return Some(Action::Watch { key, interest, is_new });
        }
        None
    }

    /// Chooses a core for a connection that has just become an I/O queue, and counts the queue
    /// there. `None` for every other connection, and for one that is counted already.
    fn count_queue(&mut self, at: u32) -> Option<usize> {
        let Self { connections, config, stopping, .. } = self;
        let connection = connections.get_mut(at as usize)?.as_deref_mut()?;
        if connection.counted_by.is_some() || connection.session.qid().is_none_or(|qid| qid == 0) {
            return None;
        }
        // Device operations carry the connection's key. A core that stops has promised to move
        // no connection to another core.
        let stays = stopping.is_asked() || connection.is_ending() || !connection.is_quiet();
        let core = if stays {
            config.queues.add(config.index);
            config.index
        } else {
            config.queues.choose()
        };
        connection.counted_by = Some(core);
        Some(core)
    }
}
