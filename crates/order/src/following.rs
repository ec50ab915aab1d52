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
        self.streams.insert(number, Stream { id, state: State::Starting, must_fail: false });
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

    /// Notes that `follower` follows group `seq` of stream `number`.
    pub fn follow(&mut self, number: u16, seq: Seq, follower: u16, way: FollowWay) {
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

/// The part of the program that lets several threads use a [`Following`]. Each of its calls ends
/// soon.
pub trait FollowingShell: fmt::Debug + Send + Sync {
    /// Calls `act` once. No other thread has the state meanwhile.
    fn with(&self, act: &mut dyn FnMut(&mut Following));

    /// Wakes the thread that drives a stream, so that it polls the stream soon.
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
        Self { version: AtomicU64::new(1), shell }
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
