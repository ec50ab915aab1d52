//! The slots of a queue pair: one for each command that can be in flight.

use alloc::vec::Vec;

use riopipe_nvme::pdu::{DataHdr, PduError, R2t};

/// How the data of a command travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    /// The command has no data.
    None,
    /// From host to controller, in the command capsule.
    InCapsule,
    /// From host to controller, in H2CData PDUs, when the target requests it with R2Ts.
    H2cData,
    /// From controller to host, in C2HData PDUs.
    C2hData,
}

/// The data of a command that is about to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataPlan {
    pub(super) transfer: Transfer,
    pub(super) len_bytes: u32,
}

impl DataPlan {
    /// The number of bytes of data in the command capsule.
    #[inline(always)]
    pub(super) fn capsule_bytes(self) -> u32 {
        if self.transfer == Transfer::InCapsule { self.len_bytes } else { 0 }
    }
}

/// The R2Ts of a command that arrived in one call of
/// [`QueuePair::receive`](super::QueuePair::receive).
///
/// The data that they request is sent only after the call. So the target sent all of these R2Ts
/// before it got any of that data, and all of them count as open at once.
#[derive(Clone, Copy, Debug)]
struct R2tBurst {
    count: u32,
    /// The number of the call.
    receive_call: u32,
}

/// A slot, and the state of the command that occupies it.
///
/// A command identifier consists of the slot's number and a count of the slot's uses:
///
/// ```text
/// bits  15        slot_bits  slot_bits - 1     0
///      | uses of the slot  | number of the slot |
/// ```
///
/// So a completion that comes twice does not match the next command in the slot.
#[derive(Debug)]
pub(super) struct Slot<P, T> {
    /// The caller's context of the command; `None` for Connect, which the queue pair sends itself.
    pub(super) context: Option<T>,
    /// The command identifier of the present or the next command.
    pub(super) cid: u16,
    pub(super) in_flight: bool,
    /// Whether some of the read data did not match its digest.
    pub(super) is_corrupted: bool,
    pub(super) transfer: Transfer,
    /// The length of the command's data.
    pub(super) data_bytes: u32,
    /// The number of bytes that R2Ts have requested ([`Transfer::H2cData`]) or that have arrived
    /// ([`Transfer::C2hData`]). Both come in ascending order, without gaps.
    pub(super) transferred_bytes: u32,
    /// Whether a C2HData PDU with the LAST_PDU flag has arrived.
    pub(super) has_last_pdu: bool,
    r2t_burst: R2tBurst,
    /// The outbox position behind the command's capsule, without its data.
    pub(super) capsule_end: u64,
    /// The outbox position behind everything that was put into the outbox for the command.
    pub(super) queued_end: u64,
    /// The data that R2Ts will request. The vector's memory is kept for the next command.
    pub(super) write_pieces: Vec<P>,
}

impl<P, T> Slot<P, T> {
    /// A free slot. `number` is its place in the queue pair's list.
    pub(super) const fn new(number: u16) -> Self {
        Self {
            context: None,
            cid: number,
            in_flight: false,
            is_corrupted: false,
            transfer: Transfer::None,
            data_bytes: 0,
            transferred_bytes: 0,
            has_last_pdu: false,
            r2t_burst: R2tBurst { count: 0, receive_call: 0 },
            capsule_end: 0,
            queued_end: 0,
            write_pieces: Vec::new(),
        }
    }

    /// Occupies the free slot with a new command.
    #[inline(always)]
    pub(super) fn begin_command(&mut self, context: Option<T>, plan: DataPlan) {
        debug_assert!(!self.in_flight && self.write_pieces.is_empty());
        self.in_flight = true;
        self.context = context;
        self.is_corrupted = false;
        self.transfer = plan.transfer;
        self.data_bytes = plan.len_bytes;
        self.transferred_bytes = 0;
        self.has_last_pdu = false;
        self.r2t_burst.count = 0;
    }

    /// Frees the slot, and gives its next command another identifier. Returns the slot's number.
    #[inline]
    pub(super) fn end_command(&mut self, slot_bits: u32) -> u16 {
        let cid = self.cid;
        self.in_flight = false;
        self.cid = cid.wrapping_add(1 << slot_bits);
        if !self.write_pieces.is_empty() {
            self.write_pieces.clear();
        }
        slot_number(cid, slot_bits)
    }

    /// Whether some data of the command has not been transferred yet.
    #[inline(always)]
    pub(super) fn misses_data(&self) -> bool {
        self.transferred_bytes < self.data_bytes
    }

    /// Checks that the data of a C2HData PDU continues the data of this command. `is_command_sent`:
    /// whether the whole command has been sent. TCP §3.3.2.1 gives the status for each error.
    pub(super) fn check_c2h_data(
        &self,
        hdr: &DataHdr,
        is_command_sent: bool,
    ) -> Result<(), PduError> {
        if !is_command_sent {
            return Err(PduError::sequence("data before its command was sent"));
        }
        if self.transfer != Transfer::C2hData {
            return Err(PduError::sequence("data for a command that reads none"));
        }
        if self.has_last_pdu {
            return Err(PduError::sequence("data after LAST_PDU"));
        }
        if u64::from(hdr.datao) + u64::from(hdr.datal) > u64::from(self.data_bytes) {
            return Err(PduError::out_of_range("data beyond what the read asked for"));
        }
        if hdr.datao != self.transferred_bytes {
            return Err(PduError::sequence("data that does not follow what came before"));
        }
        Ok(())
    }

    /// Checks that an R2T requests the next data of this command. `is_queue_sent`: whether
    /// everything that was put into the outbox for the command has been sent. TCP §3.3.2.2 gives
    /// the status for each error.
    pub(super) fn check_r2t(&self, r2t: &R2t, is_queue_sent: bool) -> Result<(), PduError> {
        // Data for an earlier R2T may still be in the outbox, because the target may have several
        // R2Ts open. So only the first R2T shows that the command has arrived.
        if self.transferred_bytes == 0 && !is_queue_sent {
            return Err(PduError::sequence("an R2T before its command was sent"));
        }
        if self.transfer != Transfer::H2cData {
            return Err(PduError::sequence("an R2T for a command that has no data to ask for"));
        }
        if u64::from(r2t.r2to) + u64::from(r2t.r2tl) > u64::from(self.data_bytes) {
            return Err(PduError::out_of_range("an R2T beyond the data of the write"));
        }
        if r2t.r2to != self.transferred_bytes {
            return Err(PduError::sequence("an R2T that does not follow the one before"));
        }
        Ok(())
    }

    /// Counts an R2T that arrived in call number `receive_call`. At most `maxr2t` of them may be
    /// open at once.
    pub(super) fn count_r2t(&mut self, receive_call: u32, maxr2t: u32) -> Result<(), PduError> {
        let is_same_call = self.r2t_burst.receive_call == receive_call;
        let count = if is_same_call { self.r2t_burst.count + 1 } else { 1 };
        self.r2t_burst = R2tBurst { count, receive_call };
        if count > maxr2t {
            return Err(PduError::limit("more R2Ts at once than were allowed"));
        }
        Ok(())
    }
}

/// The number of the slot to which a command identifier belongs.
#[inline(always)]
pub(super) const fn slot_number(cid: u16, slot_bits: u32) -> u16 {
    cid & ((1 << slot_bits) - 1)
}
