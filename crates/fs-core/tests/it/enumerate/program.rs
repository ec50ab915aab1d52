//! Small programs: calls that change names and files, and what syncs them.

use riopipe_fs_core::fs::{Caller, Fs, NewInode, RENAME_EXCHANGE, RENAME_WHITEOUT, SetAttr, mode};
use riopipe_fs_core::xattr::SetMode;
use riopipe_fs_core::{FsError, Ino};
use riopipe_fs_testkit::path::{place, resolve};

use super::NOW;
use super::mapped::Back;

/// A path of directory and name: `a/x`, or `a` in the root.
pub(crate) type Path = &'static str;

/// A call that changes the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// An empty file.
    Create(Path),
    /// A file of 5000 bytes.
    New(Path),
    /// Bytes from an offset on.
    Write(Path, u64, usize),
    Truncate(Path, u64),
    Rename(Path, Path),
    Exchange(Path, Path),
    Link(Path, Path),
    Unlink(Path),
    Mkdir(Path),
    Rmdir(Path),
    /// A symbolic link with a target of so many bytes.
    Symlink(Path, usize),
    /// An attribute of so many bytes.
    Xattr(Path, usize),
    Mode(Path, u16),
    Fallocate(Path, i32, u64, u64),
    /// Stores into two pages of a mapped file. [`Mapped`](super::mapped::Mapped) does it.
    Store(Path, Back),
    /// A rename that leaves a whiteout.
    Whiteout(Path, Path),
}

/// A call that makes changes durable, or orders them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sync {
    Nothing,
    Fsync,
    FsyncDir,
    Fdatasync,
    Barrier,
    All,
}

impl Sync {
    pub(crate) const ALL: [Self; 6] =
        [Self::Nothing, Self::Fsync, Self::FsyncDir, Self::Fdatasync, Self::Barrier, Self::All];
}

/// A change, and what follows it.
pub(crate) type Step = (Change, Sync);

/// The changes for programs of one and two.
pub(crate) const CHANGES: &[Change] = {
    use Change::*;
    &[
        Create("a/n"),
        New("a/n"),
        New("b/x"),
        New("b/e/f"),
        Write("a/x", 0, 100),
        Write("a/x", 0, 4096),
        Write("a/x", 6000, 5000),
        Write("a/x", 20_000, 10),
        Write("a/n", 4096, 4096),
        Truncate("a/x", 0),
        Truncate("a/x", 100),
        Truncate("a/x", 10_000),
        Rename("a/x", "b/x"),
        Rename("a/x", "b/y"),
        Rename("b/y", "a/x"),
        Rename("a/x", "a/n"),
        Rename("a", "b/a"),
        Rename("b/e", "a/n"),
        Exchange("a/x", "b/y"),
        Exchange("a/x", "b/e"),
        Link("a/x", "b/x"),
        Link("b/y", "a/n"),
        Unlink("a/x"),
        Unlink("b/y"),
        Unlink("a/n"),
        Mkdir("a/n"),
        Mkdir("b/e/f"),
        Rmdir("b/e"),
        Symlink("a/n", 5),
        Symlink("b/x", 500),
        Xattr("a/x", 10),
        Xattr("a/x", 1000),
        Mode("a/x", 0o600),
        Fallocate("a/x", 0, 8192, 8192),
        Fallocate("a/x", mode::KEEP_SIZE, 4096, 12_288),
        Fallocate("a/x", mode::PUNCH_HOLE | mode::KEEP_SIZE, 0, 4096),
        Fallocate("a/x", mode::ZERO_RANGE, 100, 5000),
        Fallocate("a/x", mode::ZERO_RANGE | mode::KEEP_SIZE, 4096, 8192),
        Fallocate("a/x", mode::COLLAPSE_RANGE, 0, 4096),
        Fallocate("a/x", mode::INSERT_RANGE, 4096, 4096),
        Store("a/x", Back::InOrder),
        Store("a/x", Back::Reversed),
        Store("a/x", Back::Split),
        Store("a/x", Back::Later),
        Store("b/y", Back::Split),
        Whiteout("a/x", "b/x"),
    ]
};

/// The changes for programs of three: they collide in two names.
pub(crate) const COLLIDING: &[Change] = {
    use Change::*;
    &[
        New("a/n"),
        Unlink("a/n"),
        Rename("a/x", "a/n"),
        Rename("a/n", "a/x"),
        Rename("a/n", "b/n"),
        Exchange("a/x", "a/n"),
        Link("a/x", "a/n"),
        Unlink("a/x"),
        New("a/x"),
        Mkdir("a/n"),
        Rmdir("a/n"),
        Write("a/n", 5000, 4000),
        Truncate("a/n", 10),
    ]
};

pub(crate) fn root() -> Caller {
    Caller::default()
}

fn make(fs: &Fs, path: &str, mode: u16, target: &[u8]) -> Result<Ino, FsError> {
    let (parent, name) = place(fs, path)?;
    let new = NewInode { mode, rdev: 0, target };
    let ino = fs.create(&root(), parent, name, &new, NOW)?.ino;
    fs.forget(ino, 1);
    Ok(ino)
}

impl Change {
    /// The path that a sync after the change is for.
    pub(crate) const fn path(self) -> Path {
        match self {
            Self::Create(path)
            | Self::New(path)
            | Self::Write(path, ..)
            | Self::Truncate(path, _)
            | Self::Unlink(path)
            | Self::Mkdir(path)
            | Self::Rmdir(path)
            | Self::Symlink(path, _)
            | Self::Xattr(path, _)
            | Self::Mode(path, _)
            | Self::Fallocate(path, ..)
            | Self::Store(path, _)
            | Self::Whiteout(_, path)
            | Self::Rename(_, path)
            | Self::Exchange(_, path)
            | Self::Link(_, path) => path,
        }
    }

    /// Does the calls of the change; `after` is called after each. `number` makes the bytes of each
    /// write different.
    pub(crate) fn run(
        self,
        fs: &Fs,
        number: usize,
        after: &mut dyn FnMut(),
    ) -> Result<(), FsError> {
        let byte = b'A'.wrapping_add(number as u8);
        let write = |path, at, len| {
            let ino = resolve(fs, path)?;
            // No two blocks are the same, and no half of one.
            let data: Vec<u8> =
                (at..at + len as u64).map(|at| byte ^ ((at / 1000) as u8) << 5).collect();
            fs.write(&root(), ino, at, &data, NOW).map(drop)
        };
        match self {
            Self::Create(path) => make(fs, path, 0o100_644, b"").map(drop)?,
            Self::New(path) => {
                make(fs, path, 0o100_644, b"")?;
                after();
                write(path, 0, 5000)?;
            }
            Self::Write(path, at, len) => write(path, at, len)?,
            Self::Truncate(path, size) => {
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                fs.set_attr(&root(), resolve(fs, path)?, &set, NOW)?;
            }
            Self::Mode(path, mode) => {
                let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
                fs.set_attr(&root(), resolve(fs, path)?, &set, NOW)?;
            }
            Self::Rename(from, to) => rename(fs, from, to, 0)?,
            Self::Exchange(from, to) => rename(fs, from, to, RENAME_EXCHANGE)?,
            Self::Whiteout(from, to) => rename(fs, from, to, RENAME_WHITEOUT)?,
            Self::Store(..) => unreachable!("the cache of the kernel does it"),
            Self::Link(from, to) => {
                let ino = resolve(fs, from)?;
                let (parent, name) = place(fs, to)?;
                fs.link(&root(), ino, parent, name, NOW)?;
                fs.forget(ino, 1);
            }
            Self::Unlink(path) => {
                let (parent, name) = place(fs, path)?;
                fs.unlink(&root(), parent, name, NOW)?;
            }
            Self::Mkdir(path) => make(fs, path, 0o040_755, b"").map(drop)?,
            Self::Rmdir(path) => {
                let (parent, name) = place(fs, path)?;
                fs.rmdir(&root(), parent, name, NOW)?;
            }
            Self::Symlink(path, len) => make(fs, path, 0o120_777, &vec![byte; len]).map(drop)?,
            Self::Xattr(path, len) => {
                let ino = resolve(fs, path)?;
                let value = vec![byte; len];
                fs.set_xattr(&root(), ino, b"user.k", &value, SetMode::Any, NOW)?;
            }
            Self::Fallocate(path, how, at, len) => {
                fs.fallocate(resolve(fs, path)?, how, at, len, NOW)?;
            }
        }
        after();
        Ok(())
    }
}

fn rename(fs: &Fs, from: &str, to: &str, flags: u32) -> Result<(), FsError> {
    let (parent, name) = place(fs, from)?;
    let (new_parent, new_name) = place(fs, to)?;
    fs.rename(&root(), parent, name, new_parent, new_name, flags, NOW)
}
