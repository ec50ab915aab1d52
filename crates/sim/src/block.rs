//! What 4 KiB blocks hold: a 64-bit name each, so that a drive need not keep the bytes.

pub use riopipe_order::block_device::BLOCK_BYTES as BLOCK;

/// What a block holds, by name. Every block of every write gets a name of its own, counted
/// upwards: of two contents of one block, the one submitted later has the larger name.
pub type Content = u64;

/// All zero bytes: never written, or undone, or discarded.
pub const ZERO: Content = 0;
/// What deallocated blocks of some drives read as.
pub const GARBAGE: Content = u64::MAX - 1;
/// Bytes that no single write put there.
pub const MIXED: Content = u64::MAX;

/// Where in a block its name stands.
const PLACES: [usize; 4] = [0, 1360, 2728, BLOCK - 8];

/// Fills a block, all zero so far, with what has this name.
pub fn fill(block: &mut [u8], content: Content) {
    debug_assert_eq!(block.len(), BLOCK);
    for (i, at) in PLACES.into_iter().enumerate() {
        let word = if content == ZERO { 0 } else { content.rotate_left(16 * i as u32) };
        block[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }
}

/// The name of what a block holds.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_and_mixtures_are_noticed() {
        let contents = [ZERO, 1, 77, GARBAGE];
        let bytes = bytes(&contents);
        assert_eq!(names(&bytes), contents);
        let mut mixed = bytes[BLOCK..2 * BLOCK].to_vec();
        mixed[2048..].copy_from_slice(&bytes[2 * BLOCK + 2048..3 * BLOCK]);
        assert_eq!(name(&mixed), MIXED);
    }
}
