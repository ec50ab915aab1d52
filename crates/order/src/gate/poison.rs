//! Stopping a stream after a failure: nothing that comes later in order completes (P6, T22).

use alloc::vec::Vec;

use super::{Cause, Gate, NONE, Slot, State, Step, Ticket, is_after};
use crate::attribute::Member;
use crate::probe::{self, Plant, Rare};

#[derive(Clone, Copy, Debug)]
pub(super) struct Poison {
    pub(super) cause: Cause,
    /// Entries from here on may not complete; `None`: all that are here.
    from: Option<u32>,
}

impl Gate {
    /// Stops the stream: what waits is refused now, what is in flight when it comes back, what
    /// arrives later at once.
    pub fn poison(&mut self, cause: Cause, steps: &mut Vec<Step>) {
        self.poison_from(cause, None, steps);
    }

    /// A FLUSH of the drive failed, issued by whomever. Stops the stream if it has unflushed
    /// writes there, since they may be lost even if a later FLUSH succeeds (T22), and says
    /// whether it did.
    pub fn flush_failed_on(&mut self, member: Member, steps: &mut Vec<Step>) -> bool {
        let own = self.drives.iter().any(|d| d.cache.member == member && d.flushing.is_some());
        let harmed = self.has_unflushed(member) && !(own && probe::planted(Plant::T22OwnFlush));
        if harmed {
            if !own {
                probe::hit(Rare::FlushFailedElsewhere);
            }
            self.poison_from(Cause::FlushFailed { member }, None, steps);
        }
        harmed
    }

    /// The log did not take `steps[at]`, an [`Step::Append`]: takes it and all later entries
    /// back. `steps[at..]` are rewritten; those before stay. No step from `at` on may have been
    /// carried out.
    ///
    /// # Panics
    ///
    /// If `steps[at]` is not an `Append`.
    pub fn append_failed(&mut self, at: usize, cause: Cause, steps: &mut Vec<Step>) {
        let Step::Append(ticket) = steps[at] else {
            panic!("step {at} is {:?}, not an append", steps[at]);
        };
        let ordinal = self.slots[ticket.0 as usize].ordinal;
        self.retract(at, cause, Some(ordinal), steps);
    }

    /// The log's fence failed: takes all of `steps` back, of which only `Append`s and persist
    /// words may have been carried out, and stops the stream.
    pub fn fence_failed(&mut self, steps: &mut Vec<Step>) {
        self.retract(0, Cause::LogFailed, None, steps);
    }

    pub(super) fn poison_from(&mut self, cause: Cause, from: Option<u32>, steps: &mut Vec<Step>) {
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
        if self.held > 0 {
            for index in 0..self.early.len() {
                let ticket = core::mem::replace(&mut self.early[index], NONE);
                if ticket != NONE {
                    self.refuse(ticket, steps);
                }
            }
            self.held = 0;
        }
        let mut waiting = core::mem::take(&mut self.waiting);
        waiting.retain(|&ticket| {
            let doomed = self.is_doomed(&self.slots[ticket as usize]);
            if doomed {
                let slot = self.slots[ticket as usize];
                self.leave_drive(&slot);
                self.slots[ticket as usize].state = State::Unflushed;
                if !self.slots[ticket as usize].flush {
                    self.refuse(ticket, steps);
                }
            }
            !doomed
        });
        self.waiting = waiting;
        for drive in 0..self.drives.len() {
            // Those that a FLUSH under way covers come back with it.
            let covered = self.drives[drive].flushing.map(|last| self.slots[last as usize].ordinal);
            let mut pending = core::mem::take(&mut self.drives[drive].pending);
            pending.retain(|&ticket| {
                let slot = &self.slots[ticket as usize];
                let (ordinal, state) = (slot.ordinal, slot.state);
                let goes =
                    self.is_doomed(slot) && covered.is_none_or(|last| is_after(ordinal, last));
                if goes && state == State::Unflushed {
                    self.refuse(ticket, steps);
                }
                !goes
            });
            self.drives[drive].pending = pending;
        }
    }

    fn retract(&mut self, at: usize, cause: Cause, from: Option<u32>, steps: &mut Vec<Step>) {
        let taken_back = steps.split_off(at);
        let gone = |slot: &Slot| from.is_none_or(|from| !is_after(from, slot.ordinal));
        for step in taken_back {
            let (Step::Append(Ticket(ticket))
            | Step::Write(Ticket(ticket))
            | Step::Flush(Ticket(ticket))
            | Step::Complete { ticket: Ticket(ticket), .. }
            | Step::Refuse { ticket: Ticket(ticket), .. }) = step;
            let slot = self.slots[ticket as usize];
            if !gone(&slot) {
                steps.push(step);
                continue;
            }
            match step {
                Step::Append(_) => {}
                Step::Write(_) => {
                    // Not submitted, so not in flight: as if it were still waiting.
                    self.slots[ticket as usize].state = State::Waiting;
                    self.waiting.push(ticket);
                }
                Step::Flush(_) => self.drives[usize::from(slot.drive)].flushing = None,
                Step::Complete { ticket, .. } => steps.push(Step::Refuse { ticket, why: cause }),
                Step::Refuse { .. } => steps.push(step),
            }
        }
        self.poison_from(cause, from, steps);
        for drive in 0..self.drives.len() {
            self.flush_if_due(drive as u8, steps);
        }
    }

    #[inline]
    pub(super) fn is_doomed(&self, slot: &Slot) -> bool {
        let Some(Poison { from, .. }) = self.poison else { return false };
        let spared = probe::planted(Plant::T4VouchAfterFailure)
            && slot.flush
            && slot.blockers == 0
            && from.is_some_and(|from| from != slot.ordinal);
        from.is_none_or(|from| !is_after(from, slot.ordinal)) && !spared
    }

    /// Refuses an entry, and for a FLUSH all that it was to cover, as if nothing else were harmed
    /// by what failed: the planted bugs of T22.
    #[cold]
    pub(super) fn fail_alone(&mut self, ticket: u32, why: Cause, steps: &mut Vec<Step>) {
        let slot = self.slots[ticket as usize];
        let mut gone = Vec::new();
        let pending = &mut self.drives[usize::from(slot.drive)].pending;
        pending.retain(|&other| {
            let covered = slot.state == State::Unflushed
                && !is_after(self.slots[other as usize].ordinal, slot.ordinal);
            let goes = other == ticket || covered;
            if goes {
                gone.push(other);
            }
            !goes
        });
        if !slot.flush {
            gone.push(ticket);
        }
        for ticket in gone {
            self.slots[ticket as usize].state = State::Free;
            self.inside -= 1;
            steps.push(Step::Refuse { ticket: Ticket(ticket), why });
        }
        self.wake(&slot, steps);
        self.flush_if_due(slot.drive, steps);
    }

    #[cold]
    pub(super) fn refuse(&mut self, ticket: u32, steps: &mut Vec<Step>) {
        self.slots[ticket as usize].state = State::Free;
        self.inside -= 1;
        let why = self.poison.expect("only a poisoned gate refuses").cause;
        let ticket = Ticket(ticket);
        steps.push(Step::Refuse { ticket, why });
    }
}
