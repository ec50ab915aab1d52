//! A drive and a log whose states after a crash can all be listed.

use std::collections::{BTreeMap, BTreeSet};

use riopipe_order::region::{Region, RegionError};

/// A log region that remembers unfenced stores, write by write. A write that a crash tears counts
/// as absent: other tests check that a torn entry or mark is never used (T7).
#[derive(Clone)]
pub(crate) struct Words {
    durable: Vec<u8>,
    now: Vec<u8>,
    pending: Vec<(usize, Vec<u8>)>,
}

impl Words {
    pub(crate) fn new(len: usize) -> Self {
        Self { durable: vec![0; len], now: vec![0; len], pending: Vec::new() }
    }

    /// How many states a power cut can leave.
    pub(crate) fn cuts(&self) -> u32 {
        1 << self.pending.len()
    }

    /// The state in which exactly the writes are present whose bit is set.
    pub(crate) fn cut(&self, which: u32) -> Self {
        let mut bytes = self.durable.clone();
        for (i, (offset, data)) in self.pending.iter().enumerate() {
            if which >> i & 1 != 0 {
                bytes[*offset..offset + data.len()].copy_from_slice(data);
            }
        }
        Self { durable: bytes.clone(), now: bytes, pending: Vec::new() }
    }

    /// The region as it is, for a reader after the process has died.
    pub(crate) fn as_is(&self) -> Self {
        self.cut(u32::MAX)
    }
}

impl Region for Words {
    fn len(&self) -> usize {
        self.now.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.now[offset..offset + into.len()]);
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.now[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.pending.push((offset, bytes.to_vec()));
    }

    fn write_word(&mut self, offset: usize, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }

    fn fence(&mut self) -> Result<(), RegionError> {
        self.durable.copy_from_slice(&self.now);
        self.pending.clear();
        Ok(())
    }
}

/// The possible contents of a block.
#[derive(Clone, Default)]
struct Block {
    /// The possible contents at rest, one of which is the real one. Empty stands for zeroes alone.
    rest: BTreeSet<u64>,
    /// Completed and not flushed, oldest first.
    cached: Vec<u64>,
}

/// A write or FLUSH in flight.
#[derive(Clone)]
struct Op {
    ticket: u32,
    /// Block and content; none for a FLUSH.
    writes: Vec<(u64, u64)>,
    flush: bool,
    /// Of a FLUSH: how much of each block's cache it covers (M2).
    covers: BTreeMap<u64, u64>,
}

/// A drive that keeps all its possible futures.
#[derive(Clone, Default)]
pub(crate) struct Drive {
    pub(crate) volatile: bool,
    blocks: BTreeMap<u64, Block>,
    in_flight: Vec<Op>,
}

impl Drive {
    pub(crate) fn new(volatile: bool) -> Self {
        Self { volatile, ..Self::default() }
    }

    pub(crate) fn write(&mut self, ticket: u32, writes: Vec<(u64, u64)>) {
        self.in_flight.push(Op { ticket, writes, flush: false, covers: BTreeMap::new() });
    }

    pub(crate) fn flush(&mut self, ticket: u32) {
        // A FLUSH covers the writes that had completed by now.
        let last = |block: &Block| block.cached.last().copied();
        let covers = self.blocks.iter().filter_map(|(lba, b)| Some((*lba, last(b)?))).collect();
        self.in_flight.push(Op { ticket, writes: Vec::new(), flush: true, covers });
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Finishes one operation: its ticket, and whether it was a FLUSH.
    pub(crate) fn finish(&mut self, index: usize) -> (u32, bool) {
        let op = self.in_flight.remove(index);
        for (lba, content) in op.writes {
            let block = self.blocks.entry(lba).or_default();
            if self.volatile {
                block.cached.push(content);
            } else {
                block.rest = BTreeSet::from([content]);
            }
        }
        for (lba, content) in op.covers {
            let block = self.blocks.entry(lba).or_default();
            if let Some(at) = block.cached.iter().position(|c| *c == content) {
                block.cached.drain(..=at);
                block.rest = BTreeSet::from([content]);
            }
        }
        (op.ticket, op.flush)
    }

    /// Power is lost: each block keeps its content at rest, or any of its cached writes.
    pub(crate) fn power_cut(&self) -> Self {
        let mut after = self.clone();
        for op in after.in_flight.drain(..) {
            for (lba, content) in op.writes {
                let block = after.blocks.entry(lba).or_default();
                block.rest_or_zero().insert(content);
            }
        }
        for block in after.blocks.values_mut() {
            let cached = std::mem::take(&mut block.cached);
            block.rest_or_zero().extend(cached);
        }
        after
    }

    /// The process of the drive's user has died. Operations in flight end all the same (M4), and
    /// recovery waits for them (T8).
    pub(crate) fn drained(&self) -> Self {
        let mut after = self.clone();
        while !after.in_flight.is_empty() {
            after.finish(0);
        }
        after
    }

    /// All that a read may find in a block; 0 for zeroes.
    pub(crate) fn may_hold(&self, lba: u64) -> BTreeSet<u64> {
        match self.blocks.get(&lba) {
            None => BTreeSet::from([0]),
            Some(Block { cached, .. }) if !cached.is_empty() => {
                BTreeSet::from([cached[cached.len() - 1]])
            }
            Some(block) if block.rest.is_empty() => BTreeSet::from([0]),
            Some(block) => block.rest.clone(),
        }
    }

    /// The number of possible states of its blocks: the subsets of lost writes.
    pub(crate) fn states(&self) -> u64 {
        self.blocks.values().map(|block| block.rest.len().max(1) as u64).product()
    }
}

impl Block {
    fn rest_or_zero(&mut self) -> &mut BTreeSet<u64> {
        if self.rest.is_empty() {
            self.rest.insert(0);
        }
        &mut self.rest
    }
}
