//! One thread for each volume that looks after the streams whose owners are elsewhere: it takes in
//! what arrives, sends what waits, tells the released mark alone when a stream is idle (T1),
//! flushes in the background when nobody does, binds streams again to targets that came back, and
//! notices failures.
//!
//! It touches a stream only when its owner has not called for a while, and only if it gets the
//! stream's ownership flag at once. It sleeps until something happens to a stream that it minds,
//! or until the next owner may have gone away; with nothing open there is no thread at all.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use riopipe_net::{Event, Interest, Owned, Poller, PollerError, Waker, now_ns};
use riopipe_order::attribute::StreamId;

use crate::lanes::{Lanes, Side};
use crate::shared::lock;
use crate::watched::Watched;

/// An owner that has not called for so long is taken to be elsewhere.
const AWAY_NS: u64 = 50_000_000;
/// So many turns of one stream at a time: its owner may come back and wait for the flag.
const TURNS_MAX: u32 = 4;

/// A stream, as the housekeeper and the keepers know it.
#[derive(Clone, Debug)]
pub(crate) struct Charge {
    pub(crate) lanes: Arc<Owned<Lanes>>,
    pub(crate) side: Arc<Side>,
}

/// The open streams of a volume, and the thread that looks after them while there are any.
#[derive(Debug)]
pub(crate) struct Housekeeper {
    volume: String,
    poller: Poller,
    waker: Waker,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    streams: BTreeMap<StreamId, Charge>,
    /// Counts changes of `streams`.
    version: u64,
    running: bool,
}

impl Housekeeper {
    pub(crate) fn new(volume: &str) -> Result<Arc<Self>, PollerError> {
        let poller = Poller::new()?;
        let waker = poller.waker();
        Ok(Arc::new(Self { volume: volume.into(), poller, waker, state: Mutex::default() }))
    }

    /// A stream is open from now on.
    pub(crate) fn add(self: &Arc<Self>, stream: StreamId, charge: Charge) {
        let mut state = lock(&self.state);
        state.streams.insert(stream, charge);
        state.version += 1;
        if state.running {
            self.waker.wake();
            return;
        }
        let housekeeper = Arc::clone(self);
        let builder = std::thread::Builder::new().name("riopipe-house".into());
        match builder.spawn(move || housekeeper.run()) {
            Ok(_) => state.running = true,
            Err(error) => {
                tracing::error!(
                    volume = %self.volume, %error,
                    "no thread to look after idle streams: poll them"
                );
            }
        }
    }

    /// A stream is gone.
    pub(crate) fn remove(&self, stream: StreamId) {
        let mut state = lock(&self.state);
        state.streams.remove(&stream);
        state.version += 1;
        self.waker.wake();
    }

    /// All open streams.
    pub(crate) fn streams(&self) -> Vec<Charge> {
        lock(&self.state).streams.values().cloned().collect()
    }

    /// What is published of all open streams. Their lanes are not touched: whoever asks can't be
    /// the last to have them.
    pub(crate) fn watched(&self) -> Vec<(StreamId, Arc<Watched>)> {
        let state = lock(&self.state);
        let watched = |(id, charge): (&StreamId, &Charge)| (*id, Arc::clone(&charge.side.watched));
        state.streams.iter().map(watched).collect()
    }

    /// A stream that is minded has work again, or its owner is back.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    fn run(&self) {
        let mut rounds = Rounds { housekeeper: self, version: 0, minds: BTreeMap::new() };
        let mut events = Vec::new();
        while rounds.refresh() {
            let next = rounds.go(now_ns(), &events);
            let sleep = next.map(|at| Duration::from_nanos(at.saturating_sub(now_ns())));
            if let Err(error) = self.poller.wait(&mut events, sleep) {
                tracing::error!(%error, "the housekeeper cannot wait for events");
                std::thread::sleep(Duration::from_nanos(AWAY_NS));
            }
        }
    }
}

/// What the thread knows of a stream.
struct Mind {
    charge: Charge,
    /// The owner's calls at the last look.
    seen: u64,
    /// When to look again, ns; `None`: when something happens.
    again: Option<u64>,
    /// Whether the thread's poller watches the stream's.
    watched: bool,
}

struct Rounds<'a> {
    housekeeper: &'a Housekeeper,
    version: u64,
    minds: BTreeMap<StreamId, Mind>,
}

impl Rounds<'_> {
    /// Takes note of streams that came and went; false when none is left: the thread ends.
    fn refresh(&mut self) -> bool {
        let mut state = lock(&self.housekeeper.state);
        if state.streams.is_empty() {
            // Whoever opens the next one starts a new thread, under this lock.
            state.running = false;
            return false;
        }
        if state.version == self.version {
            return true;
        }
        self.version = state.version;
        let is_same = |mind: &Mind, charge: Option<&Charge>| {
            charge.is_some_and(|charge| Arc::ptr_eq(&mind.charge.lanes, &charge.lanes))
        };
        // A poller that is closed is no longer watched.
        self.minds.retain(|id, mind| is_same(mind, state.streams.get(id)));
        for (id, charge) in &state.streams {
            self.minds.entry(*id).or_insert_with(|| Mind {
                charge: charge.clone(),
                seen: 0,
                again: Some(0),
                watched: false,
            });
        }
        true
    }

    /// Looks after the streams to which something has happened or that are due, and whether the
    /// owners of the others are back; returns when the next one is due.
    fn go(&mut self, now: u64, events: &[Event]) -> Option<u64> {
        for (id, mind) in &mut self.minds {
            let told = events.iter().any(|event| event.token == u64::from(id.0));
            let due = mind.again.is_some_and(|again| again <= now);
            if told || due || mind.watched {
                mind.look(*id, told || due, now, &self.housekeeper.poller);
            }
        }
        self.minds.values().filter_map(|mind| mind.again).min()
    }
}

impl Mind {
    /// Sees whether the owner is elsewhere; then, if it is the stream's turn, tends it.
    fn look(&mut self, id: StreamId, its_turn: bool, now: u64, poller: &Poller) {
        let Charge { lanes, side } = &self.charge;
        let away = match lanes.try_take() {
            // The owner is in a call.
            None => None,
            Some(mut lanes) => match lanes.attention.look(self.seen) {
                Some(calls) => {
                    self.seen = calls;
                    None
                }
                None => {
                    let next = if its_turn { lanes.tend(TURNS_MAX) } else { self.again };
                    lanes.attention.mind();
                    Some(next)
                }
            },
        };
        match away {
            Some(next) => {
                self.again = next;
                if !self.watched {
                    let added = poller.add(side.poller(), u64::from(id.0), Interest::Read);
                    self.watched = added.is_ok();
                }
                if !self.watched {
                    // Not told of events: look now and then.
                    self.again = Some(now + AWAY_NS);
                }
            }
            None => {
                self.again = Some(now + AWAY_NS);
                if std::mem::take(&mut self.watched) {
                    // It is watched, so this can't fail.
                    let _ = poller.remove(side.poller());
                }
            }
        }
    }
}
