//! The files of a directory, by the system calls of this machine.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::Files;

/// The files of a directory.
#[derive(Debug)]
pub struct PathFiles {
    directory: PathBuf,
    handle: File,
}

impl PathFiles {
    /// The files of an existing directory.
    ///
    /// # Errors
    /// It can't be opened.
    pub fn new(directory: &Path) -> io::Result<Self> {
        Ok(Self { directory: directory.to_owned(), handle: File::open(directory)? })
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Files for PathFiles {
    type File = File;

    fn create(&self, name: &str) -> io::Result<File> {
        let options = File::options().read(true).append(true).create_new(true).clone();
        options.open(self.directory.join(name))
    }

    fn open(&self, name: &str) -> io::Result<File> {
        File::options().read(true).append(true).open(self.directory.join(name))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.directory.join(name))
    }

    fn append(&self, mut file: &File, data: &[u8]) -> io::Result<()> {
        file.write_all(data)
    }

    fn read_all(&self, mut file: &File, into: &mut Vec<u8>) -> io::Result<usize> {
        into.clear();
        file.read_to_end(into)
    }

    fn cut(&self, file: &File) -> io::Result<()> {
        file.set_len(0)
    }

    fn sync(&self, file: &File, data_only: bool) -> io::Result<()> {
        if data_only { file.sync_data() } else { file.sync_all() }
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.handle.sync_all()
    }
}
