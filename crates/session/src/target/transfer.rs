//! Data that a host sends on request: R2T and H2CData, and the budget that bounds what a
//! connection holds (T18).

use riopipe_nvme::command::{Sqe, Status, opcode};
use riopipe_nvme::pdu::{DataHdr, PduError, R2t};

use super::conn::{Closed, TargetConn};
use super::env::TargetEnv;
use super::limits::TRANSFER_BUDGET;
use super::slots::Stage;
use super::stream::overtaken;
use crate::outbox::Outbox;

impl<E: TargetEnv> TargetConn<E> {
    /// Asks for the `want` bytes of a command's data, now or when the budget allows; returns the
    /// command's slot.
    pub(super) fn ask_for_data(
        &mut self,
        sqe: &Sqe,
        ns: usize,
        want: u32,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<u16, Closed> {
        let index = self.next_slot()?;
        self.slots.take(sqe, Stage::Budget, ns);
        self.slots[index].want = want;
        self.when_affordable(index, env, out);
        Ok(index)
    }

    /// Starts the command in a slot that needs a buffer, or queues it for its turn.
    pub(super) fn when_affordable(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        if self.waiting.is_empty() && self.affordable(index, out) {
            self.start_transfer(index, env, out);
        } else {
            self.waiting.push_back(index);
        }
    }

    /// Starts commands that waited for the budget, in order.
    pub(super) fn pump(&mut self, env: &mut E, out: &mut Outbox<E::Buf>) {
        self.loan.shrink(self.held + out.len_bytes());
        while let Some(&index) = self.waiting.front() {
            if !self.affordable(index, out) {
                break;
            }
            self.waiting.pop_front();
            self.start_transfer(index, env, out);
            // An ordered request that gets no memory ends at the gate: nobody else may come along
            // to see to that (P8).
            if self.slots[index].stage == Stage::Gate {
                self.settle(&[], env, out);
            }
        }
    }

    fn affordable(&mut self, index: u16, out: &Outbox<E::Buf>) -> bool {
        let used = self.held + out.len_bytes();
        let then = used + self.slots[index].want as usize;
        // Who holds nothing gets what one command needs: else it might wait for others for ever.
        used == 0 || then <= TRANSFER_BUDGET && self.loan.grow(then)
    }

    fn start_transfer(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        let slot = &mut self.slots[index];
        if slot.refused {
            // Its stream was given back while it waited; no R2T has been sent.
            let status = slot.verdict.unwrap_or_else(overtaken);
            return self.answer(index, status, 0, out);
        }
        let want = slot.want;
        slot.charged = want as usize;
        self.held += want as usize;
        if slot.sqe.opcode() == opcode::READ && !slot.ordered && self.admin.is_none() {
            return self.start_read(index, env, out);
        }
        match env.alloc(want as usize) {
            Some(buf) => slot.buf = Some(buf),
            None => {
                // No R2T has been sent: the command simply fails.
                if slot.ordered {
                    self.ordered_data_failed(index);
                } else {
                    self.answer(index, Status::INTERNAL, 0, out);
                }
                return;
            }
        }
        slot.stage = Stage::Receiving;
        let r2t = R2t { cccid: slot.sqe.cid(), ttag: index, r2to: 0, r2tl: want };
        let tx = &self.tx;
        out.push_bytes(|v| tx.r2t(&r2t, v));
    }

    /// A piece of the data that an R2T asked for.
    pub(super) fn h2c_data(
        &mut self,
        header: &DataHdr,
        data: &[u8],
        digest_ok: bool,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let slot = self
            .slots
            .used(header.ttag)
            .filter(|slot| slot.stage == Stage::Receiving)
            .ok_or(PduError::header(10, "no R2T with this tag is open"))?;
        if slot.sqe.cid() != header.cccid {
            return Err(PduError::header(8, "the command is not the one of this R2T").into());
        }
        // Over one connection pieces come in order (TCP §3.3.2.1).
        if header.datao != slot.got {
            return Err(PduError::header(12, "data is not where the last piece ended").into());
        }
        if header.datal == 0 || header.datal > slot.want - slot.got {
            return Err(PduError::out_of_range("data beyond what the R2T asked for").into());
        }
        let start = slot.got as usize;
        slot.got += header.datal;
        let complete = slot.got == slot.want;
        if header.last != complete {
            return Err(PduError::header(1, "LAST_PDU is not on the last piece").into());
        }
        if !digest_ok {
            slot.verdict.get_or_insert(Status::TRANSIENT_TRANSPORT);
        }
        if let Some(buf) = &mut slot.buf {
            buf.as_mut()[start..start + data.len()].copy_from_slice(data);
        }
        if complete {
            self.gathered(header.ttag, env, out);
        }
        Ok(())
    }

    fn gathered(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        let slot = &mut self.slots[index];
        if slot.ordered {
            return self.ordered_gathered(index, out);
        }
        if let Some(status) = slot.verdict {
            return self.answer(index, status, 0, out);
        }
        if self.admin.is_some() {
            return self.admin_gathered(index, env, out);
        }
        match slot.sqe.opcode() {
            opcode::WRITE => self.write_gathered(index, env, out),
            _ => self.dataset_gathered(index, env, out),
        }
    }
}
