//! Redirected updates of engine `horae`.
//!
//! An update in place behind `flushed` must not be at its home, because recovery could not roll it
//! back. So its data goes to the *prepare area* of the drive first:
//!
//! ```text
//! admitted → prepared in the area → durable, by a joint FLUSH → written home, flushed → released
//! ```
//!
//! Each stream has a part of the area on each drive, and uses it as a ring.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::{Bound, Refusal};
use crate::attribute::{Member, Seq};
use crate::gate::Filter;
use crate::probe::{self, Plant, Rare};
use crate::topology::{Extent, PreparePart, Topology};

/// A change of the blocks that a stream has redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Redirection<P> {
    /// The newest content of these blocks is in the prepare area.
    Prepared {
        /// The group and the index of the update. A later one is newer.
        id: (Seq, u16),
        /// The drive.
        member: Member,
        /// The first block at home.
        lba: u64,
        /// The first block in the prepare area, on the drive.
        prepared_lba: u64,
        /// The number of blocks.
        blocks: u32,
        /// The payload: handles on all blocks, in order. Empty if a commit has it: then the update is
        /// durable.
        pieces: Vec<P>,
    },
    /// The updates of all groups up to this one are at home.
    Home(Seq),
    /// The stream has failed. The updates of all groups behind this one may be lost, and their blocks
    /// in the area may have the content of other updates. Those up to it follow, as prepared.
    RolledBack(Seq),
}

/// A redirected update that is not released.
#[derive(Debug)]
pub(super) struct Update<P> {
    pub(super) id: (Seq, u16),
    pub(super) member: Member,
    pub(super) server: u16,
    pub(super) lba: u64,
    pub(super) blocks: u32,
    /// The first block in the prepare area.
    prepared_lba: u64,
    /// Whether the data is in the prepare area.
    is_prepared: bool,
    /// The payload, once the data is in the prepare area.
    pub(super) pieces: Vec<P>,
}

impl<P> Update<P> {
    fn as_prepared(&self) -> Redirection<P>
    where
        P: Clone,
    {
        let Self { id, member, lba, prepared_lba, blocks, .. } = *self;
        let pieces = self.pieces.clone();
        Redirection::Prepared { id, member, lba, prepared_lba, blocks, pieces }
    }

    fn touches(&self, extent: &Extent) -> bool {
        let Self { member, lba, blocks, .. } = *self;
        extent.touches(&Extent { member, lba, blocks, offset: 0 })
    }
}

/// The stream's part of the prepare area of one drive: a ring of blocks. Positions count blocks
/// without end.
#[derive(Debug, Default)]
struct Ring {
    /// The first block on the drive.
    start: u64,
    /// The number of blocks.
    blocks: u32,
    /// The position of the next block to take.
    next: u64,
    /// The position of the first block that is taken.
    first: u64,
    /// The updates that have blocks, oldest first: the group, and the position behind the blocks.
    taken: VecDeque<(Seq, u64)>,
}

impl Ring {
    /// Takes adjacent blocks for an update. Returns the first one on the drive.
    fn take(&mut self, seq: Seq, blocks: u32) -> Option<u64> {
        if self.taken.is_empty() {
            (self.next, self.first) = (0, 0);
        }
        let size = u64::from(self.blocks);
        let mut at = self.next % size;
        let mut end = self.next + u64::from(blocks);
        if at + u64::from(blocks) > size {
            // The blocks up to the end of the ring are left out.
            end += size - at;
            at = 0;
        }
        if end - self.first > size {
            return None;
        }
        self.next = end;
        self.taken.push_back((seq, end));
        Some(self.start + at)
    }

    /// Frees the blocks of a group that is refused.
    fn free_refused(&mut self, seq: Seq) {
        while self.taken.back().is_some_and(|(of, _)| *of == seq) {
            self.taken.pop_back();
        }
        self.next = self.taken.back().map_or(self.first, |(_, end)| *end);
    }

    /// Frees the blocks of all groups up to `seq`.
    fn free_up_to(&mut self, seq: Seq) {
        while let Some((_, end)) = self.taken.front().filter(|(of, _)| *of <= seq) {
            self.first = *end;
            self.taken.pop_front();
        }
    }

    fn is_half_full(&self) -> bool {
        !self.taken.is_empty() && (self.next - self.first) * 2 >= u64::from(self.blocks)
    }
}

/// The redirected updates of a stream that are not released, and its part of the prepare area.
#[derive(Debug)]
pub(super) struct Redirects<P> {
    /// By member; empty if nothing is redirected.
    rings: Vec<Ring>,
    /// The updates that are not released, oldest first.
    live: VecDeque<Update<P>>,
    /// The blocks of the live updates.
    blocks: Filter,
    /// All updates up to this group are released. Their blocks in the area may still be read.
    released: Seq,
    /// Reads of an earlier run of the stream may be in flight in the area.
    awaits_earlier_reads: bool,
    /// The changes that the caller has not taken.
    changes: VecDeque<Redirection<P>>,
    /// The stream has failed.
    is_rolled_back: bool,
}

impl<P: Clone> Redirects<P> {
    pub(super) fn new(topology: &Topology, part: PreparePart, start: Seq) -> Self {
        let is_enabled = part.blocks > 0;
        let members = (0..topology.members().len() * usize::from(is_enabled)).map(|member| Ring {
            start: topology.prepare_start(Member(member as u8)) + u64::from(part.first),
            blocks: part.blocks,
            ..Ring::default()
        });
        let rings: Vec<Ring> = members.collect();
        Self {
            blocks: Filter::new(rings.len() * part.blocks as usize),
            rings,
            live: VecDeque::new(),
            released: start,
            awaits_earlier_reads: is_enabled,
            changes: VecDeque::new(),
            is_rolled_back: false,
        }
    }

    /// Whether updates in place are redirected.
    #[inline]
    pub(super) fn is_enabled(&self) -> bool {
        !self.rings.is_empty()
    }

    /// Whether no update waits to be written home.
    pub(super) fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// The group of the oldest live update.
    pub(super) fn oldest(&self) -> Option<Seq> {
        self.live.front().map(|update| update.id.0)
    }

    /// The newest live update of a group before `before` that touches these blocks, by its group.
    pub(super) fn newest_touching(&self, extent: &Extent, before: Seq) -> Option<Seq> {
        let Extent { member, lba, blocks, .. } = *extent;
        if self.live.is_empty() || !self.blocks.may_contain(member.0, lba, lba + u64::from(blocks))
        {
            return None;
        }
        let mut newest_first = self.live.iter().rev();
        let found = newest_first.find(|update| update.id.0 < before && update.touches(extent))?;
        Some(found.id.0)
    }

    /// Adds an update, and takes blocks of the area for it. Returns the first one on the drive; `None`
    /// if the area has no space now. Then [`free_refused`](Self::free_refused) must follow.
    pub(super) fn add(&mut self, id: (Seq, u16), extent: &Extent, server: u16) -> Option<u64> {
        let Extent { member, lba, blocks, .. } = *extent;
        if self.awaits_earlier_reads {
            return None;
        }
        let prepared_lba = self.rings[usize::from(member.0)].take(id.0, blocks)?;
        self.blocks.add(member.0, lba, lba + u64::from(blocks));
        let (is_prepared, pieces) = (false, Vec::new());
        let update = Update { id, member, server, lba, blocks, prepared_lba, is_prepared, pieces };
        self.live.push_back(update);
        Some(prepared_lba)
    }

    /// The refusal of a group for which the area of `member` has no space. The updates of the group
    /// have `blocks` blocks there.
    pub(super) fn refusal(&self, member: Member, blocks: u64) -> Refusal {
        if let Err(refusal) = self.check_size(member, blocks) {
            return refusal;
        }
        probe::count_rare(Rare::PrepareAreaFull);
        Refusal::Full(Bound::PrepareArea { member })
    }

    /// Checks whether `blocks` blocks fit into the area of `member` once it is empty.
    ///
    /// # Errors
    /// [`Refusal::TooLarge`].
    pub(super) fn check_size(&self, member: Member, blocks: u64) -> Result<(), Refusal> {
        match blocks > u64::from(self.rings[usize::from(member.0)].blocks) {
            true => Err(Refusal::TooLarge(Bound::PrepareArea { member })),
            false => Ok(()),
        }
    }

    /// Removes the updates of a group that is refused.
    pub(super) fn free_refused(&mut self, seq: Seq) {
        while self.live.back().is_some_and(|update| update.id.0 == seq) {
            let Some(update) = self.live.pop_back() else { break };
            let end = update.lba + u64::from(update.blocks);
            self.blocks.remove(update.member.0, update.lba, end);
        }
        for ring in &mut self.rings {
            ring.free_refused(seq);
        }
    }

    /// Whether half of the stream's part of some drive's area is taken.
    pub(super) fn is_half_full(&self) -> bool {
        self.rings.iter().any(Ring::is_half_full)
    }

    /// Notes that the data of an update is in the area, and keeps its payload to write it home.
    pub(super) fn on_prepared(&mut self, id: (Seq, u16), pieces: Vec<P>) {
        let Ok(at) = self.live.binary_search_by_key(&id, |update| update.id) else { return };
        let update = &mut self.live[at];
        (update.is_prepared, update.pieces) = (true, pieces);
        self.changes.push_back(update.as_prepared());
    }

    /// Notes that the stream has failed: only updates of groups up to `durable` are certain to be in
    /// the area.
    pub(super) fn roll_back(&mut self, durable: Seq) {
        // A stream fails once, but each of its requests that fails leads here.
        if self.rings.is_empty() || core::mem::replace(&mut self.is_rolled_back, true) {
            return;
        }
        self.changes.push_back(Redirection::RolledBack(durable));
        let certain =
            self.live.iter().filter(|update| update.is_prepared && update.id.0 <= durable);
        self.changes.extend(certain.map(Update::as_prepared));
    }

    /// The live updates up to a group that must be written home, oldest first. An update that newer
    /// ones up to that group cover is not among them.
    pub(super) fn not_home(&mut self, up_to: Seq) -> Vec<&mut Update<P>> {
        let count = self.live.partition_point(|update| update.id.0 <= up_to);
        let updates: Vec<&mut Update<P>> = self.live.iter_mut().take(count).collect();
        if probe::is_bug_planted(Plant::HoraeOlderCommitted) {
            return not_covered(updates);
        }
        let mut home = not_covered(updates.into_iter().rev());
        home.reverse();
        home
    }

    /// Notes that all updates up to a group are at home, and that no log needs them.
    pub(super) fn on_released(&mut self, up_to: Seq) {
        while self.live.front().is_some_and(|update| update.id.0 <= up_to) {
            let Some(update) = self.live.pop_front() else { break };
            let end = update.lba + u64::from(update.blocks);
            self.blocks.remove(update.member.0, update.lba, end);
        }
        self.released = self.released.max(up_to);
        self.changes.push_back(Redirection::Home(up_to));
        if probe::is_bug_planted(Plant::HoraeAreaReusedEarly) {
            self.rings.iter_mut().for_each(|ring| ring.free_up_to(up_to));
        }
    }

    /// The last group whose payload and whose blocks in the area are not needed any more; `None`:
    /// nothing is redirected.
    pub(super) fn freed_up_to(&self) -> Option<Seq> {
        let taken = self.rings.iter().filter_map(|ring| ring.taken.front());
        taken.map(|(seq, _)| Seq(seq.0 - 1)).min()
    }

    /// Whether blocks of released updates wait for the end of reads.
    pub(super) fn awaits_reads(&self) -> bool {
        let mut oldest = self.rings.iter().filter_map(|ring| ring.taken.front());
        self.awaits_earlier_reads || oldest.any(|(seq, _)| *seq <= self.released)
    }

    /// Frees the blocks of released updates before the oldest one that is being read.
    pub(super) fn note_oldest_read(&mut self, oldest: Option<Seq>) {
        self.awaits_earlier_reads &= oldest.is_some();
        if oldest.is_some_and(|oldest| oldest <= self.released) {
            probe::count_rare(Rare::PrepareAreaRead);
        }
        let free = oldest.map_or(self.released, |seq| self.released.min(Seq(seq.0.max(1) - 1)));
        self.rings.iter_mut().for_each(|ring| ring.free_up_to(free));
    }

    /// The next change for the readers of the volume.
    pub(super) fn next_change(&mut self) -> Option<Redirection<P>> {
        self.changes.pop_front()
    }
}

/// The updates with a block that no update before them in the list has.
fn not_covered<'a, P>(
    updates: impl IntoIterator<Item = &'a mut Update<P>>,
) -> Vec<&'a mut Update<P>> {
    let mut covered = BTreeSet::new();
    let mut needed = Vec::new();
    for update in updates {
        let mut is_needed = false;
        for block in update.lba..update.lba + u64::from(update.blocks) {
            is_needed |= covered.insert((update.member, block));
        }
        if is_needed {
            needed.push(update);
        }
    }
    needed
}
