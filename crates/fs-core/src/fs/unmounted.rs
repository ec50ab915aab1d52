//! Changes of the superblock of a file system that is not mounted.

use super::journal_io::replay_sound_part;
use super::mount::{MountError, read_superblock, write_superblock};
use crate::block::BlockNo;
use crate::format::features::{Features, incompat};
use crate::format::inode::{DiskInode, InodeFlags, Time, file_type};
use crate::format::superblock::{State, Superblock};
use crate::raw::Raw;
use crate::storage::Storage;
use riopipe_nvme::digest::Crc32c;

/// Gives up the recovery of a file system that is too damaged for a mount: replays the main journal
/// up to the damage, clears the private bit, so that e2fsck accepts the file system, and sets the
/// state *with errors*, so that e2fsck checks everything. What only file-level records have is lost.
///
/// # Errors
/// The superblock is damaged, or the storage has failed.
pub fn give_up_recovery(storage: &dyn Storage, crc32c: Crc32c) -> Result<(), MountError> {
    let (superblock, layout) = read_superblock(storage, crc32c)?;
    let raw = Raw { storage, layout: &layout };
    let ino = layout.journal_ino;
    let inode = raw.inode(ino).or_else(|error| match error.is_damage() {
        true => Ok(journal_inode(&superblock)),
        false => Err(error),
    });
    let blocks = inode.and_then(|inode| raw.blocks_of(ino, &inode));
    // The journal may have a superblock with the bit. So its replay can't be left to e2fsck.
    match blocks.map_err(MountError::from).and_then(|blocks| replay_sound_part(&raw, &blocks)) {
        // e2fsck can't replay it either, and makes a new one.
        Err(error) if error.is_damage() => {}
        replayed => replayed?,
    }
    let (mut superblock, _) = read_superblock(storage, crc32c)?;
    let features = superblock.features();
    let incompat = features.incompat & !incompat::RIOFS_DIRTY;
    superblock.set_features(Features { incompat, ..features });
    superblock.set_state(superblock.state() | State::ERROR);
    Ok(write_superblock(storage, &mut superblock, crc32c)?)
}

/// Clears the record of errors in the superblock, after a check of all structures that has found
/// nothing.
///
/// # Errors
/// The superblock is damaged, or the storage has failed.
pub fn clear_errors(storage: &dyn Storage, crc32c: Crc32c) -> Result<(), MountError> {
    let (mut superblock, _) = read_superblock(storage, crc32c)?;
    superblock.clear_errors();
    Ok(write_superblock(storage, &mut superblock, crc32c)?)
}

/// The inode of the journal, of which the superblock has a copy as far as it is needed to find the
/// blocks. e2fsck uses that, too.
fn journal_inode(superblock: &Superblock) -> DiskInode {
    let (i_block, size) = superblock.journal_copy();
    DiskInode {
        mode: file_type::REGULAR,
        uid: 0,
        gid: 0,
        size,
        atime: Time::default(),
        ctime: Time::default(),
        mtime: Time::default(),
        crtime: Time::default(),
        dtime: 0,
        links: 1,
        sectors: 0,
        flags: InodeFlags::EXTENTS,
        generation: 0,
        version: 0,
        xattr_block: BlockNo(0),
        i_block,
        extra_isize: 32,
        projid: 0,
        attributes: [0; 128],
    }
}
