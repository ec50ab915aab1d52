//! A part of a log in mapped memory.
//!
//! Stores go to the memory directly, word by word. How a fence makes them durable depends on [`Persist`]:
//!
//! | | a store | a fence |
//! |---|---|---|
//! | [`Persist::Stores`] | stores the word | orders later stores after it |
//! | [`Persist::Lines`] | also begins to write its cache line back | waits for these lines |
//! | [`Persist::Sync`] | stores the word | writes the whole file back |
//! | [`Persist::ReadBack`] | posts the word to a device | reads from the device, which then has all of them |

use core::ops::Range;

use riopipe_order::probe::{self, Plant};
use riopipe_order::region::{Region, RegionError};

/// How stores to a mapping are made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persist {
    /// Nothing is done, because no call makes a store to this mapping survive a power cut. Stores
    /// survive the process, in their order.
    Stores,
    /// Cache lines are written back, which is durable on persistent memory (assumption M5).
    Lines,
    /// The whole file is written back: for CPUs without a known instruction for cache lines.
    Sync,
    /// The memory is a device's, behind its bus. No cache of the CPU has stores to it, but the bus and the
    /// device may. A read from the device waits for them.
    ReadBack,
}

/// Mapped memory. It only carries out effects, and decides nothing. Offsets are in bytes, and are
/// multiples of 8.
pub trait Memory {
    /// How its stores are made durable.
    fn persist(&self) -> Persist;

    /// Size in bytes.
    fn size(&self) -> usize;

    /// The word at `offset`, little endian.
    fn load(&self, offset: usize) -> u64;

    /// Stores a word, little endian, with a single store. No reader sees a part of the word.
    fn store(&mut self, offset: usize, value: u64);

    /// Loads words from `offset` on, one after the other. The length of `into` is a multiple of 8.
    #[inline]
    fn load_all(&self, offset: usize, into: &mut [u8]) {
        for (at, word) in (offset..).step_by(8).zip(into.chunks_exact_mut(8)) {
            word.copy_from_slice(&self.load(at).to_le_bytes());
        }
    }

    /// Stores words from `offset` on, one after the other. The length of `bytes` is a multiple of
    /// 8.
    #[inline]
    fn store_all(&mut self, offset: usize, bytes: &[u8]) {
        for (at, word) in (offset..).step_by(8).zip(words_of(bytes)) {
            self.store(at, word);
        }
    }

    /// Begins to write the cache lines of these bytes back.
    fn write_back_lines(&mut self, bytes: Range<usize>);

    /// Waits until the lines whose write-back this process has begun are durable, and orders later
    /// stores after them.
    fn drain(&mut self);

    /// Orders later stores after earlier ones, for all observers.
    fn order_stores(&mut self);

    /// Checks that no access to the memory has failed so far.
    ///
    /// # Errors
    /// The content is not that of the file any more.
    fn check(&self) -> Result<(), RegionError> {
        Ok(())
    }

    /// Writes the whole file back and waits, so that it survives a power cut.
    ///
    /// # Errors
    /// The disk could not write it.
    fn sync(&mut self) -> Result<(), RegionError>;

    /// Reads from the device in the way that makes all earlier stores durable, and checks that the device
    /// has accepted them, as [`check`](Self::check) does. Only memory with [`Persist::ReadBack`] has a
    /// device.
    ///
    /// # Errors
    /// The device may have lost stores.
    fn read_back(&mut self) -> Result<(), RegionError>;
}

/// The words in `bytes`, little endian.
#[inline]
pub fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("chunks of eight bytes"));
    bytes.chunks_exact(8).map(word)
}

/// Makes the content of persistent memory durable. Must be called before any of the content is
/// used. The last process may have died between a store and the fence after it. The stored words
/// can then be read, although a power cut would still destroy them.
///
/// # Errors
/// The medium could not make it durable.
pub fn make_content_durable<M: Memory>(memory: &mut M) -> Result<(), RegionError> {
    if probe::is_bug_planted(Plant::T7UseUnfenced) {
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
        Persist::ReadBack => memory.read_back(),
    }
}

/// One part of a log in mapped memory.
#[derive(Debug)]
pub struct MappedPart<M> {
    memory: M,
}

impl<M: Memory> MappedPart<M> {
    /// A part that consists of all of `memory`.
    pub const fn new(memory: M) -> Self {
        Self { memory }
    }

    /// The memory.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// Panics unless the bytes are aligned words inside the part.
    #[inline]
    fn check_words(&self, offset: usize, len: usize) {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.memory.size());
        assert!(
            fits && offset.is_multiple_of(8) && len.is_multiple_of(8),
            "{len} bytes at {offset} are not aligned words of a part of {} bytes",
            self.memory.size()
        );
    }

    /// Begins to write the cache lines of these bytes back, if a fence waits for such lines.
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
        self.check_words(offset, into.len());
        self.memory.load_all(offset, into);
    }

    fn check(&self) -> Result<(), RegionError> {
        self.memory.check()
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.check_words(offset, bytes.len());
        self.memory.store_all(offset, bytes);
        self.begin_write_back(offset..offset + bytes.len());
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        self.check_words(offset, 8);
        self.memory.store(offset, value);
        self.begin_write_back(offset..offset + 8);
    }

    #[inline]
    fn fence(&mut self) -> Result<(), RegionError> {
        match self.memory.persist() {
            Persist::Stores => self.memory.order_stores(),
            Persist::Lines => self.memory.drain(),
            Persist::Sync => self.memory.sync()?,
            // It contains the check.
            Persist::ReadBack => return self.memory.read_back(),
        }
        self.memory.check()
    }

    /// Writes back the whole file. That costs little more than to write back the part alone,
    /// because nearly nothing else of the file is dirty at such a time.
    fn write_back(&mut self) -> Result<(), RegionError> {
        self.fence()?;
        match self.memory.persist() {
            // There is no file, and the device has everything.
            Persist::ReadBack => Ok(()),
            Persist::Stores | Persist::Lines | Persist::Sync => self.memory.sync(),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    const WORDS: usize = 64;

    /// Memory that also models what remains after a power cut.
    struct Fake {
        persist: Persist,
        words: Vec<u64>,
        durable: Vec<u64>,
        /// Lines whose write-back has begun.
        begun: Vec<usize>,
        ordered: u32,
        sync_fails: bool,
        read_backs: u32,
    }

    impl Fake {
        fn new(persist: Persist) -> Self {
            let words = vec![0; WORDS];
            let durable = words.clone();
            Self {
                persist,
                words,
                durable,
                begun: Vec::new(),
                ordered: 0,
                sync_fails: false,
                read_backs: 0,
            }
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

        fn read_back(&mut self) -> Result<(), RegionError> {
            self.read_backs += 1;
            self.sync()
        }
    }

    #[test]
    fn a_fence_makes_all_stores_durable_and_none_is_before() {
        for persist in [Persist::Lines, Persist::Sync, Persist::ReadBack] {
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
    fn a_device_is_read_back_by_each_fence_and_its_failure_is_the_fence_s() {
        let mut part = MappedPart::new(Fake::new(Persist::ReadBack));
        part.write(0, &[1; 128]);
        part.write_word(128, 2);
        assert_eq!(part.memory.read_backs, 0, "a store alone does not wait for the bus");
        part.fence().unwrap();
        assert_eq!(part.memory.read_backs, 1);
        part.write_back().unwrap();
        assert_eq!(part.memory.read_backs, 2, "nothing but a fence");
        assert!(part.memory.begun.is_empty(), "no cache has its lines");
        part.memory.sync_fails = true;
        assert!(part.fence().is_err() && part.write_back().is_err());
    }

    #[test]
    fn content_is_made_durable_on_opening() {
        for persist in [Persist::Lines, Persist::Sync, Persist::ReadBack, Persist::Stores] {
            let mut memory = Fake::new(persist);
            // An earlier process has stored the word, and died before its fence.
            memory.words[5] = 1;
            make_content_durable(&mut memory).unwrap();
            assert_eq!(memory.durable[5] == 1, persist != Persist::Stores, "{persist:?}");
        }
        let mut memory = Fake { sync_fails: true, ..Fake::new(Persist::Sync) };
        assert!(make_content_durable(&mut memory).is_err());
    }

    #[test]
    #[should_panic(expected = "not aligned words of a part of 512 bytes")]
    fn access_outside_of_a_part_panics() {
        MappedPart::new(Fake::new(Persist::Stores)).write(504, &[0; 16]);
    }
}
