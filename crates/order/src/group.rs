//! Counting the entries of a group: whole, partial or contradictory (T6).

use alloc::collections::BTreeMap;

use crate::attribute::Attribute;

/// The result of counting a set of entries of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupCount {
    /// Every one of the group's entries is there.
    Whole,
    /// Some entries are missing.
    Partial {
        /// Distinct entries found.
        found: u16,
        /// How many entries the group has.
        num: u16,
    },
    /// The entries cannot be of one group: different seq, size, tag or shape, or an index that
    /// the group does not have. The log or the peer is damaged.
    Contradictory,
}

/// Counts the *distinct* entries of one group.
///
/// An entry that was replayed after a target's crash is logged twice, with the same index and the
/// same shape: it counts once. A missing index shows a fragment that never arrived (T6).
pub fn count_group<'a>(entries: impl IntoIterator<Item = &'a Attribute>) -> GroupCount {
    let mut distinct: BTreeMap<u16, &Attribute> = BTreeMap::new();
    let mut group: Option<&Attribute> = None;
    for entry in entries {
        let first = *group.get_or_insert(entry);
        let fits = entry.seq == first.seq
            && entry.span == first.span
            && entry.num == first.num
            && entry.tag == first.tag
            && entry.index < entry.num;
        let same = *distinct.entry(entry.index).or_insert(entry);
        if !fits || !same_shape(same, entry) {
            return GroupCount::Contradictory;
        }
    }
    let num = group.map_or(0, |first| first.num);
    match u16::try_from(distinct.len()) {
        Ok(found) if found < num || num == 0 => GroupCount::Partial { found, num },
        _ => GroupCount::Whole,
    }
}

/// Whether all of one group's entries are among these (T6).
pub fn group_complete<'a>(entries: impl IntoIterator<Item = &'a Attribute>) -> bool {
    count_group(entries) == GroupCount::Whole
}

/// Replay keeps shapes: a copy differs in its ordinal alone, which every binding counts anew.
pub(crate) fn same_shape(a: &Attribute, b: &Attribute) -> bool {
    Attribute { ordinal: 0, ..*a } == Attribute { ordinal: 0, ..*b }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::{Flags, Kind, Member, Seq};

    fn part(index: u16, ordinal: u32) -> Attribute {
        Attribute {
            seq: Seq(9),
            span: 1,
            num: 3,
            index,
            ordinal,
            member: Member(0),
            kind: Kind::Write,
            flags: Flags::SPLIT,
            lba: 100 + u64::from(index),
            blocks: 1,
            tag: 5,
        }
    }

    #[test]
    fn t6_a_replayed_entry_counts_once() {
        let replayed = [part(0, 1), part(1, 2), part(0, 1), part(1, 7)];
        assert_eq!(
            count_group(&replayed),
            GroupCount::Partial { found: 2, num: 3 },
            "four logged entries, but fragment 2 never arrived"
        );
        assert!(!group_complete(&replayed));
        assert!(group_complete(&[part(2, 1), part(0, 2), part(2, 9), part(1, 3)]));
        assert!(!group_complete([]));
    }

    #[test]
    fn t6_entries_that_disagree_are_not_counted() {
        let bigger = Attribute { num: 4, ..part(1, 2) };
        let moved = Attribute { lba: 7, ..part(0, 2) };
        let outside = part(3, 2);
        let other = Attribute { seq: Seq(8), ..part(1, 2) };
        let tagged = Attribute { tag: 6, ..part(1, 2) };
        let merged = Attribute { span: 2, ..part(1, 2) };
        for wrong in [bigger, moved, outside, other, tagged, merged] {
            assert_eq!(count_group(&[part(0, 1), wrong]), GroupCount::Contradictory, "{wrong:?}");
        }
    }
}
