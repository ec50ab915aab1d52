//! The background driver drives the streams that their owners do not call.
//!
//! A stream belongs to its owner, which drives it in its own calls. The background driver takes
//! over a stream that its owner has not called for
//! [`unreachable_ns`](BackgroundConfig::unreachable_ns). It takes in answers, sends waiting
//! requests, sends the released mark of an idle stream, flushes it (T1), and binds the stream again
//! on a target that comes back. The driver sleeps until a stream that it has taken over has an
//! event, or until the next owner may have stopped calling.
//!
//! A stream is *awaited* if another thread waits for its marks. The driver takes over an awaited
//! stream at once whenever its owner is in no call: the shell wakes the driver when the first
//! waiter comes, and when a call of the owner ends. No waiter waits for a timer.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_order::attribute::StreamId;
use riopipe_order::probe::{self, Plant};

use super::Attention;

/// The times of the background driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackgroundConfig {
    /// An owner that has not called for this time counts as not calling, ns.
    pub unreachable_ns: u64,
    /// A stream that has been taken over is flushed when it has been idle for this time, ns. So an
    /// owner that writes now and then is not slowed down by flushes that it did not request.
    pub flush_ns: u64,
}

impl Default for BackgroundConfig {
    fn default() -> Self {
        Self { unreachable_ns: 50_000_000, flush_ns: 1_000_000_000 }
    }
}

/// The shell drives a stream for this number of rounds at a time: its owner may call again and wait
/// for the ownership flag.
pub const ROUNDS_MAX: u32 = 4;

/// The result of a check of a stream: the next action of the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Its owner drives it: release it.
    Owner,
    /// Its owner is not calling, and it has no event: release it, and watch it for events.
    Watch,
    /// Its owner is not calling: drive it for at most [`ROUNDS_MAX`] rounds, then call
    /// [`driven`](BackgroundDriver::driven), and watch it for events.
    Drive,
}

/// The background driver's record of a stream.
#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The number of the owner's calls at the last check.
    seen: u64,
    /// When to check again, ns; `None`: at the next event.
    due: Option<u64>,
    /// Whether the stream has been taken over.
    taken_over: bool,
    /// Its owner was in a call at the last check, and the stream was awaited: the end of that call
    /// wakes the driver.
    in_call: bool,
}

/// The background driver of a volume, with its records of the open streams. Times are nanoseconds
/// of one monotonic clock.
#[derive(Debug)]
pub struct BackgroundDriver {
    config: BackgroundConfig,
    streams: BTreeMap<StreamId, Stream>,
}

impl BackgroundDriver {
    /// A driver without streams.
    #[must_use]
    pub const fn new(config: BackgroundConfig) -> Self {
        Self { config, streams: BTreeMap::new() }
    }

    /// The times of the driver.
    #[must_use]
    pub const fn config(&self) -> &BackgroundConfig {
        &self.config
    }

    /// Adds a stream that is open from now on. It replaces an earlier stream with the same id.
    pub fn add(&mut self, stream: StreamId) {
        self.streams
            .insert(stream, Stream { seen: 0, due: Some(0), taken_over: false, in_call: false });
    }

    /// Removes a stream.
    pub fn remove(&mut self, stream: StreamId) {
        self.streams.remove(&stream);
    }

    /// When to call [`due`](Self::due) next, even if there is no event, ns.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.streams.values().filter_map(|stream| stream.due).min()
    }

    /// Whether a stream has been taken over: then the shell watches it for events.
    #[must_use]
    pub fn has_taken_over(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_some_and(|stream| stream.taken_over)
    }

    /// The streams to check now, and for each whether it is its turn. It is a stream's turn if it
    /// is due, if an event has `happened` to it, if its owner was in a call, or if it is `awaited`
    /// and was not taken over. For the others, the driver only checks whether the owner calls
    /// again.
    pub fn due(
        &self,
        now: u64,
        happened: impl Fn(StreamId) -> bool,
        awaited: impl Fn(StreamId) -> bool,
    ) -> Vec<(StreamId, bool)> {
        let mut checks = Vec::new();
        for (id, stream) in &self.streams {
            let is_its_turn = happened(*id)
                || stream.in_call
                || stream.due.is_some_and(|due| due <= now)
                || !stream.taken_over && awaited(*id);
            if is_its_turn || stream.taken_over {
                checks.push((*id, is_its_turn));
            }
        }
        checks
    }

    /// A stream could not be taken: its owner is in a call. If it is `awaited`, the shell has left
    /// a request, so that the end of the call makes it the stream's [turn](Self::due). Otherwise
    /// the stream is checked again later: an owner that makes one call after the other does not
    /// wake the driver at the end of each call.
    pub fn in_call(&mut self, stream: StreamId, awaited: bool, now: u64) {
        let due = now.saturating_add(self.config.unreachable_ns);
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.due = (!awaited).then_some(due);
            stream.taken_over = false;
            stream.in_call = awaited;
        }
    }

    /// Checks a stream that the shell has taken, and decides whether the shell drives it now, only
    /// watches it, or leaves it to its owner. The stream is left to an owner that has called since
    /// the last check, unless another thread waits for the marks (`is_awaited`). `is_its_turn` is
    /// from [`due`](Self::due).
    pub fn check(
        &mut self,
        stream: StreamId,
        is_its_turn: bool,
        is_awaited: bool,
        attention: &mut Attention,
        now: u64,
    ) -> Finding {
        let unreachable_ns = self.config.unreachable_ns;
        let is_awaited = is_awaited && !probe::planted(Plant::P8AwaitedLeft);
        let Some(stream) = self.streams.get_mut(&stream) else { return Finding::Owner };
        stream.in_call = false;
        let mut must_drive = is_its_turn;
        if let Some(calls) = attention.check(stream.seen) {
            stream.seen = calls;
            if !is_awaited {
                stream.due = Some(now.saturating_add(unreachable_ns));
                stream.taken_over = false;
                return Finding::Owner;
            }
            must_drive = true;
        }
        if probe::planted(Plant::P8OwnerNotCalling) {
            stream.due = Some(now.saturating_add(unreachable_ns));
            return Finding::Owner;
        }
        attention.take_over();
        stream.taken_over = true;
        if must_drive { Finding::Drive } else { Finding::Watch }
    }

    /// A stream has been driven; `next` is the result of
    /// [`take_care`](super::StreamDriver::take_care).
    pub fn driven(&mut self, stream: StreamId, next: Option<u64>) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.due = next;
        }
    }

    /// The shell cannot watch a stream: the driver checks it at intervals instead.
    pub fn unwatched(&mut self, stream: StreamId, now: u64) {
        let due = now.saturating_add(self.config.unreachable_ns);
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.due = Some(due);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    const UNREACHABLE_NS: u64 = 50_000_000;
    const ID: StreamId = StreamId(3);

    fn driver() -> BackgroundDriver {
        let mut driver = BackgroundDriver::new(BackgroundConfig::default());
        driver.add(ID);
        driver
    }

    fn nothing(_: StreamId) -> bool {
        false
    }

    #[test]
    fn a_stream_is_taken_over_when_its_owner_has_not_called_for_a_while() {
        let mut background = driver();
        let mut owner = Attention::default();
        owner.called();
        assert_eq!(background.due(7, nothing, nothing), [(ID, true)], "a new stream is checked");
        assert_eq!(background.check(ID, true, false, &mut owner, 7), Finding::Owner);
        assert_eq!(background.deadline(), Some(7 + UNREACHABLE_NS));
        assert_eq!(background.due(6 + UNREACHABLE_NS, nothing, nothing), []);
        owner.called();
        assert_eq!(
            background.check(ID, true, false, &mut owner, 7 + UNREACHABLE_NS),
            Finding::Owner
        );
        assert!(!background.has_taken_over(ID));
        assert_eq!(
            background.check(ID, true, false, &mut owner, 7 + 2 * UNREACHABLE_NS),
            Finding::Drive
        );
        assert!(background.has_taken_over(ID));
        background.driven(ID, Some(900));
        assert_eq!(background.deadline(), Some(900));
        background.driven(ID, None);
        assert_eq!(background.deadline(), None, "until there is an event");
    }

    #[test]
    fn an_owner_that_calls_again_gets_its_stream_and_is_checked_again() {
        let mut background = driver();
        let mut owner = Attention::default();
        assert_eq!(background.check(ID, true, false, &mut owner, 0), Finding::Drive);
        background.driven(ID, Some(5 * UNREACHABLE_NS));
        assert_eq!(
            background.due(1, nothing, nothing),
            [(ID, false)],
            "does the owner call again?"
        );
        assert_eq!(background.check(ID, false, false, &mut owner, 1), Finding::Watch);
        assert_eq!(background.deadline(), Some(5 * UNREACHABLE_NS), "nothing has changed");
        assert!(owner.called(), "the background driver is to be woken");
        assert_eq!(background.check(ID, false, false, &mut owner, 2), Finding::Owner);
        assert_eq!(background.deadline(), Some(2 + UNREACHABLE_NS));
        assert_eq!(background.due(3, nothing, nothing), vec![], "its owner drives it");
        assert_eq!(background.due(3, |id| id == ID, nothing), [(ID, true)]);
    }

    #[test]
    fn an_owner_in_a_long_call_is_not_disturbed() {
        let mut background = driver();
        let mut owner = Attention::default();
        assert_eq!(background.check(ID, true, false, &mut owner, 0), Finding::Drive);
        background.in_call(ID, false, 1);
        assert!(!background.has_taken_over(ID));
        assert_eq!(
            background.deadline(),
            Some(1 + UNREACHABLE_NS),
            "the ends of its calls do not wake the driver"
        );
        assert_eq!(background.due(9, nothing, nothing), []);
        background.in_call(ID, true, 2);
        assert!(!background.has_taken_over(ID));
        assert_eq!(background.deadline(), None, "the end of the call wakes the driver");
        assert_eq!(background.due(9, nothing, nothing), [(ID, true)]);
        owner.called();
        assert_eq!(background.check(ID, true, false, &mut owner, 9), Finding::Owner);
        assert_eq!(background.deadline(), Some(9 + UNREACHABLE_NS));
        assert_eq!(background.due(9, nothing, nothing), []);
    }

    #[test]
    fn p8_a_stream_that_is_awaited_is_taken_over_at_once() {
        let mut background = driver();
        let mut owner = Attention::default();
        owner.called();
        assert_eq!(background.check(ID, true, false, &mut owner, 0), Finding::Owner);
        owner.called();
        let awaited = |id| id == ID;
        assert_eq!(background.due(1, nothing, awaited), [(ID, true)]);
        assert_eq!(background.check(ID, true, true, &mut owner, 1), Finding::Drive);
        background.driven(ID, None);
        assert_eq!(background.due(2, nothing, awaited), [(ID, false)], "it is taken over");
        assert_eq!(background.check(ID, false, true, &mut owner, 2), Finding::Watch);
        assert!(owner.called(), "the end of the call wakes the driver");
        assert_eq!(background.check(ID, false, true, &mut owner, 3), Finding::Drive);
        assert!(owner.called());
        assert_eq!(
            background.check(ID, false, false, &mut owner, 4),
            Finding::Owner,
            "not any more"
        );
        assert_eq!(background.deadline(), Some(4 + UNREACHABLE_NS));
    }

    #[test]
    fn a_stream_that_cannot_be_watched_is_checked_at_intervals() {
        let mut background = driver();
        let mut owner = Attention::default();
        assert_eq!(background.check(ID, true, false, &mut owner, 0), Finding::Drive);
        background.driven(ID, None);
        background.unwatched(ID, 4);
        assert_eq!(background.deadline(), Some(4 + UNREACHABLE_NS));
        background.remove(ID);
        assert_eq!(background.deadline(), None);
        assert_eq!(background.check(ID, true, false, &mut owner, 0), Finding::Owner, "it is gone");
    }
}
