//! One connection of a core: its session, its outgoing bytes, and the progress of its end.

use alloc::string::{String, ToString};

use riopipe_order::block_device::IoError;

use super::super::conn::TargetConn;
use super::super::env::TargetEnv;
use super::super::identity::LocalAddress;
use super::super::ids::{ConnId, OpId};
use super::places::Place;
use super::stopping::StopPhase;
use crate::outbox::Outbox;

/// How long a connection that is being closed may take to deliver its last bytes, ns.
const LINGER_NS: u64 = 1_000_000_000;

/// The shell's part of a connection: its socket, and the bytes that have come in and were not
/// consumed. It moves with the connection from core to core.
pub trait Transport {
    /// The bytes that have come in and were not consumed.
    fn input(&self) -> &[u8];
    /// Drops the first `bytes` bytes of [`input`](Self::input).
    fn consume(&mut self, bytes: usize);
    /// Makes space for a PDU of `bytes` bytes in all, of which [`input`](Self::input) is the start.
    ///
    /// # Errors
    /// Why it cannot be held. The connection is closed for this reason.
    fn reserve(&mut self, bytes: usize) -> Result<(), String>;
}

/// The events for which a socket is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Something can be received.
    Read,
    /// Something can be sent.
    Write,
    /// Both events.
    Both,
}

/// A connection with the shell's part of it. It moves from core to core as a whole.
pub struct Connection<E: TargetEnv, T> {
    pub(super) session: TargetConn<E>,
    pub(super) output: Outbox<E::Buf>,
    transport: T,
    /// The socket takes no more bytes just now, although some are left to send.
    is_blocked: bool,
    /// The events for which its socket is watched; `None` if it is not watched yet.
    pub(super) watched: Option<Interest>,
    /// If it is being closed: the time limit for the delivery of its last bytes, ns.
    ending: Option<u64>,
    /// The socket has failed or ended in both directions.
    is_dead: bool,
    /// The shell has been asked to close the sending direction.
    has_finished: bool,
    /// The core that counts it as an I/O queue.
    pub(super) counted_by: Option<usize>,
    /// Some of its device operations have come back, and are not settled.
    pub(super) in_batch: bool,
    /// It is on its core's list of changed connections.
    pub(super) is_touched: bool,
    /// It counts as one of all connections, on any core, until it is dropped (T28).
    _place: Place,
}

impl<E: TargetEnv, T: Transport> Connection<E, T> {
    pub(super) fn new(
        place: Place,
        transport: T,
        local: Option<LocalAddress>,
        crc: riopipe_nvme::Crc32c,
        now: u64,
    ) -> Self {
        Self {
            session: TargetConn::new(place.id(), 0, crc, now).with_local_address(local),
            output: Outbox::new(),
            transport,
            is_blocked: false,
            watched: None,
            ending: None,
            is_dead: false,
            has_finished: false,
            counted_by: None,
            in_batch: false,
            is_touched: false,
            _place: place,
        }
    }

    /// Its id: unique in an incarnation of the target.
    #[must_use]
    pub const fn id(&self) -> ConnId {
        self.session.id()
    }

    /// The shell's part of it.
    #[must_use]
    pub const fn transport(&self) -> &T {
        &self.transport
    }

    pub(super) const fn transport_mut(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Whether it takes incoming bytes, only drops them, or leaves them in the socket.
    pub(super) fn receives(&self) -> Receives {
        match self.ending {
            Some(_) => Receives::Dropped,
            None if self.session.wants_input(&self.output) => Receives::Wanted,
            None => Receives::Left,
        }
    }

    /// Hands the incoming bytes to the session.
    pub(super) fn receive(&mut self, env: &mut E) {
        if self.ending.is_some() {
            return;
        }
        match self.session.receive(self.transport.input(), env, &mut self.output) {
            Ok(consumed) => {
                self.transport.consume(consumed);
                let need = self.session.need(self.transport.input());
                if let Err(why) = self.transport.reserve(need) {
                    // The session refuses longer PDUs by their header. This is a second check.
                    self.end(&why, env);
                }
            }
            Err(closed) => self.end(&closed.to_string(), env),
        }
    }

    /// The bytes to send now, with the shell's part of the connection.
    pub(super) fn sends(&mut self) -> Option<(&mut T, &Outbox<E::Buf>)> {
        let sends = !self.output.is_empty() && !self.is_dead && !self.in_batch;
        sends.then_some((&mut self.transport, &self.output))
    }

    /// Whether the shell is to send: there are bytes, and the socket may take them.
    pub(super) fn may_send(&self) -> bool {
        !self.output.is_empty() && !self.is_dead && !self.is_blocked
    }

    /// Notes that the socket has taken this many bytes.
    pub(super) fn sent(&mut self, bytes: usize, env: &mut E) {
        self.is_blocked = false;
        let took_no_input = !self.session.wants_input(&self.output);
        self.output.consume(bytes);
        self.session.sent(env, &mut self.output);
        if took_no_input && self.session.wants_input(&self.output) {
            self.receive(env);
        }
    }

    /// Notes that the socket takes no more bytes for now.
    pub(super) fn blocked(&mut self, now: u64) {
        self.is_blocked = true;
        self.session.unsent(now);
    }

    /// Takes in the result of a device operation.
    pub(super) fn device_done(
        &mut self,
        op: OpId,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
    ) {
        self.session.device_done(op, result, env, &mut self.output);
    }

    /// Notes that all device operations that came back together are handed in.
    pub(super) fn batch_ended(&mut self, env: &mut E) {
        self.in_batch = false;
        self.session.batch_ended(env, &mut self.output);
    }

    /// Reads the notices that were left for it.
    pub(super) fn noticed(&mut self, env: &mut E) {
        if let Err(closed) = self.session.noticed(env, &mut self.output) {
            self.end(&closed.to_string(), env);
        }
    }

    /// Checks its time limits; returns whether this had an effect.
    pub(super) fn tick(&mut self, env: &mut E) -> bool {
        match self.session.tick(env, &mut self.output) {
            Ok(()) => self.may_be_dropped(env.now(), StopPhase::Serving),
            Err(closed) => {
                self.end(&closed.to_string(), env);
                true
            }
        }
    }

    /// Begins the end: no more input is taken, the last bytes are still sent.
    pub(super) fn end(&mut self, why: &str, env: &mut E) {
        if self.ending.is_none() {
            self.ending = Some(env.now() + LINGER_NS);
            self.session.close(why, env);
        }
    }

    /// Notes that the socket has failed or ended in both directions.
    pub(super) fn socket_ended(&mut self, why: &str, env: &mut E) {
        self.is_dead = true;
        self.is_blocked = false;
        self.output.clear();
        self.end(why, env);
    }

    /// Whether its last bytes are sent, so that the sending direction must be closed. Returns true
    /// only once.
    pub(super) fn must_finish_sending(&mut self) -> bool {
        let finishes = self.ending.is_some() && self.output.is_empty() && !self.is_dead;
        finishes && !core::mem::replace(&mut self.has_finished, true)
    }

    /// Whether it may be dropped. `stop`: the phase of its core.
    pub(super) fn may_be_dropped(&self, now: u64, stop: StopPhase) -> bool {
        let Some(ending) = self.ending else {
            return false;
        };
        // The socket stays open until the peer has read the last bytes. If it is closed while input
        // is unread, the system resets the connection, and the last bytes are lost. But a target
        // that stops does not wait for a host that does not read.
        let has_delivered = match stop {
            StopPhase::Serving => self.is_dead || now >= ending,
            StopPhase::Grace => self.output.is_empty(),
            StopPhase::Over => true,
        };
        self.session.is_drained() && has_delivered
    }

    /// The time at which it must be checked again. A result from a drive makes its core check it
    /// anyway.
    pub(super) fn deadline(&self) -> Option<u64> {
        match self.ending {
            Some(ending) => Some(ending).filter(|_| self.session.is_drained()),
            None => self.session.next_deadline(),
        }
    }

    /// Whether it is being closed.
    pub(super) const fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Whether nothing of it is in flight: no command at a drive, no answer unsent.
    pub(super) fn is_quiet(&self) -> bool {
        self.output.is_empty() && self.session.is_quiet()
    }

    /// The events for which its socket is to be watched.
    pub(super) fn interest(&self) -> Interest {
        interest(self.receives() != Receives::Left, self.is_blocked)
    }
}

/// The treatment of incoming bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Receives {
    Wanted,
    Dropped,
    Left,
}

/// The events for which a socket is watched. If nothing is received from it just now, since too
/// much waits to be sent, it is not watched for input: the input in the socket would wake the core
/// without end (T28).
const fn interest(receives: bool, blocked: bool) -> Interest {
    match (receives, blocked) {
        (_, false) => Interest::Read,
        (true, true) => Interest::Both,
        (false, true) => Interest::Write,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t28_a_peer_that_takes_no_answers_is_not_read() {
        assert_eq!(interest(true, false), Interest::Read);
        assert_eq!(interest(true, true), Interest::Both);
        assert_eq!(interest(false, true), Interest::Write);
    }
}
