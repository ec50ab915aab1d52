//! Ordered requests: the gate and the ordering log of the stream that a connection is bound to.
//!
//! The discipline of a batch, which is what arrives in one receive or comes back from the drives
//! in one poll: append all attributes, **one** fence, submit the writes; set all persist words,
//! **one** fence, send the responses (paper §4.3.2 steps 5 to 7; T7).

use core::mem;
use core::ops::Range;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Attribute, Kind, Member};
use riopipe_order::block_device::{self, BlockDevice, IoError, Submitted};
use riopipe_order::gate::{Cause, Step, Ticket};
use riopipe_order::probe::{self, Plant, Rare};

use super::bound::{Data, Stream};
use super::conn::{Closed, TargetConn};
use super::env::{OpId, TargetEnv, status_of};
use super::io::zero;
use super::limits::{BLOCK_SIZE, SEQ_MAX, TRANSFER_BYTES_MAX};
use super::slots::Stage;
use super::stream::overtaken;
use crate::outbox::Outbox;
use crate::wire;

impl<E: TargetEnv> TargetConn<E> {
    /// A Write, Write Zeroes or Flush with an ordering attribute.
    #[inline]
    pub(super) fn ordered(
        &mut self,
        sqe: &Sqe,
        buf: &[u8],
        data: Range<usize>,
        digest_ok: bool,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Some(mut stream) = self.stream.take() else {
            // T17: without a binding the fields mean nothing, and a host that sets them must not
            // believe they do.
            if self.was_fenced && probe::planted(Plant::T8StaleOwner) {
                return self.io_command(
                    &wire::without_attribute(sqe),
                    buf,
                    data,
                    digest_ok,
                    env,
                    out,
                );
            }
            let status =
                if self.was_fenced { overtaken() } else { wire::status::NOT_BOUND.with_dnr() };
            self.respond(sqe.cid(), status, 0, out);
            return Ok(());
        };
        let result = self.enter(&mut stream, sqe, buf, data, digest_ok, env, out);
        self.stream = Some(stream);
        result
    }

    #[inline]
    #[allow(clippy::too_many_arguments)]
    fn enter(
        &mut self,
        stream: &mut Stream<E>,
        sqe: &Sqe,
        buf: &[u8],
        data: Range<usize>,
        digest_ok: bool,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cid = sqe.cid();
        if let Some(cause) = stream.gate.poisoned() {
            self.respond(cid, stream.refusal(cause), 0, out);
            return Ok(());
        }
        let (attribute, ns, inline) =
            match self.check_ordered(stream, sqe, &buf[data.clone()], digest_ok) {
                Ok(checked) => checked,
                Err(status) => {
                    stream.stop(Member(0), sqe.dword(3));
                    self.trouble("an ordered request made no sense; its stream is stopped", env);
                    self.respond(cid, status, 0, out);
                    return Ok(());
                }
            };
        let index = self.next_slot()?;
        let stage = if inline { Stage::Gate } else { Stage::Budget };
        self.slots.take(sqe, stage, ns);
        self.slots[index].ordered = true;
        let entry = &mut stream.entries[usize::from(index)];
        entry.data = if inline { Data::Ready } else { Data::Awaited };
        entry.may_write = false;
        entry.attribute = attribute;
        // The gate knows drives by their place in this volume on this server, the log by the
        // volume's own number.
        entry.attribute.member = Member(stream.drive_of[ns]);
        let from = stream.steps.len();
        let ticket = Ticket(u32::from(index));
        let arrived = stream.gate.arrive(ticket, &entry.attribute, &mut stream.steps);
        let at_gate = mem::replace(&mut entry.attribute.member, attribute.member);
        if arrived.is_err() {
            stream.stop(at_gate, attribute.ordinal);
            self.trouble(
                "an ordered request came twice or too far ahead; its stream is stopped",
                env,
            );
            self.answer(index, wire::status::BAD_ATTRIBUTE.with_dnr(), 0, out);
            return Ok(());
        }
        if stream.tracer.is_due() {
            stream.trace_arrival(index, from, env);
        }
        stream.append(from);
        if !inline {
            self.slots[index].want = attribute.blocks * BLOCK_SIZE;
            self.when_affordable(index, env, out);
            if self.slots[index].stage == Stage::Gate {
                // No memory for it.
                self.data_ready(stream, index);
            }
        } else if !data.is_empty() {
            self.slots[index].inline = (data.start as u32, data.end as u32);
            stream.inline.push(index);
        }
        Ok(())
    }

    #[inline]
    fn check_ordered(
        &mut self,
        stream: &mut Stream<E>,
        sqe: &Sqe,
        data: &[u8],
        digest_ok: bool,
    ) -> Result<(Attribute, usize, bool), Status> {
        if !digest_ok {
            return Err(Status::TRANSIENT_TRANSPORT);
        }
        let (attribute, released) = wire::attribute(sqe, stream.near)
            .map_err(|_| wire::status::BAD_ATTRIBUTE.with_dnr())?;
        // Durability is asked for by the FLUSH flag; FUA would be silently weaker.
        if sqe.fua() || sqe.fuse() != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let ns = match attribute.kind {
            Kind::Flush => match self.namespaces.find(sqe.nsid()) {
                Some((ns, _)) => ns,
                None => return Err(Status::INVALID_NAMESPACE.with_dnr()),
            },
            Kind::Write | Kind::Discard => self.extent(sqe)?,
        };
        stream.drive(ns, attribute.member).ok_or(wire::status::BAD_ATTRIBUTE.with_dnr())?;
        let inline = match attribute.kind {
            Kind::Write => {
                let want = attribute.blocks * BLOCK_SIZE;
                if want > TRANSFER_BYTES_MAX {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                Self::in_capsule(sqe, want, data)?
            }
            Kind::Discard | Kind::Flush if data.is_empty() => true,
            Kind::Discard | Kind::Flush => return Err(Status::SGL_LENGTH_INVALID.with_dnr()),
        };
        if attribute.seq_end() > stream.near {
            if attribute.seq_end().0 >> 32 != stream.near.0 >> 32 {
                probe::hit(Rare::SeqWrap);
            }
            stream.near = attribute.seq_end();
        }
        stream.log.release(released);
        Ok((attribute, ns, inline))
    }

    /// All data of an ordered request has come in by R2T.
    pub(super) fn ordered_gathered(&mut self, index: u16, out: &mut Outbox<E::Buf>) {
        let slot = &mut self.slots[index];
        slot.stage = Stage::Gate;
        if slot.refused {
            let status = slot.verdict.unwrap_or_else(overtaken);
            return self.answer(index, status, 0, out);
        }
        match self.stream.take() {
            Some(mut stream) => {
                self.data_ready(&mut stream, index);
                self.stream = Some(stream);
            }
            None => {
                debug_assert!(false, "a stream was given back and its request not refused");
                self.answer(index, overtaken(), 0, out);
            }
        }
    }

    /// The stream is given back. The requests that it still waits for the data of are refused: when
    /// that has come, this connection may carry another stream, whose gate knows nothing of them
    /// (T8).
    pub(super) fn refuse_unfinished(&mut self) {
        for (_, slot) in self.slots.iter_mut() {
            let waits = matches!(slot.stage, Stage::Budget | Stage::Receiving);
            if slot.ordered && waits && !slot.refused {
                slot.refused = true;
                slot.verdict = Some(overtaken());
            }
        }
    }

    /// There is no memory for the data of an ordered request.
    pub(super) fn ordered_data_failed(&mut self, index: u16) {
        let slot = &mut self.slots[index];
        slot.verdict = Some(Status::INTERNAL);
        slot.stage = Stage::Gate;
        if let Some(mut stream) = self.stream.take() {
            self.data_ready(&mut stream, index);
            self.stream = Some(stream);
        }
    }

    fn data_ready(&mut self, stream: &mut Stream<E>, index: u16) {
        let entry = &mut stream.entries[usize::from(index)];
        let bad = self.slots[index].verdict.is_some();
        entry.data = if bad { Data::Bad } else { Data::Ready };
        if mem::take(&mut entry.may_write) {
            stream.steps.push(Step::Write(Ticket(u32::from(index))));
        }
    }

    /// Ends a batch: does what the gate wants done, in order, and answers what is complete.
    /// `buf` is the receive buffer of the batch.
    pub(super) fn settle(&mut self, buf: &[u8], env: &mut E, out: &mut Outbox<E::Buf>) {
        let Some(mut stream) = self.stream.take() else {
            return;
        };
        stream.see_flush_failures(&self.namespaces);
        env.ordered(stream.tracer.news());
        let mut persisted = 0u32;
        // Entries that were appended and wait are fenced with the batch they came in.
        while stream.appended || !stream.steps.is_empty() {
            let due = mem::take(&mut stream.appended) && !probe::planted(Plant::T7WriteBeforeFence);
            if due && stream.log.fence().is_err() {
                probe::hit(Rare::LogFailed);
                stream.gate.fence_failed(&mut stream.steps);
                self.trouble("the ordering log failed; its stream is stopped", env);
            }
            if stream.tracer.is_logging() {
                stream.tracer.logged(&stream.steps, env.instant());
            }
            let mut doing = mem::take(&mut stream.doing);
            mem::swap(&mut doing, &mut stream.steps);
            for &step in &doing {
                match step {
                    Step::Append(_) => debug_assert!(false, "carried out when it came"),
                    Step::Write(ticket) => {
                        self.submit(&mut stream, ticket.0 as u16, buf, env);
                        // Nearly always it is written when the call returns, and nothing waited
                        // for it: what is alone and complete needs no other round.
                        if let [step @ Step::Complete { .. }] = stream.steps[..] {
                            stream.steps.clear();
                            persisted += u32::from(stream.complete(step));
                        }
                    }
                    Step::Flush(ticket) => self.submit_flush(&mut stream, ticket.0 as u16, env),
                    Step::Complete { .. } | Step::Refuse { .. } => {
                        persisted += u32::from(stream.complete(step));
                    }
                }
            }
            doing.clear();
            stream.doing = doing;
        }
        if stream.tracer.is_under_way() {
            stream.tracer.completing(&stream.done, env.instant());
        }
        let shared = persisted > 1;
        if shared {
            probe::hit(Rare::FenceShared);
        }
        let due = persisted > 0
            && !probe::planted(Plant::T7AnswerBeforeFence)
            && !(shared && probe::planted(Plant::T7BatchBeforeFence));
        if due && stream.log.fence().is_err() {
            probe::hit(Rare::LogFailed);
            stream.gate.fence_failed(&mut stream.done);
            self.trouble("the ordering log failed; its stream is stopped", env);
        }
        if stream.tracer.is_complete() {
            stream.tracer.persisted(env.instant());
        }
        if !stream.told_stopped
            && let Some(cause) = stream.gate.poisoned()
        {
            stream.told_stopped = true;
            if !matches!(cause, Cause::Closed) {
                env.stopped(cause);
            }
        }
        let mut done = mem::take(&mut stream.done);
        for step in done.drain(..) {
            match step {
                Step::Complete { ticket, .. } => {
                    self.answer_here(ticket.0 as u16, Status::SUCCESS, 0, out);
                }
                Step::Refuse { ticket, why } => {
                    self.refuse(&stream, ticket.0 as u16, why, out);
                }
                Step::Append(_) | Step::Write(_) | Step::Flush(_) => {}
            }
        }
        stream.done = done;
        self.keep_inline(&mut stream, buf, env);
        self.stream = Some(stream);
    }

    /// Answers a refused request, or, if its data is still to come, as soon as it has.
    fn refuse(&mut self, stream: &Stream<E>, index: u16, why: Cause, out: &mut Outbox<E::Buf>) {
        let status = stream.refusal(why);
        let Some(slot) = self.slots.used(index) else {
            return;
        };
        let status = *slot.verdict.get_or_insert(status);
        match slot.stage {
            Stage::Receiving => slot.refused = true,
            Stage::Budget => {
                self.waiting.retain(|waiting| *waiting != index);
                self.answer(index, status, 0, out);
            }
            _ => self.answer(index, status, 0, out),
        }
    }

    /// Data that the gate still holds leaves the receive buffer.
    fn keep_inline(&mut self, stream: &mut Stream<E>, buf: &[u8], env: &mut E) {
        let mut lost = false;
        for index in stream.inline.drain(..) {
            let slot = &mut self.slots[index];
            let (start, end) = mem::take(&mut slot.inline);
            if slot.stage != Stage::Gate || end == 0 {
                continue;
            }
            let bytes = &buf[start as usize..end as usize];
            match env.alloc(bytes.len()) {
                Some(mut copy) => {
                    copy.as_mut().copy_from_slice(bytes);
                    slot.buf = Some(copy);
                }
                None => {
                    slot.verdict = Some(Status::INTERNAL);
                    stream.entries[usize::from(index)].data = Data::Bad;
                    lost = true;
                }
            }
        }
        if lost {
            self.trouble("no memory for a held write; it will fail and stop its stream", env);
        }
    }

    /// The gate lets a write or discard go.
    #[inline]
    fn submit(&mut self, stream: &mut Stream<E>, index: u16, buf: &[u8], env: &mut E) {
        let entry = &mut stream.entries[usize::from(index)];
        let attribute = entry.attribute;
        let slot = &mut self.slots[index];
        if entry.data == Data::Awaited {
            entry.may_write = true;
            if stream.tracer.is(index) {
                stream.tracer.held(env.instant());
            }
            return;
        }
        let hopeless = stream.fenced
            || matches!(stream.gate.poisoned(), Some(Cause::LogFailed | Cause::Closed));
        if entry.data == Data::Bad || hopeless {
            // Nothing goes to the drives after the stream has changed hands (T8), or without its
            // attribute in the log.
            return Self::written(stream, index, false);
        }
        let (ns, op) = (usize::from(slot.ns), OpId::new(self.key, index));
        let (start, end) = mem::take(&mut slot.inline);
        slot.stage = Stage::Device;
        let is_traced = stream.tracer.is(index);
        if is_traced {
            stream.tracer.submitted(env.instant());
        }
        let submitted = match attribute.kind {
            Kind::Write if end > 0 => {
                let bytes = &buf[start as usize..end as usize];
                let data = block_device::Data::Borrowed(bytes);
                env.device(ns).write(op.0, attribute.lba, data)
            }
            Kind::Write => match slot.buf.take() {
                Some(data) => {
                    let data = block_device::Data::Owned(data);
                    env.device(ns).write(op.0, attribute.lba, data)
                }
                None => {
                    debug_assert!(false, "a write without data");
                    slot.stage = Stage::Gate;
                    slot.verdict = Some(Status::INTERNAL);
                    return Self::written(stream, index, false);
                }
            },
            Kind::Discard => {
                let deallocate = slot.sqe.deac();
                zero(env.device(ns), op, attribute.lba, attribute.blocks.into(), deallocate)
            }
            Kind::Flush => {
                debug_assert!(false, "the gate writes nothing for a flush entry");
                Submitted::Done(Ok(None))
            }
        };
        if let Submitted::Done(result) = submitted {
            if is_traced {
                stream.landed(index, false, env.instant());
            }
            self.submitted(stream, index, result, env);
        }
    }

    fn submit_flush(&mut self, stream: &mut Stream<E>, index: u16, env: &mut E) {
        let slot = &mut self.slots[index];
        slot.stage = Stage::DeviceFlush;
        let is_traced = stream.tracer.is(index);
        if is_traced {
            stream.tracer.submitted(env.instant());
        }
        if let Submitted::Done(result) = self.submit_flush_of(index, env) {
            if is_traced {
                stream.landed(index, true, env.instant());
            }
            self.submitted(stream, index, result, env);
        }
    }

    /// A device operation of an ordered request has come back.
    pub(super) fn ordered_device_result(
        &mut self,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        match self.stream.take() {
            Some(mut stream) => {
                if stream.tracer.is(index) {
                    let was_flush = self.slots[index].stage == Stage::DeviceFlush;
                    stream.landed(index, was_flush, env.instant());
                }
                self.submitted(&mut stream, index, result, env);
                self.stream = Some(stream);
            }
            None => {
                debug_assert!(
                    probe::planted(Plant::T8ClaimNoWait) || probe::planted(Plant::T8GhostReplay),
                    "a stream was given back with operations under way (T8)"
                );
                self.answer(index, overtaken(), 0, out);
            }
        }
    }

    #[inline(always)]
    fn submitted(
        &mut self,
        stream: &mut Stream<E>,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
    ) {
        let slot = &mut self.slots[index];
        let was_flush = slot.stage == Stage::DeviceFlush;
        slot.stage = Stage::Gate;
        let ok = match result {
            Ok(_) => true,
            Err(error) => {
                slot.verdict = Some(status_of(&error, false));
                false
            }
        };
        if was_flush {
            self.ordered_flush_ended(stream, index, ok, env);
        } else {
            if !ok {
                probe::hit(Rare::WriteFailed);
            }
            Self::written(stream, index, ok);
        }
    }

    #[inline(always)]
    fn written(stream: &mut Stream<E>, index: u16, ok: bool) {
        stream.gate.written(Ticket(u32::from(index)), ok, &mut stream.steps);
    }

    /// Takes note of a released mark (T1).
    pub(super) fn mark(&mut self, sqe: &Sqe, out: &mut Outbox<E::Buf>) {
        let mark = wire::mark_of(sqe);
        let durable = sqe.dword(10) & 1 != 0;
        let status = match &mut self.stream {
            None if self.was_fenced => overtaken(),
            None => wire::status::NOT_BOUND.with_dnr(),
            Some(stream) if stream.fenced => overtaken(),
            Some(_) if mark.0 > SEQ_MAX => wire::status::BAD_ATTRIBUTE.with_dnr(),
            Some(stream) => {
                if mark > stream.near {
                    stream.near = mark;
                }
                if !durable {
                    stream.log.release(mark);
                    Status::SUCCESS
                } else if stream.log.release_now(mark).is_ok() {
                    Status::SUCCESS
                } else {
                    probe::hit(Rare::LogFailed);
                    stream.gate.poison(Cause::LogFailed, &mut stream.steps);
                    wire::status::LOG_FAILED
                }
            }
        };
        self.respond(sqe.cid(), status, 0, out);
    }
}
