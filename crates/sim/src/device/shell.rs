//! The threads of a plain device in the simulated initiator's process.
//!
//! They make no decision. [`PlainDevice`] does, and each of them carries out its work for one stream, as
//! the threads of the crate `riopipe-attach` do: it submits parts, asks for flushes, sleeps until the
//! marks of its stream move or another thread wakes it, and reports the marks.

use std::collections::BTreeMap;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Marks;
use riopipe_session::initiator::plain_device::{Content, Ended, Layout, Part, PlainDevice, Work};
use riopipe_session::initiator::stream_driver::Until;

use super::counts::DeviceCounts;
use crate::block::{self, ZERO};
use crate::client::process::NotSubmitted;
use crate::core::{MS, US};
use crate::rng::Rng;
use crate::scenario::{DeviceSpec, Place};
use crate::world::World;

/// The time after which a stream without space is tried again, ns.
const SPACE_CHECK_NS: u64 = 10 * MS;
/// The pause before a read is begun again, ns.
const READ_AGAIN_NS: u64 = MS / 10;
/// An owner that was fenced can't read. A host that gets errors for this time, ns, ends its device. With
/// 1 s the tries to read again were more events than a run may have after its faults.
const FENCED_NS: u64 = 400 * MS;

/// The host's name for a request.
pub(super) type Token = u64;
/// The data of a write: its token, and its first block.
pub(super) type Data = (Token, u64);
/// The finding for a block that was read: the write that its content is from, or 0 for zeroes.
pub(super) type Found = Token;
/// Data that no write had for this block.
pub(super) const FOREIGN: Found = Token::MAX;

/// The block of a write that each content in the cluster is. A content gets its name when it is submitted,
/// because the oracle compares the names of the contents of a block.
pub(super) type Names = BTreeMap<block::Content, (Token, u64)>;

/// The thread of a stream.
#[derive(Debug, Default)]
struct Thread {
    /// The stream had no space for the last part.
    is_full: bool,
    /// The thread does not run before this time, ns.
    not_before: u64,
}

/// A read, which another thread carries out.
#[derive(Debug)]
pub(super) struct ReadRequest {
    pub(super) token: Token,
    pub(super) first: u32,
    pub(super) blocks: u32,
}

/// A read that has ended.
#[derive(Debug)]
pub(super) struct ReadEnded {
    pub(super) request: ReadRequest,
    /// `None`: the device has failed, and the blocks are in doubt.
    pub(super) found: Option<Vec<Found>>,
}

/// The device of one process of an initiator.
pub(super) struct Shell {
    client: usize,
    incarnation: u32,
    pub(super) device: PlainDevice<Token, Data>,
    threads: Vec<Thread>,
    /// Why the device has failed.
    pub(super) failure: Option<String>,
    delays: u8,
    rng: Rng,
    reads: Vec<ReadRequest>,
    is_reading: bool,
    read_not_before: u64,
    /// The first failure of the present read, ns.
    read_fails_since: Option<u64>,
    pub(super) names: Names,
    pub(super) counts: DeviceCounts,
}

impl Shell {
    /// A device on the streams of a process that has opened the volume.
    pub(super) fn new(
        (client, incarnation): (usize, u32),
        spec: &DeviceSpec,
        rng: Rng,
        world: &mut World,
    ) -> Result<Self, String> {
        let volume = &world.core().scenario.volume;
        let (streams, engine) = (volume.streams, volume.engine.kind());
        let last = |stream| world.with_client(client, |client, _, _| client.last(stream));
        let last: Vec<Seq> = (0..streams).map(last).collect::<Result<_, _>>()?;
        let (range_blocks, part_blocks) = (u64::from(spec.range_blocks), spec.part_blocks);
        let layout = Layout::with_ranges(last.len(), range_blocks, part_blocks.into());
        let layout = layout.map_err(|error| error.to_string())?;
        Ok(Self {
            client,
            incarnation,
            threads: last.iter().map(|_| Thread::default()).collect(),
            device: PlainDevice::new(layout, last).on_engine(engine),
            failure: None,
            delays: spec.delays,
            rng,
            reads: Vec::new(),
            is_reading: false,
            read_not_before: 0,
            read_fails_since: None,
            names: Names::new(),
            counts: DeviceCounts::default(),
        })
    }

    /// Whether the process still runs.
    pub(super) fn is_alive(&self, world: &World) -> bool {
        world.is_running(self.client, self.incarnation)
    }

    /// Takes a read.
    pub(super) fn read(&mut self, request: ReadRequest) {
        self.reads.push(request);
    }

    /// The number of reads that have not ended.
    pub(super) const fn reads(&self) -> usize {
        self.reads.len()
    }

    /// The requests that have ended, other than reads.
    pub(super) fn take_ended(&mut self) -> Vec<Ended<Token>> {
        self.device.take_ended()
    }

    /// Lets all threads run until each of them sleeps.
    pub(super) fn run(&mut self, world: &mut World) {
        loop {
            let mut has_run = false;
            for index in 0..self.threads.len() {
                has_run |= self.run_thread(index, world);
            }
            for index in self.device.take_to_wake() {
                let id = index as u16;
                world.with_client(self.client, |client, drives, core| {
                    client.interrupt(id, drives, core);
                });
                has_run = true;
            }
            if !has_run {
                return;
            }
        }
    }

    /// Lets a thread run until it sleeps. Returns whether it has run.
    fn run_thread(&mut self, index: usize, world: &mut World) -> bool {
        let id = index as u16;
        let is_asleep = world.with_client(self.client, |client, _, _| client.is_in_call(id));
        let now = world.core().now;
        if is_asleep || self.failure.is_some() || now < self.threads[index].not_before {
            return false;
        }
        if self.rng.percent(self.delays.into()) {
            // The scheduler lets it wait.
            self.threads[index].not_before = now + self.rng.below(300) * US;
            return false;
        }
        if let Err(why) = self.serve(index, world) {
            self.fail(why, world);
        }
        true
    }

    /// Fails the device. Only the first reason counts.
    fn fail(&mut self, why: String, world: &mut World) {
        if self.failure.is_none() {
            world.core_mut().trace(|| format!("the device has failed: {why}"));
            self.counts.failures += 1;
            self.failure = Some(why);
        }
        self.device.fail();
    }

    /// A round of the thread of a stream: from the end of a wait to the begin of the next.
    fn serve(&mut self, index: usize, world: &mut World) -> Result<(), String> {
        let (id, client) = (index as u16, self.client);
        self.report_marks(index, world)?;
        if core::mem::take(&mut self.threads[index].is_full) {
            self.device.on_space(index);
        }
        while let Some(work) = self.device.next_work(index) {
            self.carry_out(index, work, world)?;
        }
        self.report_marks(index, world)?;
        let now = world.core().now;
        let deadline = self.threads[index].is_full.then_some(now + SPACE_CHECK_NS);
        world.with_client(client, |client, drives, core| {
            client.begin_wait(id, (Until::Moved, deadline), drives, core)
        })
    }

    /// Ends the threads: each ends its wait, and does not wait again.
    pub(super) fn end(&self, world: &mut World) {
        for id in 0..self.threads.len() as u16 {
            world.with_client(self.client, |client, drives, core| {
                client.interrupt(id, drives, core);
            });
        }
    }

    fn carry_out(
        &mut self,
        index: usize,
        work: Work<Data>,
        world: &mut World,
    ) -> Result<(), String> {
        match work {
            Work::MakeDurable(seq) => {
                self.counts.asked += 1;
                let now = world.core().now;
                world.with_client(self.client, |client, drives, core| {
                    let until = (Until::Durable(seq), Some(now));
                    client.begin_wait(index as u16, until, drives, core)
                })
            }
            Work::Submit(part) => self.submit(index, part, world),
        }
    }

    fn submit(&mut self, index: usize, part: Part<Data>, world: &mut World) -> Result<(), String> {
        let core = world.core_mut();
        let names: Vec<_> = (0..part.blocks).map(|_| core.oracle.next_number()).collect();
        let place = match part.content {
            Content::Zeroes => Place::Discard,
            Content::Data { data: (token, lba), first_block } => {
                let blocks = lba + u64::from(first_block)..;
                let of = blocks.map(|block| (token, block));
                self.names.extend(names.iter().copied().zip(of));
                Place::InPlace
            }
        };
        let write = (part.lba, place, names);
        let (id, is_durable) = (index as u16, part.is_durable);
        let submitted = world.with_client(self.client, |client, drives, core| {
            client.submit(id, &[write], (is_durable, None), drives, core)
        });
        match submitted {
            Ok(seq) => {
                self.counts.parts += 1;
                self.counts.durable_parts += u64::from(is_durable);
                self.device.on_submitted(index, seq);
                Ok(())
            }
            Err(NotSubmitted::Full) => {
                self.counts.full += 1;
                self.threads[index].is_full = true;
                self.device.on_no_space(index, part);
                Ok(())
            }
            Err(NotSubmitted::Refused(why)) => Err(why),
        }
    }

    fn report_marks(&mut self, index: usize, world: &mut World) -> Result<(), String> {
        let id = index as u16;
        let marks = world
            .with_client(self.client, |client, drives, core| client.poll(id, drives, core))
            .ok_or_else(|| format!("stream {id} has failed"))?;
        let crate::client::process::StreamMarks { complete, durable, released } = marks;
        self.device.on_marks(index, Marks { complete, durable }, released);
        Ok(())
    }

    /// The writes that these blocks are from.
    fn found(&self, first: u32, bytes: &[u8]) -> Vec<Found> {
        find(&self.names, first, &block::names(bytes))
    }

    /// Continues the reads. Returns one that has ended.
    pub(super) fn continue_reads(&mut self, world: &mut World) -> Option<ReadEnded> {
        let (first, blocks) = self.reads.first().map(|read| (read.first, read.blocks))?;
        let now = world.core().now;
        let is_stale = world.with_client(self.client, |client, _, core| {
            client.era() != Some(core.oracle.current())
        });
        let since = self.read_fails_since;
        if is_stale || since.is_some_and(|since| now > since + FENCED_NS) {
            // An owner that was fenced does not get connections any more.
            self.fail("another owner has the volume".to_owned(), world);
            return Some(ReadEnded { request: self.reads.remove(0), found: None });
        }
        if !self.is_reading && now >= self.read_not_before {
            self.is_reading = world.with_client(self.client, |client, drives, core| {
                client.begin_read(first, blocks, drives, core)
            });
        }
        if !self.is_reading {
            return None;
        }
        match world.with_client(self.client, |client, _, core| client.take_read(core))? {
            None => {
                // The library begins it again with new connections.
                (self.is_reading, self.read_not_before) = (false, now + READ_AGAIN_NS);
                self.read_fails_since.get_or_insert(now);
                None
            }
            Some(bytes) => {
                (self.is_reading, self.read_fails_since) = (false, None);
                let request = self.reads.remove(0);
                let may_read = self.device.may_read(first.into(), blocks.into());
                Some(ReadEnded { request, found: may_read.then(|| self.found(first, &bytes)) })
            }
        }
    }
}

/// The writes that the contents of these blocks are from.
pub(super) fn find(names: &Names, first: u32, contents: &[block::Content]) -> Vec<Found> {
    let blocks = u64::from(first)..;
    let found = contents.iter().zip(blocks).map(|(content, block)| match names.get(content) {
        Some((token, at)) if *at == block => *token,
        None if *content == ZERO => 0,
        _ => FOREIGN,
    });
    found.collect()
}
