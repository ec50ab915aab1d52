//! The running transaction: what operations have changed since the last commit's cut.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;

use crate::block::{BlockKind, BlockNo, Ino};
use crate::groups::FreedBatch;
use crate::inode_table::Inode;
use crate::storage::{GroupSeq, StreamNo};
use crate::tid::Tid;

/// The running transaction. All its content goes into one commit.
#[derive(Debug, Default)]
pub(crate) struct Running {
    /// Its number.
    pub(crate) tid: Tid,
    /// The blocks that operations have edited. Their content is in the cache.
    pub(crate) blocks: BTreeMap<BlockNo, BlockKind>,
    /// The inodes that must be rendered into the inode tables.
    pub(crate) inodes: BTreeMap<Ino, Arc<Inode>>,
    /// The blocks of the inode tables with those inodes.
    pub(crate) table_blocks: BTreeSet<BlockNo>,
    /// Metadata blocks that were freed: older copies in the journal must not be replayed.
    pub(crate) revoked: BTreeSet<BlockNo>,
    /// The blocks and inodes that were freed. They may be used again once the commit is durable, and once
    /// [`last_writes`](Self::last_writes) are released.
    pub(crate) freed: FreedBatch,
    /// The last groups that wrote freed blocks.
    pub(crate) last_writes: BTreeMap<StreamNo, GroupSeq>,
    /// The data that must be durable before the commit.
    pub(crate) data: BTreeMap<StreamNo, GroupSeq>,
    /// Whether the orphan list has changed.
    pub(crate) orphans_changed: bool,
    /// The inodes whose place in the orphan list has changed.
    pub(crate) orphans: BTreeSet<Ino>,
}

impl Running {
    /// An empty transaction.
    pub(crate) fn new(tid: Tid) -> Self {
        Self { tid, ..Self::default() }
    }

    /// Whether there is nothing to commit.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
            && self.inodes.is_empty()
            && self.revoked.is_empty()
            && !self.orphans_changed
            && self.freed.is_empty()
    }

    /// The blocks of the commit, without those of the groups.
    pub(crate) fn blocks_needed(&self) -> usize {
        // A revoke block has the numbers of about 500 blocks.
        self.blocks.len() + self.table_blocks.len() + self.revoked.len() / 500 + 1
    }

    /// The commit needs the groups of `stream` up to `seq`.
    pub(crate) fn needs_data(&mut self, stream: StreamNo, seq: GroupSeq) {
        let last = self.data.entry(stream).or_default();
        *last = seq.max(*last);
    }

    /// Freed blocks were written by the groups of `stream` up to `seq`.
    pub(crate) fn was_written(&mut self, stream: StreamNo, seq: GroupSeq) {
        let last = self.last_writes.entry(stream).or_default();
        *last = seq.max(*last);
    }
}
