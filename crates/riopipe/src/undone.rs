//! The file that keeps the data that recovery is about to zero, so that it can be inspected, and
//! written back. docs/undone-format.md describes its bytes: a header, a table of extents, the name
//! of the volume, and the blocks of the extents in the order of the table.
//!
//! The header is written last, after all else is on the disk. So a file without a header was not
//! finished.
//!
//! [`read`] opens and checks such a file. While the volume is recovered, the file is written in three
//! steps: create it with the table, append the blocks, and write the header.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use riopipe_order::attribute::{Seq, StreamId, VolumeId};
pub use riopipe_session::initiator::volume::saving::UndoneExtent as SavedExtent;
pub use riopipe_session::initiator::volume::undone::{
    BlockNow, NotOfVolume, check_origin, zeroes_are_of_the_undo,
};
use riopipe_session::label::NAME_MAX;

use crate::recovery::BlockRange;
use crate::{BLOCK_BYTES, crc32c};

const MAGIC: [u8; 8] = *b"RIOUNDO\x01";
/// Version 1 had no name of the volume, no seqs, no generation and no time.
const VERSION: u32 = 2;

const HEADER_BYTES: usize = 64;
const MAGIC_FIELD: Range<usize> = 0..8;
/// The CRC32C of [`CHECKED_FIELDS`], the table and the name.
const HEADER_CRC_FIELD: Range<usize> = 8..12;
/// All fields after the checksum of the header.
const CHECKED_FIELDS: Range<usize> = 12..HEADER_BYTES;
const VERSION_FIELD: Range<usize> = 12..16;
const VOLUME_FIELD: Range<usize> = 16..32;
const BLOCK_COUNT_FIELD: Range<usize> = 32..40;
const EXTENT_COUNT_FIELD: Range<usize> = 40..44;
const BLOCKS_CRC_FIELD: Range<usize> = 44..48;
const TIME_FIELD: Range<usize> = 48..56;
const GENERATION_FIELD: Range<usize> = 56..60;

const EXTENT_BYTES: usize = 32;
const EXTENT_LBA_FIELD: Range<usize> = 0..8;
const EXTENT_BLOCKS_FIELD: Range<usize> = 8..16;
const EXTENT_STREAM_FIELD: Range<usize> = 16..18;
const EXTENT_SEQ_FIELD: Range<usize> = 24..32;

/// The bytes of the volume's name, filled up with NUL.
const NAME_BYTES: usize = NAME_MAX;

/// The size of the buffer for writes to the file.
const WRITE_BUF_BYTES: usize = 1 << 20;

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
    NotUndoneFile(PathBuf),
    /// Made by a later version.
    #[error("{}: version {version}, newer than this program reads", .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// Its length is not the one that its header gives.
    #[error("{} is {}: its header gives {expected} bytes, and it has {have}", .path.display(),
        if .have < .expected { "truncated" } else { "too long" })]
    Length {
        /// The file.
        path: PathBuf,
        /// The bytes by the header.
        expected: u64,
        /// The bytes that it has.
        have: u64,
    },
    /// A checksum or a field is wrong.
    #[error("{} is damaged: {what}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The part that is wrong.
        what: &'static str,
    },
}

/// A file of undone blocks.
#[derive(Debug)]
pub struct UndoneFile {
    /// The version of the file.
    pub version: u32,
    /// The volume that they belonged to.
    pub volume: VolumeId,
    /// The name of the volume. `None`: the file has version 1.
    pub name: Option<String>,
    /// The generation of the owner whose recovery zeroed them; 0 if a dry run has made the file, or
    /// if it has version 1.
    pub generation: u32,
    /// When the file was begun. `None`: the file has version 1.
    pub saved_at: Option<SystemTime>,
    /// The place of the blocks, in the order of the file.
    pub extents: Vec<SavedExtent>,
    file: File,
    path: PathBuf,
    /// The offset of the first block in the file, bytes.
    blocks_begin: u64,
}

/// Opens a file of undone blocks, and checks all of it.
///
/// # Errors
/// [`ReadSavedError`].
pub fn read(path: &Path) -> Result<UndoneFile, ReadSavedError> {
    let io_error = |source| ReadSavedError::Io { path: path.into(), source };
    let damaged = |what| ReadSavedError::Damaged { path: path.into(), what };
    // A pipe is not opened: that would wait for a writer.
    if !std::fs::metadata(path).map_err(io_error)?.is_file() {
        return Err(ReadSavedError::NotUndoneFile(path.into()));
    }
    let mut file = File::open(path).map_err(io_error)?;
    let have = file.metadata().map_err(io_error)?.len();
    let header = read_header(&mut file, path)?;
    let version = u32_at(&header, VERSION_FIELD);
    let name_bytes = if version >= 2 { NAME_BYTES } else { 0 };
    let extent_count = u64::from(u32_at(&header, EXTENT_COUNT_FIELD));
    let block_count = u64_at(&header, BLOCK_COUNT_FIELD);
    let blocks_begin = (HEADER_BYTES + name_bytes) as u64 + extent_count * EXTENT_BYTES as u64;
    // The checksum covers the numbers only together with the table, so a flipped bit in a number
    // shows as a wrong length.
    let blocks_bytes = block_count.checked_mul(BLOCK_BYTES as u64);
    let expected = blocks_bytes.and_then(|bytes| bytes.checked_add(blocks_begin));
    let expected = expected.ok_or_else(|| damaged("its header gives an impossible length"))?;
    if expected != have {
        return Err(ReadSavedError::Length { path: path.into(), expected, have });
    }
    let mut table_and_name = vec![0; extent_count as usize * EXTENT_BYTES + name_bytes];
    file.read_exact(&mut table_and_name).map_err(io_error)?;
    if header_crc(&header, &table_and_name) != u32_at(&header, HEADER_CRC_FIELD) {
        return Err(damaged("the checksum of its header and its table is wrong"));
    }
    let (table, name) = table_and_name.split_at(table_and_name.len() - name_bytes);
    let extents: Vec<SavedExtent> = table.chunks_exact(EXTENT_BYTES).map(decode_extent).collect();
    if total_blocks(&extents) != Some(block_count) {
        return Err(damaged("its extents do not have as many blocks as its header gives"));
    }
    let blocks_crc = read_blocks_crc(&mut file, block_count).map_err(io_error)?;
    if blocks_crc != u32_at(&header, BLOCKS_CRC_FIELD) {
        return Err(damaged("the checksum of its blocks is wrong"));
    }
    let mut volume = [0; 16];
    volume.copy_from_slice(&header[VOLUME_FIELD]);
    let is_named = version >= 2;
    let saved_at = UNIX_EPOCH.checked_add(Duration::from_millis(u64_at(&header, TIME_FIELD)));
    Ok(UndoneFile {
        version,
        volume: VolumeId(volume),
        name: is_named.then(|| decode_name(name)),
        generation: u32_at(&header, GENERATION_FIELD),
        saved_at: saved_at.filter(|_| is_named),
        extents,
        file,
        path: path.into(),
        blocks_begin,
    })
}

/// The name of the volume, without the NULs after it.
fn decode_name(bytes: &[u8]) -> String {
    let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

/// Reads the header, and checks that the file is of the right kind and version.
fn read_header(file: &mut File, path: &Path) -> Result<[u8; HEADER_BYTES], ReadSavedError> {
    let mut header = [0; HEADER_BYTES];
    if let Err(source) = file.read_exact(&mut header) {
        return Err(match source.kind() {
            io::ErrorKind::UnexpectedEof => ReadSavedError::NotUndoneFile(path.into()),
            _ => ReadSavedError::Io { path: path.into(), source },
        });
    }
    if header[MAGIC_FIELD] != MAGIC {
        return Err(ReadSavedError::NotUndoneFile(path.into()));
    }
    let version = u32_at(&header, VERSION_FIELD);
    if version > VERSION {
        return Err(ReadSavedError::Newer { path: path.into(), version });
    }
    Ok(header)
}

fn header_crc(header: &[u8; HEADER_BYTES], table_and_name: &[u8]) -> u32 {
    crc32c(crc32c(0, &header[CHECKED_FIELDS]), table_and_name)
}

/// The number of blocks of all extents. `None` if it does not fit into 64 bits.
fn total_blocks(extents: &[SavedExtent]) -> Option<u64> {
    let mut total = 0_u64;
    for extent in extents {
        total = total.checked_add(extent.range.blocks)?;
    }
    Some(total)
}

/// Reads `block_count` blocks, and returns their checksum.
fn read_blocks_crc(file: &mut File, block_count: u64) -> io::Result<u32> {
    let mut crc = 0;
    let mut block = [0; BLOCK_BYTES];
    for _ in 0..block_count {
        file.read_exact(&mut block)?;
        crc = crc32c(crc, &block);
    }
    Ok(crc)
}

impl UndoneFile {
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
        let Some(offset) = self.offset_of_block(lba) else { return Ok(None) };
        let mut block = vec![0; BLOCK_BYTES];
        match self.file.read_exact_at(&mut block, offset) {
            Ok(()) => Ok(Some(block)),
            Err(source) => Err(ReadSavedError::Io { path: self.path.clone(), source }),
        }
    }

    /// Reads blocks of the file into `into`: those from the block number `first` of the file on,
    /// counted over all extents in their order.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn read_blocks(&self, first: u64, into: &mut [u8]) -> Result<(), ReadSavedError> {
        let offset = self.blocks_begin + first * BLOCK_BYTES as u64;
        let read = self.file.read_exact_at(into, offset);
        read.map_err(|source| ReadSavedError::Io { path: self.path.clone(), source })
    }

    /// The offset of a volume block in the file, bytes.
    fn offset_of_block(&self, lba: u64) -> Option<u64> {
        let mut extent_offset = self.blocks_begin;
        for SavedExtent { range, .. } in &self.extents {
            if lba >= range.lba && lba - range.lba < range.blocks {
                return Some(extent_offset + (lba - range.lba) * BLOCK_BYTES as u64);
            }
            extent_offset += range.blocks * BLOCK_BYTES as u64;
        }
        None
    }
}

/// A file of undone blocks that is being written.
pub(crate) struct UndoneFileWriter {
    file: BufWriter<File>,
    path: PathBuf,
    /// The header without its checksums.
    header: [u8; HEADER_BYTES],
    table_and_name: Vec<u8>,
    /// The checksum of the blocks so far.
    blocks_crc: u32,
}

impl UndoneFileWriter {
    /// Creates the file, with the table and space for the header. A file that exists already is not
    /// changed. `name` and `generation` are those of the volume and of its owner.
    pub(crate) fn create(
        path: &Path,
        volume: VolumeId,
        name: &str,
        generation: u32,
        extents: &[SavedExtent],
    ) -> Result<Self, SaveError> {
        let file = match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(SaveError::Exists(path.into()));
            }
            Err(source) => return Err(SaveError::Write { path: path.into(), source }),
        };
        let file = BufWriter::with_capacity(WRITE_BUF_BYTES, file);
        let header = encode_header(volume, generation, extents);
        let mut table_and_name = encode_table(extents);
        let mut padded_name = [0; NAME_BYTES];
        let len = name.len().min(NAME_BYTES);
        padded_name[..len].copy_from_slice(&name.as_bytes()[..len]);
        table_and_name.extend(padded_name);
        let mut writer = Self { file, path: path.into(), header, table_and_name, blocks_crc: 0 };
        match writer.write_placeholder_and_table() {
            Ok(()) => Ok(writer),
            Err(source) => Err(writer.abandon(source)),
        }
    }

    fn write_placeholder_and_table(&mut self) -> io::Result<()> {
        self.file.write_all(&[0; HEADER_BYTES])?;
        self.file.write_all(&self.table_and_name)
    }

    /// Appends whole blocks, in the order of the extents.
    pub(crate) fn append(mut self, blocks: &[u8]) -> Result<Self, SaveError> {
        self.blocks_crc = crc32c(self.blocks_crc, blocks);
        match self.file.write_all(blocks) {
            Ok(()) => Ok(self),
            Err(source) => Err(self.abandon(source)),
        }
    }

    /// Completes the file after the last block, and makes it durable. Returns its path.
    pub(crate) fn finish(mut self) -> Result<PathBuf, SaveError> {
        match self.write_header() {
            Ok(()) => Ok(self.path),
            Err(source) => Err(self.abandon(source)),
        }
    }

    fn write_header(&mut self) -> io::Result<()> {
        self.file.flush()?;
        let file = self.file.get_mut();
        // The header may only become durable after all else.
        file.sync_all()?;
        self.header[BLOCKS_CRC_FIELD].copy_from_slice(&self.blocks_crc.to_le_bytes());
        let crc = header_crc(&self.header, &self.table_and_name);
        self.header[HEADER_CRC_FIELD].copy_from_slice(&crc.to_le_bytes());
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&self.header)?;
        file.sync_all()?;
        // The name of the file must be durable, too.
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }

    /// Removes the file.
    pub(crate) fn discard(self) {
        // A failure to remove the file does not matter. It has no header, so `read` reports that it was
        // not finished.
        let _ = std::fs::remove_file(&self.path);
    }

    /// Removes the file, and returns the error for a write that failed with `source`.
    fn abandon(self, source: io::Error) -> SaveError {
        let path = self.path.clone();
        self.discard();
        SaveError::Write { path, source }
    }
}

/// The header without its checksums.
fn encode_header(volume: VolumeId, generation: u32, extents: &[SavedExtent]) -> [u8; HEADER_BYTES] {
    let block_count: u64 = extents.iter().map(|extent| extent.range.blocks).sum();
    let mut header = [0; HEADER_BYTES];
    header[MAGIC_FIELD].copy_from_slice(&MAGIC);
    header[VERSION_FIELD].copy_from_slice(&VERSION.to_le_bytes());
    header[VOLUME_FIELD].copy_from_slice(&volume.0);
    header[BLOCK_COUNT_FIELD].copy_from_slice(&block_count.to_le_bytes());
    header[EXTENT_COUNT_FIELD].copy_from_slice(&(extents.len() as u32).to_le_bytes());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    header[TIME_FIELD].copy_from_slice(&now_ms.to_le_bytes());
    header[GENERATION_FIELD].copy_from_slice(&generation.to_le_bytes());
    header
}

fn encode_table(extents: &[SavedExtent]) -> Vec<u8> {
    let mut table = vec![0; extents.len() * EXTENT_BYTES];
    for (extent, record) in extents.iter().zip(table.chunks_exact_mut(EXTENT_BYTES)) {
        record[EXTENT_LBA_FIELD].copy_from_slice(&extent.range.lba.to_le_bytes());
        record[EXTENT_BLOCKS_FIELD].copy_from_slice(&extent.range.blocks.to_le_bytes());
        record[EXTENT_STREAM_FIELD].copy_from_slice(&extent.stream.0.to_le_bytes());
        record[EXTENT_SEQ_FIELD].copy_from_slice(&extent.seq.0.to_le_bytes());
    }
    table
}

fn decode_extent(record: &[u8]) -> SavedExtent {
    let stream_field = &record[EXTENT_STREAM_FIELD];
    let stream = StreamId(u16::from_le_bytes([stream_field[0], stream_field[1]]));
    let lba = u64_at(record, EXTENT_LBA_FIELD);
    let blocks = u64_at(record, EXTENT_BLOCKS_FIELD);
    let seq = Seq(u64_at(record, EXTENT_SEQ_FIELD));
    SavedExtent { stream, seq, range: BlockRange { lba, blocks } }
}

/// Reads a field of 4 bytes.
fn u32_at(bytes: &[u8], field: Range<usize>) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[field]);
    u32::from_le_bytes(value)
}

/// Reads a field of 8 bytes.
fn u64_at(bytes: &[u8], field: Range<usize>) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[field]);
    u64::from_le_bytes(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents() -> [SavedExtent; 2] {
        let range = |lba, blocks| BlockRange { lba, blocks };
        [
            SavedExtent { stream: StreamId(3), seq: Seq(17), range: range(10, 2) },
            SavedExtent { stream: StreamId(4), seq: Seq(9), range: range(100, 1) },
        ]
    }

    fn create(path: &Path) -> Result<UndoneFileWriter, SaveError> {
        UndoneFileWriter::create(path, VolumeId([7; 16]), "journal", 5, &extents())
    }

    fn saved(path: &Path) {
        let mut saving = create(path).unwrap();
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
        assert_eq!((saved.name.as_deref(), saved.generation), (Some("journal"), 5));
        let age = SystemTime::now().duration_since(saved.saved_at.unwrap()).unwrap();
        assert!(age < Duration::from_secs(3600), "{age:?}");
        assert_eq!(saved.extents, extents());
        let mut two = vec![0; 2 * BLOCK_BYTES];
        saved.read_blocks(1, &mut two).unwrap();
        assert_eq!((two[0], two[BLOCK_BYTES]), (2, 3));
        assert_eq!(saved.block(11).unwrap(), Some(vec![2; BLOCK_BYTES]));
        assert_eq!(saved.block(100).unwrap(), Some(vec![3; BLOCK_BYTES]));
        assert_eq!(saved.block(12).unwrap(), None);
    }

    #[test]
    fn an_older_file_is_never_overwritten() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("undone");
        std::fs::write(&path, b"precious").unwrap();
        let again = create(&path);
        assert!(matches!(again, Err(SaveError::Exists(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn an_unfinished_file_and_every_damaged_byte_are_refused() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("undone");
        let saving = create(&path).unwrap();
        drop(saving.append(&[1; BLOCK_BYTES]).unwrap());
        assert!(matches!(read(&path), Err(ReadSavedError::NotUndoneFile(_))));
        std::fs::remove_file(&path).unwrap();
        saved(&path);
        let whole = std::fs::read(&path).unwrap();
        let blocks_begin = HEADER_BYTES + 2 * EXTENT_BYTES + NAME_BYTES;
        for at in (0..blocks_begin).chain([blocks_begin + 5000, whole.len() - 1]) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert!(read(&path).is_err(), "byte {at}");
        }
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.to_string().contains("truncated"), "{error}");
        // Not a regular file.
        assert!(matches!(read(dir.path()), Err(ReadSavedError::NotUndoneFile(_))));
    }

    #[test]
    fn a_file_of_version_1_is_read() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("undone");
        let mut header = encode_header(VolumeId([7; 16]), 0, &extents());
        header[VERSION_FIELD].copy_from_slice(&1_u32.to_le_bytes());
        header[TIME_FIELD].fill(0);
        let mut table = encode_table(&extents());
        for record in table.chunks_exact_mut(EXTENT_BYTES) {
            record[EXTENT_SEQ_FIELD].fill(0);
        }
        let blocks = [1, 2, 3].map(|byte| [byte; BLOCK_BYTES]).concat();
        header[BLOCKS_CRC_FIELD].copy_from_slice(&crc32c(0, &blocks).to_le_bytes());
        let crc = header_crc(&header, &table);
        header[HEADER_CRC_FIELD].copy_from_slice(&crc.to_le_bytes());
        std::fs::write(&path, [&header[..], &table, &blocks].concat()).unwrap();
        let saved = read(&path).unwrap();
        assert_eq!((saved.version, saved.name.as_deref(), saved.saved_at), (1, None, None));
        assert_eq!(saved.block(100).unwrap(), Some(vec![3; BLOCK_BYTES]));
    }
}
