//! Counts the entries of a group: whole, partial or contradictory.
//!
//! A crash can lose entries of a group, and a replay can log an entry a second time. Recovery keeps
//! a group only if all its entries are there. So it counts the *distinct* entries, and compares
//! their number with [`Attribute::num`], the number that each entry records (trap T6).

use alloc::collections::BTreeMap;

use crate::attribute::Attribute;

/// The result of counting a set of entries of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupCount {
    /// Every entry of the group is there.
    Whole,
    /// Some entries are missing.
    Partial {
        /// The number of distinct entries found.
        found: u16,
        /// The number of entries that the group has.
        num: u16,
    },
    /// The entries cannot be of one group: different seq, size, tag or shape, or an index that
    /// the group does not have. The log or the peer is damaged.
    Contradictory,
}

/// Counts the *distinct* entries of one group.
///
/// An entry that was replayed after a target's crash is logged twice, with the same index and the
/// same shape: it counts once. A missing index shows a fragment that never arrived.
pub fn count_group<'a>(entries: impl IntoIterator<Item = &'a Attribute>) -> GroupCount {
    let mut entry_by_index: BTreeMap<u16, &Attribute> = BTreeMap::new();
    let mut first_entry: Option<&Attribute> = None;
    for entry in entries {
        let first = *first_entry.get_or_insert(entry);
        let earlier_copy = *entry_by_index.entry(entry.index).or_insert(entry);
        if !can_be_of_one_group(first, entry) || !has_same_shape(earlier_copy, entry) {
            return GroupCount::Contradictory;
        }
    }
    let num = first_entry.map_or(0, |first| first.num);
    match u16::try_from(entry_by_index.len()) {
        Ok(found) if found < num || num == 0 => GroupCount::Partial { found, num },
        _ => GroupCount::Whole,
    }
}

/// Whether all entries of one group are among `entries`.
pub fn is_group_whole<'a>(entries: impl IntoIterator<Item = &'a Attribute>) -> bool {
    count_group(entries) == GroupCount::Whole
}

/// Whether an entry has the fields that it must share with the first entry of its group, and an
/// index that the group has.
fn can_be_of_one_group(first: &Attribute, entry: &Attribute) -> bool {
    entry.seq == first.seq
        && entry.span == first.span
        && entry.num == first.num
        && entry.tag == first.tag
        && entry.index < entry.num
}

/// Whether two entries differ in their ordinal at most.
///
/// A replay sends an entry again as it was. Only the ordinal is new, because every binding counts
/// ordinals from 1.
pub(crate) fn has_same_shape(a: &Attribute, b: &Attribute) -> bool {
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
        assert!(!is_group_whole(&replayed));
        assert!(is_group_whole(&[part(2, 1), part(0, 2), part(2, 9), part(1, 3)]));
        assert!(!is_group_whole([]));
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
