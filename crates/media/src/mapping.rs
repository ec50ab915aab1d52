//! Memory that drives and logs live in: anonymous, or a mapped file.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use crate::drive::BLOCK_SIZE;

/// A huge page on x86-64 and on arm64 with 4 KiB pages.
const HUGE: usize = 2 << 20;

/// A mapping that stays until it is dropped. It hands out raw pointers only: who shares it says
/// how access is kept apart.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    huge: bool,
}

// SAFETY: a mapping is plain memory, valid on every thread until the drop.
unsafe impl Send for Mapping {}
// SAFETY: it only hands out raw pointers; their users keep access apart.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed memory of at least `len` bytes on huge pages where they can be had (reserved ones,
    /// else transparent ones). With `prefault` every page is there before this returns: a page
    /// fault costs 9 µs, thirty times a copy of the page.
    pub(crate) fn anonymous(len: usize, prefault: bool) -> io::Result<Mapping> {
        assert!(len > 0);
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        if prefault && len >= HUGE {
            let rounded = len.next_multiple_of(HUGE);
            let flags = private | libc::MAP_HUGETLB | libc::MAP_POPULATE;
            if let Ok(start) = map(rounded, flags, -1) {
                return Ok(Mapping { start, len: rounded, huge: true });
            }
        }
        let available = memory_available();
        if prefault && available.is_some_and(|available| len as u64 > available) {
            // Better refused now than killed for lack of memory later.
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        // Transparent huge pages need aligned addresses: map a huge page more and cut both ends.
        let len = len.next_multiple_of(BLOCK_SIZE);
        let slack = if len >= HUGE { HUGE } else { 0 };
        let start = map(len + slack, private | libc::MAP_NORESERVE, -1)?;
        let lead = start.as_ptr().align_offset(HUGE).min(slack);
        // SAFETY: `lead <= slack` bytes at the start and the rest of the slack at the end are part
        // of the mapping just made, and nobody uses them.
        let start = unsafe {
            let kept = start.add(lead);
            if lead > 0 {
                libc::munmap(start.as_ptr().cast(), lead);
            }
            if slack > lead {
                libc::munmap(kept.add(len).as_ptr().cast(), slack - lead);
            }
            kept
        };
        let mapping = Mapping { start, len, huge: false };
        // SAFETY: the range is the mapping. Advice only: a kernel without it says no, and that is
        // fine.
        unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        if prefault {
            mapping.prefault();
        }
        Ok(mapping)
    }

    /// The first `len` bytes of `file`, shared with it. `sync` asks for MAP_SYNC: only a DAX file
    /// system agrees, and then a store is durable once its line has left the CPU's caches; others
    /// answer EOPNOTSUPP (or EINVAL, old kernels).
    pub(crate) fn shared(file: &File, len: usize, sync: bool) -> io::Result<Mapping> {
        let flags = match sync {
            true => libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC,
            false => libc::MAP_SHARED,
        };
        let start = map(len, flags | libc::MAP_POPULATE, file.as_raw_fd())?;
        Ok(Mapping { start, len, huge: false })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// On reserved huge pages (transparent ones come as the kernel sees fit).
    pub(crate) fn is_huge(&self) -> bool {
        self.huge
    }

    /// Gives the pages of a private mapping back: they read as zeroes afterwards.
    pub(crate) fn discard(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset + len <= self.len);
        // SAFETY: the range is inside the mapping; the caller keeps others away from it.
        let code = unsafe {
            libc::madvise(self.start.as_ptr().add(offset).cast(), len, libc::MADV_DONTNEED)
        };
        if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Writes a shared mapping back to its file and waits.
    pub(crate) fn sync(&self) -> io::Result<()> {
        // SAFETY: the range is the mapping.
        let code = unsafe { libc::msync(self.start.as_ptr().cast(), self.len, libc::MS_SYNC) };
        if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn prefault(&self) {
        // SAFETY: the range is the mapping.
        let code = unsafe {
            libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_POPULATE_WRITE)
        };
        if code != 0 {
            // Before Linux 5.14: touch every page.
            for offset in (0..self.len).step_by(BLOCK_SIZE) {
                // SAFETY: inside the mapping, which nobody else knows yet and which is all zero.
                unsafe { self.start.as_ptr().add(offset).write_volatile(0) };
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `map` with this start and length (or cut to them), and the users of the
        // pointers handed out keep the mapping alive.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

fn map(len: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let start = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
    };
    match NonNull::new(start.cast()) {
        Some(start) if start.as_ptr() as *mut libc::c_void != libc::MAP_FAILED => Ok(start),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Bytes that can be had without swapping, as far as the kernel tells.
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
    fn anonymous_memory_is_zero_whole_and_discardable() {
        for len in [BLOCK_SIZE, HUGE - BLOCK_SIZE, 3 * HUGE + BLOCK_SIZE] {
            let mapping = Mapping::anonymous(len, true).unwrap();
            assert!(mapping.len() >= len);
            // SAFETY: first and last byte of the mapping, one thread.
            unsafe {
                let last = mapping.start().add(mapping.len() - 1);
                assert_eq!((*mapping.start(), *last), (0, 0));
                *last = 1;
                if !mapping.is_huge() {
                    mapping.discard(0, mapping.len()).unwrap();
                    assert_eq!(*last, 0);
                }
            }
        }
    }

    #[test]
    fn more_than_the_machine_has_is_refused() {
        assert!(Mapping::anonymous(1 << 46, true).is_err());
    }
}
