//! The bytes of a set of attributes, as they are in an inode and in a block.
//!
//! Entries grow from the front, 4 zero bytes end them, and values grow from the end. An entry has 16
//! bytes and the name, filled up to a multiple of 4; a value is filled up, too.

use alloc::vec::Vec;

use crate::format::bytes::{set_u16, set_u32, u16_at, u32_at};

/// The bytes of an entry without its name.
const ENTRY_BYTES: usize = 16;
/// The bytes that end the entries.
const END_BYTES: usize = 4;

/// An attribute: the number of its prefix, and the rest of its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attribute {
    pub(super) index: u8,
    pub(super) name: Vec<u8>,
    pub(super) value: Vec<u8>,
}

impl Attribute {
    /// The bytes that it needs.
    const fn bytes(&self) -> usize {
        padded(ENTRY_BYTES + self.name.len()) + padded(self.value.len())
    }

    /// Whether it is called so.
    pub(super) fn is(&self, index: u8, name: &[u8]) -> bool {
        self.index == index && self.name == name
    }

    /// The order of the entries in a block.
    pub(super) fn key(&self) -> (u8, usize, &[u8]) {
        (self.index, self.name.len(), &self.name)
    }
}

const fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(4)
}

/// A set of attributes to read. All of it is checked.
#[derive(Clone, Copy)]
pub(super) struct Area<'a> {
    bytes: &'a [u8],
    first: usize,
    end: usize,
}

/// An attribute in its area.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a> {
    pub(super) index: u8,
    pub(super) name: &'a [u8],
    pub(super) value: &'a [u8],
}

impl<'a> Area<'a> {
    /// The set whose first entry is at `first`, and whose offsets of values count from the beginning
    /// of `bytes`. `None` if it is damaged, or has a value in an inode of its own, which needs the
    /// feature `ea_inode`.
    pub(super) fn parse(bytes: &'a [u8], first: usize) -> Option<Self> {
        let mut at = first;
        while u32_at(bytes.get(at..at + END_BYTES)?, 0) != 0 {
            let header = bytes.get(at..at + ENTRY_BYTES)?;
            at += padded(ENTRY_BYTES + usize::from(header[0]));
        }
        let area = Self { bytes, first, end: at };
        let mut at = first;
        while at < area.end {
            let header = &bytes[at..at + ENTRY_BYTES];
            let (offset, size) = (usize::from(u16_at(header, 2)), u32_at(header, 8) as usize);
            let is_inside = size == 0
                || size <= bytes.len()
                    && offset >= area.end + END_BYTES
                    && offset + padded(size) <= bytes.len();
            if u32_at(header, 4) != 0 || !is_inside {
                return None;
            }
            at += padded(ENTRY_BYTES + usize::from(header[0]));
        }
        Some(area)
    }

    /// The attributes, in their order in the area.
    pub(super) fn entries(self) -> impl Iterator<Item = Entry<'a>> {
        let mut at = self.first;
        core::iter::from_fn(move || {
            // `parse` checked all the offsets.
            (at < self.end).then(|| {
                let header = &self.bytes[at..at + ENTRY_BYTES];
                let name = &self.bytes[at + ENTRY_BYTES..][..usize::from(header[0])];
                let (offset, size) = (usize::from(u16_at(header, 2)), u32_at(header, 8) as usize);
                let value = if size == 0 { &[][..] } else { &self.bytes[offset..offset + size] };
                at += padded(ENTRY_BYTES + name.len());
                Entry { index: header[1], name, value }
            })
        })
    }

    /// Copies of the attributes.
    pub(super) fn to_vec(self) -> Vec<Attribute> {
        let copy = |entry: Entry<'_>| Attribute {
            index: entry.index,
            name: entry.name.to_vec(),
            value: entry.value.to_vec(),
        };
        self.entries().map(copy).collect()
    }
}

/// Whether the attributes fit in an area of `bytes` bytes from the first entry on.
pub(super) fn fit(attributes: &[Attribute], bytes: usize) -> bool {
    attributes.iter().map(Attribute::bytes).sum::<usize>() + END_BYTES <= bytes
}

/// Writes a set, which [fits](fit). With `hashed`, as in a block, entries have their hashes. Returns
/// the hash of all entries.
pub(super) fn write(bytes: &mut [u8], first: usize, attributes: &[Attribute], hashed: bool) -> u32 {
    bytes[first..].fill(0);
    let (mut at, mut end, mut all) = (first, bytes.len(), Some(0_u32));
    for attribute in attributes {
        let Attribute { index, name, value } = attribute;
        bytes[at + ENTRY_BYTES..at + ENTRY_BYTES + name.len()].copy_from_slice(name);
        bytes[at] = u8::try_from(name.len()).expect("a name has at most 255 bytes");
        bytes[at + 1] = *index;
        if !value.is_empty() {
            end -= padded(value.len());
            bytes[end..end + value.len()].copy_from_slice(value);
            set_u16(bytes, at + 2, end as u16);
            set_u32(bytes, at + 8, value.len() as u32);
        }
        if hashed {
            let hash = hash(name, &bytes[end..end + padded(value.len())]);
            set_u32(bytes, at + 12, hash);
            all = all.filter(|_| hash != 0).map(|all| all.rotate_left(16) ^ hash);
        }
        at += padded(ENTRY_BYTES + name.len());
    }
    all.unwrap_or(0)
}

/// The hash of an entry; the value is filled up.
fn hash(name: &[u8], value: &[u8]) -> u32 {
    let name = name.iter().fold(0_u32, |hash, byte| hash.rotate_left(5) ^ u32::from(*byte));
    value.chunks_exact(4).fold(name, |hash, word| hash.rotate_left(16) ^ u32_at(word, 0))
}
