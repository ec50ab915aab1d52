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

/// Under a scheduler threads meet in a shard also if they are few.
const SHARDS: usize = if cfg!(feature = "shuttle") { 2 } else { 64 };

/// One shard.
#[derive(Debug)]
struct Shard {
    slots: BTreeMap<BlockNo, Slot>,
    /// How many slots were dropped that an operation had put there, or that were freed.
    drops: u64,
}

/// A moment in the life of the cache, at which a block was not in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Missed(u64);

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
    shards: [Mutex<Shard>; SHARDS],
    /// The blocks of one shard that are kept although no transaction needs them.
    clean_max: usize,
}

impl BlockCache {
    /// An empty cache, which keeps about `blocks_max` blocks that no transaction needs.
    pub(crate) fn new(blocks_max: usize) -> Self {
        Self {
            shards: [const { Mutex::new(Shard { slots: BTreeMap::new(), drops: 0 }) }; SHARDS],
            clean_max: (blocks_max / SHARDS).max(1),
        }
    }

    fn shard(&self, at: BlockNo) -> &Mutex<Shard> {
        &self.shards[(at.0 % SHARDS as u64) as usize]
    }

    /// A cached block; or, for [`insert_read`](Self::insert_read), that it is not there.
    ///
    /// # Errors
    /// The block is in use as another kind: two structures of the file system point at it.
    pub(crate) fn get(
        &self,
        at: BlockNo,
        kind: BlockKind,
    ) -> Result<Result<Arc<Block>, Missed>, FsError> {
        let shard = self.shard(at).lock();
        match shard.slots.get(&at) {
            None => Ok(Err(Missed(shard.drops))),
            Some(slot) if slot.kind == kind => Ok(Ok(Arc::clone(&slot.data))),
            Some(_) => {
                Err(FsError::DamagedBlock { what: "pointer (two uses of one block)", block: at })
            }
        }
    }

    /// Caches a block that was read after it was `missed`, unless it is cached already. Returns the
    /// cached one. `None`: blocks were dropped meanwhile. A newer version of the block may have
    /// been here and be at home now, so the caller reads it again.
    pub(crate) fn insert_read(
        &self,
        at: BlockNo,
        kind: BlockKind,
        data: Arc<Block>,
        missed: Missed,
        durable: Tid,
    ) -> Option<Arc<Block>> {
        let mut shard = self.shard(at).lock();
        if shard.drops != missed.0 {
            return None;
        }
        if shard.slots.len() >= self.clean_max {
            // Every second clean block is dropped. They are read again when they are needed.
            let Shard { slots, drops } = &mut *shard;
            let mut keep = false;
            slots.retain(|_, slot| {
                keep = !keep;
                let is_kept = slot.tid > durable || keep;
                // No reader can have missed an older version of a block that was never changed. So
                // readers that only drop each other's blocks do not make each other read again.
                *drops += u64::from(!is_kept && slot.tid > Tid(0));
                is_kept
            });
        }
        let slot = shard.slots.entry(at).or_insert(Slot { kind, data, tid: Tid(0) });
        Some(Arc::clone(&slot.data))
    }

    /// Puts the block of a finished operation of transaction `tid` in its place.
    pub(crate) fn put(&self, at: BlockNo, kind: BlockKind, data: Arc<Block>, tid: Tid) {
        self.shard(at).lock().slots.insert(at, Slot { kind, data, tid });
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
        let slot = shard.slots.get_mut(&at)?;
        change(slot.kind, Arc::make_mut(&mut slot.data));
        slot.tid = tid;
        Some(Arc::clone(&slot.data))
    }

    /// Changes a block of transaction `tid` during a commit's cut. It was `read` before in the same
    /// cut. If another reader has dropped it from the cache since, that version is the latest:
    /// nothing else changes blocks during the cut.
    pub(crate) fn change_read(
        &self,
        at: BlockNo,
        kind: BlockKind,
        read: Arc<Block>,
        tid: Tid,
        change: impl FnOnce(&mut Block),
    ) {
        let mut shard = self.shard(at).lock();
        let slot = shard.slots.entry(at).or_insert(Slot { kind, data: read, tid });
        change(Arc::make_mut(&mut slot.data));
        slot.tid = tid;
    }

    /// Drops a block that was freed.
    pub(crate) fn remove(&self, at: BlockNo) {
        let mut shard = self.shard(at).lock();
        shard.slots.remove(&at);
        shard.drops += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BLOCK_BYTES;

    fn block(value: u8) -> Arc<Block> {
        Arc::new([value; BLOCK_BYTES])
    }

    /// Blocks of one shard.
    fn at(n: u64) -> BlockNo {
        BlockNo(n * SHARDS as u64)
    }

    /// Without this, threads that read more blocks than the cache keeps could read again and again,
    /// each because of the other.
    #[test]
    fn readers_that_drop_unchanged_blocks_do_not_make_each_other_read_again() {
        let cache = BlockCache::new(4 * SHARDS);
        let kind = BlockKind::Plain;
        let slow = cache.get(at(0), kind).unwrap().unwrap_err();
        for n in 1..100 {
            let missed = cache.get(at(n), kind).unwrap().unwrap_err();
            assert!(cache.insert_read(at(n), kind, block(1), missed, Tid(9)).is_some());
        }
        assert!(cache.insert_read(at(0), kind, block(1), slow, Tid(9)).is_some());
    }

    #[test]
    fn a_reader_that_may_have_missed_a_newer_version_reads_again() {
        let (cache, kind) = (BlockCache::new(4 * SHARDS), BlockKind::Plain);
        let slow = cache.get(at(1), kind).unwrap().unwrap_err();
        cache.put(at(1), kind, block(2), Tid(5));
        for n in (0..100).filter(|n| *n != 1) {
            let Err(missed) = cache.get(at(n), kind).unwrap() else { continue };
            cache.insert_read(at(n), kind, block(1), missed, Tid(9));
        }
        assert!(cache.get(at(1), kind).unwrap().is_err(), "it was dropped");
        assert!(cache.insert_read(at(1), kind, block(1), slow, Tid(9)).is_none());
    }

    #[test]
    fn a_cut_changes_a_block_that_was_dropped_after_it_was_read() {
        let (cache, kind) = (BlockCache::new(4 * SHARDS), BlockKind::Plain);
        let missed = cache.get(at(0), kind).unwrap().unwrap_err();
        let read = cache.insert_read(at(0), kind, block(1), missed, Tid(9)).unwrap();
        cache.remove(at(0));
        cache.change_read(at(0), kind, read, Tid(7), |block| block[0] = 3);
        let changed = cache.get(at(0), kind).unwrap().unwrap();
        assert_eq!(changed[..2], [3, 1]);
    }
}
