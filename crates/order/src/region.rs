//! The medium of a log: bytes that become durable with a fence, in words of 8 bytes (assumption
//! M5).
//!
//! The ordering log reads and writes through the trait [`Region`]. The crate `media` implements the
//! trait for a drive's PMR, a persistent-memory mapping and a file mapping. Tests use
//! [`MemRegion`]. A crash of a `MemRegion` loses any subset of the stores that were not fenced.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

/// CRC-32C (Castagnoli) in append form: `crc(0, data)` is the checksum of `data`, and
/// `crc(crc(0, a), b)` is the checksum of `a` followed by `b`. The caller passes an implementation,
/// such as one that uses the processor's instruction.
pub type Crc32c = fn(u32, &[u8]) -> u32;

/// The bytes of a log.
///
/// Offsets and lengths are multiples of 8 bytes and inside [`len`](Self::len). The log computes
/// them, so a violation is a bug, and implementations may panic.
///
/// All content of a region is durable when the region is opened, because recovery decides by it.
/// The last process may have died between a store and its fence. So the code that opens persistent
/// memory first writes back all of it.
pub trait Region {
    /// Size in bytes.
    fn len(&self) -> usize;

    /// Whether the region has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the bytes at `offset` into `into`. They are as last written, fenced or not.
    fn read(&self, offset: usize, into: &mut [u8]);

    /// Checks that everything read so far is the content of the medium.
    ///
    /// # Errors
    ///
    /// The medium has failed, so that some of it may be something else.
    fn check(&self) -> Result<(), RegionError> {
        Ok(())
    }

    /// Writes bytes at `offset`. They are durable after the next [`fence`](Self::fence). After a
    /// crash before that fence, each aligned 8-byte word is old or new, in any combination.
    fn write(&mut self, offset: usize, bytes: &[u8]);

    /// Writes one aligned word of 8 bytes (little endian) with a single store, so that a read never
    /// returns half of it.
    fn write_word(&mut self, offset: usize, value: u64);

    /// Makes all bytes written so far durable before it returns.
    ///
    /// # Errors
    ///
    /// The medium failed. Bytes written since the last fence may be lost, and the log refuses
    /// further appends.
    fn fence(&mut self) -> Result<(), RegionError>;

    /// Makes all bytes written so far survive a power cut. On most media a fence does this. A
    /// mapped file, whose fence does not, is written back to its disk. That is slow, so it is done
    /// only when service begins and ends (trap T24).
    ///
    /// # Errors
    ///
    /// The medium failed.
    fn write_back(&mut self) -> Result<(), RegionError> {
        self.fence()
    }
}

/// A log region failed to make its bytes durable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the log region could not make its bytes durable: {cause}")]
pub struct RegionError {
    /// The cause, as the medium describes it.
    pub cause: String,
}

impl RegionError {
    /// An error with this cause.
    pub fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into() }
    }
}

/// A region in plain memory, for tests and simulation.
///
/// A region made by [`new`](Self::new) never loses a store. A region made by
/// [`forgetful`](Self::forgetful) also records the stores that are not fenced yet, so that
/// [`crash`](Self::crash) can lose them.
#[derive(Clone, Debug)]
pub struct MemRegion {
    bytes: Vec<u8>,
    /// For each word stored since the last fence, by offset: the durable value, and then every
    /// value stored since. `None` if the region never loses a store.
    unfenced: Option<BTreeMap<usize, Vec<u64>>>,
    /// The number of fences that will still succeed; `None` if all will.
    fences_left: Option<u64>,
    /// The number of fences that have succeeded.
    fence_count: u64,
}

/// The size of a word in bytes. A word is durable as a whole or not at all.
const WORD_BYTES: usize = 8;
/// The size of a cache line in bytes.
const LINE_BYTES: usize = 64;

impl MemRegion {
    /// A region of `len` zero bytes that never loses a store.
    ///
    /// # Panics
    ///
    /// If `len` is not a multiple of 8.
    #[must_use]
    pub fn new(len: usize) -> Self {
        assert!(len.is_multiple_of(WORD_BYTES), "a region consists of whole 8-byte words");
        Self { bytes: vec![0; len], unfenced: None, fences_left: None, fence_count: 0 }
    }

    /// A region of `len` zero bytes that may lose unfenced stores in a [`crash`](Self::crash).
    #[must_use]
    pub fn forgetful(len: usize) -> Self {
        Self { unfenced: Some(BTreeMap::new()), ..Self::new(len) }
    }

    /// The region after a power cut. Each unfenced word holds its durable value or any value stored
    /// since; `seed` chooses which.
    ///
    /// Of a third of the cache lines, all unfenced words are lost. Of another third, all have
    /// arrived, so that whole entries are found, too.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        let mut after = self.clone();
        let mut random = seed;
        if let Some(unfenced) = &mut after.unfenced {
            for (&offset, values) in unfenced.iter() {
                random = mix(random.wrapping_add(MIX_INCREMENT));
                let line = (offset / LINE_BYTES) as u64;
                let survivor = match mix(seed ^ mix(line + 1)) % 3 {
                    0 => values[0],
                    1 => values[values.len() - 1],
                    _ => values[(random % values.len() as u64) as usize],
                };
                after.bytes[offset..offset + WORD_BYTES].copy_from_slice(&survivor.to_le_bytes());
            }
            unfenced.clear();
        }
        after.fences_left = None;
        after
    }

    /// Lets `count` more fences succeed; all later ones fail.
    pub fn fail_fences_after(&mut self, count: u64) {
        self.fences_left = Some(count);
    }

    /// The number of fences that have succeeded.
    #[must_use]
    pub const fn fences(&self) -> u64 {
        self.fence_count
    }

    /// The bytes as last written. A test may damage them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The bytes as last written.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The word at this offset.
    fn word(&self, offset: usize) -> u64 {
        let bytes = self.bytes[offset..offset + WORD_BYTES].try_into();
        u64::from_le_bytes(bytes.expect("the slice is 8 bytes long"))
    }

    /// Records that the word at this offset is about to be overwritten with `value`.
    #[cold]
    fn record_unfenced(&mut self, offset: usize, value: u64) {
        let durable = self.word(offset);
        if let Some(unfenced) = &mut self.unfenced {
            unfenced.entry(offset).or_insert_with(|| vec![durable]).push(value);
        }
    }
}

impl Region for MemRegion {
    fn len(&self) -> usize {
        self.bytes.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.bytes[offset..offset + into.len()]);
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        debug_assert!(offset.is_multiple_of(WORD_BYTES) && bytes.len().is_multiple_of(WORD_BYTES));
        if self.unfenced.is_some() {
            for (index, word) in bytes.chunks_exact(WORD_BYTES).enumerate() {
                let word = word.try_into().expect("chunks are 8 bytes long");
                self.record_unfenced(offset + WORD_BYTES * index, u64::from_le_bytes(word));
            }
        }
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }

    #[inline]
    fn fence(&mut self) -> Result<(), RegionError> {
        if let Some(left) = &mut self.fences_left {
            *left = left
                .checked_sub(1)
                .ok_or_else(|| RegionError::new("no more fences (a planned fault)"))?;
        }
        self.fence_count += 1;
        if let Some(unfenced) = &mut self.unfenced {
            unfenced.clear();
        }
        Ok(())
    }
}

/// The increment of the generator splitmix64: 2⁶⁴ divided by the golden ratio.
const MIX_INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// Scrambles 64 bits by the last steps of the generator splitmix64. Distinct inputs have distinct
/// results.
pub(crate) const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_loses_only_what_was_not_fenced() {
        let mut region = MemRegion::forgetful(64);
        region.write(0, &[1; 16]);
        region.fence().unwrap();
        region.write(8, &[2; 16]);
        region.write_word(16, 3);
        let mut seen = BTreeMap::new();
        for seed in 0..64 {
            let after = region.crash(seed);
            assert_eq!(after.word(0), 0x0101_0101_0101_0101, "fenced");
            *seen.entry((after.word(8), after.word(16))).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 2 * 3, "every combination of old and new words: {seen:?}");
    }

    #[test]
    fn whole_lines_are_lost_and_whole_lines_arrive() {
        let mut region = MemRegion::forgetful(4 * 64);
        region.write(0, &[1; 4 * 64]);
        region.write(0, &[2; 4 * 64]);
        let (mut lost, mut arrived, mut mixed) = (0, 0, 0);
        for seed in 0..64 {
            let after = region.crash(seed);
            for line in after.bytes().chunks_exact(64) {
                match (0..=2).find(|byte| line.iter().all(|found| found == byte)) {
                    Some(0) => lost += 1,
                    Some(2) => arrived += 1,
                    _ => mixed += 1,
                }
            }
        }
        // A third each. By chance alone, a line of eight words would be whole once in thousands.
        for count in [lost, arrived, mixed] {
            assert!((50..120).contains(&count), "{lost} lost, {arrived} whole, {mixed} mixed");
        }
    }

    #[test]
    fn the_scrambler_is_the_published_one() {
        // The first two outputs of splitmix64 seeded with 0.
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(2)), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn a_planned_fence_fault_comes_when_planned() {
        let mut region = MemRegion::forgetful(8);
        region.fail_fences_after(1);
        assert!(region.fence().is_ok());
        assert!(region.fence().is_err());
        assert_eq!(region.fences(), 1);
    }
}
