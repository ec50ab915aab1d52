//! Applying file-level records after a crash. They become ordinary transactions of the main
//! journal, and can be applied any number of times.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Fs;
use super::namespace::{add_subdirectory, check_dir, touch};
use crate::block::{BlockNo, Ino};
use crate::dir::{self, FileKind};
use crate::error::FsError;
use crate::extents::{self, Extent};
use crate::file_journal::record::{Change, Record};
use crate::format::inode::{DiskInode, INODE_BYTES, InodeFlags};
use crate::groups::Claim;
use crate::open_inode::OpenInode;
use crate::probe::{Plant, is_bug_planted};

impl Fs {
    /// Applies the records in the order of their ids. Returns how many.
    pub(super) fn apply_records(&self, mut records: Vec<Record>) -> Result<u64, FsError> {
        records.sort_by_key(|record| record.header.id);
        if is_bug_planted(Plant::OlderIdWins) {
            records.reverse();
        }
        // A record may need a block for the directory or the extent tree that it changes.
        self.await_blocks(&records);
        let mut applied = 0;
        for record in &records {
            match self.apply_record(record) {
                // Not those of the storage.
                Err(error)
                    if self.options.accept_lost_records
                        && !matches!(error, FsError::Io(_) | FsError::ReadOnly) => {}
                result => {
                    result?;
                    applied += 1;
                }
            }
        }
        self.await_blocks(&[]);
        Ok(applied)
    }

    fn apply_record(&self, record: &Record) -> Result<(), FsError> {
        record.changes.iter().try_for_each(|change| match change {
            Change::Inode { ino, fields } => self.apply_inode(*ino, fields, record),
            Change::Entry { parent, child, kind, name } => {
                self.apply_entry(*parent, *child, FileKind(*kind), name)
            }
            &Change::Extent { ino, logical, len, physical, unwritten } => {
                self.apply_extent(ino, logical, len, physical, unwritten)
            }
        })
    }

    /// Gives an inode its fields, and makes it if it does not exist.
    fn apply_inode(
        &self,
        ino: Ino,
        fields: &[u8; INODE_BYTES],
        record: &Record,
    ) -> Result<(), FsError> {
        let new = DiskInode::decode(fields, &self.layout, ino)?;
        match self.inode(ino) {
            Ok(inode) => {
                let op = self.begin()?;
                let mut state = op.lock(&inode)?;
                if state.disk.generation != new.generation
                    || state.disk.file_type() != new.file_type()
                {
                    return Err(FsError::DamagedInode {
                        what: "file-level record (other inode)",
                        ino,
                    });
                }
                if new.is_dir() && !is_bug_planted(Plant::DirectoryFieldsApplied) {
                    // A record has the first fields of a directory. It is here, so a later commit
                    // has newer ones.
                    return Ok(());
                }
                let old = state.disk.clone();
                let disk = DiskInode {
                    i_block: old.i_block,
                    sectors: old.sectors,
                    xattr_block: old.xattr_block,
                    ..new
                };
                let finished = op.finish(&[&inode])?;
                state.written_size = disk.size;
                state.disk = disk;
                drop(finished);
            }
            Err(FsError::Stale(_)) => {
                let mut op = self.begin()?;
                op.set_claim(Claim::WriteBack);
                op.claim_inode(ino, new.is_dir())?;
                let mut disk = DiskInode { sectors: 0, xattr_block: BlockNo(0), ..new };
                if disk.is_regular() || disk.is_dir() {
                    extents::init(&mut OpenInode { ino, disk: &mut disk });
                }
                if disk.is_dir() {
                    let parent = record.changes.iter().find_map(|change| match change {
                        Change::Entry { parent, child, .. } if *child == ino => Some(*parent),
                        _ => None,
                    });
                    let what = "file-level record (directory without a parent)";
                    let parent = parent.ok_or(FsError::DamagedInode { what, ino })?;
                    disk.links = 2;
                    disk.flags.remove(InodeFlags::INDEX);
                    dir::create_empty(&mut OpenInode { ino, disk: &mut disk }, &mut op, parent)?;
                }
                let inode = Arc::new(self.inodes.make(ino, disk));
                let finished = op.finish(&[&inode])?;
                self.inodes.insert_new(inode);
                drop(finished);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Puts an entry into a directory, unless it is there.
    fn apply_entry(
        &self,
        parent: Ino,
        child: Ino,
        kind: FileKind,
        name: &[u8],
    ) -> Result<(), FsError> {
        let parent = self.inode(parent)?;
        let child_mtime = self.inode(child)?.state.read().disk.crtime;
        let mut op = self.begin()?;
        op.set_claim(Claim::WriteBack);
        let mut state = op.lock(&parent)?;
        check_dir(&state.disk)?;
        match dir::lookup(parent.ino, &state.disk, &op, name)? {
            Some(entry) if entry.ino == child => return Ok(()),
            Some(_) => {
                let what = "file-level record (name in use)";
                return Err(FsError::DamagedInode { what, ino: parent.ino });
            }
            None => {}
        }
        let mut disk = state.disk.clone();
        if kind == FileKind::DIRECTORY {
            add_subdirectory(self, &mut disk)?;
        }
        let mut open = OpenInode { ino: parent.ino, disk: &mut disk };
        dir::insert(&mut open, &mut op, name, child, kind)?;
        let mtime = disk.mtime.max(child_mtime);
        touch(&mut disk, mtime);
        let finished = op.finish(&[&parent])?;
        state.disk = disk;
        drop(finished);
        Ok(())
    }

    /// Makes a range of a file lie where the record has it.
    fn apply_extent(
        &self,
        ino: Ino,
        logical: u32,
        len: u32,
        physical: Option<BlockNo>,
        unwritten: bool,
    ) -> Result<(), FsError> {
        let inode = self.inode(ino)?;
        let (first, mut end) = (u64::from(logical), u64::from(logical) + u64::from(len));
        // In steps that fit into a transaction, whatever has the place now.
        while end > first {
            let mut op = self.begin_removal()?;
            op.set_claim(Claim::WriteBack);
            let mut state = op.lock(&inode)?;
            let mut disk = state.disk.clone();
            let mut open = OpenInode { ino, disk: &mut disk };
            let budget = self.removal();
            end = match physical {
                None => extents::remove_some(&mut open, &mut op, logical, end, budget)?,
                Some(physical) => {
                    let start = first.max(end.saturating_sub(budget.extents as u64));
                    let extent = Extent { logical, len, physical, unwritten }.part(start, end);
                    if !is_bug_planted(Plant::BlocksNotClaimed) {
                        op.claim_extent(ino, open.disk, extent)?;
                    }
                    extents::replace(&mut open, &mut op, extent)?;
                    start
                }
            };
            let finished = op.finish(&[&inode])?;
            state.disk = disk;
            drop(finished);
        }
        Ok(())
    }
}
