//! Writing a transaction into the journal.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo};
use crate::format::layout::Layout;
use crate::jbd2::format::{Shape, Tag, needs_escape, set_u32, tag_flag};

/// The number of blocks that a transaction takes in the journal, with its commit block.
#[must_use]
pub fn blocks_needed(shape: &Shape, blocks: usize, revoked: usize) -> usize {
    blocks + blocks.div_ceil(shape.tags_max()) + revoked.div_ceil(shape.revoked_max()) + 1
}

/// The blocks of a transaction in the order in which they lie in the journal. The last one is the
/// commit block.
#[must_use]
pub fn encode(
    layout: &Layout,
    shape: &Shape,
    sequence: u32,
    blocks: &[(BlockNo, Arc<Block>)],
    revoked: &[BlockNo],
    seconds: u64,
) -> Vec<Arc<Block>> {
    let mut encoded = Vec::with_capacity(blocks_needed(shape, blocks.len(), revoked.len()));
    for revoked in revoked.chunks(shape.revoked_max()) {
        encoded.push(Arc::new(shape.revoke(layout, sequence, revoked)));
    }
    for blocks in blocks.chunks(shape.tags_max()) {
        let mut tags = Vec::with_capacity(blocks.len());
        let mut data = Vec::with_capacity(blocks.len());
        for (at, block) in blocks {
            let mut flags = 0;
            let mut block = Arc::clone(block);
            if needs_escape(&block) {
                flags = tag_flag::ESCAPE;
                set_u32(&mut Arc::make_mut(&mut block)[..], 0, 0);
            }
            let checksum =
                if shape.has_csum() { shape.data_checksum(layout, sequence, &block) } else { 0 };
            tags.push(Tag { block: *at, flags, checksum });
            data.push(block);
        }
        // The UUID of a journal inside of its file system is zero in tags.
        encoded.push(Arc::new(shape.descriptor(layout, sequence, &tags, &[0; 16])));
        encoded.append(&mut data);
    }
    encoded.push(Arc::new(shape.commit(layout, sequence, seconds)));
    encoded
}
