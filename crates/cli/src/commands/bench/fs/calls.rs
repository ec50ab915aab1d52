//! The calls of a file system in this process, without FUSE.

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use riopipe_fs::{
    Fs,
    core::{
        FsError, Ino,
        fs::{Caller, NewInode, SetAttr},
    },
    fsync_stages::{FsyncTrace, measured, traced},
    fuse::now,
};
use riopipe_lab::fs_load::{BarrierFiles, Files};

/// One `fsync` of this number is traced.
const TRACED_ONE_IN: u64 = 16;
/// The traces that are kept.
const TRACES_MAX: usize = 4096;

/// The files of a directory.
pub(in crate::commands) struct Calls {
    directory: Directory,
    caller: Caller,
    fsyncs: AtomicU64,
    traces: Mutex<Vec<FsyncTrace>>,
}

/// An open directory.
struct Directory {
    fs: Arc<Fs>,
    ino: Ino,
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.ino != Ino::ROOT {
            self.fs.forget(self.ino, 1);
        }
    }
}

/// An open file.
pub(in crate::commands) struct OpenFile {
    fs: Arc<Fs>,
    ino: Ino,
    size: AtomicU64,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.fs.forget(self.ino, 1);
    }
}

impl Calls {
    /// The files of the root directory.
    pub(in crate::commands) fn new(fs: Arc<Fs>) -> Self {
        Self::of(Directory { fs, ino: Ino::ROOT })
    }

    fn of(directory: Directory) -> Self {
        let (fsyncs, traces) = (AtomicU64::new(0), Mutex::default());
        Self { directory, caller: Caller::default(), fsyncs, traces }
    }

    fn fs(&self) -> &Arc<Fs> {
        &self.directory.fs
    }

    /// The traces of some calls of `fsync`.
    pub(super) fn into_traces(self) -> Vec<FsyncTrace> {
        self.traces.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn opened(&self, ino: Ino, size: u64) -> OpenFile {
        OpenFile { fs: Arc::clone(self.fs()), ino, size: AtomicU64::new(size) }
    }

    fn sync_inode(&self, ino: Ino, data_only: bool) -> io::Result<()> {
        let fsync = || self.fs().fsync(ino, data_only, now());
        let count = self.fsyncs.fetch_add(1, Ordering::Relaxed);
        // Not the first one, which also begins the log.
        if count % TRACED_ONE_IN != TRACED_ONE_IN - 1 {
            return measured(fsync).map_err(failed);
        }
        let (result, trace) = traced(fsync);
        let mut traces = self.traces.lock().unwrap_or_else(PoisonError::into_inner);
        if traces.len() < TRACES_MAX {
            traces.push(trace);
        }
        result.map_err(failed)
    }
}

fn failed(error: FsError) -> io::Error {
    io::Error::other(error)
}

/// A write that wrote a part only met the end of the space.
fn whole(written: usize, asked: usize) -> io::Result<()> {
    if written < asked {
        let problem = format!("the file system is full: {written} of {asked} bytes were written");
        return Err(io::Error::new(io::ErrorKind::StorageFull, problem));
    }
    Ok(())
}

impl Files for Calls {
    type File = OpenFile;

    fn create(&self, name: &str) -> io::Result<OpenFile> {
        let new = NewInode { mode: 0o100_644, rdev: 0, target: b"" };
        let made = self.fs().create(&self.caller, self.directory.ino, name.as_bytes(), &new, now());
        Ok(self.opened(made.map_err(failed)?.ino, 0))
    }

    fn open(&self, name: &str) -> io::Result<OpenFile> {
        let found =
            self.fs().lookup(&self.caller, self.directory.ino, name.as_bytes()).map_err(failed)?;
        Ok(self.opened(found.ino, found.size))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.fs().unlink(&self.caller, self.directory.ino, name.as_bytes(), now()).map_err(failed)
    }

    fn append(&self, file: &OpenFile, data: &[u8]) -> io::Result<()> {
        let at = file.size.load(Ordering::Relaxed);
        let written = self.fs().write(&self.caller, file.ino, at, data, now()).map_err(failed)?;
        file.size.store(at + written as u64, Ordering::Relaxed);
        whole(written, data.len())
    }

    fn read_all(&self, file: &OpenFile, into: &mut Vec<u8>) -> io::Result<usize> {
        into.resize(file.size.load(Ordering::Relaxed) as usize, 0);
        self.fs().read(file.ino, 0, into, now()).map_err(failed)
    }

    fn cut(&self, file: &OpenFile) -> io::Result<()> {
        let cut = SetAttr { size: Some(0), ..SetAttr::default() };
        self.fs().set_attr(&self.caller, file.ino, &cut, now()).map_err(failed)?;
        file.size.store(0, Ordering::Relaxed);
        Ok(())
    }

    fn sync(&self, file: &OpenFile, data_only: bool) -> io::Result<()> {
        self.sync_inode(file.ino, data_only)
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.sync_inode(self.directory.ino, false)
    }
}

impl BarrierFiles for Calls {
    fn directory(&self, name: &str) -> io::Result<Self> {
        let new = NewInode { mode: 0o040_755, rdev: 0, target: b"" };
        let parent = self.directory.ino;
        let made = self.fs().create(&self.caller, parent, name.as_bytes(), &new, now());
        let ino = made.map_err(failed)?.ino;
        Ok(Self::of(Directory { fs: Arc::clone(self.fs()), ino }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (directory, from, to) = (self.directory.ino, from.as_bytes(), to.as_bytes());
        let renamed = self.fs().rename(&self.caller, directory, from, directory, to, 0, now());
        renamed.map_err(failed)
    }

    fn write_at(&self, file: &OpenFile, offset: u64, data: &[u8]) -> io::Result<()> {
        let written = self.fs().write(&self.caller, file.ino, offset, data, now());
        let written = written.map_err(failed)?;
        file.size.fetch_max(offset + written as u64, Ordering::Relaxed);
        whole(written, data.len())
    }

    fn barrier(&self, file: &OpenFile, data_only: bool) -> io::Result<()> {
        measured(|| self.fs().barrier(file.ino, data_only, now())).map_err(failed)
    }
}
