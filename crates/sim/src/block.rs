//! The contents of 4 KiB blocks: a 64-bit name for each, so that a drive need not keep the bytes.

use std::collections::BTreeMap;

pub use riopipe_order::block_device::BLOCK_BYTES as BLOCK;

/// The content of a block, by name. Every block of every write gets its own name, counted upwards:
/// of two contents of one block, the one that was submitted later has the larger name.
pub type Content = u64;

/// All zero bytes: never written, or undone, or discarded.
pub const ZERO: Content = 0;
/// The content that deallocated blocks of some drives return.
pub const GARBAGE: Content = u64::MAX - 1;
/// Bytes that do not come from one single write.
pub const MIXED: Content = u64::MAX;

/// The offsets of the name in its block, bytes.
const PLACES: [usize; 4] = [0, 1360, 2728, BLOCK - 8];

/// Fills a block, all zero so far, with the content of this name.
pub fn fill(block: &mut [u8], content: Content) {
    debug_assert_eq!(block.len(), BLOCK);
    for (i, at) in PLACES.into_iter().enumerate() {
        let word = if content == ZERO { 0 } else { content.rotate_left(16 * i as u32) };
        block[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }
}

/// The name of a block's content.
#[must_use]
pub fn name(block: &[u8]) -> Content {
    let mut names = PLACES.into_iter().enumerate().map(|(i, at)| {
        let word = u64::from_le_bytes(block[at..at + 8].try_into().expect("8 bytes were sliced"));
        word.rotate_right(16 * i as u32)
    });
    let first = names.next().expect("there are four places");
    if names.all(|name| name == first) { first } else { MIXED }
}

/// The names of the blocks in these bytes.
#[must_use]
pub fn names(bytes: &[u8]) -> Vec<Content> {
    bytes.chunks_exact(BLOCK).map(name).collect()
}

/// Blocks with these contents.
#[must_use]
pub fn bytes(contents: &[Content]) -> Vec<u8> {
    let mut bytes = vec![0; contents.len() * BLOCK];
    for (block, content) in bytes.chunks_exact_mut(BLOCK).zip(contents) {
        fill(block, *content);
    }
    bytes
}

/// Names of torn blocks are counted from here.
const TORN: Content = 1 << 61;
/// Contents that a torn block may be made of lie below this.
const TORN_PARTS: Content = 1 << 26;
/// The unit at which a power cut may tear a block, bytes.
pub const SECTOR: usize = 512;

/// The name of a block of which some sectors have the newer content, one bit each, and the others
/// the older one. Returns `None` if there is no name for it.
#[must_use]
pub const fn torn(older: Content, newer: Content, sectors: u8) -> Option<Content> {
    if older >= TORN_PARTS || newer >= TORN_PARTS {
        return None;
    }
    Some(TORN | (sectors as u64) << 52 | older << 26 | newer)
}

/// The parts of a torn block: the older content, the newer one, and the sectors that are newer.
#[must_use]
pub const fn torn_from(content: Content) -> Option<(Content, Content, u8)> {
    if content >> 60 != TORN >> 60 {
        return None;
    }
    Some((content >> 26 & (TORN_PARTS - 1), content & (TORN_PARTS - 1), (content >> 52) as u8))
}

/// Blocks that have bytes of their own. Only their writer and its readers use these bytes; all
/// parts between them handle names.
#[derive(Debug, Default)]
pub struct BlockBytes(BTreeMap<Content, Vec<u8>>);

impl BlockBytes {
    /// Records the bytes of the content with this name.
    pub fn record(&mut self, content: Content, bytes: &[u8]) {
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        self.0.insert(content, bytes[..used].to_vec());
    }

    /// Replaces each block that has recorded bytes by these bytes.
    pub fn fill_in(&self, bytes: &mut [u8]) {
        for block in bytes.chunks_exact_mut(BLOCK) {
            let name = name(block);
            let Some((older, newer, sectors)) = torn_from(name) else {
                self.fill_one(block, name);
                continue;
            };
            let mut other = [0; BLOCK];
            self.fill_one(block, older);
            self.fill_one(&mut other, newer);
            let parts = block.chunks_exact_mut(SECTOR).zip(other.chunks_exact(SECTOR));
            for (_, (part, newer)) in parts.enumerate().filter(|(nth, _)| sectors >> nth & 1 == 1) {
                part.copy_from_slice(newer);
            }
        }
    }

    fn fill_one(&self, block: &mut [u8], content: Content) {
        block.fill(0);
        match self.0.get(&content) {
            Some(own) => block[..own.len()].copy_from_slice(own),
            None => fill(block, content),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_mixtures_are_detected() {
        let contents = [ZERO, 1, 77, GARBAGE];
        let bytes = bytes(&contents);
        assert_eq!(names(&bytes), contents);
        let mut mixed = bytes[BLOCK..2 * BLOCK].to_vec();
        mixed[2048..].copy_from_slice(&bytes[2 * BLOCK + 2048..3 * BLOCK]);
        assert_eq!(name(&mixed), MIXED);
    }

    #[test]
    fn a_torn_block_has_sectors_of_both() {
        let mut block_bytes = BlockBytes::default();
        block_bytes.record(1, &[1; BLOCK]);
        block_bytes.record(2, &[2; 700]);
        let torn = torn(1, 2, 0b1000_0010).expect("both are small");
        assert_eq!(torn_from(torn), Some((1, 2, 0b1000_0010)));
        let mut read = bytes(&[torn, 2, 3]);
        block_bytes.fill_in(&mut read);
        assert_eq!((read[SECTOR - 1], read[SECTOR], read[700], read[1024]), (1, 2, 0, 1));
        assert_eq!(read[BLOCK - SECTOR..BLOCK], [0; SECTOR]);
        assert_eq!((read[BLOCK + 699], read[BLOCK + 700]), (2, 0));
        assert_eq!(name(&read[2 * BLOCK..]), 3, "this one has no bytes of its own");
        assert_eq!(torn_from(GARBAGE).or(torn_from(MIXED)).or(torn_from(1 << 62)), None);
        assert_eq!(super::torn(GARBAGE, 2, 1), None);
    }
}
