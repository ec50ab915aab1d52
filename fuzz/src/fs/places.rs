//! The structures of an image: where each lies, and how its checksum is made.

use std::ops::ControlFlow;
use std::sync::Arc;

use riopipe_fs_core::extents;
use riopipe_fs_core::format::checksum;
use riopipe_fs_core::format::group_desc::GroupDesc;
use riopipe_fs_core::format::inode::{DiskInode, INODE_BYTES};
use riopipe_fs_core::format::layout::Layout;
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockKind, BlockNo, FsError, Ino, MetaBlocks};

use super::drive::Image;

/// A structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    /// The superblock.
    Superblock,
    /// The descriptor of a group.
    Descriptor(u32),
    /// The block bitmap of a group.
    BlockBitmap(u32),
    /// The inode bitmap of a group.
    InodeBitmap(u32),
    /// An inode.
    Inode(Ino),
    /// A metadata block of an inode.
    Block(Ino, BlockKind),
    /// The superblock of the journal.
    JournalSuperblock,
    /// A descriptor or revoke block of the log.
    LogBlock,
    /// A commit block of the log.
    LogCommit,
    /// A copy of a block in the log, whose checksum is in the descriptor block.
    LogCopy,
    /// The table of the areas.
    Table,
    /// A record of an area.
    Record,
}

/// A part of a structure of which the bytes are changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The structure.
    pub structure: Structure,
    /// Its block.
    pub at: BlockNo,
    /// The first byte, counted in the block.
    pub from: usize,
    /// The number of bytes.
    pub len: usize,
}

/// The blocks of an image, to be read.
pub struct Reader<'i> {
    /// The image.
    pub image: &'i Image,
    /// Its layout.
    pub layout: &'i Layout,
}

impl Reader<'_> {
    /// The descriptor of a group.
    pub fn descriptor(&self, group: u32) -> GroupDesc {
        let (at, offset) = self.layout.descriptor_at(group);
        GroupDesc::decode(self.layout, &self.image.read(at)[offset..])
    }

    /// The block of an inode, and its offset.
    pub fn inode_place(&self, ino: Ino) -> (BlockNo, usize) {
        let (group, index) = self.layout.group_of_inode(ino);
        let per_block = self.layout.inodes_per_block();
        let table = self.descriptor(group).inode_table;
        let at = BlockNo(table.0 + u64::from(index / per_block));
        (at, (index % per_block) as usize * INODE_BYTES)
    }

    /// An inode.
    pub fn inode(&self, ino: Ino) -> DiskInode {
        let (at, offset) = self.inode_place(ino);
        let block = self.image.read(at);
        let raw = block[offset..].first_chunk().expect("a whole inode");
        DiskInode::decode(raw, self.layout, ino).expect("an undamaged inode")
    }

    /// The blocks of an inode: those of its data, and those of its extent tree.
    pub fn blocks_of(&self, ino: Ino) -> (Vec<BlockNo>, Vec<BlockNo>) {
        let disk = self.inode(ino);
        let (mut data, mut nodes) = (Vec::new(), Vec::new());
        let _ = extents::for_each(ino, &disk, self, 0..1 << 32, &mut |extent| {
            data.extend((0..u64::from(extent.len)).map(|n| BlockNo(extent.physical.0 + n)));
            ControlFlow::Continue(())
        });
        let _ = extents::blocks_of_tree(ino, &disk, self, &mut |at| {
            nodes.push(at);
            ControlFlow::Continue(())
        });
        (data, nodes)
    }

    /// The entry of a name in a directory.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Ino {
        let found = riopipe_fs_core::dir::lookup(parent, &self.inode(parent), self, name);
        found.expect("an undamaged directory").expect("the name").ino
    }

    /// The places of an inode: its fields, its extent tree, its attributes, its directory blocks.
    pub fn places_of(&self, ino: Ino, places: &mut Vec<Place>) {
        let (at, from) = self.inode_place(ino);
        places.push(Place { structure: Structure::Inode(ino), at, from, len: INODE_BYTES });
        let disk = self.inode(ino);
        let seed = self.layout.inode_seed(ino, disk.generation);
        let mut add = |at, kind, from, len| {
            places.push(Place { structure: Structure::Block(ino, kind), at, from, len });
        };
        let (data, nodes) = self.blocks_of(ino);
        for &at in nodes.iter().take(2).chain(nodes.last()) {
            // The header, the first entries, and the last one of a full node.
            add(at, BlockKind::ExtentNode(seed), 0, 36);
            add(at, BlockKind::ExtentNode(seed), 12 * 340, 16);
        }
        if disk.xattr_block.0 != 0 {
            add(disk.xattr_block, BlockKind::Xattr, 0, 96);
        }
        if disk.is_dir() {
            for (n, &at) in data.iter().enumerate() {
                let block = self.image.read(at);
                let leaf = BlockKind::DirLeaf(seed);
                if n > 4 && n + 2 < data.len() {
                    continue;
                }
                if checksum::verify(self.layout, at, leaf, &block).is_ok() {
                    add(at, leaf, 0, 64);
                    add(at, leaf, BLOCK_BYTES - 12, 12);
                } else {
                    add(at, BlockKind::DirIndex(seed), 0, 64);
                    add(at, BlockKind::DirIndex(seed), BLOCK_BYTES - 16, 16);
                }
            }
        }
    }
}

impl MetaBlocks for Reader<'_> {
    fn layout(&self) -> &Layout {
        self.layout
    }

    fn get(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError> {
        let block = self.image.read(at);
        checksum::verify(self.layout, at, kind, &block)?;
        Ok(Arc::new(block))
    }

    fn edit(&mut self, _: BlockNo, _: BlockKind) -> Result<&mut Block, FsError> {
        Err(FsError::ReadOnly)
    }

    fn create(&mut self, _: BlockNo, _: BlockKind) -> Result<&mut Block, FsError> {
        Err(FsError::ReadOnly)
    }

    fn allocate(&mut self, _: BlockNo) -> Result<BlockNo, FsError> {
        Err(FsError::ReadOnly)
    }

    fn free_meta(&mut self, _: BlockNo) {}

    fn free_data(&mut self, _: BlockNo, _: u32) {}
}
