//! Directories: those of mke2fs and e2fsck are read, and those of this crate are checked by e2fsck.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::image::Image;
use riopipe_fs_core::dir::{self, Entry, FileKind};
use riopipe_fs_core::extents;
use riopipe_fs_core::format::checksum::{seal, verify};
use riopipe_fs_core::format::group_desc::GroupDesc;
use riopipe_fs_core::format::inode::{DiskInode, INODE_BYTES, InodeFlags};
use riopipe_fs_core::format::layout::Layout;
use riopipe_fs_core::open_inode::OpenInode;
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockKind, BlockNo, FsError, Ino, MetaBlocks};

/// The blocks of an image, with edits in memory.
struct ImageBlocks<'a> {
    image: &'a Image,
    layout: Layout,
    edits: BTreeMap<BlockNo, (BlockKind, Arc<Block>)>,
    /// The blocks that may be allocated, the last one first.
    free: Vec<BlockNo>,
}

impl<'a> ImageBlocks<'a> {
    fn new(image: &'a Image) -> Self {
        Self { image, layout: image.layout(), edits: BTreeMap::new(), free: Vec::new() }
    }

    /// Writes all edits.
    fn write(&mut self) {
        for (at, (kind, block)) in std::mem::take(&mut self.edits) {
            let mut block = *block;
            seal(&self.layout, at, kind, &mut block);
            self.image.write(at, &block);
        }
    }

    /// The block and the offset of an inode.
    fn inode_at(&self, ino: Ino) -> (BlockNo, usize) {
        let (group, index) = self.layout.group_of_inode(ino);
        let (at, offset) = self.layout.descriptor_at(group);
        let desc = GroupDesc::decode(&self.layout, &self.image.read(at)[offset..]);
        let per_block = self.layout.inodes_per_block();
        let at = BlockNo(desc.inode_table.0 + u64::from(index / per_block));
        (at, (index % per_block) as usize * INODE_BYTES)
    }

    fn inode(&self, ino: Ino) -> DiskInode {
        let (at, offset) = self.inode_at(ino);
        let raw = self.image.read(at)[offset..offset + INODE_BYTES].try_into().expect("an inode");
        DiskInode::decode(&raw, &self.layout, ino).expect("a valid inode")
    }

    fn set_inode(&self, ino: Ino, disk: &DiskInode) {
        let (at, offset) = self.inode_at(ino);
        let mut block = self.image.read(at);
        let raw = &mut block[offset..offset + INODE_BYTES];
        disk.encode(raw.try_into().expect("an inode"), &self.layout, ino);
        self.image.write(at, &block);
    }
}

impl MetaBlocks for ImageBlocks<'_> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn get(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError> {
        if let Some((had, block)) = self.edits.get(&at) {
            assert_eq!(*had, kind);
            return Ok(Arc::clone(block));
        }
        let block = self.image.read(at);
        verify(&self.layout, at, kind, &block)?;
        Ok(Arc::new(*block))
    }

    fn edit(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        let block = self.get(at, kind)?;
        let (_, block) = self.edits.entry(at).or_insert((kind, block));
        Ok(Arc::make_mut(block))
    }

    fn create(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        self.edits.insert(at, (kind, Arc::new([0; BLOCK_BYTES])));
        self.edit(at, kind)
    }

    fn allocate(&mut self, _goal: BlockNo) -> Result<BlockNo, FsError> {
        self.free.pop().ok_or(FsError::NoSpace)
    }

    fn free_meta(&mut self, at: BlockNo) {
        panic!("directories free no block such as {at}");
    }

    fn free_data(&mut self, first: BlockNo, _blocks: u32) {
        panic!("directories free no block such as {first}");
    }
}

/// All names of a directory but `.` and `..`, read in steps of `limit`.
fn read_all(
    blocks: &ImageBlocks<'_>,
    ino: Ino,
    disk: &DiskInode,
    limit: usize,
) -> BTreeMap<Vec<u8>, Entry> {
    let mut all = BTreeMap::new();
    let (mut cookie, mut number) = (0, 0);
    loop {
        let (mut left, from) = (limit, cookie);
        let mut sink = |item: dir::DirItem<'_>| {
            if left == 0 {
                return ControlFlow::Break(());
            }
            left -= 1;
            cookie = item.next_cookie;
            let entry = Entry { ino: item.ino, kind: item.kind };
            match number {
                0 => assert_eq!((item.name, item.ino), (&b"."[..], ino)),
                1 => assert_eq!(item.name, b".."),
                _ => assert!(all.insert(item.name.to_vec(), entry).is_none(), "read twice"),
            }
            number += 1;
            ControlFlow::Continue(())
        };
        dir::read(ino, disk, blocks, from, &mut sink).expect("a directory");
        if left > 0 {
            return all;
        }
    }
}

/// The entries of `path` as debugfs lists them.
fn listed(image: &Image, path: &str) -> BTreeMap<Vec<u8>, Entry> {
    let mut names = BTreeMap::new();
    for line in image.debugfs(&format!("ls -p {path}\n")).lines() {
        // "/12/100644/0/0/name/5/"
        let fields: Vec<&str> = line.split('/').collect();
        if fields.len() < 7 || fields[1] == "0" || fields[5] == "." || fields[5] == ".." {
            continue;
        }
        let mode = u16::from_str_radix(fields[2], 8).expect("a mode");
        let ino = Ino(fields[1].parse().expect("a number"));
        let kind = FileKind::of_mode(mode);
        names.insert(fields[5].as_bytes().to_vec(), Entry { ino, kind });
    }
    names
}

/// Chooses the hash of an image: 0 legacy, 1 half MD4, 2 TEA; 3 is added for unsigned bytes.
fn set_hash(image: &Image, version: u8) {
    let flags = if version >= 3 { 2 } else { 1 };
    let name = ["legacy", "half_md4", "tea"][usize::from(version % 3)];
    image.debugfs(&format!(
        "set_super_value def_hash_version {name}\nset_super_value flags {flags}\n"
    ));
    assert_eq!(image.layout().hash_version, version);
}

fn ino_of(image: &Image, path: &str) -> Ino {
    let text = image.debugfs(&format!("stat {path}\n"));
    let number = text.split("Inode: ").nth(1).expect("an inode").split_whitespace().next();
    Ino(number.expect("a number").parse().expect("a number"))
}

#[test]
fn directories_of_mke2fs_and_e2fsck_are_read() {
    let files = tempfile::TempDir::new().expect("a directory");
    let many = files.path().join("many");
    std::fs::create_dir(&many).expect("made");
    for number in 0..3000 {
        let text = format!("{number:x}-ä-{}", "é".repeat(number % 90));
        std::fs::write(many.join(text), "").expect("written");
    }
    std::fs::create_dir(many.join("folder")).expect("made");
    std::os::unix::fs::symlink("folder", many.join("link")).expect("made");
    let files = files.path().to_str().expect("a plain path");
    for (version, features) in [
        (0, "metadata_csum"),
        (1, "metadata_csum"),
        (2, "^metadata_csum"),
        (3, "metadata_csum"),
        (4, "^metadata_csum"),
        (5, "metadata_csum"),
    ] {
        let image = Image::new(64, &["-O", features, "-d", files]);
        set_hash(&image, version);
        let expected = listed(&image, "/many");
        assert_eq!(expected.len(), 3002);
        let ino = ino_of(&image, "/many");
        for is_tree in [false, true] {
            if is_tree {
                let ended = image.tool("e2fsck", &["-f", "-y", "-D"]);
                assert!(ended.code <= 1, "e2fsck: {}", ended.output);
            }
            let blocks = ImageBlocks::new(&image);
            let disk = blocks.inode(ino);
            assert_eq!(disk.flags.contains(InodeFlags::INDEX), is_tree);
            for limit in [17, 100_000] {
                assert_eq!(read_all(&blocks, ino, &disk, limit), expected);
            }
            for (name, entry) in &expected {
                let found = dir::lookup(ino, &disk, &blocks, name).expect("a directory");
                assert_eq!(found, Some(*entry));
            }
            assert_eq!(dir::lookup(ino, &disk, &blocks, b"none"), Ok(None));
            assert_eq!(dir::parent(ino, &disk, &blocks), Ok(Ino::ROOT));
            assert_eq!(dir::is_empty(ino, &disk, &blocks), Ok(false));
            let folder = expected[&b"folder"[..]].ino;
            let disk = blocks.inode(folder);
            assert_eq!(dir::is_empty(folder, &disk, &blocks), Ok(true));
            assert_eq!(dir::parent(folder, &disk, &blocks), Ok(ino));
            for path in ["/", "/lost+found"] {
                let ino = ino_of(&image, path);
                let disk = blocks.inode(ino);
                assert_eq!(read_all(&blocks, ino, &disk, 1), listed(&image, path));
                assert_eq!(dir::is_empty(ino, &disk, &blocks), Ok(path != "/"));
            }
        }
    }
}

/// A directory `/d` in an image, of which every block was written by this crate. All names are
/// links to the file `/f`.
struct Written<'a> {
    blocks: ImageBlocks<'a>,
    ino: Ino,
    disk: DiskInode,
    file: Ino,
    names: BTreeSet<Vec<u8>>,
}

impl<'a> Written<'a> {
    /// The tools make a directory that has as many blocks as this crate needs, so that bitmaps and
    /// counts are right.
    fn new(image: &'a Image, names: &[Vec<u8>]) -> Self {
        image.debugfs("mkdir d\nwrite /dev/null f\n");
        let (ino, file) = (ino_of(image, "/d"), ino_of(image, "/f"));
        let disk = ImageBlocks::new(image).inode(ino);
        let blocks = ImageBlocks::new(image);
        let mut written = Self { blocks, ino, disk, file, names: BTreeSet::new() };
        // Once without a place, to learn the number of blocks.
        let last = written.blocks.layout.blocks - 1;
        written.blocks.free = (last / 2..=last).rev().map(BlockNo).collect();
        written.build(names);
        let len = written.disk.size / BLOCK_BYTES as u64;

        image.debugfs(&"expand_dir d\n".repeat(len as usize - 1));
        let mut blocks = ImageBlocks::new(image);
        written.disk = blocks.inode(ino);
        let mut places = Vec::new();
        let mut each = |extent: extents::Extent| {
            places.extend((0..u64::from(extent.len)).map(|i| BlockNo(extent.physical.0 + i)));
            ControlFlow::Continue(())
        };
        let all = 0..len;
        let _ = extents::for_each(ino, &written.disk, &blocks, all, &mut each).expect("extents");
        places.reverse();
        blocks.free = places;
        written.blocks = blocks;
        written.build(names);
        assert_eq!(written.disk.size, len * BLOCK_BYTES as u64);
        assert!(written.blocks.free.is_empty());
        written.write();
        written
    }

    fn build(&mut self, names: &[Vec<u8>]) {
        self.disk.sectors = 0;
        let mut open = OpenInode { ino: self.ino, disk: &mut self.disk };
        extents::init(&mut open);
        dir::create_empty(&mut open, &mut self.blocks, Ino::ROOT).expect("an empty directory");
        self.names.clear();
        for name in names {
            self.insert(name);
        }
    }

    fn insert(&mut self, name: &[u8]) {
        let mut open = OpenInode { ino: self.ino, disk: &mut self.disk };
        dir::insert(&mut open, &mut self.blocks, name, self.file, FileKind::REGULAR)
            .expect("inserted");
        self.names.insert(name.to_vec());
    }

    fn remove(&mut self, name: &[u8]) {
        let mut open = OpenInode { ino: self.ino, disk: &mut self.disk };
        let removed = dir::remove(&mut open, &mut self.blocks, name).expect("a directory");
        assert_eq!(removed.expect("an entry").ino, self.file);
        self.names.remove(name);
    }

    /// Writes everything, and lets the tools check it.
    fn write(&mut self) {
        self.blocks.write();
        self.blocks.set_inode(self.ino, &self.disk);
        let mut file = self.blocks.inode(self.file);
        file.links = self.names.len() as u16 + 1;
        self.blocks.set_inode(self.file, &file);
        self.blocks.image.assert_clean();
        let entry = Entry { ino: self.file, kind: FileKind::REGULAR };
        let expected = self.names.iter().map(|name| (name.clone(), entry)).collect();
        assert_eq!(read_all(&self.blocks, self.ino, &self.disk, 100), expected);
    }

    fn len(&self) -> u64 {
        self.disk.size / BLOCK_BYTES as u64
    }

    fn is_tree(&self) -> bool {
        self.disk.flags.contains(InodeFlags::INDEX)
    }

    /// The levels of index blocks, from the root of the tree.
    fn levels(&self) -> u8 {
        self.root()[30] + 1
    }

    fn root(&self) -> Box<Block> {
        let run = extents::lookup(self.ino, &self.disk, &self.blocks, 0).expect("extents");
        let extents::Run::Mapped(extent) = run else { panic!("a hole") };
        self.blocks.image.read(extent.physical)
    }
}

/// Names of up to 255 bytes, half of them long.
fn names(count: usize) -> Vec<Vec<u8>> {
    let name = |number: usize| {
        let mut name = format!("{number:05}").into_bytes();
        let length = if number.is_multiple_of(2) { 255 } else { 5 + number % 251 };
        name.resize(length, 0x80 | number as u8);
        name
    };
    (0..count).map(name).collect()
}

#[test]
fn e2fsck_finds_nothing_in_lists() {
    for features in ["metadata_csum", "^metadata_csum", "^dir_index", "^dir_index,^metadata_csum"] {
        let image = Image::new(64, &["-O", features]);
        let written = Written::new(&image, &names(7));
        assert_eq!(written.len(), 1);
    }
    for features in ["^dir_index", "^dir_index,^metadata_csum"] {
        for (count, blocks) in [(30, 2), (1000, 50)] {
            let image = Image::new(64, &["-O", features]);
            let mut written = Written::new(&image, &names(count));
            assert!(written.len() >= blocks && !written.is_tree());
            for name in names(count).iter().step_by(3) {
                written.remove(name);
            }
            written.write();
        }
    }
}

#[test]
fn e2fsck_finds_nothing_in_trees() {
    for version in 0..6 {
        for features in ["metadata_csum", "^metadata_csum"] {
            for (count, levels) in [(30, 1), (1000, 1), (9000, 2)] {
                let image = Image::new(128, &["-O", features]);
                set_hash(&image, version);
                let mut written = Written::new(&image, &names(count));
                assert!(written.is_tree());
                assert_eq!((written.levels(), written.root()[28]), (levels, version % 3));
                for name in names(count).iter().step_by(3) {
                    written.remove(name);
                }
                written.write();
                for name in names(count).iter().step_by(6) {
                    written.insert(name);
                }
                written.write();
            }
        }
    }
}

#[test]
fn e2fsck_finds_nothing_in_an_empty_tree() {
    let image = Image::new(64, &[]);
    let mut written = Written::new(&image, &names(200));
    for name in &names(200) {
        written.remove(name);
    }
    written.write();
    assert_eq!(dir::is_empty(written.ino, &written.disk, &written.blocks), Ok(true));
}

/// The legacy hash of signed bytes, continued.
fn legacy([last, before]: [u32; 2], name: &[u8]) -> [u32; 2] {
    name.iter().fold([last, before], |[last, before], &byte| {
        let byte = i32::from(byte.cast_signed()) as u32;
        let next = before.wrapping_add(last ^ byte.wrapping_mul(7_152_373));
        [if next >> 31 == 1 { next.wrapping_sub(0x7fff_ffff) } else { next }, last]
    })
}

/// Names in groups that have the hash in common.
fn colliding_names() -> Vec<Vec<u8>> {
    let prefix = [b'x'; 200];
    let start = legacy([0x12a3_fe2d, 0x37ab_e8f9], &prefix);
    let mut by_hash: Vec<(u32, [u8; 5])> = (0..2_000_000_u32)
        .map(|number| {
            let letter = |shift: u32| b'A' + (number >> shift & 0x1f) as u8;
            let suffix = [letter(0), letter(5), letter(10), letter(15), letter(20)];
            (legacy(start, &suffix)[0] << 1, suffix)
        })
        .collect();
    by_hash.sort_unstable();
    let groups = by_hash.chunk_by(|a, b| a.0 == b.0).filter(|group| group.len() > 1);
    let suffixes = groups.take(1500).flatten();
    suffixes.map(|(_, suffix)| [&prefix[..], suffix].concat()).collect()
}

#[test]
fn e2fsck_finds_nothing_in_a_tree_with_collisions() {
    let names = colliding_names();
    assert!(names.len() >= 2000, "{}", names.len());
    let image = Image::new(64, &[]);
    set_hash(&image, 0);
    let mut written = Written::new(&image, &names);
    let root = written.root();
    let pairs = u16::from_le_bytes([root[34], root[35]]);
    let shared = (1..usize::from(pairs)).filter(|pair| root[32 + pair * 8] & 1 == 1).count();
    assert!(shared > 20, "{shared} of {pairs} leaves share a hash with the one before");
    for name in names.iter().step_by(2) {
        written.remove(name);
    }
    written.write();
    for name in &names {
        let found = dir::lookup(written.ino, &written.disk, &written.blocks, name);
        assert_eq!(found.expect("a directory").is_some(), written.names.contains(name));
    }
}
