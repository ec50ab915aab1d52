//! The ordered queue that Bind makes of a connection: a stream's gate and its ordering log, over the
//! connection's table of commands.
//!
//! [`arrival`](super::arrival) takes in requests; [`batch`](super::batch) carries out the steps of
//! the gate.

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Attribute, Member, Seq, VolumeId};
use riopipe_order::gate::{Cause, Gate, MemberCache, Step, Ticket};
use riopipe_order::ordering_log::{AppendError, StreamLog};
use riopipe_order::probe::{self, Plant, Rare};

use super::commands::Commands;
use super::context::{Context, fenced_owner};
use super::env::TargetEnv;
use super::limits::SEQ_MAX;
use super::namespace::Namespaces;
use super::tracer::Tracer;
use super::volumes::{Listing, check_page_len, read_page, status_of_unreadable};
use crate::outbox::Outbox;
use crate::wire;

/// The part of a connection that carries a stream.
pub(super) struct OrderedQueue<E: TargetEnv> {
    pub(super) volume: VolumeId,
    pub(super) log: StreamLog<E::Region>,
    pub(super) gate: Gate,
    /// The volume's drives on this target. The gate knows a drive by its index in this list.
    drives: Vec<DriveOfStream>,
    /// Index into `drives` by namespace index, or [`NO_DRIVE`].
    pub(super) drive_index_of: Vec<u8>,
    /// The highest seq that has arrived. A command has only the lower 32 bits of a seq. The rest
    /// follows from this seq, because the two are near each other (T5).
    pub(super) highest_seq: Seq,
    /// The steps of the gate that are to be carried out, in its order.
    pub(super) gate_steps: Vec<Step>,
    /// The steps that are being carried out. The gate may add to `steps` meanwhile.
    pub(super) steps_in_progress: Vec<Step>,
    /// Completions and refusals. They are answered after the last fence of the batch.
    pub(super) to_answer: Vec<Step>,
    /// Commands whose data is still in the receive buffer.
    pub(super) with_capsule_data: Vec<u16>,
    /// Attributes have been appended since the last fence.
    pub(super) has_unfenced_appends: bool,
    /// The list of the stream's entries that the owner reads now, page by page.
    pub(super) listing: Option<Listing>,
    pub(super) tracer: Tracer,
    /// The environment has been informed of the failure of the stream.
    pub(super) has_reported_stop: bool,
}

/// The index of a namespace without a drive of the stream.
const NO_DRIVE: u8 = u8::MAX;

#[derive(Debug)]
struct DriveOfStream {
    ns_index: usize,
    /// The drive's member number in the volume.
    member: Member,
    /// Failed FLUSHes of the drive at the last check (T22).
    flush_failures: u64,
}

impl<E: TargetEnv> OrderedQueue<E> {
    /// The queue of a newly bound stream over the namespaces `members` of the volume. At most
    /// `entries` requests are in flight at once.
    pub(super) fn new(
        volume: VolumeId,
        log: StreamLog<E::Region>,
        members: &[(usize, Member)],
        namespaces: &Namespaces,
        released: Seq,
        entries: u16,
    ) -> Self {
        let mut drive_index_of = Vec::new();
        let mut drives = Vec::new();
        let mut caches = Vec::new();
        for &(ns_index, member) in members.iter().take(usize::from(NO_DRIVE)) {
            if drive_index_of.len() <= ns_index {
                drive_index_of.resize(ns_index + 1, NO_DRIVE);
            }
            let local = drives.len() as u8;
            drive_index_of[ns_index] = local;
            let namespace = namespaces.at(ns_index);
            let flush_failures = namespace.state.flush_failures();
            drives.push(DriveOfStream { ns_index, member, flush_failures });
            caches.push(MemberCache { member: Member(local), volatile: namespace.config.volatile });
        }
        let capacity = usize::from(entries);
        let seed = u64::from(log.id().stream.0);
        Self {
            volume,
            log,
            gate: Gate::new(&caches, u32::from(entries.max(1))),
            drives,
            drive_index_of,
            highest_seq: released,
            gate_steps: Vec::with_capacity(4 * capacity),
            steps_in_progress: Vec::with_capacity(4 * capacity),
            to_answer: Vec::with_capacity(capacity),
            with_capsule_data: Vec::with_capacity(capacity),
            has_unfenced_appends: false,
            listing: None,
            // The seed differs, so that streams of equal speed do not all trace at the same time.
            tracer: Tracer::new(seed),
            has_reported_stop: false,
        }
    }

    /// The gate's index of the drive that a request goes to; `None` if the namespace is not the one
    /// of this member number.
    pub(super) fn gate_index_of(&mut self, ns_index: usize, member: Member) -> Option<Member> {
        let local = *self.drive_index_of.get(ns_index)?;
        let drive = self.drives.get(usize::from(local))?;
        (drive.member == member).then_some(Member(local))
    }

    /// Carries out the `Append`s among the steps from index `from` on, and removes them from the
    /// steps.
    #[inline]
    pub(super) fn carry_out_appends(&mut self, commands: &mut Commands<E::Buf>, from: usize) {
        // The fast path: one entry has arrived in order, and its write need not wait.
        if let [Step::Append(ticket), next] = self.gate_steps[from..]
            && !matches!(next, Step::Append(_))
        {
            if let Err(cause) = self.append_one(commands, ticket) {
                return self.gate.append_failed(commands, from, cause, &mut self.gate_steps);
            }
            self.gate_steps.truncate(from);
            return self.gate_steps.push(next);
        }
        // The other steps move up to take the places of the `Append`s.
        let mut kept = from;
        for at in from..self.gate_steps.len() {
            let step = self.gate_steps[at];
            if let Step::Append(ticket) = step {
                if let Err(cause) = self.append_one(commands, ticket) {
                    self.gate_steps.drain(kept..at);
                    return self.gate.append_failed(commands, kept, cause, &mut self.gate_steps);
                }
            } else {
                self.gate_steps[kept] = step;
                kept += 1;
            }
        }
        self.gate_steps.truncate(kept);
    }

    /// Appends an entry to the log. If that fails, the gate must refuse the entry and stop the stream
    /// for the returned cause.
    #[inline(always)]
    fn append_one(&mut self, commands: &mut Commands<E::Buf>, ticket: Ticket) -> Result<(), Cause> {
        let entry = &mut commands[ticket.0 as u16].entry;
        match self.log.append(&entry.attribute) {
            Ok(position) => {
                entry.position = position;
                self.has_unfenced_appends = true;
                Ok(())
            }
            Err(error) => Err(match error {
                AppendError::Full { .. } => Cause::LogFull,
                // A replayed request has the shape of its entry in the log (T6). With another shape
                // it is of another stream, or the initiator has a bug.
                AppendError::OtherShape { .. } => {
                    let Attribute { member, ordinal, .. } = entry.attribute;
                    Cause::WriteFailed { member, ordinal }
                }
                AppendError::Unloggable { .. } | AppendError::Unbound | AppendError::Region(_) => {
                    Cause::LogFailed
                }
            }),
        }
    }

    /// Notes that an entry is complete or refused. It is answered after the last fence of the batch.
    /// Sets its persist word if the step demands that. Returns whether it was set.
    #[inline(always)]
    pub(super) fn set_persist_word(&mut self, commands: &Commands<E::Buf>, step: Step) -> bool {
        self.to_answer.push(step);
        let Step::Complete { ticket, persist: true } = step else { return false };
        self.log.persist(commands[ticket.0 as u16].entry.position);
        true
    }

    /// Carries out a Mark command: takes in the released mark of the owner (T1).
    pub(super) fn release_mark(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let mark = wire::mark_of(sqe);
        let must_be_durable = sqe.dword(10) & 1 != 0;
        let status = if context.is_fenced {
            fenced_owner()
        } else if mark.0 > SEQ_MAX {
            wire::status::BAD_ATTRIBUTE.with_dnr()
        } else {
            self.highest_seq = self.highest_seq.max(mark);
            if !must_be_durable {
                self.log.release(mark);
                Status::SUCCESS
            } else if self.log.release_now(mark).is_ok() {
                Status::SUCCESS
            } else {
                probe::hit(Rare::LogFailed);
                self.gate.poison(&mut context.commands, Cause::LogFailed, &mut self.gate_steps);
                wire::status::LOG_FAILED
            }
        };
        context.send_completion(sqe.cid(), status, 0, outbox);
    }

    /// List: a page of the stream that this queue carries.
    pub(super) fn list(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let (_, from, len) = wire::list_of(sqe);
        let page = match check_page_len(len) {
            _ if context.is_fenced => Err(fenced_owner()),
            Err(status) => Err(status),
            Ok(()) => read_page(&mut self.listing, &self.log, from, len)
                .map_err(|error| status_of_unreadable(&error)),
        };
        match page {
            Ok(page) => context.send_page(sqe, &page.encode(len), outbox),
            Err(status) => context.send_completion(sqe.cid(), status, 0, outbox),
        }
    }

    /// Reports to the gate the FLUSHes of its drives that failed on any other connection (T22).
    pub(super) fn report_flush_failures(&mut self, context: &mut Context<E>) {
        let Context { namespaces, commands, .. } = context;
        for (local, drive) in self.drives.iter_mut().enumerate() {
            let failures = namespaces.at(drive.ns_index).state.flush_failures();
            if failures != drive.flush_failures {
                drive.flush_failures = failures;
                if !probe::planted(Plant::T22OtherStreams)
                    && self.gate.flush_failed_on(
                        commands,
                        Member(local as u8),
                        &mut self.gate_steps,
                    )
                {
                    probe::hit(Rare::FlushFailedElsewhere);
                }
            }
        }
    }

    /// Counts a failed FLUSH of this stream. The gate receives that failure with its entry.
    pub(super) fn count_own_flush_failure(&mut self, ns_index: usize) {
        let local =
            self.drive_index_of.get(ns_index).map_or(usize::MAX, |local| usize::from(*local));
        if let Some(drive) = self.drives.get_mut(local) {
            drive.flush_failures = drive.flush_failures.wrapping_add(1);
        }
    }

    /// Ends the stream, because its owner is fenced or the connection ends (T8). Every request that
    /// is not at the drives yet is refused.
    pub(super) fn end_stream(&mut self, context: &mut Context<E>) {
        context.is_fenced = true;
        self.gate.poison(&mut context.commands, Cause::Closed, &mut self.gate_steps);
    }

    /// Stops the stream because of a request that the gate does not get. Later requests cannot be
    /// carried out without their predecessor (P6).
    pub(super) fn stop_stream(&mut self, context: &mut Context<E>, member: Member, ordinal: u32) {
        let cause = Cause::WriteFailed { member, ordinal };
        self.gate.poison(&mut context.commands, cause, &mut self.gate_steps);
    }

    /// The answer to a request that the gate refuses.
    pub(super) fn refusal_status(context: &Context<E>, why: Cause) -> Status {
        let status = match why {
            Cause::LogFull => wire::status::LOG_FULL,
            Cause::LogFailed => wire::status::LOG_FAILED,
            Cause::Closed if context.is_fenced => return fenced_owner(),
            Cause::WriteFailed { .. } | Cause::FlushFailed { .. } | Cause::Closed => {
                wire::status::POISONED
            }
        };
        status.with_dnr()
    }
}
