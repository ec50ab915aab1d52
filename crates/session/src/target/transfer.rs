//! Data that a host sends on request: R2T and H2CData, and the budget that bounds what a
//! connection holds (T18).

use riopipe_nvme::command::{Sqe, Status};
use riopipe_nvme::pdu::{DataHdr, PduError, R2t};

use super::closed::Closed;
use super::commands::Stage;
use super::context::Context;
use super::env::TargetEnv;
use super::limits::TRANSFER_BUDGET;
use crate::outbox::Outbox;

impl<E: TargetEnv> Context<E> {
    /// Asks for the `data_len` bytes of a command's data, now or when the budget allows.
    pub(super) fn insert_and_request_data(
        &mut self,
        sqe: &Sqe,
        ns_index: usize,
        data_len: u32,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let index = self.insert_command(sqe, Stage::Budget, ns_index)?;
        if self.charge_or_enqueue(index, data_len, outbox) {
            self.request_data_or_fail(index, env, outbox);
        }
        Ok(())
    }

    /// Whether a command may hold a buffer of `data_len` bytes now. Otherwise it waits for its turn,
    /// and [`next_within_budget`](Self::next_within_budget) returns it later.
    pub(super) fn charge_or_enqueue(
        &mut self,
        index: u16,
        data_len: u32,
        outbox: &Outbox<E::Buf>,
    ) -> bool {
        self.commands[index].data_len = data_len;
        let charge_or_enqueue =
            self.waiting_for_budget.is_empty() && self.try_reserve(index, outbox);
        if charge_or_enqueue {
            self.charge_budget(index);
        } else {
            self.waiting_for_budget.push_back(index);
        }
        charge_or_enqueue
    }

    /// The next of the commands that waited for the budget, if it allows that one now.
    pub(super) fn next_within_budget(&mut self, outbox: &Outbox<E::Buf>) -> Option<u16> {
        let index = *self.waiting_for_budget.front()?;
        if !self.try_reserve(index, outbox) {
            return None;
        }
        self.waiting_for_budget.pop_front();
        self.charge_budget(index);
        Some(index)
    }

    fn try_reserve(&mut self, index: u16, outbox: &Outbox<E::Buf>) -> bool {
        let used = self.held_bytes + outbox.len_bytes();
        let then = used + self.commands[index].data_len as usize;
        // A connection that holds nothing gets the memory that one command needs. Else it might
        // wait for others for ever.
        used == 0 || then <= TRANSFER_BUDGET && self.reservation.grow(then)
    }

    fn charge_budget(&mut self, index: u16) {
        let command = &mut self.commands[index];
        command.charged_bytes = command.data_len as usize;
        self.held_bytes += command.charged_bytes;
    }

    /// Asks for the data of a command that may hold it; returns whether there is memory for it.
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
        let r2t = R2t { cccid: command.sqe.cid(), ttag: index, r2to: 0, r2tl: data_len };
        let tx = &self.tx;
        outbox.push_bytes(|v| tx.r2t(&r2t, v));
        true
    }

    /// [`request_data`](Self::request_data) for a command without an ordering attribute. The command fails if there
    /// is no memory.
    pub(super) fn request_data_or_fail(
        &mut self,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if !self.request_data(index, env, outbox) {
            // No R2T has been sent.
            self.complete_command(index, Status::INTERNAL, 0, outbox);
        }
    }

    /// Takes in a piece of the data that an R2T requested. Returns the command if its data is now
    /// complete.
    pub(super) fn receive_data(
        &mut self,
        header: &DataHdr,
        data: &[u8],
        digest_ok: bool,
    ) -> Result<Option<u16>, PduError> {
        let command = self
            .commands
            .get_used(header.ttag)
            .filter(|command| command.stage == Stage::Receiving)
            .ok_or(PduError::header(10, "no R2T with this tag is open"))?;
        if command.sqe.cid() != header.cccid {
            return Err(PduError::header(8, "the command is not the one of this R2T"));
        }
        // Over one connection pieces come in order (TCP §3.3.2.1).
        if header.datao != command.received_bytes {
            return Err(PduError::header(12, "data is not where the last piece ended"));
        }
        if header.datal == 0 || header.datal > command.data_len - command.received_bytes {
            return Err(PduError::out_of_range("data beyond what the R2T asked for"));
        }
        let start = command.received_bytes as usize;
        command.received_bytes += header.datal;
        let complete = command.received_bytes == command.data_len;
        if header.last != complete {
            return Err(PduError::header(1, "LAST_PDU is not on the last piece"));
        }
        if !digest_ok {
            command.early_status.get_or_insert(Status::TRANSIENT_TRANSPORT);
        }
        if let Some(buf) = &mut command.buf {
            buf.as_mut()[start..start + data.len()].copy_from_slice(data);
        }
        Ok(complete.then_some(header.ttag))
    }
}
