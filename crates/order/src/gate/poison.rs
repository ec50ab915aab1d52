//! Stopping a stream after a failure: no later entry completes (P6, T22).

use alloc::vec::Vec;

use super::{Cause, Gate, NONE, Node, State, Step, Table, Ticket, is_after};
use crate::attribute::Member;
use crate::probe::{self, Plant, Rare};

/// The failure that has stopped a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Poison {
    /// The first cause.
    pub(super) cause: Cause,
    /// The first ordinal that must not complete; `None`: no entry at the gate may complete.
    from: Option<u32>,
}

impl Gate {
    /// Stops the stream. An entry that waits is refused now, an entry in flight when it comes back,
    /// a later arrival at once.
    pub fn poison(&mut self, table: &mut impl Table, cause: Cause, steps: &mut Vec<Step>) {
        self.poison_from(table, cause, None, steps);
    }

    /// Notes that a FLUSH of the drive failed, of this stream or of another one. If this stream has
    /// unflushed writes there, they may be lost even if a later FLUSH succeeds (T22), so the stream
    /// is stopped. Returns whether it was.
    pub fn flush_failed_on(
        &mut self,
        table: &mut impl Table,
        member: Member,
        steps: &mut Vec<Step>,
    ) -> bool {
        let is_own =
            self.drives.iter().any(|d| d.cache.member == member && d.flush_in_flight.is_some());
        let affected =
            self.has_unflushed(member) && !(is_own && probe::planted(Plant::T22OwnFlush));
        if affected {
            if !is_own {
                probe::hit(Rare::FlushFailedElsewhere);
            }
            self.poison_from(table, Cause::FlushFailed { member }, None, steps);
        }
        affected
    }

    /// Notes that the log did not take `steps[at]`, a [`Step::Append`], and takes back that entry
    /// and all later ones. `steps[at..]` are rewritten; those before stay. No step from `at` on may
    /// have been carried out.
    ///
    /// # Panics
    ///
    /// If `steps[at]` is not an `Append`.
    pub fn append_failed(
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

    /// Notes that the log's fence failed. Takes all of `steps` back, and stops the stream. Of these
    /// steps only `Append`s may have been carried out, and the persist words of `Complete`s may
    /// have been set.
    pub fn fence_failed(&mut self, table: &mut impl Table, steps: &mut Vec<Step>) {
        self.take_back(table, 0, Cause::LogFailed, None, steps);
    }

    /// Stops the stream from ordinal `from` on; `None`: every entry at the gate. A later failure
    /// can only widen that range, and the first cause stays the one that is reported.
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
        // Entries that arrived early are refused: the failure was among those admitted before them.
        if self.held > 0 {
            for index in 0..self.early.len() {
                let ticket = core::mem::replace(&mut self.early[index], NONE);
                if ticket != NONE {
                    self.refuse(table, ticket, steps);
                }
            }
            self.held = 0;
        }
        // A waiting write that must fail is never submitted. If a FLUSH belongs to it, it is in
        // `pending`, too, and is refused there.
        let mut waiting = core::mem::take(&mut self.waiting);
        waiting.retain(|&ticket| {
            let must_fail = self.must_fail(table.node(Ticket(ticket)));
            if must_fail {
                let node = *table.node(Ticket(ticket));
                self.remove_from_drive(table, &node);
                table.node_mut(Ticket(ticket)).state = State::Unflushed;
                if !table.node(Ticket(ticket)).flush {
                    self.refuse(table, ticket, steps);
                }
            }
            !must_fail
        });
        self.waiting = waiting;
        for drive in 0..self.drives.len() {
            // The entries that a FLUSH in flight covers come back with it.
            let covered =
                self.drives[drive].flush_in_flight.map(|last| table.node(Ticket(last)).ordinal);
            let mut pending = core::mem::take(&mut self.drives[drive].pending_flushes);
            pending.retain(|&ticket| {
                let node = table.node(Ticket(ticket));
                let (ordinal, state) = (node.ordinal, node.state);
                let must_go =
                    self.must_fail(node) && covered.is_none_or(|last| is_after(ordinal, last));
                // The write of an entry in another state is in flight. The entry is refused when
                // that write comes back.
                if must_go && state == State::Unflushed {
                    self.refuse(table, ticket, steps);
                }
                !must_go
            });
            self.drives[drive].pending_flushes = pending;
        }
    }

    /// Takes back the steps from `at` on that belong to entries from ordinal `from` on, and stops
    /// the stream there; `None`: all entries.
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
                    // The write was not submitted, so it is not in flight. It counts as one that
                    // still waits.
                    table.node_mut(Ticket(ticket)).state = State::Waiting;
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

    /// Whether the entry must be refused, because the stream has failed at it or before it.
    #[inline]
    pub(super) fn must_fail(&self, node: &Node) -> bool {
        let Some(Poison { from, .. }) = self.poison else { return false };
        let is_spared_by_plant = probe::planted(Plant::T4CoverAfterFailure)
            && node.flush
            && node.blockers == 0
            && from.is_some_and(|from| from != node.ordinal);
        from.is_none_or(|from| !is_after(from, node.ordinal)) && !is_spared_by_plant
    }

    /// Refuses an entry, and for a FLUSH all entries that it was to cover, as if the failure
    /// affected nothing else. Only for the plants of T22.
    #[cold]
    pub(super) fn refuse_without_poison(
        &mut self,
        table: &mut impl Table,
        ticket: u32,
        why: Cause,
        steps: &mut Vec<Step>,
    ) {
        let node = *table.node(Ticket(ticket));
        let mut gone = Vec::new();
        let pending = &mut self.drives[usize::from(node.drive)].pending_flushes;
        pending.retain(|&other| {
            let covered = node.state == State::Unflushed
                && !is_after(table.node(Ticket(other)).ordinal, node.ordinal);
            let goes = other == ticket || covered;
            if goes {
                gone.push(other);
            }
            !goes
        });
        if !node.flush {
            gone.push(ticket);
        }
        for ticket in gone {
            table.node_mut(Ticket(ticket)).state = State::Free;
            self.inside -= 1;
            steps.push(Step::Refuse { ticket: Ticket(ticket), why });
        }
        self.release_blocked(table, &node, steps);
        self.flush_if_due(table, node.drive, steps);
    }

    /// Lets an entry leave the gate as refused, with the cause that stopped the stream.
    #[cold]
    pub(super) fn refuse(&mut self, table: &mut impl Table, ticket: u32, steps: &mut Vec<Step>) {
        table.node_mut(Ticket(ticket)).state = State::Free;
        self.inside -= 1;
        let why = self.poison.expect("only a poisoned gate refuses").cause;
        let ticket = Ticket(ticket);
        steps.push(Step::Refuse { ticket, why });
    }
}
