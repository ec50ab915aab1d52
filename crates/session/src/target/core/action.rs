//! The actions that a core asks its shell to carry out, and the decision which one is next.

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
    /// Watch the connection's socket for these events from now on.
    Watch {
        /// The connection.
        key: ConnKey,
        /// The events to watch for.
        interest: Interest,
        /// Whether this core has not watched the socket before.
        is_new: bool,
    },
    /// Stop watching the connection's socket. Send the connection to another core in a
    /// [`Message::Adopt`](super::Message::Adopt).
    HandOver {
        /// The other core.
        core: usize,
        /// The connection.
        connection: Box<Connection<E, T>>,
    },
    /// This core stops and moves no connection to another core any more. Send
    /// [`Message::MovesEnded`](super::Message::MovesEnded) with the index of this core to all
    /// others.
    EndMoves,
    /// The connection has ended. Close its socket.
    Drop(Box<Connection<E, T>>),
}

impl<E: TargetEnv, T: Transport> TargetCore<E, T> {
    /// The next action of this round; `None` if none is left. Ends the batch of this round's device
    /// operations first.
    ///
    /// The shell must carry out each action before it asks for the next one.
    pub fn next_action(&mut self, env: &mut E) -> Option<Action<E, T>> {
        self.end_batch(env);
        let accepts = self.accepts_connections();
        if core::mem::replace(&mut self.accept.listens, accepts) != accepts {
            return Some(Action::Listen(accepts));
        }
        while let Some(&at) = self.changed.get(self.handled_count) {
            // The same connection is checked again until it needs no action any more.
            if let Some(action) = self.action_for(at, env.now()) {
                return Some(action);
            }
            self.handled_count += 1;
            if let Some(connection) = self.get(at) {
                connection.is_in_changed_list = false;
            }
        }
        self.changed.clear();
        self.handled_count = 0;
        self.stopping.must_inform_others(self.config.index).then_some(Action::EndMoves)
    }

    /// The next action for the connection at place `at`; `None` if none is left.
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
            if let Some(core) = connection.counted_by_core {
                self.config.queues.remove(core);
            }
            return Some(Action::Drop(connection));
        }
        if let Some(core) = self.assign_queue_to_core(at)
            && core != self.config.index
        {
            probe::count_rare(Rare::HandedOver);
            return self.take_out(at).map(|connection| Action::HandOver { core, connection });
        }
        let connection = self.get(at)?;
        let interest = connection.interest();
        if connection.watched_for != Some(interest) {
            let is_new = connection.watched_for.replace(interest).is_none();
            return Some(Action::Watch { key, interest, is_new });
        }
        None
    }

    /// Chooses a core for a connection that has just become an I/O queue, and counts the queue
    /// there. Returns `None` for every other connection, and for a queue that is counted already.
    fn assign_queue_to_core(&mut self, at: u32) -> Option<usize> {
        let Self { connections, config, stopping, .. } = self;
        let connection = connections.get_mut(at as usize)?.as_deref_mut()?;
        let is_io_queue = connection.session.is_admitted()
            && connection.session.qid().is_some_and(|qid| qid != 0);
        if connection.counted_by_core.is_some() || !is_io_queue {
            return None;
        }
        // The results of device operations in flight would find a moved connection no more, because
        // they carry its key on this core. A core that stops moves no connection at all.
        let must_stay = stopping.is_asked() || connection.is_ending() || !connection.is_quiet();
        let core = if must_stay {
            config.queues.add(config.index);
            config.index
        } else {
            config.queues.add_to_least_loaded()
        };
        connection.counted_by_core = Some(core);
        Some(core)
    }
}
