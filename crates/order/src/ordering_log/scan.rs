//! Reads a partition after a crash: finds the live entries, and checks that none is missing.
//!
//! A crash can tear an append that was not fenced. Such an append leaves a *hole*, which is no
//! loss, because the target submits no write before the fence. But a hole among entries that were
//! durable is damage, and the log is refused. It must not be read as a shorter one, because then
//! the undo of the lost entries would be missing (trap T19).

use alloc::vec::Vec;

use super::error::{Damage, LogError};
use super::mark::{MARK_BYTES, Mark, MarkCopy};
use crate::attribute::{Attribute, GroupTag, Seq};
use crate::entry::{Decoded, ENTRY_BYTES, Entry, Origin, PartitionId, Persist, Position, decode};
use crate::probe::{self, Plant, Rare};
use crate::region::{Crc32c, Region};

/// The offset of the first slot in a partition, in bytes.
pub(crate) const SLOTS_AT: usize = 2 * MARK_BYTES;

/// No count of a real log is larger: 2⁶² appends take 10⁵ years.
const COUNT_MAX: u64 = 1 << 62;

/// A live entry in a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedEntry {
    /// The position of the entry.
    pub position: Position,
    /// The attribute.
    pub attribute: Attribute,
    /// The owner and the incarnation of the target that appended the entry.
    pub origin: Origin,
    /// Whether the persist word is set. Then the data of the entry is durable, and for a flush
    /// entry the data of the earlier entries that it covers, too.
    pub persisted: bool,
}

/// The content of a partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// The last group that is released. No entry of a group up to it is listed. For a settled
    /// partition this is the recovered seq.
    pub released: Seq,
    /// Whether recovery has settled the partition. Then a listed entry was undone, or is an
    /// in-place update that the caller has not acknowledged yet.
    pub settled: bool,
    /// The newest released group that the partition knows, with the caller's tag. The partition of
    /// another server may know a newer one.
    pub newest_tag: GroupTag,
    /// The generation and the incarnation of the last binding. Entries of older generations are
    /// dead.
    pub origin: Origin,
    /// The live entries, in order of position.
    pub entries: Vec<LoggedEntry>,
    /// The number of slots with bytes that are not a whole entry. A crash has torn these appends
    /// before a write was submitted for them.
    pub torn: u32,
    /// The number of slots with whole entries of an older lap or a dead generation.
    pub stale: u32,
}

impl Scan {
    /// Whether there is nothing to recover: no live entry, and no torn one.
    #[must_use]
    pub const fn is_clean(&self) -> bool {
        self.entries.is_empty() && self.torn == 0
    }
}

/// The mark of a partition, as [`read_mark`] found it.
pub(crate) struct FoundMark {
    /// The newer one of the two copies.
    pub(crate) mark: Mark,
    /// Whether the other copy is torn.
    pub(crate) is_other_copy_torn: bool,
}

/// Reads both copies of the mark.
pub(crate) fn read_mark<R: Region>(
    region: &R,
    id: PartitionId,
    slots: u32,
    crc: Crc32c,
) -> Result<FoundMark, LogError> {
    let mut newest: Option<Mark> = None;
    let (mut torn_copies, mut blank_copies) = (0, 0);
    for copy in 0..2 {
        let mut bytes = [0; MARK_BYTES];
        region.read(copy * MARK_BYTES, &mut bytes);
        match Mark::decode(&bytes, crc) {
            MarkCopy::Newer { version } => return Err(LogError::Newer { version }),
            // No program has written such a mark to this copy.
            MarkCopy::Whole(mark)
                if mark.number % 2 != copy as u64 || mark.head.max(mark.number) >= COUNT_MAX =>
            {
                torn_copies += 1;
            }
            MarkCopy::Whole(mark) if newest.is_none_or(|newest| newest.number < mark.number) => {
                newest = Some(mark);
            }
            MarkCopy::Whole(_) => {}
            MarkCopy::Torn => torn_copies += 1,
            MarkCopy::Blank => blank_copies += 1,
        }
    }
    let Some(mark) = newest else {
        let is_blank = blank_copies == 2;
        return Err(if is_blank { LogError::Blank { id } } else { damaged(id, Damage::NoMark) });
    };
    if mark.id != id && !probe::is_bug_planted(Plant::T19ForeignPartition) {
        return Err(LogError::Foreign { found: mark.id, expected: id });
    }
    if mark.slots != slots {
        return Err(LogError::Resized { found: mark.slots, expected: slots });
    }
    Ok(FoundMark { mark, is_other_copy_torn: torn_copies > 0 })
}

fn damaged(id: PartitionId, what: Damage) -> LogError {
    LogError::Damaged { volume: id.volume, stream: id.stream, what }
}

/// The value of [`Slots::ends`] for a position without a whole entry. It is never released.
pub(crate) const HOLE: GroupTag = GroupTag { seq: Seq(u64::MAX), tag: 0 };

/// The state of the slots, as [`scan`] found them.
#[derive(Default)]
pub(crate) struct Slots {
    /// For each position from the mark's head up to the last whole entry: the last group of the
    /// entry, or [`HOLE`].
    pub(crate) ends: Vec<GroupTag>,
    /// The slots with bytes that are not a whole entry.
    pub(crate) torn: Vec<u32>,
    /// The positions of whole entries with an invalid persist word: a crash kept the word of an
    /// older lap.
    pub(crate) invalid: Vec<Position>,
}

/// The content of a slot, in view of the mark.
enum SlotContent {
    /// No entry was ever appended here.
    Blank,
    /// Bytes that are not a whole entry.
    Torn,
    /// An entry of an older lap or of an older owner.
    Stale,
    /// The entry of this position.
    Current { entry: Entry, persist: Persist },
}

/// Reads all slots, and distinguishes live, stale, torn and damaged ones.
///
/// Each slot belongs to exactly one position from `head` to `head + slots`. Only the entry of that
/// position is live there, because the log uses a slot again only after the mark that frees it has
/// become durable (trap T1).
pub(crate) fn scan<R: Region>(
    region: &R,
    mark: &Mark,
    crc: Crc32c,
) -> Result<(Scan, Slots), LogError> {
    let checksum_seed = mark.id.seed(crc);
    let mut found = Scan {
        released: mark.released,
        settled: mark.settled,
        newest_tag: mark.newest_tag,
        origin: mark.origin,
        ..Scan::default()
    };
    let mut slots = Slots::default();
    // The entries found so far prove that all appends before this position were durable.
    let mut proven_durable = Position(mark.head);
    for position in (mark.head..mark.head + u64::from(mark.slots)).map(Position) {
        let (entry, persist) = match read_slot(region, mark, position, checksum_seed, crc)? {
            SlotContent::Blank => continue,
            SlotContent::Torn => {
                found.torn += 1;
                slots.torn.push(slot_of(position, mark));
                continue;
            }
            SlotContent::Stale => {
                found.stale += 1;
                continue;
            }
            SlotContent::Current { entry, persist } => (entry, persist),
        };
        proven_durable = proven_durable.max(entry.fenced_before());
        match persist {
            Persist::Yes => proven_durable = proven_durable.max(Position(position.0 + 1)),
            Persist::Invalid => {
                probe::count_rare(Rare::InvalidPersist);
                slots.invalid.push(position);
            }
            Persist::No => {}
        }
        let end = GroupTag::of_last_group(&entry.attribute);
        slots.ends.resize((position.0 - mark.head) as usize, HOLE);
        slots.ends.push(end);
        found.newest_tag.advance_to(end, mark.released);
        if end.seq > mark.released {
            found.entries.push(LoggedEntry {
                position,
                attribute: entry.attribute,
                origin: entry.origin,
                persisted: persist == Persist::Yes,
            });
        }
    }
    // An empty slot that the medium does not hold would make recovery undo durable groups.
    region.check()?;
    check_durable_entries(mark, &slots, proven_durable)?;
    Ok((found, slots))
}

/// Reads the slot of a position.
///
/// # Errors
/// The entry is of a later version, or it proves that the mark is not the last one.
fn read_slot<R: Region>(
    region: &R,
    mark: &Mark,
    position: Position,
    checksum_seed: u32,
    crc: Crc32c,
) -> Result<SlotContent, LogError> {
    let slot = slot_of(position, mark);
    let mut bytes = [0; ENTRY_BYTES];
    region.read(SLOTS_AT + slot as usize * ENTRY_BYTES, &mut bytes);
    let (entry, persist) = match decode(&bytes, checksum_seed, crc) {
        Decoded::Blank => return Ok(SlotContent::Blank),
        // An entry is whole only in the slot of its own position.
        Decoded::Whole { entry, persist } if slot_of(entry.position, mark) == slot => {
            (entry, persist)
        }
        Decoded::Newer { position, .. } if position.0 < mark.head => {
            return Ok(SlotContent::Stale);
        }
        Decoded::Newer { position, kind, flags } => {
            return Err(LogError::NewerEntry { position, kind, flags });
        }
        Decoded::Torn | Decoded::Whole { .. } => {
            probe::count_rare(Rare::TornEntry);
            return Ok(SlotContent::Torn);
        }
    };
    let is_of_older_lap = entry.position < position;
    let is_of_older_owner = entry.origin.generation < mark.origin.generation;
    if is_of_older_lap || is_of_older_owner {
        probe::count_rare(Rare::StaleEntry);
        return Ok(SlotContent::Stale);
    }
    // The log appends such an entry only after a newer mark is durable. That mark is lost.
    let is_newer_than_mark = entry.position > position
        || entry.origin.generation > mark.origin.generation
        || entry.origin.incarnation > mark.origin.incarnation;
    if is_newer_than_mark {
        return Err(damaged(mark.id, Damage::MarkLost(entry.position)));
    }
    Ok(SlotContent::Current { entry, persist })
}

/// The slot of a position.
const fn slot_of(position: Position, mark: &Mark) -> u32 {
    (position.0 % mark.slots as u64) as u32
}

/// Checks that all entries before `proven_durable`, which were durable, are whole and have a valid
/// persist word.
fn check_durable_entries(
    mark: &Mark,
    slots: &Slots,
    proven_durable: Position,
) -> Result<(), LogError> {
    // Positions behind the last whole entry have no element in `ends`. They are holes, too.
    let ends = slots.ends.iter().chain(core::iter::repeat(&HOLE));
    for (position, end) in (mark.head..proven_durable.0).zip(ends) {
        if *end == HOLE {
            return Err(damaged(mark.id, Damage::EntryLost(Position(position))));
        }
    }
    if let Some(&position) = slots.invalid.iter().find(|&&position| position < proven_durable) {
        return Err(damaged(mark.id, Damage::PersistWord(position)));
    }
    Ok(())
}
