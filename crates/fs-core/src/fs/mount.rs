//! Mounting: recovery, and the state of a mounted file system. Unmounting.
//!
//! A mount changes the drive in these steps. Each is durable before the next one, and the whole can
//! be cut anywhere and run again:
//!
//! 1. The main journal is replayed, and emptied.
//! 2. File-level records that are newer are applied, and committed ([`super::recovery`]).
//! 3. Orphans are deleted or truncated, and committed.
//! 4. The areas are emptied: their table gets a new epoch.
//! 5. The superblock marks the file system as in use.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::journal_io::{
    Division, LogReader, find_log, read_table, replay_log, write_durably, write_table,
};
use super::journal_mode::JournalMode;
use super::{Fs, stat};
use crate::block::{BLOCK_BYTES, BlockKind, Ino, MetaBlocks};
use crate::cache::BlockCache;
use crate::credits::Credits;
use crate::error::FsError;
use crate::file_journal::area::find_records;
use crate::file_journal::record::{Epoch, RecordId};
use crate::file_journal::table::{AreaTable, AreasState};
use crate::format::features::{Features, incompat, ro_compat};
use crate::format::inode::Time;
use crate::format::layout::Layout;
use crate::format::superblock::{SUPERBLOCK, State, Superblock, SuperblockError, SuperblockTime};
use crate::format::{checksum, orphan_file};
use crate::groups::Groups;
use crate::inode_table::{Inode, InodeTable};
use crate::journal::JournalError;
use crate::journal::MainJournal;
use crate::orphans::Orphans;
use crate::probe::{Plant, is_bug_planted};
use crate::raw::Raw;
use crate::running::Running;
use crate::storage::{Storage, StorageError, StreamNo};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Mutex, RwLock};
use riopipe_nvme::digest::Crc32c;

/// The options of a mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// How `fsync` keeps order.
    pub mode: JournalMode,
    /// Whether the file system can't be changed. A journal that needs recovery is an error then.
    pub read_only: bool,
    /// The random number of this mount.
    pub epoch: Epoch,
    /// Whether file-level records that are damaged, or can't be applied because something else is,
    /// are left out. What `fsync` made durable may be lost then.
    pub accept_lost_records: bool,
    /// The time between two commits, in seconds.
    pub commit_seconds: u32,
    /// The dirty pages of a file at which a write submits them.
    pub dirty_pages_max: usize,
    /// The pages of all files in memory at which a write submits and drops some, and waits for that.
    pub pages_max: usize,
    /// The metadata blocks that are kept in memory although no transaction needs them, about.
    pub cached_blocks_max: usize,
    /// Whether reads update the time of access (as `relatime`).
    pub atime: bool,
    /// The blocks of a file-level journal, at most.
    pub area_blocks_max: u32,
    /// The function for CRC32C.
    pub crc32c: Crc32c,
}

impl MountOptions {
    /// The usual options, with the random number of the mount.
    #[must_use]
    pub fn new(epoch: Epoch) -> Self {
        Self {
            mode: JournalMode::default(),
            read_only: false,
            accept_lost_records: false,
            epoch,
            commit_seconds: 5,
            dirty_pages_max: 4096,
            pages_max: 32_768,
            cached_blocks_max: 65_536,
            atime: true,
            area_blocks_max: super::journal_io::AREA_BLOCKS_MAX,
            crc32c: riopipe_nvme::digest::soft,
        }
    }
}

/// Why a file system can't be mounted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The superblock is not one that RioFS takes.
    #[error(transparent)]
    Superblock(#[from] SuperblockError),
    /// The storage is smaller than the file system.
    #[error("the file system has {blocks} blocks, but its device only {available}")]
    TooSmall {
        /// The blocks of the file system.
        blocks: u64,
        /// The blocks of the device.
        available: u64,
    },
    /// A read-only mount needs a recovery.
    #[error(
        "the file system needs recovery, which a read-only mount can't do: mount it writable once"
    )]
    NeedsRecovery,
    /// The journal can't be used.
    #[error("the journal can't be used: {0}")]
    Journal(#[from] JournalError),
    /// A file-level record is damaged: others after it are there.
    #[error(
        "the file-level record before number {id} of stream {stream} is damaged: some of what \
         fsync made durable is lost; `--accept-lost-log` goes on without it"
    )]
    DamagedRecord {
        /// The stream.
        stream: u16,
        /// The number of the record after it.
        id: u64,
    },
    /// A file-level record needs another one. This version writes no such record, and can't check
    /// whether that one is there.
    #[error(
        "the file-level record number {id} of stream {stream} needs one of another stream, which \
         this version of rio can't check: mount it with the version that has written it; \
         `--accept-lost-log` goes on without the record, and some of what fsync made durable is lost"
    )]
    DependentRecord {
        /// The stream.
        stream: u16,
        /// The number of the record.
        id: u64,
    },
    /// A structure that the mount needs is damaged.
    #[error("{error}: {}", if *is_unrecovered { GIVE_UP } else { "run e2fsck" })]
    Damaged {
        /// The structure.
        error: Box<Self>,
        /// Whether the file system has the private bit, so that e2fsck refuses it.
        is_unrecovered: bool,
    },
    /// A call has failed.
    #[error(transparent)]
    Fs(#[from] FsError),
}

/// The advice for a damaged file system that e2fsck refuses.
const GIVE_UP: &str = "e2fsck refuses the file system before it is recovered, and `rio fs fsck \
    --accept-lost-log` gives up what can't be recovered";

impl MountError {
    /// Whether a structure on the drive is damaged, so that the file system can't be mounted.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } => true,
            Self::Journal(error) => error.is_damage(),
            Self::Fs(error) => error.is_damage(),
            _ => false,
        }
    }
}

impl From<StorageError> for MountError {
    fn from(error: StorageError) -> Self {
        Self::Fs(error.into())
    }
}

/// The findings of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountReport {
    /// The main transactions that were replayed.
    pub replayed: u64,
    /// The file-level records that were applied.
    pub records: u64,
    /// The orphans that were deleted or truncated.
    pub orphans: u64,
    /// An error was found in this mount or before: e2fsck shall check everything.
    pub has_error: bool,
    /// The orphans that are damaged, so that e2fsck must delete them.
    pub damaged_orphans: u64,
}

impl Fs {
    /// Mounts a file system: recovers it if that is needed, and marks it as in use.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn mount(
        storage: Arc<dyn Storage>,
        options: MountOptions,
        now: Time,
    ) -> Result<(Self, MountReport), MountError> {
        let (superblock, layout) = read_superblock(&*storage, options.crc32c)?;
        let is_dirty = superblock.features().has_incompat(incompat::RIOFS_DIRTY);
        Self::recover_and_mount(storage, options, now, (superblock, layout)).map_err(|error| {
            match error.is_damage() {
                true => MountError::Damaged { error: Box::new(error), is_unrecovered: is_dirty },
                false => error,
            }
        })
    }

    fn recover_and_mount(
        storage: Arc<dyn Storage>,
        options: MountOptions,
        now: Time,
        (superblock, layout): (Superblock, Layout),
    ) -> Result<(Self, MountReport), MountError> {
        let raw = Raw { storage: &*storage, layout: &layout };
        let journal_ino = layout.journal_ino;
        let blocks = raw.blocks_of(journal_ino, &raw.inode(journal_ino)?)?;
        let log = find_log(&raw, &blocks)?;
        let is_dirty = superblock.features().has_incompat(incompat::RIOFS_DIRTY);
        let left = match is_dirty.then(|| read_table(&raw, &log.superblock, &blocks)) {
            Some(Err(error)) if error.is_damage() && options.accept_lost_records => None,
            Some(left) => left?,
            None => None,
        };
        let needs_recovery = log.superblock.start() != 0
            || left.as_ref().is_some_and(|(table, _)| table.state != AreasState::Empty);
        if options.read_only && needs_recovery {
            return Err(MountError::NeedsRecovery);
        }
        // The replay empties the log, so the table gets the number of its last transaction first.
        let left = match left {
            Some((table @ AreaTable { state: AreasState::Active { before }, .. }, division)) => {
                let state = AreasState::Recovering { durable: before.not_before(log.durable) };
                let table = AreaTable { state, ..table };
                write_table(&*storage, &layout, &division, &blocks, &table)?;
                Some((table, division))
            }
            left => left,
        };
        if !options.read_only {
            replay_log(&raw, &blocks, &log)?;
        }

        // The replay may have changed it.
        let (mut superblock, layout) = read_superblock(&*storage, options.crc32c)?;
        let has_error = log.superblock.errno() != 0;
        if has_error && !options.read_only {
            // As ext4 does it. The next update of the journal's superblock clears the error there.
            superblock.set_state(superblock.state() | State::ERROR);
            if superblock.error_count() == 0 {
                // The replay has put an older superblock over the one that had it.
                superblock.record_error(b"journal aborted", 0, 0, now.seconds.max(0) as u64);
            }
            write_superblock(&*storage, &mut superblock, options.crc32c)?;
        }
        let raw = Raw { storage: &*storage, layout: &layout };
        let journal = MainJournal::new(&layout, &log.superblock, blocks.clone(), &log.recovery)?;
        let next = journal.next();
        let mut groups = Groups::open(&layout, &|at| Ok(Arc::new(raw.block(at)?)))?;
        let overhead = groups.system_blocks() + blocks.len() as u64;
        groups.add_journal(journal_ino, &blocks)?;
        let mut orphans = raw_orphans(&raw, &superblock)?;
        let listed = Orphans::from_drive(&orphans);
        orphans.extend(orphan_file(&raw, &superblock)?);
        let mut fs = Self {
            running: Mutex::new(Running::new(next)),
            durable: AtomicU64::new(next.0 - 1),
            covered: (0..storage.streams()).map(|_| AtomicU64::new(0)).collect(),
            log_blocks: AtomicUsize::new(journal.capacity()),
            credits: Credits::default(),
            journal: Mutex::new(journal),
            overhead,
            superblock: Mutex::new(superblock),
            groups,
            cache: BlockCache::new(options.cached_blocks_max),
            inodes: InodeTable::new(),
            gate: RwLock::new(()),
            limiting: Mutex::new(()),
            committing: Mutex::default(),
            orphans: Mutex::new(listed),
            directory_moves: Mutex::new(()),
            shared_attributes: Mutex::new(()),
            directory_moved: AtomicU64::new(0),
            areas: Vec::new(),
            division: left.map(|(_, division)| division),
            journal_blocks: blocks,
            next_record: AtomicU64::new(1),
            awaited: Mutex::default(),
            is_recovering: AtomicBool::new(false),
            barriers: Mutex::default(),
            submitting_held: Mutex::new(()),
            next_generation: AtomicU32::new(first_generation(&options.epoch)),
            now_seconds: AtomicU64::new(now.seconds.max(0) as u64),
            next_commit_seconds: AtomicU64::new(0),
            is_commit_due: AtomicBool::new(false),
            waker: Mutex::new(None),
            is_read_only: AtomicBool::new(options.read_only),
            is_closing: AtomicBool::new(false),
            failure: Mutex::new(None),
            is_failure_recorded: AtomicBool::new(false),
            reuses: AtomicU64::new(0),
            stat: stat::Counters::default(),
            storage,
            layout,
            options,
        };
        let mut report = MountReport {
            replayed: u64::from(log.recovery.transactions),
            has_error: has_error || fs.superblock.get_mut().state().contains(State::ERROR),
            ..MountReport::default()
        };
        if !fs.options.read_only {
            if let Some((table, division)) = left {
                report.records = fs.recover_records(&table, &division)?;
            }
            (report.orphans, report.damaged_orphans) = fs.process_orphans(&orphans)?;
            fs.begin_use(now)?;
            fs.storage.recovered()?;
        }
        Ok((fs, report))
    }

    /// Applies the file-level records of a mount that was not unmounted, and empties the areas.
    fn recover_records(&self, table: &AreaTable, division: &Division) -> Result<u64, MountError> {
        let AreasState::Recovering { durable } = table.state else { return Ok(0) };
        let raw = Raw { storage: &*self.storage, layout: &self.layout };
        let mut records = Vec::new();
        for index in 0..division.areas {
            let area = division.area(&self.journal_blocks, index);
            let (mut failure, mut reader) = (None, LogReader::new(&raw, area));
            let found = find_records(
                &self.layout,
                StreamNo(1 + index),
                area.len() as u64,
                table.epoch,
                durable,
                &mut |n| match reader.read(n as u32) {
                    Ok(block) => Some(*block),
                    Err(error) => {
                        failure = Some(error);
                        None
                    }
                },
            );
            if let Some(error) = failure {
                return Err(error.into());
            }
            // A stream keeps the order of its groups, so a crash leaves no gap.
            if let Some(RecordId(id)) = found.missing
                && !self.options.accept_lost_records
            {
                return Err(MountError::DamagedRecord { stream: 1 + index, id });
            }
            for record in found.records {
                match record.dependencies.is_empty() {
                    true => records.push(record),
                    false if self.options.accept_lost_records => {}
                    false => {
                        let RecordId(id) = record.header.id;
                        return Err(MountError::DependentRecord { stream: 1 + index, id });
                    }
                }
            }
        }
        let count = self.apply_records(records)?;
        let table = AreaTable { state: AreasState::Empty, ..*table };
        let (storage, layout) = (&*self.storage, &self.layout);
        if is_bug_planted(Plant::TableEmptyEarly) {
            write_table(storage, layout, division, &self.journal_blocks, &table)?;
        }
        self.commit_now()?;
        self.checkpoint_all()?;
        write_table(storage, layout, division, &self.journal_blocks, &table)?;
        Ok(count)
    }

    /// Empties the log, of which everything is home.
    fn empty_log(&self) -> Result<(), MountError> {
        let emptied = self.journal.lock().empty();
        if let Some(write) = emptied {
            self.write_main([write])?;
            self.journal.lock().on_tail_released();
        }
        Ok(())
    }

    /// Empties the log, of which everything is home, and gives it a length in blocks.
    fn set_log_length(&self, maxlen: u32) -> Result<(), MountError> {
        self.empty_log()?;
        let mut journal = self.journal.lock();
        let resized = journal.set_maxlen(maxlen)?;
        self.log_blocks.store(journal.capacity(), Ordering::Relaxed);
        drop(journal);
        self.write_main([resized])?;
        self.journal.lock().on_tail_released();
        Ok(())
    }

    /// Marks the file system as in use.
    fn begin_use(&mut self, now: Time) -> Result<(), MountError> {
        // Everything is home before the log changes its length.
        self.commit_now()?;
        self.checkpoint_all()?;
        let full = u32::try_from(self.journal_blocks.len()).unwrap_or(u32::MAX);
        let mut features = self.superblock.get_mut().features().incompat | incompat::RECOVER;
        if self.options.mode.keep_order().file_level {
            let division =
                Division::new(full, self.storage.streams() - 1, self.options.area_blocks_max)?;
            // The length of the log is the place of the table. A superblock that was marked by the
            // mount before must lead to a table, the old one or the new one, also after a crash
            // between the next two writes.
            self.empty_log()?;
            let state = AreasState::Active { before: self.durable() };
            let table = division.table(self.options.epoch, state, full);
            let (storage, layout) = (&*self.storage, &self.layout);
            write_table(storage, layout, &division, &self.journal_blocks, &table)?;
            self.set_log_length(division.maxlen)?;
            self.areas = division.new_areas(&self.journal_blocks);
            self.stat.set_areas(self.areas.len());
            self.division = Some(division);
            if !is_bug_planted(Plant::NoPrivateBit) {
                features |= incompat::RIOFS_DIRTY;
            }
        } else {
            self.set_log_length(full)?;
            self.division = None;
            features &= !incompat::RIOFS_DIRTY;
        }
        let superblock = self.superblock.get_mut();
        let raw = Raw { storage: &*self.storage, layout: &self.layout };
        empty_orphan_file(&raw, superblock)?;
        superblock.set_features(Features { incompat: features, ..superblock.features() });
        superblock.set_time(SuperblockTime::Mount, now.seconds.max(0) as u64);
        superblock.set_mount_count(superblock.mount_count().wrapping_add(1));
        write_superblock(&*self.storage, superblock, self.options.crc32c)?;
        self.cache.remove(SUPERBLOCK);
        Ok(())
    }

    /// Deletes the inodes without names, and finishes the truncates, that a crash has interrupted.
    /// Those that are damaged stay in the list. Returns the numbers of both.
    fn process_orphans(&self, orphans: &[Ino]) -> Result<(u64, u64), FsError> {
        let mut damaged = 0;
        for &ino in orphans {
            match self.process_orphan(ino) {
                Err(error) if error.is_damage() => damaged += 1,
                processed => processed?,
            }
        }
        self.commit_now()?;
        Ok((orphans.len() as u64 - damaged, damaged))
    }

    fn process_orphan(&self, ino: Ino) -> Result<(), FsError> {
        // The kernel's orphan file may have one that is deleted already.
        let read = |at| self.read_meta(at, BlockKind::Plain);
        let is_used = self.groups.is_inode_used(ino, &read);
        if is_used == Ok(false) {
            self.orphans.lock().remove(ino, &mut self.running.lock());
            return Ok(());
        }
        // A commit writes the inodes of the list, so one that can't be read must not be in it.
        self.read_inode(ino)?;
        self.orphans.lock().add(ino, &mut self.running.lock());
        is_used?;
        self.end_orphan(&self.inode(ino)?)
    }

    /// Deletes an inode of the orphan list, or finishes its truncate.
    fn end_orphan(&self, inode: &Arc<Inode>) -> Result<(), FsError> {
        let has_no_name = inode.state.read().disk.links == 0;
        if has_no_name {
            return self.delete(inode, true);
        }
        inode.state.write().is_cutting = true;
        match self.finish_cut(inode) {
            Err(FsError::Stale(_)) => Ok(()),
            other => other,
        }
    }

    /// Unmounts: everything becomes durable and is written home, the journal is empty, and any ext4
    /// may mount the file system. Calls that are in progress end before, or fail with
    /// [`FsError::ReadOnly`], as later ones do.
    ///
    /// # Errors
    /// The storage has failed. The next mount recovers what was durable.
    pub fn unmount(&self, now: Time) -> Result<(), FsError> {
        if self.is_read_only() {
            self.record_failure(now);
            return match self.failure() {
                Some(_) => Err(FsError::ReadOnly),
                None => Ok(()),
            };
        }
        if is_bug_planted(Plant::PrivateBitClearedEarly) {
            self.clear_marks(now).map_err(|error| self.fail("unmounting", &error))?;
        }
        self.is_closing.store(true, Ordering::Release);
        let ended = self.make_all_durable(now);
        if ended.is_err() {
            self.is_closing.store(false, Ordering::Release);
        }
        ended?;
        let ended = self.end_use(now);
        ended.map_err(|error| self.fail("unmounting", &error))
    }

    /// Records the error that has made the file system read-only on the drive, once, if that is still
    /// possible: in the superblock, and in that of the journal. The replay of the journal may put an
    /// older superblock over the one with the error, so the next mount takes it from the journal.
    pub(super) fn record_failure(&self, now: Time) {
        let Some(failure) = self.failure() else { return };
        if self.is_failure_recorded.swap(true, Ordering::AcqRel) {
            return;
        }
        // No commit and no checkpoint is in progress, or comes later.
        let _committing = self.committing.lock();
        let aborted = self.journal.lock().abort();
        let doing = failure.split(':').next().unwrap_or_default().as_bytes();
        let now = now.seconds.max(0) as u64;
        self.superblock.lock().record_error(doing, 0, 0, now);
        let record = || -> Result<(), MountError> {
            self.write_main([aborted])?;
            // Not the one in memory: it may have changes that no commit contains.
            let (mut superblock, _) = read_superblock(&*self.storage, self.options.crc32c)?;
            superblock.record_error(doing, 0, 0, now);
            Ok(write_superblock(&*self.storage, &mut superblock, self.options.crc32c)?)
        };
        // The storage may have failed for good. Then the reason is in the log of the mount only.
        let _ = record();
    }

    /// Makes everything durable, and then the file system read-only, while programs change nothing
    /// more.
    fn make_all_durable(&self, now: Time) -> Result<(), FsError> {
        loop {
            self.sync(now)?;
            // Deleted files that are still open go with the mount.
            let orphans = self.orphans.lock().all();
            let mut damaged = 0;
            for ino in orphans {
                match self.inode(ino).and_then(|inode| self.end_orphan(&inode)) {
                    // The thread that had it open last deletes it.
                    Err(FsError::Stale(_)) => {}
                    // It stays in the list.
                    Err(error) if error.is_damage() => damaged += 1,
                    ended => ended?,
                }
            }
            self.commit_now()?;
            let _gate = self.gate.write();
            if self.is_all_durable(damaged) {
                // Calls that wait for the gate find it.
                self.is_read_only.store(true, Ordering::Release);
                return Ok(());
            }
            // Calls that were in progress have changed something.
        }
    }

    /// Whether the memory has nothing that is not durable, and the list of orphans only those that
    /// are damaged. The gate is closed.
    fn is_all_durable(&self, damaged: usize) -> bool {
        self.running.lock().is_empty()
            && self.barriers.lock().is_nothing_held()
            && self.orphans.lock().all().len() == damaged
            && self.inodes.data_pages().dirty() == 0
    }

    fn end_use(&self, now: Time) -> Result<(), MountError> {
        // No commit or checkpoint of another thread is in progress, or comes later.
        let mut committing = self.committing.lock();
        // A call may have submitted one after the last wait for all.
        self.await_submitted(&mut committing)?;
        self.checkpoint(usize::MAX)?;
        // The journal has its full length again: the mark that no record is needed.
        let full = u32::try_from(self.journal_blocks.len()).unwrap_or(u32::MAX);
        self.set_log_length(full)?;
        self.clear_marks(now)
    }

    /// Clears the private bit and the one for the journal.
    fn clear_marks(&self, now: Time) -> Result<(), MountError> {
        let mut superblock = self.superblock.lock();
        let features = superblock.features();
        let incompat = features.incompat & !(incompat::RECOVER | incompat::RIOFS_DIRTY);
        superblock.set_features(Features { incompat, ..features });
        let state = superblock.state() | State::VALID;
        superblock.set_state(state);
        superblock.set_time(SuperblockTime::Write, now.seconds.max(0) as u64);
        write_superblock(&*self.storage, &mut superblock, self.options.crc32c)?;
        Ok(())
    }
}

/// The first generation of new inodes of a mount.
fn first_generation(epoch: &Epoch) -> u32 {
    let [a, b, c, d, ..] = epoch.0;
    u32::from_le_bytes([a, b, c, d])
}

/// Reads and checks the superblock.
pub(super) fn read_superblock(
    storage: &dyn Storage,
    crc32c: Crc32c,
) -> Result<(Superblock, Layout), MountError> {
    let mut block = [0; BLOCK_BYTES];
    storage.read(SUPERBLOCK, &mut block)?;
    let superblock = Superblock::decode(&block, crc32c)?;
    let layout = superblock.layout(crc32c)?;
    if layout.blocks > storage.blocks() {
        return Err(MountError::TooSmall { blocks: layout.blocks, available: storage.blocks() });
    }
    Ok((superblock, layout))
}

/// Writes the superblock, and waits until it is durable.
pub(super) fn write_superblock(
    storage: &dyn Storage,
    superblock: &mut Superblock,
    crc32c: Crc32c,
) -> Result<(), StorageError> {
    let mut block = [0; BLOCK_BYTES];
    storage.read(SUPERBLOCK, &mut block)?;
    superblock.encode(&mut block, crc32c);
    write_durably(storage, [(SUPERBLOCK, Arc::new(block))])
}

/// The inodes in the orphan file, which the kernel uses instead of the orphan list. RioFS only reads
/// it, and empties it.
fn orphan_file(raw: &Raw<'_>, superblock: &Superblock) -> Result<Vec<Ino>, FsError> {
    let (Some(ino), true) =
        (raw.layout.orphan_file, superblock.features().has_ro_compat(ro_compat::ORPHAN_PRESENT))
    else {
        return Ok(Vec::new());
    };
    let disk = raw.inode(ino)?;
    let kind = BlockKind::OrphanFile(raw.layout.inode_seed(ino, disk.generation));
    let mut found = Vec::new();
    for at in raw.blocks_of(ino, &disk)? {
        found.extend(orphan_file::orphans(raw.layout, at, &*raw.get(at, kind)?)?);
    }
    Ok(found)
}

/// Empties the orphan file. Its inodes were processed, durably.
fn empty_orphan_file(raw: &Raw<'_>, superblock: &mut Superblock) -> Result<(), FsError> {
    let Some(ino) = raw.layout.orphan_file else { return Ok(()) };
    if !superblock.features().has_ro_compat(ro_compat::ORPHAN_PRESENT) {
        return Ok(());
    }
    let disk = raw.inode(ino)?;
    let kind = BlockKind::OrphanFile(raw.layout.inode_seed(ino, disk.generation));
    let blocks = raw.blocks_of(ino, &disk)?.into_iter().map(|at| {
        let mut block = [0; BLOCK_BYTES];
        orphan_file::fill(&mut block, &[]);
        checksum::seal(raw.layout, at, kind, &mut block);
        (at, Arc::new(block))
    });
    write_durably(raw.storage, blocks.collect::<Vec<_>>())?;
    let features = superblock.features();
    let ro_compat = features.ro_compat & !ro_compat::ORPHAN_PRESENT;
    superblock.set_features(Features { ro_compat, ..features });
    Ok(())
}

/// The inodes of the orphan list on the drive, the first one first.
fn raw_orphans(raw: &Raw<'_>, superblock: &Superblock) -> Result<Vec<Ino>, FsError> {
    let first = Ino(superblock.last_orphan());
    orphan_file::walk_list(raw.layout, first, |ino| Ok(Ino(raw.inode(ino)?.dtime)))
}
