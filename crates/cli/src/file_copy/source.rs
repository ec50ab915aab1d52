//! The bytes to copy into a volume, or to compare with its file: a regular file or a stream.

use std::{
    ffi::OsStr,
    fmt,
    fs::{self, File},
    io::{self, ErrorKind, Read},
    path::{Path, PathBuf},
};

use super::{CopyError, Watch};

/// Name of a stream's file in a volume, unless another one is given.
const STREAM_NAME: &str = "stdin";

/// A regular file, or a stream whose length is known only at its end.
pub struct Source {
    path: PathBuf,
    input: Input,
}

enum Input {
    File { file: File, length: u64 },
    Stream(Box<dyn Read>),
}

impl Source {
    /// Opens the regular file at `path`.
    ///
    /// # Errors
    /// It can't be read, or is no regular file.
    pub fn open<E: std::error::Error>(path: &Path) -> Result<Self, CopyError<E>> {
        let failed = |source| CopyError::Source { path: path.to_owned(), source };
        // Checked before it is opened: opening a pipe would wait for its other end.
        if !fs::metadata(path).map_err(failed)?.is_file() {
            return Err(CopyError::NotAFile(path.to_owned()));
        }
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        Ok(Self { path: path.to_owned(), input: Input::File { file, length } })
    }

    /// A stream; `path` names it in messages. After [`ErrorKind::WouldBlock`] the read is repeated,
    /// unless [`Watch::stop`] is set.
    pub fn stream(path: &Path, stream: impl Read + 'static) -> Self {
        Self { path: path.to_owned(), input: Input::Stream(Box::new(stream)) }
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Its name in a volume.
    pub(super) fn name(&self) -> &OsStr {
        match self.input {
            Input::File { .. } => self.path.file_name().unwrap_or(OsStr::new("file")),
            Input::Stream(_) => OsStr::new(STREAM_NAME),
        }
    }

    /// Length of a file at the start, in bytes.
    pub(super) const fn length(&self) -> Option<u64> {
        match self.input {
            Input::File { length, .. } => Some(length),
            Input::Stream(_) => None,
        }
    }

    /// Length of a file now.
    pub(super) fn length_now(&self) -> Option<u64> {
        match &self.input {
            Input::File { file, .. } => file.metadata().ok().map(|meta| meta.len()),
            Input::Stream(_) => None,
        }
    }

    /// The error for a file that did not end where it should; `found` bytes were seen.
    pub(super) fn changed<E: std::error::Error>(&self, found: u64) -> CopyError<E> {
        let began = self.length().unwrap_or_default();
        let now = self.length_now().filter(|now| *now != began).unwrap_or(found);
        CopyError::Changed { path: self.path.clone(), began, now }
    }

    /// Reads until `into` is full or the source ends; returns the number of bytes.
    pub(super) fn fill<E: std::error::Error>(
        &mut self,
        into: &mut [u8],
        watch: &mut dyn Watch,
    ) -> Result<usize, CopyError<E>> {
        let Self { path, input } = self;
        let mut done = 0;
        while done < into.len() {
            let read = match input {
                Input::File { file, .. } => file.read(&mut into[done..]),
                Input::Stream(stream) => {
                    if watch.stop() {
                        return Err(CopyError::Interrupted);
                    }
                    stream.read(&mut into[done..])
                }
            };
            match read {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if is_passing(&error) => {}
                Err(source) => return Err(CopyError::Source { path: path.clone(), source }),
            }
        }
        Ok(done)
    }
}

/// Whether an operation on a stream that failed like this is only to be repeated.
pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock)
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("path", &self.path).finish_non_exhaustive()
    }
}
