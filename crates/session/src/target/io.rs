//! I/O commands outside of ordered streams: read, write, flush, write zeroes, deallocate.

use core::ops::Range;
use core::sync::atomic::Ordering;

use riopipe_nvme::command::{DsmRange, Sgl, Sqe, Status, admin, opcode};
use riopipe_nvme::pdu::{DataHdr, PduError};
use riopipe_order::block_device::{BlockDevice, Data, IoError, Submitted};
use riopipe_order::probe::{self, Plant, Rare};

use super::conn::{Closed, Queue, TargetConn};
use super::env::{OpId, TargetEnv, status_of};
use super::limits::{BLOCK_SIZE, TRANSFER_BYTES_MAX};
use super::slots::Stage;
use super::stream::overtaken;
use crate::outbox::Outbox;
use crate::wire;

/// A page of ranges of Dataset Management at its longest, bytes.
const DSM_PAGE: u32 = 256 * DsmRange::LEN as u32;

impl<E: TargetEnv> TargetConn<E> {
    /// A command on an I/O queue, with its in-capsule data at `data` in `buf`.
    #[inline]
    pub(super) fn io_command(
        &mut self,
        sqe: &Sqe,
        buf: &[u8],
        data: Range<usize>,
        digest_ok: bool,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let code = sqe.opcode();
        // Of the dword that says "ordered", other opcodes know nothing.
        if wire::is_ordered(sqe)
            && matches!(code, opcode::WRITE | opcode::WRITE_ZEROES | opcode::FLUSH)
        {
            return self.ordered(sqe, buf, data, digest_ok, env, out);
        }
        let cid = sqe.cid();
        if !digest_ok {
            self.respond(cid, Status::TRANSIENT_TRANSPORT, 0, out);
            return Ok(());
        }
        if sqe.fuse() != 0 {
            self.respond(cid, Status::INVALID_FIELD.with_dnr(), 0, out);
            return Ok(());
        }
        match code {
            opcode::WRITE => self.write(sqe, &buf[data], env, out),
            opcode::READ => self.read(sqe, env, out),
            opcode::FLUSH => self.flush(sqe, env, out),
            opcode::WRITE_ZEROES => self.write_zeroes(sqe, env, out),
            opcode::DATASET_MANAGEMENT => self.dataset(sqe, &buf[data], env, out),
            wire::IO_BIND => {
                self.bind(sqe, env, out);
                Ok(())
            }
            wire::IO_MARK => {
                self.mark(sqe, out);
                Ok(())
            }
            wire::IO_LIST => {
                self.list_own(sqe, out);
                Ok(())
            }
            admin::FABRICS => self.fabrics(sqe, env, out),
            _ => {
                self.respond(cid, Status::INVALID_OPCODE.with_dnr(), 0, out);
                Ok(())
            }
        }
    }

    /// Finds the namespace of a block command and checks its blocks: the namespace's index.
    #[inline]
    pub(super) fn extent(&self, sqe: &Sqe) -> Result<usize, Status> {
        let (index, ns) =
            self.namespaces.find(sqe.nsid()).ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
        match sqe.slba().checked_add(u64::from(sqe.nlb())) {
            Some(end) if end <= ns.config.blocks => Ok(index),
            _ => Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
        }
    }

    /// Whether a new owner has fenced the stream that this connection carries, or carried.
    #[inline]
    fn is_overtaken(&self) -> bool {
        self.was_fenced || self.stream.as_ref().is_some_and(|stream| stream.fenced)
    }

    /// Whether plain writes of this association to the namespace are welcome (T21).
    #[inline]
    pub(super) fn guard(&mut self, ns: usize, env: &mut E) -> Result<(), Status> {
        let assoc = self.queue.as_ref().map_or(0, |q| q.assoc);
        if self.may_write(ns, assoc, env) {
            return Ok(());
        }
        self.guarded(ns, assoc, env)
    }

    #[inline]
    fn may_write(&mut self, ns: usize, assoc: u64, env: &mut E) -> bool {
        let Self { noted, namespaces, id, was_fenced, queue, .. } = self;
        let state = &namespaces.at(ns).state;
        // What another owner has taken over is not to be written by the one before, also once nobody
        // has it any more and any plain host may (T8).
        let is_overtaken = || {
            queue.as_ref().is_some_and(|q: &Queue| q.overtaken.load(Ordering::SeqCst))
                && !state.is_of(assoc)
                && !probe::planted(Plant::T8OvertakenPlain)
        };
        let is_welcome = || {
            state.may_write(assoc) && !is_overtaken()
                || probe::planted(Plant::T21NoGuard)
                || probe::planted(Plant::T8StaleOwner) && *was_fenced
        };
        noted.may_write(ns, is_welcome, || env.with_shared(|s| s.note_writer(ns, *id)))
    }

    /// The namespace is guarded, unless it is for a lease that has run out (T25).
    #[cold]
    fn guarded(&mut self, ns: usize, assoc: u64, env: &mut E) -> Result<(), Status> {
        let (namespace, now) = (self.namespaces.at(ns), env.now());
        if namespace.state.lease_is_over(now) {
            let nsid = namespace.config.nsid;
            env.with_shared(|s| s.free_namespace(nsid, now));
            if self.may_write(ns, assoc, env) {
                return Ok(());
            }
        }
        probe::hit(Rare::Guarded);
        Err(wire::status::GUARDED.with_dnr())
    }

    /// Checks where a command's `want` bytes of data are: in the capsule (`true`) or to be asked
    /// for.
    #[inline]
    pub(super) fn in_capsule(sqe: &Sqe, want: u32, data: &[u8]) -> Result<bool, Status> {
        match sqe.sgl() {
            Ok(Sgl::InCapsule { offset, len }) => {
                if offset != 0 {
                    Err(Status::SGL_OFFSET_INVALID.with_dnr())
                } else if len != want || data.len() != want as usize {
                    Err(Status::SGL_LENGTH_INVALID.with_dnr())
                } else {
                    Ok(true)
                }
            }
            Ok(Sgl::Transport { len }) if len == want && data.is_empty() => Ok(false),
            Ok(Sgl::Transport { .. }) => Err(Status::SGL_LENGTH_INVALID.with_dnr()),
            Err(error) => Err(error.status()),
        }
    }

    #[inline]
    fn check_write(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
    ) -> Result<(usize, u32, bool), Status> {
        let ns = self.extent(sqe)?;
        self.guard(ns, env)?;
        // No directives but Rio's own are supported.
        if sqe.dword(12) >> 20 & 0xf != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let want = sqe.nlb() * BLOCK_SIZE;
        if want > TRANSFER_BYTES_MAX {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        Ok((ns, want, Self::in_capsule(sqe, want, data)?))
    }

    #[inline]
    fn write(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let (ns, want, inline) = match self.check_write(sqe, data, env) {
            Ok(checked) => checked,
            Err(status) => {
                self.respond(sqe.cid(), status, 0, out);
                return Ok(());
            }
        };
        if !inline {
            return self.ask_for_data(sqe, ns, want, env, out).map(|_| ());
        }
        let index = self.next_slot()?;
        self.note_plain_write(ns);
        let op = OpId::new(self.key, index);
        match env.device(ns).write(op.0, sqe.slba(), Data::Borrowed(data)) {
            Submitted::Done(Ok(_)) if !self.must_flush(sqe, ns) => {
                self.respond_here(sqe.cid(), Status::SUCCESS, 0, out);
            }
            Submitted::Done(result) => {
                self.slots.take(sqe, Stage::Device, ns);
                self.device_result(index, result, env, out);
            }
            Submitted::Pending => {
                self.slots.take(sqe, Stage::Device, ns);
            }
        }
        Ok(())
    }

    /// The data of a plain write has come in by R2T.
    pub(super) fn write_gathered(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        let slot = &self.slots[index];
        let (ns, lba) = (usize::from(slot.ns), slot.sqe.slba());
        // The volume may have found an owner while the data was under way (T21).
        if let Err(status) = self.guard(ns, env) {
            return self.answer(index, status, 0, out);
        }
        let slot = &mut self.slots[index];
        let Some(buf) = slot.buf.take() else {
            debug_assert!(false, "gathered data without a buffer");
            return self.answer(index, Status::INTERNAL, 0, out);
        };
        slot.stage = Stage::Device;
        self.note_plain_write(ns);
        let op = OpId::new(self.key, index);
        if let Submitted::Done(result) = env.device(ns).write(op.0, lba, Data::Owned(buf)) {
            self.device_result(index, result, env, out);
        }
    }

    #[inline]
    fn read(&mut self, sqe: &Sqe, env: &mut E, out: &mut Outbox<E::Buf>) -> Result<(), Closed> {
        let want = sqe.nlb() * BLOCK_SIZE;
        let checked = self.extent(sqe).and_then(|ns| match sqe.sgl() {
            _ if want > TRANSFER_BYTES_MAX => Err(Status::INVALID_FIELD.with_dnr()),
            Ok(Sgl::Transport { len }) if len == want => Ok(ns),
            Ok(Sgl::Transport { .. }) => Err(Status::SGL_LENGTH_INVALID.with_dnr()),
            Ok(Sgl::InCapsule { .. }) => Err(Status::SGL_TYPE_INVALID.with_dnr()),
            Err(error) => Err(error.status()),
        });
        let ns = match checked {
            Ok(ns) => ns,
            Err(status) => {
                self.respond(sqe.cid(), status, 0, out);
                return Ok(());
            }
        };
        let index = self.next_slot()?;
        self.slots.take(sqe, Stage::Budget, ns);
        self.slots[index].want = want;
        self.when_affordable(index, env, out);
        Ok(())
    }

    /// The connection may hold the read's buffer.
    pub(super) fn start_read(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        // It would find undone what its stream has completed, and nobody has told it yet (T8, P9).
        if self.is_overtaken() && !probe::planted(Plant::T8FencedReads) {
            return self.answer(index, overtaken(), 0, out);
        }
        let slot = &mut self.slots[index];
        slot.stage = Stage::Device;
        let (ns, lba, blocks) = (usize::from(slot.ns), slot.sqe.slba(), slot.sqe.nlb());
        let op = OpId::new(self.key, index);
        if let Submitted::Done(result) = env.device(ns).read(op.0, lba, blocks.into()) {
            self.device_result(index, result, env, out);
        }
    }

    fn flush(&mut self, sqe: &Sqe, env: &mut E, out: &mut Outbox<E::Buf>) -> Result<(), Closed> {
        let Some((ns, _)) = self.namespaces.find(sqe.nsid()) else {
            self.respond(sqe.cid(), Status::INVALID_NAMESPACE.with_dnr(), 0, out);
            return Ok(());
        };
        let index = self.next_slot()?;
        self.slots.take(sqe, Stage::Device, ns);
        self.slots[index].since = self.covered_since(ns);
        if let Submitted::Done(result) = self.submit_flush_of(index, env) {
            self.device_result(index, result, env, out);
        }
        Ok(())
    }

    /// A plain write goes to the drive: a FLUSH of this connection will be asked for it.
    #[inline(always)]
    fn note_plain_write(&mut self, ns: usize) {
        let namespace = self.namespaces.at(ns);
        if !namespace.config.volatile {
            return;
        }
        let failures = namespace.state.flush_failures();
        if self.plain.len() <= ns {
            self.plain.resize(ns + 1, None);
        }
        self.plain[ns].get_or_insert(failures);
    }

    /// What a FLUSH that is submitted now answers for: since when its connection has writes there
    /// that no FLUSH has covered, or else since now. Writes under way are not covered (M2).
    fn covered_since(&mut self, ns: usize) -> Option<u64> {
        let namespace = self.namespaces.at(ns);
        if !namespace.config.volatile {
            return None;
        }
        let now = namespace.state.flush_failures();
        let Some(Some(since)) = self.plain.get(ns).copied() else { return Some(now) };
        let writing = self.slots.any(|slot| {
            usize::from(slot.ns) == ns
                && matches!(slot.stage, Stage::Device | Stage::DeviceFlush)
                && !slot.ordered
                && !matches!(slot.sqe.opcode(), opcode::READ | opcode::FLUSH)
        });
        if !writing {
            self.plain[ns] = None;
        }
        Some(since)
    }

    /// Whether the drive has lost, by a FLUSH that failed for whomever, what a FLUSH that it now
    /// calls good was to cover. It is told once, as Linux tells `fsync`; who writes again and
    /// flushes again has it (T22).
    pub(super) fn has_lost(&mut self, index: u16, ns: usize) -> bool {
        let Some(since) = self.slots[index].since else {
            return false;
        };
        let failures = self.namespaces.at(ns).state.flush_failures();
        let lost = failures != since && !probe::planted(Plant::T22PlainFlush);
        if lost && let Some(plain) = self.plain.get_mut(ns) {
            // What is written from now on is a new affair.
            *plain = Some(failures);
        }
        lost
    }

    fn write_zeroes(
        &mut self,
        sqe: &Sqe,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let checked = self.extent(sqe).and_then(|ns| self.guard(ns, env).map(|()| ns));
        let ns = match checked {
            Ok(ns) => ns,
            Err(status) => {
                self.respond(sqe.cid(), status, 0, out);
                return Ok(());
            }
        };
        let index = self.next_slot()?;
        self.slots.take(sqe, Stage::Device, ns);
        let op = OpId::new(self.key, index);
        let (lba, blocks) = (sqe.slba(), u64::from(sqe.nlb()));
        self.note_plain_write(ns);
        if let Submitted::Done(result) = zero(env.device(ns), op, lba, blocks, sqe.deac()) {
            self.device_result(index, result, env, out);
        }
        Ok(())
    }

    fn dataset(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        // The page may be longer than the ranges in it: Linux always sends all of its 4 KiB.
        let ranges = sqe.dsm_ranges() * DsmRange::LEN as u32;
        let want = match sqe.sgl() {
            Ok(Sgl::InCapsule { len, .. } | Sgl::Transport { len })
                if (ranges..=DSM_PAGE).contains(&len) =>
            {
                len
            }
            _ => ranges,
        };
        let checked = match self.namespaces.find(sqe.nsid()) {
            None => Err(Status::INVALID_NAMESPACE.with_dnr()),
            Some((ns, _)) => Self::in_capsule(sqe, want, data).map(|inline| (ns, inline)),
        };
        match checked {
            Err(status) => {
                self.respond(sqe.cid(), status, 0, out);
                Ok(())
            }
            Ok((ns, false)) => self.ask_for_data(sqe, ns, want, env, out).map(|_| ()),
            Ok((ns, true)) => {
                let index = self.next_slot()?;
                self.slots.take(sqe, Stage::Device, ns);
                let Some(mut buf) = env.alloc(want as usize) else {
                    self.answer(index, Status::INTERNAL, 0, out);
                    return Ok(());
                };
                buf.as_mut().copy_from_slice(data);
                self.slots[index].buf = Some(buf);
                self.dataset_gathered(index, env, out);
                Ok(())
            }
        }
    }

    /// The ranges of a Dataset Management command are there; checks them all before the first
    /// is begun.
    pub(super) fn dataset_gathered(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        let slot = &self.slots[index];
        // Other attributes are hints about use.
        if !slot.sqe.dsm_deallocates() {
            return self.answer(index, Status::SUCCESS, 0, out);
        }
        let ns = usize::from(slot.ns);
        let blocks = self.namespaces.at(ns).config.blocks;
        let inside = (0..slot.sqe.dsm_ranges()).all(|i| {
            Self::range(slot.buf.as_ref(), i as usize)
                .is_some_and(|r| r.lba.checked_add(r.blocks.into()).is_some_and(|e| e <= blocks))
        });
        if !inside {
            return self.answer(index, Status::LBA_OUT_OF_RANGE.with_dnr(), 0, out);
        }
        if let Err(status) = self.guard(ns, env) {
            return self.answer(index, status, 0, out);
        }
        self.slots[index].step = 0;
        self.next_range(index, env, out);
    }

    fn range(buf: Option<&E::Buf>, i: usize) -> Option<DsmRange> {
        let bytes = buf?.as_ref().get(i * DsmRange::LEN..(i + 1) * DsmRange::LEN)?;
        bytes.first_chunk().map(DsmRange::decode)
    }

    fn next_range(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        loop {
            let slot = &mut self.slots[index];
            let step = slot.step;
            if u32::from(step) >= slot.sqe.dsm_ranges() {
                return self.answer(index, Status::SUCCESS, 0, out);
            }
            slot.step += 1;
            slot.stage = Stage::Device;
            let (ns, op) = (usize::from(slot.ns), OpId::new(self.key, index));
            let Some(range) = Self::range(slot.buf.as_ref(), usize::from(step)) else {
                return self.answer(index, Status::INTERNAL, 0, out);
            };
            if range.blocks == 0 {
                continue;
            }
            // The volume may have found an owner since the last range (T21).
            if let Err(status) = self.guard(ns, env) {
                return self.answer(index, status, 0, out);
            }
            self.note_plain_write(ns);
            match env.device(ns).deallocate(op.0, range.lba, range.blocks.into()) {
                Submitted::Pending => return,
                Submitted::Done(Ok(_)) => {}
                Submitted::Done(Err(error)) => {
                    return self.answer(index, status_of(&error, false), 0, out);
                }
            }
        }
    }

    /// The device operation of the command in a slot has ended.
    pub(super) fn device_result(
        &mut self,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let slot = &self.slots[index];
        if slot.ordered {
            return self.ordered_device_result(index, result, env, out);
        }
        let (ns, stage, code) = (usize::from(slot.ns), slot.stage, slot.sqe.opcode());
        let flushed = stage == Stage::DeviceFlush || code == opcode::FLUSH;
        if flushed {
            if self.flush_ended(index, result.is_ok(), env) {
                return;
            }
            if result.is_ok() {
                return self.plain_flush_believed(index, out);
            }
        }
        let status = match result {
            Err(error) => status_of(&error, code == opcode::READ),
            Ok(buf) => match (code, buf) {
                _ if self.is_closing() => Status::SUCCESS,
                (opcode::READ, Some(buf)) => return self.send_read(index, buf, out),
                (opcode::READ, None) => {
                    debug_assert!(false, "a read without a buffer");
                    Status::INTERNAL
                }
                (opcode::DATASET_MANAGEMENT, _) => return self.next_range(index, env, out),
                _ if self.must_flush(&self.slots[index].sqe, ns) => {
                    return self.start_flush(index, ns, env, out);
                }
                _ => Status::SUCCESS,
            },
        };
        self.answer(index, status, 0, out);
    }

    /// FUA on a drive with a volatile cache: the write is followed by a FLUSH.
    #[inline]
    fn must_flush(&self, sqe: &Sqe, ns: usize) -> bool {
        sqe.fua() && self.namespaces.at(ns).config.volatile
    }

    fn start_flush(&mut self, index: u16, ns: usize, env: &mut E, out: &mut Outbox<E::Buf>) {
        self.slots[index].stage = Stage::DeviceFlush;
        // Its own write is among them; others keep their own FLUSH.
        self.slots[index].since = self.plain.get(ns).copied().flatten();
        if let Submitted::Done(result) = self.submit_flush_of(index, env) {
            self.device_result(index, result, env, out);
        }
    }

    fn send_read(&mut self, index: u16, buf: E::Buf, out: &mut Outbox<E::Buf>) {
        let cid = self.slots[index].sqe.cid();
        let want = self.slots[index].want;
        debug_assert_eq!(buf.as_ref().len(), want as usize, "a read of another length");
        let (_, charged) = self.slots.release(index);
        self.held -= charged;
        // SUCCESS stands for a response capsule, but carries no SQHD (TCP §3.3.2.2).
        let success = self.queue.as_ref().is_some_and(|q| q.no_sq_flow);
        let header = DataHdr { cccid: cid, ttag: 0, datao: 0, datal: want, last: true, success };
        let tx = &self.tx;
        out.push_bytes(|v| tx.c2h_data(&header, v));
        if tx.data_digest {
            let mut digest = alloc::vec::Vec::with_capacity(4);
            tx.data_digest([buf.as_ref()], &mut digest);
            out.push_payload(buf);
            out.push_bytes(|v| v.extend_from_slice(&digest));
        } else {
            out.push_payload(buf);
        }
        if !success {
            self.respond(cid, Status::SUCCESS, 0, out);
        }
    }

    /// The slot that the next command gets.
    #[inline]
    pub(super) fn next_slot(&self) -> Result<u16, Closed> {
        self.slots.next().ok_or_else(|| {
            PduError::sequence("more commands outstanding than the submission queue has entries")
                .into()
        })
    }
}

/// Makes blocks read as zeroes; with `deallocate` their space may be given up.
#[inline]
pub(super) fn zero<D: BlockDevice>(
    device: &mut D,
    op: OpId,
    lba: u64,
    blocks: u64,
    deallocate: bool,
) -> Submitted<D::Buf> {
    match deallocate {
        true => device.deallocate(op.0, lba, blocks),
        false => device.write_zeroes(op.0, lba, blocks),
    }
}
