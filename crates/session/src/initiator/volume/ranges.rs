//! Blocks of drives, expressed as blocks of the volume.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_order::attribute::Seq;
use riopipe_order::recovery::{DriveExtent, InPlace};
use riopipe_order::topology::Topology;

use crate::initiator::opening::StreamOutcome;

/// Blocks of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRange {
    /// The first block.
    pub lba: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// A write whose blocks may hold the old content or the new: an in-place update, or a write in
/// doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InPlaceRange {
    /// Its group; of merged groups, the first one.
    pub seq: Seq,
    /// The blocks.
    pub range: BlockRange,
}

/// The volume blocks of some extents of drives: sorted, adjacent ones joined.
#[must_use]
pub fn volume_ranges(topology: &Topology, extents: &[DriveExtent]) -> Vec<BlockRange> {
    let unit = u64::from(topology.unit_blocks());
    let mut ranges = Vec::new();
    for extent in extents {
        let start = topology.member(extent.member).start;
        let (mut lba, end) = (extent.lba, extent.lba + extent.blocks);
        while lba < end {
            // Within a stripe unit, adjacent blocks of a drive are adjacent in the volume.
            let blocks = (unit - (lba - start) % unit).min(end - lba);
            // Extents outside the volume were refused before (trap T19).
            if let Some(first) = topology.volume_block(extent.member, lba) {
                ranges.push(BlockRange { lba: first, blocks });
            }
            lba += blocks;
        }
    }
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let joins = next.lba <= last.lba + last.blocks;
        if joins {
            last.blocks = last.blocks.max(next.lba + next.blocks - last.lba);
        }
        joins
    });
    ranges
}

/// The volume blocks of some listed writes, in the lists' order.
#[must_use]
pub fn listed_ranges(topology: &Topology, updates: &[InPlace]) -> Vec<InPlaceRange> {
    let ranges_of = |update: &InPlace| {
        let (seq, ranges) = (update.seq, volume_ranges(topology, &[update.extent]));
        ranges.into_iter().map(move |range| InPlaceRange { seq, range })
    };
    updates.iter().flat_map(ranges_of).collect()
}

/// The blocks of some writes, each block once, with the newest group that wrote it: in order of the
/// blocks, adjacent ones of one group joined.
#[must_use]
pub fn newest_writes(writes: &[InPlaceRange]) -> Vec<InPlaceRange> {
    let edges = |write: &InPlaceRange| {
        let BlockRange { lba, blocks } = write.range;
        [(lba, true, write.seq), (lba + blocks, false, write.seq)]
    };
    let mut edges: Vec<(u64, bool, Seq)> = writes.iter().flat_map(edges).collect();
    edges.sort_unstable();
    // The number of writes of each group that contain the present block.
    let mut present: BTreeMap<Seq, usize> = BTreeMap::new();
    let mut newest: Vec<InPlaceRange> = Vec::new();
    let mut from = 0;
    for (lba, begins, seq) in edges {
        if lba > from
            && let Some((&seq, _)) = present.last_key_value()
        {
            match newest.last_mut() {
                Some(last) if last.seq == seq && last.range.lba + last.range.blocks == from => {
                    last.range.blocks = lba - last.range.lba;
                }
                _ => {
                    let range = BlockRange { lba: from, blocks: lba - from };
                    newest.push(InPlaceRange { seq, range });
                }
            }
        }
        from = lba;
        let count = present.entry(seq).or_default();
        *count = if begins { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            present.remove(&seq);
        }
    }
    newest
}

/// The blocks that a stream's owner must check before the stream starts again: in-place updates
/// beyond the prefix, and writes in doubt; empty if nothing waits to be acknowledged (traps T9,
/// T26).
#[must_use]
pub fn to_acknowledge(topology: &Topology, found: &StreamOutcome) -> Option<Vec<InPlaceRange>> {
    found.pending.then(|| {
        let mut all = listed_ranges(topology, &found.plan.in_place);
        all.extend(listed_ranges(topology, &found.plan.in_doubt));
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use riopipe_order::attribute::Member;
    use riopipe_order::topology::{MemberInfo, ServerInfo};

    fn striped() -> Topology {
        let member = MemberInfo {
            server: 0,
            start: 256,
            blocks: 64,
            request_blocks_max: 32,
            volatile: false,
        };
        Topology::new(vec![member, member], vec![ServerInfo { slots: 8 }], 4).unwrap()
    }

    #[test]
    fn each_block_has_the_newest_group_that_wrote_it() {
        let write =
            |seq, lba, blocks| InPlaceRange { seq: Seq(seq), range: BlockRange { lba, blocks } };
        assert_eq!(newest_writes(&[]), []);
        let writes =
            [write(3, 0, 4), write(3, 4, 2), write(5, 2, 1), write(4, 2, 3), write(9, 8, 1)];
        assert_eq!(
            newest_writes(&writes),
            [write(3, 0, 2), write(5, 2, 1), write(4, 3, 2), write(3, 5, 1), write(9, 8, 1)]
        );
        // The same write twice, and writes that end or begin at the same block.
        let twice = [write(2, 1, 2), write(2, 1, 2), write(1, 0, 3), write(1, 3, 1)];
        assert_eq!(newest_writes(&twice), [write(1, 0, 1), write(2, 1, 2), write(1, 3, 1)]);
    }

    #[test]
    fn extents_of_drives_are_reported_in_volume_blocks() {
        let at = |member, lba, blocks| DriveExtent { member: Member(member), lba, blocks };
        // Blocks 2–5 of drive 0 are the volume's 2, 3 and 8, 9; 0–3 of drive 1 its 4–7.
        let ranges = volume_ranges(&striped(), &[at(0, 258, 4), at(1, 256, 4)]);
        assert_eq!(ranges, [BlockRange { lba: 2, blocks: 8 }]);
        let ranges = volume_ranges(&striped(), &[at(0, 258, 4)]);
        assert_eq!(ranges, [BlockRange { lba: 2, blocks: 2 }, BlockRange { lba: 8, blocks: 2 }]);
    }
}
