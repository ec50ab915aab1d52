//! A drive in memory that counts its accesses, and judges each write.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use riopipe_fs_core::format::inode::{DiskInode, INODE_BYTES};
use riopipe_fs_core::format::layout::Layout;
use riopipe_fs_core::storage::{
    GroupSeq, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
};
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockNo, Ino};

/// The accesses after which a drive assumes a loop without an end.
const ACCESSES_MAX: u64 = 400_000;

/// The number of streams.
pub const STREAMS: u16 = 3;

/// Blocks, sparse.
#[derive(Clone, Debug, Default)]
pub struct Image {
    /// The number of blocks.
    pub blocks: u64,
    content: BTreeMap<u64, Arc<Block>>,
}

impl Image {
    /// The image with these bytes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let blocks = bytes.as_chunks::<BLOCK_BYTES>().0;
        let used = blocks.iter().enumerate().filter(|(_, block)| **block != [0; BLOCK_BYTES]);
        Self {
            blocks: blocks.len() as u64,
            content: used.map(|(at, block)| (at as u64, Arc::new(*block))).collect(),
        }
    }

    /// Block `at`.
    pub fn read(&self, at: BlockNo) -> Block {
        self.content.get(&at.0).map_or([0; BLOCK_BYTES], |block| **block)
    }

    /// Writes block `at`.
    pub fn write(&mut self, at: BlockNo, block: Arc<Block>) {
        self.content.insert(at.0, block);
    }

    /// Writes the image into a file.
    pub fn save(&self, path: &std::path::Path) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(path).expect("a file");
        file.set_len(self.blocks * BLOCK_BYTES as u64).expect("a sparse file");
        for (at, block) in &self.content {
            file.write_all_at(&**block, at * BLOCK_BYTES as u64).expect("written");
        }
    }
}

/// The blocks that no write may damage.
#[derive(Clone, Debug, Default)]
pub struct Protected {
    /// The layout before the damage.
    pub layout: Option<Layout>,
    /// Superblocks, group descriptors, bitmaps, inode tables: only the main stream writes them.
    pub system: BTreeSet<u64>,
    /// The inode tables, with the first inode of each block.
    pub inode_tables: BTreeMap<u64, Ino>,
    /// The bits of block bitmaps that are always set: those of blocks of the format.
    pub bitmaps: BTreeMap<u64, Vec<u32>>,
    /// The journal's log: only the main stream writes it.
    pub log: BTreeSet<u64>,
    /// The blocks of files and directories that are only read.
    pub witness: BTreeSet<u64>,
}

#[derive(Debug, Default)]
struct State {
    image: Image,
    last: [u64; STREAMS as usize],
    accesses: u64,
    writes: u64,
}

/// The drive.
#[derive(Clone, Debug)]
pub struct Drive {
    state: Arc<Mutex<State>>,
    protected: Arc<Protected>,
}

impl Drive {
    /// A drive with an image.
    pub fn new(image: Image, protected: Protected) -> Self {
        let state = State { image, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)), protected: Arc::new(protected) }
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// The content now.
    pub fn image(&self) -> Image {
        self.with(|state| state.image.clone())
    }

    /// The blocks that were written.
    pub fn writes(&self) -> u64 {
        self.with(|state| state.writes)
    }

    /// The calls so far.
    pub fn accesses(&self) -> u64 {
        self.with(|state| state.accesses)
    }

    fn judge(&self, stream: StreamNo, at: u64, old: &Block, new: &Block) {
        let Protected { layout, system, inode_tables, bitmaps, log, witness } = &*self.protected;
        if stream.0 != 0 {
            assert!(!system.contains(&at), "file data is written to block {at} of the format");
            assert!(!log.contains(&at), "file data is written to block {at} of the journal");
        }
        assert!(!witness.contains(&at), "block {at} of a file that is only read is written");
        if let (Some(first), Some(layout)) = (inode_tables.get(&at), layout) {
            let pairs = old.as_chunks::<INODE_BYTES>().0.iter().zip(new.as_chunks().0);
            for (ino, (old, new)) in (first.0..).zip(pairs) {
                assert!(
                    old == new || DiskInode::decode(new, layout, Ino(ino)).is_ok(),
                    "inode {ino} is overwritten by something else"
                );
            }
        }
        for &bit in bitmaps.get(&at).into_iter().flatten() {
            let is_set = |block: &Block| block[bit as usize / 8] >> (bit % 8) & 1 == 1;
            assert!(!is_set(old) || is_set(new), "a block of the format becomes free");
        }
    }
}

impl State {
    fn access(&mut self) {
        self.accesses += 1;
        assert!(self.accesses < ACCESSES_MAX, "{ACCESSES_MAX} accesses: a loop without an end");
    }
}

impl Storage for Drive {
    fn blocks(&self) -> u64 {
        self.with(|state| state.image.blocks)
    }

    fn streams(&self) -> u16 {
        STREAMS
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        self.with(|state| {
            state.access();
            for (at, block) in (first.0..).zip(into.as_chunks_mut::<BLOCK_BYTES>().0) {
                assert!(at < state.image.blocks, "a read out of range: {at}");
                *block = state.image.read(BlockNo(at));
            }
        });
        Ok(())
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        self.with(|state| {
            state.access();
            for write in group.writes {
                assert!(write.at.0 < state.image.blocks, "a write out of range: {}", write.at);
                self.judge(stream, write.at.0, &state.image.read(write.at), &write.data);
                state.image.write(write.at, write.data);
                state.writes += 1;
            }
            let last = &mut state.last[usize::from(stream.0)];
            *last += 1;
            Ok(GroupSeq(*last))
        })
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        let last = GroupSeq(self.with(|state| state.last[usize::from(stream.0)]));
        StreamMarks { complete: last, durable: last, released: last }
    }

    fn wait_complete(&self, _: StreamNo, _: GroupSeq) -> Result<(), StorageError> {
        self.with(State::access);
        Ok(())
    }

    fn wait_durable(&self, _: StreamNo, _: GroupSeq) -> Result<(), StorageError> {
        self.with(State::access);
        Ok(())
    }
}
