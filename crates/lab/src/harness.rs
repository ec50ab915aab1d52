//! The execution of worker threads with a warm-up and a measured window.
//!
//! The workers only count. A third thread reads their counters and CPU clocks at both ends of the
//! window. So a worker's loop needs no clock, unless it measures each operation, and all threads are measured over the same period.
//!
//! On a busy machine nothing may complete in a short window, and no ratio exists then. So a window
//! stays open until something has completed.

use std::{
    sync::{
        atomic::{AtomicU8, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use riopipe_platform::{CpuClock, now_ns};

use crate::{latency::Latencies, sample::Sample};

/// The duration of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Not measured: connections, caches and congestion windows reach their steady state.
    pub warm_up: Duration,
    /// Measured: at least so long, and until two batches of completions fell into it.
    pub duration: Duration,
}

/// Time by which a window without completions is extended, repeatedly.
const STEP: Duration = Duration::from_millis(1);
/// Longest extension in all: longer than a target may delay an answer.
const EXTENSION_MAX: Duration = Duration::from_secs(60);

/// The phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Work, without recording latencies.
    WarmUp,
    /// Work and record.
    Measure,
    /// Begin nothing, wait for operations in flight, and return.
    Stop,
}

/// A worker's access to the harness.
#[derive(Debug)]
pub struct Worker<'a> {
    shared: &'a Shared,
    counters: &'a Counters,
    events: mpsc::Sender<Event>,
}

#[derive(Debug, Default)]
struct Shared {
    phase: AtomicU8,
}

/// On cache lines of its own (two, for the prefetcher), so that workers don't slow one another.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counters {
    /// Number of calls of [`Worker::completed`] that counted something.
    batches: AtomicU64,
    writes: AtomicU64,
    groups: AtomicU64,
    bytes: AtomicU64,
}

/// CPU time of threads that are not workers, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SideCpu {
    /// The initiator's threads.
    pub initiator_ns: u64,
    /// The target's threads, if it is known.
    pub target_ns: Option<u64>,
}

impl From<Option<u64>> for SideCpu {
    fn from(target_ns: Option<u64>) -> Self {
        Self { initiator_ns: 0, target_ns }
    }
}

enum Event {
    Ready(CpuClock),
    Ended,
}

impl Worker<'_> {
    /// Reports the end of the set-up; the warm-up begins when all workers have. Call it once.
    pub fn ready(&self) {
        // The receiver outlives the workers.
        let _ = self.events.send(Event::Ready(CpuClock::of_this_thread()));
    }

    /// The current phase: one load, cheap enough for every iteration.
    #[inline]
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.shared.phase.load(Ordering::Relaxed) {
            0 => Phase::WarmUp,
            1 => Phase::Measure,
            _ => Phase::Stop,
        }
    }

    /// Repeats an operation until the window closes, and measures the time of each one. `prepare`
    /// runs before each, and is not measured. The operation returns its bytes. It is called instead
    /// of [`ready`](Self::ready), once.
    ///
    /// # Errors
    /// The first error of the two.
    pub fn repeat<E>(
        &self,
        mut prepare: impl FnMut() -> Result<(), E>,
        mut operation: impl FnMut() -> Result<u64, E>,
    ) -> Result<Latencies, E> {
        let mut latencies = Latencies::new();
        self.ready();
        loop {
            let phase = self.phase();
            if phase == Phase::Stop {
                return Ok(latencies);
            }
            prepare()?;
            let since = Instant::now();
            let bytes = operation()?;
            self.completed(1, 1, bytes);
            if phase == Phase::Measure {
                latencies.record(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
            }
        }
    }

    /// Counts completed writes, groups and bytes.
    #[inline]
    pub fn completed(&self, writes: u64, groups: u64, bytes: u64) {
        // Only this thread writes them, so plain additions suffice.
        let add = |counter: &AtomicU64, n| {
            counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        };
        add(&self.counters.batches, u64::from(writes > 0));
        add(&self.counters.writes, writes);
        add(&self.counters.groups, groups);
        add(&self.counters.bytes, bytes);
    }
}

impl Drop for Worker<'_> {
    /// Also when the worker panics: the harness must not wait for it.
    fn drop(&mut self) {
        // The receiver outlives the workers.
        let _ = self.events.send(Event::Ended);
    }
}

/// Runs `threads` workers. `body` gets its number and returns the latencies that it recorded while
/// measuring. `side_cpu` reads the CPU time of threads that are not workers: that of the target, if
/// it is known, or a [`SideCpu`].
///
/// # Errors
/// The first worker's error; the others are stopped. A worker that returns early without an error
/// ends the run: the sample then covers less than the window.
pub fn run<E: Send, C: Into<SideCpu>>(
    window: Window,
    threads: u32,
    side_cpu: impl Fn() -> C,
    body: impl Fn(u32, &Worker<'_>) -> Result<Latencies, E> + Sync,
) -> Result<Sample, E> {
    let shared = Shared::default();
    let counters: Vec<Counters> = (0..threads).map(|_| Counters::default()).collect();
    let (sender, events) = mpsc::channel();
    thread::scope(|scope| {
        let workers: Vec<_> = counters
            .iter()
            .zip(0..)
            .map(|(counters, number)| {
                let worker = Worker { shared: &shared, counters, events: sender.clone() };
                let body = &body;
                thread::Builder::new()
                    .name(format!("writer {number}"))
                    .spawn_scoped(scope, move || body(number, &worker))
                    // Out of threads: no useful measurement is possible.
                    .expect("start a thread")
            })
            .collect();
        drop(sender);

        let read = |clocks: &[CpuClock]| {
            let side: SideCpu = side_cpu().into();
            let workers: u64 = clocks.iter().filter_map(CpuClock::used_ns).sum();
            Reading {
                at: now_ns(),
                writes: sum(&counters, |c| &c.writes),
                groups: sum(&counters, |c| &c.groups),
                bytes: sum(&counters, |c| &c.bytes),
                cpu: workers + side.initiator_ns,
                target_cpu: side.target_ns,
            }
        };
        let clocks = wait_ready(&events, threads);
        let go_on = clocks.is_some() && pause(&events, window.warm_up);
        let clocks = clocks.unwrap_or_default();
        let start = read(&clocks);
        if go_on {
            shared.phase.store(1, Ordering::Relaxed);
            // The whole wait for a worker's second batch was in the window, so its latency is
            // known, too.
            let of_each = || counters.iter().map(|c| c.batches.load(Ordering::Relaxed));
            let before: Vec<u64> = of_each().collect();
            let is_seen = || of_each().zip(&before).any(|(now, before)| now - before >= 2);
            let mut go_on = pause(&events, window.duration);
            let mut longer = EXTENSION_MAX.as_nanos() / STEP.as_nanos();
            while go_on && longer > 0 && !is_seen() {
                go_on = pause(&events, STEP);
                longer -= 1;
            }
        }
        let end = read(&clocks);
        shared.phase.store(2, Ordering::Relaxed);

        let mut sample = end.since(&start);
        let mut first_error = None;
        for worker in workers {
            match worker.join() {
                Ok(Ok(latencies)) => sample.latencies.add(&latencies),
                Ok(Err(error)) => first_error = first_error.or(Some(error)),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        first_error.map_or(Ok(sample), Err)
    })
}

struct Reading {
    at: u64,
    writes: u64,
    groups: u64,
    bytes: u64,
    cpu: u64,
    target_cpu: Option<u64>,
}

impl Reading {
    fn since(&self, start: &Self) -> Sample {
        Sample {
            writes: self.writes - start.writes,
            groups: self.groups - start.groups,
            bytes: self.bytes - start.bytes,
            wall_ns: self.at - start.at,
            initiator_cpu_ns: self.cpu.saturating_sub(start.cpu),
            target_cpu_ns: self
                .target_cpu
                .zip(start.target_cpu)
                .map(|(end, start)| end.saturating_sub(start)),
            ..Sample::default()
        }
    }
}

fn sum(counters: &[Counters], which: impl Fn(&Counters) -> &AtomicU64) -> u64 {
    counters.iter().map(|c| which(c).load(Ordering::Relaxed)).sum()
}

/// The workers' clocks once all are ready; `None` if one has ended before.
fn wait_ready(events: &mpsc::Receiver<Event>, threads: u32) -> Option<Vec<CpuClock>> {
    let mut clocks = Vec::new();
    for _ in 0..threads {
        match events.recv() {
            Ok(Event::Ready(clock)) => clocks.push(clock),
            Ok(Event::Ended) | Err(_) => return None,
        }
    }
    Some(clocks)
}

/// Lets the workers run for `time`; false if one has ended.
fn pause(events: &mpsc::Receiver<Event>, time: Duration) -> bool {
    matches!(events.recv_timeout(time), Err(mpsc::RecvTimeoutError::Timeout))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Window =
        Window { warm_up: Duration::from_millis(5), duration: Duration::from_millis(20) };

    #[test]
    fn counts_what_the_window_saw() {
        let total = AtomicU64::new(0);
        let sample = run::<(), _>(SHORT, 2, SideCpu::default, |_, worker| {
            let mut latencies = Latencies::new();
            // Certainly before the window.
            worker.completed(2, 1, 8192);
            total.fetch_add(2, Ordering::Relaxed);
            worker.ready();
            while worker.phase() != Phase::Stop {
                if worker.phase() == Phase::Measure {
                    latencies.record(1_000);
                }
                worker.completed(2, 1, 8192);
                total.fetch_add(2, Ordering::Relaxed);
                thread::sleep(Duration::from_micros(100));
            }
            Ok(latencies)
        })
        .unwrap();
        assert!(sample.writes > 0);
        assert!(sample.writes < total.load(Ordering::Relaxed), "warm-up was counted");
        assert_eq!(sample.groups * 2, sample.writes);
        assert_eq!(sample.bytes, sample.writes * 4096);
        assert!(sample.wall_ns >= 20_000_000);
        assert!(sample.latencies.summary().count > 0);
        assert!(sample.initiator_cpu_ns > 0);
        // The workers slept almost all the time; both threads' CPU clocks must show it.
        assert!(sample.initiator_cpu_ns < 2 * sample.wall_ns);
        assert_eq!(sample.target_cpu_ns, None);
    }

    #[test]
    fn the_targets_cpu_time_is_that_of_the_window() {
        let clock = AtomicU64::new(1_000);
        let read = || Some(clock.fetch_add(500, Ordering::Relaxed));
        let sample = run::<(), _>(SHORT, 1, read, |_, worker| {
            worker.ready();
            while worker.phase() != Phase::Stop {
                thread::sleep(Duration::from_millis(1));
                worker.completed(1, 1, 4096);
            }
            Ok(Latencies::new())
        })
        .unwrap();
        assert_eq!(sample.target_cpu_ns, Some(500));
    }

    #[test]
    fn a_window_stays_open_until_something_completed_in_it() {
        let window = Window { warm_up: Duration::ZERO, duration: Duration::from_millis(1) };
        let sample = run::<(), _>(window, 2, SideCpu::default, |number, worker| {
            let mut latencies = Latencies::new();
            worker.ready();
            // One is far too slow for this window, the other never completes anything.
            while worker.phase() != Phase::Stop {
                let phase = worker.phase();
                thread::sleep(Duration::from_millis(20));
                if number == 0 {
                    if phase == Phase::Measure {
                        latencies.record(20_000_000);
                    }
                    worker.completed(1, 1, 4096);
                }
            }
            Ok(latencies)
        })
        .unwrap();
        assert!(sample.writes >= 2, "{sample:?}");
        assert!(sample.latencies.summary().count > 0, "{sample:?}");
    }

    #[test]
    fn one_workers_error_stops_all() {
        for early in [true, false] {
            let result = run(
                Window { warm_up: Duration::from_secs(60), duration: Duration::from_secs(60) },
                3,
                SideCpu::default,
                |number, worker| {
                    if number == 1 && early {
                        return Err("no connection");
                    }
                    worker.ready();
                    while worker.phase() != Phase::Stop {
                        if number == 1 {
                            return Err("connection lost");
                        }
                        thread::sleep(Duration::from_millis(1));
                    }
                    Ok(Latencies::new())
                },
            );
            // Without the stop this would take a minute.
            assert!(result.is_err());
        }
    }

    #[test]
    #[should_panic(expected = "a bug")]
    fn a_panic_is_passed_on_and_hangs_nothing() {
        let _ = run::<(), _>(SHORT, 2, SideCpu::default, |number, worker| {
            worker.ready();
            if number == 0 {
                panic!("a bug");
            }
            while worker.phase() != Phase::Stop {
                thread::sleep(Duration::from_millis(1));
            }
            Ok(Latencies::new())
        });
    }
}
