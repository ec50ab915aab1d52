//! Random programs: the calls, what they do to a file system, and what they do to its model.

use std::fmt;

use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Caller, Fs, NewInode, SetAttr};
use riopipe_fs_core::{BLOCK_BYTES, FsError};

use crate::model::{Model, Node, Path};
use crate::path::{place, resolve};
use crate::random::Random;

/// A call of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A new file.
    Create(Path),
    /// A new directory.
    Mkdir(Path),
    /// Writes into a file.
    Write {
        /// The file.
        path: Path,
        /// The offset, bytes.
        at: usize,
        /// The number of bytes.
        len: usize,
        /// All of them are this one.
        byte: u8,
    },
    /// Gives a file a size in bytes.
    Truncate(Path, usize),
    /// Makes a file durable; with `true` by `fdatasync`.
    Fsync(Path, bool),
    /// Orders a file; with `true` by `fdatabarrier`.
    Barrier(Path, bool),
    /// Removes a file.
    Unlink(Path),
    /// Removes a directory, which may have entries.
    Rmdir(Path),
    /// Renames a file or directory.
    Rename(Path, Path),
    /// Makes everything durable.
    Sync,
    /// The work of the background.
    Tick,
    /// Reads a file, and compares it with the model.
    Read(Path),
}

/// Why a call has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    /// The file system returned an error that the program does not expect.
    Error(FsError),
    /// The file system did something else than it should.
    Wrong(String),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(error) => error.fmt(f),
            Self::Wrong(what) => f.write_str(what),
        }
    }
}

impl From<FsError> for Failed {
    fn from(error: FsError) -> Self {
        Self::Error(error)
    }
}

impl Call {
    /// A call that is possible now; sometimes there is none.
    pub fn draw(model: &Model, random: &mut Random) -> Option<Self> {
        let dirs = model.dirs();
        let parent = &dirs[random.below(dirs.len() as u64) as usize];
        let path = format!("{parent}/{}", random.pick(&["a", "b", "c", "d", "e"]));
        let node = model.node(&path);
        Some(match (random.below(22), node) {
            (0..=3, None) => Self::Create(path),
            (4, None) if parent.len() < 6 => Self::Mkdir(path),
            (0..=7, Some(Node::File(file))) => {
                let size = model.content(file).len();
                let at = match random.below(3) {
                    0 => size,
                    1 => random.below(size as u64 + 1) as usize,
                    _ => random.below(20_000) as usize,
                };
                let len = random.pick(&[1, 100, 4096, 9000]);
                Self::Write { path, at, len, byte: 1 + random.below(255) as u8 }
            }
            (8, Some(Node::File(_))) => Self::Truncate(path, random.below(20_000) as usize),
            (9..=13, Some(Node::File(_))) => Self::Fsync(path, random.below(2) == 0),
            (14, Some(Node::File(_))) => Self::Unlink(path),
            (14, Some(Node::Dir)) => Self::Rmdir(path),
            (15 | 16, Some(source)) => {
                let to_parent = &dirs[random.below(dirs.len() as u64) as usize];
                let to = format!("{to_parent}/{}", random.pick(&["a", "b", "x"]));
                let is_inside = format!("{to_parent}/").starts_with(&format!("{path}/"));
                let is_possible = match model.node(&to) {
                    Some(Node::Dir) => false,
                    Some(Node::File(_)) => source != Node::Dir,
                    None => true,
                };
                if to == path || is_inside || !is_possible {
                    return None;
                }
                Self::Rename(path, to)
            }
            (17, _) => Self::Sync,
            (18, _) => Self::Tick,
            (19 | 20, Some(Node::File(_))) => Self::Barrier(path, random.below(2) == 0),
            (21, Some(Node::File(_))) => Self::Read(path),
            _ => return None,
        })
    }

    /// The calls of a database, if there are two files besides `other`: it writes a log, orders it,
    /// writes a table, and waits once.
    pub fn draw_ordered(model: &Model, other: &str, random: &mut Random) -> Vec<Self> {
        let mut files = model.files();
        files.retain(|path| path != other);
        if files.len() < 2 {
            return Vec::new();
        }
        let log = random.below(files.len() as u64) as usize;
        let table = (log + 1 + random.below(files.len() as u64 - 1) as usize) % files.len();
        let write = |path: &Path, random: &mut Random| Self::Write {
            path: path.clone(),
            at: random.below(12_000) as usize,
            len: random.pick(&[100, 4096, 9000]),
            byte: 1 + random.below(255) as u8,
        };
        let (log, table) = (&files[log], &files[table]);
        vec![
            write(log, random),
            Self::Barrier(log.clone(), random.below(2) == 0),
            write(table, random),
            Self::Fsync(table.clone(), random.below(2) == 0),
        ]
    }

    /// Calls by which blocks of one file pass to another one, if there are two files besides
    /// `other` and few blocks are free.
    pub fn draw_reuse(model: &Model, other: &str, random: &mut Random) -> Vec<Self> {
        let mut files = model.files();
        files.retain(|path| path != other);
        if files.len() < 2 {
            return Vec::new();
        }
        let old = random.below(files.len() as u64) as usize;
        let new = (old + 1 + random.below(files.len() as u64 - 1) as usize) % files.len();
        let write = |path: &Path, random: &mut Random| Self::Write {
            path: path.clone(),
            at: random.below(3) as usize * BLOCK_BYTES,
            len: 4 * BLOCK_BYTES,
            byte: 1 + random.below(255) as u8,
        };
        let (old, new) = (&files[old], &files[new]);
        vec![
            write(old, random),
            Self::Fsync(old.clone(), random.below(2) == 0),
            Self::Truncate(old.clone(), 0),
            match random.below(3) {
                0 => Self::Tick,
                1 => Self::Fsync(old.clone(), false),
                _ => Self::Sync,
            },
            write(new, random),
            Self::Fsync(new.clone(), random.below(2) == 0),
        ]
    }

    /// Does to the model what the call does when it has succeeded.
    pub fn apply(&self, model: &mut Model) {
        match self {
            Self::Create(path) => model.create(path),
            Self::Mkdir(path) => model.make_dir(path),
            Self::Write { path, at, len, byte } => model.change(path, |content| {
                content.resize(content.len().max(at + len), 0);
                content[*at..at + len].fill(*byte);
            }),
            Self::Truncate(path, size) => model.change(path, |content| content.resize(*size, 0)),
            Self::Fsync(path, data_only) => model.sync_file(path, *data_only),
            Self::Barrier(path, data_only) => model.barrier(path, *data_only),
            Self::Unlink(path) => model.remove(path),
            Self::Rmdir(path) => {
                if model.is_empty(path) {
                    model.remove(path);
                }
            }
            Self::Rename(path, to) => model.rename(path, to),
            Self::Sync => model.sync_all(),
            Self::Tick | Self::Read(_) => {}
        }
    }

    /// Does the call. `model` is from before it.
    ///
    /// # Errors
    /// [`Failed`].
    pub fn run(&self, fs: &Fs, model: &Model, now: Time) -> Result<(), Failed> {
        let caller = Caller::default();
        match self {
            Self::Create(path) | Self::Mkdir(path) => {
                let (parent, name) = place(fs, path)?;
                let mode = if matches!(self, Self::Mkdir(_)) { 0o040_755 } else { 0o100_644 };
                let new = NewInode { mode, rdev: 0, target: b"" };
                let ino = fs.create(&caller, parent, name, &new, now)?.ino;
                fs.forget(ino, 1);
            }
            Self::Write { path, at, len, byte } => {
                let data = vec![*byte; *len];
                let written = fs.write(&caller, resolve(fs, path)?, *at as u64, &data, now)?;
                if written != *len {
                    return Err(Failed::Wrong(format!("{written} bytes of {len} were written")));
                }
            }
            Self::Truncate(path, size) => {
                let set = SetAttr { size: Some(*size as u64), ..SetAttr::default() };
                fs.set_attr(&caller, resolve(fs, path)?, &set, now)?;
            }
            Self::Fsync(path, data_only) => fs.fsync(resolve(fs, path)?, *data_only, now)?,
            Self::Barrier(path, data_only) => fs.barrier(resolve(fs, path)?, *data_only, now)?,
            Self::Unlink(path) => {
                let (parent, name) = place(fs, path)?;
                fs.unlink(&caller, parent, name, now)?;
            }
            Self::Rmdir(path) => {
                let (parent, name) = place(fs, path)?;
                match fs.rmdir(&caller, parent, name, now) {
                    Err(FsError::NotEmpty) if !model.is_empty(path) => {}
                    Ok(()) if !model.is_empty(path) => {
                        return Err(Failed::Wrong(format!("{path} was not empty")));
                    }
                    result => result?,
                }
            }
            Self::Rename(path, to) => {
                let (parent, name) = place(fs, path)?;
                let (new_parent, new_name) = place(fs, to)?;
                fs.rename(&caller, parent, name, new_parent, new_name, 0, now)?;
            }
            Self::Sync => fs.sync(now)?,
            Self::Tick => drop(fs.tick(now)?),
            Self::Read(path) => {
                let Some(Node::File(file)) = model.node(path) else { return Ok(()) };
                let expected = model.content(file);
                let mut data = vec![0; expected.len() + 1];
                let len = fs.read(resolve(fs, path)?, 0, &mut data, now)?;
                if data[..len] != *expected {
                    let differ = data[..len].iter().zip(expected).position(|(one, two)| one != two);
                    return Err(Failed::Wrong(format!(
                        "{path} reads as {len} bytes, not as the {} that were written: the first \
                         difference is at {differ:?}",
                        expected.len()
                    )));
                }
            }
        }
        Ok(())
    }
}
