//! A block of directory entries.
//!
//! An entry has the number of the inode (4 bytes), its own length up to the next entry (2), the
//! length of the name (1), the type of the file (1), and the name. Entries fill the block without a
//! gap; inode 0 stands for unused space. With checksums, the last 12 bytes are an unused entry of
//! type 0xde that has the checksum.

use super::{Entry, FileKind};
use crate::block::{BLOCK_BYTES, Block, BlockNo, Ino};
use crate::error::FsError;
use crate::format::bytes::{set_u16, set_u32, u16_at, u32_at};
use crate::format::checksum::{DIR_TAIL_BYTES, DIR_TAIL_TYPE};
use crate::format::layout::Layout;

/// The bytes before the name.
const HEADER: usize = 8;
/// The length of the shortest entry.
const SHORTEST: usize = 12;
/// Where the entry `..` is in the first block: after `.`.
pub(super) const PARENT_OFFSET: usize = SHORTEST;

/// The bytes that an entry with a name of this length needs.
pub(super) const fn entry_bytes(name_len: usize) -> usize {
    (HEADER + name_len).next_multiple_of(4)
}

/// The bytes of a block that entries fill.
pub(super) const fn area(layout: &Layout) -> usize {
    if layout.csum_seed.is_some() { BLOCK_BYTES - DIR_TAIL_BYTES } else { BLOCK_BYTES }
}

/// Whether a block whose entries need `used` bytes is better cleared of the space between its
/// entries than split, when `name` is added.
pub(super) const fn is_sparse(layout: &Layout, used: usize, name: &[u8]) -> bool {
    used + entry_bytes(name.len()) <= area(layout) / 4 * 3
}

/// A block of entries, to be read.
#[derive(Clone, Copy)]
pub(super) struct Leaf<'a> {
    block: &'a Block,
    at: BlockNo,
    area: usize,
    inodes: u32,
}

/// One entry, used or not.
#[derive(Clone, Copy)]
pub(super) struct RawEntry<'a> {
    pub(super) offset: usize,
    pub(super) bytes: usize,
    /// 0 if unused.
    pub(super) ino: u32,
    pub(super) kind: FileKind,
    pub(super) name: &'a [u8],
}

impl RawEntry<'_> {
    /// The bytes that the entry needs; the rest up to its length is free.
    const fn used(&self) -> usize {
        if self.ino == 0 { 0 } else { entry_bytes(self.name.len()) }
    }

    pub(super) const fn entry(&self) -> Entry {
        Entry { ino: Ino(self.ino), kind: self.kind }
    }
}

/// An entry that was found.
pub(super) struct Found {
    pub(super) offset: usize,
    /// The entry before it in the block.
    pub(super) before: Option<usize>,
    pub(super) entry: Entry,
}

/// The place for a new entry.
pub(super) enum Slot {
    /// The name is there already.
    Exists,
    /// In the unused space of the entry at this offset.
    At(usize),
    /// No entry has enough space. The used entries need `used` bytes in all.
    Full { used: usize },
}

impl<'a> Leaf<'a> {
    pub(super) const fn new(layout: &Layout, at: BlockNo, block: &'a Block) -> Self {
        Self { block, at, area: area(layout), inodes: layout.inodes }
    }

    pub(super) const fn damaged(&self) -> FsError {
        FsError::DamagedBlock { what: "directory entry", block: self.at }
    }

    /// The entry at `offset`, which is below `area`.
    pub(super) fn decode(&self, offset: usize) -> Result<RawEntry<'a>, FsError> {
        if self.area - offset < SHORTEST {
            return Err(self.damaged());
        }
        let ino = u32_at(self.block, offset);
        let bytes = usize::from(u16_at(self.block, offset + 4));
        let name_len = usize::from(self.block[offset + 6]);
        if bytes < SHORTEST
            || !bytes.is_multiple_of(4)
            || bytes > self.area - offset
            || entry_bytes(name_len) > bytes
            || ino > self.inodes
            || (ino != 0 && name_len == 0)
        {
            return Err(self.damaged());
        }
        let name = &self.block[offset + HEADER..offset + HEADER + name_len];
        Ok(RawEntry { offset, bytes, ino, kind: FileKind(self.block[offset + 7]), name })
    }

    /// All entries, used or not, in the order of the block. Ends after an error.
    pub(super) fn entries(self) -> impl Iterator<Item = Result<RawEntry<'a>, FsError>> {
        let mut offset = 0;
        core::iter::from_fn(move || {
            if offset >= self.area {
                return None;
            }
            let entry = self.decode(offset);
            offset = entry.as_ref().map_or(self.area, |entry| entry.offset + entry.bytes);
            Some(entry)
        })
    }

    /// The used entries.
    pub(super) fn used(self) -> impl Iterator<Item = Result<RawEntry<'a>, FsError>> {
        self.entries().filter(|entry| !matches!(entry, Ok(entry) if entry.ino == 0))
    }

    /// The entry of `name`.
    pub(super) fn find(self, name: &[u8]) -> Result<Option<Found>, FsError> {
        let mut before = None;
        for raw in self.entries() {
            let raw = raw?;
            if raw.ino != 0 && raw.name == name {
                return Ok(Some(Found { offset: raw.offset, before, entry: raw.entry() }));
            }
            before = Some(raw.offset);
        }
        Ok(None)
    }

    /// A place for `name`. All entries are read, so an existing name is found.
    pub(super) fn slot(self, name: &[u8]) -> Result<Slot, FsError> {
        let need = entry_bytes(name.len());
        let mut place = None;
        let mut used = 0;
        for raw in self.entries() {
            let raw = raw?;
            if raw.ino != 0 && raw.name == name {
                return Ok(Slot::Exists);
            }
            if place.is_none() && raw.bytes - raw.used() >= need {
                place = Some(raw.offset);
            }
            used += raw.used();
        }
        Ok(place.map_or(Slot::Full { used }, Slot::At))
    }

    /// The inode of `..`, which is the second entry of a directory after `.`.
    pub(super) fn parent(self) -> Result<Ino, FsError> {
        let dot = self.decode(0)?;
        if dot.name != b"." || dot.ino == 0 || dot.bytes != SHORTEST {
            return Err(self.damaged());
        }
        let parent = self.decode(PARENT_OFFSET)?;
        if parent.name != b".." || parent.ino == 0 {
            return Err(self.damaged());
        }
        Ok(Ino(parent.ino))
    }
}

/// Writes an entry. There are `bytes` bytes at `offset`, and the name fits.
fn write(block: &mut Block, offset: usize, bytes: usize, name: &[u8], entry: Entry) {
    set_u32(block, offset, entry.ino.0);
    // A block has 4096 bytes, and a name 255.
    set_u16(block, offset + 4, bytes as u16);
    block[offset + 6] = name.len() as u8;
    block[offset + 7] = entry.kind.0;
    let padded = &mut block[offset + HEADER..offset + entry_bytes(name.len())];
    padded.fill(0);
    padded[..name.len()].copy_from_slice(name);
}

/// Inserts an entry into the unused space of the entry at `slot`, as [`Leaf::slot`] found it.
pub(super) fn insert(block: &mut Block, slot: usize, name: &[u8], entry: Entry) {
    let bytes = usize::from(u16_at(block, slot + 4));
    if u32_at(block, slot) == 0 {
        write(block, slot, bytes, name, entry);
    } else {
        let used = entry_bytes(usize::from(block[slot + 6]));
        set_u16(block, slot + 4, used as u16);
        write(block, slot + used, bytes - used, name, entry);
    }
}

/// Sets inode and type of the entry at `offset`.
pub(super) fn set(block: &mut Block, offset: usize, entry: Entry) {
    set_u32(block, offset, entry.ino.0);
    block[offset + 7] = entry.kind.0;
}

/// Removes an entry that was found. Its bytes go to the entry before it. If it is the first, it
/// remains as unused space. No other entry moves.
pub(super) fn remove(block: &mut Block, found: &Found) {
    let bytes = usize::from(u16_at(block, found.offset + 4));
    block[found.offset..found.offset + bytes].fill(0);
    if let Some(before) = found.before {
        let merged = usize::from(u16_at(block, before + 4)) + bytes;
        set_u16(block, before + 4, merged as u16);
    } else {
        set_u16(block, found.offset + 4, bytes as u16);
    }
}

/// Fills a block with entries, from its beginning and without unused space between them.
pub(super) struct Builder<'a> {
    block: &'a mut Block,
    area: usize,
    last: usize,
    end: usize,
}

impl<'a> Builder<'a> {
    /// Begins with no entries. [`area`] bytes of the block are filled.
    pub(super) fn new(area: usize, block: &'a mut Block) -> Self {
        block.fill(0);
        Self { block, area, last: 0, end: 0 }
    }

    /// Adds an entry. Returns `None` if there is no space.
    pub(super) fn push(&mut self, name: &[u8], entry: Entry) -> Option<()> {
        let bytes = entry_bytes(name.len());
        if bytes > self.area - self.end {
            return None;
        }
        write(self.block, self.end, bytes, name, entry);
        self.last = self.end;
        self.end += bytes;
        Some(())
    }

    /// Adds the space after the last entry to it, and writes the entry for the checksum.
    pub(super) fn finish(self) {
        set_u16(self.block, self.last + 4, (self.area - self.last) as u16);
        if self.area < BLOCK_BYTES {
            set_u16(self.block, self.area + 4, DIR_TAIL_BYTES as u16);
            self.block[self.area + 7] = DIR_TAIL_TYPE;
        }
    }
}
