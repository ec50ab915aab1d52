//! The table of the areas: the block behind the main journal's log.

use crate::block::{BLOCK_BYTES, Block};
use crate::file_journal::record::Epoch;
use crate::format::layout::Layout;
use crate::tid::Tid;

const MAGIC: [u8; 8] = *b"RIOFSTAB";

/// The state of the areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AreasState {
    /// They may have records of this mount.
    Active {
        /// The last durable main transaction when the mount began. The log has 32 bits of a number
        /// only, and this has all of them.
        before: Tid,
    },
    /// A recovery applies the records of this mount that are newer than a main transaction. It may
    /// have committed a part of them, so the journal does not show any more which these are.
    Recovering {
        /// The last durable main transaction before the recovery.
        durable: Tid,
    },
    /// They are empty.
    Empty,
}

/// The table of the areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaTable {
    /// The mount whose records count.
    pub epoch: Epoch,
    /// The state of the areas.
    pub state: AreasState,
    /// The number of areas: one for each data stream.
    pub areas: u16,
    /// The blocks of each area.
    pub area_blocks: u32,
    /// The blocks of the main journal when no area is in use (`s_maxlen`).
    pub full_maxlen: u32,
}

impl AreaTable {
    /// The table as a block.
    #[must_use]
    pub fn encode(&self, layout: &Layout) -> Block {
        let mut block = [0; BLOCK_BYTES];
        block[..8].copy_from_slice(&MAGIC);
        block[16..32].copy_from_slice(&self.epoch.0);
        let (state, durable) = match self.state {
            AreasState::Active { before } => (1_u8, before),
            AreasState::Recovering { durable } => (2, durable),
            AreasState::Empty => (3, Tid(0)),
        };
        block[12] = state;
        block[32..40].copy_from_slice(&durable.0.to_le_bytes());
        block[40..42].copy_from_slice(&self.areas.to_le_bytes());
        block[44..48].copy_from_slice(&self.area_blocks.to_le_bytes());
        block[48..52].copy_from_slice(&self.full_maxlen.to_le_bytes());
        block[52..68].copy_from_slice(&layout.uuid);
        let crc = (layout.crc32c)(0, &block);
        block[8..12].copy_from_slice(&crc.to_le_bytes());
        block
    }

    /// Reads the table; `None` if the block is none, is damaged, or is another file system's.
    #[must_use]
    pub fn decode(layout: &Layout, block: &Block) -> Option<Self> {
        let mut copy = *block;
        copy[8..12].fill(0);
        let crc = (layout.crc32c)(0, &copy);
        if block[..8] != MAGIC || block[8..12] != crc.to_le_bytes() || block[52..68] != layout.uuid
        {
            return None;
        }
        let (mut epoch, mut durable, mut areas) = ([0; 16], [0; 8], [0; 2]);
        epoch.copy_from_slice(&block[16..32]);
        durable.copy_from_slice(&block[32..40]);
        areas.copy_from_slice(&block[40..42]);
        let u32_at = |at: usize| {
            u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        };
        let state = match block[12] {
            1 => AreasState::Active { before: Tid(u64::from_le_bytes(durable)) },
            2 => AreasState::Recovering { durable: Tid(u64::from_le_bytes(durable)) },
            3 => AreasState::Empty,
            _ => return None,
        };
        Some(Self {
            epoch: Epoch(epoch),
            state,
            areas: u16::from_le_bytes(areas),
            area_blocks: u32_at(44),
            full_maxlen: u32_at(48),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::layout;

    #[test]
    fn the_table_is_read_as_it_was_written_and_not_when_a_bit_flips() {
        for state in [
            AreasState::Active { before: Tid(3) },
            AreasState::Recovering { durable: Tid(1 << 40) },
            AreasState::Empty,
        ] {
            let epoch = Epoch(*b"an epoch of test");
            let table =
                AreaTable { epoch, state, areas: 7, area_blocks: 1 << 20, full_maxlen: 1 << 18 };
            let block = table.encode(&layout());
            assert_eq!(AreaTable::decode(&layout(), &block), Some(table));
            for bit in 0..8 * BLOCK_BYTES {
                let mut flipped = block;
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(AreaTable::decode(&layout(), &flipped), None, "bit {bit}");
            }
            let other = Layout { uuid: [7; 16], ..layout() };
            assert_eq!(AreaTable::decode(&other, &block), None);
        }
    }
}
