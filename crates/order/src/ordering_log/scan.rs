//! Reading a partition after a crash: which entries are alive, and whether any is missing that
//! must be there (T7, T19).

use alloc::vec::Vec;

use super::error::{Damage, LogError};
use super::mark::{MARK_BYTES, Mark, MarkCopy};
use crate::attribute::{Attribute, Seq};
use crate::entry::{Decoded, ENTRY_BYTES, Origin, PartitionId, Persist, Position, decode};
use crate::probe::{self, Plant, Rare};
use crate::region::{Crc32c, Region};

/// Where the entries begin in a partition.
pub(crate) const SLOTS_AT: usize = 2 * MARK_BYTES;

/// No count of a real log comes near this: 2⁶² appends take 10⁵ years.
const COUNT_MAX: u64 = 1 << 62;

/// One live entry as found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedEntry {
    /// Its position.
    pub position: Position,
    /// Its attribute.
    pub attribute: Attribute,
    /// The owner and the incarnation of the target that appended it (T4, T8).
    pub origin: Origin,
    /// Whether its persist word was set: its data is durable; for a flushed entry also the data of
    /// earlier ones (T4).
    pub persisted: bool,
}

/// The content of a partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// The last group that is released: no entry up to it is listed (T1). For a settled partition
    /// the k of its recovery.
    pub released: Seq,
    /// Recovery has settled the partition: a listed entry was undone, or is an in-place update to
    /// be acknowledged (T9, T11).
    pub settled: bool,
    /// The newest released group of which the partition knows, and the caller's tag of it; seq 0
    /// if it knows of none. Another server's partition may know of a newer one.
    pub tag: (Seq, u64),
    /// The generation and incarnation of the last binding. Older generations are dead.
    pub origin: Origin,
    /// The live entries, in position order.
    pub entries: Vec<LoggedEntry>,
    /// Slots with bytes that are no whole entry: appends torn by the crash, before anything was
    /// submitted for them.
    pub torn: u32,
    /// Slots with whole entries of an older lap or a dead generation.
    pub stale: u32,
}

impl Scan {
    /// Whether there is nothing to recover: no live entry, and no trace of a torn one.
    #[must_use]
    pub const fn is_clean(&self) -> bool {
        self.entries.is_empty() && self.torn == 0
    }
}

/// Reads both copies of the mark. Returns the newer one, and whether the other one is torn.
pub(crate) fn read_mark<R: Region>(
    region: &R,
    id: PartitionId,
    slots: u32,
    crc: Crc32c,
) -> Result<(Mark, bool), LogError> {
    let mut newest: Option<Mark> = None;
    let (mut torn, mut blank) = (0, 0);
    for copy in 0..2 {
        let mut bytes = [0; MARK_BYTES];
        region.read(copy * MARK_BYTES, &mut bytes);
        match Mark::decode(&bytes, crc) {
            MarkCopy::Newer { version } => return Err(LogError::Newer { version }),
            // No program has written such a mark there.
            MarkCopy::Whole(mark)
                if mark.number % 2 != copy as u64 || mark.head.max(mark.number) >= COUNT_MAX =>
            {
                torn += 1;
            }
            MarkCopy::Whole(mark) if newest.is_none_or(|n| n.number < mark.number) => {
                newest = Some(mark);
            }
            MarkCopy::Whole(_) => {}
            MarkCopy::Torn => torn += 1,
            MarkCopy::Blank => blank += 1,
        }
    }
    let Some(mark) = newest else {
        return Err(if blank == 2 { LogError::Blank { id } } else { damaged(id, Damage::NoMark) });
    };
    if mark.id != id && !probe::planted(Plant::T19ForeignPartition) {
        return Err(LogError::Foreign { found: mark.id, expected: id });
    }
    if mark.slots != slots {
        return Err(LogError::Resized { found: mark.slots, expected: slots });
    }
    Ok((mark, torn > 0))
}

fn damaged(id: PartitionId, what: Damage) -> LogError {
    LogError::Damaged { volume: id.volume, stream: id.stream, what }
}

/// The last group of an entry, and the caller's tag of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) seq: Seq,
    pub(crate) tag: u64,
}

impl End {
    /// Stands for a slot without an entry. It is never released.
    pub(crate) const HOLE: Self = Self { seq: Seq(u64::MAX), tag: 0 };

    pub(crate) const fn of(attribute: &Attribute) -> Self {
        Self { seq: attribute.seq_end(), tag: attribute.tag }
    }

    /// Sets `newest`, a group and its tag, to this group if this group is newer and released.
    #[inline]
    pub(crate) fn update_newest(self, released: Seq, newest: &mut (Seq, u64)) {
        if self.seq <= released && self.seq > newest.0 {
            *newest = (self.seq, self.tag);
        }
    }
}

/// The state of the slots, as [`scan`] found them.
pub(crate) struct Slots {
    /// For each position from the mark's head up to the last whole entry, the end of that entry;
    /// a hole where an append was torn.
    pub(crate) ends: Vec<End>,
    /// Slots with bytes that are no whole entry.
    pub(crate) torn: Vec<u32>,
    /// Positions of whole entries whose persist word is neither 0 nor their own: a crash kept the
    /// word of an older lap (T7).
    pub(crate) invalid: Vec<Position>,
}

/// Reads all slots and distinguishes live, stale, torn and damaged ones.
///
/// Each slot belongs to exactly one position from `head` to `head + slots`. Only the entry of that
/// position is live there, because a slot is used again only after the mark that frees it has become
/// durable (T1).
pub(crate) fn scan<R: Region>(
    region: &R,
    mark: &Mark,
    crc: Crc32c,
) -> Result<(Scan, Slots), LogError> {
    let seed = mark.id.seed(crc);
    let slots = u64::from(mark.slots);
    let mut found = Scan {
        released: mark.released,
        settled: mark.settled,
        tag: mark.tag,
        origin: mark.origin,
        ..Scan::default()
    };
    let mut ends = Vec::new();
    let mut torn = Vec::new();
    // An entry found so far proves that every append before this position was durable. So a hole
    // before it is damage, and not an append that the crash has torn.
    let mut proven = Position(mark.head);
    let mut invalid = Vec::new();
    for position in (mark.head..mark.head + slots).map(Position) {
        let slot = (position.0 % slots) as u32;
        let mut bytes = [0; ENTRY_BYTES];
        region.read(SLOTS_AT + slot as usize * ENTRY_BYTES, &mut bytes);
        let (entry, persist) = match decode(&bytes, seed, crc) {
            Decoded::Blank => continue,
            // A whole entry is in the slot of its position.
            Decoded::Whole { entry, persist } if entry.position.0 % slots == u64::from(slot) => {
                (entry, persist)
            }
            Decoded::Newer { position, .. } if position.0 < mark.head => {
                found.stale += 1;
                continue;
            }
            Decoded::Newer { position, kind, flags } => {
                return Err(LogError::NewerEntry { position, kind, flags });
            }
            Decoded::Torn | Decoded::Whole { .. } => {
                probe::hit(Rare::TornEntry);
                found.torn += 1;
                torn.push(slot);
                continue;
            }
        };
        // The entry is of an older lap or of an older owner.
        if entry.position < position || entry.origin.generation < mark.origin.generation {
            probe::hit(Rare::StaleEntry);
            found.stale += 1;
            continue;
        }
        // The entry was appended after a newer mark had become durable, and that mark is not there.
        if entry.position > position
            || entry.origin.generation > mark.origin.generation
            || entry.origin.incarnation > mark.origin.incarnation
        {
            return Err(damaged(mark.id, Damage::MarkLost(entry.position)));
        }
        proven = proven.max(entry.fenced_before());
        match persist {
            Persist::Yes => proven = proven.max(Position(position.0 + 1)),
            Persist::Invalid => {
                probe::hit(Rare::InvalidPersist);
                invalid.push(position);
            }
            Persist::No => {}
        }
        let end = End::of(&entry.attribute);
        ends.resize((position.0 - mark.head) as usize, End::HOLE);
        ends.push(end);
        end.update_newest(mark.released, &mut found.tag);
        if end.seq > mark.released {
            found.entries.push(LoggedEntry {
                position,
                attribute: entry.attribute,
                origin: entry.origin,
                persisted: persist == Persist::Yes,
            });
        }
    }
    let holes = (mark.head..proven.0).zip(ends.iter().chain(core::iter::repeat(&End::HOLE)));
    if let Some((hole, _)) = holes.into_iter().find(|(_, end)| **end == End::HOLE) {
        return Err(damaged(mark.id, Damage::EntryLost(Position(hole))));
    }
    if let Some(&position) = invalid.iter().find(|&&position| position < proven) {
        return Err(damaged(mark.id, Damage::PersistWord(position)));
    }
    Ok((found, Slots { ends, torn, invalid }))
}
