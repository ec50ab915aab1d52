//! The promises of engines other than `rio`. They promise less than `rio`; that is checked
//! exactly.
//!
//! - `sync`: a group is sent once the one before it is durable. So a crash leaves a prefix, and
//!   perhaps some of the one group after it.
//! - `linux`: as `sync`. Besides, the last write of a durable group, its commit block, is sent once
//!   the other writes of the group are durable. So after a crash it is there only behind them.
//! - `none`: keeps no order. Writes that were confirmed durable are there. Every block holds the
//!   content of some write that no write confirmed since then has overwritten.
//!
//! - `horae`: recovery finds the prefix that the last joint FLUSH has covered, and undoes the rest, as
//!   with `rio`. A lost connection fails the stream, and its recovery rolls it back.
//!
//! - `barrier`: a crash leaves a prefix, and perhaps some of the one group after it. The drives keep
//!   this at each time, also while nothing fails: a block that shows a group shows that all groups of
//!   the stream before it are there. Streams without an order promise what `none` does.
//!
//! - `opimq`: a power cut leaves a prefix of each stream, and perhaps some of the one group after it.
//!
//! Apart from `horae`, none of these engines undoes or replays anything. A lost connection fails the stream (promise P6), and
//! the stream begins again behind its durable mark. An owner owns its volume on a target as long as
//! its association exists.

use std::collections::BTreeMap;
use std::ops::Range;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::EngineKind;

use super::blocks::{Block, Wr, is_of};
use super::{
    Drives, Era, Named, Opened, Oracle, Poison, Promise, Recovered, StreamHistory, Submitted,
};
use crate::block::{self, Content};
use crate::scenario::{Place, Scenario};

/// A group: its owner's era, its stream and its seq.
type GroupId = (Era, u16, Seq);

/// The promises of the volume's engine, and the state that their checks need.
#[derive(Debug)]
pub(super) struct Promised {
    engine: EngineKind,
    /// For each machine, whether the owner has an association there.
    held: Vec<bool>,
    /// Some target had no owner to protect from a plain host, at some time.
    freed: bool,
    /// The group of each write, by number.
    groups: Vec<Option<GroupId>>,
    /// The groups with a commit block, by the numbers of its blocks.
    commits: BTreeMap<u64, GroupId>,
    /// For each machine, the number of the first write that was submitted after its last power
    /// loss.
    cuts: Vec<u64>,
    /// The blocks of the prepare area on each drive; empty if updates are not redirected.
    area: Range<u32>,
    /// Nothing goes wrong in the scenario.
    is_faultless: bool,
    /// The streams of engine `barrier` whose writes have no order.
    orderless: Vec<u16>,
}

impl Promised {
    pub(super) fn new(scenario: &Scenario) -> Self {
        Self {
            engine: scenario.volume.engine.kind(),
            held: vec![false; scenario.machines.len()],
            freed: false,
            groups: Vec::new(),
            commits: BTreeMap::new(),
            cuts: vec![0; scenario.machines.len()],
            area: scenario.volume.first - scenario.volume.prepare..scenario.volume.first,
            is_faultless: scenario.faults.is_empty(),
            orderless: scenario.volume.orderless.clone(),
        }
    }

    /// Whether updates in place are redirected. Behind the prefix they are then not there, in the
    /// place of being listed.
    pub(super) fn redirects(&self) -> bool {
        self.engine == EngineKind::Horae && !self.area.is_empty()
    }

    /// Whether a block of a drive is in the prepare area.
    pub(super) fn is_in_area(&self, lba: u32) -> bool {
        self.area.contains(&lba)
    }

    /// Whether nothing goes wrong in the scenario.
    pub(super) const fn is_faultless(&self) -> bool {
        self.is_faultless
    }

    /// The engine that makes the promises of a stream.
    fn engine_of(&self, stream: u16) -> EngineKind {
        if self.orderless.contains(&stream) { EngineKind::None } else { self.engine }
    }

    /// Whether a stream belongs to the one sequence of epochs of its drives.
    pub(super) fn is_in_sequence(&self, stream: u16) -> bool {
        self.engine_of(stream) == EngineKind::Barrier
    }

    /// Whether it is an engine with an ordering log.
    pub(super) fn is_logged(&self) -> bool {
        self.engine.capabilities().keeps_log
    }

    /// Whether a lost connection costs time only, because the engine sends again what is lost.
    fn replays(&self) -> bool {
        self.engine.capabilities().can_replay
    }

    /// Whether the engine sends a group only once the one before it is durable.
    fn is_serial(&self) -> bool {
        matches!(self.engine, EngineKind::Sync | EngineKind::Linux)
    }

    /// Whether the owner has an association with a machine that has no log, and so no record of the
    /// owner.
    pub(super) fn is_held(&self, machine: usize) -> bool {
        self.held[machine]
    }

    /// Notes that a target has no owner to protect from a plain host.
    pub(super) fn frees(&mut self) {
        self.freed = true;
    }
}

impl Oracle {
    /// Whether write `number` of a block is durable in the prepare area of its drive, or a newer one
    /// that may take its place.
    pub(super) fn is_durable_in_area(
        &self,
        block: &Block,
        number: u64,
        drives: &Drives<'_>,
    ) -> bool {
        let drive = drives.of(block.at);
        let is_content = |content: Content| {
            let is_of_block = block.writes.iter().any(|wr| wr.number == content);
            is_of_block && block.survives(number, content)
        };
        let mut area = self.promised.area.clone();
        self.promised.redirects() && area.any(|lba| is_content(drive.durable(lba)))
    }

    /// Notes whether the owner has an association with a machine that has no log, and so no record
    /// of the owner.
    pub fn holds(&mut self, machine: usize, there: bool) {
        self.promised.held[machine] = there;
    }

    /// The last group of its stream whose writes to a block are surely older than a write that is
    /// submitted now.
    pub(super) fn orders_behind(
        &self,
        era: Era,
        stream: u16,
        seq: Seq,
        writes: &[Submitted],
    ) -> Seq {
        match self.promised.engine_of(stream) {
            EngineKind::Rio | EngineKind::Horae => Seq(u64::MAX),
            EngineKind::Opimq if !self.is_sent_apart(writes) => Seq(u64::MAX),
            // The writes of one group have no order.
            EngineKind::Opimq | EngineKind::Sync | EngineKind::Linux | EngineKind::Barrier => {
                Seq(seq.0 - 1)
            }
            EngineKind::None => self.eras[era][usize::from(stream)].complete,
        }
    }

    /// Whether engine `opimq` sends a group without an order: it is for several drives, or has a
    /// discard.
    fn is_sent_apart(&self, writes: &[Submitted]) -> bool {
        let drive = |write: &Submitted| {
            let at = self.blocks[write.block as usize].at;
            (at.machine, at.drive)
        };
        let first = writes.first().map(drive);
        writes.iter().any(|write| write.place == Place::Discard || Some(drive(write)) != first)
    }

    /// P1 of `opimq`: after a power cut of a machine, each stream has a prefix.
    pub fn has_lost_power(&mut self, machine: usize, drives: &Drives<'_>) {
        if self.promised.engine == EngineKind::Opimq {
            let current = self.current;
            let durable: Vec<Seq> =
                self.eras[current].iter().map(|history| history.durable).collect();
            self.check_left(&durable, Some(machine), drives);
        }
    }

    pub(super) fn note_seqs(&mut self, era: Era, stream: u16, seq: Seq, writes: &[Submitted]) {
        if !self.promised.is_serial() {
            return;
        }
        let has_commit = self.promised.engine == EngineKind::Linux;
        let Promised { groups, commits, .. } = &mut self.promised;
        groups.resize(self.completed.len(), None);
        for write in writes {
            groups[write.number as usize] = Some((era, stream, seq));
            if write.commits && has_commit {
                commits.insert(write.number, (era, stream, seq));
            }
        }
    }

    /// Whether some of these contents, of a write that failed, are of a commit block.
    pub(super) fn may_be_commit(&self, failed: &[(u32, Content)]) -> bool {
        failed.iter().any(|(_, content)| self.promised.commits.contains_key(content))
    }

    /// Whether the write of these contents, which has failed, ends the order of all ordered streams
    /// on the drive.
    pub(super) fn ends_sequence(&self, failed: &[(u32, Content)]) -> bool {
        let is_orderless = |content: Content| {
            let mut writes = self.blocks.iter().flat_map(|block| &block.writes);
            writes.any(|wr| wr.number == content && !self.promised.is_in_sequence(wr.stream))
        };
        self.promised.engine == EngineKind::Barrier
            && !failed.iter().all(|(_, content)| is_orderless(*content))
    }

    /// P4 of `linux`: a commit block is done only when all other writes of its group are durable.
    pub(super) fn check_commits(&mut self, contents: &[Content], drives: &Drives<'_>) {
        for content in contents {
            if let Some(group) = self.promised.commits.get(content) {
                self.check_commit(*group, drives);
            }
        }
    }

    /// P4 of `linux`: the commit block of the first group that is not durable may be there, and
    /// then all other writes of the group are. This is checked for each stream of the current era.
    fn check_cut_commits(&mut self, durable: &[Seq], drives: &Drives<'_>) {
        if self.promised.commits.is_empty() {
            return;
        }
        let next = |stream: usize, seq: Seq| (self.current, stream as u16, seq.next());
        let cut: Vec<GroupId> = durable
            .iter()
            .enumerate()
            .filter(|(_, seq)| seq.0 < u64::MAX)
            .map(|(stream, seq)| next(stream, *seq))
            .collect();
        for group in cut {
            let commits = &self.promised.commits;
            let is_commit = |content: Content| commits.get(&content) == Some(&group);
            let may_be_there = self.blocks.iter().any(|block| {
                let drive = drives.of(block.at);
                drive.possible(block.at.lba).any(is_commit)
            });
            if may_be_there {
                self.check_commit(group, drives);
            }
        }
    }

    /// Checks that all writes of a group but its commit block are durable. A block that was settled
    /// since then is not checked.
    fn check_commit(&mut self, (era, stream, seq): GroupId, drives: &Drives<'_>) {
        let commits = &self.promised.commits;
        let is_of_group = |wr: &&Wr| wr.era == era && wr.stream == stream && wr.seq == seq;
        let missing = self.blocks.iter().find_map(|block| {
            let mut body = block
                .writes
                .iter()
                .filter(is_of_group)
                .filter(|wr| !commits.contains_key(&wr.number));
            let number = body.next()?.number;
            let drive = drives.of(block.at);
            let is_kept = |content: Content| {
                block.plain_contents.contains(&content)
                    || block.writes.iter().any(|wr| wr.number >= number && wr.is(content))
            };
            let lost = drive.possible(block.at.lba).find(|content| !is_kept(*content))?;
            Some((block.at, lost))
        });
        if let Some((at, lost)) = missing {
            let what = format!(
                "stream {stream}: the commit block of group {seq} is there, although {at} may hold \
                 {} after a power cut instead of the content of the group",
                Named(lost)
            );
            self.broken(Promise::P4, what);
        }
    }

    /// P1 of `sync` and `linux`: no write is done before its owner knew that the group before it was durable.
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

    /// Whether a stream may fail with this cause. Without replay it can't continue without a
    /// connection. Without a log its writes are refused once its association has ended, another owner has claimed
    /// the volume, or a plain host has written while there was no owner.
    pub(super) fn may_fail(&self, machine: usize, cause: Poison, now: u64) -> bool {
        let Promised { held, freed, .. } = &self.promised;
        match cause {
            Poison::Lost => !self.promised.replays() && !self.promised.is_faultless,
            Poison::Fenced => {
                !self.promised.is_logged()
                    && (*freed || !held[machine] || self.ownership.may_be_fenced(now))
            }
            Poison::Other | Poison::Failed => false,
        }
    }

    /// The last group of a stream whose writes other streams can read. A stream without replay that
    /// has failed may have lost the groups that were not durable.
    fn delivered(&self, history: &StreamHistory) -> Seq {
        if self.promised.replays() || !history.failed { history.complete } else { history.durable }
    }

    /// Notes that a machine loses its power. Without replay, writes that were complete there and not
    /// durable may be gone, and are not sent again. Readers miss them from now on, although
    /// the stream may learn of the loss later (promise P9).
    pub fn loses_power(&mut self, machine: usize) {
        if !self.promised.replays() {
            self.promised.cuts[machine] = self.completed.len() as u64;
        }
    }

    /// The number of the first write after the last power loss of the machine that has the block;
    /// see [`loses_power`](Self::loses_power).
    pub(super) fn cut(&self, block: &Block) -> u64 {
        self.promised.cuts[block.at.machine]
    }

    /// Whether a write of a block is there for other streams to read.
    pub(super) fn is_delivered(&self, wr: &Wr, block: &Block) -> bool {
        let history = &self.eras[wr.era][usize::from(wr.stream)];
        wr.seq <= self.delivered(history)
            && (wr.seq <= history.durable || wr.number >= self.cut(block))
    }

    /// Notes a new owner of the volume. There is no recovery: its streams count anew.
    pub(super) fn taken(
        &mut self,
        of: Opened,
        generation: u32,
        found: &[Recovered],
        drives: &Drives<'_>,
    ) -> Era {
        let Opened { client, took, began, now, .. } = of;
        let current = self.current;
        let affected = self.failures.since(began);
        let durable: Vec<Seq> = self.eras[current].iter().map(|history| history.durable).collect();
        let next = (0..durable.len()).map(|stream| {
            let result = found.iter().find(|r| usize::from(r.stream) == stream);
            let start = result.map_or(Seq::ZERO, |r| r.last);
            let affected = affected.clone();
            let (complete, durable) = (start, start);
            StreamHistory { start, complete, durable, affected, ..StreamHistory::default() }
        });
        let mut next: Vec<StreamHistory> = next.collect();
        let settle = |history: &mut StreamHistory| history.settled = Some(Seq(u64::MAX));
        if generation <= self.ownership.generation() {
            // The owner was fenced before its opening ended.
            next.iter_mut().for_each(settle);
            self.eras.push(next);
            return self.eras.len() - 1;
        }
        if !took && self.ownership.is_owned() && self.promised.held.contains(&true) {
            let what = "the volume was claimed from an owner that is there, without a take-over";
            self.broken(Promise::P7, what);
        }
        self.ownership.new_owner(client, generation, now);
        self.check_kept(&durable, drives);
        // A fenced owner may still receive reports that were true when they were sent.
        self.eras[current].iter_mut().for_each(settle);
        for block in &mut self.blocks {
            block.adopt(drives);
        }
        self.promised.held.fill(false);
        self.eras.push(next);
        self.current = self.eras.len() - 1;
        self.current
    }

    /// Notes that a stream begins again behind its durable mark.
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
            affected: self.failures.since(began),
            ..StreamHistory::default()
        };
        if self.is_stale(era) {
            self.eras[era][stream] = begun;
            return;
        }
        let reported = history.durable;
        if last < reported {
            let what = format!(
                "stream {stream} begins anew behind group {last}, although groups up to \
                 {reported} were reported durable to it"
            );
            return self.broken(Promise::P2, what);
        }
        // The owner receives now the results that arrived just before the stream failed.
        self.check_complete(era, stream as u16, reported, last);
        self.check_durable(era, stream as u16, reported, last, drives);
        self.eras[era][stream].durable = last;
        let durable: Vec<Seq> = self.eras[era].iter().map(|history| history.durable).collect();
        self.check_kept(&durable, drives);
        // The stream gives the seqs of lost groups again.
        let lost = |(of, id, _): &GroupId| *of == era && usize::from(*id) == stream;
        self.promised.commits.retain(|_, group| !lost(group));
        for block in self.blocks.iter_mut().filter(|b| b.has_beyond(stream as u16, last)) {
            block.drop_beyond(stream as u16, last, drives);
            block.reopened = self.recoveries;
        }
        self.eras[era][stream] = begun;
    }

    /// P1, P2, P5: every block holds a permitted content, also after a power cut, if streams are
    /// durable up to these groups.
    pub(super) fn check_kept(&mut self, durable: &[Seq], drives: &Drives<'_>) {
        self.check_cut_commits(durable, drives);
        let one_more = self.promised.is_serial();
        let wrong = self.blocks.iter().enumerate().find_map(|(number, block)| {
            let (promise, why) = block.check_kept(durable, one_more, drives).err()?;
            Some((promise, format!("block {number} on {}: {why}", block.at)))
        });
        if let Some((promise, what)) = wrong {
            return self.broken(promise, what);
        }
        if self.promised.engine == EngineKind::Barrier {
            self.check_left(durable, None, drives);
        }
    }

    /// P1 of `barrier` and `opimq`: if a block shows a group, all groups of the stream before it are there.
    /// With a machine, only its blocks show that: those of others may show what is in a cache.
    fn check_left(&mut self, durable: &[Seq], machine: Option<usize>, drives: &Drives<'_>) {
        let mut reached = durable.to_vec();
        let mut shown = durable.to_vec();
        let is_shown = |block: &&Block| machine.is_none_or(|machine| block.at.machine == machine);
        for block in self.blocks.iter().filter(is_shown) {
            let content = drives.of(block.at).block(block.at.lba);
            let shows = |wr: &&Wr| wr.place != Place::Discard && wr.is(content);
            for wr in block.writes.iter().filter(shows) {
                if self.promised.engine_of(wr.stream) == EngineKind::None {
                    continue;
                }
                let stream = usize::from(wr.stream);
                shown[stream] = shown[stream].max(wr.seq);
                reached[stream] = reached[stream].max(Seq(wr.seq.0 - 1));
            }
        }
        self.reach_followed(&shown, &mut reached);
        let wrong = self.blocks.iter().enumerate().find_map(|(number, block)| {
            let content = drives.of(block.at).block(block.at.lba);
            let why = block.misses(&reached, content)?;
            Some(format!("block {number} on {}: {why}", block.at))
        });
        if let Some(what) = wrong {
            self.broken(Promise::P1, what);
        }
    }
}

impl Block {
    /// Whether this content lacks a write of a group up to `reached`, which is there according to
    /// another block.
    fn misses(&self, reached: &[Seq], content: Content) -> Option<String> {
        let is_due = |wr: &&Wr| wr.seq <= reached[usize::from(wr.stream)];
        let due: Vec<&Wr> = self.writes.iter().filter(is_due).collect();
        let is_kept = |wr: &Wr| wr.is(content) && !due.iter().any(|due| wr.precedes(due));
        let is_there = due.is_empty()
            || self.writes.iter().any(is_kept)
            || self.plain_contents.contains(&content)
            || block::torn_from(content).is_some();
        (!is_there).then(|| {
            let text = self.describe_with(reached);
            format!(
                "it holds {}, although later groups of the stream are there ({text})",
                Named(content)
            )
        })
    }

    /// Checks the content of the block, if streams are durable up to these groups. With `one_more`,
    /// only the next group of each stream was sent.
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
                let may_be_sent = !one_more || wr.seq.0 <= mark(wr.stream).0.saturating_add(1);
                sent |= may_be_sent;
                newest |= may_be_sent && !kept.iter().any(|at| wr.precedes(&self.writes[*at]));
            }
            let base = is_of(&self.base, content);
            if newest || base && kept.is_empty() || self.plain_contents.contains(&content) {
                continue;
            }
            let (promise, why) = if sent || base {
                (Promise::P2, "older than the content that was confirmed as durable")
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
