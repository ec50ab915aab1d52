//! The journal's place on the drive: the log, and behind it the table and the areas of file-level
//! records. Replaying the log.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::MAIN_STREAM;
use super::mount::MountError;
use crate::block::{Block, BlockNo};
use crate::error::FsError;
use crate::file_journal::area::Area;
use crate::file_journal::record::{Epoch, RECORD_BLOCKS_MAX};
use crate::file_journal::table::{AreaTable, AreasState};
use crate::format::layout::Layout;
use crate::journal::format::{DamagedPart, JournalError, JournalSuperblock};
use crate::journal::recovery::{Recovery, recover};
use crate::raw::Raw;
use crate::storage::{BlockWrite, Content, Placement, Storage, StorageError, StreamNo, WriteGroup};
use crate::sync::Mutex;

/// The blocks of the log that stay, at least.
const LOG_BLOCKS_MIN: u32 = 1024;

/// The usual most blocks of an area: 16 MiB.
pub(super) const AREA_BLOCKS_MAX: u32 = 4096;

/// The blocks of a group, at most.
const GROUP_BLOCKS_MAX: usize = 64;

/// Writes blocks in place on the main stream, and waits until they are durable.
pub(super) fn write_durably(
    storage: &dyn Storage,
    writes: impl IntoIterator<Item = (BlockNo, Arc<Block>)>,
) -> Result<(), StorageError> {
    let in_place = |(at, data)| BlockWrite { at, data, placement: Placement::InPlace };
    let mut writes = writes.into_iter().map(in_place).peekable();
    while writes.peek().is_some() {
        let group: Vec<_> = writes.by_ref().take(GROUP_BLOCKS_MAX).collect();
        let flush = writes.peek().is_none();
        let group = WriteGroup { writes: group, flush, content: Content::Home };
        let seq = storage.submit(MAIN_STREAM, group)?;
        if flush {
            storage.wait_durable(MAIN_STREAM, seq)?;
        }
    }
    Ok(())
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
    let first = *blocks.first().ok_or(JournalError::NoSuperblock)?;
    let len = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
    let superblock = JournalSuperblock::decode(raw.layout, &raw.block(first)?, len)?;
    let mut read = |index: u32| Ok(Arc::new(raw.block(blocks[index as usize])?));
    let recovery = recover(raw.layout, &superblock, &mut read)?;
    // The superblock has the number of the first transaction that may be in the log.
    let before = superblock.sequence().wrapping_sub(1);
    let durable = recovery.last.unwrap_or(before);
    Ok(FoundLog { superblock, recovery, durable })
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
    let mut read = |index: u32| Ok(Arc::new(raw.block(blocks[index as usize])?));
    let of_the_journal: BTreeSet<BlockNo> = blocks.iter().copied().collect();
    let mut homes = Vec::with_capacity(recovery.homes.len());
    for home in &recovery.homes {
        if of_the_journal.contains(&home.at) {
            let what = DamagedPart::Tag(home.at);
            return Err(JournalError::DamagedTransaction { what, sequence: home.sequence }.into());
        }
        homes.push((home.at, recovery.load(home, &mut read)?));
    }
    write_durably(raw.storage, homes)?;
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
