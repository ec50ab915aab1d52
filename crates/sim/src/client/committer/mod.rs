//! The thread that owns the stream of a log of records, as in the library. It opens the log, packs
//! appended records, submits the groups, trims, and reads. The log's core makes all of its
//! decisions.
//!
//! The core reads blocks at once; here a read takes time. So a decision of the core that needs
//! blocks is run again with each block that has come, until it needs no other block.

mod calls;
mod opening;

use std::error::Error;
use std::fmt;

use riopipe_order::attribute::Seq;
use riopipe_order::probe::{self, Rare};
use riopipe_platform::crc32c;
use riopipe_session::initiator::stream_driver::Until;
use riopipe_wal_core::Lsn;
use riopipe_wal_core::opening::{End, Read, Settling};
use riopipe_wal_core::reading::{self, ReadError, Span, Walk, locate};
use riopipe_wal_core::record::{FRAME_BYTES, Frame, Kind};
use riopipe_wal_core::ring::Ring;
use riopipe_wal_core::writer::{Group, Marks, Writer};

use super::application::Process;
use super::stream::Stream;
use crate::block::BLOCK;
use crate::core::Core;
use crate::oracle::{Promise, Record};
use crate::rng::Rng;
use crate::scenario::{LogSpec, Op, Place};

/// The maximum number of bytes that wait to be packed, unless they are one record.
const QUEUE_BYTES: usize = 64 << 10;

/// Blocks that a decision needs and that were not read yet: the first on the volume, and their
/// number.
#[derive(Clone, Copy, Debug)]
struct NotYet(u64, usize);

impl fmt::Display for NotYet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks from {} on were not read", self.1, self.0)
    }
}

impl Error for NotYet {}

/// The present work of the thread.
#[derive(Debug)]
enum Job {
    /// It searches for the end of the log.
    Find,
    /// It has submitted a new log, and waits until the log is durable.
    Create { seq: Seq, log: u64, end: End },
    /// Without an ordering log, it writes again the blocks that may still be lost.
    Settle { log: u64, end: End, settling: Settling, last: Option<Seq>, at: usize },
    /// It reads the content of the log.
    Check { log: u64, end: End },
    /// The log is open.
    Serve,
    /// The log is open, and the thread searches for the block of a trim.
    Locate(Lsn),
    /// The log is open, and the thread reads the records.
    ReadBack(Lsn),
}

/// The event that the application waits for.
#[derive(Debug)]
enum Goal {
    Nothing,
    /// Space for records: their kind, the bytes of each, and their number.
    Space(Kind, u32, u32),
    /// The record at this Lsn is durable.
    Durable(Lsn),
}

/// A group that is packed: the parts, each with its first block and its contents by name.
type Packed = (Group, Vec<(u64, Vec<u64>)>);

/// An open log.
#[derive(Debug)]
struct Open {
    log: u64,
    writer: Writer,
    /// Records that are not packed.
    queue: Vec<u8>,
    /// The Lsn of the next record.
    end: Lsn,
    wanted: Lsn,
    trimmed: Lsn,
    /// A group that was refused because the stream had no space.
    refused: Option<Packed>,
    /// The number of the opening, for the oracle; `None` if another owner has replaced this one.
    opening: Option<usize>,
    /// The Lsn of each record, and of each checkpoint.
    records: Vec<Lsn>,
    checkpoints: Vec<Lsn>,
}

/// The thread that owns the stream of a log of records.
pub(super) struct Committer {
    nth: usize,
    spec: LogSpec,
    ring: Ring,
    /// The result of recovery for the stream: the last group of the prefix, and its tag.
    recovered: Option<(Seq, u64)>,
    job: Job,
    goal: Goal,
    /// The blocks that were read for the job, in order.
    read: Vec<Vec<u8>>,
    is_reading: bool,
    open: Option<Box<Open>>,
    /// The thread sleeps until this is reached, or until the application makes a call.
    asleep: Option<Until>,
}

impl Committer {
    /// A thread that opens a log. Returns `None` if there is no space for the log.
    pub(super) fn new(nth: usize, recovered: Option<(Seq, u64)>, core: &Core) -> Option<Box<Self>> {
        let spec = core.scenario.logs[nth];
        let fits = spec.first + spec.blocks <= core.map.len() as u32;
        let ring = Ring::new(u64::from(spec.first) + 1, u64::from(spec.blocks.saturating_sub(1)));
        Some(Box::new(Self {
            nth,
            spec,
            ring: ring.filter(|_| fits)?,
            recovered,
            job: Job::Find,
            goal: Goal::Nothing,
            read: Vec::new(),
            is_reading: false,
            open: None,
            asleep: None,
        }))
    }

    /// Whether the application may make a call.
    pub(super) fn is_ready(&self) -> bool {
        matches!((&self.job, &self.goal), (Job::Serve, Goal::Nothing))
    }

    /// Whether it sleeps until the marks move.
    pub(super) fn waits_for_marks(&self) -> bool {
        self.asleep == Some(Until::Moved)
    }

    /// Whether everything that was appended is submitted.
    pub(super) fn is_packed(&self) -> bool {
        let done = |open: &Open| open.queue.is_empty() && open.refused.is_none();
        self.is_ready() && self.open.as_deref().is_some_and(done)
    }

    /// Notes that the stream was closed: everything is durable.
    pub(super) fn stream_closed(&mut self, core: &mut Core) {
        if let Some(open) = &self.open {
            let confirmed = core.logs[self.nth].confirm(open.opening, open.end.0);
            report_violation(confirmed, core);
        }
    }

    /// Continues its work. Returns whether anything was done.
    pub(super) fn advance(
        &mut self,
        stream: &mut Stream,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> bool {
        if self.is_reading {
            match stream.read_of_log(core) {
                None => return false,
                Some(Some(bytes)) => {
                    self.read.push(bytes);
                    self.is_reading = false;
                }
                Some(None) => {
                    stream.leave("its log cannot be read", core);
                    return false;
                }
            }
        }
        match self.job {
            Job::Find => self.find(stream, process, core),
            Job::Create { seq, log, end } => {
                self.is_durable(seq, stream) && {
                    core.logs[self.nth].is_created = true;
                    self.checks(log, end)
                }
            }
            Job::Settle { log, end, settling, last, at } => {
                self.rewrite_last_blocks((log, end, settling), (last, at), stream, process, core)
            }
            Job::Check { log, end } => self.check(log, &end, stream, core),
            Job::Locate(lsn) => self.locate(lsn, stream, core),
            Job::ReadBack(from) => self.read_back(from, stream, core),
            Job::Serve => {
                if !self.wakes(stream, core) {
                    return false;
                }
                let moved = self.serve(stream, process, core);
                if self.is_ready() {
                    stream.plan(process.end, 0, core);
                }
                if !moved {
                    self.sleeps(stream);
                }
                moved
            }
        }
    }

    /// Whether the thread is awake, or wakes now.
    fn wakes(&mut self, stream: &mut Stream, core: &mut Core) -> bool {
        let (Some(until), Some(driver)) = (self.asleep, stream.driver()) else { return true };
        let is_over = driver.wait_step(until, None, || core.now).is_some();
        if is_over {
            driver.marks_reported();
            self.asleep = None;
        }
        is_over
    }

    /// Puts the thread to sleep until the marks move. With a refused group, it sleeps until there
    /// may be space.
    fn sleeps(&mut self, stream: &mut Stream) {
        let refused = self.open.as_ref().is_some_and(|open| open.refused.is_some());
        let until = if refused { Until::Space } else { Until::Moved };
        if stream.driver().is_some_and(|driver| driver.begin_wait(until).is_ok()) {
            self.asleep = Some(until);
        }
    }

    fn is_durable(&self, seq: Seq, stream: &mut Stream) -> bool {
        stream.driver().is_some_and(|driver| driver.delivered().durable >= seq)
    }

    fn checks(&mut self, log: u64, end: End) -> bool {
        self.read.clear();
        self.job = Job::Check { log, end };
        true
    }

    /// Runs a decision with the blocks of the volume that were read. If it needs other blocks,
    /// begins to read them.
    fn decide<T>(
        &mut self,
        stream: &mut Stream,
        core: &mut Core,
        decide: impl FnOnce(Ring, &mut Read<'_, NotYet>) -> Result<T, NotYet>,
    ) -> Option<T> {
        let mut given = self.read.iter();
        let mut read = |block: u64, bytes: &mut [u8]| match given.next() {
            Some(read) => {
                bytes.copy_from_slice(read);
                Ok(())
            }
            None => Err(NotYet(block, bytes.len() / BLOCK)),
        };
        match decide(self.ring, &mut read) {
            Ok(decided) => Some(decided),
            Err(NotYet(block, blocks)) => {
                self.is_reading = true;
                stream.begin_read_of_log(block as u32, blocks as u32, core);
                None
            }
        }
    }

    /// Reports that the log is not valid. A fenced owner may not know that it is fenced, so it
    /// reports nothing.
    fn is_broken(&self, promise: Promise, what: &str, stream: &mut Stream, core: &mut Core) {
        if !core.oracle.is_stale(stream.era) {
            core.oracle.broken(promise, format!("log {}: {what}", self.nth));
        }
        stream.leave(what, core);
    }

    /// Handles the stream's progress, and submits the groups that are due.
    fn serve(
        &mut self,
        stream: &mut Stream,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> bool {
        let Some(open) = &mut self.open else { return false };
        let Some(driver) = stream.driver() else { return false };
        driver.marks_reported();
        driver.reclaim();
        let (marks, released) = (driver.delivered(), driver.released());
        let (complete, durable, released) = (marks.complete.0, marks.durable.0, released.0);
        open.writer.on_marks(Marks { complete, durable, released }, open.wanted);
        let confirmed = core.logs[self.nth].confirm(open.opening, open.writer.durable().0);
        report_violation(confirmed, core);
        let mut moved = self.submit(stream, process, core);
        let Some(open) = &mut self.open else { return false };
        match self.goal {
            Goal::Nothing => {}
            Goal::Durable(lsn) if open.writer.durable() > lsn => {
                self.goal = Goal::Nothing;
                moved = true;
            }
            Goal::Space(kind, bytes, count) => moved |= self.append(kind, bytes, count, core),
            Goal::Durable(_) => {}
        }
        // An application that finds the log full waits until other records are durable, and trims
        // the log.
        let Some(open) = &mut self.open else { return false };
        let is_full = open.writer.free_blocks() == 0 && !open.writer.awaits_space();
        if is_full && !open.queue.is_empty() {
            moved |= open.wanted < open.end;
            open.wanted = open.end;
            let durable = open.writer.durable();
            if durable > open.trimmed {
                probe::count_rare(Rare::RecordsFull);
                let nth = self.nth;
                core.trace(|| format!("log {nth}: full"));
                self.trim(durable);
                moved = true;
            }
        }
        moved
    }

    fn submit(
        &mut self,
        stream: &mut Stream,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> bool {
        let Some(open) = &mut self.open else { return false };
        let mut any = false;
        loop {
            let (group, parts) = match open.refused.take() {
                Some(refused) => refused,
                None => match open.writer.plan(open.queue.len(), open.wanted) {
                    Some(group) => (group, pack(open, self.ring, &group, core)),
                    None => return any,
                },
            };
            let tag = group.first + group.blocks;
            match stream.submit_log(&parts, Place::Fresh, tag, group.flush, process, core) {
                Some(seq) => open.writer.on_submitted(&group, seq.0),
                None => {
                    open.refused = Some((group, parts));
                    return any;
                }
            }
            any = true;
        }
    }

    /// Appends records until there is no space. Returns whether there was any space.
    fn append(&mut self, kind: Kind, bytes: u32, count: u32, core: &mut Core) -> bool {
        let Some(open) = &mut self.open else { return false };
        let log = &mut core.logs[self.nth];
        let max = self.ring.record_bytes_max();
        let mut left = count;
        while left > 0 {
            let mut record = content(self.nth, log.appended, (bytes as usize).min(max - 8));
            if kind == Kind::Checkpoint {
                record.splice(0..0, open.writer.durable().0.to_le_bytes());
            }
            let total = FRAME_BYTES + record.len();
            if !open.queue.is_empty() && open.queue.len() + total > QUEUE_BYTES {
                break;
            }
            let (lsn, sum) = (open.end, crc32c(0, &record));
            open.queue.extend_from_slice(&Frame::encode(kind, record.len(), sum, lsn, crc32c));
            open.queue.extend_from_slice(&record);
            open.end = lsn.plus(total);
            open.records.push(lsn);
            let checkpoint = kind == Kind::Checkpoint;
            if checkpoint {
                open.checkpoints.push(lsn);
            }
            log.appended += 1;
            log.append(open.opening, Record { lsn: lsn.0, checkpoint, bytes: record });
            left -= 1;
        }
        self.goal = if left > 0 { Goal::Space(kind, bytes, left) } else { Goal::Nothing };
        left < count
    }

    /// Handles a call of the application.
    pub(super) fn call(&mut self, op: &Op, core: &mut Core) {
        let Some(open) = &mut self.open else { return };
        self.asleep = None;
        let durable = open.writer.durable();
        match *op {
            Op::Append(bytes, count) => {
                self.append(Kind::Data, bytes, count, core);
            }
            Op::Checkpoint(bytes) => {
                self.append(Kind::Checkpoint, bytes, 1, core);
            }
            Op::WaitDurable => {
                if let Some(lsn) = open.records.last().filter(|lsn| **lsn >= durable) {
                    open.wanted = open.wanted.max(lsn.plus(1));
                    self.goal = Goal::Durable(*lsn);
                }
            }
            Op::Trim(0) => {
                let last = open.checkpoints.iter().rfind(|lsn| **lsn < durable).copied();
                last.into_iter().for_each(|lsn| self.trim(lsn));
            }
            Op::Trim(1) => self.trim(durable),
            Op::Trim(nth) => {
                let at = nth as usize % open.records.len().max(1);
                open.records.get(at).copied().into_iter().for_each(|lsn| self.trim(lsn));
            }
            Op::ReadBack => {
                self.read.clear();
                self.job = Job::ReadBack(open.trimmed);
            }
            _ => {}
        }
    }

    /// Drops the records below an Lsn, if that is permitted.
    fn trim(&mut self, lsn: Lsn) {
        let Some(open) = &self.open else { return };
        if lsn > open.trimmed && open.writer.may_trim(lsn).is_ok() {
            self.read.clear();
            self.job = Job::Locate(lsn);
        }
    }

    fn locate(&mut self, lsn: Lsn, stream: &mut Stream, core: &mut Core) -> bool {
        let Some(open) = &self.open else { return false };
        let (log, blocks, own) = (open.log, open.writer.blocks(), open.writer.block_of(lsn));
        let found = self.decide(stream, core, |ring, read| {
            if let Some(number) = own {
                return Ok(Ok(number));
            }
            let mut in_ring = |place: u64, bytes: &mut [u8]| read(ring.lba(place), bytes);
            match locate(ring, log, crc32c, lsn, blocks, &mut in_ring) {
                Ok(number) => Ok(Ok(number)),
                Err(ReadError::Read(not_yet)) => Err(not_yet),
                Err(error) => Ok(Err(error.to_string())),
            }
        });
        let Some(found) = found else { return self.is_reading };
        let Some(open) = &mut self.open else { return false };
        match found {
            Ok(number) => {
                open.trimmed = lsn;
                open.records.retain(|record| *record >= lsn);
                open.checkpoints.retain(|record| *record >= lsn);
                open.writer.trim(lsn, number);
                let nth = self.nth;
                core.trace(|| format!("log {nth}: trimmed to Lsn {lsn}, block {number}"));
                let trimmed = core.logs[nth].trimmed(open.opening, lsn.0);
                report_violation(trimmed, core);
                self.job = Job::Serve;
                true
            }
            Err(why) => {
                self.is_broken(Promise::P1, &why, stream, core);
                false
            }
        }
    }

    fn read_back(&mut self, from: Lsn, stream: &mut Stream, core: &mut Core) -> bool {
        let Some(open) = &self.open else { return false };
        let (log, blocks) = (open.log, open.writer.blocks());
        let found = self.decide(stream, core, |ring, read| {
            records(Span { ring, log, crc: crc32c, from, blocks }, usize::MAX, read)
        });
        let Some(found) = found else { return self.is_reading };
        let opening = self.open.as_ref().and_then(|open| open.opening);
        match found {
            Ok(records) => {
                let read = core.logs[self.nth].read(opening, from.0, &records);
                report_violation(read, core);
                self.job = Job::Serve;
                true
            }
            Err(why) => {
                self.is_broken(Promise::P1, &why, stream, core);
                false
            }
        }
    }
}

/// The first `count` records of a part of a log.
fn records(
    span: Span,
    count: usize,
    read: &mut Read<'_, NotYet>,
) -> Result<Result<Vec<Record>, String>, NotYet> {
    let ring = span.ring;
    let mut in_ring = |place: u64, bytes: &mut [u8]| read(ring.lba(place), bytes);
    let (mut walk, mut all) = (Walk::new(span), Vec::new());
    while all.len() < count {
        match walk.next_record(&mut in_ring) {
            Ok(None) => break,
            Ok(Some(reading::Record { lsn, kind, bytes })) => {
                all.push(Record { lsn: lsn.0, checkpoint: kind == Kind::Checkpoint, bytes });
            }
            Err(ReadError::Read(not_yet)) => return Err(not_yet),
            Err(error) => return Ok(Err(error.to_string())),
        }
    }
    Ok(Ok(all))
}

/// The bytes of a record. No two records have the same bytes.
fn content(log: usize, nth: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new((log as u64) << 32 | nth);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&rng.u64().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Records the bytes of blocks before a write. Returns their names.
fn record_blocks(bytes: &[u8], core: &mut Core) -> Vec<u64> {
    let blocks = bytes.chunks_exact(BLOCK).map(|block| {
        let name = core.oracle.next_number();
        core.block_bytes.record(name, block);
        name
    });
    blocks.collect()
}

/// Packs a group. Returns its parts.
fn pack(open: &mut Open, ring: Ring, group: &Group, core: &mut Core) -> Vec<(u64, Vec<u64>)> {
    let extents = ring.extents(group.first, group.blocks);
    let [mut first, mut second] = extents.map(|extent| vec![0; extent.blocks as usize * BLOCK]);
    open.writer.pack(group, &open.queue, [&mut first, &mut second]);
    open.queue.drain(..group.bytes);
    let parts = extents.into_iter().zip([first, second]).filter(|(_, bytes)| !bytes.is_empty());
    parts.map(|(extent, bytes)| (extent.lba, record_blocks(&bytes, core))).collect()
}

/// Reports a broken promise of a log to the oracle, if there is one.
fn report_violation(result: Result<(), (Promise, String)>, core: &mut Core) {
    if let Err((promise, what)) = result {
        core.oracle.broken(promise, what);
    }
}
