//! A queue over threads that block in the kernel: for systems that forbid io_uring.
//!
//! ```text
//! push ──▶ waiting ── kick ──▶ jobs ──▶ a thread ──▶ done ── poll ──▶ caller
//! ```

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::slice;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use riopipe_platform::EventFd;
use rustix::io::{pread, pwrite};

use crate::drive::Done;
use crate::medium;
use crate::request::{Disk, Engine, Request, Step};

/// Largest number of threads per queue: enough to use a drive's parallelism.
const THREADS_MAX: usize = 16;

/// The threads of one queue, with their requests.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// The requests that wait for `kick`.
    waiting: Vec<Request>,
    in_flight: usize,
}

/// The state that the queue's owner shares with the threads.
struct Shared {
    disk: Arc<Disk>,
    jobs: Mutex<Jobs>,
    /// Notified when a job is added, or the threads are to stop.
    jobs_changed: Condvar,
    /// The finished requests that `poll` has not taken.
    done: Mutex<Vec<Done>>,
    /// Signalled when a request has finished.
    eventfd: EventFd,
}

/// The work for the threads.
struct Jobs {
    /// The requests that no thread has taken.
    queue: VecDeque<Request>,
    /// Whether the threads end once the queue is empty.
    must_stop: bool,
}

impl Threads {
    /// Starts the threads.
    pub(crate) fn new(disk: Arc<Disk>, depth: usize) -> io::Result<Threads> {
        let shared = Arc::new(Shared {
            disk,
            jobs: Mutex::new(Jobs { queue: VecDeque::new(), must_stop: false }),
            jobs_changed: Condvar::new(),
            done: Mutex::new(Vec::new()),
            eventfd: EventFd::new()?,
        });
        let mut threads = Threads {
            shared: Arc::clone(&shared),
            threads: Vec::new(),
            waiting: Vec::new(),
            in_flight: 0,
        };
        for index in 0..depth.min(THREADS_MAX) {
            let shared = Arc::clone(&shared);
            let thread = thread::Builder::new()
                .name(format!("rio-io-{index}"))
                .spawn(move || shared.run_jobs())?;
            threads.threads.push(thread);
        }
        Ok(threads)
    }
}

impl Shared {
    /// Executes requests until the threads are to stop.
    fn run_jobs(&self) {
        while let Some(mut request) = self.wait_for_job() {
            let result = loop {
                let answer = self.execute(request.step(&self.disk));
                if let Some(result) = request.advance(&self.disk, answer) {
                    break result;
                }
            };
            lock(&self.done).push(Done { op: request.op, result });
            self.eventfd.signal();
        }
    }

    /// Waits for the next request; `None` if the threads are to stop.
    fn wait_for_job(&self) -> Option<Request> {
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(request) = jobs.queue.pop_front() {
                return Some(request);
            }
            if jobs.must_stop {
                return None;
            }
            jobs = self.jobs_changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Executes a step. Returns the number of bytes done, or a negative error number, as io_uring
    /// does.
    fn execute(&self, step: Step) -> i32 {
        let file = &self.disk.medium.file;
        let bytes_done = match step {
            Step::Write { from, len, offset } => {
                // SAFETY: `Step` promises `len` readable bytes until the step has ended.
                let bytes = unsafe { slice::from_raw_parts(from, len as usize) };
                pwrite(file, bytes, offset)
            }
            Step::Read { to, len, offset } => {
                // SAFETY: as above, and they are writable, and nothing else uses them meanwhile.
                let bytes = unsafe { slice::from_raw_parts_mut(to, len as usize) };
                pread(file, bytes, offset)
            }
            Step::Sync => return kernel_answer(file.sync_data()),
            Step::Allocate { mode, offset, len } => {
                return kernel_answer(medium::allocate(file, mode, offset, len));
            }
        };
        match bytes_done {
            // The number fits, because one step asks for at most 8 MiB.
            Ok(bytes) => bytes as i32,
            Err(error) => -error.raw_os_error(),
        }
    }
}

impl Engine for Threads {
    fn push(&mut self, request: Request) {
        self.waiting.push(request);
        self.in_flight += 1;
    }

    fn kick(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let count = self.waiting.len();
        lock(&self.shared.jobs).queue.extend(self.waiting.drain(..));
        // A busy thread checks the queue again before it sleeps.
        for _ in 0..count.min(self.threads.len()) {
            self.shared.jobs_changed.notify_one();
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        if self.in_flight == 0 {
            return;
        }
        let mut ready = lock(&self.shared.done);
        self.in_flight -= ready.len();
        done.append(&mut ready);
    }

    fn event_fd(&self) -> RawFd {
        self.shared.eventfd.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn is_stalled(&self) -> bool {
        false
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.kick();
        lock(&self.shared.jobs).must_stop = true;
        self.shared.jobs_changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panicked thread has reported its panic; its request ends with it.
            let _ = thread.join();
        }
    }
}

/// The result of a system call as a number: 0, or a negative error number.
fn kernel_answer(result: io::Result<()>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic can't leave a guarded value half changed: each statement changes all of it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
