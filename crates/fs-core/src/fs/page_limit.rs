//! The limit of the pages of all files in memory. A write that exceeds it submits pages of files,
//! waits until the drive has them, and drops them.
//!
//! So the memory is bounded by the limit, and by what each thread that writes adds in one call. A
//! page whose file has no space for it, or is damaged, stays. The calls for that file return the
//! error.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Fs;
use super::durability::ALL_PAGES;
use crate::error::FsError;
use crate::inode_table::Inode;

/// The files whose pages are submitted before the first of them is waited for.
const FILES_AT_ONCE: usize = 64;

impl Fs {
    /// Drops pages of files until there are half as many as the limit, if there are more than that.
    /// The caller has no lock.
    pub(super) fn limit_pages(&self) -> Result<(), FsError> {
        let (pages, max) = (self.inodes.data_pages(), self.options.pages_max);
        if pages.count() <= max {
            return Ok(());
        }
        // The others wait for the one that does it. It is the first of all mutexes.
        let _limiting = self.limiting.lock();
        if pages.count() <= max {
            return Ok(());
        }
        for files in pages.files().chunks(FILES_AT_ONCE) {
            let mut submitted = Vec::with_capacity(files.len());
            for &ino in files {
                let Ok(inode) = self.inodes.get(ino) else { continue };
                match self.write_back(&inode, ALL_PAGES) {
                    Ok(()) => submitted.push(inode),
                    // Its other pages stay. They must not keep other files from being written.
                    Err(error) if error == FsError::NoSpace || error.is_damage() => {
                        submitted.push(inode);
                    }
                    Err(error) => return Err(error),
                }
            }
            for inode in submitted {
                self.drop_submitted(&inode)?;
            }
            if pages.count() <= max / 2 {
                break;
            }
        }
        Ok(())
    }

    /// Waits until the drive has what was submitted of a file, and drops these pages.
    fn drop_submitted(&self, inode: &Arc<Inode>) -> Result<(), FsError> {
        let Some((stream, seq)) = self.last_write(inode) else { return Ok(()) };
        let waited = self.storage.wait_complete(stream, seq);
        waited.map_err(|error| self.fail("writing file data", &error))?;
        inode.state.write().pages.drop_complete(seq, None);
        Ok(())
    }
}
