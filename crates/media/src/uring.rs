//! A queue over io_uring: one ring per queue, submissions in batches, completions without a system
//! call where possible.
//!
//! A request lives in a slot until it has finished. Its next step goes through these places:
//!
//! ```text
//! waiting ──▶ submission queue of the ring ──▶ kernel ──▶ completion queue ──▶ done
//!    ▲                                                          │
//!    └──────────────── the request needs another step ──────────┘
//! ```

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
    // The first field, so that it is dropped before `requests`: the kernel uses the buffers of the
    // requests until the ring is gone. `Drop` also waits for all requests.
    ring: IoUring,
    /// The requests in flight, by slot. The slot is the `user_data` of the ring's entries.
    requests: Vec<Option<Request>>,
    /// The free slots.
    free_slots: Vec<u32>,
    disk: Arc<Disk>,
    eventfd: EventFd,
    /// Whether the ring has been enabled. The first thread that submits enables the ring, and from
    /// then on no other thread may use it.
    is_enabled: bool,
    /// The slots of requests whose next step is to be put into the ring.
    waiting: Vec<u32>,
    /// Whether the kernel accepts nothing for now. The next poll submits `waiting`, and the entries
    /// that are still in the ring.
    is_stalled: bool,
    /// Whether the failure of the last system call has been logged. A stalled ring makes many
    /// calls, and only the first failure is logged.
    is_failure_logged: bool,
    in_flight: usize,
}

/// The outcome of the system call `io_uring_enter`.
enum EnterOutcome {
    /// The kernel has taken all entries.
    Taken,
    /// The kernel accepts nothing for now; the entries stay in the ring.
    Stalled,
    /// The ring belongs to another thread.
    WrongThread,
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
            free_slots: (0..depth as u32).rev().collect(),
            disk,
            eventfd,
            is_enabled: false,
            waiting: Vec::with_capacity(depth),
            is_stalled: false,
            is_failure_logged: false,
            in_flight: 0,
        })
    }

    /// Puts the next step of all waiting requests into the ring, and submits the entries.
    fn submit(&mut self) {
        self.is_stalled = false;
        if !self.is_enabled && !self.try_enable() {
            self.is_stalled = true;
            return;
        }
        // Each round fills the ring, as far as there is space in it.
        while !self.waiting.is_empty() {
            self.fill_ring();
            match self.enter(0) {
                EnterOutcome::Taken => {}
                EnterOutcome::Stalled => {
                    self.is_stalled = true;
                    return;
                }
                EnterOutcome::WrongThread => {
                    panic!("a queue belongs to the thread that used it first")
                }
            }
        }
    }

    /// Enables the ring for this thread. Returns false if the system refuses.
    fn try_enable(&mut self) -> bool {
        match self.ring.submitter().register_enable_rings() {
            Ok(()) => self.is_enabled = true,
            // A ring that was created enabled answers EBADFD.
            Err(error) if error.raw_os_error() == Some(libc::EBADFD) => self.is_enabled = true,
            Err(error) => {
                if !std::mem::replace(&mut self.is_failure_logged, true) {
                    tracing::error!(%error, "can't enable the io_uring, will try again");
                }
            }
        }
        self.is_enabled
    }

    /// Moves the next steps of waiting requests into the submission queue, until it is full.
    fn fill_ring(&mut self) {
        // The file is not registered with the ring: the ring ends asynchronously, and a registered
        // file would stay locked until then.
        let file = Fd(self.disk.medium.file.as_raw_fd());
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
    }

    /// One system call: submits the entries in the ring, runs the work that the kernel has deferred
    /// to this thread, and waits for `min_complete` completions.
    fn enter(&mut self, min_complete: usize) -> EnterOutcome {
        match self.ring.submit_and_wait(min_complete) {
            Ok(_) => {
                self.is_failure_logged = false;
                // The kernel may have taken only the first entries.
                if self.ring.submission().is_empty() {
                    EnterOutcome::Taken
                } else {
                    EnterOutcome::Stalled
                }
            }
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => EnterOutcome::WrongThread,
            Err(error) => {
                let is_transient =
                    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY));
                if !is_transient && !std::mem::replace(&mut self.is_failure_logged, true) {
                    tracing::error!(%error, "io_uring_enter failed, will try again");
                }
                EnterOutcome::Stalled
            }
        }
    }

    /// Takes completions from the ring. A finished request is added to `done`. The next step of any
    /// other request is submitted.
    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut has_next_steps = false;
        for completion in self.ring.completion() {
            let slot = completion.user_data() as u32;
            let request_slot = &mut self.requests[slot as usize];
            let Some(request) = request_slot.as_mut() else {
                unreachable!("a completion for slot {slot}, which has no request");
            };
            match request.advance(&self.disk, completion.result()) {
                None => {
                    self.waiting.push(slot);
                    has_next_steps = true;
                }
                Some(result) => {
                    done.push(Done { op: request.op, result });
                    *request_slot = None;
                    self.free_slots.push(slot);
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
        let slot = self.free_slots.pop().expect("a free slot");
        self.requests[slot as usize] = Some(request);
        self.waiting.push(slot);
        self.in_flight += 1;
    }

    fn kick(&mut self) {
        if !self.waiting.is_empty() {
            // `submit` takes the slots from the end. So the requests are submitted in the order in
            // which they were pushed.
            self.waiting.reverse();
            self.submit();
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        if self.is_stalled {
            self.submit();
        }
        if !self.is_enabled || self.in_flight == 0 {
            return;
        }
        // A system call is needed only for work that the kernel has deferred to this thread, and
        // for entries that the kernel has not taken yet.
        let (has_kernel_work, has_entries) = {
            let ring = self.ring.submission();
            (ring.taskrun() || ring.cq_overflow(), !ring.is_empty())
        };
        if has_kernel_work || has_entries {
            match self.enter(0) {
                EnterOutcome::Taken => {}
                EnterOutcome::Stalled => self.is_stalled = true,
                EnterOutcome::WrongThread => {
                    panic!("a queue belongs to the thread that used it first")
                }
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
        self.is_stalled
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut done = Vec::new();
        self.kick();
        while self.in_flight > 0 {
            if matches!(self.enter(1), EnterOutcome::WrongThread) {
                // Only the ring's own thread could wait for the requests. The kernel still uses
                // their buffers, so they are never freed.
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
        self.is_enabled = true;
        let failed = self.ring.submit().err().and_then(|error| error.raw_os_error());
        (failed == Some(libc::EBADFD)).then_some(self)
    }

    /// Ends the failures that [`refused`](Self::refused) began.
    pub(crate) fn accepted(&mut self) {
        self.ring.submitter().register_enable_rings().unwrap();
    }
}
