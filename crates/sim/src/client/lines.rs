//! A stream's connections: made, lost, made again.

use riopipe_order::attribute::StreamId;
use riopipe_order::engine::Cause;
use riopipe_session::initiator::queue_pair::QueuePair;
use riopipe_session::initiator::reconnect::ConnectRequest;
use riopipe_session::initiator::stream::LinkState;

use super::stream::Stream;
use super::wire::Wire;
use crate::core::Core;
use crate::network::{ClientEnd, Role};
use crate::payload::Payload;

/// The connection to a server.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) wire: Option<Wire>,
    /// A connection has been asked for.
    asked: bool,
    replaying: bool,
    /// How often it was made again.
    again: u16,
    /// How often in a row it was lost before anything flowed.
    vain: u32,
}

impl Stream {
    /// Connects to every server.
    pub(super) fn start(&mut self, end: ClientEnd, core: &mut Core) {
        for (server, line) in self.lines.iter_mut().enumerate() {
            let role = Role::Stream { stream: self.id, server: server as u16 };
            line.wire = Some(Wire::new(core.connect(ClientEnd { role, ..end }, server)));
        }
        self.session.start(core.now);
        self.send(core);
    }

    /// Which server a connection leads to, if it is one of the stream's.
    #[must_use]
    pub(super) fn server_of(&self, conn: usize) -> Option<u16> {
        let is = |line: &Line| line.wire.as_ref().is_some_and(|wire| wire.conn == conn);
        self.lines.iter().position(is).map(|server| server as u16)
    }

    pub(super) fn send(&mut self, core: &mut Core) {
        for (server, line) in self.lines.iter().enumerate() {
            if let Some(wire) = &line.wire {
                wire.send(self.session.outbox(server as u16), core);
            }
        }
    }

    /// Bytes have come from a server.
    pub(super) fn receive(&mut self, server: u16, bytes: &[u8], core: &mut Core) {
        let Self { session, lines, reading, .. } = self;
        let Some(wire) = &mut lines[usize::from(server)].wire else { return };
        let now = core.now;
        let into = &mut reading.bytes;
        let fed = wire.feed(bytes, |bytes| {
            session.receive(server, now, bytes, &mut |offset, bytes| {
                if let Some(part) = into.get_mut(offset..offset + bytes.len()) {
                    part.copy_from_slice(bytes);
                }
            })
        });
        if let Err(error) = fed {
            self.lose(server, Cause::Disconnected, &error.to_string(), core);
        }
    }

    /// The connection to a server is gone.
    pub(super) fn lose(&mut self, server: u16, cause: Cause, why: &str, core: &mut Core) {
        self.session.lost(server, cause, core.now);
        let line = &mut self.lines[usize::from(server)];
        let Some(wire) = line.wire.take() else { return };
        line.replaying = false;
        wire.close(core);
        let id = self.id;
        core.trace(|| format!("stream {id}: lost target {server}: {why}"));
    }

    /// The target will not have the stream back.
    pub(super) fn give_up(&mut self, server: u16, cause: Cause, core: &mut Core) {
        if let Some(wire) = self.lines[usize::from(server)].wire.take() {
            wire.close(core);
        }
        self.session.give_up(server, cause);
    }

    /// The connections that are wanted, each asked for once; the queues have room for `depth`
    /// commands.
    pub(super) fn wants_connections(&mut self, depth: usize) -> Vec<ConnectRequest> {
        if self.failed {
            return Vec::new();
        }
        let wanted: Vec<u16> = self.session.wants_rejoin().collect();
        let request = |server: u16| {
            let qid = self.next_qid(server);
            let line = &mut self.lines[usize::from(server)];
            let asked = core::mem::replace(&mut line.asked, true);
            let (stream, attempts) = (StreamId(self.id), line.vain);
            (!asked).then_some(ConnectRequest { stream, server, qid, depth, attempts })
        };
        wanted.into_iter().filter_map(request).collect()
    }

    /// The queue that the next connection to a server is to be: not always the one before, which
    /// the target may not have given up yet.
    pub(super) fn next_qid(&self, server: u16) -> u16 {
        let again = self.lines[usize::from(server)].again;
        2 + self.id + 8 * (again / 2 % 3)
    }

    /// A connection to a server is there, that was asked for, perhaps in another life.
    pub(super) fn rejoin(
        &mut self,
        server: u16,
        wire: Wire,
        queue: QueuePair<Payload>,
        core: &mut Core,
    ) {
        let line = &mut self.lines[usize::from(server)];
        let asked = core::mem::take(&mut line.asked);
        if !asked || self.failed || self.session.link(server) != LinkState::Down {
            return wire.close(core);
        }
        line.wire = Some(wire);
        line.again += 1;
        line.vain += 1;
        self.session.rejoin(server, queue, core.now);
        let id = self.id;
        core.trace(|| format!("stream {id}: connects to target {server} again"));
        self.send(core);
    }

    /// A server is reached by a new association: the connection of the one before is gone, also one
    /// that is idle and has not noticed.
    pub(super) fn has_association(&mut self, server: u16, core: &mut Core) {
        self.lose(server, Cause::Disconnected, "its association has ended", core);
    }

    /// Gives up what the session has given up, and notes replays that begin.
    pub(super) fn look_at_links(&mut self, core: &mut Core) {
        for (server, line) in self.lines.iter_mut().enumerate() {
            let link = self.session.link(server as u16);
            if matches!(link, LinkState::Down | LinkState::Dead)
                && let Some(wire) = line.wire.take()
            {
                wire.close(core);
            }
            if matches!(link, LinkState::Up | LinkState::Replaying) {
                line.vain = 0;
            }
            let replaying = link == LinkState::Replaying;
            if replaying && !line.replaying {
                core.replays = (core.replays.0 + 1, core.events);
            }
            line.replaying = replaying;
        }
    }

    /// Whether it replays something right now.
    #[must_use]
    pub(super) fn is_replaying(&self) -> bool {
        self.lines.iter().any(|line| line.replaying)
    }

    /// Closes all connections at once.
    pub(super) fn drop_wires(&mut self, core: &mut Core) {
        for wire in self.lines.iter_mut().filter_map(|line| line.wire.take()) {
            wire.close(core);
        }
    }

    /// Time goes by.
    pub(super) fn tick(&mut self, core: &mut Core) {
        if self.failed {
            return;
        }
        while let Some(server) = self.session.stalled(core.now) {
            self.lose(server, Cause::TimedOut, "it makes no progress", core);
        }
    }
}
