//! What engines without an ordering log promise: less than `rio`, and that to the letter.
//!
//! - `sync`: a group is sent once the one before it is durable, so that a crash leaves a prefix,
//!   and perhaps some of the one group after it.
//! - `none`: nothing of order. What was confirmed durable is there, and every block holds what some
//!   write of it put there that none confirmed since has overwritten.
//!
//! With neither is anything undone or sent again: a lost connection fails the stream (P6), and it
//! begins anew behind what is durable. An owner has its volume on a target as long as its association
//! is there.

use riopipe_order::attribute::Seq;
use riopipe_order::engine::EngineKind;

use super::blocks::{Block, Wr, is_of};
use super::{
    Drives, Era, Named, Opened, Oracle, Poison, Promise, Recovered, StreamHistory, Submitted,
};
use crate::block::{self, Content};
use crate::scenario::Scenario;

/// What the volume's engine promises, and what is to be known for that.
#[derive(Debug)]
pub(super) struct Promised {
    engine: EngineKind,
    /// On which machines the owner is there.
    held: Vec<bool>,
    /// Some target had nobody to keep a plain writer from, at some time.
    freed: bool,
    /// Which group each write is of, by number.
    groups: Vec<Option<(Era, u16, Seq)>>,
    /// Of each machine, the number of the first write that was submitted after it lost its power.
    cuts: Vec<u64>,
}

impl Promised {
    pub(super) fn new(scenario: &Scenario) -> Self {
        Self {
            engine: scenario.volume.engine.kind(),
            held: vec![false; scenario.machines.len()],
            freed: false,
            groups: Vec::new(),
            cuts: vec![0; scenario.machines.len()],
        }
    }

    /// Whether it is an engine with an ordering log.
    pub(super) fn is_logged(&self) -> bool {
        self.engine == EngineKind::Rio
    }

    /// Whether the owner is there, on a machine that has no log to remember it by.
    pub(super) fn is_held(&self, machine: usize) -> bool {
        self.held[machine]
    }

    /// A target has nobody to keep a plain writer from.
    pub(super) fn frees(&mut self) {
        self.freed = true;
    }
}

impl Oracle {
    /// Whether the owner is there on a machine that has no log to remember it by.
    pub fn holds(&mut self, machine: usize, there: bool) {
        self.promised.held[machine] = there;
    }

    /// Up to which group of its stream all writes to a block are surely older than one that is
    /// submitted now.
    pub(super) fn orders_behind(&self, era: Era, stream: u16, seq: Seq) -> Seq {
        match self.promised.engine {
            EngineKind::Rio => Seq(u64::MAX),
            // One group's writes go side by side.
            EngineKind::Sync => Seq(seq.0 - 1),
            EngineKind::None => self.eras[era][usize::from(stream)].complete,
        }
    }

    pub(super) fn note_seqs(&mut self, era: Era, stream: u16, seq: Seq, writes: &[Submitted]) {
        let groups = &mut self.promised.groups;
        if self.promised.engine == EngineKind::Sync {
            groups.resize(self.completed.len(), None);
            for write in writes {
                groups[write.number as usize] = Some((era, stream, seq));
            }
        }
    }

    /// P1 of `sync`: no write is done before its owner knew the group before it to be durable.
    pub(super) fn check_turn(&mut self, contents: &[Content]) {
        let group = |content: &Content| *self.promised.groups.get(*content as usize)?;
        let early = contents.iter().filter_map(group).find(|(era, stream, seq)| {
            let history = &self.eras[*era][usize::from(*stream)];
            *seq > history.durable.next()
        });
        if let Some((era, stream, seq)) = early {
            let durable = self.eras[era][usize::from(stream)].durable;
            let what = format!(
                "stream {stream}: a write of group {seq} was sent while only groups up to \
                 {durable} were durable"
            );
            self.broken(Promise::P1, what);
        }
    }

    /// Whether a stream without a log may fail so: it can't do without a connection, and it is kept
    /// out once its association has ended, another owner has come, or a plain writer has at a moment
    /// when nobody was there.
    pub(super) fn may_fail(&self, machine: usize, cause: Poison, now: u64) -> bool {
        let Promised { held, freed, .. } = &self.promised;
        !self.promised.is_logged()
            && match cause {
                Poison::Lost => true,
                Poison::Fenced => *freed || !held[machine] || self.ownership.is_challenged(now),
                Poison::Failed => false,
            }
    }

    /// Up to which group a stream's writes are there for others to read. A stream without a log
    /// that has failed may have lost what was not durable.
    fn delivered(&self, history: &StreamHistory) -> Seq {
        if self.promised.is_logged() || !history.failed {
            history.complete
        } else {
            history.durable
        }
    }

    /// A machine loses its power. Without a log, what was complete there and not durable may be
    /// gone, and nobody sends it again: readers miss it from now on, though its stream may hear of
    /// the loss later (P9).
    pub fn loses_power(&mut self, machine: usize) {
        if !self.promised.is_logged() {
            self.promised.cuts[machine] = self.completed.len() as u64;
        }
    }

    /// See [`loses_power`](Self::loses_power): of the machine with a block.
    pub(super) fn cut(&self, block: &Block) -> u64 {
        self.promised.cuts[block.at.machine]
    }

    /// Whether a write of a block is there for other streams to read.
    pub(super) fn is_delivered(&self, wr: &Wr, block: &Block) -> bool {
        let history = &self.eras[wr.era][usize::from(wr.stream)];
        wr.seq <= self.delivered(history)
            && (wr.seq <= history.durable || wr.number >= self.cut(block))
    }

    /// The volume has been taken by a new owner. Nothing was recovered: its streams count anew.
    pub(super) fn taken(
        &mut self,
        of: Opened,
        generation: u32,
        found: &[Recovered],
        drives: &Drives<'_>,
    ) -> Era {
        let Opened { client, took, began, now, .. } = of;
        let current = self.current;
        let harmed = self.failures.since(began);
        let durable: Vec<Seq> = self.eras[current].iter().map(|history| history.durable).collect();
        let next = (0..durable.len()).map(|stream| {
            let of = found.iter().find(|r| usize::from(r.stream) == stream);
            let start = of.map_or(Seq::ZERO, |r| r.last);
            let harmed = harmed.clone();
            let (complete, durable) = (start, start);
            StreamHistory { start, complete, durable, harmed, ..StreamHistory::default() }
        });
        let mut next: Vec<StreamHistory> = next.collect();
        let settle = |history: &mut StreamHistory| history.settled = Some(Seq(u64::MAX));
        if generation <= self.ownership.generation() {
            // Overtaken before it was through.
            next.iter_mut().for_each(settle);
            self.eras.push(next);
            return self.eras.len() - 1;
        }
        if !took && self.ownership.is_owned() && self.promised.held.contains(&true) {
            let what =
                "the volume was taken from an owner that is there, and nobody said take-over";
            self.broken(Promise::P7, what);
        }
        self.ownership.has_it(client, generation, now);
        self.check_kept(&durable, drives);
        // What an owner that was overtaken is told later in good faith was so.
        self.eras[current].iter_mut().for_each(settle);
        for block in &mut self.blocks {
            block.adopt(drives);
        }
        self.promised.held.fill(false);
        self.eras.push(next);
        self.current = self.eras.len() - 1;
        self.current
    }

    /// A stream begins anew behind what it knows to be durable.
    pub(super) fn begun_anew(
        &mut self,
        (era, began): (Era, u64),
        stream: usize,
        last: Seq,
        drives: &Drives<'_>,
    ) {
        let history = &self.eras[era][stream];
        let begun = StreamHistory {
            start: last,
            complete: last,
            durable: last,
            settled: history.settled,
            harmed: self.failures.since(began),
            ..StreamHistory::default()
        };
        if self.is_stale(era) {
            self.eras[era][stream] = begun;
            return;
        }
        let told = history.durable;
        if last < told {
            let what = format!(
                "stream {stream} begins anew behind group {last}, and was told that groups up to \
                 {told} are durable"
            );
            return self.broken(Promise::P2, what);
        }
        // What came in just before it failed, its owner hears of now.
        self.check_complete(era, stream as u16, told, last);
        self.check_durable(era, stream as u16, told, last, drives);
        self.eras[era][stream].durable = last;
        let durable: Vec<Seq> = self.eras[era].iter().map(|history| history.durable).collect();
        self.check_kept(&durable, drives);
        for block in self.blocks.iter_mut().filter(|b| b.has_beyond(stream as u16, last)) {
            block.adopt(drives);
            block.reopened = self.recoveries;
        }
        self.eras[era][stream] = begun;
    }

    /// P1, P2, P5: every block holds what it may, also after a power cut, streams being durable up
    /// to these groups.
    pub(super) fn check_kept(&mut self, durable: &[Seq], drives: &Drives<'_>) {
        let one_more = self.promised.engine == EngineKind::Sync;
        let wrong = self.blocks.iter().enumerate().find_map(|(number, block)| {
            let (promise, why) = block.check_kept(durable, one_more, drives).err()?;
            Some((promise, format!("block {number} on {}: {why}", block.at)))
        });
        if let Some((promise, what)) = wrong {
            self.broken(promise, what);
        }
    }
}

impl Block {
    /// What the block may hold, streams being durable up to these groups; with `one_more`, only the
    /// next group of each was sent.
    fn check_kept(
        &self,
        durable: &[Seq],
        one_more: bool,
        drives: &Drives<'_>,
    ) -> Result<(), (Promise, String)> {
        let drive = drives.of(self.at);
        let mark = |stream: u16| durable[usize::from(stream)];
        let is_durable =
            |number: &usize| self.writes[*number].seq <= mark(self.writes[*number].stream);
        let kept: Vec<usize> = (0..self.writes.len()).filter(is_durable).collect();
        for content in drive.possible(self.at.lba).chain([drive.block(self.at.lba)]) {
            // A block of a log of records may be torn, as long as it is not durable.
            let torn = block::torn_from(content).map(|(_, newer, _)| newer);
            let may_be = |wr: &Wr| match torn {
                Some(newer) => wr.is(newer) && wr.seq > mark(wr.stream),
                None => wr.is(content),
            };
            let from = self.writes.iter().filter(|wr| may_be(wr));
            let (mut sent, mut newest) = (false, false);
            for wr in from {
                let turn = !one_more || wr.seq.0 <= mark(wr.stream).0.saturating_add(1);
                sent |= turn;
                newest |= turn && !kept.iter().any(|at| wr.precedes(&self.writes[*at]));
            }
            let base = is_of(&self.base, content);
            if newest || base && kept.is_empty() || self.alien.contains(&content) {
                continue;
            }
            let (promise, why) = if sent || base {
                (Promise::P2, "older than what was confirmed as durable")
            } else if self.writes.iter().any(|wr| wr.is(content)) {
                (Promise::P1, "of a group that was not to be sent yet")
            } else {
                (Promise::P5, "never written there, or fenced off")
            };
            let (named, text) = (Named(content), self.describe_with(durable));
            return Err((
                promise,
                format!("it holds, or may hold after a power cut, {named}: {why} ({text})"),
            ));
        }
        Ok(())
    }
}
