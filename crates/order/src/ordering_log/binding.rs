//! The steps from one owner or incarnation of the target to the next: starting, resuming, and the
//! records of recovery in between (P7, T9). All of them are rare and durable before they return. A
//! crash in the middle leaves the log as it was before or as it is after.

use alloc::vec::Vec;

use super::adoption::Adoption;
use super::error::{BindError, ForgetError, SettleError};
use super::mark::Mark;
use super::scan::{End, LoggedEntry, scan};
use super::{State, StreamLog, offset};
use crate::attribute::Seq;
use crate::entry::{ENTRY_BYTES, Origin, Position};
use crate::probe::{self, Plant, Rare};
use crate::region::{Region, RegionError};

impl<R: Region> StreamLog<R> {
    /// Begins anew: every entry so far is dead, groups up to `released` are done with, and the log
    /// is not settled any more. Call it on a clean log, or when recovery has undone and flushed
    /// everywhere, and settled all logs (T9). Durable before it returns.
    ///
    /// Group numbers go on across generations; `released` is taken as it is. The newest
    /// [tag](Self::tag) up to it stays known.
    ///
    /// # Errors
    ///
    /// The generation is older than the log's, or the region failed.
    pub fn start(&mut self, origin: Origin, released: Seq) -> Result<(), BindError> {
        self.check_origin(origin)?;
        if origin.generation < self.durable.origin.generation {
            return Err(BindError::Generation {
                given: origin.generation,
                current: self.durable.origin.generation,
            });
        }
        self.repair(false)?;
        let (head, tag) = (self.next, self.tag_up_to(released));
        self.bind(Mark { origin, head, released, tag, ..self.mark() }, Adoption::default())
    }

    /// Goes on after the target's restart or a lost connection, with the same owner: the entries
    /// beyond the released mark stay, and the owner replays those that are not durable, in order,
    /// before anything new (P7, T4). [`append`](Self::append) adopts the entries that are in the
    /// log already.
    ///
    /// Where a crash has torn an append, this entry and all behind it are dropped: no fence came
    /// after them, so nothing was submitted for any of them. So the log keeps no holes, the
    /// replayed entries fit (T13), and a later scan can distinguish new damage from old. Durable
    /// before it returns.
    ///
    /// # Errors
    ///
    /// Another generation than the log's, an older incarnation, the log is settled, or the region
    /// failed.
    pub fn resume(&mut self, origin: Origin) -> Result<(), BindError> {
        self.check_origin(origin)?;
        if origin.generation != self.durable.origin.generation {
            return Err(BindError::Generation {
                given: origin.generation,
                current: self.durable.origin.generation,
            });
        }
        if self.durable.settled {
            return Err(BindError::Settled { released: self.released });
        }
        let entries = self.repair(true)?;
        self.bind(Mark { origin, ..self.mark() }, Adoption::of(&entries))
    }

    /// Records the result of a recovery that has undone and flushed everywhere (T9): groups up to
    /// `k`, the last of which has the caller's tag `tag`, stay and are released. An entry beyond
    /// `k` has been undone, or is an in-place update. Those entries stay listed until the log is
    /// [emptied](Self::forget) or [started](Self::start); nothing is appended until then. Durable
    /// before it returns.
    ///
    /// Settling again at the same group is fine, and keeps the tag.
    ///
    /// # Errors
    ///
    /// Groups beyond `k` are released, the log is settled at another group, or the region failed.
    pub fn settle(&mut self, k: Seq, tag: u64) -> Result<(), SettleError> {
        self.check_region()?;
        let settled = self.durable.settled;
        if settled && k != self.released {
            return Err(SettleError::Settled { k, settled: self.released });
        }
        if k < self.released {
            return Err(SettleError::Released { k, released: self.released });
        }
        let tag = if settled { self.durable.tag } else { (k, tag) };
        self.unbind();
        Ok(self.change(Mark { released: k, tag, settled: true, ..self.mark() })?)
    }

    /// Settles a settled log again, at a later group: only where a log is given up (T26). Durable
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
        Ok(self.change(Mark { released: k, tag: (k, tag), settled: true, ..self.mark() })?)
    }

    /// Empties a [settled](Self::settle) log, once nothing in it needs to be acknowledged (T11).
    /// It stays settled until it is [started](Self::start). Durable before it returns; done again,
    /// it changes nothing.
    ///
    /// # Errors
    ///
    /// The log is not settled, or the region failed.
    pub fn forget(&mut self) -> Result<(), ForgetError> {
        self.check_region()?;
        if !self.durable.settled {
            return Err(ForgetError::NotSettled);
        }
        self.repair(false)?;
        Ok(self.change(Mark { head: self.next, ..self.mark() })?)
    }

    /// Refuses an incarnation that is older than the log's.
    fn check_origin(&self, origin: Origin) -> Result<(), BindError> {
        self.check_region()?;
        let current = self.durable.origin.incarnation;
        if origin.incarnation < current {
            return Err(BindError::Incarnation { given: origin.incarnation, current });
        }
        Ok(())
    }

    /// Cleans up after torn appends: slots that are neither blank nor whole become blank.
    /// `keeps_entries`: the live entries stay in use. The ring is then cut at its first hole, and
    /// persist words of older laps become 0. Returns the live entries.
    fn repair(&mut self, keeps_entries: bool) -> Result<Vec<LoggedEntry>, RegionError> {
        // A damaged partition cannot have been opened. So if this scan refuses it, the region has
        // failed.
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
            // The checksum goes first. Else words that become 0 might complete a torn entry.
            for &slot in &to_blank {
                self.region.write_word(offset(slot) + 8, 0);
            }
            self.fence_region()?;
        }
        for slot in to_blank {
            self.region.write(offset(slot), &[0; ENTRY_BYTES]);
        }
        if keeps_entries {
            found.entries.retain(|entry| entry.position.0 < self.next);
            let invalid = slots.invalid.into_iter().filter(|position| position.0 < self.next);
            for position in invalid.filter(|_| !probe::planted(Plant::T7InvalidWordKept)) {
                self.region.write_word(offset(self.slot_of(position)), 0);
            }
        }
        self.fence_region()?;
        Ok(found.entries)
    }

    /// Begins a binding with this mark, durably. Appends are allowed from now on.
    fn bind(&mut self, mark: Mark, adoption: Adoption) -> Result<(), BindError> {
        self.change(Mark { settled: false, ..mark })?;
        self.bound_from = self.next;
        self.adoptable = adoption.last();
        self.adoption = adoption;
        self.limit = self.head + u64::from(self.slots);
        self.state = State::Bound;
        Ok(())
    }

    /// Nothing more is appended until the next binding.
    fn unbind(&mut self) {
        self.bound_from = self.next;
        self.adoptable = Seq::ZERO;
        self.adoption = Adoption::default();
        self.limit = 0;
        self.state = State::Unbound;
    }
}
