//! An area: a ring of blocks with the records of one stream.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo};
use crate::file_journal::record::{Epoch, Header, Position, Record, RecordId};
use crate::format::layout::Layout;
use crate::probe::{Plant, is_bug_planted};
use crate::storage::StreamNo;
use crate::tid::Tid;

/// The part of an area that has records.
#[derive(Debug)]
pub struct Area {
    stream: StreamNo,
    /// The blocks of the ring.
    blocks: Vec<BlockNo>,
    /// The end of the last record.
    head: Position,
    /// The records that are not obsolete: their transaction, and where they begin.
    records: VecDeque<(Tid, Position)>,
    /// The transaction of the last record, and the first record with it.
    last: (Tid, Position),
}

impl Area {
    /// An empty area.
    ///
    /// Panics if it has no block.
    #[must_use]
    pub fn new(stream: StreamNo, blocks: Vec<BlockNo>) -> Self {
        assert!(!blocks.is_empty(), "an area has blocks");
        Self {
            stream,
            blocks,
            head: Position(0),
            records: VecDeque::new(),
            last: Default::default(),
        }
    }

    /// The oldest record that is not obsolete, or the head.
    #[must_use]
    pub fn oldest(&self) -> Position {
        self.records.front().map_or(self.head, |&(_, position)| position)
    }

    /// The end of the last record.
    #[must_use]
    pub const fn head(&self) -> Position {
        self.head
    }

    /// Whether a record of `blocks` blocks fits. All records in the way must be obsolete, and the
    /// commit that made them so must be released: their blocks are written as fresh.
    #[must_use]
    pub fn has_space(&self, blocks: usize) -> bool {
        self.head.0 + blocks as u64 - self.oldest().0 <= self.blocks.len() as u64
    }

    /// Whether half of the area is in use: a main commit should make records obsolete.
    #[must_use]
    pub fn is_half_full(&self) -> bool {
        self.head.0 - self.oldest().0 > self.blocks.len() as u64 / 2
    }

    /// Drops the records that a durable and released main commit has made obsolete.
    pub fn on_commit_released(&mut self, durable: Tid) {
        while self.records.front().is_some_and(|&(tid, _)| tid <= durable) {
            self.records.pop_front();
        }
    }

    /// Appends a record: gives it its place, and returns the blocks to be written.
    ///
    /// Panics if there is no space.
    pub fn append(&mut self, layout: &Layout, record: &mut Record) -> Vec<(BlockNo, Block)> {
        let header = &mut record.header;
        header.stream = self.stream;
        header.position = self.head;
        header.oldest = self.oldest();
        let tid = header.tid;
        if self.last.0 != tid {
            self.last = (tid, self.head);
        }
        header.first = self.last.1;
        let encoded = record.encode(layout);
        assert!(self.has_space(encoded.len()), "the caller has asked for space");
        let first = self.head.0;
        self.records.push_back((tid, self.head));
        self.head.0 += encoded.len() as u64;
        let len = self.blocks.len() as u64;
        (first..)
            .zip(encoded)
            .map(|(at, block)| (self.blocks[(at % len) as usize], block))
            .collect()
    }
}

/// Finds the records of a mount in an area after a crash that are newer than main transaction
/// `durable`, in their order. `read` returns block `n` of the area.
///
/// The engine keeps a prefix of a stream's groups, so a record is there with all that were written
/// before it. A record that misses one of them is dropped, with all after it.
#[must_use]
pub fn find_records(
    layout: &Layout,
    stream: StreamNo,
    blocks: u64,
    epoch: Epoch,
    durable: Tid,
    read: &mut dyn FnMut(u64) -> Option<Block>,
) -> FoundRecords {
    let mut found: Vec<(Record, usize)> = Vec::new();
    for index in 0..blocks {
        let Some(first) = read(index) else { continue };
        let mut next = |n: usize| read((index + n as u64) % blocks);
        if let Some((record, len)) = Record::decode(layout, &first, &mut next) {
            let header = &record.header;
            // A block of an earlier lap, or a copy of a record in file data, is at a wrong place.
            if (header.epoch == epoch || is_bug_planted(Plant::EpochIgnored))
                && header.stream == stream
                && header.position.0 % blocks == index
            {
                found.push((record, len));
            }
        }
    }
    found.sort_by_key(|(record, _)| record.header.position);
    let mut found_records = FoundRecords::default();
    let Some((last, _)) = found.last() else { return found_records };
    // Each needed record up to the last one must be there. Two transactions may be open at a time.
    // If the older one is durable, the needed records begin with the first one of the last record's
    // transaction: those before it may be written over already, by a record that was lost. If it is
    // not, nothing has been written over the records that counted when the last one was written.
    let Header { tid, oldest, first, .. } = last.header;
    if tid <= durable && !is_bug_planted(Plant::ObsoleteApplied) {
        // All are obsolete. A record that was lost may have written over any of them.
        return found_records;
    }
    let mut expected = if tid <= durable.next() { first } else { oldest };
    for (record, len) in found {
        let Header { position, id, tid, .. } = record.header;
        if position < expected {
            continue;
        }
        if position > expected {
            found_records.missing = Some(id);
            break;
        }
        expected.0 += len as u64;
        if tid > durable || is_bug_planted(Plant::ObsoleteApplied) {
            found_records.records.push(record);
        }
    }
    found_records
}

/// The records of an area after a crash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundRecords {
    /// Those that are newer than the last durable main transaction, in their order.
    pub records: Vec<Record>,
    /// A record that was dropped because one before it is missing.
    pub missing: Option<RecordId>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{BLOCK_BYTES, Ino};
    use crate::file_journal::record::Change;
    use crate::testing::layout;
    use alloc::collections::BTreeMap;

    const EPOCH: Epoch = Epoch(*b"an epoch of test");

    fn record(id: u64, tid: u64, names: usize) -> Record {
        let header = Header { epoch: EPOCH, id: RecordId(id), tid: Tid(tid), ..Header::default() };
        let entry = |n| Change::Entry {
            parent: Ino(2),
            child: Ino(n as u32 + 11),
            kind: 1,
            name: alloc::vec![b'x'; 200],
        };
        Record { header, dependencies: Vec::new(), changes: (0..names).map(entry).collect() }
    }

    fn ids(found: &FoundRecords) -> Vec<u64> {
        found.records.iter().map(|record| record.header.id.0).collect()
    }

    #[test]
    fn records_wrap_and_the_newer_ones_are_found_in_order() {
        let mut area = Area::new(StreamNo(2), (100..110).map(BlockNo).collect());
        let mut drive: BTreeMap<BlockNo, Block> = BTreeMap::new();
        let mut written = Vec::new();
        for id in 1..=50 {
            // Two transactions may be open: one runs, and one is committed.
            let tid = id / 2;
            let mut record = record(id, tid, (id % 3) as usize * 20);
            let blocks = Record::blocks_needed(&[], &record.changes);
            if !area.has_space(blocks) {
                area.on_commit_released(Tid(tid - 1));
                assert!(area.has_space(blocks));
            }
            drive.extend(area.append(&layout(), &mut record));
            written.push((id, tid));
            for durable in [tid.saturating_sub(2), tid - tid.min(1), tid] {
                let mut read = |n| drive.get(&BlockNo(100 + n)).copied();
                let found =
                    find_records(&layout(), StreamNo(2), 10, EPOCH, Tid(durable), &mut read);
                let expected: Vec<u64> = written
                    .iter()
                    .rev()
                    .take(area.records.len())
                    .filter(|&&(_, tid)| tid > durable)
                    .map(|&(id, _)| id)
                    .rev()
                    .collect();
                assert_eq!(
                    ids(&found),
                    expected,
                    "after record {id}, transaction {durable} durable"
                );
            }
        }
        let mut read = |n| drive.get(&BlockNo(100 + n)).copied();
        let other = find_records(&layout(), StreamNo(3), 10, EPOCH, Tid(0), &mut read);
        assert_eq!(ids(&other), [], "another stream");
        let other = Epoch(*b"another epoch...");
        let other = find_records(&layout(), StreamNo(2), 10, other, Tid(0), &mut read);
        assert_eq!(ids(&other), [], "another mount");
    }

    #[test]
    fn a_lost_record_over_an_obsolete_one_does_not_hide_the_records_before_it() {
        let mut area = Area::new(StreamNo(1), (0..4).map(BlockNo).collect());
        let mut drive: BTreeMap<BlockNo, Block> = BTreeMap::new();
        for (id, tid) in [(1, 5), (2, 5), (3, 6), (4, 6)] {
            drive.extend(area.append(&layout(), &mut record(id, tid, 0)));
        }
        area.on_commit_released(Tid(5));
        let lost = area.append(&layout(), &mut record(5, 6, 0));
        assert_eq!(lost[0].0, BlockNo(0));
        drive.insert(BlockNo(0), [0; BLOCK_BYTES]);
        let mut read = |n| drive.get(&BlockNo(n)).copied();
        let found = find_records(&layout(), StreamNo(1), 4, EPOCH, Tid(5), &mut read);
        assert_eq!((ids(&found), found.missing), (alloc::vec![3, 4], None));
    }

    /// A record that wraps, and that a crash has undone, has written over obsolete ones.
    #[test]
    fn obsolete_records_may_be_missing() {
        let mut area = Area::new(StreamNo(1), (0..20).map(BlockNo).collect());
        let mut drive: BTreeMap<BlockNo, Block> = BTreeMap::new();
        for id in 1..=4 {
            drive.extend(area.append(&layout(), &mut record(id, 9, 30)));
        }
        drive.insert(BlockNo(0), [0; BLOCK_BYTES]);
        let mut read = |n| drive.get(&BlockNo(n)).copied();
        let found = find_records(&layout(), StreamNo(1), 20, EPOCH, Tid(9), &mut read);
        assert_eq!(found, FoundRecords::default());
        let found = find_records(&layout(), StreamNo(1), 20, EPOCH, Tid(8), &mut read);
        assert_eq!((ids(&found), found.missing), (alloc::vec![], Some(RecordId(2))));
    }

    #[test]
    fn a_record_behind_a_missing_one_is_dropped() {
        let mut area = Area::new(StreamNo(1), (0..20).map(BlockNo).collect());
        let mut drive: BTreeMap<BlockNo, Block> = BTreeMap::new();
        for id in 1..=5 {
            drive.extend(area.append(&layout(), &mut record(id, 9, 30)));
        }
        drive.insert(BlockNo(5), [0; BLOCK_BYTES]);
        let mut read = |n| drive.get(&BlockNo(n)).copied();
        let found = find_records(&layout(), StreamNo(1), 20, EPOCH, Tid(8), &mut read);
        assert_eq!((ids(&found), found.missing), (alloc::vec![1, 2], Some(RecordId(4))));
    }
}
