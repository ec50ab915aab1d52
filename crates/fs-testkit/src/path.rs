//! Paths of the programs: `a/x`, or `a` in the root.

use riopipe_fs_core::fs::{Caller, Fs};
use riopipe_fs_core::{FsError, Ino};

/// Finds the inode at a path.
///
/// # Errors
/// As [`Fs::lookup`].
pub fn resolve(fs: &Fs, path: &str) -> Result<Ino, FsError> {
    let mut ino = Ino::ROOT;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        ino = fs.lookup(&Caller::default(), ino, name.as_bytes())?.ino;
        // The kernel forgets it, so that an unlinked file goes.
        fs.forget(ino, 1);
    }
    Ok(ino)
}

/// The directory of a path, and the name in it.
#[must_use]
pub fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

/// The inode of the directory of a path, and the name in it.
///
/// # Errors
/// As [`resolve`].
pub fn place<'p>(fs: &Fs, path: &'p str) -> Result<(Ino, &'p [u8]), FsError> {
    let (parent, name) = split(path);
    Ok((resolve(fs, parent)?, name.as_bytes()))
}
