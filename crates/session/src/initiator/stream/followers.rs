//! A stream's part in the [following](riopipe_order::following) of its volume: the groups of other
//! streams that it follows, and those of its own that others follow.

use alloc::sync::Arc;

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::following::{FollowWay, SharedFollowing};
use riopipe_order::probe::{self, Rare};

/// One opening of a stream, among the streams of its volume. When it is dropped, the stream is over.
#[derive(Debug)]
pub(super) struct Followers {
    shared: Arc<SharedFollowing>,
    /// The number of the stream in commands.
    number: u16,
    /// The version of the shared state from which the next three are.
    version: u64,
    /// Whether no group may be admitted, since the stream follows one that is not durable.
    must_wait: bool,
    must_fail: bool,
    /// Whether groups of the stream have followers and are not known to be durable.
    is_followed: bool,
    /// Whether a group was refused because the stream must wait, and none was admitted since.
    has_refused: bool,
    /// Whether a request with a number, or data of a command, had not left at the end of the last call.
    has_unsent: bool,
    /// The version of the shared state from which the next one is.
    needed_version: u64,
    /// Whether another stream needs that a thread drives this one.
    is_needed: bool,
    was_closed: bool,
}

impl Followers {
    pub(super) fn new(shared: &Arc<SharedFollowing>, id: StreamId, number: u16) -> Self {
        shared.with(|following| following.start(id, number));
        Self {
            shared: Arc::clone(shared),
            number,
            version: 0,
            must_wait: false,
            must_fail: false,
            is_followed: false,
            has_refused: false,
            has_unsent: true,
            needed_version: 0,
            is_needed: false,
            was_closed: false,
        }
    }

    /// Notes that the stream is open.
    pub(super) fn open(&self) {
        self.shared.with(|following| following.open(self.number));
    }

    /// Reads the shared state if it has changed.
    #[inline]
    fn refresh(&mut self) {
        let version = self.shared.version();
        if version != self.version {
            self.version = version;
            let number = self.number;
            (self.must_wait, self.must_fail) = self
                .shared
                .with(|following| (following.must_wait(number), following.must_fail(number)));
        }
    }

    /// Whether a group must be refused now, because the stream follows one that is not durable.
    #[inline]
    pub(super) fn refuses_group(&mut self) -> bool {
        self.refresh();
        self.has_refused = self.must_wait;
        if self.must_wait {
            probe::count_rare(Rare::FollowWaited);
        }
        self.must_wait
    }

    /// Whether the last group was refused because the stream must wait, and it must still wait.
    pub(super) fn still_refuses(&self) -> bool {
        let number = self.number;
        self.has_refused && self.shared.with(|following| following.must_wait(number))
    }

    /// The number of an open stream that can follow a group of this one.
    pub(super) fn follower(&self, id: StreamId) -> Option<u16> {
        self.shared.with(|following| following.follower(self.number, id))
    }

    /// Notes that `follower` follows group `seq`.
    pub(super) fn follow(&mut self, seq: Seq, follower: u16, way: FollowWay) {
        self.is_followed = true;
        self.shared.change(|following| following.follow(self.number, seq, follower, way));
    }

    /// Notes at the end of a call whether a request with a number, or data of a command, has not
    /// left. Returns whether another stream needs that a thread drives this one.
    #[inline]
    pub(super) fn end_call(&mut self, has_unsent: impl FnOnce() -> bool) -> bool {
        if !self.shared.is_used() {
            return false;
        }
        let (version, has_unsent) = (self.shared.version(), has_unsent());
        if has_unsent != self.has_unsent || version != self.needed_version {
            (self.has_unsent, self.needed_version) = (has_unsent, version);
            let number = self.number;
            self.is_needed = self.shared.with(|following| {
                following.set_unsent(number, has_unsent);
                following.is_needed(number)
            });
        }
        self.is_needed
    }

    /// Notes that the groups up to `seq` are durable.
    #[inline]
    pub(super) fn on_durable(&mut self, seq: Seq) {
        if self.is_followed {
            self.shared.change(|following| following.on_durable(self.number, seq));
            self.is_followed = self.shared.with(|following| following.is_followed(self.number));
        }
    }

    /// Whether the stream must fail, because one has failed with which it shares a group.
    #[inline]
    pub(super) fn must_fail(&mut self) -> bool {
        self.refresh();
        self.must_fail
    }

    /// Notes that the stream has failed.
    pub(super) fn fail(&self) {
        self.shared.change(|following| following.fail(self.number));
    }

    /// Notes whether the owner closes the stream.
    pub(super) fn set_closing(&self, is_closing: bool) {
        self.shared.with(|following| following.set_closing(self.number, is_closing));
    }

    /// Notes that the stream was closed: all that it has written and follows is durable.
    pub(super) fn set_closed(&mut self) {
        self.was_closed = true;
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        self.shared.change(|following| following.end(self.number, self.was_closed));
    }
}
