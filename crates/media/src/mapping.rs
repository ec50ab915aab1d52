//! Memory that drives and logs live in: anonymous, or a mapped file.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use riopipe_order::block_device::BLOCK_SIZE;

/// A huge page on x86-64 and on arm64 with 4 KiB pages.
const HUGE: usize = 2 << 20;

const PRIVATE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// A mapping that stays until it is dropped. It hands out raw pointers only: who shares it says
/// how access is kept apart.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory, valid on every thread until the drop.
unsafe impl Send for Mapping {}
// SAFETY: it only hands out raw pointers; their users keep access apart.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed memory of at least `len` bytes on reserved huge pages, all of it there. Fails where
    /// none (or too few) are reserved, which is usual.
    pub(crate) fn huge(len: usize) -> io::Result<Mapping> {
        let len = len.next_multiple_of(HUGE);
        let flags = libc::MAP_HUGETLB | libc::MAP_POPULATE;
        let start = map(len, PRIVATE | flags, -1)?;
        Ok(Mapping { start, len })
    }

    /// Zeroed memory of at least `len` bytes, taken as it is first used (or by
    /// [`Mapping::prefault`]), on transparent huge pages where the kernel gives them.
    pub(crate) fn anonymous(len: usize) -> io::Result<Mapping> {
        assert!(len > 0);
        // Huge pages need aligned addresses: map one more and cut both ends.
        let len = len.next_multiple_of(BLOCK_SIZE);
        let slack = if len >= HUGE { HUGE } else { 0 };
        let start = map(len + slack, PRIVATE | libc::MAP_NORESERVE, -1)?;
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
        // SAFETY: the range is the mapping. Advice only: a kernel without it says no, and that is
        // fine.
        unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        Ok(Mapping { start, len })
    }

    /// Takes the memory for the first `len` bytes now: a page fault costs 9 µs, fifty times a copy
    /// of the page. More than the machine has left is refused: better now than killed for lack
    /// of memory later.
    pub(crate) fn prefault(&self, len: usize) -> io::Result<()> {
        assert!(len <= self.len);
        if len == 0 {
            return Ok(());
        }
        if memory_available().is_some_and(|available| len as u64 > available) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        // SAFETY: the range is inside the mapping.
        let code =
            unsafe { libc::madvise(self.start.as_ptr().cast(), len, libc::MADV_POPULATE_WRITE) };
        if code != 0 {
            // Before Linux 5.14: touch every page.
            for offset in (0..len).step_by(BLOCK_SIZE) {
                // SAFETY: inside the mapping, which its maker has not shared yet; the value is
                // written back unchanged.
                unsafe {
                    let byte = self.start.as_ptr().add(offset);
                    byte.write_volatile(byte.read_volatile());
                }
            }
        }
        Ok(())
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
        Ok(Mapping { start, len })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Writes a shared mapping back to its file and waits.
    pub(crate) fn sync(&self) -> io::Result<()> {
        // SAFETY: the range is the mapping.
        let code = unsafe { libc::msync(self.start.as_ptr().cast(), self.len, libc::MS_SYNC) };
        if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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
    fn anonymous_memory_is_zero_and_whole() {
        for len in [BLOCK_SIZE, HUGE - BLOCK_SIZE, 3 * HUGE + BLOCK_SIZE] {
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

    #[test]
    fn more_than_the_machine_has_is_refused() {
        let mapping = Mapping::anonymous(1 << 45).unwrap();
        assert!(mapping.prefault(1 << 45).is_err());
    }
}
