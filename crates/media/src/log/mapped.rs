//! The memory of a mapped log: a mapping of a file or of a drive's memory, or anonymous memory.
//!
//! [`MappedMemory`] has the raw effects: loads, stores, and the ways in which stores are made
//! durable. [`MappedPart`](riopipe_model::log::mapped::MappedPart) decides when each is used.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use riopipe_model::log::mapped::{self, Memory};
use riopipe_order::region::RegionError;

use super::pci::Properties;
use crate::mapping::Mapping;
use crate::medium::Medium;
use crate::persist::Persist;

/// The error after an access to a mapped file has failed.
pub(super) const FAULT: &str = "a page of its file could not be read or written: its file system \
                                is full, its disk has failed, or the file was cut short";

/// A log's mapping, shared by its parts.
pub(super) struct SharedMapping {
    pub(super) mapping: Mapping,
    /// How stores to the mapping are made durable.
    pub(super) persist: Persist,
    /// The drive whose memory is mapped. A read from the drive makes stores durable, whatever
    /// `persist` is.
    pub(super) drive: Option<Properties>,
    /// The medium stays open and locked as long as any part exists. It is dropped after the mapping.
    pub(super) medium: Option<Medium>,
}

impl SharedMapping {
    /// Checks that no access to the mapping has failed.
    #[inline]
    pub(super) fn check_access(&self) -> Result<(), RegionError> {
        if let Some(drive) = &self.drive {
            return drive.check(&self.mapping).map_err(|fault| drive.region_error(fault));
        }
        match self.mapping.has_faulted() {
            false => Ok(()),
            true => Err(RegionError::new(FAULT)),
        }
    }

    /// Whether the mapping has a file that it can be written back to.
    fn has_file(&self) -> bool {
        self.medium.is_some() && self.drive.is_none()
    }

    /// Writes the whole mapping back to its file, if it has one, and waits.
    pub(super) fn sync(&self) -> std::io::Result<()> {
        if self.has_file() { self.mapping.sync() } else { Ok(()) }
    }

    /// Like [`sync`](Self::sync), but also writes those bytes in `used` whose pages the kernel
    /// takes for clean. After a failed write-back, the kernel takes pages for clean that are not in
    /// the file (trap T24). No other thread may use the mapping.
    pub(super) fn sync_all(&self, used: &[Range<usize>]) -> std::io::Result<()> {
        if self.has_file() {
            for range in used {
                self.mapping.touch(range.clone());
            }
        }
        self.sync()
    }
}

/// One part of the mapping, which only its owner writes.
pub(super) struct MappedMemory {
    pub(super) shared: Arc<SharedMapping>,
    /// The range of the part in the mapping, in bytes.
    pub(super) part: Range<usize>,
}

impl MappedMemory {
    /// The address of the part's byte `offset`. The caller has checked that it is inside the part.
    #[inline]
    fn address(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.part.len() && offset.is_multiple_of(8));
        self.shared.mapping.start().wrapping_add(self.part.start + offset)
    }
}

impl Memory for MappedMemory {
    #[inline]
    fn persist(&self) -> mapped::Persist {
        if self.shared.drive.is_some() {
            return mapped::Persist::ReadBack;
        }
        match self.shared.persist {
            Persist::Stores => mapped::Persist::Stores,
            #[cfg(target_arch = "x86_64")]
            Persist::Lines(_) => mapped::Persist::Lines,
            #[cfg(not(target_arch = "x86_64"))]
            Persist::Sync => mapped::Persist::Sync,
        }
    }

    #[inline]
    fn size(&self) -> usize {
        self.part.len()
    }

    #[inline]
    fn load(&self, offset: usize) -> u64 {
        // SAFETY: `MappedPart` only asks for words inside the part, which is in the mapping and
        // aligned to 8; only the part's owner writes it. The load is volatile, since the bytes also
        // belong to a file.
        u64::from_le(unsafe { ptr::read_volatile(self.address(offset).cast::<u64>()) })
    }

    #[inline]
    fn store(&mut self, offset: usize, value: u64) {
        // SAFETY: as in `load`. The store is volatile, so that the compiler makes it a single store
        // of 8 bytes: persistent memory keeps or loses such a unit as a whole (assumption M5).
        unsafe { ptr::write_volatile(self.address(offset).cast::<u64>(), value.to_le()) };
    }

    #[inline]
    fn write_back_lines(&mut self, bytes: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if let Persist::Lines(lines) = self.shared.persist {
            let start = self.shared.mapping.start().wrapping_add(self.part.start + bytes.start);
            // SAFETY: `MappedPart` asks only for bytes inside the part, so they are mapped.
            unsafe { lines.write_back(start, bytes.len()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = bytes;
    }

    #[inline]
    fn drain(&mut self) {
        #[cfg(target_arch = "x86_64")]
        crate::persist::fence();
    }

    #[inline]
    fn order_stores(&mut self) {
        // The kernel and all other readers of the file see the stores of this CPU in program order.
        compiler_fence(Ordering::SeqCst);
    }

    #[inline]
    fn check(&self) -> Result<(), RegionError> {
        self.shared.check_access()
    }

    fn sync(&mut self) -> Result<(), RegionError> {
        self.shared.sync().map_err(|error| RegionError::new(error.to_string()))
    }

    #[inline]
    fn read_back(&mut self) -> Result<(), RegionError> {
        match &self.shared.drive {
            Some(drive) => drive.fence(&self.shared.mapping),
            None => Ok(()),
        }
    }
}
