//! Log stores, handed out in disjoint parts.
//!
//! A target opens a [`LogStore`] once. Each [`LogPart`] of the store (the header, or the partition
//! of one stream) has one owner, which writes the part without a lock:
//!
//! ```text
//!              LogStore
//!             /        \
//!     LogPart           LogPart      one for the header, one for each stream
//!        |                 |
//!   mapped memory    mirror in memory
//!   (file: dax:            | fence: block by block
//!    pci: mem:)       block device (block:)
//! ```

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use riopipe_model::log::block::BlockPart;
use riopipe_model::log::mapped::MappedPart;
use riopipe_order::block_device::{BLOCK_BYTES, Gone};
use riopipe_order::log_region::LogKind;
use riopipe_order::region::{Region, RegionError};

use crate::disk::DEVICE_NOTE;
use crate::error::OpenError;
use crate::mapping::Mapping;
use crate::medium::{LOCK_WAIT_SHORT, LockWait, Medium, Reserve, parent_directory};
use crate::pci::{PciAddress, SYSFS};
use crate::persist::Persist;
use crate::place::would_create;
use crate::survival::{Kept, Survival};

mod device;
mod mapped;
mod pci;
mod reader;
pub(crate) mod spec;

use device::{BlockStore, DevicePart};
use mapped::{MappedMemory, SharedMapping};
use pci::DriveMemory;
pub use reader::{LogReader, read_log};
pub use spec::LOG_HELP;
use spec::LogSpec;

/// Size of a word of a log in bytes. Parts begin and end at words.
const WORD_BYTES: usize = 8;

/// Opens (or creates) and locks the log that `spec` names; [`LOG_HELP`] lists the kinds.
pub fn open_log(spec: &str) -> Result<LogStore, OpenError> {
    open_log_within(spec, LOCK_WAIT_SHORT)
}

/// [`open_log`], with a wait of at most `lock_wait` for another process that has the log locked. A
/// killed process keeps its locks until its last write has landed (trap T8).
pub fn open_log_within(spec: &str, lock_wait: Duration) -> Result<LogStore, OpenError> {
    let lock_wait = LockWait::within(lock_wait);
    match LogSpec::parse(spec)? {
        LogSpec::Memory { bytes } => LogStore::in_memory(bytes),
        LogSpec::Mapped { path, size, dax } => LogStore::in_file(&path, size, dax, lock_wait),
        LogSpec::Device { path, plp } => LogStore::on_device(&path, plp, lock_wait),
        LogSpec::Blocks { path, size } => LogStore::in_blocks_of_file(&path, size, lock_wait),
        LogSpec::DriveMemory { address } => {
            LogStore::in_drive_memory(Path::new(SYSFS), &address, lock_wait)
        }
    }
}

/// The survival of a log that `spec` would create; `None` if opening it would create nothing.
pub fn survival_once_created(spec: &str) -> Result<Option<Survival>, OpenError> {
    match LogSpec::parse(spec)? {
        LogSpec::Mapped { path, size, dax } if would_create(&path, size) => {
            Ok(Some(mapped_survival(dax, dax)))
        }
        LogSpec::Blocks { path, size } if would_create(&path, size) => {
            let directory = File::open(parent_directory(&path));
            let in_memory = directory.is_ok_and(|directory| is_in_memory(&directory));
            Ok(Some(block_file_survival(in_memory)))
        }
        _ => Ok(None),
    }
}

/// The kernel's identifier of this boot. If the identifier has changed, the content of memory and
/// of the page cache may have been lost in between (trap T19).
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
    shared: Arc<SharedStore>,
    kind: LogKind,
    description: String,
    survival: Survival,
    is_restored: bool,
}

/// The state of a store that its parts share.
struct SharedStore {
    backing: Backing,
    /// The ranges of the parts that have an owner.
    in_use: Mutex<Vec<Range<usize>>>,
}

/// The medium that holds the bytes of a store.
enum Backing {
    Mapped(Arc<SharedMapping>),
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
        let memory = SharedMapping { mapping, persist: Persist::Stores, drive: None, medium: None };
        let backing = Backing::Mapped(Arc::new(memory));
        let survival = Survival { process_kill: Kept::Nothing, power_cut: Kept::Nothing, note: "" };
        let description = format!("memory, {} KiB", bytes >> 10);
        Ok(LogStore::new(backing, LogKind::File, description, survival))
    }

    /// A log in a mapped file. `dax`: the file should be on persistent memory. If it is not, the
    /// log is opened even so, and does not survive a power cut.
    fn in_file(
        path: &str,
        size: Option<u64>,
        dax: bool,
        lock_wait: LockWait,
    ) -> Result<LogStore, OpenError> {
        let medium = Medium::file(path, size, Reserve::Must, false, lock_wait)?;
        let len = medium.len as usize;
        let os_error = |doing| move |source| OpenError::Os { path: path.to_owned(), doing, source };
        let persistent_mapping =
            if dax { Mapping::shared(&medium.file, len, true).ok() } else { None };
        let is_persistent = persistent_mapping.is_some();
        let mapping = match persistent_mapping {
            Some(mapping) => mapping,
            None => Mapping::shared(&medium.file, len, false).map_err(os_error("map it"))?,
        };
        let survival = mapped_survival(dax, is_persistent);
        if dax && !is_persistent {
            tracing::warn!(path, "{}", survival.note);
        }
        let persist = if dax { Persist::lines() } else { Persist::Stores };
        let description = format!(
            "{} {path}, {} KiB, {}",
            if is_persistent { "persistent memory" } else { "mapped file" },
            len >> 10,
            persist.describe(),
        );
        let memory = SharedMapping { mapping, persist, drive: None, medium: Some(medium) };
        LogStore::mapped(memory, LogKind::Dax, description, survival)
            .map_err(os_error("make durable what it holds"))
    }

    /// A log in the memory of the NVMe drive at `address` below the directory `root`.
    fn in_drive_memory(
        root: &Path,
        address: &PciAddress,
        lock_wait: LockWait,
    ) -> Result<LogStore, OpenError> {
        let memory = DriveMemory::open(root, address, lock_wait)?;
        let DriveMemory { properties, mapping, medium, is_restored } = memory;
        let path = medium.path.clone();
        let description = format!(
            "memory of the drive {address} (BAR {}), {} KiB, {}",
            properties.bar(),
            medium.len >> 10,
            properties.describe_fence()
        );
        let survival =
            Survival { process_kill: Kept::Completed, power_cut: Kept::Completed, note: "" };
        let (persist, drive) = (Persist::Stores, Some(properties));
        let memory = SharedMapping { mapping, persist, drive, medium: Some(medium) };
        let store =
            LogStore::mapped(memory, LogKind::Pci, description, survival).map_err(|source| {
                OpenError::Os { path, doing: "make durable what it holds", source }
            })?;
        Ok(LogStore { is_restored, ..store })
    }

    /// A log in a mapping, whose content is made durable first.
    fn mapped(
        memory: SharedMapping,
        kind: LogKind,
        description: String,
        survival: Survival,
    ) -> std::io::Result<LogStore> {
        let memory = Arc::new(memory);
        let part = 0..memory.mapping.len();
        let mut whole_log = MappedMemory { shared: Arc::clone(&memory), part };
        riopipe_model::log::mapped::make_content_durable(&mut whole_log)
            .map_err(|error| std::io::Error::other(error.cause))?;
        Ok(LogStore::new(Backing::Mapped(memory), kind, description, survival))
    }

    /// A log on a block device. `plp`: the device has power-loss protection, although it reports a
    /// volatile cache.
    fn on_device(path: &str, plp: bool, lock_wait: LockWait) -> Result<LogStore, OpenError> {
        let medium = Medium::device(path, lock_wait)?;
        let is_volatile = !plp && !medium.device_is_protected();
        let note = match is_volatile {
            true if !medium.device_has_volatile_cache() => DEVICE_NOTE,
            true => {
                "the log's device has a volatile cache: every fence waits for its FLUSH, which is \
                 slow; with power-loss protection it needs none (if this device has it, give plp)"
            }
            false => "",
        };
        let survival = Survival { process_kill: Kept::Completed, power_cut: Kept::Completed, note };
        let description = format!(
            "block device {path}, {} KiB, {}",
            medium.len >> 10,
            if is_volatile {
                "volatile cache, a FLUSH with each fence"
            } else {
                "power-loss protection"
            },
        );
        let store = BlockStore::open(medium, is_volatile)?;
        Ok(LogStore::new(Backing::Blocks(store), LogKind::Block, description, survival))
    }

    /// A log in a file that is written block by block, in place of a block device.
    fn in_blocks_of_file(
        path: &str,
        size: Option<u64>,
        lock_wait: LockWait,
    ) -> Result<LogStore, OpenError> {
        let medium = Medium::file(path, size, Reserve::Must, true, lock_wait)?;
        let survival = block_file_survival(is_in_memory(&medium.file));
        let description = format!(
            "file {path} in place of a device, {} KiB, no power-loss protection, an fdatasync with \
             each fence",
            medium.len >> 10
        );
        let store = BlockStore::open(medium, true)?;
        Ok(LogStore::new(Backing::Blocks(store), LogKind::Block, description, survival))
    }

    fn new(
        backing: Backing,
        requested_kind: LogKind,
        description: String,
        survival: Survival,
    ) -> LogStore {
        let shared = Arc::new(SharedStore { backing, in_use: Mutex::new(Vec::new()) });
        // The stamp of a log region has the kind, and a stamp of another kind than `File` counts
        // after a power cut. A log that does not survive one must not have such a stamp.
        let kind = match survival.power_cut {
            Kept::Completed => requested_kind,
            _ => LogKind::File,
        };
        LogStore { shared, kind, description, survival, is_restored: true }
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty: at least one block")]
    pub fn len(&self) -> usize {
        match &self.shared.backing {
            Backing::Mapped(memory) => memory.mapping.len(),
            Backing::Blocks(store) => store.len(),
        }
    }

    /// The kind that a log region made here is stamped with. It is [`LogKind::File`] if the log
    /// would not survive a power cut: all other kinds are accepted after another boot (trap T19).
    pub fn kind(&self) -> LogKind {
        self.kind
    }

    /// Whether the log has the content that was last made durable there. A drive can report that it
    /// could not restore its memory after a power cut (`pci:`): the content may then be any (trap
    /// T24).
    pub fn is_restored(&self) -> bool {
        self.is_restored
    }

    /// Hands out the bytes in `part` to one owner, until the owner drops the [`LogPart`]. Two parts
    /// of a device never share a block, because a write of one part would also write unfinished
    /// changes of the other.
    pub fn part(&self, part: Range<usize>) -> Result<LogPart, PartError> {
        let len = self.len();
        let is_aligned =
            part.start.is_multiple_of(WORD_BYTES) && part.end.is_multiple_of(WORD_BYTES);
        if !is_aligned || part.start >= part.end || part.end > len {
            return Err(PartError::OutOfRange { part, len });
        }
        let unit = match &self.shared.backing {
            Backing::Mapped(_) => WORD_BYTES,
            Backing::Blocks(_) => BLOCK_BYTES,
        };
        let units = widen(&part, unit);
        let mut in_use = self.shared.in_use();
        let overlapping = in_use.iter().find(|other| {
            let other_units = widen(other, unit);
            other_units.start < units.end && units.start < other_units.end
        });
        if let Some(other) = overlapping {
            return Err(PartError::InUse { in_use: other.clone(), part });
        }
        let region = match &self.shared.backing {
            Backing::Mapped(memory) => {
                let shared = Arc::clone(memory);
                PartRegion::Mapped(MappedPart::new(MappedMemory { shared, part: part.clone() }))
            }
            Backing::Blocks(store) => {
                match BlockPart::read(DevicePart(Arc::clone(store)), part.clone()) {
                    Ok(region) => PartRegion::Blocks(region),
                    Err(error) => return Err(PartError::Read { part, cause: error.to_string() }),
                }
            }
        };
        in_use.push(part.clone());
        drop(in_use);
        Ok(LogPart { region, shared: Arc::clone(&self.shared), part })
    }

    /// One line for display: kind, place, size, and the way in which it is made durable.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// The content that remains of the log after a killed process and after a power cut.
    pub fn survives(&self) -> Survival {
        self.survival
    }

    /// Checks that the file still exists with its full size. It is to be called now and then,
    /// because a store into a deleted file is lost.
    ///
    /// # Errors
    /// [`Gone`], with the change of the file.
    pub fn check(&self) -> Result<(), Gone> {
        match &self.shared.backing {
            Backing::Mapped(memory) => memory.medium.as_ref().map_or(Ok(()), Medium::check),
            Backing::Blocks(store) => store.medium.check(),
        }
    }

    /// Checks that no access to the bytes of a mapped log has failed since it was opened.
    ///
    /// # Errors
    /// A page of the file could not be read or written, or the status of the drive's memory is not
    /// good. A `block:` log reports none: its parts return the errors of their accesses.
    pub fn check_access(&self) -> Result<(), RegionError> {
        match &self.shared.backing {
            Backing::Mapped(memory) => memory.check_access(),
            Backing::Blocks(_) => Ok(()),
        }
    }

    /// Writes back to the file all stored bytes and all bytes in `used`, and waits (`msync`). After
    /// that, the bytes in `used` of a `file:` log also survive a power cut (trap T24). A `block:`
    /// or `pci:` log has nothing left to write, since each of its fences writes everything that it
    /// covers. No part of the log may be in use.
    ///
    /// The bytes in `used` are written even if the kernel considers them written already, because
    /// the kernel is wrong about that after a failed write-back. The call takes as long as the disk
    /// needs for all of these bytes.
    ///
    /// # Errors
    /// The error of the write-back. A `block:` or `pci:` log reports none.
    ///
    /// # Panics
    /// If a range in `used` goes beyond the log.
    pub fn sync(&self, used: &[Range<usize>]) -> std::io::Result<()> {
        match &self.shared.backing {
            Backing::Mapped(memory) => memory.sync_all(used),
            Backing::Blocks(_) => Ok(()),
        }
    }
}

/// The smallest range that contains `range` and consists of whole units of `unit` bytes.
fn widen(range: &Range<usize>, unit: usize) -> Range<usize> {
    range.start / unit * unit..range.end.next_multiple_of(unit)
}

/// The survival of a mapped file. `dax`: persistent memory was asked for. `is_persistent`: the file
/// is on persistent memory.
fn mapped_survival(dax: bool, is_persistent: bool) -> Survival {
    Survival {
        process_kill: Kept::Completed,
        power_cut: if is_persistent { Kept::Completed } else { Kept::Nothing },
        note: match (dax, is_persistent) {
            (true, true) => "",
            (true, false) => {
                "not on a DAX file system: this log is only as durable as memory, it does not \
                 survive a power cut"
            }
            (false, _) => "the log survives the process, not the power",
        },
    }
}

/// The survival of a `block:` log in a file. `in_memory`: the file's file system is in memory.
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
    /// `RAMFS_MAGIC` of `linux/magic.h`, which `libc` lacks.
    const RAMFS_MAGIC: i128 = 0x8584_58f6;
    let Ok(file_system) = rustix::fs::fstatfs(file) else { return false };
    let magic = i128::from(file_system.f_type);
    magic == i128::from(libc::TMPFS_MAGIC) || magic == RAMFS_MAGIC
}

/// A part of a log, owned by one thread at a time.
///
/// A store of an aligned word is a single store.
///
/// | log | a store survives the process | a store survives a power cut |
/// |---|---|---|
/// | `mem:` | never | never |
/// | `file:` | at once | never |
/// | `dax:`, `pci:` | at once | after [`Region::fence`] |
/// | `block:` | after [`Region::fence`] | after [`Region::fence`] |
pub struct LogPart {
    region: PartRegion,
    shared: Arc<SharedStore>,
    /// The range of the part in the log, in bytes.
    part: Range<usize>,
}

/// The content of a part, by the kind of its medium.
enum PartRegion {
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
        match &self.region {
            PartRegion::Mapped(part) => part.read(offset, into),
            PartRegion::Blocks(part) => part.read(offset, into),
        }
    }

    fn check(&self) -> Result<(), RegionError> {
        match &self.region {
            PartRegion::Mapped(part) => part.check(),
            PartRegion::Blocks(part) => part.check(),
        }
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        match &mut self.region {
            PartRegion::Mapped(part) => part.write(offset, bytes),
            PartRegion::Blocks(part) => part.write(offset, bytes),
        }
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        match &mut self.region {
            PartRegion::Mapped(part) => part.write_word(offset, value),
            PartRegion::Blocks(part) => part.write_word(offset, value),
        }
    }

    #[inline]
    fn fence(&mut self) -> Result<(), RegionError> {
        match &mut self.region {
            PartRegion::Mapped(part) => part.fence(),
            PartRegion::Blocks(part) => part.fence(),
        }
    }

    fn write_back(&mut self) -> Result<(), RegionError> {
        match &mut self.region {
            PartRegion::Mapped(part) => part.write_back(),
            PartRegion::Blocks(part) => part.write_back(),
        }
    }
}

impl Drop for LogPart {
    fn drop(&mut self) {
        self.shared.in_use().retain(|in_use| *in_use != self.part);
    }
}

impl SharedStore {
    fn in_use(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        // A panic can't leave the list half changed: each statement changes one range.
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
