//! An initiator's association with one target: attached, kept alive, found again.

use std::collections::BTreeMap;

use riopipe_nvme::command::{Sqe, Status, admin};
use riopipe_order::attribute::VolumeId;
use riopipe_order::probe::{self, Plant};
use riopipe_session::initiator::attach::{Attach, Controller};
use riopipe_session::initiator::known::{Changed, DriveOfVolume, KnownTarget};
use riopipe_session::initiator::opening::{Call, Ticket};
use riopipe_session::initiator::queue_pair::{Data, Event, QpConfig, QueuePair};
use riopipe_session::label::{LABEL_LEN, Label};
use riopipe_session::label_work::LabelIo;
use riopipe_session::outbox::Outbox;

use super::wire::Wire;
use crate::core::{Core, MS};
use crate::crc::crc32c;
use crate::network::{ClientEnd, Role};
use crate::oracle::Drives;
use crate::payload::Payload;

/// A target is asked for a sign of life this often, ns.
const PING_NS: u64 = 10 * MS;
/// A target that owes an answer on its admin queue for so long is given up, ns.
const ANSWER_NS: u64 = 80 * MS;

/// What an admin command was sent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A sign of life.
    Ping,
    /// The opening of the volume.
    Opening(Ticket),
    /// Taking the volume again after the association had gone.
    Resume,
    /// Giving the volume back.
    Release,
}

/// The end of an admin command.
#[derive(Debug)]
pub(super) struct Ended {
    /// What it was for.
    pub(super) purpose: Purpose,
    /// How it ended, with the data that came.
    pub(super) answer: Result<Vec<u8>, Status>,
}

#[derive(Debug)]
enum State {
    Down { retry_at: u64 },
    Attaching(Box<Attach<Payload>>, Wire),
    Up(Box<QueuePair<Payload>>, Wire),
}

/// An I/O queue of the owner, for undo.
#[derive(Debug)]
struct UndoQueue {
    queue: QueuePair<Payload>,
    out: Outbox<Payload>,
    wire: Wire,
    ready: bool,
    /// A label is being read or written; the bytes that have been read.
    label: Option<Vec<u8>>,
}

/// The name of a label's command; no ticket is the same.
const LABEL: u64 = u64::MAX - 1;

/// A target, as an initiator sees it.
#[derive(Debug)]
pub(super) struct Server {
    index: u16,
    config: QpConfig,
    state: State,
    out: Outbox<Payload>,
    controller: Option<Controller>,
    calls: BTreeMap<u64, (Purpose, Vec<u8>)>,
    next_call: u64,
    heard: u64,
    asked: u64,
    undo: Option<UndoQueue>,
    undo_calls: BTreeMap<u64, Ticket>,
    undo_heard: u64,
    undo_opened: u16,
    label_ended: Option<Result<Vec<u8>, Status>>,
    /// Counts its associations.
    pub(super) association: u32,
    /// The volume was claimed in this association.
    pub(super) claimed: bool,
    /// A claim to have it again is under way.
    pub(super) claiming: bool,
    /// As the volume was opened.
    known: Option<KnownTarget>,
}

/// Commands that have ended, and how.
pub(super) type UndoEnded = Vec<(Ticket, Result<(), Status>)>;

impl Server {
    /// A target that nobody has talked to yet.
    #[must_use]
    pub(super) fn new(index: u16, config: QpConfig) -> Self {
        Self {
            index,
            config,
            state: State::Down { retry_at: 0 },
            out: Outbox::new(),
            controller: None,
            calls: BTreeMap::new(),
            next_call: 1,
            heard: 0,
            asked: 0,
            undo: None,
            undo_calls: BTreeMap::new(),
            undo_heard: 0,
            undo_opened: 0,
            label_ended: None,
            association: 0,
            claimed: false,
            claiming: false,
            known: None,
        }
    }

    /// The volume has been opened: it is this target that is to be found again.
    pub(super) fn is_known(
        &mut self,
        volume: VolumeId,
        generation: u32,
        drives: impl Iterator<Item = DriveOfVolume>,
    ) {
        let now = self.controller.as_ref();
        self.known = now.map(|now| KnownTarget::new(volume, generation, now, drives));
    }

    /// What is not as it was when the volume was opened, in an association made since: the target,
    /// its drives, or their labels, which a newer owner may have rewritten (T8, T27).
    #[must_use]
    pub(super) fn changed(&self, drives: &Drives<'_>) -> Option<Changed> {
        let (known, now) = (self.known.as_ref()?, self.controller.as_ref()?);
        let machine = usize::from(self.index);
        let label = |nsid: u32| {
            let copies = drives.labels(machine, nsid as usize - 1);
            let (older, newer) = copies.split_at(LABEL_LEN);
            Label::newest([older, newer], crc32c)
        };
        let of_labels = || known.namespaces().find_map(|n| known.check_label(n, &label(n)).err());
        known.check(now).err().or_else(of_labels)
    }

    /// Whether its association is there.
    #[must_use]
    pub(super) const fn is_up(&self) -> bool {
        matches!(self.state, State::Up(..))
    }

    /// The admin connection of the association that is there.
    #[must_use]
    pub(super) const fn admin_conn(&self) -> Option<usize> {
        match &self.state {
            State::Up(_, wire) => Some(wire.conn),
            _ => None,
        }
    }

    /// The controller, as last attached.
    #[must_use]
    pub(super) const fn controller(&self) -> Option<&Controller> {
        self.controller.as_ref()
    }

    /// A new I/O queue of the association.
    #[must_use]
    pub(super) fn io_queue(&self, qid: u16, depth: u16) -> Option<QueuePair<Payload>> {
        let controller = self.controller.as_ref().filter(|_| self.is_up())?;
        let mut queue = QueuePair::new(self.config.io_queue(controller.cntlid, qid, depth));
        queue.set_in_capsule(controller.in_capsule_bytes);
        Some(queue)
    }

    /// Time goes by: connects, keeps alive, gives up who owes answers. Whether something that was
    /// asked will not be answered.
    pub(super) fn tick(&mut self, end: ClientEnd, core: &mut Core) -> bool {
        match &mut self.state {
            State::Down { retry_at } if *retry_at <= core.now => {
                let machine = usize::from(self.index);
                let end = ClientEnd { role: Role::Admin(self.index), ..end };
                let wire = Wire::new(core.connect(end, machine));
                let mut attach = Box::new(Attach::new(self.config.clone(), 32));
                attach.start(&mut self.out);
                wire.send(&mut self.out, core);
                self.heard = core.now;
                self.state = State::Attaching(attach, wire);
                false
            }
            State::Down { .. } => false,
            State::Attaching(attach, wire) => {
                if core.now > self.heard + ANSWER_NS {
                    return self.lose("it does not answer", core);
                }
                attach.tick(core.now, &mut self.out);
                wire.send(&mut self.out, core);
                false
            }
            State::Up(..) => {
                if !self.calls.is_empty() && core.now > self.heard + ANSWER_NS {
                    return self.lose("it does not answer", core);
                }
                let waits = |undo: &UndoQueue| !undo.ready || undo.label.is_some();
                if (self.undo.as_ref().is_some_and(waits) || !self.undo_calls.is_empty())
                    && core.now > self.undo_heard + ANSWER_NS
                {
                    self.close_undo(core);
                    return true;
                }
                if self.calls.is_empty() && core.now > self.asked + PING_NS {
                    self.call(Purpose::Ping, Sqe::new(admin::KEEP_ALIVE, 0), &[], 0, core);
                }
                false
            }
        }
    }

    /// The association is gone; always true.
    pub(super) fn lose(&mut self, why: &str, core: &mut Core) -> bool {
        if let State::Attaching(_, wire) | State::Up(_, wire) = &self.state {
            wire.close(core);
        }
        let (index, now) = (self.index, core.now);
        core.trace(|| format!("initiator: lost target {index}: {why}"));
        self.state = State::Down { retry_at: now + core.retry() };
        self.out.clear();
        self.calls.clear();
        self.claimed = false;
        self.claiming = false;
        self.close_undo(core);
        true
    }

    /// Whether so many admin commands wait for an answer that there is no room for many more.
    #[must_use]
    pub(super) fn owes_much(&self) -> bool {
        self.calls.len() >= usize::from(self.config.sqsize) / 2
    }

    /// Sends an admin command.
    pub(super) fn call(
        &mut self,
        purpose: Purpose,
        sqe: Sqe,
        send: &[u8],
        receive: usize,
        core: &mut Core,
    ) {
        let State::Up(queue, wire) = &mut self.state else { return };
        let user = self.next_call;
        self.next_call += 1;
        let data = match (send.is_empty(), receive) {
            (false, _) => Data::Bytes(send),
            (true, 0) => Data::None,
            (true, len) => Data::Read(len as u32),
        };
        if queue.submit(sqe, user, data, &mut self.out).is_err() {
            // The admin queue has more entries than anybody here has calls.
            debug_assert!(false, "the admin queue is full");
            return;
        }
        if self.calls.is_empty() {
            self.heard = core.now;
        }
        self.asked = core.now;
        self.calls.insert(user, (purpose, vec![0; receive]));
        wire.send(&mut self.out, core);
    }

    /// Sends a command of the opening; whether it could be.
    pub(super) fn opening_call(
        &mut self,
        ticket: Ticket,
        call: &Call,
        end: ClientEnd,
        core: &mut Core,
    ) {
        match call {
            Call::Admin { sqe, send, receive } => {
                self.call(Purpose::Opening(ticket), *sqe, send, *receive, core);
            }
            Call::Io { sqe } => {
                self.open_undo(end, core);
                if let Some(undo) = &mut self.undo {
                    if self.undo_calls.is_empty() {
                        self.undo_heard = core.now;
                        core.undos = (core.undos.0 + 1, core.events);
                    }
                    self.undo_calls.insert(ticket.to_bits(), ticket);
                    let sent = undo.queue.submit(*sqe, ticket.to_bits(), Data::None, &mut undo.out);
                    debug_assert!(sent.is_ok(), "{sent:?}");
                    undo.wire.send(&mut undo.out, core);
                }
            }
        }
    }

    /// Does something with a drive's labels, over the queue for undo, which is ready.
    pub(super) fn label_io(&mut self, io: &LabelIo, nsid: u32, core: &mut Core) {
        let Some(undo) = &mut self.undo else { return };
        let mut payload = Vec::new();
        let (sqe, data, page) = match io {
            LabelIo::Read { .. } => {
                let len = 2 * LABEL_LEN;
                (Sqe::read(nsid, 0, 2), Data::Read(len as u32), vec![0; len])
            }
            LabelIo::Flush { .. } => (Sqe::flush(nsid), Data::None, Vec::new()),
            LabelIo::Write { lba, block, .. } => {
                payload.push(Payload::from(block.clone()));
                (Sqe::write(nsid, *lba, 1), Data::Write(&payload), Vec::new())
            }
        };
        undo.label = Some(page);
        self.undo_heard = core.now;
        let sent = undo.queue.submit(sqe, LABEL, data, &mut undo.out);
        debug_assert!(sent.is_ok(), "{sent:?}");
        undo.wire.send(&mut undo.out, core);
    }

    /// How the label's command has ended, once.
    pub(super) fn take_label(&mut self) -> Option<Result<Vec<u8>, Status>> {
        self.label_ended.take()
    }

    /// Whether a command of this kind can be sent now; makes it so for later.
    pub(super) fn is_ready_for_io(&mut self, end: ClientEnd, core: &mut Core) -> bool {
        self.open_undo(end, core);
        self.undo.as_ref().is_some_and(|undo| undo.ready)
    }

    fn open_undo(&mut self, end: ClientEnd, core: &mut Core) {
        if self.undo.is_some() {
            return;
        }
        // Always the same queue: the target takes it again only when everything that was asked on
        // it before has come back, so that no zeroes of an earlier attempt land late (T8).
        self.undo_opened += 1;
        let ghosts = probe::planted(Plant::T8UndoGhosts);
        let qid = if ghosts { 26 + self.undo_opened % 6 } else { 1 };
        let Some(mut queue) = self.io_queue(qid, 68) else { return };
        let end = ClientEnd { role: Role::Undo(self.index), ..end };
        let wire = Wire::new(core.connect(end, usize::from(self.index)));
        let mut out = Outbox::new();
        queue.start(&mut out);
        wire.send(&mut out, core);
        self.undo = Some(UndoQueue { queue, out, wire, ready: false, label: None });
        self.undo_heard = core.now;
    }

    /// The queue for undo is not needed any more.
    pub(super) fn close_undo(&mut self, core: &mut Core) {
        if let Some(undo) = self.undo.take() {
            undo.wire.close(core);
        }
        self.undo_calls.clear();
        self.label_ended = None;
    }

    /// Bytes have come on the admin queue.
    ///
    /// # Errors
    /// The association is gone.
    pub(super) fn admin_bytes(
        &mut self,
        conn: usize,
        bytes: &[u8],
        core: &mut Core,
    ) -> Result<Vec<Ended>, ()> {
        let mut ended = Vec::new();
        let (now, out) = (core.now, &mut self.out);
        let fed: Result<(), String> = match &mut self.state {
            State::Attaching(attach, wire) if wire.conn == conn => {
                self.heard = now;
                let fed = wire
                    .feed(bytes, |bytes| attach.receive(now, bytes, out))
                    .map_err(|e| e.to_string());
                wire.send(out, core);
                fed
            }
            State::Up(queue, wire) if wire.conn == conn => {
                self.heard = now;
                let calls = &mut self.calls;
                let fed = wire
                    .feed(bytes, |bytes| {
                        queue.receive(bytes, out, |event| match event {
                            Event::Ready { .. } => {}
                            Event::Data { user, offset, bytes } => {
                                if let Some((_, page)) = calls.get_mut(&user) {
                                    let at = offset as usize;
                                    page[at..at + bytes.len()].copy_from_slice(bytes);
                                }
                            }
                            Event::Done { user, cqe } => {
                                if let Some((purpose, page)) = calls.remove(&user) {
                                    let status = cqe.status();
                                    let answer =
                                        if status.is_ok() { Ok(page) } else { Err(status) };
                                    ended.push(Ended { purpose, answer });
                                }
                            }
                        })
                    })
                    .map_err(|e| e.to_string());
                wire.send(out, core);
                fed
            }
            _ => return Ok(ended),
        };
        if let Err(why) = fed {
            self.lose(&why, core);
            return Err(());
        }
        self.attached();
        Ok(ended)
    }

    fn attached(&mut self) {
        let State::Attaching(attach, _) = &self.state else { return };
        if !attach.is_attached() {
            return;
        }
        let was = core::mem::replace(&mut self.state, State::Down { retry_at: 0 });
        if let State::Attaching(attach, wire) = was
            && let Some((queue, controller)) = attach.finish()
        {
            self.controller = Some(controller);
            self.association += 1;
            self.state = State::Up(Box::new(queue), wire);
        }
    }

    /// Bytes have come on the queue for undo.
    ///
    /// # Errors
    /// The queue is gone.
    pub(super) fn undo_bytes(
        &mut self,
        conn: usize,
        bytes: &[u8],
        core: &mut Core,
    ) -> Result<UndoEnded, ()> {
        let mut ended = Vec::new();
        let Some(undo) = self.undo.as_mut().filter(|undo| undo.wire.conn == conn) else {
            return Ok(ended);
        };
        self.undo_heard = core.now;
        let UndoQueue { queue, out, wire, ready, label } = undo;
        let (calls, label_ended) = (&mut self.undo_calls, &mut self.label_ended);
        let fed = wire.feed(bytes, |bytes| {
            queue.receive(bytes, out, |event| match event {
                Event::Ready { .. } => *ready = true,
                Event::Data { offset, bytes, .. } => {
                    if let Some(page) = label {
                        let at = offset as usize;
                        page[at..at + bytes.len()].copy_from_slice(bytes);
                    }
                }
                Event::Done { user: LABEL, cqe } => {
                    let (status, page) = (cqe.status(), label.take().unwrap_or_default());
                    *label_ended = Some(if status.is_ok() { Ok(page) } else { Err(status) });
                }
                Event::Done { user, cqe } => {
                    if let Some(ticket) = calls.remove(&user) {
                        let status = cqe.status();
                        ended.push((ticket, if status.is_ok() { Ok(()) } else { Err(status) }));
                    }
                }
            })
        });
        wire.send(out, core);
        if fed.is_err() {
            self.close_undo(core);
            return Err(());
        }
        Ok(ended)
    }

    /// Which of its connections this is, if it is one of them still.
    #[must_use]
    pub(super) fn has(&self, conn: usize) -> bool {
        let admin = match &self.state {
            State::Attaching(_, wire) | State::Up(_, wire) => wire.conn == conn,
            State::Down { .. } => false,
        };
        admin || self.undo.as_ref().is_some_and(|undo| undo.wire.conn == conn)
    }

    /// A connection of it has ended; whether the association is gone with it.
    pub(super) fn hung_up(&mut self, conn: usize, core: &mut Core) -> bool {
        if self.undo.as_ref().is_some_and(|undo| undo.wire.conn == conn) {
            self.close_undo(core);
            return false;
        }
        self.has(conn) && self.lose("the connection has ended", core)
    }
}
