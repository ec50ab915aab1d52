//! Groups that another stream of the volume follows: what the streams of one owner know of each
//! other.
//!
//! A group may name one *follower*, another stream of the same volume. Groups of the follower that
//! are submitted later are behind the group, and so behind all earlier groups of its stream. There
//! are two [ways](FollowWay):
//!
//! ```text
//!              stream A           stream B, the follower
//! Dual         A5, also B's ────▶ B3 is sent at once: the drive keeps the order
//! Waits        A5 ─ durable ────▶ B3 is admitted then
//! ```
//!
//! Each stream is driven by a thread of its own. [`Following`] is the state that they share. It
//! decides alone, and [`SharedFollowing`] gives all threads access to it.
//!
//! # No stream waits for ever
//!
//! A write of an epoch waits in the drive for all earlier epochs of its streams. With dual-stream
//! writes these are also epochs of another stream, which another thread sends.
//!
//! - *The waits have no circle.* An epoch gets its numbers in all its streams at once. So in the
//!   drive it waits only for epochs that got their numbers earlier.
//! - *The queues let the oldest pass.* Requests leave each stream in the order of their numbers. So
//!   the commands that fill a queue before the oldest epoch has left are of that epoch, or wait for
//!   nothing: their answers come, and free its slots. Only a FLUSH may get its answer later than it
//!   has to (trap T29). An epoch of one stream gets its number when its first write leaves. From then
//!   on it has a slot that only its own writes use. A dual-stream write gets its numbers earlier, and
//!   so only if no FLUSH of its stream is queued or in flight.
//! - *A thread sends what has a number.* If requests with numbers have not left, or their data has not,
//!   and the stream shares a dual-stream write, the background thread drives the stream whenever its
//!   owner is in no call ([`Following::is_needed`]). A follower that waits has the same need: the
//!   stream of the group must read the answer.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::attribute::{Member, Seq, StreamId};
use crate::dispatch::epoch_numbers::EpochNumbers;
use crate::probe::{self, Plant};

/// How a stream follows a group of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowWay {
    /// The drive keeps the order: the group's writes are dual-stream writes (engine `opimq`).
    Dual,
    /// The follower admits no group before the group is durable.
    Waits,
}

/// The open streams of a volume, and the groups that they follow. A stream has its number in commands here
/// ([`Limits::stream_number`](crate::engine::Limits::stream_number)), which differs in each opening.
#[derive(Debug, Default)]
pub struct Following {
    streams: BTreeMap<u16, Stream>,
    /// The groups with a follower that are not known to be durable.
    links: Vec<Link>,
    /// The epochs of the streams on each drive (engine `opimq`).
    drives: Vec<EpochNumbers>,
}

#[derive(Debug)]
struct Stream {
    id: StreamId,
    state: State,
    /// Whether a stream has failed with which this one shares a group.
    must_fail: bool,
    /// Whether requests that have their numbers, or data of commands, have not left the initiator,
    /// or may not have: a stream reports it from the first group with a follower on.
    has_unsent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is being started, and may have to begin again with another number.
    Starting,
    Open,
    /// Its owner closes it, so it follows no further group.
    Closing,
    Failed,
}

/// A group with a follower.
#[derive(Clone, Copy, Debug)]
struct Link {
    /// The stream of the group.
    stream: u16,
    seq: Seq,
    follower: u16,
    way: FollowWay,
}

impl Following {
    /// Adds a stream that is started with this number.
    pub fn start(&mut self, id: StreamId, number: u16) {
        let stream = Stream { id, state: State::Starting, must_fail: false, has_unsent: true };
        self.streams.insert(number, stream);
    }

    /// Notes that a stream is open. From now on it can follow groups.
    pub fn open(&mut self, number: u16) {
        self.set_state(number, State::Open);
    }

    /// Removes a stream that is over. Returns the streams that must be woken.
    pub fn end(&mut self, number: u16, was_closed: bool) -> Vec<StreamId> {
        // A stream that was closed has made everything durable, also what it follows.
        let woken = if was_closed { Vec::new() } else { self.fail(number) };
        self.streams.remove(&number);
        self.links.retain(|link| link.stream != number && link.follower != number);
        self.drives.iter_mut().for_each(|drive| drive.end(number));
        woken
    }

    /// The number of an open stream that can follow a group of stream `number`.
    #[must_use]
    pub fn follower(&self, number: u16, id: StreamId) -> Option<u16> {
        let can_follow = |(other, stream): &(&u16, &Stream)| {
            **other != number && stream.id == id && stream.state == State::Open && !stream.must_fail
        };
        self.streams.iter().find(can_follow).map(|(other, _)| *other)
    }

    /// Notes that `follower` follows group `seq` of stream `number`. Returns the streams that must be
    /// woken: the drive keeps the group back until the follower has sent what is before it.
    pub fn follow(
        &mut self,
        number: u16,
        seq: Seq,
        follower: u16,
        way: FollowWay,
    ) -> Vec<StreamId> {
        let is_open = |number| {
            let state = self.streams.get(&number).map(|stream: &Stream| stream.state);
            matches!(state, Some(State::Open | State::Closing))
        };
        if is_open(follower) {
            self.links.push(Link { stream: number, seq, follower, way });
        } else if way == FollowWay::Dual {
            // It has failed since its number was asked for. The drive may never map the writes.
            self.set_must_fail(number);
        }
        if self.is_needed(follower) {
            self.id_of(follower).into_iter().collect()
        } else {
            Vec::new()
        }
    }

    /// Notes whether requests of a stream that have their numbers, or data of its commands, have not
    /// left the initiator, because a queue or a connection has no space or the target has not asked
    /// for the data.
    pub fn set_unsent(&mut self, number: u16, has_unsent: bool) {
        if let Some(stream) = self.streams.get_mut(&number) {
            stream.has_unsent = has_unsent;
        }
    }

    /// Whether another stream needs that a thread drives this one, also while its owner does not
    /// call: see the [module](self). A stream that must fail is driven until it has failed, because
    /// the drive keeps back FLUSHes for what it has not sent.
    #[must_use]
    pub fn is_needed(&self, number: u16) -> bool {
        let Some(stream) = self.streams.get(&number) else { return false };
        if stream.state == State::Failed || probe::is_bug_planted(Plant::FollowNotDriven) {
            return false;
        }
        let needs = |link: &Link| match link.way {
            FollowWay::Dual => {
                stream.has_unsent && (link.stream == number || link.follower == number)
            }
            FollowWay::Waits => link.stream == number,
        };
        stream.must_fail || self.links.iter().any(needs)
    }

    /// As [`is_needed`](Self::is_needed), for the opening of a stream that is not over.
    #[must_use]
    pub fn is_stream_needed(&self, id: StreamId) -> bool {
        let mut openings = self.streams.iter().filter(|(_, stream)| stream.id == id);
        openings.any(|(number, _)| self.is_needed(*number))
    }

    /// Whether a stream must admit no group, since it follows one that is not durable.
    #[must_use]
    pub fn must_wait(&self, number: u16) -> bool {
        let waits_for = |link: &Link| link.follower == number && link.way == FollowWay::Waits;
        self.links.iter().any(waits_for) && !probe::is_bug_planted(Plant::FollowNotWaited)
    }

    /// Whether groups of a stream have followers and are not known to be durable.
    #[must_use]
    pub fn is_followed(&self, number: u16) -> bool {
        self.links.iter().any(|link| link.stream == number)
    }

    /// Notes that the groups of a stream up to `seq` are durable. Returns the streams that must be
    /// woken, since they need wait no longer.
    pub fn on_durable(&mut self, number: u16, seq: Seq) -> Vec<StreamId> {
        let mut followers = Vec::new();
        self.links.retain(|link| {
            let is_over = link.stream == number && link.seq <= seq;
            if is_over && link.way == FollowWay::Waits {
                followers.push(link.follower);
            }
            !is_over
        });
        followers.retain(|follower| !self.must_wait(*follower));
        followers.iter().filter_map(|number| self.id_of(*number)).collect()
    }

    /// Notes that a stream has failed. The streams with which it shares groups that are not known to
    /// be durable must fail, too: of a group that may be lost, nothing behind it may survive. Returns
    /// these streams, which must be woken.
    pub fn fail(&mut self, number: u16) -> Vec<StreamId> {
        match self.streams.get_mut(&number) {
            Some(stream) if stream.state != State::Failed => stream.state = State::Failed,
            _ => return Vec::new(),
        }
        let mut partners = Vec::new();
        for link in &self.links {
            if link.stream == number {
                partners.push(link.follower);
            } else if link.follower == number && link.way == FollowWay::Dual {
                // The drive maps the group only with all earlier epochs of the follower.
                partners.push(link.stream);
            }
        }
        self.links.retain(|link| link.stream != number && link.follower != number);
        if probe::is_bug_planted(Plant::FollowFailureIgnored) {
            return Vec::new();
        }
        partners.sort_unstable();
        partners.dedup();
        partners.iter().for_each(|partner| self.set_must_fail(*partner));
        partners.iter().filter_map(|partner| self.id_of(*partner)).collect()
    }

    /// Whether a stream must fail, because one has failed with which it shares a group.
    #[must_use]
    pub fn must_fail(&self, number: u16) -> bool {
        self.streams.get(&number).is_some_and(|stream| stream.must_fail)
    }

    /// Notes whether the owner of a stream closes it.
    pub fn set_closing(&mut self, number: u16, is_closing: bool) {
        self.set_state(number, if is_closing { State::Closing } else { State::Open });
    }

    fn set_state(&mut self, number: u16, state: State) {
        if let Some(stream) = self.streams.get_mut(&number)
            && stream.state != State::Failed
        {
            stream.state = state;
        }
    }

    /// The epochs of the streams on a drive.
    pub fn epochs(&mut self, member: Member) -> &mut EpochNumbers {
        let index = usize::from(member.0);
        if self.drives.len() <= index {
            self.drives.resize_with(index + 1, EpochNumbers::default);
        }
        &mut self.drives[index]
    }

    /// A drive with a write that the stream follows and has not flushed, if there is one: another
    /// drive than `present` if there is such a one.
    #[must_use]
    pub fn unflushed_drive(&self, number: u16, present: Option<Member>) -> Option<Member> {
        let drives =
            self.drives.iter().zip(0..).filter(|(drive, _)| drive.follows_unflushed(number));
        let mut members = drives.map(|(_, index)| Member(index));
        let first = members.next()?;
        let other = core::iter::once(first).chain(members).find(|member| Some(*member) != present);
        Some(other.unwrap_or(first))
    }

    fn set_must_fail(&mut self, number: u16) {
        if let Some(stream) = self.streams.get_mut(&number) {
            stream.must_fail = true;
        }
    }

    fn id_of(&self, number: u16) -> Option<StreamId> {
        self.streams.get(&number).map(|stream| stream.id)
    }
}

/// The version of a state that has not changed.
const FIRST_VERSION: u64 = 1;

/// The part of the program that lets several threads use a [`Following`]. Each of its calls ends
/// soon.
pub trait FollowingShell: fmt::Debug + Send + Sync {
    /// Calls `act` once. No other thread has the state meanwhile.
    fn with(&self, act: &mut dyn FnMut(&mut Following));

    /// Wakes the thread that drives a stream, so that it polls the stream soon; also the background
    /// thread, which drives it if its owner is in no call and it
    /// [is needed](SharedFollowing::is_needed).
    fn wake(&self, stream: StreamId);
}

/// The one [`Following`] of an open volume.
#[derive(Debug)]
pub struct SharedFollowing {
    /// Counts the changes that other streams must notice. So a stream without followers pays for one
    /// load.
    version: AtomicU64,
    shell: Box<dyn FollowingShell>,
}

impl SharedFollowing {
    /// The state behind this shell.
    #[must_use]
    pub fn new(shell: Box<dyn FollowingShell>) -> Self {
        Self { version: AtomicU64::new(FIRST_VERSION), shell }
    }

    /// Uses the state.
    pub fn with<R>(&self, act: impl FnOnce(&mut Following) -> R) -> R {
        let (mut act, mut result) = (Some(act), None);
        self.shell.with(&mut |following| {
            if let Some(act) = act.take() {
                result = Some(act(following));
            }
        });
        result.expect("the shell calls it once")
    }

    /// Changes the state so that other streams must notice it, and wakes the streams that `act`
    /// returns.
    pub fn change(&self, act: impl FnOnce(&mut Following) -> Vec<StreamId>) {
        let woken = self.with(act);
        // A stream that reads the new version then reads the state that was changed before.
        self.version.fetch_add(1, Ordering::Release);
        woken.into_iter().for_each(|stream| self.shell.wake(stream));
    }

    /// The number of changes so far.
    #[inline]
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Whether a group may have a follower.
    #[inline]
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.version() != FIRST_VERSION
    }

    /// Whether another stream needs that a thread drives this one ([`Following::is_needed`]).
    #[must_use]
    pub fn is_needed(&self, stream: StreamId) -> bool {
        self.is_used() && self.with(|following| following.is_stream_needed(stream))
    }
}

/// A [`Following`] that one thread uses.
#[derive(Debug, Default)]
pub struct OwnFollowing(Following);

impl OwnFollowing {
    /// Uses the state.
    pub fn with<R>(&mut self, act: impl FnOnce(&mut Following) -> R) -> R {
        act(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);
    const C: StreamId = StreamId(2);

    /// Streams A, B and C, with the numbers 1 to 3.
    fn three() -> Following {
        let mut following = Following::default();
        for (id, number) in [(A, 1), (B, 2), (C, 3)] {
            following.start(id, number);
            following.open(number);
        }
        following
    }

    #[test]
    fn a_follower_waits_until_the_group_is_durable() {
        let mut following = three();
        assert_eq!(following.follower(1, B), Some(2));
        following.follow(1, Seq(5), 2, FollowWay::Waits);
        following.follow(3, Seq(7), 2, FollowWay::Waits);
        following.follow(1, Seq(6), 3, FollowWay::Dual);
        assert_eq!([1, 2, 3].map(|it| following.must_wait(it)), [false, true, false]);
        assert!(following.on_durable(1, Seq(4)).is_empty());
        assert!(following.on_durable(1, Seq(6)).is_empty(), "it waits for C, too");
        assert!(!following.is_followed(1) && following.is_followed(3));
        assert_eq!(following.on_durable(3, Seq(9)), [B]);
        assert!(!following.must_wait(2));
    }

    #[test]
    fn p8_a_stream_is_needed_while_another_one_waits_for_what_it_has_not_sent() {
        let needed = |following: &Following| [1, 2, 3].map(|number| following.is_needed(number));
        let mut following = three();
        following.set_unsent(1, false);
        assert_eq!(needed(&following), [false; 3], "no stream waits for another one");
        assert_eq!(following.follow(1, Seq(1), 2, FollowWay::Dual), [B], "it has not sent all");
        assert_eq!(needed(&following), [false, true, false], "A has sent all");
        assert!(following.is_stream_needed(B) && !following.is_stream_needed(A));
        following.set_unsent(1, true);
        following.set_unsent(2, false);
        assert_eq!(needed(&following), [true, false, false]);
        following.on_durable(1, Seq(1));
        assert_eq!(needed(&following), [false; 3]);

        // The stream of the group must read the answer.
        assert_eq!(following.follow(2, Seq(1), 1, FollowWay::Waits), vec![]);
        assert_eq!(needed(&following), [false, true, false]);
        following.on_durable(2, Seq(1));
        assert_eq!(needed(&following), [false; 3]);

        // It learns that it must fail.
        following.follow(1, Seq(2), 2, FollowWay::Dual);
        following.fail(1);
        assert_eq!(needed(&following), [false, true, false]);
        following.fail(2);
        assert_eq!(needed(&following), [false; 3], "nothing of it will be sent");
    }

    #[test]
    fn only_an_open_stream_follows() {
        let mut following = three();
        assert_eq!(following.follower(1, A), None, "itself");
        assert_eq!(following.follower(1, StreamId(9)), None);
        following.set_closing(2, true);
        assert_eq!(following.follower(1, B), None);
        following.set_closing(2, false);
        assert_eq!(following.follower(1, B), Some(2));
        following.fail(2);
        assert_eq!(following.follower(1, B), None);
        following.start(B, 4);
        assert_eq!(following.follower(1, B), None, "it is being started");
        following.open(4);
        assert_eq!(following.follower(1, B), Some(4), "it was opened again");
    }

    #[test]
    fn a_failure_reaches_the_streams_that_share_a_group() {
        let mut following = three();
        following.follow(1, Seq(1), 2, FollowWay::Dual);
        following.follow(3, Seq(1), 2, FollowWay::Waits);
        assert_eq!(following.fail(2), [A], "the group of C is durable some time");
        assert_eq!([1, 2, 3].map(|it| following.must_fail(it)), [true, false, false]);
        assert_eq!(following.fail(2), vec![], "once");

        let mut following = three();
        following.follow(1, Seq(1), 2, FollowWay::Dual);
        following.follow(1, Seq(2), 3, FollowWay::Waits);
        assert_eq!(following.end(1, false), [B, C]);
        assert_eq!([2, 3].map(|it| following.must_fail(it)), [true, true]);

        let mut following = three();
        following.follow(1, Seq(1), 2, FollowWay::Dual);
        following.on_durable(1, Seq(1));
        assert_eq!(following.fail(1), vec![], "the group is durable");
        following.follow(3, Seq(1), 1, FollowWay::Dual);
        assert!(following.must_fail(3), "its follower had failed before");
    }

    #[test]
    fn a_stream_that_was_closed_leaves_nothing_to_wait_for() {
        let mut following = three();
        following.follow(1, Seq(1), 2, FollowWay::Waits);
        following.follow(3, Seq(1), 2, FollowWay::Dual);
        assert_eq!(following.end(2, true), vec![]);
        assert!(!following.must_fail(3) && !following.is_followed(1));
    }
}
