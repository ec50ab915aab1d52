//! The stream that a connection is bound to: its gate, its log, and what is under way at either.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, VolumeId};
use riopipe_order::entry::Position;
use riopipe_order::gate::{Cause, Gate, MemberCache, Step, Ticket};
use riopipe_order::ordering_log::{AppendError, LogError, StreamLog};
use riopipe_order::probe::{self, Plant, Rare};

use super::env::TargetEnv;
use super::listing::{self, Listing};
use super::namespace::Namespaces;
use super::stream::overtaken;
use super::tracer::Tracer;
use crate::wire;
use crate::wire::list::Page;

/// The stream that a connection carries.
pub(super) struct Stream<E: TargetEnv> {
    pub(super) volume: VolumeId,
    pub(super) log: StreamLog<E::Region>,
    /// A new owner has fenced this one: nothing more goes to the drives (T8).
    pub(super) fenced: bool,
    pub(super) gate: Gate,
    drives: Vec<DriveOfStream>,
    /// Index into `drives` by namespace index, or [`NO_DRIVE`].
    pub(super) drive_of: Vec<u8>,
    /// By slot of the connection, which is the gate's ticket.
    pub(super) entries: Vec<Entry>,
    /// The highest seq seen: wire numbers are widened next to it (T5).
    pub(super) near: Seq,
    /// What the gate wants done, in its order.
    pub(super) steps: Vec<Step>,
    pub(super) doing: Vec<Step>,
    /// Completions and refusals, answered after the batch's last fence.
    pub(super) done: Vec<Step>,
    /// Slots whose data is still in the receive buffer.
    pub(super) inline: Vec<u16>,
    /// Attributes have been appended since the last fence.
    pub(super) appended: bool,
    /// The list of which the owner has had a page, but not the last.
    listing: Option<Listing>,
    pub(super) tracer: Tracer,
    /// The host knows that the stream has failed.
    pub(super) told_stopped: bool,
}

/// No drive of the stream.
const NO_DRIVE: u8 = u8::MAX;

#[derive(Debug)]
struct DriveOfStream {
    ns: usize,
    /// The volume's number of the drive.
    member: Member,
    /// Failed FLUSHes of the drive when last looked at (T22).
    flush_failures: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) attribute: Attribute,
    pub(super) position: Position,
    pub(super) data: Data,
    /// The gate lets it go, but its data is not there yet.
    pub(super) may_write: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Data {
    /// Asked for by R2T.
    Awaited,
    /// In the slot or the receive buffer, or none needed.
    Ready,
    /// Damaged on the way.
    Bad,
}

impl<E: TargetEnv> Stream<E> {
    /// A newly bound stream over the namespaces `members` of the volume; at most `entries`
    /// requests are under way at once.
    pub(super) fn new(
        volume: VolumeId,
        log: StreamLog<E::Region>,
        members: &[(usize, Member)],
        namespaces: &Namespaces,
        released: Seq,
        entries: u16,
    ) -> Self {
        let mut drive_of = Vec::new();
        let mut drives = Vec::new();
        let mut caches = Vec::new();
        for &(ns, member) in members.iter().take(usize::from(NO_DRIVE)) {
            if drive_of.len() <= ns {
                drive_of.resize(ns + 1, NO_DRIVE);
            }
            let local = drives.len() as u8;
            drive_of[ns] = local;
            let namespace = namespaces.at(ns);
            let flush_failures = namespace.state.flush_failures();
            drives.push(DriveOfStream { ns, member, flush_failures });
            caches.push(MemberCache { member: Member(local), volatile: namespace.config.volatile });
        }
        let blank = Entry {
            attribute: Attribute {
                seq: Seq::ZERO,
                span: 1,
                num: 1,
                index: 0,
                ordinal: 0,
                member: Member(0),
                kind: Kind::Flush,
                flags: Flags(0),
                lba: 0,
                blocks: 0,
                tag: 0,
            },
            position: Position(0),
            data: Data::Ready,
            may_write: false,
        };
        let room = usize::from(entries);
        let seed = u64::from(log.id().stream.0);
        Self {
            volume,
            log,
            fenced: false,
            gate: Gate::new(&caches, u32::from(entries.max(1))),
            drives,
            drive_of,
            entries: alloc::vec![blank; room],
            near: released,
            steps: Vec::with_capacity(4 * room),
            doing: Vec::with_capacity(4 * room),
            done: Vec::with_capacity(room),
            inline: Vec::with_capacity(room),
            appended: false,
            listing: None,
            // Streams that go the same pace are not all looked at together.
            tracer: Tracer::new(seed),
            told_stopped: false,
        }
    }

    /// The gate's name of the drive that a request goes to, if the request's member number and
    /// namespace belong together as they have so far.
    pub(super) fn drive(&mut self, ns: usize, member: Member) -> Option<Member> {
        let local = *self.drive_of.get(ns)?;
        let drive = self.drives.get(usize::from(local))?;
        (drive.member == member).then_some(Member(local))
    }

    /// Carries out the `Append`s among the steps from `from` on, and takes them off.
    #[inline]
    pub(super) fn append(&mut self, from: usize) {
        // Nearly always an entry in its turn, whose write need not wait.
        if let [Step::Append(ticket), next] = self.steps[from..]
            && !matches!(next, Step::Append(_))
        {
            if let Err(cause) = self.append_one(ticket) {
                return self.gate.append_failed(from, cause, &mut self.steps);
            }
            self.steps.truncate(from);
            return self.steps.push(next);
        }
        let mut left = from;
        for at in from..self.steps.len() {
            let step = self.steps[at];
            if let Step::Append(ticket) = step {
                if let Err(cause) = self.append_one(ticket) {
                    self.steps.drain(left..at);
                    return self.gate.append_failed(left, cause, &mut self.steps);
                }
            } else {
                self.steps[left] = step;
                left += 1;
            }
        }
        self.steps.truncate(left);
    }

    #[inline(always)]
    fn append_one(&mut self, ticket: Ticket) -> Result<(), Cause> {
        let entry = &mut self.entries[ticket.0 as usize];
        match self.log.append(&entry.attribute) {
            Ok(position) => {
                entry.position = position;
                self.appended = true;
                Ok(())
            }
            Err(error) => Err(match error {
                AppendError::Full { .. } => Cause::LogFull,
                // Replay keeps shapes (T6): this is another stream, or a bug.
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

    /// An entry is complete or refused, and will be answered after the batch's last fence; says
    /// whether its persist word was set.
    #[inline(always)]
    pub(super) fn complete(&mut self, step: Step) -> bool {
        self.done.push(step);
        let Step::Complete { ticket, persist: true } = step else { return false };
        self.log.persist(self.entries[ticket.0 as usize].position);
        true
    }

    /// The request in slot `index` is to be traced, or what is traced waits for it; the gate wants
    /// the steps from `from` on.
    #[cold]
    #[inline(never)]
    pub(super) fn trace_arrival(&mut self, index: u16, from: usize, env: &E) {
        let is_write = self.entries[usize::from(index)].attribute.kind == Kind::Write;
        self.tracer.arrived(index, is_write, &self.steps[from..], env.instant());
    }

    /// The traced write in slot `index` is back from the drive, or its FLUSH is.
    #[cold]
    pub(super) fn landed(&mut self, index: u16, was_flush: bool, now: u64) {
        let flags = self.entries[usize::from(index)].attribute.flags;
        self.tracer.landed(flags.has(Flags::FLUSH) && !was_flush, now);
    }

    /// Notices FLUSHes of its drives that failed on any other connection (T22).
    pub(super) fn see_flush_failures(&mut self, namespaces: &Namespaces) {
        for (local, drive) in self.drives.iter_mut().enumerate() {
            let failures = namespaces.at(drive.ns).state.flush_failures();
            if failures != drive.flush_failures {
                drive.flush_failures = failures;
                if !probe::planted(Plant::T22OtherStreams)
                    && self.gate.flush_failed_on(Member(local as u8), &mut self.steps)
                {
                    probe::hit(Rare::FlushFailedElsewhere);
                }
            }
        }
    }

    /// A FLUSH of this stream has failed and was counted: the gate hears of that one with the
    /// entry it belongs to.
    pub(super) fn own_flush_failed(&mut self, ns: usize) {
        let local = self.drive_of.get(ns).map_or(usize::MAX, |local| usize::from(*local));
        if let Some(drive) = self.drives.get_mut(local) {
            drive.flush_failures = drive.flush_failures.wrapping_add(1);
        }
    }

    /// A page of its log's live entries.
    pub(super) fn list(&mut self, from: Position, len: usize) -> Result<Page, LogError> {
        let Self { listing, log, .. } = self;
        listing::page(listing, log, from, len)
    }

    /// The stream is no longer this owner's (T8): everything not at the drives yet is refused.
    pub(super) fn shut(&mut self) {
        self.fenced = true;
        self.gate.poison(Cause::Closed, &mut self.steps);
    }

    /// Stops the stream because of a request that never reached the gate: what follows it has
    /// lost its predecessor (P6).
    pub(super) fn stop(&mut self, member: Member, ordinal: u32) {
        self.gate.poison(Cause::WriteFailed { member, ordinal }, &mut self.steps);
    }

    pub(super) fn refusal(&self, why: Cause) -> Status {
        let status = match why {
            Cause::LogFull => wire::status::LOG_FULL,
            Cause::LogFailed => wire::status::LOG_FAILED,
            Cause::Closed if self.fenced => return overtaken(),
            Cause::WriteFailed { .. } | Cause::FlushFailed { .. } | Cause::Closed => {
                wire::status::POISONED
            }
        };
        status.with_dnr()
    }
}
