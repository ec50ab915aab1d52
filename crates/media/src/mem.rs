//! `mem:` drives: blocks in this process's memory. For tests, floors and scratch space.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::buf::AlignedBuf;
use crate::check::Limits;
use crate::copy::copy_block;
use crate::drive::{BLOCK_SIZE, Data, Done, Drive, Geometry, Queue, Submitted};
use crate::error::{OpenError, Operation};
use crate::mapping::Mapping;
use crate::survival::{Kept, Survival};

/// Locks for blocks: one serves each block whose number is the same modulo this.
const STRIPES: usize = 4096;

/// A drive in memory: every operation finishes within its call.
pub(crate) struct Mem {
    shared: Arc<Shared>,
}

struct Shared {
    memory: Mapping,
    /// Readers and writers of one block exclude each other: that is what makes a block atomic
    /// (M1) and shared memory sound. An uncontended lock costs a few nanoseconds.
    locks: Box<[AtomicBool]>,
    geometry: Geometry,
    name: Arc<str>,
}

impl Mem {
    /// A drive of `bytes` (whole blocks), all zero. `prefault`: take the memory now.
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
                geometry: Geometry {
                    block_size: BLOCK_SIZE as u32,
                    blocks: bytes / BLOCK_SIZE as u64,
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

    fn open_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        let _ = depth;
        Ok(Box::new(MemQueue {
            limits: Limits::new(&self.shared.geometry, &self.shared.name),
            shared: Arc::clone(&self.shared),
        }))
    }

    fn survives(&self) -> Survival {
        Survival { process_kill: Kept::Nothing, power_cut: Kept::Nothing, note: "" }
    }
}

struct MemQueue {
    shared: Arc<Shared>,
    limits: Limits,
}

impl Queue for MemQueue {
    #[inline]
    fn write(&mut self, _op: u64, lba: u64, data: Data<'_>) -> Submitted {
        let bytes = data.bytes();
        if let Err(error) = self.limits.data(Operation::Write, lba, bytes.len()) {
            return Submitted::Done(Err(error));
        }
        for (lba, block) in (lba..).zip(bytes.chunks_exact(BLOCK_SIZE)) {
            // SAFETY: `limits` has checked the range, so the block is inside the memory and
            // aligned; its lock keeps others away; `block` has BLOCK_SIZE bytes.
            self.shared.with_block(lba, |to| unsafe { copy_block(to, block.as_ptr()) });
        }
        Submitted::Done(Ok(None))
    }

    fn read(&mut self, _op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.limits.blocks(Operation::Read, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        let mut buf = AlignedBuf::recycled(blocks as usize * BLOCK_SIZE);
        for (lba, block) in (lba..).zip(buf.chunks_exact_mut(BLOCK_SIZE)) {
            self.shared.with_block(lba, |from| {
                // SAFETY: as in `write`, in the other direction.
                unsafe { std::ptr::copy_nonoverlapping(from, block.as_mut_ptr(), BLOCK_SIZE) }
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
        for lba in lba..lba + blocks {
            // SAFETY: as in `write`.
            self.shared.with_block(lba, |to| unsafe { to.write_bytes(0, BLOCK_SIZE) });
        }
        Submitted::Done(Ok(None))
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.write_zeroes(op, lba, blocks)
    }

    fn kick(&mut self) {}

    fn poll(&mut self, _now: u64, _done: &mut Vec<Done>) {}

    fn next_deadline(&self) -> Option<u64> {
        None
    }

    fn event_fd(&self) -> Option<RawFd> {
        None
    }

    fn in_flight(&self) -> usize {
        0
    }
}

impl Shared {
    /// Runs `access` on the block's memory with its lock held.
    #[inline]
    fn with_block(&self, lba: u64, access: impl FnOnce(*mut u8)) {
        let lock = &self.locks[lba as usize % STRIPES];
        let mut spins = 0u32;
        while lock.swap(true, Ordering::Acquire) {
            // The holder copies for 0.2 µs; if it takes longer, it has been descheduled.
            spins += 1;
            match spins % 64 {
                0 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
        // Inside the memory: every caller has checked the range against the geometry, which is
        // not larger.
        access(self.memory.start().wrapping_add(lba as usize * BLOCK_SIZE));
        lock.store(false, Ordering::Release);
    }
}

/// The memory, and what to say of its pages.
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
