//! The connections of a stream: their loss, the requests for new ones, and their return.

use riopipe_order::engine::{Cause, Payload};
use riopipe_order::probe::{self, Plant};

use super::{StreamDriver, StreamEvent};
use crate::initiator::reconnect::ConnectRequest;
use crate::initiator::stream::{ConnectionState, StreamQueue};

/// The driver's state of a stream's connection to one server. The session has the rest.
#[derive(Debug)]
pub(super) struct ServerConnection {
    pub(super) qid: u16,
    /// The number of commands for which its queue has space.
    pub(super) depth: usize,
    /// The shell has a connection.
    open: bool,
    /// A connection has been requested.
    asked: bool,
    /// The number of connections that have failed.
    attempts: u32,
    /// When the connection was found to be lost, ns, and the number of requests replayed by then.
    lost: Option<(u64, u64)>,
}

impl ServerConnection {
    pub(super) const fn new(qid: u16, depth: usize) -> Self {
        Self { qid, depth, open: true, asked: false, attempts: 0, lost: None }
    }
}

impl<P: Payload + AsRef<[u8]>> StreamDriver<P> {
    /// Whether there is a connection to a server. If not, the shell drops everything that it still
    /// receives from there.
    #[inline]
    #[must_use]
    pub fn is_open(&self, server: u16) -> bool {
        !self.session.is_lost(server)
    }

    /// The connection to a server has ended, or the target broke the protocol.
    #[cold]
    pub fn closed(&mut self, server: u16, now: u64) {
        self.session.lost(server, Cause::Disconnected, now);
        self.unsettled = true;
    }

    /// A [requested](StreamEvent::Connect) connection is made, with a queue that has not been
    /// started. Returns false if the stream does not need it any more: then the shell closes it.
    #[cold]
    pub fn connected(&mut self, server: u16, queue: StreamQueue<P>, now: u64) -> bool {
        let Some(connection) = self.servers.get_mut(usize::from(server)) else { return false };
        let asked = core::mem::take(&mut connection.asked);
        if !asked || self.session.connection(server) != ConnectionState::Down {
            return false;
        }
        connection.attempts += 1;
        connection.open = true;
        self.session.rejoin(server, queue, now);
        self.unsettled = true;
        self.unsent = true;
        true
    }

    /// The association of a server's connections has ended. A connection that is still open is of
    /// no use any more: the target may have lost its power while nothing was in flight. A
    /// connection that is being made may get into the next association (T27). Reads of other
    /// streams wait until this stream is bound again (P9).
    #[cold]
    pub fn association_ended(&mut self, server: u16, now: u64) {
        let is_late = self.session.connection(server) == ConnectionState::Joining;
        if self.is_open(server) && !(is_late && probe::planted(Plant::T27LateConnect)) {
            self.closed(server, now);
        }
    }

    /// A server will not come back: the stream fails (P6).
    #[cold]
    pub fn give_up(&mut self, server: u16, cause: Cause) {
        self.session.give_up(server, cause);
        self.unsettled = true;
    }

    /// Handles the connections that are not up: has the lost ones closed, requests new ones, and
    /// reports those that are back. The shell calls it at the end of each round.
    #[inline]
    pub fn settle(&mut self, now: u64) {
        if self.unsettled {
            self.settle_all(now);
        }
    }

    #[cold]
    fn settle_all(&mut self, now: u64) {
        self.unsettled = false;
        let has_failed = self.session.engine().failure().is_some();
        let replayed = self.session.engine().replayed();
        for (server, connection) in (0..).zip(&mut self.servers) {
            let state = self.session.connection(server);
            match state {
                ConnectionState::Down | ConnectionState::Dead => {
                    connection.lost.get_or_insert((now, replayed));
                    if core::mem::take(&mut connection.open) {
                        self.events.push_back(StreamEvent::Over { server });
                    }
                }
                ConnectionState::Joining | ConnectionState::Replaying => {}
                ConnectionState::Up => {
                    connection.attempts = 0;
                    if let Some((since, before)) = connection.lost.take() {
                        self.events.push_back(StreamEvent::Back {
                            server,
                            unreachable_ns: now.saturating_sub(since),
                            replayed: replayed - before,
                        });
                    }
                }
            }
            // A stream that has failed repairs nothing.
            self.unsettled |=
                !matches!(state, ConnectionState::Up | ConnectionState::Dead) && !has_failed;
        }
        let Self { session, servers, events, .. } = self;
        for server in session.wants_rejoin() {
            let connection = &mut servers[usize::from(server)];
            if core::mem::replace(&mut connection.asked, true) {
                continue;
            }
            events.push_back(StreamEvent::Connect(ConnectRequest {
                stream: session.config().stream,
                server,
                qid: connection.qid,
                depth: connection.depth,
                attempts: connection.attempts,
            }));
        }
    }
}
