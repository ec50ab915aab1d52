//! The orphan list: inodes that a crash must not forget. They have no name any more but are still
//! open, or a truncate of them is not finished.
//!
//! On the drive it is a list: the superblock has its first inode, and each inode has the next one
//! in `i_dtime`.

use alloc::vec::Vec;

use crate::block::Ino;
use crate::running::Running;

/// The orphan list. The first on the drive is the one that was added last.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    /// In the order in which they were added.
    list: Vec<Ino>,
}

impl Orphans {
    /// The list as it is on the drive, the first inode first.
    pub(crate) fn from_drive(list: &[Ino]) -> Self {
        Self { list: list.iter().rev().copied().collect() }
    }

    /// Adds an inode, unless it is in the list.
    pub(crate) fn add(&mut self, ino: Ino, running: &mut Running) {
        if !self.contains(ino) {
            self.list.push(ino);
            running.orphans_changed = true;
            running.orphans.insert(ino);
        }
    }

    /// Removes an inode from the list. The inode that was before it on the drive points at another
    /// one then.
    pub(crate) fn remove(&mut self, ino: Ino, running: &mut Running) {
        if let Some(at) = self.list.iter().rposition(|&listed| listed == ino) {
            self.list.remove(at);
            running.orphans_changed = true;
            running.orphans.extend(self.list.get(at));
            running.orphans.insert(ino);
        }
    }

    /// Whether an inode is in the list.
    pub(crate) fn contains(&self, ino: Ino) -> bool {
        self.list.contains(&ino)
    }

    /// The first inode of the list on the drive.
    pub(crate) fn first(&self) -> Ino {
        self.list.last().copied().unwrap_or_default()
    }

    /// The inode after `ino` in the list on the drive; `None`: `ino` is not in the list.
    pub(crate) fn next(&self, ino: Ino) -> Option<Ino> {
        let at = self.list.iter().rposition(|&listed| listed == ino)?;
        Some(at.checked_sub(1).map(|before| self.list[before]).unwrap_or_default())
    }

    /// All inodes of the list.
    pub(crate) fn all(&self) -> &[Ino] {
        &self.list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_orphan_is_bypassed_by_the_one_before_it() {
        let (mut orphans, mut running) = (Orphans::default(), Running::default());
        for ino in [11, 12, 13] {
            orphans.add(Ino(ino), &mut running);
        }
        assert_eq!((orphans.first(), orphans.next(Ino(13))), (Ino(13), Some(Ino(12))));
        assert_eq!((orphans.next(Ino(11)), orphans.next(Ino(14))), (Some(Ino(0)), None));
        running.orphans.clear();
        orphans.remove(Ino(12), &mut running);
        assert_eq!(orphans.next(Ino(13)), Some(Ino(11)));
        assert!(running.orphans.contains(&Ino(13)) && running.orphans.contains(&Ino(12)));
        assert!(!running.orphans.contains(&Ino(11)));
    }
}
