//! Files with secrets, which only their owner may use.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use zeroize::Zeroizing;

/// The permissions of a file's group and of others, which a file with a secret must not have.
const OTHERS: u32 = 0o077;
/// The most bytes that are read of a file with a secret.
const FILE_BYTES_MAX: u64 = 4096;

/// Why a file with a secret can't be used.
#[derive(Debug)]
pub enum PrivateFileError {
    /// It can't be read.
    Read(io::Error),
    /// Others than its owner have permissions for it: its mode, the lowest 12 bits.
    Shared(u32),
}

/// Reads a file with a secret: its first 4096 bytes, as UTF-8.
///
/// # Errors
/// [`PrivateFileError`], also if others than the owner may use the file.
pub fn read_private_file(path: &Path) -> Result<Zeroizing<String>, PrivateFileError> {
    let file = File::open(path).map_err(PrivateFileError::Read)?;
    check_private_file(&file)?;
    let mut text = Zeroizing::new(String::new());
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(PrivateFileError::Read)?;
    Ok(text)
}

/// Checks that only the owner of a file has permissions for it.
///
/// # Errors
/// [`PrivateFileError::Shared`].
pub fn check_private_file(file: &File) -> Result<(), PrivateFileError> {
    let mode = file.metadata().map_or(0, |metadata| metadata.mode()) & 0o7777;
    if mode & OTHERS != 0 { Err(PrivateFileError::Shared(mode)) } else { Ok(()) }
}
