//! The ordering log of one stream on one server: a circular log of attributes (paper §4.3.2).
//!
//! A [`StreamLog`] is one *partition* of a log region: two copies of a mark, and a ring of 64-byte
//! slots (`docs/log-format.md`). For each ordered request, the target
//!
//! 1. appends the attribute and fences, before it submits the write;
//! 2. stores the persist word and fences, before it answers (trap T7);
//! 3. uses the slot again only after the initiator has released the group *and* the mark with that
//!    release is durable (trap T1).
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
//! When the owner or the incarnation of the target changes, the log needs a new *binding*:
//!
//! - The same owner [resumes](StreamLog::resume) the log, and replays what is not durable.
//! - For another owner, recovery undoes the groups beyond the prefix. Then the log is
//!   [settled](StreamLog::settle), [emptied](StreamLog::remove_entries) and
//!   [started](StreamLog::start).

use alloc::vec;
use alloc::vec::Vec;
use core::mem;

use crate::attribute::{Attribute, GroupTag, Seq};
use crate::entry::{ENTRY_BYTES, Entry, Origin, PartitionId, Position, Unfenced, encode, loggable};
use crate::probe::{self, Plant, Rare};
use crate::region::{Crc32c, Region, RegionError};
use adoption::Adoption;
pub use error::{AppendError, BindError, Damage, ForgetError, FormatError, LogError, SettleError};
use mark::{MARK_BYTES, Mark};
use scan::{FoundMark, HOLE, SLOTS_AT, read_mark, scan};
pub use scan::{LoggedEntry, Scan};

mod adoption;
mod binding;
mod error;
mod mark;
mod scan;

use error::TooSmall;

/// The size of a partition with this number of slots, in bytes.
#[must_use]
pub const fn partition_bytes(slots: u32) -> usize {
    SLOTS_AT + slots as usize * ENTRY_BYTES
}

/// The fewest slots of a partition.
pub const SLOTS_MIN: u32 = 4;
/// The most slots of a partition. The ordinals of entries have 32 bits, and must not repeat within
/// one lap of the ring.
pub const SLOTS_MAX: u32 = 1 << 24;

/// A fence also makes the mark durable if the mark frees at least the slots divided by this number.
const MARK_WITH_FENCE_DIVISOR: u32 = 8;

/// Whether the log accepts appends.
#[derive(Debug)]
enum Binding {
    /// The log is neither started nor resumed, so it accepts none.
    Unbound,
    /// The log is started or resumed.
    Bound,
    /// A fence has failed, so the log can record nothing any more.
    Failed(RegionError),
}

/// One partition: the log of one stream on one server.
///
/// The *mark* is the last group that the initiator has released, with the position (`head`) of the
/// first entry that is still needed. A *position* counts appends without end. The *slot* of a
/// position is its place in the ring, so a new lap begins after `slots` positions. The relation of
/// the positions is drawn in the [module](self).
#[derive(Debug)]
pub struct StreamLog<R> {
    region: R,
    crc: Crc32c,
    /// The value from which the checksum of each entry starts. It follows from the identity of the
    /// partition.
    checksum_seed: u32,
    /// The number of slots.
    slots: u32,
    binding: Binding,
    /// For each slot, the group of the entry that was appended there last. For an entry of several
    /// groups, this is the last one of them.
    ends: Vec<GroupTag>,
    /// The position of the next append.
    next: u64,
    /// The slot of `next`.
    next_slot: u32,
    /// Appends must stop before this position. It is the head of the durable mark plus `slots`, or
    /// 0 while nothing may be appended.
    append_limit: u64,
    /// The first position that is not released, by the mark in memory.
    head: u64,
    /// The slot of `head`.
    head_slot: u32,
    /// All appends before this position are durable.
    fenced: u64,
    /// The first position of this binding. Entries before it belong to older bindings.
    binding_start: u64,
    /// All entries of this binding before this position have been recorded as durable by
    /// [`persist_up_to`](Self::persist_up_to).
    persisted: u64,
    /// The released mark in memory.
    released: Seq,
    /// The newest group with an entry before `head`, and the tag that the caller gave to the group.
    newest_tag: GroupTag,
    /// The mark as it was last written to the region.
    durable_mark: Mark,
    /// Whether a crash has torn the copy of the mark that is written next.
    next_copy_is_torn: bool,
    /// The last group that has entries in `adoption`; 0 if there is none. An append of a later group
    /// needs no search there.
    last_adoptable: Seq,
    /// The entries of older bindings, for a replay.
    adoption: Adoption,
}

impl<R: Region> StreamLog<R> {
    /// Makes the whole region a new, empty partition. The partition is durable before this returns.
    /// The old content of the region is lost.
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
        let slots = slot_count(&region)?;
        // The first chunk has both marks. It is zeroed first, and the new mark is written last. So
        // a crash in between leaves a blank partition, and never a new mark with old entries.
        const ZEROES: [u8; 4096] = [0; 4096];
        let len = partition_bytes(slots);
        for offset in (0..len).step_by(ZEROES.len()) {
            region.write(offset, &ZEROES[..ZEROES.len().min(len - offset)]);
            if offset == 0 {
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
            newest_tag: GroupTag::NONE,
            settled: false,
        };
        let mut log = Self::from_mark(region, mark, crc);
        log.write_both_marks(mark)?;
        Ok(log)
    }

    /// Reads an existing partition. Nothing is written. The log accepts appends only after
    /// [`start`](Self::start) or [`resume`](Self::resume).
    ///
    /// # Errors
    ///
    /// See [`LogError`]. A partition that is damaged, or is another one, is refused.
    pub fn open(region: R, id: PartitionId, crc: Crc32c) -> Result<(Self, Scan), LogError> {
        let slot_count = slot_count(&region)?;
        let FoundMark { mark, is_other_copy_torn } = read_mark(&region, id, slot_count, crc)?;
        let (found, slots) = scan(&region, &mark, crc)?;
        let mut log = Self::from_mark(region, mark, crc);
        log.next_copy_is_torn = is_other_copy_torn;
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
        let head_slot = (mark.head % u64::from(mark.slots)) as u32;
        Self {
            region,
            crc,
            checksum_seed: mark.id.seed(crc),
            slots: mark.slots,
            binding: Binding::Unbound,
            ends: vec![HOLE; mark.slots as usize],
            next: mark.head,
            next_slot: head_slot,
            append_limit: 0,
            head: mark.head,
            head_slot,
            fenced: mark.head,
            binding_start: mark.head,
            persisted: mark.head,
            released: mark.released,
            newest_tag: mark.newest_tag,
            durable_mark: mark,
            next_copy_is_torn: false,
            last_adoptable: Seq::ZERO,
            adoption: Adoption::default(),
        }
    }

    /// Appends an entry whose persist word is not set. The entry is durable after the next
    /// [`fence`](Self::fence), and only then may the caller submit the write.
    ///
    /// An entry that a [resumed](Self::resume) log has already is *adopted*: the old position is
    /// returned, and nothing is written. So no entry is logged twice, and a full log can be
    /// replayed.
    ///
    /// # Errors
    ///
    /// See [`AppendError`]. The log is unchanged.
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
        self.count_append(GroupTag::of_last_group(attribute));
        if self.next_slot == 0 {
            probe::count_rare(Rare::LogLap);
        }
        Ok(position)
    }

    /// Records that the data of the entry is durable, and for a flush entry the data of the earlier
    /// entries that it covers. The record is durable after the next [`fence`](Self::fence), and
    /// only then may the caller send the completion (trap T7).
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

    /// Records that the data of all groups up to `seq` is durable: sets the persist word of each of
    /// their entries. The entries stay in the log. The record is durable after the next
    /// [`fence`](Self::fence).
    ///
    /// The entries must have been appended in order of their groups, and in this binding.
    pub fn persist_up_to(&mut self, seq: Seq) {
        let mut position = self.persisted.max(self.head).max(self.binding_start);
        while position < self.next {
            if self.ends[self.slot_of(Position(position)) as usize].seq > seq {
                break;
            }
            self.write_persist_word(Position(position), self.durable_mark.origin);
            position += 1;
        }
        self.persisted = position;
    }

    /// Makes all appends, persist words and marks so far durable.
    ///
    /// # Errors
    ///
    /// The region failed, and the log is unusable from then on. The caller must not submit the
    /// writes whose entries were appended since the last fence, and must not answer the requests
    /// whose persist words were set since then.
    #[inline]
    pub fn fence(&mut self) -> Result<(), RegionError> {
        self.check_region()?;
        // If the mark in memory frees enough slots, this fence makes it durable, too. Otherwise an
        // append at `append_limit` would have to wait for another fence.
        let freed_slots = self.head - self.durable_mark.head;
        if freed_slots >= u64::from(self.slots / MARK_WITH_FENCE_DIVISOR).max(1) {
            return self.make_mark_durable();
        }
        self.fence_region()?;
        self.fenced = self.next;
        Ok(())
    }

    /// Records that the groups up to `mark` are complete on all servers, durable and delivered. The
    /// mark becomes durable later, when slots are needed. A mark that is not above the last one is
    /// ignored, and so is a mark for a settled log.
    #[inline]
    pub fn release(&mut self, mark: Seq) {
        if mark > self.released && !self.durable_mark.settled {
            self.released = mark;
            self.advance_head();
            if self.last_adoptable > Seq::ZERO {
                self.adoption.remove_released(mark);
                self.last_adoptable = self.adoption.last_group();
            }
        }
    }

    /// Like [`release`](Self::release), but the mark is durable before this returns. The close of a
    /// volume needs this.
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
    /// See [`LogError`]. After a failed fence the result is always [`LogError::Region`], because
    /// the next incarnation of the target may find other bytes.
    pub fn scan(&self) -> Result<Scan, LogError> {
        self.check_region()?;
        Ok(scan(&self.region, &self.mark(), self.crc)?.0)
    }

    /// The number of slots: the most entries that the partition can hold.
    #[must_use]
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// The number of appends that will succeed before more groups are released.
    #[must_use]
    pub const fn free_slots(&self) -> u32 {
        self.slots - (self.next - self.head) as u32
    }

    /// The released mark in memory, durable or not. For a settled log this is the recovered seq.
    #[must_use]
    pub const fn released(&self) -> Seq {
        self.released
    }

    /// The newest released group that was ever logged here, with the caller's tag.
    #[must_use]
    pub fn newest_tag(&self) -> GroupTag {
        self.newest_tag_up_to(self.released)
    }

    /// Whether recovery has [settled](Self::settle) the log and no owner has started it since.
    #[must_use]
    pub const fn is_settled(&self) -> bool {
        self.durable_mark.settled
    }

    /// Whether the region has failed, so that the log can record nothing any more.
    #[must_use]
    pub const fn has_failed(&self) -> bool {
        matches!(self.binding, Binding::Failed(_))
    }

    /// The generation and the incarnation of the last binding.
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

    /// Makes slots available for appends: makes the mark in memory durable, so that the slots of
    /// released entries may be used again (trap T1).
    #[cold]
    fn free_space(&mut self) -> Result<(), AppendError> {
        match &self.binding {
            Binding::Unbound => return Err(AppendError::Unbound),
            Binding::Failed(error) => return Err(error.clone().into()),
            Binding::Bound => {}
        }
        if self.free_slots() == 0 {
            return Err(AppendError::Full { slots: self.slots, released: self.released });
        }
        probe::count_rare(Rare::MarkForSpace);
        if probe::is_bug_planted(Plant::T1ReuseBeforeMark) {
            self.append_limit = self.head + u64::from(self.slots);
            return Ok(());
        }
        self.make_mark_durable()?;
        Ok(())
    }

    /// The position of an entry that the resumed log has already; `None` if it has no such entry.
    #[cold]
    fn adopt(&self, attribute: &Attribute) -> Option<Result<Position, AppendError>> {
        if !matches!(self.binding, Binding::Bound) || probe::is_bug_planted(Plant::T6CountTwice) {
            return None;
        }
        let adopted = self.adoption.find(attribute)?;
        if adopted.is_ok() {
            probe::count_rare(Rare::Adopted);
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
        // A mark may release an entry whose write is still in flight. A later entry may have its
        // slot.
        let appends_since = self.next - position.0;
        if appends_since <= u64::from(self.slots) {
            // The slot is counted back from the next one, because the division `position % slots`
            // would cost more than all the rest.
            let (slots_back, next) = (appends_since as u32, self.next_slot);
            let slot =
                if slots_back <= next { next - slots_back } else { next + self.slots - slots_back };
            self.region.write_word(slot_offset(slot), origin.stamp(position));
        }
    }

    /// Fails if an earlier fence of the region has failed.
    #[inline]
    fn check_region(&self) -> Result<(), RegionError> {
        match &self.binding {
            Binding::Failed(error) => Err(error.clone()),
            Binding::Unbound | Binding::Bound => Ok(()),
        }
    }

    /// Writes the mark in memory to the region, and fences. The fence makes all other stores
    /// durable, too.
    #[cold]
    fn make_mark_durable(&mut self) -> Result<(), RegionError> {
        self.write_mark_copy(self.mark())?;
        self.fenced = self.next;
        if matches!(self.binding, Binding::Bound) {
            self.append_limit = self.head + u64::from(self.slots);
        }
        Ok(())
    }

    /// Writes both copies of the mark, one after the other. The rare changes of a binding need
    /// this, because they must survive the damage of one copy. The change is made as soon as the
    /// first copy is durable.
    fn write_both_marks(&mut self, mark: Mark) -> Result<(), RegionError> {
        self.write_mark_copy(mark)?;
        self.released = mark.released;
        self.newest_tag = mark.newest_tag;
        self.head = mark.head;
        self.head_slot = self.slot_of(Position(mark.head));
        self.write_mark_copy(mark)?;
        self.fenced = self.next;
        Ok(())
    }

    /// The newest group up to `released` that the log has now or had before, with the caller's tag.
    fn newest_tag_up_to(&self, released: Seq) -> GroupTag {
        let is_up_to = self.newest_tag.seq <= released;
        let mut newest = if is_up_to { self.newest_tag } else { GroupTag::NONE };
        for position in self.head..self.next {
            let end = self.ends[self.slot_of(Position(position)) as usize];
            newest.advance_to(end, released);
        }
        newest
    }

    /// The mark in memory.
    const fn mark(&self) -> Mark {
        Mark {
            head: self.head,
            released: self.released,
            newest_tag: self.newest_tag,
            ..self.durable_mark
        }
    }

    /// Writes the mark over the older of its two copies, and fences.
    fn write_mark_copy(&mut self, mark: Mark) -> Result<(), RegionError> {
        let mark = Mark { number: self.durable_mark.number + 1, ..mark };
        let copy_offset = (mark.number % 2) as usize * MARK_BYTES;
        if mem::take(&mut self.next_copy_is_torn) {
            // The torn copy has some words of an earlier mark. If the power fails again while this
            // mark is written, these words and some of the new ones could form a whole mark. So the
            // checksum of the torn copy is destroyed first.
            self.region.write_word(copy_offset, 0);
            self.fence_region()?;
        }
        self.region.write(copy_offset, &mark.encode(self.crc));
        self.fence_region()?;
        self.durable_mark = mark;
        Ok(())
    }

    /// Fences the region. If the fence fails, the log is unusable from then on.
    #[inline]
    fn fence_region(&mut self) -> Result<(), RegionError> {
        self.region.fence().inspect_err(|error| {
            self.binding = Binding::Failed(error.clone());
            self.append_limit = 0;
        })
    }

    /// Moves `head` behind the released entries.
    #[inline]
    fn advance_head(&mut self) {
        while self.head < self.next {
            let end = self.ends[self.head_slot as usize];
            if end.seq > self.released {
                break;
            }
            self.newest_tag.advance_to(end, self.released);
            self.head += 1;
            self.head_slot = self.slot_after(self.head_slot);
        }
    }

    /// Moves `next` behind an entry that was written, or found, at `next`. `end` is the last group
    /// of the entry.
    #[inline]
    fn count_append(&mut self, end: GroupTag) {
        self.ends[self.next_slot as usize] = end;
        self.next += 1;
        self.next_slot = self.slot_after(self.next_slot);
    }

    /// The slot of a position.
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

/// The number of slots that fit into the region.
fn slot_count<R: Region>(region: &R) -> Result<u32, TooSmall> {
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
