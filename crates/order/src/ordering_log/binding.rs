//! The changes of a log when the owner or the incarnation of the target changes.
//!
//! ```text
//!            same owner: resume
//!  unbound ----------------------------------------------> bound
//!     |                                                      ^
//!     `-- another owner, after the undo:                     |
//!         settle --> remove_entries --> settled and empty -- start
//! ```
//!
//! All changes are rare, and durable before they return. A crash in the middle leaves the state
//! before the change or the state after it.

use alloc::vec::Vec;

use super::adoption::Adoption;
use super::error::{BindError, ForgetError, SettleError};
use super::mark::Mark;
use super::scan::{HOLE, LoggedEntry, Slots, scan};
use super::{Binding, StreamLog, slot_offset};
use crate::attribute::{GroupTag, Seq};
use crate::entry::{ENTRY_BYTES, Origin, Position};
use crate::probe::{self, Plant, Rare};
use crate::region::{Region, RegionError};

/// The use of the live entries after a repair.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LiveEntries {
    /// The log goes on with them.
    Keep,
    /// The log drops them afterwards.
    Drop,
}

/// The offset in a slot of the word that has the checksum.
const CHECKSUM_WORD_AT: usize = 8;

impl<R: Region> StreamLog<R> {
    /// Begins a binding with an empty log: drops all entries, sets the released mark to `released`,
    /// and ends the settled state. The change is durable before this returns.
    ///
    /// The log must be without entries, or recovery must have undone and flushed everywhere and
    /// have settled all logs. Otherwise a crash would leave groups that no log lists any more (trap
    /// T9).
    ///
    /// The numbers of groups continue across generations, so the caller passes `released`. The
    /// [newest tag](Self::newest_tag) up to `released` stays known.
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
        self.repair(LiveEntries::Drop)?;
        let newest_tag = self.newest_tag_up_to(released);
        let mark = Mark { origin, head: self.next, released, newest_tag, ..self.mark() };
        self.bind(mark, Adoption::default())
    }

    /// Begins a binding with the entries that the log has, for the same owner, after a restart of
    /// the target or the loss of a connection. The change is durable before this returns. The owner
    /// replays the entries that are not durable, in order, before anything new, and
    /// [`append`](Self::append) adopts the entries that are in the log already.
    ///
    /// If a crash has torn an append, that entry and all later ones are dropped. No fence came
    /// after them, so no write was submitted for any of them. The log has no holes afterwards. So
    /// the replayed entries fit, and a hole that a later scan finds is new damage.
    ///
    /// # Errors
    ///
    /// The generation is not the log's, the incarnation is older than the log's, the log is
    /// settled, or the region failed.
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
        let entries = self.repair(LiveEntries::Keep)?;
        self.bind(Mark { origin, ..self.mark() }, Adoption::new(&entries))
    }

    /// Records the result of a recovery that has undone and flushed everywhere: the groups up to
    /// `k` are released, and `tag` is the caller's tag of group `k`. The record is durable before
    /// this returns. The log accepts no appends until it is [started](Self::start).
    ///
    /// The entries beyond `k` have been undone, or are of in-place writes. They stay listed until
    /// the log is [emptied](Self::remove_entries) or started.
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
        let newest_tag = if settled { self.durable_mark.newest_tag } else { GroupTag::new(k, tag) };
        self.unbind();
        Ok(self.write_both_marks(Mark { released: k, newest_tag, settled: true, ..self.mark() })?)
    }

    /// Settles a settled log again, at a later group. Only a log that was given up may need this,
    /// because it may have been settled long ago. The record is durable before this returns.
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
            newest_tag: GroupTag::new(k, tag),
            settled: true,
            ..self.mark()
        })?)
    }

    /// Removes all entries of a [settled](Self::settle) log. The caller must have acknowledged the
    /// in-place writes among them. The change is durable before this returns. The log stays settled
    /// until it is [started](Self::start). A second call changes nothing.
    ///
    /// # Errors
    ///
    /// The log is not settled, or the region failed.
    pub fn remove_entries(&mut self) -> Result<(), ForgetError> {
        self.check_region()?;
        if !self.durable_mark.settled {
            return Err(ForgetError::NotSettled);
        }
        self.repair(LiveEntries::Drop)?;
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

    /// Repairs the slots after a crash, and returns the live entries.
    ///
    /// Slots with torn entries become blank. If the live entries are kept, the log is also cut at
    /// its first hole, and invalid persist words become 0.
    fn repair(&mut self, live_entries: LiveEntries) -> Result<Vec<LoggedEntry>, RegionError> {
        // The scan at the opening found no damage. If this scan finds damage, the region does not
        // store what is written to it.
        let (mut found, slots) = scan(&self.region, &self.mark(), self.crc)
            .map_err(|_| RegionError::new("it does not hold what was written to it"))?;
        let keeps_entries = live_entries == LiveEntries::Keep;
        let mut slots_to_blank = slots.torn.clone();
        if keeps_entries && !probe::is_bug_planted(Plant::T7NoCut) {
            self.cut_at_first_hole(&slots, &mut slots_to_blank);
        }
        self.blank_slots(&slots_to_blank)?;
        if keeps_entries {
            found.entries.retain(|entry| entry.position.0 < self.next);
            self.clear_persist_words(&slots.invalid);
        }
        self.fence_region()?;
        Ok(found.entries)
    }

    /// Ends the log at its first hole, if it has one. Adds the slots of the whole entries behind
    /// the hole to `slots_to_blank`.
    fn cut_at_first_hole(&mut self, slots: &Slots, slots_to_blank: &mut Vec<u32>) {
        let Some(index) = slots.ends.iter().position(|end| *end == HOLE) else { return };
        probe::count_rare(Rare::Cut);
        let hole = self.head + index as u64;
        for (position, end) in (self.head..).zip(&slots.ends) {
            if position > hole && *end != HOLE {
                slots_to_blank.push(self.slot_of(Position(position)));
            }
        }
        self.next = hole;
        self.next_slot = self.slot_of(Position(hole));
    }

    /// Zeroes these slots. The caller fences afterwards.
    fn blank_slots(&mut self, slots: &[u32]) -> Result<(), RegionError> {
        if slots.is_empty() {
            return Ok(());
        }
        // The checksums become 0 first. Otherwise a crash could leave a slot in which words that
        // are 0 already form a whole entry with the words of the torn one.
        for &slot in slots {
            self.region.write_word(slot_offset(slot) + CHECKSUM_WORD_AT, 0);
        }
        self.fence_region()?;
        for &slot in slots {
            self.region.write(slot_offset(slot), &[0; ENTRY_BYTES]);
        }
        Ok(())
    }

    /// Sets the persist words of the entries at these positions to 0, because an older lap has left
    /// them. Entries that the log has cut off are blank already.
    fn clear_persist_words(&mut self, positions: &[Position]) {
        if probe::is_bug_planted(Plant::T7InvalidWordKept) {
            return;
        }
        for position in positions.iter().filter(|position| position.0 < self.next) {
            self.region.write_word(slot_offset(self.slot_of(*position)), 0);
        }
    }

    /// Begins a binding with this mark, durably. The log accepts appends from now on.
    fn bind(&mut self, mark: Mark, adoption: Adoption) -> Result<(), BindError> {
        self.write_both_marks(Mark { settled: false, ..mark })?;
        self.binding_start = self.next;
        self.last_adoptable = adoption.last_group();
        self.adoption = adoption;
        self.append_limit = self.head + u64::from(self.slots);
        self.binding = Binding::Bound;
        Ok(())
    }

    /// Ends the binding. The log accepts no appends until the next one.
    fn unbind(&mut self) {
        self.binding_start = self.next;
        self.last_adoptable = Seq::ZERO;
        self.adoption = Adoption::default();
        self.append_limit = 0;
        self.binding = Binding::Unbound;
    }
}
