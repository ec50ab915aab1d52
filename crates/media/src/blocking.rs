//! A drive for those who would rather wait: tools, tests, start-up.

use std::os::fd::RawFd;

use riopipe_order::block_device::IoError;

use crate::buf::AlignedBuf;
use crate::clock::now;
use crate::drive::{Data, Done, Drive, Queue, Submitted};
use crate::error::OpenError;

/// A queue with one operation at a time; each call returns when it is done.
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
        // Every queue answers a good read with a buffer.
        self.wait(submitted).map(|buf| buf.expect("a read brings a buffer"))
    }

    /// Makes durable what has completed.
    pub fn flush(&mut self) -> Result<(), IoError> {
        let submitted = self.queue.flush(0);
        self.wait(submitted).map(drop)
    }

    /// Makes blocks read as zeroes.
    pub fn write_zeroes(&mut self, lba: u64, blocks: u64) -> Result<(), IoError> {
        let submitted = self.queue.write_zeroes(0, lba, blocks);
        self.wait(submitted).map(drop)
    }

    /// Gives blocks up; they read as zeroes.
    pub fn deallocate(&mut self, lba: u64, blocks: u64) -> Result<(), IoError> {
        let submitted = self.queue.deallocate(0, lba, blocks);
        self.wait(submitted).map(drop)
    }

    fn wait(&mut self, submitted: Submitted) -> Result<Option<AlignedBuf>, IoError> {
        if let Submitted::Done(result) = submitted {
            return result;
        }
        self.queue.kick(now());
        let mut done: Vec<Done> = Vec::new();
        loop {
            let now = now();
            self.queue.poll(now, &mut done);
            if let Some(done) = done.pop() {
                return done.result;
            }
            let deadline = self.queue.next_deadline();
            let timeout_ns = deadline.map_or(MAX_SLEEP_NS, |due| due.saturating_sub(now));
            sleep(self.queue.event_fd(), timeout_ns.min(MAX_SLEEP_NS));
        }
    }
}

/// Wake up at least this often (ns): an event may have been consumed by an earlier wait.
const MAX_SLEEP_NS: u64 = 1_000_000;

/// Sleeps until `fd` is readable or the time is over.
fn sleep(fd: Option<RawFd>, timeout_ns: u64) {
    let mut poll = libc::pollfd { fd: fd.unwrap_or(-1), events: libc::POLLIN, revents: 0 };
    let timeout = libc::timespec {
        tv_sec: (timeout_ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (timeout_ns % 1_000_000_000) as libc::c_long,
    };
    // SAFETY: one valid pollfd (a negative descriptor is ignored) and a valid timespec; however
    // the wait ends, the caller looks again.
    unsafe {
        libc::ppoll(&mut poll, 1, &timeout, std::ptr::null());
        if poll.revents & libc::POLLIN != 0 {
            let mut count = [0u8; 8];
            libc::read(poll.fd, count.as_mut_ptr().cast(), count.len());
        }
    }
}
