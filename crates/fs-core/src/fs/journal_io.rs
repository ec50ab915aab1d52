//! The journal's place on the drive: the log, and behind it the table and the areas of file-level
//! records. Replaying the log.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::MAIN_STREAM;
use super::mount::MountError;
use crate::block::{BLOCK_BYTES, Block, BlockNo};
use crate::error::FsError;
use crate::file_journal::area::Area;
use crate::file_journal::record::{Epoch, RECORD_BLOCKS_MAX};
use crate::file_journal::table::{AreaTable, AreasState};
use crate::format::layout::Layout;
use crate::journal::format::{DamagedPart, JournalError, JournalSuperblock};
use crate::journal::recovery::{HomeBlock, Recovery, recover_before};
use crate::raw::Raw;
use crate::storage::{BlockWrite, Content, Placement, Storage, StorageError, StreamNo, WriteGroup};
use crate::sync::Mutex;

/// The blocks of the log that stay, at least.
const LOG_BLOCKS_MIN: u32 = 1024;

/// The usual most blocks of an area: 16 MiB.
pub(super) const AREA_BLOCKS_MAX: u32 = 4096;

/// The blocks of the log that one read gets.
const READ_BLOCKS: usize = 64;

/// The blocks of a group, at most.
const GROUP_BLOCKS_MAX: usize = 64;

/// Writes blocks in place on the main stream, and waits until they are durable.
pub(super) fn write_durably(
    storage: &dyn Storage,
    writes: impl IntoIterator<Item = (BlockNo, Arc<Block>)>,
) -> Result<(), StorageError> {
    let mut writes = writes.into_iter().peekable();
    while writes.peek().is_some() {
        let group: Vec<_> = writes.by_ref().take(GROUP_BLOCKS_MAX).collect();
        write_group(storage, group, writes.peek().is_none())?;
    }
    Ok(())
}

/// Writes a group of blocks in place on the main stream. After the last one it waits until all are
/// durable.
fn write_group(
    storage: &dyn Storage,
    writes: Vec<(BlockNo, Arc<Block>)>,
    is_last: bool,
) -> Result<(), StorageError> {
    let in_place = |(at, data)| BlockWrite { at, data, placement: Placement::InPlace };
    let writes = writes.into_iter().map(in_place).collect();
    let group = WriteGroup { writes, flush: is_last, content: Content::Home, follower: None };
    let seq = storage.submit(MAIN_STREAM, group)?;
    if is_last { storage.wait_durable(MAIN_STREAM, seq) } else { Ok(()) }
}

/// Reads blocks of the journal, many at once: the log and the areas are read from their beginning to
/// their end, and their blocks lie together.
pub(super) struct LogReader<'a> {
    raw: &'a Raw<'a>,
    /// The blocks of the journal.
    blocks: &'a [BlockNo],
    /// The first block that was read ahead, counted in the journal, and the content from there on.
    first: u32,
    ahead: Vec<Block>,
}

impl<'a> LogReader<'a> {
    pub(super) fn new(raw: &'a Raw<'a>, blocks: &'a [BlockNo]) -> Self {
        Self { raw, blocks, first: 0, ahead: Vec::new() }
    }

    /// Reads block `index` of the journal.
    pub(super) fn read(&mut self, index: u32) -> Result<Arc<Block>, FsError> {
        let known = index.checked_sub(self.first).and_then(|n| self.ahead.get(n as usize));
        if let Some(block) = known {
            return Ok(Arc::new(*block));
        }
        let rest = &self.blocks[index as usize..];
        let at = rest[0];
        let follows = |(block, n): &(&BlockNo, u64)| block.0 == *n;
        let together = rest.iter().zip(at.0..).take(READ_BLOCKS).take_while(follows).count();
        let is_inside = self.raw.layout.contains(BlockNo(at.0 + together as u64 - 1));
        self.ahead.resize(together, [0; BLOCK_BYTES]);
        self.first = index;
        // One block that can't be read must not keep the others from being read.
        if !is_inside || self.raw.storage.read(at, self.ahead.as_flattened_mut()).is_err() {
            self.ahead.clear();
            return Ok(Arc::new(self.raw.block(at)?));
        }
        Ok(Arc::new(self.ahead[0]))
    }
}

/// The log of a file system that may not have been unmounted.
#[derive(Debug)]
pub(super) struct FoundLog {
    pub(super) superblock: JournalSuperblock,
    pub(super) recovery: Recovery,
    /// The number of the last durable transaction.
    pub(super) durable: u32,
}

/// Reads the log. `blocks` are the blocks of the journal.
pub(super) fn find_log(raw: &Raw<'_>, blocks: &[BlockNo]) -> Result<FoundLog, MountError> {
    find_log_before(raw, blocks, None)
}

/// As [`find_log`], but the log ends before transaction `before`.
fn find_log_before(
    raw: &Raw<'_>,
    blocks: &[BlockNo],
    before: Option<u32>,
) -> Result<FoundLog, MountError> {
    let first = *blocks.first().ok_or(JournalError::NoSuperblock)?;
    let len = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
    let superblock = JournalSuperblock::decode(raw.layout, &raw.block(first)?, len)?;
    let mut reader = LogReader::new(raw, blocks);
    let recovery =
        recover_before(raw.layout, &superblock, before, &mut |index| reader.read(index))?;
    // The superblock has the number of the first transaction that may be in the log.
    let earlier = superblock.sequence().wrapping_sub(1);
    let durable = recovery.last.unwrap_or(earlier);
    Ok(FoundLog { superblock, recovery, durable })
}

/// Writes home what the log has before its first damaged transaction, and empties the log.
pub(super) fn replay_sound_part(raw: &Raw<'_>, blocks: &[BlockNo]) -> Result<(), MountError> {
    let mut before = None;
    loop {
        let found = find_log_before(raw, blocks, before);
        match found.and_then(|found| replay_log(raw, blocks, &found)) {
            // Only transactions before the last damaged one are read, so this ends.
            Err(MountError::Journal(JournalError::DamagedTransaction { sequence, .. })) => {
                before = Some(sequence);
            }
            replayed => return replayed,
        }
    }
}

/// Writes the blocks of the log's transactions home, and empties the log.
pub(super) fn replay_log(
    raw: &Raw<'_>,
    blocks: &[BlockNo],
    found: &FoundLog,
) -> Result<(), MountError> {
    let FoundLog { superblock, recovery, .. } = found;
    if superblock.start() == 0 {
        return Ok(());
    }
    let of_the_journal: BTreeSet<BlockNo> = blocks.iter().copied().collect();
    let mut homes: Vec<_> = recovery.homes.iter().collect();
    if let Some(home) = homes.iter().find(|home| of_the_journal.contains(&home.at)) {
        let what = DamagedPart::Tag(home.at);
        return Err(JournalError::DamagedTransaction { what, sequence: home.sequence }.into());
    }
    // In the order of the log, and not all in memory at a time.
    homes.sort_by_key(|home| home.copy);
    let mut reader = LogReader::new(raw, blocks);
    let mut groups = homes.chunks(GROUP_BLOCKS_MAX).peekable();
    while let Some(group) = groups.next() {
        let mut load = |home: &&HomeBlock| {
            Ok((home.at, recovery.load(home, &mut |index| reader.read(index))?))
        };
        let writes: Result<_, JournalError> = group.iter().map(&mut load).collect();
        write_group(raw.storage, writes?, groups.peek().is_none())?;
    }
    let emptied = Arc::new(recovery.emptied(superblock).encode(raw.layout));
    write_durably(raw.storage, [(blocks[0], emptied)])?;
    Ok(())
}

/// How the blocks of a journal are divided: log, table, areas.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    /// The blocks of the log; the table comes next.
    pub(super) maxlen: u32,
    pub(super) areas: u16,
    pub(super) area_blocks: u32,
}

impl Division {
    /// Half of a journal of `blocks` blocks is for `areas` areas, one for each data stream, of
    /// `area_max` blocks at most.
    pub(super) fn new(blocks: u32, areas: u16, area_max: u32) -> Result<Self, JournalError> {
        let count = u32::from(areas);
        let area_blocks = (blocks / 2 / count.max(1)).min(area_max);
        let maxlen = blocks.saturating_sub(1 + area_blocks * count);
        if area_blocks < 2 * RECORD_BLOCKS_MAX as u32 || maxlen < LOG_BLOCKS_MIN {
            let needed = (2 * RECORD_BLOCKS_MAX as u32 * count * 2).max(2 * LOG_BLOCKS_MIN);
            return Err(JournalError::TooSmall { blocks, needed });
        }
        Ok(Self { maxlen, areas, area_blocks })
    }

    /// The table of areas for a mount.
    pub(super) fn table(&self, epoch: Epoch, state: AreasState, full_maxlen: u32) -> AreaTable {
        let Self { areas, area_blocks, .. } = *self;
        AreaTable { epoch, state, areas, area_blocks, full_maxlen }
    }

    /// The blocks of the area of data stream `1 + index`.
    pub(super) fn area<'b>(&self, blocks: &'b [BlockNo], index: u16) -> &'b [BlockNo] {
        let len = self.area_blocks as usize;
        let from = self.maxlen as usize + 1 + usize::from(index) * len;
        &blocks[from..from + len]
    }

    /// Empty areas for all data streams.
    pub(super) fn new_areas(&self, blocks: &[BlockNo]) -> Vec<Mutex<Area>> {
        let area = |index| Area::new(StreamNo(1 + index), self.area(blocks, index).to_vec());
        (0..self.areas).map(|index| Mutex::new(area(index))).collect()
    }
}

/// Reads the table of the areas of a file system that was not unmounted. `None`: the areas are
/// empty, because an unmount had made everything durable.
pub(super) fn read_table(
    raw: &Raw<'_>,
    superblock: &JournalSuperblock,
    blocks: &[BlockNo],
) -> Result<Option<(AreaTable, Division)>, FsError> {
    let Some(&at) = blocks.get(superblock.maxlen() as usize) else { return Ok(None) };
    let damaged = FsError::DamagedBlock { what: "table of the file-level journals", block: at };
    let Some(table) = AreaTable::decode(raw.layout, &raw.block(at)?) else { return Err(damaged) };
    let AreaTable { areas, area_blocks, .. } = table;
    let division = Division { maxlen: superblock.maxlen(), areas, area_blocks };
    let end = u64::from(division.maxlen) + 1 + u64::from(areas) * u64::from(area_blocks);
    if end > blocks.len() as u64 || area_blocks == 0 {
        return Err(damaged);
    }
    Ok(Some((table, division)))
}

/// Writes the table of the areas, durably.
pub(super) fn write_table(
    storage: &dyn Storage,
    layout: &Layout,
    division: &Division,
    blocks: &[BlockNo],
    table: &AreaTable,
) -> Result<(), StorageError> {
    let at = blocks[division.maxlen as usize];
    write_durably(storage, [(at, Arc::new(table.encode(layout)))])
}
