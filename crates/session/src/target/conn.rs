//! One connection of a target: bytes in, device operations and bytes out.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use riopipe_nvme::Crc32c;
use riopipe_nvme::command::{Cqe, Sqe, Status};
use riopipe_nvme::pdu::{
    CAPSULE_CMD_LEN, IcReq, IcResp, Parsed, Pdu, PduError, Role, Rx, TermReq, Tx,
};
use riopipe_order::block_device::IoError;
use riopipe_order::probe::{self, Plant};

use super::admin::Admin;
use super::bound::Stream;
use super::budget::Loan;
use super::env::{Event, OpId, TargetEnv};
use super::limits::{
    ADMIN_CAPSULE_BYTES, CONNECTION_BYTES, DATA_STALL_NS, H2C_DATA_BYTES_MAX, STALL_NS,
    UNSENT_BYTES_MAX,
};
use super::namespace::Namespaces;
use super::shared::{ConnId, Notice, Shared, heard};
use super::slots::{Slots, Stage};
use super::writers::Noted;
use crate::outbox::Outbox;

/// Why a connection ends. What is to be told to the host is in the outbox already.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The host broke the protocol; it has been told with a termination request (T18).
    #[error("the host broke the protocol: {0}")]
    Protocol(#[from] PduError),
    /// The host sent a termination request.
    #[error("the host ended the connection (fatal error status {}, information {:#x})", .0.fes, .0.fei)]
    ByHost(TermReq),
    /// A time ran out (T18).
    #[error("{0}")]
    Stalled(&'static str),
    /// The association has ended, or the target stops.
    #[error("{0}")]
    Ended(&'static str),
}

/// What Connect made of a connection.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) cntlid: u16,
    pub(super) assoc: u64,
    pub(super) qid: u16,
    pub(super) hostnqn: String,
    /// Submission queue flow control is off: SQHD means nothing and SUCCESS may be used.
    pub(super) no_sq_flow: bool,
    pub(super) entries: u16,
    pub(super) heard: Arc<AtomicU64>,
    pub(super) overtaken: Arc<AtomicBool>,
}

/// One connection, from its ICReq to its last device operation.
///
/// A pure state machine: bytes go in through [`receive`](Self::receive), finished device
/// operations through [`device_done`](Self::device_done), the clock through
/// [`tick`](Self::tick), wake-ups from other connections through [`noticed`](Self::noticed);
/// device operations go out through the [`TargetEnv`], bytes through the [`Outbox`].
///
/// When any of them says [`Closed`], or the socket dies, call [`closing`](Self::closing), keep
/// handing in `device_done`, and drop the connection once it [`is_drained`](Self::is_drained):
/// only then is its stream free for another owner (T8).
pub struct TargetConn<E: TargetEnv> {
    pub(super) id: ConnId,
    pub(super) key: u64,
    pub(super) rx: Rx,
    pub(super) tx: Tx,
    pub(super) queue: Option<Queue>,
    pub(super) sqhd: u16,
    pub(super) slots: Slots<E::Buf>,
    pub(super) namespaces: Arc<Namespaces>,
    /// Commands that wait until the connection may hold their buffers, in order.
    pub(super) waiting: VecDeque<u16>,
    /// Bytes of buffers held by commands.
    pub(super) held: usize,
    /// What it has borrowed for that, and for what waits to be sent (T28).
    pub(super) loan: Loan,
    /// Nothing is received for want of memory for the answers.
    is_starved: bool,
    pub(super) stream: Option<Box<Stream<E>>>,
    pub(super) admin: Option<Box<Admin>>,
    /// It carried a stream that a new owner has fenced.
    pub(super) was_fenced: bool,
    /// Fences to acknowledge once this many device operations have come back.
    pub(super) fence_left: usize,
    pub(super) fences: alloc::vec::Vec<u64>,
    /// By namespace: how many of its FLUSHes had failed when this connection's first plain write
    /// that no FLUSH of its own has covered was submitted (T22).
    pub(super) plain: alloc::vec::Vec<Option<u64>>,
    /// Where a claim asks it whether it has writes under way (T8).
    pub(super) noted: Noted,
    closing: bool,
    drained: bool,
    /// Accepted, or the last whole PDU consumed.
    progress: u64,
    /// A PDU has begun and is not all there.
    partial: bool,
    /// Since when the peer has taken nothing of what waits for it.
    unsent_since: Option<u64>,
    /// The address by which the host came.
    pub(super) local: Option<LocalAddress>,
}

/// An address of this machine, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalAddress {
    /// The address.
    pub traddr: String,
    /// Whether it is IPv6.
    pub ipv6: bool,
}

impl<E: TargetEnv> TargetConn<E> {
    /// A connection that has just been accepted. `id` is unique for the life of the target; `key`
    /// (48 bits) comes back in every [`OpId`].
    #[must_use]
    pub fn new(id: ConnId, key: u64, crc: Crc32c, now: u64) -> Self {
        Self {
            id,
            key,
            rx: Rx::new(Role::Controller, crc),
            tx: Tx::new(crc),
            queue: None,
            sqhd: 0,
            slots: Slots::new(0),
            namespaces: Arc::default(),
            waiting: VecDeque::new(),
            held: 0,
            loan: Loan::default(),
            is_starved: false,
            stream: None,
            admin: None,
            was_fenced: false,
            fence_left: 0,
            fences: alloc::vec::Vec::new(),
            plain: alloc::vec::Vec::new(),
            noted: Noted::default(),
            closing: false,
            drained: false,
            progress: now,
            partial: false,
            unsent_since: None,
            local: None,
        }
    }

    /// Tells by which address the host came: discovery names it for ports that listen on all.
    #[must_use]
    pub fn came_by(mut self, local: Option<LocalAddress>) -> Self {
        self.local = local;
        self
    }

    /// The id given to [`TargetConn::new`].
    #[must_use]
    pub const fn id(&self) -> ConnId {
        self.id
    }

    /// Takes whole PDUs from the start of `buf`; returns how many bytes they were. What follows
    /// is the beginning of a PDU, or PDUs that must wait until the peer has taken what waits for
    /// it ([`wants_input`](Self::wants_input)).
    ///
    /// # Errors
    /// The connection must be closed, once what is in `out` has been sent.
    pub fn receive(
        &mut self,
        buf: &[u8],
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<usize, Closed> {
        let mut at = 0;
        let mut full = false;
        let end = loop {
            if out.len_bytes() > CONNECTION_BYTES && self.must_wait(out) {
                full = true;
                break Ok(());
            }
            let pdu = &buf[at..];
            if let Some((sqe, len)) = self.rx.plain_command(pdu) {
                let data = at + CAPSULE_CMD_LEN..at + len;
                if let Err(closed) = self.capsule(&sqe, buf, data, true, env, out) {
                    break Err(closed);
                }
                at += len;
                continue;
            }
            match self.rx.parse(pdu) {
                Ok(Some(parsed)) => {
                    if let Err(closed) = self.pdu(&parsed, buf, at, env, out) {
                        break Err(closed);
                    }
                    at += parsed.len;
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error.into()),
            }
        };
        if self.stream.is_some() {
            self.settle(buf, env, out);
        }
        self.partial = !full && at < buf.len();
        if at > 0 {
            let now = env.now();
            self.progress = now;
            if let Some(queue) = &self.queue {
                heard(&queue.heard, now);
            }
            self.pump(env, out);
        }
        match end {
            Ok(()) => Ok(at),
            Err(closed) => {
                if let Closed::Protocol(error) = &closed {
                    out.push_bytes(|v| error.term_req().encode(Role::Host, &buf[at..], v));
                }
                Err(closed)
            }
        }
    }

    /// Bytes that the PDU at the start of `buf` needs in all, as far as is known.
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        self.rx.need(buf)
    }

    /// The queue that Connect made of the connection: 0 for the admin queue.
    #[must_use]
    pub fn qid(&self) -> Option<u16> {
        self.queue.as_ref().map(|q| q.qid)
    }

    /// Whether no command is under way, held event requests apart.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.slots.in_use() == 0
    }

    /// Changes the key that the host knows the connection by.
    ///
    /// # Panics
    /// If a device operation is under way with the old one.
    pub fn set_key(&mut self, key: u64) {
        assert!(self.is_quiet(), "device operations carry the old key");
        self.key = key;
    }

    /// Whether more may be received: not while too much waits to be sent (T18).
    #[must_use]
    pub fn wants_input(&self, out: &Outbox<E::Buf>) -> bool {
        !self.closing && !self.is_starved && out.len_bytes() <= UNSENT_BYTES_MAX
    }

    /// Whether no further command may be taken because of what waits to be sent.
    #[cold]
    fn must_wait(&mut self, out: &Outbox<E::Buf>) -> bool {
        let unsent = out.len_bytes();
        self.is_starved = unsent > CONNECTION_BYTES && !self.loan.grow(self.held + unsent);
        self.is_starved || unsent > UNSENT_BYTES_MAX
    }

    /// Something of `out` has been sent: commands that waited for room may go on.
    pub fn sent(&mut self, env: &mut E, out: &mut Outbox<E::Buf>) {
        self.unsent_since = None;
        if self.is_starved {
            self.must_wait(out);
        }
        if let Some(stream) = &mut self.stream
            && stream.tracer.is_answered()
            && out.is_empty()
        {
            env.traced(&stream.tracer.sent(env.instant()));
        }
        self.pump(env, out);
    }

    /// The peer takes nothing more of what is to be sent, at time `now`: from now on it is waited
    /// for, but not for ever (T28).
    pub const fn unsent(&mut self, now: u64) {
        if self.unsent_since.is_none() {
            self.unsent_since = Some(now);
        }
    }

    /// A device operation that was under way has finished: what
    /// [`BlockDevice::poll`](riopipe_order::block_device::BlockDevice::poll) has returned.
    pub fn device_done(
        &mut self,
        op: OpId,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let index = op.slot();
        let Some(slot) = self.slots.used(index).filter(|slot| slot.on_device()) else {
            debug_assert!(false, "a completion of an operation that was not under way");
            return;
        };
        if core::mem::take(&mut slot.fenced) {
            // The slot may go on to a second operation (a FLUSH, another range); a FLUSH writes
            // nothing new, and a range is checked against the guard before it is begun.
            self.fence_left -= 1;
        }
        self.device_result(index, result, env, out);
    }

    /// Ends a batch of one or more [`device_done`](Self::device_done), and must be called after
    /// it: persist words of the batch share one fence, and responses follow it (T7).
    pub fn settled(&mut self, env: &mut E, out: &mut Outbox<E::Buf>) {
        if self.stream.is_some() {
            self.settle(&[], env, out);
        }
        self.pump(env, out);
        self.fences_passed(env);
        if self.closing {
            self.finish_if_idle(env);
        }
    }

    /// Looks at what other connections have left for this one.
    ///
    /// # Errors
    /// The connection must be closed.
    pub fn noticed(&mut self, env: &mut E, out: &mut Outbox<E::Buf>) -> Result<(), Closed> {
        let id = self.id;
        let mut end = Ok(());
        for notice in env.with_shared(|s| s.take_notices(id)) {
            match notice {
                Notice::Close(why) => end = Err(Closed::Ended(why)),
                Notice::Fence { id, volume, claimed } => {
                    self.fence(id, volume, claimed, env, out);
                }
                Notice::Fenced { id } => self.fence_over(id, env, out),
                Notice::Flushes => self.doubts_over(env, out),
            }
        }
        if self.closing { Ok(()) } else { end }
    }

    /// The clock says `now`.
    ///
    /// # Errors
    /// A time has run out and the connection must be closed.
    pub fn tick(&mut self, env: &mut E, out: &mut Outbox<E::Buf>) -> Result<(), Closed> {
        if self.closing {
            return Ok(());
        }
        let now = env.now();
        if out.is_empty() {
            self.unsent_since = None;
        } else if self.unsent_since.is_none() {
            self.unsent_since = Some(now);
        }
        match self.deadline() {
            Some((deadline, why)) if deadline <= now => Err(Closed::Stalled(why)),
            _ => Ok(()),
        }
    }

    /// When [`tick`](Self::tick) is due next, on the host's clock.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        if self.closing { None } else { self.deadline().map(|d| d.0) }
    }

    fn deadline(&self) -> Option<(u64, &'static str)> {
        let mut first = None;
        let mut add = |at: u64, why: &'static str| {
            if first.is_none_or(|(other, _)| at < other) {
                first = Some((at, why));
            }
        };
        if self.queue.is_none() {
            add(self.progress + STALL_NS, "no Fabrics Connect came in time");
        } else if self.partial {
            add(self.progress + STALL_NS, "the rest of a PDU did not come in time");
        } else if self.slots.in_use() > 0 && self.is_receiving() {
            add(self.progress + DATA_STALL_NS, "data that was asked for did not come in time");
        }
        if let Some(since) = self.unsent_since {
            add(since + DATA_STALL_NS, "the host does not take what it is sent");
        }
        if let (Some(queue), Some(admin)) = (&self.queue, &self.admin)
            && admin.kato_ms > 0
        {
            let heard = queue.heard.load(Ordering::Relaxed);
            add(heard + u64::from(admin.kato_ms) * 1_000_000, "the keep alive timer expired");
        }
        first
    }

    fn is_receiving(&self) -> bool {
        self.slots.any(|slot| slot.stage == Stage::Receiving)
    }

    /// The connection is gone, or is to be closed: nothing new is begun. Device operations that
    /// are under way come back through [`device_done`](Self::device_done).
    pub fn closing(&mut self, why: &str, env: &mut E) {
        if self.closing {
            return;
        }
        self.closing = true;
        let queue = self.queue.as_ref();
        env.log(Event::Closed {
            hostnqn: queue.map_or("", |q| &q.hostnqn),
            cntlid: queue.map(|q| q.cntlid),
            qid: queue.map_or(0, |q| q.qid),
            why,
        });
        self.waiting.clear();
        if let Some(stream) = &mut self.stream {
            stream.shut();
            // Nobody is left to answer.
            self.settle(&[], env, &mut Outbox::new());
            if probe::planted(Plant::T8GhostReplay) {
                self.give_back_stream(env);
            }
        }
        for index in self.slots.indices(|slot| !slot.on_device()) {
            let (_, charged) = self.slots.release(index);
            self.held -= charged;
        }
        if self.queue.is_some() {
            let (id, now) = (self.id, env.now());
            let waived = self.releasing();
            shared(env, |s| {
                for (volume, assoc) in waived {
                    s.volumes.waive(volume, assoc);
                }
                s.detach_begin(id, now);
            });
        }
        self.finish_if_idle(env);
    }

    /// Whether nothing of it is left: it may be dropped.
    #[must_use]
    pub const fn is_drained(&self) -> bool {
        self.drained
    }

    fn finish_if_idle(&mut self, env: &mut E) {
        if self.drained || self.slots.in_use() > 0 {
            return;
        }
        self.give_back_stream(env);
        if self.queue.is_some() {
            let id = self.id;
            shared(env, |s| s.detach(id));
        }
        self.loan = Loan::default();
        self.drained = true;
    }

    /// One PDU at `at` in `buf`.
    #[inline(never)]
    fn pdu(
        &mut self,
        parsed: &Parsed,
        buf: &[u8],
        at: usize,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let data = at + parsed.data.start..at + parsed.data.end;
        match &parsed.pdu {
            Pdu::CapsuleCmd { sqe } => {
                self.capsule(sqe, buf, data, parsed.data_digest_ok, env, out)
            }
            Pdu::H2cData(header) => {
                self.h2c_data(header, &buf[data], parsed.data_digest_ok, env, out)
            }
            Pdu::IcReq(request) => self.initialize(request, env, out),
            Pdu::H2cTermReq(term) => Err(Closed::ByHost(*term)),
            // `Rx` lets nothing else through to a controller.
            _ => Err(PduError::sequence("a PDU that only a host may get").into()),
        }
    }

    fn initialize(
        &mut self,
        request: &IcReq,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if request.pfv != 0 {
            return Err(PduError::unsupported(8, "an unknown PDU format version").into());
        }
        let identity = env.with_shared(|s| Arc::clone(s.identity()));
        if identity.require_header_digest && !request.header_digest
            || identity.require_data_digest && !request.data_digest
        {
            return Err(PduError::unsupported(11, "digests that this target insists on").into());
        }
        out.push_bytes(|v| {
            IcResp {
                pfv: 0,
                cpda: 0,
                header_digest: request.header_digest,
                data_digest: request.data_digest,
                maxh2cdata: H2C_DATA_BYTES_MAX,
            }
            .encode(v);
        });
        self.rx.connected = true;
        self.rx.header_digest = request.header_digest;
        self.rx.data_digest = request.data_digest;
        self.rx.capsule_max = ADMIN_CAPSULE_BYTES;
        self.rx.data_max = H2C_DATA_BYTES_MAX;
        self.tx.header_digest = request.header_digest;
        self.tx.data_digest = request.data_digest;
        self.tx.align = (u32::from(request.hpda) + 1) * 4;
        Ok(())
    }

    /// One command.
    #[inline]
    fn capsule(
        &mut self,
        sqe: &Sqe,
        buf: &[u8],
        data: core::ops::Range<usize>,
        digest_ok: bool,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Some(queue) = &self.queue else {
            return self.before_connect(sqe, &buf[data], digest_ok, env, out);
        };
        self.sqhd += 1;
        if self.sqhd >= queue.entries {
            self.sqhd = 0;
        }
        if self.slots.has_cid(sqe.cid()) {
            self.respond(sqe.cid(), Status::COMMAND_ID_CONFLICT.with_dnr(), 0, out);
            return Ok(());
        }
        if queue.qid == 0 {
            self.admin_command(sqe, &buf[data], digest_ok, env, out)
        } else {
            self.io_command(sqe, buf, data, digest_ok, env, out)
        }
    }

    /// Sends a response capsule.
    #[inline(never)]
    pub(super) fn respond(
        &mut self,
        cid: u16,
        status: Status,
        result: u64,
        out: &mut Outbox<E::Buf>,
    ) {
        self.respond_here(cid, status, result, out);
    }

    /// [`respond`](Self::respond), for the hot path.
    #[inline(always)]
    pub(super) fn respond_here(
        &mut self,
        cid: u16,
        status: Status,
        result: u64,
        out: &mut Outbox<E::Buf>,
    ) {
        let qid = self.queue.as_ref().map_or(0, |q| q.qid);
        let cqe = Cqe::new(cid, self.sqhd, qid, status, result);
        out.push_response(&self.tx, &cqe);
    }

    /// Answers the command in a slot and frees the slot.
    #[inline(never)]
    pub(super) fn answer(
        &mut self,
        index: u16,
        status: Status,
        result: u64,
        out: &mut Outbox<E::Buf>,
    ) {
        self.answer_here(index, status, result, out);
    }

    /// [`answer`](Self::answer), for the hot path.
    #[inline(always)]
    pub(super) fn answer_here(
        &mut self,
        index: u16,
        status: Status,
        result: u64,
        out: &mut Outbox<E::Buf>,
    ) {
        let cid = self.slots[index].sqe.cid();
        let (_, charged) = self.slots.release(index);
        self.held -= charged;
        if !self.closing {
            self.respond_here(cid, status, result, out);
        }
    }

    pub(super) const fn is_closing(&self) -> bool {
        self.closing
    }

    pub(super) fn trouble(&self, why: &str, env: &mut E) {
        if let Some(queue) = &self.queue {
            env.log(Event::Trouble {
                hostnqn: &queue.hostnqn,
                cntlid: queue.cntlid,
                qid: queue.qid,
                why,
            });
        }
    }
}

/// Runs `f` on what all connections share, and wakes those it left notices for.
pub(super) fn shared<E: TargetEnv, T>(
    env: &mut E,
    f: impl FnOnce(&mut Shared<E::Region>) -> T,
) -> T {
    let (result, wake) = env.with_shared(|s| {
        let result = f(s);
        (result, s.take_wake())
    });
    for conn in wake {
        env.notify(conn);
    }
    result
}
