//! A target's drives at their worst: operations end in any order, a volatile cache loses any of its
//! unflushed blocks, and an operation in flight at a crash lands or does not.

use std::collections::BTreeMap;

use riopipe_order::block_device::{BlockDevice, Data, Done, IoError, Submitted};
use riopipe_session::target::{ConnId, Event, OpId, Shared, TargetEnv};

use super::region::Part;
use riopipe_testkit::Random;

#[derive(Clone, Debug)]
enum What {
    Write(Vec<u8>),
    Zero(u64),
    Read(u64),
    /// A flush that covers the writes that had completed when it was begun: cached blocks up to
    /// this number.
    Flush(u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) op: OpId,
    lba: u64,
    what: What,
}

/// A block that has completed and is not durable, with the number of its completion.
type Cached = (u64, u64, Vec<u8>);

#[derive(Default)]
pub(crate) struct Drive {
    volatile: bool,
    durable: BTreeMap<u64, Vec<u8>>,
    cache: Vec<Cached>,
    completions: u64,
    pub(crate) pending: Vec<Pending>,
}

impl Drive {
    pub(crate) fn new(volatile: bool) -> Self {
        Self { volatile, ..Self::default() }
    }

    /// The content that a read finds.
    pub(crate) fn block(&self, lba: u64) -> Vec<u8> {
        let cached = self.cache.iter().rev().find(|(_, at, _)| *at == lba);
        cached.map_or_else(|| self.durable_block(lba), |(_, _, bytes)| bytes.clone())
    }

    /// The content that a read finds after a power cut that loses all that may be lost.
    pub(crate) fn durable_block(&self, lba: u64) -> Vec<u8> {
        self.durable.get(&lba).cloned().unwrap_or_else(|| vec![0; 4096])
    }

    fn put(&mut self, lba: u64, bytes: Vec<u8>) {
        self.completions += 1;
        if self.volatile {
            self.cache.push((self.completions, lba, bytes));
        } else {
            self.durable.insert(lba, bytes);
        }
    }

    fn apply(&mut self, lba: u64, what: What) -> Option<Vec<u8>> {
        match what {
            What::Write(bytes) => {
                for (block, lba) in bytes.chunks(4096).zip(lba..) {
                    self.put(lba, block.to_vec());
                }
            }
            What::Zero(blocks) => (lba..lba + blocks).for_each(|lba| self.put(lba, vec![0; 4096])),
            What::Read(blocks) => {
                let lbas = lba..lba + blocks;
                return Some(lbas.map(|lba| self.block(lba)).collect::<Vec<_>>().concat());
            }
            What::Flush(upto) => {
                for (number, lba, bytes) in std::mem::take(&mut self.cache) {
                    if number <= upto {
                        self.durable.insert(lba, bytes);
                    } else {
                        self.cache.push((number, lba, bytes));
                    }
                }
            }
        }
        None
    }

    /// The target has died: operations in flight land or do not, in any order. With a power cut,
    /// any part of the cache is left, and of each block any version.
    pub(crate) fn crash(&mut self, power: bool, random: &mut Random) {
        while !self.pending.is_empty() {
            let at = random.index(self.pending.len());
            let Pending { lba, what, .. } = self.pending.swap_remove(at);
            if matches!(what, What::Write(_) | What::Zero(_)) && random.one_in(2) {
                self.apply(lba, what);
            }
        }
        if power {
            let mut cache = std::mem::take(&mut self.cache);
            while !cache.is_empty() {
                let (_, lba, bytes) = cache.swap_remove(random.index(cache.len()));
                if random.one_in(2) {
                    self.durable.insert(lba, bytes);
                }
            }
        }
    }
}

impl Drive {
    fn begin(&mut self, op: u64, lba: u64, what: What) -> Submitted<Vec<u8>> {
        self.pending.push(Pending { op: OpId(op), lba, what });
        Submitted::Pending
    }
}

impl BlockDevice for Drive {
    type Buf = Vec<u8>;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_, Vec<u8>>) -> Submitted<Vec<u8>> {
        self.begin(op, lba, What::Write(data.bytes().to_vec()))
    }
    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.begin(op, lba, What::Read(blocks))
    }
    fn flush(&mut self, op: u64) -> Submitted<Vec<u8>> {
        let upto = self.completions;
        self.begin(op, 0, What::Flush(upto))
    }
    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.begin(op, lba, What::Zero(blocks))
    }
    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.begin(op, lba, What::Zero(blocks))
    }
    fn kick(&mut self, _: u64) {}
    /// In the order in which they were begun.
    fn poll(&mut self, _: u64, done: &mut Vec<Done<Vec<u8>>>) {
        for Pending { op, lba, what } in std::mem::take(&mut self.pending) {
            done.push(Done { op: op.0, result: Ok(self.apply(lba, what)) });
        }
    }
    fn next_deadline(&self) -> Option<u64> {
        None
    }
    fn in_flight(&self) -> usize {
        self.pending.len()
    }
}

/// The environment of a target's connections.
pub(crate) struct Media {
    pub(crate) shared: Shared<Part>,
    pub(crate) drives: Vec<Drive>,
    pub(crate) notices: Vec<ConnId>,
    pub(crate) now: u64,
}

impl Media {
    /// Ends an operation of a drive: its id, and its result.
    pub(crate) fn end(&mut self, ns: usize, at: usize) -> (OpId, Result<Option<Vec<u8>>, IoError>) {
        let Pending { op, lba, what } = self.drives[ns].pending.remove(at);
        (op, Ok(self.drives[ns].apply(lba, what)))
    }
}

impl TargetEnv for Media {
    type Buf = Vec<u8>;
    type Device = Drive;
    type Region = Part;

    fn now(&self) -> u64 {
        self.now
    }
    fn alloc(&mut self, len: usize) -> Option<Vec<u8>> {
        Some(vec![0xee; len])
    }
    fn device(&mut self, ns: usize) -> &mut Drive {
        &mut self.drives[ns]
    }
    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<Part>) -> T) -> T {
        f(&mut self.shared)
    }
    fn notify(&mut self, conn: ConnId) {
        self.notices.push(conn);
    }
    fn log(&mut self, _: Event<'_>) {}
}
