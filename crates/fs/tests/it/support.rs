//! An image in a folder of its own, and its storage.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use riopipe::Recovery;
use riopipe_fs::image::{Image, ImageError, ImageOptions, Opened};
use riopipe_fs::mkfs::{BYTES_MIN, MkfsOptions, make_in_file};
use riopipe_fs::storage::VolumeStorage;
use riopipe_fs_core::block::{BLOCK_BYTES, Block, BlockNo};
use riopipe_fs_core::storage::{BlockWrite, GroupSeq, Placement, Storage, StreamNo, WriteGroup};

/// The first block that tests write. All blocks from there on are free.
pub(crate) const FREE: u64 = 24_000;

/// A new file system in a folder of its own.
pub(crate) fn new_image() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk, 1.img");
    let options = MkfsOptions { size: Some(BYTES_MIN), ..MkfsOptions::default() };
    make_in_file(&path, &options).unwrap();
    (dir, path)
}

/// An image in service, and its storage.
pub(crate) struct Mounted {
    pub(crate) storage: Arc<VolumeStorage>,
    pub(crate) recovery: Recovery,
    pub(crate) image: Image,
}

impl Mounted {
    pub(crate) fn open(path: &Path) -> Result<Self, ImageError> {
        let Opened { image, volume, recovery } = Image::open(path, &ImageOptions::default())?;
        let storage = Arc::new(VolumeStorage::new(volume).unwrap());
        Ok(Self { storage, recovery, image })
    }

    pub(crate) fn close(self) {
        self.storage.close().unwrap();
        self.image.close().unwrap();
    }

    /// Submits one block that is filled with `n`.
    pub(crate) fn write(&self, stream: u16, at: u64, n: u64, flush: bool) -> GroupSeq {
        self.storage.submit(StreamNo(stream), group(&[(at, n)], flush)).unwrap()
    }

    /// The number that fills the block.
    pub(crate) fn number(&self, at: u64) -> u64 {
        let mut block = [0; BLOCK_BYTES];
        self.storage.read(BlockNo(at), &mut block).unwrap();
        let n = u64::from_le_bytes(block[..8].try_into().unwrap());
        assert_eq!(block, filled(n), "block {at}");
        n
    }

    /// Sets or clears the bit of a mounted file system.
    pub(crate) fn set_dirty(&self, is_dirty: bool) {
        let mut block = [0; BLOCK_BYTES];
        self.storage.read(BlockNo(0), &mut block).unwrap();
        let byte = &mut block[1024 + 0x63];
        *byte = if is_dirty { *byte | 0x40 } else { *byte & !0x40 };
        let write =
            BlockWrite { at: BlockNo(0), data: Arc::new(block), placement: Placement::InPlace };
        let group = WriteGroup { writes: vec![write], flush: true, ..WriteGroup::default() };
        let seq = self.storage.submit(StreamNo(0), group).unwrap();
        self.storage.wait_durable(StreamNo(0), seq).unwrap();
    }
}

/// A block that is filled with a number.
pub(crate) fn filled(n: u64) -> Block {
    let mut block = [0; BLOCK_BYTES];
    for place in block.chunks_exact_mut(8) {
        place.copy_from_slice(&n.to_le_bytes());
    }
    block
}

/// A group of fresh blocks, each filled with a number.
pub(crate) fn group(blocks: &[(u64, u64)], flush: bool) -> WriteGroup {
    let write = |(at, n): &(u64, u64)| BlockWrite {
        at: BlockNo(*at),
        data: Arc::new(filled(*n)),
        placement: Placement::Fresh,
    };
    let writes = blocks.iter().map(write).collect();
    WriteGroup { writes, flush, ..WriteGroup::default() }
}
