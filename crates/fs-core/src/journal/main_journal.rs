//! The state of the main journal of a mounted file system: its space, the transactions in it, the
//! blocks that are not home yet, the tail.
//!
//! Nothing here waits. The caller submits the writes on one stream, in the order in which it gets
//! them, and reports what is durable and released.
//!
//! # A commit
//!
//! [`encode_commit`](MainJournal::encode_commit) returns up to three parts for groups in this order:
//! the superblock if the log was empty, the body, the commit block. When the commit block is
//! durable, [`on_commit_durable`](MainJournal::on_commit_durable). Several commits may be in flight.
//! Their numbers have no gaps, since recovery ends at a gap: an empty transaction is written, too,
//! or its number is used again.
//!
//! # A checkpoint, and the tail
//!
//! 1. [`plan_checkpoint`](MainJournal::plan_checkpoint) returns blocks of durable transactions, to
//!    be written home. One checkpoint is in flight at a time; commits go on meanwhile.
//! 2. When all its writes are durable and released:
//!    [`on_checkpoint_released`](MainJournal::on_checkpoint_released). A transaction leaves the log
//!    once each of its blocks is home, or has a later copy in the log, or was revoked by a later
//!    transaction; and all older transactions have left.
//! 3. [`tail_update`](MainJournal::tail_update) returns the superblock with the new tail.
//! 4. When it is durable and released: [`on_tail_released`](MainJournal::on_tail_released). Only now
//!    the space of the transactions that have left is free.
//!
//! Without the wait for the first release, a crash could keep the new tail and lose a block's
//! write home, since in-place writes beyond a stream's prefix may be there or not.
//!
//! # Placement
//!
//! The superblock and the writes home are in place. The blocks of a transaction are fresh (trap
//! T11): the log is empty when the file system is mounted, and a block of the journal is used again
//! only when the superblock with a tail behind it is released. So no state to which the storage may
//! recover needs the old content.
//!
//! # Freed blocks
//!
//! A block that a durable commit has revoked is not written home any more. But a checkpoint that is
//! in flight may still write it; until [`is_written_home`](MainJournal::is_written_home) is false,
//! the block must not be used again (trap T15).

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo};
use crate::format::layout::Layout;
use crate::journal::format::{JournalError, JournalSuperblock, Shape};
use crate::journal::recovery::Recovery;
use crate::journal::ring::Ring;
use crate::journal::writer;
use crate::storage::{BlockWrite, Placement};
use crate::tid::Tid;

/// The shortest log, in blocks. The kernel refuses a shorter one.
pub const LOG_BLOCKS_MIN: u32 = 1023;

/// The writes of a commit.
#[derive(Clone, Debug)]
pub struct Commit {
    /// The superblock of the journal, if the log was empty: it has the place where the log begins.
    pub start: Option<BlockWrite>,
    /// Revoke blocks, descriptor blocks and copies.
    pub body: Vec<BlockWrite>,
    /// The commit block. It belongs into a group after those of the body.
    pub commit: BlockWrite,
}

/// The error of an aborted journal, as a kernel writes it: minus EIO.
const ABORTED: u32 = (-5_i32).cast_unsigned();

/// Blocks that are written home.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint {
    /// The writes.
    pub writes: Vec<BlockWrite>,
    /// When the writes are released, all transactions up to this one may leave the log.
    pub up_to: Option<Tid>,
    /// The blocks, with the transactions of which the versions are.
    versions: Vec<(BlockNo, Tid)>,
}

impl Checkpoint {
    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }
}

/// A durable transaction in the log.
#[derive(Debug)]
struct Logged {
    tid: Tid,
    /// Where it begins.
    start: u32,
    blocks: Vec<BlockNo>,
    /// The number of its blocks of which the log must keep the copies.
    needed: usize,
}

impl Logged {
    /// Whether the log need not keep it, as soon as all older ones have left.
    const fn may_leave(&self) -> bool {
        self.needed == 0
    }
}

/// A transaction that was encoded, and is not durable yet.
#[derive(Debug)]
struct InFlight {
    tid: Tid,
    start: u32,
    blocks: BTreeMap<BlockNo, Arc<Block>>,
    revoked: Vec<BlockNo>,
}

/// The state of the main journal. See the [module](self).
#[derive(Debug)]
pub struct MainJournal {
    layout: Layout,
    /// As it was returned last.
    superblock: JournalSuperblock,
    shape: Shape,
    ring: Ring,
    /// The blocks of the journal's file.
    blocks: Vec<BlockNo>,
    next: Tid,
    /// Where the next transaction begins.
    head: u32,
    /// The tail that is released: from here up to the head, blocks are in use.
    tail: u32,
    /// The tail in the superblock that was returned and is not released yet.
    moving_tail: Option<u32>,
    /// The durable transactions in the log, the oldest first. Their numbers have no gaps.
    logged: VecDeque<Logged>,
    /// The transactions that are not durable yet, the oldest first.
    in_flight: VecDeque<InFlight>,
    /// The latest durable version of each block that is not home, and its transaction.
    not_home: BTreeMap<BlockNo, (Tid, Arc<Block>)>,
    /// The blocks that the checkpoint in flight writes.
    writing_home: BTreeSet<BlockNo>,
}

impl MainJournal {
    /// The journal after its recovery: all blocks are home, and the superblock
    /// [`emptied`](Recovery::emptied) is released. `blocks` are the blocks of the journal's file.
    ///
    /// # Errors
    /// [`JournalError::TooSmall`].
    pub fn new(
        layout: &Layout,
        superblock: &JournalSuperblock,
        blocks: Vec<BlockNo>,
        recovery: &Recovery,
    ) -> Result<Self, JournalError> {
        Self::with_minimum(LOG_BLOCKS_MIN, layout, superblock, blocks, recovery)
    }

    /// As [`new`](Self::new), with another shortest log.
    pub(super) fn with_minimum(
        minimum: u32,
        layout: &Layout,
        superblock: &JournalSuperblock,
        blocks: Vec<BlockNo>,
        recovery: &Recovery,
    ) -> Result<Self, JournalError> {
        let mut superblock = recovery.emptied(superblock);
        superblock.use_features_of(layout);
        // The mount has put the error of an aborted journal into the superblock of the file system.
        superblock.set_errno(0);
        let ring = ring(&superblock, minimum, blocks.len(), superblock.maxlen())?;
        Ok(Self {
            shape: superblock.shape(layout),
            layout: layout.clone(),
            ring,
            blocks,
            next: first_tid(recovery.next),
            head: recovery.head,
            tail: recovery.head,
            moving_tail: None,
            superblock,
            logged: VecDeque::new(),
            in_flight: VecDeque::new(),
            not_home: BTreeMap::new(),
            writing_home: BTreeSet::new(),
        })
    }

    /// Nothing more is committed, because of an error: the superblock with that, which must be
    /// written.
    pub fn abort(&mut self) -> BlockWrite {
        self.superblock.set_errno(ABORTED);
        self.superblock_write()
    }

    /// The number of the next transaction.
    #[must_use]
    pub const fn next(&self) -> Tid {
        self.next
    }

    /// The most blocks that the log may have in use: one stays free, since a full ring would be
    /// like an empty one.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.ring.len() as usize - 1
    }

    /// The blocks of the log that are in use: all that recovery may still read.
    #[must_use]
    pub const fn used(&self) -> usize {
        self.ring.distance(self.tail, self.head) as usize
    }

    /// A good limit for a transaction, in blocks of metadata: a quarter of the log, so that commits
    /// need not wait for checkpoints.
    #[must_use]
    pub const fn transaction_blocks(&self) -> usize {
        self.capacity() / 4
    }

    /// Whether there is space for a transaction of `blocks` blocks and `revoked` revoked ones. If
    /// not, checkpoints make space.
    ///
    /// # Errors
    /// [`JournalError::TooLarge`]: not even the whole log has that space.
    pub fn has_space(&self, blocks: usize, revoked: usize) -> Result<bool, JournalError> {
        let needed = writer::blocks_needed(&self.shape, blocks, revoked);
        if needed > self.capacity() {
            return Err(JournalError::TooLarge { blocks: self.capacity(), needed });
        }
        Ok(needed <= self.capacity() - self.used())
    }

    /// Encodes transaction `tid`, which ends at this time in seconds. Each block is there once. A
    /// block that is in `revoked`, too, was freed and allocated again: it is not revoked.
    ///
    /// # Errors
    /// [`JournalError::TooLarge`].
    ///
    /// Panics if there is no [space](Self::has_space), or if `tid` is not the [next](Self::next).
    pub fn encode_commit(
        &mut self,
        tid: Tid,
        blocks: &[(BlockNo, Arc<Block>)],
        revoked: &[BlockNo],
        seconds: u64,
    ) -> Result<Commit, JournalError> {
        assert!(self.has_space(blocks.len(), revoked.len())?, "the caller has asked for space");
        assert_eq!(tid, self.next, "transactions have no gaps");
        let by_number: BTreeMap<BlockNo, Arc<Block>> = blocks.iter().cloned().collect();
        debug_assert_eq!(by_number.len(), blocks.len(), "each block is there once");
        let is_revoked = |at: &BlockNo| !by_number.contains_key(at);
        let revoked: Vec<BlockNo> = revoked.iter().copied().filter(is_revoked).collect();

        let start = self.head;
        let superblock = (self.superblock.start() == 0).then(|| self.write_tail(start, tid));
        let sequence = tid.on_drive();
        let mut encoded = writer::encode(&self.shape, sequence, blocks, &revoked, seconds);
        let commit = encoded.pop().expect("a transaction has a commit block");
        let body = encoded.into_iter().map(|data| self.append(data)).collect();
        let commit = self.append(commit);
        self.in_flight.push_back(InFlight { tid, start, blocks: by_number, revoked });
        self.next = tid.next();
        Ok(Commit { start: superblock, body, commit })
    }

    /// Writes the next block of the log.
    fn append(&mut self, data: Arc<Block>) -> BlockWrite {
        // The ring lies in the journal's file.
        let at = self.blocks[self.head as usize];
        self.head = self.ring.after(self.head);
        BlockWrite { at, data, placement: Placement::Fresh }
    }

    /// The commit blocks of the transactions up to `tid` are durable.
    pub fn on_commit_durable(&mut self, tid: Tid) {
        while self.in_flight.front().is_some_and(|first| first.tid <= tid) {
            let transaction = self.in_flight.pop_front().expect("there is one");
            let InFlight { tid, start, blocks, revoked } = transaction;
            for at in revoked {
                self.forget(at);
            }
            let numbers: Vec<BlockNo> = blocks.keys().copied().collect();
            for (at, data) in blocks {
                self.forget(at);
                self.not_home.insert(at, (tid, data));
            }
            let needed = numbers.len();
            self.logged.push_back(Logged { tid, start, blocks: numbers, needed });
        }
        self.drop_oldest();
    }

    /// The log need not keep the latest version of a block.
    fn forget(&mut self, at: BlockNo) {
        if let Some((tid, _)) = self.not_home.remove(&at)
            && let Ok(index) = self.logged.binary_search_by_key(&tid, |logged| logged.tid)
        {
            self.logged[index].needed -= 1;
        }
    }

    /// Drops the oldest transactions, as far as the log need not keep them.
    fn drop_oldest(&mut self) {
        while self.logged.front().is_some_and(Logged::may_leave) {
            self.logged.pop_front();
        }
    }

    /// The latest version of a block that is not home: in the log, or in a commit that is in flight.
    /// `None`: the drive has the latest version.
    #[must_use]
    pub fn committed(&self, at: BlockNo) -> Option<Arc<Block>> {
        let in_flight = self.in_flight.iter().rev().find_map(|commit| commit.blocks.get(&at));
        in_flight.or_else(|| self.not_home.get(&at).map(|(_, data)| data)).cloned()
    }

    /// The number of blocks that durable transactions have changed, and that are not home.
    #[must_use]
    pub fn not_home(&self) -> usize {
        self.not_home.len()
    }

    /// Begins a checkpoint of up to `max` blocks, those of the oldest transactions. It is empty if
    /// there are none, or if a checkpoint is in flight.
    pub fn plan_checkpoint(&mut self, max: usize) -> Checkpoint {
        let mut plan = Checkpoint::default();
        if !self.writing_home.is_empty() {
            return plan;
        }
        'plan: for logged in &self.logged {
            for &at in &logged.blocks {
                let Some((tid, data)) = self.not_home.get(&at) else { continue };
                if *tid != logged.tid {
                    continue;
                }
                if plan.writes.len() == max {
                    break 'plan;
                }
                let data = Arc::clone(data);
                plan.writes.push(BlockWrite { at, data, placement: Placement::InPlace });
                plan.versions.push((at, *tid));
            }
            plan.up_to = Some(logged.tid);
        }
        // Consecutive blocks can be one write.
        plan.writes.sort_unstable_by_key(|write| write.at);
        self.writing_home.extend(plan.versions.iter().map(|&(at, _)| at));
        plan
    }

    /// The writes of a checkpoint are durable and released.
    pub fn on_checkpoint_released(&mut self, checkpoint: Checkpoint) {
        for (at, tid) in checkpoint.versions {
            self.writing_home.remove(&at);
            if self.is_latest(at, tid) {
                self.forget(at);
            }
        }
        self.drop_oldest();
    }

    /// Whether the version of a block that transaction `tid` has is the latest durable one.
    fn is_latest(&self, at: BlockNo, tid: Tid) -> bool {
        self.not_home.get(&at).is_some_and(|&(latest, _)| latest == tid)
    }

    /// Whether the checkpoint in flight writes a block. If so, the block must not be used for
    /// anything else, even if it is free.
    #[must_use]
    pub fn is_written_home(&self, at: BlockNo) -> bool {
        self.writing_home.contains(&at)
    }

    /// The oldest transaction that the log must keep, and where it begins.
    fn oldest(&self) -> (u32, Tid) {
        let logged = self.logged.front().map(|logged| (logged.start, logged.tid));
        let in_flight = || self.in_flight.front().map(|commit| (commit.start, commit.tid));
        logged.or_else(in_flight).unwrap_or((self.head, self.next))
    }

    /// The superblock with the new tail, if transactions have left the log, and no other update is
    /// in flight.
    pub fn tail_update(&mut self) -> Option<BlockWrite> {
        let (start, tid) = self.oldest();
        if self.superblock.start() == 0 || self.moving_tail.is_some() || start == self.tail {
            return None;
        }
        self.moving_tail = Some(start);
        Some(self.write_tail(start, tid))
    }

    /// The superblock that [`tail_update`](Self::tail_update), [`empty`](Self::empty) or
    /// [`set_maxlen`](Self::set_maxlen) has returned is durable and released.
    pub fn on_tail_released(&mut self) {
        if let Some(tail) = self.moving_tail.take() {
            self.tail = tail;
        }
    }

    /// Whether the log has no transaction that recovery needs.
    #[must_use]
    pub fn is_all_home(&self) -> bool {
        self.logged.is_empty() && self.in_flight.is_empty() && self.writing_home.is_empty()
    }

    /// The superblock of an empty journal, for the end of a mount. `None` if the superblock is
    /// already that one.
    ///
    /// Panics unless [everything is home](Self::is_all_home) and no tail update is in flight.
    pub fn empty(&mut self) -> Option<BlockWrite> {
        assert!(self.is_all_home() && self.moving_tail.is_none(), "all transactions are home");
        if self.superblock.start() == 0 {
            return None;
        }
        self.moving_tail = Some(self.head);
        self.superblock.set_head(self.head);
        Some(self.write_tail(0, self.next))
    }

    /// Changes how many blocks of its file the journal uses, and returns the superblock. The log
    /// must be [empty](Self::empty): right after the mount, or with that superblock released. The
    /// blocks from `maxlen` on may be used for something else once the superblock is released; Linux
    /// and e2fsck leave them alone.
    ///
    /// # Errors
    /// [`JournalError::TooSmall`]; [`JournalError::Damaged`] if the file is shorter.
    ///
    /// Panics if the log is not empty.
    pub fn set_maxlen(&mut self, maxlen: u32) -> Result<BlockWrite, JournalError> {
        assert!(self.superblock.start() == 0 && self.moving_tail.is_none(), "the log is empty");
        self.ring = ring(&self.superblock, LOG_BLOCKS_MIN, self.blocks.len(), maxlen)?;
        self.superblock.set_maxlen(maxlen);
        if !self.ring.contains(self.head) {
            self.head = self.ring.first;
        }
        self.tail = self.head;
        self.moving_tail = Some(self.head);
        self.superblock.set_head(self.head);
        Ok(self.write_tail(0, self.next))
    }

    /// The superblock with this tail; 0 for an empty log.
    fn write_tail(&mut self, start: u32, tid: Tid) -> BlockWrite {
        self.superblock.set_start(start);
        self.superblock.set_sequence(tid.on_drive());
        self.superblock_write()
    }

    /// The superblock, as it is now.
    fn superblock_write(&self) -> BlockWrite {
        let data = Arc::new(self.superblock.encode(&self.layout));
        BlockWrite { at: self.blocks[0], data, placement: Placement::InPlace }
    }
}

/// The ring of a journal that uses `maxlen` of the `blocks` blocks of its file.
fn ring(
    superblock: &JournalSuperblock,
    minimum: u32,
    blocks: usize,
    maxlen: u32,
) -> Result<Ring, JournalError> {
    if maxlen as usize > blocks {
        return Err(JournalError::Damaged("number of blocks"));
    }
    let first = superblock.first();
    let needed = first.saturating_add(minimum);
    if maxlen < needed {
        return Err(JournalError::TooSmall { blocks: maxlen, needed });
    }
    Ok(Ring { first, end: maxlen })
}

/// The transaction with this number on the drive. 0 stands for no transaction in memory.
fn first_tid(sequence: u32) -> Tid {
    Tid(if sequence == 0 { 1 << 32 } else { sequence.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BLOCK_BYTES;
    use crate::journal::format::tests_support::superblock;
    use crate::journal::recovery::recover;
    use crate::testing::layout;

    fn journal(len: u32) -> Result<MainJournal, JournalError> {
        let superblock = superblock(len);
        let mut read = |_| panic!("the log is empty");
        let recovery = recover(&layout(), &superblock, &mut read).expect("recovered");
        let blocks = (100..).take(len as usize).map(BlockNo).collect();
        MainJournal::new(&layout(), &superblock, blocks, &recovery)
    }

    fn blocks(numbers: core::ops::Range<u64>) -> Vec<(BlockNo, Arc<Block>)> {
        numbers.map(|at| (BlockNo(at), Arc::new([at as u8; BLOCK_BYTES]))).collect()
    }

    fn commit(journal: &mut MainJournal, numbers: core::ops::Range<u64>, revoked: &[u64]) -> Tid {
        let revoked: Vec<BlockNo> = revoked.iter().map(|&at| BlockNo(at)).collect();
        let tid = journal.next();
        journal.encode_commit(tid, &blocks(numbers), &revoked, 0).expect("it fits");
        tid
    }

    #[test]
    fn a_journal_needs_as_many_blocks_as_the_kernel_needs() {
        assert_eq!(journal(1024).expect("large enough").capacity(), 1022);
        let too_small = JournalError::TooSmall { blocks: 1023, needed: 1024 };
        assert_eq!(journal(1023).expect_err("too small"), too_small);
    }

    #[test]
    fn a_transaction_larger_than_the_log_is_an_error() {
        let mut journal = journal(1024).expect("large enough");
        // 1016 copies, 5 descriptor blocks and the commit block fill the log.
        assert_eq!(journal.has_space(1016, 0), Ok(true));
        let too_large = JournalError::TooLarge { blocks: 1022, needed: 1023 };
        assert_eq!(journal.has_space(1017, 0), Err(too_large.clone()));
        assert_eq!(journal.has_space(1016, 1), Err(too_large.clone()));
        let found = journal.encode_commit(journal.next(), &blocks(0..1017), &[], 0);
        assert_eq!(found.expect_err("too large"), too_large);
        commit(&mut journal, 0..1016, &[]);
        assert_eq!((journal.used(), journal.has_space(0, 0)), (1022, Ok(false)));
    }

    #[test]
    #[should_panic(expected = "transactions have no gaps")]
    fn a_gap_between_transactions_is_refused() {
        let mut journal = journal(1024).expect("large enough");
        let tid = journal.next().next();
        let _ = journal.encode_commit(tid, &[], &[], 0);
    }

    #[test]
    fn a_checkpoint_names_the_transactions_that_it_completes() {
        let mut journal = journal(1024).expect("large enough");
        let first = commit(&mut journal, 0..4, &[]);
        let second = commit(&mut journal, 2..6, &[0]);
        assert!(journal.plan_checkpoint(9).is_empty(), "nothing is durable");
        journal.on_commit_durable(second);
        // Block 0 is revoked, and 2 and 3 have later copies.
        assert_eq!(journal.not_home(), 5);
        let plan = journal.plan_checkpoint(3);
        let numbers: Vec<u64> = plan.writes.iter().map(|write| write.at.0).collect();
        assert_eq!((numbers, plan.up_to), (alloc::vec![1, 2, 3], Some(first)));
        assert!(journal.is_written_home(BlockNo(1)) && !journal.is_written_home(BlockNo(4)));
        assert!(journal.plan_checkpoint(9).is_empty(), "one is in flight");
        assert!(journal.tail_update().is_none(), "nothing is home");
        journal.on_checkpoint_released(plan);
        assert!(!journal.is_written_home(BlockNo(1)));
        assert!(journal.committed(BlockNo(1)).is_none() && journal.committed(BlockNo(4)).is_some());

        let used = journal.used();
        assert!(journal.tail_update().is_some());
        assert!(journal.tail_update().is_none(), "one is in flight");
        assert_eq!(journal.used(), used, "the space is not free before the tail is released");
        journal.on_tail_released();
        assert!(journal.used() < used && !journal.is_all_home());
        let plan = journal.plan_checkpoint(usize::MAX);
        assert_eq!((plan.writes.len(), plan.up_to), (2, Some(second)));
        journal.on_checkpoint_released(plan);
        assert!(journal.is_all_home());
        assert!(journal.empty().is_some());
        journal.on_tail_released();
        assert!(journal.empty().is_none(), "it is empty");
    }

    #[test]
    fn a_shorter_log_begins_in_its_blocks() {
        let mut journal = journal(2048).expect("large enough");
        let tid = commit(&mut journal, 0..900, &[]);
        journal.on_commit_durable(tid);
        let tid = commit(&mut journal, 0..900, &[]);
        journal.on_commit_durable(tid);
        let plan = journal.plan_checkpoint(usize::MAX);
        journal.on_checkpoint_released(plan);
        assert!(journal.empty().is_some());
        journal.on_tail_released();
        // The head is behind block 1800.
        let write = journal.set_maxlen(1100).expect("long enough");
        assert_eq!((write.at, write.placement), (BlockNo(100), Placement::InPlace));
        journal.on_tail_released();
        assert_eq!((journal.used(), journal.capacity()), (0, 1098));
        let commit = journal.encode_commit(journal.next(), &blocks(0..3), &[], 0).expect("it fits");
        assert_eq!(commit.body[0].at, BlockNo(101));
        assert!(commit.start.is_some());
        assert!(commit.body.iter().all(|write| write.placement == Placement::Fresh));
    }
}
