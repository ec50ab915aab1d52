//! Where ordering logs rest: a mapped file, handed out in disjoint parts.
//!
//! A [`LogStore`] is opened once by whoever serves it; each [`LogPart`] of it (the header, the
//! partition of one stream) is owned by one thread, which writes it without a lock.

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{Ordering, compiler_fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riopipe_order::region::{Region, RegionError};

use crate::error::{Gone, OpenError};
use crate::mapping::Mapping;
use crate::medium::{Medium, Reserve};
use crate::persist::Persist;
use crate::spec::Spec;
use crate::survival::{Kept, Survival};

/// The kinds of log and their options, as shown with every complaint about a specification.
pub const LOG_HELP: &str = "logs are:
  file:PATH[,size=SIZE]
      a mapped file: survives the process, not the power; size= creates it if need be
  dax:PATH[,size=SIZE]
      a file on persistent memory (a file system mounted with -o dax): survives the power
  mem:SIZE
      this process's memory, gone with it
sizes are whole numbers of 4096-byte blocks, written like 2M";

/// Opens (or creates) and locks the log that `spec` names; [`LOG_HELP`] lists the kinds.
pub fn open_log(spec: &str) -> Result<LogStore, OpenError> {
    let mut spec = Spec::parse(spec, LOG_HELP)?;
    match spec.kind {
        "mem" => {
            let bytes = spec.blocks(spec.what)?;
            spec.finish()?;
            LogStore::in_memory(bytes)
        }
        kind @ ("file" | "dax") => {
            let size = spec.size("size")?;
            let path = spec.path()?;
            spec.finish()?;
            LogStore::in_file(path, size, kind == "dax")
        }
        kind => Err(spec.wrong(format!("unknown kind of log {kind:?}"))),
    }
}

/// The kernel's name for this boot: another one means that memory, and what was only in the page
/// cache, may have been lost in between (T19).
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

/// A log's bytes, before they are handed out with [`LogStore::part`].
pub struct LogStore {
    shared: Arc<Shared>,
    describe: String,
    survival: Survival,
}

struct Shared {
    mapping: Mapping,
    persist: Persist,
    /// Locked for as long as any part lives.
    medium: Option<Medium>,
    /// The parts that are out.
    lent: Mutex<Vec<Range<usize>>>,
}

/// Why a part of a log can't be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartError {
    /// It reaches beyond the log, is empty, or isn't aligned to 8 bytes.
    #[error(
        "bytes {}..{} of the log: not a non-empty, 8-byte aligned part of its {len} bytes",
        .part.start, .part.end
    )]
    OutOfRange {
        /// What was asked for.
        part: Range<usize>,
        /// The log's size in bytes.
        len: usize,
    },
    /// Somebody has some of it.
    #[error(
        "bytes {}..{} of the log: in use, as bytes {}..{}",
        .part.start, .part.end, .lent.start, .lent.end
    )]
    Lent {
        /// What was asked for.
        part: Range<usize>,
        /// The part that is out.
        lent: Range<usize>,
    },
}

impl LogStore {
    fn in_memory(bytes: u64) -> Result<LogStore, OpenError> {
        let mapping = Mapping::anonymous(bytes as usize).map_err(|source| OpenError::Memory {
            what: "a log in memory",
            bytes,
            source,
        })?;
        let survival = Survival { process_kill: Kept::Nothing, power_cut: Kept::Nothing, note: "" };
        let describe = format!("memory, {} KiB", bytes >> 10);
        Ok(LogStore::new(mapping, Persist::Stores, None, describe, survival))
    }

    fn in_file(path: &str, size: Option<u64>, dax: bool) -> Result<LogStore, OpenError> {
        let medium = Medium::file(path, size, Reserve::Must, false)?;
        let len = medium.len as usize;
        let os = |source| OpenError::Os { path: path.to_owned(), doing: "map it", source };
        let synchronous = if dax { Mapping::shared(&medium.file, len, true).ok() } else { None };
        let persistent = synchronous.is_some();
        let mapping = match synchronous {
            Some(mapping) => mapping,
            None => Mapping::shared(&medium.file, len, false).map_err(os)?,
        };
        let note = match (dax, persistent) {
            (true, true) => "",
            (true, false) => {
                "not on a DAX file system: this log is only as durable as memory, it does not \
                 survive a power cut"
            }
            (false, _) => "the log survives the process, not the power",
        };
        if dax && !persistent {
            tracing::warn!(path, "{note}");
        }
        let persist = if dax { Persist::lines() } else { Persist::Stores };
        let survival = Survival {
            process_kill: Kept::Completed,
            power_cut: if persistent { Kept::Completed } else { Kept::Nothing },
            note,
        };
        let describe = format!(
            "{} {path}, {} KiB, {}",
            if persistent { "persistent memory" } else { "mapped file" },
            len >> 10,
            persist.describe(),
        );
        Ok(LogStore::new(mapping, persist, Some(medium), describe, survival))
    }

    fn new(
        mapping: Mapping,
        persist: Persist,
        medium: Option<Medium>,
        describe: String,
        survival: Survival,
    ) -> LogStore {
        let lent = Mutex::new(Vec::new());
        let shared = Arc::new(Shared { mapping, persist, medium, lent });
        LogStore { shared, describe, survival }
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty: at least one block")]
    pub fn len(&self) -> usize {
        self.shared.mapping.len()
    }

    /// Hands out the bytes in `part` to be written by one owner, until that is dropped.
    pub fn part(&self, part: Range<usize>) -> Result<LogPart, PartError> {
        let len = self.len();
        let aligned = part.start.is_multiple_of(8) && part.end.is_multiple_of(8);
        if !aligned || part.start >= part.end || part.end > len {
            return Err(PartError::OutOfRange { part, len });
        }
        let mut lent = self.shared.lent();
        if let Some(other) = lent.iter().find(|o| o.start < part.end && part.start < o.end) {
            return Err(PartError::Lent { lent: other.clone(), part });
        }
        lent.push(part.clone());
        drop(lent);
        Ok(LogPart { shared: Arc::clone(&self.shared), part })
    }

    /// One line for people: kind, place, size, how it is made durable.
    pub fn describe(&self) -> &str {
        &self.describe
    }

    /// What remains after a killed process and after a power cut.
    pub fn survives(&self) -> Survival {
        self.survival
    }

    /// Whether the file is still there in full. To be asked now and then: a store to a mapping of
    /// a file that somebody has cut short ends the process (SIGBUS), and one into a deleted file
    /// is lost.
    pub fn check(&self) -> Result<(), Gone> {
        self.shared.medium.as_ref().map_or(Ok(()), Medium::check)
    }

    /// Writes everything back to the file and waits (`msync`): for a clean shutdown of a `file:`
    /// log, so that it also survives a power cut after that.
    pub fn sync(&self) -> std::io::Result<()> {
        match self.shared.medium {
            Some(_) => self.shared.mapping.sync(),
            None => Ok(()),
        }
    }
}

/// A part of a log, owned by one thread at a time.
///
/// Stores of aligned words are single stores. They survive the process as soon as they are made
/// (`file:`, `dax:`); [`Region::fence`] makes them survive the power on `dax:`.
pub struct LogPart {
    shared: Arc<Shared>,
    part: Range<usize>,
}

impl LogPart {
    /// Where it lies in the log, in bytes.
    pub fn range(&self) -> Range<usize> {
        self.part.clone()
    }

    /// The address of the part's byte `offset`, of which `len` bytes are wanted.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.part.len());
        assert!(
            fits && offset.is_multiple_of(8) && len.is_multiple_of(8),
            "{len} bytes at {offset} are not aligned words of a part of {} bytes",
            self.part.len()
        );
        self.shared.mapping.start().wrapping_add(self.part.start + offset)
    }

    /// Starts making `len` bytes at `start` durable.
    #[inline]
    fn write_back(&self, start: *const u8, len: usize) {
        #[cfg(target_arch = "x86_64")]
        if let Persist::Lines(lines) = self.shared.persist {
            // SAFETY: `start` and `len` come from `at`, so they are inside the mapping.
            unsafe { lines.write_back(start, len) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (start, len);
    }
}

impl Region for LogPart {
    fn len(&self) -> usize {
        self.part.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len()).cast::<u64>();
        for (i, word) in into.chunks_exact_mut(8).enumerate() {
            // SAFETY: inside the part (see `at`), aligned, and this part's owner is the only one
            // who writes it. Volatile, since the bytes are also a file's.
            let value = unsafe { ptr::read_volatile(from.wrapping_add(i)) };
            word.copy_from_slice(&value.to_ne_bytes());
        }
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        for (i, word) in bytes.chunks_exact(8).enumerate() {
            let value = u64::from_ne_bytes(word.try_into().expect("chunks of eight bytes"));
            // SAFETY: inside the part, aligned, and only this owner writes it. Volatile, so that
            // each word is one store: that is what "in units of 8 bytes" means (M5).
            unsafe { ptr::write_volatile(to.cast::<u64>().wrapping_add(i), value) };
        }
        self.write_back(to, bytes.len());
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        let to = self.at(offset, 8);
        // SAFETY: as in `write`.
        unsafe { ptr::write_volatile(to.cast::<u64>(), value.to_le()) };
        self.write_back(to, 8);
    }

    #[inline]
    fn fence(&mut self) -> Result<(), RegionError> {
        match self.shared.persist {
            // What has been stored outlives the process, in the order of the stores: the kernel
            // and every reader of the file see this CPU's stores as it made them.
            Persist::Stores => compiler_fence(Ordering::SeqCst),
            #[cfg(target_arch = "x86_64")]
            Persist::Lines(_) => crate::persist::fence(),
            #[cfg(not(target_arch = "x86_64"))]
            Persist::Sync => {
                self.shared.mapping.sync().map_err(|error| RegionError::new(error.to_string()))?
            }
        }
        Ok(())
    }
}

impl Drop for LogPart {
    fn drop(&mut self) {
        self.shared.lent().retain(|lent| *lent != self.part);
    }
}

impl Shared {
    fn lent(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        // A list of ranges is whole after each statement.
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roundtrip(spec: &str) {
        let log = open_log(spec).unwrap();
        let mut part = log.part(4096..8192).unwrap();
        assert_eq!(part.len(), 4096);
        part.write(64, &[7; 64]);
        part.write_word(128, 0x0102_0304_0506_0708);
        part.fence().unwrap();
        let mut bytes = [0; 80];
        part.read(56, &mut bytes);
        assert_eq!(&bytes[..8], &[0; 8]);
        assert_eq!(&bytes[8..72], &[7; 64]);
        assert_eq!(&bytes[72..], &[8, 7, 6, 5, 4, 3, 2, 1], "words are little endian");
    }

    #[test]
    fn each_kind_keeps_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log").display().to_string();
        for spec in [format!("file:{path},size=64K"), format!("dax:{path}"), "mem:64K".into()] {
            roundtrip(&spec);
            if !spec.starts_with("mem") {
                // What the mapping holds, the file holds.
                let bytes = std::fs::read(&path).unwrap();
                assert_eq!(&bytes[4096 + 64..4096 + 128], &[7; 64], "{spec}");
                std::fs::write(&path, [0; 65536]).unwrap();
            }
        }
    }

    #[test]
    fn what_was_written_is_there_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log").display().to_string();
        let log = open_log(&format!("file:{path},size=8K")).unwrap();
        log.part(0..64).unwrap().write(0, &[3; 64]);
        log.sync().unwrap();
        drop(log);
        let log = open_log(&format!("file:{path}")).unwrap();
        assert_eq!(log.len(), 8192);
        let mut bytes = [0; 64];
        log.part(0..64).unwrap().read(0, &mut bytes);
        assert_eq!(bytes, [3; 64]);
    }

    #[test]
    fn parts_never_overlap_and_come_back() {
        let log = open_log("mem:8K").unwrap();
        let first = log.part(0..4096).unwrap();
        assert_eq!(
            log.part(4088..8192).err(),
            Some(PartError::Lent { part: 4088..8192, lent: 0..4096 })
        );
        let second = log.part(4096..8192).unwrap();
        std::thread::spawn(move || drop(second)).join().unwrap();
        drop(log.part(4096..8192).unwrap());
        drop(first);
        drop(log.part(0..8192).unwrap());
        for part in [4..64, 0..60, 64..64, 0..8200] {
            assert!(matches!(log.part(part), Err(PartError::OutOfRange { .. })));
        }
    }

    #[test]
    #[should_panic(expected = "not aligned words of a part")]
    fn nothing_outside_the_part_is_touched() {
        let log = open_log("mem:8K").unwrap();
        log.part(0..64).unwrap().write(8, &[0; 64]);
    }

    #[test]
    fn a_log_is_locked_by_whoever_serves_it() {
        // T8.
        let dir = tempfile::tempdir().unwrap();
        let spec = format!("file:{},size=8K", dir.path().join("log").display());
        let log = open_log(&spec).unwrap();
        let part = log.part(0..64).unwrap();
        assert!(matches!(open_log(&spec), Err(OpenError::Locked { .. })));
        drop(log);
        assert!(matches!(open_log(&spec), Err(OpenError::Locked { .. })), "a part still lives");
        drop(part);
        open_log(&spec).unwrap();
    }

    #[test]
    fn a_file_that_is_too_short_or_too_long_is_refused_and_one_that_goes_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log").display().to_string();
        assert!(matches!(open_log(&format!("file:{path}")), Err(OpenError::NoSuchFile { .. })));
        let log = open_log(&format!("file:{path},size=8K")).unwrap();
        log.check().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(log.check(), Err(Gone::Deleted));
        drop(log);

        std::fs::write(&path, [0; 4096]).unwrap();
        let refused = open_log(&format!("file:{path},size=8K")).err().unwrap();
        assert!(matches!(refused, OpenError::Size { .. }), "{refused}");
        std::fs::write(&path, [0; 5000]).unwrap();
        assert!(matches!(open_log(&format!("file:{path}")), Err(OpenError::Size { .. })));
    }

    #[test]
    fn only_persistent_memory_survives_the_power() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log").display().to_string();
        let log = open_log(&format!("file:{path},size=8K")).unwrap();
        assert_eq!(log.survives().process_kill, Kept::Completed);
        assert_eq!(log.survives().power_cut, Kept::Nothing);
        drop(log);
        let log = open_log(&format!("dax:{path}")).unwrap();
        if log.survives().power_cut != Kept::Completed {
            assert!(log.survives().note.contains("only as durable as memory"));
        }
    }

    #[test]
    fn boots_have_names() {
        let id = boot_id().unwrap();
        assert_eq!(id, boot_id().unwrap());
        assert_ne!(id, [0; 16]);
    }
}
