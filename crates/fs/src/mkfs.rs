//! Makes file systems with `mke2fs`, on a file of this machine or on a volume.
//!
//! `mke2fs` needs a file or a device. So the file system of a volume is made in a sparse temporary
//! file of the same size, and copied:
//!
//! 1. All blocks of the volume are discarded: they read as zeroes, as the file's holes do.
//! 2. The data of the file is written, block 0 apart.
//! 3. Block 0, with the superblock, is written once all else is durable. A copy that was cut off
//!    leaves no file system.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use riopipe::{BLOCK_BYTES, Place, ReadError, ReaderOptions, Stream, StreamOptions, Until, Volume};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::image::side_folder;
use crate::superblock::Superblock;

/// The smallest file system, bytes: the smallest journal takes a quarter of it.
pub const BYTES_MIN: u64 = 128 << 20;
/// The smallest and the largest journal, bytes.
const JOURNAL_BYTES: (u64, u64) = (32 << 20, 1 << 30);
/// The part of the file system that the journal takes, between these sizes.
const JOURNAL_PART: u64 = 1 << 6;
/// The features of a new file system, whatever the defaults of this machine are.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,\
    flex_bg,metadata_csum,sparse_super,large_file,huge_file,dir_nlink,extra_isize";
/// The blocks of one write to a volume.
const WRITE_BLOCKS: u64 = 256;
/// The blocks of one discard. Each stripe unit of it takes an entry in a log.
const DISCARD_BLOCKS: u64 = 1 << 12;

/// The options of a new file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MkfsOptions {
    /// The size of a file, bytes. It is needed for a new or an empty file, and given to an old one.
    pub size: Option<u64>,
    /// Make it over existing content, which is lost.
    pub force: bool,
    /// The label, at most 16 bytes.
    pub label: Option<String>,
}

/// A new file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// Its size in bytes.
    pub bytes: u64,
    /// The size of the journal in bytes.
    pub journal_bytes: u64,
    /// Its UUID.
    pub uuid: String,
}

/// Why no file system was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MkfsError {
    /// The program is missing.
    #[error(
        "mke2fs is missing: it is in the package e2fsprogs of Debian, Fedora and others \
         (apt-get install e2fsprogs)"
    )]
    NoMke2fs,
    /// The program refused.
    #[error("mke2fs failed: {0}")]
    Mke2fs(String),
    /// The file or volume is too small.
    #[error("{bytes} bytes are too few: the smallest file system has {} (128M)", BYTES_MIN)]
    TooSmall {
        /// The bytes that there are.
        bytes: u64,
    },
    /// A new or empty file has no size.
    #[error("{path} is a new or an empty file: give it a size, such as --size 1G")]
    NoSize {
        /// The path of the file.
        path: String,
    },
    /// The file or the volume has content.
    #[error("{place} has content, {content}: with --force it is lost")]
    HasContent {
        /// The file or volume.
        place: String,
        /// The content.
        content: &'static str,
    },
    /// The file is mounted, or in use otherwise.
    #[error("{path} is in use by another process: unmount it first")]
    InUse {
        /// The path of the file.
        path: String,
    },
    /// The label is too long.
    #[error("the label {0:?} has more than 16 bytes")]
    Label(String),
    /// A file can't be used.
    #[error("{path}: can't {doing}: {source}")]
    Os {
        /// The path of the file.
        path: String,
        /// The operation that failed.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The volume can't be read.
    #[error("the volume can't be read: {0}")]
    Read(#[from] ReadError),
    /// The volume can't be written.
    #[error("the volume can't be written: {0}")]
    Write(String),
}

impl MkfsError {
    fn os(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Os { path: path.display().to_string(), doing, source }
    }

    fn write(error: impl std::fmt::Display) -> Self {
        Self::Write(error.to_string())
    }
}

/// The size of the journal of a file system of `bytes` bytes.
#[must_use]
pub fn journal_bytes(bytes: u64) -> u64 {
    let wanted = (bytes / JOURNAL_PART).next_power_of_two();
    wanted.clamp(JOURNAL_BYTES.0, JOURNAL_BYTES.1)
}

/// Makes a file system in the file at `path`. A new file is created, and is sparse.
///
/// # Errors
/// [`MkfsError`]. An existing file is not changed if it is refused.
pub fn make_in_file(path: &Path, options: &MkfsOptions) -> Result<Made, MkfsError> {
    check_label(options)?;
    let program = find_mke2fs()?;
    let is_new = !path.exists();
    if is_new && options.size.is_none() {
        return Err(MkfsError::NoSize { path: path.display().to_string() });
    }
    if let Some(bytes) = options.size {
        check_size(bytes)?;
    }
    let file = OpenOptions::new().read(true).write(true).create(is_new).truncate(false).open(path);
    let file = file.map_err(MkfsError::os(path, "open it"))?;
    let made = make_in_open_file(&program, path, &file, options);
    if made.is_err() && is_new {
        // An empty file without a file system would be of no use.
        let _ = fs::remove_file(path);
    }
    made
}

fn make_in_open_file(
    program: &Path,
    path: &Path,
    file: &File,
    options: &MkfsOptions,
) -> Result<Made, MkfsError> {
    // The process that has an image mounted has this lock.
    file.try_lock().map_err(|error| match error {
        fs::TryLockError::WouldBlock => MkfsError::InUse { path: path.display().to_string() },
        fs::TryLockError::Error(source) => MkfsError::os(path, "lock it")(source),
    })?;
    let metadata = file.metadata().map_err(MkfsError::os(path, "inspect it"))?;
    let len = metadata.len();
    if has_data(file) && !options.force {
        let content = match Superblock::read(path) {
            Ok(superblock) if superblock.is_dirty => "a file system that was not unmounted",
            Ok(_) => "an ext2, ext3 or ext4 file system",
            Err(_) => "data of an unknown kind",
        };
        return Err(MkfsError::HasContent { place: path.display().to_string(), content });
    }
    let bytes = match options.size.unwrap_or(len) {
        0 => return Err(MkfsError::NoSize { path: path.display().to_string() }),
        bytes => bytes,
    };
    check_size(bytes)?;
    // The old content would remain in blocks that mke2fs does not write.
    file.set_len(0).map_err(MkfsError::os(path, "empty it"))?;
    let bytes = bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    file.set_len(bytes).map_err(MkfsError::os(path, "set its size"))?;
    // The ordering log of an old file system has no meaning for the new one.
    let _ = fs::remove_dir_all(side_folder(path));
    let made = run(program, path, bytes, options)?;
    file.sync_all().map_err(MkfsError::os(path, "write it to the disk"))?;
    Ok(made)
}

/// Makes a file system on an open volume of which no stream is open. `name` is its name, for errors.
/// `progress` gets the blocks that are done, and the number of all.
///
/// # Errors
/// [`MkfsError`]. If the volume was being written, it has no file system.
pub fn make_on_volume(
    volume: &Volume,
    options: &MkfsOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Made, MkfsError> {
    check_label(options)?;
    let program = find_mke2fs()?;
    let blocks = volume.blocks();
    check_size(blocks * BLOCK_BYTES as u64)?;
    let mut first = [0; BLOCK_BYTES];
    volume.reader(&ReaderOptions::default()).read(0, &mut first, None)?;
    if first.iter().any(|byte| *byte != 0) && !options.force {
        let superblock: &[u8; 1024] = first[1024..2048].try_into().expect("it has 1024 bytes");
        let content = match Superblock::decode(superblock) {
            Some(_) => "an ext2, ext3 or ext4 file system",
            None => "data of an unknown kind",
        };
        let place = format!("the volume {}", volume.info().name);
        return Err(MkfsError::HasContent { place, content });
    }
    let folder = std::env::temp_dir();
    let model = Model::create(&folder, blocks * BLOCK_BYTES as u64)?;
    let made = run(&program, &model.path, blocks * BLOCK_BYTES as u64, options)?;
    let opened = volume.stream(0, &StreamOptions::default());
    let mut stream = opened.map_err(MkfsError::write)?;
    copy(&model, &mut stream, blocks, progress)?;
    stream.close().map_err(MkfsError::write)?;
    Ok(made)
}

/// Copies a file system from a file to a volume.
fn copy(
    model: &Model,
    stream: &mut Stream,
    blocks: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), MkfsError> {
    let data = model.data_ranges(blocks).map_err(MkfsError::os(&model.path, "find its data"))?;
    let written: u64 = data.iter().map(|range| range.end - range.start).sum();
    let all = blocks + written;
    // Block 0 may have an old superblock, so it goes first.
    let mut done = 0;
    while done < blocks {
        let count = DISCARD_BLOCKS.min(blocks - done);
        let group = stream.group().discard(done, count as u32);
        group.submit_or_wait(None).map_err(MkfsError::write)?;
        done += count;
        progress(done, all);
    }
    // The writes are fresh only once the discards are released.
    let last = stream.last();
    stream.wait(Until::Durable(last), None).map_err(MkfsError::write)?;
    let write = |stream: &mut Stream, at: u64, count: u64| {
        let mut buf = stream.buf(count as usize * BLOCK_BYTES).map_err(MkfsError::write)?;
        let offset = at * BLOCK_BYTES as u64;
        let read = model.file.read_exact_at(&mut buf, offset);
        read.map_err(MkfsError::os(&model.path, "read it"))?;
        let group = stream.group().write(at, buf, Place::Fresh);
        group.submit_or_wait(None).map_err(MkfsError::write)
    };
    for range in data {
        let mut at = range.start.max(1);
        while at < range.end {
            let count = WRITE_BLOCKS.min(range.end - at);
            write(stream, at, count)?;
            at += count;
            done += count;
            progress(done, all);
        }
    }
    let last = stream.last();
    stream.wait(Until::Durable(last), None).map_err(MkfsError::write)?;
    let seq = write(stream, 0, 1)?;
    stream.wait(Until::Durable(seq), None).map_err(MkfsError::write)?;
    progress(all, all);
    Ok(())
}

/// A temporary sparse file, which is removed when it is dropped.
struct Model {
    path: PathBuf,
    file: File,
}

impl Model {
    fn create(folder: &Path, bytes: u64) -> Result<Self, MkfsError> {
        let path =
            folder.join(format!("riofs-{}-{}", std::process::id(), riopipe_platform::now_ns()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(MkfsError::os(&path, "create it"))?;
        let model = Self { path, file };
        let sized = model.file.set_len(bytes);
        sized.map_err(MkfsError::os(&model.path, "set its size"))?;
        Ok(model)
    }

    /// The ranges of blocks that are no holes.
    fn data_ranges(&self, blocks: u64) -> io::Result<Vec<std::ops::Range<u64>>> {
        let unit = BLOCK_BYTES as u64;
        let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
        let mut at = 0;
        loop {
            let data = match seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(Errno::NXIO) => return Ok(ranges),
                Err(error) => return Err(error.into()),
            };
            at = seek(&self.file, SeekFrom::Hole(data))?;
            let range = data / unit..at.div_ceil(unit).min(blocks);
            match ranges.last_mut() {
                Some(last) if last.end >= range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether any part of a file is no hole and not all zeroes at its beginning.
fn has_data(file: &File) -> bool {
    !matches!(seek(file, SeekFrom::Data(0)), Err(Errno::NXIO))
}

fn check_size(bytes: u64) -> Result<(), MkfsError> {
    match bytes < BYTES_MIN {
        true => Err(MkfsError::TooSmall { bytes }),
        false => Ok(()),
    }
}

fn check_label(options: &MkfsOptions) -> Result<(), MkfsError> {
    match &options.label {
        Some(label) if label.len() > 16 => Err(MkfsError::Label(label.clone())),
        _ => Ok(()),
    }
}

/// The path of a program of e2fsprogs: on the path, or where root has it.
#[must_use]
pub fn find_e2fs_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut found = std::env::split_paths(&path).chain(system).map(|folder| folder.join(name));
    found.find(|program| {
        fs::metadata(program).is_ok_and(|found| found.is_file() && found.mode() & 0o111 != 0)
    })
}

fn find_mke2fs() -> Result<PathBuf, MkfsError> {
    find_e2fs_program("mke2fs").ok_or(MkfsError::NoMke2fs)
}

/// Runs `mke2fs` on a file of `bytes` bytes.
fn run(program: &Path, path: &Path, bytes: u64, options: &MkfsOptions) -> Result<Made, MkfsError> {
    let journal_bytes = journal_bytes(bytes);
    // The root directory belongs to the user that makes the file system.
    let (user, group) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let extended = format!("lazy_itable_init=0,lazy_journal_init=0,root_owner={user}:{group}");
    let mut command = Command::new(program);
    command.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-O", FEATURES]);
    command.args(["-J", &format!("size={}", journal_bytes >> 20), "-E", &extended]);
    if let Some(label) = &options.label {
        command.args(["-L", label]);
    }
    let output = command.arg("--").arg(path).output();
    let output = output.map_err(MkfsError::os(program, "run it"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(MkfsError::Mke2fs(text.split_whitespace().collect::<Vec<_>>().join(" ")));
    }
    let superblock = Superblock::read(path)
        .map_err(|error| MkfsError::Mke2fs(format!("it made no file system: {error}")))?;
    Ok(Made { bytes, journal_bytes, uuid: superblock.uuid_text() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_file_systems_have_larger_journals() {
        assert_eq!(journal_bytes(BYTES_MIN), 32 << 20);
        assert_eq!(journal_bytes(1 << 30), 32 << 20);
        assert_eq!(journal_bytes(4 << 30), 64 << 20);
        assert_eq!(journal_bytes(5 << 30), 128 << 20);
        assert_eq!(journal_bytes(1 << 40), 1 << 30);
    }

    #[test]
    fn content_is_lost_only_by_force() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        let options = |size, force| MkfsOptions { size, force, ..MkfsOptions::default() };
        assert!(matches!(
            make_in_file(&path, &options(None, false)),
            Err(MkfsError::NoSize { .. })
        ));
        assert!(matches!(
            make_in_file(&path, &options(Some(1 << 20), false)),
            Err(MkfsError::TooSmall { bytes: 1_048_576 })
        ));
        assert!(!path.exists());
        let made = make_in_file(&path, &options(Some(BYTES_MIN), false)).unwrap();
        assert_eq!((made.bytes, made.journal_bytes), (BYTES_MIN, 32 << 20));
        assert_eq!(made.uuid, Superblock::read(&path).unwrap().uuid_text());

        let refused = make_in_file(&path, &options(None, false)).unwrap_err().to_string();
        assert!(refused.contains("ext4") && refused.contains("--force"), "{refused}");
        let label = Some("data".to_owned());
        let again = MkfsOptions { size: Some(192 << 20), force: true, label };
        assert_eq!(make_in_file(&path, &again).unwrap().bytes, 192 << 20);
        let check =
            Command::new(find_e2fs_program("e2fsck").unwrap()).arg("-fn").arg(&path).output();
        assert!(check.unwrap().status.success());

        let lock = File::open(&path).unwrap();
        lock.try_lock().unwrap();
        assert!(matches!(make_in_file(&path, &again), Err(MkfsError::InUse { .. })));
    }
}
