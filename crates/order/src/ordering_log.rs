//! The ordering log of one stream on one server: a circular log of attributes (paper §4.3.2).
//!
//! A [`StreamLog`] is one *partition* of a log region: two copies of a mark, and a ring of 64-byte
//! slots (`docs/log-format.md`). For each ordered request, the target
//!
//! 1. appends the attribute and fences, before it submits the write;
//! 2. stores the persist word and fences, before it answers (T7);
//! 3. uses the slot again only after the initiator has released the group *and* the mark with that
//!    release is durable (T1).
//!
//! Each append has a *position*, counted without end:
//!
//! ```text
//!    durable head       head            fenced          next       append_limit
//!  -------+---------------+---------------+---------------+---------------+--->
//!         |   released,   |    durable    |  not durable  |     free      |
//!         | slots not yet |    appends    |  appends yet  |     slots     |
//!         |     free      |               |               |               |
//! ```
//!
//! `append_limit` is the durable head plus the number of slots.
//!
//! When the owner or the incarnation of the target changes, there are two ways to go on. The same
//! owner [resumes](StreamLog::resume) the log. Otherwise recovery undoes the groups beyond the
//! prefix; then the log is [settled](StreamLog::settle), [emptied](StreamLog::forget) and
//! [started](StreamLog::start) anew.

use alloc::vec;
use alloc::vec::Vec;
use core::mem;

use crate::attribute::{Attribute, Seq};
use crate::entry::{ENTRY_BYTES, Entry, Origin, PartitionId, Position, Unfenced, encode, loggable};
use crate::probe::{self, Plant, Rare};
use crate::region::{Crc32c, Region, RegionError};
use adoption::Adoption;
pub use error::{AppendError, BindError, Damage, ForgetError, FormatError, LogError, SettleError};
use mark::{MARK_BYTES, Mark};
use scan::{End, SLOTS_AT, read_mark, scan};
pub use scan::{LoggedEntry, Scan};

mod adoption;
mod binding;
mod error;
mod mark;
mod scan;

use error::TooSmall;

/// Bytes that a partition with this many slots takes.
#[must_use]
pub const fn partition_bytes(slots: u32) -> usize {
    SLOTS_AT + slots as usize * ENTRY_BYTES
}

/// The fewest slots of a partition.
pub const SLOTS_MIN: u32 = 4;
/// The most slots of a partition. The positions of one lap must fit well inside 32 bits.
pub const SLOTS_MAX: u32 = 1 << 24;

#[derive(Debug)]
enum State {
    /// It is not started or resumed, so nothing may be appended.
    Unbound,
    /// It is started or resumed.
    Bound,
    /// A fence has failed, so nothing can be recorded any more.
    Failed(RegionError),
}

/// One partition: the log of one stream on one server.
#[derive(Debug)]
pub struct StreamLog<R> {
    region: R,
    crc: Crc32c,
    /// The value from which the checksum of each entry starts. It follows from the identity of the
    /// partition.
    checksum_seed: u32,
    /// The number of slots.
    slots: u32,
    state: State,
    /// For each slot: the last group of the entry that was appended there, and its tag.
    ends: Vec<End>,
    /// The position of the next append.
    next: u64,
    /// The slot of `next`.
    next_slot: u32,
    /// Appends stop at this position: the head of the durable mark plus `slots`; 0 while nothing may
    /// be appended.
    append_limit: u64,
    /// The first position that is not released, by the mark in memory.
    head: u64,
    /// The slot of `head`.
    head_slot: u32,
    /// All appends before this position are durable.
    fenced: u64,
    /// The first position of this binding. Entries before it belong to older bindings.
    binding_start: u64,
    /// The released mark in memory.
    released: Seq,
    /// The newest released group before `head`, and the caller's tag of it.
    tag: (Seq, u64),
    /// The mark as it was last written to the region.
    durable_mark: Mark,
    /// The copy of the mark that is written next was torn by a crash.
    next_copy_is_torn: bool,
    /// The last group that has entries in `adoption`; 0 if there is none. It saves most appends a
    /// search there.
    last_adoptable: Seq,
    /// The entries of older bindings.
    adoption: Adoption,
}

impl<R: Region> StreamLog<R> {
    /// Makes a new, empty partition of the whole region, durable before it returns. The old content
    /// of the region is lost.
    ///
    /// # Errors
    ///
    /// [`FormatError::TooSmall`] for less than [`SLOTS_MIN`] slots, or the region failed.
    pub fn format(
        mut region: R,
        id: PartitionId,
        generation: u32,
        crc: Crc32c,
    ) -> Result<Self, FormatError> {
        let slots = slots_of(&region)?;
        // The marks are zeroed first, and the new mark is written last. So a crash in between leaves
        // a blank partition, and never a new mark with old entries.
        const ZEROES: [u8; 4096] = [0; 4096];
        let len = partition_bytes(slots);
        for at in (0..len).step_by(ZEROES.len()) {
            region.write(at, &ZEROES[..ZEROES.len().min(len - at)]);
            if at == 0 {
                region.fence()?;
            }
        }
        region.fence()?;
        let mark = Mark {
            number: 0,
            released: Seq::ZERO,
            head: 0,
            origin: Origin { generation, incarnation: 0 },
            id,
            slots,
            tag: (Seq::ZERO, 0),
            settled: false,
        };
        let mut log = Self::from_mark(region, mark, crc);
        log.write_both_marks(mark)?;
        Ok(log)
    }

    /// Reads an existing partition. Nothing is written; appending needs [`start`](Self::start)
    /// or [`resume`](Self::resume) first.
    ///
    /// # Errors
    ///
    /// See [`LogError`]: bytes that are not surely this partition, whole, are refused (T19).
    pub fn open(region: R, id: PartitionId, crc: Crc32c) -> Result<(Self, Scan), LogError> {
        let slots = slots_of(&region)?;
        let (mark, torn) = read_mark(&region, id, slots, crc)?;
        let (found, slots) = scan(&region, &mark, crc)?;
        let mut log = Self::from_mark(region, mark, crc);
        log.next_copy_is_torn = torn;
        for end in slots.ends {
            log.count_append(end);
        }
        log.advance_head();
        log.fenced = log.next;
        log.binding_start = log.next;
        Ok((log, found))
    }

    /// An unbound log with this mark, and without entries.
    fn from_mark(region: R, mark: Mark, crc: Crc32c) -> Self {
        let slot = (mark.head % u64::from(mark.slots)) as u32;
        Self {
            region,
            crc,
            checksum_seed: mark.id.seed(crc),
            slots: mark.slots,
            state: State::Unbound,
            ends: vec![End::HOLE; mark.slots as usize],
            next: mark.head,
            next_slot: slot,
            append_limit: 0,
            head: mark.head,
            head_slot: slot,
            fenced: mark.head,
            binding_start: mark.head,
            released: mark.released,
            tag: mark.tag,
            durable_mark: mark,
            next_copy_is_torn: false,
            last_adoptable: Seq::ZERO,
            adoption: Adoption::default(),
        }
    }

    /// Appends an entry with its persist word unset. Durable after the next
    /// [`fence`](Self::fence), and only then may the write be submitted.
    ///
    /// An entry that a [resumed](Self::resume) log has already is *adopted*: its old position is
    /// returned, and nothing is written. So a full log can be replayed, too (T13), and nothing is
    /// logged twice (T6).
    ///
    /// # Errors
    ///
    /// See [`AppendError`]; the log is unchanged.
    #[inline]
    pub fn append(&mut self, attribute: &Attribute) -> Result<Position, AppendError> {
        if !loggable(attribute) {
            return Err(AppendError::Unloggable { seq: attribute.seq });
        }
        if attribute.seq <= self.last_adoptable
            && let Some(adopted) = self.adopt(attribute)
        {
            return adopted;
        }
        if self.next >= self.append_limit {
            self.free_space()?;
        }
        let position = Position(self.next);
        let entry = Entry {
            position,
            origin: self.durable_mark.origin,
            unfenced: Unfenced::of(self.next - self.fenced),
            attribute: *attribute,
        };
        self.region
            .write(slot_offset(self.next_slot), &encode(&entry, self.checksum_seed, self.crc));
        self.count_append(End::of(attribute));
        if self.next_slot == 0 {
            probe::hit(Rare::LogLap);
        }
        Ok(position)
    }

    /// Records that the entry's data is durable (and, for a flushed entry, the data of the earlier
    /// entries that it covers, T4). The record is durable after the next [`fence`](Self::fence),
    /// and only then may the completion be sent (T7).
    ///
    /// # Panics
    ///
    /// If the entry was neither appended nor adopted in this binding.
    #[inline]
    pub fn persist(&mut self, position: Position) {
        if position.0 < self.binding_start {
            return self.persist_adopted(position);
        }
        assert!(position.0 < self.next, "{position:?} was not appended");
        self.write_persist_word(position, self.durable_mark.origin);
    }

    /// Makes all appends, persist words and marks so far durable.
    ///
    /// # Errors
    ///
    /// The region failed. The log is unusable from then on. Writes whose entries were appended
    /// since the last fence must not be submitted. Requests whose persist words were set since
    /// then must not be answered (P6).
    #[inline]
    pub fn fence(&mut self) -> Result<(), RegionError> {
        // If the mark in memory frees an eighth of the slots or more, this fence makes it durable,
        // too. Otherwise appends would have to stop for another fence at `append_limit`.
        self.check_region()?;
        if self.head - self.durable_mark.head >= u64::from(self.slots / 8).max(1) {
            return self.make_mark_durable();
        }
        self.fence_region()?;
        self.fenced = self.next;
        Ok(())
    }

    /// Records that groups up to `mark` are complete on all servers, durable and delivered (T1).
    /// The mark is made durable only when slots are needed. A smaller mark than before is ignored,
    /// and a settled log takes none.
    #[inline]
    pub fn release(&mut self, mark: Seq) {
        if mark > self.released && !self.durable_mark.settled {
            self.released = mark;
            self.advance_head();
            if self.last_adoptable > Seq::ZERO {
                self.adoption.release(mark);
                self.last_adoptable = self.adoption.last();
            }
        }
    }

    /// Like [`release`](Self::release), but durable before it returns: for the close of a volume.
    ///
    /// # Errors
    ///
    /// The region failed.
    pub fn release_now(&mut self, mark: Seq) -> Result<(), RegionError> {
        self.release(mark);
        self.check_region()?;
        if self.released > self.durable_mark.released || self.head > self.durable_mark.head {
            self.make_mark_durable()?;
        }
        Ok(())
    }

    /// Lists the live entries as they are now.
    ///
    /// # Errors
    ///
    /// See [`LogError`]; [`LogError::Region`] once a fence has failed, because the next incarnation
    /// of the target may find other bytes.
    pub fn scan(&self) -> Result<Scan, LogError> {
        self.check_region()?;
        Ok(scan(&self.region, &self.mark(), self.crc)?.0)
    }

    /// How many entries the partition can hold.
    #[must_use]
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// How many appends will succeed before more is released (T13).
    #[must_use]
    pub const fn free(&self) -> u32 {
        self.slots - (self.next - self.head) as u32
    }

    /// The released mark as last noted, durable or not; of a settled log, the k of its recovery.
    #[must_use]
    pub const fn released(&self) -> Seq {
        self.released
    }

    /// The newest released group that was ever logged here, and the caller's tag of it; seq 0 if
    /// there is none.
    #[must_use]
    pub fn tag(&self) -> (Seq, u64) {
        self.tag_up_to(self.released)
    }

    /// Whether recovery has [settled](Self::settle) the log and no owner has started it since.
    #[must_use]
    pub const fn is_settled(&self) -> bool {
        self.durable_mark.settled
    }

    /// Whether the region has failed: nothing can be recorded any more.
    #[must_use]
    pub const fn has_failed(&self) -> bool {
        matches!(self.state, State::Failed(_))
    }

    /// The generation and incarnation of the binding.
    #[must_use]
    pub const fn origin(&self) -> Origin {
        self.durable_mark.origin
    }

    /// The identity of the partition.
    #[must_use]
    pub const fn id(&self) -> PartitionId {
        self.durable_mark.id
    }

    /// The region of the partition.
    #[must_use]
    pub const fn region(&self) -> &R {
        &self.region
    }

    /// Returns the region itself.
    #[must_use]
    pub fn into_region(self) -> R {
        self.region
    }

    /// Makes slots available for appends: writes a mark, so that the slots of released entries may
    /// be used again (T1).
    #[cold]
    fn free_space(&mut self) -> Result<(), AppendError> {
        match &self.state {
            State::Unbound => return Err(AppendError::Unbound),
            State::Failed(error) => return Err(error.clone().into()),
            State::Bound => {}
        }
        if self.free() == 0 {
            return Err(AppendError::Full { slots: self.slots, released: self.released });
        }
        probe::hit(Rare::MarkForSpace);
        if probe::planted(Plant::T1ReuseBeforeMark) {
            self.append_limit = self.head + u64::from(self.slots);
            return Ok(());
        }
        self.make_mark_durable()?;
        Ok(())
    }

    /// The position of an entry that the resumed log has already (T6); `None` if it has no such
    /// entry.
    #[cold]
    fn adopt(&self, attribute: &Attribute) -> Option<Result<Position, AppendError>> {
        if !matches!(self.state, State::Bound) || probe::planted(Plant::T6CountTwice) {
            return None;
        }
        let adopted = self.adoption.find(attribute)?;
        if adopted.is_ok() {
            probe::hit(Rare::Adopted);
        }
        Some(adopted)
    }

    /// Records that the data of an adopted entry is durable. Its persist word must match the
    /// binding that appended the entry.
    #[cold]
    fn persist_adopted(&mut self, position: Position) {
        let origin = self.adoption.origin_of(position);
        let origin = origin.unwrap_or_else(|| panic!("{position:?} is not of this binding"));
        self.write_persist_word(position, origin);
    }

    /// Stores the persist word of an entry, unless its slot has been used again.
    #[inline]
    fn write_persist_word(&mut self, position: Position, origin: Origin) {
        // A mark may release an entry whose write is still in flight. Then a later entry may have
        // its slot.
        let appends_since = self.next - position.0;
        if appends_since <= u64::from(self.slots) {
            // The slot is counted back from the next one. A division, `position % slots`, would
            // cost more than all the rest.
            let (back, next) = (appends_since as u32, self.next_slot);
            let slot = if back <= next { next - back } else { next + self.slots - back };
            self.region.write_word(slot_offset(slot), origin.stamp(position));
        }
    }

    /// Fails if an earlier fence of the region has failed.
    #[inline]
    fn check_region(&self) -> Result<(), RegionError> {
        match &self.state {
            State::Failed(error) => Err(error.clone()),
            State::Unbound | State::Bound => Ok(()),
        }
    }

    /// Writes the mark in memory to the region and fences. This makes everything else durable, too.
    #[cold]
    fn make_mark_durable(&mut self) -> Result<(), RegionError> {
        self.write_mark_copy(self.mark())?;
        self.fenced = self.next;
        if matches!(self.state, State::Bound) {
            self.append_limit = self.head + u64::from(self.slots);
        }
        Ok(())
    }

    /// Writes both copies of the mark, one after the other. This is for rare changes, which must
    /// survive the damage of one copy. The change is made as soon as the first copy is durable.
    fn write_both_marks(&mut self, mark: Mark) -> Result<(), RegionError> {
        self.write_mark_copy(mark)?;
        (self.released, self.tag) = (mark.released, mark.tag);
        self.head = mark.head;
        self.head_slot = self.slot_of(Position(mark.head));
        self.write_mark_copy(mark)?;
        self.fenced = self.next;
        Ok(())
    }

    /// The newest group up to `released` that the log holds or has passed, and its tag.
    fn tag_up_to(&self, released: Seq) -> (Seq, u64) {
        let mut tag = if self.tag.0 <= released { self.tag } else { (Seq::ZERO, 0) };
        for position in self.head..self.next {
            self.ends[self.slot_of(Position(position)) as usize].update_newest(released, &mut tag);
        }
        tag
    }

    /// The mark in memory.
    const fn mark(&self) -> Mark {
        Mark { head: self.head, released: self.released, tag: self.tag, ..self.durable_mark }
    }

    /// Writes the older of the two copies of the mark anew, and fences.
    fn write_mark_copy(&mut self, mark: Mark) -> Result<(), RegionError> {
        let mark = Mark { number: self.durable_mark.number + 1, ..mark };
        let at = (mark.number % 2) as usize * MARK_BYTES;
        if mem::take(&mut self.next_copy_is_torn) {
            // The torn copy has some words of an earlier mark. If the power fails again while this
            // mark is written, these words and some of the new ones could form a whole mark. So its
            // checksum is destroyed first.
            self.region.write_word(at, 0);
            self.fence_region()?;
        }
        self.region.write(at, &mark.encode(self.crc));
        self.fence_region()?;
        self.durable_mark = mark;
        Ok(())
    }

    /// Fences the region. If that fails, the log is unusable from then on.
    #[inline]
    fn fence_region(&mut self) -> Result<(), RegionError> {
        self.region.fence().inspect_err(|error| {
            self.state = State::Failed(error.clone());
            self.append_limit = 0;
        })
    }

    /// Moves `head` behind the entries that are released.
    #[inline]
    fn advance_head(&mut self) {
        while self.head < self.next {
            let end = self.ends[self.head_slot as usize];
            if end.seq > self.released {
                break;
            }
            end.update_newest(self.released, &mut self.tag);
            self.head += 1;
            self.head_slot = self.slot_after(self.head_slot);
        }
    }

    /// Moves `next` behind an entry that has been written, or was found, at `next`.
    #[inline]
    fn count_append(&mut self, end: End) {
        self.ends[self.next_slot as usize] = end;
        self.next += 1;
        self.next_slot = self.slot_after(self.next_slot);
    }

    #[inline]
    const fn slot_of(&self, position: Position) -> u32 {
        (position.0 % self.slots as u64) as u32
    }

    /// The next slot in the ring.
    #[inline]
    const fn slot_after(&self, slot: u32) -> u32 {
        if slot + 1 == self.slots { 0 } else { slot + 1 }
    }
}

/// How many slots a partition of this region has.
fn slots_of<R: Region>(region: &R) -> Result<u32, TooSmall> {
    let have = region.len();
    let slots = have.saturating_sub(SLOTS_AT) / ENTRY_BYTES;
    if slots < SLOTS_MIN as usize {
        let need = partition_bytes(SLOTS_MIN);
        return Err(TooSmall { have, need });
    }
    Ok(slots.min(SLOTS_MAX as usize) as u32)
}

/// The offset of a slot in the partition.
#[inline]
const fn slot_offset(slot: u32) -> usize {
    SLOTS_AT + slot as usize * ENTRY_BYTES
}
