//! `file:` and `block:` drives.
//!
//! A queue checks and admits operations. It hands them as [`Request`]s to an [`Engine`]: io_uring,
//! or threads on systems that forbid io_uring.

use std::os::fd::RawFd;
use std::sync::Arc;

use riopipe_order::block_device::{BLOCK_BYTES, BlockDevice, Cause, Limits, Operation};

use crate::buf::AlignedBuf;
use crate::drive::{Data, Done, Drive, Geometry, Queue, Submitted};
use crate::error::OpenError;
use crate::identity::Carrier;
use crate::medium::{Medium, Space};
use crate::request::{Disk, Engine, Request};
use crate::survival::{Kept, Survival};
use crate::threads::Threads;
use crate::uring::Uring;
use crate::watched::CHECK_INTERVAL_NS;

/// Time in ns after which a queue hands over again the requests that the kernel has refused. No
/// event shows when the kernel accepts requests again.
const RETRY_AFTER_NS: u64 = 1_000_000;

/// A drive on a file or a block device.
pub(crate) struct DiskDrive {
    disk: Arc<Disk>,
    geometry: Geometry,
    /// Whether queues use threads in place of io_uring.
    uses_threads: bool,
}

impl DiskDrive {
    /// A drive on an opened medium. `volatile_cache` is the specification's value, which replaces
    /// the medium's own. `without_uring` forbids io_uring.
    pub(crate) fn new(
        medium: Medium,
        volatile_cache: Option<bool>,
        without_uring: bool,
    ) -> DiskDrive {
        let kind = if medium.device { "block" } else { "file" };
        let name: Arc<str> = Arc::from(format!("{kind}:{}", medium.path));
        let volatile_cache = volatile_cache.unwrap_or_else(|| match medium.device {
            // A device that may tear a block is not protected, whatever its cache (M1).
            true => !medium.device_is_protected(),
            // Behind the file are the page cache of this machine, and a disk that may have a cache.
            false => true,
        });
        let mut geometry = Geometry {
            block_size: BLOCK_BYTES as u32,
            blocks: medium.len / BLOCK_BYTES as u64,
            volatile_cache,
            // The specification's `plp` declares this, too.
            atomic_block: medium.device && (!volatile_cache || medium.device_has_atomic_blocks()),
            describe: String::new(),
        };
        let disk = Disk::new(medium, Limits::new(geometry.blocks, &name));
        let uses_threads = without_uring || !has_uring(&disk, &name);
        let medium = &disk.medium;
        geometry.describe = format!(
            "{} {}, {} MiB, {}{}{}{}",
            if medium.device { "block device" } else { "file" },
            medium.path,
            medium.len >> 20,
            if uses_threads { "threads" } else { "io_uring" },
            if medium.direct { ", direct I/O" } else { ", page cache" },
            if volatile_cache { ", volatile cache" } else { ", power-loss protection" },
            if medium.space == Space::Holes { ", space not reserved" } else { "" },
        );
        DiskDrive { disk, geometry, uses_threads }
    }
}

/// Whether the system has io_uring, which is tried once for each drive. Logs the reason if it is
/// missing.
fn has_uring(disk: &Arc<Disk>, drive_name: &str) -> bool {
    match Uring::new(Arc::clone(disk), 1) {
        Ok(_) => true,
        Err(error) => {
            tracing::warn!(
                drive = drive_name,
                "no io_uring here ({error}): using threads, which is slower; containers often \
                 forbid it by seccomp"
            );
            false
        }
    }
}

impl Drive for DiskDrive {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        let depth = depth.max(1);
        let disk = Arc::clone(&self.disk);
        let os_error = |source| OpenError::Os {
            path: self.disk.medium.path.clone(),
            doing: "start a queue for it",
            source,
        };
        if self.uses_threads {
            let engine = Threads::new(Arc::clone(&disk), depth).map_err(os_error)?;
            return Ok(Box::new(DiskQueue::new(engine, disk, depth)));
        }
        let engine = Uring::new(Arc::clone(&disk), depth).map_err(os_error)?;
        Ok(Box::new(DiskQueue::new(engine, disk, depth)))
    }

    fn carrier(&self) -> Option<Carrier<'_>> {
        Some(Carrier::new(&self.disk.medium.file))
    }

    fn survives(&self) -> Survival {
        Survival {
            process_kill: Kept::Completed,
            power_cut: match self.geometry.volatile_cache {
                true => Kept::Flushed,
                false => Kept::Completed,
            },
            note: match (self.geometry.atomic_block, self.disk.medium.device) {
                (true, _) => "",
                (false, false) => FILE_NOTE,
                (false, true) => DEVICE_NOTE,
            },
        }
    }
}

/// The remark about a file.
const FILE_NOTE: &str = "the host's file system may tear a block that was not flushed";
/// The remark about a device whose atomic unit is below 4096 bytes.
pub(crate) const DEVICE_NOTE: &str = "the system reports no atomic writes of 4096 bytes for the \
    device, so it is not taken for one with power-loss protection: a power cut may tear a block \
    that was not flushed (if the device has this protection, give plp)";

/// The survival of a drive in a file that has just been created.
pub(crate) const fn survival_of_file() -> Survival {
    Survival { process_kill: Kept::Completed, power_cut: Kept::Flushed, note: FILE_NOTE }
}

/// A queue to a disk. The engine carries out its requests.
struct DiskQueue<E> {
    engine: E,
    disk: Arc<Disk>,
    /// Largest number of requests in flight.
    depth: usize,
    /// Time of the last poll in ns.
    last_poll: u64,
    /// Time of the last check of the medium in ns.
    last_check: u64,
}

impl<E: Engine> DiskQueue<E> {
    fn new(engine: E, disk: Arc<Disk>, depth: usize) -> Self {
        Self { engine, disk, depth, last_poll: 0, last_check: 0 }
    }

    /// Checks that one more request may be submitted. The error is the reason against it.
    fn check_admission(&self) -> Result<(), Cause> {
        if self.engine.in_flight() >= self.depth {
            return Err(Cause::QueueFull { depth: self.depth });
        }
        match self.disk.medium.gone() {
            Some(gone) => Err(Cause::Vanished(gone)),
            None => Ok(()),
        }
    }

    /// Passes a request to the engine, unless the queue refuses the operation. `make_request` is
    /// only called for an admitted operation.
    fn submit(
        &mut self,
        what: Operation,
        lba: u64,
        blocks: u64,
        make_request: impl FnOnce(&Disk) -> Request,
    ) -> Submitted {
        if let Err(cause) = self.check_admission() {
            return Submitted::Done(Err(self.disk.limits.error(what, lba, blocks, cause)));
        }
        self.engine.push(make_request(&self.disk));
        Submitted::Pending
    }

    /// Submits an operation that makes blocks read as zeroes.
    fn submit_zeroing(&mut self, what: Operation, op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.disk.limits.extent(what, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        self.submit(what, lba, blocks, |disk| Request::zero(op, what, lba, blocks, disk))
    }
}

impl<E: Engine> BlockDevice for DiskQueue<E> {
    type Buf = AlignedBuf;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted {
        let len = data.bytes().len();
        if let Err(error) = self.disk.limits.data(Operation::Write, lba, len) {
            return Submitted::Done(Err(error));
        }
        self.submit(Operation::Write, lba, (len / BLOCK_BYTES) as u64, |_| {
            let buf = match data {
                Data::Borrowed(bytes) => AlignedBuf::copy_of(bytes),
                Data::Owned(buf) => buf,
            };
            Request::write(op, lba, buf)
        })
    }

    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.disk.limits.blocks(Operation::Read, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        self.submit(Operation::Read, lba, blocks, |_| Request::read(op, lba, blocks))
    }

    fn flush(&mut self, op: u64) -> Submitted {
        self.submit(Operation::Flush, 0, 0, |_| Request::flush(op))
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.submit_zeroing(Operation::WriteZeroes, op, lba, blocks)
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.submit_zeroing(Operation::Deallocate, op, lba, blocks)
    }

    fn kick(&mut self, _now: u64) {
        self.engine.kick();
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done>) {
        if self.engine.in_flight() == 0 {
            return;
        }
        self.last_poll = now;
        self.engine.poll(done);
        if now.saturating_sub(self.last_check) >= CHECK_INTERVAL_NS {
            self.last_check = now;
            // The disk remembers a failed check, so that all later requests fail.
            let _ = self.disk.check();
        }
    }

    /// No time at which an operation ends is known. Only a stalled engine must be polled at a
    /// certain time: without the poll, its requests would wait for ever (promise P8).
    fn next_deadline(&self) -> Option<u64> {
        let must_retry = self.engine.in_flight() > 0 && self.engine.is_stalled();
        must_retry.then(|| self.last_poll.saturating_add(RETRY_AFTER_NS))
    }

    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }
}

impl<E: Engine> Queue for DiskQueue<E> {
    fn event_fd(&self) -> Option<RawFd> {
        Some(self.engine.event_fd())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::medium::{LockWait, Reserve};
    use crate::request::Step;

    /// A disk on a new file of 16 blocks in `dir`.
    fn disk(dir: &tempfile::TempDir) -> Arc<Disk> {
        let path = dir.path().join("drive").display().to_string();
        let busy = LockWait::within(Duration::ZERO);
        let medium = Medium::file(&path, Some(65536), Reserve::Try, false, busy).unwrap();
        Disk::new(medium, Limits::new(16, &Arc::from("a test's")))
    }

    /// The mode of the request's next step, which is a `fallocate`.
    fn allocation(request: &mut Request, disk: &Disk) -> i32 {
        match request.step(disk) {
            Step::Allocate { mode, .. } => mode & !libc::FALLOC_FL_KEEP_SIZE,
            _ => panic!("another step"),
        }
    }

    #[test]
    fn a_file_that_is_served_again_without_its_size_keeps_its_space() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("drive").display().to_string();
        assert_eq!(disk(&dir).medium.space, Space::Reserved);
        let reopen = |reserve| {
            let medium =
                Medium::file(&path, None, reserve, false, LockWait::within(Duration::ZERO));
            Disk::new(medium.unwrap(), Limits::new(16, &Arc::from("a test's")))
        };
        let deallocate = |disk: &Disk| Request::zero(1, Operation::Deallocate, 0, 4, disk);

        let allocated = reopen(Reserve::Try);
        assert_eq!(allocated.medium.space, Space::Allocated);
        let mut request = deallocate(&allocated);
        assert_eq!(allocation(&mut request, &allocated), libc::FALLOC_FL_ZERO_RANGE);
        // The file system copies on write, and is full.
        assert!(request.advance(&allocated, -libc::ENOSPC).is_none());
        assert_eq!(allocation(&mut request, &allocated), libc::FALLOC_FL_PUNCH_HOLE);
        drop(allocated);

        // Holes are asked for.
        let sparse = reopen(Reserve::No);
        assert_eq!(sparse.medium.space, Space::Holes);
        assert_eq!(allocation(&mut deallocate(&sparse), &sparse), libc::FALLOC_FL_PUNCH_HOLE);
        drop(sparse);

        // One block of the file has space.
        let file = std::fs::File::create(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; BLOCK_BYTES], 0).unwrap();
        file.set_len(65536).unwrap();
        drop(file);
        assert_eq!(reopen(Reserve::Try).medium.space, Space::Holes);
    }

    /// An engine that accepts requests, and is stalled for the first polls.
    struct Stalling {
        polls: u32,
        request: Option<Request>,
    }

    impl Engine for Stalling {
        fn push(&mut self, request: Request) {
            self.request = Some(request);
        }

        fn kick(&mut self) {}

        fn poll(&mut self, done: &mut Vec<Done>) {
            self.polls = self.polls.saturating_sub(1);
            if self.polls == 0 {
                done.extend(self.request.take().map(|r| Done { op: r.op, result: Ok(None) }));
            }
        }

        fn event_fd(&self) -> RawFd {
            -1
        }

        fn in_flight(&self) -> usize {
            usize::from(self.request.is_some())
        }

        fn is_stalled(&self) -> bool {
            self.polls > 0
        }
    }

    #[test]
    fn a_stalled_queue_is_polled_again_soon() {
        let dir = tempfile::tempdir().unwrap();
        let engine = Stalling { polls: 2, request: None };
        let mut queue = DiskQueue::new(engine, disk(&dir), 1);
        assert_eq!(queue.next_deadline(), None, "it has nothing to hand over");
        assert!(matches!(queue.flush(7), Submitted::Pending));
        let (now, mut done) = (5_000_000_000, Vec::new());
        queue.kick(now);
        queue.poll(now, &mut done);
        let due = queue.next_deadline().unwrap();
        assert!(done.is_empty() && due > now && due <= now + 1_000_000);
        queue.poll(due, &mut done);
        assert_eq!((done.len(), queue.next_deadline()), (1, None));
    }

    #[test]
    fn requests_that_the_kernel_refused_are_submitted_again() {
        let dir = tempfile::tempdir().unwrap();
        let disk = disk(&dir);
        let Some(engine) = Uring::new(Arc::clone(&disk), 4).ok().and_then(Uring::refused) else {
            return eprintln!("not tested: no io_uring whose calls can be made to fail");
        };
        let mut queue = DiskQueue::new(engine, disk, 4);
        assert!(matches!(queue.flush(7), Submitted::Pending));
        let (mut now, mut done) = (5_000_000_000, Vec::new());
        queue.kick(now);
        let mut deadlines = Vec::new();
        for _ in 0..3 {
            queue.poll(now, &mut done);
            deadlines.push(queue.next_deadline());
            now += RETRY_AFTER_NS;
        }
        // Before anything can fail: the end of the queue waits for its requests.
        queue.engine.accepted();
        assert!(done.is_empty());
        assert!(deadlines.iter().all(Option::is_some), "it is to be polled again: {deadlines:?}");
        while done.is_empty() {
            queue.poll(now, &mut done);
        }
        assert!(done[0].op == 7 && done[0].result.is_ok());
        assert_eq!(queue.next_deadline(), None);
    }
}
