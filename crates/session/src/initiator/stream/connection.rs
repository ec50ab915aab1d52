//! The stream's connection to one of its servers, and its state.
//!
//! ```text
//! first connection:   Joining: Connect → Bind ⇄ Busy → Up
//! after a loss:       Down → Joining: Connect → Bind ⇄ Busy → List → Reads → Replaying → Up
//! server given up:    every state → Dead
//! ```

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Cause;
use riopipe_order::entry::Position;
use riopipe_order::recovery::ListedEntry;

use super::barrier::Participant;
use super::{CONTROL_COMMANDS, Purpose, StreamQueue};
use crate::initiator::queue_pair::Data;
use crate::outbox::Outbox;
use crate::wire;

/// The first pause before the bind is sent again after the answer STREAM_BUSY, ns. Each later pause
/// is twice as long.
pub(super) const BUSY_PAUSE_MIN_NS: u64 = 2_000_000;

/// The state of a stream at one of its servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// A connection is being set up: handshake, bind, and, if there was one before, the list of the
    /// entries in the target's log.
    Joining,
    /// Requests are sent.
    Up,
    /// Requests are sent, and some of them replay requests that the last connection may not have
    /// carried out.
    Replaying,
    /// There is no connection, and the stream needs one.
    Down,
    /// The server is given up: the stream has failed.
    Dead,
}

/// The step of setting up a connection, in order. The last two belong to a stream that was bound
/// before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// ICReq and Connect.
    Connect,
    /// Bind has been sent.
    Bind,
    /// The target has answered STREAM_BUSY, because operations of the old connection are still in
    /// flight (trap T8). Bind is sent again later.
    Busy {
        /// The time of the next bind, ns.
        at: u64,
    },
    /// A page of the target's list has been requested.
    List,
    /// The list is complete. The replay waits until no stream reads the server (promise P9).
    Reads,
}

/// The state of the connection: [`ConnectionState`], with the step of the set-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Joining(Step),
    Up,
    Replaying,
    Down,
    Dead,
}

/// The stream's entries in the target's log, page by page.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// The page in flight.
    pub(super) page: Vec<u8>,
    /// The position at which it starts.
    pub(super) from: Position,
    /// The entries so far.
    pub(super) entries: Vec<ListedEntry>,
}

/// A connection that was lost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loss {
    /// When the connection was lost, ns. If later connections were lost before one was up, this is
    /// the time of the first loss.
    pub(super) since: u64,
    /// The cause of the last failure.
    pub(super) cause: Cause,
}

/// A released mark that was sent durably to a target.
#[derive(Clone, Copy, Debug)]
pub(super) struct SentMark {
    pub(super) seq: Seq,
    /// When it was sent, ns.
    pub(super) at: u64,
}

/// The stream's connection to one server.
#[derive(Debug)]
pub(super) struct Connection<P> {
    pub(super) queue: StreamQueue<P>,
    pub(super) outbox: Outbox<P>,
    pub(super) state: State,
    /// When the target last answered, or got a command while none was in flight, ns.
    pub(super) last_progress: u64,
    /// The last mark that was sent durably to the target.
    pub(super) last_mark: SentMark,
    /// The number of durable marks without an answer.
    pub(super) marks_in_flight: u32,
    /// The target's refusal of the last durable mark.
    pub(super) mark_refused: Option<Status>,
    /// The number of read commands without an answer.
    pub(super) reads_in_flight: u32,
    /// The stream's part in the read barrier of the server.
    pub(super) participant: Participant,
    /// Whether the stream has ever been bound here. Then the target's log may have entries of it.
    pub(super) was_bound: bool,
    /// The loss of the last connection, until the stream is up again.
    pub(super) loss: Option<Loss>,
    /// The pause before the next bind if the target is busy, ns.
    pub(super) busy_pause_ns: u64,
    pub(super) listing: Listing,
}

impl<P: AsRef<[u8]> + Clone> Connection<P> {
    pub(super) fn new(queue: StreamQueue<P>, participant: Participant, start: Seq) -> Self {
        Self {
            queue,
            outbox: Outbox::new(),
            state: State::Joining(Step::Connect),
            last_progress: 0,
            last_mark: SentMark { seq: start, at: 0 },
            marks_in_flight: 0,
            mark_refused: None,
            reads_in_flight: 0,
            participant,
            was_bound: false,
            loss: None,
            busy_pause_ns: BUSY_PAUSE_MIN_NS,
            listing: Listing::default(),
        }
    }

    /// Whether requests are sent.
    #[inline]
    pub(super) const fn sends_requests(&self) -> bool {
        matches!(self.state, State::Up | State::Replaying)
    }

    /// The number of commands in flight from which on no request is sent: `queue_depth`, or less if
    /// the queue has no space for that beside reads, marks and bind. A target that comes back may
    /// grant a smaller queue than before, so the session must not rely on the old size (trap T18).
    #[inline]
    pub(super) fn depth(&self, queue_depth: usize) -> usize {
        queue_depth.min(self.queue.depth().saturating_sub(CONTROL_COMMANDS).max(1))
    }

    /// Whether a read may be sent. Reads and requests share `depth` commands, of which requests are
    /// sent first. So many reads do not keep the stream's writes waiting, and one read at a time
    /// may always be sent, so that many writes do not keep its reads waiting.
    pub(super) fn has_space_for_read(&self, depth: usize) -> bool {
        self.queue.in_flight() < depth || self.reads_in_flight == 0
    }

    /// Whether there is a connection, over which bytes may arrive.
    pub(super) const fn has_connection(&self) -> bool {
        !matches!(self.state, State::Down | State::Dead)
    }

    /// Sends the target the released mark, to be recorded durably. Returns false if the queue has
    /// no space.
    pub(super) fn send_mark(&mut self, released: Seq, now: u64) -> bool {
        let mark = wire::mark_command(released, true);
        let sent = self.queue.submit(mark, Purpose::Mark, Data::None, &mut self.outbox).is_ok();
        if sent {
            self.last_mark = SentMark { seq: released, at: now };
            self.marks_in_flight += 1;
        }
        sent
    }

    /// Whether the target must send an answer.
    pub(super) fn awaits_answer(&self) -> bool {
        match self.state {
            State::Joining(Step::Connect | Step::Bind | Step::List) => true,
            State::Up | State::Replaying => self.queue.in_flight() > 0,
            State::Joining(Step::Busy { .. } | Step::Reads) | State::Down | State::Dead => false,
        }
    }

    /// Drops the state of a connection that is lost or given up. Its commands will not be answered,
    /// and the contents of its outbox are not sent.
    pub(super) fn drop_connection(&mut self) {
        self.queue.close();
        self.outbox.clear();
        self.marks_in_flight = 0;
        self.reads_in_flight = 0;
        self.participant.end_read();
        self.participant.set_behind();
        self.listing = Listing::default();
    }
}
