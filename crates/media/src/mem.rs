//! `mem:` drives: blocks in this process's memory, for tests, lower bounds of cost, and scratch
//! space.

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

/// Number of locks for blocks: each serves the blocks whose number is the same modulo this.
const STRIPES: usize = 4096;

/// A drive in memory: every operation finishes within its call.
pub(crate) struct Mem {
    shared: Arc<Shared>,
}

struct Shared {
    memory: Mapping,
    /// Readers and writers of one block exclude each other: this makes a block atomic (M1) and
    /// shared memory sound. An uncontended lock costs a few nanoseconds, but it is only released
    /// when memory has the whole block. The only queue of a drive needs no lock.
    locks: Box<[AtomicBool]>,
    queues: Mutex<Queues>,
    geometry: Geometry,
    name: Arc<str>,
}

/// The users of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queues {
    /// Number of queues that exclude each other by the locks.
    Sharing(usize),
    /// One queue, beside which none can be opened.
    Alone,
}

impl Mem {
    /// A drive of `bytes` (whole blocks), all zero. `prefault`: the memory is allocated now.
    pub(crate) fn new(bytes: u64, prefault: bool) -> Result<Mem, OpenError> {
        let (memory, pages) = memory(bytes, prefault).map_err(|source| OpenError::Memory {
            what: "a drive in memory",
            bytes,
            source,
        })?;
        let describe = format!("memory, {} MiB{pages}", bytes >> 20);
        Ok(Mem {
            shared: Arc::new(Shared {
                memory,
                locks: (0..STRIPES).map(|_| AtomicBool::new(false)).collect(),
                queues: Mutex::new(Queues::Sharing(0)),
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

impl Drive for Mem {
    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn open_queue(&self, _depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        match &mut *self.shared.queues() {
            Queues::Alone => Err(OpenError::Taken { drive: self.shared.name.to_string() }),
            Queues::Sharing(count) => {
                *count += 1;
                Ok(Box::new(MemQueue::new(&self.shared, false)))
            }
        }
    }

    fn open_only_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        let mut queues = self.shared.queues();
        if *queues != Queues::Sharing(0) {
            drop(queues);
            return self.open_queue(depth);
        }
        *queues = Queues::Alone;
        Ok(Box::new(MemQueue::new(&self.shared, true)))
    }

    fn survives(&self) -> Survival {
        Survival { process_kill: Kept::Nothing, power_cut: Kept::Nothing, note: "" }
    }
}

struct MemQueue {
    shared: Arc<Shared>,
    limits: Limits,
    /// No other queue is open, and none can be opened.
    alone: bool,
}

impl MemQueue {
    fn new(shared: &Arc<Shared>, alone: bool) -> Self {
        let limits = Limits::new(shared.geometry.blocks, &shared.name);
        Self { shared: Arc::clone(shared), limits, alone }
    }

    /// Makes this queue's copies visible. It precedes every access except another copy: until then
    /// no thread may read streaming stores, including the one that made them.
    #[inline]
    fn publish(&self) {
        if self.alone {
            publish_copies();
        }
    }

    /// Runs `access` on the block's memory, with others excluded.
    #[inline]
    fn with_block(&self, lba: u64, access: impl FnOnce(*mut u8)) {
        match self.alone {
            true => access(self.shared.block(lba)),
            false => self.shared.with_block(lba, access),
        }
    }
}

impl Drop for MemQueue {
    fn drop(&mut self) {
        // The next queue sees the writes of this one. Writes of another thread, which handed the
        // queue over, were published by the hand-over (see `Drive::open_only_queue`).
        publish_copies();
        let mut queues = self.shared.queues();
        *queues = match *queues {
            Queues::Alone => Queues::Sharing(0),
            Queues::Sharing(count) => Queues::Sharing(count - 1),
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
            let alone = self.alone;
            // SAFETY: `limits` has checked the range, so the block is inside the memory and
            // aligned. `with_block` excludes other queues; if there are none now, there will be
            // none until this queue has been dropped, which publishes the copies. `block` has
            // BLOCK_BYTES bytes. Later accesses of this queue come after `publish_copies`, except
            // another copy to the same block, whose stores the processor keeps in order.
            self.with_block(lba, |to| unsafe {
                match alone {
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
        self.publish();
        let mut buf = AlignedBuf::recycled(blocks as usize * BLOCK_BYTES);
        for (lba, block) in (lba..).zip(buf.chunks_exact_mut(BLOCK_BYTES)) {
            self.with_block(lba, |from| {
                // SAFETY: as in `write`, in the other direction.
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
        self.publish();
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

impl Shared {
    /// Runs `access` on the block's memory with its lock held.
    #[inline]
    fn with_block(&self, lba: u64, access: impl FnOnce(*mut u8)) {
        let lock = &self.locks[lba as usize % STRIPES];
        let mut spins = 0u32;
        while lock.swap(true, Ordering::Acquire) {
            // The holder copies for 0.2 µs; a longer wait means that its thread was descheduled.
            spins += 1;
            match spins % 64 {
                0 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
        access(self.block(lba));
        lock.store(false, Ordering::Release);
    }

    /// The address is inside the memory: every caller has checked the range against the geometry,
    /// which is not larger.
    #[inline]
    fn block(&self, lba: u64) -> *mut u8 {
        self.memory.start().wrapping_add(lba as usize * BLOCK_BYTES)
    }

    fn queues(&self) -> std::sync::MutexGuard<'_, Queues> {
        // Each change is one assignment, so the value is always consistent.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory, and a description of its pages.
fn memory(bytes: u64, prefault: bool) -> io::Result<(Mapping, &'static str)> {
    let len = usize::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
    if prefault && let Ok(memory) = Mapping::huge(len) {
        return Ok((memory, " on huge pages"));
    }
    let memory = Mapping::anonymous(len)?;
    if prefault {
        memory.prefault(len)?;
    }
    Ok((memory, ""))
}
