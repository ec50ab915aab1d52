//! A mounted file system.

mod attributes;
mod barriers;
mod commit;
mod deletion;
mod directory_move;
mod durability;
mod file;
mod file_commit;
mod holes;
mod journal_io;
mod journal_mode;
mod mount;
mod namespace;
mod page_limit;
mod recovery;
mod retirement;
mod space;
mod unmounted;
mod write_back;

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

pub use self::attributes::{Attr, SetAttr, StatFs, Times};
pub use self::directory_move::{RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT};
pub use self::holes::{SeekTo, mode};
use self::journal_io::Division;
use self::journal_mode::DataStreams;
pub use self::journal_mode::JournalMode;
pub use self::mount::{MountError, MountOptions, MountReport};
pub use self::namespace::NewInode;
pub use self::unmounted::{clear_errors, give_up_recovery};
use crate::block::{BLOCK_BYTES, Block, BlockKind, BlockNo, Ino};
use crate::cache::BlockCache;
use crate::credits::Credits;
use crate::error::FsError;
use crate::extents::{self, Budget};
use crate::file_journal::area::Area;
use crate::format::checksum;
use crate::format::inode::{DiskInode, INODE_BYTES, file_type};
use crate::format::layout::Layout;
use crate::format::superblock::Superblock;
use crate::groups::{Groups, InodePlace};
use crate::inode_table::{Inode, InodeTable};
use crate::journal::MainJournal;
use crate::op::Op;
use crate::orphans::Orphans;
use crate::running::Running;
use crate::storage::{Storage, StorageError, StreamNo};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Mutex, RwLock};
use crate::tid::Tid;

/// The program for which a call is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its other groups.
    pub groups: Vec<u32>,
    /// The permissions that new files do not get.
    pub umask: u16,
}

impl Caller {
    /// Whether a file of group `gid` may get the set-group-ID bit.
    fn may_set_group_id(&self, gid: u32) -> bool {
        self.uid == 0 || self.gid == gid || self.groups.contains(&gid)
    }
}

/// A mounted file system. All calls may be made by any thread at any time.
///
/// A call that returns has changed the memory only. `fsync`, `sync` and the commits of the
/// background make changes durable.
pub struct Fs {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) layout: Layout,
    options: MountOptions,
    /// Blocks that files can't use.
    overhead: u64,
    /// The blocks of the journal, and how they are divided.
    journal_blocks: Vec<BlockNo>,
    division: Option<Division>,
    superblock: Mutex<Superblock>,
    pub(crate) groups: Groups,
    pub(crate) cache: BlockCache,
    pub(crate) inodes: InodeTable,
    /// Operations have it for reading. A commit's cut takes it for writing.
    pub(crate) gate: RwLock<()>,
    pub(crate) running: Mutex<Running>,
    journal: Mutex<MainJournal>,
    /// The blocks of its log.
    log_blocks: AtomicUsize,
    /// The blocks that operations that are not finished may change.
    pub(crate) credits: Credits,
    /// The mutex of dropping pages, because there are too many.
    limiting: Mutex<()>,
    /// The mutex of commits: one is submitted at a time.
    committing: Mutex<retirement::CommitState>,
    /// The last durable transaction.
    durable: AtomicU64,
    /// The last group of each stream that a durable commit has covered.
    covered: Vec<AtomicU64>,
    orphans: Mutex<Orphans>,
    /// The mutex of directory moves.
    directory_moves: Mutex<()>,
    /// The mutex of changes of attributes in blocks, which several inodes may share.
    shared_attributes: Mutex<()>,
    /// The last transaction that has moved a directory: until it is durable, no file-level record
    /// is written, because paths may lead through the directory.
    directory_moved: AtomicU64,
    /// The area of each data stream, from stream 1 on; none in mode `ext4`.
    areas: Vec<Mutex<Area>>,
    /// The number of the next file-level record.
    next_record: AtomicU64,
    /// The blocks of file-level records that recovery will apply: first block and end.
    awaited: Mutex<BTreeMap<u64, u64>>,
    is_recovering: AtomicBool,
    barriers: Mutex<barriers::Barriers>,
    /// The mutex of submitting held files.
    submitting_held: Mutex<()>,
    /// The generation of the next new inode.
    next_generation: AtomicU32,
    /// The time of the last call, in seconds since 1970.
    now_seconds: AtomicU64,
    /// The time of the next periodic commit, in seconds since 1970.
    next_commit_seconds: AtomicU64,
    /// Whether a commit is due before that, because an area is filling up.
    is_commit_due: AtomicBool,
    /// Called when that happens.
    waker: Mutex<Option<Waker>>,
    is_read_only: AtomicBool,
    /// An unmount has begun: programs change nothing any more.
    is_closing: AtomicBool,
    /// The reason, if an error has made the file system read-only.
    failure: Mutex<Option<String>>,
    /// Whether the drive has that, too, or could not get it.
    is_failure_recorded: AtomicBool,
    /// How often freed space has become free to be used again.
    reuses: AtomicU64,
    stat: stat::Counters,
}

pub(crate) use barriers::Held;
mod stat;
pub use stat::{Fallback, Fill, FsLoad, FsStat};

/// The blocks that a usual operation changes at most.
const OPERATION_BLOCKS: usize = 48;

/// Called when [`Fs::tick`] has work before its time.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// The stream of the main journal and of checkpoints.
pub(crate) const MAIN_STREAM: StreamNo = StreamNo(0);

impl core::fmt::Debug for Fs {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Fs").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Fs {
    /// Begins an operation of a program that changes the file system. A transaction must fit into
    /// the log. So the running transaction is committed first if it is large, or if it would be too
    /// large with all that the operations of other threads may change.
    pub(crate) fn begin(&self) -> Result<Op<'_>, FsError> {
        self.check_open()?;
        self.begin_own(Held::First)
    }

    /// # Errors
    /// [`FsError::ReadOnly`]: an unmount has begun.
    fn check_open(&self) -> Result<(), FsError> {
        if self.is_closing.load(Ordering::Acquire) { Err(FsError::ReadOnly) } else { Ok(()) }
    }

    /// Begins an operation that is not one of a program, or a later step of one. An unmount does
    /// such operations, too.
    pub(crate) fn begin_own(&self, held: Held) -> Result<Op<'_>, FsError> {
        self.begin_with(OPERATION_BLOCKS, held)
    }

    /// Begins an operation of a program that may remove as much as [`removal`](Self::removal).
    pub(crate) fn begin_removal(&self) -> Result<Op<'_>, FsError> {
        self.check_open()?;
        self.begin_own_removal(Held::First)
    }

    /// As [`begin_removal`](Self::begin_removal), for a later step, or one of an unmount.
    pub(crate) fn begin_own_removal(&self, held: Held) -> Result<Op<'_>, FsError> {
        self.begin_with(self.operation_max() / 2, held)
    }

    /// Begins an operation of a program that may change as much as
    /// [`operation_max`](Self::operation_max).
    pub(crate) fn begin_large(&self) -> Result<Op<'_>, FsError> {
        self.check_open()?;
        self.begin_with(self.operation_max(), Held::First)
    }

    /// Begins an operation that may change `credits` blocks.
    fn begin_with(&self, credits: usize, held: Held) -> Result<Op<'_>, FsError> {
        self.check_writable()?;
        while !self.take_credits(credits, self.operation_max()) {
            // It waits for the operations that have begun.
            self.commit_running(held)?;
        }
        let op = Op::begin(self, credits);
        // An unmount may have ended during the wait for the gate.
        self.check_writable()?;
        Ok(op)
    }

    /// Takes the right to `blocks` more blocks of the running transaction. Whether it was taken: not
    /// if that has more than `running_max` blocks, or if it would not fit into the log with all
    /// rights that were taken.
    pub(crate) fn take_credits(&self, blocks: usize, running_max: usize) -> bool {
        // An operation that finishes adds its blocks under this lock, before its right ends. So
        // each is counted here.
        let running = self.running.lock();
        let needed = running.blocks_needed() + self.groups.blocks_to_render();
        needed <= running_max
            && self.credits.take(blocks, needed, self.log_blocks.load(Ordering::Relaxed))
    }

    /// The blocks that one operation may edit.
    pub(crate) fn operation_max(&self) -> usize {
        self.log_blocks.load(Ordering::Relaxed) / 4
    }

    /// The limits of one step of a long removal.
    pub(crate) fn removal(&self) -> Budget {
        // An extent may be the last one of a node, and the only one in its group: with the node, the
        // bitmap and the descriptor these are three blocks, and an extent may lie in two groups.
        let extents = (self.operation_max() / 2).saturating_sub(24) / 5;
        // Small groups: an extent may lie in more of them. With these blocks, there are four more.
        let blocks = u64::from(self.layout.blocks_per_group) * 4;
        Budget { blocks: blocks.min(8192), extents: extents.max(1) }
    }

    /// Whether the file system is read-only: it was mounted so, or an error has made it so
    /// ([`failure`](Self::failure)).
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.is_read_only.load(Ordering::Acquire)
    }

    /// The error that has made the file system read-only.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().clone()
    }

    fn check_writable(&self) -> Result<(), FsError> {
        if self.is_read_only() { Err(FsError::ReadOnly) } else { Ok(()) }
    }

    /// Makes the file system read-only after an error that may have lost changes: nothing later may
    /// seem to be durable.
    pub(crate) fn fail(&self, doing: &str, error: &dyn core::fmt::Display) -> FsError {
        let text = alloc::format!("{doing}: {error}");
        self.failure.lock().get_or_insert_with(|| text.clone());
        self.is_read_only.store(true, Ordering::Release);
        FsError::Io(text)
    }

    /// # Errors
    /// The block is not a block of the file system.
    pub(crate) fn check_block(&self, at: BlockNo) -> Result<(), FsError> {
        if at.0 != 0 && self.layout.contains(at) {
            Ok(())
        } else {
            Err(FsError::DamagedBlock { what: "pointer (out of range)", block: at })
        }
    }

    /// A metadata block as the finished operations have left it.
    pub(crate) fn read_meta(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError> {
        loop {
            let missed = match self.cache.get(at, kind)? {
                Ok(data) => return Ok(data),
                Err(missed) => missed,
            };
            let data = self.load_meta(at, kind)?;
            if let Some(data) = self.cache.insert_read(at, kind, data, missed, self.durable()) {
                return Ok(data);
            }
        }
    }

    /// Reads a metadata block that is not in the cache.
    fn load_meta(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError> {
        if at.0 >= self.layout.blocks {
            return Err(FsError::DamagedBlock { what: "pointer (out of range)", block: at });
        }
        // The block of a durable commit may not be at home yet.
        let committed = self.journal.lock().committed(at);
        let data = match committed {
            Some(data) => data,
            None => {
                let mut data = [0; BLOCK_BYTES];
                self.storage.read(at, &mut data)?;
                Arc::new(data)
            }
        };
        checksum::verify(&self.layout, at, kind, &data)?;
        if let BlockKind::ExtentNode(_) = kind {
            extents::check_node(&self.layout, at, &data, &|at, len| self.may_have(at, len))?;
        }
        Ok(data)
    }

    /// The last durable transaction.
    pub(crate) fn durable(&self) -> Tid {
        Tid(self.durable.load(Ordering::Acquire))
    }

    /// An inode that is in use.
    pub(crate) fn inode(&self, ino: Ino) -> Result<Arc<Inode>, FsError> {
        loop {
            let missed = match self.inodes.get(ino) {
                Ok(inode) if inode.is_gone() => return Err(FsError::Stale(ino)),
                Ok(inode) => return Ok(inode),
                Err(missed) => missed,
            };
            if self.is_special(ino) {
                return Err(FsError::DamagedInode { what: "entry of a special inode", ino });
            }
            let disk = self.read_inode(ino)?;
            if disk.links == 0 && !self.orphans.lock().contains(ino) {
                return Err(FsError::Stale(ino));
            }
            self.check_inode(ino, &disk)?;
            self.inodes.insert_read(self.inodes.make(ino, disk), missed);
        }
    }

    /// Whether an inode is one of the format's own, to which no name leads.
    fn is_special(&self, ino: Ino) -> bool {
        let is_reserved = ino < self.layout.first_ino && ino != Ino::ROOT;
        is_reserved || ino == self.layout.journal_ino || Some(ino) == self.layout.orphan_file
    }

    /// Whether a file or a directory may have these blocks: no other structure of the format has
    /// them. A write to them would damage the whole file system.
    pub(crate) fn may_have(&self, first: BlockNo, blocks: u32) -> bool {
        !self.groups.is_system_block(first, blocks)
    }

    /// Checks an inode that was read from the drive. It is done once, when it comes into memory.
    fn check_inode(&self, ino: Ino, disk: &DiskInode) -> Result<(), FsError> {
        let known = [
            file_type::REGULAR,
            file_type::DIRECTORY,
            file_type::SYMLINK,
            file_type::CHARACTER,
            file_type::BLOCK,
            file_type::FIFO,
            file_type::SOCKET,
        ];
        if !known.contains(&disk.file_type()) {
            return Err(FsError::DamagedInode { what: "type", ino });
        }
        if disk.xattr_block != BlockNo(0) && !self.may_have(disk.xattr_block, 1) {
            return Err(FsError::DamagedInode { what: "block of attributes", ino });
        }
        extents::check_root(&self.layout, ino, disk, &|at, len| self.may_have(at, len))
    }

    /// Reads an inode from the inode table.
    fn read_inode(&self, ino: Ino) -> Result<DiskInode, FsError> {
        if ino.0 == 0 || ino.0 > self.layout.inodes {
            return Err(FsError::DamagedInode { what: "number", ino });
        }
        let (place, block) = self.read_table_block(ino)?;
        let (inodes, _) = block.as_chunks::<INODE_BYTES>();
        DiskInode::decode(&inodes[place.offset / INODE_BYTES], &self.layout, ino)
    }

    /// The block of the inode table with an inode. It is in the cache then.
    fn read_table_block(&self, ino: Ino) -> Result<(InodePlace, Arc<Block>), FsError> {
        loop {
            let at = self.groups.inode_place(ino).block;
            let missed = match self.cache.get(at, BlockKind::Plain)? {
                Ok(data) => return Ok((self.groups.inode_place(ino), data)),
                Err(missed) => missed,
            };
            // A block may not be fresh any more as soon as it was in the cache.
            let place = self.groups.inode_place(ino);
            let data = if place.is_fresh {
                Arc::new([0; BLOCK_BYTES])
            } else {
                self.load_meta(at, BlockKind::Plain)?
            };
            let durable = self.durable();
            let cached = self.cache.insert_read(at, BlockKind::Plain, data, missed, durable);
            if let Some(data) = cached {
                return Ok((place, data));
            }
        }
    }

    /// The area of a data stream.
    fn area(&self, stream: StreamNo) -> &Mutex<Area> {
        &self.areas[usize::from(stream.0) - 1]
    }

    /// The stream for the data of an inode. It is always the same, so that the inode changes hands
    /// never (T15).
    fn stream_of(&self, ino: Ino) -> StreamNo {
        match self.options.mode.keep_order().data {
            DataStreams::Main => MAIN_STREAM,
            DataStreams::OfInode | DataStreams::OfInodeFollowedByMain => {
                let data_streams = u32::from(self.storage.streams() - 1);
                StreamNo(1 + (ino.0 % data_streams) as u16)
            }
        }
    }
}

impl From<StorageError> for FsError {
    fn from(error: StorageError) -> Self {
        Self::Io(error.to_string())
    }
}
