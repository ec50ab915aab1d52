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
    /// Asks for the `want` bytes of a command's data, now or when the budget allows.
    pub(super) fn ask_for_data(
        &mut self,
        sqe: &Sqe,
        ns: usize,
        want: u32,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let index = self.take(sqe, Stage::Budget, ns)?;
        if self.may_hold(index, want, out) {
            self.ask_or_fail(index, env, out);
        }
        Ok(())
    }

    /// Whether a command may hold a buffer of `want` bytes now. Otherwise it waits for its turn,
    /// and [`next_to_start`](Self::next_to_start) returns it later.
    pub(super) fn may_hold(&mut self, index: u16, want: u32, out: &Outbox<E::Buf>) -> bool {
        self.commands[index].want = want;
        let may_hold = self.waiting.is_empty() && self.affordable(index, out);
        if may_hold {
            self.charge(index);
        } else {
            self.waiting.push_back(index);
        }
        may_hold
    }

    /// The next of the commands that waited for the budget, if it allows that one now.
    pub(super) fn next_to_start(&mut self, out: &Outbox<E::Buf>) -> Option<u16> {
        let index = *self.waiting.front()?;
        if !self.affordable(index, out) {
            return None;
        }
        self.waiting.pop_front();
        self.charge(index);
        Some(index)
    }

    fn affordable(&mut self, index: u16, out: &Outbox<E::Buf>) -> bool {
        let used = self.held + out.len_bytes();
        let then = used + self.commands[index].want as usize;
        // A connection that holds nothing gets the memory that one command needs. Else it might
        // wait for others for ever.
        used == 0 || then <= TRANSFER_BUDGET && self.reservation.grow(then)
    }

    fn charge(&mut self, index: u16) {
        let command = &mut self.commands[index];
        command.charged = command.want as usize;
        self.held += command.charged;
    }

    /// Asks for the data of a command that may hold it; returns whether there is memory for it.
    pub(super) fn ask(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) -> bool {
        let command = &mut self.commands[index];
        let want = command.want;
        let Some(buf) = env.alloc(want as usize) else { return false };
        command.buf = Some(buf);
        command.stage = Stage::Receiving;
        let r2t = R2t { cccid: command.sqe.cid(), ttag: index, r2to: 0, r2tl: want };
        let tx = &self.tx;
        out.push_bytes(|v| tx.r2t(&r2t, v));
        true
    }

    /// [`ask`](Self::ask) for a command without an ordering attribute. The command fails if there
    /// is no memory.
    pub(super) fn ask_or_fail(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        if !self.ask(index, env, out) {
            // No R2T has been sent.
            self.answer(index, Status::INTERNAL, 0, out);
        }
    }

    /// Takes in a piece of the data that an R2T requested. Returns the command if its data is now
    /// complete.
    pub(super) fn data_received(
        &mut self,
        header: &DataHdr,
        data: &[u8],
        digest_ok: bool,
    ) -> Result<Option<u16>, PduError> {
        let command = self
            .commands
            .used(header.ttag)
            .filter(|command| command.stage == Stage::Receiving)
            .ok_or(PduError::header(10, "no R2T with this tag is open"))?;
        if command.sqe.cid() != header.cccid {
            return Err(PduError::header(8, "the command is not the one of this R2T"));
        }
        // Over one connection pieces come in order (TCP §3.3.2.1).
        if header.datao != command.got {
            return Err(PduError::header(12, "data is not where the last piece ended"));
        }
        if header.datal == 0 || header.datal > command.want - command.got {
            return Err(PduError::out_of_range("data beyond what the R2T asked for"));
        }
        let start = command.got as usize;
        command.got += header.datal;
        let complete = command.got == command.want;
        if header.last != complete {
            return Err(PduError::header(1, "LAST_PDU is not on the last piece"));
        }
        if !digest_ok {
            command.verdict.get_or_insert(Status::TRANSIENT_TRANSPORT);
        }
        if let Some(buf) = &mut command.buf {
            buf.as_mut()[start..start + data.len()].copy_from_slice(data);
        }
        Ok(complete.then_some(header.ttag))
    }
}
