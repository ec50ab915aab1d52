//! One block of the volume: the writes to it, and the contents that it may hold.

use core::fmt;

use riopipe_order::attribute::Seq;

use super::{Drives, Due, Era, Named, Promise};
use crate::block::{Content, GARBAGE, ZERO, torn_from};
use crate::scenario::Place;

/// The place of a block of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Where {
    /// The machine.
    pub machine: usize,
    /// Its drive.
    pub drive: usize,
    /// The drive's block.
    pub lba: u32,
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "machine {} drive {} block {}", self.machine, self.drive, self.lba)
    }
}

/// A write to the block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wr {
    pub(super) number: u64,
    pub(super) era: Era,
    pub(super) stream: u16,
    pub(super) seq: Seq,
    /// Earlier groups of the stream up to this one surely precede the write. Engines without an
    /// ordering log send writes side by side: of two such writes to one block, either may remain.
    pub(super) follows: Seq,
    pub(super) place: Place,
}

/// Whether a block may hold this content, if it had one of the contents of `base` before any write.
/// A power cut may tear contents that are not durable.
pub(super) fn is_of(base: &[Content], content: Content) -> bool {
    let both = torn_from(content)
        .is_some_and(|(older, newer, _)| base.contains(&older) && base.contains(&newer));
    both || base.contains(&content)
}

impl Wr {
    /// Whether the other write, to the same block, surely comes after this one. A block passes from
    /// one stream to another only when released (trap T15).
    pub(super) fn precedes(&self, other: &Self) -> bool {
        let same = self.era == other.era && self.stream == other.stream;
        self.number < other.number && (!same || self.seq <= other.follows)
    }

    /// The contents that the block may hold because of the write.
    fn contents(&self) -> &[Content] {
        match self.place {
            Place::Discard => &[ZERO, GARBAGE],
            Place::Fresh | Place::InPlace | Place::Extend => core::slice::from_ref(&self.number),
        }
    }

    /// Whether the block may hold this content because of the write.
    pub(super) fn is(&self, content: Content) -> bool {
        self.contents().contains(&content)
    }

    /// Whether the old content of its block may be lost (trap T11).
    const fn may_lose_old_content(&self) -> bool {
        matches!(self.place, Place::Fresh | Place::Discard)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) at: Where,
    /// The content at the beginning of the era. There is more than one after a failed FLUSH: the
    /// block reads as one of them now, and as another after a power cut.
    pub(super) base: Vec<Content>,
    /// The contents that plain hosts were permitted to write since then.
    pub(super) plain_contents: Vec<Content>,
    /// The contents that they were permitted to write before that.
    past_plain_contents: Vec<Content>,
    /// The writes since then, in the order of submission.
    pub(super) writes: Vec<Wr>,
    /// The writes before that.
    past: Vec<Wr>,
    /// The number of the last recovery that reopened a stream with writes here.
    pub(super) reopened: u64,
    /// The number of failures of a write to the block, or of a FLUSH that should make it durable.
    /// After a failure the block may have lost its content.
    pub(super) failures: u32,
    /// The number of these failures before the content was last known for certain.
    pub(super) settled_failures: u32,
    /// How often a plain host's FLUSH has fixed the content ([`Block::hold`]).
    pub(super) held_count: u64,
}

impl Block {
    pub(super) fn new(at: Where) -> Self {
        Self {
            at,
            base: vec![ZERO],
            plain_contents: Vec::new(),
            past_plain_contents: Vec::new(),
            writes: Vec::new(),
            past: Vec::new(),
            reopened: 0,
            failures: 0,
            settled_failures: 0,
            held_count: 0,
        }
    }

    pub(super) fn adopt(&mut self, drives: &Drives<'_>) {
        let drive = drives.of(self.at);
        self.base.clear();
        self.base.push(drive.block(self.at.lba));
        self.base.extend(drive.possible(self.at.lba));
        self.base.dedup();
        self.past_plain_contents.append(&mut self.plain_contents);
        self.past.append(&mut self.writes);
        self.settled_failures = self.failures;
    }

    /// Drops the writes of a stream beyond its prefix: the stream begins anew, and their outcome is
    /// settled.
    ///
    /// With engine `opimq` the block may have passed to another stream before this one knew that its
    /// group was durable ([`Oracle::covered`](super::Oracle::covered)). Then the writes of the other
    /// stream are in flight, and count.
    pub(super) fn drop_beyond(&mut self, stream: u16, last: Seq, drives: &Drives<'_>) {
        let is_beyond = |wr: &Wr| wr.stream == stream && wr.seq > last;
        let Some(at) = self.writes.iter().rposition(is_beyond) else { return };
        if at + 1 == self.writes.len() {
            return self.adopt(drives);
        }
        let last = self.writes[at];
        let kept = self.writes[..=at].iter().filter(|wr| !wr.precedes(&last));
        self.base = kept.flat_map(|wr| wr.contents()).copied().collect();
        // Failures that were counted since may concern the other stream's writes. They stay.
        self.past_plain_contents.append(&mut self.plain_contents);
        self.past.extend(self.writes.drain(..=at));
    }

    /// Sets the durable content, whatever was there before.
    pub(super) fn hold(&mut self, content: Content) {
        self.held_count += 1;
        self.base = vec![content];
        self.past_plain_contents.append(&mut self.plain_contents);
        self.past.append(&mut self.writes);
        self.settled_failures = self.failures;
    }

    /// Whether the block may have lost its content.
    pub(super) fn may_have_lost_content(&self) -> bool {
        self.failures > self.settled_failures
    }

    /// Whether it may hold this content when all writes are done.
    pub(super) fn may_hold_last(&self, content: Content) -> bool {
        let last = match self.writes.last() {
            Some(last) => self.writes.iter().any(|wr| !wr.precedes(last) && wr.is(content)),
            None => self.base.contains(&content),
        };
        last || self.plain_contents.contains(&content)
    }

    /// Whether the write with this number is a discard. Settled writes count, too.
    pub(super) fn discards(&self, number: u64) -> bool {
        let mut all = self.past.iter().chain(&self.writes);
        all.any(|wr| wr.number == number && wr.place == Place::Discard)
    }

    /// Whether the write with this number may be redirected by engine `horae`.
    pub(super) fn is_update(&self, number: u64) -> bool {
        let of_number = |wr: &&Wr| wr.number == number;
        let place = self.writes.iter().find(of_number).map(|wr| wr.place);
        matches!(place, Some(Place::InPlace | Place::Extend))
    }

    /// Whether a stream has ever updated the block in place beyond its prefix. Then the block may
    /// be listed.
    pub(super) fn was_updated_beyond(&self, stream: u16, last: Seq) -> bool {
        let update = |wr: &Wr| wr.stream == stream && wr.seq > last && wr.place == Place::InPlace;
        self.past.iter().chain(&self.writes).any(update)
    }

    pub(super) fn has_beyond(&self, stream: u16, last: Seq) -> bool {
        self.writes.iter().any(|wr| wr.stream == stream && wr.seq > last)
    }

    /// Whether this content keeps the promise that write `number` is durable: it is the content of
    /// that write, or of a later one.
    pub(super) fn survives(&self, number: u64, content: Content) -> bool {
        // An earlier recovery has adopted it: the promise has ended.
        let Some(known) = self.writes.iter().find(|wr| wr.number == number) else { return true };
        self.plain_contents.contains(&content)
            || self.writes.iter().any(|wr| !wr.precedes(known) && wr.is(content))
    }

    /// Whether this content may remain of write `number`, which was durable. It is like
    /// [`survives`](Self::survives), but a recovery before a log was given up may have undone a
    /// fresh write over it.
    pub(super) fn is_left(&self, number: u64, content: Content) -> bool {
        let overwrites = |wr: &Wr| wr.number > number && wr.may_lose_old_content();
        self.survives(number, content) || content == ZERO && self.writes.iter().any(overwrites)
    }

    /// The write beyond the prefix that has this content, if there is one.
    pub(super) fn beyond(&self, prefix: &[Seq], content: Content) -> Option<&Wr> {
        let has_content = |wr: &&Wr| wr.place != Place::Discard && wr.is(content);
        self.writes.iter().find(has_content).filter(|wr| wr.seq > prefix[usize::from(wr.stream)])
    }

    /// Whether a write of the block had this content.
    pub(super) fn was_written(&self, content: Content) -> bool {
        self.past.iter().chain(&self.writes).any(|wr| wr.place != Place::Discard && wr.is(content))
    }

    /// The number of its writes that a recovery has settled.
    pub(super) const fn past(&self) -> usize {
        self.past.len()
    }

    /// The number of contents that plain hosts were permitted to write before the last recovery.
    pub(super) const fn past_plain(&self) -> usize {
        self.past_plain_contents.len()
    }

    /// The writes of an era except the first `past` settled ones, whatever their outcome.
    pub(super) fn of_era(&self, era: Era, past: usize) -> impl Iterator<Item = &Wr> {
        self.past[past..].iter().chain(&self.writes).filter(move |wr| wr.era == era)
    }

    /// Whether a reader of this era may find this content, given the newest write `due` that the
    /// reader had to see when the read began.
    pub(super) fn may_read(&self, era: Era, due: &Due, content: Content) -> bool {
        let newest = self.of_era(era, due.past).find(|wr| wr.number == due.newest);
        let is_older =
            |wr: &Wr| wr.number < due.newest && newest.is_none_or(|newest| wr.precedes(newest));
        // The content before any write may have changed meanwhile: the write of a plain host has
        // become durable, on a volume without a log.
        let held = |content| is_of(&due.base, content) || is_of(&self.base, content);
        due.newest == 0 && held(content)
            || self.plain_contents.contains(&content)
            || self.past_plain_contents[due.past_plain..].contains(&content)
            || self.of_era(era, due.past).any(|wr| !is_older(wr) && wr.is(content))
    }

    /// Checks the content of the block, given the last group of each stream's prefix. `listed`:
    /// recovery has listed an update of it. `redirects`: updates beyond the prefix are rolled back.
    pub(super) fn check(
        &self,
        prefix: &[Seq],
        drives: &Drives<'_>,
        listed: bool,
        redirects: bool,
    ) -> Result<(), (Promise, String)> {
        let drive = drives.of(self.at);
        let inside = |wr: &Wr| wr.seq <= prefix[usize::from(wr.stream)];
        let newest = self.writes.iter().rposition(inside);
        // A block passes to another stream only when released (trap T15), so writes beyond the
        // prefix come last.
        let beyond = &self.writes[newest.map_or(0, |at| at + 1)..];
        let due = |content: Content| match newest {
            Some(at) => self.writes[at].is(content),
            None => self.base.contains(&content),
        };
        // An update or extension behind a fresh write entered the log behind it, so both are zeroed
        // (trap T11).
        let fresh = beyond.iter().position(Wr::may_lose_old_content);
        let left = &beyond[..fresh.unwrap_or(beyond.len())];
        // A power cut right after this must not restore anything.
        for content in drive.possible(self.at.lba).chain([drive.block(self.at.lba)]) {
            if due(content)
                || fresh.is_some() && content == ZERO
                || self.plain_contents.contains(&content)
            {
                continue;
            }
            let written = left.iter().position(|wr| wr.is(content));
            // An extension counts as the write that it extends. It shows the content of the prefix,
            // and more, unless it extends an update beyond the prefix.
            let update =
                written.is_some_and(|at| left[..=at].iter().any(|wr| wr.place == Place::InPlace));
            if written.is_some() && (!update || listed && !redirects) {
                continue;
            }
            let (promise, why) = if update && redirects {
                (Promise::P1, "a redirected update beyond the prefix that was not rolled back")
            } else if update {
                (Promise::P1, "an in-place update beyond the prefix that was not listed")
            } else if beyond.iter().any(|wr| wr.is(content)) {
                (Promise::P1, "a fresh write beyond the prefix that was not undone")
            } else if self.writes.iter().any(|wr| wr.is(content)) || self.base.contains(&content) {
                (Promise::P1, "older than the content inside the prefix")
            } else if content == ZERO {
                (Promise::P5, "zeroed, although its content is inside the prefix")
            } else {
                (Promise::P5, "never written there, or fenced off")
            };
            return Err((
                promise,
                format!(
                    "it holds, or may hold after a power cut, {}: {why} ({})",
                    Named(content),
                    self.describe_with(prefix)
                ),
            ));
        }
        Ok(())
    }

    pub(super) fn describe(&self) -> String {
        self.describe_with(&[])
    }

    pub(super) fn describe_with(&self, prefix: &[Seq]) -> String {
        let mut text = format!("at first {}", Named(self.base[0]));
        for wr in &self.writes {
            let kind = match wr.place {
                Place::Fresh => "fresh",
                Place::InPlace => "in place",
                Place::Extend => "extending",
                Place::Discard => "discarded",
            };
            let beyond = prefix.get(usize::from(wr.stream)).is_some_and(|last| wr.seq > *last);
            let place = if beyond { ", beyond the prefix" } else { "" };
            text.push_str(&format!(
                ", then #{} ({kind} by stream {} in group {}{place})",
                wr.number, wr.stream, wr.seq
            ));
        }
        text
    }
}
