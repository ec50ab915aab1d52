//! The calls of a mounted file system, judged by e2fsck.

use std::ops::ControlFlow;
use std::sync::Arc;

use riopipe_fs_core::file_journal::record::Epoch;
use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Caller, Fs, MountOptions, NewInode, SetAttr};
use riopipe_fs_core::xattr::SetMode;
use riopipe_fs_core::{FsError, Ino};

use crate::memory::{Image, Memory};

pub(crate) const NOW: Time = Time { seconds: 1_700_000_000, nanos: 5 };

pub(crate) fn options() -> MountOptions {
    MountOptions::new(Epoch(*b"an epoch of test"))
}

pub(crate) fn root() -> Caller {
    Caller::default()
}

pub(crate) fn file(mode: u16) -> NewInode<'static> {
    NewInode { mode: 0o100_000 | mode, rdev: 0, target: b"" }
}

pub(crate) fn dir(mode: u16) -> NewInode<'static> {
    NewInode { mode: 0o040_000 | mode, rdev: 0, target: b"" }
}

/// A file system in memory.
pub(crate) struct Mounted {
    pub(crate) memory: Arc<Memory>,
    pub(crate) fs: Fs,
}

impl Mounted {
    pub(crate) fn new(blocks: u64, mke2fs: &[&str]) -> Self {
        Self::of(crate::memory::image_of(blocks, mke2fs), blocks)
    }

    pub(crate) fn of(image: Image, blocks: u64) -> Self {
        let memory = Arc::new(Memory::new(image, blocks, 3));
        let (fs, _) = Fs::mount(memory.clone(), options(), NOW).unwrap();
        Self { memory, fs }
    }

    /// Unmounts, and lets e2fsck check everything.
    pub(crate) fn check(self) {
        self.fs.unmount(NOW).unwrap();
        crate::memory::check_clean(&self.memory.image(), self.blocks());
    }

    fn blocks(&self) -> u64 {
        riopipe_fs_core::storage::Storage::blocks(&*self.memory)
    }

    pub(crate) fn names(&self, ino: Ino) -> Vec<String> {
        let mut names = Vec::new();
        self.fs
            .read_dir(ino, 0, &mut |item| {
                names.push(String::from_utf8_lossy(item.name).into_owned());
                ControlFlow::Continue(())
            })
            .unwrap();
        names.sort();
        names
    }

    pub(crate) fn read_all(&self, ino: Ino) -> Vec<u8> {
        let size = self.fs.attr(ino).unwrap().size as usize;
        let mut data = vec![0xee; size + 10];
        let len = self.fs.read(ino, 0, &mut data, NOW).unwrap();
        data.truncate(len);
        data
    }
}

const BLOCKS: u64 = 65_536;

#[test]
fn files_and_directories_are_made_written_and_removed() {
    let m = Mounted::new(BLOCKS, &[]);
    let fs = &m.fs;
    let d = fs.create(&root(), Ino::ROOT, b"dir", &dir(0o755), NOW).unwrap();
    let f = fs.create(&root(), d.ino, b"file", &file(0o644), NOW).unwrap();
    assert_eq!(fs.create(&root(), d.ino, b"file", &file(0o644), NOW), Err(FsError::Exists));
    let data: Vec<u8> = (0..100_000_u32).map(|n| (n / 3) as u8).collect();
    assert_eq!(fs.write(&root(), f.ino, 7, &data, NOW), Ok(data.len()));
    fs.fsync(f.ino, false, NOW).unwrap();
    let mut expected = vec![0; 7];
    expected.extend(&data);
    assert_eq!(m.read_all(f.ino), expected);
    fs.write(&root(), f.ino, 50_000, b"overwritten", NOW).unwrap();
    expected[50_000..50_011].copy_from_slice(b"overwritten");
    assert_eq!(m.read_all(f.ino), expected);

    let link = NewInode { mode: 0o120_777, rdev: 0, target: b"a/target" };
    let link = fs.create(&root(), d.ino, b"link", &link, NOW).unwrap();
    assert_eq!(fs.read_link(link.ino).unwrap(), b"a/target");
    let long = [b'x'; 3000];
    let long = NewInode { mode: 0o120_777, rdev: 0, target: &long };
    let long = fs.create(&root(), d.ino, b"long link", &long, NOW).unwrap();
    assert_eq!(fs.read_link(long.ino).unwrap(), [b'x'; 3000]);
    fs.link(&root(), f.ino, Ino::ROOT, b"second", NOW).unwrap();
    assert_eq!(fs.attr(f.ino).unwrap().links, 2);
    assert_eq!(m.names(d.ino), [".", "..", "file", "link", "long link"]);

    fs.rename(&root(), d.ino, b"file", Ino::ROOT, b"moved", 0, NOW).unwrap();
    fs.unlink(&root(), d.ino, b"link", NOW).unwrap();
    assert_eq!(fs.rmdir(&root(), Ino::ROOT, b"dir", NOW), Err(FsError::NotEmpty));
    fs.unlink(&root(), d.ino, b"long link", NOW).unwrap();
    fs.rmdir(&root(), Ino::ROOT, b"dir", NOW).unwrap();
    let cut = SetAttr { size: Some(4099), ..SetAttr::default() };
    fs.set_attr(&root(), f.ino, &cut, NOW).unwrap();
    assert_eq!(m.read_all(f.ino), expected[..4099]);
    let grow = SetAttr { size: Some(9000), ..SetAttr::default() };
    fs.set_attr(&root(), f.ino, &grow, NOW).unwrap();
    expected.truncate(4099);
    expected.resize(9000, 0);
    assert_eq!(m.read_all(f.ino), expected);
    assert_eq!(m.names(Ino::ROOT), [".", "..", "lost+found", "moved", "second"]);
    m.check();
}

#[test]
fn what_was_written_is_there_after_a_remount() {
    let m = Mounted::new(BLOCKS, &[]);
    let f = m.fs.create(&root(), Ino::ROOT, b"file", &file(0o600), NOW).unwrap();
    m.fs.write(&root(), f.ino, 1_000_000, b"behind a hole", NOW).unwrap();
    m.fs.unmount(NOW).unwrap();
    let m = Mounted::of(m.memory.image(), BLOCKS);
    let f = m.fs.lookup(&root(), Ino::ROOT, b"file").unwrap();
    assert_eq!((f.size, f.mode), (1_000_013, 0o100_600));
    assert_eq!(m.read_all(f.ino)[1_000_000..], *b"behind a hole");
    m.check();
}

#[test]
fn a_storage_that_fails_makes_the_file_system_read_only() {
    for groups in 0..14 {
        let m = Mounted::new(BLOCKS, &[]);
        let f = m.fs.create(&root(), Ino::ROOT, b"file", &file(0o600), NOW).unwrap();
        m.fs.fsync(f.ino, false, NOW).unwrap();
        m.memory.fail_after(groups % 7);
        let mut synced = 0;
        let failed = (0..20_u8).any(|byte| {
            let written = m.fs.write(&root(), f.ino, u64::from(byte) * 4096, &[byte; 4096], NOW);
            let result = match (written, byte % 3) {
                (Err(error), _) => Err(error),
                (_, 0) => m.fs.sync(NOW),
                _ => m.fs.fsync(f.ino, false, NOW),
            };
            synced += u64::from(result.is_ok());
            result.is_err()
        });
        assert!(failed && m.fs.is_read_only(), "after {synced} syncs");
        assert!(m.fs.failure().unwrap().contains("made to fail"));
        assert_eq!(m.fs.fsync(f.ino, false, NOW), Err(FsError::ReadOnly));
        let created = m.fs.create(&root(), Ino::ROOT, b"other", &file(0o600), NOW);
        assert_eq!(created, Err(FsError::ReadOnly));
        assert_eq!(m.fs.unmount(NOW), Err(FsError::ReadOnly));
        // What was synced is there.
        let again = Mounted::of(m.memory.crash(&mut |_| 0), BLOCKS);
        let f = again.fs.lookup(&root(), Ino::ROOT, b"file").unwrap();
        assert!(f.size >= synced * 4096, "{} bytes, {synced} syncs", f.size);
        again.check();
    }
}

/// As the kernel leaves an image when it is cut: an unlinked file that was open is in the orphan
/// file, and so is one that is deleted already.
#[test]
fn orphans_of_the_kernel_are_deleted() {
    use riopipe_fs_core::block::BlockKind;
    use riopipe_fs_core::format::features::{Features, ro_compat};
    use riopipe_fs_core::format::{checksum, orphan_file};

    let image = crate::image::Image::new(256, &["-J", "size=32", "-O", "orphan_file"]);
    std::fs::write(image.dir().join("data"), [7; 50_000]).unwrap();
    let data = image.dir().join("data");
    image.debugfs(&format!("write {} file\nsif file links_count 0\n", data.display()));
    let layout = image.layout();
    let file = layout.orphan_file.unwrap();
    let found = image.debugfs(&format!("bmap <{}> 0\nstat file\nunlink file\n", file.0));
    let number = |line: &str| {
        line.split(|c: char| !c.is_ascii_digit()).find(|n| !n.is_empty()).unwrap().parse().unwrap()
    };
    let at = found.lines().find(|line| line.starts_with(|c: char| c.is_ascii_digit())).unwrap();
    let at = riopipe_fs_core::BlockNo(number(at));
    let ino = Ino(number(found.lines().find(|line| line.contains("Inode:")).unwrap()) as u32);
    let generation = found.lines().find(|line| line.contains("Generation:")).map(|_| 0).unwrap();
    let kind = BlockKind::OrphanFile(layout.inode_seed(file, generation));
    let mut block = image.read(at);
    checksum::verify(&layout, at, kind, &block).unwrap();
    assert!(orphan_file::fill(&mut block, &[ino, Ino(500)]).is_empty());
    checksum::seal(&layout, at, kind, &mut block);
    image.write(at, &block);
    let mut superblock = image.superblock();
    let features = superblock.features();
    let with = features.ro_compat | ro_compat::ORPHAN_PRESENT;
    superblock.set_features(Features { ro_compat: with, ..features });
    let mut first = image.read(riopipe_fs_core::BlockNo(0));
    superblock.encode(&mut first, riopipe_nvme::digest::soft);
    image.write(riopipe_fs_core::BlockNo(0), &first);

    let bytes = std::fs::read(image.path()).unwrap();
    let memory = Arc::new(Memory::new(Image::from_bytes(&bytes), BLOCKS, 3));
    let (fs, report) = Fs::mount(memory.clone(), options(), NOW).unwrap();
    assert_eq!(report.orphans, 2);
    Mounted { memory, fs }.check();
}

/// Recovery allocates directory blocks and extent nodes while it applies records. The blocks that
/// later records have do not become any of these.
#[test]
fn recovery_does_not_allocate_what_a_later_record_has() {
    let m = Mounted::new(BLOCKS, &[]);
    let fs = &m.fs;
    let d = fs.create(&root(), Ino::ROOT, b"dir", &dir(0o755), NOW).unwrap();
    // The first file has the first blocks of the group, but its record is the last one.
    let first = fs.create(&root(), d.ino, b"first", &file(0o600), NOW).unwrap();
    for page in 0..5000_u64 {
        fs.write(&root(), first.ino, page * 4096, &[9; 4096], NOW).unwrap();
    }
    for n in 0..120_u32 {
        let name = format!("{n:0>200}");
        let f = fs.create(&root(), d.ino, name.as_bytes(), &file(0o600), NOW).unwrap();
        fs.fsync(f.ino, false, NOW).unwrap();
    }
    fs.fsync(first.ino, false, NOW).unwrap();
    assert_eq!(fs.stat().commits, 0, "all of it is in records");
    let again = Mounted::of(m.memory.crash(&mut |n| n - 1), BLOCKS);
    let d = again.fs.lookup(&root(), Ino::ROOT, b"dir").unwrap();
    assert_eq!(again.names(d.ino).len(), 123);
    let f = again.fs.lookup(&root(), d.ino, b"first").unwrap();
    assert!(again.read_all(f.ino) == vec![9; 5000 * 4096]);
    again.check();
}

/// SQLite calls `fdatasync` for a directory when it has removed its journal.
#[test]
fn fdatasync_of_a_directory_makes_its_entries_durable() {
    let m = Mounted::new(BLOCKS, &[]);
    let fs = &m.fs;
    for name in [b"a", b"b"] {
        fs.create(&root(), Ino::ROOT, name, &file(0o600), NOW).unwrap();
    }
    fs.fsync(Ino::ROOT, false, NOW).unwrap();
    // Nothing but the unlink: a create counts as data anyway.
    fs.unlink(&root(), Ino::ROOT, b"a", NOW).unwrap();
    fs.fsync(Ino::ROOT, true, NOW).unwrap();
    let again = Mounted::of(m.memory.crash(&mut |_| 0), BLOCKS);
    assert!(again.fs.lookup(&root(), Ino::ROOT, b"a").is_err());
    assert!(again.fs.lookup(&root(), Ino::ROOT, b"b").is_ok());
    again.check();
}

type Close = fn(&Fs, Ino) -> Result<(), FsError>;

/// Changes after which fewer programs may use a directory.
fn closings() -> [Close; 3] {
    fn set(fs: &Fs, ino: Ino, set: &SetAttr) -> Result<(), FsError> {
        fs.set_attr(&root(), ino, set, NOW).map(drop)
    }
    [
        |fs, ino| set(fs, ino, &SetAttr { mode: Some(0o700), ..SetAttr::default() }),
        |fs, ino| set(fs, ino, &SetAttr { uid: Some(7), ..SetAttr::default() }),
        |fs, ino| fs.set_xattr(&root(), ino, b"security.a", b"secret", SetMode::Any, NOW),
    ]
}

/// Afterwards a held file below the directory needs a main commit. It would contain what came after
/// the barriers of other held files.
#[test]
fn held_files_are_submitted_before_a_directory_is_closed() {
    for close in closings() {
        let m = Mounted::new(BLOCKS, &[]);
        let fs = &m.fs;
        let d = fs.create(&root(), Ino::ROOT, b"dir", &dir(0o755), NOW).unwrap();
        // Their numbers follow one another, so they are on different streams.
        for name in [b"a", b"b"] {
            let f = fs.create(&root(), d.ino, name, &file(0o644), NOW).unwrap();
            fs.write(&root(), f.ino, 0, b"data", NOW).unwrap();
            fs.barrier(f.ino, false, NOW).unwrap();
        }
        assert_eq!(fs.load().held, 1);
        close(fs, d.ino).unwrap();
        assert_eq!(fs.load().held, 0);
        m.check();
    }
}

/// A record has the first fields of the directories on the way. A file that was put into a
/// directory after its permissions were taken must not be there with the permissions.
#[test]
fn a_synced_file_is_not_in_a_directory_with_older_permissions() {
    for close in closings() {
        let m = Mounted::new(BLOCKS, &[]);
        let fs = &m.fs;
        let d = fs.create(&root(), Ino::ROOT, b"dir", &dir(0o755), NOW).unwrap();
        close(fs, d.ino).unwrap();
        let f = fs.create(&root(), d.ino, b"file", &file(0o644), NOW).unwrap();
        fs.fsync(f.ino, false, NOW).unwrap();
        let expected = (fs.attr(d.ino).unwrap(), fs.list_xattr(&root(), d.ino).unwrap());
        let again = Mounted::of(m.memory.crash(&mut |_| 0), BLOCKS);
        let fs = &again.fs;
        let d = fs.lookup(&root(), Ino::ROOT, b"dir").unwrap();
        assert_eq!((d.mode, d.uid), (expected.0.mode, expected.0.uid));
        assert_eq!(fs.list_xattr(&root(), d.ino).unwrap(), expected.1);
        assert!(fs.lookup(&root(), d.ino, b"file").is_ok());
        again.check();
    }
}
