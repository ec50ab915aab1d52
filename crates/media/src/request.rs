//! One operation on a file or device, as a sequence of steps for the kernel; shared by the io_uring
//! queue and the threaded one.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use riopipe_order::block_device::{BLOCK_BYTES, Cause, Gone, IoError, Limits, Operation};

use crate::buf::AlignedBuf;
use crate::drive::Done;
use crate::error::cause_of;
use crate::medium::Medium;

/// Size in bytes of the pieces in which zeroes are written if the medium supports nothing better.
const ZERO_PIECE: usize = 1 << 20;

/// A medium as its queues share it.
pub(crate) struct Disk {
    pub(crate) medium: Medium,
    pub(crate) limits: Limits,
    /// `FALLOC_FL_PUNCH_HOLE` may be tried.
    can_punch: AtomicBool,
    /// `FALLOC_FL_ZERO_RANGE` may be tried.
    can_zero: AtomicBool,
    /// Set once the medium is found gone: all later operations fail.
    gone: OnceLock<Gone>,
    /// [`ZERO_PIECE`] zero bytes, made when they are first needed.
    zeroes: OnceLock<AlignedBuf>,
}

impl Disk {
    pub(crate) fn new(medium: Medium, limits: Limits) -> Arc<Disk> {
        // Reserved space stays reserved: on a full disk a hole could not be filled again.
        let can_punch = medium.device || !medium.reserved;
        Arc::new(Disk {
            medium,
            limits,
            can_punch: AtomicBool::new(can_punch),
            can_zero: AtomicBool::new(true),
            gone: OnceLock::new(),
            zeroes: OnceLock::new(),
        })
    }

    /// Checks that the medium still exists, unless it is known to be gone.
    pub(crate) fn check(&self) -> Result<(), Gone> {
        if let Some(gone) = self.gone.get() {
            return Err(*gone);
        }
        self.medium.check().inspect_err(|gone| {
            tracing::error!(path = self.medium.path, "{gone}");
            // Another thread may have been first; either reason is right.
            let _ = self.gone.set(*gone);
        })
    }

    /// The reason for which all operations fail, if there is one.
    pub(crate) fn gone(&self) -> Option<Gone> {
        self.gone.get().copied()
    }

    fn zeroes(&self) -> &AlignedBuf {
        self.zeroes.get_or_init(|| AlignedBuf::zeroed(ZERO_PIECE))
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
    zeroing: Zeroing,
}

/// How blocks are being zeroed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Zeroing {
    /// By a hole in the file.
    Punch,
    /// By the file system's operation for ranges of zeroes.
    Range,
    /// By writing zeroes.
    Write,
}

/// How requests get to the kernel and back.
pub(crate) trait Engine: Send {
    /// Takes a request. The caller limits their number to the one that the engine was made for.
    fn push(&mut self, request: Request);
    /// Hands the requests that were pushed to the kernel.
    fn kick(&mut self);
    /// Adds the finished requests to `done`.
    fn poll(&mut self, done: &mut Vec<Done>);
    /// A descriptor that becomes readable when a request has finished.
    fn event_fd(&self) -> RawFd;
    /// The number of requests that were pushed and have not finished.
    fn in_flight(&self) -> usize;
    /// Whether the kernel has refused requests that only the next `poll` hands over again. Nothing
    /// need signal the event descriptor before.
    fn is_stalled(&self) -> bool;
}

/// The next step for the kernel. Pointers are into the request's buffer, or the disk's zeroes,
/// and valid for `len` bytes until the step has ended.
pub(crate) enum Step {
    Write { from: *const u8, len: u32, offset: u64 },
    Read { to: *mut u8, len: u32, offset: u64 },
    Sync,
    Allocate { mode: i32, offset: u64, len: u64 },
}

impl Request {
    pub(crate) fn write(op: u64, lba: u64, buf: AlignedBuf) -> Request {
        let blocks = (buf.len() / BLOCK_BYTES) as u64;
        Request::new(op, Operation::Write, lba, blocks, Some(buf))
    }

    pub(crate) fn read(op: u64, lba: u64, blocks: u64) -> Request {
        let buf = AlignedBuf::recycled(blocks as usize * BLOCK_BYTES);
        Request::new(op, Operation::Read, lba, blocks, Some(buf))
    }

    pub(crate) fn flush(op: u64) -> Request {
        Request::new(op, Operation::Flush, 0, 0, None)
    }

    /// Write zeroes or deallocate.
    pub(crate) fn zero(op: u64, what: Operation, lba: u64, blocks: u64, disk: &Disk) -> Request {
        let mut request = Request::new(op, what, lba, blocks, None);
        let punch = what == Operation::Deallocate && disk.can_punch.load(Ordering::Relaxed);
        let range = disk.can_zero.load(Ordering::Relaxed);
        request.zeroing = match (punch, range) {
            (true, _) => Zeroing::Punch,
            (false, true) => Zeroing::Range,
            (false, false) => Zeroing::Write,
        };
        request
    }

    fn new(op: u64, what: Operation, lba: u64, blocks: u64, buf: Option<AlignedBuf>) -> Request {
        Request { op, what, lba, blocks, buf, progress: 0, zeroing: Zeroing::Write }
    }

    /// The next step.
    pub(crate) fn step(&mut self, disk: &Disk) -> Step {
        let start = self.lba * BLOCK_BYTES as u64;
        let offset = start + self.progress;
        let left = self.len() - self.progress;
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
            _ => match self.zeroing {
                Zeroing::Punch => Step::Allocate {
                    mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                    offset,
                    len: left,
                },
                Zeroing::Range => Step::Allocate {
                    mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                    offset,
                    len: left,
                },
                Zeroing::Write => {
                    let len = left.min(ZERO_PIECE as u64) as u32;
                    Step::Write { from: disk.zeroes().as_ptr(), len, offset }
                }
            },
        }
    }

    /// Takes the kernel's answer to the last step (bytes done, or a negative error number). Returns
    /// the operation's end, or `None` if it needs another step.
    pub(crate) fn advance(
        &mut self,
        disk: &Disk,
        answer: i32,
    ) -> Option<Result<Option<AlignedBuf>, IoError>> {
        if answer < 0 {
            return self.failed(disk, -answer);
        }
        let carries_data = self.buf.is_some();
        let zeroes_written =
            !carries_data && self.what != Operation::Flush && self.zeroing == Zeroing::Write;
        if carries_data || zeroes_written {
            // Only whole blocks count; the rest of a block is repeated.
            let whole = answer as u64 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            if whole == 0 {
                return self.stuck(disk);
            }
            self.progress += whole;
            if self.progress < self.len() {
                return None;
            }
        }
        // A deleted file still accepts writes; a flush of it must not succeed.
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

    /// The error of an operation that failed for a reason of the host's.
    pub(crate) fn error(&self, disk: &Disk, cause: Cause) -> IoError {
        disk.limits.error(self.what, self.lba, self.blocks, cause)
    }

    fn len(&self) -> u64 {
        self.blocks * BLOCK_BYTES as u64
    }

    #[cold]
    fn failed(&mut self, disk: &Disk, errno: i32) -> Option<Result<Option<AlignedBuf>, IoError>> {
        let unsupported = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS);
        let is_full = matches!(errno, libc::ENOSPC | libc::EDQUOT);
        match (self.what, self.zeroing) {
            _ if errno == libc::EINTR || errno == libc::EAGAIN => return None,
            (Operation::Deallocate, Zeroing::Punch) if unsupported => {
                disk.can_punch.store(false, Ordering::Relaxed);
                self.zeroing = Zeroing::Range;
                return None;
            }
            (Operation::Deallocate | Operation::WriteZeroes, Zeroing::Range) if unsupported => {
                disk.can_zero.store(false, Ordering::Relaxed);
                self.zeroing = Zeroing::Write;
                return None;
            }
            // A full disk has no space for zeroes, and a hole reads as zeroes, too. Else a stream
            // whose write found no space could never be undone (P8, T10).
            (Operation::Deallocate | Operation::WriteZeroes, Zeroing::Range | Zeroing::Write)
                if is_full && disk.can_punch.load(Ordering::Relaxed) =>
            {
                self.zeroing = Zeroing::Punch;
                return None;
            }
            (Operation::WriteZeroes, Zeroing::Punch) if unsupported => {
                disk.can_punch.store(false, Ordering::Relaxed);
                return Some(Err(self.error(disk, cause_of(libc::ENOSPC))));
            }
            _ => {}
        }
        Some(Err(self.error(disk, cause_of(errno))))
    }

    /// The kernel did nothing and returned no error: the end of the file, if the file has become
    /// shorter.
    #[cold]
    fn stuck(&mut self, disk: &Disk) -> Option<Result<Option<AlignedBuf>, IoError>> {
        let cause = match disk.check() {
            Err(gone) => Cause::Vanished(gone),
            Ok(()) => cause_of(libc::EIO),
        };
        Some(Err(self.error(disk, cause)))
    }
}
