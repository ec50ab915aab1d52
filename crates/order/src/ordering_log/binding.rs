//! The changes of a log when the owner or the incarnation of the target changes: start, resume, and
//! the records of recovery in between (P7, T9). All of them are rare, and durable before they return.
//! A crash in the middle leaves the state before the change or the state after it.

use alloc::vec::Vec;

use super::adoption::Adoption;
use super::error::{BindError, ForgetError, SettleError};
use super::mark::Mark;
use super::scan::{End, LoggedEntry, scan};
use super::{State, StreamLog, slot_offset};
use crate::attribute::Seq;
use crate::entry::{ENTRY_BYTES, Origin, Position};
use crate::probe::{self, Plant, Rare};
use crate::region::{Region, RegionError};

impl<R: Region> StreamLog<R> {
    /// Begins a binding with an empty log: drops all entries, sets the released mark to `released`,
    /// and ends the settled state. Call it on a log without entries, or when recovery has undone and
    /// flushed everywhere and has settled all logs (T9). Durable before it returns.
    ///
    /// The numbers of groups continue across generations, so the caller gives `released`. The newest
    /// [tag](Self::tag) up to `released` stays known.
    ///
    /// # Errors
    ///
    /// The generation is older than the log's, or the region failed.
    pub fn start(&mut self, origin: Origin, released: Seq) -> Result<(), BindError> {
        self.check_origin(origin)?;
        if origin.generation < self.durable_mark.origin.generation {
            return Err(BindError::Generation {
                given: origin.generation,
                current: self.durable_mark.origin.generation,
            });
        }
        self.repair(false)?;
        let (head, tag) = (self.next, self.tag_up_to(released));
        self.bind(Mark { origin, head, released, tag, ..self.mark() }, Adoption::default())
    }

    /// Begins a binding with the entries that the log has, for the same owner, after a restart of
    /// the target or the loss of a connection. The owner replays the entries that are not durable, in
    /// order, before anything new (P7, T4). [`append`](Self::append) adopts the entries that are in
    /// the log already.
    ///
    /// A crash may have torn an append. Then this entry and all later ones are dropped: no fence
    /// came after them, so no write was submitted for any of them. The log then has no holes. So the
    /// replayed entries fit (T13), and damage that a later scan finds is new. Durable before it
    /// returns.
    ///
    /// # Errors
    ///
    /// Another generation than the log's, an older incarnation, the log is settled, or the region
    /// failed.
    pub fn resume(&mut self, origin: Origin) -> Result<(), BindError> {
        self.check_origin(origin)?;
        if origin.generation != self.durable_mark.origin.generation {
            return Err(BindError::Generation {
                given: origin.generation,
                current: self.durable_mark.origin.generation,
            });
        }
        if self.durable_mark.settled {
            return Err(BindError::Settled { released: self.released });
        }
        let entries = self.repair(true)?;
        self.bind(Mark { origin, ..self.mark() }, Adoption::of(&entries))
    }

    /// Records the result of a recovery that has undone and flushed everywhere (T9): groups up to
    /// `k` are released; `tag` is the caller's tag of group `k`. The entries beyond `k` have been
    /// undone, or are of in-place writes. They stay listed until the log is [emptied](Self::forget)
    /// or [started](Self::start). Nothing is appended until the log is started. Durable before it
    /// returns.
    ///
    /// A settled log may be settled again at the same group, and keeps its tag.
    ///
    /// # Errors
    ///
    /// Groups beyond `k` are released, the log is settled at another group, or the region failed.
    pub fn settle(&mut self, k: Seq, tag: u64) -> Result<(), SettleError> {
        self.check_region()?;
        let settled = self.durable_mark.settled;
        if settled && k != self.released {
            return Err(SettleError::Settled { k, settled: self.released });
        }
        if k < self.released {
            return Err(SettleError::Released { k, released: self.released });
        }
        let tag = if settled { self.durable_mark.tag } else { (k, tag) };
        self.unbind();
        Ok(self.write_both_marks(Mark { released: k, tag, settled: true, ..self.mark() })?)
    }

    /// Settles a settled log again, at a later group. Only for a log that was given up (T26). Durable
    /// before it returns.
    ///
    /// # Errors
    ///
    /// Groups beyond `k` are released, or the region failed.
    pub fn settle_later(&mut self, k: Seq, tag: u64) -> Result<(), SettleError> {
        self.check_region()?;
        if k < self.released {
            return Err(SettleError::Released { k, released: self.released });
        }
        self.unbind();
        Ok(self.write_both_marks(Mark {
            released: k,
            tag: (k, tag),
            settled: true,
            ..self.mark()
        })?)
    }

    /// Empties a [settled](Self::settle) log, when none of its entries must be acknowledged any more
    /// (T11). The log stays settled until it is [started](Self::start). Durable before it returns. A
    /// second call changes nothing.
    ///
    /// # Errors
    ///
    /// The log is not settled, or the region failed.
    pub fn forget(&mut self) -> Result<(), ForgetError> {
        self.check_region()?;
        if !self.durable_mark.settled {
            return Err(ForgetError::NotSettled);
        }
        self.repair(false)?;
        Ok(self.write_both_marks(Mark { head: self.next, ..self.mark() })?)
    }

    /// Refuses an incarnation that is older than the log's.
    fn check_origin(&self, origin: Origin) -> Result<(), BindError> {
        self.check_region()?;
        let current = self.durable_mark.origin.incarnation;
        if origin.incarnation < current {
            return Err(BindError::Incarnation { given: origin.incarnation, current });
        }
        Ok(())
    }

    /// Cleans up after a crash: slots with torn entries become blank. Returns the live entries.
    ///
    /// With `keeps_entries`, the live entries stay in use. Then the log also ends at its first hole,
    /// so that the entries behind the hole become blank. Persist words of older laps become 0.
    fn repair(&mut self, keeps_entries: bool) -> Result<Vec<LoggedEntry>, RegionError> {
        // The scan at the opening found no damage. So if this scan finds damage, the region does not
        // store what is written to it.
        let (mut found, slots) = scan(&self.region, &self.mark(), self.crc)
            .map_err(|_| RegionError::new("it does not hold what was written to it"))?;
        let mut to_blank = slots.torn;
        let hole = slots.ends.iter().position(|end| *end == End::HOLE);
        let must_cut = keeps_entries && !probe::planted(Plant::T7NoCut);
        if must_cut && let Some(hole) = hole.map(|at| self.head + at as u64) {
            probe::hit(Rare::Cut);
            let after = (self.head..).zip(&slots.ends).filter(|&(position, _)| position > hole);
            let whole = after.filter(|(_, end)| **end != End::HOLE);
            to_blank.extend(whole.map(|(position, _)| self.slot_of(Position(position))));
            self.next = hole;
            self.next_slot = self.slot_of(Position(hole));
        }
        if !to_blank.is_empty() {
            // The checksums become 0 first. Otherwise a crash could leave a slot in which words that
            // are 0 already form a whole entry with the words of the torn one.
            for &slot in &to_blank {
                self.region.write_word(slot_offset(slot) + 8, 0);
            }
            self.fence_region()?;
        }
        for slot in to_blank {
            self.region.write(slot_offset(slot), &[0; ENTRY_BYTES]);
        }
        if keeps_entries {
            found.entries.retain(|entry| entry.position.0 < self.next);
            let invalid = slots.invalid.into_iter().filter(|position| position.0 < self.next);
            for position in invalid.filter(|_| !probe::planted(Plant::T7InvalidWordKept)) {
                self.region.write_word(slot_offset(self.slot_of(position)), 0);
            }
        }
        self.fence_region()?;
        Ok(found.entries)
    }

    /// Begins a binding with this mark, durably. Appends are allowed from now on.
    fn bind(&mut self, mark: Mark, adoption: Adoption) -> Result<(), BindError> {
        self.write_both_marks(Mark { settled: false, ..mark })?;
        self.binding_start = self.next;
        self.last_adoptable = adoption.last();
        self.adoption = adoption;
        self.append_limit = self.head + u64::from(self.slots);
        self.state = State::Bound;
        Ok(())
    }

    /// Nothing more is appended until the next binding.
    fn unbind(&mut self) {
        self.binding_start = self.next;
        self.last_adoptable = Seq::ZERO;
        self.adoption = Adoption::default();
        self.append_limit = 0;
        self.state = State::Unbound;
    }
}
