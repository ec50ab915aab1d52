//! The oracle: what was submitted and what was promised, block by block, and nothing about how.
//!
//! It knows the groups of each stream with the name of every block's content, which of them were
//! reported complete or durable, and what each drive holds. It knows nothing of logs, gates,
//! connections or recovery.

mod blocks;
mod checks;
mod engines;
mod failures;
mod ownership;
mod records;

use core::fmt;
use std::collections::BTreeSet;

use riopipe_order::attribute::Seq;

use crate::block::{Content, ZERO};
use crate::scenario::{Place, Scenario};
pub use blocks::Where;
use blocks::{Block, Wr};
use engines::Promised;
use failures::Failures;
use ownership::Ownership;
pub use records::{FoundLog, LogHistory, Record};

/// The promises (`docs/ordering-contract.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the text of each says it")]
pub enum Promise {
    P1,
    P2,
    P3,
    P4,
    P5,
    P6,
    P7,
    P8,
    P9,
}

impl Promise {
    /// What it promises, in a word or two.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::P1 => "P1 prefix",
            Self::P2 => "P2 durable",
            Self::P3 => "P3 in order",
            Self::P4 => "P4 atomic",
            Self::P5 => "P5 exact",
            Self::P6 => "P6 fail-stop",
            Self::P7 => "P7 a target's crash alone",
            Self::P8 => "P8 live",
            Self::P9 => "P9 reads",
        }
    }
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub promise: Promise,
    /// What was seen.
    pub what: String,
}

/// One owner's time, from the end of its recovery to the end of the next.
pub type Era = usize;

#[derive(Clone, Debug)]
struct Group {
    seq: Seq,
    tag: u64,
    /// Volume blocks and the numbers of the writes to them.
    writes: Vec<(u32, u64)>,
}

#[derive(Clone, Debug, Default)]
struct StreamHistory {
    /// From which mark it went on, and with which tag.
    start: Seq,
    start_tag: u64,
    groups: Vec<Group>,
    complete: Seq,
    durable: Seq,
    /// It has failed, and nobody has reopened it.
    failed: bool,
    /// Once somebody has recovered the stream: groups up to here count, for ever.
    settled: Option<Seq>,
    /// The machines whose faults it may die of.
    harmed: Vec<usize>,
}

impl StreamHistory {
    fn last(&self) -> Seq {
        self.groups.last().map_or(self.start, |group| group.seq)
    }

    fn upto(&self, seq: Seq) -> usize {
        self.groups.partition_point(|group| group.seq <= seq)
    }

    fn tag_at(&self, seq: Seq) -> u64 {
        self.upto(seq).checked_sub(1).map_or(self.start_tag, |at| self.groups[at].tag)
    }
}

/// What a recovery says of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Which stream.
    pub stream: u16,
    /// The prefix reaches up to here.
    pub last: Seq,
    /// The caller's tag of that group.
    pub tag: u64,
    /// Blocks of drives that in-place updates beyond the prefix touched; with a log given up, fresh
    /// writes, too.
    pub in_place: Vec<Where>,
}

/// A read under way: what it may find.
#[derive(Clone, Debug, Default)]
pub struct Read {
    era: Era,
    stream: u16,
    block: u32,
    /// Recoveries so far.
    recoveries: u64,
    /// Its owner had been overtaken before.
    stale: bool,
    due: Vec<Due>,
}

/// What a reader may find in a block: the newest write that it has to know of, by number, or one
/// submitted later; what was there before if there is none (number 0).
#[derive(Clone, Debug)]
struct Due {
    newest: u64,
    base: Vec<Content>,
    /// So many of the block's writes were settled when it began.
    past: usize,
    /// So many of its failures were.
    settled_shakes: u32,
    /// See [`Oracle::loses_power`].
    cut: u64,
}

/// How an owner came to the volume.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    /// Which initiator it is.
    pub client: usize,
    /// Whether it might have taken the volume over from another.
    pub took: bool,
    /// When its process began, ns.
    pub began: u64,
    /// The time, ns.
    pub now: u64,
    /// When it began to read the labels that it went by, ns.
    pub looked: u64,
}

/// Why a stream says that it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// A target was away for too long.
    Lost,
    /// Another owner has the volume.
    Fenced,
    /// Something failed.
    Failed,
}

/// How a stream says that it failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Poisoned {
    /// Because of something on this machine.
    pub machine: usize,
    /// Why.
    pub cause: Poison,
    /// In its own words.
    pub why: String,
}

/// A write, as submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submitted {
    /// The volume's block.
    pub block: u32,
    /// The number of the write to it, which is also the content's name (but for discards).
    pub number: u64,
    /// What kind.
    pub place: Place,
}

/// See [the module](self).
#[derive(Debug)]
pub struct Oracle {
    blocks: Vec<Block>,
    /// What each block outside of the volume's data area holds.
    outside: Vec<(Where, Content)>,
    eras: Vec<Vec<StreamHistory>>,
    /// The one of the owner with the highest generation.
    current: Era,
    /// Whether the drive has completed the write with this number.
    completed: Vec<bool>,
    violation: Option<Violation>,
    failures: Failures,
    /// Whether the log of a machine was lost, mislaid or failing at some time: without it a target
    /// can't know whom to refuse (T21).
    logless: Vec<bool>,
    /// In-place updates that were reported and not acknowledged, per stream.
    unacknowledged: Vec<Vec<Where>>,
    /// Machines, and since when a drive of each was last replaced by another, ns.
    replaced: Vec<(usize, u64)>,
    /// Machines whose logs were given up: what is on the drives is no prefix of anything, but
    /// nothing that was durable is gone (T26).
    lost: BTreeSet<usize>,
    /// Streams that some target was told to settle, by a recovery that is not through.
    settling: BTreeSet<u16>,
    /// Whether a log was ever given up: from then on more may be listed than in-place updates.
    doubtful: bool,
    patient: bool,
    recoveries: u64,
    ownership: Ownership,
    promised: Promised,
}

impl Oracle {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(scenario: &Scenario, map: &[Where]) -> Self {
        let streams = usize::from(scenario.volume.streams);
        let logged = scenario.volume.engine.is_logged();
        let start = if logged { Seq(scenario.volume.start) } else { Seq::ZERO };
        let history =
            StreamHistory { start, complete: start, durable: start, ..StreamHistory::default() };
        Self {
            blocks: map.iter().map(|at| Block::new(*at)).collect(),
            outside: Vec::new(),
            eras: vec![vec![history; streams]],
            current: 0,
            completed: vec![false; 1],
            violation: None,
            failures: Failures::default(),
            logless: vec![false; scenario.machines.len()],
            unacknowledged: vec![Vec::new(); streams],
            replaced: Vec::new(),
            lost: BTreeSet::new(),
            settling: BTreeSet::new(),
            doubtful: false,
            patient: scenario.client.loss_ms >= PATIENT_MS,
            recoveries: 0,
            ownership: Ownership::new(scenario),
            promised: Promised::new(scenario),
        }
    }

    /// The first broken promise.
    #[must_use]
    pub const fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    /// A promise is broken; the first one counts.
    pub fn broken(&mut self, promise: Promise, what: impl Into<String>) {
        if self.violation.is_none() {
            self.violation = Some(Violation { promise, what: what.into() });
        }
    }

    /// The number of the next write to a block.
    pub fn next_number(&mut self) -> u64 {
        self.completed.push(false);
        self.completed.len() as u64 - 1
    }

    /// Writes are numbered from here on.
    pub fn number_from(&mut self, number: usize) {
        self.completed.resize(number.max(1), false);
    }

    /// A block outside of the volume's data area holds this: nothing that the volume's owners do
    /// may ever change it (P5).
    pub fn outside(&mut self, at: Where, content: Content) {
        self.outside.push((at, content));
    }

    /// The era of the owner with the highest generation.
    #[must_use]
    pub const fn current(&self) -> Era {
        self.current
    }

    /// Whether an owner has been overtaken.
    #[must_use]
    pub const fn is_stale(&self, era: Era) -> bool {
        era != self.current
    }

    /// A group was admitted.
    pub fn submitted(
        &mut self,
        (era, stream, now): (Era, u16, u64),
        seq: Seq,
        tag: u64,
        writes: &[Submitted],
    ) {
        let last = self.eras[era][usize::from(stream)].last();
        if seq <= last {
            let what = format!("stream {stream}: group {seq} was admitted after group {last}");
            self.broken(Promise::P3, what);
        }
        let knows = self.orders_behind(era, stream, seq);
        self.note_seqs(era, stream, seq, writes);
        if !self.is_stale(era) {
            for write in writes {
                self.blocks[write.block as usize].writes.push(Wr {
                    number: write.number,
                    era,
                    stream,
                    seq,
                    knows,
                    place: write.place,
                });
            }
        }
        let writes: Vec<(u32, u64)> = writes.iter().map(|w| (w.block, w.number)).collect();
        self.may_be_harmed(era, stream, &writes, now);
        self.eras[era][usize::from(stream)].groups.push(Group { seq, tag, writes });
    }

    /// A target is told how far recovery kept a stream: its log is shortened.
    pub fn settles(&mut self, stream: u16) {
        self.settling.insert(stream);
    }

    /// A machine's log is given up.
    pub fn log_lost(&mut self, machine: usize) {
        self.lost.insert(machine);
        self.doubtful = true;
    }

    /// An owner who was told to accept the loss of one log claims the volume from a machine whose
    /// log is gone, too. That is another loss accepted, if the log can be gone at all.
    pub fn log_given_up(&mut self, machine: usize) {
        if self.logless[machine] {
            self.lost.insert(machine);
            self.doubtful = true;
        }
    }

    /// Whether a log was lost since the volume was last recovered.
    #[must_use]
    pub fn has_lost_log(&self) -> bool {
        !self.lost.is_empty()
    }

    /// A stream's marks, as its owner was told them.
    pub fn marks(
        &mut self,
        era: Era,
        stream: u16,
        complete: Seq,
        durable: Seq,
        drives: &Drives<'_>,
    ) {
        let history = &self.eras[era][usize::from(stream)];
        let (was_complete, was_durable) = (history.complete, history.durable);
        if complete == was_complete && durable == was_durable {
            return;
        }
        if complete < was_complete || durable < was_durable {
            let what = format!(
                "stream {stream}: the marks went from {was_complete}/{was_durable} back to \
                 {complete}/{durable}"
            );
            self.broken(Promise::P3, what);
            return;
        }
        if let Some(settled) = history.settled {
            // Its owner was overtaken; what was on its way may still tell the truth.
            let reported = if durable > was_durable { durable } else { Seq::ZERO };
            if reported > settled {
                let what = format!(
                    "stream {stream}: group {durable} was reported durable to an owner who had \
                     been overtaken at group {settled}"
                );
                self.broken(Promise::P2, what);
            }
        } else {
            self.check_complete(era, stream, was_complete, complete);
            self.check_durable(era, stream, was_durable, durable, drives);
        }
        let history = &mut self.eras[era][usize::from(stream)];
        history.complete = complete;
        history.durable = durable;
    }

    /// A stream's owner has left it as it is.
    pub fn left(&mut self, era: Era, stream: u16) {
        self.eras[era][usize::from(stream)].failed = true;
    }

    /// A stream failed.
    pub fn poisoned(&mut self, era: Era, stream: u16, of: &Poisoned, now: u64) {
        let Poisoned { machine, cause, why } = of;
        let (machine, cause) = (*machine, *cause);
        let history = &mut self.eras[era][usize::from(stream)];
        history.failed = true;
        if history.harmed.contains(&machine)
            || self.is_stale(era)
            || self.may_fail(machine, cause, now)
        {
            return;
        }
        // To be fenced is no failure of anything else: a claim breaks connections and bindings (T8).
        if self.ownership.is_challenged(now) && cause != Poison::Failed {
            return;
        }
        // Who gives a lost connection no time takes its being replaced for the end.
        if cause == Poison::Lost || cause == Poison::Fenced && !self.patient {
            if self.patient {
                let what = format!("stream {stream} gave machine {machine} up too early: {why}");
                self.broken(Promise::P7, what);
            }
        } else {
            let what = format!("stream {stream} failed although nothing had gone wrong: {why}");
            self.broken(Promise::P6, what);
        }
    }

    /// What a read that begins now may find, block by block.
    #[must_use]
    pub fn read_begins(&self, era: Era, stream: u16, block: u32, blocks: u32) -> Read {
        let stale = self.is_stale(era);
        let due = (block..block + blocks).map(|block| {
            let b = &self.blocks[block as usize];
            let past = if stale { 0 } else { b.past() };
            let known = |wr: &&Wr| wr.stream == stream || self.is_delivered(wr, b);
            let newest = b.of_era(era, past).filter(known).map(|wr| wr.number).max();
            Due {
                newest: newest.unwrap_or(0),
                base: b.base.clone(),
                past,
                settled_shakes: b.settled_shakes,
                cut: self.cut(b),
            }
        });
        Read { era, stream, block, recoveries: self.recoveries, stale, due: due.collect() }
    }

    /// A read has ended well. Also one that was under way while somebody took the volume over: what
    /// its owner reads came back before anything was undone, or it is refused (T8, P9).
    pub fn read_ends(&mut self, read: &Read, found: &[Content]) {
        for ((block, due), found) in (read.block..).zip(&read.due).zip(found) {
            let b = &self.blocks[block as usize];
            // What a failed stream wrote may be undone at any moment, and has been when the stream
            // is reopened (P6).
            let failed = |stream: u16| self.eras[read.era][usize::from(stream)].failed;
            let since = if read.stale { 0 } else { read.recoveries };
            if b.reopened > since || b.of_era(read.era, due.past).any(|wr| failed(wr.stream)) {
                continue;
            }
            // What a drive loses when its FLUSH fails, readers miss (T22). A take-over that settles
            // the block while the read is under way does not bring it back.
            let shaken = b.shakes > due.settled_shakes || self.cut(b) > due.cut;
            if !shaken && !b.may_read(read.era, due, *found) {
                let over =
                    if self.is_stale(read.era) { ", whose owner was overtaken," } else { "" };
                let what = format!(
                    "stream {}{over} read {} from block {block}; its newest write there was {} ({})",
                    read.stream,
                    Named(*found),
                    due.newest,
                    b.describe()
                );
                return self.broken(Promise::P9, what);
            }
        }
    }

    /// The volume has been recovered by a new owner; the era that begins.
    pub fn recovered(
        &mut self,
        of: Opened,
        generation: u32,
        found: &[Recovered],
        drives: &Drives<'_>,
    ) -> Era {
        let Opened { client, took, began, now, looked } = of;
        self.recoveries += 1;
        self.check_outside(drives);
        self.check_drives(looked, drives);
        if !self.promised.is_logged() {
            return self.taken(of, generation, found, drives);
        }
        let current = self.current;
        let mut prefix = Vec::new();
        for (stream, history) in self.eras[current].iter().enumerate() {
            let of = found.iter().find(|r| usize::from(r.stream) == stream);
            prefix.push(of.map_or(history.start, |r| r.last));
        }
        if generation <= self.ownership.generation() {
            // Overtaken before it was through: it will not be able to bind a stream.
            let mut stale = self.eras[current].clone();
            stale.iter_mut().zip(&prefix).for_each(|(history, last)| {
                let (complete, durable) = (*last, *last);
                let settled = Some(*last);
                *history = StreamHistory { complete, durable, settled, ..StreamHistory::default() };
            });
            self.eras.push(stale);
            return self.eras.len() - 1;
        }
        // With a log goes what it knew of an owner.
        if self.lost.is_empty()
            && let Some(what) = self.ownership.robs(took, now)
        {
            self.broken(Promise::P7, what);
        }
        self.ownership.has_it(client, generation, now);
        if self.lost.is_empty() {
            for (stream, k) in prefix.iter().enumerate() {
                let of = found.iter().find(|r| usize::from(r.stream) == stream);
                self.check_prefix(current, stream, *k, of.map(|r| r.tag));
            }
            self.check_blocks(&prefix, found, None, drives);
        } else {
            self.check_given_up(&prefix, found, drives);
        }
        // Whoever has been through with its log has found one that works.
        self.failures.logs_that_work(|machine| drives.0[machine].has_its_log());
        let mut next = self.close_era(&prefix, began);
        if !core::mem::take(&mut self.lost).is_empty() {
            // Tags were lost with the log.
            for r in found {
                next[usize::from(r.stream)].start_tag = r.tag;
            }
        }
        for block in &mut self.blocks {
            block.adopt(drives);
        }
        for r in found {
            self.unacknowledged[usize::from(r.stream)].clone_from(&r.in_place);
        }
        self.settling.clear();
        self.eras.push(next);
        self.current = self.eras.len() - 1;
        self.current
    }

    /// One stream was reopened by its owner, who began that at a time.
    pub fn reopened(&mut self, (era, began): (Era, u64), found: &Recovered, drives: &Drives<'_>) {
        self.recoveries += 1;
        self.check_outside(drives);
        let stream = usize::from(found.stream);
        let last = found.last;
        if !self.promised.is_logged() {
            return self.begun_anew((era, began), stream, last, drives);
        }
        if self.is_stale(era) {
            // Binding it again will be refused.
            let history = &mut self.eras[era][stream];
            (history.complete, history.durable) = (last, last);
            return;
        }
        self.check_prefix(era, stream, last, Some(found.tag));
        let everything = Seq(u64::MAX);
        let mut prefix = vec![everything; self.eras[era].len()];
        prefix[stream] = last;
        self.check_blocks(&prefix, core::slice::from_ref(found), Some(found.stream), drives);
        for block in self.blocks.iter_mut().filter(|b| b.has_beyond(found.stream, last)) {
            block.adopt(drives);
            block.reopened = self.recoveries;
        }
        let history = &mut self.eras[era][stream];
        let tag = history.tag_at(last);
        *history = StreamHistory {
            start: last,
            start_tag: tag,
            complete: last,
            durable: last,
            harmed: self.failures.since(began),
            ..StreamHistory::default()
        };
        self.unacknowledged[stream].clone_from(&found.in_place);
        self.settling.remove(&found.stream);
    }

    fn close_era(&mut self, prefix: &[Seq], began: u64) -> Vec<StreamHistory> {
        let (current, lost) = (self.current, !self.lost.is_empty());
        let harmed = self.failures.since(began);
        self.eras[current]
            .iter_mut()
            .zip(prefix)
            .map(|(history, last)| {
                // With a log that was lost, what its owner was told in good faith may go beyond.
                history.settled = Some(if lost { Seq(u64::MAX) } else { *last });
                StreamHistory {
                    start: *last,
                    start_tag: history.tag_at(*last),
                    complete: *last,
                    durable: *last,
                    harmed: harmed.clone(),
                    ..StreamHistory::default()
                }
            })
            .collect()
    }

    /// The caller has taken note of a stream's in-place updates.
    pub fn acknowledged(&mut self, stream: u16) {
        self.unacknowledged[usize::from(stream)].clear();
    }

    /// Everything has ended: every block holds what was submitted last, durably.
    pub fn check_end(&mut self, drives: &Drives<'_>) {
        self.check_outside(drives);
        let all = vec![Seq(u64::MAX); self.eras[0].len()];
        if !self.promised.is_logged() {
            return self.check_kept(&all, drives);
        }
        if self.lost.is_empty() {
            self.check_blocks(&all, &[], None, drives);
        }
    }

    /// How far a stream's owner was told that it is, and the last group it submitted.
    #[must_use]
    pub fn progress(&self, era: Era, stream: u16) -> (Seq, Seq, Seq) {
        let history = &self.eras[era][usize::from(stream)];
        (history.complete, history.durable, history.last())
    }
}

/// A loss time beyond any outage in a scenario: a stream never has a reason to give a target up.
pub const PATIENT_MS: u32 = 600_000;

/// Every machine's drives.
#[derive(Clone, Copy)]
pub struct Drives<'a>(pub &'a [crate::machine::Machine]);

impl Drives<'_> {
    /// Both copies of the label of the drive that is there, as they would be read now.
    #[must_use]
    pub fn labels(&self, machine: usize, drive: usize) -> Vec<u8> {
        let drive = &self.0[machine].env.drives[drive];
        drive.bytes(&[drive.block(0), drive.block(1)])
    }

    fn of(&self, at: Where) -> &crate::drive::Drive {
        self.0[at.machine].drive(at.drive)
    }
}

/// A content, for people.
struct Named(Content);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ZERO => f.write_str("zeroes"),
            crate::block::GARBAGE => f.write_str("garbage"),
            crate::block::MIXED => f.write_str("a mixture"),
            content => write!(f, "#{content}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::Told;

    /// The owner of volume block 0 reads it. Meanwhile a FLUSH may fail, another takes the volume over
    /// and finds zeroes there, and the read comes back with what was there before the write.
    fn read_across_a_take_over(flush_fails: bool) -> Option<Violation> {
        let at = Where { machine: 0, drive: 0, lba: 9 };
        let mut oracle = Oracle::new(&crate::draw::draw(1), &[at]);
        let number = oracle.next_number();
        let write = Submitted { block: 0, number, place: Place::Fresh };
        oracle.submitted((0, 0, 0), Seq(1), 0, &[write]);
        let read = oracle.read_begins(0, 0, 0, 1);
        if flush_fails {
            oracle.told(0, 0, &Told::FlushFailed(vec![(9, number)]), 1);
        }
        oracle.blocks[0].hold(ZERO);
        oracle.read_ends(&read, &[ZERO]);
        oracle.violation
    }

    #[test]
    fn a_read_misses_what_a_failed_flush_lost_also_after_a_take_over() {
        assert_eq!(read_across_a_take_over(true).map(|v| v.promise), None);
        assert_eq!(read_across_a_take_over(false).map(|v| v.promise), Some(Promise::P9));
    }
}
