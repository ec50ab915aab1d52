//! The use of a file system that may be damaged: everything is read, then all sorts of changes are
//! made, and it is unmounted.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use riopipe_fs_core::file_journal::record::Epoch;
use riopipe_fs_core::format::inode::{Time, file_type};
use riopipe_fs_core::fs::{Caller, Fs, MountError, MountOptions, NewInode, SeekTo, SetAttr, mode};
use riopipe_fs_core::xattr::SetMode;
use riopipe_fs_core::{BLOCK_BYTES, FsError, Ino};

use super::drive::Drive;
use super::fixture::{AREA_BLOCKS, WITNESS, WITNESS_DATA, witness_content};

/// The time of all calls.
pub const NOW: Time = Time { seconds: 1_700_000_000, nanos: 5 };

/// The names of a directory that are used, at most.
const NAMES_MAX: usize = 24;
/// The parts of a file that are read, at most.
const PARTS_MAX: usize = 24;

/// The findings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Whether it could be mounted.
    pub is_mounted: bool,
    /// The error of the mount.
    pub refused: Option<MountError>,
    /// The errors of calls that name something damaged.
    pub damage: Vec<FsError>,
}

/// A name that was found.
struct Found {
    parent: Ino,
    name: Vec<u8>,
    ino: Ino,
    mode: u16,
}

/// Mounts the image of a drive, uses it and unmounts it.
///
/// Panics if a property does not hold. With `is_witness_sound` the damage concerns other files than
/// the witness, which then must be as it was.
pub fn exercise(drive: &Drive, is_witness_sound: bool) -> Outcome {
    let mut outcome = Outcome::default();
    let mut options = MountOptions::new(Epoch(*b"an epoch of fuzz"));
    options.area_blocks_max = AREA_BLOCKS;
    let (fs, _) = match Fs::mount(Arc::new(drive.clone()), options, NOW) {
        Ok(mounted) => mounted,
        Err(error) => {
            outcome.refused = Some(error);
            return outcome;
        }
    };
    outcome.is_mounted = true;
    let mut user = User { fs: &fs, damage: Vec::new(), made: 0 };
    let found = user.walk();
    if is_witness_sound {
        user.check_witness();
    }
    user.change(&found);
    user.check(fs.sync(NOW));
    user.walk();
    if is_witness_sound {
        user.check_witness();
        user.write_beside_the_witness();
    }
    outcome.damage = std::mem::take(&mut user.damage);
    assert_eq!(fs.failure(), None, "a damaged structure makes the whole file system read-only");
    if let Err(error) = fs.unmount(NOW) {
        panic!("it can't be unmounted: {error}");
    }
    outcome
}

struct User<'f> {
    fs: &'f Fs,
    damage: Vec<FsError>,
    made: u32,
}

impl User<'_> {
    /// Takes the result of a call. An error of the storage would be one of the judge.
    fn check<T>(&mut self, result: Result<T, FsError>) -> Option<T> {
        match result {
            Ok(value) => return Some(value),
            Err(error @ (FsError::DamagedBlock { .. } | FsError::DamagedInode { .. })) => {
                self.damage.push(error);
            }
            Err(FsError::Io(text)) => panic!("an error of the storage: {text}"),
            Err(_) => {}
        }
        None
    }

    /// Reads everything that the root leads to.
    fn walk(&mut self) -> Vec<Found> {
        let (mut found, mut seen) = (Vec::new(), BTreeSet::from([Ino::ROOT]));
        let mut directories = vec![Ino::ROOT];
        let figures = self.fs.statfs();
        assert!(figures.blocks_free <= figures.blocks, "{figures:?}");
        while let Some(parent) = directories.pop() {
            let mut names = Vec::new();
            let mut count = 0;
            let read = self.fs.read_dir(parent, 0, &mut |item| {
                count += 1;
                if names.len() < NAMES_MAX && item.name != b"." && item.name != b".." {
                    names.push(item.name.to_vec());
                }
                if count > 100_000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            self.check(read);
            assert!(count <= 100_000, "a scan of a directory without an end");
            for name in names {
                let looked_up = self.fs.lookup(&Caller::default(), parent, &name);
                let Some(attr) = self.check(looked_up) else { continue };
                self.read(attr.ino, attr.mode);
                self.fs.forget(attr.ino, 1);
                let is_dir = attr.mode & file_type::MASK == file_type::DIRECTORY;
                if is_dir && seen.insert(attr.ino) {
                    directories.push(attr.ino);
                }
                found.push(Found { parent, name, ino: attr.ino, mode: attr.mode });
            }
        }
        found
    }

    /// Reads one inode.
    fn read(&mut self, ino: Ino, file_mode: u16) {
        let attr = self.fs.attr(ino);
        self.check(attr);
        let names = self.fs.list_xattr(&Caller::default(), ino);
        for name in self.check(names).unwrap_or_default().split(|byte| *byte == 0) {
            if !name.is_empty() {
                let value = self.fs.get_xattr(ino, name);
                self.check(value);
            }
        }
        match file_mode & file_type::MASK {
            file_type::SYMLINK => {
                let target = self.fs.read_link(ino);
                self.check(target);
            }
            file_type::REGULAR => {
                let mut at = 0;
                for _ in 0..PARTS_MAX {
                    let data = self.fs.seek(ino, at, SeekTo::Data);
                    let Some(data) = self.check(data) else { break };
                    let hole = self.fs.seek(ino, data, SeekTo::Hole);
                    let Some(hole) = self.check(hole) else { break };
                    assert!(hole > data && data >= at, "a seek goes back");
                    let mut part = vec![0; (hole - data).min(1 << 18) as usize];
                    let read = self.fs.read(ino, data, &mut part, NOW);
                    self.check(read);
                    at = hole;
                }
            }
            _ => {}
        }
    }

    fn name(&mut self) -> Vec<u8> {
        self.made += 1;
        format!("made {}", self.made).into_bytes()
    }

    /// Changes everything but the witness.
    fn change(&mut self, found: &[Found]) {
        let root = Caller::default();
        for Found { parent, name, ino, mode: file_mode } in found {
            if name == WITNESS || self.is_witness(*parent) {
                continue;
            }
            match file_mode & file_type::MASK {
                file_type::REGULAR => self.change_file(*ino),
                file_type::DIRECTORY => self.change_directory(*ino),
                _ => {}
            }
            let set = self.fs.set_xattr(&root, *ino, b"user.new", b"value", SetMode::Any, NOW);
            self.check(set);
            let set = self.fs.set_xattr(&root, *ino, b"user.big", &[7; 2000], SetMode::Any, NOW);
            self.check(set);
            let synced = self.fs.fsync(*ino, false, NOW);
            self.check(synced);
            let new = self.name();
            let moved = self.fs.rename(&root, *parent, name, *parent, &new, 0, NOW);
            let now = if self.check(moved).is_some() { &new } else { name };
            let other = self.name();
            let linked = self.fs.link(&root, *ino, *parent, &other, NOW);
            self.check(linked.inspect(|attr| self.fs.forget(attr.ino, 1)));
            let over = self.fs.rename(&root, *parent, &other, *parent, now, 0, NOW);
            self.check(over);
        }
        let ticked = self.fs.tick(NOW);
        self.check(ticked);
        for Found { parent, name, .. } in found {
            if name == WITNESS || self.is_witness(*parent) {
                continue;
            }
            let mut names = vec![name.clone()];
            let read = self.fs.read_dir(*parent, 0, &mut |item| {
                if names.len() < NAMES_MAX && item.name.starts_with(b"made") {
                    names.push(item.name.to_vec());
                }
                ControlFlow::Continue(())
            });
            self.check(read);
            for name in names {
                let removed = self.fs.unlink(&root, *parent, &name, NOW);
                if removed == Err(FsError::IsDirectory) {
                    let removed = self.fs.rmdir(&root, *parent, &name, NOW);
                    self.check(removed);
                } else {
                    self.check(removed);
                }
            }
        }
    }

    fn change_file(&mut self, ino: Ino) {
        let root = Caller::default();
        let opened = self.fs.open(ino);
        let Some(attr) = self.check(opened) else { return };
        let fs = self.fs;
        self.check(fs.write(&root, ino, 0, b"overwritten", NOW));
        self.check(fs.write(&root, ino, attr.size.min(1 << 40), &[9; 9000], NOW));
        self.check(fs.write(&root, ino, 40_000, &[8; 20_000], NOW));
        self.check(fs.fsync(ino, true, NOW));
        self.check(fs.fallocate(ino, mode::PUNCH_HOLE | mode::KEEP_SIZE, 4096, 8192, NOW));
        self.check(fs.fallocate(ino, mode::KEEP_SIZE, 100 << 12, 16 << 12, NOW));
        self.check(fs.fallocate(ino, mode::ZERO_RANGE, 0, 5000, NOW));
        self.check(fs.fallocate(ino, mode::INSERT_RANGE, 4096, 4096, NOW));
        self.check(fs.fallocate(ino, mode::COLLAPSE_RANGE, 4096, 4096, NOW));
        for size in [attr.size / 2, attr.size / 2 + 100_000, 10] {
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            self.check(fs.set_attr(&root, ino, &set, NOW));
        }
        let set = SetAttr { mode: Some(0o640), uid: Some(5), ..SetAttr::default() };
        self.check(fs.set_attr(&root, ino, &set, NOW));
        fs.forget(ino, 1);
    }

    fn change_directory(&mut self, ino: Ino) {
        let root = Caller::default();
        for mode in [file_type::REGULAR | 0o644, file_type::DIRECTORY | 0o755, file_type::FIFO] {
            let name = self.name();
            let new = NewInode { mode, rdev: 0, target: b"" };
            let made = self.fs.create(&root, ino, &name, &new, NOW);
            if let Some(attr) = self.check(made) {
                if attr.mode & file_type::MASK == file_type::REGULAR {
                    let written = self.fs.write(&root, attr.ino, 0, &[5; 5000], NOW);
                    self.check(written);
                    let synced = self.fs.fsync(attr.ino, false, NOW);
                    self.check(synced);
                }
                self.fs.forget(attr.ino, 1);
            }
        }
        let new = NewInode { mode: file_type::SYMLINK | 0o777, rdev: 0, target: &[b'x'; 200] };
        let name = self.name();
        let made = self.fs.create(&root, ino, &name, &new, NOW);
        self.check(made.inspect(|attr| self.fs.forget(attr.ino, 1)));
    }

    fn is_witness(&self, ino: Ino) -> bool {
        self.witness().is_some_and(|witness| witness == ino)
    }

    fn witness(&self) -> Option<Ino> {
        let found = self.fs.lookup(&Caller::default(), Ino::ROOT, WITNESS).ok()?;
        self.fs.forget(found.ino, 1);
        Some(found.ino)
    }

    /// A file that the damage does not concern has its content.
    fn check_witness(&self) {
        let dir = self.witness().expect("the directory that is not damaged");
        let file = self.fs.lookup(&Caller::default(), dir, WITNESS_DATA).expect("the file");
        let content = witness_content();
        let mut read = vec![0; content.len() + 1];
        let len = self.fs.read(file.ino, 0, &mut read, NOW).expect("it can be read");
        assert!(read[..len] == content, "another file has changed");
        let value = self.fs.get_xattr(file.ino, b"user.witness").expect("its attribute");
        assert_eq!(value, [3; 1000]);
        self.fs.forget(file.ino, 1);
    }

    /// Beside a damaged structure, files can still be made.
    fn write_beside_the_witness(&mut self) {
        let root = Caller::default();
        let dir = self.witness().expect("the directory that is not damaged");
        let sub = self.fs.lookup(&root, dir, b"sub").expect("its subdirectory");
        let new = NewInode { mode: file_type::REGULAR | 0o644, rdev: 0, target: b"" };
        let made = self.fs.create(&root, sub.ino, b"new", &new, NOW).expect("a file is made");
        let data = vec![0x77; 100_000];
        // The groups that are not damaged may have less.
        let available = self.fs.statfs().blocks_available;
        if available < data.len().div_ceil(BLOCK_BYTES) as u64 {
            let written = self.fs.write(&root, made.ino, 0, &data, NOW);
            assert!(written.is_err() || written.is_ok_and(|len| len < data.len()), "{available}");
            return;
        }
        assert_eq!(self.fs.write(&root, made.ino, 0, &data, NOW), Ok(data.len()));
        self.fs.fsync(made.ino, false, NOW).expect("it becomes durable");
        let mut read = vec![0; data.len()];
        self.fs.read(made.ino, 0, &mut read, NOW).expect("it can be read");
        assert!(read == data, "a new file has other data");
        self.fs.unlink(&root, sub.ino, b"new", NOW).expect("it is removed");
        self.fs.forget(made.ino, 1);
        self.fs.forget(sub.ino, 1);
    }
}
