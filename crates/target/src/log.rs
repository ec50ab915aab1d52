//! The ordering log of a target: its opening at the start, and the watch over its file.
//!
//! [`open_volumes`] opens the log's store, and the volumes in it. Each volume gets [`WatchedPart`]s
//! of the store. [`Log::watch`] checks now and then whether the log's file still exists. Once the
//! file is gone, every fence of every part fails.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use riopipe_media::survival::{Kept, Survival};
use riopipe_media::{LogPart, LogStore, boot_id, open_log_within, place_of_log};
use riopipe_order::log_region::opening::{Place, REGION_BYTES_MIN, Refused};
use riopipe_order::log_region::{Class, HEADER_BYTES, inspect};
use riopipe_order::region::{Region, RegionError};
use riopipe_session::target::{Found, Split, Volumes};
use rustix::rand::{GetRandomFlags, getrandom};

use riopipe_platform::crc32c;

/// The reason why the ordering log was not opened.
#[derive(Debug, thiserror::Error)]
pub enum LogOpenError {
    /// The medium can't be opened.
    #[error(transparent)]
    Store(#[from] riopipe_media::OpenError),
    /// The content of the medium was refused (trap T19).
    #[error(transparent)]
    Refused(#[from] Refused),
    /// A part of the medium is not available.
    #[error(transparent)]
    Part(#[from] riopipe_media::PartError),
}

/// The error of a log whose file has disappeared.
const GONE: &str = "its file has been deleted, replaced or cut short";

/// A part of the log that fails after the log's file has disappeared.
pub(crate) struct WatchedPart {
    part: LogPart,
    /// Whether [`Log::watch`] has found that the file does not exist any more. All parts share this
    /// flag.
    is_gone: Arc<AtomicBool>,
}

impl Region for WatchedPart {
    fn len(&self) -> usize {
        self.part.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.part.read(offset, into);
    }

    fn check(&self) -> Result<(), RegionError> {
        if self.is_gone.load(Ordering::Relaxed) {
            return Err(RegionError::new(GONE));
        }
        self.part.check()
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.part.write(offset, bytes);
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        self.part.write_word(offset, value);
    }

    #[inline]
    fn fence(&mut self) -> Result<(), RegionError> {
        if self.is_gone.load(Ordering::Relaxed) {
            return Err(RegionError::new(GONE));
        }
        self.part.fence()
    }

    fn write_back(&mut self) -> Result<(), RegionError> {
        self.fence()?;
        self.part.write_back()
    }
}

/// The log region of the target. Its store is checked now and then ([`watch`](Self::watch)).
pub(crate) struct Log {
    store: LogStore,
    /// Whether the store's file does not exist any more.
    is_gone: Arc<AtomicBool>,
    /// Whether the log had the stamp of a clean stop before it was opened. Opening clears the stamp
    /// (trap T24).
    was_synced: bool,
}

impl Log {
    /// Hands out the bytes in `range` of the log.
    fn part(&self, range: Range<usize>) -> Result<WatchedPart, riopipe_media::PartError> {
        Ok(WatchedPart { part: self.store.part(range)?, is_gone: Arc::clone(&self.is_gone) })
    }

    /// Checks that the file still exists. If it does not, every later fence fails, and with the
    /// fence its stream, because nothing in a deleted file is durable (promise P6).
    pub(crate) fn watch(&self) {
        if let Err(gone) = self.store.check()
            && !self.is_gone.swap(true, Ordering::Relaxed)
        {
            tracing::error!(log = self.store.describe(), %gone, "the ordering log has failed");
        }
    }

    /// Checks that the file still exists, and that no access to it has failed. No stream has to
    /// notice first, because an idle target has none that writes.
    pub(crate) fn check(&self) -> Result<(), RegionError> {
        self.watch();
        if self.is_gone.load(Ordering::Relaxed) {
            return Err(RegionError::new(GONE));
        }
        self.store.check_access()
    }

    /// One line for display.
    pub(crate) fn describe(&self) -> &str {
        self.store.describe()
    }

    /// The content that remains of the log after a killed process and after a power cut.
    pub(crate) fn survives(&self) -> Survival {
        self.store.survives()
    }

    /// Writes back to the log's file all stored bytes, and all bytes in `used`
    /// ([`LogStore::sync`]). Fails if the file does not exist any more.
    pub(crate) fn sync(&self, used: &[Range<usize>]) -> Result<(), RegionError> {
        self.store.check().map_err(|gone| RegionError::new(gone.to_string()))?;
        self.store.sync(used).map_err(|error| RegionError::new(error.to_string()))
    }
}

/// Ends the service of a log that no host has used, because the target does not start. Opening the
/// log has cleared its stamp of a clean stop. If it had one, the log gets the stamp again (trap
/// T24).
pub(crate) fn end_unused_service(mut volumes: Volumes<WatchedPart>, log: &Log) {
    // Without the stamp, the file may lack pages that the kernel takes for clean. Only a write-back
    // of the whole log would bring all pages into the file, and a failed start must not take so
    // long.
    if !log.was_synced {
        return;
    }
    // With the stamp, all of the log was in the file, so only later stores have to be written back.
    if let Err(error) = volumes.end_service(|| log.sync(&[])) {
        tracing::error!(log = log.describe(), %error, "the log could not be written back");
    }
}

/// Checks that a file with the size that `spec` gives could hold a log. A log that would be refused
/// is not created.
pub(crate) fn check_size(spec: &str) -> Result<(), LogOpenError> {
    let size = place_of_log(spec)?.and_then(|file| file.size());
    match size {
        Some(bytes) if bytes < REGION_BYTES_MIN as u64 => {
            Err(Refused::TooSmall { have: bytes as usize, need: REGION_BYTES_MIN }.into())
        }
        _ => Ok(()),
    }
}

/// Opens the log that `spec` names, if any, and the volumes in it. Adds a line about the log to
/// `descriptions`, for display. Waits at most `lock_wait` for a locked log.
pub(crate) fn open_volumes(
    spec: Option<&str>,
    accept_lost: bool,
    lock_wait: Duration,
    descriptions: &mut Vec<String>,
) -> Result<(Volumes<WatchedPart>, Option<Arc<Log>>), LogOpenError> {
    let Some(spec) = spec else {
        descriptions.push("no ordering log: engine rio can't run here".into());
        return Ok((Volumes::without_log(crc32c), None));
    };
    let store = open_log_within(spec, lock_wait)?;
    let boot = boot_id()?;
    let len = store.len();
    let was_synced = is_synced(&store, boot)?;
    let log = Arc::new(Log { store, is_gone: Arc::default(), was_synced });
    let note = log.survives().note;
    if !note.is_empty() {
        tracing::info!(log = spec, "{note}");
    }
    let header = log.part(0..HEADER_BYTES.min(len))?;
    let split: Split<WatchedPart> = Box::new({
        let log = Arc::clone(&log);
        move |range| log.part(range).map_err(|error| RegionError::new(error.to_string()))
    });
    let place = place(&log.store, boot);
    let opened = Volumes::open(header, split, place, accept_lost, random_id(), crc32c)?;
    let state_text = match opened.found {
        Found::Log { has_volumes: true } => ", with volumes",
        Found::Log { has_volumes: false } | Found::Nothing => "",
        Found::GivenUp => {
            tracing::warn!(log = spec, "the log was given up and made anew (--accept-lost-log)");
            ""
        }
        Found::Lost => {
            // The log is served, so that the other namespaces stay usable. Its volumes are refused,
            // and plain hosts may not write their members (traps T19, T21).
            tracing::error!(
                log = spec,
                "the log is of another boot, in which its target was not stopped cleanly: \
                 the volumes in it are refused until the loss is accepted (--accept-lost-log)"
            );
            ", of another boot: LOST"
        }
    };
    descriptions.push(format!("ordering log: {}{state_text}", log.describe()));
    let mut volumes = opened.volumes;
    if log.survives().process_kill == Kept::Nothing {
        volumes.note_log_in_memory();
    }
    for problem in &opened.problems {
        tracing::error!(log = spec, problem, "a volume is refused");
    }
    Ok((volumes, Some(log)))
}

/// The place of a log, for the decision about its content.
pub(crate) fn place(store: &LogStore, boot: [u8; 16]) -> Place {
    Place { len: store.len(), kind: store.kind(), boot, is_restored: store.is_restored() }
}

/// Whether a log has the stamp of a clean stop (trap T24).
fn is_synced(store: &LogStore, boot: [u8; 16]) -> Result<bool, riopipe_media::PartError> {
    let len = store.len();
    let header = store.part(0..HEADER_BYTES.min(len))?;
    Ok(matches!(inspect(&header, len, boot, crc32c), Class::Ours(header) if header.synced))
}

/// An identifier for a new log region or drive: random, from the kernel.
pub(crate) fn random_id() -> [u8; 16] {
    let mut id = [0u8; 16];
    // Requests of up to 256 bytes are never cut short.
    if getrandom(&mut id, GetRandomFlags::empty()) != Ok(id.len()) {
        // The kernel's pool is not ready yet. The clock and the process are enough for an
        // identifier.
        id[..8].copy_from_slice(&riopipe_platform::now_ns().to_le_bytes());
        id[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    }
    id
}

#[cfg(test)]
mod tests {
    use riopipe_order::attribute::{Member, VolumeId};
    use riopipe_order::log_region::{LogRegion, MemberNamespace, NewVolume};
    use riopipe_order::ordering_log::SLOTS_MIN;

    use super::*;

    #[test]
    fn once_a_log_is_found_missing_every_part_fails_its_fences() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let store = open_log_within(&format!("file:{},size=64K", path.display()), Duration::ZERO);
        let log = Log { store: store.unwrap(), is_gone: Arc::default(), was_synced: false };
        let mut parts = [0..8192, 8192..12288, 12288..16384].map(|range| log.part(range).unwrap());
        log.watch();
        assert!(parts.iter_mut().all(|part| part.fence().is_ok()));
        log.check().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(log.check().is_err());
        assert!(parts.iter_mut().all(|part| part.fence().is_err() && part.write_back().is_err()));
        assert!(log.sync(&[]).is_err());
    }

    #[test]
    fn a_log_with_a_failed_page_stays_failed_although_its_file_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let store = open_log_within(&format!("file:{},size=64K", path.display()), Duration::ZERO);
        let log = Log { store: store.unwrap(), is_gone: Arc::default(), was_synced: false };
        let part = log.part(8192..12288).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(4096).unwrap();
        part.read(0, &mut [0; 8]);
        file.set_len(64 << 10).unwrap();
        let error = log.check().unwrap_err().to_string();
        assert!(error.contains("a page of its file"), "{error}");
    }

    /// The volumes and the log that `spec` names, opened as a target does at its start.
    fn opened(spec: &str) -> (Volumes<WatchedPart>, Arc<Log>) {
        let (volumes, log) = open_volumes(Some(spec), false, Duration::ZERO, &mut vec![]).unwrap();
        (volumes, log.unwrap())
    }

    fn has_stamp(spec: &str) -> bool {
        let store = open_log_within(spec, Duration::ZERO).unwrap();
        is_synced(&store, boot_id().unwrap()).unwrap()
    }

    #[test]
    fn t24_a_start_that_fails_leaves_the_stamp_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let spec = format!("file:{},size=64K", dir.path().join("log").display());
        drop(opened(&spec));
        let (volumes, log) = opened(&spec);
        assert!(!log.was_synced);
        end_unused_service(volumes, &log);
        drop(log);
        assert!(!has_stamp(&spec), "nothing has written all of the log back");

        let (mut volumes, log) = opened(&spec);
        let used = volumes.log_used();
        volumes.end_service(|| log.sync(&used)).unwrap();
        drop((volumes, log));
        assert!(has_stamp(&spec));
        let (volumes, log) = opened(&spec);
        end_unused_service(volumes, &log);
        drop(log);
        assert!(has_stamp(&spec));
    }

    #[test]
    fn t24_every_volume_in_the_log_is_used_also_one_that_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let spec = format!("file:{},size=1M", dir.path().join("log").display());
        let (volumes, log) = opened(&spec);
        assert_eq!(volumes.log_used(), std::slice::from_ref(&(0..HEADER_BYTES)));
        drop((volumes, log));
        let store = open_log_within(&spec, Duration::ZERO).unwrap();
        let header = store.part(0..HEADER_BYTES).unwrap();
        let mut region = LogRegion::open(header, store.len(), boot_id().unwrap(), crc32c).unwrap();
        let id = VolumeId([7; 16]);
        let members = vec![MemberNamespace { member: Member(0), nsid: 1 }];
        let volume = NewVolume { id, streams: 2, slots: SLOTS_MIN, members };
        // Its partitions stay blank, which no target accepts.
        region.add_volume(volume, |_, _| Ok(())).unwrap();
        region.set_generation(id, 1, [1; 16], 1000).unwrap();
        let extent = region.volume(id).unwrap().extent();
        drop((region, store));
        let (volumes, _log) = opened(&spec);
        assert_eq!(volumes.log_used(), [0..HEADER_BYTES, extent]);
    }
}
