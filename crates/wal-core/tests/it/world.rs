//! A log, the drives below it, and a model of its content.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;

use riopipe_nvme::digest::soft;
use riopipe_testkit::Random;
use riopipe_wal_core::format::{Anchor, PAYLOAD_BYTES, begin};
use riopipe_wal_core::opening::{End, FindError, find_end};
use riopipe_wal_core::reading::{Assembler, ReadError, Record, locate};
use riopipe_wal_core::record::{Frame, Kind};
use riopipe_wal_core::ring::{Extent, Ring};
use riopipe_wal_core::writer::{Config, Marks, Writer};
use riopipe_wal_core::{BLOCK_BYTES, Lsn};

pub(crate) const LOG: u64 = 0x10c;
pub(crate) const START: u64 = 1000;

pub(crate) type Block = [u8; BLOCK_BYTES];

/// The content of a block that a reader gets, and the content after a power cut.
#[derive(Clone)]
struct Cell {
    seen: Box<Block>,
    durable: Box<Block>,
}

/// The guarantee of the volume below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Below {
    /// Engine `rio`: a prefix of groups; later blocks are zeroed, or were never written.
    Rio,
    /// Engine `sync` and weaker: any subset of the blocks that are not durable.
    Any,
}

/// A group in flight.
pub(crate) struct Flying {
    pub(crate) seq: u64,
    pub(crate) writes: Vec<(u64, Box<Block>)>,
    pub(crate) flush: bool,
    tag: u64,
}

pub(crate) struct World {
    pub(crate) ring: Ring,
    pub(crate) below: Below,
    cells: BTreeMap<u64, Cell>,
    pub(crate) writer: Writer,
    pub(crate) queue: Vec<u8>,
    next: Lsn,
    seq: u64,
    pub(crate) marks: Marks,
    pub(crate) flying: VecDeque<Flying>,
    /// The tag of the stream's last durable group, as recovery reports it.
    tag: u64,
    epochs: u64,
    /// All records since the log's creation.
    pub(crate) model: Vec<Record>,
    /// Records below this Lsn were reported durable.
    pub(crate) confirmed: Lsn,
    pub(crate) trim: Lsn,
    /// Whether a caller waits for all appended records.
    pub(crate) waits: bool,
}

fn config(ring: Ring, epoch: u64) -> Config {
    // Group size and limits small enough for the tests to reach them.
    let (groups, flushes, group_blocks) = (3, 2, 4);
    let (volatile, crc) = (true, soft);
    Config { log: LOG, ring, epoch, volatile, groups, flushes, group_blocks, crc }
}

impl World {
    pub(crate) fn new(blocks: u64, below: Below) -> Self {
        let ring = Ring::new(START, blocks).unwrap();
        let writer = Writer::new(config(ring, 100), &End::of_new(100));
        let mut world = Self {
            ring,
            below,
            cells: BTreeMap::new(),
            writer,
            queue: Vec::new(),
            next: Lsn::ZERO,
            seq: 0,
            marks: Marks::default(),
            flying: VecDeque::new(),
            tag: 1,
            epochs: 100,
            model: Vec::new(),
            confirmed: Lsn::ZERO,
            trim: Lsn::ZERO,
            waits: false,
        };
        let mut first = [0; 2 * BLOCK_BYTES];
        let anchor = Anchor { log: LOG, start: START - 1, blocks: blocks + 1 };
        begin(&anchor, 100, soft, &mut first);
        let block: Box<Block> = Box::new(first[BLOCK_BYTES..].try_into().unwrap());
        world.cells.insert(START, Cell { seen: block.clone(), durable: block });
        world
    }

    pub(crate) fn append(&mut self, kind: Kind, bytes: &[u8]) -> Lsn {
        let lsn = self.next;
        let frame = Frame::encode(kind, bytes.len(), soft(0, bytes), lsn, soft);
        self.queue.extend_from_slice(&frame);
        self.queue.extend_from_slice(bytes);
        self.next = lsn.plus(frame.len() + bytes.len());
        self.model.push(Record { lsn, kind, bytes: bytes.to_vec() });
        lsn
    }

    /// Submits all groups that are due now; returns their number.
    pub(crate) fn commit(&mut self) -> usize {
        let mut groups = 0;
        while let Some(group) = self.writer.plan(self.queue.len(), self.wanted()) {
            let [a, b] = self.ring.extents(group.first, group.blocks);
            let bytes = |blocks: u64| vec![0xee; blocks as usize * BLOCK_BYTES];
            let (mut one, mut two) = (bytes(a.blocks), bytes(b.blocks));
            self.writer.pack(&group, &self.queue, [&mut one, &mut two]);
            self.queue.drain(..group.bytes);
            self.seq += 1;
            let mut writes = Vec::new();
            for (Extent { lba, .. }, data) in [a, b].into_iter().zip([one, two]) {
                for (block, lba) in data.chunks_exact(BLOCK_BYTES).zip(lba..) {
                    let block: Block = block.try_into().unwrap();
                    writes.push((lba, Box::new(block)));
                }
            }
            let tag = group.first + group.blocks;
            let flush = group.flush;
            self.flying.push_back(Flying { seq: self.seq, writes, flush, tag });
            self.writer.on_submitted(&group, self.seq);
            groups += 1;
        }
        groups
    }

    fn wanted(&self) -> Lsn {
        if self.waits { self.next } else { Lsn::ZERO }
    }

    /// Advances the marks by this many groups each, as far as they can go.
    pub(crate) fn advance(&mut self, complete: u64, durable: u64, released: u64) {
        let marks = &mut self.marks;
        marks.complete = (marks.complete + complete).min(self.seq);
        marks.durable = (marks.durable + durable).min(marks.complete);
        marks.released = (marks.released + released).min(marks.durable);
        while let Some(group) = self.flying.front().filter(|group| group.seq <= marks.durable) {
            self.tag = group.tag;
            for (lba, block) in &group.writes {
                let cell = Cell { seen: block.clone(), durable: block.clone() };
                self.cells.insert(*lba, cell);
            }
            self.flying.pop_front();
        }
        let marks = *marks;
        self.writer.on_marks(marks, self.wanted());
        self.confirmed = self.confirmed.max(self.writer.durable());
    }

    /// Writes and releases everything, unless the ring is full.
    pub(crate) fn settle(&mut self) {
        while self.commit() > 0 || self.marks.released < self.seq {
            self.advance(99, 99, 99);
        }
    }

    pub(crate) fn trim(&mut self, lsn: Lsn) {
        if self.writer.may_trim(lsn).is_err() {
            return;
        }
        let oldest = match self.writer.block_of(lsn) {
            Some(number) => number,
            None => {
                let blocks = self.writer.blocks();
                let cells = &self.cells;
                let mut read = reader(cells, self.ring);
                locate(self.ring, LOG, soft, lsn, blocks, &mut read).unwrap()
            }
        };
        self.writer.trim(lsn, oldest);
        self.trim = self.trim.max(lsn);
    }

    /// The writing machine crashes, or (`power`) all machines lose power. Returns the group up to
    /// which all blocks have landed, for engine `rio`.
    pub(crate) fn crash(&mut self, coin: &mut Random, power: bool) {
        let blank = || Box::new([0; BLOCK_BYTES]);
        let kept = self.marks.durable + coin.below(self.seq - self.marks.durable + 1);
        for group in std::mem::take(&mut self.flying) {
            let is_kept = group.seq <= kept;
            if is_kept {
                self.tag = group.tag;
            }
            for (lba, block) in group.writes {
                let cell = self
                    .cells
                    .entry(lba)
                    .or_insert_with(|| Cell { seen: blank(), durable: blank() });
                match self.below {
                    Below::Rio if is_kept => cell.seen = block,
                    Below::Rio if coin.one_in(2) => cell.seen = blank(),
                    Below::Rio => {}
                    Below::Any if coin.one_in(2) => cell.seen = block,
                    Below::Any => {}
                }
                if self.below == Below::Rio {
                    // Recovery flushes the drives.
                    cell.durable = cell.seen.clone();
                }
            }
        }
        if power {
            for cell in self.cells.values_mut() {
                match coin.one_in(2) {
                    true => cell.seen = cell.durable.clone(),
                    false => cell.durable = cell.seen.clone(),
                }
            }
        }
    }

    /// The tag that recovery reports for the stream's last group.
    pub(crate) fn hint(&self) -> Option<u64> {
        (self.below == Below::Rio).then_some(self.tag)
    }

    pub(crate) fn find(&self) -> Result<End, FindError<Infallible>> {
        let mut read = reader(&self.cells, self.ring);
        find_end(self.ring, LOG, soft, self.hint(), &mut read)
    }

    /// Opens the log, compares it with the model, and continues with it.
    pub(crate) fn reopen(&mut self) {
        let end = self.find().unwrap();
        self.go_on(end, true);
    }

    /// As [`reopen`](Self::reopen); `careful`: with all steps of opening.
    pub(crate) fn go_on(&mut self, end: End, careful: bool) {
        assert!(
            end.lsn >= self.confirmed,
            "{} is lost; the log ends at {}",
            self.confirmed,
            end.lsn
        );
        assert!(end.trim <= self.trim, "never trimmed");
        let found = self.read(&end, end.trim).unwrap();
        let records = self.model.iter().filter(|record| record.lsn >= end.trim);
        let model: Vec<_> = records.take(found.len()).cloned().collect();
        assert!(found == model, "the records differ");
        let is_there = |lsn: Lsn| lsn < end.trim || found.last().is_some_and(|r| lsn <= r.lsn);
        let missing = self.model.iter().map(|r| r.lsn).find(|lsn| !is_there(*lsn));
        let is_whole = missing.is_none_or(|lsn| lsn >= self.confirmed);
        assert!(is_whole, "{missing:?} is lost; up to {} is durable", self.confirmed);
        let checkpoints = found.iter().filter(|record| record.kind == Kind::Checkpoint);
        let newest = checkpoints.map(|record| record.lsn).next_back();
        assert_eq!(end.checkpoint, newest, "the last checkpoint");
        self.model.retain(|record| is_there(record.lsn));
        self.confirmed = end.lsn;
        self.trim = end.trim;
        if careful && self.below == Below::Any {
            for number in end.unsettled() {
                let cell = self.cells.get_mut(&self.ring.lba(number)).unwrap();
                cell.durable = cell.seen.clone();
            }
        }
        self.open(&end);
    }

    /// Continues after `end`, with any content.
    pub(crate) fn open(&mut self, end: &End) {
        self.queue.clear();
        self.next = end.lsn;
        self.epochs += 1;
        self.writer = Writer::new(config(self.ring, self.epochs), end);
        self.marks = Marks { complete: self.seq, durable: self.seq, released: self.seq };
    }

    /// The records from `from` on, up to `end`.
    pub(crate) fn read(&self, end: &End, from: Lsn) -> Result<Vec<Record>, ReadError<Infallible>> {
        let mut read = reader(&self.cells, self.ring);
        let first = locate(self.ring, LOG, soft, from, end.oldest..end.number, &mut read)?;
        let mut assembler = Assembler::new(LOG, soft, from);
        let mut records = Vec::new();
        for number in first..end.number {
            let mut block = [0; BLOCK_BYTES];
            let Ok(()) = read(number % self.ring.blocks(), &mut block);
            assembler.add_block::<Infallible>(number, &block)?;
            while let Some(record) = assembler.next_record::<Infallible>()? {
                records.push(record);
            }
        }
        Ok(records)
    }

    /// Writes these blocks to the drives' caches.
    pub(crate) fn arrive(&mut self, writes: Vec<(u64, Box<Block>)>) {
        for (lba, block) in writes {
            let blank = Box::new([0; BLOCK_BYTES]);
            let durable = self.cells.remove(&lba).map_or(blank, |cell| cell.durable);
            self.cells.insert(lba, Cell { seen: block, durable });
        }
    }

    /// Cuts the power: the contents of all caches are lost.
    pub(crate) fn lose_caches(&mut self) {
        for cell in self.cells.values_mut() {
            cell.seen = cell.durable.clone();
        }
    }

    /// The bytes of block `number`, for damaging them.
    pub(crate) fn block(&mut self, number: u64) -> &mut Block {
        let cell = self.cells.get_mut(&self.ring.lba(number)).unwrap();
        &mut cell.seen
    }
}

/// A reader of places of the ring.
fn reader(
    cells: &BTreeMap<u64, Cell>,
    ring: Ring,
) -> impl FnMut(u64, &mut [u8]) -> Result<(), Infallible> + use<'_> {
    move |place, bytes| {
        assert!(place + (bytes.len() / BLOCK_BYTES) as u64 <= ring.blocks(), "within the ring");
        for (block, lba) in bytes.chunks_exact_mut(BLOCK_BYTES).zip(START + place..) {
            match cells.get(&lba) {
                Some(cell) => block.copy_from_slice(&cell.seen[..]),
                None => block.fill(0),
            }
        }
        Ok(())
    }
}

/// Bytes that differ for each seed.
pub(crate) fn bytes(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(31) ^ seed.wrapping_mul(0x9d)) as u8).collect()
}

/// Records that fill `blocks` blocks exactly, one each.
pub(crate) const ONE_BLOCK: usize = PAYLOAD_BYTES - 8;
