//! One connection to a target: a submission and a completion queue over TCP.
//!
//! [`QueuePair`] initializes the connection, creates the queue (Fabrics Connect), sends commands
//! and takes completions. It answers R2Ts by itself. Every PDU from the target is checked against
//! the commands in flight (T18): a target that breaks the protocol loses the connection. The
//! termination request that the specification gives for the error is then already in the outbox.

mod config;
mod error;

use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sgl, Sqe, Status};
use riopipe_nvme::fabrics::{Connect, ConnectData};
use riopipe_nvme::pdu::{
    ADMIN_IN_CAPSULE, CAPSULE_RESP_LEN, DataHdr, IcReq, IcResp, Pdu, PduError, R2t, Role, Rx,
    TermReq, Tx,
};

pub use self::config::{IoQueue, QpConfig};
pub use self::error::{SessionError, SubmitError};
use crate::outbox::Outbox;

/// The name of a command while it is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cid(pub u16);

/// The data of a command.
#[derive(Debug)]
pub enum Data<'a, P> {
    /// No data.
    None,
    /// Host to controller: pieces, in order. Cheap to clone (counted references): the connection
    /// keeps a clone until the piece is sent.
    Write(&'a [P]),
    /// Host to controller: a few bytes, copied. They must fit into the capsule.
    Bytes(&'a [u8]),
    /// Controller to host: the number of bytes that the command reads.
    Read(u32),
}

/// A PDU that arrived.
#[derive(Debug)]
pub enum Event<'a, T = u64> {
    /// The queue exists; commands may be submitted.
    Ready {
        /// The controller.
        cntlid: u16,
    },
    /// Data of a read.
    Data {
        /// As given with the command.
        user: T,
        /// Its offset in the command's data, in bytes.
        offset: u32,
        /// The data.
        bytes: &'a [u8],
    },
    /// A command is done.
    Done {
        /// As given with the command.
        user: T,
        /// Its completion.
        cqe: Cqe,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    /// ICReq has been sent.
    Initializing,
    /// Connect has been sent.
    Connecting,
    Ready,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    None,
    /// All data was sent with the capsule.
    Sent,
    /// Data is sent when the target requests it.
    Out,
    In,
}

#[derive(Debug)]
struct Slot<P, T> {
    /// As given with the command; `None` for Connect, which is the queue pair's own.
    user: Option<T>,
    /// The whole identifier. The low bits are the slot number. The high bits count the uses of the
    /// slot, so that a completion that comes twice is not taken for the next command's.
    cid: u16,
    busy: bool,
    /// Some of its data did not match the digest.
    corrupted: bool,
    direction: Direction,
    /// The length of the data, bytes.
    len: u32,
    /// Bytes requested by R2Ts (`Out`), or received (`In`): both go strictly upwards.
    moved: u32,
    /// LAST_PDU has arrived.
    ended: bool,
    /// The number of R2Ts that arrived in one call of `receive`, and the number of that call. The
    /// data for them is sent only after the call. So the target sent all of them before it got any
    /// of that data, and may not have sent more than `maxr2t`.
    r2ts: (u32, u32),
    /// The positions in the outbox at which its capsule without data ends (`capsule_end`), and at
    /// which all that was sent for it ends (`end`). An answer to a command that was not sent cannot
    /// be genuine, and without this check the waiting bytes would have no bound (T18).
    capsule_end: u64,
    end: u64,
    /// The data that R2Ts will request. The vector is kept for the next command.
    pieces: Vec<P>,
}

impl<P, T> Slot<P, T> {
    /// Ends the command; the next one has another identifier. The low `bits` of each identifier are
    /// the slot number, which is returned.
    #[inline]
    fn end_command(&mut self, bits: u32) -> u16 {
        let cid = self.cid;
        self.busy = false;
        self.cid = cid.wrapping_add(1 << bits);
        if !self.pieces.is_empty() {
            self.pieces.clear();
        }
        cid & ((1 << bits) - 1)
    }
}

/// One connection to a target; see [the module](self). `T` is the caller's name of a command.
#[derive(Debug)]
pub struct QueuePair<P, T = u64> {
    config: QpConfig,
    state: State,
    rx: Rx,
    tx: Tx,
    /// The most data in one H2CData PDU, bytes, as the target has stated it.
    maxh2cdata: u32,
    /// The most data in a command capsule, bytes.
    in_capsule: u32,
    slots: Vec<Slot<P, T>>,
    /// The indices of the free slots.
    free: Vec<u16>,
    /// How many low bits of a command identifier are the slot number.
    slot_bits: u32,
    cntlid: u16,
    /// The number of calls of `receive`, to separate R2Ts of one call from those of another.
    calls: u32,
}

/// Entries per queue are bounded so that a generation of some bits is left in the identifier.
const SQSIZE_MAX: u16 = 4096;

impl<P: AsRef<[u8]> + Clone, T: Copy> QueuePair<P, T> {
    /// The number of commands that can be in flight.
    #[inline]
    #[must_use]
    pub const fn depth(&self) -> usize {
        self.slots.len()
    }

    /// A connection that has not begun.
    #[must_use]
    pub fn new(config: QpConfig) -> Self {
        let depth = config.sqsize.clamp(2, SQSIZE_MAX) - 1;
        let mut rx = Rx::new(Role::Host, config.crc);
        rx.data_max = config.data_max;
        Self {
            state: State::Idle,
            rx,
            tx: Tx::new(config.crc),
            maxh2cdata: 0,
            in_capsule: if config.qid == 0 { ADMIN_IN_CAPSULE } else { 0 },
            slots: (0..depth)
                .map(|cid| Slot {
                    user: None,
                    cid,
                    busy: false,
                    corrupted: false,
                    direction: Direction::None,
                    len: 0,
                    moved: 0,
                    ended: false,
                    capsule_end: 0,
                    end: 0,
                    r2ts: (0, 0),
                    pieces: Vec::new(),
                })
                .collect(),
            free: (0..depth).rev().collect(),
            slot_bits: depth.next_power_of_two().trailing_zeros(),
            cntlid: config.cntlid,
            calls: 0,
            config,
        }
    }

    /// As [`new`](Self::new), for an I/O queue of an association.
    #[must_use]
    pub fn open(queue: IoQueue) -> Self {
        let mut pair = Self::new(queue.config);
        pair.set_in_capsule(queue.in_capsule_bytes);
        pair
    }

    /// Begins: sends ICReq. Connect follows by itself; [`Event::Ready`] reports that it is done.
    pub fn start(&mut self, out: &mut Outbox<P>) {
        if self.state != State::Idle {
            return;
        }
        self.state = State::Initializing;
        let ic = IcReq {
            pfv: 0,
            hpda: 0,
            header_digest: self.config.header_digest,
            data_digest: self.config.data_digest,
            maxr2t: self.config.maxr2t.max(1) - 1,
        };
        out.push_bytes(|b| ic.encode(b));
    }

    /// Whether commands may be submitted.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.state == State::Ready
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.state == State::Dead
    }

    /// The number of commands that may be submitted now.
    #[must_use]
    #[inline]
    pub fn space(&self) -> usize {
        if self.state == State::Ready { self.free.len() } else { 0 }
    }

    /// The number of commands in flight.
    #[must_use]
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The caller's names of the commands in flight, in no order. These must be replayed or failed
    /// when the connection has ended.
    pub fn outstanding(&self) -> impl Iterator<Item = T> {
        self.slots.iter().filter(|s| s.busy).filter_map(|s| s.user)
    }

    /// The connection is lost. Commands in flight stay [outstanding](Self::outstanding); the
    /// references to the data that their R2Ts would have requested are dropped.
    pub fn close(&mut self) {
        let connecting = self.state == State::Connecting;
        self.state = State::Dead;
        for slot in &mut self.slots {
            slot.pieces.clear();
            slot.busy &= !connecting;
        }
    }

    /// The controller's identifier, once ready.
    #[must_use]
    pub const fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// The configuration of the connection.
    #[must_use]
    pub const fn config(&self) -> &QpConfig {
        &self.config
    }

    /// Sets the limit of data in an I/O command capsule, bytes (IOCCSZ of Identify Controller).
    /// Until then the limit is 0 on I/O queues and 8 KiB on the admin queue.
    pub fn set_in_capsule(&mut self, bytes: u32) {
        self.in_capsule = bytes;
    }

    /// The limit of data in an I/O command capsule, bytes.
    #[must_use]
    pub const fn in_capsule(&self) -> u32 {
        self.in_capsule
    }

    /// The bytes that the next PDU in `buf` needs; see [`Rx::need`].
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        self.rx.need(buf)
    }

    /// Sends a command; its identifier and data pointer are set here. `user` comes back with its
    /// events.
    ///
    /// # Errors
    /// The queue is full or not ready, or the data is too long: then nothing was sent.
    #[inline]
    pub fn submit(
        &mut self,
        sqe: Sqe,
        user: T,
        data: Data<'_, P>,
        out: &mut Outbox<P>,
    ) -> Result<Cid, SubmitError> {
        if self.state != State::Ready {
            return Err(SubmitError::NotReady);
        }
        self.send(sqe, Some(user), data, out)
    }

    /// Takes a slot for a command, and puts its capsule into the outbox. The data of a write goes
    /// into the capsule if it fits there. Else it stays in the slot until the target requests it.
    #[inline(always)]
    fn send(
        &mut self,
        mut sqe: Sqe,
        user: Option<T>,
        data: Data<'_, P>,
        out: &mut Outbox<P>,
    ) -> Result<Cid, SubmitError> {
        let (direction, len) = match &data {
            Data::None => (Direction::None, 0),
            Data::Bytes(bytes) => (Direction::Sent, bytes.len() as u64),
            Data::Write(pieces) => {
                let len = pieces.iter().map(|p| p.as_ref().len() as u64).sum();
                let fits = len <= u64::from(self.in_capsule);
                (if fits { Direction::Sent } else { Direction::Out }, len)
            }
            Data::Read(len) => (Direction::In, u64::from(*len)),
        };
        let max = match data {
            Data::Bytes(_) => self.in_capsule,
            Data::Read(_) => self.config.data_max,
            _ => u32::MAX,
        };
        if len > u64::from(max) {
            return Err(SubmitError::TooLong { len, max });
        }
        if matches!(direction, Direction::Out | Direction::In) && !len.is_multiple_of(4) {
            return Err(SubmitError::Misaligned { len });
        }
        let len = len as u32;
        let index = self.free.pop().ok_or(SubmitError::Full)?;
        let slot = &mut self.slots[usize::from(index)];
        debug_assert!(!slot.busy && slot.pieces.is_empty());
        slot.busy = true;
        slot.user = user;
        slot.corrupted = false;
        slot.direction = direction;
        slot.len = len;
        slot.moved = 0;
        slot.ended = false;
        slot.r2ts.0 = 0;
        let cid = slot.cid;

        sqe.set_cid(cid);
        let has_capsule_data = direction == Direction::Sent && len > 0;
        sqe.set_sgl(if has_capsule_data {
            Sgl::InCapsule { offset: 0, len }
        } else {
            Sgl::Transport { len }
        });
        let tx = &self.tx;
        out.push_command(tx, &sqe, if has_capsule_data { len } else { 0 });
        slot.capsule_end = out.end();
        if let Data::Bytes(bytes) = data {
            out.push_bytes(|b| {
                b.extend_from_slice(bytes);
                if has_capsule_data {
                    tx.data_digest([bytes], b);
                }
            });
        } else if let Data::Write(pieces) = data {
            if has_capsule_data {
                for piece in pieces {
                    out.push_payload(piece.clone());
                }
                if tx.data_digest {
                    out.push_bytes(|b| tx.data_digest(pieces.iter().map(AsRef::as_ref), b));
                }
            } else {
                slot.pieces.extend_from_slice(pieces);
            }
        }
        slot.end = out.end();
        Ok(Cid(cid))
    }

    /// Takes the whole PDUs at the start of `buf` and returns their length in bytes. The rest is
    /// the beginning of a PDU, which must be passed again with the bytes that follow it.
    ///
    /// # Errors
    /// The connection has ended. The contents of the outbox must then be sent before it is closed.
    #[inline]
    pub fn receive(
        &mut self,
        buf: &[u8],
        out: &mut Outbox<P>,
        mut on_event: impl FnMut(Event<'_, T>),
    ) -> Result<usize, SessionError> {
        if self.state == State::Dead {
            return Err(SessionError::Closed);
        }
        self.calls = self.calls.wrapping_add(1);
        let mut used = 0;
        loop {
            let rest = &buf[used..];
            if let Some(cqe) = self.rx.plain_response(rest) {
                match self.completion(&cqe, out, &mut on_event) {
                    Ok(()) => used += CAPSULE_RESP_LEN,
                    Err(e) => return Err(self.end(e, rest, out)),
                }
                continue;
            }
            let end = match self.rx.parse(rest) {
                Ok(None) => return Ok(used),
                Ok(Some(parsed)) => {
                    let data = &rest[parsed.data.clone()];
                    self.take(&parsed.pdu, data, parsed.data_digest_ok, out, &mut on_event)
                        .map(|()| parsed.len)
                }
                Err(e) => Err(e.into()),
            };
            match end {
                Ok(len) => used += len,
                Err(e) => return Err(self.end(e, rest, out)),
            }
        }
    }

    /// Ends the connection with `error`, about the PDU at the start of `pdu`.
    #[cold]
    fn end(&mut self, error: SessionError, pdu: &[u8], out: &mut Outbox<P>) -> SessionError {
        self.close();
        if let SessionError::Protocol(e) = &error {
            out.push_bytes(|b| e.term_req().encode(Role::Controller, pdu, b));
        }
        error
    }

    /// Handles one PDU from the target. `digest_ok`: whether its data matches the data digest.
    #[inline(never)]
    fn take(
        &mut self,
        pdu: &Pdu,
        data: &[u8],
        digest_ok: bool,
        out: &mut Outbox<P>,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        match pdu {
            Pdu::CapsuleResp { cqe } => self.completion(cqe, out, on_event),
            Pdu::C2hData(hdr) => self.data_in(hdr, data, digest_ok, out, on_event),
            Pdu::R2t(r2t) => self.data_out(r2t, out).map_err(Into::into),
            Pdu::IcResp(ic) => self.initialized(ic, out),
            Pdu::C2hTermReq(TermReq { fes, fei }) => {
                Err(SessionError::Terminated { fes: *fes, fei: *fei })
            }
            // `Rx` lets no other PDU through to a host.
            _ => Err(PduError::sequence("a PDU that only a controller may get").into()),
        }
    }

    /// Handles the ICResp: takes over the parameters of the connection, and sends Connect.
    fn initialized(&mut self, ic: &IcResp, out: &mut Outbox<P>) -> Result<(), SessionError> {
        if self.state != State::Initializing {
            return Err(PduError::sequence("an ICResp that was not asked for").into());
        }
        if ic.header_digest && !self.config.header_digest
            || ic.data_digest && !self.config.data_digest
        {
            return Err(PduError::header(11, "digests that were not asked for").into());
        }
        if self.config.header_digest && !ic.header_digest {
            return Err(SessionError::NoDigests("header"));
        }
        if self.config.data_digest && !ic.data_digest {
            return Err(SessionError::NoDigests("data"));
        }
        self.rx.connected = true;
        self.rx.header_digest = ic.header_digest;
        self.rx.data_digest = ic.data_digest;
        self.tx.header_digest = ic.header_digest;
        self.tx.data_digest = ic.data_digest;
        self.tx.align = (u32::from(ic.cpda) + 1) * 4;
        self.maxh2cdata = ic.maxh2cdata;

        self.state = State::Connecting;
        let sqe = Sqe::connect(&Connect {
            recfmt: 0,
            qid: self.config.qid,
            sqsize: self.slots.len() as u16,
            // Fewer commands are in flight than the queue has entries, so flow control needs no
            // code.
            cattr: 0,
            kato_ms: self.config.kato_ms,
        });
        let data = ConnectData {
            hostid: self.config.hostid,
            cntlid: self.config.cntlid,
            subnqn: self.config.subnqn.clone(),
            hostnqn: self.config.hostnqn.clone(),
        }
        .encode();
        // The data of Connect is always in the capsule (Base §6.3), whatever the limit for I/O
        // commands is.
        let limit = core::mem::replace(&mut self.in_capsule, ADMIN_IN_CAPSULE);
        let sent = self.send(sqe, None, Data::Bytes(&data), out);
        self.in_capsule = limit;
        debug_assert!(sent.is_ok(), "the queue was empty");
        Ok(())
    }

    /// The slot of the command in flight that has this identifier.
    #[inline]
    fn slot(&mut self, cid: u16) -> Option<&mut Slot<P, T>> {
        let index = usize::from(cid & ((1 << self.slot_bits) - 1));
        self.slots.get_mut(index).filter(|slot| slot.busy && slot.cid == cid)
    }

    /// Ends the command with this identifier, and frees its slot.
    fn release(&mut self, cid: u16) {
        let bits = self.slot_bits;
        if let Some(slot) = self.slot(cid) {
            let index = slot.end_command(bits);
            self.free.push(index);
        }
    }

    /// Handles the completion of a command: ends the command, and reports it to the caller.
    #[inline(always)]
    fn completion(
        &mut self,
        cqe: &Cqe,
        out: &Outbox<P>,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        let (cid, bits) = (cqe.cid(), self.slot_bits);
        let Some(slot) = self.slot(cid) else {
            // The identifier is at byte 12 of the entry, which is at byte 8 of the PDU.
            return Err(PduError::header(20, "a completion of no command in flight").into());
        };
        let mut cqe = *cqe;
        // A write may fail before all its data was sent. So for a failure it is enough that the
        // capsule was sent. All bytes before the capsule were then sent, too. So the waiting bytes
        // are still those of no more commands than the queue has space for (T18).
        let must_be_sent = if cqe.status().is_ok() { slot.end } else { slot.capsule_end };
        if !out.has_sent(must_be_sent) {
            return Err(PduError::sequence("a completion before its command was sent").into());
        }
        if cqe.status().is_ok() {
            // The caller would accept a success that skipped data: its buffer would hold old bytes,
            // or the drive none of the new ones.
            match slot.direction {
                Direction::In if slot.moved < slot.len => {
                    return Err(PduError::sequence("a read completed before its data").into());
                }
                Direction::Out if slot.moved < slot.len => {
                    return Err(PduError::sequence("a write completed before its data").into());
                }
                _ => {}
            }
            if slot.corrupted {
                cqe = with_status(&cqe, Status::TRANSIENT_TRANSPORT);
            }
        } else if cqe.status().is(Status::QUEUE_DELETED) {
            // This status does not concern the command: it stays outstanding, and is sent again
            // (P7).
            return Err(SessionError::QueueDeleted);
        }
        let user = slot.user;
        let index = slot.end_command(bits);
        self.free.push(index);
        if self.state == State::Connecting {
            return self.queue_created(&cqe, on_event);
        }
        if let Some(user) = user {
            on_event(Event::Done { user, cqe });
        }
        Ok(())
    }

    /// Handles the completion of Connect.
    #[cold]
    fn queue_created(
        &mut self,
        cqe: &Cqe,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        let subnqn = || self.config.subnqn.clone();
        if !cqe.status().is_ok() {
            return Err(SessionError::Refused {
                qid: self.config.qid,
                subnqn: subnqn(),
                status: cqe.status(),
                result: cqe.result(),
            });
        }
        // AUTHREQ, bits 18:17 of the result.
        if cqe.result() >> 16 & 0b110 != 0 {
            return Err(SessionError::Authentication { subnqn: subnqn() });
        }
        self.cntlid = cqe.result() as u16;
        self.state = State::Ready;
        on_event(Event::Ready { cntlid: self.cntlid });
        Ok(())
    }

    /// Handles data of a read. It must follow the data that came before it.
    fn data_in(
        &mut self,
        hdr: &DataHdr,
        data: &[u8],
        digest_ok: bool,
        out: &Outbox<P>,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        // TCP §3.3.2.1 gives the status for each error.
        let Some(slot) = self.slot(hdr.cccid) else {
            return Err(PduError::header(8, "data for no command in flight").into());
        };
        if !out.has_sent(slot.end) {
            return Err(PduError::sequence("data before its command was sent").into());
        }
        if slot.direction != Direction::In {
            return Err(PduError::sequence("data for a command that reads none").into());
        }
        if slot.ended {
            return Err(PduError::sequence("data after LAST_PDU").into());
        }
        if u64::from(hdr.datao) + u64::from(hdr.datal) > u64::from(slot.len) {
            return Err(PduError::out_of_range("data beyond what the read asked for").into());
        }
        if hdr.datao != slot.moved {
            return Err(PduError::sequence("data that does not follow what came before").into());
        }
        slot.moved += hdr.datal;
        slot.ended = hdr.last;
        if hdr.success && slot.moved < slot.len {
            return Err(PduError::sequence("a read completed before its data").into());
        }
        slot.corrupted |= !digest_ok;
        let corrupted = slot.corrupted;
        let Some(user) = slot.user else {
            return Err(PduError::sequence("data for Connect").into());
        };
        if !corrupted {
            on_event(Event::Data { user, offset: hdr.datao, bytes: data });
        }
        if hdr.success {
            let status = if corrupted { Status::TRANSIENT_TRANSPORT } else { Status::SUCCESS };
            self.release(hdr.cccid);
            let cqe = Cqe::new(hdr.cccid, 0, self.config.qid, status, 0);
            on_event(Event::Done { user, cqe });
        }
        Ok(())
    }

    /// Handles an R2T: puts the requested data of a write into the outbox, in PDUs of `maxh2cdata`
    /// bytes at most.
    fn data_out(&mut self, r2t: &R2t, out: &mut Outbox<P>) -> Result<(), PduError> {
        let maxh2cdata = self.maxh2cdata as usize;
        let maxr2t = self.config.maxr2t.max(1);
        let calls = self.calls;
        // Not `self.slot()`: `self.tx` is needed beside it.
        let index = usize::from(r2t.cccid & ((1 << self.slot_bits) - 1));
        let slot = self
            .slots
            .get_mut(index)
            .filter(|slot| slot.busy && slot.cid == r2t.cccid)
            .ok_or(PduError::header(8, "an R2T for no command in flight"))?;
        // TCP §3.3.2.2 gives the status for each error. Data that was requested before may still be
        // in flight: as many R2Ts as `maxr2t` may be out at once.
        if slot.moved == 0 && !out.has_sent(slot.end) {
            return Err(PduError::sequence("an R2T before its command was sent"));
        }
        if slot.direction != Direction::Out {
            return Err(PduError::sequence("an R2T for a command that has no data to ask for"));
        }
        if u64::from(r2t.r2to) + u64::from(r2t.r2tl) > u64::from(slot.len) {
            return Err(PduError::out_of_range("an R2T beyond the data of the write"));
        }
        if r2t.r2to != slot.moved {
            return Err(PduError::sequence("an R2T that does not follow the one before"));
        }
        slot.r2ts = if slot.r2ts.1 == calls { (slot.r2ts.0 + 1, calls) } else { (1, calls) };
        if slot.r2ts.0 > maxr2t {
            return Err(PduError::limit("more R2Ts at once than were allowed"));
        }
        slot.moved += r2t.r2tl;
        let mut at = r2t.r2to as usize;
        let end = at + r2t.r2tl as usize;
        while at < end {
            let len = maxh2cdata.min(end - at);
            let hdr = DataHdr {
                cccid: r2t.cccid,
                ttag: r2t.ttag,
                datao: at as u32,
                datal: len as u32,
                last: at + len == end,
                success: false,
            };
            let tx = &self.tx;
            out.push_bytes(|b| tx.h2c_data(&hdr, b));
            let pieces = &slot.pieces;
            for (piece, range) in cut(pieces, at, len) {
                out.push_slice(piece.clone(), range);
            }
            if tx.data_digest {
                let slices = cut(pieces, at, len).map(|(piece, range)| &piece.as_ref()[range]);
                out.push_bytes(|b| tx.data_digest(slices, b));
            }
            at += len;
        }
        slot.end = out.end();
        if slot.moved == slot.len {
            // All is in the outbox, which has its own references.
            slot.pieces.clear();
        }
        Ok(())
    }
}

/// The bytes `at..at + len` of the data that `pieces` make together: the pieces in which they lie,
/// each with its range.
fn cut<P: AsRef<[u8]>>(
    pieces: &[P],
    at: usize,
    len: usize,
) -> impl Iterator<Item = (&P, core::ops::Range<usize>)> {
    let mut start = 0;
    pieces.iter().filter_map(move |piece| {
        let size = piece.as_ref().len();
        let from = at.saturating_sub(start).min(size);
        let to = (at + len).saturating_sub(start).min(size);
        start += size;
        (from < to).then_some((piece, from..to))
    })
}

/// The same completion with another status.
fn with_status(cqe: &Cqe, status: Status) -> Cqe {
    Cqe::new(cqe.cid(), cqe.sqhd(), cqe.sqid(), status, cqe.result())
}

#[cfg(test)]
mod tests;
