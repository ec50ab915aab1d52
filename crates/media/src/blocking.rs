//! A drive with calls that wait for their results, for tools, tests and start-up.

use std::os::fd::{BorrowedFd, RawFd};

use riopipe_order::block_device::IoError;
use riopipe_platform::now_ns;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::buf::AlignedBuf;
use crate::drive::{Data, Done, Drive, Queue, Submitted};
use crate::error::OpenError;

/// A queue with one operation at a time. Each call returns when its operation has finished.
pub struct Blocking {
    queue: Box<dyn Queue>,
}

impl Blocking {
    /// Opens a queue of `drive` for one thread.
    ///
    /// # Errors
    /// Those of [`Drive::open_queue`].
    pub fn new(drive: &dyn Drive) -> Result<Blocking, OpenError> {
        Ok(Blocking { queue: drive.open_queue(1)? })
    }

    /// Writes whole blocks from block `lba` on.
    pub fn write(&mut self, lba: u64, bytes: &[u8]) -> Result<(), IoError> {
        let submitted = self.queue.write(0, lba, Data::Borrowed(bytes));
        self.wait(submitted).map(drop)
    }

    /// Reads `blocks` blocks from `lba` on.
    pub fn read(&mut self, lba: u64, blocks: u64) -> Result<AlignedBuf, IoError> {
        let submitted = self.queue.read(0, lba, blocks);
        // Every queue answers a successful read with a buffer.
        self.wait(submitted).map(|buf| buf.expect("a read brings a buffer"))
    }

    /// Makes all completed writes durable.
    pub fn flush(&mut self) -> Result<(), IoError> {
        let submitted = self.queue.flush(0);
        self.wait(submitted).map(drop)
    }

    /// Makes blocks read as zeroes.
    pub fn write_zeroes(&mut self, lba: u64, blocks: u64) -> Result<(), IoError> {
        let submitted = self.queue.write_zeroes(0, lba, blocks);
        self.wait(submitted).map(drop)
    }

    /// Deallocates blocks; they read as zeroes.
    pub fn deallocate(&mut self, lba: u64, blocks: u64) -> Result<(), IoError> {
        let submitted = self.queue.deallocate(0, lba, blocks);
        self.wait(submitted).map(drop)
    }

    /// Waits for the result of the operation that was just submitted.
    fn wait(&mut self, submitted: Submitted) -> Result<Option<AlignedBuf>, IoError> {
        if let Submitted::Done(result) = submitted {
            return result;
        }
        self.queue.kick(now_ns());
        let mut done: Vec<Done> = Vec::new();
        loop {
            let now = now_ns();
            self.queue.poll(now, &mut done);
            if let Some(done) = done.pop() {
                return done.result;
            }
            let deadline = self.queue.next_deadline();
            let timeout_ns = deadline.map_or(SLEEP_NS_MAX, |due| due.saturating_sub(now));
            sleep(self.queue.event_fd(), timeout_ns.min(SLEEP_NS_MAX));
        }
    }
}

/// Longest sleep in ns. The sleep is short, because an earlier wait may have consumed the event of
/// the operation.
const SLEEP_NS_MAX: u64 = 1_000_000;

/// Sleeps until `fd` is readable or the time-out has passed.
fn sleep(fd: Option<RawFd>, timeout_ns: u64) {
    let timeout = Timespec {
        tv_sec: (timeout_ns / 1_000_000_000) as i64,
        tv_nsec: (timeout_ns % 1_000_000_000) as i64,
    };
    // SAFETY: the descriptor belongs to the queue, which the caller has borrowed for longer than
    // this call.
    let fd = fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
    let mut polled = fd.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    // The result does not matter, because the caller checks for completions after any wait.
    let _ = poll(polled.as_mut_slice(), Some(&timeout));
    if let (Some(fd), Some(polled)) = (fd, polled)
        && polled.revents().contains(PollFlags::IN)
    {
        // Resets the event counter of 8 bytes.
        let _ = rustix::io::read(fd, &mut [0u8; 8]);
    }
}
