//! The gate: a target holds entries in it until their predecessors are done (paper §4.3.1).
//!
//! One [`Gate`] per (stream, server) turns arrivals and completions into [`Step`]s. Plain writes
//! need not wait for one another; the gate holds only
//!
//! - an entry that arrived before its predecessors, until they arrive,
//! - a write that touches a block that an earlier write in flight touches too (T12),
//! - the FLUSH of a flush entry, until all the stream's earlier entries on that device and the
//!   entry's own write have completed (T2),
//! - after a failure, every later entry, for good (T22, P6).

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use crate::attribute::{Attribute, Kind, Member};
use crate::probe::{self, Plant, Rare};
use node::{NONE, State};
pub use node::{Node, Table};
use overlap::Filter;
use poison::Poison;
pub use step::{Cause, GateError, MemberCache, Step, Ticket};

mod node;
mod overlap;
mod poison;
mod step;

/// The per-stream, per-server gate.
///
/// Its part of each entry is a [`Node`] in the caller's [`Table`], so that the caller finds all of
/// an entry in one place. A gate works on one table only. Every node of the table is
/// [free](Node::FREE) at the beginning, and only the gate changes nodes.
#[derive(Debug)]
pub struct Gate {
    /// Tickets are below this.
    capacity: usize,
    drives: Vec<Drive>,
    /// Index into `drives` by member number, or `NO_DRIVE`.
    drive_of: [u8; 256],
    /// The ordinal to be admitted next.
    next: u32,
    /// The tickets of entries that arrived before their turn. The index is the ordinal modulo the
    /// length, which is a power of two.
    early: Vec<u32>,
    /// How many tickets are in `early`.
    held: u32,
    /// The number of entries that arrived and were neither completed nor refused.
    inside: u32,
    /// A quick first check for overlapping writes. For most writes it finds none, so the drive's list
    /// need not be searched (T12).
    filter: Filter,
    /// Writes that wait for overlapping ones, in ordinal order.
    waiting: Vec<u32>,
    poison: Option<Poison>,
}

impl Gate {
    /// A gate for a new binding: the first entry has ordinal 1. At most `capacity` entries are at
    /// the gate at once, with tickets `0..capacity`.
    ///
    /// # Panics
    ///
    /// If `capacity` is 0 or above 65536, a member is listed twice, or there are 255 or more.
    #[must_use]
    pub fn new(members: &[MemberCache], capacity: u32) -> Self {
        Self::starting_at(1, members, capacity)
    }

    /// Like [`new`](Self::new), but the first entry has the given ordinal. Ordinals wrap from
    /// 2³² − 1 to 0 (T5).
    ///
    /// # Panics
    ///
    /// See [`new`](Self::new).
    #[must_use]
    pub fn starting_at(first: u32, members: &[MemberCache], capacity: u32) -> Self {
        assert!((1..=1 << 16).contains(&capacity), "a gate has space for 1 to 65536 entries");
        assert!(members.len() < usize::from(NO_DRIVE), "too many members");
        let mut drive_of = [NO_DRIVE; 256];
        for (i, cache) in members.iter().enumerate() {
            let drive = &mut drive_of[usize::from(cache.member.0)];
            assert!(*drive == NO_DRIVE, "{:?} is listed twice", cache.member);
            *drive = i as u8;
        }
        let drives = members.iter().map(|cache| Drive {
            cache: *cache,
            first: NONE,
            last: NONE,
            pending_flushes: VecDeque::with_capacity(capacity as usize),
            flush_in_flight: None,
            last_unflushed: None,
        });
        Self {
            capacity: capacity as usize,
            drives: drives.collect(),
            drive_of,
            next: first,
            early: vec![NONE; capacity.next_power_of_two() as usize],
            held: 0,
            inside: 0,
            filter: Filter::new(capacity as usize),
            waiting: Vec::with_capacity(capacity as usize),
            poison: None,
        }
    }

    /// Takes in an entry that has arrived. Its data may still be in transit: the caller submits the
    /// write once it has the step and the data.
    ///
    /// # Errors
    ///
    /// The peer broke the protocol; the gate is unchanged, the ticket still free.
    ///
    /// # Panics
    ///
    /// If the ticket is out of range or in use.
    #[inline]
    pub fn arrive(
        &mut self,
        table: &mut impl Table,
        ticket: Ticket,
        attribute: &Attribute,
        steps: &mut Vec<Step>,
    ) -> Result<(), GateError> {
        let ordinal = attribute.ordinal;
        let drive = self.drive_of[usize::from(attribute.member.0)];
        if drive == NO_DRIVE {
            return Err(GateError::UnknownMember { ordinal, member: attribute.member });
        }
        let ahead = ordinal.wrapping_sub(self.next);
        if ahead != 0 && self.poison.is_none() {
            check_early(ahead, self.next, &self.early, self.capacity)?;
        }
        let node = table.node_mut(ticket);
        assert!(node.state == State::Free, "{ticket:?} is in use");
        *node = Node {
            lba: attribute.lba,
            end: attribute.lba.saturating_add(u64::from(attribute.blocks)),
            ordinal,
            before: NONE,
            after: NONE,
            blockers: 0,
            drive,
            writes: attribute.kind != Kind::Flush,
            flush: attribute.is_flush(),
            state: State::Early,
        };
        self.inside += 1;
        if self.poison.is_some() {
            // The failure was one of entries that had been admitted. This entry comes later in
            // order, and is refused.
            self.refuse(table, ticket.0, steps);
        } else if ahead == 0 {
            self.admit(table, ticket.0, steps);
            if self.held > 0 {
                self.admit_held(table, steps);
            }
        } else {
            probe::hit(Rare::GateEarly);
            let index = ordinal as usize & (self.early.len() - 1);
            self.early[index] = ticket.0;
            self.held += 1;
        }
        Ok(())
    }

    /// Notes that the drive has finished the entry's write or discard.
    ///
    /// # Panics
    ///
    /// If no [`Step::Write`] was given for the ticket.
    #[inline(always)]
    pub fn written(
        &mut self,
        table: &mut impl Table,
        ticket: Ticket,
        ok: bool,
        steps: &mut Vec<Step>,
    ) {
        let node = *table.node(ticket);
        assert!(node.state == State::Writing, "{ticket:?} is not being written");
        self.remove_from_drive(table, &node);
        let steps_before = steps.len();
        if !ok {
            probe::hit(Rare::WriteFailed);
            let member = self.drives[usize::from(node.drive)].cache.member;
            let ordinal = node.ordinal;
            let cause = Cause::WriteFailed { member, ordinal };
            if probe::planted(Plant::T22FailedWrite) {
                return self.refuse_without_poison(table, ticket.0, cause, steps);
            }
            self.poison_from(table, cause, Some(ordinal), steps);
        }
        let volatile = self.drives[usize::from(node.drive)].cache.volatile;
        if self.must_fail(&node) {
            self.refuse(table, ticket.0, steps);
            // The answer to the failed write was added last. It goes before the refusals that the
            // failure has caused (P6).
            steps[steps_before..].rotate_right(1);
        } else if node.flush {
            table.node_mut(ticket).state = State::Unflushed;
        } else {
            self.complete(table, ticket.0, !volatile, steps);
        }
        if !self.waiting.is_empty() {
            self.release_blocked(table, &node, steps);
        }
        self.flush_if_due(table, node.drive, steps);
    }

    /// Notes that the drive has finished the entry's FLUSH.
    ///
    /// Its success also completes earlier flush entries that were waiting when it was submitted.
    ///
    /// # Panics
    ///
    /// If no [`Step::Flush`] was given for the ticket.
    pub fn flushed(
        &mut self,
        table: &mut impl Table,
        ticket: Ticket,
        ok: bool,
        steps: &mut Vec<Step>,
    ) {
        let node = *table.node(ticket);
        let drive = &mut self.drives[usize::from(node.drive)];
        assert!(drive.flush_in_flight.take() == Some(ticket.0), "{ticket:?} is not being flushed");
        let member = drive.cache.member;
        if !ok {
            probe::hit(Rare::FlushFailed);
            let cause = Cause::FlushFailed { member };
            if probe::planted(Plant::T22OwnFlush) {
                return self.refuse_without_poison(table, ticket.0, cause, steps);
            }
            self.poison_from(table, cause, None, steps);
            return;
        }
        if drive.last_unflushed.is_some_and(|last| !is_after(last, node.ordinal)) {
            drive.last_unflushed = None;
        }
        while let Some(&first) = self.drives[usize::from(node.drive)].pending_flushes.front() {
            let covered = *table.node(Ticket(first));
            if is_after(covered.ordinal, node.ordinal) {
                break;
            }
            self.drives[usize::from(node.drive)].pending_flushes.pop_front();
            if self.must_fail(&covered) {
                self.refuse(table, first, steps);
            } else {
                self.complete(table, first, true, steps);
            }
        }
        self.flush_if_due(table, node.drive, steps);
    }

    /// The cause that stopped the stream, if it is stopped.
    #[must_use]
    pub fn poisoned(&self) -> Option<Cause> {
        self.poison.map(|poison| poison.cause)
    }

    /// Whether the stream has writes on the drive, completed or in flight, that no FLUSH covers
    /// yet.
    #[must_use]
    pub fn has_unflushed(&self, member: Member) -> bool {
        let drive = self.drive_of[usize::from(member.0)];
        self.drives.get(usize::from(drive)).is_some_and(|drive| drive.last_unflushed.is_some())
    }

    /// Whether no entry is at the gate.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.inside == 0
    }

    /// The number of entries that arrived and were neither completed nor refused.
    #[must_use]
    pub const fn inside(&self) -> u32 {
        self.inside
    }

    /// The number of entries that overtook their predecessors and wait for them.
    #[must_use]
    pub const fn held(&self) -> u32 {
        self.held
    }

    /// Admits the early entries that follow the one just admitted.
    #[inline(never)]
    fn admit_held(&mut self, table: &mut impl Table, steps: &mut Vec<Step>) {
        while self.held > 0 {
            let index = self.next as usize & (self.early.len() - 1);
            let ticket = core::mem::replace(&mut self.early[index], NONE);
            if ticket == NONE {
                break;
            }
            self.held -= 1;
            self.admit(table, ticket, steps);
        }
    }

    /// Admits the entry that is next in order: gives the step to append it to the log, and the step to
    /// write it unless an earlier write in flight overlaps it.
    #[inline(always)]
    fn admit(&mut self, table: &mut impl Table, ticket: u32, steps: &mut Vec<Step>) {
        self.next = self.next.wrapping_add(1);
        steps.push(Step::Append(Ticket(ticket)));
        let node = table.node_mut(Ticket(ticket));
        let drive = &mut self.drives[usize::from(node.drive)];
        if node.flush || !node.writes {
            drive.pending_flushes.push_back(ticket);
        }
        if !node.writes {
            node.state = State::Unflushed;
            let drive = node.drive;
            self.flush_if_due(table, drive, steps);
            return;
        }
        if drive.cache.volatile {
            drive.last_unflushed = Some(node.ordinal);
        }
        let may_overlap = self.filter.add(node.drive, node.lba, node.end);
        let blockers = if may_overlap && !probe::planted(Plant::T12NoOverlap) {
            self.overlapping(table, ticket)
        } else {
            0
        };
        let node = table.node_mut(Ticket(ticket));
        node.blockers = blockers;
        if blockers == 0 {
            node.state = State::Writing;
            steps.push(Step::Write(Ticket(ticket)));
        } else {
            probe::hit(Rare::GateOverlap);
            node.state = State::Waiting;
            self.waiting.push(ticket);
        }
        self.add_to_drive(table, ticket);
    }

    /// How many entries on the drive's list touch blocks of this one (T12).
    fn overlapping(&self, table: &impl Table, ticket: u32) -> u32 {
        let node = table.node(Ticket(ticket));
        let mut count = 0;
        let mut other = self.drives[usize::from(node.drive)].first;
        while other != NONE {
            let earlier = table.node(Ticket(other));
            count += u32::from(earlier.overlaps(node));
            other = earlier.after;
        }
        count
    }

    /// Notes that the write `done` does not block others any more. Gives the step to write for each
    /// waiting write that has no blocker left.
    fn release_blocked(&mut self, table: &mut impl Table, done: &Node, steps: &mut Vec<Step>) {
        self.waiting.retain(|&ticket| {
            let node = table.node_mut(Ticket(ticket));
            if node.drive == done.drive
                && is_after(node.ordinal, done.ordinal)
                && done.overlaps(node)
            {
                node.blockers -= 1;
                if node.blockers == 0 {
                    node.state = State::Writing;
                    steps.push(Step::Write(Ticket(ticket)));
                    return false;
                }
            }
            true
        });
    }

    /// Submits a FLUSH for the latest flush entry before which no write of the stream is in flight
    /// on the drive (T2). Only one FLUSH is in flight at a time. Otherwise one could succeed before
    /// an earlier one has failed, and would cover writes that the earlier one lost (T4).
    #[inline(always)]
    fn flush_if_due(&mut self, table: &mut impl Table, drive: u8, steps: &mut Vec<Step>) {
        let at = &self.drives[usize::from(drive)];
        if !at.pending_flushes.is_empty() && at.flush_in_flight.is_none() {
            self.flush_ready(table, drive, steps);
        }
    }

    /// The part of [`flush_if_due`](Self::flush_if_due) for a drive with flush entries and no FLUSH
    /// in flight.
    fn flush_ready(&mut self, table: &mut impl Table, drive: u8, steps: &mut Vec<Step>) {
        let at = &mut self.drives[usize::from(drive)];
        let oldest_write = (at.first != NONE).then(|| table.node(Ticket(at.first)).ordinal);
        let ready = at.pending_flushes.iter().take_while(|&&ticket| {
            let node = table.node(Ticket(ticket));
            oldest_write.is_none_or(|oldest| is_after(oldest, node.ordinal))
                || probe::planted(Plant::T2FlushEarly) && node.state == State::Unflushed
        });
        let ready = ready.count();
        if ready == 0 {
            // A flush entry in this state waits for earlier writes, not for its own.
            if table.node(Ticket(at.pending_flushes[0])).state == State::Unflushed {
                probe::hit(Rare::GateFlush);
            }
            return;
        }
        if at.cache.volatile {
            let last = at.pending_flushes[ready - 1];
            at.flush_in_flight = Some(last);
            steps.push(Step::Flush(Ticket(last)));
        } else {
            // A completed write is durable on this drive, so no FLUSH is needed. But a flush entry
            // covers the earlier entries on this drive, too, so it has waited for them.
            for _ in 0..ready {
                let at = &mut self.drives[usize::from(drive)];
                let ticket = at.pending_flushes.pop_front().expect("`ready` entries are pending");
                self.complete(table, ticket, true, steps);
            }
        }
    }

    /// Lets an entry leave the gate as completed. `persist`: its persist word may be set, because
    /// its data is durable.
    #[inline(always)]
    fn complete(
        &mut self,
        table: &mut impl Table,
        ticket: u32,
        persist: bool,
        steps: &mut Vec<Step>,
    ) {
        table.node_mut(Ticket(ticket)).state = State::Free;
        self.inside -= 1;
        let ticket = Ticket(ticket);
        steps.push(Step::Complete { ticket, persist });
    }

    /// Adds an entry at the end of its drive's list of entries whose write is not completed.
    #[inline]
    fn add_to_drive(&mut self, table: &mut impl Table, ticket: u32) {
        let drive = &mut self.drives[usize::from(table.node(Ticket(ticket)).drive)];
        let last = core::mem::replace(&mut drive.last, ticket);
        table.node_mut(Ticket(ticket)).before = last;
        if last == NONE {
            drive.first = ticket;
        } else {
            table.node_mut(Ticket(last)).after = ticket;
        }
    }

    /// Removes an entry from its drive's list, and its blocks from the filter.
    #[inline(always)]
    fn remove_from_drive(&mut self, table: &mut impl Table, node: &Node) {
        self.filter.remove(node.drive, node.lba, node.end);
        let drive = &mut self.drives[usize::from(node.drive)];
        if node.before == NONE {
            drive.first = node.after;
        } else {
            table.node_mut(Ticket(node.before)).after = node.after;
        }
        if node.after == NONE {
            drive.last = node.before;
        } else {
            table.node_mut(Ticket(node.after)).before = node.before;
        }
    }
}

/// The entry in `drive_of` of a member that the gate does not know.
const NO_DRIVE: u8 = u8::MAX;

#[derive(Debug)]
struct Drive {
    cache: MemberCache,
    /// The first entry of the drive's list: the entries whose write is not completed, in ordinal
    /// order. The list goes on through [`Node::after`].
    first: u32,
    /// The last entry of that list.
    last: u32,
    /// The flush entries that are not completed, in ordinal order.
    pending_flushes: VecDeque<u32>,
    /// The entry whose FLUSH is in flight. That FLUSH covers all pending flush entries up to this
    /// one.
    flush_in_flight: Option<u32>,
    /// The ordinal of the last write to the drive; `None` if a FLUSH has covered that write.
    last_unflushed: Option<u32>,
}

/// Whether ordinal `a` comes after `b`, also over the wrap: all ordinals at the gate are within 2³¹
/// (T5).
#[inline]
const fn is_after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// Checks an entry that arrived `ahead` ordinals before its turn: whether it is a duplicate or too
/// far ahead.
#[cold]
fn check_early(ahead: u32, expected: u32, early: &[u32], window: usize) -> Result<(), GateError> {
    let ordinal = expected.wrapping_add(ahead);
    if (ahead as i32) < 0 {
        return Err(GateError::Duplicate { ordinal, expected });
    }
    if ahead as usize >= window {
        let window = window as u32;
        return Err(GateError::TooFar { ordinal, expected, window });
    }
    if early[ordinal as usize & (early.len() - 1)] != NONE {
        return Err(GateError::Duplicate { ordinal, expected });
    }
    Ok(())
}
