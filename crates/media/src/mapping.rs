//! Memory of drives and logs: anonymous, or a mapped file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

use riopipe_order::block_device::BLOCK_BYTES;
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MsyncFlags, ProtFlags, madvise, mmap, mmap_anonymous, msync, munmap,
};

use crate::page_fault::Guard;

/// Size of a huge page in bytes, on x86-64 and on arm64 with 4 KiB pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// A mapping that exists until it is dropped. It only hands out raw pointers. Its users must not
/// access the same bytes at the same time.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// The guard of a mapped file.
    guard: Option<Guard>,
}

// SAFETY: a mapping is plain memory, valid on every thread until the drop.
unsafe impl Send for Mapping {}
// SAFETY: the mapping only hands out raw pointers, whose users don't access the same bytes at a
// time.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed memory of at least `len` bytes on reserved huge pages, allocated now. Fails if no
    /// huge pages, or too few, are reserved, which is usual.
    pub(crate) fn huge(len: usize) -> io::Result<Mapping> {
        let len = len.next_multiple_of(HUGE_PAGE_BYTES);
        let start = map_private(len, MapFlags::HUGETLB | MapFlags::POPULATE)?;
        Ok(Mapping { start, len, guard: None })
    }

    /// Zeroed memory of at least `len` bytes, allocated at its first use (or by
    /// [`Mapping::prefault`]), on transparent huge pages if the kernel has them.
    pub(crate) fn anonymous(len: usize) -> io::Result<Mapping> {
        assert!(len > 0);
        let len = len.next_multiple_of(BLOCK_BYTES);
        // Huge pages need aligned addresses. So one huge page more is mapped, and what lies before
        // the aligned start and behind the end is unmapped again.
        let slack = if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 0 };
        let mapped = map_private(len + slack, MapFlags::NORESERVE)?;
        let lead = mapped.as_ptr().align_offset(HUGE_PAGE_BYTES).min(slack);
        let tail = slack - lead;
        // SAFETY: `lead <= slack` bytes at the start and the rest of the slack at the end are part
        // of the new mapping, and unused.
        let start = unsafe {
            let start = mapped.add(lead);
            // A part that cannot be unmapped stays mapped, unused.
            if lead > 0 {
                let _ = munmap(mapped.as_ptr().cast(), lead);
            }
            if tail > 0 {
                let _ = munmap(start.add(len).as_ptr().cast(), tail);
            }
            start
        };
        // SAFETY: the range is the mapping. The call is only advice. It fails on a kernel without
        // transparent huge pages, which is harmless.
        let _ = unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(Mapping { start, len, guard: None })
    }

    /// Allocates the memory of the first `len` bytes now, because a page fault later costs 9 µs:
    /// fifty times a copy of the page. Fails if the machine has not so much memory left, because
    /// the kernel would kill the process.
    pub(crate) fn prefault(&self, len: usize) -> io::Result<()> {
        assert!(len <= self.len);
        if len == 0 {
            return Ok(());
        }
        if memory_available().is_some_and(|available| len as u64 > available) {
            return Err(Errno::NOMEM.into());
        }
        self.populate(len);
        Ok(())
    }

    /// Allocates the memory of the first `len` bytes now, in one call if the kernel can.
    pub(crate) fn populate(&self, len: usize) {
        assert!(len <= self.len);
        // SAFETY: the range is inside the mapping.
        let populated =
            unsafe { madvise(self.start.as_ptr().cast(), len, Advice::LinuxPopulateWrite) };
        if populated.is_err() {
            // Linux before 5.14 does not know this advice.
            self.touch(0..len);
        }
    }

    /// Writes to each page that has any of these bytes, without a change of its content. The kernel
    /// then takes the pages for dirty. No other thread may use the pages.
    pub(crate) fn touch(&self, bytes: Range<usize>) {
        assert!(bytes.end <= self.len);
        let first_page = bytes.start / BLOCK_BYTES * BLOCK_BYTES;
        for offset in (first_page..bytes.end).step_by(BLOCK_BYTES) {
            // SAFETY: inside the mapping, which no other thread uses meanwhile; the value is
            // written back unchanged.
            unsafe {
                let byte = self.start.as_ptr().add(offset);
                byte.write_volatile(byte.read_volatile());
            }
        }
    }

    /// Maps the first `len` bytes of `file`, shared with the file, which must stay open as long as
    /// the mapping exists. An access that fails does not end the process
    /// ([`has_faulted`](Self::has_faulted)).
    ///
    /// `map_sync` asks for MAP_SYNC: a store is then durable once its cache line has left the CPU's
    /// caches. Only a DAX file system supports it. Others answer EOPNOTSUPP, or EINVAL on old
    /// kernels.
    pub(crate) fn shared(file: &File, len: usize, map_sync: bool) -> io::Result<Mapping> {
        let flags = match map_sync {
            true => MapFlags::SHARED_VALIDATE | MapFlags::SYNC,
            false => MapFlags::SHARED,
        } | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let start = unsafe { mmap(ptr::null_mut(), len, READ_WRITE, flags, file, 0) }?;
        let mut mapping = Mapping { start: not_null(start)?, len, guard: None };
        mapping.guard = Some(Guard::new(mapping.start(), len, file)?);
        Ok(mapping)
    }

    /// Whether an access to the mapped file has failed. Its content then differs from the file's.
    #[inline]
    pub(crate) fn has_faulted(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::has_faulted)
    }

    /// The address of the first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Writes a shared mapping back to its file and waits. Fails if an access has failed.
    pub(crate) fn sync(&self) -> io::Result<()> {
        if self.has_faulted() {
            return Err(Errno::IO.into());
        }
        // SAFETY: the range is the mapping.
        Ok(unsafe { msync(self.start.as_ptr().cast(), self.len, MsyncFlags::SYNC) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // From here on the addresses may belong to another mapping.
        self.guard = None;
        // SAFETY: the mapping was created with this start and length (or cut to them), and the
        // users of the pointers keep the mapping alive.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Maps `len` bytes of zeroed memory that no other process shares.
fn map_private(len: usize, flags: MapFlags) -> io::Result<NonNull<u8>> {
    let flags = MapFlags::PRIVATE | flags;
    // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
    not_null(unsafe { mmap_anonymous(ptr::null_mut(), len, READ_WRITE, flags) }?)
}

/// The address that the kernel has chosen. It is never 0: the kernel maps memory there only on
/// request.
fn not_null(start: *mut std::ffi::c_void) -> io::Result<NonNull<u8>> {
    NonNull::new(start.cast()).ok_or_else(|| Errno::NOMEM.into())
}

/// Memory available without swapping, in bytes, if the kernel reports it.
fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_memory_is_zero_and_whole() {
        for len in [BLOCK_BYTES, HUGE_PAGE_BYTES - BLOCK_BYTES, 3 * HUGE_PAGE_BYTES + BLOCK_BYTES] {
            let mapping = Mapping::anonymous(len).unwrap();
            mapping.prefault(len).unwrap();
            assert_eq!(mapping.len(), len);
            // SAFETY: first and last byte of the mapping, one thread.
            unsafe {
                let last = mapping.start().add(len - 1);
                assert_eq!((*mapping.start(), *last), (0, 0));
                *last = 1;
                mapping.prefault(len).unwrap();
                assert_eq!(*last, 1, "prefaulting changes nothing");
            }
        }
    }

    /// The kilobytes of the mapping at `start` that the kernel would write back.
    fn dirty(start: *const u8) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let head = format!("{:x}-", start as usize);
        let lines = maps.lines().skip_while(|line| !line.starts_with(&head)).skip(1);
        let values = lines.take_while(|line| !line.starts_with("VmFlags"));
        let of = ["Shared_Dirty:", "Private_Dirty:"];
        let dirty = values.filter(|line| of.iter().any(|name| line.starts_with(name)));
        dirty.map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum()
    }

    #[test]
    fn t24_pages_that_the_kernel_takes_for_clean_are_written_back_again() {
        // Not in /tmp, which may be memory.
        let test = std::env::current_exe().unwrap();
        let file = tempfile::tempfile_in(test.parent().unwrap()).unwrap();
        let len = 8 * BLOCK_BYTES;
        file.set_len(len as u64).unwrap();
        let mapping = Mapping::shared(&file, len, false).unwrap();
        // SAFETY: inside the mapping, one thread.
        unsafe { *mapping.start().add(len - 1) = 7 };
        mapping.sync().unwrap();
        if dirty(mapping.start()) > 0 {
            return eprintln!("not tested: this file system writes nothing back");
        }
        mapping.touch(BLOCK_BYTES + 8..3 * BLOCK_BYTES);
        assert_eq!(dirty(mapping.start()), 2 * BLOCK_BYTES as u64 / 1024);
        mapping.touch(0..len);
        assert_eq!(dirty(mapping.start()), len as u64 / 1024);
        // SAFETY: as above.
        assert_eq!(unsafe { *mapping.start().add(len - 1) }, 7);
    }

    #[test]
    fn more_than_the_machine_has_is_refused() {
        let mapping = Mapping::anonymous(1 << 45).unwrap();
        assert!(mapping.prefault(1 << 45).is_err());
    }
}
