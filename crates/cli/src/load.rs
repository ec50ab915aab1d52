//! The load generator: a workload's groups through the streams of a volume, as fast as possible.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use riopipe::{
    Buf, ConnectOptions, EngineKind, MemberAddr, OpenOptions, Place, Seq, Stream, StreamOptions,
    SubmitError, SubmitErrorKind, Until, Volume,
    stages::{Distribution, Stage},
};
use riopipe_lab::{
    generator::{Extent, Generator},
    harness::{self, Phase, Window, Worker},
    latency::Latencies,
    sample::Sample,
    workload::{BLOCK, Workload, WorkloadError},
};

use crate::{
    connect::{open_failure, stream_failure},
    failure::{Code, Failure},
    interrupt::Interrupt,
};

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
}

/// One group in flight.
#[derive(Clone, Copy, Debug)]
struct Group {
    seq: Seq,
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
        let streams = (0..workload.threads)
            .map(|thread| {
                let id = u16::try_from(thread).unwrap_or(u16::MAX);
                volume.stream(id, &options).map(|stream| Mutex::new(Some(stream)))
            })
            .collect::<Result<Vec<_>, _>>();
        let streams = streams.map_err(|error| stream_failure(&error))?;
        harness::run(self.window, workload.threads, target_cpu_ns, |thread, worker| {
            let stream =
                streams[thread as usize].lock().unwrap_or_else(PoisonError::into_inner).take();
            if !self.cores.is_empty() {
                riopipe_net::pin_to_core(self.cores[thread as usize % self.cores.len()])
                    .map_err(|error| Failure::new(Code::Failed, error.to_string()))?;
            }
            // Each worker is started once, with a number below the number of streams.
            let stream = stream.expect("a stream for each worker");
            let writer = Writer::new(volume, workload, thread, stream)?;
            writer.run(worker, interrupt)
        })
    }
}

fn usage(error: &WorkloadError) -> Failure {
    Failure::new(Code::Usage, error.to_string())
}

fn storage(error: &dyn std::error::Error) -> Failure {
    Failure::new(Code::Storage, error.to_string())
}

/// The loop of one thread.
struct Writer {
    stream: Stream,
    generator: Generator,
    /// Largest number of writes in flight.
    depth: u32,
    /// Number of writes in flight.
    in_flight: u32,
    groups: VecDeque<Group>,
    /// The writes of a group that may still have to be submitted.
    extents: Vec<Extent>,
    staged: bool,
    /// Their buffers, if they were staged and refused.
    spare: Vec<Buf>,
}

impl Writer {
    fn new(
        volume: &Volume,
        workload: &Workload,
        thread: u32,
        stream: Stream,
    ) -> Result<Self, Failure> {
        let area = workload.area(thread, volume.blocks()).map_err(|error| usage(&error))?;
        let generator = Generator::new(workload, thread, area);
        let depth = match volume.engine().capabilities().is_serial {
            // With a wait for each group, one group is in flight. More would only queue, and their
            // latency would be that of the queue.
            true => generator.writes_in_next_group(),
            false => workload.queue_depth,
        };
        Ok(Self {
            stream,
            generator,
            depth,
            in_flight: 0,
            groups: VecDeque::new(),
            extents: Vec::new(),
            staged: false,
            spare: Vec::new(),
        })
    }

    /// Writes until it is asked to stop, then closes the stream in order.
    fn run(mut self, worker: &Worker<'_>, interrupt: &Interrupt) -> Result<Latencies, Failure> {
        let mut latencies = Latencies::new();
        worker.ready();
        let result = self.write(worker, interrupt, &mut latencies);
        let closed = self.stream.close().map_err(|error| storage(&error));
        result.and(closed.map(|_| latencies))
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
            let full = !self.fill()?;
            let until = match self.enough() {
                _ if full => Until::Space,
                Some(seq) => Until::Complete(seq),
                None => Until::Space,
            };
            let marks = self.stream.wait(until, None).map_err(|error| storage(&error))?;
            let now = Instant::now();
            let (mut writes, mut groups, mut bytes) = (0, 0, 0);
            while let Some(group) = self.groups.front().filter(|g| g.seq <= marks.complete) {
                if phase == Phase::Measure {
                    let ns = now.duration_since(group.since).as_nanos();
                    latencies.record_n(u64::try_from(ns).unwrap_or(u64::MAX), group.writes.into());
                }
                writes += u64::from(group.writes);
                groups += 1;
                bytes += group.bytes;
                self.in_flight -= group.writes;
                self.groups.pop_front();
            }
            worker.completed(writes, groups, bytes);
        }
    }

    /// Submits groups up to the depth; false when the stream accepts no more.
    fn fill(&mut self) -> Result<bool, Failure> {
        let since = Instant::now();
        loop {
            if !self.staged {
                if self.in_flight + self.generator.writes_in_next_group() > self.depth {
                    return Ok(true);
                }
                self.generator.next_group(&mut self.extents);
                self.staged = true;
            }
            if self.spare.is_empty() {
                for extent in &self.extents {
                    // Their content does not matter.
                    let buf = self.stream.buf((extent.blocks * BLOCK) as usize);
                    self.spare.push(buf.map_err(|error| storage(&error))?);
                }
            }
            let mut group = self.stream.group();
            for (extent, buf) in self.extents.iter().zip(self.spare.drain(..)) {
                // The area is written again and again, so its blocks are never fresh.
                group = group.write(extent.lba, buf, Place::InPlace);
            }
            match group.submit() {
                Ok(seq) => {
                    let writes = self.extents.len() as u32;
                    let blocks: u64 = self.extents.iter().map(|e| u64::from(e.blocks)).sum();
                    let bytes = blocks * u64::from(BLOCK);
                    self.groups.push_back(Group { seq, writes, bytes, since });
                    self.in_flight += writes;
                    self.staged = false;
                }
                Err(SubmitError { kind: SubmitErrorKind::Full(_), bufs }) => {
                    self.spare = bufs;
                    return Ok(false);
                }
                Err(SubmitError { kind, .. }) => return Err(storage(&kind)),
            }
        }
    }

    /// The group after whose completion it pays to submit again: a quarter of the depth is then
    /// free. One at a time would cost a system call per write on both sides.
    fn enough(&self) -> Option<Seq> {
        let wanted = (self.depth / 4).max(1);
        let mut free = self.depth - self.in_flight;
        for group in &self.groups {
            free += group.writes;
            if free >= wanted.max(self.generator.writes_in_next_group()) {
                return Some(group.seq);
            }
        }
        self.groups.back().map(|group| group.seq)
    }
}
