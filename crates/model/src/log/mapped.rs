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
    fn len(&self) -> usize;

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
            memory.write_back_lines(0..memory.len());
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
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.memory.len());
        assert!(
            fits && offset.is_multiple_of(8) && len.is_multiple_of(8),
            "{len} bytes at {offset} are not aligned words of a part of {} bytes",
            self.memory.len()
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
        self.memory.len()
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
