//! The medium of a log: bytes that are durable once fenced, in units of 8 (M5).
//!
//! The ordering log uses [`Region`] alone. The crate `media` implements it for a drive's PMR, a
//! persistent-memory mapping and a file mapping. Tests use [`MemRegion`]: it can forget, after a
//! crash, any subset of the stores that were not fenced.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

/// CRC-32C (Castagnoli) in append form: `crc(0, data)` is the checksum of `data`, and `crc(crc(0,
/// a), b) == crc(0, a ‖ b)`. The caller passes an implementation, such as one that uses the
/// processor's instruction.
pub type Crc32c = fn(u32, &[u8]) -> u32;

/// The bytes of a log.
///
/// Offsets and lengths are multiples of 8 and inside [`len`](Self::len): the log computes them,
/// so a violation is a bug and implementations may panic.
///
/// The content of a region is durable when it is opened. The last process may have died between a
/// store and its fence, and recovery decides by these stores. So the code that opens persistent
/// memory writes back all of it first.
pub trait Region {
    /// Size in bytes.
    fn len(&self) -> usize;

    /// Whether the region has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes out, as last written, fenced or not.
    fn read(&self, offset: usize, into: &mut [u8]);

    /// Writes bytes; durable only after the next [`fence`](Self::fence). After a crash before it,
    /// each aligned 8-byte word is old or new, in any combination.
    fn write(&mut self, offset: usize, bytes: &[u8]);

    /// Writes one aligned word (little endian) with a single store, so that a reader never sees
    /// half of it.
    fn write_word(&mut self, offset: usize, value: u64);

    /// Makes everything written so far durable before it returns.
    ///
    /// # Errors
    ///
    /// The medium could not do it: bytes written since the last fence may be lost, and the log
    /// refuses further appends.
    fn fence(&mut self) -> Result<(), RegionError>;

    /// Makes everything written so far survive a power cut, too, where a fence does not: a mapped
    /// file is written back to its disk. It is slow, and used only when service begins and ends
    /// (T24).
    ///
    /// # Errors
    ///
    /// The medium could not do it.
    fn write_back(&mut self) -> Result<(), RegionError> {
        self.fence()
    }
}

/// A log region failed to make its bytes durable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the log region could not make its bytes durable: {cause}")]
pub struct RegionError {
    /// The cause, in the medium's words.
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
/// Made with [`new`](Self::new) it only stores. Made with [`forgetful`](Self::forgetful) it also
/// remembers the stores that are not fenced yet, so that [`crash`](Self::crash) can lose them.
#[derive(Clone, Debug)]
pub struct MemRegion {
    bytes: Vec<u8>,
    /// For each unfenced word, by offset: the durable value, then every value stored since.
    unfenced: Option<BTreeMap<usize, Vec<u64>>>,
    fences_left: Option<u64>,
    fences: u64,
}

impl MemRegion {
    /// `len` zero bytes that never lose anything.
    ///
    /// # Panics
    ///
    /// If `len` is not a multiple of 8.
    #[must_use]
    pub fn new(len: usize) -> Self {
        assert!(len.is_multiple_of(8), "a region consists of whole 8-byte words");
        Self { bytes: vec![0; len], unfenced: None, fences_left: None, fences: 0 }
    }

    /// `len` zero bytes; stores that are not fenced may be lost in a [`crash`](Self::crash).
    #[must_use]
    pub fn forgetful(len: usize) -> Self {
        Self { unfenced: Some(BTreeMap::new()), ..Self::new(len) }
    }

    /// The region after a power cut: each unfenced word holds, chosen by `seed`, its durable value
    /// or any value stored since. Of some lines of 64 bytes every word is lost, of some every word
    /// has arrived, so that whole entries are found, too.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        let mut after = self.clone();
        let mut state = seed;
        if let Some(unfenced) = &mut after.unfenced {
            for (&offset, values) in unfenced.iter() {
                state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
                let value = match mix(seed ^ mix(offset as u64 / 64 + 1)) % 3 {
                    0 => values[0],
                    1 => values[values.len() - 1],
                    _ => values[(state % values.len() as u64) as usize],
                };
                after.bytes[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
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

    /// How many fences succeeded.
    #[must_use]
    pub const fn fences(&self) -> u64 {
        self.fences
    }

    /// The bytes as last written, to be read or damaged.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The bytes as last written.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn word(&self, offset: usize) -> u64 {
        let bytes = self.bytes[offset..offset + 8].try_into();
        u64::from_le_bytes(bytes.expect("the slice is 8 bytes long"))
    }

    #[cold]
    fn remember(&mut self, offset: usize, value: u64) {
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
        debug_assert!(offset.is_multiple_of(8) && bytes.len().is_multiple_of(8));
        if self.unfenced.is_some() {
            for (i, word) in bytes.chunks_exact(8).enumerate() {
                let word = word.try_into().expect("chunks are 8 bytes long");
                self.remember(offset + 8 * i, u64::from_le_bytes(word));
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
        self.fences += 1;
        if let Some(unfenced) = &mut self.unfenced {
            unfenced.clear();
        }
        Ok(())
    }
}

/// A bijective 64-bit scrambler (the finaliser of splitmix64): distinct inputs stay distinct.
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
