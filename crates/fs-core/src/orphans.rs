//! The orphan list: inodes that a crash must not forget. They have no name any more but are still
//! open, or a truncate of them is not finished.
//!
//! On the drive it is a list: the superblock has its first inode, and each inode has the next one
//! in `i_dtime`.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::block::Ino;
use crate::running::Running;

/// The orphan list. The first on the drive is the one that was added last.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    /// In the order in which they were added.
    list: BTreeMap<u64, Ino>,
    /// Their places in the list.
    places: BTreeMap<Ino, u64>,
}

impl Orphans {
    /// The list as it is on the drive, the first inode first.
    pub(crate) fn from_drive(list: &[Ino]) -> Self {
        let mut orphans = Self::default();
        list.iter().rev().for_each(|&ino| orphans.push(ino));
        orphans
    }

    fn push(&mut self, ino: Ino) {
        let place = self.list.last_key_value().map_or(0, |(place, _)| place + 1);
        self.list.insert(place, ino);
        self.places.insert(ino, place);
    }

    /// Adds an inode, unless it is in the list.
    pub(crate) fn add(&mut self, ino: Ino, running: &mut Running) {
        if !self.contains(ino) {
            self.push(ino);
            running.orphans_changed = true;
            running.orphans.insert(ino);
        }
    }

    /// Removes an inode from the list. The inode that was before it on the drive points at another
    /// one then.
    pub(crate) fn remove(&mut self, ino: Ino, running: &mut Running) {
        if let Some(place) = self.places.remove(&ino) {
            self.list.remove(&place);
            running.orphans_changed = true;
            running.orphans.extend(self.list.range(place..).next().map(|(_, ino)| ino));
            running.orphans.insert(ino);
        }
    }

    /// Whether an inode is in the list.
    pub(crate) fn contains(&self, ino: Ino) -> bool {
        self.places.contains_key(&ino)
    }

    /// The first inode of the list on the drive.
    pub(crate) fn first(&self) -> Ino {
        self.list.last_key_value().map(|(_, &ino)| ino).unwrap_or_default()
    }

    /// The inode after `ino` in the list on the drive; `None`: `ino` is not in the list.
    pub(crate) fn next(&self, ino: Ino) -> Option<Ino> {
        let place = *self.places.get(&ino)?;
        Some(self.list.range(..place).next_back().map(|(_, &ino)| ino).unwrap_or_default())
    }

    /// All inodes of the list.
    pub(crate) fn all(&self) -> Vec<Ino> {
        self.list.values().copied().collect()
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
