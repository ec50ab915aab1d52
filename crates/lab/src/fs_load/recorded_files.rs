//! Files that record the calls, and store nothing.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::{BarrierFiles, Files};

/// A call of a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Create(String),
    Open(String),
    Remove(String),
    Rename(String, String),
    Write(String, u64, usize),
    Read(String),
    Sync(String),
    Barrier(String),
}

#[derive(Debug, Default)]
pub(super) struct Recorded {
    calls: Arc<Mutex<Vec<Call>>>,
    directory: String,
    /// The number of syncs and barriers after which they fail; `None`: they don't.
    fails_after: Option<usize>,
}

impl Recorded {
    pub(super) fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, call: Call) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    fn path(&self, name: &str) -> String {
        format!("{}{name}", self.directory)
    }

    /// Files whose syncs and barriers fail after this number of them.
    pub(super) fn failing_after(limit: usize) -> Self {
        Self { fails_after: Some(limit), ..Self::default() }
    }

    fn check(&self) -> io::Result<()> {
        let Some(limit) = self.fails_after else { return Ok(()) };
        let is_sync = |call: &&Call| matches!(call, Call::Sync(_) | Call::Barrier(_));
        match self.calls().iter().filter(is_sync).count() > limit {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }
}

impl Files for Recorded {
    type File = (String, Mutex<u64>);

    fn create(&self, name: &str) -> io::Result<Self::File> {
        self.note(Call::Create(self.path(name)));
        Ok((self.path(name), Mutex::new(0)))
    }

    fn open(&self, name: &str) -> io::Result<Self::File> {
        self.note(Call::Open(self.path(name)));
        Ok((self.path(name), Mutex::new(0)))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.note(Call::Remove(self.path(name)));
        Ok(())
    }

    fn append(&self, (name, size): &Self::File, data: &[u8]) -> io::Result<()> {
        let mut size = size.lock().unwrap();
        self.note(Call::Write(name.clone(), *size, data.len()));
        *size += data.len() as u64;
        Ok(())
    }

    fn read_all(&self, (name, _): &Self::File, _: &mut Vec<u8>) -> io::Result<usize> {
        self.note(Call::Read(name.clone()));
        Ok(0)
    }

    fn cut(&self, (_, size): &Self::File) -> io::Result<()> {
        *size.lock().unwrap() = 0;
        Ok(())
    }

    fn sync(&self, (name, _): &Self::File, _: bool) -> io::Result<()> {
        self.note(Call::Sync(name.clone()));
        self.check()
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.note(Call::Sync(self.directory.clone()));
        self.check()
    }
}

impl BarrierFiles for Recorded {
    fn directory(&self, name: &str) -> io::Result<Self> {
        let directory = format!("{}/", self.path(name));
        Ok(Self { calls: self.calls.clone(), directory, fails_after: self.fails_after })
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.note(Call::Rename(self.path(from), self.path(to)));
        Ok(())
    }

    fn write_at(&self, (name, _): &Self::File, offset: u64, data: &[u8]) -> io::Result<()> {
        self.note(Call::Write(name.clone(), offset, data.len()));
        Ok(())
    }

    fn barrier(&self, (name, _): &Self::File, _: bool) -> io::Result<()> {
        self.note(Call::Barrier(name.clone()));
        self.check()
    }
}
