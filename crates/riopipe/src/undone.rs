//! The file that keeps the data that recovery is about to zero, for later inspection.
//!
//! All numbers are little-endian. After the header comes a table of extents, after the table their
//! blocks, in the same order, each of [`BLOCK_BYTES`].
//!
//! | byte | field |
//! |---|---|
//! | 0–7 | magic `RIOUNDO\x01` |
//! | 8–11 | CRC32C of bytes 12–63 and the table |
//! | 12–15 | version, 1 |
//! | 16–31 | volume id |
//! | 32–39 | blocks in all |
//! | 40–43 | extents |
//! | 44–47 | CRC32C of all blocks |
//! | 48–63 | 0 |
//!
//! Each extent has 32 bytes:
//!
//! | byte | field |
//! |---|---|
//! | 0–7 | first volume block |
//! | 8–15 | blocks |
//! | 16–17 | stream whose groups wrote them |
//! | 18–31 | 0 |
//!
//! The header is written last, when all else is on the disk: a file without it was not finished.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use riopipe_order::attribute::{StreamId, VolumeId};
pub use riopipe_session::initiator::volume::saving::UndoneExtent as SavedExtent;

use crate::recovery::BlockRange;
use crate::{BLOCK_BYTES, crc32c};

const MAGIC: [u8; 8] = *b"RIOUNDO\x01";
const VERSION: u32 = 1;
const HEADER: usize = 64;
const RECORD: usize = 32;

/// Why data that is about to be zeroed could not be saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// A file of this name exists already.
    #[error("{} exists already, and may be the only copy of other data: use another name", .0.display())]
    Exists(PathBuf),
    /// The file can't be written.
    #[error("{}: {source}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The blocks can't be read.
    #[error("target {target}: {source}")]
    Read {
        /// The target.
        target: crate::TargetAddr,
        /// The error of the call.
        source: crate::CallError,
    },
    /// No file was named.
    #[error("there is no file for the data that is about to be zeroed")]
    NoFile,
}

/// Why a file of undone blocks can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadSavedError {
    /// A system call failed.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// There is no such file, or it was not finished.
    #[error("{} is no file of undone blocks, or was not finished: then nothing was undone", .0.display())]
    NotOne(PathBuf),
    /// Made by a later version.
    #[error("{}: version {version}, newer than this program reads", .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// A checksum is wrong.
    #[error("{} is damaged: a checksum is wrong", .0.display())]
    Damaged(PathBuf),
}

/// A file of undone blocks.
#[derive(Debug)]
pub struct Saved {
    /// The volume that they belonged to.
    pub volume: VolumeId,
    /// The place of the blocks, in the order of the file.
    pub extents: Vec<SavedExtent>,
    file: File,
    path: PathBuf,
}

/// Opens a file of undone blocks, and checks all of it.
///
/// # Errors
/// [`ReadSavedError`].
pub fn read(path: &Path) -> Result<Saved, ReadSavedError> {
    let fail = |source| ReadSavedError::Io { path: path.into(), source };
    let damaged = || ReadSavedError::Damaged(path.into());
    let mut file = File::open(path).map_err(fail)?;
    let length = file.metadata().map_err(fail)?.len();
    let mut header = [0; HEADER];
    match file.read_exact(&mut header) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(ReadSavedError::NotOne(path.into()));
        }
        other => other.map_err(fail)?,
    }
    if header[..8] != MAGIC {
        return Err(ReadSavedError::NotOne(path.into()));
    }
    let version = u32_at(&header, 12);
    if version > VERSION {
        return Err(ReadSavedError::Newer { path: path.into(), version });
    }
    let count = u64::from(u32_at(&header, 40));
    let blocks = u64_at(&header, 32);
    let before = HEADER as u64 + count * RECORD as u64;
    let whole = blocks.checked_mul(BLOCK_BYTES as u64).and_then(|data| data.checked_add(before));
    if whole != Some(length) {
        return Err(damaged());
    }
    let mut table = vec![0; count as usize * RECORD];
    file.read_exact(&mut table).map_err(fail)?;
    if crc32c(crc32c(0, &header[12..]), &table) != u32_at(&header, 8) {
        return Err(damaged());
    }
    let extents: Vec<SavedExtent> = table.chunks_exact(RECORD).map(extent_of).collect();
    let listed = extents.iter().try_fold(0u64, |sum, extent| sum.checked_add(extent.range.blocks));
    if listed != Some(blocks) {
        return Err(damaged());
    }
    let mut crc = 0;
    let mut block = [0; BLOCK_BYTES];
    for _ in 0..blocks {
        file.read_exact(&mut block).map_err(fail)?;
        crc = crc32c(crc, &block);
    }
    if crc != u32_at(&header, 44) {
        return Err(damaged());
    }
    let mut volume = [0; 16];
    volume.copy_from_slice(&header[16..32]);
    Ok(Saved { volume: VolumeId(volume), extents, file, path: path.into() })
}

impl Saved {
    /// Blocks in all.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.extents.iter().map(|extent| extent.range.blocks).sum()
    }

    /// The content of one volume block before it was zeroed; `None` if the file does not have it.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn block(&self, lba: u64) -> Result<Option<Vec<u8>>, ReadSavedError> {
        let mut at = (HEADER + self.extents.len() * RECORD) as u64;
        for SavedExtent { range, .. } in &self.extents {
            if lba >= range.lba && lba - range.lba < range.blocks {
                let mut block = vec![0; BLOCK_BYTES];
                let from = at + (lba - range.lba) * BLOCK_BYTES as u64;
                let read = self.file.read_exact_at(&mut block, from);
                let path = || self.path.clone();
                return match read {
                    Ok(()) => Ok(Some(block)),
                    Err(source) => Err(ReadSavedError::Io { path: path(), source }),
                };
            }
            at += range.blocks * BLOCK_BYTES as u64;
        }
        Ok(None)
    }
}

/// A file of undone blocks that is being written.
pub(crate) struct Saving {
    file: BufWriter<File>,
    path: PathBuf,
    header: [u8; HEADER],
    table: Vec<u8>,
    crc: u32,
}

impl Saving {
    /// Creates the file; a file that exists already is not changed.
    pub(crate) fn begin(
        path: &Path,
        volume: VolumeId,
        extents: &[SavedExtent],
    ) -> Result<Self, SaveError> {
        let file = match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(SaveError::Exists(path.into()));
            }
            Err(source) => return Err(SaveError::Write { path: path.into(), source }),
        };
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&MAGIC);
        header[12..16].copy_from_slice(&VERSION.to_le_bytes());
        header[16..32].copy_from_slice(&volume.0);
        let blocks: u64 = extents.iter().map(|extent| extent.range.blocks).sum();
        header[32..40].copy_from_slice(&blocks.to_le_bytes());
        header[40..44].copy_from_slice(&(extents.len() as u32).to_le_bytes());
        let mut table = vec![0; extents.len() * RECORD];
        for (extent, record) in extents.iter().zip(table.chunks_exact_mut(RECORD)) {
            record[..8].copy_from_slice(&extent.range.lba.to_le_bytes());
            record[8..16].copy_from_slice(&extent.range.blocks.to_le_bytes());
            record[16..18].copy_from_slice(&extent.stream.0.to_le_bytes());
        }
        let file = BufWriter::with_capacity(1 << 20, file);
        let mut saving = Self { file, path: path.into(), header, table, crc: 0 };
        let begun = saving.file.write_all(&[0; HEADER]);
        let begun = begun.and_then(|()| saving.file.write_all(&saving.table));
        match begun {
            Ok(()) => Ok(saving),
            Err(source) => Err(saving.abandon(source)),
        }
    }

    /// Appends whole blocks, in the order of the extents.
    pub(crate) fn append(mut self, blocks: &[u8]) -> Result<Self, SaveError> {
        self.crc = crc32c(self.crc, blocks);
        match self.file.write_all(blocks) {
            Ok(()) => Ok(self),
            Err(source) => Err(self.abandon(source)),
        }
    }

    /// Completes the file after the last block, and makes it durable.
    pub(crate) fn finish(mut self) -> Result<PathBuf, SaveError> {
        match self.seal() {
            Ok(()) => Ok(self.path),
            Err(source) => Err(self.abandon(source)),
        }
    }

    fn seal(&mut self) -> io::Result<()> {
        self.file.flush()?;
        let file = self.file.get_mut();
        file.sync_all()?;
        self.header[44..48].copy_from_slice(&self.crc.to_le_bytes());
        let crc = crc32c(crc32c(0, &self.header[12..]), &self.table);
        self.header[8..12].copy_from_slice(&crc.to_le_bytes());
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&self.header)?;
        file.sync_all()?;
        // The name of the file must be durable, too.
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }

    /// Removes the file.
    pub(crate) fn discard(self) {
        // Without its header the file is of no use, and reading it reports that; so a failure to
        // remove it does not matter.
        let _ = std::fs::remove_file(&self.path);
    }

    fn abandon(self, source: io::Error) -> SaveError {
        let path = self.path.clone();
        self.discard();
        SaveError::Write { path, source }
    }
}

fn extent_of(record: &[u8]) -> SavedExtent {
    let stream = StreamId(u16::from_le_bytes([record[16], record[17]]));
    let range = BlockRange { lba: u64_at(record, 0), blocks: u64_at(record, 8) };
    SavedExtent { stream, range }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents() -> [SavedExtent; 2] {
        let range = |lba, blocks| BlockRange { lba, blocks };
        [
            SavedExtent { stream: StreamId(3), range: range(10, 2) },
            SavedExtent { stream: StreamId(4), range: range(100, 1) },
        ]
    }

    fn saved(path: &Path) {
        let mut saving = Saving::begin(path, VolumeId([7; 16]), &extents()).unwrap();
        for byte in 1..=3 {
            saving = saving.append(&[byte; BLOCK_BYTES]).unwrap();
        }
        saving.finish().unwrap();
    }

    #[test]
    fn saved_blocks_are_read_back() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("undone");
        saved(&path);
        let saved = read(&path).unwrap();
        assert_eq!((saved.volume, saved.blocks()), (VolumeId([7; 16]), 3));
        assert_eq!(saved.extents, extents());
        assert_eq!(saved.block(11).unwrap(), Some(vec![2; BLOCK_BYTES]));
        assert_eq!(saved.block(100).unwrap(), Some(vec![3; BLOCK_BYTES]));
        assert_eq!(saved.block(12).unwrap(), None);
    }

    #[test]
    fn an_older_file_is_never_overwritten() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("undone");
        std::fs::write(&path, b"precious").unwrap();
        let again = Saving::begin(&path, VolumeId([7; 16]), &extents());
        assert!(matches!(again, Err(SaveError::Exists(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn an_unfinished_file_and_every_damaged_byte_are_refused() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("undone");
        let saving = Saving::begin(&path, VolumeId([7; 16]), &extents()).unwrap();
        drop(saving.append(&[1; BLOCK_BYTES]).unwrap());
        assert!(matches!(read(&path), Err(ReadSavedError::NotOne(_))));
        std::fs::remove_file(&path).unwrap();
        saved(&path);
        let whole = std::fs::read(&path).unwrap();
        for at in (0..HEADER + 2 * RECORD).chain([HEADER + 2 * RECORD + 5000, whole.len() - 1]) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert!(read(&path).is_err(), "byte {at}");
        }
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(read(&path).is_err());
    }
}
