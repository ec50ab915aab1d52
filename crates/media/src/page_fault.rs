//! Failed page faults of mapped files (SIGBUS), as errors.
//!
//! A load or a store of a mapped file fails if the kernel can't provide the page: the file has been
//! cut short, its disk fails, or a copy-on-write file system (btrfs, XFS with reflinks) has no
//! space for the changed page. The kernel then sends SIGBUS, which ends a process. A target must
//! not end, because it serves more than its log (trap T24 is about the log's content).
//!
//! So the files that [`Mapping::shared`](crate::mapping::Mapping::shared) maps are *guarded*. The
//! handler of the signal replaces the page by anonymous memory with the file's content, as far as
//! that can be read, and the access continues there. The guard records the fault, and from then on
//! every fence of the mapping fails. SIGBUS at any other address goes to the handler that was there
//! before. One that a process sends (`kill -BUS`) is ignored.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering, compiler_fence};

use riopipe_order::block_device::BLOCK_BYTES;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Largest number of mapped files that are guarded at the same time.
const GUARDS_MAX: usize = 1024;

/// One guarded mapping. The signal handler reads it, so it has atomic fields and no lock.
struct Slot {
    is_taken: AtomicBool,
    /// The mapping's first address; 0 while the slot guards nothing.
    start: AtomicUsize,
    len: AtomicUsize,
    file: AtomicI32,
    has_faulted: AtomicBool,
}

static SLOTS: [Slot; GUARDS_MAX] = [const {
    Slot {
        is_taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        file: AtomicI32::new(-1),
        has_faulted: AtomicBool::new(false),
    }
}; GUARDS_MAX];

/// The action for SIGBUS before [`install`]; null until then.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// The guard of one mapping, until it is dropped.
#[derive(Debug)]
pub(crate) struct Guard {
    slot: usize,
}

impl Guard {
    /// Guards the `len` bytes from address `start` on, which map the beginning of `file`. The file
    /// stays open as long as the guard exists.
    ///
    /// # Errors
    /// There are too many mappings.
    pub(crate) fn new(start: *const u8, len: usize, file: &File) -> io::Result<Guard> {
        install()?;
        let take = |slot: &Slot| !slot.is_taken.swap(true, Ordering::AcqRel);
        let slot = SLOTS.iter().position(take).ok_or(Errno::NOMEM)?;
        let Slot { has_faulted, len: slot_len, file: slot_file, start: slot_start, .. } =
            &SLOTS[slot];
        has_faulted.store(false, Ordering::Relaxed);
        slot_len.store(len, Ordering::Relaxed);
        slot_file.store(file.as_raw_fd(), Ordering::Relaxed);
        // The handler uses a slot only with its address, so this store comes last.
        slot_start.store(start as usize, Ordering::Release);
        Ok(Guard { slot })
    }

    /// Whether an access to the mapping has failed. Its content then differs from the file's.
    #[inline]
    pub(crate) fn has_faulted(&self) -> bool {
        // The handler has run on the thread of the access, or the access was before a lock or a
        // message that orders it. The compiler must not move the load before the access.
        compiler_fence(Ordering::SeqCst);
        SLOTS[self.slot].has_faulted.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        SLOTS[self.slot].start.store(0, Ordering::Release);
        SLOTS[self.slot].is_taken.store(false, Ordering::Release);
    }
}

/// Installs the handler, once for the process.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: a query of the current action into a large enough place.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
        }
        // SAFETY: the call above has filled it. It is leaked, since a handler may use it at any
        // time.
        let previous = Box::leak(Box::new(unsafe { previous.assume_init() }));
        PREVIOUS.store(previous, Ordering::Release);
        // SAFETY: an all-zero action is valid; the handler only makes system calls and uses
        // atomics, so it may interrupt any code.
        let result = unsafe {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
        }
    });
    installed.map_err(io::Error::from_raw_os_error)
}

/// The handler of SIGBUS. After it returns, the access that has failed is repeated.
extern "C" fn on_bus_error(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid `info`, and SIGBUS has an address unless a
    // process has sent it.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code <= 0 {
        // Sent by a process (`kill -BUS`), so no access has failed.
        return;
    }
    for slot in &SLOTS {
        let start = slot.start.load(Ordering::Acquire);
        let offset = address.wrapping_sub(start);
        if start != 0 && offset < slot.len.load(Ordering::Relaxed) {
            // Set first: parts of the log that share the page then fail their fences, whatever they
            // store to the replaced page.
            slot.has_faulted.store(true, Ordering::SeqCst);
            if replace_page(slot, start, offset).is_ok() {
                return;
            }
            break;
        }
    }
    // The repeated access raises the signal again, for the handler that was there before.
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: `install` has stored a valid action before it installed this handler.
    unsafe { libc::sigaction(libc::SIGBUS, previous, ptr::null_mut()) };
}

/// Replaces the page with the byte `offset` of a mapping by memory of this process.
fn replace_page(slot: &Slot, start: usize, offset: usize) -> Result<(), Errno> {
    let page_bytes = rustix::param::page_size().max(BLOCK_BYTES);
    let page_offset = offset / page_bytes * page_bytes;
    let page = ptr::without_provenance_mut::<u8>(start + page_offset);
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    let read_write = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the page is in the mapping, which its guard outlives, and which is only used through
    // raw pointers. No valid content is replaced: the kernel could not provide the page.
    unsafe { mmap_anonymous(page.cast(), page_bytes, read_write, flags) }?;
    // SAFETY: the file is open as long as the guard of the slot exists, and the page has been
    // mapped writable.
    let (file, content) = unsafe {
        let file = BorrowedFd::borrow_raw(slot.file.load(Ordering::Relaxed));
        (file, std::slice::from_raw_parts_mut(page, page_bytes))
    };
    // If the file's content can't be read either, the page stays zero.
    let _ = rustix::io::pread(file, content, page_offset as u64);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;

    #[test]
    fn an_access_behind_the_end_of_a_file_is_recorded_and_goes_on() {
        let file = tempfile::tempfile().unwrap();
        let len = 4 * BLOCK_BYTES;
        file.set_len(len as u64).unwrap();
        let other = Mapping::shared(&file, len, false).unwrap();
        for round in 0..3 {
            file.set_len(len as u64).unwrap();
            let mapping = Mapping::shared(&file, len, false).unwrap();
            // SAFETY: inside the mapping, one thread.
            unsafe {
                *mapping.start() = 7;
                assert!(!mapping.has_faulted());
                file.set_len(BLOCK_BYTES as u64).unwrap();
                assert_eq!(mapping.start().add(2 * BLOCK_BYTES).read_volatile(), 0);
                mapping.start().add(3 * BLOCK_BYTES).write_volatile(9);
                assert_eq!(mapping.start().add(3 * BLOCK_BYTES).read_volatile(), 9);
                assert_eq!(mapping.start().read_volatile(), 7, "round {round}");
            }
            assert!(mapping.has_faulted());
            assert!(mapping.sync().is_err());
            // SAFETY: a signal to this thread, whose handler returns.
            assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
        }
        assert!(!other.has_faulted(), "a mapping is responsible for its own accesses only");
    }
}
