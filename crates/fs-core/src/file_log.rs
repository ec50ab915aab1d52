//! The content of an inode's next file-level transaction: its changes that are neither in a
//! durable main commit nor in an earlier record of its stream.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::Ino;
use crate::format::inode::INODE_BYTES;
use crate::probe::{Plant, is_bug_planted};
use crate::storage::GroupSeq;
use crate::sync::Mutex;
use crate::tid::Tid;

/// Ranges of blocks that do not overlap: the first block, and the one after the last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges(BTreeMap<u32, u32>);

impl Ranges {
    /// Adds a range.
    pub(crate) fn add(&mut self, mut first: u32, mut end: u32) {
        if first >= end {
            return;
        }
        // Ranges that overlap the new one or touch it become a part of it.
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back() {
            if other_end < first {
                break;
            }
            self.0.remove(&other);
            first = first.min(other);
            end = end.max(other_end);
        }
        self.0.insert(first, end);
    }

    /// The ranges in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.0.iter().map(|(&first, &end)| (first, end))
    }
}

/// The ranges of an inode that one main transaction has changed.
#[derive(Clone, Debug, Default)]
struct Generation {
    tid: Tid,
    ranges: Ranges,
}

/// The changes of an inode that no durable main commit and no record of its stream contains.
///
/// There are two generations at most: of the transaction that runs, and of the one that is being
/// committed. A record contains both, because the commit in flight may be lost.
#[derive(Debug, Default)]
pub(crate) struct FileLog {
    older: Generation,
    current: Generation,
    /// The last record.
    last: Option<LastRecord>,
}

/// The last record of an inode.
#[derive(Clone, Copy, Debug)]
struct LastRecord {
    seq: GroupSeq,
    /// The changes of the inode up to the record.
    changes: Changes,
}

/// How often an inode has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// All changes.
    pub(crate) all: u64,
    /// Those that are needed to read its data.
    pub(crate) data: u64,
}

impl FileLog {
    /// A range of blocks has changed in transaction `tid`.
    pub(crate) fn change_range(&mut self, first: u32, end: u32, tid: Tid) {
        if self.current.tid < tid {
            let next = Generation { tid, ..Generation::default() };
            // The generation before this one is durable: there is one commit at a time.
            self.older = core::mem::replace(&mut self.current, next);
        }
        self.current.ranges.add(first, end);
    }

    /// The ranges that a record must contain now.
    pub(crate) fn ranges(&self, durable: Tid) -> Ranges {
        let mut ranges = Ranges::default();
        for generation in [&self.older, &self.current] {
            if generation.tid > durable {
                generation.ranges.iter().for_each(|(first, end)| ranges.add(first, end));
            }
        }
        ranges
    }

    /// The group of the last record, if it contains all `changes`; with `data_only` all that are
    /// needed to read the data.
    pub(crate) fn record_of(&self, changes: Changes, data_only: bool) -> Option<GroupSeq> {
        let last = self.last?;
        let is_same =
            last.changes.data == changes.data && (data_only || last.changes.all == changes.all);
        is_same.then_some(last.seq)
    }

    /// A record with everything was submitted as group `seq`. Later records of the stream need not
    /// repeat it: if one of them is there after a crash, this one is, too.
    pub(crate) fn on_record(&mut self, seq: GroupSeq, changes: Changes) {
        self.older = Generation::default();
        self.current.ranges = Ranges::default();
        self.last = Some(LastRecord { seq, changes });
    }
}

/// The names in a directory that may not be in a record until a transaction is durable.
#[derive(Debug, Default)]
pub(crate) struct UnfitNames {
    names: BTreeMap<Vec<u8>, Tid>,
    /// The names that stayed when those that are fit again were dropped.
    kept: usize,
}

/// The names that a directory remembers at least before it drops those that are fit again.
const UNFIT_NAMES_MIN: usize = 1024;

impl UnfitNames {
    /// Adds a name, until transaction `tid` is durable.
    pub(crate) fn add(&mut self, name: &[u8], tid: Tid, durable: Tid) {
        // Only after their number has doubled: a long transaction makes many names unfit, and a
        // search of all of them for each new one would take longer and longer.
        if self.names.len() >= UNFIT_NAMES_MIN.max(2 * self.kept) {
            self.names.retain(|_, unfit| *unfit > durable);
            self.kept = self.names.len();
        }
        self.names.insert(name.to_vec(), tid);
    }

    /// Whether a name may be in a record.
    pub(crate) fn is_fit(&self, name: &[u8], durable: Tid) -> bool {
        self.names.get(name).is_none_or(|&tid| tid <= durable)
            || is_bug_planted(Plant::NameAlwaysFit)
    }
}

/// How an inode came into being: an entry in a directory.
#[derive(Debug)]
pub(crate) struct Creation {
    /// The directory.
    pub(crate) parent: Ino,
    /// The name.
    pub(crate) name: Vec<u8>,
    /// The transaction. Once it is durable, no record needs the entry.
    pub(crate) tid: Tid,
    /// Its first fields, encoded as on the drive.
    pub(crate) fields: Box<[u8; INODE_BYTES]>,
    /// The streams with a record that contains the entry, one bit each.
    logged_on: Mutex<u64>,
}

impl Creation {
    pub(crate) fn new(parent: Ino, name: &[u8], tid: Tid, fields: [u8; INODE_BYTES]) -> Arc<Self> {
        let fields = Box::new(fields);
        Arc::new(Self { parent, name: name.to_vec(), tid, fields, logged_on: Mutex::new(0) })
    }

    /// Whether a record of a stream contains the entry.
    pub(crate) fn is_logged_on(&self, stream: u16) -> bool {
        *self.logged_on.lock() >> (stream % 64) & 1 == 1
    }

    /// A record of a stream contains the entry.
    pub(crate) fn on_logged(&self, stream: u16) {
        *self.logged_on.lock() |= 1 << (stream % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn ranges_are_the_union(added in proptest::collection::vec((0..60_u32, 0..20_u32), 0..30)) {
            let (mut ranges, mut blocks) = (Ranges::default(), BTreeSet::new());
            for (first, len) in added {
                ranges.add(first, first + len);
                blocks.extend(first..first + len);
            }
            let covered: Vec<u32> = ranges.iter().flat_map(|(first, end)| first..end).collect();
            prop_assert_eq!(covered, blocks.into_iter().collect::<Vec<_>>());
            let apart = ranges.iter().zip(ranges.iter().skip(1)).all(|(a, b)| a.1 < b.0);
            prop_assert!(apart, "ranges that touch are one");
        }
    }

    #[test]
    fn a_record_contains_the_commit_in_flight_and_not_what_is_durable_or_logged() {
        let mut log = FileLog::default();
        log.change_range(0, 4, Tid(5));
        log.change_range(8, 9, Tid(6));
        let ranges = |log: &FileLog, durable| log.ranges(durable).iter().collect::<Vec<_>>();
        assert_eq!(ranges(&log, Tid(4)), [(0, 4), (8, 9)], "5 is in flight");
        assert_eq!(ranges(&log, Tid(5)), [(8, 9)], "5 is durable");
        log.on_record(GroupSeq(3), Changes { all: 7, data: 2 });
        assert_eq!(ranges(&log, Tid(4)), []);
        let record = |all, data, data_only| log.record_of(Changes { all, data }, data_only);
        assert_eq!(record(7, 2, false), Some(GroupSeq(3)));
        assert_eq!((record(8, 2, false), record(8, 2, true)), (None, Some(GroupSeq(3))));
        assert_eq!(record(8, 3, true), None);
    }

    /// One search of all names for each new one made 65,000 unlinks take half a minute.
    #[test]
    fn many_unfit_names_are_searched_a_few_times_only() {
        let mut names = UnfitNames::default();
        let mut searches = BTreeSet::new();
        for n in 0..100_000_u32 {
            names.add(&n.to_le_bytes(), Tid(7), Tid(6));
            searches.insert(names.kept);
        }
        assert!(searches.len() < 10, "{searches:?}");
        names.add(b"x", Tid(9), Tid(8));
        while names.names.len() > 50_000 {
            names.add(&names.names.len().to_be_bytes(), Tid(9), Tid(8));
        }
        assert!(!names.is_fit(b"x", Tid(8)), "those that are fit again are dropped");
    }

    #[test]
    fn a_name_is_unfit_until_the_transaction_is_durable() {
        let mut names = UnfitNames::default();
        names.add(b"x", Tid(7), Tid(6));
        assert!(!names.is_fit(b"x", Tid(6)) && names.is_fit(b"x", Tid(7)));
        assert!(names.is_fit(b"y", Tid(6)));
    }
}
