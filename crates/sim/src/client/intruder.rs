//! A plain host that writes one block of a drive, knowing nothing of volumes (T21).

use riopipe_nvme::command::Sqe;
use riopipe_session::initiator::queue_pair::{Data, Event, QpConfig, QueuePair};
use riopipe_session::outbox::Outbox;

use super::server::Server;
use super::wire::Wire;
use crate::block::Content;
use crate::core::Core;
use crate::crc::crc32c;
use crate::machine::subnqn;
use crate::network::{ClientEnd, Role};
use crate::oracle::Where;
use crate::payload::Payload;

/// Intruders are counted from here where initiators are counted from 0.
pub const FIRST: usize = 100;

struct Queue {
    pair: QueuePair<Payload>,
    out: Outbox<Payload>,
    wire: Wire,
}

/// See [the module](self).
pub struct Intruder {
    index: usize,
    server: Server,
    queue: Option<Queue>,
    /// Where it writes.
    pub at: Where,
    /// What it writes.
    pub content: Content,
    over: bool,
}

impl Intruder {
    /// An intruder that has not begun.
    #[must_use]
    pub fn new(index: usize, at: Where, content: Content) -> Self {
        let hostnqn = format!("nqn.2026-01.io.example:intruder{index}");
        let config = QpConfig::admin(hostnqn, [0xee; 16], subnqn(at.machine), crc32c);
        let server = Server::new(at.machine as u16, config);
        Self { index: FIRST + index, server, queue: None, at, content, over: false }
    }

    fn end(&self, role: Role) -> ClientEnd {
        ClientEnd { client: self.index, life: 0, role }
    }

    /// Whether it has been answered, or never will be.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.over
    }

    /// Begins, or goes on.
    pub fn tick(&mut self, core: &mut Core) {
        if !self.over {
            let end = self.end(Role::Admin(0));
            self.server.tick(end, core);
        }
    }

    /// Bytes have come; whether it was told that its write is done.
    pub fn receive(&mut self, role: Role, conn: usize, bytes: &[u8], core: &mut Core) -> bool {
        if self.over {
            return false;
        }
        if matches!(role, Role::Admin(_)) {
            if self.server.admin_bytes(conn, bytes, core).is_ok() && self.server.is_up() {
                self.connect(core);
            }
            return false;
        }
        let Some(Queue { pair, out, wire }) = &mut self.queue else { return false };
        let (mut ready, mut done) = (false, None);
        let fed = wire.feed(bytes, |bytes| {
            pair.receive(bytes, out, |event| match event {
                Event::Ready { .. } => ready = true,
                Event::Data { .. } => {}
                Event::Done { cqe, .. } => done = Some(cqe.status().is_ok()),
            })
        });
        if ready {
            let payload = [Payload::new(&[self.content], &std::sync::Arc::default())];
            let sqe = Sqe::write(self.at.drive as u32 + 1, u64::from(self.at.lba), 1);
            let sent = pair.submit(sqe, 1, Data::Write(&payload), out);
            debug_assert!(sent.is_ok(), "{sent:?}");
        }
        wire.send(out, core);
        if fed.is_err() || done.is_some() {
            self.close(core);
        }
        done == Some(true)
    }

    fn connect(&mut self, core: &mut Core) {
        if self.queue.is_some() {
            return;
        }
        let Some(mut pair) = self.server.io_queue(1, 4) else { return };
        let wire = Wire::new(core.connect(self.end(Role::Undo(0)), self.at.machine));
        let mut out = Outbox::new();
        pair.start(&mut out);
        wire.send(&mut out, core);
        self.queue = Some(Queue { pair, out, wire });
    }

    /// One of its connections has ended, or it is to end.
    pub fn close(&mut self, core: &mut Core) {
        self.over = true;
        if let Some(queue) = self.queue.take() {
            queue.wire.close(core);
        }
        self.server.lose("it leaves", core);
    }
}
