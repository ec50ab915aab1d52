//! Turning a transaction into blocks of the journal.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo};
use crate::journal::format::{Shape, Tag, escape, needs_escape};

/// The number of blocks that a transaction takes in the journal, with its commit block.
#[must_use]
pub fn blocks_needed(shape: &Shape, blocks: usize, revoked: usize) -> usize {
    revoked.div_ceil(shape.revoked_max()) + blocks.div_ceil(shape.tags_max()) + blocks + 1
}

/// The blocks of a transaction in the order in which they lie in the journal: revoke blocks;
/// descriptor blocks, each with its copies behind it; the commit block. They are
/// [`blocks_needed`] many.
///
/// A block that is in `blocks` must not be in `revoked`: the revoke would count for it.
#[must_use]
pub fn encode(
    shape: &Shape,
    sequence: u32,
    blocks: &[(BlockNo, Arc<Block>)],
    revoked: &[BlockNo],
    seconds: u64,
) -> Vec<Arc<Block>> {
    let mut encoded = Vec::with_capacity(blocks_needed(shape, blocks.len(), revoked.len()));
    for revoked in revoked.chunks(shape.revoked_max()) {
        encoded.push(Arc::new(shape.revoke(sequence, revoked)));
    }
    for blocks in blocks.chunks(shape.tags_max()) {
        let (mut tags, mut copies) = (Vec::with_capacity(blocks.len()), Vec::new());
        for (at, block) in blocks {
            let mut copy = Arc::clone(block);
            let is_escaped = needs_escape(block);
            if is_escaped {
                escape(Arc::make_mut(&mut copy));
            }
            let checksum = shape.copy_checksum(sequence, &copy);
            tags.push(Tag { at: *at, is_escaped, checksum });
            copies.push(copy);
        }
        encoded.push(Arc::new(shape.descriptor(sequence, &tags)));
        encoded.append(&mut copies);
    }
    encoded.push(Arc::new(shape.commit(sequence, seconds)));
    encoded
}
