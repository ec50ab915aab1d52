//! The load generator: a workload's groups through the streams of a volume, as fast as possible.

mod own_stream;
mod shared_stream;

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use riopipe::{
    ConnectOptions, EngineKind, MemberAddr, OpenOptions, Stream, StreamOptions, Volume,
    stages::{Distribution, Stage},
};
use riopipe_lab::{
    access::Access,
    generator::{Extent, Generator},
    harness::{self, Phase, SideCpu, Window, Worker},
    latency::Latencies,
    sample::Sample,
    workload::{BLOCK, Workload, WorkloadError},
};

use crate::{
    connect::{open_failure, stream_failure},
    failure::{Code, Failure},
    interrupt::Interrupt,
};
use own_stream::OwnStream;
use shared_stream::Dispatcher;

/// The parameters of a load on a volume.
#[derive(Clone, Debug)]
pub struct Load {
    /// Name of the volume.
    pub volume: String,
    /// Its drives, in order.
    pub members: Vec<MemberAddr>,
    /// Options of its connections.
    pub connect: ConnectOptions,
    /// Longest time for an answer of a target.
    pub io_timeout: Duration,
    /// The workload.
    pub workload: Workload,
    /// Duration of the run.
    pub window: Window,
    /// Whether adjacent requests are merged (trap T16).
    pub merge: bool,
    /// Writer `i` runs on core `i mod n` of these; empty: on any core.
    pub cores: Vec<usize>,
    /// Whether all writers share one stream.
    pub shares_stream: bool,
    /// Whether each writer moves to another core after every few groups.
    pub moves: bool,
}

/// The way of a writer's groups to a stream.
trait Queue {
    /// Reads these extents in one call, and waits for them.
    fn read(&mut self, extents: &[Extent], into: &mut Vec<u8>) -> Result<(), Failure>;

    /// Hands over a group; false if there is no space for it now.
    fn submit(&mut self, extents: &[Extent]) -> Result<bool, Failure>;

    /// Waits until so many groups of this writer are complete, counted from the first one, or, with
    /// `None`, until there may be space. Returns the number of complete groups.
    fn wait(&mut self, groups: Option<u64>) -> Result<u64, Failure>;

    /// Ends the writer's use of the stream, in order.
    fn close(self) -> Result<(), Failure>;
}

/// One group in flight.
#[derive(Clone, Copy, Debug)]
struct Group {
    writes: u32,
    bytes: u64,
    since: Instant,
}

impl Load {
    /// Opens the volume with `engine`, runs the workload once and closes it. `target_cpu_ns` reads
    /// the CPU time of the targets' threads, where that is known.
    ///
    /// # Errors
    /// The failure that keeps the volume from being opened or written to, or an interruption; the
    /// volume is closed in order in both cases.
    pub fn run(
        &self,
        engine: EngineKind,
        interrupt: &Interrupt,
        target_cpu_ns: impl Fn() -> Option<u64>,
    ) -> Result<Sample, Failure> {
        self.run_traced(engine, interrupt, target_cpu_ns, |_| ()).map(|(sample, _)| sample)
    }

    /// As [`run`](Self::run), with the time of the groups in each stage on the initiator's side;
    /// that includes the warm-up. `opened` gets the volume before anything is written.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_traced(
        &self,
        engine: EngineKind,
        interrupt: &Interrupt,
        target_cpu_ns: impl Fn() -> Option<u64>,
        opened: impl FnOnce(&Volume),
    ) -> Result<(Sample, Vec<(Stage, Distribution)>), Failure> {
        let options = OpenOptions {
            engine: Some(engine),
            connect: self.connect.clone(),
            ..OpenOptions::default()
        };
        let (volume, _recovery) = Volume::open(&self.volume, &self.members, &options)
            .map_err(|error| open_failure(&error))?;
        opened(&volume);
        let result = self.run_on(&volume, interrupt, target_cpu_ns);
        let stages = volume.stages();
        let closed = volume.close().map_err(|error| {
            Failure::new(Code::Storage, format!("can't close volume {:?}", self.volume))
                .because(&error)
        });
        // The first failure is the cause; that of closing is its consequence.
        let sample = result?;
        closed?;
        interrupt.check()?;
        Ok((sample, stages))
    }

    fn run_on(
        &self,
        volume: &Volume,
        interrupt: &Interrupt,
        target_cpu_ns: impl Fn() -> Option<u64>,
    ) -> Result<Sample, Failure> {
        let workload = &self.workload;
        workload.check().map_err(|error| usage(&error))?;
        let (threads, streams) = (workload.threads, u32::from(volume.info().streams));
        if threads > streams {
            let message = format!(
                "--threads {threads}: volume {:?} has {streams} streams, and each thread needs one",
                self.volume
            );
            let hint = "use fewer threads, or create the volume with more --streams";
            return Err(Failure::new(Code::Usage, message).hint(hint));
        }
        for thread in 0..workload.threads {
            workload.area(thread, volume.blocks()).map_err(|error| usage(&error))?;
        }
        let options = StreamOptions {
            // A write of the workload may become several requests, at stripe boundaries.
            queue_depth: (workload.queue_depth as usize * 2).clamp(1, 1024),
            merge: self.merge,
            timeout: self.io_timeout,
            ..StreamOptions::default()
        };
        let stream = |id| volume.stream(id, &options).map_err(|error| stream_failure(&error));
        if self.shares_stream {
            let stream = stream(0)?;
            return self.run_on_one(stream, volume, interrupt, target_cpu_ns);
        }
        let streams = (0..workload.threads)
            .map(|thread| stream(u16::try_from(thread).unwrap_or(u16::MAX)))
            .map(|stream| stream.map(|stream| Mutex::new(Some(stream))))
            .collect::<Result<Vec<_>, _>>()?;
        harness::run(self.window, workload.threads, target_cpu_ns, |thread, worker| {
            let stream =
                streams[thread as usize].lock().unwrap_or_else(PoisonError::into_inner).take();
            // Each worker is started once, with a number below the number of streams.
            let stream = stream.expect("a stream for each worker");
            self.write(OwnStream::new(stream), volume, thread, worker, interrupt)
        })
    }

    /// Runs the workload with one stream for all threads.
    fn run_on_one(
        &self,
        stream: Stream,
        volume: &Volume,
        interrupt: &Interrupt,
        target_cpu_ns: impl Fn() -> Option<u64>,
    ) -> Result<Sample, Failure> {
        std::thread::scope(|scope| {
            let (dispatcher, queues) = Dispatcher::new(stream, self.workload.threads);
            let clock = dispatcher.clock();
            let cores = &self.cores;
            let dispatching = scope.spawn(move || {
                pin(cores, 0)?;
                dispatcher.run()
            });
            let queues: Vec<_> = queues.into_iter().map(|queue| Mutex::new(Some(queue))).collect();
            let side_cpu = || SideCpu { initiator_ns: clock.used_ns(), target_ns: target_cpu_ns() };
            let sample =
                harness::run(self.window, self.workload.threads, side_cpu, |thread, worker| {
                    let queue = queues[thread as usize]
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .take();
                    // As in `run_on`.
                    let queue = queue.expect("a queue for each worker");
                    self.write(queue, volume, thread, worker, interrupt)
                });
            // A writer that never started leaves its queue, for which the dispatcher would wait.
            drop(queues);
            let dispatched = dispatching.join();
            // The dispatcher's failure is the cause of that of a writer.
            dispatched.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            sample
        })
    }

    /// The work of one thread.
    fn write(
        &self,
        queue: impl Queue,
        volume: &Volume,
        thread: u32,
        worker: &Worker<'_>,
        interrupt: &Interrupt,
    ) -> Result<Latencies, Failure> {
        pin(&self.cores, thread as usize)?;
        let mut writer = Writer::new(volume, &self.workload, thread, queue)?;
        if self.moves {
            writer.moving_over = riopipe_net::allowed_cores();
        }
        writer.run(worker, interrupt)
    }
}

/// Lets this thread run on core `number mod n` of `cores` only; on any core if there are none.
fn pin(cores: &[usize], number: usize) -> Result<(), Failure> {
    if cores.is_empty() {
        return Ok(());
    }
    riopipe_net::pin_to_core(cores[number % cores.len()])
        .map_err(|error| Failure::new(Code::Failed, error.to_string()))
}

fn usage(error: &WorkloadError) -> Failure {
    Failure::new(Code::Usage, error.to_string())
}

/// The length of these extents together, bytes.
fn bytes_of(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| u64::from(extent.blocks) * u64::from(BLOCK)).sum()
}

/// Groups that a moving thread submits before it moves on.
const GROUPS_ON_A_CORE: u64 = 16;

/// The loop of one thread.
struct Writer<Q> {
    queue: Q,
    generator: Generator,
    access: Access,
    seed: u64,
    /// How many groups have been generated.
    generated: u64,
    /// The reads of the next call.
    reads: Vec<Extent>,
    /// How many groups these are.
    read_groups: u64,
    /// The memory for the data of reads.
    read_data: Vec<u8>,
    /// Largest number of writes and reads in flight.
    depth: u32,
    /// Number of writes in flight.
    in_flight: u32,
    /// Number of groups that are known to be complete.
    complete: u64,
    groups: VecDeque<Group>,
    /// The writes of a group that may still have to be submitted.
    extents: Vec<Extent>,
    staged: bool,
    /// The cores over which the thread moves; empty: it stays.
    moving_over: Vec<usize>,
}

impl<Q: Queue> Writer<Q> {
    fn new(volume: &Volume, workload: &Workload, thread: u32, queue: Q) -> Result<Self, Failure> {
        let area = workload.area(thread, volume.blocks()).map_err(|error| usage(&error))?;
        let generator = Generator::new(workload, thread, area);
        let waits_for_each =
            volume.engine().capabilities().is_serial && workload.access != Access::Read;
        let depth = match waits_for_each {
            // With a wait for each group, one group is in flight. More would only queue, and their
            // latency would be that of the queue.
            true => generator.writes_in_next_group(),
            false => workload.queue_depth,
        };
        Ok(Self {
            queue,
            generator,
            access: workload.access,
            seed: workload.seed ^ u64::from(thread),
            generated: 0,
            reads: Vec::new(),
            read_groups: 0,
            read_data: Vec::new(),
            depth,
            in_flight: 0,
            complete: 0,
            groups: VecDeque::new(),
            extents: Vec::new(),
            staged: false,
            moving_over: Vec::new(),
        })
    }

    /// Writes until it is asked to stop, then closes the queue in order.
    fn run(mut self, worker: &Worker<'_>, interrupt: &Interrupt) -> Result<Latencies, Failure> {
        let mut latencies = Latencies::new();
        worker.ready();
        let result = self.write(worker, interrupt, &mut latencies);
        let closed = self.queue.close();
        result.and(closed.map(|()| latencies))
    }

    fn write(
        &mut self,
        worker: &Worker<'_>,
        interrupt: &Interrupt,
        latencies: &mut Latencies,
    ) -> Result<(), Failure> {
        loop {
            let phase = worker.phase();
            if phase == Phase::Stop || interrupt.requested() {
                return Ok(());
            }
            let is_full = !self.fill()?;
            self.read(worker, phase, latencies)?;
            if self.groups.is_empty() && !is_full {
                continue;
            }
            let wanted = if is_full { None } else { self.enough() };
            let complete = self.queue.wait(wanted)?;
            let now = Instant::now();
            let (mut writes, mut groups, mut bytes) = (0, 0, 0);
            for group in self.groups.drain(..(complete - self.complete) as usize) {
                if phase == Phase::Measure {
                    let ns = now.duration_since(group.since).as_nanos();
                    latencies.record_n(u64::try_from(ns).unwrap_or(u64::MAX), group.writes.into());
                }
                writes += u64::from(group.writes);
                groups += 1;
                bytes += group.bytes;
                self.in_flight -= group.writes;
            }
            self.complete = complete;
            worker.completed(writes, groups, bytes);
        }
    }

    /// Reads the extents that were gathered, in one call.
    fn read(
        &mut self,
        worker: &Worker<'_>,
        phase: Phase,
        latencies: &mut Latencies,
    ) -> Result<(), Failure> {
        if self.reads.is_empty() {
            return Ok(());
        }
        let since = Instant::now();
        self.queue.read(&self.reads, &mut self.read_data)?;
        let reads = self.reads.len() as u64;
        if phase == Phase::Measure {
            let ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            latencies.record_n(ns, reads);
        }
        worker.completed(reads, self.read_groups, bytes_of(&self.reads));
        self.reads.clear();
        self.read_groups = 0;
        Ok(())
    }

    /// Submits groups up to the depth, and gathers those that are to be read; false when the stream
    /// accepts no more.
    fn fill(&mut self) -> Result<bool, Failure> {
        let since = Instant::now();
        loop {
            if !self.staged {
                let in_flight = self.in_flight + self.reads.len() as u32;
                if in_flight + self.generator.writes_in_next_group() > self.depth {
                    return Ok(true);
                }
                self.generator.next_group(&mut self.extents);
                self.generated += 1;
                if self.access.is_read(self.seed, self.generated) {
                    self.reads.append(&mut self.extents);
                    self.read_groups += 1;
                    continue;
                }
                self.staged = true;
                self.move_if_due()?;
            }
            if !self.queue.submit(&self.extents)? {
                return Ok(false);
            }
            let writes = self.extents.len() as u32;
            self.groups.push_back(Group { writes, bytes: bytes_of(&self.extents), since });
            self.in_flight += writes;
            self.staged = false;
        }
    }

    fn move_if_due(&self) -> Result<(), Failure> {
        let number = self.complete + self.groups.len() as u64;
        match number.is_multiple_of(GROUPS_ON_A_CORE) {
            true => pin(&self.moving_over, (number / GROUPS_ON_A_CORE) as usize),
            false => Ok(()),
        }
    }

    /// The number of complete groups from which on it pays to submit again: a quarter of the depth is
    /// then free. One at a time would cost a system call per write on both sides.
    fn enough(&self) -> Option<u64> {
        let wanted = (self.depth / 4).max(1);
        let mut free = self.depth - self.in_flight;
        for (group, number) in self.groups.iter().zip(self.complete + 1..) {
            free += group.writes;
            if free >= wanted.max(self.generator.writes_in_next_group()) {
                return Some(number);
            }
        }
        let last = self.complete + self.groups.len() as u64;
        (last > self.complete).then_some(last)
    }
}
