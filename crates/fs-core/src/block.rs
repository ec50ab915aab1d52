//! Blocks, numbers, and the metadata blocks as one operation sees them.

use alloc::sync::Arc;
use core::fmt;

use crate::error::FsError;
use crate::format::layout::Layout;

/// The only supported size of a block, in bytes.
pub const BLOCK_BYTES: usize = 4096;

/// The content of a block.
pub type Block = [u8; BLOCK_BYTES];

/// A block of the file system, counted from its first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockNo(pub u64);

impl fmt::Display for BlockNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An inode number. Inodes count from 1; 0 stands for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u32);

impl Ino {
    /// The root directory.
    pub const ROOT: Self = Self(2);
}

impl fmt::Display for Ino {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The use of a metadata block, and the seed of its checksum. It decides how the block is
/// [verified](crate::format::checksum::verify) when it is read, and
/// [sealed](crate::format::checksum::seal) before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// A node of an extent tree that is not the root; with the seed of the inode.
    ExtentNode(u32),
    /// A block of directory entries; with the seed of the inode.
    DirLeaf(u32),
    /// A block of a directory's hash tree: the root (block 0 of the directory) or an inner node;
    /// with the seed of the inode.
    DirIndex(u32),
    /// A block of extended attributes.
    Xattr,
    /// A block of the orphan file; with the seed of its inode.
    OrphanFile(u32),
    /// A block without a checksum, such as the target of a long symbolic link.
    Plain,
}

/// The metadata blocks of the file system, as one operation sees them: with its own edits, which no
/// other operation sees before this one ends. If the operation fails, its edits are dropped, so a
/// caller may return an error at any point.
///
/// The lock of an inode protects the blocks that belong to it: its extent tree, its directory
/// blocks, its attributes.
pub trait MetaBlocks {
    /// The parameters of the file system.
    fn layout(&self) -> &Layout;

    /// Block `at`, verified as a block of `kind`.
    ///
    /// # Errors
    /// The block can't be read, is out of range, or is damaged.
    fn get(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError>;

    /// Block `at`, verified as a block of `kind`, to be edited. Its checksum need not be updated.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    fn edit(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError>;

    /// Block `at`, filled with zeroes. It was just [allocated](Self::allocate), or is one of the
    /// inode's blocks that becomes another kind. Its old content is not read.
    ///
    /// # Errors
    /// The block is out of range.
    fn create(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError>;

    /// Allocates a block for metadata, near `goal`.
    ///
    /// # Errors
    /// [`FsError::NoSpace`].
    fn allocate(&mut self, goal: BlockNo) -> Result<BlockNo, FsError>;

    /// Frees a block of metadata. It is revoked: no older copy in the journal is replayed over what
    /// the block is used for later.
    fn free_meta(&mut self, at: BlockNo);

    /// Frees `blocks` blocks of file data from `first` on.
    fn free_data(&mut self, first: BlockNo, blocks: u32);
}
