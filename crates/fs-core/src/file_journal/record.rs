//! A record: a file-level transaction in blocks. `docs/riofs.md` draws it byte by byte.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::block::{BLOCK_BYTES, Block, BlockNo, Ino};
use crate::format::inode::INODE_BYTES;
use crate::format::layout::Layout;
use crate::storage::StreamNo;
use crate::tid::Tid;

const MAGIC: [u8; 8] = *b"RIOFSREC";
const HEADER_BYTES: usize = 80;

/// The largest record, in blocks.
pub const RECORD_BLOCKS_MAX: usize = 64;

/// The random number of a mount: a record of another one is not valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epoch(pub [u8; 16]);

/// The number of a record: it grows over all areas of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId(pub u64);

/// The place of a record in its area: the number of blocks that were written there before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

/// The header of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The mount.
    pub epoch: Epoch,
    /// Its number.
    pub id: RecordId,
    /// The main transaction that was running.
    pub tid: Tid,
    /// The stream of the area.
    pub stream: StreamNo,
    /// Its place in the area.
    pub position: Position,
    /// The place of the oldest record of the area that was not obsolete.
    pub oldest: Position,
    /// The place of the first record of the area with the same transaction.
    pub first: Position,
}

/// A change that a record contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The fields of an inode, encoded as on the drive. Extents, link counts of directories, the
    /// number of sectors and the block of attributes in it do not count.
    Inode {
        /// The inode.
        ino: Ino,
        /// Its 256 bytes.
        fields: Box<[u8; INODE_BYTES]>,
    },
    /// The blocks of a range of a file.
    Extent {
        /// The inode.
        ino: Ino,
        /// The first block, counted in the file.
        logical: u32,
        /// The number of blocks.
        len: u32,
        /// Where they lie; `None`: a hole.
        physical: Option<BlockNo>,
        /// They read as zeroes.
        unwritten: bool,
    },
    /// A name in a directory.
    Entry {
        /// The directory.
        parent: Ino,
        /// The inode that the name leads to.
        child: Ino,
        /// The type of the inode, as in a directory entry.
        kind: u8,
        /// The name.
        name: Vec<u8>,
    },
}

/// A record that another one needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dependency {
    /// The stream of the record.
    pub stream: StreamNo,
    /// Its number.
    pub id: RecordId,
}

/// A file-level transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Its header.
    pub header: Header,
    /// The records of other streams that it needs. Those of its own stream are there if it is.
    pub dependencies: Vec<Dependency>,
    /// Its changes.
    pub changes: Vec<Change>,
}

const INODE: u8 = 1;
const EXTENT: u8 = 2;
const ENTRY: u8 = 3;

impl Change {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Inode { ino, fields } => {
                out.extend([INODE, 0, 0, 0]);
                out.extend(ino.0.to_le_bytes());
                out.extend(&fields[..]);
            }
            Self::Extent { ino, logical, len, physical, unwritten } => {
                out.extend([EXTENT, u8::from(*unwritten), u8::from(physical.is_none()), 0]);
                out.extend(ino.0.to_le_bytes());
                out.extend(logical.to_le_bytes());
                out.extend(len.to_le_bytes());
                out.extend(physical.unwrap_or_default().0.to_le_bytes());
            }
            Self::Entry { parent, child, kind, name } => {
                out.extend([ENTRY, *kind, name.len() as u8, 0]);
                out.extend(parent.0.to_le_bytes());
                out.extend(child.0.to_le_bytes());
                out.extend(name);
            }
        }
    }

    fn decode(bytes: &mut &[u8]) -> Option<Self> {
        let [tag, a, b, _] = take(bytes)?;
        Some(match tag {
            INODE => Self::Inode { ino: Ino(take_u32(bytes)?), fields: Box::new(take(bytes)?) },
            EXTENT => {
                let ino = Ino(take_u32(bytes)?);
                let (logical, len) = (take_u32(bytes)?, take_u32(bytes)?);
                let physical = BlockNo(u64::from_le_bytes(take(bytes)?));
                if len == 0 || logical.checked_add(len).is_none() || a > 1 || b > 1 {
                    return None;
                }
                let physical = (b == 0).then_some(physical);
                Self::Extent { ino, logical, len, physical, unwritten: a == 1 }
            }
            ENTRY => {
                let (parent, child) = (Ino(take_u32(bytes)?), Ino(take_u32(bytes)?));
                let (name, rest) = bytes.split_at_checked(usize::from(b))?;
                *bytes = rest;
                if name.is_empty() {
                    return None;
                }
                Self::Entry { parent, child, kind: a, name: name.to_vec() }
            }
            _ => return None,
        })
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    take(bytes).map(u32::from_le_bytes)
}

impl Record {
    /// The number of blocks that these dependencies and changes take.
    #[must_use]
    pub fn blocks_needed(dependencies: &[Dependency], changes: &[Change]) -> usize {
        let mut bytes = HEADER_BYTES + dependencies.len() * 12;
        for change in changes {
            bytes += match change {
                Change::Inode { .. } => 8 + INODE_BYTES,
                Change::Extent { .. } => 24,
                Change::Entry { name, .. } => 12 + name.len(),
            };
        }
        bytes.div_ceil(BLOCK_BYTES)
    }

    /// The record in blocks.
    #[must_use]
    pub fn encode(&self, layout: &Layout) -> Vec<Block> {
        let header = &self.header;
        let mut bytes = Vec::with_capacity(BLOCK_BYTES);
        bytes.extend(MAGIC);
        bytes.extend([0; 4]); // the checksum
        bytes.extend([0; 4]); // the length in bytes
        bytes.extend(header.epoch.0);
        bytes.extend(header.id.0.to_le_bytes());
        bytes.extend(header.tid.0.to_le_bytes());
        bytes.extend(header.position.0.to_le_bytes());
        bytes.extend(header.oldest.0.to_le_bytes());
        bytes.extend(header.stream.0.to_le_bytes());
        bytes.extend((self.dependencies.len() as u16).to_le_bytes());
        bytes.extend((self.changes.len() as u32).to_le_bytes());
        bytes.extend(header.first.0.to_le_bytes());
        debug_assert_eq!(bytes.len(), HEADER_BYTES);
        for dependency in &self.dependencies {
            bytes.extend(dependency.stream.0.to_le_bytes());
            bytes.extend([0; 2]);
            bytes.extend(dependency.id.0.to_le_bytes());
        }
        for change in &self.changes {
            change.encode(&mut bytes);
        }
        let len = bytes.len() as u32;
        bytes[12..16].copy_from_slice(&len.to_le_bytes());
        let crc = (layout.crc32c)(0, &bytes);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        bytes.as_chunks().0.to_vec()
    }

    /// Reads a record. `next` returns the blocks after the first one, each once. `None`: there is
    /// no valid record; a torn one, an old one, or other data.
    pub fn decode(
        layout: &Layout,
        first: &Block,
        next: &mut dyn FnMut(usize) -> Option<Block>,
    ) -> Option<(Self, usize)> {
        if first[..8] != MAGIC {
            return None;
        }
        let len = u32::from_le_bytes([first[12], first[13], first[14], first[15]]) as usize;
        let blocks = len.div_ceil(BLOCK_BYTES);
        if len < HEADER_BYTES || blocks > RECORD_BLOCKS_MAX {
            return None;
        }
        let mut bytes = first.to_vec();
        for index in 1..blocks {
            bytes.extend(next(index)?);
        }
        bytes.truncate(len);
        let crc = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        bytes[8..12].fill(0);
        if (layout.crc32c)(0, &bytes) != crc {
            return None;
        }
        let rest = &mut &bytes[16..];
        let epoch = Epoch(take(rest)?);
        let mut number = || take(rest).map(u64::from_le_bytes);
        let id = RecordId(number()?);
        let tid = Tid(number()?);
        let position = Position(number()?);
        let oldest = Position(number()?);
        let stream = StreamNo(take(rest).map(u16::from_le_bytes)?);
        let dependency_count = take(rest).map(u16::from_le_bytes)?;
        let change_count = take_u32(rest)?;
        let first = Position(take(rest).map(u64::from_le_bytes)?);
        let header = Header { epoch, id, tid, stream, position, oldest, first };
        let mut record = Self { header, ..Self::default() };
        for _ in 0..dependency_count {
            let stream = StreamNo(take(rest).map(u16::from_le_bytes)?);
            let _: [u8; 2] = take(rest)?;
            let id = RecordId(take(rest).map(u64::from_le_bytes)?);
            record.dependencies.push(Dependency { stream, id });
        }
        for _ in 0..change_count {
            record.changes.push(Change::decode(rest)?);
        }
        rest.is_empty().then_some((record, blocks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::layout;
    use proptest::prelude::*;

    fn change() -> impl Strategy<Value = Change> {
        let ino = || (1..1000_u32).prop_map(Ino);
        prop_oneof![
            (ino(), any::<[u8; 32]>()).prop_map(|(ino, bytes)| {
                let mut fields = Box::new([0; INODE_BYTES]);
                fields[100..132].copy_from_slice(&bytes);
                Change::Inode { ino, fields }
            }),
            (ino(), 0..1000_u32, 1..1000_u32, any::<Option<u64>>(), any::<bool>()).prop_map(
                |(ino, logical, len, physical, unwritten)| {
                    let physical = physical.map(BlockNo);
                    Change::Extent { ino, logical, len, physical, unwritten }
                }
            ),
            (ino(), ino(), 1..8_u8, proptest::collection::vec(1..255_u8, 1..=255)).prop_map(
                |(parent, child, kind, name)| Change::Entry { parent, child, kind, name }
            ),
        ]
    }

    fn record() -> impl Strategy<Value = Record> {
        (proptest::collection::vec(change(), 0..40), any::<[u64; 5]>(), 0..4_u16).prop_map(
            |(changes, [id, tid, position, oldest, first], dependencies)| Record {
                header: Header {
                    epoch: Epoch(*b"an epoch of test"),
                    id: RecordId(id),
                    tid: Tid(tid),
                    stream: StreamNo(3),
                    position: Position(position),
                    oldest: Position(oldest),
                    first: Position(first),
                },
                dependencies: (0..dependencies)
                    .map(|n| Dependency { stream: StreamNo(n), id: RecordId(u64::from(n) + 7) })
                    .collect(),
                changes,
            },
        )
    }

    proptest! {
        #[test]
        fn a_record_is_read_as_it_was_written_and_never_when_it_is_torn(
            record in record(), torn in any::<prop::sample::Index>(), bit in 0..8 * BLOCK_BYTES,
        ) {
            let blocks = record.encode(&layout());
            prop_assert_eq!(blocks.len(), Record::blocks_needed(&record.dependencies, &record.changes));
            let read = |blocks: &[Block]| {
                Record::decode(&layout(), &blocks[0], &mut |index| blocks.get(index).copied())
            };
            let (found, len) = read(&blocks).unwrap();
            prop_assert_eq!((&found, len), (&record, blocks.len()));
            let mut zeroed = blocks.clone();
            zeroed[torn.index(blocks.len())] = [0; BLOCK_BYTES];
            // A block may have been zero before: it has the end of a field.
            prop_assert!(read(&zeroed).is_none() || zeroed == blocks);
            let mut flipped = blocks.clone();
            let block = torn.index(blocks.len());
            flipped[block][bit / 8] ^= 1 << (bit % 8);
            // Only the unused bytes at the end are not covered.
            if let Some((found, _)) = read(&flipped) {
                prop_assert_eq!(found, record);
            }
        }
    }
}
