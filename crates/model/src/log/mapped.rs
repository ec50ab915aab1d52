//! The part of a log that is mapped memory: written by stores.

use core::ops::Range;

use riopipe_order::probe::{self, Plant};
use riopipe_order::region::{Region, RegionError};

/// How stores to a mapping are made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persist {
    /// Not at all: the mapping is as durable as a completed store can make it. What has been
    /// stored outlives the process, in the order of the stores.
    Stores,
    /// By writing the cache lines back, which on persistent memory is durable (M5).
    Lines,
    /// By writing back all of the file: for CPUs without an instruction for lines that we know.
    Sync,
}

/// Mapped memory: raw effects, in which nothing is decided. Offsets are multiples of 8.
pub trait Memory {
    /// How stores to it are made durable.
    fn persist(&self) -> Persist;

    /// Size in bytes.
    fn size(&self) -> usize;

    /// The word at `offset`, little endian.
    fn load(&self, offset: usize) -> u64;

    /// Stores a word, little endian, with a single store: never seen half.
    fn store(&mut self, offset: usize, value: u64);

    /// Begins to write the cache lines of these bytes back.
    fn write_back_lines(&mut self, bytes: Range<usize>);

    /// Waits until the lines whose writing back this process has begun are durable, and orders
    /// later stores after them.
    fn drain(&mut self);

    /// Orders later stores after earlier ones, as others see them.
    fn order_stores(&mut self);

    /// Writes all of the file back and waits, so that it survives the power.
    ///
    /// # Errors
    /// The disk could not.
    fn sync(&mut self) -> Result<(), RegionError>;
}

/// Makes durable what persistent memory holds, before anything in it is believed: the last process
/// may have died between a store and its fence, and those lines still read as stored, and are lost
/// with the power.
///
/// # Errors
/// The medium could not.
pub fn open<M: Memory>(memory: &mut M) -> Result<(), RegionError> {
    if probe::planted(Plant::T7TrustUnfenced) {
        return Ok(());
    }
    match memory.persist() {
        Persist::Stores => Ok(()),
        Persist::Lines => {
            memory.write_back_lines(0..memory.size());
            memory.drain();
            Ok(())
        }
        Persist::Sync => memory.sync(),
    }
}

/// One part of a log in mapped memory.
#[derive(Debug)]
pub struct MappedPart<M> {
    memory: M,
}

impl<M: Memory> MappedPart<M> {
    /// A part whose bytes are all of `memory`.
    pub const fn new(memory: M) -> Self {
        Self { memory }
    }

    /// The memory.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    #[inline]
    fn check(&self, offset: usize, len: usize) {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.memory.size());
        assert!(
            fits && offset.is_multiple_of(8) && len.is_multiple_of(8),
            "{len} bytes at {offset} are not aligned words of a part of {} bytes",
            self.memory.size()
        );
    }

    #[inline]
    fn begin_write_back(&mut self, bytes: Range<usize>) {
        if self.memory.persist() == Persist::Lines {
            self.memory.write_back_lines(bytes);
        }
    }
}

impl<M: Memory> Region for MappedPart<M> {
    fn len(&self) -> usize {
        self.memory.size()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        for (at, word) in (offset..).step_by(8).zip(into.chunks_exact_mut(8)) {
            word.copy_from_slice(&self.memory.load(at).to_le_bytes());
        }
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        for (at, word) in (offset..).step_by(8).zip(bytes.chunks_exact(8)) {
            let word = word.try_into().expect("chunks of eight bytes");
            self.memory.store(at, u64::from_le_bytes(word));
        }
        self.begin_write_back(offset..offset + bytes.len());
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        self.check(offset, 8);
        self.memory.store(offset, value);
        self.begin_write_back(offset..offset + 8);
    }

    #[inline]
    fn fence(&mut self) -> Result<(), RegionError> {
        match self.memory.persist() {
            Persist::Stores => self.memory.order_stores(),
            Persist::Lines => self.memory.drain(),
            Persist::Sync => return self.memory.sync(),
        }
        Ok(())
    }

    /// Of the whole file: whoever asks for it has little else that is not written back.
    fn write_back(&mut self) -> Result<(), RegionError> {
        self.fence()?;
        self.memory.sync()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    const WORDS: usize = 64;

    /// Memory that remembers what would be left without power.
    struct Fake {
        persist: Persist,
        words: Vec<u64>,
        durable: Vec<u64>,
        /// Lines that are being written back.
        begun: Vec<usize>,
        ordered: u32,
        sync_fails: bool,
    }

    impl Fake {
        fn new(persist: Persist) -> Self {
            let words = vec![0; WORDS];
            let durable = words.clone();
            Self { persist, words, durable, begun: Vec::new(), ordered: 0, sync_fails: false }
        }
    }

    impl Memory for Fake {
        fn persist(&self) -> Persist {
            self.persist
        }

        fn size(&self) -> usize {
            8 * WORDS
        }

        fn load(&self, offset: usize) -> u64 {
            self.words[offset / 8]
        }

        fn store(&mut self, offset: usize, value: u64) {
            self.words[offset / 8] = value;
        }

        fn write_back_lines(&mut self, bytes: Range<usize>) {
            self.begun.extend(bytes.start / 64..bytes.end.div_ceil(64));
        }

        fn drain(&mut self) {
            for line in self.begun.drain(..) {
                let words = 8 * line..8 * line + 8;
                self.durable[words.clone()].copy_from_slice(&self.words[words]);
            }
        }

        fn order_stores(&mut self) {
            self.ordered += 1;
        }

        fn sync(&mut self) -> Result<(), RegionError> {
            if self.sync_fails {
                return Err(RegionError::new("the disk is gone"));
            }
            self.durable.clone_from(&self.words);
            Ok(())
        }
    }

    #[test]
    fn a_fence_makes_durable_all_that_was_stored_and_nothing_is_before() {
        for persist in [Persist::Lines, Persist::Sync] {
            let mut part = MappedPart::new(Fake::new(persist));
            part.write(56, &[7; 24]);
            part.write_word(504, 9);
            assert!(part.memory.durable.iter().all(|word| *word == 0), "{persist:?}");
            part.fence().unwrap();
            assert_eq!(part.memory.durable, part.memory.words, "{persist:?}");
            assert_eq!((part.memory.words[7], part.memory.words[63]), (0x0707_0707_0707_0707, 9));
            let mut read = [0; 32];
            part.read(48, &mut read);
            assert_eq!((&read[..8], &read[8..]), (&[0; 8][..], &[7; 24][..]));
        }
    }

    #[test]
    fn a_mapped_file_is_only_kept_in_order_until_it_is_written_back() {
        let mut part = MappedPart::new(Fake::new(Persist::Stores));
        part.write_word(0, 1);
        part.fence().unwrap();
        assert_eq!((part.memory.ordered, part.memory.durable[0]), (1, 0));
        assert!(part.memory.begun.is_empty());
        part.write_back().unwrap();
        assert_eq!(part.memory.durable[0], 1);
        part.memory.sync_fails = true;
        assert!(part.write_back().is_err());
    }

    #[test]
    fn what_is_found_is_durable_before_it_is_believed() {
        for persist in [Persist::Lines, Persist::Sync, Persist::Stores] {
            let mut memory = Fake::new(persist);
            // An earlier process has stored it, and died before its fence.
            memory.words[5] = 1;
            open(&mut memory).unwrap();
            assert_eq!(memory.durable[5] == 1, persist != Persist::Stores, "{persist:?}");
        }
        let mut memory = Fake { sync_fails: true, ..Fake::new(Persist::Sync) };
        assert!(open(&mut memory).is_err());
    }

    #[test]
    #[should_panic(expected = "not aligned words of a part of 512 bytes")]
    fn what_is_outside_of_a_part_is_not_touched() {
        MappedPart::new(Fake::new(Persist::Stores)).write(504, &[0; 16]);
    }
}
