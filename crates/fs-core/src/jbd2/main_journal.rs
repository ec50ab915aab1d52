//! The state of the main journal: space, what is committed but not home, the tail.
//!
//! Nothing here waits. The caller submits what it gets, and reports what is durable.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo};
use crate::format::layout::Layout;
use crate::jbd2::format::{JournalError, JournalSuperblock, Shape, feature};
use crate::jbd2::recovery::Log;
use crate::jbd2::writer;
use crate::storage::{BlockWrite, Placement};
use crate::tid::Tid;

/// The smallest log, in blocks (`JBD2_MIN_JOURNAL_BLOCKS`).
const LOG_BLOCKS_MIN: u32 = 1024;

/// A transaction in the log.
#[derive(Debug)]
struct Logged {
    tid: Tid,
    /// Where it begins.
    start: u32,
    /// Its blocks that are not home, and of which no later transaction in the log has a version.
    pending: usize,
}

/// A transaction that was encoded and is not durable yet.
#[derive(Debug)]
struct InFlight {
    tid: Tid,
    start: u32,
    blocks: Vec<(BlockNo, Arc<Block>)>,
    revoked: Vec<BlockNo>,
}

/// The writes of a commit.
#[derive(Debug)]
pub struct Commit {
    /// The superblock of the journal, which must be durable before the rest is written.
    pub start: Option<BlockWrite>,
    /// Descriptors, data, revoke blocks.
    pub body: Vec<BlockWrite>,
    /// The commit block, which is written after the body.
    pub commit: BlockWrite,
}

/// Blocks that are to be written home.
#[derive(Debug, Default)]
pub struct Checkpoint {
    /// The writes.
    pub writes: Vec<BlockWrite>,
    versions: Vec<(BlockNo, Tid)>,
}

/// The state of the main journal. See the [module](self).
#[derive(Debug)]
pub struct MainJournal {
    layout: Layout,
    superblock: JournalSuperblock,
    shape: Shape,
    log: Log,
    /// The blocks of the journal.
    blocks: Vec<BlockNo>,
    /// Where the next transaction begins.
    head: u32,
    /// Where the log begins on the drive, by a superblock that is released.
    released_tail: u32,
    /// The transactions in the log, the oldest first.
    logged: VecDeque<Logged>,
    /// The latest durable version of each block that is not home.
    home: BTreeMap<BlockNo, (Tid, Arc<Block>)>,
    in_flight: Option<InFlight>,
    /// The tail in the superblock that was returned last.
    tail_in_superblock: u32,
}

impl MainJournal {
    /// The journal of a file system, which is empty: it was replayed. `blocks` are its blocks, and
    /// `next` is the next transaction.
    ///
    /// # Errors
    /// The journal is too small.
    pub fn new(
        layout: &Layout,
        mut superblock: JournalSuperblock,
        blocks: Vec<BlockNo>,
        next: Tid,
    ) -> Result<Self, JournalError> {
        let log = Log { first: superblock.first(), end: superblock.maxlen() };
        if log.len() < LOG_BLOCKS_MIN - 1 {
            let needed = LOG_BLOCKS_MIN;
            return Err(JournalError::TooSmall { blocks: superblock.maxlen(), needed });
        }
        // As the kernel does when it mounts.
        let mut incompat = superblock.incompat() | feature::REVOKE;
        incompat &= !(feature::CSUM_V2 | feature::CSUM_V3 | feature::ASYNC_COMMIT);
        if layout.csum_seed.is_some() {
            incompat |= feature::CSUM_V3;
        }
        if layout.is_64bit {
            incompat |= feature::IS_64BIT;
        }
        superblock.set_incompat(incompat);
        superblock.set_sequence(next.on_drive());
        superblock.set_start(0);
        let head = log.first;
        Ok(Self {
            shape: superblock.shape(layout),
            layout: layout.clone(),
            superblock,
            log,
            blocks,
            head,
            released_tail: head,
            logged: VecDeque::new(),
            home: BTreeMap::new(),
            in_flight: None,
            tail_in_superblock: head,
        })
    }

    /// The largest number of blocks of a transaction for which there is always space after a
    /// checkpoint.
    #[must_use]
    pub fn transaction_max(&self) -> usize {
        self.log.len() as usize / 2
    }

    /// Whether there is space for a transaction of `blocks` blocks and `revoked` revoked ones.
    #[must_use]
    pub fn has_space(&self, blocks: usize, revoked: usize) -> bool {
        let needed = writer::blocks_needed(&self.shape, blocks, revoked);
        // One block stays free: a full ring would be taken for an empty one.
        needed < (self.log.len() - self.used()) as usize
    }

    /// The blocks of the log that may not be written.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.log.distance(self.released_tail, self.head)
    }

    /// The blocks of the log.
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.log.len()
    }

    /// Encodes a transaction. There must be space.
    ///
    /// Panics if there is none, or if another transaction is in flight.
    pub fn encode_commit(
        &mut self,
        tid: Tid,
        blocks: &[(BlockNo, Arc<Block>)],
        revoked: &[BlockNo],
        seconds: u64,
    ) -> Commit {
        assert!(self.has_space(blocks.len(), revoked.len()), "the caller has made space");
        assert!(self.in_flight.is_none(), "there is one commit at a time");
        let start = (self.superblock.start() == 0).then(|| {
            self.superblock.set_start(self.head);
            self.superblock.set_sequence(tid.on_drive());
            self.superblock_write()
        });
        let encoded =
            writer::encode(&self.layout, &self.shape, tid.on_drive(), blocks, revoked, seconds);
        let mut body = Vec::with_capacity(encoded.len());
        let from = self.head;
        for data in encoded {
            // No state needs the old content: the tail is behind it, and that is released.
            let at = self.blocks[self.head as usize];
            body.push(BlockWrite { at, data, placement: Placement::Fresh });
            self.head = self.log.after(self.head, 1);
        }
        let commit = body.pop().expect("a transaction has a commit block");
        let (blocks, revoked) = (blocks.to_vec(), revoked.to_vec());
        self.in_flight = Some(InFlight { tid, start: from, blocks, revoked });
        Commit { start, body, commit }
    }

    /// The commit of transaction `tid` is durable.
    pub fn on_commit_durable(&mut self, tid: Tid) {
        let Some(InFlight { blocks, revoked, start, .. }) =
            self.in_flight.take_if(|commit| commit.tid == tid)
        else {
            return;
        };
        for block in revoked {
            if let Some((old, _)) = self.home.remove(&block) {
                self.unpend(old);
            }
        }
        let pending = blocks.len();
        for (at, data) in blocks {
            if let Some((old, _)) = self.home.insert(at, (tid, data)) {
                self.unpend(old);
            }
        }
        self.logged.push_back(Logged { tid, start, pending });
    }

    /// A block of a transaction is home, or its version there is not needed.
    fn unpend(&mut self, tid: Tid) {
        if let Ok(at) = self.logged.binary_search_by_key(&tid, |logged| logged.tid) {
            self.logged[at].pending -= 1;
        }
    }

    /// The latest durable version of a block that may not be home.
    #[must_use]
    pub fn committed(&self, at: BlockNo) -> Option<Arc<Block>> {
        self.home.get(&at).map(|(_, data)| Arc::clone(data))
    }

    /// Up to `max` blocks to be written home: those of the oldest transactions.
    #[must_use]
    pub fn plan_checkpoint(&self, max: usize) -> Checkpoint {
        let mut plan = Checkpoint::default();
        let mut oldest: Vec<_> =
            self.home.iter().map(|(&at, (tid, data))| (*tid, at, data)).collect();
        if max < oldest.len() {
            oldest.select_nth_unstable_by_key(max, |&(tid, at, _)| (tid, at));
            oldest.truncate(max);
        }
        oldest.sort_unstable_by_key(|&(_, at, _)| at);
        for (tid, at, data) in oldest {
            let data = Arc::clone(data);
            plan.writes.push(BlockWrite { at, data, placement: Placement::InPlace });
            plan.versions.push((at, tid));
        }
        plan
    }

    /// The writes of a checkpoint are durable and released.
    pub fn on_checkpoint_released(&mut self, plan: Checkpoint) {
        for (at, tid) in plan.versions {
            if self.home.get(&at).is_some_and(|&(version, _)| version == tid) {
                self.home.remove(&at);
                self.unpend(tid);
            }
        }
        while self.logged.front().is_some_and(|oldest| oldest.pending == 0) {
            self.logged.pop_front();
        }
    }

    /// Where the log begins: at the oldest transaction that is needed.
    fn tail(&self) -> (u32, Option<Tid>) {
        match (self.logged.front(), &self.in_flight) {
            (Some(oldest), _) => (oldest.start, Some(oldest.tid)),
            (None, Some(in_flight)) => (in_flight.start, Some(in_flight.tid)),
            (None, None) => (self.head, None),
        }
    }

    /// The superblock with a new tail, if the tail has moved. `next` is the running transaction.
    pub fn tail_update(&mut self, next: Tid) -> Option<BlockWrite> {
        let (tail, tid) = self.tail();
        if self.superblock.start() == 0 || tail == self.tail_in_superblock {
            return None;
        }
        self.tail_in_superblock = tail;
        self.superblock.set_start(tail);
        self.superblock.set_sequence(tid.unwrap_or(next).on_drive());
        Some(self.superblock_write())
    }

    /// The superblock that [`tail_update`](Self::tail_update) has returned is durable and released.
    pub fn on_tail_released(&mut self) {
        self.released_tail = self.tail_in_superblock;
    }

    /// The superblock of an empty journal, for the end of a mount. Everything must be home.
    ///
    /// Panics if something is not.
    pub fn empty(&mut self, next: Tid) -> BlockWrite {
        assert!(self.home.is_empty() && self.in_flight.is_none(), "everything is home");
        self.logged.clear();
        self.superblock.set_start(0);
        self.superblock.set_sequence(next.on_drive());
        self.superblock_write()
    }

    /// Gives an empty journal another length, in blocks, for its next superblock.
    ///
    /// Panics if it is not empty.
    pub fn set_maxlen(&mut self, blocks: u32) {
        assert!(self.home.is_empty() && self.in_flight.is_none(), "everything is home");
        self.superblock.set_maxlen(blocks);
    }

    /// The number of blocks that are not home.
    #[must_use]
    pub fn not_home(&self) -> usize {
        self.home.len()
    }

    fn superblock_write(&self) -> BlockWrite {
        let data = Arc::new(self.superblock.encode(&self.layout));
        BlockWrite { at: self.blocks[0], data, placement: Placement::InPlace }
    }
}
