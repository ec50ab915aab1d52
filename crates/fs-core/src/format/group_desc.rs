//! Group descriptors: where the bitmaps and the inode table of a group lie, and its free counts.

use crate::block::{Block, BlockNo};
use crate::format::bytes::{
    high16, high32, low16, low32, set_u16, set_u32, u16_at, u16_pair, u32_at, u32_pair,
};
use crate::format::layout::Layout;

bitflags::bitflags! {
    /// Flags of a group (`bg_flags`). They count only with `metadata_csum` or `uninit_bg`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct GroupFlags: u16 {
        /// No inode is in use, and the inode bitmap is not initialised.
        const INODE_UNINIT = 0x1;
        /// Only metadata of the format is in use, and the block bitmap is not initialised.
        const BLOCK_UNINIT = 0x2;
        /// The whole inode table is initialised.
        const INODE_ZEROED = 0x4;
        /// Other bits are kept.
        const _ = !0;
    }
}

/// A group descriptor, decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupDesc {
    /// The block of the block bitmap.
    pub block_bitmap: BlockNo,
    /// The block of the inode bitmap.
    pub inode_bitmap: BlockNo,
    /// The first block of the inode table.
    pub inode_table: BlockNo,
    /// Free blocks.
    pub free_blocks: u32,
    /// Free inodes.
    pub free_inodes: u32,
    /// Inodes that are directories.
    pub used_dirs: u32,
    /// Flags.
    pub flags: GroupFlags,
    /// The checksum of the block bitmap; 16 bits of it in a descriptor of 32 bytes.
    pub block_bitmap_csum: u32,
    /// The checksum of the inode bitmap; 16 bits of it in a descriptor of 32 bytes.
    pub inode_bitmap_csum: u32,
    /// Inodes at the end of the table that were never used.
    pub itable_unused: u32,
}

const CHECKSUM: usize = 0x1e;

impl GroupDesc {
    /// Decodes a descriptor. Its fields are not checked.
    ///
    /// Panics if `raw` is shorter than the layout's descriptors.
    #[must_use]
    pub fn decode(layout: &Layout, raw: &[u8]) -> Self {
        let raw = &raw[..usize::from(layout.descriptor_bytes)];
        let wide = raw.len() >= 64;
        let block = |low, high| {
            BlockNo(if wide { u32_pair(raw, low, high) } else { u64::from(u32_at(raw, low)) })
        };
        let number =
            |low, high| if wide { u16_pair(raw, low, high) } else { u32::from(u16_at(raw, low)) };
        Self {
            block_bitmap: block(0, 0x20),
            inode_bitmap: block(4, 0x24),
            inode_table: block(8, 0x28),
            free_blocks: number(0xc, 0x2c),
            free_inodes: number(0xe, 0x2e),
            used_dirs: number(0x10, 0x30),
            flags: GroupFlags::from_bits_retain(u16_at(raw, 0x12)),
            block_bitmap_csum: number(0x18, 0x38),
            inode_bitmap_csum: number(0x1a, 0x3a),
            itable_unused: number(0x1c, 0x32),
        }
    }

    /// Encodes the descriptor of `group` with its checksum. Bytes of other fields are kept.
    ///
    /// Panics if `raw` is shorter than the layout's descriptors.
    pub fn encode(&self, layout: &Layout, group: u32, raw: &mut [u8]) {
        let raw = &mut raw[..usize::from(layout.descriptor_bytes)];
        let wide = raw.len() >= 64;
        for (low, high, value) in [
            (0, 0x20, self.block_bitmap.0),
            (4, 0x24, self.inode_bitmap.0),
            (8, 0x28, self.inode_table.0),
        ] {
            set_u32(raw, low, low32(value));
            if wide {
                set_u32(raw, high, high32(value));
            }
        }
        for (low, high, value) in [
            (0xc, 0x2c, self.free_blocks),
            (0xe, 0x2e, self.free_inodes),
            (0x10, 0x30, self.used_dirs),
            (0x18, 0x38, self.block_bitmap_csum),
            (0x1a, 0x3a, self.inode_bitmap_csum),
            (0x1c, 0x32, self.itable_unused),
        ] {
            set_u16(raw, low, low16(value));
            if wide {
                set_u16(raw, high, high16(value));
            }
        }
        set_u16(raw, 0x12, self.flags.bits());
        if let Some(checksum) = descriptor_checksum(layout, group, raw) {
            set_u16(raw, CHECKSUM, checksum);
        }
    }

    /// Whether a descriptor's checksum is right, or there is none.
    ///
    /// Panics if `raw` is shorter than the layout's descriptors.
    #[must_use]
    pub fn verify(layout: &Layout, group: u32, raw: &[u8]) -> bool {
        let raw = &raw[..usize::from(layout.descriptor_bytes)];
        descriptor_checksum(layout, group, raw).is_none_or(|sum| sum == u16_at(raw, CHECKSUM))
    }

    /// Whether the checksum of a block bitmap is right, or there is none.
    #[must_use]
    pub fn verify_block_bitmap(&self, layout: &Layout, bitmap: &Block) -> bool {
        let bits = layout.blocks_per_group;
        bitmap_checksum(layout, bitmap, bits).is_none_or(|sum| sum == self.block_bitmap_csum)
    }

    /// Whether the checksum of an inode bitmap is right, or there is none.
    #[must_use]
    pub fn verify_inode_bitmap(&self, layout: &Layout, bitmap: &Block) -> bool {
        let bits = layout.inodes_per_group;
        bitmap_checksum(layout, bitmap, bits).is_none_or(|sum| sum == self.inode_bitmap_csum)
    }

    /// Sets the checksum of the block bitmap, which is about to be written.
    pub fn seal_block_bitmap(&mut self, layout: &Layout, bitmap: &Block) {
        if let Some(sum) = bitmap_checksum(layout, bitmap, layout.blocks_per_group) {
            self.block_bitmap_csum = sum;
        }
    }

    /// Sets the checksum of the inode bitmap, which is about to be written.
    pub fn seal_inode_bitmap(&mut self, layout: &Layout, bitmap: &Block) {
        if let Some(sum) = bitmap_checksum(layout, bitmap, layout.inodes_per_group) {
            self.inode_bitmap_csum = sum;
        }
    }
}

/// The checksum of a bitmap with `bits` bits, a multiple of 8.
fn bitmap_checksum(layout: &Layout, bitmap: &Block, bits: u32) -> Option<u32> {
    let sum = layout.crc(layout.csum_seed?, &bitmap[..bits as usize / 8]);
    Some(if layout.descriptor_bytes >= 64 { sum } else { sum & 0xffff })
}

/// The checksum of a descriptor; `None` if the format has none.
fn descriptor_checksum(layout: &Layout, group: u32, raw: &[u8]) -> Option<u16> {
    let group = group.to_le_bytes();
    if let Some(seed) = layout.csum_seed {
        let seed = layout.crc(seed, &group);
        let seed = layout.crc(seed, &raw[..CHECKSUM]);
        let seed = layout.crc(seed, &[0; 2]);
        Some(low16(layout.crc(seed, &raw[CHECKSUM + 2..])))
    } else if layout.gdt_csum {
        let crc = crc16(0xffff, &layout.uuid);
        let crc = crc16(crc, &group);
        let crc = crc16(crc, &raw[..CHECKSUM]);
        Some(crc16(crc, &raw[CHECKSUM + 2..]))
    } else {
        None
    }
}

/// The CRC16 of `uninit_bg`: polynomial 0x8005, reflected.
fn crc16(seed: u16, data: &[u8]) -> u16 {
    data.iter().fold(seed, |crc, byte| {
        (0..8).fold(
            crc ^ u16::from(*byte),
            |crc, _| {
                if crc & 1 == 1 { crc >> 1 ^ 0xa001 } else { crc >> 1 }
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::layout;

    #[test]
    fn crc16_has_its_known_value() {
        // CRC-16/MODBUS.
        assert_eq!(crc16(0xffff, b"123456789"), 0x4b37);
    }

    #[test]
    fn a_descriptor_survives_and_unknown_bytes_stay() {
        let desc = GroupDesc {
            block_bitmap: BlockNo(1),
            inode_bitmap: BlockNo(2),
            inode_table: BlockNo(3),
            free_blocks: 4,
            free_inodes: 5,
            used_dirs: 6,
            flags: GroupFlags::INODE_ZEROED,
            block_bitmap_csum: 7,
            inode_bitmap_csum: 8,
            itable_unused: 9,
        };
        for (descriptor_bytes, csum_seed, gdt_csum) in
            [(64, Some(5), false), (32, Some(5), false), (64, None, true), (32, None, true)]
        {
            let layout = Layout { descriptor_bytes, csum_seed, gdt_csum, ..layout() };
            let mut raw = [0xaa; 64];
            // Block numbers with more than 32 bits, and counts with more than 16.
            let desc = if descriptor_bytes == 64 {
                GroupDesc {
                    block_bitmap: BlockNo(0x12_3456_789a),
                    inode_bitmap: BlockNo(0x13_3456_789a),
                    inode_table: BlockNo(0x14_3456_789a),
                    free_blocks: 0x1_2345,
                    itable_unused: 0x1_2346,
                    block_bitmap_csum: 0x1234_5678,
                    ..desc
                }
            } else {
                desc
            };
            desc.encode(&layout, 3, &mut raw);
            assert_eq!(GroupDesc::decode(&layout, &raw), desc);
            assert!(GroupDesc::verify(&layout, 3, &raw));
            assert!(!GroupDesc::verify(&layout, 4, &raw));
            assert_eq!(u32_at(&raw, 0x14), 0xaaaa_aaaa);
            raw[0] ^= 1;
            assert!(!GroupDesc::verify(&layout, 3, &raw));
        }
    }
}
