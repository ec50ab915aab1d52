//! The oracle. It compares the drives with the promises that were made, block by block.
//!
//! It records the groups of each stream, with the name of the content of every block, and the
//! groups that were reported complete or durable. It reads the content of each drive. It has no
//! knowledge of logs, gates, connections or recovery.

mod blocks;
mod checks;
mod engines;
mod failures;
mod following;
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
use following::Links;
use ownership::Ownership;
pub use records::{FoundLog, LogHistory, Record};

/// The promises (`docs/ordering-contract.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Promise {
    /// A crash leaves a prefix of the groups.
    P1,
    /// A group that was reported durable remains.
    P2,
    /// Groups are reported complete in order.
    P3,
    /// Groups, and merged and split requests, are there wholly or not at all.
    P4,
    /// Blocks inside the prefix hold the submitted bytes, and other blocks are unchanged.
    P5,
    /// After a failed write or FLUSH, each stream that it may have affected is poisoned.
    P6,
    /// The crash of a target alone loses no data.
    P7,
    /// When faults stop, all that was submitted ends within bounds.
    P8,
    /// Readers find the writes that they must see.
    P9,
}

impl Promise {
    /// A short name of the promise.
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
    /// The promise that was broken.
    pub promise: Promise,
    /// A description of the violation.
    pub what: String,
}

/// The number of an owner's era: the time from the end of its recovery to the end of the next
/// recovery.
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
    /// The mark from which the stream resumed; `start_tag` is its tag.
    start: Seq,
    start_tag: u64,
    groups: Vec<Group>,
    complete: Seq,
    durable: Seq,
    /// The stream has failed, and its owner has not reopened it.
    failed: bool,
    /// Set once the stream was recovered: groups up to here count from then on.
    settled: Option<Seq>,
    /// The machines whose faults may fail the stream.
    affected: Vec<usize>,
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

/// The result of a recovery for one stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The stream.
    pub stream: u16,
    /// The last group of the prefix.
    pub last: Seq,
    /// The caller's tag of that group.
    pub tag: u64,
    /// Blocks of drives that in-place updates beyond the prefix have touched. If a log was given
    /// up, the blocks of fresh writes beyond the prefix are included.
    pub in_place: Vec<Where>,
}

/// A read in flight, with the contents that it may return.
#[derive(Clone, Debug, Default)]
pub struct Read {
    era: Era,
    stream: u16,
    block: u32,
    /// The number of recoveries before the read began.
    recoveries: u64,
    /// Its owner was fenced before the read began.
    stale: bool,
    due: Vec<Due>,
}

/// The contents that a reader may find in a block: those of the newest write that the reader must
/// see, by number, or of a write submitted later. If there is no such write (number 0), the content
/// before all writes.
#[derive(Clone, Debug)]
struct Due {
    newest: u64,
    base: Vec<Content>,
    /// The number of the block's writes that were settled when the read began.
    past: usize,
    /// See [`blocks::Block::past_plain`].
    past_plain: usize,
    /// The number of the block's failures that were settled when the read began.
    settled_failures: u32,
    /// See [`Oracle::loses_power`].
    cut: u64,
}

/// The way in which an owner opened the volume.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    /// The initiator.
    pub client: usize,
    /// Whether it may have taken the volume over from another owner.
    pub took: bool,
    /// The time at which its process began, ns.
    pub began: u64,
    /// The time, ns.
    pub now: u64,
    /// The time at which it began to read the labels that it used, ns.
    pub labels_read: u64,
}

/// The cause with which a stream failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// A target was unreachable for too long.
    Lost,
    /// Another owner has the volume.
    Fenced,
    /// A stream had failed with which it shares a group.
    Other,
    /// An operation failed.
    Failed,
}

/// The failure that a stream reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Poisoned {
    /// The machine on which the cause lies.
    pub machine: usize,
    /// The cause.
    pub cause: Poison,
    /// The stream's own text of the failure.
    pub why: String,
}

/// A write, as submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submitted {
    /// The block of the volume.
    pub block: u32,
    /// The number of the write to the block. It is also the name of the content, except for
    /// discards.
    pub number: u64,
    /// The place of the write.
    pub place: Place,
    /// Whether the block is of the last write of a durable group. With engine `linux` that is the
    /// commit block of the group.
    pub commits: bool,
}

/// The oracle: the submitted writes, the promises that were made, and the first violation.
#[derive(Debug)]
pub struct Oracle {
    blocks: Vec<Block>,
    /// The content of each block outside of the volume's data area.
    outside: Vec<(Where, Content)>,
    eras: Vec<Vec<StreamHistory>>,
    /// The era of the owner with the highest generation.
    current: Era,
    /// Whether the drive has completed the write with this number.
    completed: Vec<bool>,
    violation: Option<Violation>,
    failures: Failures,
    /// Whether the log of a machine was lost, replaced or failing at some time. Without its log a
    /// target can't know which writers to refuse (trap T21).
    logless: Vec<bool>,
    /// In-place updates that were reported and not acknowledged, by stream.
    unacknowledged: Vec<Vec<Where>>,
    /// Machines, each with the time at which one of its drives was last replaced by another, ns.
    replaced: Vec<(usize, u64)>,
    /// Machines whose logs were given up. The content of the drives is then no prefix, but
    /// everything that was durable is still there (trap T26).
    lost: BTreeSet<usize>,
    /// Streams that a recovery has begun to settle on some target, while that recovery has not
    /// ended.
    settling: BTreeSet<u16>,
    /// Whether a log was ever given up. From then on the list may have more than in-place updates.
    ever_given_up: bool,
    long_loss_timeout: bool,
    recoveries: u64,
    ownership: Ownership,
    promised: Promised,
    links: Links,
}

impl Oracle {
    /// An oracle before the first event.
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
            ever_given_up: false,
            long_loss_timeout: scenario.client.loss_ms >= NO_LOSS_MS,
            recoveries: 0,
            ownership: Ownership::new(scenario),
            promised: Promised::new(scenario),
            links: Links::default(),
        }
    }

    /// The first broken promise.
    #[must_use]
    pub const fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    /// Reports a broken promise. Only the first report counts.
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

    /// Numbers the writes from `number` on.
    pub fn number_from(&mut self, number: usize) {
        self.completed.resize(number.max(1), false);
    }

    /// Sets the content of a block outside of the volume's data area. No action of the volume's
    /// owners may ever change it (promise P5).
    pub fn outside(&mut self, at: Where, content: Content) {
        self.outside.push((at, content));
    }

    /// Sets the content of a block of the volume before the first event.
    pub fn preset(&mut self, block: usize, content: Content) {
        self.blocks[block].base = vec![content];
    }

    /// The era of the owner with the highest generation.
    #[must_use]
    pub const fn current(&self) -> Era {
        self.current
    }

    /// Whether the owner of an era was fenced.
    #[must_use]
    pub const fn is_stale(&self, era: Era) -> bool {
        era != self.current
    }

    /// Notes that a group was admitted.
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
        self.check_follower(era, stream, seq);
        let follows = self.orders_behind(era, stream, seq, writes);
        self.note_seqs(era, stream, seq, writes);
        if !self.is_stale(era) {
            for write in writes {
                self.blocks[write.block as usize].writes.push(Wr {
                    number: write.number,
                    era,
                    stream,
                    seq,
                    follows,
                    place: write.place,
                });
            }
        }
        let writes: Vec<(u32, u64)> = writes.iter().map(|w| (w.block, w.number)).collect();
        self.may_be_affected(era, stream, &writes, now);
        self.eras[era][usize::from(stream)].groups.push(Group { seq, tag, writes });
    }

    /// Notes that a target gets the recovered seq of a stream, and shortens the log.
    pub fn settles(&mut self, stream: u16) {
        self.settling.insert(stream);
    }

    /// Notes that the log of a machine is given up.
    pub fn log_lost(&mut self, machine: usize) {
        self.lost.insert(machine);
        self.ever_given_up = true;
    }

    /// Notes that an owner with permission to give up one log claims the volume from a machine
    /// whose log is lost, too. That gives up another log, if the log can be lost at all.
    pub fn log_given_up(&mut self, machine: usize) {
        if self.logless[machine] {
            self.lost.insert(machine);
            self.ever_given_up = true;
        }
    }

    /// Whether a log was lost since the volume was last recovered.
    #[must_use]
    pub fn has_lost_log(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Records the marks of a stream that its owner has received.
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
            // The owner was fenced. A report that was in flight then may still be true.
            let reported = if durable > was_durable { durable } else { Seq::ZERO };
            if reported > settled {
                let what = format!(
                    "stream {stream}: group {durable} was reported durable to an owner that \
                     was fenced at group {settled}"
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
        self.followed_durable(era, stream, durable);
    }

    /// Notes that the owner of a stream has left it as it is.
    pub fn left(&mut self, era: Era, stream: u16) {
        self.eras[era][usize::from(stream)].failed = true;
        self.followed_failed(era, stream);
    }

    /// Notes that a stream failed.
    pub fn poisoned(&mut self, era: Era, stream: u16, of: &Poisoned, now: u64) {
        let Poisoned { machine, cause, why } = of;
        let (machine, cause) = (*machine, *cause);
        let history = &mut self.eras[era][usize::from(stream)];
        history.failed = true;
        let is_excused = history.affected.contains(&machine)
            || self.is_stale(era)
            || self.may_fail(machine, cause, now)
            || self.may_fail_with_other(era, stream, cause == Poison::Other);
        self.followed_failed(era, stream);
        if is_excused {
            return;
        }
        // Fencing is not a failure of another part: a claim breaks connections and bindings (trap
        // T8).
        if self.ownership.may_be_fenced(now) && cause != Poison::Failed {
            return;
        }
        // An initiator with a short loss timeout treats a replaced connection as a lost one.
        if cause == Poison::Lost || cause == Poison::Fenced && !self.long_loss_timeout {
            if self.long_loss_timeout {
                let what = format!("stream {stream} gave machine {machine} up too early: {why}");
                self.broken(Promise::P7, what);
            }
        } else {
            let what = format!("stream {stream} failed although nothing had gone wrong: {why}");
            self.broken(Promise::P6, what);
        }
    }

    /// The contents that a read may find, block by block, if it begins now.
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
                past_plain: b.past_plain(),
                settled_failures: b.settled_failures,
                cut: self.cut(b),
            }
        });
        Read { era, stream, block, recoveries: self.recoveries, stale, due: due.collect() }
    }

    /// Checks a read that has succeeded. The volume may have been taken over during the read. Then
    /// the data of the read came back before anything was undone, or the read is refused (trap T8,
    /// promise P9).
    pub fn read_ends(&mut self, read: &Read, found: &[Content]) {
        for ((block, due), found) in (read.block..).zip(&read.due).zip(found) {
            let b = &self.blocks[block as usize];
            // The writes of a failed stream may be undone at any moment. They have been undone when
            // the stream is reopened (promise P6).
            let failed = |stream: u16| self.eras[read.era][usize::from(stream)].failed;
            let since = if read.stale { 0 } else { read.recoveries };
            // Whatever happens, a block has no content of another one: not even in a prepare area.
            if let Some(other) = self.written_to_another(block, *found) {
                let what = format!(
                    "stream {} read {} from block {block}, which was written to block {other}",
                    read.stream,
                    Named(*found),
                );
                return self.broken(Promise::P9, what);
            }
            if b.reopened > since || b.of_era(read.era, due.past).any(|wr| failed(wr.stream)) {
                continue;
            }
            // Readers miss the data that a drive loses in a failed FLUSH (trap T22). A take-over
            // that settles the block during the read does not restore that data.
            let uncertain = b.failures > due.settled_failures || self.cut(b) > due.cut;
            if !uncertain && !b.may_read(read.era, due, *found) {
                let over = if self.is_stale(read.era) { ", whose owner was fenced," } else { "" };
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

    /// The other block to which this content was written, if there is one, and it was not written to
    /// `block`, too.
    fn written_to_another(&self, block: u32, content: Content) -> Option<u32> {
        let has = |block: &Block| block.was_written(content);
        // Only engine `horae` reads blocks at other places.
        if !self.promised.redirects() || content == ZERO || has(&self.blocks[block as usize]) {
            return None;
        }
        self.blocks.iter().position(has).map(|other| other as u32)
    }

    /// Begins an era: a new owner has recovered the volume.
    pub fn recovered(
        &mut self,
        of: Opened,
        generation: u32,
        found: &[Recovered],
        drives: &Drives<'_>,
    ) -> Era {
        let Opened { client, took, began, now, labels_read } = of;
        self.recoveries += 1;
        self.check_outside(drives);
        self.check_drives(labels_read, drives);
        if !self.promised.is_logged() {
            return self.taken(of, generation, found, drives);
        }
        let current = self.current;
        let mut prefix = Vec::new();
        for (stream, history) in self.eras[current].iter().enumerate() {
            let result = found.iter().find(|r| usize::from(r.stream) == stream);
            prefix.push(result.map_or(history.start, |r| r.last));
        }
        if generation <= self.ownership.generation() {
            // The owner was fenced before its recovery ended: it will not be able to bind a stream.
            let mut stale = self.eras[current].clone();
            stale.iter_mut().zip(&prefix).for_each(|(history, last)| {
                let (complete, durable) = (*last, *last);
                let settled = Some(*last);
                *history = StreamHistory { complete, durable, settled, ..StreamHistory::default() };
            });
            self.eras.push(stale);
            return self.eras.len() - 1;
        }
        // A lost log has lost its record of the owner, too.
        if self.lost.is_empty()
            && let Some(what) = self.ownership.claim_violation(took, now)
        {
            self.broken(Promise::P7, what);
        }
        self.ownership.new_owner(client, generation, now);
        if self.lost.is_empty() {
            for (stream, k) in prefix.iter().enumerate() {
                let result = found.iter().find(|r| usize::from(r.stream) == stream);
                self.check_prefix(current, stream, *k, result.map(|r| r.tag));
            }
            self.check_blocks(&prefix, found, None, drives);
        } else {
            self.check_given_up(&prefix, found, drives);
        }
        // An owner that has completed a recovery with its log has found a log that works.
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

    /// Notes that the owner has reopened one stream; `began` is the time at which that started.
    pub fn reopened(&mut self, (era, began): (Era, u64), found: &Recovered, drives: &Drives<'_>) {
        self.recoveries += 1;
        self.followed_over(era, found.stream);
        self.check_outside(drives);
        let stream = usize::from(found.stream);
        let last = found.last;
        if !self.promised.is_logged() {
            return self.begun_anew((era, began), stream, last, drives);
        }
        if self.is_stale(era) {
            // The target will refuse to bind it again.
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
            affected: self.failures.since(began),
            ..StreamHistory::default()
        };
        self.unacknowledged[stream].clone_from(&found.in_place);
        self.settling.remove(&found.stream);
    }

    fn close_era(&mut self, prefix: &[Seq], began: u64) -> Vec<StreamHistory> {
        let (current, lost) = (self.current, !self.lost.is_empty());
        let affected = self.failures.since(began);
        self.eras[current]
            .iter_mut()
            .zip(prefix)
            .map(|(history, last)| {
                // With a lost log, the durable mark that the owner received may lie beyond.
                history.settled = Some(if lost { Seq(u64::MAX) } else { *last });
                StreamHistory {
                    start: *last,
                    start_tag: history.tag_at(*last),
                    complete: *last,
                    durable: *last,
                    affected: affected.clone(),
                    ..StreamHistory::default()
                }
            })
            .collect()
    }

    /// Notes that the caller has acknowledged the in-place updates of a stream.
    pub fn acknowledged(&mut self, stream: u16) {
        self.unacknowledged[usize::from(stream)].clear();
    }

    /// Checks the end of a run: every block holds the content that was submitted last, durably.
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

    /// The complete and durable marks that the owner of a stream has received, and the last group
    /// it submitted.
    #[must_use]
    pub fn progress(&self, era: Era, stream: u16) -> (Seq, Seq, Seq) {
        let history = &self.eras[era][usize::from(stream)];
        (history.complete, history.durable, history.last())
    }
}

/// A loss timeout beyond any outage in a scenario: a stream never has a reason to give a target up.
pub const NO_LOSS_MS: u32 = 600_000;

/// The drives of all machines.
#[derive(Clone, Copy)]
pub struct Drives<'a>(pub &'a [crate::machine::Machine]);

impl Drives<'_> {
    /// Both copies of the label on the drive that is in place, as a reader would find them now.
    #[must_use]
    pub fn labels(&self, machine: usize, drive: usize) -> Vec<u8> {
        let drive = &self.0[machine].env.drives[drive];
        drive.bytes(&[drive.block(0), drive.block(1)])
    }

    fn of(&self, at: Where) -> &crate::drive::Drive {
        self.0[at.machine].drive(at.drive)
    }
}

/// A content, formatted for people.
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
    use crate::drive::DriveEvent;

    /// Reads volume block 0 as its owner. During the read a FLUSH may fail. Another initiator takes
    /// the volume over and finds zeroes there. Then the read returns the content from before the
    /// write.
    fn read_across_a_take_over(flush_fails: bool) -> Option<Violation> {
        let at = Where { machine: 0, drive: 0, lba: 9 };
        let mut oracle = Oracle::new(&crate::draw::draw(1), &[at]);
        let number = oracle.next_number();
        let write = Submitted { block: 0, number, place: Place::Fresh, commits: false };
        oracle.submitted((0, 0, 0), Seq(1), 0, &[write]);
        let read = oracle.read_begins(0, 0, 0, 1);
        if flush_fails {
            let failed = DriveEvent::FlushFailed(vec![(9, number)]);
            oracle.drive_reports((0, 0), &failed, 1, &Drives(&[]));
        }
        oracle.blocks[0].hold(ZERO);
        oracle.read_ends(&read, &[ZERO]);
        oracle.violation
    }

    #[test]
    fn a_read_may_miss_data_of_a_failed_flush_also_after_a_take_over() {
        assert_eq!(read_across_a_take_over(true).map(|v| v.promise), None);
        assert_eq!(read_across_a_take_over(false).map(|v| v.promise), Some(Promise::P9));
    }

    /// A stream of engine `horae` that redirects has failed, so a read may find any content of its
    /// block. It returns what was written to `block`.
    fn read_of_block_0_that_returns(block: usize) -> Option<Violation> {
        let mut scenario = crate::draw::draw(1);
        scenario.volume.engine = crate::scenario::Engine::Horae;
        scenario.volume.prepare = 4;
        let places = [9, 10].map(|lba| Where { machine: 0, drive: 0, lba });
        let mut oracle = Oracle::new(&scenario, &places);
        let numbers = [oracle.next_number(), oracle.next_number()];
        let writes = [0, 1].map(|block| {
            let number = numbers[block as usize];
            Submitted { block, number, place: Place::InPlace, commits: false }
        });
        oracle.submitted((0, 0, 0), Seq(1), 0, &writes);
        oracle.eras[0][0].failed = true;
        let read = oracle.read_begins(0, 0, 0, 1);
        oracle.read_ends(&read, &[numbers[block]]);
        oracle.violation
    }

    #[test]
    fn a_read_never_finds_what_was_written_to_another_block() {
        assert_eq!(read_of_block_0_that_returns(0).map(|v| v.promise), None);
        assert_eq!(read_of_block_0_that_returns(1).map(|v| v.promise), Some(Promise::P9));
    }
}
