//! A drive with the worst behaviour that the media assumptions permit
//! (`docs/ordering-contract.md`).
//!
//! Writes in flight land in any order, before or after they are reported complete, also when the
//! process that issued them has died. With power-loss protection, complete writes are durable.
//! Without it, only the writes that a FLUSH has covered are durable, and a power cut leaves any
//! subset of the others. A FLUSH covers the writes that had *completed* before it was submitted. A
//! FLUSH that fails acts on each block separately: it loses the content, keeps it, or leaves it
//! readable without making it durable.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

use riopipe_model::ssd::Command;
use riopipe_order::block_device::{
    BLOCK_BYTES, BlockDevice, Cause, Data, Done, IoError, Limits, Operation, Submitted,
};
use riopipe_order::write_order::{DriveOrder, EpochId, WriteOrder};
use serde::{Deserialize, Serialize};

use crate::block::{self, BLOCK, Content, GARBAGE, SECTOR, ZERO};
use crate::crash_injector::CrashInjector;
use crate::env::TraceLines;
use crate::rng::Rng;
use modelled::{Finished, Modelled};
use riopipe_platform::crc32c;

pub use modelled::ModelKind;

mod modelled;

/// The properties of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveSpec {
    /// The drive has power-loss protection: complete writes are durable.
    pub plp: bool,
    /// Deallocated blocks read as garbage, not as zeroes.
    pub garbage: bool,
    /// Of 100 operations, the number that finish within the call.
    pub at_once: u8,
    /// The longest that an operation usually takes, µs.
    pub latency_us: u32,
    /// Of 100 operations, the number that take up to a hundred times as long.
    pub slow: u8,
    /// The drive is a modelled SSD instead, with times and losses of its own. Only writes fail
    /// there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelKind>,
}

/// An operation on a drive.
#[derive(Clone, Debug)]
enum Request {
    /// Writes these contents from a block on.
    Write(u32, Vec<Content>),
    /// Zeroes blocks. `true`: deallocates them.
    Zero(u32, u32, bool),
    /// Reads blocks.
    Read(u32, u32),
    /// Makes durable all writes that had completed when the count of completions had this value.
    Flush(u64),
}

impl Request {
    /// The same operation for a modelled drive.
    fn command(self) -> Command<Content> {
        let (what, lba, blocks) = self.extent();
        match self {
            Self::Write(_, contents) => {
                let (pages, order) = (modelled::pages(contents), WriteOrder::Orderless);
                Command::Write { lba, pages, order }
            }
            Self::Zero(..) => Command::Zeroes { what, lba, blocks },
            Self::Read(..) => Command::Read { lba, blocks },
            Self::Flush(_) => Command::Flush,
        }
    }

    /// The operation, the first block, and the number of blocks.
    fn extent(&self) -> (Operation, u64, u64) {
        match self {
            Self::Write(lba, contents) => {
                (Operation::Write, u64::from(*lba), contents.len() as u64)
            }
            Self::Zero(lba, blocks, false) => {
                (Operation::WriteZeroes, u64::from(*lba), u64::from(*blocks))
            }
            Self::Zero(lba, blocks, true) => {
                (Operation::Deallocate, u64::from(*lba), u64::from(*blocks))
            }
            Self::Read(lba, blocks) => (Operation::Read, u64::from(*lba), u64::from(*blocks)),
            Self::Flush(_) => (Operation::Flush, 0, 0),
        }
    }
}

/// A planned fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DriveFault {
    /// The next write fails. A part of it may have landed.
    Write,
    /// The next FLUSH fails.
    Flush,
    /// The next read fails.
    Read,
    /// The next write finds no space.
    Full,
}

/// An event on a drive that the oracle gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriveEvent {
    /// The contents of these blocks have completed.
    Completed(Vec<Content>),
    /// A write or discard failed: its blocks, and for a write their contents.
    WriteFailed(Vec<(u32, Content)>),
    /// A FLUSH failed while these blocks had contents that were not durable.
    FlushFailed(Vec<(u32, Content)>),
}

#[derive(Clone, Copy, Debug)]
struct Version {
    content: Content,
    /// The count of completions when its write completed; `PENDING` before.
    completed: u64,
    /// A failed FLUSH has dropped it: no later FLUSH makes it durable.
    dropped: bool,
    /// The write that put it there.
    flight: u64,
}

const PENDING: u64 = u64::MAX;

/// The result of an operation; of a read, its bytes.
pub type Ended = Result<Option<Vec<u8>>, IoError>;

#[derive(Clone, Debug, Default)]
struct Block {
    durable: Content,
    /// The contents that have landed since then, oldest first.
    versions: Vec<Version>,
}

impl Block {
    fn now(&self) -> Content {
        self.versions.last().map_or(self.durable, |version| version.content)
    }

    /// Makes durable the last version that had completed at the count `completed`, and drops the
    /// versions before it.
    fn settle(&mut self, completed: u64) {
        let covered = |v: &Version| v.completed <= completed && !v.dropped;
        if let Some(at) = self.versions.iter().rposition(covered) {
            self.durable = self.versions[at].content;
            self.versions.drain(..=at);
        }
    }
}

#[derive(Clone, Debug)]
struct Flight {
    number: u64,
    /// The name of the operation, for the core that asked. `None` once the process has died.
    op: Option<u64>,
    request: Request,
    landed: bool,
    fault: Option<DriveFault>,
}

/// A drive.
#[derive(Debug)]
pub struct Drive {
    spec: DriveSpec,
    blocks: Vec<Block>,
    flights: Vec<Flight>,
    /// The number of completions.
    clock: u64,
    begun: u64,
    /// Blocks that have versions.
    dirty: Vec<u32>,
    faults: Vec<DriveFault>,
    reported: Vec<DriveEvent>,
    /// Writes that landed after the process that issued them had died.
    late: u64,
    /// The bytes of labels, by the names that they were given here.
    labels: BTreeMap<Content, Vec<u8>>,
    /// Blocks that a power cut may also tear.
    tears: BTreeSet<u32>,
    limits: Limits,
    /// Operations that were not yet given to the drive: the number and the duration, ns, of each.
    gathered: Vec<(u64, u64)>,
    /// The end of each operation: its time, ns, and its number.
    due: BinaryHeap<Reverse<(u64, u64)>>,
    rng: Rng,
    /// Stops the process in the middle of an effect.
    crash_injector: CrashInjector,
    trace_lines: TraceLines,
    modelled: Option<Modelled>,
}

/// The first blocks of a drive, which hold labels. They have real bytes, not only names.
pub const LABEL_BLOCKS: u32 = 2;
/// The first name of a label. The checksum of the label is added to it.
const LABEL_NAMES: Content = 1 << 62;

impl Drive {
    /// A drive of `blocks` blocks, all zero. Its name is for errors and traces.
    #[must_use]
    pub fn new(
        (spec, blocks): (DriveSpec, u32),
        name: &str,
        mut rng: Rng,
        crash_injector: CrashInjector,
        trace_lines: TraceLines,
    ) -> Self {
        Self {
            limits: Limits::new(blocks.into(), &Arc::from(name)),
            modelled: spec.model.map(|kind| Modelled::new(kind, blocks, rng.u64())),
            gathered: Vec::new(),
            due: BinaryHeap::new(),
            rng,
            crash_injector,
            trace_lines,
            spec,
            blocks: vec![Block::default(); blocks as usize],
            flights: Vec::new(),
            clock: 0,
            begun: 0,
            dirty: Vec::new(),
            faults: Vec::new(),
            reported: Vec::new(),
            late: 0,
            labels: BTreeMap::new(),
            tears: BTreeSet::new(),
        }
    }

    /// The names of the contents that are written from a block on.
    pub fn names(&mut self, lba: u64, bytes: &[u8]) -> Vec<Content> {
        if lba >= u64::from(LABEL_BLOCKS) {
            return block::names(bytes);
        }
        bytes.chunks_exact(BLOCK).map(|block| self.name_label(block)).collect()
    }

    /// The bytes of the contents with these names.
    #[must_use]
    pub fn bytes(&self, contents: &[Content]) -> Vec<u8> {
        let mut bytes = block::bytes(contents);
        for (block, content) in bytes.chunks_exact_mut(BLOCK).zip(contents) {
            if let Some(label) = self.labels.get(content) {
                block.copy_from_slice(label);
            }
        }
        bytes
    }

    /// The name of a label, by which its bytes are found again.
    pub fn name_label(&mut self, bytes: &[u8]) -> Content {
        let name = LABEL_NAMES + Content::from(crc32c(0, bytes));
        self.labels.insert(name, bytes.to_vec());
        name
    }

    /// Tears a label that was in flight when the power was cut: some sectors are old, some new.
    /// Other blocks are written whole (assumption M1). For labels the product does not rely on
    /// that.
    fn tear(&mut self, lba: u32, newer: Content) {
        let mut torn = self.bytes(&[self.blocks[lba as usize].durable]);
        let newer = self.bytes(&[newer]);
        for (torn, newer) in torn.chunks_mut(SECTOR).zip(newer.chunks(SECTOR)) {
            if self.rng.one_in(2) {
                torn.copy_from_slice(newer);
            }
        }
        let torn = self.name_label(&torn);
        self.blocks[lba as usize].durable = torn;
    }

    /// Sets the content that a block holds from the start, durably.
    pub fn preset(&mut self, lba: u32, content: Content) {
        if let Some(modelled) = &mut self.modelled {
            return modelled.preset(lba, content);
        }
        self.blocks[lba as usize].durable = content;
    }

    /// Permits tears of this block: its writer does not need it to be written whole (assumption
    /// M1).
    pub fn may_tear(&mut self, lba: u32) {
        self.tears.insert(lba);
    }

    /// The properties of the drive.
    #[must_use]
    pub const fn spec(&self) -> &DriveSpec {
        &self.spec
    }

    /// Gives the drive a volatile cache from now on. Durable contents stay durable.
    pub fn unprotect(&mut self) {
        self.spec.plp = false;
    }

    /// The content that a reader finds in a block.
    #[must_use]
    pub fn block(&self, lba: u32) -> Content {
        if let Some(modelled) = &self.modelled {
            return modelled.block(lba);
        }
        self.blocks[lba as usize].now()
    }

    /// The contents that a power cut may leave in a block.
    pub fn possible(&self, lba: u32) -> impl Iterator<Item = Content> {
        let block = &self.blocks[lba as usize];
        let kept = block.versions.iter().filter(|v| !v.dropped).map(|v| v.content);
        let older = self.modelled.iter().flat_map(move |modelled| modelled.older(lba));
        let newest = self.modelled.as_ref().map_or(block.durable, |modelled| modelled.block(lba));
        older.chain([newest]).chain(kept)
    }

    /// The durable content of a block.
    #[must_use]
    pub fn durable(&self, lba: u32) -> Content {
        if let Some(modelled) = &self.modelled {
            return modelled.older(lba).next().unwrap_or_else(|| modelled.block(lba));
        }
        self.blocks[lba as usize].durable
    }

    /// Plans the next fault.
    pub fn plan_fault(&mut self, fault: DriveFault) {
        self.faults.push(fault);
    }

    /// Removes all planned faults.
    pub fn heal(&mut self) {
        self.faults.clear();
    }

    /// Whether the drive still works on operations of an earlier process.
    #[must_use]
    pub fn has_late_operations(&self) -> bool {
        !self.flights.is_empty() || self.modelled.as_ref().is_some_and(Modelled::is_busy)
    }

    fn submit(&mut self, op: u64, request: Request) -> Submitted<Vec<u8>> {
        let (what, lba, blocks) = request.extent();
        if what != Operation::Flush
            && let Err(refused) = self.limits.extent(what, lba, blocks)
        {
            return Submitted::Done(Err(refused));
        }
        if !self.crash_injector.count_effect() {
            // The process has stopped before. It will not receive the result.
            return Submitted::Pending;
        }
        if let Some(modelled) = &mut self.modelled {
            self.trace_lines.add(|| format!("begins {op}: {request:?}"));
            modelled.submit(op, request.command());
            return Submitted::Pending;
        }
        let text = self.trace_lines.is_wanted().then(|| format!("{request:?}"));
        let flight = self.begin(op, request);
        self.trace_lines.add(|| format!("begins {flight}: {}", text.unwrap_or_default()));
        if self.rng.percent(u64::from(self.spec.at_once))
            && let Some((_, result)) = self.finish(flight)
        {
            return Submitted::Done(result);
        }
        let slow = self.rng.percent(u64::from(self.spec.slow));
        let times = if slow { self.rng.range(1, 100) } else { 1 };
        let delay = 1_000 + times * self.rng.below(1_000 * u64::from(self.spec.latency_us));
        self.gathered.push((flight, delay));
        Submitted::Pending
    }

    /// Submits an operation that only a modelled drive has.
    fn submit_to_model(&mut self, op: u64, command: Command<Content>) -> Submitted<Vec<u8>> {
        if !self.crash_injector.count_effect() {
            // The process has stopped before. It will not receive the result.
            return Submitted::Pending;
        }
        self.trace_lines.add(|| format!("begins {op}: {command:?}"));
        if let Some(modelled) = &mut self.modelled {
            modelled.submit(op, command);
        }
        Submitted::Pending
    }

    /// Begins a write, which may be one that fails.
    fn write_to_model(
        &mut self,
        op: u64,
        lba: u64,
        contents: Vec<Content>,
        order: WriteOrder,
    ) -> Submitted<Vec<u8>> {
        let request = Request::Write(lba as u32, contents.clone());
        let lba = match self.take_fault(&request) {
            None => lba,
            Some(_) => {
                let failed = (lba as u32..).zip(contents.iter().copied()).collect();
                self.reported.push(DriveEvent::WriteFailed(failed));
                match &mut self.modelled {
                    // It fails when it would have completed.
                    Some(modelled) if self.rng.one_in(2) => {
                        modelled.fail(&contents);
                        lba
                    }
                    // The model refuses a write beyond the last block at once.
                    _ => self.blocks.len() as u64,
                }
            }
        };
        self.submit_to_model(op, Command::Write { lba, pages: modelled::pages(contents), order })
    }

    /// Resets the controller: all streams end, and begin with the epoch `first`.
    pub fn reset_streams(&mut self, now: u64, first: u16) {
        if let Some(modelled) = &mut self.modelled {
            modelled.reset_streams(now, first);
        }
    }

    /// The order that the drive keeps.
    pub fn order(&self) -> DriveOrder {
        self.spec.model.map_or(DriveOrder::None, |model| model.order().kind)
    }

    /// Begins an operation. Returns its number.
    fn begin(&mut self, op: u64, request: Request) -> u64 {
        self.begun += 1;
        let fault = self.take_fault(&request);
        let mut flight = Flight { number: self.begun, op: Some(op), request, landed: false, fault };
        // The write may be on the medium long before it is reported.
        if fault.is_none() && self.rng.one_in(4) {
            self.land(&mut flight);
        }
        self.flights.push(flight);
        self.begun
    }

    fn take_fault(&mut self, request: &Request) -> Option<DriveFault> {
        let fits = |fault: &DriveFault| match fault {
            DriveFault::Write => matches!(request, Request::Write(..) | Request::Zero(..)),
            DriveFault::Full => matches!(request, Request::Write(..)),
            DriveFault::Flush => matches!(request, Request::Flush(_)),
            DriveFault::Read => matches!(request, Request::Read(..)),
        };
        let at = self.faults.iter().position(fits)?;
        Some(self.faults.remove(at))
    }

    /// Ends an operation. Returns `None` if a power cut has ended it before. The name of the
    /// operation is `None` if its process has died.
    fn finish(&mut self, number: u64) -> Option<(Option<u64>, Ended)> {
        let at = self.flights.iter().position(|flight| flight.number == number)?;
        let mut flight = self.flights.swap_remove(at);
        let end = match flight.fault {
            None => Ok(self.complete(&mut flight)),
            Some(fault) => Err(self.fail(&flight, fault)),
        };
        self.trace_lines.add(|| format!("ends {number}: {end:?}"));
        let end = end.map(|read| read.map(|contents| self.bytes(&contents)));
        if flight.op.is_none() && matches!(flight.request, Request::Write(..) | Request::Zero(..)) {
            self.late += 1;
        }
        Some((flight.op, end))
    }

    /// Ends an operation with success. Returns the contents that a read finds.
    fn complete(&mut self, flight: &mut Flight) -> Option<Vec<Content>> {
        self.land(flight);
        self.clock += 1;
        match &flight.request {
            Request::Read(lba, blocks) => {
                return Some((*lba..lba + blocks).map(|lba| self.block(lba)).collect());
            }
            Request::Flush(clock) => self.flush(*clock),
            Request::Write(lba, contents) => {
                let (lba, blocks) = (*lba, contents.len() as u32);
                self.completed(flight.number, lba, blocks);
                self.reported.push(DriveEvent::Completed(contents.clone()));
            }
            Request::Zero(lba, blocks, _) => self.completed(flight.number, *lba, *blocks),
        }
        None
    }

    /// Puts the contents of a write onto the medium, or into its cache.
    fn land(&mut self, flight: &mut Flight) {
        if core::mem::replace(&mut flight.landed, true) {
            return;
        }
        match &flight.request {
            Request::Write(lba, contents) => {
                for (lba, content) in (*lba..).zip(contents) {
                    self.put(lba, *content, flight.number);
                }
            }
            Request::Zero(lba, blocks, deallocate) => {
                let content = self.zeroed(*deallocate);
                for lba in *lba..lba + blocks {
                    self.put(lba, content, flight.number);
                }
            }
            Request::Read(..) | Request::Flush(_) => {}
        }
    }

    const fn zeroed(&self, deallocate: bool) -> Content {
        if deallocate && self.spec.garbage { GARBAGE } else { ZERO }
    }

    fn put(&mut self, lba: u32, content: Content, flight: u64) {
        let block = &mut self.blocks[lba as usize];
        if block.versions.is_empty() {
            self.dirty.push(lba);
        }
        block.versions.push(Version { content, completed: PENDING, dropped: false, flight });
    }

    fn completed(&mut self, flight: u64, lba: u32, blocks: u32) {
        for lba in lba..lba + blocks {
            let block = &mut self.blocks[lba as usize];
            for version in block.versions.iter_mut().filter(|v| v.flight == flight) {
                version.completed = self.clock;
            }
            if self.spec.plp {
                block.settle(self.clock);
            }
        }
    }

    fn flush(&mut self, clock: u64) {
        let blocks = &mut self.blocks;
        self.dirty.retain(|lba| {
            let block = &mut blocks[*lba as usize];
            block.settle(clock);
            !block.versions.is_empty()
        });
    }

    /// Makes all complete writes durable.
    pub fn sync(&mut self) {
        if let Some(modelled) = &mut self.modelled {
            return modelled.sync();
        }
        self.flush(self.clock);
    }

    fn fail(&mut self, flight: &Flight, fault: DriveFault) -> IoError {
        match &flight.request {
            Request::Write(lba, contents) => {
                let blocks = || (*lba..).zip(contents.iter().copied());
                if fault != DriveFault::Full {
                    for (lba, content) in blocks() {
                        if self.rng.one_in(2) {
                            self.put(lba, content, flight.number);
                        }
                    }
                }
                self.reported.push(DriveEvent::WriteFailed(blocks().collect()));
            }
            Request::Zero(lba, blocks, deallocate) => {
                for lba in *lba..lba + blocks {
                    if self.rng.one_in(2) {
                        self.put(lba, self.zeroed(*deallocate), flight.number);
                    }
                }
                self.reported.push(DriveEvent::WriteFailed(
                    (*lba..lba + blocks).map(|b| (b, ZERO)).collect(),
                ));
            }
            Request::Flush(clock) => self.fail_flush(*clock),
            Request::Read(..) => {}
        }
        let (what, lba, blocks) = flight.request.extent();
        let cause = match fault {
            DriveFault::Full => Cause::NoSpace("a planned fault".into()),
            DriveFault::Write | DriveFault::Flush | DriveFault::Read => {
                Cause::Failed("a planned fault".into())
            }
        };
        self.limits.error(what, lba, blocks, cause)
    }

    /// Fails a FLUSH ("fsyncgate"). Contents that should have become durable are gone, or stay
    /// readable without ever becoming durable, or became durable nevertheless.
    fn fail_flush(&mut self, clock: u64) {
        let mut affected = Vec::new();
        for lba in self.dirty.clone() {
            let block = &mut self.blocks[lba as usize];
            let covered = |v: &Version| v.completed <= clock && !v.dropped;
            let Some(last) = block.versions.iter().rposition(covered) else { continue };
            affected.push((lba, block.versions[last].content));
            match self.rng.below(3) {
                0 => {
                    block.versions.drain(..=last);
                }
                1 => block.versions[..=last].iter_mut().for_each(|v| v.dropped = true),
                _ => block.settle(clock),
            }
        }
        let blocks = &self.blocks;
        self.dirty.retain(|lba| !blocks[*lba as usize].versions.is_empty());
        self.reported.push(DriveEvent::FlushFailed(affected));
    }

    /// Continues the operations in flight after the process that issued them has died.
    pub fn orphan(&mut self) {
        debug_assert!(self.gathered.is_empty(), "an operation that would never end");
        if let Some(modelled) = &mut self.modelled {
            modelled.orphan();
        }
        for flight in &mut self.flights {
            flight.op = None;
        }
        self.flights.retain(|f| matches!(f.request, Request::Write(..) | Request::Zero(..)));
    }

    /// Cuts the power. Of all that is not durable, any subset remains.
    pub fn power_cut(&mut self, now: u64) {
        if let Some(modelled) = &mut self.modelled {
            return modelled.power_cut(now, self.rng.u64());
        }
        self.gathered.clear();
        self.due.clear();
        let mut flights = core::mem::take(&mut self.flights);
        while !flights.is_empty() {
            let mut flight = flights.swap_remove(self.rng.index(flights.len()));
            if self.rng.one_in(2) {
                self.land(&mut flight);
            }
        }
        // Keep all, nothing, or about half.
        let keep = *self.rng.pick(&[0, 50, 50, 100]);
        for lba in core::mem::take(&mut self.dirty) {
            let block = &mut self.blocks[lba as usize];
            let versions = core::mem::take(&mut block.versions);
            // On a protected drive, complete writes are durable and not torn any more.
            if let Some(newer) = versions.last().filter(|_| lba < LABEL_BLOCKS)
                && self.rng.one_in(3)
            {
                self.tear(lba, newer.content);
                continue;
            }
            if let Some(newer) = versions.last().filter(|_| self.tears.contains(&lba))
                && self.rng.one_in(2)
                && let Some(torn) =
                    block::torn(block.durable, newer.content, self.rng.range(1, 254) as u8)
            {
                block.durable = torn;
                continue;
            }
            let kept: Vec<&Version> = versions.iter().filter(|v| !v.dropped).collect();
            if !kept.is_empty() && self.rng.percent(keep) {
                let last = if keep == 100 { kept.len() - 1 } else { self.rng.index(kept.len()) };
                block.durable = kept[last].content;
            }
        }
    }

    /// The events for the oracle since the last call.
    pub fn take_reported(&mut self) -> Vec<DriveEvent> {
        core::mem::take(&mut self.reported)
    }

    /// The number of late writes since the last call: those that landed after their process had
    /// died.
    pub fn take_late(&mut self) -> u64 {
        core::mem::take(&mut self.late)
    }
}

impl BlockDevice for Drive {
    type Buf = Vec<u8>;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_, Vec<u8>>) -> Submitted<Vec<u8>> {
        if let Err(refused) = self.limits.data(Operation::Write, lba, data.bytes().len()) {
            return Submitted::Done(Err(refused));
        }
        let contents = self.names(lba, data.bytes());
        match self.modelled.is_some() {
            true => self.write_to_model(op, lba, contents, WriteOrder::Orderless),
            false => self.submit(op, Request::Write(lba as u32, contents)),
        }
    }

    fn write_in_order(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_, Vec<u8>>,
        order: WriteOrder,
    ) -> Submitted<Vec<u8>> {
        if order == WriteOrder::Orderless {
            return self.write(op, lba, data);
        }
        if let Err(refused) = self.limits.data(Operation::Write, lba, data.bytes().len()) {
            return Submitted::Done(Err(refused));
        }
        if !self.order().keeps(order) {
            let blocks = (data.bytes().len() / BLOCK_BYTES) as u64;
            let cause = Cause::OrderNotKept;
            return Submitted::Done(Err(self.limits.error(Operation::Write, lba, blocks, cause)));
        }
        let contents = self.names(lba, data.bytes());
        self.write_to_model(op, lba, contents, order)
    }

    fn flush_epochs(&mut self, op: u64, before: EpochId) -> Submitted<Vec<u8>> {
        if self.order() != DriveOrder::Epochs {
            let error = self.limits.error(Operation::Flush, 0, 0, Cause::OrderNotKept);
            return Submitted::Done(Err(error));
        }
        self.submit_to_model(op, Command::FlushEpochs { before })
    }

    fn start_stream(&mut self, op: u64, first: EpochId) -> Submitted<Vec<u8>> {
        if self.order() == DriveOrder::None {
            let error = self.limits.error(Operation::StartStream, 0, 0, Cause::OrderNotKept);
            return Submitted::Done(Err(error));
        }
        self.submit_to_model(op, Command::StartStream { first })
    }

    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.submit(op, Request::Read(lba as u32, blocks as u32))
    }

    fn flush(&mut self, op: u64) -> Submitted<Vec<u8>> {
        self.submit(op, Request::Flush(self.clock))
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.submit(op, Request::Zero(lba as u32, blocks as u32, false))
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.submit(op, Request::Zero(lba as u32, blocks as u32, true))
    }

    fn kick(&mut self, now: u64) {
        if let Some(modelled) = &mut self.modelled {
            return modelled.kick(now);
        }
        self.due
            .extend(self.gathered.drain(..).map(|(flight, delay)| Reverse((now + delay, flight))));
    }

    /// Operations of a process that has died end, too, but are not reported.
    fn poll(&mut self, now: u64, done: &mut Vec<Done<Vec<u8>>>) {
        if let Some(modelled) = &mut self.modelled {
            for Finished { op, writes, contents, result } in modelled.poll(now) {
                self.trace_lines.add(|| format!("ends {op:?}: {result:?}"));
                if result.is_ok() && !contents.is_empty() {
                    self.reported.push(DriveEvent::Completed(contents));
                }
                self.late += u64::from(writes && op.is_none());
                let result = result.map(|read| read.map(|contents| self.bytes(&contents)));
                done.extend(op.map(|op| Done { op, result }));
            }
            return;
        }
        while let Some(Reverse((due, flight))) = self.due.peek().copied()
            && due <= now
        {
            self.due.pop();
            if let Some((Some(op), result)) = self.finish(flight) {
                done.push(Done { op, result });
            }
        }
    }

    fn next_deadline(&self) -> Option<u64> {
        if let Some(modelled) = &self.modelled {
            return modelled.next_deadline();
        }
        self.due.peek().map(|Reverse((due, _))| *due)
    }

    fn in_flight(&self) -> usize {
        if let Some(modelled) = &self.modelled {
            return modelled.in_flight();
        }
        self.flights.iter().filter(|flight| flight.op.is_some()).count()
    }
}
