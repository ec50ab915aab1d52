//! A checker of whole images, as strict as e2fsck about what RioFS writes, and much faster.
//!
//! It reads an image block by block, and shares only the decoders of single structures with the
//! product. e2fsck judges a sample of the images that this checker has passed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use riopipe_fs_core::format::checksum::verify;
use riopipe_fs_core::format::features::{compat, incompat};
use riopipe_fs_core::format::group_desc::{GroupDesc, GroupFlags};
use riopipe_fs_core::format::inode::{DiskInode, InodeFlags, file_type};
use riopipe_fs_core::format::layout::Layout;
use riopipe_fs_core::format::superblock::{State, Superblock};
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockKind, BlockNo, Ino};
use riopipe_nvme::digest::Crc32c;

use crate::hash::{hash_of, mix};

type Found = Result<(), String>;

/// The blocks of an image.
pub trait Image {
    /// A block by its number.
    fn read(&self, at: u64) -> &Block;

    /// The [hash](hash_of) of a block.
    fn hash(&self, at: u64) -> u64 {
        hash_of(self.read(at))
    }
}

impl Image for [Block] {
    fn read(&self, at: u64) -> &Block {
        &self[at as usize]
    }
}

macro_rules! ensure {
    ($condition:expr, $($text:tt)*) => {
        if !$condition {
            return Err(format!($($text)*));
        }
    };
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

struct Check<'a, I: ?Sized> {
    image: &'a I,
    layout: Layout,
    used: BTreeSet<u64>,
    inodes: BTreeMap<u32, DiskInode>,
    /// The entries that lead to each inode.
    names: BTreeMap<u32, u32>,
    subdirectories: BTreeMap<u32, u32>,
    /// The parent of each directory by its `..`, and by the entry that leads to it.
    parents: BTreeMap<u32, u32>,
    above: BTreeMap<u32, u32>,
    /// The kind of each inode by the entries that lead to it.
    kinds: BTreeMap<u32, u8>,
    /// The blocks of metadata that were read, and their hashes.
    metadata: RefCell<BTreeMap<u64, u64>>,
    /// How many inodes have a block of attributes.
    attributes: BTreeMap<u64, u32>,
}

/// Checks an image that was unmounted. Returns the hash of all its metadata: images with one hash
/// differ only in the content of files, free blocks and the empty log, and in how often they were
/// mounted.
///
/// The image has one group, no resize inode and no large directories: it was made with
/// `mke2fs -t ext4 -b 4096 -I 256 -O ^resize_inode` from 32,768 blocks at most.
///
/// # Errors
/// The first structure that is wrong.
pub fn check<I: Image + ?Sized>(image: &I, crc32c: Crc32c) -> Result<u64, String> {
    let block = image.read(0);
    let superblock = Superblock::decode(block, crc32c).map_err(|error| error.to_string())?;
    let layout = superblock.layout(crc32c).map_err(|error| error.to_string())?;
    let mut check = Check {
        image,
        layout,
        used: BTreeSet::new(),
        inodes: BTreeMap::new(),
        names: BTreeMap::new(),
        subdirectories: BTreeMap::new(),
        parents: BTreeMap::new(),
        above: BTreeMap::new(),
        kinds: BTreeMap::new(),
        metadata: RefCell::default(),
        attributes: BTreeMap::new(),
    };
    check.superblock(&superblock)?;
    check.groups_inodes(&superblock)?;
    check.attributes()?;
    check.links()?;
    let mut plain = *block;
    // The time of mounts and the checksum, and what the checker of the journal has passed.
    plain[1024 + 0x34..][..2].fill(0);
    plain[1024 + 0x3fc..][..4].fill(0);
    let metadata = check.metadata.into_inner();
    let hashes = metadata.into_iter().map(|(at, hash)| mix(at, hash));
    Ok(hashes.fold(mix(0, hash_of(&plain)), u64::wrapping_add))
}

/// The blocks of an image that are not in use. The image has one group, and is sound.
///
/// # Panics
/// It has no superblock.
#[must_use]
pub fn free_blocks<I: Image + ?Sized>(image: &I, crc32c: Crc32c) -> Vec<u64> {
    let superblock = Superblock::decode(image.read(0), crc32c).expect("a superblock");
    let layout = superblock.layout(crc32c).expect("a layout");
    let (at, offset) = layout.descriptor_at(0);
    let desc = GroupDesc::decode(&layout, &image.read(at.0)[offset..][..64]);
    let bitmap = image.read(desc.block_bitmap.0);
    (0..layout.blocks).filter(|&at| bitmap[at as usize / 8] >> (at % 8) & 1 == 0).collect()
}

impl<'a, I: Image + ?Sized> Check<'a, I> {
    fn read(&self, at: u64) -> &'a Block {
        self.metadata.borrow_mut().insert(at, self.image.hash(at));
        self.image.read(at)
    }

    fn superblock(&self, superblock: &Superblock) -> Found {
        let features = superblock.features();
        ensure!(!features.has_incompat(incompat::RECOVER), "the journal is to be replayed");
        ensure!(!features.has_incompat(incompat::RIOFS_DIRTY), "the private bit is set");
        ensure!(!features.has_compat(compat::RESIZE_INODE), "the image has no resize inode");
        ensure!(superblock.state() == State::VALID, "the state is {:?}", superblock.state());
        ensure!(superblock.last_orphan() == 0, "the orphan list is not empty");
        Ok(())
    }

    fn take(&mut self, at: u64, what: &str) -> Found {
        ensure!(at > 0 && at < self.layout.blocks, "{what}: block {at} is out of range");
        ensure!(self.used.insert(at), "{what}: block {at} is used twice");
        Ok(())
    }

    fn groups_inodes(&mut self, superblock: &Superblock) -> Found {
        let layout = self.layout.clone();
        ensure!(layout.groups == 1, "the image has one group");
        let (at, offset) = layout.descriptor_at(0);
        let raw = &self.read(at.0)[offset..offset + usize::from(layout.descriptor_bytes)];
        ensure!(GroupDesc::verify(&layout, 0, raw), "the descriptor has a bad checksum");
        let desc = GroupDesc::decode(&layout, raw);
        ensure!(!desc.flags.contains(GroupFlags::INODE_UNINIT), "inodes are in use");
        self.used.insert(0);
        for at in 1..u64::from(layout.superblock_blocks(0)) {
            self.take(at, "descriptors")?;
        }
        self.take(desc.block_bitmap.0, "bitmap")?;
        self.take(desc.inode_bitmap.0, "bitmap")?;
        for index in 0..u64::from(layout.inode_table_blocks()) {
            self.take(desc.inode_table.0 + index, "inode table")?;
        }

        let bitmap = *self.read(desc.inode_bitmap.0);
        ensure!(desc.verify_inode_bitmap(&layout, &bitmap), "the inode bitmap's checksum");
        let ready = layout.inodes - desc.itable_unused;
        let mut free = 0;
        for index in 0..layout.inodes {
            let ino = Ino(index + 1);
            let is_used = bitmap[index as usize / 8] >> (index % 8) & 1 == 1;
            free += u32::from(!is_used);
            if index >= ready {
                ensure!(!is_used, "inode {ino} is in use in the unused part of the table");
                continue;
            }
            let block = self.read(desc.inode_table.0 + u64::from(index / 16));
            let raw = block.as_chunks::<256>().0[index as usize % 16];
            if raw == [0; 256] {
                ensure!(!is_used || ino < layout.first_ino, "inode {ino} is in use, and zero");
                continue;
            }
            let disk = DiskInode::decode(&raw, &layout, ino).map_err(|error| error.to_string())?;
            if ino < layout.first_ino && ino != Ino::ROOT && ino != layout.journal_ino {
                continue;
            }
            ensure!(is_used == (disk.links > 0), "inode {ino}: {} links, {is_used}", disk.links);
            if is_used {
                ensure!(disk.dtime == 0, "inode {ino} has a time of deletion, {}", disk.dtime);
                self.inode(ino, &disk)?;
                self.inodes.insert(ino.0, disk);
            } else {
                ensure!(disk.dtime > layout.inodes, "inode {ino}: free, dtime {}", disk.dtime);
            }
        }
        ensure!(desc.free_inodes == free, "{free} free inodes, {}", desc.free_inodes);
        ensure!(superblock.free_inodes() == free, "{free} free inodes, in the superblock");
        let dirs = self.inodes.values().filter(|disk| disk.is_dir()).count() as u32;
        ensure!(desc.used_dirs == dirs, "{dirs} directories, not {}", desc.used_dirs);

        let bitmap = *self.read(desc.block_bitmap.0);
        ensure!(desc.verify_block_bitmap(&layout, &bitmap), "the block bitmap's checksum");
        for at in 0..8 * BLOCK_BYTES as u64 {
            let is_used = bitmap[at as usize / 8] >> (at % 8) & 1 == 1;
            let expected = at >= layout.blocks || self.used.contains(&at);
            ensure!(is_used == expected, "block {at}: its bit is {is_used}");
        }
        let free = layout.blocks - self.used.len() as u64;
        ensure!(u64::from(desc.free_blocks) == free, "{free} free blocks, {}", desc.free_blocks);
        ensure!(superblock.free_blocks() == free, "{free} free blocks, in the superblock");
        Ok(())
    }

    fn inode(&mut self, ino: Ino, disk: &DiskInode) -> Found {
        let before = self.used.len();
        let mut blocks = BTreeMap::new();
        let has_tree = disk.flags.contains(InodeFlags::EXTENTS);
        if has_tree {
            self.extents(ino, disk, &disk.i_block, 0, &mut blocks)?;
        }
        let taken = self.used.len() - before;
        if disk.xattr_block.0 != 0 {
            let at = disk.xattr_block;
            if !self.attributes.contains_key(&at.0) {
                self.take(at.0, "attributes")?;
            }
            *self.attributes.entry(at.0).or_default() += 1;
            let block = self.read(at.0);
            verify(&self.layout, at, BlockKind::Xattr, block).map_err(|error| error.to_string())?;
            ensure!(u32_at(block, 0) == 0xea02_0000, "inode {ino}: attributes without a magic");
        }
        let sectors = (taken + usize::from(disk.xattr_block.0 != 0)) as u64 * 8;
        ensure!(disk.sectors == sectors, "inode {ino}: {} sectors, not {sectors}", disk.sectors);
        let pages = disk.size.div_ceil(BLOCK_BYTES as u64);
        if Some(ino) == self.layout.orphan_file {
            blocks.values().for_each(|&(at, _)| {
                self.read(at);
            });
        }
        if ino == self.layout.journal_ino {
            self.journal(self.image.read(blocks[&0].0), blocks.len())?;
        }
        match disk.mode & file_type::MASK {
            file_type::REGULAR => {
                let last = blocks.iter().rfind(|(_, (_, unwritten))| !unwritten);
                let is_in = last.is_none_or(|(&last, _)| u64::from(last) < pages);
                ensure!(is_in, "inode {ino}: written blocks behind {} bytes", disk.size);
            }
            file_type::DIRECTORY => {
                ensure!(
                    disk.size.is_multiple_of(BLOCK_BYTES as u64) && disk.size > 0,
                    "inode {ino}: size"
                );
                ensure!(pages == blocks.len() as u64, "inode {ino}: a directory of {pages} pages");
                self.directory(ino, disk, &blocks)?;
            }
            file_type::SYMLINK if has_tree => {
                ensure!(blocks.len() == 1, "inode {ino}: a link with {} blocks", blocks.len());
                let block = self.read(blocks[&0].0);
                let len = block.iter().position(|&byte| byte == 0);
                ensure!(len == Some(disk.size as usize), "inode {ino}: {len:?} bytes");
            }
            file_type::SYMLINK => {
                let len = disk.i_block.iter().position(|&byte| byte == 0);
                ensure!(len == Some(disk.size as usize), "inode {ino}: {len:?} bytes");
            }
            _ => {}
        }
        Ok(())
    }

    /// The superblock of the journal: the log is empty, and has its full length.
    fn journal(&self, block: &Block, blocks: usize) -> Found {
        let be = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|index| block[at + index]));
        ensure!((be(0), be(4)) == (0xc03b_3998, 4), "the journal has no superblock");
        ensure!(be(0x1c) == 0, "the log begins at {}", be(0x1c));
        ensure!(be(0x10) as usize == blocks, "the log has {} blocks of {blocks}", be(0x10));
        let mut plain = *block;
        // The number of the next transaction, and the checksum.
        plain[0x18..0x1c].fill(0);
        plain[0xfc..0x100].fill(0);
        self.metadata.borrow_mut().insert(u64::MAX, hash_of(&plain));
        Ok(())
    }

    /// Each block of attributes counts the inodes that share it.
    fn attributes(&self) -> Found {
        for (&at, &inodes) in &self.attributes {
            let count = u32_at(self.read(at), 4);
            ensure!(count == inodes, "block {at} of attributes: {count} inodes, not {inodes}");
        }
        Ok(())
    }

    fn extents(
        &mut self,
        ino: Ino,
        disk: &DiskInode,
        node: &[u8],
        least: u32,
        blocks: &mut BTreeMap<u32, (u64, bool)>,
    ) -> Found {
        let (entries, max, depth) = (u16_at(node, 2), u16_at(node, 4), u16_at(node, 6));
        ensure!(u16_at(node, 0) == 0xf30a, "inode {ino}: an extent node without a magic");
        ensure!(entries <= max && depth <= 5, "inode {ino}: {entries} extents of {max}");
        let mut next = least;
        for index in 0..usize::from(entries) {
            let entry = &node[12 + 12 * index..24 + 12 * index];
            let logical = u32_at(entry, 0);
            ensure!(logical >= next, "inode {ino}: extents out of order at {logical}");
            if depth > 0 {
                let child = u64::from(u32_at(entry, 4)) | u64::from(u16_at(entry, 8)) << 32;
                self.take(child, "extent node")?;
                let block = *self.read(child);
                let kind = BlockKind::ExtentNode(self.layout.inode_seed(ino, disk.generation));
                verify(&self.layout, BlockNo(child), kind, &block)
                    .map_err(|error| error.to_string())?;
                ensure!(u16_at(&block, 6) == depth - 1, "inode {ino}: the depth of a node");
                self.extents(ino, disk, &block, logical, blocks)?;
                next = blocks.keys().last().map_or(logical, |last| last + 1);
                continue;
            }
            let len = u32::from(u16_at(entry, 4));
            let (len, unwritten) = if len > 32_768 { (len - 32_768, true) } else { (len, false) };
            let first = u64::from(u32_at(entry, 8)) | u64::from(u16_at(entry, 6)) << 32;
            ensure!(len > 0, "inode {ino}: an empty extent");
            for index in 0..len {
                let at = first + u64::from(index);
                self.take(at, &format!("data of inode {ino}"))?;
                blocks.insert(logical + index, (at, unwritten));
            }
            next = logical + len;
        }
        Ok(())
    }

    fn directory(
        &mut self,
        ino: Ino,
        disk: &DiskInode,
        blocks: &BTreeMap<u32, (u64, bool)>,
    ) -> Found {
        ensure!(!disk.flags.contains(InodeFlags::INDEX), "the directories are small");
        let mut names = BTreeSet::new();
        for &(at, _) in blocks.values() {
            let block = *self.read(at);
            let kind = BlockKind::DirLeaf(self.layout.inode_seed(ino, disk.generation));
            verify(&self.layout, BlockNo(at), kind, &block).map_err(|error| error.to_string())?;
            let mut offset = 0;
            while offset < BLOCK_BYTES - 12 {
                let child = u32_at(&block, offset);
                let len = usize::from(u16_at(&block, offset + 4));
                let name_len = usize::from(block[offset + 6]);
                let is_whole = len >= 8 + name_len && len % 4 == 0;
                ensure!(is_whole && offset + len <= BLOCK_BYTES - 12, "directory {ino}: entry");
                if child != 0 {
                    let name = block[offset + 8..offset + 8 + name_len].to_vec();
                    let text = String::from_utf8_lossy(&name).into_owned();
                    ensure!(names.insert(name), "directory {ino}: two entries {text}");
                    match text.as_str() {
                        "." => ensure!(child == ino.0, "directory {ino}: . is {child}"),
                        ".." => drop(self.parents.insert(ino.0, child)),
                        _ => self.entry(ino, child, block[offset + 7], &text)?,
                    }
                }
                offset += len;
            }
        }
        ensure!(names.contains(&b".."[..]) && names.contains(&b"."[..]), "directory {ino}: dots");
        Ok(())
    }

    fn entry(&mut self, dir: Ino, child: u32, kind: u8, name: &str) -> Found {
        ensure!(child <= self.layout.inodes, "{name} in {dir}: inode {child}");
        *self.names.entry(child).or_default() += 1;
        if kind == 2 {
            *self.subdirectories.entry(dir.0).or_default() += 1;
            self.above.insert(child, dir.0);
        }
        let other = self.kinds.insert(child, kind).filter(|other| *other != kind);
        ensure!(other.is_none(), "{name} in {dir}: two kinds");
        Ok(())
    }

    fn links(&self) -> Found {
        for (&ino, disk) in &self.inodes {
            if Ino(ino) == self.layout.journal_ino {
                continue;
            }
            let names = self.names.get(&ino).copied().unwrap_or(0);
            let links = u32::from(disk.links);
            if disk.is_dir() {
                let subdirectories = self.subdirectories.get(&ino).copied().unwrap_or(0);
                ensure!(links == 2 + subdirectories, "directory {ino}: {links} links");
                let is_root = Ino(ino) == Ino::ROOT;
                ensure!(names == u32::from(!is_root), "directory {ino} has {names} names");
                let above = if is_root { Some(&ino) } else { self.above.get(&ino) };
                ensure!(self.parents.get(&ino) == above, "directory {ino}: a wrong ..");
            } else {
                ensure!(links == names, "inode {ino}: {links} links, {names} names");
            }
            if names > 0 {
                let kind = match disk.mode & file_type::MASK {
                    file_type::REGULAR => 1,
                    file_type::DIRECTORY => 2,
                    file_type::CHARACTER => 3,
                    file_type::SYMLINK => 7,
                    _ => 0,
                };
                let found = self.kinds.get(&ino);
                ensure!(found == Some(&kind), "inode {ino}: its entry has kind {found:?}");
            }
        }
        let dangling = self.names.keys().find(|ino| !self.inodes.contains_key(ino));
        ensure!(dangling.is_none(), "an entry leads to the free inode {dangling:?}");
        Ok(())
    }
}
