//! The background driver: drives the streams whose owners are not calling.
//!
//! A stream belongs to its owner, which drives it in its own calls. The background driver takes
//! over a stream that its owner has not called for
//! [`unreachable_ns`](BackgroundConfig::unreachable_ns). It takes in answers, sends waiting
//! requests, sends the released mark of an idle stream, flushes it (trap T1), and binds the stream
//! again on a target that comes back. The driver sleeps until a stream that it has taken over has
//! an event, or until the next owner may have stopped calling.
//!
//! A stream is *awaited* if another thread waits for its marks, or another stream for what it sends
//! ([`SharedFollowing::is_needed`](riopipe_order::following::SharedFollowing::is_needed)). The driver
//! takes over an awaited stream at once whenever its owner is in no call: the shell wakes the driver
//! when the first waiter comes, and when a call of the owner ends. No waiter waits for a timer.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_order::attribute::StreamId;
use riopipe_order::probe::{self, Plant};

use super::Attention;

/// The times of the background driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackgroundConfig {
    /// The time without a call after which an owner counts as not calling, ns.
    pub unreachable_ns: u64,
    /// The idle time after which a stream that has been taken over is flushed, ns. It is long, so
    /// that such flushes do not slow down an owner that writes from time to time.
    pub flush_ns: u64,
}

impl Default for BackgroundConfig {
    fn default() -> Self {
        Self { unreachable_ns: 50_000_000, flush_ns: 1_000_000_000 }
    }
}

/// The largest number of rounds for which the shell drives a stream at a time. The owner may call
/// meanwhile, and then waits for the ownership flag.
pub const ROUNDS_MAX: u32 = 4;

/// The result of a check of a stream: the next action of the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The owner drives the stream. The shell releases it.
    Owner,
    /// The owner is not calling, and there is no event. The shell releases the stream, and watches
    /// it for events.
    Watch,
    /// The owner is not calling. The shell drives the stream for at most [`ROUNDS_MAX`] rounds,
    /// then calls [`on_driven`](BackgroundDriver::on_driven), and watches the stream for events.
    Drive,
}

/// The background driver's record of a stream.
#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The number of the owner's calls at the last check.
    calls_seen: u64,
    /// When to check again, ns; `None`: at the next event.
    due: Option<u64>,
    /// Whether the stream has been taken over.
    taken_over: bool,
    /// Whether, at the last check, the owner was in a call and the stream was awaited. The end of
    /// that call wakes the driver.
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
        self.streams.insert(
            stream,
            Stream { calls_seen: 0, due: Some(0), taken_over: false, in_call: false },
        );
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

    /// Whether a stream has been taken over. The shell watches such a stream for events.
    #[must_use]
    pub fn has_taken_over(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_some_and(|stream| stream.taken_over)
    }

    /// The streams to check now, and for each whether it must be driven. A stream must be driven if
    /// it is due, if it has an event, if its owner was in a call, or if it is awaited and was not
    /// taken over. For the other streams, the driver only checks whether the owner calls again.
    pub fn due(
        &self,
        now: u64,
        has_event: impl Fn(StreamId) -> bool,
        is_awaited: impl Fn(StreamId) -> bool,
    ) -> Vec<(StreamId, bool)> {
        let mut checks = Vec::new();
        for (id, stream) in &self.streams {
            let must_drive = has_event(*id)
                || stream.in_call
                || stream.due.is_some_and(|due| due <= now)
                || !stream.taken_over && is_awaited(*id);
            if must_drive || stream.taken_over {
                checks.push((*id, must_drive));
            }
        }
        checks
    }

    /// Handles a stream that could not be checked, because its owner is in a call. If the stream is
    /// `awaited`, the end of the call wakes the driver, and the stream is then [due](Self::due).
    /// Otherwise the stream is checked again after a while. So an owner that makes many calls does
    /// not wake the driver at the end of each call.
    pub fn on_owner_in_call(&mut self, stream: StreamId, awaited: bool, now: u64) {
        let due = now.saturating_add(self.config.unreachable_ns);
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.due = (!awaited).then_some(due);
            stream.taken_over = false;
            stream.in_call = awaited;
        }
    }

    /// Checks a stream that the shell has taken, and decides whether the shell drives it now, only
    /// watches it, or leaves it to its owner. The stream is left to an owner that has called since
    /// the last check, unless another thread waits for the marks (`is_awaited`). `must_drive` is
    /// from [`due`](Self::due).
    pub fn check(
        &mut self,
        stream: StreamId,
        must_drive: bool,
        is_awaited: bool,
        attention: &mut Attention,
        now: u64,
    ) -> Finding {
        let unreachable_ns = self.config.unreachable_ns;
        let is_awaited = is_awaited && !probe::is_bug_planted(Plant::P8AwaitedLeft);
        let Some(stream) = self.streams.get_mut(&stream) else { return Finding::Owner };
        stream.in_call = false;
        let mut must_drive = must_drive;
        if let Some(calls) = attention.check(stream.calls_seen) {
            stream.calls_seen = calls;
            if !is_awaited {
                stream.due = Some(now.saturating_add(unreachable_ns));
                stream.taken_over = false;
                return Finding::Owner;
            }
            must_drive = true;
        }
        if probe::is_bug_planted(Plant::P8OwnerNotCalling) {
            stream.due = Some(now.saturating_add(unreachable_ns));
            return Finding::Owner;
        }
        attention.take_over();
        stream.taken_over = true;
        if must_drive { Finding::Drive } else { Finding::Watch }
    }

    /// Records that a stream has been driven. `next` is the result of
    /// [`finish_background_rounds`](super::StreamDriver::finish_background_rounds).
    pub fn on_driven(&mut self, stream: StreamId, next: Option<u64>) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.due = next;
        }
    }

    /// Handles a stream that the shell cannot watch: the driver checks it at intervals.
    pub fn on_unwatchable(&mut self, stream: StreamId, now: u64) {
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
        background.on_driven(ID, Some(900));
        assert_eq!(background.deadline(), Some(900));
        background.on_driven(ID, None);
        assert_eq!(background.deadline(), None, "until there is an event");
    }

    #[test]
    fn an_owner_that_calls_again_gets_its_stream_and_is_checked_again() {
        let mut background = driver();
        let mut owner = Attention::default();
        assert_eq!(background.check(ID, true, false, &mut owner, 0), Finding::Drive);
        background.on_driven(ID, Some(5 * UNREACHABLE_NS));
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
        background.on_owner_in_call(ID, false, 1);
        assert!(!background.has_taken_over(ID));
        assert_eq!(
            background.deadline(),
            Some(1 + UNREACHABLE_NS),
            "the ends of its calls do not wake the driver"
        );
        assert_eq!(background.due(9, nothing, nothing), []);
        background.on_owner_in_call(ID, true, 2);
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
        background.on_driven(ID, None);
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
        background.on_driven(ID, None);
        background.on_unwatchable(ID, 4);
        assert_eq!(background.deadline(), Some(4 + UNREACHABLE_NS));
        background.remove(ID);
        assert_eq!(background.deadline(), None);
        assert_eq!(background.check(ID, true, false, &mut owner, 0), Finding::Owner, "it is gone");
    }
}
