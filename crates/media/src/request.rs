//! One operation on a file or device, as a sequence of steps for the kernel. The io_uring queue and
//! the threaded queue share it.
//!
//! ```text
//! Request::step ──▶ Step ──▶ kernel ──▶ answer ──▶ Request::advance ──▶ result
//!       ▲                                                 │
//!       └──────────────── another step is needed ─────────┘
//! ```
//!
//! Most operations need one step. More are needed after a short read or write, after an
//! interruption, and for zeroes: see [`Zeroing`].

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use riopipe_order::block_device::{BLOCK_BYTES, Cause, Gone, IoError, Limits, Operation};

use crate::buf::AlignedBuf;
use crate::drive::Done;
use crate::error::cause_of;
use crate::medium::{Medium, Space};
use crate::watched::Watched;

/// Size in bytes of the pieces in which zeroes are written if the medium supports nothing better.
const ZERO_PIECE_BYTES: usize = 1 << 20;

/// A medium as its queues share it.
pub(crate) struct Disk {
    pub(crate) medium: Watched,
    pub(crate) limits: Limits,
    /// Whether `FALLOC_FL_PUNCH_HOLE` may be tried.
    can_punch: AtomicBool,
    /// Whether deallocated blocks become a hole. Otherwise they keep their space as long as zeroes
    /// need none.
    prefers_holes: bool,
    /// Whether `FALLOC_FL_ZERO_RANGE` may be tried.
    can_zero_range: AtomicBool,
    /// [`ZERO_PIECE_BYTES`] zero bytes, allocated when they are first needed.
    zeroes: OnceLock<AlignedBuf>,
}

impl Disk {
    pub(crate) fn new(medium: Medium, limits: Limits) -> Arc<Disk> {
        // Reserved space must stay reserved, because on a full disk a hole could not be filled
        // again. Space that is only allocated is kept, too. But if zeroes in it need new space (the
        // file system copies on write), a hole is the last way on a full disk.
        let can_punch = medium.device || medium.space != Space::Reserved;
        let prefers_holes = medium.device || medium.space == Space::Holes;
        Arc::new(Disk {
            medium: Watched::new(medium),
            limits,
            can_punch: AtomicBool::new(can_punch),
            prefers_holes,
            can_zero_range: AtomicBool::new(true),
            zeroes: OnceLock::new(),
        })
    }

    /// Checks that the medium still exists, and remembers if it does not.
    pub(crate) fn check(&self) -> Result<(), Gone> {
        self.medium.check()
    }

    fn zeroes(&self) -> &AlignedBuf {
        self.zeroes.get_or_init(|| AlignedBuf::zeroed(ZERO_PIECE_BYTES))
    }
}

/// An operation in flight.
pub(crate) struct Request {
    pub(crate) op: u64,
    what: Operation,
    lba: u64,
    blocks: u64,
    /// The data of a write, the destination of a read.
    buf: Option<AlignedBuf>,
    /// Number of bytes done so far.
    progress: u64,
    /// How the blocks are zeroed, if the operation is one that zeroes.
    zeroing: Zeroing,
}

/// The way in which blocks are zeroed.
///
/// A request tries the ways in their order, beginning with the first one that suits the operation
/// and the medium. If the kernel does not support a way, the request goes on with the next. On a
/// full disk, a request that needs new space goes back to [`Punch`](Self::Punch).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Zeroing {
    /// By a hole in the file (`FALLOC_FL_PUNCH_HOLE`).
    Punch,
    /// By the file system's operation for ranges of zeroes (`FALLOC_FL_ZERO_RANGE`).
    Range,
    /// By writing zeroes.
    Write,
}

/// The progress of a request: the result of its operation, or `None` if the operation needs another
/// step.
type Progress = Option<Result<Option<AlignedBuf>, IoError>>;

/// Hands requests to the kernel, and takes the results back.
pub(crate) trait Engine: Send {
    /// Takes a request. The caller never has more requests in flight than the engine was created
    /// for.
    fn push(&mut self, request: Request);
    /// Hands the requests that were pushed to the kernel.
    fn kick(&mut self);
    /// Adds the finished requests to `done`.
    fn poll(&mut self, done: &mut Vec<Done>);
    /// A descriptor that becomes readable when a request has finished.
    fn event_fd(&self) -> RawFd;
    /// The number of requests that were pushed and have not finished.
    fn in_flight(&self) -> usize;
    /// Whether the kernel has refused requests. Only the next `poll` hands them over again, and the
    /// event descriptor need not become readable before.
    fn is_stalled(&self) -> bool;
}

/// One step for the kernel. `offset` and `len` are in bytes.
///
/// The pointers are into the request's buffer, or into the disk's zeroes. They are valid for `len`
/// bytes until the step has ended.
pub(crate) enum Step {
    Write {
        from: *const u8,
        len: u32,
        offset: u64,
    },
    Read {
        to: *mut u8,
        len: u32,
        offset: u64,
    },
    /// `fdatasync`
    Sync,
    /// `fallocate` with the flags `mode`.
    Allocate {
        mode: i32,
        offset: u64,
        len: u64,
    },
}

impl Request {
    pub(crate) fn write(op: u64, lba: u64, buf: AlignedBuf) -> Request {
        let blocks = (buf.len() / BLOCK_BYTES) as u64;
        Request::new(op, Operation::Write, lba, blocks, Some(buf))
    }

    pub(crate) fn read(op: u64, lba: u64, blocks: u64) -> Request {
        let buf = AlignedBuf::with_any_content(blocks as usize * BLOCK_BYTES);
        Request::new(op, Operation::Read, lba, blocks, Some(buf))
    }

    pub(crate) fn flush(op: u64) -> Request {
        Request::new(op, Operation::Flush, 0, 0, None)
    }

    /// A request that makes blocks read as zeroes: `what` is to write zeroes, or to deallocate.
    pub(crate) fn zero(op: u64, what: Operation, lba: u64, blocks: u64, disk: &Disk) -> Request {
        let mut request = Request::new(op, what, lba, blocks, None);
        let may_punch = what == Operation::Deallocate
            && disk.prefers_holes
            && disk.can_punch.load(Ordering::Relaxed);
        request.zeroing = if may_punch {
            Zeroing::Punch
        } else if disk.can_zero_range.load(Ordering::Relaxed) {
            Zeroing::Range
        } else {
            Zeroing::Write
        };
        request
    }

    fn new(op: u64, what: Operation, lba: u64, blocks: u64, buf: Option<AlignedBuf>) -> Request {
        Request { op, what, lba, blocks, buf, progress: 0, zeroing: Zeroing::Write }
    }

    /// The next step for the kernel.
    pub(crate) fn step(&mut self, disk: &Disk) -> Step {
        let offset = self.offset();
        match (self.what, &mut self.buf) {
            (Operation::Flush, _) => Step::Sync,
            (Operation::Read, Some(buf)) => {
                let rest = &mut buf[self.progress as usize..];
                Step::Read { to: rest.as_mut_ptr(), len: rest.len() as u32, offset }
            }
            (Operation::Write, Some(buf)) => {
                let rest = &buf[self.progress as usize..];
                Step::Write { from: rest.as_ptr(), len: rest.len() as u32, offset }
            }
            _ => self.zeroing_step(disk),
        }
    }

    /// The next step of an operation that zeroes blocks.
    fn zeroing_step(&self, disk: &Disk) -> Step {
        let offset = self.offset();
        let len = self.len() - self.progress;
        match self.zeroing {
            Zeroing::Punch => Step::Allocate {
                mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                offset,
                len,
            },
            Zeroing::Range => Step::Allocate {
                mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                offset,
                len,
            },
            Zeroing::Write => {
                let len = len.min(ZERO_PIECE_BYTES as u64) as u32;
                Step::Write { from: disk.zeroes().as_ptr(), len, offset }
            }
        }
    }

    /// Takes the kernel's answer to the last step: the number of bytes done, or a negative error
    /// number.
    pub(crate) fn advance(&mut self, disk: &Disk, answer: i32) -> Progress {
        if answer < 0 {
            return self.on_error(disk, -answer);
        }
        let carries_data = self.buf.is_some();
        let writes_zeroes =
            !carries_data && self.what != Operation::Flush && self.zeroing == Zeroing::Write;
        if carries_data || writes_zeroes {
            // Only whole blocks count. The next step repeats a block that was done in part.
            let whole_blocks_len = answer as u64 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            if whole_blocks_len == 0 {
                return self.on_no_progress(disk);
            }
            self.progress += whole_blocks_len;
            if self.progress < self.len() {
                return None;
            }
        }
        // The kernel also flushes a deleted file. Such a flush must not succeed, because nothing in
        // the file will be found again.
        if self.what == Operation::Flush
            && let Err(gone) = disk.check()
        {
            return Some(Err(self.error(disk, Cause::Vanished(gone))));
        }
        Some(Ok(match self.what {
            Operation::Read => self.buf.take(),
            _ => None,
        }))
    }

    /// The error of this operation with the given cause.
    fn error(&self, disk: &Disk, cause: Cause) -> IoError {
        disk.limits.error(self.what, self.lba, self.blocks, cause)
    }

    /// Length of the operation in bytes.
    fn len(&self) -> u64 {
        self.blocks * BLOCK_BYTES as u64
    }

    /// The byte of the medium at which the next step begins.
    fn offset(&self) -> u64 {
        self.lba * BLOCK_BYTES as u64 + self.progress
    }

    /// Handles an error of the last step: the next step repeats it, or zeroes in another way, or
    /// the operation fails.
    #[cold]
    fn on_error(&mut self, disk: &Disk, errno: i32) -> Progress {
        let is_unsupported = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS);
        let is_full = matches!(errno, libc::ENOSPC | libc::EDQUOT);
        match (self.what, self.zeroing) {
            _ if errno == libc::EINTR || errno == libc::EAGAIN => return None,
            (Operation::Deallocate, Zeroing::Punch) if is_unsupported => {
                disk.can_punch.store(false, Ordering::Relaxed);
                self.zeroing = Zeroing::Range;
                return None;
            }
            (Operation::Deallocate | Operation::WriteZeroes, Zeroing::Range) if is_unsupported => {
                disk.can_zero_range.store(false, Ordering::Relaxed);
                self.zeroing = Zeroing::Write;
                return None;
            }
            // A full disk has no space for zeroes. A hole reads as zeroes, too, and needs no space.
            // Without this way, a stream whose write found no space could never be undone (P8,
            // T10).
            (Operation::Deallocate | Operation::WriteZeroes, Zeroing::Range | Zeroing::Write)
                if is_full && disk.can_punch.load(Ordering::Relaxed) =>
            {
                self.zeroing = Zeroing::Punch;
                return None;
            }
            // The disk is full, and a hole was the last way to zero the blocks.
            (Operation::WriteZeroes, Zeroing::Punch) if is_unsupported => {
                disk.can_punch.store(false, Ordering::Relaxed);
                return Some(Err(self.error(disk, cause_of(libc::ENOSPC))));
            }
            _ => {}
        }
        Some(Err(self.error(disk, cause_of(errno))))
    }

    /// The kernel has done no whole block, and has returned no error. That happens at the end of a
    /// file that has become shorter.
    #[cold]
    fn on_no_progress(&mut self, disk: &Disk) -> Progress {
        let cause = match disk.check() {
            Err(gone) => Cause::Vanished(gone),
            Ok(()) => cause_of(libc::EIO),
        };
        Some(Err(self.error(disk, cause)))
    }
}
