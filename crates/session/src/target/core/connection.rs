//! One connection of a core: its session, its outgoing bytes, and the steps of its end.
//!
//! A connection ends in these steps:
//!
//! 1. [`Connection::end`]: the session is closed. Input is dropped, the last bytes are still sent.
//! 2. All bytes are sent: the shell closes the sending direction of the socket.
//! 3. The peer closes its direction, or a time limit passes.
//! 4. No device operation is in flight any more: the connection may be dropped.

use alloc::string::{String, ToString};
use core::net::IpAddr;

use riopipe_order::block_device::IoError;

use super::super::conn::TargetConn;
use super::super::env::{Event, TargetEnv};
use super::super::identity::LocalAddress;
use super::super::ids::{ConnId, OpId};
use super::pending::PendingEntry;
use super::places::Place;
use super::stopping::StopPhase;
use crate::outbox::Outbox;

/// Why a connection ends that is not admitted, and gives way to another one.
const DISPLACED: &str = "it was not admitted, and another connection needs its place";
/// The time limit for the peer to take the last bytes of a connection that ends, ns.
const LINGER_NS: u64 = 1_000_000_000;

/// The shell's part of a connection: the socket, and the bytes that have been received and not
/// consumed. It moves with the connection from core to core.
pub trait Transport {
    /// The bytes that have been received and not consumed.
    fn input(&self) -> &[u8];
    /// Drops the first `bytes` bytes of [`input`](Self::input).
    fn consume(&mut self, bytes: usize);
    /// Makes space for a PDU that begins with [`input`](Self::input) and has `bytes` bytes in all.
    ///
    /// # Errors
    /// Why there is no space for the PDU. The connection is closed for this reason.
    fn reserve(&mut self, bytes: usize) -> Result<(), String>;
    /// The address of the peer, as text; empty if it has none.
    fn peer(&self) -> String {
        String::new()
    }
    /// The IP address of the peer; `None` if it has none.
    fn peer_address(&self) -> Option<IpAddr> {
        None
    }
    /// The connection is admitted: it may use the memory of a queue from now on. Before, it should
    /// have no more memory than one PDU of a host without rights needs (trap T28).
    fn admit(&mut self) {}
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
    /// The socket takes no more bytes at present, although some are left to send.
    is_blocked: bool,
    /// The events for which the socket is watched; `None` if it is not watched on this core yet.
    pub(super) watched_for: Option<Interest>,
    /// The time limit for the delivery of the last bytes, ns; `None` if the connection does not
    /// end.
    linger_deadline_ns: Option<u64>,
    /// The socket has failed or ended in both directions.
    has_socket_ended: bool,
    /// The shell has been asked to close the sending direction of the socket.
    has_finished_sending: bool,
    /// The core that counts the connection as an I/O queue; `None` if none does.
    pub(super) counted_by_core: Option<usize>,
    /// Device operations have come back in the present batch, and the batch has not ended yet.
    pub(super) has_unsettled_results: bool,
    /// The entry of the connection among those that are not admitted; `None` once it is admitted.
    pub(super) pending_entry: Option<PendingEntry>,
    /// The connection is on its core's list of changed connections.
    pub(super) is_in_changed_list: bool,
    /// The connection's place among all connections of the target. It is free when the connection
    /// is dropped (trap T28).
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
            session: TargetConn::new(place.id(), 0, crc, now)
                .with_local_address(local)
                .with_peer(transport.peer()),
            output: Outbox::new(),
            transport,
            is_blocked: false,
            watched_for: None,
            linger_deadline_ns: None,
            has_socket_ended: false,
            has_finished_sending: false,
            counted_by_core: None,
            has_unsettled_results: false,
            pending_entry: None,
            is_in_changed_list: false,
            _place: place,
        }
    }

    /// The id of the connection, unique in an incarnation of the target.
    #[must_use]
    pub const fn id(&self) -> ConnId {
        self.session.id()
    }

    /// The shell's part of the connection.
    #[must_use]
    pub const fn transport(&self) -> &T {
        &self.transport
    }

    /// The shell's part of the connection, and the memory for the next input if that is known to be
    /// data of a command.
    pub(super) fn input_parts(&mut self) -> (&mut T, &mut [u8]) {
        let space = match self.transport.input().is_empty() {
            true => self.session.data_space(),
            false => &mut [],
        };
        (&mut self.transport, space)
    }

    pub(super) const fn transport_mut(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Notes that bytes have been received in the memory for data.
    pub(super) fn data_arrived(&mut self, bytes: usize) {
        if self.linger_deadline_ns.is_none() {
            self.session.data_arrived(bytes);
        }
    }

    /// The way in which the shell must treat bytes from the peer.
    pub(super) fn input_treatment(&self) -> InputTreatment {
        match self.linger_deadline_ns {
            Some(_) => InputTreatment::Dropped,
            None if self.session.wants_input(&self.output) => InputTreatment::Wanted,
            None => InputTreatment::StaysInSocket,
        }
    }

    /// Passes the received bytes to the session.
    pub(super) fn receive(&mut self, env: &mut E) {
        if self.linger_deadline_ns.is_some() {
            return;
        }
        match self.session.receive(self.transport.input(), env, &mut self.output) {
            Ok(consumed) => {
                self.transport.consume(consumed);
                if self.is_newly_admitted() {
                    self.transport.admit();
                }
                let need = self.session.need(self.transport.input());
                if let Err(why) = self.transport.reserve(need) {
                    // This is a second check: the session refuses a PDU that is too long because of
                    // the length in its header.
                    self.end(&why, env);
                }
            }
            Err(closed) => self.end(&closed.to_string(), env),
        }
    }

    /// The bytes to send now, with the shell's part of the connection; `None` if nothing may be
    /// sent.
    pub(super) fn bytes_to_send(&mut self) -> Option<(&mut T, &Outbox<E::Buf>)> {
        let may_send =
            !self.output.is_empty() && !self.has_socket_ended && !self.has_unsettled_results;
        may_send.then_some((&mut self.transport, &self.output))
    }

    /// Whether the shell must send: there are bytes, and the socket takes bytes.
    pub(super) fn may_send(&self) -> bool {
        !self.output.is_empty() && !self.has_socket_ended && !self.is_blocked
    }

    /// Notes that the socket has taken this many bytes.
    pub(super) fn sent(&mut self, bytes: usize, env: &mut E) {
        self.is_blocked = false;
        let was_input_stopped =
            !self.session.wants_input(&self.output) || self.session.input_waits();
        self.output.consume(bytes);
        self.session.sent(env, &mut self.output);
        if was_input_stopped && self.session.wants_input(&self.output) {
            self.receive(env);
        }
    }

    /// Notes that the socket takes no more bytes for now.
    pub(super) fn blocked(&mut self, env: &mut E) {
        self.is_blocked = true;
        self.session.unsent(env.now());
        if self.session.input_waits() && self.session.wants_input(&self.output) {
            self.receive(env);
        }
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

    /// Notes that the batch has ended: the results of all device operations that came back together
    /// have been passed in.
    pub(super) fn batch_ended(&mut self, env: &mut E) {
        self.has_unsettled_results = false;
        self.session.batch_ended(env, &mut self.output);
    }

    /// Reads the notices that other connections have left for this one.
    pub(super) fn noticed(&mut self, env: &mut E) {
        if let Err(closed) = self.session.noticed(env, &mut self.output) {
            self.end(&closed.to_string(), env);
        } else if self.is_newly_admitted() {
            self.transport.admit();
        }
    }

    /// Checks the time limits of the connection. Returns whether the connection has changed.
    /// `read_until` is the time up to which all input has been read, ns.
    pub(super) fn tick(&mut self, read_until: u64, env: &mut E) -> bool {
        match self.session.tick(read_until, env, &mut self.output) {
            Ok(()) => self.may_be_dropped(env.now(), StopPhase::Serving),
            Err(closed) => {
                self.end(&closed.to_string(), env);
                true
            }
        }
    }

    /// Whether the connection has been admitted, and still counts as one that is not.
    pub(super) fn is_newly_admitted(&self) -> bool {
        self.pending_entry.is_some() && self.session.is_admitted()
    }

    /// Ends a connection that is not admitted at once, because another one needs its place. The peer
    /// gets no last bytes, because waiting for it would keep the place.
    pub(super) fn displace(&mut self, env: &mut E) {
        env.log(Event::Displaced { peer: self.session.peer() });
        self.socket_ended(DISPLACED, env);
    }

    /// Begins the end of the connection: no more input is used, the last bytes are still sent.
    pub(super) fn end(&mut self, why: &str, env: &mut E) {
        if self.linger_deadline_ns.is_none() {
            self.linger_deadline_ns = Some(env.now() + LINGER_NS);
            self.session.close(why, env);
        }
    }

    /// Notes that the socket has failed or ended in both directions.
    pub(super) fn socket_ended(&mut self, why: &str, env: &mut E) {
        self.has_socket_ended = true;
        self.is_blocked = false;
        self.output.clear();
        self.end(why, env);
    }

    /// Whether the last bytes are sent, so that the sending direction of the socket must be closed.
    /// Returns true only once.
    pub(super) fn must_finish_sending(&mut self) -> bool {
        let is_all_sent =
            self.linger_deadline_ns.is_some() && self.output.is_empty() && !self.has_socket_ended;
        is_all_sent && !core::mem::replace(&mut self.has_finished_sending, true)
    }

    /// Whether the connection has ended and may be dropped. `stop` is the phase of its core.
    pub(super) fn may_be_dropped(&self, now: u64, stop: StopPhase) -> bool {
        let Some(linger_deadline_ns) = self.linger_deadline_ns else {
            return false;
        };
        // The socket stays open until the peer has read the last bytes. If the target closed it
        // while input is unread, the system would reset the connection, and the last bytes would be
        // lost. A target that stops does not wait for a host that does not read.
        let has_delivered = match stop {
            StopPhase::Serving => self.has_socket_ended || now >= linger_deadline_ns,
            StopPhase::Grace => self.output.is_empty(),
            StopPhase::Over => true,
        };
        self.session.is_drained() && has_delivered
    }

    /// The time at which the connection must be checked again, ns. A connection that ends and has
    /// operations in flight needs no time, because their results make the core check it.
    pub(super) fn deadline(&self) -> Option<u64> {
        match self.linger_deadline_ns {
            Some(deadline_ns) => Some(deadline_ns).filter(|_| self.session.is_drained()),
            None => self.session.next_deadline(),
        }
    }

    /// Whether the end of the connection has begun.
    pub(super) const fn is_ending(&self) -> bool {
        self.linger_deadline_ns.is_some()
    }

    /// Whether the connection has no command in flight and no unsent bytes.
    pub(super) fn is_quiet(&self) -> bool {
        self.output.is_empty() && self.session.is_quiet()
    }

    /// The events for which the socket must be watched.
    pub(super) fn interest(&self) -> Interest {
        let takes_input = self.input_treatment() != InputTreatment::StaysInSocket;
        interest(takes_input, self.is_blocked)
    }
}

/// The way in which the shell must treat bytes from the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InputTreatment {
    /// Receive the bytes and pass them to the connection.
    Wanted,
    /// Receive the bytes and drop them.
    Dropped,
    /// Leave the bytes in the socket.
    StaysInSocket,
}

/// The events for which a socket must be watched.
///
/// While too much waits to be sent, the connection takes no input, and the socket is not watched
/// for input. Otherwise the input in the socket would wake the core again and again (trap T28).
const fn interest(takes_input: bool, is_blocked: bool) -> Interest {
    match (takes_input, is_blocked) {
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
