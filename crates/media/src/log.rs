//! Log stores, handed out in disjoint parts.
//!
//! A target opens a [`LogStore`] once. Each [`LogPart`] of it (the header, the partition of one
//! stream) has one owner, which writes it without a lock. Mapped stores (`file:`, `dax:`, `mem:`)
//! are written directly; a device (`block:`) is written from a mirror in memory, block by block,
//! when the part is fenced.

use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use riopipe_model::log::block::BlockPart;
use riopipe_model::log::mapped::MappedPart;
use riopipe_order::block_device::{BLOCK_BYTES, Gone};
use riopipe_order::log_region::LogKind;
use riopipe_order::region::{Region, RegionError};

use crate::error::OpenError;
use crate::mapping::Mapping;
use crate::medium::{LOCK_WAIT_SHORT, LockWait, Medium, Reserve};
use crate::persist::Persist;
use crate::spec::Spec;
use crate::survival::{Kept, Survival};

mod device;
mod mapped;
mod reader;

use device::{BlockStore, DevicePart};
use mapped::MappedMemory;
pub use reader::{LogReader, read_log};

/// The kinds of log and their options, as shown with every error in a specification.
pub const LOG_HELP: &str = "logs are:
  file:PATH[,size=SIZE]
      a mapped file: survives the process, not the power; size= creates it if need be
  dax:PATH[,size=SIZE]
      a file on persistent memory (a file system mounted with -o dax): survives the power
  block:PATH[,plp]
      a small block device, all of it: survives the power. Without power-loss protection it is
      flushed with every fence; plp: it has it although it reports a volatile cache
  block:PATH[,size=SIZE]
      the same in a file, to try it out: each fence waits for the file system
  mem:SIZE
      this process's memory, gone with it
sizes are whole numbers of 4096-byte blocks, written like 2M";

/// Opens (or creates) and locks the log that `spec` names; [`LOG_HELP`] lists the kinds.
pub fn open_log(spec: &str) -> Result<LogStore, OpenError> {
    open_log_within(spec, LOCK_WAIT_SHORT)
}

/// [`open_log`], with a wait of at most `lock_wait` for another process that has the log locked. A
/// killed process keeps its locks until its last write has landed (T8).
pub fn open_log_within(spec: &str, lock_wait: Duration) -> Result<LogStore, OpenError> {
    let busy = LockWait::within(lock_wait);
    match Parsed::from(spec)? {
        Parsed::Memory { bytes } => LogStore::in_memory(bytes),
        Parsed::Mapped { path, size, dax } => LogStore::in_file(path, size, dax, busy),
        Parsed::Device { path, plp } => LogStore::on_device(path, plp, busy),
        Parsed::Blocks { path, size } => LogStore::in_blocks_of_file(path, size, busy),
    }
}

/// The survival of a log that `spec` would create; `None` if opening it would create nothing.
pub fn survival_once_created(spec: &str) -> Result<Option<Survival>, OpenError> {
    let is_new = |path: &str, size: Option<u64>| {
        let new = size.is_some() && std::fs::metadata(path).is_err();
        new.then(|| std::path::Path::new(path).parent().map(ToOwned::to_owned)).flatten()
    };
    Ok(match Parsed::from(spec)? {
        Parsed::Mapped { path, size, dax } => is_new(path, size).map(|_| mapped_survival(dax, dax)),
        Parsed::Blocks { path, size } => is_new(path, size).map(|parent| {
            let here = std::path::Path::new(".");
            let parent = if parent.as_os_str().is_empty() { here } else { &parent };
            block_file_survival(File::open(parent).is_ok_and(|file| is_in_memory(&file)))
        }),
        Parsed::Memory { .. } | Parsed::Device { .. } => None,
    })
}

/// A parsed specification.
enum Parsed<'a> {
    /// `mem:`
    Memory { bytes: u64 },
    /// `file:` and `dax:`
    Mapped { path: &'a str, size: Option<u64>, dax: bool },
    /// `block:` on a block device.
    Device { path: &'a str, plp: bool },
    /// `block:` in a file.
    Blocks { path: &'a str, size: Option<u64> },
}

impl<'a> Parsed<'a> {
    fn from(spec: &'a str) -> Result<Self, OpenError> {
        let mut spec = Spec::parse(spec, LOG_HELP)?;
        match spec.kind {
            "mem" => {
                let bytes = spec.blocks(spec.what)?;
                spec.finish()?;
                Ok(Self::Memory { bytes })
            }
            kind @ ("file" | "dax") => {
                let size = spec.size("size")?;
                let path = spec.path()?;
                spec.finish()?;
                Ok(Self::Mapped { path, size, dax: kind == "dax" })
            }
            "block" => {
                let size = spec.size("size")?;
                let plp = spec.switch("plp")?;
                let path = spec.path()?;
                spec.finish()?;
                // A path that does not exist is to be a file if it has a size.
                let is_file =
                    std::fs::metadata(path).map_or(size.is_some(), |found| found.is_file());
                match (is_file, size) {
                    (true, _) if plp => {
                        Err(spec.wrong("plp is for a device: a file never counts as protected"))
                    }
                    (true, size) => Ok(Self::Blocks { path, size }),
                    (false, Some(_)) => Err(spec.wrong(
                        "size= is for a file: a device is used as a whole (make a partition of \
                         the size that you want)",
                    )),
                    (false, None) => Ok(Self::Device { path, plp }),
                }
            }
            kind => Err(spec.wrong(format!("unknown kind of log {kind:?}"))),
        }
    }
}

/// The kernel's identifier of this boot. If it has changed, content of memory and of the page cache
/// may have been lost in between (T19).
pub fn boot_id() -> Result<[u8; 16], OpenError> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).map_err(|source| OpenError::Os {
        path: path.to_owned(),
        doing: "read which boot this is",
        source,
    })?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(id) if digits.len() == 32 => Ok(id.to_be_bytes()),
        _ => Err(OpenError::Kind {
            path: path.to_owned(),
            problem: format!("{:?} is not the UUID of a boot", text.trim()),
        }),
    }
}

/// The bytes of a log, to be handed out with [`LogStore::part`].
pub struct LogStore {
    shared: Arc<Shared>,
    kind: LogKind,
    describe: String,
    survival: Survival,
}

struct Shared {
    bytes: Bytes,
    /// The parts in use.
    in_use: Mutex<Vec<Range<usize>>>,
}

enum Bytes {
    Mapped(Arc<mapped::Shared>),
    Blocks(Arc<BlockStore>),
}

/// The reason why a part of a log can't be handed out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartError {
    /// The range goes beyond the log, is empty, or isn't aligned to 8 bytes.
    #[error(
        "bytes {}..{} of the log: not a non-empty, 8-byte aligned part of its {len} bytes",
        .part.start, .part.end
    )]
    OutOfRange {
        /// The requested range.
        part: Range<usize>,
        /// Size of the log in bytes.
        len: usize,
    },
    /// Another owner has some of the range.
    #[error(
        "bytes {}..{} of the log: in use, as bytes {}..{}",
        .part.start, .part.end, .in_use.start, .in_use.end
    )]
    InUse {
        /// The requested range.
        part: Range<usize>,
        /// The part in use.
        in_use: Range<usize>,
    },
    /// The device can't read the range.
    #[error("bytes {}..{} of the log: can't be read: {cause}", .part.start, .part.end)]
    Read {
        /// The requested range.
        part: Range<usize>,
        /// The system's error.
        cause: String,
    },
}

impl LogStore {
    fn in_memory(bytes: u64) -> Result<LogStore, OpenError> {
        let mapping = Mapping::anonymous(bytes as usize).map_err(|source| OpenError::Memory {
            what: "a log in memory",
            bytes,
            source,
        })?;
        let memory = mapped::Shared { mapping, persist: Persist::Stores, medium: None };
        let survival = Survival { process_kill: Kept::Nothing, power_cut: Kept::Nothing, note: "" };
        let describe = format!("memory, {} KiB", bytes >> 10);
        Ok(LogStore::new(Bytes::Mapped(Arc::new(memory)), LogKind::File, describe, survival))
    }

    fn in_file(
        path: &str,
        size: Option<u64>,
        dax: bool,
        busy: LockWait,
    ) -> Result<LogStore, OpenError> {
        let medium = Medium::file(path, size, Reserve::Must, false, busy)?;
        let len = medium.len as usize;
        let os = |source| OpenError::Os { path: path.to_owned(), doing: "map it", source };
        let synchronous = if dax { Mapping::shared(&medium.file, len, true).ok() } else { None };
        let persistent = synchronous.is_some();
        let mapping = match synchronous {
            Some(mapping) => mapping,
            None => Mapping::shared(&medium.file, len, false).map_err(os)?,
        };
        let survival = mapped_survival(dax, persistent);
        if dax && !persistent {
            tracing::warn!(path, "{}", survival.note);
        }
        let persist = if dax { Persist::lines() } else { Persist::Stores };
        let describe = format!(
            "{} {path}, {} KiB, {}",
            if persistent { "persistent memory" } else { "mapped file" },
            len >> 10,
            persist.describe(),
        );
        let shared = Arc::new(mapped::Shared { mapping, persist, medium: Some(medium) });
        let mut all = MappedMemory { shared: Arc::clone(&shared), part: 0..len };
        riopipe_model::log::mapped::make_content_durable(&mut all).map_err(|error| {
            OpenError::Os {
                path: path.to_owned(),
                doing: "make durable what it holds",
                source: std::io::Error::other(error.cause),
            }
        })?;
        Ok(LogStore::new(Bytes::Mapped(shared), LogKind::Dax, describe, survival))
    }

    fn on_device(path: &str, plp: bool, busy: LockWait) -> Result<LogStore, OpenError> {
        let medium = Medium::device(path, busy)?;
        let is_volatile = !plp && medium.device_has_volatile_cache();
        let note = match is_volatile {
            true => {
                "the log's device has a volatile cache: every fence waits for its FLUSH, which is \
                 slow; with power-loss protection it needs none (if this device has it, give plp)"
            }
            false => "",
        };
        let survival = Survival { process_kill: Kept::Completed, power_cut: Kept::Completed, note };
        let describe = format!(
            "block device {path}, {} KiB, {}",
            medium.len >> 10,
            if is_volatile {
                "volatile cache, a FLUSH with each fence"
            } else {
                "power-loss protection"
            },
        );
        let store = BlockStore::open(medium, is_volatile)?;
        Ok(LogStore::new(Bytes::Blocks(store), LogKind::Block, describe, survival))
    }

    fn in_blocks_of_file(
        path: &str,
        size: Option<u64>,
        busy: LockWait,
    ) -> Result<LogStore, OpenError> {
        let medium = Medium::file(path, size, Reserve::Must, true, busy)?;
        let survival = block_file_survival(is_in_memory(&medium.file));
        let describe = format!(
            "file {path} in place of a device, {} KiB, no power-loss protection, an fdatasync with \
             each fence",
            medium.len >> 10
        );
        let store = BlockStore::open(medium, true)?;
        Ok(LogStore::new(Bytes::Blocks(store), LogKind::Block, describe, survival))
    }

    fn new(bytes: Bytes, kind: LogKind, describe: String, survival: Survival) -> LogStore {
        let shared = Arc::new(Shared { bytes, in_use: Mutex::new(Vec::new()) });
        // The stamp decides how far the log can be used later; the requested kind may be more.
        let kind = if survival.power_cut == Kept::Completed { kind } else { LogKind::File };
        LogStore { shared, kind, describe, survival }
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty: at least one block")]
    pub fn len(&self) -> usize {
        match &self.shared.bytes {
            Bytes::Mapped(memory) => memory.mapping.len(),
            Bytes::Blocks(store) => store.len(),
        }
    }

    /// The kind that a log region made here is stamped with. It is [`LogKind::File`] if the log
    /// would not survive a power cut: all other kinds are accepted after another boot (T19).
    pub fn kind(&self) -> LogKind {
        self.kind
    }

    /// Hands out the bytes in `part` to one owner, until that drops it. Parts of a device never
    /// share a block: each would write the other's unfinished changes.
    pub fn part(&self, part: Range<usize>) -> Result<LogPart, PartError> {
        let len = self.len();
        let aligned = part.start.is_multiple_of(8) && part.end.is_multiple_of(8);
        if !aligned || part.start >= part.end || part.end > len {
            return Err(PartError::OutOfRange { part, len });
        }
        let unit = match &self.shared.bytes {
            Bytes::Mapped(_) => 8,
            Bytes::Blocks(_) => BLOCK_BYTES,
        };
        let ends = |r: &Range<usize>| (r.start / unit * unit, r.end.next_multiple_of(unit));
        let (start, end) = ends(&part);
        let mut in_use = self.shared.in_use();
        let clash = |other: &&Range<usize>| ends(other).0 < end && start < ends(other).1;
        if let Some(other) = in_use.iter().find(clash) {
            return Err(PartError::InUse { in_use: other.clone(), part });
        }
        let kind = match &self.shared.bytes {
            Bytes::Mapped(memory) => {
                let shared = Arc::clone(memory);
                Kind::Mapped(MappedPart::new(MappedMemory { shared, part: part.clone() }))
            }
            Bytes::Blocks(store) => {
                let read = BlockPart::read(DevicePart(Arc::clone(store)), part.clone());
                Kind::Blocks(read.map_err(|error| PartError::Read {
                    part: part.clone(),
                    cause: error.to_string(),
                })?)
            }
        };
        in_use.push(part.clone());
        drop(in_use);
        Ok(LogPart { kind, shared: Arc::clone(&self.shared), part })
    }

    /// One line for display: kind, place, size, and the way in which it is made durable.
    pub fn describe(&self) -> &str {
        &self.describe
    }

    /// The content that remains of the log after a killed process and after a power cut.
    pub fn survives(&self) -> Survival {
        self.survival
    }

    /// Checks that the file still exists with its full size. Call it now and then: a store to a
    /// mapping of a truncated file ends the process (SIGBUS), and one into a deleted file is lost.
    ///
    /// # Errors
    /// [`Gone`], with the change of the file.
    pub fn check(&self) -> Result<(), Gone> {
        match &self.shared.bytes {
            Bytes::Mapped(memory) => memory.medium.as_ref().map_or(Ok(()), Medium::check),
            Bytes::Blocks(store) => store.medium.check(),
        }
    }

    /// Writes back to the file all that was stored in it, and all bytes in `used`, and waits
    /// (`msync`). After a clean shutdown with it, a `file:` log also survives a power cut, as far as
    /// `used` names it (T24). A `block:` log has nothing left to write, since each of its fences
    /// writes everything that it covers. No part of the log may be in use.
    ///
    /// The bytes in `used` are written even if the kernel considers them written already. After a
    /// failed write-back the kernel does so wrongly. The call takes as long as the disk needs for
    /// all of these bytes.
    ///
    /// # Errors
    /// The error of the write-back. A `block:` log reports none.
    ///
    /// # Panics
    /// If a range in `used` goes beyond the log.
    pub fn sync(&self, used: &[Range<usize>]) -> std::io::Result<()> {
        match &self.shared.bytes {
            Bytes::Mapped(memory) => memory.sync_all(used),
            Bytes::Blocks(_) => Ok(()),
        }
    }
}

/// The survival of a mapped file. `persistent`: it is persistent memory.
fn mapped_survival(dax: bool, persistent: bool) -> Survival {
    Survival {
        process_kill: Kept::Completed,
        power_cut: if persistent { Kept::Completed } else { Kept::Nothing },
        note: match (dax, persistent) {
            (true, true) => "",
            (true, false) => {
                "not on a DAX file system: this log is only as durable as memory, it does not \
                 survive a power cut"
            }
            (false, _) => "the log survives the process, not the power",
        },
    }
}

/// The survival of a `block:` log in a file.
fn block_file_survival(in_memory: bool) -> Survival {
    Survival {
        process_kill: Kept::Completed,
        power_cut: if in_memory { Kept::Nothing } else { Kept::Completed },
        note: match in_memory {
            true => "the log's file is in memory (tmpfs): it does not survive a power cut",
            false => {
                "the log is a file in place of a device, to try it out: no power-loss protection, \
                 every fence waits for the file system, and it survives a power cut only as far \
                 as that file system's fdatasync does"
            }
        },
    }
}

/// Whether a file's file system is in memory.
fn is_in_memory(file: &File) -> bool {
    const RAMFS_MAGIC: i128 = 0x8584_58f6;
    let Ok(found) = rustix::fs::fstatfs(file) else { return false };
    let kind = i128::from(found.f_type);
    kind == i128::from(libc::TMPFS_MAGIC) || kind == RAMFS_MAGIC
}

/// A part of a log, owned by one thread at a time.
///
/// A store of an aligned word is a single store. On `file:` and `dax:` it survives the process at
/// once. [`Region::fence`] makes it survive a power cut on `dax:`, and both on `block:`.
pub struct LogPart {
    kind: Kind,
    shared: Arc<Shared>,
    part: Range<usize>,
}

enum Kind {
    Mapped(MappedPart<MappedMemory>),
    Blocks(BlockPart<DevicePart>),
}

impl LogPart {
    /// The range of the part in the log, in bytes.
    pub fn range(&self) -> Range<usize> {
        self.part.clone()
    }
}

impl Region for LogPart {
    fn len(&self) -> usize {
        self.part.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        match &self.kind {
            Kind::Mapped(part) => part.read(offset, into),
            Kind::Blocks(part) => part.read(offset, into),
        }
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        match &mut self.kind {
            Kind::Mapped(part) => part.write(offset, bytes),
            Kind::Blocks(part) => part.write(offset, bytes),
        }
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        match &mut self.kind {
            Kind::Mapped(part) => part.write_word(offset, value),
            Kind::Blocks(part) => part.write_word(offset, value),
        }
    }

    #[inline]
    fn fence(&mut self) -> Result<(), RegionError> {
        match &mut self.kind {
            Kind::Mapped(part) => part.fence(),
            Kind::Blocks(part) => part.fence(),
        }
    }

    fn write_back(&mut self) -> Result<(), RegionError> {
        match &mut self.kind {
            Kind::Mapped(part) => part.write_back(),
            Kind::Blocks(part) => part.write_back(),
        }
    }
}

impl Drop for LogPart {
    fn drop(&mut self) {
        self.shared.in_use().retain(|in_use| *in_use != self.part);
    }
}

impl Shared {
    fn in_use(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        // The list of ranges is consistent after each statement.
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
