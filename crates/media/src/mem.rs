//! `mem:` drives: blocks in this process's memory, for tests, lower bounds of cost, and scratch
//! space.
//!
//! A queue that has the drive to itself needs no locks. Several queues exclude each other by locks,
//! each of which serves every 4096th block.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use riopipe_order::block_device::{BLOCK_BYTES, BlockDevice, Limits, Operation};

use crate::buf::AlignedBuf;
use crate::copy::{copy_block, copy_block_unpublished, publish_copies};
use crate::drive::{Data, Done, Drive, Geometry, Queue, Submitted};
use crate::error::OpenError;
use crate::mapping::Mapping;
use crate::survival::{Kept, Survival};

/// Number of locks for blocks. Block `lba` has the lock `lba % LOCK_COUNT`.
const LOCK_COUNT: usize = 4096;

/// A drive in memory: every operation finishes within its call.
pub(crate) struct MemDrive {
    shared: Arc<SharedMemory>,
}

/// The drive's blocks, shared by its queues.
struct SharedMemory {
    memory: Mapping,
    /// By the locks, readers and writers of one block exclude each other. So a block is read and
    /// written as a whole (assumption M1), and shared access to the memory is sound. An uncontended
    /// lock costs a few nanoseconds, but it is only released when memory has the whole block. The
    /// only queue of a drive needs no lock.
    locks: Box<[AtomicBool]>,
    open_queues: Mutex<OpenQueues>,
    geometry: Geometry,
    name: Arc<str>,
}

/// The queues that are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenQueues {
    /// This number of queues, which exclude each other by the locks.
    Shared(usize),
    /// One queue, beside which no other one can be opened.
    Exclusive,
}

impl MemDrive {
    /// A drive of `bytes` bytes (whole blocks), all zero. `prefault`: the memory is allocated now.
    pub(crate) fn new(bytes: u64, prefault: bool) -> Result<MemDrive, OpenError> {
        let DriveMemory { mapping, is_on_huge_pages } = allocate_memory(bytes, prefault)
            .map_err(|source| OpenError::Memory { what: "a drive in memory", bytes, source })?;
        let pages = if is_on_huge_pages { " on huge pages" } else { "" };
        let describe = format!("memory, {} MiB{pages}", bytes >> 20);
        Ok(MemDrive {
            shared: Arc::new(SharedMemory {
                memory: mapping,
                locks: (0..LOCK_COUNT).map(|_| AtomicBool::new(false)).collect(),
                open_queues: Mutex::new(OpenQueues::Shared(0)),
                geometry: Geometry {
                    block_size: BLOCK_BYTES as u32,
                    blocks: bytes / BLOCK_BYTES as u64,
                    volatile_cache: false,
                    atomic_block: true,
                    describe,
                },
                name: Arc::from(format!("mem:{bytes}")),
            }),
        })
    }
}

impl Drive for MemDrive {
    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn open_queue(&self, _depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        match &mut *self.shared.open_queues() {
            OpenQueues::Exclusive => Err(OpenError::Taken { drive: self.shared.name.to_string() }),
            OpenQueues::Shared(count) => {
                *count += 1;
                Ok(Box::new(MemQueue::new(&self.shared, false)))
            }
        }
    }

    fn open_only_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        let mut open_queues = self.shared.open_queues();
        if *open_queues != OpenQueues::Shared(0) {
            drop(open_queues);
            return self.open_queue(depth);
        }
        *open_queues = OpenQueues::Exclusive;
        Ok(Box::new(MemQueue::new(&self.shared, true)))
    }

    fn survives(&self) -> Survival {
        Survival { process_kill: Kept::Nothing, power_cut: Kept::Nothing, note: "" }
    }
}

/// A queue of a drive in memory. Its operations finish within their calls.
struct MemQueue {
    shared: Arc<SharedMemory>,
    limits: Limits,
    /// Whether no other queue is open, and none can be opened.
    is_exclusive: bool,
}

impl MemQueue {
    fn new(shared: &Arc<SharedMemory>, is_exclusive: bool) -> Self {
        let limits = Limits::new(shared.geometry.blocks, &shared.name);
        Self { shared: Arc::clone(shared), limits, is_exclusive }
    }

    /// Makes the writes of an exclusive queue visible. Must be called before every access other
    /// than a write: a write uses streaming stores, and until they are published no thread may read
    /// them, not even the thread that made them.
    ///
    /// Queues that share the drive publish each write at once.
    #[inline]
    fn publish_writes(&self) {
        if self.is_exclusive {
            publish_copies();
        }
    }

    /// Runs `access` on the block's memory, with other users of the block excluded.
    #[inline]
    fn with_block(&self, lba: u64, access: impl FnOnce(*mut u8)) {
        match self.is_exclusive {
            true => access(self.shared.block_address(lba)),
            false => self.shared.with_locked_block(lba, access),
        }
    }
}

impl Drop for MemQueue {
    fn drop(&mut self) {
        // The next queue must see the writes of this one. If another thread has written and handed
        // the queue over, the hand-over has published its writes (see `Drive::open_only_queue`).
        publish_copies();
        let mut open_queues = self.shared.open_queues();
        *open_queues = match *open_queues {
            OpenQueues::Exclusive => OpenQueues::Shared(0),
            OpenQueues::Shared(count) => OpenQueues::Shared(count - 1),
        };
    }
}

impl BlockDevice for MemQueue {
    type Buf = AlignedBuf;

    #[inline]
    fn write(&mut self, _op: u64, lba: u64, data: Data<'_>) -> Submitted {
        let bytes = data.bytes();
        if let Err(error) = self.limits.data(Operation::Write, lba, bytes.len()) {
            return Submitted::Done(Err(error));
        }
        for (lba, block) in (lba..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
            let is_exclusive = self.is_exclusive;
            // SAFETY: `limits` has checked the range, so the block is inside the memory and
            // aligned. `block` has BLOCK_BYTES bytes. `with_block` excludes other queues. Beside an
            // exclusive queue there is no other until the queue is dropped, which publishes the
            // copies. Later accesses of an exclusive queue come after `publish_copies`, except
            // another copy to the same block, whose stores the processor keeps in order.
            self.with_block(lba, |to| unsafe {
                match is_exclusive {
                    true => copy_block_unpublished(to, block.as_ptr()),
                    false => copy_block(to, block.as_ptr()),
                }
            });
        }
        Submitted::Done(Ok(None))
    }

    fn read(&mut self, _op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.limits.blocks(Operation::Read, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        self.publish_writes();
        let mut buf = AlignedBuf::with_any_content(blocks as usize * BLOCK_BYTES);
        if self.is_exclusive {
            // One copy of all blocks takes two thirds of the time of a copy of each.
            // SAFETY: as in `write`, with source and destination exchanged. The blocks lie one behind
            // the other, and `buf` has space for all of them.
            unsafe {
                let from = self.shared.block_address(lba);
                std::ptr::copy_nonoverlapping(from, buf.as_mut_ptr(), buf.len());
            }
            return Submitted::Done(Ok(Some(buf)));
        }
        for (lba, block) in (lba..).zip(buf.chunks_exact_mut(BLOCK_BYTES)) {
            self.with_block(lba, |from| {
                // SAFETY: as in `write`, with source and destination exchanged.
                unsafe { std::ptr::copy_nonoverlapping(from, block.as_mut_ptr(), BLOCK_BYTES) }
            });
        }
        Submitted::Done(Ok(Some(buf)))
    }

    fn flush(&mut self, _op: u64) -> Submitted {
        Submitted::Done(Ok(None))
    }

    fn write_zeroes(&mut self, _op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.limits.extent(Operation::WriteZeroes, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        self.publish_writes();
        for lba in lba..lba + blocks {
            // SAFETY: as in `write`.
            self.with_block(lba, |to| unsafe { to.write_bytes(0, BLOCK_BYTES) });
        }
        Submitted::Done(Ok(None))
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.write_zeroes(op, lba, blocks)
    }

    fn kick(&mut self, _now: u64) {}

    fn poll(&mut self, _now: u64, _done: &mut Vec<Done>) {}

    fn next_deadline(&self) -> Option<u64> {
        None
    }

    fn in_flight(&self) -> usize {
        0
    }
}

impl Queue for MemQueue {
    fn event_fd(&self) -> Option<RawFd> {
        None
    }
}

impl SharedMemory {
    /// Runs `access` on the block's memory with its lock held.
    #[inline]
    fn with_locked_block(&self, lba: u64, access: impl FnOnce(*mut u8)) {
        let lock = &self.locks[lba as usize % LOCK_COUNT];
        let mut spins = 0u32;
        while lock.swap(true, Ordering::Acquire) {
            // The holder of the lock copies for 0.2 µs. A longer wait means that the kernel has
            // stopped the holder's thread, and may need this core to run it.
            spins += 1;
            match spins % 64 {
                0 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
        access(self.block_address(lba));
        lock.store(false, Ordering::Release);
    }

    /// The address of the block's memory. It is inside the mapping, because every caller has
    /// checked `lba` against the geometry, which is not larger.
    #[inline]
    fn block_address(&self, lba: u64) -> *mut u8 {
        self.memory.start().wrapping_add(lba as usize * BLOCK_BYTES)
    }

    fn open_queues(&self) -> std::sync::MutexGuard<'_, OpenQueues> {
        // A panic can't leave the value half changed: each change is one assignment.
        self.open_queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of a drive.
struct DriveMemory {
    mapping: Mapping,
    /// Whether the memory is on huge pages that the administrator has reserved.
    is_on_huge_pages: bool,
}

/// Zeroed memory for a drive of `bytes` bytes. With `prefault`, the memory is allocated now, on
/// reserved huge pages if there are enough.
fn allocate_memory(bytes: u64, prefault: bool) -> io::Result<DriveMemory> {
    let len = usize::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
    if prefault && let Ok(mapping) = Mapping::huge(len) {
        return Ok(DriveMemory { mapping, is_on_huge_pages: true });
    }
    let mapping = Mapping::anonymous(len)?;
    if prefault {
        mapping.prefault(len)?;
    }
    Ok(DriveMemory { mapping, is_on_huge_pages: false })
}
