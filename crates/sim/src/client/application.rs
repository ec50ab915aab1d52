//! The application's use of a stream: the steps of the scenario, as calls of the library.
//!
//! While the application's thread is in a call that waits, it drives the stream. Otherwise it does
//! other work, pauses, or has no step left, and then only the background driver drives the stream.

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Op as EngineOp, Place as EnginePlace, Refusal, Write};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_session::initiator::stream::{ReadExtent, ReadSlot};
use riopipe_session::initiator::stream_driver::{StreamDriver, Until};
use riopipe_session::initiator::volume::block_ownership::BlockOwnershipChecker;

use super::committer::Committer;
use super::duties::stage;
use super::stream::Stream;
use crate::block::{self, BLOCK};
use crate::core::{Core, Ev, US};
use crate::network::ClientEnd;
use crate::oracle::{Drives, Promise, Read, Recovered, Submitted};
use crate::payload::Payload;
use crate::scenario::{Op, Place, WriteOp};

/// The pause after a call that was refused for lack of space, ns. It prevents an endless loop at
/// one moment.
const AGAIN_NS: u64 = US;
/// Of 100 submissions, the number that a poll follows at once. The others wait for the next call,
/// or for the background driver.
const POLLED: u64 = 75;
/// Of 100 waits, the number that are given up after a while.
const GIVEN_UP_WAITS: u64 = 10;

/// The call that the owner of a stream is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// No call.
    None,
    /// The owner waits, until `deadline` at the latest.
    Wait { until: Until, deadline: Option<u64> },
    /// The owner reads.
    Read,
    /// The owner closes the stream.
    Close,
    /// The thread of a log of records drives the stream.
    Serve,
}

/// The read of a call, as one or two reads of the driver.
#[derive(Debug, Default)]
pub(super) struct Reading {
    pub(super) due: Read,
    /// The number of blocks of the extent that is read first. These are the last blocks.
    pub(super) first: usize,
    pub(super) bytes: Vec<u8>,
    /// The driver's reads that have not ended, with the place of their first byte in `bytes`.
    pub(super) slots: Vec<(ReadSlot, usize)>,
    /// Whether the read has ended, and has succeeded.
    pub(super) ended: Option<bool>,
}

impl Reading {
    /// The contents that were read, in the order of the blocks.
    pub(super) fn found(&self) -> Vec<block::Content> {
        let mut found = block::names(&self.bytes);
        found.rotate_left(self.first);
        found
    }

    /// Takes in data of the driver's reads.
    pub(super) fn put(&mut self, slot: ReadSlot, offset: usize, data: &[u8]) {
        let read = self.slots.iter().find(|(read, _)| *read == slot);
        let begin = read.map_or(usize::MAX, |(_, base)| base + offset);
        let part = self.bytes.get_mut(begin..begin.saturating_add(data.len()));
        if let Some(part) = part {
            part.copy_from_slice(data);
        }
    }

    /// Continues the read, after each round. Returns whether it has succeeded, once it has ended.
    pub(super) fn step(&mut self, driver: &mut StreamDriver<Payload>, now: u64) -> Option<bool> {
        let mut has_failed = false;
        self.slots.retain(|(slot, _)| match driver.read_step(*slot, now) {
            None => true,
            Some(result) => {
                has_failed |= result.is_err();
                false
            }
        });
        if has_failed {
            // The call ends with the first error.
            self.slots.drain(..).for_each(|(slot, _)| driver.give_up_read(slot));
        }
        self.slots.is_empty().then_some(!has_failed)
    }
}

/// The result of a step.
enum Done {
    /// The step has ended.
    Ended,
    /// The step waits.
    Waits(Call),
    /// The step must be repeated after a wait.
    Again(Call),
}

/// The state of the application's process beside the stream.
pub(super) struct Process<'a, 'd> {
    /// The initiator's process.
    pub(super) end: ClientEnd,
    pub(super) ownership_checker: &'a mut BlockOwnershipChecker,
    pub(super) drives: &'a Drives<'d>,
}

impl Stream {
    /// Whether it has steps left, or waits for the end of a step that it has begun.
    #[must_use]
    pub(super) fn has_work(&self, core: &Core) -> bool {
        if self.is_reader {
            return self.is_in_call();
        }
        let (steps, begun) = &core.steps[usize::from(self.id)];
        let serves = self.committer.as_ref().is_some_and(|committer| !committer.is_packed());
        let waits = self.is_in_call() && !matches!(self.call, Call::Close | Call::Serve);
        *begun < steps.len() || self.step_planned || serves || waits
    }

    /// Whether everything that was submitted is durable, according to the marks that its owner has
    /// received.
    #[must_use]
    pub(super) fn is_durable(&self, core: &Core) -> bool {
        // The thread of a log of records never leaves its stream.
        if self.is_reader || self.committer.is_some() {
            return true;
        }
        let (_, durable, last) = core.oracle.progress(self.era, self.id);
        durable >= last
    }

    /// Begins the steps of the owner: the stream is bound everywhere. If the stream was opened
    /// before, the oracle gets the mark from which it resumes.
    pub(super) fn start_steps(&mut self, process: &mut Process<'_, '_>, core: &mut Core) {
        if self.opened_before {
            let (stream, last) = (self.id, self.start);
            probe::count_rare(Rare::Reopened);
            process.ownership_checker.on_recovered(StreamId(stream), last);
            let found = Recovered { stream, last, ..Recovered::default() };
            core.oracle.reopened((self.era, self.made_at), &found, process.drives);
        }
        match core.log_of(self.id).and_then(|nth| Committer::new(nth, self.recovered, core)) {
            Some(committer) => self.opens_log(committer, process, core),
            None => self.plan(process.end, 0, core),
        }
    }

    /// Plans the next step, if there is one.
    pub(super) fn plan(&mut self, end: ClientEnd, pause_ns: u64, core: &mut Core) {
        if self.is_reader {
            return;
        }
        let (steps, begun) = &core.steps[usize::from(self.id)];
        if *begun < steps.len() && !self.step_planned && !self.closing && !self.failed {
            self.step_planned = true;
            let think = core.rng.below(u64::from(core.scenario.client.think_ns) + 1);
            let ev = Ev::Act { client: end.client, incarnation: end.incarnation, stream: self.id };
            core.after(pause_ns + think, ev);
        }
    }

    /// Runs the next step.
    pub(super) fn act(&mut self, process: &mut Process<'_, '_>, core: &mut Core) {
        self.step_planned = false;
        if self.committer.is_some() {
            return self.act_on_log(process, core);
        }
        // A stream that this one has replaced may have planned the step. This stream cannot be used
        // before it is bound everywhere.
        if self.is_in_call() || self.closing {
            return;
        }
        let index = usize::from(self.id);
        let Some(driver) = self.driver() else { return };
        let last = driver.last();
        let (steps, begun) = &core.steps[index];
        let Some(step) = steps.get(*begun) else { return };
        let op = core.scenario.steps[*step].op.clone();
        if let Op::Pause(us) = op {
            core.steps[index].1 += 1;
            self.step_planned = true;
            let ev = Ev::Act {
                client: process.end.client,
                incarnation: process.end.incarnation,
                stream: self.id,
            };
            core.after(u64::from(us) * US, ev);
            return;
        }
        self.enter_call();
        let is_read = matches!(op, Op::Read(..) | Op::ReadApart(..));
        self.watchers.may_begin(!is_read, core.now);
        let done = match op {
            Op::Group { writes, durable } => self.group(&writes, durable, None, process, core),
            Op::Followed { writes, durable, follower } => {
                self.group(&writes, durable, Some(follower), process, core)
            }
            Op::WaitComplete => self.wait(Until::Complete(last), core),
            Op::WaitDurable => self.wait(Until::Durable(last), core),
            Op::Read(block, blocks) if core.now / US % 4 != 1 => self.read(block, blocks, core),
            Op::Read(block, blocks) | Op::ReadApart(block, blocks) => {
                self.reads_apart = Some((block, blocks));
                Done::Ended
            }
            Op::Pause(_) | Op::Append(..) | Op::Checkpoint(_) | Op::Trim(_) | Op::ReadBack => {
                Done::Ended
            }
            Op::Restart => {
                self.leave("its owner requests it", core);
                Done::Ended
            }
        };
        match done {
            Done::Ended => core.steps[index].1 += 1,
            Done::Waits(call) => {
                core.steps[index].1 += 1;
                self.call = call;
            }
            Done::Again(call) => self.call = call,
        }
        if self.is_in_call() {
            self.continue_call(process, core);
        } else {
            self.plan(process.end, 0, core);
        }
    }

    /// Continues the call that its owner is in.
    pub(super) fn continue_call(&mut self, process: &mut Process<'_, '_>, core: &mut Core) {
        while self.is_in_call() {
            let worked = self.round(core);
            if !self.check_marks(process.ownership_checker, process.drives, core) {
                return;
            }
            let served = self.call == Call::Serve && self.serve(process, core);
            if self.call != Call::Serve && self.call_returns(core) {
                let pause = if self.call_waited_for_space() { AGAIN_NS } else { 0 };
                self.call = Call::None;
                self.falls_asleep(core.now);
                if !self.closed {
                    self.plan(process.end, pause, core);
                }
                return;
            }
            let eager = self.driver().is_some_and(|driver| driver.wants_pump());
            if !worked && !eager && !served {
                self.prepare_log_sleep(core);
                return self.falls_asleep(core.now);
            }
        }
    }

    fn call_waited_for_space(&self) -> bool {
        matches!(self.call, Call::Wait { until: Until::Space, .. })
    }

    /// Whether the call that its owner is in returns, after reading the marks.
    fn call_returns(&mut self, core: &mut Core) -> bool {
        let call = self.call;
        let Some(driver) = self.driver() else { return true };
        match call {
            Call::None | Call::Serve => true,
            Call::Wait { until, deadline } => {
                let ended = driver.wait_step(until, deadline, || core.now).is_some();
                if ended {
                    driver.marks_reported();
                    driver.reclaim();
                }
                ended
            }
            Call::Read => match self.step_read(core.now) {
                None => false,
                Some(is_read) => {
                    self.reading.ended = Some(is_read);
                    if is_read {
                        core.oracle.read_ends(&self.reading.due, &self.reading.found());
                    }
                    true
                }
            },
            Call::Close => match driver.close_step() {
                Ok(None) => false,
                Ok(Some(_)) => {
                    self.closed = true;
                    if let Some(committer) = &mut self.committer {
                        committer.stream_closed(core);
                    }
                    self.drop_stream(core);
                    true
                }
                Err(refused) => {
                    let id = self.id;
                    core.trace(|| format!("stream {id}: its mark was refused: {refused:?}"));
                    self.refused = Some((refused.server, refused.status));
                    self.failed = true;
                    self.watchers.end();
                    true
                }
            },
        }
    }

    fn wait(&mut self, until: Until, core: &mut Core) -> Done {
        let has_deadline = core.rng.percent(GIVEN_UP_WAITS);
        let deadline = has_deadline.then(|| core.now + core.rng.below(2_000) * US);
        match self.driver().map(|driver| driver.begin_wait(until)) {
            Some(Ok(())) => Done::Waits(Call::Wait { until, deadline }),
            // The wait cannot begin. The step has ended: the submission before it has taken place.
            Some(Err(_)) | None => Done::Ended,
        }
    }

    fn group(
        &mut self,
        intended: &[WriteOp],
        durable: bool,
        follower: Option<u16>,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> Done {
        let id = self.id;
        let mut parts: Vec<(u32, u32, Place)> = Vec::new();
        for write in intended {
            stage(process.ownership_checker, core.map.len(), id, write, &mut parts);
        }
        if parts.is_empty() && !durable {
            return Done::Ended;
        }
        // Where a follower waits for its group, the group is durable. Engine `linux` has no other way.
        let has_commit = durable || follower.is_some();
        let mut writes = Vec::with_capacity(parts.len());
        let mut submitted = Vec::new();
        for (at, (first, blocks, place)) in parts.iter().enumerate() {
            let numbers: Vec<u64> = (0..*blocks).map(|_| core.oracle.next_number()).collect();
            let list = (*first..).zip(&numbers);
            submitted.extend(list.map(|(block, number)| Submitted {
                block,
                number: *number,
                place: *place,
                commits: has_commit && at + 1 == parts.len() && *place != Place::Discard,
            }));
            let op = match place {
                Place::Fresh => EngineOp::Write(EnginePlace::Fresh, self.payload(&numbers)),
                Place::InPlace => EngineOp::Write(EnginePlace::InPlace, self.payload(&numbers)),
                Place::Extend => EngineOp::Write(EnginePlace::Extend, self.payload(&numbers)),
                Place::Discard => EngineOp::Discard,
            };
            writes.push(Write { lba: u64::from(*first), blocks: *blocks, op });
        }
        let checked = writes.iter().map(|write| (write.lba, write.blocks, write.op.is_fresh()));
        if let Err(violation) = process.ownership_checker.check(StreamId(id), checked)
            && !probe::is_bug_planted(Plant::T15ReuseEarly)
        {
            let what = format!("a group that keeps its caller's duties is refused: {violation}");
            core.oracle.broken(Promise::P8, what);
        }
        let tag = core.tags + 1;
        let Some(driver) = self.driver() else { return Done::Ended };
        let admitted = match follower {
            None => driver.admit(&mut writes, tag, durable).map(|seq| (seq, None)),
            Some(follower) => driver
                .admit_followed(&mut writes, tag, durable, StreamId(follower))
                .map(|(seq, way)| (seq, Some((follower, way)))),
        };
        match admitted {
            Ok((seq, followed)) => {
                let full = driver.should_send();
                core.tags = tag;
                let written = parts.iter().map(|(first, blocks, _)| ((*first).into(), *blocks));
                process.ownership_checker.note(StreamId(id), written, seq);
                self.was_submitted(seq, &submitted, durable, core);
                if let Some((follower, way)) = followed {
                    core.trace(|| format!("stream {id}: stream {follower} follows it: {way:?}"));
                    core.oracle.followed((self.era, id), seq, follower, way);
                }
                if full || core.rng.percent(POLLED) {
                    self.round(core);
                    self.check_marks(process.ownership_checker, process.drives, core);
                    if let Some(driver) = self.driver() {
                        driver.reclaim();
                    }
                }
                if durable && !self.failed && self.sent < seq {
                    let what = format!("stream {id}: durable group {seq} was submitted, not sent");
                    core.oracle.broken(Promise::P8, what);
                }
                Done::Ended
            }
            Err(Refusal::Full(_)) => {
                Done::Again(Call::Wait { until: Until::Space, deadline: None })
            }
            Err(Refusal::Poisoned(failure)) => {
                self.has_failed_with(failure, core);
                Done::Again(Call::None)
            }
            Err(
                Refusal::TooLarge(_)
                | Refusal::TooManyEntries
                | Refusal::Empty
                | Refusal::NoFollower,
            ) => Done::Ended,
        }
    }

    fn was_submitted(&self, seq: Seq, submitted: &[Submitted], durable: bool, core: &mut Core) {
        let id = self.id;
        core.trace(|| {
            let blocks: Vec<String> = submitted
                .iter()
                .map(|w| format!("{}:#{} {:?}", w.block, w.number, w.place))
                .collect();
            let durable = if durable { ", durable" } else { "" };
            format!("stream {id}: group {seq} [{}]{durable}", blocks.join(", "))
        });
        let origin = (self.era, self.id, core.now);
        core.oracle.submitted(origin, seq, core.tags, submitted);
    }

    fn payload(&self, numbers: &[u64]) -> Payload {
        Payload::new(numbers, &self.held)
    }

    /// Reads the volume in a thread of the process, if no other thread does that at the moment.
    pub(super) fn read_apart(
        &mut self,
        block: u32,
        blocks: u32,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) {
        if self.is_in_call() || self.is_to_be_replaced() || self.driver().is_none() {
            return;
        }
        if let Done::Waits(call) = self.read(block, blocks, core) {
            self.call = call;
            self.continue_call(process, core);
        }
    }

    fn read(&mut self, block: u32, blocks: u32, core: &mut Core) -> Done {
        let blocks = blocks.min((core.map.len() as u32).saturating_sub(block));
        if blocks == 0 {
            return Done::Ended;
        }
        let due = core.oracle.read_begins(self.era, self.id, block, blocks);
        // One call reads several extents, and not in the order of the blocks.
        let first = blocks / 2;
        let split = block + (blocks - first);
        let extents = [
            ReadExtent { lba: u64::from(split), blocks: first },
            ReadExtent { lba: u64::from(block), blocks: blocks - first },
        ];
        let bytes = vec![0; blocks as usize * BLOCK];
        self.abandon_read();
        self.reading = Reading { due, first: first as usize, bytes, ..Reading::default() };
        let now = core.now;
        // Some calls have a deadline that may pass before a target answers.
        let deadline = matches!(now / US % 8, 0 | 5).then(|| now + now / US % 512 * US);
        // Some have two reads in flight.
        let reads_apart = first > 0 && matches!(now / US % 8, 2 | 5 | 7);
        let Some(driver) = self.driver() else { return Done::Ended };
        let extents = &extents[usize::from(first == 0)..];
        let mut slots = Vec::new();
        if reads_apart {
            let second = first as usize * BLOCK;
            slots.push((driver.begin_read(&extents[..1], deadline, now), 0));
            slots.push((driver.begin_read(&extents[1..], deadline, now), second));
        } else {
            slots.push((driver.begin_read(extents, deadline, now), 0));
        }
        self.reading.slots = slots;
        // If its own writes are all complete, the read starts at once.
        match self.step_read(now) {
            Some(_) => Done::Ended,
            None => Done::Waits(Call::Read),
        }
    }

    /// Continues the read of a call. Returns whether it has succeeded, once it has ended.
    pub(super) fn step_read(&mut self, now: u64) -> Option<bool> {
        let mut reading = core::mem::take(&mut self.reading);
        let stepped = self.driver().map(|driver| reading.step(driver, now));
        self.reading = reading;
        stepped.unwrap_or(Some(false))
    }

    /// Gives up the read of an earlier call that has not ended, if there is one.
    pub(super) fn abandon_read(&mut self) {
        let slots = core::mem::take(&mut self.reading.slots);
        if let Some(driver) = self.driver() {
            slots.into_iter().for_each(|(slot, _)| driver.give_up_read(slot));
        }
    }

    /// Closes the stream: everything becomes durable, and the logs record that.
    pub(super) fn close(&mut self, process: &mut Process<'_, '_>, core: &mut Core) {
        self.closing = true;
        let packed = self.committer.as_ref().is_some_and(|committer| committer.is_packed());
        if self.call == Call::Serve && packed {
            self.call = Call::None;
        }
        if self.is_in_call() {
            return;
        }
        self.enter_call();
        let Some(driver) = self.driver() else { return };
        driver.begin_close();
        self.call = Call::Close;
        self.continue_call(process, core);
    }

    /// Runs the background driver's part. Returns the time of the next part if no event comes
    /// before.
    pub(super) fn run_background(
        &mut self,
        flush_ns: u64,
        ownership_checker: &mut BlockOwnershipChecker,
        drives: &Drives<'_>,
        core: &mut Core,
    ) -> Option<u64> {
        let mut worked = true;
        for _ in 0..riopipe_session::initiator::stream_driver::ROUNDS_MAX {
            worked = worked && self.round(core);
        }
        if !self.check_marks(ownership_checker, drives, core) {
            return None;
        }
        let now = core.now;
        self.driver().and_then(|driver: &mut StreamDriver<Payload>| {
            driver.finish_background_rounds(worked, flush_ns, now)
        })
    }
}
