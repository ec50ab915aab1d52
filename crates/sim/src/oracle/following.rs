//! Groups that another stream follows (P1): if a later group of the follower is there, the group and
//! all groups of its stream before it are.
//!
//! - With engine `opimq` this is checked after each power cut, by what the drives hold. What the
//!   follower has reported as durable counts as there.
//! - A follower that waits submits nothing before the group is durable. This is checked at once.
//! - A stream may fail because one has failed with which it shares such a group.

use riopipe_order::attribute::Seq;
use riopipe_order::following::FollowWay;

use super::{Era, Oracle, Promise};

/// A group with a follower, until it is reported durable.
#[derive(Clone, Copy, Debug)]
struct Link {
    era: Era,
    stream: u16,
    seq: Seq,
    follower: u16,
    /// The last group of the follower that was submitted before.
    after: Seq,
    way: FollowWay,
    /// One of the two streams has failed.
    has_failed: bool,
    /// One of them was opened again since.
    is_over: bool,
}

/// The groups with followers.
#[derive(Debug, Default)]
pub(super) struct Links(Vec<Link>);

impl Links {
    /// The links between a stream and others in which it may fail because of the other.
    fn of(&self, era: Era, stream: u16) -> impl Iterator<Item = &Link> {
        self.0.iter().filter(move |link| {
            let is_partner = link.follower == stream || link.stream == stream;
            link.era == era && is_partner
        })
    }
}

impl Oracle {
    /// Notes that another stream follows a group that was just admitted.
    pub fn followed(&mut self, (era, stream): (Era, u16), seq: Seq, follower: u16, way: FollowWay) {
        let after = self.eras[era][usize::from(follower)].last();
        let (has_failed, is_over) = (false, false);
        self.links.0.push(Link { era, stream, seq, follower, after, way, has_failed, is_over });
    }

    /// The groups of other streams that are durable because the groups of their follower up to
    /// `durable` are: their streams need not know of it. Only drives that keep the order of epochs show
    /// that. Engine `opimq` undoes nothing and sends nothing again, so the blocks of these groups may
    /// pass to another stream (trap T15).
    pub fn covered(&self, era: Era, follower: u16, durable: Seq) -> Vec<(u16, Seq)> {
        let is_covered = |link: &&Link| {
            link.era == era
                && link.follower == follower
                && link.way == FollowWay::Dual
                && !link.has_failed
                && self.has_group_behind(link, durable)
        };
        self.links.0.iter().filter(is_covered).map(|link| (link.stream, link.seq)).collect()
    }

    /// Whether a group of the follower up to `upto` was submitted after the group that it follows. A
    /// seq behind that group alone does not show it: a wait for durability may have taken one before.
    fn has_group_behind(&self, link: &Link, upto: Seq) -> bool {
        let groups = &self.eras[link.era][usize::from(link.follower)].groups;
        groups.iter().rev().any(|group| group.seq > link.after && group.seq <= upto)
    }

    /// P1: a follower that waits submits a group only when the group before it is durable.
    pub(super) fn check_follower(&mut self, era: Era, follower: u16, seq: Seq) {
        if self.is_stale(era) {
            return;
        }
        let early = self.links.0.iter().find(|link| {
            link.era == era
                && link.follower == follower
                && link.way == FollowWay::Waits
                && !link.is_over
                && self.eras[era][usize::from(link.stream)].durable < link.seq
        });
        if let Some(Link { stream, seq: before, .. }) = early {
            let what = format!(
                "stream {follower}: group {seq} was admitted, although it follows group {before} \
                 of stream {stream}, which is not durable"
            );
            self.broken(Promise::P1, what);
        }
    }

    /// Drops the groups of a stream that are durable. A link of a stream that has failed stays,
    /// since the other stream may learn of it later.
    pub(super) fn followed_durable(&mut self, era: Era, stream: u16, durable: Seq) {
        self.links.0.retain(|link| {
            link.era != era || link.stream != stream || link.seq > durable || link.has_failed
        });
    }

    /// Notes that a stream has failed, or that its owner has left it.
    pub(super) fn followed_failed(&mut self, era: Era, stream: u16) {
        for link in &mut self.links.0 {
            if link.era == era && (link.stream == stream || link.follower == stream) {
                link.has_failed = true;
            }
        }
    }

    /// Notes that a stream was opened again. Its seqs are used again, so the links count no more.
    pub(super) fn followed_over(&mut self, era: Era, stream: u16) {
        self.followed_failed(era, stream);
        for link in &mut self.links.0 {
            link.is_over |= link.era == era && (link.stream == stream || link.follower == stream);
        }
    }

    /// Whether a stream may fail, because one has failed with which it shares a group. `is_told`:
    /// that is the cause which the stream reports. Otherwise a drive may have stopped it, before the
    /// other stream knows that its connection is lost.
    pub(super) fn may_fail_with_other(&self, era: Era, stream: u16, is_told: bool) -> bool {
        self.links.of(era, stream).any(|link| {
            let may_be_stopped =
                !is_told && link.way == FollowWay::Dual && !self.promised.is_faultless();
            link.has_failed || may_be_stopped
        })
    }

    /// Adds to `reached`, the groups of each stream that must be there, those that must be there
    /// because of their followers. `shown` are the last groups that are there at least in part.
    pub(super) fn reach_followed(&self, shown: &[Seq], reached: &mut [Seq]) {
        loop {
            let mut has_changed = false;
            for link in self.links.0.iter().filter(|it| it.era == self.current && !it.is_over) {
                let follower = usize::from(link.follower);
                let is_there = self.has_group_behind(link, shown[follower].max(reached[follower]));
                let due = &mut reached[usize::from(link.stream)];
                if is_there && *due < link.seq {
                    *due = link.seq;
                    has_changed = true;
                }
            }
            if !has_changed {
                return;
            }
        }
    }
}
