//! Stops a stream after a failure, so that no later entry completes (promise P6).
//!
//! A failure *poisons* the gate from some ordinal on. Every entry from there on is refused:
//!
//! - an early, waiting or pending entry at once,
//! - an entry whose write or FLUSH is in flight when that operation ends,
//! - a later arrival at once.

use alloc::vec::Vec;

use super::{Cause, Gate, NONE, Node, NodeState, Step, Table, Ticket, is_after};
use crate::attribute::Member;
use crate::probe::{self, Plant, Rare};

/// The failure that has stopped a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Poison {
    /// The first cause.
    pub(super) cause: Cause,
    /// The first ordinal that must not complete; `None` if the poison covers every entry at the
    /// gate.
    from: Option<u32>,
}

impl Gate {
    /// Stops the stream: refuses every entry at the gate, and every later arrival.
    pub fn poison(&mut self, table: &mut impl Table, cause: Cause, steps: &mut Vec<Step>) {
        self.poison_from(table, cause, None, steps);
    }

    /// Handles a failed FLUSH of the drive, of this stream or of another one. If this stream has
    /// unflushed writes there, the stream is stopped, because they may be lost even if a later
    /// FLUSH succeeds (trap T22). Returns whether the stream was stopped.
    pub fn on_flush_failed(
        &mut self,
        table: &mut impl Table,
        member: Member,
        steps: &mut Vec<Step>,
    ) -> bool {
        let is_own_flush = self
            .drives
            .iter()
            .any(|drive| drive.cache.member == member && drive.flush_in_flight.is_some());
        let is_spared_by_plant = is_own_flush && probe::is_bug_planted(Plant::T22OwnFlush);
        if !self.has_unflushed(member) || is_spared_by_plant {
            return false;
        }
        if !is_own_flush {
            probe::count_rare(Rare::FlushFailedElsewhere);
        }
        self.poison_from(table, Cause::FlushFailed { member }, None, steps);
        true
    }

    /// Handles an append that the log did not accept: `steps[at]`, a [`Step::Append`]. Refuses that
    /// entry and all later ones. For this, the steps from `at` on are replaced; the steps before it
    /// stay. The caller must not have carried out any step from `at` on.
    ///
    /// # Panics
    ///
    /// If `steps[at]` is not an `Append`.
    pub fn on_append_failed(
        &mut self,
        table: &mut impl Table,
        at: usize,
        cause: Cause,
        steps: &mut Vec<Step>,
    ) {
        let Step::Append(ticket) = steps[at] else {
            panic!("step {at} is {:?}, not an append", steps[at]);
        };
        let ordinal = table.node(ticket).ordinal;
        self.take_back(table, at, cause, Some(ordinal), steps);
    }

    /// Handles a failed fence of the log: replaces all of `steps` by refusals, and stops the
    /// stream. Of these steps the caller may have carried out the `Append`s, and set the persist
    /// words of the `Complete`s, but nothing else.
    pub fn on_fence_failed(&mut self, table: &mut impl Table, steps: &mut Vec<Step>) {
        self.take_back(table, 0, Cause::LogFailed, None, steps);
    }

    /// Stops the stream from ordinal `from` on, or for every entry at the gate if that is `None`. A
    /// later failure can only widen that range. The first cause stays the one that is reported.
    pub(super) fn poison_from(
        &mut self,
        table: &mut impl Table,
        cause: Cause,
        from: Option<u32>,
        steps: &mut Vec<Step>,
    ) {
        match &mut self.poison {
            None => self.poison = Some(Poison { cause, from }),
            Some(poison) => {
                poison.from = match (poison.from, from) {
                    (Some(old), Some(new)) if is_after(old, new) => Some(new),
                    (Some(old), Some(_)) => Some(old),
                    _ => None,
                };
            }
        }
        self.refuse_early(table, steps);
        self.refuse_waiting(table, steps);
        for drive in 0..self.drives.len() {
            self.refuse_pending_flushes(table, drive, steps);
        }
    }

    /// Refuses all entries that arrived early, because the entry that failed was admitted before
    /// them.
    fn refuse_early(&mut self, table: &mut impl Table, steps: &mut Vec<Step>) {
        if self.early_count == 0 {
            return;
        }
        for index in 0..self.early_tickets.len() {
            let ticket = core::mem::replace(&mut self.early_tickets[index], NONE);
            if ticket != NONE {
                self.refuse(table, ticket, steps);
            }
        }
        self.early_count = 0;
    }

    /// Refuses the waiting writes that must fail, so that they are never submitted. An entry that
    /// has a FLUSH, too, is refused with the pending flushes.
    fn refuse_waiting(&mut self, table: &mut impl Table, steps: &mut Vec<Step>) {
        let mut waiting = core::mem::take(&mut self.waiting);
        waiting.retain(|&ticket| {
            let node = *table.node(Ticket(ticket));
            if !self.must_fail(&node) {
                return true;
            }
            self.remove_from_drive(table, &node);
            table.node_mut(Ticket(ticket)).state = NodeState::Unflushed;
            if !node.has_flush {
                self.refuse(table, ticket, steps);
            }
            false
        });
        self.waiting = waiting;
    }

    /// Removes the pending flush entries of a drive that must fail. The entries that a FLUSH in
    /// flight covers stay until that FLUSH ends.
    fn refuse_pending_flushes(
        &mut self,
        table: &mut impl Table,
        drive: usize,
        steps: &mut Vec<Step>,
    ) {
        let last_covered =
            self.drives[drive].flush_in_flight.map(|ticket| table.node(Ticket(ticket)).ordinal);
        let mut pending = core::mem::take(&mut self.drives[drive].pending_flushes);
        pending.retain(|&ticket| {
            let node = table.node(Ticket(ticket));
            let (ordinal, state) = (node.ordinal, node.state);
            let is_covered = last_covered.is_some_and(|last| !is_after(ordinal, last));
            if is_covered || !self.must_fail(node) {
                return true;
            }
            // In any other state the entry's write is in flight. The entry is refused when that
            // write ends.
            if state == NodeState::Unflushed {
                self.refuse(table, ticket, steps);
            }
            false
        });
        self.drives[drive].pending_flushes = pending;
    }

    /// Takes back the steps from `at` on that belong to entries from ordinal `from` on, and stops
    /// the stream there. `None` means all entries.
    fn take_back(
        &mut self,
        table: &mut impl Table,
        at: usize,
        cause: Cause,
        from: Option<u32>,
        steps: &mut Vec<Step>,
    ) {
        let taken_back = steps.split_off(at);
        let is_taken_back = |node: &Node| from.is_none_or(|from| !is_after(from, node.ordinal));
        for step in taken_back {
            let (Step::Append(Ticket(ticket))
            | Step::Write(Ticket(ticket))
            | Step::Flush(Ticket(ticket))
            | Step::Complete { ticket: Ticket(ticket), .. }
            | Step::Refuse { ticket: Ticket(ticket), .. }) = step;
            let node = *table.node(Ticket(ticket));
            if !is_taken_back(&node) {
                steps.push(step);
                continue;
            }
            match step {
                Step::Append(_) => {}
                Step::Write(_) => {
                    // The write was not submitted, so it counts as one that still waits.
                    table.node_mut(Ticket(ticket)).state = NodeState::Waiting;
                    self.waiting.push(ticket);
                }
                Step::Flush(_) => self.drives[usize::from(node.drive)].flush_in_flight = None,
                Step::Complete { ticket, .. } => steps.push(Step::Refuse { ticket, why: cause }),
                Step::Refuse { .. } => steps.push(step),
            }
        }
        self.poison_from(table, cause, from, steps);
        for drive in 0..self.drives.len() {
            self.flush_if_due(table, drive as u8, steps);
        }
    }

    /// Whether the entry must be refused, because the stream has failed at this entry or before it.
    #[inline]
    pub(super) fn must_fail(&self, node: &Node) -> bool {
        let Some(Poison { from, .. }) = self.poison else { return false };
        let is_spared_by_plant = probe::is_bug_planted(Plant::T4CoverAfterFailure)
            && node.has_flush
            && node.blockers == 0
            && from.is_some_and(|from| from != node.ordinal);
        from.is_none_or(|from| !is_after(from, node.ordinal)) && !is_spared_by_plant
    }

    /// Refuses an entry, and for a failed FLUSH all entries that it would have covered, as if the
    /// failure affected nothing else. Only for the plants that remove the defence against failures
    /// (trap T22).
    #[cold]
    pub(super) fn refuse_without_poison(
        &mut self,
        table: &mut impl Table,
        ticket: u32,
        why: Cause,
        steps: &mut Vec<Step>,
    ) {
        let node = *table.node(Ticket(ticket));
        let mut refused = Vec::new();
        let pending = &mut self.drives[usize::from(node.drive)].pending_flushes;
        pending.retain(|&other| {
            let is_covered = node.state == NodeState::Unflushed
                && !is_after(table.node(Ticket(other)).ordinal, node.ordinal);
            let is_refused = other == ticket || is_covered;
            if is_refused {
                refused.push(other);
            }
            !is_refused
        });
        if !node.has_flush {
            refused.push(ticket);
        }
        for ticket in refused {
            table.node_mut(Ticket(ticket)).state = NodeState::Free;
            self.entry_count -= 1;
            steps.push(Step::Refuse { ticket: Ticket(ticket), why });
        }
        self.unblock_waiting(table, &node, steps);
        self.flush_if_due(table, node.drive, steps);
    }

    /// Removes an entry from the gate as refused, with the cause that stopped the stream.
    #[cold]
    pub(super) fn refuse(&mut self, table: &mut impl Table, ticket: u32, steps: &mut Vec<Step>) {
        table.node_mut(Ticket(ticket)).state = NodeState::Free;
        self.entry_count -= 1;
        let why = self.poison.expect("only a poisoned gate refuses").cause;
        let ticket = Ticket(ticket);
        steps.push(Step::Refuse { ticket, why });
    }
}
