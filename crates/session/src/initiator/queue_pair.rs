//! One connection to a target: a submission and a completion queue over TCP.
//!
//! ```text
//! Idle ──start: ICReq──→ Initializing ──ICResp: Connect──→ Connecting ──completion──→ Ready
//!                                     Connecting ──AUTHREQ──→ Authenticating ──success──→ Ready
//! every state ──error, or end of the connection──→ Closed
//! ```
//!
//! [`QueuePair`] initializes the connection, creates the queue (Fabrics Connect), sends commands
//! and takes completions. It answers R2Ts by itself. The queue pair checks every PDU from the
//! target against the commands in flight, because a PDU that fits no command could complete a
//! command too early (trap T18). A target that breaks the protocol loses the connection. The
//! termination request that the specification gives for the error is then already in the outbox.

mod authentication;
mod config;
mod error;
mod set_up;
mod slot;
mod transfer;

use alloc::boxed::Box;
use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sgl, Sqe, Status};
use riopipe_nvme::digest::Crc32c;
use riopipe_nvme::pdu::{ADMIN_IN_CAPSULE, CAPSULE_RESP_LEN, Pdu, PduError, Role, Rx, TermReq, Tx};

use self::authentication::Authentication;
pub use self::config::{IoQueue, QpConfig};
pub use self::error::{SessionError, SubmitError};
use self::slot::{DataPlan, Slot, Transfer, slot_number};
use crate::outbox::Outbox;

/// The command identifier of a command in flight.
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

/// An event on a connection. `T` is the caller's context of a command.
#[derive(Debug)]
pub enum Event<'a, T = u64> {
    /// The queue exists; commands may be submitted.
    Ready {
        /// The controller.
        cntlid: u16,
    },
    /// Data of a read has arrived.
    Data {
        /// As given with the command.
        context: T,
        /// Its offset in the command's data, in bytes.
        offset: u32,
        /// The data.
        bytes: &'a [u8],
    },
    /// A command is done.
    Done {
        /// As given with the command.
        context: T,
        /// Its completion.
        cqe: Cqe,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueState {
    /// Nothing has been sent.
    Idle,
    /// ICReq has been sent.
    Initializing,
    /// Connect has been sent.
    Connecting,
    /// The queue exists, and the host authenticates.
    Authenticating,
    /// The queue exists.
    Ready,
    /// The connection has ended.
    Closed,
}

/// One connection to a target; see [the module](self). `T` is the caller's context of a command.
#[derive(Debug)]
pub struct QueuePair<P, T = u64> {
    config: QpConfig,
    state: QueueState,
    /// Decodes the target's PDUs.
    rx: Rx,
    /// Encodes the PDUs to the target.
    tx: Tx,
    /// The most data in one H2CData PDU, bytes, as the target has stated it.
    maxh2cdata: u32,
    /// The most data in a command capsule, bytes.
    in_capsule_max: u32,
    slots: Vec<Slot<P, T>>,
    /// The numbers of the free slots.
    free_slots: Vec<u16>,
    /// How many low bits of a command identifier are the slot number.
    slot_bits: u32,
    cntlid: u16,
    /// The number of calls of [`receive`](Self::receive), to separate R2Ts of one call from those
    /// of another.
    receive_calls: u32,
    /// The authentication that is running.
    authentication: Option<Box<Authentication>>,
}

/// Entries per queue are bounded so that some bits of an identifier are left to count the uses of
/// its slot.
const SQSIZE_MAX: u16 = 4096;
/// The offset of the command identifier (CCCID) in the header of a C2HData PDU and of an R2T.
const CCCID_OFFSET: u32 = 8;
/// The offset of the command identifier in a response capsule: byte 12 of the completion queue
/// entry, which is at byte 8 of the PDU.
const RESPONSE_CID_OFFSET: u32 = 8 + 12;

impl<P: AsRef<[u8]> + Clone, T: Copy> QueuePair<P, T> {
    /// The number of commands that can be in flight.
    #[inline]
    #[must_use]
    pub const fn depth(&self) -> usize {
        self.slots.len()
    }

    /// The function that computes CRC32C.
    #[must_use]
    pub const fn crc32c(&self) -> Crc32c {
        self.tx.crc
    }

    /// A connection on which nothing has been sent.
    #[must_use]
    pub fn new(config: QpConfig) -> Self {
        let depth = config.sqsize.clamp(2, SQSIZE_MAX) - 1;
        let mut rx = Rx::new(Role::Host, config.crc);
        rx.data_max = config.data_max;
        Self {
            state: QueueState::Idle,
            rx,
            tx: Tx::new(config.crc),
            maxh2cdata: 0,
            in_capsule_max: if config.qid == 0 { ADMIN_IN_CAPSULE } else { 0 },
            slots: (0..depth).map(Slot::new).collect(),
            free_slots: (0..depth).rev().collect(),
            slot_bits: depth.next_power_of_two().trailing_zeros(),
            cntlid: config.cntlid,
            receive_calls: 0,
            authentication: None,
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

    /// Whether commands may be submitted.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.state == QueueState::Ready
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state == QueueState::Closed
    }

    /// The number of commands that may be submitted now.
    #[must_use]
    #[inline]
    pub fn space(&self) -> usize {
        if self.state == QueueState::Ready { self.free_slots.len() } else { 0 }
    }

    /// The number of commands in flight.
    #[must_use]
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free_slots.len()
    }

    /// Whether data of a command has not been put into the outbox, because the target has not asked
    /// for it.
    #[must_use]
    pub fn has_unrequested_data(&self) -> bool {
        let is_unrequested = |slot: &Slot<P, T>| {
            slot.in_flight && slot.transfer == Transfer::H2cData && slot.misses_data()
        };
        self.in_flight() > 0 && self.slots.iter().any(is_unrequested)
    }

    /// The caller's contexts of the commands in flight, in no order. When the connection has ended,
    /// the caller must replay or fail these commands.
    pub fn outstanding(&self) -> impl Iterator<Item = T> {
        self.slots.iter().filter(|slot| slot.in_flight).filter_map(|slot| slot.context)
    }

    /// Records that the connection has ended. Commands in flight stay
    /// [outstanding](Self::outstanding). The queue pair drops its references to data that no R2T
    /// has requested.
    pub fn close(&mut self) {
        let was_connecting =
            matches!(self.state, QueueState::Connecting | QueueState::Authenticating);
        self.state = QueueState::Closed;
        self.authentication = None;
        for slot in &mut self.slots {
            slot.write_pieces.clear();
            // While the queue connects, the only command in flight is not the caller's.
            slot.in_flight &= !was_connecting;
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
        self.in_capsule_max = bytes;
    }

    /// The limit of data in an I/O command capsule, bytes.
    #[must_use]
    pub const fn in_capsule(&self) -> u32 {
        self.in_capsule_max
    }

    /// The bytes that the next PDU in `buf` needs; see [`Rx::need`].
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        self.rx.need(buf)
    }

    /// Sends a command. The queue pair sets its identifier and its data pointer. The command's
    /// events carry `context`.
    ///
    /// # Errors
    /// The queue is full or not ready, or the data is too long: then nothing was sent.
    #[inline]
    pub fn submit(
        &mut self,
        sqe: Sqe,
        context: T,
        data: Data<'_, P>,
        outbox: &mut Outbox<P>,
    ) -> Result<Cid, SubmitError> {
        if self.state != QueueState::Ready {
            return Err(SubmitError::NotReady);
        }
        self.send_command(sqe, Some(context), data, outbox)
    }

    /// Takes a slot for a command, and puts its capsule into the outbox. The data of a write goes
    /// into the capsule if it fits there. Otherwise the slot keeps the data until the target
    /// requests it.
    #[inline(always)]
    fn send_command(
        &mut self,
        mut sqe: Sqe,
        context: Option<T>,
        data: Data<'_, P>,
        outbox: &mut Outbox<P>,
    ) -> Result<Cid, SubmitError> {
        let plan = self.plan_data(&data)?;
        let capsule_bytes = plan.capsule_bytes();
        let number = self.free_slots.pop().ok_or(SubmitError::Full)?;
        let slot = &mut self.slots[usize::from(number)];
        slot.begin_command(context, plan);
        let cid = slot.cid;

        sqe.set_cid(cid);
        sqe.set_sgl(if capsule_bytes > 0 {
            Sgl::InCapsule { offset: 0, len: plan.len_bytes }
        } else {
            Sgl::Transport { len: plan.len_bytes }
        });
        let tx = &self.tx;
        outbox.push_command(tx, &sqe, capsule_bytes);
        slot.capsule_end = outbox.end();
        match data {
            Data::None | Data::Read(_) => {}
            Data::Bytes(data) => outbox.push_bytes(|bytes| {
                bytes.extend_from_slice(data);
                if capsule_bytes > 0 {
                    tx.data_digest([data], bytes);
                }
            }),
            Data::Write(pieces) if capsule_bytes > 0 => {
                for piece in pieces {
                    outbox.push_payload(piece.clone());
                }
                if tx.data_digest {
                    let slices = pieces.iter().map(AsRef::as_ref);
                    outbox.push_bytes(|bytes| tx.data_digest(slices, bytes));
                }
            }
            Data::Write(pieces) => slot.write_pieces.extend_from_slice(pieces),
        }
        slot.queued_end = outbox.end();
        Ok(Cid(cid))
    }

    /// Decides how the data of a command travels.
    ///
    /// # Errors
    /// The data is too long, or its length is not allowed outside of a capsule.
    #[inline(always)]
    fn plan_data(&self, data: &Data<'_, P>) -> Result<DataPlan, SubmitError> {
        let (transfer, len) = match data {
            Data::None => (Transfer::None, 0),
            Data::Bytes(bytes) => (Transfer::InCapsule, bytes.len() as u64),
            Data::Write(pieces) => {
                let len = pieces.iter().map(|piece| piece.as_ref().len() as u64).sum();
                let fits_capsule = len <= u64::from(self.in_capsule_max);
                (if fits_capsule { Transfer::InCapsule } else { Transfer::H2cData }, len)
            }
            Data::Read(len) => (Transfer::C2hData, u64::from(*len)),
        };
        let max = match data {
            Data::Bytes(_) => self.in_capsule_max,
            Data::Read(_) => self.config.data_max,
            Data::None | Data::Write(_) => u32::MAX,
        };
        if len > u64::from(max) {
            return Err(SubmitError::TooLong { len, max });
        }
        let uses_data_pdus = matches!(transfer, Transfer::H2cData | Transfer::C2hData);
        if uses_data_pdus && !len.is_multiple_of(4) {
            return Err(SubmitError::Misaligned { len });
        }
        Ok(DataPlan { transfer, len_bytes: len as u32 })
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
        outbox: &mut Outbox<P>,
        mut on_event: impl FnMut(Event<'_, T>),
    ) -> Result<usize, SessionError> {
        if self.state == QueueState::Closed {
            return Err(SessionError::Closed);
        }
        self.receive_calls = self.receive_calls.wrapping_add(1);
        let mut used = 0;
        loop {
            let rest = &buf[used..];
            // The fast path: a response capsule without digests.
            if let Some(cqe) = self.rx.plain_response(rest) {
                match self.on_completion(&cqe, outbox, &mut on_event) {
                    Ok(()) => used += CAPSULE_RESP_LEN,
                    Err(error) => return Err(self.end_with_error(error, rest, outbox)),
                }
                continue;
            }
            let handled = match self.rx.parse(rest) {
                Ok(None) => return Ok(used),
                Ok(Some(parsed)) => {
                    let data = &rest[parsed.data.clone()];
                    self.on_pdu(&parsed.pdu, data, parsed.data_digest_ok, outbox, &mut on_event)
                        .map(|()| parsed.len)
                }
                Err(error) => Err(error.into()),
            };
            match handled {
                Ok(pdu_len) => used += pdu_len,
                Err(error) => return Err(self.end_with_error(error, rest, outbox)),
            }
        }
    }

    /// Ends the connection with an error about the PDU at the start of `pdu`. Reports an error of
    /// the protocol to the target, in a termination request.
    #[cold]
    fn end_with_error(
        &mut self,
        error: SessionError,
        pdu: &[u8],
        outbox: &mut Outbox<P>,
    ) -> SessionError {
        self.close();
        if let SessionError::Protocol(error) = &error {
            outbox.push_bytes(|bytes| error.term_req().encode(Role::Controller, pdu, bytes));
        }
        error
    }

    /// Handles one PDU from the target. `digest_ok`: whether its data matches the data digest.
    #[inline(never)]
    fn on_pdu(
        &mut self,
        pdu: &Pdu,
        data: &[u8],
        digest_ok: bool,
        outbox: &mut Outbox<P>,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        match pdu {
            Pdu::CapsuleResp { cqe } => self.on_completion(cqe, outbox, on_event),
            Pdu::C2hData(hdr) => self.on_c2h_data(hdr, data, digest_ok, outbox, on_event),
            Pdu::R2t(r2t) => self.on_r2t(r2t, outbox).map_err(Into::into),
            Pdu::IcResp(icresp) => self.on_icresp(icresp, outbox),
            Pdu::C2hTermReq(TermReq { fes, fei }) => {
                Err(SessionError::Terminated { fes: *fes, fei: *fei })
            }
            // `Rx` lets no other PDU through to a host.
            _ => Err(PduError::sequence("a PDU that only a controller may get").into()),
        }
    }

    /// The slot of the command in flight that has this identifier.
    #[inline]
    fn slot_in_flight(&mut self, cid: u16) -> Option<&mut Slot<P, T>> {
        let number = usize::from(slot_number(cid, self.slot_bits));
        self.slots.get_mut(number).filter(|slot| slot.in_flight && slot.cid == cid)
    }

    /// Ends the command in flight with this identifier, and frees its slot.
    fn free_slot(&mut self, cid: u16) {
        let slot_bits = self.slot_bits;
        if let Some(slot) = self.slot_in_flight(cid) {
            let number = slot.end_command(slot_bits);
            self.free_slots.push(number);
        }
    }

    /// Handles the completion of a command: ends the command, and reports it to the caller.
    #[inline(always)]
    fn on_completion(
        &mut self,
        cqe: &Cqe,
        outbox: &mut Outbox<P>,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        let slot_bits = self.slot_bits;
        let Some(slot) = self.slot_in_flight(cqe.cid()) else {
            let why = "a completion of no command in flight";
            return Err(PduError::header(RESPONSE_CID_OFFSET, why).into());
        };
        let mut cqe = *cqe;
        // An answer to a command that was not sent cannot be genuine. If the queue pair accepted
        // it, the caller could submit the next command at once, and the outbox would grow without a
        // limit (trap T18). A write may fail before all its data was sent. So after a failure only
        // the capsule must have been sent, which was put into the outbox before the data.
        let must_be_sent = if cqe.status().is_ok() { slot.queued_end } else { slot.capsule_end };
        if !outbox.has_sent(must_be_sent) {
            return Err(PduError::sequence("a completion before its command was sent").into());
        }
        if cqe.status().is_ok() {
            // The caller would accept a success that skipped data. After a read its buffer would
            // hold old bytes, and after a write the drive would hold old blocks.
            match slot.transfer {
                Transfer::C2hData if slot.misses_data() => {
                    return Err(PduError::sequence("a read completed before its data").into());
                }
                Transfer::H2cData if slot.misses_data() => {
                    return Err(PduError::sequence("a write completed before its data").into());
                }
                _ => {}
            }
            if slot.is_corrupted {
                cqe = with_status(&cqe, Status::TRANSIENT_TRANSPORT);
            }
        } else if cqe.status().is(Status::QUEUE_DELETED) {
            // This status does not concern the command itself. The command stays outstanding, so
            // that the caller sends it again on another connection (promise P7).
            return Err(SessionError::QueueDeleted);
        }
        let context = slot.context;
        let number = slot.end_command(slot_bits);
        self.free_slots.push(number);
        if self.state != QueueState::Ready {
            return self.on_setup_completion(&cqe, outbox, on_event);
        }
        if let Some(context) = context {
            on_event(Event::Done { context, cqe });
        }
        Ok(())
    }
}

/// The same completion with another status.
fn with_status(cqe: &Cqe, status: Status) -> Cqe {
    Cqe::new(cqe.cid(), cqe.sqhd(), cqe.sqid(), status, cqe.result())
}

#[cfg(test)]
mod tests;
