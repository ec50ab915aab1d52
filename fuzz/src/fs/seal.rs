//! Making checksums right again after damage.

use std::sync::Arc;

use riopipe_fs_core::format::checksum;
use riopipe_fs_core::format::group_desc::GroupDesc;
use riopipe_fs_core::format::layout::Layout;
use riopipe_fs_core::format::superblock::SUPERBLOCK_OFFSET;
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockNo, Ino};

use super::drive::Image;
use super::places::{Place, Reader, Structure};

fn set_le(block: &mut [u8], at: usize, value: u32) {
    block[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn set_be(block: &mut [u8], at: usize, value: u32) {
    block[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Makes the checksum of a structure right. `layout` is that of before the damage, `journal_uuid` the
/// one in the journal's superblock.
pub fn seal(image: &mut Image, layout: &Layout, journal_uuid: [u8; 16], place: &Place) {
    let mut block = image.read(place.at);
    let journal_seed = layout.crc(!0, &journal_uuid);
    match place.structure {
        Structure::Superblock => {
            let from = SUPERBLOCK_OFFSET;
            let sum = !(layout.crc32c)(0, &block[from..from + 0x3fc]);
            set_le(&mut block, from + 0x3fc, sum);
        }
        Structure::Descriptor(group) => seal_descriptor(layout, group, &mut block),
        Structure::BlockBitmap(group) | Structure::InodeBitmap(group) => {
            return seal_bitmap(image, layout, group, &block, place.structure);
        }
        Structure::Inode(ino) => seal_inode(layout, ino, &mut block[place.from..place.from + 256]),
        Structure::Block(_, kind) => checksum::seal(layout, place.at, kind, &mut block),
        Structure::JournalSuperblock => {
            let sum = layout.crc(!0, &block[..0xfc]);
            let sum = layout.crc(layout.crc(sum, &[0; 4]), &block[0x100..1024]);
            set_be(&mut block, 0xfc, sum);
        }
        Structure::LogBlock => {
            set_be(&mut block, BLOCK_BYTES - 4, 0);
            let sum = layout.crc(journal_seed, &block);
            set_be(&mut block, BLOCK_BYTES - 4, sum);
        }
        Structure::LogCommit => {
            set_be(&mut block, 0x10, 0);
            let sum = layout.crc(journal_seed, &block);
            set_be(&mut block, 0x10, sum);
        }
        Structure::LogCopy => {}
        Structure::Table => {
            set_le(&mut block, 8, 0);
            let sum = (layout.crc32c)(0, &block);
            set_le(&mut block, 8, sum);
        }
        Structure::Record => {
            let len = u32_at(&block, 12) as usize;
            if len <= BLOCK_BYTES {
                set_le(&mut block, 8, 0);
                let sum = (layout.crc32c)(0, &block[..len]);
                set_le(&mut block, 8, sum);
            }
        }
    }
    image.write(place.at, Arc::new(block));
}

fn seal_descriptor(layout: &Layout, group: u32, block: &mut Block) {
    let (_, offset) = layout.descriptor_at(group);
    let raw = &mut block[offset..offset + usize::from(layout.descriptor_bytes)];
    GroupDesc::decode(layout, raw).encode(layout, group, raw);
}

fn seal_inode(layout: &Layout, ino: Ino, raw: &mut [u8]) {
    let extra = u16::from_le_bytes([raw[0x80], raw[0x81]]);
    let seed = layout.inode_seed(ino, u32_at(raw, 0x64));
    let has_high = extra >= 4;
    raw[0x7c..0x7e].fill(0);
    if has_high {
        raw[0x82..0x84].fill(0);
    }
    let sum = layout.crc(seed, raw).to_le_bytes();
    raw[0x7c..0x7e].copy_from_slice(&sum[..2]);
    if has_high {
        raw[0x82..0x84].copy_from_slice(&sum[2..]);
    }
}

/// Writes the checksum of a bitmap and the number of its free bits into the descriptor.
fn seal_bitmap(image: &mut Image, layout: &Layout, group: u32, bitmap: &Block, which: Structure) {
    let (at, offset) = layout.descriptor_at(group);
    let mut block = image.read(at);
    let raw = &mut block[offset..offset + usize::from(layout.descriptor_bytes)];
    let mut desc = GroupDesc::decode(layout, raw);
    let free =
        |bits: u32| (0..bits).filter(|n| bitmap[*n as usize / 8] >> (n % 8) & 1 == 0).count();
    if let Structure::BlockBitmap(_) = which {
        desc.free_blocks = free(layout.blocks_in_group(group)) as u32;
        desc.seal_block_bitmap(layout, bitmap);
    } else {
        desc.free_inodes = free(layout.inodes_per_group) as u32;
        desc.seal_inode_bitmap(layout, bitmap);
    }
    desc.encode(layout, group, raw);
    image.write(at, Arc::new(block));
}

/// The first block of the file system that a place of a group's bitmap or descriptor has.
pub fn bitmap_places(reader: &Reader<'_>, group: u32) -> [(Structure, BlockNo); 2] {
    let desc = reader.descriptor(group);
    [
        (Structure::BlockBitmap(group), desc.block_bitmap),
        (Structure::InodeBitmap(group), desc.inode_bitmap),
    ]
}
