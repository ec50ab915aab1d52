//! The file system before the first mount: an empty one, as `mke2fs` makes it.
//!
//! `image.txt` has the bytes that are not zero, in lines `OFFSET HEX`, or `OFFSET HEX COUNT` for a
//! byte that is repeated. The test `tests/fs_image.rs` makes it anew, and lets e2fsck check it.

use riopipe_fs_core::{BLOCK_BYTES, Block};
use riopipe_fs_testkit::check::free_blocks;
use riopipe_platform::crc32c;

/// The blocks of the file system.
pub const BLOCKS: usize = 4352;

const IMAGE: &str = include_str!("image.txt");

/// The content of all blocks.
///
/// # Panics
/// The text is not an image.
#[must_use]
pub fn image() -> Vec<Block> {
    let mut bytes = vec![0; BLOCKS * BLOCK_BYTES];
    for line in IMAGE.lines() {
        let mut words = line.split(' ');
        let at: usize = words.next().and_then(|word| word.parse().ok()).expect("an offset");
        let hex = words.next().expect("bytes").as_bytes();
        let digit = |digit: u8| (digit as char).to_digit(16).expect("a digit") as u8;
        let part: Vec<u8> =
            hex.chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect();
        let count = words.next().map_or(1, |word| word.parse().expect("a count"));
        let part = part.repeat(count);
        bytes[at..at + part.len()].copy_from_slice(&part);
    }
    bytes.as_chunks().0.to_vec()
}

/// The blocks that are not zero before the first mount. Those that are not in use have old content.
pub(super) fn blocks() -> Vec<(usize, Block)> {
    let mut image = image();
    let free = free_blocks(&image[..], crc32c);
    for at in free {
        image[at as usize] = [0xab; BLOCK_BYTES];
    }
    let is_full = |(_, block): &(usize, Block)| *block != [0; BLOCK_BYTES];
    image.into_iter().enumerate().filter(is_full).collect()
}
