//! Finds out which live entries of a partition are durable. The target does this before it sends
//! its list to the initiator.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use super::stream_order;
use crate::attribute::{Attribute, Member};
use crate::ordering_log::LoggedEntry;
use crate::probe::{self, Plant, Rare};

/// For each live entry of a partition, in the order given: whether it is durable.
///
/// An entry is durable if
///
/// - its persist word is set, or
/// - a persisted flush entry on the same drive comes later in stream order. The gate issued that
///   FLUSH after all earlier entries on the drive had completed without a failure (trap T4). Or
/// - a durable entry on the same drive comes later in stream order and overlaps it. The gate
///   submitted the later one only after this one had completed (trap T12).
///
/// The last rule applies whether or not the drive has a volatile cache now. While a drive has one,
/// only flush entries get a persist word, and these cover all earlier entries anyway. So if another
/// entry has a persist word, the drive had no volatile cache *at that time*, and kept completed
/// writes. An owner that came back at that time has counted the overlapped entry as done, and does
/// not send it again. So the entry stays durable when the drive comes back without its protection
/// (trap T27).
///
/// An entry covers no entry of another drive or of another generation. (The live entries of a
/// partition are of one generation.) But it covers entries of earlier incarnations: within a
/// generation, the owner replays everything that is not durable, in order, before anything new. So
/// a later flush covers the replayed writes, too.
#[must_use]
pub fn validate(entries: &[LoggedEntry]) -> Vec<bool> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&index| stream_order(&entries[index].attribute));
    let mut durable = vec![false; entries.len()];
    let mut flushed_members: Vec<Member> = Vec::new();
    let mut overwritten = BlockRuns::default();
    // From the newest entry to the oldest, so that all entries that may cover one are known before
    // it.
    for &index in order.iter().rev() {
        let LoggedEntry { attribute, persisted, .. } = &entries[index];
        let is_covered_by_flush = flushed_members.contains(&attribute.member)
            || probe::is_bug_planted(Plant::T4CoverOtherDrive) && !flushed_members.is_empty();
        let is_covered_by_overlap =
            overwritten.overlaps(attribute) && !probe::is_bug_planted(Plant::T12NoOverlapCover);
        durable[index] = *persisted || is_covered_by_flush || is_covered_by_overlap;
        if !persisted && is_covered_by_flush {
            probe::count_rare(Rare::CoveredByFlush);
        } else if !persisted && is_covered_by_overlap {
            probe::count_rare(Rare::CoveredByOverlap);
        }
        if *persisted && attribute.is_flush() && !flushed_members.contains(&attribute.member) {
            flushed_members.push(attribute.member);
        }
        if durable[index] {
            overwritten.add(attribute);
        }
    }
    durable
}

/// A set of blocks of the drives of one server, as runs that do not touch each other.
#[derive(Default)]
struct BlockRuns {
    /// The end of each run (the block after its last), by member and first block.
    end_by_start: BTreeMap<(Member, u64), u64>,
}

impl BlockRuns {
    /// Whether an entry touches a block of the set.
    fn overlaps(&self, entry: &Attribute) -> bool {
        let entry_end = entry.lba.saturating_add(u64::from(entry.blocks));
        let mut before_end = self.end_by_start.range((entry.member, 0)..(entry.member, entry_end));
        before_end.next_back().is_some_and(|(_, &run_end)| run_end > entry.lba)
    }

    /// Adds the blocks of an entry, and joins runs that touch.
    fn add(&mut self, entry: &Attribute) {
        let member = entry.member;
        let (mut first, mut end) = (entry.lba, entry.lba.saturating_add(u64::from(entry.blocks)));
        while let Some((&(_, run_first), &run_end)) =
            self.end_by_start.range((member, 0)..=(member, end)).next_back()
        {
            if run_end < first {
                break;
            }
            first = first.min(run_first);
            end = end.max(run_end);
            self.end_by_start.remove(&(member, run_first));
        }
        self.end_by_start.insert((member, first), end);
    }
}
