//! Which streams the background driver looks after: those whose owners are elsewhere.
//!
//! A stream belongs to its owner, which drives it in its own calls. A stream that its owner has not
//! called for [`unreachable_ns`](BackgroundConfig::unreachable_ns) is taken over: answers are taken in, requests
//! that wait are sent, an idle stream tells its released mark and is flushed (T1), a target that
//! comes back is bound again. The driver sleeps until something happens to a stream that it looks after,
//! or until the next owner may have gone away.
//!
//! A stream that somebody *awaits*, in another thread, is taken over at once whenever its owner is
//! in no call: the shell says so when the first waiter comes, and when a call of the owner ends. No
//! waiter waits for a timer.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_order::attribute::StreamId;
use riopipe_order::probe::{self, Plant};

use super::Attention;

/// The times of the background driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackgroundConfig {
    /// An owner that has not called for so long is taken to be elsewhere, ns.
    pub unreachable_ns: u64,
    /// A stream that its owner has left is flushed when it has been idle for so long, ns. An owner
    /// that writes now and then is not slowed down by flushes that it never asked for.
    pub flush_ns: u64,
}

impl Default for BackgroundConfig {
    fn default() -> Self {
        Self { unreachable_ns: 50_000_000, flush_ns: 1_000_000_000 }
    }
}

/// The shell drives a stream for so many rounds at a time: its owner may come back and wait for the
/// ownership flag.
pub const ROUNDS_MAX: u32 = 4;

/// What to do with a stream that has been taken for a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Its owner looks after it: give it back.
    Owner,
    /// Its owner is elsewhere, and nothing has happened to it: give it back, and watch for what
    /// happens to it.
    Watch,
    /// Its owner is elsewhere: drive it for at most [`ROUNDS_MAX`] rounds, then say
    /// [`tended`](BackgroundDriver::tended); watch for what happens to it.
    Drive,
}

/// A stream, as the background driver knows it.
#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The owner's calls at the last look.
    seen: u64,
    /// When to look again, ns; `None`: when something happens.
    due: Option<u64>,
    /// Whether the stream has been taken over.
    taken_over: bool,
    /// Its owner was in a call at the last look, and the stream was awaited: the end of that call
    /// wakes the driver.
    in_call: bool,
}

/// The open streams of a volume, as its background driver sees them. Times are nanoseconds of one
/// monotonic clock.
#[derive(Debug)]
pub struct BackgroundDriver {
    config: BackgroundConfig,
    streams: BTreeMap<StreamId, Stream>,
}

impl BackgroundDriver {
    /// No stream is open.
    #[must_use]
    pub const fn new(config: BackgroundConfig) -> Self {
        Self { config, streams: BTreeMap::new() }
    }

    /// The times.
    #[must_use]
    pub const fn config(&self) -> &BackgroundConfig {
        &self.config
    }

    /// A stream is open from now on, or is another one than the one that had its id.
    pub fn add(&mut self, stream: StreamId) {
        self.streams
            .insert(stream, Stream { seen: 0, due: Some(0), taken_over: false, in_call: false });
    }

    /// A stream is gone.
    pub fn remove(&mut self, stream: StreamId) {
        self.streams.remove(&stream);
    }

    /// When to call [`due`](Self::due) next though nothing may have happened.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.streams.values().filter_map(|stream| stream.due).min()
    }

    /// Whether a stream has been taken over: then the shell watches for what happens to it.
    #[must_use]
    pub fn minds(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_some_and(|stream| stream.taken_over)
    }

    /// The streams to look at now, and whether it is their turn: one is due, something has
    /// `happened` to it, its owner was in a call, or it is `awaited` and was not taken over. With
    /// the others it is enough to see whether the owner is back.
    pub fn due(
        &self,
        now: u64,
        happened: impl Fn(StreamId) -> bool,
        awaited: impl Fn(StreamId) -> bool,
    ) -> Vec<(StreamId, bool)> {
        let mut looks = Vec::new();
        for (id, stream) in &self.streams {
            let turn = happened(*id)
                || stream.in_call
                || stream.due.is_some_and(|due| due <= now)
                || !stream.taken_over && awaited(*id);
            if turn || stream.taken_over {
                looks.push((*id, turn));
            }
        }
        looks
    }

    /// A stream could not be taken: its owner is in a call. If it is `awaited`, the shell has left a
    /// request, so that the end of the call makes it the stream's [turn](Self::due). Otherwise the
    /// stream is checked again later: an owner that makes one call after the other does not wake
    /// the driver at the end of each.
    pub fn in_call(&mut self, stream: StreamId, awaited: bool, now: u64) {
        let due = now.saturating_add(self.config.unreachable_ns);
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.due = (!awaited).then_some(due);
            stream.taken_over = false;
            stream.in_call = awaited;
        }
    }

    /// A stream has been taken; `turn` is what [`due`](Self::due) said of it, and `awaited` says
    /// whether somebody waits for its marks.
    pub fn look(
        &mut self,
        stream: StreamId,
        turn: bool,
        awaited: bool,
        attention: &mut Attention,
        now: u64,
    ) -> Finding {
        let unreachable_ns = self.config.unreachable_ns;
        let awaited = awaited && !probe::planted(Plant::P8AwaitedLeft);
        let Some(stream) = self.streams.get_mut(&stream) else { return Finding::Owner };
        stream.in_call = false;
        let mut turn = turn;
        if let Some(calls) = attention.look(stream.seen) {
            stream.seen = calls;
            if !awaited {
                stream.due = Some(now.saturating_add(unreachable_ns));
                stream.taken_over = false;
                return Finding::Owner;
            }
            turn = true;
        }
        if probe::planted(Plant::P8OwnerNotCalling) {
            stream.due = Some(now.saturating_add(unreachable_ns));
            return Finding::Owner;
        }
        attention.mind();
        stream.taken_over = true;
        if turn { Finding::Drive } else { Finding::Watch }
    }

    /// A stream has been driven; `next` is what
    /// [`take_care`](super::StreamDriver::take_care) returned.
    pub fn tended(&mut self, stream: StreamId, next: Option<u64>) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.due = next;
        }
    }

    /// The shell cannot watch a stream: it is looked at now and then instead.
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

    const AWAY: u64 = 50_000_000;
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
        assert_eq!(background.due(7, nothing, nothing), [(ID, true)], "a new stream is looked at");
        assert_eq!(background.look(ID, true, false, &mut owner, 7), Finding::Owner);
        assert_eq!(background.deadline(), Some(7 + AWAY));
        assert_eq!(background.due(6 + AWAY, nothing, nothing), []);
        owner.called();
        assert_eq!(background.look(ID, true, false, &mut owner, 7 + AWAY), Finding::Owner);
        assert!(!background.minds(ID));
        assert_eq!(background.look(ID, true, false, &mut owner, 7 + 2 * AWAY), Finding::Drive);
        assert!(background.minds(ID));
        background.tended(ID, Some(900));
        assert_eq!(background.deadline(), Some(900));
        background.tended(ID, None);
        assert_eq!(background.deadline(), None, "until something happens");
    }

    #[test]
    fn an_owner_that_is_back_gets_its_stream_and_is_watched_again() {
        let mut background = driver();
        let mut owner = Attention::default();
        assert_eq!(background.look(ID, true, false, &mut owner, 0), Finding::Drive);
        background.tended(ID, Some(5 * AWAY));
        assert_eq!(background.due(1, nothing, nothing), [(ID, false)], "is the owner back?");
        assert_eq!(background.look(ID, false, false, &mut owner, 1), Finding::Watch);
        assert_eq!(background.deadline(), Some(5 * AWAY), "nothing has changed");
        assert!(owner.called(), "the background driver is to be woken");
        assert_eq!(background.look(ID, false, false, &mut owner, 2), Finding::Owner);
        assert_eq!(background.deadline(), Some(2 + AWAY));
        assert_eq!(background.due(3, nothing, nothing), vec![], "its owner has it");
        assert_eq!(background.due(3, |id| id == ID, nothing), [(ID, true)]);
    }

    #[test]
    fn an_owner_in_a_long_call_is_not_disturbed() {
        let mut background = driver();
        let mut owner = Attention::default();
        assert_eq!(background.look(ID, true, false, &mut owner, 0), Finding::Drive);
        background.in_call(ID, false, 1);
        assert!(!background.minds(ID));
        assert_eq!(background.deadline(), Some(1 + AWAY), "the ends of its calls wake nobody");
        assert_eq!(background.due(9, nothing, nothing), []);
        background.in_call(ID, true, 2);
        assert!(!background.minds(ID));
        assert_eq!(background.deadline(), None, "the end of the call wakes the driver");
        assert_eq!(background.due(9, nothing, nothing), [(ID, true)]);
        owner.called();
        assert_eq!(background.look(ID, true, false, &mut owner, 9), Finding::Owner);
        assert_eq!(background.deadline(), Some(9 + AWAY));
        assert_eq!(background.due(9, nothing, nothing), []);
    }

    #[test]
    fn p8_a_stream_that_is_awaited_is_taken_over_at_once() {
        let mut background = driver();
        let mut owner = Attention::default();
        owner.called();
        assert_eq!(background.look(ID, true, false, &mut owner, 0), Finding::Owner);
        owner.called();
        let awaited = |id| id == ID;
        assert_eq!(background.due(1, nothing, awaited), [(ID, true)]);
        assert_eq!(background.look(ID, true, true, &mut owner, 1), Finding::Drive);
        background.tended(ID, None);
        assert_eq!(background.due(2, nothing, awaited), [(ID, false)], "it is looked after");
        assert_eq!(background.look(ID, false, true, &mut owner, 2), Finding::Watch);
        assert!(owner.called(), "the end of the call wakes the driver");
        assert_eq!(background.look(ID, false, true, &mut owner, 3), Finding::Drive);
        assert!(owner.called());
        assert_eq!(
            background.look(ID, false, false, &mut owner, 4),
            Finding::Owner,
            "not any more"
        );
        assert_eq!(background.deadline(), Some(4 + AWAY));
    }

    #[test]
    fn a_stream_that_cannot_be_watched_is_looked_at_now_and_then() {
        let mut background = driver();
        let mut owner = Attention::default();
        assert_eq!(background.look(ID, true, false, &mut owner, 0), Finding::Drive);
        background.tended(ID, None);
        background.unwatched(ID, 4);
        assert_eq!(background.deadline(), Some(4 + AWAY));
        background.remove(ID);
        assert_eq!(background.deadline(), None);
        assert_eq!(background.look(ID, true, false, &mut owner, 0), Finding::Owner, "it is gone");
    }
}
