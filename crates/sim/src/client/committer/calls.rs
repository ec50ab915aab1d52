//! The calls of a log's thread to its stream.

use riopipe_fs_core::probe::{Plant, is_bug_planted};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Op as EngineOp, Place as EnginePlace, Refusal, Write};
use riopipe_session::initiator::stream::ReadExtent;

use super::Committer;
use crate::block::BLOCK;
use crate::client::application::{Call, Process, Reading};
use crate::client::stream::Stream;
use crate::core::{Core, US};
use crate::oracle::{Promise, Submitted};
use crate::payload::Payload;
use crate::scenario::{Op, Place};

impl Stream {
    /// Begins the work of a log's thread.
    pub(in crate::client) fn opens_log(
        &mut self,
        committer: Box<Committer>,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) {
        self.committer = Some(committer);
        self.call = Call::Serve;
        self.enter_call();
        self.continue_call(process, core);
    }

    /// Runs the next step of a log's owner.
    pub(in crate::client) fn act_on_log(&mut self, process: &mut Process<'_, '_>, core: &mut Core) {
        let index = usize::from(self.id);
        let is_ready = self.committer.as_ref().is_some_and(|committer| committer.is_ready());
        if self.driver().is_none() {
            return;
        }
        self.enter_call();
        let (steps, begun) = &core.steps[index];
        let step = steps.get(*begun).filter(|_| is_ready && !self.closing);
        let Some(op) = step.map(|step| core.scenario.steps[*step].op.clone()) else { return };
        core.steps[index].1 += 1;
        match op {
            Op::Pause(us) => {
                self.plan(process.end, u64::from(us) * US, core);
                return;
            }
            Op::Restart => {
                self.call = Call::None;
                self.leave("its log is dropped", core);
                return;
            }
            Op::ReadApart(block, blocks) => self.reads_apart = Some((block, blocks)),
            _ => {}
        }
        if let Some(committer) = &mut self.committer {
            committer.call(&op, core);
        }
        self.continue_call(process, core);
    }

    /// Drops the stream as it is. It will be opened again.
    pub(in crate::client) fn leave(&mut self, why: &str, core: &mut Core) {
        let id = self.id;
        core.trace(|| format!("stream {id}: left, to be opened anew: {why}"));
        core.oracle.left(self.era, id);
        self.call = Call::None;
        self.failed = true;
        self.drop_stream(core);
    }

    /// Whether the targets keep a log of the stream. Returns `None` if the stream has failed.
    pub(in crate::client) fn keeps_log(&mut self) -> Option<bool> {
        Some(self.driver()?.config().engine.capabilities().keeps_log)
    }

    /// Continues the work of the log's thread. Returns whether anything was done.
    pub(in crate::client) fn serve(
        &mut self,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> bool {
        let Some(mut committer) = self.committer.take() else { return false };
        let moved = committer.advance(self, process, core);
        self.committer = Some(committer);
        moved && !self.failed
    }

    /// Prepares a sleep of the log's thread, perhaps without end: the wait does the work that the
    /// background driver does elsewhere (trap T1).
    pub(in crate::client) fn prepare_log_sleep(&mut self, core: &Core) {
        let flush_ns = u64::from(core.scenario.client.flush_us) * US;
        if self.committer.as_ref().is_some_and(|committer| committer.waits_for_marks())
            && let Some(driver) = self.driver()
        {
            driver.finish_background_rounds(false, flush_ns, core.now);
        }
    }

    /// Begins to read blocks of its log.
    pub(in crate::client) fn begin_read_of_log(
        &mut self,
        block: u32,
        blocks: u32,
        core: &mut Core,
    ) {
        let due = core.oracle.read_begins(self.era, self.id, block, blocks);
        let bytes = vec![0; blocks as usize * BLOCK];
        self.abandon_read();
        self.reading = Reading { due, bytes, ..Reading::default() };
        if let Some(driver) = self.driver() {
            let extent = ReadExtent { lba: block.into(), blocks };
            let slot = driver.begin_read(&[extent], None, core.now);
            self.reading.slots.push((slot, 0));
        }
    }

    /// The blocks that were read of the log, once they have come. Returns `Some(None)` if they
    /// cannot be read.
    pub(in crate::client) fn read_of_log(&mut self, core: &mut Core) -> Option<Option<Vec<u8>>> {
        self.driver()?;
        if !self.step_read(core.now)? {
            return Some(None);
        }
        core.oracle.read_ends(&self.reading.due, &self.reading.found());
        let mut bytes = core::mem::take(&mut self.reading.bytes);
        core.block_bytes.fill_in(&mut bytes);
        Some(Some(bytes))
    }

    /// Submits a group of a log. Returns `None` if there is no space, or if the stream has failed.
    pub(super) fn submit_log(
        &mut self,
        parts: &[(u64, Vec<u64>)],
        place: Place,
        tag: u64,
        durable: bool,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> Option<Seq> {
        let parts: Vec<_> =
            parts.iter().map(|(first, names)| (*first, place, names.clone())).collect();
        let admitted = self.submit_named(&parts, tag, (durable, None), process, core);
        if let Err(Refusal::Poisoned(failure)) = admitted {
            self.has_failed_with(failure, core);
            return None;
        }
        admitted.ok()
    }

    /// Submits a group of blocks that have bytes of their own, given the first block, the place and
    /// the names of each write. The caller has duties (T11, T15), and they are checked.
    pub(in crate::client) fn submit_named(
        &mut self,
        parts: &[(u64, Place, Vec<u64>)],
        tag: u64,
        (durable, follower): (bool, Option<u16>),
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> Result<Seq, Refusal> {
        let mut submitted = Vec::new();
        let mut writes = Vec::new();
        for (at, (first, place, names)) in parts.iter().enumerate() {
            let list = (*first as u32..).zip(names);
            submitted.extend(list.map(|(block, number)| Submitted {
                block,
                number: *number,
                place: *place,
                commits: durable && at + 1 == parts.len() && *place != Place::Discard,
            }));
            let payload = Payload::new(names, &self.held);
            let op = match place {
                Place::Fresh => EngineOp::Write(EnginePlace::Fresh, payload),
                Place::Discard => EngineOp::Discard,
                _ => EngineOp::Write(EnginePlace::InPlace, payload),
            };
            writes.push(Write { lba: *first, blocks: names.len() as u32, op });
        }
        let (id, era) = (StreamId(self.id), self.era);
        let checked: Vec<_> =
            writes.iter().map(|write| (write.lba, write.blocks, write.op.is_fresh())).collect();
        let Some(driver) = self.driver() else { return Err(Refusal::Empty) };
        let (seq, followed) = match follower {
            None => (driver.admit(&mut writes, tag, durable)?, None),
            Some(follower) => {
                let follower_id = StreamId(follower);
                let (seq, way) = driver.admit_followed(&mut writes, tag, durable, follower_id)?;
                (seq, Some((follower, way)))
            }
        };
        // With a planted bug of RioFS or of the plain device its consequences must be seen.
        if let Err(violation) = process.ownership_checker.check(id, checked.iter().copied())
            && !Plant::ALL.iter().any(|plant| is_bug_planted(*plant))
            && !riopipe_order::probe::is_any_device_bug_planted()
        {
            let what = format!("a caller of the volume breaks its duties: {violation}");
            core.oracle.broken(Promise::P1, what);
        }
        let written = checked.into_iter().map(|(lba, blocks, _)| (lba, blocks));
        process.ownership_checker.note(id, written, seq);
        core.trace(|| {
            let parts: Vec<String> =
                parts.iter().map(|it| format!("{}:{:?} {:?}", it.0, it.2, it.1)).collect();
            format!("stream {}: group {seq}, tag {tag}, {parts:?}, {durable}", id.0)
        });
        core.oracle.submitted((era, id.0, core.now), seq, tag, &submitted);
        if let Some((follower, way)) = followed {
            core.trace(|| format!("stream {}: stream {follower} follows it: {way:?}", id.0));
            core.oracle.followed((era, id.0), seq, follower, way);
        }
        Ok(seq)
    }
}
