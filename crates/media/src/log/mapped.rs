//! The part of a log that is mapped memory: written by stores.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use riopipe_order::region::{Region, RegionError};

use crate::mapping::Mapping;
use crate::medium::Medium;
use crate::persist::Persist;

/// A log's memory, shared by its parts.
pub(super) struct Memory {
    pub(super) mapping: Mapping,
    pub(super) persist: Persist,
    /// Locked for as long as any part lives.
    pub(super) medium: Option<Medium>,
}

impl Memory {
    /// Writes all of it back to its file, if it is one, and waits.
    pub(super) fn sync(&self) -> std::io::Result<()> {
        if self.medium.is_some() { self.mapping.sync() } else { Ok(()) }
    }

    /// Makes durable what is there. The last process may have died between a store and its fence:
    /// those lines still read as stored, and are lost with the power.
    pub(super) fn write_back_all(&self) -> std::io::Result<()> {
        match self.persist {
            Persist::Stores => {}
            #[cfg(target_arch = "x86_64")]
            Persist::Lines(lines) => {
                // SAFETY: all of the mapping is mapped.
                unsafe { lines.write_back(self.mapping.start(), self.mapping.len()) };
                crate::persist::fence();
            }
            #[cfg(not(target_arch = "x86_64"))]
            Persist::Sync => self.mapping.sync()?,
        }
        Ok(())
    }
}

/// One part of it.
pub(super) struct MappedPart {
    pub(super) memory: Arc<Memory>,
    pub(super) part: Range<usize>,
}

impl MappedPart {
    /// The address of the part's byte `offset`, of which `len` bytes are wanted.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.part.len());
        assert!(
            fits && offset.is_multiple_of(8) && len.is_multiple_of(8),
            "{len} bytes at {offset} are not aligned words of a part of {} bytes",
            self.part.len()
        );
        self.memory.mapping.start().wrapping_add(self.part.start + offset)
    }

    /// Starts making `len` bytes at `start` durable.
    #[inline]
    fn begin_write_back(&self, start: *const u8, len: usize) {
        #[cfg(target_arch = "x86_64")]
        if let Persist::Lines(lines) = self.memory.persist {
            // SAFETY: `start` and `len` come from `at`, so they are inside the mapping.
            unsafe { lines.write_back(start, len) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (start, len);
    }
}

impl Region for MappedPart {
    /// Of the whole mapping: who asks for it has little else that is not written back.
    fn write_back(&mut self) -> Result<(), RegionError> {
        self.fence()?;
        self.memory.sync().map_err(|error| RegionError::new(error.to_string()))
    }

    fn len(&self) -> usize {
        self.part.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len()).cast::<u64>();
        for (i, word) in into.chunks_exact_mut(8).enumerate() {
            // SAFETY: inside the part (see `at`), aligned, and this part's owner is the only one
            // who writes it. Volatile, since the bytes are also a file's.
            let value = unsafe { ptr::read_volatile(from.wrapping_add(i)) };
            word.copy_from_slice(&value.to_ne_bytes());
        }
    }

    #[inline]
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        for (i, word) in bytes.chunks_exact(8).enumerate() {
            let value = u64::from_ne_bytes(word.try_into().expect("chunks of eight bytes"));
            // SAFETY: inside the part, aligned, and only this owner writes it. Volatile, so that
            // each word is one store: that is what "in units of 8 bytes" means (M5).
            unsafe { ptr::write_volatile(to.cast::<u64>().wrapping_add(i), value) };
        }
        self.begin_write_back(to, bytes.len());
    }

    #[inline]
    fn write_word(&mut self, offset: usize, value: u64) {
        let to = self.at(offset, 8);
        // SAFETY: as in `write`.
        unsafe { ptr::write_volatile(to.cast::<u64>(), value.to_le()) };
        self.begin_write_back(to, 8);
    }

    #[inline]
    fn fence(&mut self) -> Result<(), RegionError> {
        match self.memory.persist {
            // What has been stored outlives the process, in the order of the stores: the kernel
            // and every reader of the file see this CPU's stores as it made them.
            Persist::Stores => compiler_fence(Ordering::SeqCst),
            #[cfg(target_arch = "x86_64")]
            Persist::Lines(_) => crate::persist::fence(),
            #[cfg(not(target_arch = "x86_64"))]
            Persist::Sync => {
                self.memory.mapping.sync().map_err(|error| RegionError::new(error.to_string()))?
            }
        }
        Ok(())
    }
}
