//! Replaying a journal: which blocks its committed transactions leave where.
//!
//! The caller writes the blocks home, waits until they are durable, and only then empties the
//! journal. So the replay can be cut anywhere and run again.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo};
use crate::error::FsError;
use crate::format::layout::Layout;
use crate::jbd2::format::{
    JournalError, JournalSuperblock, MAGIC, Shape, block_type, set_u32, tag_flag, u32_at,
};

/// The result of a replay.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// The latest version of each block of the committed transactions.
    pub blocks: BTreeMap<BlockNo, Arc<Block>>,
    /// The transactions that were found.
    pub transactions: u64,
    /// The number of the next transaction.
    pub next_sequence: u32,
}

/// Why a replay has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The journal is damaged.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A block can't be read.
    #[error(transparent)]
    Read(#[from] FsError),
}

/// A block of data in the log.
struct Logged {
    block: BlockNo,
    sequence: u32,
    index: u32,
    flags: u32,
    checksum: u32,
}

/// Reads the log of a journal. `read` returns block `n` of the journal.
///
/// # Errors
/// A block can't be read, or a block of a committed transaction is damaged.
pub fn replay(
    layout: &Layout,
    superblock: &JournalSuperblock,
    read: &mut dyn FnMut(u32) -> Result<Block, FsError>,
) -> Result<Replay, ReplayError> {
    let shape = superblock.shape(layout);
    let mut result = Replay { next_sequence: superblock.sequence(), ..Replay::default() };
    if superblock.start() == 0 {
        return Ok(result);
    }
    let log = Log { first: superblock.first(), end: superblock.maxlen() };
    let mut logged: Vec<Logged> = Vec::new();
    let mut revoked: BTreeMap<BlockNo, u32> = BTreeMap::new();
    // What the transaction that is being read adds. It counts when its commit block is found.
    let (mut blocks_of_this, mut revoked_by_this) = (Vec::new(), Vec::new());
    let mut at = superblock.start();
    let mut steps = 0;
    // A log that fills the whole ring does not end at a block of another kind.
    while steps < log.len() {
        let block = read(at)?;
        let sequence = result.next_sequence;
        if u32_at(&block, 0) != MAGIC || u32_at(&block, 8) != sequence {
            break;
        }
        at = log.after(at, 1);
        steps += 1;
        match u32_at(&block, 4) {
            block_type::DESCRIPTOR => {
                // A torn descriptor is the end of the log.
                if !shape.is_tail_sound(layout, &block) {
                    break;
                }
                let tags = shape.tags(&block);
                steps += tags.len() as u32;
                for tag in tags {
                    let (flags, checksum) = (tag.flags, tag.checksum);
                    blocks_of_this.push(Logged {
                        block: tag.block,
                        sequence,
                        index: at,
                        flags,
                        checksum,
                    });
                    at = log.after(at, 1);
                }
            }
            block_type::REVOKE => {
                if !shape.is_tail_sound(layout, &block) {
                    break;
                }
                let Some(blocks) = shape.revoked(&block) else { break };
                revoked_by_this.extend(blocks);
            }
            block_type::COMMIT => {
                if !shape.is_commit_sound(layout, &block) {
                    break;
                }
                logged.append(&mut blocks_of_this);
                for block in revoked_by_this.drain(..) {
                    revoked.insert(block, sequence);
                }
                result.transactions += 1;
                result.next_sequence = sequence.wrapping_add(1);
            }
            _ => break,
        }
    }

    let start = superblock.sequence();
    for entry in logged {
        // A revoke counts for all copies of its own transaction and of earlier ones.
        let age = |sequence: u32| sequence.wrapping_sub(start);
        let is_revoked =
            revoked.get(&entry.block).is_some_and(|&by| age(entry.sequence) <= age(by));
        if is_revoked || entry.flags & tag_flag::DELETED != 0 {
            result.blocks.remove(&entry.block);
            continue;
        }
        let damaged = JournalError::DamagedBlock { block: entry.block, tid: entry.sequence };
        if !layout.contains(entry.block) {
            return Err(damaged.into());
        }
        let mut block = read(entry.index)?;
        if shape.has_csum() && !is_data_sound(layout, &shape, &entry, &block) {
            return Err(damaged.into());
        }
        if entry.flags & tag_flag::ESCAPE != 0 {
            set_u32(&mut block, 0, MAGIC);
        }
        result.blocks.insert(entry.block, Arc::new(block));
    }
    Ok(result)
}

fn is_data_sound(layout: &Layout, shape: &Shape, entry: &Logged, block: &Block) -> bool {
    let checksum = shape.data_checksum(layout, entry.sequence, block);
    // The tag has 16 bits without version 3.
    checksum == entry.checksum
}

/// The ring of the log's blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Log {
    /// The first block.
    pub(super) first: u32,
    /// The block after the last one.
    pub(super) end: u32,
}

impl Log {
    pub(super) const fn len(&self) -> u32 {
        self.end - self.first
    }

    /// The block `blocks` behind `at`.
    pub(super) const fn after(&self, at: u32, blocks: u32) -> u32 {
        self.first + (at - self.first + blocks) % self.len()
    }

    /// The blocks from `from` up to `to`.
    pub(super) const fn distance(&self, from: u32, to: u32) -> u32 {
        (to + self.len() - from) % self.len()
    }
}
