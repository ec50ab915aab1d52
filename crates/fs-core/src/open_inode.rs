//! An inode that a thread has locked.

use crate::block::Ino;
use crate::format::inode::DiskInode;
use crate::format::layout::Layout;

/// An inode that this thread has locked for a change.
#[derive(Debug)]
pub struct OpenInode<'a> {
    /// Its number.
    pub ino: Ino,
    /// Its fields.
    pub disk: &'a mut DiskInode,
}

impl OpenInode<'_> {
    /// The seed of the checksums of its blocks.
    #[must_use]
    pub fn seed(&self, layout: &Layout) -> u32 {
        layout.inode_seed(self.ino, self.disk.generation)
    }
}
