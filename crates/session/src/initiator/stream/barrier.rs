//! The state that the streams of a volume share: failed FLUSHes (T22), and the read barrier (P9).

use alloc::sync::Arc;
use alloc::vec::Vec;

use riopipe_order::attribute::Member;
use riopipe_order::probe::{self, Plant};

use super::sync::{AtomicU32, AtomicU64, Ordering};

/// Failed FLUSHes of a volume's drives, shared by its streams (T22).
#[derive(Debug)]
pub struct FlushFailures {
    epoch: AtomicU64,
    members: Vec<AtomicU64>,
}

/// The failed FLUSHes that one stream has handled.
#[derive(Debug)]
pub(super) struct Seen {
    epoch: u64,
    members: Vec<u64>,
}

impl FlushFailures {
    /// A record without failures, for a volume of `members` drives.
    #[must_use]
    pub fn new(members: usize) -> Arc<Self> {
        let members = (0..members).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { epoch: AtomicU64::new(0), members })
    }

    pub(super) fn fail(&self, member: Member) {
        self.members[usize::from(member.0)].fetch_add(1, Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// The failures until now, which the caller need not handle.
    pub(super) fn seen(&self) -> Seen {
        // The epoch first: a failure in between is then reported once more, not missed.
        let epoch = self.epoch.load(Ordering::Acquire);
        let members = self.members.iter().map(|m| m.load(Ordering::Relaxed)).collect();
        Seen { epoch, members }
    }

    /// The drives of which a FLUSH has failed since the last call. It costs one load as long as
    /// there is no failure.
    #[inline]
    pub(super) fn new_failures(&self, seen: &mut Seen, mut each: impl FnMut(Member)) {
        let epoch = self.epoch.load(Ordering::Acquire);
        if epoch == seen.epoch {
            return;
        }
        seen.epoch = epoch;
        for ((member, seen), number) in self.members.iter().zip(&mut seen.members).zip(0..) {
            let now = member.load(Ordering::Relaxed);
            if core::mem::replace(seen, now) != now {
                each(Member(number));
            }
        }
    }
}

/// The read barrier: which servers of a volume may be read. Its streams share it (P9).
///
/// After a target's restart, data that a stream has delivered may not be there. While a stream
/// replays, its older writes cover its newer ones for a moment. So a server is read only while
/// every stream that writes there is *up to date*: bound in the newest incarnation of the target
/// that any stream knows of, with nothing left to replay. A replay starts only when no stream has a
/// read in flight there.
#[derive(Debug)]
pub struct ReadBarrier {
    servers: Vec<ServerBarrier>,
}

#[derive(Debug, Default)]
struct ServerBarrier {
    /// The bits of a [`Word`].
    word: AtomicU64,
    /// The number of streams that have reads in flight.
    reads: AtomicU32,
}

/// The state of a server, which changes as a whole.
#[derive(Clone, Copy)]
struct Word {
    /// The newest incarnation that a stream knows of.
    incarnation: u32,
    /// The number of streams that write there.
    streams: u16,
    /// The number of them that are up to date.
    current: u16,
}

impl Word {
    const fn of(word: u64) -> Self {
        Self {
            incarnation: (word >> 32) as u32,
            streams: (word >> 16) as u16,
            current: word as u16,
        }
    }

    const fn bits(self) -> u64 {
        (self.incarnation as u64) << 32 | (self.streams as u64) << 16 | self.current as u64
    }
}

impl ReadBarrier {
    /// The read barrier of a volume on `servers` servers, without streams.
    #[must_use]
    pub fn new(servers: usize) -> Arc<Self> {
        Arc::new(Self { servers: (0..servers).map(|_| ServerBarrier::default()).collect() })
    }

    /// Whether a server may be read now.
    #[must_use]
    pub fn readable(&self, server: u16) -> bool {
        let word = Word::of(self.servers[usize::from(server)].word.load(Ordering::SeqCst));
        word.streams == word.current || probe::planted(Plant::P9ReadsRaceReplay)
    }

    pub(super) fn participant(self: &Arc<Self>, server: u16) -> Participant {
        Participant {
            barrier: Arc::clone(self),
            server,
            incarnation: None,
            current: false,
            reading: false,
        }
    }
}

/// One stream's state in the read barrier of one server; removed when dropped.
#[derive(Debug)]
pub(super) struct Participant {
    barrier: Arc<ReadBarrier>,
    server: u16,
    /// The incarnation in which the stream was last bound, if it ever was.
    incarnation: Option<u32>,
    /// The stream counts as up to date in `incarnation`.
    current: bool,
    /// The stream counts as one with reads in flight.
    reading: bool,
}

impl Participant {
    fn change(&self, change: impl Fn(Word) -> Word) {
        let change = |word| Some(change(Word::of(word)).bits());
        let word = &self.barrier.servers[usize::from(self.server)].word;
        // The closure always returns a value to store.
        let _ = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change);
    }

    /// Records that the stream is bound in this incarnation, but not up to date. If the incarnation
    /// is newer than the known one, no other stream is up to date, either.
    pub(super) fn bound(&mut self, incarnation: u32) {
        self.set_behind();
        let first = self.incarnation.is_none();
        self.incarnation = Some(incarnation);
        self.change(|word| {
            let newer = incarnation > word.incarnation;
            Word {
                incarnation: word.incarnation.max(incarnation),
                streams: word.streams + u16::from(first),
                current: if newer { 0 } else { word.current },
            }
        });
    }

    /// Records the target's incarnation, as reported by a stream that is not bound there. If it is
    /// newer than the known one, no stream is up to date.
    pub(super) fn note_incarnation(&self, incarnation: u32) {
        self.change(|word| match incarnation > word.incarnation {
            true => Word { incarnation, current: 0, ..word },
            false => word,
        });
    }

    /// Records that the stream has nothing left to replay.
    pub(super) fn up_to_date(&mut self) {
        let Some(mine) = self.incarnation.filter(|_| !self.current) else { return };
        self.current = true;
        self.change(|word| {
            let counts = word.incarnation == mine;
            Word { current: word.current + u16::from(counts), ..word }
        });
    }

    /// Records that the stream is not up to date: it has lost its connection.
    pub(super) fn set_behind(&mut self) {
        let Some(mine) = self.incarnation.filter(|_| self.current) else { return };
        self.current = false;
        self.change(|word| {
            let counted = word.incarnation == mine;
            Word { current: word.current - u16::from(counted), ..word }
        });
    }

    /// Whether a read may be sent now. If so, the stream counts as reading until
    /// [`end_read`](Self::end_read).
    pub(super) fn begin_read(&mut self) -> bool {
        let counted = self.reading;
        if !counted {
            // This stream counts itself, then reads the state. A stream that starts a replay
            // changes the state, then reads the count. So at least one of the two sees the other.
            self.barrier.servers[usize::from(self.server)].reads.fetch_add(1, Ordering::SeqCst);
            self.reading = true;
        }
        let may = self.barrier.readable(self.server);
        if !may && !counted {
            self.end_read();
        }
        may
    }

    /// Records that the stream has no read in flight any more.
    pub(super) fn end_read(&mut self) {
        if core::mem::take(&mut self.reading) {
            self.barrier.servers[usize::from(self.server)].reads.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Whether no stream reads the server. A replay may then start.
    pub(super) fn has_no_reads(&self) -> bool {
        debug_assert!(!self.current, "reads may begin again");
        if probe::planted(Plant::P9ReplayRacesReads) {
            return true;
        }
        // A plain load could return an earlier value. After this read-modify-write, a stream that
        // counts itself later also reads the state that was stored before.
        self.barrier.servers[usize::from(self.server)].reads.fetch_add(0, Ordering::SeqCst) == 0
    }

    /// Removes the stream from the writers of the server.
    pub(super) fn leave(&mut self) {
        self.set_behind();
        if self.incarnation.take().is_some() {
            self.change(|word| Word { streams: word.streams - 1, ..word });
        }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        self.end_read();
        self.leave();
    }
}
