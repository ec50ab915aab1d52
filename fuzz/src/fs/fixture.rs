//! The images that are damaged: each structure of the format is there.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use riopipe_fs_core::file_journal::record::Epoch;
use riopipe_fs_core::format::inode::file_type;
use riopipe_fs_core::format::layout::Layout;
use riopipe_fs_core::format::superblock::Superblock;
use riopipe_fs_core::fs::{Caller, Fs, MountOptions, NewInode, mode};
use riopipe_fs_core::journal::format::{Header, MAGIC, block_type};
use riopipe_fs_core::xattr::SetMode;
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockNo, Ino};
use riopipe_nvme::digest::soft;

use super::drive::{Drive, Image, Protected, STREAMS};
use super::exercise::NOW;
use super::places::{Place, Reader, Structure};
use super::seal::{bitmap_places, seal};
use super::{Change, Mutation};

/// The directory that is only read.
pub const WITNESS: &[u8] = b"witness";
/// The file in it.
pub const WITNESS_DATA: &[u8] = b"data";

/// The blocks of the images: 32 MiB.
const BLOCKS: u64 = 8192;

/// The blocks of each area.
pub const AREA_BLOCKS: u32 = 128;

/// The content of the file in [`WITNESS`].
pub fn witness_content() -> Vec<u8> {
    (0..50_000_u32).map(|n| (n / 7) as u8).collect()
}

/// An image, and its structures.
#[derive(Clone, Debug)]
pub struct Fixture {
    /// The image.
    pub image: Image,
    /// Its layout.
    pub layout: Layout,
    /// Its structures.
    pub places: Vec<Place>,
    journal_uuid: [u8; 16],
    protected: Protected,
}

fn options() -> MountOptions {
    let mut options = MountOptions::new(Epoch(*b"an epoch of base"));
    options.area_blocks_max = AREA_BLOCKS;
    options
}

fn file() -> NewInode<'static> {
    NewInode { mode: file_type::REGULAR | 0o644, rdev: 0, target: b"" }
}

fn dir() -> NewInode<'static> {
    NewInode { mode: file_type::DIRECTORY | 0o755, rdev: 0, target: b"" }
}

/// A file system that is filled.
struct Filling<'f>(&'f Fs);

impl Filling<'_> {
    fn make(&self, parent: Ino, name: &[u8], new: &NewInode<'_>) -> Ino {
        let made = self.0.create(&Caller::default(), parent, name, new, NOW).expect("made");
        self.0.forget(made.ino, 1);
        made.ino
    }

    fn write(&self, ino: Ino, offset: u64, data: &[u8]) {
        let written = self.0.write(&Caller::default(), ino, offset, data, NOW);
        assert_eq!(written, Ok(data.len()));
    }

    fn attribute(&self, ino: Ino, name: &[u8], value: &[u8]) {
        let set = self.0.set_xattr(&Caller::default(), ino, name, value, SetMode::Any, NOW);
        set.expect("set");
    }

    fn link(&self, ino: Ino, parent: Ino, name: &[u8]) {
        self.0.link(&Caller::default(), ino, parent, name, NOW).expect("linked");
        self.0.forget(ino, 1);
    }

    /// Files and directories of all forms.
    fn fill(&self) {
        let witness = self.make(Ino::ROOT, WITNESS, &dir());
        self.make(witness, b"sub", &dir());
        let data = self.make(witness, WITNESS_DATA, &file());
        self.write(data, 0, &witness_content());
        self.attribute(data, b"user.witness", &[3; 1000]);

        let top = self.make(Ino::ROOT, b"top", &dir());
        // Roots of one level, with a hole and with an unwritten extent.
        let plain = self.make(top, b"plain", &file());
        self.write(plain, 0, &[1; 10_000]);
        self.write(plain, 50_000, &[2; 10_000]);
        self.0.fallocate(plain, mode::KEEP_SIZE, 100 << 12, 20 << 12, NOW).expect("allocated");
        self.write(self.make(top, b"sparse", &file()), 1 << 33, b"behind 4 GiB");
        // Trees of one and of two levels.
        for (name, extents) in [(&b"one"[..], 30), (b"two", 1500)] {
            let ino = self.make(top, name, &file());
            for n in 0..extents {
                self.write(ino, n * 8192, &[n as u8; 100]);
            }
        }
        let tree = self.make(top, b"tree", &dir());
        for n in 0..300 {
            self.link(plain, tree, format!("a name in a tree of directory blocks {n}").as_bytes());
        }
        let few = self.make(top, b"few", &dir());
        for name in [b"x", b"y", b"z"] {
            self.make(few, name, &file());
        }
        let attributes = self.make(top, b"attributes", &file());
        self.attribute(attributes, b"user.a", b"inside");
        self.attribute(attributes, b"user.b", &[b'b'; 1500]);
        self.attribute(attributes, b"trusted.c", &[b'c'; 500]);
        for (name, len) in [(&b"short"[..], 20), (b"long", 400)] {
            let target = vec![b't'; len];
            self.make(
                top,
                name,
                &NewInode { mode: file_type::SYMLINK | 0o777, rdev: 0, target: &target },
            );
        }
        self.make(top, b"pipe", &NewInode { mode: file_type::FIFO | 0o600, rdev: 0, target: b"" });
    }

    /// A directory whose tree has two levels of index blocks.
    fn fill_deep(&self) {
        let deep = self.make(Ino::ROOT, b"deep", &dir());
        let ino = self.make(deep, b"file", &file());
        for n in 0..6500 {
            self.link(ino, deep, format!("{n:0>250}").as_bytes());
        }
    }

    /// Fills the journals, as a crash leaves them.
    fn leave_behind(&self) {
        let fs = self.0;
        let top = fs.lookup(&Caller::default(), Ino::ROOT, b"top").expect("there").ino;
        let gone = self.make(top, b"gone", &dir());
        for n in 0..40 {
            self.make(gone, format!("{n}").as_bytes(), &file());
        }
        fs.sync(NOW).expect("a commit");
        for n in 0..40 {
            let name = format!("{n}");
            fs.unlink(&Caller::default(), gone, name.as_bytes(), NOW).expect("removed");
        }
        fs.rmdir(&Caller::default(), top, b"gone", NOW).expect("removed, with a revoke");
        // Open files without names stay in the orphan list.
        for name in [&b"orphan"[..], b"another orphan"] {
            let orphan = self.make(top, name, &file());
            fs.open(orphan).expect("open");
            self.write(orphan, 0, &[4; 30_000]);
            fs.unlink(&Caller::default(), top, name, NOW).expect("removed");
        }
        fs.sync(NOW).expect("a commit");
        fs.sync(NOW).expect("nothing");
        // Records.
        let new = self.make(top, b"recorded directory", &dir());
        for n in 0..6 {
            let ino = self.make(new, format!("recorded {n}").as_bytes(), &file());
            self.write(ino, n * 4096, &[n as u8; 9000]);
            fs.fsync(ino, false, NOW).expect("a record");
        }
        let plain = fs.lookup(&Caller::default(), top, b"few").expect("there").ino;
        let x = fs.lookup(&Caller::default(), plain, b"x").expect("there").ino;
        self.write(x, 0, &[6; 5000]);
        fs.fsync(x, true, NOW).expect("a record");
    }
}

impl Fixture {
    /// An image that was unmounted.
    pub fn clean(dir: &Path) -> Self {
        Self::filled(dir, |filling| filling.fill())
    }

    /// An unmounted image with a directory whose tree is deep.
    pub fn deep(dir: &Path) -> Self {
        Self::filled(dir, |filling| {
            filling.fill();
            filling.fill_deep();
        })
    }

    fn filled(dir: &Path, fill: impl FnOnce(&Filling<'_>)) -> Self {
        let options_of_mke2fs =
            ["-J", "size=9", "-N", "1024", "-g", "2048", "-G", "2", "-O", "dir_nlink,orphan_file"];
        let bytes = super::make_image(dir, BLOCKS, &options_of_mke2fs);
        let drive = Drive::new(Image::from_bytes(&bytes), Protected::default());
        let (fs, _) = Fs::mount(Arc::new(drive.clone()), options(), NOW).expect("a new image");
        fill(&Filling(&fs));
        fs.unmount(NOW).expect("unmounted");
        Self::of(drive.image())
    }

    /// The image of `clean` after more changes and a crash.
    pub fn dirty(clean: &Self) -> Self {
        let drive = Drive::new(clean.image.clone(), Protected::default());
        let (fs, _) = Fs::mount(Arc::new(drive.clone()), options(), NOW).expect("mounted");
        Filling(&fs).leave_behind();
        Self::of(drive.image())
    }

    fn of(image: Image) -> Self {
        let superblock = Superblock::decode(&image.read(BlockNo(0)), soft).expect("a superblock");
        let layout = superblock.layout(soft).expect("a layout");
        let reader = Reader { image: &image, layout: &layout };
        let journal = reader.blocks_of(layout.journal_ino).0;
        let first = image.read(journal[0]);
        let mut journal_uuid = [0; 16];
        journal_uuid.copy_from_slice(&first[0x30..0x40]);
        let maxlen = u32::from_be_bytes([first[16], first[17], first[18], first[19]]) as usize;
        let places = places(&reader, &journal, maxlen);
        let protected = protected(&reader, &journal, maxlen);
        Self { journal_uuid, places, protected, layout, image }
    }

    /// The blocks that no write may damage. If the damage makes two files have the same block, the
    /// witness does not count.
    pub fn protected(&self, are_aliased: bool) -> Protected {
        let mut protected = self.protected.clone();
        if are_aliased {
            protected.witness.clear();
            protected.inode_tables.clear();
            protected.bitmaps.clear();
        }
        protected
    }

    /// Changes an image.
    pub fn apply(&self, image: &mut Image, mutation: &Mutation) {
        let place = &self.places[mutation.place];
        let mut block = image.read(place.at);
        let byte = &mut block[place.from + mutation.offset];
        *byte = match mutation.change {
            Change::Set(value) => value,
            Change::Flip(bits) => *byte ^ bits,
        };
        image.write(place.at, Arc::new(block));
        if mutation.sealed {
            seal(image, &self.layout, self.journal_uuid, place);
        }
    }

    /// Whether a mutation may give a block or an inode to two owners without any sign of it.
    pub fn may_alias(&self, mutation: &Mutation) -> bool {
        mutation.sealed
            && match self.places[mutation.place].structure {
                Structure::BlockBitmap(_)
                | Structure::InodeBitmap(_)
                | Structure::Inode(_)
                | Structure::LogBlock
                | Structure::LogCommit
                | Structure::JournalSuperblock
                | Structure::Table
                | Structure::Record
                | Structure::Superblock
                | Structure::Descriptor(_) => true,
                Structure::Block(_, kind) => !matches!(kind, riopipe_fs_core::BlockKind::Xattr),
                Structure::LogCopy => false,
            }
    }

    /// Whether a mutation concerns all files.
    pub fn concerns_all(&self, mutation: &Mutation) -> bool {
        match self.places[mutation.place].structure {
            Structure::Inode(ino) | Structure::Block(ino, _) => ino == Ino::ROOT,
            Structure::BlockBitmap(_) | Structure::InodeBitmap(_) => false,
            _ => true,
        }
    }
}

fn places(reader: &Reader<'_>, journal: &[BlockNo], maxlen: usize) -> Vec<Place> {
    let mut places = Vec::new();
    let at = BlockNo(0);
    places.push(Place { structure: Structure::Superblock, at, from: 1024, len: 1024 });
    for group in 0..reader.layout.groups {
        let (at, from) = reader.layout.descriptor_at(group);
        let len = usize::from(reader.layout.descriptor_bytes);
        places.push(Place { structure: Structure::Descriptor(group), at, from, len });
        for (structure, at) in bitmap_places(reader, group) {
            // The first bits, and some behind the end of the inode bitmap.
            for from in [0, 24, 128, BLOCK_BYTES - 8] {
                places.push(Place { structure, at, from, len: 8 });
            }
        }
    }
    reader.places_of(Ino::ROOT, &mut places);
    reader.places_of(reader.layout.journal_ino, &mut places);
    if let Some(ino) = reader.layout.orphan_file {
        reader.places_of(ino, &mut places);
        let seed = reader.layout.inode_seed(ino, reader.inode(ino).generation);
        let structure = Structure::Block(ino, riopipe_fs_core::BlockKind::OrphanFile(seed));
        let at = reader.blocks_of(ino).0[0];
        places.push(Place { structure, at, from: 0, len: 8 });
        places.push(Place { structure, at, from: BLOCK_BYTES - 8, len: 8 });
    }
    let top = reader.lookup(Ino::ROOT, b"top");
    reader.places_of(top, &mut places);
    for name in [
        &b"plain"[..],
        b"sparse",
        b"one",
        b"two",
        b"tree",
        b"few",
        b"attributes",
        b"short",
        b"long",
        b"pipe",
    ] {
        reader.places_of(reader.lookup(top, name), &mut places);
    }
    let is_deep = |name: &&[u8]| {
        riopipe_fs_core::dir::lookup(Ino::ROOT, &reader.inode(Ino::ROOT), reader, name)
            .is_ok_and(|found| found.is_some())
    };
    if let Some(name) = [&b"deep"[..]].iter().find(|name| is_deep(name)) {
        reader.places_of(reader.lookup(Ino::ROOT, name), &mut places);
    }
    let superblock =
        Place { structure: Structure::JournalSuperblock, at: journal[0], from: 0, len: 0x110 };
    places.push(superblock);
    log_places(reader.image, &journal[..maxlen.min(journal.len())], &mut places);
    for (index, &at) in journal.iter().enumerate().skip(maxlen) {
        let block = reader.image.read(at);
        if index == maxlen {
            places.push(Place { structure: Structure::Table, at, from: 0, len: 72 });
        } else if &block[..8] == b"RIOFSREC" {
            let len = u32::from_le_bytes([block[12], block[13], block[14], block[15]]) as usize;
            let len = len.min(480);
            places.push(Place { structure: Structure::Record, at, from: 0, len });
        }
    }
    places
}

/// The blocks of the log, the newest transactions included.
fn log_places(image: &Image, log: &[BlockNo], places: &mut Vec<Place>) {
    let block = |n: usize| -> Block { image.read(log[n]) };
    let be = |block: &Block, at: usize| {
        u32::from_be_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
    };
    let superblock = block(0);
    let mut at = be(&superblock, 0x1c) as usize;
    let mut sequence = be(&superblock, 0x18);
    let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
    while at != 0 && at < log.len() {
        let content = block(at);
        let Some(header) = Header::decode(&content) else { break };
        if header.sequence != sequence {
            break;
        }
        let (structure, len) = match header.block_type {
            block_type::DESCRIPTOR => (Structure::LogBlock, 80),
            block_type::REVOKE => (Structure::LogBlock, 32),
            block_type::COMMIT => (Structure::LogCommit, 64),
            _ => break,
        };
        let count = counts.entry(header.block_type).or_default();
        *count += 1;
        if *count <= 3 {
            places.push(Place { structure, at: log[at], from: 0, len });
        }
        if header.block_type == block_type::COMMIT {
            sequence = sequence.wrapping_add(1);
        }
        at += 1;
        if header.block_type == block_type::DESCRIPTOR {
            let copy = Place { structure: Structure::LogCopy, at: log[at], from: 0, len: 8 };
            places.push(copy);
            while at < log.len() && be(&block(at), 0) != MAGIC {
                at += 1;
            }
        }
    }
}

fn protected(reader: &Reader<'_>, journal: &[BlockNo], maxlen: usize) -> Protected {
    let layout = reader.layout;
    let mut protected = Protected { layout: Some(layout.clone()), ..Protected::default() };
    for group in 0..layout.groups {
        let first = layout.first_block(group).0;
        let mut own: Vec<u64> =
            (0..u64::from(layout.superblock_blocks(group))).map(|n| first + n).collect();
        let desc = reader.descriptor(group);
        own.extend([desc.block_bitmap.0, desc.inode_bitmap.0]);
        let table = desc.inode_table.0;
        for n in 0..layout.inode_table_blocks() {
            own.push(table + u64::from(n));
            let ino = group * layout.inodes_per_group + n * layout.inodes_per_block() + 1;
            protected.inode_tables.insert(table + u64::from(n), Ino(ino));
        }
        protected.system.extend(own);
    }
    for group in 0..layout.groups {
        let first = layout.first_block(group).0;
        let end = first + u64::from(layout.blocks_in_group(group));
        let bits = protected.system.range(first..end).map(|at| (at - first) as u32).collect();
        protected.bitmaps.insert(reader.descriptor(group).block_bitmap.0, bits);
    }
    // A mount makes the log shorter, and puts the areas behind it.
    let log = maxlen.min(journal.len() - AREA_BLOCKS as usize * usize::from(STREAMS - 1) - 1);
    protected.log.extend(journal[..log].iter().map(|at| at.0));
    let witness = reader.lookup(Ino::ROOT, WITNESS);
    let data = reader.lookup(witness, WITNESS_DATA);
    for ino in [witness, data] {
        let (blocks, nodes) = reader.blocks_of(ino);
        protected.witness.extend(blocks.iter().chain(&nodes).map(|at| at.0));
        protected.witness.extend(Some(reader.inode(ino).xattr_block.0).filter(|at| *at != 0));
    }
    protected
}
