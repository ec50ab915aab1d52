//! Deletion: an inode without names whose last reference has gone gives up its blocks and its
//! number.

use alloc::sync::Arc;

use super::{Fs, Held};
use crate::error::FsError;
use crate::inode_table::Inode;
use crate::open_inode::OpenInode;
use crate::{extents, xattr};

impl Fs {
    /// Nothing refers to an inode any more: it is deleted if it has no names, and may leave the
    /// memory otherwise.
    pub(super) fn on_unreferenced(&self, inode: Arc<Inode>) {
        let ino = inode.ino;
        let has_no_name = inode.state.read().disk.links == 0;
        if has_no_name && !self.is_read_only() {
            // After an error the inode stays in the orphan list, and the next mount deletes it.
            let _ = self.delete(&inode, false);
        }
        drop(inode);
        self.remove_idle(ino);
    }

    /// Deletes an inode without names, step by step. With `also_open` it is deleted although it is
    /// referenced.
    pub(super) fn delete(&self, inode: &Arc<Inode>, also_open: bool) -> Result<(), FsError> {
        // Its barrier is before anything later, although its data goes.
        self.before_change(inode)?;
        while !self.retry(|| self.delete_step(inode, also_open, Held::First))? {}
        Ok(())
    }

    /// Removes a step's worth of blocks, and after the last ones the inode. Returns whether it is
    /// gone, or referenced again: then the last reference deletes it.
    pub(super) fn delete_step(
        &self,
        inode: &Arc<Inode>,
        also_open: bool,
        held: Held,
    ) -> Result<bool, FsError> {
        let mut op = self.begin_own_removal(held)?;
        let mut state = match op.lock(inode) {
            Err(FsError::Stale(_)) => return Ok(true),
            other => other?,
        };
        let state = &mut *state;
        if inode.is_referenced() && !also_open {
            return Ok(true);
        }
        debug_assert_eq!(state.disk.links, 0, "only an inode without names is deleted");
        let reserved = state.pages.remove(0..u32::MAX);
        self.groups.unreserve(reserved);
        let mut disk = state.disk.clone();
        let is_dir = disk.is_dir();
        // The blocks of directories and symbolic links went through the journal.
        op.free_as_metadata(!disk.is_regular());
        let _shared = self.lock_attributes(&disk);
        let mut open = OpenInode { ino: inode.ino, disk: &mut disk };
        let has_tree = open.disk.flags.contains(crate::format::inode::InodeFlags::EXTENTS);
        if !has_tree
            && (is_dir || open.disk.is_regular())
            && open.disk.i_block.iter().any(|&b| b != 0)
        {
            // A list of blocks as ext3 has it, or a damaged flag: its blocks would be lost.
            return Err(FsError::DamagedInode { what: "flag for an extent tree", ino: inode.ino });
        }
        let is_done =
            !has_tree || extents::remove_some(&mut open, &mut op, 0, 1 << 32, self.removal())? == 0;
        op.was_written(state);
        if is_done {
            xattr::remove_block(&mut open, &mut op)?;
            op.free_inode(inode.ino, is_dir);
            disk.size = 0;
            // The time of the last unlink; a number below that of the inodes would be taken for
            // the next entry of the orphan list.
            disk.dtime = u32::try_from(disk.ctime.seconds).unwrap_or(u32::MAX);
        }
        let finished = op.finish(&[inode])?;
        state.disk = disk;
        state.written_size = 0;
        if is_done {
            self.orphans.lock().remove(inode.ino, &mut self.running.lock());
            inode.set_gone();
        }
        drop(finished);
        Ok(is_done)
    }
}
