//! Reading a log that another process may serve: nothing is written, and no lock is kept.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use riopipe_order::block_device::BLOCK_BYTES;

use crate::buf::AlignedBuf;
use crate::error::OpenError;
use crate::log::pci::ReadMemory;
use crate::log::spec::LogSpec;
use crate::pci::SYSFS;

/// A log opened for reading only.
pub struct LogReader {
    source: Source,
    len: u64,
    is_served: bool,
}

/// The medium that a log is read from.
enum Source {
    /// A file or a block device.
    File { file: File, path: String },
    /// The memory of a drive.
    Memory(ReadMemory),
}

/// Opens the log that `spec` names for reading only. Options for creating or serving it are
/// accepted and ignored.
///
/// A server is locked out only for the moment of the check whether one exists. The memory of a drive
/// (`pci:`) is enabled if it is not, since it has no content to read before.
pub fn read_log(spec: &str) -> Result<LogReader, OpenError> {
    // The newest content of a mapped log is in the page cache. The content of a device log is on
    // the device.
    let (path, direct) = match LogSpec::parse(spec)? {
        LogSpec::Memory { .. } => {
            return Err(OpenError::Kind {
                path: spec.to_owned(),
                problem: "a log in memory can't be read from outside of its process".to_owned(),
            });
        }
        LogSpec::DriveMemory { address } => {
            let memory = ReadMemory::open(Path::new(SYSFS), &address)?;
            let (len, is_served) = (memory.len() as u64, memory.is_served);
            return Ok(LogReader { source: Source::Memory(memory), len, is_served });
        }
        LogSpec::Mapped { path, .. } => (path, false),
        LogSpec::Device { path, .. } | LogSpec::Blocks { path, .. } => (path, true),
    };
    let path = &*path;
    let os = |doing| move |source| OpenError::Os { path: path.to_owned(), doing, source };
    let open = |direct| {
        let flags = if direct { libc::O_DIRECT } else { 0 };
        // Opening a FIFO would wait for a writer.
        let flags = flags | libc::O_NONBLOCK;
        OpenOptions::new().read(true).custom_flags(flags).open(path)
    };
    let file = match open(direct) {
        Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => open(false),
        other => other,
    };
    let file = file.map_err(os("read it"))?;
    let kind = file.metadata().map_err(os("inspect it"))?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let problem = "neither a file nor a block device".to_owned();
        return Err(OpenError::Kind { path: path.to_owned(), problem });
    }
    let len = io::Seek::seek(&mut &file, io::SeekFrom::End(0)).map_err(os("find its size"))?;
    let is_served = is_locked(&file).map_err(os("unlock it"))?;
    Ok(LogReader { source: Source::File { file, path: path.to_owned() }, len, is_served })
}

/// Whether a process has the file locked.
///
/// # Errors
/// The lock of the check can't be released.
pub(super) fn is_locked(file: &File) -> io::Result<bool> {
    match file.try_lock_shared() {
        Ok(()) => file.unlock().map(|()| false),
        Err(TryLockError::WouldBlock) => Ok(true),
        // The file can be read even so.
        Err(TryLockError::Error(_)) => Ok(false),
    }
}

impl LogReader {
    /// Size of the log in bytes.
    #[allow(clippy::len_without_is_empty, reason = "an empty file is a finding of the caller's")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether a process serves the log: its content may then change while it is read.
    pub fn is_served(&self) -> bool {
        self.is_served
    }

    /// The bytes in `range` that exist.
    pub fn read(&self, range: Range<u64>) -> Result<Vec<u8>, OpenError> {
        let end = range.end.min(self.len);
        let start = range.start.min(end);
        // Direct I/O needs whole blocks.
        let block = BLOCK_BYTES as u64;
        let blocks_start = start / block * block;
        let blocks_end = end.next_multiple_of(block);
        let mut blocks = AlignedBuf::zeroed((blocks_end - blocks_start) as usize);
        match &self.source {
            // It consists of whole blocks.
            Source::Memory(memory) => memory.read(blocks_start as usize, &mut blocks)?,
            Source::File { file, path } => {
                read_file(file, path, blocks_start, (end - blocks_start) as usize, &mut blocks)?;
            }
        }
        let offset = (start - blocks_start) as usize;
        Ok(blocks[offset..offset + (end - start) as usize].to_vec())
    }
}

/// Reads the first `len` bytes of `blocks` at `offset` of a file. What the file lacks, because it was
/// truncated since it was opened, stays zero.
fn read_file(
    file: &File,
    path: &str,
    offset: u64,
    len: usize,
    blocks: &mut [u8],
) -> Result<(), OpenError> {
    let mut read_len = 0;
    while read_len < len {
        match file.read_at(&mut blocks[read_len..], offset + read_len as u64) {
            Ok(0) => break,
            Ok(count) => read_len += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => {
                return Err(OpenError::Os { path: path.to_owned(), doing: "read it", source });
            }
        }
    }
    Ok(())
}
