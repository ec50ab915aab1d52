//! Data that a host sends on request, and the budget that bounds the buffers of a connection (trap
//! T18).
//!
//! ```text
//! command → budget allows its buffer → R2T to the host → H2CData pieces → command has its data
//! ```
//!
//! Commands whose buffer the budget does not allow yet wait in `waiting_for_budget`, in order.
//!
//! A plain read or write of more than [`CONNECTION_BYTES`] is carried out in pieces of this size, one
//! after the other. So a connection can carry out any one command within its own share of the memory
//! (trap T28):
//!
//! ```text
//! write:  R2T of a piece → its data → the drive → R2T of the next piece → … → completion
//! read:   budget → the drive → data of a piece → budget → … → data of the last piece, completion
//! ```

use riopipe_nvme::command::{Sqe, Status};
use riopipe_nvme::pdu::{DataHdr, PduError, R2t};

use super::closed::Closed;
use super::commands::Stage;
use super::context::Context;
use super::env::TargetEnv;
use super::limits::{BLOCK_SIZE, CONNECTION_BYTES, TRANSFER_BUDGET};
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
        let index = self.insert_command(sqe, Stage::Budget, ns_index)?;
        if self.charge_or_enqueue(index, piece_of(data_len), outbox) {
            self.request_data_or_fail(index, env, outbox);
        }
        Ok(())
    }

    /// Continues a read or write with its next piece, if there is one: the current one has reached
    /// the drive, or has gone to the host. The caller begins the new piece.
    pub(super) fn begin_next_piece(&mut self, index: u16) -> bool {
        let command = &mut self.commands[index];
        let next_offset = command.piece_offset + command.data_len;
        let total_bytes = command.sqe.nlb() * BLOCK_SIZE;
        // Data in a capsule is never in pieces, and a smaller piece is the last one.
        if command.data_len < CONNECTION_BYTES as u32 || next_offset >= total_bytes {
            return false;
        }
        command.piece_offset = next_offset;
        command.data_len = piece_of(total_bytes - next_offset);
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
        let needed_bytes = used_bytes + self.commands[index].data_len as usize;
        // A connection that holds nothing may always hold the buffer of one command. Otherwise it
        // might wait for other connections without end.
        used_bytes == 0 || needed_bytes <= TRANSFER_BUDGET && self.reservation.grow(needed_bytes)
    }

    /// Counts the buffer of a command against the budget.
    fn charge_budget(&mut self, index: u16) {
        let command = &mut self.commands[index];
        command.charged_bytes = command.data_len as usize;
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
        let start = command.received_bytes as usize;
        command.received_bytes += header.datal;
        let is_complete = command.received_bytes == command.data_len;
        if header.last != is_complete {
            return Err(PduError::header(1, "LAST_PDU is not on the last piece"));
        }
        if command.stage == Stage::Aborted {
            if is_complete {
                self.commands.end_aborted_transfer(header.ttag);
            }
            return Ok(None);
        }
        if !is_digest_valid {
            command.early_status.get_or_insert(Status::TRANSIENT_TRANSPORT);
        }
        if let Some(buf) = &mut command.buf {
            buf.as_mut()[start..start + data.len()].copy_from_slice(data);
        }
        Ok(is_complete.then_some(header.ttag))
    }
}

/// The bytes of the first piece of `data_len` bytes.
pub(super) const fn piece_of(data_len: u32) -> u32 {
    if data_len > CONNECTION_BYTES as u32 { CONNECTION_BYTES as u32 } else { data_len }
}
