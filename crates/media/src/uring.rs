//! A queue over io_uring: one ring per queue, submissions in batches, completions without a system
//! call where possible.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, Probe, opcode, squeue};

use riopipe_platform::EventFd;

use crate::drive::Done;
use crate::request::{Disk, Engine, Request, Step};

/// A ring with its requests.
pub(crate) struct Uring {
    // Dropped before `requests`, whose buffers the kernel uses until the ring is gone. `Drop` has
    // also waited for them.
    ring: IoUring,
    /// The requests in flight, by slot. The slot is the `user_data` of the ring's entries.
    requests: Vec<Option<Request>>,
    /// The free slots.
    free: Vec<u32>,
    disk: Arc<Disk>,
    eventfd: EventFd,
    /// Whether the ring has been enabled. The first thread that submits does this, and no other
    /// thread may use the ring from then on.
    enabled: bool,
    /// The slots of requests whose next step is to be put into the ring.
    waiting: Vec<u32>,
    /// The kernel accepts nothing for now. The next poll submits `waiting`, and the entries that
    /// are still in the ring.
    stalled: bool,
    /// The failure of the last system call has been logged: a stalled ring makes many calls.
    logged: bool,
    in_flight: usize,
}

/// The outcome of a system call.
enum Entered {
    Done,
    /// The kernel accepts nothing for now; the entries stay in the ring.
    Later,
    /// The ring belongs to another thread.
    NotOurs,
}

impl Uring {
    /// A ring for `depth` requests. It fails if io_uring is missing, too old or forbidden.
    pub(crate) fn new(disk: Arc<Disk>, depth: usize) -> io::Result<Uring> {
        let entries = depth.next_power_of_two().clamp(1, 4096) as u32;
        let ring = ring(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed =
            [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let eventfd = EventFd::new()?;
        ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        Ok(Uring {
            ring,
            requests: (0..depth).map(|_| None).collect(),
            free: (0..depth as u32).rev().collect(),
            disk,
            eventfd,
            enabled: false,
            waiting: Vec::with_capacity(depth),
            stalled: false,
            logged: false,
            in_flight: 0,
        })
    }

    /// Puts the next step of all waiting requests into the ring, and submits the entries.
    fn submit(&mut self) {
        self.stalled = false;
        if !self.enabled {
            match self.ring.submitter().register_enable_rings() {
                Ok(()) => self.enabled = true,
                // A ring that was created enabled answers EBADFD.
                Err(error) if error.raw_os_error() == Some(libc::EBADFD) => self.enabled = true,
                Err(error) => {
                    if !std::mem::replace(&mut self.logged, true) {
                        tracing::error!(%error, "can't enable the io_uring, will try again");
                    }
                    self.stalled = true;
                    return;
                }
            }
        }
        // Not a registered file: the ring ends asynchronously, and would keep the file's lock.
        let file = Fd(self.disk.medium.file.as_raw_fd());
        // Each round fills the ring, as far as there is space in it.
        while !self.waiting.is_empty() {
            let mut ring = self.ring.submission();
            while let Some(slot) = self.waiting.last().copied() {
                let Some(request) = self.requests[slot as usize].as_mut() else {
                    unreachable!("slot {slot} waits without a request");
                };
                let entry = entry(file, request.step(&self.disk)).user_data(u64::from(slot));
                // SAFETY: the memory that the entry names is in the request (or in the disk's
                // zeroes) and stays there, unmoved, until its completion has been seen.
                if unsafe { ring.push(&entry) }.is_err() {
                    break;
                }
                self.waiting.pop();
            }
            drop(ring);
            match self.enter(0) {
                Entered::Done => {}
                Entered::Later => {
                    self.stalled = true;
                    return;
                }
                Entered::NotOurs => panic!("a queue belongs to the thread that used it first"),
            }
        }
    }

    /// One system call: submits, runs the work that the kernel has deferred to this thread, and
    /// waits for `want` completions.
    fn enter(&mut self, want: usize) -> Entered {
        match self.ring.submit_and_wait(want) {
            Ok(_) => {
                self.logged = false;
                // The kernel may have taken only the first entries.
                if self.ring.submission().is_empty() { Entered::Done } else { Entered::Later }
            }
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Entered::NotOurs,
            Err(error) => {
                let passing = [libc::EINTR, libc::EAGAIN, libc::EBUSY];
                if !error.raw_os_error().is_some_and(|code| passing.contains(&code))
                    && !std::mem::replace(&mut self.logged, true)
                {
                    tracing::error!(%error, "io_uring_enter failed, will try again");
                }
                Entered::Later
            }
        }
    }

    /// Takes completions from the ring. A request with another step is submitted again; the others
    /// are added to `done`.
    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut has_next_steps = false;
        for completion in self.ring.completion() {
            let slot = completion.user_data() as u32;
            let place = &mut self.requests[slot as usize];
            let Some(request) = place.as_mut() else {
                unreachable!("a completion for slot {slot}, which has no request");
            };
            match request.advance(&self.disk, completion.result()) {
                None => {
                    self.waiting.push(slot);
                    has_next_steps = true;
                }
                Some(result) => {
                    done.push(Done { op: request.op, result });
                    *place = None;
                    self.free.push(slot);
                    self.in_flight -= 1;
                }
            }
        }
        if has_next_steps {
            self.submit();
        }
    }
}

impl Engine for Uring {
    fn push(&mut self, request: Request) {
        // `DiskQueue` admits at most `depth` requests.
        let slot = self.free.pop().expect("a free slot");
        self.requests[slot as usize] = Some(request);
        self.waiting.push(slot);
        self.in_flight += 1;
    }

    fn kick(&mut self) {
        if !self.waiting.is_empty() {
            // `submit` takes them from the end, so this keeps the order in which they were pushed.
            self.waiting.reverse();
            self.submit();
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        if self.stalled {
            self.submit();
        }
        if !self.enabled || self.in_flight == 0 {
            return;
        }
        // A system call is needed only for work that the kernel has deferred to this thread, and
        // for entries that it has not taken yet.
        let (has_kernel_work, has_entries) = {
            let ring = self.ring.submission();
            (ring.taskrun() || ring.cq_overflow(), !ring.is_empty())
        };
        if has_kernel_work || has_entries {
            match self.enter(0) {
                Entered::Done => {}
                Entered::Later => self.stalled = true,
                Entered::NotOurs => panic!("a queue belongs to the thread that used it first"),
            }
        }
        self.reap(done);
    }

    fn event_fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn is_stalled(&self) -> bool {
        self.stalled
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut done = Vec::new();
        self.kick();
        while self.in_flight > 0 {
            if matches!(self.enter(1), Entered::NotOurs) {
                // Only the ring's own thread could wait. The kernel still uses the buffers.
                tracing::error!("a queue with operations in flight was dropped on another thread");
                std::mem::forget(std::mem::take(&mut self.requests));
                return;
            }
            self.poll(&mut done);
        }
    }
}

/// A ring with the best settings that this kernel supports.
fn ring(entries: u32) -> io::Result<IoUring> {
    let best = IoUring::builder()
        .setup_clamp()
        .setup_r_disabled()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(entries);
    match best {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            // Before Linux 6.1.
            IoUring::builder().setup_clamp().build(entries)
        }
        other => other,
    }
}

/// The ring's entry for a step of a request.
fn entry(file: Fd, step: Step) -> squeue::Entry {
    match step {
        Step::Write { from, len, offset } => {
            opcode::Write::new(file, from, len).offset(offset).build()
        }
        Step::Read { to, len, offset } => opcode::Read::new(file, to, len).offset(offset).build(),
        Step::Sync => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
        Step::Allocate { mode, offset, len } => {
            opcode::Fallocate::new(file, len).offset(offset).mode(mode).build()
        }
    }
}

#[cfg(test)]
impl Uring {
    /// Makes every `io_uring_enter` fail: it takes the ring for enabled, which it is not. `None` if
    /// this kernel's rings are enabled from the start.
    pub(crate) fn refused(mut self) -> Option<Uring> {
        self.enabled = true;
        let failed = self.ring.submit().err().and_then(|error| error.raw_os_error());
        (failed == Some(libc::EBADFD)).then_some(self)
    }

    /// Ends the failures that [`refused`](Self::refused) began.
    pub(crate) fn accepted(&mut self) {
        self.ring.submitter().register_enable_rings().unwrap();
    }
}
