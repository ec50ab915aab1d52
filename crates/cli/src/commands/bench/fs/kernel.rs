//! The kernel's ext4 on a loop device, on a file in memory.

use std::{
    fs::File,
    path::Path,
    process::{Command, Stdio},
};

use riopipe_fs::mkfs::find_e2fs_program;
use riopipe_lab::fs_load::PathFiles;
use tempfile::TempDir;

use crate::failure::{Code, Failure};

/// The bytes of the file system.
const BYTES: u64 = 1 << 30;
/// Where files are in memory.
const MEMORY: &str = "/dev/shm";

/// A mounted file system of the kernel. It is unmounted when this is dropped.
pub(super) struct KernelExt4 {
    folder: TempDir,
    is_mounted: bool,
}

impl KernelExt4 {
    /// Makes a file system and mounts it, with the usual options of both. The reason if it can't.
    pub(super) fn mount() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("only root may mount a loop device".to_owned());
        }
        let made = tempfile::Builder::new().prefix("rio-ext4-").tempdir_in(MEMORY);
        let folder = made.map_err(|error| format!("{MEMORY}: {error}"))?;
        let (image, directory) = (folder.path().join("image"), folder.path().join("mnt"));
        let text = |error: std::io::Error| error.to_string();
        File::create(&image).and_then(|file| file.set_len(BYTES)).map_err(text)?;
        std::fs::create_dir(&directory).map_err(text)?;
        let mke2fs = find_e2fs_program("mke2fs").ok_or("mke2fs is missing (package e2fsprogs)")?;
        run(Command::new(mke2fs).args(["-q", "-F", "-t", "ext4", "-b", "4096"]).arg(&image))?;
        run(Command::new("mount").args(["-t", "ext4", "-o", "loop"]).args([&image, &directory]))?;
        Ok(Self { folder, is_mounted: true })
    }

    pub(super) fn files(&self) -> Result<PathFiles, Failure> {
        let files = PathFiles::new(&self.directory());
        files.map_err(|error| Failure::storage(&error))
    }

    fn directory(&self) -> std::path::PathBuf {
        self.folder.path().join("mnt")
    }

    /// Unmounts it.
    pub(super) fn unmount(mut self) -> Result<(), Failure> {
        self.is_mounted = false;
        unmount(&self.directory()).map_err(|text| Failure::new(Code::Failed, text))
    }
}

impl Drop for KernelExt4 {
    fn drop(&mut self) {
        if self.is_mounted {
            // It is mounted still if the load has failed, which is the error that counts.
            let _ = unmount(&self.directory());
        }
    }
}

fn unmount(directory: &Path) -> Result<(), String> {
    run(Command::new("umount").arg(directory))
}

/// Runs a program. The error is its message.
fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
