//! The gate: a target holds entries in it until their predecessors are done (paper §4.3.1).
//!
//! Each stream has one [`Gate`] on each server. The caller reports arrivals and completions, and
//! the gate answers with [`Step`]s for the caller:
//!
//! ```text
//!  on_arrival --> early --> append --> waiting --> write in flight --> unflushed --> complete
//!                 (until    to the     (until no   (on_write_done)     (only flush
//!                 its turn)  log       overlap)                        entries)
//! ```
//!
//! The caller names each entry by a *ticket*: the index of its [`Node`] in the caller's [`Table`].
//! The *ordinal* of an entry counts the stream's requests to this server, so it gives the order in
//! which entries are admitted.
//!
//! Most writes need not wait for one another. The gate holds only
//!
//! - an entry that arrived before its predecessors, until they arrive,
//! - a write that touches a block of an earlier write in flight, because the drive may carry out
//!   the two in any order (trap T12),
//! - the FLUSH of a flush entry, until the entry's own write and all earlier entries of the stream
//!   on that drive have completed, because a FLUSH covers only completed writes (trap T2),
//! - after a failure, every later entry, for good, because nothing after a failure may be reported
//!   complete (promise P6).

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use crate::attribute::{Attribute, Kind, Member};
use crate::probe::{self, Plant, Rare};
use node::{NONE, NodeState};
pub use node::{Node, Table};
pub(crate) use overlap::Filter;
use poison::Poison;
pub use step::{Cause, GateError, MemberCache, Step, Ticket};

mod node;
mod overlap;
mod poison;
mod step;

/// The gate of one stream on one server.
///
/// The gate's state of each entry is a [`Node`] in the caller's [`Table`], so that all state of an
/// entry is in one place. A gate works on one table only. Every node of the table is
/// [free](Node::FREE) at the beginning, and only the gate changes nodes.
#[derive(Debug)]
pub struct Gate {
    /// The most entries at the gate. Tickets are below this.
    capacity: usize,
    /// The volume's drives on this server, with their lists of unwritten and unflushed entries.
    drives: Vec<Drive>,
    /// The index into `drives`, by member number; `NO_DRIVE` for a member that is not here.
    drive_of_member: [u8; 256],
    /// The ordinal of the entry that is admitted next.
    next_ordinal: u32,
    /// The tickets of the entries that arrived before their turn. The index is the ordinal modulo
    /// the length, which is a power of two.
    early_tickets: Vec<u32>,
    /// The number of tickets in `early_tickets`.
    early_count: u32,
    /// The number of entries that arrived and were neither completed nor refused.
    entry_count: u32,
    /// A fast check for overlapping writes. For most writes it finds none, so the drive's list need
    /// not be searched.
    filter: Filter,
    /// The tickets of the writes that wait for overlapping writes, in ordinal order.
    waiting: Vec<u32>,
    /// The failure that has stopped the stream, if there was one.
    poison: Option<Poison>,
}

impl Gate {
    /// A gate for a new binding: the first entry has ordinal 1. At most `capacity` entries are at
    /// the gate at once.
    ///
    /// # Panics
    ///
    /// If `capacity` is 0 or above 65536, a member is listed twice, or there are 255 or more.
    #[must_use]
    pub fn new(members: &[MemberCache], capacity: u32) -> Self {
        Self::starting_at(1, members, capacity)
    }

    /// A gate like that of [`new`](Self::new), but the first entry has ordinal `first`. Ordinals
    /// wrap from 2³² − 1 to 0.
    ///
    /// # Panics
    ///
    /// See [`new`](Self::new).
    #[must_use]
    pub fn starting_at(first: u32, members: &[MemberCache], capacity: u32) -> Self {
        assert!((1..=1 << 16).contains(&capacity), "a gate has space for 1 to 65536 entries");
        assert!(members.len() < usize::from(NO_DRIVE), "too many members");
        let mut drive_of_member = [NO_DRIVE; 256];
        for (index, cache) in members.iter().enumerate() {
            let drive = &mut drive_of_member[usize::from(cache.member.0)];
            assert!(*drive == NO_DRIVE, "{:?} is listed twice", cache.member);
            *drive = index as u8;
        }
        let drives = members.iter().map(|cache| Drive {
            cache: *cache,
            first_unwritten: NONE,
            last_unwritten: NONE,
            pending_flushes: VecDeque::with_capacity(capacity as usize),
            flush_in_flight: None,
            last_unflushed: None,
        });
        Self {
            capacity: capacity as usize,
            drives: drives.collect(),
            drive_of_member,
            next_ordinal: first,
            early_tickets: vec![NONE; capacity.next_power_of_two() as usize],
            early_count: 0,
            entry_count: 0,
            filter: Filter::new(capacity as usize),
            waiting: Vec::with_capacity(capacity as usize),
            poison: None,
        }
    }

    /// Handles the arrival of an entry. The data of the entry may still be in transit: the caller
    /// submits the write when it has both the step and the data.
    ///
    /// # Errors
    ///
    /// The peer broke the protocol. The gate is unchanged, and the ticket still free.
    ///
    /// # Panics
    ///
    /// If the ticket is out of range or in use.
    #[inline]
    pub fn on_arrival(
        &mut self,
        table: &mut impl Table,
        ticket: Ticket,
        attribute: &Attribute,
        steps: &mut Vec<Step>,
    ) -> Result<(), GateError> {
        let ordinal = attribute.ordinal;
        let drive = self.drive_of_member[usize::from(attribute.member.0)];
        if drive == NO_DRIVE {
            return Err(GateError::UnknownMember { ordinal, member: attribute.member });
        }
        let ahead = ordinal.wrapping_sub(self.next_ordinal);
        if ahead != 0 && self.poison.is_none() {
            check_early(ahead, self.next_ordinal, &self.early_tickets, self.capacity)?;
        }
        let node = table.node_mut(ticket);
        assert!(node.state == NodeState::Free, "{ticket:?} is in use");
        *node = Node {
            lba: attribute.lba,
            end: attribute.lba.saturating_add(u64::from(attribute.blocks)),
            ordinal,
            before: NONE,
            after: NONE,
            blockers: 0,
            drive,
            has_write: attribute.kind != Kind::Flush,
            has_flush: attribute.is_flush(),
            state: NodeState::Early,
        };
        self.entry_count += 1;
        if self.poison.is_some() {
            // Only admitted entries can fail, and this entry was not admitted yet. So it comes after
            // the failure in the stream, and is refused.
            self.refuse(table, ticket.0, steps);
        } else if ahead == 0 {
            self.admit(table, ticket.0, steps);
            if self.early_count > 0 {
                self.admit_early(table, steps);
            }
        } else {
            probe::count_rare(Rare::GateEarly);
            let index = ordinal as usize & (self.early_tickets.len() - 1);
            self.early_tickets[index] = ticket.0;
            self.early_count += 1;
        }
        Ok(())
    }

    /// Handles the end of the entry's write or discard. `ok` is whether the drive reported
    /// success.
    ///
    /// # Panics
    ///
    /// If no [`Step::Write`] was given for the ticket.
    #[inline(always)]
    pub fn on_write_done(
        &mut self,
        table: &mut impl Table,
        ticket: Ticket,
        ok: bool,
        steps: &mut Vec<Step>,
    ) {
        let node = *table.node(ticket);
        assert!(node.state == NodeState::Writing, "{ticket:?} is not being written");
        self.remove_from_drive(table, &node);
        let first_new_step = steps.len();
        if !ok {
            probe::count_rare(Rare::WriteFailed);
            let member = self.drives[usize::from(node.drive)].cache.member;
            let ordinal = node.ordinal;
            let cause = Cause::WriteFailed { member, ordinal };
            if probe::is_bug_planted(Plant::T22FailedWrite) {
                return self.refuse_without_poison(table, ticket.0, cause, steps);
            }
            self.poison_from(table, cause, Some(ordinal), steps);
        }
        let volatile = self.drives[usize::from(node.drive)].cache.volatile;
        if self.must_fail(&node) {
            self.refuse(table, ticket.0, steps);
            // The refusal of the failed write was added last. It must be the first of the new
            // steps, before the refusals that the failure has caused.
            steps[first_new_step..].rotate_right(1);
        } else if node.has_flush {
            table.node_mut(ticket).state = NodeState::Unflushed;
        } else {
            self.complete(table, ticket.0, !volatile, steps);
        }
        if !self.waiting.is_empty() {
            self.unblock_waiting(table, &node, steps);
        }
        self.flush_if_due(table, node.drive, steps);
    }

    /// Handles the end of the entry's FLUSH. `ok` is whether the drive reported success.
    ///
    /// A success also completes the earlier flush entries on this drive that were pending when the
    /// FLUSH was submitted.
    ///
    /// # Panics
    ///
    /// If no [`Step::Flush`] was given for the ticket.
    pub fn on_flush_done(
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
            probe::count_rare(Rare::FlushFailed);
            let cause = Cause::FlushFailed { member };
            if probe::is_bug_planted(Plant::T22OwnFlush) {
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
    pub fn poison_cause(&self) -> Option<Cause> {
        self.poison.map(|poison| poison.cause)
    }

    /// Whether the stream has writes on the drive, completed or in flight, that no FLUSH covers
    /// yet. Always false for a drive without a volatile cache.
    #[must_use]
    pub fn has_unflushed(&self, member: Member) -> bool {
        let drive = self.drive_of_member[usize::from(member.0)];
        self.drives.get(usize::from(drive)).is_some_and(|drive| drive.last_unflushed.is_some())
    }

    /// Whether no entry is at the gate.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.entry_count == 0
    }

    /// The number of entries that arrived and were neither completed nor refused.
    #[must_use]
    pub const fn entry_count(&self) -> u32 {
        self.entry_count
    }

    /// The number of entries that arrived before their predecessors and wait for them.
    #[must_use]
    pub const fn early_count(&self) -> u32 {
        self.early_count
    }

    /// Admits the early entries that follow the entry just admitted without a gap.
    #[inline(never)]
    fn admit_early(&mut self, table: &mut impl Table, steps: &mut Vec<Step>) {
        while self.early_count > 0 {
            let index = self.next_ordinal as usize & (self.early_tickets.len() - 1);
            let ticket = core::mem::replace(&mut self.early_tickets[index], NONE);
            if ticket == NONE {
                break;
            }
            self.early_count -= 1;
            self.admit(table, ticket, steps);
        }
    }

    /// Admits the entry that is next in order: adds the step to append it to the log, and the step
    /// to write it unless an earlier write in flight overlaps it.
    #[inline(always)]
    fn admit(&mut self, table: &mut impl Table, ticket: u32, steps: &mut Vec<Step>) {
        self.next_ordinal = self.next_ordinal.wrapping_add(1);
        steps.push(Step::Append(Ticket(ticket)));
        let node = table.node_mut(Ticket(ticket));
        let drive = &mut self.drives[usize::from(node.drive)];
        if node.has_flush || !node.has_write {
            drive.pending_flushes.push_back(ticket);
        }
        if !node.has_write {
            node.state = NodeState::Unflushed;
            let drive = node.drive;
            self.flush_if_due(table, drive, steps);
            return;
        }
        if drive.cache.volatile {
            drive.last_unflushed = Some(node.ordinal);
        }
        let may_overlap = self.filter.add(node.drive, node.lba, node.end);
        let blockers = if may_overlap && !probe::is_bug_planted(Plant::T12NoOverlap) {
            self.count_overlapping(table, ticket)
        } else {
            0
        };
        let node = table.node_mut(Ticket(ticket));
        node.blockers = blockers;
        if blockers == 0 {
            node.state = NodeState::Writing;
            steps.push(Step::Write(Ticket(ticket)));
        } else {
            probe::count_rare(Rare::GateOverlap);
            node.state = NodeState::Waiting;
            self.waiting.push(ticket);
        }
        self.add_to_drive(table, ticket);
    }

    /// The number of earlier entries on the drive whose write is not completed and touches a block
    /// of this entry.
    fn count_overlapping(&self, table: &impl Table, ticket: u32) -> u32 {
        let node = table.node(Ticket(ticket));
        let mut count = 0;
        let mut earlier_ticket = self.drives[usize::from(node.drive)].first_unwritten;
        while earlier_ticket != NONE {
            let earlier = table.node(Ticket(earlier_ticket));
            count += u32::from(earlier.overlaps(node));
            earlier_ticket = earlier.after;
        }
        count
    }

    /// Notes that the write of `written` does not block later writes any more. Adds the step to
    /// write for each waiting write that has no blocker left.
    fn unblock_waiting(&mut self, table: &mut impl Table, written: &Node, steps: &mut Vec<Step>) {
        self.waiting.retain(|&ticket| {
            let node = table.node_mut(Ticket(ticket));
            let was_blocked = node.drive == written.drive
                && is_after(node.ordinal, written.ordinal)
                && written.overlaps(node);
            if !was_blocked {
                return true;
            }
            node.blockers -= 1;
            if node.blockers > 0 {
                return true;
            }
            node.state = NodeState::Writing;
            steps.push(Step::Write(Ticket(ticket)));
            false
        });
    }

    /// Adds the step to FLUSH a drive, if pending flush entries there have no earlier write in
    /// flight any more. One FLUSH serves all of them.
    ///
    /// Only one FLUSH of a drive is in flight at a time. With two, the later one could succeed
    /// before the earlier one fails, and would cover writes that the earlier one has lost (trap
    /// T4).
    #[inline(always)]
    fn flush_if_due(&mut self, table: &mut impl Table, drive_index: u8, steps: &mut Vec<Step>) {
        let drive = &self.drives[usize::from(drive_index)];
        if !drive.pending_flushes.is_empty() && drive.flush_in_flight.is_none() {
            self.flush_ready(table, drive_index, steps);
        }
    }

    /// The part of [`flush_if_due`](Self::flush_if_due) for a drive that has pending flush entries
    /// and no FLUSH in flight.
    fn flush_ready(&mut self, table: &mut impl Table, drive_index: u8, steps: &mut Vec<Step>) {
        let drive = &mut self.drives[usize::from(drive_index)];
        let oldest_unwritten = (drive.first_unwritten != NONE)
            .then(|| table.node(Ticket(drive.first_unwritten)).ordinal);
        let ready = drive.pending_flushes.iter().take_while(|&&ticket| {
            let node = table.node(Ticket(ticket));
            oldest_unwritten.is_none_or(|oldest| is_after(oldest, node.ordinal))
                || probe::is_bug_planted(Plant::T2FlushEarly) && node.state == NodeState::Unflushed
        });
        let ready_count = ready.count();
        if ready_count == 0 {
            // A flush entry in this state waits for earlier writes, not for its own.
            if table.node(Ticket(drive.pending_flushes[0])).state == NodeState::Unflushed {
                probe::count_rare(Rare::GateFlush);
            }
            return;
        }
        if drive.cache.volatile {
            let last_ready = drive.pending_flushes[ready_count - 1];
            drive.flush_in_flight = Some(last_ready);
            steps.push(Step::Flush(Ticket(last_ready)));
        } else {
            // A completed write is durable on this drive, so no FLUSH is needed. The flush entry
            // has waited all the same, because it covers the earlier entries on this drive.
            for _ in 0..ready_count {
                let drive = &mut self.drives[usize::from(drive_index)];
                let ticket = drive.pending_flushes.pop_front().expect("ready entries are pending");
                self.complete(table, ticket, true, steps);
            }
        }
    }

    /// Removes an entry from the gate as completed. `persist` is whether its data is durable, so
    /// that its persist word may be set.
    #[inline(always)]
    fn complete(
        &mut self,
        table: &mut impl Table,
        ticket: u32,
        persist: bool,
        steps: &mut Vec<Step>,
    ) {
        table.node_mut(Ticket(ticket)).state = NodeState::Free;
        self.entry_count -= 1;
        let ticket = Ticket(ticket);
        steps.push(Step::Complete { ticket, persist });
    }

    /// Adds an entry at the end of its drive's list of entries whose write is not completed.
    #[inline]
    fn add_to_drive(&mut self, table: &mut impl Table, ticket: u32) {
        let drive = &mut self.drives[usize::from(table.node(Ticket(ticket)).drive)];
        let last = core::mem::replace(&mut drive.last_unwritten, ticket);
        table.node_mut(Ticket(ticket)).before = last;
        if last == NONE {
            drive.first_unwritten = ticket;
        } else {
            table.node_mut(Ticket(last)).after = ticket;
        }
    }

    /// Removes an entry from its drive's list of entries whose write is not completed, and its
    /// blocks from the filter.
    #[inline(always)]
    fn remove_from_drive(&mut self, table: &mut impl Table, node: &Node) {
        self.filter.remove(node.drive, node.lba, node.end);
        let drive = &mut self.drives[usize::from(node.drive)];
        if node.before == NONE {
            drive.first_unwritten = node.after;
        } else {
            table.node_mut(Ticket(node.before)).after = node.after;
        }
        if node.after == NONE {
            drive.last_unwritten = node.before;
        } else {
            table.node_mut(Ticket(node.after)).before = node.before;
        }
    }
}

/// The value in `drive_of_member` for a member that is not on this server.
const NO_DRIVE: u8 = u8::MAX;

/// The entries of the stream on one drive.
#[derive(Debug)]
struct Drive {
    /// The member, and whether it has a volatile cache.
    cache: MemberCache,
    /// The first entry on the drive's list of entries whose write is not completed, in ordinal
    /// order. The list goes on through [`Node::after`].
    first_unwritten: u32,
    /// The last entry on that list.
    last_unwritten: u32,
    /// The flush entries that are not completed, in ordinal order.
    pending_flushes: VecDeque<u32>,
    /// The entry whose FLUSH is in flight. The FLUSH covers all pending flush entries up to this
    /// one.
    flush_in_flight: Option<u32>,
    /// The ordinal of the last write to a volatile drive; `None` if a FLUSH has covered that write.
    last_unflushed: Option<u32>,
}

/// Whether ordinal `a` comes after `b`. The answer is right across the wrap from 2³² − 1 to 0, too,
/// because all ordinals at the gate lie within 2³¹ of each other (trap T5).
#[inline]
const fn is_after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// Checks an entry that arrived `ahead` ordinals before its turn. It must be neither a duplicate
/// nor further ahead than `window`, the most entries at the gate.
#[cold]
fn check_early(
    ahead: u32,
    expected: u32,
    early_tickets: &[u32],
    window: usize,
) -> Result<(), GateError> {
    let ordinal = expected.wrapping_add(ahead);
    let is_behind = (ahead as i32) < 0;
    if is_behind {
        return Err(GateError::Duplicate { ordinal, expected });
    }
    if ahead as usize >= window {
        let window = window as u32;
        return Err(GateError::TooFar { ordinal, expected, window });
    }
    if early_tickets[ordinal as usize & (early_tickets.len() - 1)] != NONE {
        return Err(GateError::Duplicate { ordinal, expected });
    }
    Ok(())
}
