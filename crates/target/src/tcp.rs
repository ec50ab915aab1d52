//! A reactor's part of a connection: its socket and its receive buffer.

use std::net::SocketAddr;

use riopipe_net::{LinkError, Received, RecvBuf, Socket};
use riopipe_session::target::limits::H2C_DATA_BYTES_MAX;
use riopipe_session::target::{LocalAddress, Transport};

/// Length of the longest PDU that a host may send, in bytes, with headers, padding and digests.
const PDU_BYTES_MAX: usize = H2C_DATA_BYTES_MAX as usize + 1024;

/// A socket, with received bytes that are not consumed.
pub(crate) struct Tcp {
    socket: Socket,
    input: RecvBuf,
    /// Time of its last receive, in ns.
    pub(crate) active: u64,
}

impl Tcp {
    pub(crate) fn new(socket: Socket, now: u64) -> Self {
        Self { socket, input: RecvBuf::new(PDU_BYTES_MAX), active: now }
    }

    pub(crate) const fn socket(&self) -> &Socket {
        &self.socket
    }

    pub(crate) fn peer(&self) -> SocketAddr {
        self.socket.peer()
    }

    /// The address of this machine that the host has connected to.
    pub(crate) fn local(&self) -> Option<LocalAddress> {
        let address = self.socket.local_addr().ok()?;
        Some(LocalAddress { traddr: address.ip().to_string(), ipv6: address.is_ipv6() })
    }

    /// Receives once, behind the bytes that are there.
    #[inline]
    pub(crate) fn fill(&mut self, now: u64) -> Result<Received, LinkError> {
        let received = self.input.fill(&self.socket);
        if matches!(received, Ok(Received::Bytes(_))) {
            self.active = now;
        }
        received
    }

    /// Receives and drops all available bytes; returns whether more may arrive.
    pub(crate) fn discard(&mut self) -> bool {
        loop {
            self.input.clear();
            match self.input.fill(&self.socket) {
                Ok(Received::Bytes(_)) => {}
                Ok(Received::WouldBlock) => return true,
                Ok(Received::Closed) | Err(_) => return false,
            }
        }
    }
}

impl Transport for Tcp {
    #[inline]
    fn input(&self) -> &[u8] {
        self.input.data()
    }

    #[inline]
    fn consume(&mut self, bytes: usize) {
        self.input.consume(bytes);
    }

    #[inline]
    fn reserve(&mut self, bytes: usize) -> Result<(), String> {
        self.input.reserve(bytes).map_err(|error| error.to_string())
    }
}
