//! One connection in a reactor: socket, buffers, session.

use riopipe_media::AlignedBuf;
use riopipe_net::{Interest, LinkError, Received, RecvBuf, Socket};
use riopipe_session::outbox::Outbox;
use riopipe_session::target::limits::H2C_DATA_BYTES_MAX;
use riopipe_session::target::{ConnId, LocalAddress, TargetConn};

use crate::devices::Devices;
use crate::places::Place;

/// The longest PDU that a host may send, with room for headers, padding and digests.
const PDU_BYTES_MAX: usize = H2C_DATA_BYTES_MAX as usize + 1024;
/// How long a connection that is being closed may take to deliver its last words.
const LINGER_NS: u64 = 1_000_000_000;
/// Receives per turn of one connection: enough to keep it streaming, few enough to be fair.
const RECEIVES_PER_TURN: usize = 4;

/// A connection.
pub(crate) struct Link {
    socket: Socket,
    input: RecvBuf,
    pub(crate) output: Outbox<AlignedBuf>,
    pub(crate) conn: TargetConn<Devices>,
    /// Something is to be sent that the kernel did not take.
    pub(crate) blocked: bool,
    /// What its socket is watched for.
    pub(crate) watching: Interest,
    /// Nothing more is read; gone once drained and delivered, or at this time.
    ending: Option<u64>,
    /// The socket has nothing more to give or to take.
    dead: bool,
    /// The reactor that counts it as an I/O queue.
    pub(crate) placed: Option<usize>,
    /// When it last received something.
    pub(crate) active: u64,
    /// Wherever it goes, it counts as one of all connections until it is dropped (T28).
    _place: Place,
}

impl Link {
    pub(crate) fn new(socket: Socket, id: ConnId, key: u64, place: Place, now: u64) -> Self {
        let local = socket.local_addr().ok().map(|address| LocalAddress {
            traddr: address.ip().to_string(),
            ipv6: address.is_ipv6(),
        });
        Self {
            socket,
            input: RecvBuf::new(PDU_BYTES_MAX),
            output: Outbox::new(),
            conn: TargetConn::new(id, key, crate::crc::crc32c, now).came_by(local),
            blocked: false,
            watching: Interest::Read,
            ending: None,
            dead: false,
            placed: None,
            active: now,
            _place: place,
        }
    }

    pub(crate) const fn socket(&self) -> &Socket {
        &self.socket
    }

    /// What its socket is to be watched for.
    pub(crate) fn interest(&self) -> Interest {
        let receives = self.ending.is_some() || self.conn.wants_input(&self.output);
        interest(receives, self.blocked)
    }

    /// Receives and answers; says whether anything came.
    pub(crate) fn receive(&mut self, devices: &mut Devices) -> bool {
        let mut any = false;
        for _ in 0..RECEIVES_PER_TURN {
            if self.ending.is_some() {
                self.discard();
                return any;
            }
            if !self.conn.wants_input(&self.output) {
                return any;
            }
            match self.input.fill(&self.socket) {
                Ok(Received::Bytes(n)) => {
                    any = true;
                    self.active = devices.now;
                    self.digest(devices);
                    self.send(devices);
                    // A short receive has emptied the socket: asking again would only say so.
                    if n < RecvBuf::DEFAULT_CAPACITY / 4 {
                        return any;
                    }
                }
                Ok(Received::WouldBlock) => return any,
                Ok(Received::Closed) => {
                    self.end("the host closed the connection", devices);
                    self.dead = true;
                    return true;
                }
                Err(error) => {
                    self.broken(&error, devices);
                    return true;
                }
            }
        }
        any
    }

    /// Hands what has been received to the session.
    pub(crate) fn digest(&mut self, devices: &mut Devices) {
        if self.ending.is_some() {
            return;
        }
        match self.conn.receive(self.input.data(), devices, &mut self.output) {
            Ok(consumed) => {
                self.input.consume(consumed);
                let need = self.conn.need(self.input.data());
                if let Err(error) = self.input.reserve(need) {
                    // `Rx` refuses longer PDUs on sight; this is the second bolt on that door.
                    self.end(&error.to_string(), devices);
                }
            }
            Err(closed) => self.end(&closed.to_string(), devices),
        }
    }

    /// Sends what the kernel takes.
    pub(crate) fn send(&mut self, devices: &mut Devices) {
        while !self.output.is_empty() && !self.dead {
            match self.socket.send(self.output.slices()) {
                Ok(0) => {
                    self.blocked = true;
                    return;
                }
                Ok(sent) => {
                    let stuck = !self.conn.wants_input(&self.output);
                    self.output.consume(sent);
                    self.conn.sent(devices, &mut self.output);
                    if stuck && self.conn.wants_input(&self.output) {
                        self.digest(devices);
                    }
                }
                Err(error) => self.broken(&error, devices),
            }
        }
        self.blocked = false;
        if self.ending.is_some() && !self.dead {
            self.socket.finish_sending();
        }
    }

    /// Begins the end: no more input, last words still go out.
    pub(crate) fn end(&mut self, why: &str, devices: &mut Devices) {
        if self.ending.is_none() {
            self.ending = Some(devices.now + LINGER_NS);
            self.conn.closing(why, devices);
        }
    }

    fn broken(&mut self, error: &LinkError, devices: &mut Devices) {
        self.dead = true;
        self.output.clear();
        self.end(&error.to_string(), devices);
    }

    /// Whether it may be dropped.
    pub(crate) fn is_over(&self, now: u64) -> bool {
        let Some(deadline) = self.ending else {
            return false;
        };
        // The socket lives on until the peer has read the last words: closing it over unread
        // input would reset the connection and take them back.
        self.conn.is_drained() && (self.dead || now >= deadline)
    }

    /// When it wants to be looked at again.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.ending.or_else(|| self.conn.next_deadline())
    }

    /// Whether it is being closed.
    pub(crate) const fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Whether nothing of it is under way: no command at a drive, no answer unsent.
    pub(crate) fn is_quiet(&self) -> bool {
        self.output.is_empty() && self.conn.is_quiet()
    }

    fn discard(&mut self) {
        self.input.clear();
        loop {
            match self.input.fill(&self.socket) {
                Ok(Received::Bytes(_)) => self.input.clear(),
                Ok(Received::WouldBlock) => return,
                Ok(Received::Closed) | Err(_) => {
                    self.dead = true;
                    return;
                }
            }
        }
    }
}

/// What a socket is watched for. One of which nothing is received just now, since too much waits to
/// be sent, is not watched for that: what has come in would wake the reactor without end (T28).
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
    fn t28_who_takes_no_answers_is_not_listened_to() {
        assert_eq!(interest(true, false), Interest::Read);
        assert_eq!(interest(true, true), Interest::Both);
        assert_eq!(interest(false, true), Interest::Write);
    }
}
