//! A plain host: it reads and writes blocks of a drive with the standard's commands, and does not
//! know volumes (trap T21).

use std::sync::Arc;

use riopipe_nvme::command::Sqe;
use riopipe_session::initiator::association::AssociationConfig;
use riopipe_session::initiator::queue_pair::{Data, Event, QueuePair};
use riopipe_session::outbox::Outbox;
use riopipe_session::wire as rio;
use riopipe_session::wire::status::GUARDED;

use super::server::{Server, TargetEvent, association};
use super::wire::Wire;
use crate::block::{self, BLOCK, Content};
use crate::core::{Core, Ev, US};
use crate::drive::LABEL_BLOCKS;
use crate::machine::{VOLUME, subnqn};
use crate::network::{ClientEnd, Role};
use crate::oracle::{Oracle, Where};
use crate::payload::Payload;

/// The number of the first plain host. Initiators are counted from 0.
pub const FIRST: usize = 100;
/// The longest pause between two of its operations, µs.
const PAUSE_US: u64 = 3_000;

struct Queue {
    pair: QueuePair<Payload>,
    out: Outbox<Payload>,
    wire: Wire,
}

/// The answer to one of its commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostAnswer {
    /// The block is written.
    Written,
    /// The block is durable.
    Flushed,
    /// The block has this content.
    Read(Content),
    /// The write was refused.
    Refused,
}

/// The answer that the host waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Nothing,
    Write,
    Flush,
    Read,
}

/// A plain host that reads and writes blocks of one drive.
pub struct PlainHost {
    index: usize,
    config: AssociationConfig,
    server: Server,
    queue: Option<Queue>,
    /// The block that it writes or reads.
    pub at: Where,
    /// The content that it writes.
    pub content: Content,
    /// The volume had no owner that excluded the host when the command arrived, or, for a write, at
    /// a later moment.
    pub free: bool,
    /// The generation of the volume's last owner at that time.
    pub generation: u32,
    /// How often a FLUSH of any plain host had fixed the content of the block when the command
    /// arrived.
    pub held_count: u64,
    /// The volume was free all the time, so there was no reason to refuse the command.
    pub must_accept: bool,
    /// The command, or a part of it, has arrived at the machine.
    has_arrived: bool,
    operation: Operation,
    bytes: Vec<u8>,
    /// The number of operations left.
    left: u32,
    /// The host asks the target to forget the volume's log before it begins.
    forgets: bool,
    over: bool,
}

impl PlainHost {
    /// A plain host that has not begun. It begins with a write.
    #[must_use]
    pub fn new(index: usize, at: Where, content: Content, more: u32, forgets: bool) -> Self {
        let hostnqn = format!("nqn.2026-01.io.example:plain_host{index}");
        let config = association(hostnqn, [0xee; 16], subnqn(at.machine));
        let config = AssociationConfig { report_ns: None, ..config };
        let server = Server::new(at.machine as u16);
        Self {
            index: FIRST + index,
            config,
            server,
            queue: None,
            at,
            content,
            free: false,
            generation: 0,
            held_count: 0,
            must_accept: false,
            has_arrived: false,
            operation: Operation::Nothing,
            bytes: vec![0; BLOCK],
            left: more,
            forgets,
            over: false,
        }
    }

    fn end(&self, role: Role) -> ClientEnd {
        ClientEnd { client: self.index, incarnation: 0, role }
    }

    /// Whether all its commands were answered, or the host has ended before.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.over
    }

    /// Begins its first operation.
    pub fn start(&mut self, core: &mut Core) {
        let end = self.end(Role::Admin(0));
        self.server.attach(self.config.clone(), end, core);
        self.take_events(core);
    }

    /// Notes that bytes of the host have arrived at its machine. A FLUSH does not write the block
    /// again, so the owner at its arrival is of no interest.
    pub fn bytes_arrived(&mut self, oracle: &mut Oracle, now: u64) {
        if !matches!(self.operation, Operation::Write | Operation::Read) {
            return;
        }
        if !core::mem::replace(&mut self.has_arrived, true) {
            self.must_accept = oracle.must_accept(self.at.machine);
            self.held_count = oracle.held_count(self.at);
        }
        self.note_ownership(oracle, now);
    }

    /// Notes a step of its machine. A busy core carries a write out later than it arrives. The
    /// owner of the volume may have changed by then. The answer may take much longer.
    pub fn machine_steps(&mut self, oracle: &mut Oracle, now: u64) {
        let writes = self.has_arrived && self.operation == Operation::Write;
        if writes && !oracle.is_completed(self.content) {
            self.must_accept &= oracle.must_accept(self.at.machine);
            self.note_ownership(oracle, now);
        }
    }

    fn note_ownership(&mut self, oracle: &mut Oracle, now: u64) {
        if oracle.is_in_use(self.at.machine, now) {
            return;
        }
        (self.free, self.generation) = (true, oracle.generation());
        if self.operation == Operation::Write {
            oracle.plain_write_permitted(self.at, self.content);
        }
    }

    /// Handles a deadline for its target.
    pub fn wake(&mut self, core: &mut Core) {
        if !self.over {
            let end = self.end(Role::Admin(0));
            self.server.wake(end, core);
            self.take_events(core);
        }
    }

    /// Handles the event of its target. The host ends when the target is lost.
    fn take_events(&mut self, core: &mut Core) {
        while let Some(event) = self.server.event(core) {
            if matches!(event, TargetEvent::Lost { .. }) {
                return self.close(core);
            }
        }
    }

    /// Begins its next operation, on any block of the drive except the labels, which it would
    /// destroy.
    pub fn begin_next(&mut self, core: &mut Core) {
        if self.over || self.left == 0 || self.queue.is_none() {
            return self.close(core);
        }
        self.left -= 1;
        let blocks = core.scenario.machines[self.at.machine].blocks;
        self.at.lba = core.rng.range(LABEL_BLOCKS.into(), u64::from(blocks) - 1) as u32;
        (self.free, self.must_accept, self.has_arrived) = (false, false, false);
        if core.rng.one_in(3) {
            self.send(Operation::Read, core);
        } else {
            self.content = core.oracle.next_number();
            self.send(Operation::Write, core);
        }
    }

    fn send(&mut self, operation: Operation, core: &mut Core) {
        let Some(Queue { pair, out, wire }) = &mut self.queue else { return };
        let (nsid, lba) = (self.at.drive as u32 + 1, u64::from(self.at.lba));
        let payload = [Payload::new(&[self.content], &Arc::default())];
        let (sqe, data) = match operation {
            Operation::Nothing => return,
            Operation::Write => (Sqe::write(nsid, lba, 1), Data::Write(&payload)),
            Operation::Flush => (Sqe::flush(nsid), Data::None),
            Operation::Read => (Sqe::read(nsid, lba, 1), Data::Read(BLOCK as u32)),
        };
        self.operation = operation;
        let sent = pair.submit(sqe, 1, data, out);
        debug_assert!(sent.is_ok(), "{sent:?}");
        wire.send(out, core);
    }

    /// Receives bytes. Returns the answer in them.
    pub fn receive(
        &mut self,
        role: Role,
        conn: usize,
        bytes: &[u8],
        core: &mut Core,
    ) -> Option<HostAnswer> {
        if self.over {
            return None;
        }
        if matches!(role, Role::Admin(_)) {
            let end = self.end(Role::Admin(0));
            self.server.received(conn, bytes, end, core);
            self.take_events(core);
            if !self.over && self.server.is_up() {
                self.connect(core);
            }
            return None;
        }
        let Queue { pair, out, wire } = self.queue.as_mut()?;
        let into = &mut self.bytes;
        let (mut ready, mut done) = (false, None);
        let fed = wire.feed(bytes, |bytes| {
            pair.receive(bytes, out, |event| match event {
                Event::Ready { .. } => ready = true,
                Event::Data { offset, bytes, .. } => {
                    let at = offset as usize;
                    into[at..at + bytes.len()].copy_from_slice(bytes);
                }
                Event::Done { cqe, .. } => done = Some(cqe.status()),
            })
        });
        wire.send(out, core);
        if fed.is_err() {
            self.close(core);
        } else if ready {
            self.send(Operation::Write, core);
        }
        let answer = match (done?, self.operation) {
            (_, Operation::Nothing) => None,
            (status, Operation::Write) if status.is(GUARDED) => Some(HostAnswer::Refused),
            (status, _) if !status.is_ok() => None,
            (_, Operation::Write) => Some(HostAnswer::Written),
            (_, Operation::Flush) => Some(HostAnswer::Flushed),
            (_, Operation::Read) => Some(HostAnswer::Read(block::name(&self.bytes))),
        };
        if answer == Some(HostAnswer::Written) {
            self.send(Operation::Flush, core);
        } else {
            self.operation = Operation::Nothing;
            let pause = core.rng.below(PAUSE_US) * US;
            core.after(pause, Ev::WakePlainHost(self.index - FIRST));
        }
        answer
    }

    fn connect(&mut self, core: &mut Core) {
        if self.queue.is_some() {
            return;
        }
        let Some(queue) = self.server.io_queue(1, 3) else { return };
        let mut pair = QueuePair::open(queue);
        if core::mem::take(&mut self.forgets) {
            let forget = rio::release_command(VOLUME, true);
            let end = self.end(Role::Admin(0));
            self.server.send_command(forget, &[], end, core);
        }
        let wire = Wire::new(core.connect(self.end(Role::Undo(0)), self.at.machine));
        let mut out = Outbox::new();
        pair.start(&mut out);
        wire.send(&mut out, core);
        self.queue = Some(Queue { pair, out, wire });
    }

    /// Ends the host: one of its connections has ended, or must end.
    pub fn close(&mut self, core: &mut Core) {
        if core::mem::replace(&mut self.over, true) {
            return;
        }
        if let Some(queue) = self.queue.take() {
            queue.wire.close(core);
        }
        let end = self.end(Role::Admin(0));
        self.server.leave(end, core);
    }
}
