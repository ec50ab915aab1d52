//! The state that the streams of a volume share: failed FLUSHes (trap T22), and the read barrier
//! (promise P9).

use alloc::sync::Arc;
use alloc::vec::Vec;

use riopipe_order::attribute::Member;
use riopipe_order::probe::{self, Plant};

use super::sync::{AtomicU32, AtomicU64, Ordering};

/// Failed FLUSHes of a volume's drives, shared by its streams. After a failed FLUSH a drive may
/// have dropped the data of all streams, and not only of the stream that has sent the FLUSH (trap
/// T22).
#[derive(Debug)]
pub struct FlushFailures {
    /// The number of failures of all drives.
    total_count: AtomicU64,
    /// The number of failures of each drive.
    member_counts: Vec<AtomicU64>,
}

/// The failed FLUSHes that one stream has handled: the counts of [`FlushFailures`] at that time.
#[derive(Debug)]
pub(super) struct HandledFailures {
    total_count: u64,
    member_counts: Vec<u64>,
}

impl FlushFailures {
    /// A record without failures, for a volume of `members` drives.
    #[must_use]
    pub fn new(members: usize) -> Arc<Self> {
        let member_counts = (0..members).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { total_count: AtomicU64::new(0), member_counts })
    }

    /// Records that a FLUSH of a drive has failed.
    pub(super) fn record(&self, member: Member) {
        // The total is last. So a stream that reads the new total also reads the new count.
        self.member_counts[usize::from(member.0)].fetch_add(1, Ordering::Relaxed);
        self.total_count.fetch_add(1, Ordering::Release);
    }

    /// A record by which all failures so far count as handled.
    pub(super) fn all_handled(&self) -> HandledFailures {
        // The total is read first. A failure between the two reads then makes the stream compare
        // the counts again, and no failure is missed.
        let total_count = self.total_count.load(Ordering::Acquire);
        let member_counts =
            self.member_counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        HandledFailures { total_count, member_counts }
    }

    /// Calls `on_failure` for each drive of which a FLUSH has failed since the last call, and
    /// counts these failures as handled. Without a new failure it costs one load.
    #[inline]
    pub(super) fn for_each_new(
        &self,
        handled: &mut HandledFailures,
        mut on_failure: impl FnMut(Member),
    ) {
        let total_count = self.total_count.load(Ordering::Acquire);
        if total_count == handled.total_count {
            return;
        }
        handled.total_count = total_count;
        let counts = self.member_counts.iter().zip(&mut handled.member_counts);
        for ((count, handled_count), member) in counts.zip(0..) {
            let count = count.load(Ordering::Relaxed);
            if *handled_count != count {
                *handled_count = count;
                on_failure(Member(member));
            }
        }
    }
}

/// The read barrier: decides which servers of a volume may be read. All streams of the volume share
/// it (promise P9).
///
/// After a restart, a target may not have all data that a stream has delivered. While a stream
/// replays, the content of an older write may be on the drive for a moment. So a server may be read
/// only while every stream that writes there is *up to date*: bound in the newest incarnation of
/// the target that any stream knows, with nothing left to replay. A replay may start only when no
/// stream has a read in flight there.
///
/// ```text
/// stream that reads:   begin_read: counts itself, then checks the state → read → end_read
/// stream that replays: set_behind and bound: change the state
///                      → has_no_reads: checks the count → replay → up_to_date
/// ```
#[derive(Debug)]
pub struct ReadBarrier {
    servers: Vec<ServerBarrier>,
    /// 1: a stream has failed, and is about to leave, or has left.
    has_failed_stream: AtomicU32,
}

/// The barrier of one server.
#[derive(Debug, Default)]
struct ServerBarrier {
    /// The bits of a [`ServerState`].
    state: AtomicU64,
    /// The number of streams that have reads in flight on the server.
    reading_streams: AtomicU32,
}

/// The state of a server. It changes as a whole, because it fits one atomic word:
///
/// ```text
/// bits  63        32 31     16 15         0
///      | incarnation | streams | up_to_date |
/// ```
#[derive(Clone, Copy)]
struct ServerState {
    /// The newest incarnation that a stream knows of.
    incarnation: u32,
    /// The number of streams that write there. They are bound there.
    streams: u16,
    /// The number of them that are up to date.
    up_to_date: u16,
}

impl ServerState {
    const fn from_bits(bits: u64) -> Self {
        Self {
            incarnation: (bits >> 32) as u32,
            streams: (bits >> 16) as u16,
            up_to_date: bits as u16,
        }
    }

    const fn to_bits(self) -> u64 {
        (self.incarnation as u64) << 32 | (self.streams as u64) << 16 | self.up_to_date as u64
    }
}

impl ReadBarrier {
    /// The read barrier of a volume on `servers` servers, without streams.
    #[must_use]
    pub fn new(servers: usize) -> Arc<Self> {
        let servers = (0..servers).map(|_| ServerBarrier::default()).collect();
        Arc::new(Self { servers, has_failed_stream: AtomicU32::new(0) })
    }

    /// Whether a stream has failed since the volume was opened. Reads do not wait for a stream that has
    /// failed. If this is false when a read has ended, that read has waited for all streams.
    #[must_use]
    pub fn has_failed_stream(&self) -> bool {
        self.has_failed_stream.load(Ordering::SeqCst) != 0
    }

    /// Whether a server may be read now.
    #[must_use]
    pub fn readable(&self, server: u16) -> bool {
        let bits = self.servers[usize::from(server)].state.load(Ordering::SeqCst);
        let state = ServerState::from_bits(bits);
        state.streams == state.up_to_date || probe::is_bug_planted(Plant::P9ReadsRaceReplay)
    }

    /// The part of a stream that has not been bound on `server` yet.
    pub(super) fn participant(self: &Arc<Self>, server: u16) -> Participant {
        Participant {
            barrier: Arc::clone(self),
            server,
            incarnation: None,
            is_up_to_date: false,
            counts_as_reading: false,
        }
    }
}

/// One stream's part in the read barrier of one server. When it is dropped, the stream leaves the
/// barrier.
#[derive(Debug)]
pub(super) struct Participant {
    barrier: Arc<ReadBarrier>,
    server: u16,
    /// The incarnation in which the stream was last bound, if it ever was.
    incarnation: Option<u32>,
    /// Whether the stream counts as up to date in `incarnation`.
    is_up_to_date: bool,
    /// Whether the stream counts as one with reads in flight.
    counts_as_reading: bool,
}

impl Participant {
    /// The barrier of the server.
    fn server_barrier(&self) -> &ServerBarrier {
        &self.barrier.servers[usize::from(self.server)]
    }

    /// Changes the state of the server atomically.
    fn update_state(&self, change: impl Fn(ServerState) -> ServerState) {
        let change_bits = |bits| Some(change(ServerState::from_bits(bits)).to_bits());
        // The update cannot fail, because the closure always returns a value to store.
        let _ = self.server_barrier().state.fetch_update(
            Ordering::SeqCst,
            Ordering::SeqCst,
            change_bits,
        );
    }

    /// Records that the stream is bound in this incarnation, but not up to date. If the incarnation
    /// is newer than the known one, no other stream is up to date, either.
    pub(super) fn set_bound(&mut self, incarnation: u32) {
        self.set_behind();
        let is_first_bind = self.incarnation.is_none();
        self.incarnation = Some(incarnation);
        self.update_state(|state| {
            let is_newer = incarnation > state.incarnation;
            ServerState {
                incarnation: state.incarnation.max(incarnation),
                streams: state.streams + u16::from(is_first_bind),
                up_to_date: if is_newer { 0 } else { state.up_to_date },
            }
        });
    }

    /// Records the target's incarnation, as reported by a stream that is not bound there. If it is
    /// newer than the known one, no stream is up to date.
    pub(super) fn note_incarnation(&self, incarnation: u32) {
        self.update_state(|state| {
            if incarnation > state.incarnation {
                ServerState { incarnation, up_to_date: 0, ..state }
            } else {
                state
            }
        });
    }

    /// Records that the stream has nothing left to replay.
    pub(super) fn set_up_to_date(&mut self) {
        let Some(own_incarnation) = self.incarnation else { return };
        if self.is_up_to_date {
            return;
        }
        self.is_up_to_date = true;
        self.update_state(|state| {
            // A stream that is bound in an older incarnation does not count.
            let counts = state.incarnation == own_incarnation;
            ServerState { up_to_date: state.up_to_date + u16::from(counts), ..state }
        });
    }

    /// Records that the stream is not up to date: it has lost its connection.
    pub(super) fn set_behind(&mut self) {
        let Some(own_incarnation) = self.incarnation else { return };
        if !self.is_up_to_date {
            return;
        }
        self.is_up_to_date = false;
        self.update_state(|state| {
            // A newer incarnation has set the count to 0, without this stream.
            let counted = state.incarnation == own_incarnation;
            ServerState { up_to_date: state.up_to_date - u16::from(counted), ..state }
        });
    }

    /// Whether a read may be sent now. If so, the stream counts as reading until
    /// [`end_read`](Self::end_read).
    pub(super) fn begin_read(&mut self) -> bool {
        let counted_before = self.counts_as_reading;
        if !counted_before {
            // This stream counts itself, and then reads the state. A stream that starts a replay
            // changes the state, and then reads the count. So at least one of the two notices the
            // other one.
            self.server_barrier().reading_streams.fetch_add(1, Ordering::SeqCst);
            self.counts_as_reading = true;
        }
        let is_readable = self.barrier.readable(self.server);
        if !is_readable && !counted_before {
            self.end_read();
        }
        is_readable
    }

    /// Records that the stream has no read in flight any more.
    pub(super) fn end_read(&mut self) {
        if core::mem::take(&mut self.counts_as_reading) {
            self.server_barrier().reading_streams.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Whether no stream reads the server. A replay may then start.
    pub(super) fn has_no_reads(&self) -> bool {
        debug_assert!(!self.is_up_to_date, "reads may begin again");
        if probe::is_bug_planted(Plant::P9ReplayRacesReads) {
            return true;
        }
        // A plain load could return an earlier value. After this read-modify-write, a stream that
        // counts itself later also reads the state that was stored before.
        self.server_barrier().reading_streams.fetch_add(0, Ordering::SeqCst) == 0
    }

    /// Removes a stream that has failed from the writers of the server.
    pub(super) fn leave_failed(&mut self) {
        // This comes first: a read that does not wait for the stream must notice it when it ends.
        self.barrier.has_failed_stream.store(1, Ordering::SeqCst);
        self.leave();
    }

    /// Removes the stream from the writers of the server.
    pub(super) fn leave(&mut self) {
        self.set_behind();
        if self.incarnation.take().is_some() {
            self.update_state(|state| ServerState { streams: state.streams - 1, ..state });
        }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        self.end_read();
        self.leave();
    }
}
