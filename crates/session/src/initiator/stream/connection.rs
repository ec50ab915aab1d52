//! The stream's connection to one of its servers, and the state of it.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Cause;
use riopipe_order::entry::Position;
use riopipe_order::recovery::ListedEntry;

use super::barrier::Participant;
use super::{CONTROL_COMMANDS, StreamQueue, Tag};
use crate::initiator::queue_pair::Data;
use crate::outbox::Outbox;
use crate::wire;

/// The first pause before a bind that found the target busy is sent again, ns; each later pause is
/// twice as long.
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

/// The step of setting up a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// ICReq and Connect.
    Connect,
    /// Bind has been sent.
    Bind,
    /// The target still has operations of the old connection in flight (T8): bind again later.
    Busy {
        /// The time of the next bind, ns.
        at: u64,
    },
    /// A page of the target's list has been requested.
    List,
    /// The list is complete; reads by other streams must end before anything is replayed (P9).
    Reads,
}

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
    /// When the connection was lost, ns; of several losses without any answer between them, the
    /// first.
    pub(super) since: u64,
    /// The cause of the last failure.
    pub(super) cause: Cause,
}

#[derive(Debug)]
pub(super) struct Connection<P> {
    pub(super) queue: StreamQueue<P>,
    pub(super) out: Outbox<P>,
    pub(super) state: State,
    /// When the target last answered, or first got a command, ns.
    pub(super) progress: u64,
    /// The last mark that was sent durably to the target, and when, ns.
    pub(super) reported: (Seq, u64),
    /// The number of durable marks without an answer.
    pub(super) marks_out: u32,
    /// The refusal of a durable mark that was not sent again since.
    pub(super) mark_refused: Option<Status>,
    /// The number of read commands without an answer.
    pub(super) reads_out: u32,
    pub(super) participant: Participant,
    /// Whether the stream has ever been bound here: then the log may have entries of it.
    pub(super) bound: bool,
    pub(super) loss: Option<Loss>,
    /// The pause before the next bind if the target is busy, ns.
    pub(super) busy_pause: u64,
    pub(super) listing: Listing,
}

impl<P: AsRef<[u8]> + Clone> Connection<P> {
    pub(super) fn new(queue: StreamQueue<P>, participant: Participant, start: Seq) -> Self {
        Self {
            queue,
            out: Outbox::new(),
            state: State::Joining(Step::Connect),
            progress: 0,
            reported: (start, 0),
            marks_out: 0,
            mark_refused: None,
            reads_out: 0,
            participant,
            bound: false,
            loss: None,
            busy_pause: BUSY_PAUSE_MIN_NS,
            listing: Listing::default(),
        }
    }

    /// Whether requests are sent.
    #[inline]
    pub(super) const fn carries(&self) -> bool {
        matches!(self.state, State::Up | State::Replaying)
    }

    /// The largest number of commands in flight with which another request is sent: `queue_depth`,
    /// or what the queue has space for beside reads, marks and bind. A target may take fewer
    /// commands than before when it comes back (T18).
    #[inline]
    pub(super) fn depth(&self, queue_depth: usize) -> usize {
        queue_depth.min(self.queue.depth().saturating_sub(CONTROL_COMMANDS).max(1))
    }

    /// Whether there is a connection from which bytes may come.
    pub(super) const fn connected(&self) -> bool {
        !matches!(self.state, State::Down | State::Dead)
    }

    /// Sends the target the released mark, to be recorded durably.
    pub(super) fn send_mark(&mut self, released: Seq, now: u64) -> bool {
        let mark = wire::mark_command(released, true);
        let sent = self.queue.submit(mark, Tag::Mark, Data::None, &mut self.out).is_ok();
        if sent {
            self.reported = (released, now);
            self.marks_out += 1;
        }
        sent
    }

    /// Whether a command is in flight.
    pub(super) fn waits(&self) -> bool {
        match self.state {
            State::Joining(Step::Connect | Step::Bind | Step::List) => true,
            State::Up | State::Replaying => self.queue.in_flight() > 0,
            State::Joining(Step::Busy { .. } | Step::Reads) | State::Down | State::Dead => false,
        }
    }

    /// The connection is lost: no command on it is answered, and no waiting PDU has to be sent.
    pub(super) fn cut(&mut self) {
        self.queue.close();
        self.out.clear();
        self.marks_out = 0;
        self.reads_out = 0;
        self.participant.end_read();
        self.participant.set_behind();
        self.listing = Listing::default();
    }
}
