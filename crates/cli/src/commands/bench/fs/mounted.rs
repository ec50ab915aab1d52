//! A file system that is mounted through FUSE on a temporary directory.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
};

use riopipe_fs::{
    Fs,
    fuse::{DEFAULT_THREADS, FuseError, FuseOptions, Mount, Unmounter},
};
use riopipe_lab::fs_load::PathFiles;
use tempfile::TempDir;

use crate::failure::{Code, Failure};

/// The mount. It is unmounted when this is dropped.
pub(super) struct Mounted {
    directory: TempDir,
    unmounter: Unmounter,
    server: Option<JoinHandle<Result<(), FuseError>>>,
}

impl Mounted {
    pub(super) fn new(fs: Arc<Fs>) -> Result<Self, Failure> {
        let failed = |error: &dyn std::error::Error| Failure::new(Code::Failed, error.to_string());
        let directory =
            tempfile::Builder::new().prefix("rio-bench-").tempdir().map_err(|e| failed(&e))?;
        let options = FuseOptions {
            source: "rio-bench".to_owned(),
            read_only: false,
            allow_other: false,
            threads: DEFAULT_THREADS,
        };
        let mount = Mount::new(fs, directory.path(), &options).map_err(|error| {
            failed(&error).hint("--through calls measures the file system without FUSE")
        })?;
        let unmounter = mount.unmounter();
        let server = thread::Builder::new()
            .name("riofs-serve".to_owned())
            .spawn(move || mount.serve(|| ()))
            .map_err(|error| failed(&error))?;
        Ok(Self { directory, unmounter, server: Some(server) })
    }

    pub(super) fn files(&self) -> Result<PathFiles, Failure> {
        let files = PathFiles::new(self.directory.path());
        files.map_err(|error| Failure::storage(&error))
    }

    /// Unmounts it, and makes everything durable.
    pub(super) fn unmount(mut self) -> Result<(), Failure> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Failure> {
        let Some(server) = self.server.take() else { return Ok(()) };
        let failed = |text: String| Failure::new(Code::Storage, text);
        self.unmounter.unmount().map_err(|error| failed(format!("can't unmount: {error}")))?;
        let served = server.join().map_err(|_| failed("the server has panicked".to_owned()))?;
        served.map_err(|error| failed(error.to_string()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // It is mounted still if the load has failed, which is the error that counts.
        let _ = self.end();
    }
}
