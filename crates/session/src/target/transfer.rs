//! Data that a host sends on request, and the budget that bounds the buffers of a connection (trap
//! T18).
//!
//! ```text
//! command → budget allows its buffer → R2T to the host → H2CData pieces → command has its data
//! ```
//!
//! The first part of an H2CData usually comes without its end. Its PDU is then open
//! ([`OpenData`]): the rest of its data goes straight to the buffer of the command, without a stay in
//! the receive buffer.
//!
//! Commands whose buffer the budget does not allow yet wait in `waiting_for_budget`, in order.
//!
//! A plain read or write of more than [`CONNECTION_BYTES`](super::limits::CONNECTION_BYTES) is carried out in pieces of this size, one
//! after the other. So a connection can carry out any one command within its own share of the memory
//! (trap T28):
//!
//! ```text
//! write:  R2T of a piece → its data → the drive → R2T of the next piece → … → completion
//! read:   budget → the drive → data of a piece → budget → … → data of the last piece, completion
//! ```

use riopipe_nvme::Crc32c;
use riopipe_nvme::command::{Sqe, Status};
use riopipe_nvme::digest::DIGEST_LEN;
use riopipe_nvme::pdu::{DataHdr, DataHead, PduError, R2t};

use riopipe_order::probe::{self, Rare};

use super::closed::Closed;
use super::commands::{Command, Stage};
use super::context::Context;
use super::env::TargetEnv;
use super::lba::Trim;
use super::limits::TRANSFER_BUDGET;
use crate::outbox::Outbox;

impl<E: TargetEnv> Context<E> {
    /// Puts a command with `data_len` bytes of data into the table. Requests the data, or its first
    /// piece, from the host, now or when the budget allows the buffer.
    pub(super) fn insert_and_request_data(
        &mut self,
        sqe: &Sqe,
        ns_index: usize,
        data_len: u32,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        self.insert_and_request_part(sqe, Trim::default(), ns_index, data_len, env, outbox)
    }

    /// Like [`insert_and_request_data`](Self::insert_and_request_data), for a command with a trim.
    pub(super) fn insert_and_request_part(
        &mut self,
        sqe: &Sqe,
        trim: Trim,
        ns_index: usize,
        data_len: u32,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let index = self.insert_command(sqe, Stage::Budget, ns_index)?;
        let command = &mut self.commands[index];
        command.trim = trim;
        let first_piece = data_len.min(command.piece_max() - u32::from(trim.head));
        if self.charge_or_enqueue(index, first_piece, outbox) {
            self.request_data_or_fail(index, env, outbox);
        }
        Ok(())
    }

    /// Continues a read or write with its next piece, if there is one: the current one has reached
    /// the drive, or has gone to the host. The caller begins the new piece.
    pub(super) fn begin_next_piece(&mut self, index: u16) -> bool {
        if self.commands[index].lock.is_some() {
            self.give_up_lock(index);
        }
        let command = &mut self.commands[index];
        let next_offset = command.piece_offset + command.data_len;
        let total_bytes = command.trim.data_len(&command.sqe);
        // Data in a capsule is never in pieces, and a smaller piece is the last one.
        if command.data_len < command.piece_at(command.piece_offset) || next_offset >= total_bytes {
            return false;
        }
        command.piece_offset = next_offset;
        command.data_len = command.piece_at(next_offset);
        true
    }

    /// Charges a buffer of `data_len` bytes to the budget and returns true, if the budget allows
    /// that now. Otherwise the command waits, and [`next_within_budget`](Self::next_within_budget)
    /// returns it later.
    pub(super) fn charge_or_enqueue(
        &mut self,
        index: u16,
        data_len: u32,
        outbox: &Outbox<E::Buf>,
    ) -> bool {
        self.commands[index].data_len = data_len;
        let fits = self.waiting_for_budget.is_empty() && self.try_reserve(index, outbox);
        if fits {
            self.charge_budget(index);
        } else {
            self.waiting_for_budget.push_back(index);
        }
        fits
    }

    /// Charges the buffer of the first waiting command to the budget and returns that command.
    /// `None` if no command waits, or the budget does not allow that buffer now.
    pub(super) fn next_within_budget(&mut self, outbox: &Outbox<E::Buf>) -> Option<u16> {
        let index = *self.waiting_for_budget.front()?;
        if !self.try_reserve(index, outbox) {
            return None;
        }
        self.waiting_for_budget.pop_front();
        self.charge_budget(index);
        Some(index)
    }

    /// Reserves the memory for the buffer of a command. Returns whether that succeeded.
    fn try_reserve(&mut self, index: u16, outbox: &Outbox<E::Buf>) -> bool {
        let used_bytes = self.held_bytes + outbox.len_bytes();
        let needed_bytes = used_bytes + self.commands[index].piece_memory();
        // A connection that holds nothing may always hold the buffer of one command. Otherwise it
        // might wait for other connections without end.
        used_bytes == 0 || needed_bytes <= TRANSFER_BUDGET && self.reservation.grow(needed_bytes)
    }

    /// Counts the buffer of a command against the budget.
    fn charge_budget(&mut self, index: u16) {
        let command = &mut self.commands[index];
        command.charged_bytes = command.piece_memory();
        self.held_bytes += command.charged_bytes;
    }

    /// Allocates the buffer of a command and requests the data from the host by R2T. Returns false,
    /// without an R2T, if there is no memory.
    pub(super) fn request_data(
        &mut self,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> bool {
        let command = &mut self.commands[index];
        let data_len = command.data_len;
        let Some(buf) = env.alloc(data_len as usize) else { return false };
        command.buf = Some(buf);
        command.stage = Stage::Receiving;
        command.received_bytes = 0;
        let r2to = command.piece_offset;
        let r2t = R2t { cccid: command.sqe.cid(), ttag: index, r2to, r2tl: data_len };
        self.last_r2t_ns = env.now();
        let tx = &self.tx;
        outbox.push_bytes(|bytes| tx.r2t(&r2t, bytes));
        true
    }

    /// Like [`request_data`](Self::request_data), for a command without an ordering attribute: the
    /// command fails if there is no memory.
    pub(super) fn request_data_or_fail(
        &mut self,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if !self.request_data(index, env, outbox) {
            self.complete_command(index, Status::INTERNAL, 0, outbox);
        }
    }

    /// Takes in a piece of the data that an R2T requested. Returns the index of the command if its
    /// data is now complete. The data of an aborted command is dropped.
    ///
    /// # Errors
    /// The host has broken the protocol.
    pub(super) fn receive_data(
        &mut self,
        header: &DataHdr,
        data: &[u8],
        is_digest_valid: bool,
    ) -> Result<Option<u16>, PduError> {
        let command = self.check_data(header)?;
        let start = command.received_bytes as usize;
        if let Some(buf) = &mut command.buf {
            buf.as_mut()[start..start + data.len()].copy_from_slice(data);
        }
        Ok(self.finish_data(header, is_digest_valid))
    }

    /// Checks that data with this header is the next that an R2T has requested. Returns its command.
    fn check_data(&mut self, header: &DataHdr) -> Result<&mut Command<E::Buf>, PduError> {
        let command = self
            .commands
            .get_used(header.ttag)
            .filter(|command| matches!(command.stage, Stage::Receiving | Stage::Aborted))
            .ok_or(PduError::header(10, "no R2T with this tag is open"))?;
        if command.sqe.cid() != header.cccid {
            return Err(PduError::header(8, "the command is not the one of this R2T"));
        }
        // On one connection the pieces must arrive in order (TCP §3.3.2.1).
        if header.datao != command.piece_offset + command.received_bytes {
            return Err(PduError::header(12, "data is not where the last piece ended"));
        }
        if header.datal == 0 || header.datal > command.data_len - command.received_bytes {
            return Err(PduError::out_of_range("data beyond what the R2T asked for"));
        }
        if header.last != (command.received_bytes + header.datal == command.data_len) {
            return Err(PduError::header(1, "LAST_PDU is not on the last piece"));
        }
        Ok(command)
    }

    /// Counts a piece of data that has come in. Returns the index of the command if its data is now
    /// complete, and the command waits for it.
    fn finish_data(&mut self, header: &DataHdr, is_digest_valid: bool) -> Option<u16> {
        let command = &mut self.commands[header.ttag];
        command.received_bytes += header.datal;
        if command.stage == Stage::Aborted {
            if header.last {
                self.commands.end_aborted_transfer(header.ttag);
            }
            return None;
        }
        if !is_digest_valid {
            command.early_status.get_or_insert(Status::TRANSIENT_TRANSPORT);
        }
        header.last.then_some(header.ttag)
    }

    /// Opens a data PDU of which not all has come, if its command has a buffer: the rest of the data
    /// goes straight to that buffer. Returns whether the PDU is open.
    ///
    /// # Errors
    /// The host has broken the protocol.
    pub(super) fn open_data(&mut self, head: &DataHead) -> Result<bool, PduError> {
        let has_buf = self.check_data(&head.header)?.buf.is_some();
        if has_buf {
            probe::count_rare(Rare::DataInParts);
            let DataHead { header, has_data_digest, .. } = *head;
            self.open_data = Some(OpenData { header, arrived_bytes: 0, has_data_digest });
        }
        Ok(has_buf)
    }

    /// The memory for the next bytes of the open data PDU. Empty without such a PDU, or if its
    /// command was aborted.
    pub(super) fn data_space(&mut self) -> &mut [u8] {
        let Some(open) = &self.open_data else { return &mut [] };
        let command = &mut self.commands[open.header.ttag];
        let start = command.received_bytes + open.arrived_bytes;
        let end = command.received_bytes + open.header.datal;
        match &mut command.buf {
            Some(buf) => &mut buf.as_mut()[start as usize..end as usize],
            None => &mut [],
        }
    }

    /// Notes that the first `bytes` bytes of [`data_space`](Self::data_space) have arrived.
    ///
    /// # Panics
    /// If these are more than the space has.
    pub(super) fn data_arrived(&mut self, bytes: usize) {
        assert!(bytes <= self.data_space().len(), "more data than there was space for");
        if let Some(open) = &mut self.open_data {
            open.arrived_bytes += bytes as u32;
        }
    }

    /// Takes the next bytes of the open data PDU from `input`. Returns how many bytes were taken,
    /// and how the PDU ends if it is complete; `None` if no PDU is open.
    pub(super) fn continue_data(&mut self, input: &[u8], crc: Crc32c) -> Option<OpenDataInput> {
        let OpenData { header, arrived_bytes, has_data_digest } = self.open_data?;
        let taken = input.len().min((header.datal - arrived_bytes) as usize);
        // The data of an aborted command has no buffer, and is dropped.
        if let Some(space) = self.data_space().get_mut(..taken) {
            space.copy_from_slice(&input[..taken]);
        }
        let arrived_bytes = arrived_bytes + taken as u32;
        self.open_data = Some(OpenData { header, arrived_bytes, has_data_digest });
        let incomplete = OpenDataInput { taken_bytes: taken, end: None };
        if arrived_bytes < header.datal {
            return Some(incomplete);
        }
        let digest = if has_data_digest { DIGEST_LEN } else { 0 };
        let Some(digest) = input.get(taken..taken + digest) else { return Some(incomplete) };
        let command = &self.commands[header.ttag];
        let start = command.received_bytes as usize;
        let data = command.buf.as_ref().map(|buf| &buf.as_ref()[start..][..header.datal as usize]);
        let is_digest_valid = match (data, <[u8; DIGEST_LEN]>::try_from(digest)) {
            (Some(data), Ok(digest)) => u32::from_le_bytes(digest) == crc(0, data),
            _ => true,
        };
        self.open_data = None;
        let taken_bytes = taken + digest.len();
        Some(OpenDataInput { taken_bytes, end: Some(DataEnd { header, is_digest_valid }) })
    }

    /// Ends a data PDU that was open. Returns the index of the command if its data is now complete.
    pub(super) fn close_data(&mut self, end: &DataEnd) -> Option<u16> {
        self.finish_data(&end.header, end.is_digest_valid)
    }
}

/// A data PDU that has begun to arrive. Its data goes straight to the buffer of its command, so that
/// the shell may receive it there.
///
/// The command can be aborted meanwhile. It keeps its slot then, and has no buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenData {
    header: DataHdr,
    /// How many bytes of the data have arrived.
    arrived_bytes: u32,
    /// A digest follows the data.
    has_data_digest: bool,
}

/// The part of the input that belongs to the open data PDU.
pub(super) struct OpenDataInput {
    /// How many bytes of the input belong to the PDU.
    pub(super) taken_bytes: usize,
    /// The end of the PDU, if it is complete.
    pub(super) end: Option<DataEnd>,
}

/// The end of an open data PDU.
pub(super) struct DataEnd {
    pub(super) header: DataHdr,
    pub(super) is_digest_valid: bool,
}
