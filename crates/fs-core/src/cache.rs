//! The cache of metadata blocks.
//!
//! A cached block is never changed: an operation makes a new one, and puts it in its place when it
//! ends. So a commit can keep the block as it was, without a copy.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use crate::block::{Block, BlockKind, BlockNo};
use crate::error::FsError;
use crate::sync::Mutex;
use crate::tid::Tid;

const SHARDS: usize = 64;

/// The blocks of one shard that are kept although no transaction needs them.
const CLEAN_MAX: usize = 1024;

/// A block in the cache.
#[derive(Clone, Debug)]
struct Slot {
    kind: BlockKind,
    data: Arc<Block>,
    /// The last transaction with the block. Until it is durable, the block is only here.
    tid: Tid,
}

/// The cache of metadata blocks. See the [module](self).
#[derive(Debug)]
pub(crate) struct BlockCache {
    shards: [Mutex<BTreeMap<BlockNo, Slot>>; SHARDS],
}

impl BlockCache {
    pub(crate) fn new() -> Self {
        Self { shards: [const { Mutex::new(BTreeMap::new()) }; SHARDS] }
    }

    fn shard(&self, at: BlockNo) -> &Mutex<BTreeMap<BlockNo, Slot>> {
        &self.shards[(at.0 % SHARDS as u64) as usize]
    }

    /// A cached block.
    ///
    /// # Errors
    /// The block is in use as another kind: two structures of the file system point at it.
    pub(crate) fn get(&self, at: BlockNo, kind: BlockKind) -> Result<Option<Arc<Block>>, FsError> {
        match self.shard(at).lock().get(&at) {
            None => Ok(None),
            Some(slot) if slot.kind == kind => Ok(Some(Arc::clone(&slot.data))),
            Some(_) => {
                Err(FsError::DamagedBlock { what: "pointer (two uses of one block)", block: at })
            }
        }
    }

    /// Caches a block that was read, unless it is cached already. Returns the cached one.
    pub(crate) fn insert_read(
        &self,
        at: BlockNo,
        kind: BlockKind,
        data: Arc<Block>,
        durable: Tid,
    ) -> Arc<Block> {
        let mut shard = self.shard(at).lock();
        if shard.len() >= CLEAN_MAX {
            // Every second clean block is dropped. They are read again when they are needed.
            let mut keep = false;
            shard.retain(|_, slot| {
                keep = !keep;
                slot.tid > durable || keep
            });
        }
        let slot = shard.entry(at).or_insert(Slot { kind, data, tid: Tid(0) });
        Arc::clone(&slot.data)
    }

    /// Puts the block of a finished operation of transaction `tid` in its place.
    pub(crate) fn put(&self, at: BlockNo, kind: BlockKind, data: Arc<Block>, tid: Tid) {
        self.shard(at).lock().insert(at, Slot { kind, data, tid });
    }

    /// Changes a cached block of transaction `tid` during a commit's cut, and returns it. `None`:
    /// the block is not cached.
    pub(crate) fn change(
        &self,
        at: BlockNo,
        tid: Tid,
        change: impl FnOnce(BlockKind, &mut Block),
    ) -> Option<Arc<Block>> {
        let mut shard = self.shard(at).lock();
        let slot = shard.get_mut(&at)?;
        change(slot.kind, Arc::make_mut(&mut slot.data));
        slot.tid = tid;
        Some(Arc::clone(&slot.data))
    }

    /// Drops a block that was freed.
    pub(crate) fn remove(&self, at: BlockNo) {
        self.shard(at).lock().remove(&at);
    }
}
