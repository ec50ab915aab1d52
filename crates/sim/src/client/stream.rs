//! A stream of an initiator: its session, its connections, and what it does next.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{
    self, Cause, Failure, Limits, Op as EngineOp, Place as EnginePlace, Refusal, Write,
};
use riopipe_order::probe::{self, Plant};
use riopipe_order::topology::Topology;
use riopipe_session::initiator::queue_pair::QueuePair;
use riopipe_session::initiator::stream::{
    FlushFailures, LinkState, ReplayBoard, StreamConfig, StreamSession,
};
use riopipe_session::initiator::volume::handover::HandoverLedger;
use riopipe_session::wire::status;

use super::ledger::stage;
use super::lines::Line;
use crate::block::{self, BLOCK};
use crate::core::{Core, Ev, MS, US};
use crate::network::ClientEnd;
use crate::oracle::{Drives, Era, Poison, Poisoned, Promise, Read, Submitted};
use crate::payload::Payload;
use crate::scenario::{Op, Place};

/// A target that makes no progress for so long is given up, ns.
const STALL_NS: u64 = 80 * MS;

/// What a stream waits for before it does its next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    No,
    Complete(Seq),
    Durable(Seq),
    /// There may be room, or the blocks may be free, when something has moved.
    Progress,
    Read,
    Pause,
}

#[derive(Debug, Default)]
pub(super) struct Reading {
    due: Read,
    pub(super) bytes: Vec<u8>,
}

/// What a stream is made of.
pub(super) struct Setup<'a> {
    /// Which.
    pub(super) id: u16,
    /// The owner's generation.
    pub(super) generation: u32,
    /// The mark from which it goes on.
    pub(super) start: Seq,
    /// The owner's era.
    pub(super) era: Era,
    /// The volume's drives.
    pub(super) topology: &'a Topology,
    /// Their namespaces.
    pub(super) nsids: &'a [u32],
    /// What the volume's streams tell one another of failed FLUSHes.
    pub(super) shared: &'a Arc<FlushFailures>,
    /// What they tell one another of replays.
    pub(super) board: &'a Arc<ReplayBoard>,
}

/// A stream.
pub(super) struct Stream {
    pub(super) id: u16,
    pub(super) era: Era,
    pub(super) session: StreamSession<Payload>,
    pub(super) lines: Vec<Line>,
    pub(super) held: Arc<AtomicU64>,
    pub(super) kept_max: u64,
    pub(super) wait: Wait,
    /// The marks when the next step could not be done, and when that was.
    stuck: (Seq, Seq),
    tried: u64,
    pub(super) reading: Reading,
    pub(super) started: bool,
    /// It had a life before that no recovery has ended.
    pub(super) anew: bool,
    /// When it was made, ns.
    pub(super) made_at: u64,
    /// It failed because plain writes are refused to it.
    pub(super) guarded: bool,
    pub(super) acting: bool,
    pub(super) failed: bool,
    /// It failed because another owner has the volume.
    pub(super) fenced: bool,
    /// A target does not bind it.
    pub(super) refused: Option<(u16, riopipe_nvme::command::Status)>,
    pub(super) closing: bool,
    pub(super) closed: bool,
}

impl Stream {
    /// A stream over `queues`, one for each server, none of them connected.
    #[must_use]
    pub(super) fn new(setup: &Setup<'_>, queues: Vec<QueuePair<Payload>>, core: &Core) -> Self {
        let spec = &core.scenario.client;
        let kept_max = u64::from(spec.kept_blocks) * BLOCK as u64;
        let (merge, start) = (spec.merge, setup.start);
        let limits = Limits { kept_bytes_max: kept_max, merge, start, ..Limits::default() };
        let engine = engine::engine(core.engine(), setup.topology.clone(), limits);
        let config = StreamConfig {
            volume: core.id,
            stream: StreamId(setup.id),
            generation: setup.generation,
            engine: core.engine(),
            start: setup.start,
            nsids: setup.nsids.to_vec(),
            queue_depth: spec.depth,
            timeout_ns: STALL_NS,
            loss_ns: u64::from(spec.loss_ms) * MS,
        };
        let wires = queues.iter().map(|_| Line::default()).collect();
        let shared = Arc::clone(setup.shared);
        let topology = setup.topology.clone();
        Self {
            id: setup.id,
            era: setup.era,
            session: StreamSession::new(config, engine, topology, queues, shared, setup.board),
            lines: wires,
            held: Arc::default(),
            kept_max,
            wait: Wait::No,
            stuck: (Seq::ZERO, Seq::ZERO),
            tried: 0,
            reading: Reading::default(),
            started: false,
            anew: false,
            made_at: core.now,
            guarded: false,
            acting: false,
            failed: false,
            fenced: false,
            refused: None,
            closing: false,
            closed: false,
        }
    }

    /// Which target would not bind it, and why.
    pub(super) fn take_refused(&mut self) -> Option<(u16, riopipe_nvme::command::Status)> {
        self.refused.take()
    }

    /// Whether it has failed, and nobody has reopened it.
    #[must_use]
    pub(super) const fn has_failed(&self) -> bool {
        self.failed
    }

    /// How far it is, for people.
    #[must_use]
    pub(super) fn describe(&self, core: &Core) -> String {
        let (complete, durable, last) = core.oracle.progress(self.era, self.id);
        let (steps, begun) = &core.steps[usize::from(self.id)];
        let links: Vec<LinkState> =
            (0..self.lines.len()).map(|server| self.session.link(server as u16)).collect();
        format!(
            "{}: {complete}/{durable}/{last} step {begun} of {} {:?} {links:?}{}",
            self.id,
            steps.len(),
            self.wait,
            if self.failed { " failed" } else { "" }
        )
    }

    /// Whether everything submitted is durable and its logs know that.
    #[must_use]
    pub(super) const fn is_closed(&self) -> bool {
        self.closed
    }

    /// The mark up to which it is released.
    #[must_use]
    pub(super) fn released(&self) -> Seq {
        self.session.engine().released()
    }

    /// Whether it has steps left, or waits for something that it has begun.
    #[must_use]
    pub(super) fn has_work(&self, core: &Core) -> bool {
        let (steps, begun) = &core.steps[usize::from(self.id)];
        *begun < steps.len() || !matches!(self.wait, Wait::No | Wait::Progress)
    }

    /// Sends what is to be sent, looks at the marks, and does what they allow.
    pub(super) fn work(
        &mut self,
        life: ClientEnd,
        ledger: &mut HandoverLedger,
        drives: &Drives<'_>,
        core: &mut Core,
    ) {
        if self.failed || self.closed {
            return;
        }
        if !self.started {
            match self.session.is_ready() {
                Ok(true) => {
                    self.started = true;
                    self.has_begun(ledger, drives, core);
                }
                Ok(false) => {}
                Err(refused) => {
                    let id = self.id;
                    core.trace(|| format!("stream {id}: not bound: {refused:?}"));
                    self.refused = Some((refused.server, refused.status));
                    self.failed = true;
                }
            }
        }
        self.session.pump(core.now);
        self.send(core);
        self.look_at_links(core);
        let polled = self.session.poll();
        let marks = self.session.marks();
        if self.started || !self.anew {
            core.oracle.marks(self.era, self.id, marks.complete, marks.durable, drives);
            ledger.released(StreamId(self.id), self.released());
        }
        self.check_memory(core);
        if let Err(failure) = polled {
            if !core.is_logged() && !self.started {
                return self.could_not_begin(&failure, core);
            }
            self.failed = true;
            return self.has_poison(failure, core);
        }
        self.finish_read(core);
        let go = match self.wait {
            Wait::Complete(seq) => marks.complete >= seq,
            Wait::Durable(seq) => marks.durable >= seq,
            Wait::No => true,
            // Tried again when something has moved, and else now and then.
            Wait::Progress => {
                self.stuck != (self.released(), marks.complete) || core.now > self.tried + MS
            }
            Wait::Read | Wait::Pause => false,
        };
        let (steps, begun) = &core.steps[usize::from(self.id)];
        let work = *begun < steps.len();
        if go && !work {
            self.wait = Wait::No;
        }
        if go && work && self.started && !self.acting && !self.closing {
            self.acting = true;
            let think = core.rng.below(u64::from(core.scenario.client.think_ns) + 1);
            let ev = Ev::Act { client: life.client, life: life.life, stream: self.id };
            core.after(think, ev);
        }
    }

    fn has_poison(&mut self, failure: Failure, core: &mut Core) {
        let machine = usize::from(self.session.topology().member(failure.member).server);
        let (id, why) = (self.id, format!("{failure:?}"));
        core.trace(|| format!("stream {id}: failed: {why}"));
        let is = |code: u16, of: riopipe_nvme::command::Status| code == of.code();
        let cause = match failure.cause {
            Cause::Disconnected | Cause::TimedOut => Poison::Lost,
            Cause::Status(code)
                if is(code, status::STREAM_BUSY)
                    || is(code, status::NOT_OWNER)
                    || is(code, status::NOT_BOUND) =>
            {
                Poison::Lost
            }
            Cause::Status(code)
                if is(code, status::STALE_GENERATION) || is(code, status::LEASE_OVER) =>
            {
                Poison::Fenced
            }
            // Plain writes are for the owner alone (T21).
            Cause::Status(code) if is(code, status::GUARDED) && !core.is_logged() => Poison::Fenced,
            _ => Poison::Failed,
        };
        self.guarded = failure.cause == Cause::Status(status::GUARDED.code());
        self.fenced = cause == Poison::Fenced && !self.guarded;
        core.oracle.poisoned(self.era, id, &Poisoned { machine, cause, why }, core.now);
    }

    /// T14: what is held for replay is bounded.
    fn check_memory(&self, core: &mut Core) {
        let held = self.held.load(Ordering::Relaxed);
        if held > self.kept_max {
            let (id, max) = (self.id, self.kept_max);
            let what = format!("stream {id} holds {held} bytes for replay; its bound is {max}");
            core.oracle.broken(Promise::P8, what);
        }
    }

    /// Does the next step.
    pub(super) fn act(
        &mut self,
        life: ClientEnd,
        ledger: &mut HandoverLedger,
        drives: &Drives<'_>,
        core: &mut Core,
    ) {
        self.acting = false;
        // It may be the turn of the stream that this one has come after; nobody has this one before
        // it is bound everywhere.
        if !self.started || self.failed || self.closing {
            return;
        }
        let index = usize::from(self.id);
        let (steps, begun) = &core.steps[index];
        let Some(step) = steps.get(*begun) else {
            self.wait = Wait::No;
            return;
        };
        let op = core.scenario.steps[*step].op.clone();
        let last = self.session.engine().last();
        self.wait = match op {
            Op::Group { writes, durable } => self.group(&writes, durable, ledger, core),
            Op::WaitComplete => Wait::Complete(last),
            Op::WaitDurable => {
                self.session.ask_durable(last);
                Wait::Durable(last)
            }
            Op::Read(block, blocks) => self.read(block, blocks, core),
            Op::Pause(us) => {
                self.acting = true;
                let ev = Ev::Act { client: life.client, life: life.life, stream: self.id };
                core.after(u64::from(us) * US, ev);
                Wait::Pause
            }
            Op::Restart => {
                let id = self.id;
                core.trace(|| format!("stream {id}: left, to be opened anew"));
                core.oracle.left(self.era, id);
                self.failed = true;
                Wait::No
            }
        };
        self.stuck = (self.released(), self.session.marks().complete);
        self.tried = core.now;
        if self.wait != Wait::Progress {
            core.steps[index].1 += 1;
            self.work(life, ledger, drives, core);
        } else {
            self.session.pump(core.now);
            self.send(core);
        }
    }

    fn group(
        &mut self,
        wishes: &[crate::scenario::WriteOp],
        durable: bool,
        ledger: &mut HandoverLedger,
        core: &mut Core,
    ) -> Wait {
        let mut parts: Vec<(u32, u32, Place)> = Vec::new();
        for wish in wishes {
            stage(ledger, core.map.len(), self.id, wish, &mut parts);
        }
        if parts.is_empty() && !durable {
            return Wait::No;
        }
        let mut writes = Vec::with_capacity(parts.len());
        let mut submitted = Vec::new();
        for (first, blocks, place) in &parts {
            let numbers: Vec<u64> = (0..*blocks).map(|_| core.oracle.next_number()).collect();
            let list = (*first..).zip(&numbers);
            submitted.extend(list.map(|(block, number)| Submitted {
                block,
                number: *number,
                place: *place,
            }));
            let op = match place {
                Place::Fresh => EngineOp::Write(EnginePlace::Fresh, self.payload(&numbers)),
                Place::InPlace => EngineOp::Write(EnginePlace::InPlace, self.payload(&numbers)),
                Place::Discard => EngineOp::Discard,
            };
            writes.push(Write { lba: u64::from(*first), blocks: *blocks, op });
        }
        let checked = parts
            .iter()
            .map(|(first, blocks, place)| ((*first).into(), *blocks, *place != Place::InPlace));
        if let Err(breach) = ledger.check(StreamId(self.id), checked)
            && !probe::planted(Plant::T15HandOverEarly)
        {
            let what = format!("a group that keeps its caller's duties is refused: {breach}");
            core.oracle.broken(Promise::P8, what);
        }
        let tag = core.tags + 1;
        match self.session.admit(&mut writes, tag, durable) {
            Ok(seq) => {
                core.tags = tag;
                let written = parts.iter().map(|(first, blocks, _)| ((*first).into(), *blocks));
                ledger.note(StreamId(self.id), written, seq);
                let id = self.id;
                core.trace(|| {
                    let blocks: Vec<String> = submitted
                        .iter()
                        .map(|w| format!("{}:#{} {:?}", w.block, w.number, w.place))
                        .collect();
                    let durable = if durable { ", durable" } else { "" };
                    format!("stream {id}: group {seq} [{}]{durable}", blocks.join(", "))
                });
                let of = (self.era, self.id, core.now);
                core.oracle.submitted(of, seq, tag, &submitted);
                Wait::No
            }
            Err(Refusal::Full(_) | Refusal::Poisoned(_)) => Wait::Progress,
            Err(Refusal::TooLarge(_) | Refusal::TooManyEntries | Refusal::Empty) => Wait::No,
        }
    }

    fn payload(&self, numbers: &[u64]) -> Payload {
        Payload::new(numbers, &self.held)
    }

    fn read(&mut self, block: u32, blocks: u32, core: &mut Core) -> Wait {
        let blocks = blocks.min((core.map.len() as u32).saturating_sub(block));
        if blocks == 0 {
            return Wait::No;
        }
        if self.session.read_must_wait(u64::from(block), blocks) {
            return Wait::Progress;
        }
        let due = core.oracle.read_begins(self.era, self.id, block, blocks);
        self.reading = Reading { due, bytes: vec![0; blocks as usize * BLOCK] };
        self.session.start_read(u64::from(block), blocks);
        Wait::Read
    }

    fn finish_read(&mut self, core: &mut Core) {
        if self.wait != Wait::Read || self.session.is_reading() {
            return;
        }
        self.wait = Wait::No;
        if self.session.read_result().is_ok() {
            let found = block::names(&self.reading.bytes);
            core.oracle.read_ends(&self.reading.due, &found);
        }
    }

    /// Ends in good order: everything becomes durable, and the logs learn that.
    pub(super) fn close(&mut self, core: &mut Core) {
        if self.failed || self.closed || !self.started {
            return;
        }
        let engine = self.session.engine();
        let (last, released, idle) = (engine.last(), engine.released(), engine.is_idle());
        if !self.closing {
            self.closing = true;
            self.session.ask_durable(last);
        }
        if released < last {
            // A flush that the engine put in itself counts, too.
            self.session.ask_durable(last);
        } else if idle {
            self.session.send_marks();
            match self.session.marks_confirmed() {
                Ok(confirmed) => self.closed = confirmed,
                Err(refused) => {
                    let id = self.id;
                    core.trace(|| format!("stream {id}: its mark was refused: {refused:?}"));
                    self.refused = Some((refused.server, refused.status));
                    self.failed = true;
                }
            }
        }
        self.session.pump(core.now);
        self.send(core);
    }
}
