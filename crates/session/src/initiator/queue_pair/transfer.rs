//! The data of commands outside of capsules: C2HData PDUs for reads, R2Ts and H2CData PDUs for
//! writes.
//!
//! ```text
//! read:   target → C2HData → … → C2HData (LAST_PDU) → completion, or the SUCCESS flag instead
//! write:  target → R2T, host → H2CData → … → H2CData (last of this R2T), again until all is
//!         requested; target → completion
//! ```

use core::ops::Range;

use riopipe_nvme::command::{Cqe, Status};
use riopipe_nvme::pdu::{DataHdr, PduError, R2t, Tx};

use super::slot::slot_number;
use super::{CCCID_OFFSET, Event, QueuePair, QueueState, SessionError};
use crate::outbox::Outbox;

impl<P: AsRef<[u8]> + Clone, T: Copy> QueuePair<P, T> {
    /// Handles data of a read. Reports the data to the caller, unless it is corrupted. If the PDU
    /// has the SUCCESS flag, the read is done.
    pub(super) fn on_c2h_data(
        &mut self,
        hdr: &DataHdr,
        data: &[u8],
        digest_ok: bool,
        outbox: &mut Outbox<P>,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        let Some(slot) = self.slot_in_flight(hdr.cccid) else {
            return Err(PduError::header(CCCID_OFFSET, "data for no command in flight").into());
        };
        slot.check_c2h_data(hdr, outbox.has_sent(slot.queued_end))?;
        slot.transferred_bytes += hdr.datal;
        slot.has_last_pdu = hdr.last;
        if hdr.success && slot.misses_data() {
            return Err(PduError::sequence("a read completed before its data").into());
        }
        slot.is_corrupted |= !digest_ok;
        let is_corrupted = slot.is_corrupted;
        let Some(context) = slot.context else {
            if self.state != QueueState::Authenticating {
                return Err(PduError::sequence("data for Connect").into());
            }
            self.on_auth_data(hdr.datao, data);
            if hdr.success {
                self.free_slot(hdr.cccid);
                let status = status_of_read(is_corrupted);
                let cqe = Cqe::new(hdr.cccid, 0, self.config.qid, status, 0);
                return self.on_setup_completion(&cqe, outbox, on_event);
            }
            return Ok(());
        };
        if !is_corrupted {
            on_event(Event::Data { context, offset: hdr.datao, bytes: data });
        }
        if hdr.success {
            let status = status_of_read(is_corrupted);
            self.free_slot(hdr.cccid);
            let cqe = Cqe::new(hdr.cccid, 0, self.config.qid, status, 0);
            on_event(Event::Done { context, cqe });
        }
        Ok(())
    }

    /// Handles an R2T: puts the requested data of a write into the outbox.
    pub(super) fn on_r2t(&mut self, r2t: &R2t, outbox: &mut Outbox<P>) -> Result<(), PduError> {
        // `slot_in_flight` would borrow all of `self`, and `self.tx` is needed, too.
        let slot = self
            .slots
            .get_mut(usize::from(slot_number(r2t.cccid, self.slot_bits)))
            .filter(|slot| slot.in_flight && slot.cid == r2t.cccid)
            .ok_or(PduError::header(CCCID_OFFSET, "an R2T for no command in flight"))?;
        slot.check_r2t(r2t, outbox.has_sent(slot.queued_end))?;
        slot.count_r2t(self.receive_calls, self.config.maxr2t.max(1))?;
        slot.transferred_bytes += r2t.r2tl;
        push_h2c_data(&self.tx, r2t, self.maxh2cdata, &slot.write_pieces, outbox);
        slot.queued_end = outbox.end();
        if !slot.misses_data() {
            // The outbox has its own references to the pieces.
            slot.write_pieces.clear();
        }
        Ok(())
    }
}

/// The status of a read whose completion the target has left out.
const fn status_of_read(is_corrupted: bool) -> Status {
    if is_corrupted { Status::TRANSIENT_TRANSPORT } else { Status::SUCCESS }
}

/// Puts the data that an R2T requests into the outbox, in H2CData PDUs with at most `maxh2cdata`
/// bytes of data each. `pieces` is the whole data of the write.
fn push_h2c_data<P: AsRef<[u8]> + Clone>(
    tx: &Tx,
    r2t: &R2t,
    maxh2cdata: u32,
    pieces: &[P],
    outbox: &mut Outbox<P>,
) {
    let maxh2cdata = maxh2cdata as usize;
    let mut offset = r2t.r2to as usize;
    let end = offset + r2t.r2tl as usize;
    while offset < end {
        let pdu_end = offset + maxh2cdata.min(end - offset);
        let hdr = DataHdr {
            cccid: r2t.cccid,
            ttag: r2t.ttag,
            datao: offset as u32,
            datal: (pdu_end - offset) as u32,
            last: pdu_end == end,
            success: false,
        };
        outbox.push_bytes(|bytes| tx.h2c_data(&hdr, bytes));
        for part in parts_in(pieces, offset..pdu_end) {
            outbox.push_slice(part.piece.clone(), part.range);
        }
        if tx.data_digest {
            let slices =
                parts_in(pieces, offset..pdu_end).map(|part| &part.piece.as_ref()[part.range]);
            outbox.push_bytes(|bytes| tx.data_digest(slices, bytes));
        }
        offset = pdu_end;
    }
}

/// A range of the bytes of one piece.
struct PiecePart<'a, P> {
    piece: &'a P,
    range: Range<usize>,
}

/// The parts of `pieces` that hold the bytes `wanted` of the data that the pieces make together.
fn parts_in<P: AsRef<[u8]>>(
    pieces: &[P],
    wanted: Range<usize>,
) -> impl Iterator<Item = PiecePart<'_, P>> {
    let mut piece_start = 0;
    pieces.iter().filter_map(move |piece| {
        let piece_len = piece.as_ref().len();
        let start = wanted.start.saturating_sub(piece_start).min(piece_len);
        let end = wanted.end.saturating_sub(piece_start).min(piece_len);
        piece_start += piece_len;
        (start < end).then_some(PiecePart { piece, range: start..end })
    })
}
