//! The part of a connection that carries a stream. It begins with a Bind command.
//!
//! It has the *gate* of the stream, which decides when each request may go on, and the ordering
//! log. The requests are in the connection's table of commands. A request's index in the table is
//! its ticket at the gate. [`arrival`](super::arrival) takes in requests, [`batch`](super::batch)
//! carries out the steps that the gate returns:
//!
//! ```text
//! arrival ─→ gate ─→ Append → Write → (Flush) → Complete, or Refuse
//! ```

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Attribute, Member, Seq, VolumeId};
use riopipe_order::gate::{Cause, Gate, MemberCache, Step, Ticket};
use riopipe_order::ordering_log::{AppendError, StreamLog};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::RegionError;

use super::commands::Commands;
use super::context::{Context, fenced_owner};
use super::env::TargetEnv;
use super::limits::SEQ_MAX;
use super::namespace::Namespaces;
use super::tracer::Tracer;
use super::volumes::{Listing, SharedFill, check_page_len, read_page, status_of_unreadable};
use crate::outbox::Outbox;
use crate::wire::{self, ListRequest};

/// The part of a connection that carries a stream.
pub(super) struct OrderedQueue<E: TargetEnv> {
    pub(super) volume: VolumeId,
    pub(super) log: StreamLog<E::Region>,
    /// The place where this queue publishes how full the log is.
    pub(super) fill: SharedFill,
    pub(super) gate: Gate,
    /// The volume's drives on this target. The gate knows a drive by its index in this list.
    drives: Vec<DriveOfStream>,
    /// By namespace index: the index of the drive in `drives`, or [`NO_DRIVE`].
    pub(super) drive_index_of: Vec<u8>,
    /// The ordinal of the last entry that came on the control path ([`wire::IO_ORDER`]).
    pub(super) last_ordered: u32,
    /// The highest seq that has arrived. A command has only the lower 32 bits of its seq. The upper
    /// bits are derived from this seq, because the two seqs are near each other (trap T5).
    pub(super) highest_seq: Seq,
    /// The steps that the gate has returned and that are not carried out yet, in the gate's order.
    pub(super) gate_steps: Vec<Step>,
    /// The steps that are being carried out. The gate may add to `gate_steps` meanwhile.
    pub(super) steps_in_progress: Vec<Step>,
    /// The `Complete` and `Refuse` steps of the batch. Their completions are sent after the last
    /// fence of the batch.
    pub(super) to_answer: Vec<Step>,
    /// The indices of the commands whose data is in the receive buffer.
    pub(super) with_capsule_data: Vec<u16>,
    /// Attributes have been appended to the log since the last fence.
    pub(super) has_unfenced_appends: bool,
    /// The list of the log's entries that the owner is reading page by page.
    pub(super) listing: Option<Listing>,
    pub(super) tracer: Tracer,
    /// The failure of the stream has been reported to the environment.
    pub(super) has_reported_stop: bool,
}

/// Stands in `drive_index_of` for a namespace that does not belong to the volume.
const NO_DRIVE: u8 = u8::MAX;

/// A drive of the stream's volume.
#[derive(Debug)]
struct DriveOfStream {
    /// The index of the drive's namespace.
    ns_index: usize,
    /// The drive's member number in the volume.
    member: Member,
    /// How many FLUSHes of the drive had failed at the last check (trap T22).
    reported_flush_failures: u64,
}

impl<E: TargetEnv> OrderedQueue<E> {
    /// The queue of a newly bound stream. `members` are the volume's namespaces on this target: for
    /// each its index and its member number. At most `entries` requests are in flight at once.
    pub(super) fn new(
        volume: VolumeId,
        (log, fill): (StreamLog<E::Region>, SharedFill),
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
            let drive_index = drives.len() as u8;
            drive_index_of[ns_index] = drive_index;
            let namespace = namespaces.at(ns_index);
            let reported_flush_failures = namespace.state.flush_failures();
            drives.push(DriveOfStream { ns_index, member, reported_flush_failures });
            caches.push(MemberCache {
                member: Member(drive_index),
                volatile: namespace.config.volatile,
            });
        }
        let capacity = usize::from(entries);
        let seed = u64::from(log.id().stream.0);
        Self {
            volume,
            log,
            fill,
            gate: Gate::new(&caches, u32::from(entries.max(1))),
            drives,
            drive_index_of,
            last_ordered: 0,
            highest_seq: released,
            gate_steps: Vec::with_capacity(4 * capacity),
            steps_in_progress: Vec::with_capacity(4 * capacity),
            to_answer: Vec::with_capacity(capacity),
            with_capsule_data: Vec::with_capacity(capacity),
            has_unfenced_appends: false,
            listing: None,
            // Each stream has another seed, so that streams of equal speed do not all trace a write
            // at the same time.
            tracer: Tracer::new(seed),
            has_reported_stop: false,
        }
    }

    /// The gate's index of the drive of a namespace. `None` if the namespace does not have this
    /// member number in the volume.
    pub(super) fn gate_index_of(&mut self, ns_index: usize, member: Member) -> Option<Member> {
        let drive_index = *self.drive_index_of.get(ns_index)?;
        let drive = self.drives.get(usize::from(drive_index))?;
        (drive.member == member).then_some(Member(drive_index))
    }

    /// Carries out the `Append` steps among `gate_steps[from..]`, and removes them from
    /// `gate_steps`.
    #[inline]
    pub(super) fn carry_out_appends(&mut self, commands: &mut Commands<E::Buf>, from: usize) {
        // The fast path: one entry has arrived in order, and its write need not wait. So there are
        // two steps, `Append` and the next step of the same entry.
        if let [Step::Append(ticket), next] = self.gate_steps[from..]
            && !matches!(next, Step::Append(_))
        {
            if let Err(cause) = self.append_one(commands, ticket) {
                return self.gate.on_append_failed(commands, from, cause, &mut self.gate_steps);
            }
            self.gate_steps.truncate(from);
            return self.gate_steps.push(next);
        }
        // The other steps move towards the front, to the places of the `Append` steps. `kept_end`
        // is the end of the steps that stay.
        let mut kept_end = from;
        for at in from..self.gate_steps.len() {
            let step = self.gate_steps[at];
            if let Step::Append(ticket) = step {
                if let Err(cause) = self.append_one(commands, ticket) {
                    self.gate_steps.drain(kept_end..at);
                    return self.gate.on_append_failed(
                        commands,
                        kept_end,
                        cause,
                        &mut self.gate_steps,
                    );
                }
            } else {
                self.gate_steps[kept_end] = step;
                kept_end += 1;
            }
        }
        self.gate_steps.truncate(kept_end);
    }

    /// Appends an entry to the log.
    ///
    /// # Errors
    /// The cause for which the gate must refuse the entry and stop the stream.
    #[inline(always)]
    pub(super) fn append_one(
        &mut self,
        commands: &mut Commands<E::Buf>,
        ticket: Ticket,
    ) -> Result<(), Cause> {
        let entry = &mut commands[ticket.0 as u16].entry;
        match self.log.append(&entry.attribute) {
            Ok(position) => {
                entry.position = position;
                self.has_unfenced_appends = true;
                Ok(())
            }
            Err(error) => Err(match error {
                AppendError::Full { .. } => Cause::LogFull,
                // A replayed request must have the same shape as its entry in the log. If the
                // shapes differ, the request is of another stream, or the initiator has a bug (trap
                // T6).
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

    /// Takes in a `Complete` or `Refuse` step, whose completion is sent after the last fence of the
    /// batch. Sets the persist word of the entry if the step demands that. Returns whether the
    /// persist word was set.
    #[inline(always)]
    pub(super) fn set_persist_word(&mut self, commands: &Commands<E::Buf>, step: Step) -> bool {
        self.to_answer.push(step);
        let Step::Complete { ticket, persist: true } = step else { return false };
        self.log.persist(commands[ticket.0 as u16].entry.position);
        true
    }

    /// Carries out a Mark command: releases the entries of the log up to the owner's mark (trap
    /// T1), or records that they are durable, and keeps them.
    pub(super) fn release_mark(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let mark = wire::mark_of(sqe);
        let must_be_durable = sqe.dword(10) & 1 != 0;
        let keeps_entries = wire::mark_keeps_entries(sqe);
        let status = if context.is_fenced {
            fenced_owner()
        } else if mark.0 > SEQ_MAX {
            wire::status::BAD_ATTRIBUTE.with_dnr()
        } else {
            self.highest_seq = self.highest_seq.max(mark);
            if keeps_entries {
                self.log.persist_up_to(mark);
                let recorded = self.log.fence();
                self.status_of_record(context, recorded)
            } else if must_be_durable {
                let recorded = self.log.release_now(mark);
                self.status_of_record(context, recorded)
            } else {
                self.log.release(mark);
                Status::SUCCESS
            }
        };
        context.send_completion(sqe.cid(), status, 0, outbox);
    }

    /// The status of a Mark command whose record in the log has succeeded or failed. A failure of
    /// the log stops the stream.
    fn status_of_record(
        &mut self,
        context: &mut Context<E>,
        recorded: Result<(), RegionError>,
    ) -> Status {
        if recorded.is_ok() {
            return Status::SUCCESS;
        }
        probe::count_rare(Rare::LogFailed);
        self.gate.poison(&mut context.commands, Cause::LogFailed, &mut self.gate_steps);
        wire::status::LOG_FAILED
    }

    /// Carries out a List command: sends a page of the entries in the log of this stream.
    pub(super) fn list(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let ListRequest { from, len, .. } = wire::list_request(sqe);
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

    /// Reports to the gate the FLUSHes of the stream's drives that have failed on other connections
    /// since the last report (trap T22).
    pub(super) fn report_flush_failures(&mut self, context: &mut Context<E>) {
        let Context { namespaces, commands, .. } = context;
        for (drive_index, drive) in self.drives.iter_mut().enumerate() {
            let failures = namespaces.at(drive.ns_index).state.flush_failures();
            if failures == drive.reported_flush_failures {
                continue;
            }
            drive.reported_flush_failures = failures;
            let member = Member(drive_index as u8);
            if !probe::is_bug_planted(Plant::T22OtherStreams)
                && self.gate.on_flush_failed(commands, member, &mut self.gate_steps)
            {
                probe::count_rare(Rare::FlushFailedElsewhere);
            }
        }
    }

    /// Counts a failed FLUSH of this stream as reported, because the gate receives this failure as
    /// the result of the FLUSH.
    pub(super) fn count_own_flush_failure(&mut self, ns_index: usize) {
        let Some(drive_index) = self.drive_index_of.get(ns_index) else { return };
        if let Some(drive) = self.drives.get_mut(usize::from(*drive_index)) {
            drive.reported_flush_failures = drive.reported_flush_failures.wrapping_add(1);
        }
    }

    /// Ends the stream, because its owner is fenced or the connection ends. The gate refuses every
    /// request that is not at a drive yet (trap T8).
    pub(super) fn end_stream(&mut self, context: &mut Context<E>) {
        context.is_fenced = true;
        self.gate.poison(&mut context.commands, Cause::Closed, &mut self.gate_steps);
    }

    /// Stops the stream because of a request that is not valid and does not pass the gate. The
    /// later requests of the stream must not be carried out without this one (promise P6).
    pub(super) fn stop_stream(&mut self, context: &mut Context<E>, member: Member, ordinal: u32) {
        let cause = Cause::WriteFailed { member, ordinal };
        self.gate.poison(&mut context.commands, cause, &mut self.gate_steps);
    }

    /// The status of a request that the gate refuses for this cause.
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
