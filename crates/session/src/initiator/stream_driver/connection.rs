//! The connections of a stream: their loss, the requests for new ones, and their return.

use riopipe_order::engine::{Cause, Payload};
use riopipe_order::probe::{self, Plant};

use super::{StreamDriver, StreamEvent};
use crate::initiator::reconnect::ConnectRequest;
use crate::initiator::stream::{ConnectionState, StreamQueue};

/// The driver's state of one link of a stream. The session has the rest.
#[derive(Debug)]
pub(super) struct ServerConnection {
    /// The id of its queue.
    pub(super) qid: u16,
    /// The number of commands for which its queue has space.
    pub(super) depth: usize,
    /// Whether the shell has a connection that it has not been asked to close.
    is_open: bool,
    /// Whether a connection has been requested and not been made yet.
    is_requested: bool,
    /// The number of connections that were made since the stream was last up here.
    attempts: u32,
    /// The loss of the connection, until the stream is up again.
    loss: Option<ConnectionLoss>,
}

/// The loss of a connection.
#[derive(Clone, Copy, Debug)]
struct ConnectionLoss {
    /// The time from which the loss counts, ns.
    since: u64,
    /// The number of requests that the stream had replayed before the loss, on all servers.
    replayed_before: u64,
}

impl ServerConnection {
    pub(super) const fn new(qid: u16, depth: usize) -> Self {
        Self { qid, depth, is_open: true, is_requested: false, attempts: 0, loss: None }
    }
}

impl<P: Payload + AsRef<[u8]>> StreamDriver<P> {
    /// Whether a link has a connection. If not, the shell drops everything that it still receives
    /// there.
    #[inline]
    #[must_use]
    pub fn is_open(&self, link: u16) -> bool {
        !self.session.is_lost(link)
    }

    /// Handles the end of the connection of a link. The shell also calls this after the target
    /// has broken the protocol.
    #[cold]
    pub fn closed(&mut self, link: u16, now: u64) {
        self.session.lost(link, Cause::Disconnected, now);
        self.connections_changed = true;
    }

    /// Takes a [requested](StreamEvent::Connect) connection, with a queue that has not been
    /// started. Returns false if the stream does not need the connection any more. The shell then
    /// closes it.
    #[cold]
    pub fn connected(&mut self, link: u16, queue: StreamQueue<P>, now: u64) -> bool {
        let Some(connection) = self.servers.get_mut(usize::from(link)) else { return false };
        let was_requested = core::mem::take(&mut connection.is_requested);
        if !was_requested || self.session.connection(link) != ConnectionState::Down {
            return false;
        }
        connection.attempts += 1;
        connection.is_open = true;
        self.session.rejoin(link, queue, now);
        self.connections_changed = true;
        self.has_unsent = true;
        true
    }

    /// Handles the end of a server's association: its connections count as lost, also if they are
    /// open. The target may have lost its power while nothing was in flight. A connection that is
    /// being made could join the next association before the target is checked again (trap T27).
    /// Reads of other streams wait until this stream is bound again (promise P9).
    ///
    /// The loss counts from `since`, ns: the last sign of life of the target (see
    /// [`Absence::since`](crate::initiator::manager::Absence::since)).
    #[cold]
    pub fn association_ended(&mut self, server: u16, since: u64) {
        for link in self.session.links_to(server) {
            let is_being_set_up = self.session.connection(link) == ConnectionState::Joining;
            if self.is_open(link)
                && !(is_being_set_up && probe::is_bug_planted(Plant::T27LateConnect))
            {
                self.closed(link, since);
            }
        }
    }

    /// The server of a link.
    #[inline]
    #[must_use]
    pub fn server_of(&self, link: u16) -> u16 {
        self.session.server_of(link)
    }

    /// The time from which the loss of the first lost link to a server counts, ns, if one is lost.
    #[must_use]
    pub fn lost_since(&self, server: u16) -> Option<u64> {
        self.session.links_to(server).filter_map(|link| self.session.lost_since(link)).min()
    }

    /// Gives up a server that will not come back. The stream fails (promise P6).
    #[cold]
    pub fn give_up(&mut self, server: u16, cause: Cause) {
        for link in self.session.links_to(server) {
            self.session.give_up(link, cause);
        }
        self.connections_changed = true;
    }

    /// Checks the connections if some are not up, and adds the events that follow: to close lost
    /// connections, to make new ones, and to report servers that are back. The shell calls it at
    /// the end of each round.
    #[inline]
    pub fn check_connections(&mut self, now: u64) {
        if self.connections_changed {
            self.check_each_connection(now);
        }
    }

    /// As [`check_connections`](Self::check_connections), for connections that are not all up.
    #[cold]
    fn check_each_connection(&mut self, now: u64) {
        self.connections_changed = false;
        let has_failed = self.session.engine().failure().is_some();
        let replayed_count = self.session.engine().replayed_count();
        let session = &self.session;
        for (link, connection) in (0..).zip(&mut self.servers) {
            let state = session.connection(link);
            match state {
                ConnectionState::Down | ConnectionState::Dead => {
                    connection.loss.get_or_insert(ConnectionLoss {
                        since: session.lost_since(link).unwrap_or(now),
                        replayed_before: replayed_count,
                    });
                    if connection.is_open {
                        connection.is_open = false;
                        self.events.push_back(StreamEvent::ConnectionEnded { link });
                    }
                }
                ConnectionState::Joining | ConnectionState::Replaying => {}
                ConnectionState::Up => {
                    connection.attempts = 0;
                    if let Some(loss) = connection.loss.take() {
                        self.events.push_back(StreamEvent::Back {
                            server: session.server_of(link),
                            unreachable_ns: now.saturating_sub(loss.since),
                            replayed: replayed_count - loss.replayed_before,
                        });
                    }
                }
            }
            // The connection must be checked again until it is up. A stream that has failed makes
            // no new connections.
            let is_settled = matches!(state, ConnectionState::Up | ConnectionState::Dead);
            self.connections_changed |= !is_settled && !has_failed;
        }
        let Self { session, servers, events, .. } = self;
        for link in session.wants_rejoin() {
            let connection = &mut servers[usize::from(link)];
            if connection.is_requested {
                continue;
            }
            connection.is_requested = true;
            events.push_back(StreamEvent::Connect(ConnectRequest {
                stream: session.config().stream,
                server: session.server_of(link),
                link,
                qid: connection.qid,
                depth: connection.depth,
                attempts: connection.attempts,
            }));
        }
    }
}
