//! Finding the committed transactions after a crash, and the blocks that they leave.
//!
//! [`recover`] reads the log and changes nothing. The caller then
//!
//! 1. writes each of [`Recovery::homes`] to its place in the file system, as an in-place write;
//! 2. waits until all of them are durable and released;
//! 3. writes the superblock [`Recovery::emptied`], and waits until it is durable and released.
//!
//! A crash before the end of step 3 leaves the log as it was: the next recovery finds the same
//! transactions and writes the same blocks. Before step 3 ends, nothing else may write to the
//! journal's blocks, nor to a block of the file system.
//!
//! # Where the log ends
//!
//! The log begins with transaction `s_sequence` at block `s_start`. It ends at the first block that
//! does not continue it: one without a header, or of another transaction. Blocks of earlier laps
//! have smaller numbers. A transaction without a commit block does not count.
//!
//! With checksums, the log also ends at a descriptor, revoke or commit block with a wrong one, which
//! a crash in the middle of a commit leaves. But if such a block is followed by a sound commit block
//! of the same transaction, or by the next transaction, then the commit did finish and something
//! damaged it later: that is an error, since a recovery without that transaction would go back in
//! time. The exception is a commit block with a time before that of the last transaction: it is
//! left from an older journal at this place. A wrong checksum of the copy of a block is always an
//! error. The kernel does the same, but it also reports a commit block with a wrong checksum at the
//! end of the log, and copies that no recovery needs.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo};
use crate::error::FsError;
use crate::format::layout::Layout;
use crate::journal::format::{
    DamagedPart, Header, JournalError, JournalSuperblock, Shape, block_type, unescape,
};
use crate::journal::ring::Ring;

/// Reads block `n` of the journal.
pub type ReadJournal<'a> = dyn FnMut(u32) -> Result<Arc<Block>, FsError> + 'a;

/// A block of the file system that recovery writes: its latest copy in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeBlock {
    /// The block.
    pub at: BlockNo,
    /// The block of the journal that has the copy.
    pub copy: u32,
    /// The transaction.
    pub sequence: u32,
    is_escaped: bool,
    checksum: u32,
}

/// Why a log ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogEnd {
    /// It is empty, by the superblock.
    Empty,
    /// After a commit block, or in a transaction whose commit had not finished, there is a block
    /// that does not belong to the log.
    Clean,
    /// A transaction whose commit had not finished has a block with a wrong checksum.
    Unfinished(DamagedPart),
    /// The log fills the journal.
    Full,
}

/// The log of a journal.
#[derive(Clone, Debug)]
pub struct Recovery {
    /// The blocks to be written home, in the order of their numbers.
    pub homes: Vec<HomeBlock>,
    /// The number of committed transactions.
    pub transactions: u32,
    /// The number of the last committed transaction, if there is one.
    pub last: Option<u32>,
    /// The number of the next transaction. It is not the one after [`last`](Self::last), of which
    /// blocks may be there, but the one after that.
    pub next: u32,
    /// The block of the journal where the next transaction may begin.
    pub head: u32,
    /// Why the log ended.
    pub end: LogEnd,
    shape: Shape,
}

impl Recovery {
    /// The content of a block to be written home.
    ///
    /// # Errors
    /// The copy can't be read, or is damaged.
    pub fn load(
        &self,
        home: &HomeBlock,
        read: &mut ReadJournal<'_>,
    ) -> Result<Arc<Block>, JournalError> {
        load(&self.shape, home, read)
    }

    /// The superblock of the journal once all blocks are home.
    #[must_use]
    pub fn emptied(&self, superblock: &JournalSuperblock) -> JournalSuperblock {
        let mut superblock = superblock.clone();
        superblock.set_start(0);
        superblock.set_sequence(self.next);
        superblock.set_head(self.head);
        superblock
    }
}

/// Reads the log of a journal, from its superblock to its end, and verifies the copies that are to
/// be written home.
///
/// # Errors
/// A block can't be read, or a committed transaction is damaged.
pub fn recover(
    layout: &Layout,
    superblock: &JournalSuperblock,
    read: &mut ReadJournal<'_>,
) -> Result<Recovery, JournalError> {
    recover_before(layout, superblock, None, read)
}

/// As [`recover`], but the log ends before transaction `before`, if it gets there.
///
/// # Errors
/// As [`recover`], for an earlier transaction.
pub fn recover_before(
    layout: &Layout,
    superblock: &JournalSuperblock,
    before: Option<u32>,
    read: &mut ReadJournal<'_>,
) -> Result<Recovery, JournalError> {
    let ring = Ring { first: superblock.first(), end: superblock.maxlen() };
    let shape = superblock.shape(layout);
    if superblock.start() == 0 {
        let head = superblock.head();
        return Ok(Recovery {
            homes: Vec::new(),
            transactions: 0,
            last: None,
            next: superblock.sequence().wrapping_add(1),
            head: if ring.contains(head) { head } else { ring.first },
            end: LogEnd::Empty,
            shape,
        });
    }
    let mut scan = Scan {
        shape,
        ring,
        at: superblock.start(),
        steps: 0,
        sequence: superblock.sequence(),
        before,
        transactions: 0,
        head: superblock.start(),
        last_seconds: 0,
        latest: BTreeMap::new(),
    };
    let end = scan.run(read)?;
    let homes: Vec<HomeBlock> = scan.latest.into_values().collect();
    for home in &homes {
        if !layout.contains(home.at) {
            return Err(damaged(DamagedPart::Tag(home.at), home.sequence));
        }
        if shape.has_checksums() {
            load(&shape, home, read)?;
        }
    }
    Ok(Recovery {
        homes,
        transactions: scan.transactions,
        last: (scan.transactions > 0).then(|| scan.sequence.wrapping_sub(1)),
        next: scan.sequence.wrapping_add(1),
        head: scan.head,
        end,
        shape,
    })
}

fn damaged(what: DamagedPart, sequence: u32) -> JournalError {
    JournalError::DamagedTransaction { what, sequence }
}

fn load(
    shape: &Shape,
    home: &HomeBlock,
    read: &mut ReadJournal<'_>,
) -> Result<Arc<Block>, JournalError> {
    let mut block = read(home.copy)?;
    if shape.copy_checksum(home.sequence, &block) != home.checksum {
        return Err(damaged(DamagedPart::Copy(home.at), home.sequence));
    }
    if home.is_escaped {
        unescape(Arc::make_mut(&mut block));
    }
    Ok(block)
}

/// The walk along a log.
struct Scan {
    shape: Shape,
    ring: Ring,
    /// The next block.
    at: u32,
    /// The blocks so far. The walk ends after a lap.
    steps: u32,
    /// The transaction that the next block must belong to.
    sequence: u32,
    /// The transaction before which the walk ends.
    before: Option<u32>,
    transactions: u32,
    /// The block after the last commit block.
    head: u32,
    /// The time of the last commit block.
    last_seconds: u64,
    /// The latest copies in committed transactions.
    latest: BTreeMap<BlockNo, HomeBlock>,
}

/// The content of a transaction before its commit block.
#[derive(Default)]
struct Pending {
    copies: Vec<HomeBlock>,
    revoked: Vec<BlockNo>,
    /// The first block that is damaged.
    damage: Option<DamagedPart>,
}

impl Scan {
    fn run(&mut self, read: &mut ReadJournal<'_>) -> Result<LogEnd, JournalError> {
        let mut pending = Pending::default();
        while self.steps < self.ring.len() {
            if self.before == Some(self.sequence) {
                return Ok(LogEnd::Clean);
            }
            let at = self.at;
            let block = read(at)?;
            self.step();
            let block_type = match Header::decode(&block) {
                Some(header) if header.sequence == self.sequence => header.block_type,
                _ => return Ok(end(pending)),
            };
            match block_type {
                block_type::DESCRIPTOR => self.descriptor(at, &block, &mut pending),
                block_type::REVOKE => self.revoke(at, &block, &mut pending),
                block_type::COMMIT => {
                    if !self.shape.is_sound_commit(&block) {
                        pending.damage.get_or_insert(DamagedPart::Commit(at));
                        if self.is_continued(read)? {
                            return Err(damaged(DamagedPart::Commit(at), self.sequence));
                        }
                        return Ok(end(pending));
                    }
                    let seconds = Shape::commit_seconds(&block);
                    if let Some(what) = pending.damage {
                        if seconds < self.last_seconds {
                            return Ok(end(pending));
                        }
                        return Err(damaged(what, self.sequence));
                    }
                    self.commit(core::mem::take(&mut pending), seconds);
                }
                _ => return Ok(end(pending)),
            }
        }
        Ok(LogEnd::Full)
    }

    fn step(&mut self) {
        self.at = self.ring.after(self.at);
        self.steps += 1;
    }

    fn descriptor(&mut self, at: u32, block: &Block, pending: &mut Pending) {
        if !self.shape.is_sealed(block) {
            pending.damage.get_or_insert(DamagedPart::Descriptor(at));
        }
        for tag in self.shape.tags(block) {
            pending.copies.push(HomeBlock {
                at: tag.at,
                copy: self.at,
                sequence: self.sequence,
                is_escaped: tag.is_escaped,
                checksum: tag.checksum,
            });
            self.step();
        }
    }

    fn revoke(&self, at: u32, block: &Block, pending: &mut Pending) {
        match self.shape.revoked(block) {
            Some(revoked) if self.shape.is_sealed(block) => pending.revoked.extend(revoked),
            _ => {
                pending.damage.get_or_insert(DamagedPart::Revoke(at));
            }
        }
    }

    /// Takes a committed transaction. A revoke counts for its own transaction and for earlier ones.
    fn commit(&mut self, transaction: Pending, seconds: u64) {
        for copy in transaction.copies {
            self.latest.insert(copy.at, copy);
        }
        for at in transaction.revoked {
            self.latest.remove(&at);
        }
        self.sequence = self.sequence.wrapping_add(1);
        self.transactions += 1;
        self.head = self.at;
        self.last_seconds = seconds;
    }

    /// Whether the next transaction begins at the next block.
    fn is_continued(&self, read: &mut ReadJournal<'_>) -> Result<bool, FsError> {
        if self.steps >= self.ring.len() {
            return Ok(false);
        }
        let block = read(self.at)?;
        let Some(header) = Header::decode(&block) else { return Ok(false) };
        Ok(header.sequence == self.sequence.wrapping_add(1)
            && match header.block_type {
                block_type::DESCRIPTOR | block_type::REVOKE => self.shape.is_sealed(&block),
                block_type::COMMIT => self.shape.is_sound_commit(&block),
                _ => false,
            })
    }
}

fn end(pending: Pending) -> LogEnd {
    pending.damage.map_or(LogEnd::Clean, LogEnd::Unfinished)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BLOCK_BYTES;
    use crate::journal::format::tests_support::superblock;
    use crate::journal::writer;
    use crate::testing::layout;

    const LEN: u32 = 20;

    /// A journal with a log that begins at block 1 with transaction 7, and its shape.
    fn log(layout: &Layout) -> (JournalSuperblock, Shape) {
        let mut superblock = superblock(LEN);
        superblock.use_features_of(layout);
        superblock.set_start(1);
        superblock.set_sequence(7);
        let shape = superblock.shape(layout);
        (superblock, shape)
    }

    fn without_checksums() -> Layout {
        Layout { csum_seed: None, ..layout() }
    }

    fn recover_from(
        layout: &Layout,
        superblock: &JournalSuperblock,
        blocks: &[Arc<Block>],
    ) -> Result<Recovery, JournalError> {
        let empty = Arc::new([0; BLOCK_BYTES]);
        let mut read = |n: u32| Ok(blocks.get(n as usize - 1).unwrap_or(&empty).clone());
        recover(layout, superblock, &mut read)
    }

    fn transaction(shape: &Shape, sequence: u32, at: u64, seconds: u64) -> Vec<Arc<Block>> {
        let blocks = [(BlockNo(at), Arc::new([3; BLOCK_BYTES]))];
        writer::encode(shape, sequence, &blocks, &[], seconds)
    }

    #[test]
    fn a_block_outside_of_the_file_system_is_an_error() {
        for layout in [layout(), without_checksums()] {
            let (superblock, shape) = log(&layout);
            let blocks = transaction(&shape, 7, layout.blocks - 1, 0);
            recover_from(&layout, &superblock, &blocks).expect("the last block");
            let blocks = transaction(&shape, 7, layout.blocks, 0);
            let found = recover_from(&layout, &superblock, &blocks).expect_err("behind it");
            let what = DamagedPart::Tag(BlockNo(layout.blocks));
            assert_eq!(found, JournalError::DamagedTransaction { what, sequence: 7 });
        }
    }

    /// An older journal at the same place may have left a transaction of the same number.
    #[test]
    fn a_damaged_transaction_with_an_older_time_ends_the_log() {
        let layout = layout();
        let (superblock, shape) = log(&layout);
        let mut blocks = transaction(&shape, 7, 5, 1000);
        blocks.extend(transaction(&shape, 8, 6, 999));
        Arc::make_mut(&mut blocks[3])[100] ^= 1;
        let recovery = recover_from(&layout, &superblock, &blocks).expect("recovered");
        assert_eq!((recovery.last, recovery.next, recovery.head), (Some(7), 9, 4));
        assert_eq!(recovery.end, LogEnd::Unfinished(DamagedPart::Descriptor(4)));

        blocks.truncate(3);
        blocks.extend(transaction(&shape, 8, 6, 1000));
        Arc::make_mut(&mut blocks[3])[100] ^= 1;
        let found = recover_from(&layout, &superblock, &blocks).expect_err("damaged");
        let what = DamagedPart::Descriptor(4);
        assert_eq!(found, JournalError::DamagedTransaction { what, sequence: 8 });
    }

    #[test]
    fn a_log_that_never_ends_is_left_after_a_lap() {
        for layout in [layout(), without_checksums()] {
            let (superblock, shape) = log(&layout);
            let revokes = alloc::vec![Arc::new(shape.revoke(7, &[])); LEN as usize - 1];
            let recovery = recover_from(&layout, &superblock, &revokes).expect("recovered");
            assert_eq!((recovery.end, recovery.transactions), (LogEnd::Full, 0));
            let descriptors = alloc::vec![Arc::new(shape.descriptor(7, &[])); LEN as usize - 1];
            let recovery = recover_from(&layout, &superblock, &descriptors).expect("recovered");
            assert_eq!((recovery.end, recovery.transactions), (LogEnd::Full, 0));
        }
    }

    #[test]
    fn a_revoke_block_with_a_wrong_checksum_is_damage() {
        let (superblock, shape) = log(&layout());
        let mut revoke = shape.revoke(7, &[BlockNo(5)]);
        revoke[23] ^= 1;
        let mut blocks = alloc::vec![Arc::new(revoke)];
        blocks.push(Arc::new(shape.commit(7, 0)));
        let found = recover_from(&layout(), &superblock, &blocks).expect_err("damaged");
        let what = DamagedPart::Revoke(1);
        assert_eq!(found, JournalError::DamagedTransaction { what, sequence: 7 });
    }

    /// Even if the next transaction is all that shows it.
    #[test]
    fn a_damaged_commit_block_before_another_transaction_is_an_error() {
        let (superblock, shape) = log(&layout());
        let mut blocks = transaction(&shape, 7, 5, 0);
        Arc::make_mut(&mut blocks[2])[100] ^= 1;
        let recovery = recover_from(&layout(), &superblock, &blocks).expect("recovered");
        assert_eq!((recovery.last, recovery.next), (None, 8));
        blocks.extend(transaction(&shape, 8, 6, 0));
        let found = recover_from(&layout(), &superblock, &blocks).expect_err("damaged");
        let what = DamagedPart::Commit(3);
        assert_eq!(found, JournalError::DamagedTransaction { what, sequence: 7 });
    }

    #[test]
    fn a_revoke_block_with_a_wrong_length_is_damage() {
        for layout in [layout(), without_checksums()] {
            let (superblock, shape) = log(&layout);
            let mut revoke = shape.revoke(7, &[BlockNo(5)]);
            revoke[12..16].copy_from_slice(&5000_u32.to_be_bytes());
            let mut blocks = alloc::vec![Arc::new(revoke)];
            let recovery = recover_from(&layout, &superblock, &blocks).expect("recovered");
            assert_eq!(recovery.end, LogEnd::Unfinished(DamagedPart::Revoke(1)));
            blocks.push(Arc::new(shape.commit(7, 0)));
            let found = recover_from(&layout, &superblock, &blocks).expect_err("damaged");
            let what = DamagedPart::Revoke(1);
            assert_eq!(found, JournalError::DamagedTransaction { what, sequence: 7 });
        }
    }
}
