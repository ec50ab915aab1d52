//! The bytes of a node of an extent tree.
//!
//! A node is a header of 12 bytes and entries of 12 bytes each. The root lies in `i_block` of the
//! inode and has 4 entries at most; other nodes fill a block and have 340 at most, which leaves 4
//! bytes at the end for the checksum. In a leaf (depth 0) an entry is an extent; above, it is the
//! first logical block and the address of a child.

use crate::block::{BLOCK_BYTES, BlockNo};
use crate::extents::view::is_sound;
use crate::extents::{END, Extent};
use crate::format::inode::I_BLOCK_BYTES;
use crate::format::layout::Layout;

/// The bytes of the header, and of an entry.
const ENTRY_BYTES: usize = 12;
/// The first two bytes of a node.
const MAGIC: u16 = 0xf30a;
/// The most levels below the root.
pub(super) const MAX_DEPTH: usize = 5;
/// The most entries of the root.
pub(super) const ROOT_MAX: usize = I_BLOCK_BYTES / ENTRY_BYTES - 1;
/// The most entries of another node.
pub(super) const NODE_MAX: usize = (BLOCK_BYTES - 4) / ENTRY_BYTES - 1;

/// The most entries of new nodes.
#[cfg(not(test))]
const fn node_max() -> usize {
    NODE_MAX
}

#[cfg(test)]
std::thread_local! {
    /// Tests make deep trees of small nodes.
    pub(super) static TEST_NODE_MAX: core::cell::Cell<usize> =
        const { core::cell::Cell::new(NODE_MAX) };
}

#[cfg(test)]
fn node_max() -> usize {
    TEST_NODE_MAX.get()
}

/// The most blocks of a written extent. The length on the drive of an unwritten one is larger.
pub(super) const MAX_WRITTEN: u32 = 0x8000;
/// The most blocks of an unwritten extent.
pub(super) const MAX_UNWRITTEN: u32 = 0x7fff;

/// An entry.
pub(super) type Raw = [u8; ENTRY_BYTES];

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The entry of a leaf. Its length is in the range that the format has.
pub(super) fn encode(extent: &Extent) -> Raw {
    let len = if extent.unwritten { extent.len + MAX_WRITTEN } else { extent.len };
    let len = u16::try_from(len).expect("an extent has at most 32,768 blocks, 32,767 unwritten");
    let mut raw = [0; ENTRY_BYTES];
    raw[..4].copy_from_slice(&extent.logical.to_le_bytes());
    raw[4..6].copy_from_slice(&len.to_le_bytes());
    let physical = extent.physical.0.to_le_bytes();
    raw[6..8].copy_from_slice(&physical[4..6]);
    raw[8..].copy_from_slice(&physical[..4]);
    raw
}

/// The entry of a node above the leaves: a child, and the first logical block of its first entry.
pub(super) fn encode_child(key: u32, child: BlockNo) -> Raw {
    let mut raw = [0; ENTRY_BYTES];
    raw[..4].copy_from_slice(&key.to_le_bytes());
    raw[4..10].copy_from_slice(&child.0.to_le_bytes()[..6]);
    raw
}

/// The first logical block of an entry of either sort.
pub(super) fn key_of(raw: &Raw) -> u32 {
    u32_at(raw, 0)
}

/// The fields of a header, which fit the bytes.
#[derive(Clone, Copy)]
struct Header {
    len: usize,
    max: usize,
    depth: usize,
}

impl Header {
    /// The header, or `None` if it is damaged.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let header = Self {
            len: usize::from(u16_at(bytes, 2)),
            max: usize::from(u16_at(bytes, 4)),
            depth: usize::from(u16_at(bytes, 6)),
        };
        // A block keeps 4 bytes for the checksum. 60 bytes have no space for 4 entries and a half.
        let fits = if bytes.len() == BLOCK_BYTES { NODE_MAX } else { ROOT_MAX };
        let good = u16_at(bytes, 0) == MAGIC
            && header.max > 0
            && header.max <= fits
            && header.len <= header.max
            && header.depth <= MAX_DEPTH;
        good.then_some(header)
    }
}

/// A node to read. Its header is right.
#[derive(Clone, Copy)]
pub(super) struct Node<'a> {
    bytes: &'a [u8],
    header: Header,
}

impl<'a> Node<'a> {
    /// The node in a block, or in `i_block`; `None` if its header is damaged, or it is empty and is not the
    /// root of an empty file.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let header = Header::parse(bytes)?;
        // Only a root without children is empty.
        let empty = header.len == 0 && (header.depth > 0 || bytes.len() == BLOCK_BYTES);
        (!empty).then_some(Self { bytes, header })
    }

    /// The number of entries.
    pub(super) const fn len(&self) -> usize {
        self.header.len
    }

    /// The number of entries that it may have.
    pub(super) const fn max(&self) -> usize {
        self.header.max
    }

    /// The number of levels below this one.
    pub(super) const fn depth(&self) -> usize {
        self.header.depth
    }

    /// The bytes of the entries from `from` on.
    pub(super) fn entries(&self, from: usize) -> &'a [u8] {
        &self.bytes[ENTRY_BYTES * (1 + from)..ENTRY_BYTES * (1 + self.len())]
    }

    /// The first logical block of entry `i`, which exists.
    pub(super) fn key(&self, i: usize) -> u32 {
        u32_at(self.entries(i), 0)
    }

    /// The child at entry `i`, which exists.
    pub(super) fn child(&self, i: usize) -> BlockNo {
        let entry = self.entries(i);
        BlockNo(u64::from(u32_at(entry, 4)) | u64::from(u16_at(entry, 8)) << 32)
    }

    /// The extent at entry `i`, which exists, as it is on the drive: its length may be 0.
    pub(super) fn extent(&self, i: usize) -> Extent {
        let entry = self.entries(i);
        let len = u32::from(u16_at(entry, 4));
        let unwritten = len > MAX_WRITTEN;
        Extent {
            logical: u32_at(entry, 0),
            len: if unwritten { len - MAX_WRITTEN } else { len },
            physical: BlockNo(u64::from(u32_at(entry, 8)) | u64::from(u16_at(entry, 6)) << 32),
            unwritten,
        }
    }

    /// Whether all entries are in order, and point into the file system.
    pub(super) fn is_sound(&self, layout: &Layout) -> bool {
        let mut next = END;
        for i in (0..self.len()).rev() {
            let good = if self.depth() == 0 {
                is_sound(layout, &self.extent(i), next)
            } else {
                let child = self.child(i);
                u64::from(self.key(i)) < next && child.0 > 0 && layout.contains(child)
            };
            if !good {
                return false;
            }
            next = u64::from(self.key(i));
        }
        true
    }

    /// Whether all blocks that the entries point at are such as `may_have` allows. The entries are
    /// [sound](Self::is_sound).
    pub(super) fn points_at(&self, may_have: &dyn Fn(BlockNo, u32) -> bool) -> bool {
        (0..self.len()).all(|i| {
            if self.depth() == 0 {
                let extent = self.extent(i);
                may_have(extent.physical, extent.len)
            } else {
                may_have(self.child(i), 1)
            }
        })
    }

    /// The number of entries that begin at `logical` or before.
    pub(super) fn position(&self, logical: u32) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.key(middle) <= logical {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }
}

/// A node to edit. Its header is right.
pub(super) struct NodeMut<'a> {
    bytes: &'a mut [u8],
    header: Header,
}

impl<'a> NodeMut<'a> {
    /// The node in a block, or in `i_block`; `None` if its header is damaged.
    pub(super) fn parse(bytes: &'a mut [u8]) -> Option<Self> {
        let header = Header::parse(bytes)?;
        Some(Self { bytes, header })
    }

    /// Makes an empty node of a block, or of `i_block`.
    pub(super) fn init(bytes: &'a mut [u8], depth: usize) -> Self {
        let max = if bytes.len() == BLOCK_BYTES { node_max() } else { ROOT_MAX };
        bytes.fill(0);
        bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&(max as u16).to_le_bytes());
        let mut node = Self { bytes, header: Header { len: 0, max, depth } };
        node.set_depth(depth);
        node
    }

    /// The node to read.
    pub(super) const fn read(&self) -> Node<'_> {
        Node { bytes: self.bytes, header: self.header }
    }

    /// The number of entries.
    pub(super) const fn len(&self) -> usize {
        self.header.len
    }

    /// The number of entries that it may have.
    pub(super) const fn max(&self) -> usize {
        self.header.max
    }

    /// Sets the number of levels below this one.
    pub(super) fn set_depth(&mut self, depth: usize) {
        self.header.depth = depth;
        self.bytes[6..8].copy_from_slice(&(depth as u16).to_le_bytes());
    }

    fn set_len(&mut self, len: usize) {
        self.header.len = len;
        self.bytes[2..4].copy_from_slice(&(len as u16).to_le_bytes());
    }

    /// Removes the entries from `len` on.
    pub(super) fn truncate(&mut self, len: usize) {
        if len < self.len() {
            self.bytes[ENTRY_BYTES * (1 + len)..ENTRY_BYTES * (1 + self.header.len)].fill(0);
            self.set_len(len);
        }
    }

    /// Replaces the entries from `from` on, up to `to`, which exist. The result fits.
    pub(super) fn splice(&mut self, from: usize, to: usize, new: &[Raw]) {
        let old = self.len();
        let len = old - (to - from) + new.len();
        assert!(len <= self.max(), "the caller splits a full node");
        self.bytes.copy_within(
            ENTRY_BYTES * (1 + to)..ENTRY_BYTES * (1 + old),
            ENTRY_BYTES * (1 + from + new.len()),
        );
        for (i, raw) in new.iter().enumerate() {
            let at = ENTRY_BYTES * (1 + from + i);
            self.bytes[at..at + ENTRY_BYTES].copy_from_slice(raw);
        }
        if len < old {
            self.bytes[ENTRY_BYTES * (1 + len)..ENTRY_BYTES * (1 + old)].fill(0);
        }
        self.set_len(len);
    }

    /// Adds entries, as [`Node::entries`] has them, at the end. They fit.
    pub(super) fn append(&mut self, entries: &[u8]) {
        let len = self.len() + entries.len() / ENTRY_BYTES;
        assert!(len <= self.max(), "the caller compares the lengths");
        let end = ENTRY_BYTES * (1 + self.len());
        self.bytes[end..end + entries.len()].copy_from_slice(entries);
        self.set_len(len);
    }

    /// Sets the first logical block of entry `i`, which exists.
    pub(super) fn set_key(&mut self, i: usize, key: u32) {
        assert!(i < self.len(), "the entry exists");
        self.bytes[ENTRY_BYTES * (1 + i)..][..4].copy_from_slice(&key.to_le_bytes());
    }
}
