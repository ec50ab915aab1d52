//! A queue over threads that block in the kernel: for systems that forbid io_uring.

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

/// Threads with their requests.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    waiting: Vec<Request>,
    in_flight: usize,
}

struct Shared {
    disk: Arc<Disk>,
    jobs: Mutex<Jobs>,
    wake: Condvar,
    done: Mutex<Vec<Done>>,
    eventfd: EventFd,
}

struct Jobs {
    queue: VecDeque<Request>,
    stop: bool,
}

impl Threads {
    /// Starts the threads.
    pub(crate) fn new(disk: Arc<Disk>, depth: usize) -> io::Result<Threads> {
        let shared = Arc::new(Shared {
            disk,
            jobs: Mutex::new(Jobs { queue: VecDeque::new(), stop: false }),
            wake: Condvar::new(),
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
                .spawn(move || shared.work())?;
            threads.threads.push(thread);
        }
        Ok(threads)
    }
}

impl Shared {
    fn work(&self) {
        loop {
            let mut jobs = lock(&self.jobs);
            let mut request = loop {
                if let Some(request) = jobs.queue.pop_front() {
                    break request;
                }
                if jobs.stop {
                    return;
                }
                jobs = self.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            };
            drop(jobs);
            let result = loop {
                let answer = self.run(request.step(&self.disk));
                if let Some(result) = request.advance(&self.disk, answer) {
                    break result;
                }
            };
            lock(&self.done).push(Done { op: request.op, result });
            self.eventfd.signal();
        }
    }

    /// Executes a step; the answer is as io_uring would give it.
    fn run(&self, step: Step) -> i32 {
        let file = &self.disk.medium.file;
        let moved = match step {
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
            Step::Sync => return errno(file.sync_data()),
            Step::Allocate { mode, offset, len } => {
                return errno(medium::allocate(file, mode, offset, len));
            }
        };
        // One step asks for at most 8 MiB.
        moved.map_or_else(|error| -error.raw_os_error(), |bytes| bytes as i32)
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
            self.shared.wake.notify_one();
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
        lock(&self.shared.jobs).stop = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A panicked thread has reported its panic; its request ends with it.
            let _ = thread.join();
        }
    }
}

fn errno(result: io::Result<()>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded values are consistent after each statement.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
