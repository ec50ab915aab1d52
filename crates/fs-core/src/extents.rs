//! The extent tree of an inode: which blocks of the file lie where.

use crate::block::BlockNo;

/// Consecutive blocks of a file that lie on consecutive blocks of the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first block, counted in the file.
    pub logical: u32,
    /// The number of blocks: 32,768 at most, and 32,767 if unwritten.
    pub len: u32,
    /// The first block on the drive.
    pub physical: BlockNo,
    /// The blocks are allocated, and read as zeroes.
    pub unwritten: bool,
}

/// Consecutive blocks of a file, from the one asked for on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Nothing is allocated.
    Hole {
        /// The first block, counted in the file.
        logical: u32,
        /// The number of blocks, up to the next extent or the end of the largest file.
        len: u32,
    },
    /// The rest of an extent.
    Mapped(Extent),
}
