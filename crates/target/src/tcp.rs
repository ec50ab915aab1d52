//! A reactor's part of a connection: its socket and its receive buffer.

use std::net::IpAddr;
use std::sync::Arc;

use riopipe_net::{Filled, LinkError, Received, RecvBuf, Socket};
use riopipe_session::auth::tls::KeyOwner;
use riopipe_session::target::limits::{ADMIN_CAPSULE_BYTES, H2C_DATA_BYTES_MAX};
use riopipe_session::target::{LocalAddress, Transport};
use riopipe_tls::LinkEnd;

use crate::hosts::Traffic;

/// Length of the longest PDU that a host may send, in bytes, with headers, padding and digests.
const PDU_BYTES_MAX: usize = H2C_DATA_BYTES_MAX as usize + 1024;

/// Length of the receive buffer before the connection is admitted, in bytes. An ICReq (128 bytes) and a
/// Connect (1096 bytes, with digests 1104) fit into it.
const NARROW_BYTES: usize = 1536;

/// Length of the longest PDU before the connection is admitted, in bytes: a capsule of an admin queue with
/// its data, padding and digests.
const NARROW_PDU_BYTES_MAX: usize = ADMIN_CAPSULE_BYTES as usize + 1024;

/// Largest number of receives from one connection before the reactor serves the next one: enough
/// for streaming, few enough for fairness.
pub(crate) const RECEIVES_MAX: usize = 4;

/// A connection's socket, with the received bytes that its core has not consumed.
pub(crate) struct Tcp {
    socket: Socket,
    input: RecvBuf,
    /// The bytes of the connection.
    traffic: Arc<Traffic>,
    /// The end of the relay of TLS; `None` without TLS, and when the host is known.
    relay: Option<Arc<LinkEnd>>,
    /// Time of the last receive of any bytes, or of the start of the connection, in ns.
    pub(crate) last_receive: u64,
}

impl Tcp {
    pub(crate) fn new(socket: Socket, relay: Option<Arc<LinkEnd>>, now: u64) -> Self {
        let traffic = Arc::default();
        let input = RecvBuf::narrow(NARROW_BYTES, NARROW_PDU_BYTES_MAX);
        Self { socket, input, traffic, relay, last_receive: now }
    }

    /// The owner of the key by which TLS secures the connection, once: at the latest with the first bytes that
    /// came by TLS.
    #[inline]
    pub(crate) fn newly_secured(&mut self) -> Option<KeyOwner> {
        let owner = self.relay.as_ref()?.admitted()?.clone();
        self.relay = None;
        Some(owner)
    }

    pub(crate) const fn traffic(&self) -> &Arc<Traffic> {
        &self.traffic
    }

    pub(crate) const fn socket(&self) -> &Socket {
        &self.socket
    }

    /// The address of this machine that the host has connected to, which is that of this port.
    pub(crate) fn local(&self, portid: u16) -> Option<LocalAddress> {
        let address = self.socket.local_addr().ok()?;
        Some(LocalAddress { traddr: address.ip().to_string(), ipv6: address.is_ipv6(), portid })
    }

    /// Receives once: first into `data_space`, then behind the bytes that are not consumed.
    #[inline]
    pub(crate) fn fill(&mut self, data_space: &mut [u8], now: u64) -> Result<Filled, LinkError> {
        let filled = self.input.fill_behind(data_space, &self.socket);
        if let Ok(Filled { received: Received::Bytes(count), .. }) = filled {
            self.last_receive = now;
            self.traffic.add_received(count);
        }
        filled
    }

    /// Receives and drops available bytes; returns whether more may arrive. A peer that sends
    /// without end must not hold the reactor, so the number of receives is limited. The poller
    /// reports the rest again.
    pub(crate) fn discard(&mut self) -> bool {
        for _ in 0..RECEIVES_MAX {
            self.input.clear();
            match self.input.fill(&self.socket) {
                Ok(Received::Bytes(_)) => {}
                Ok(Received::WouldBlock) => return true,
                Ok(Received::Closed) | Err(_) => return false,
            }
        }
        true
    }
}

impl Transport for Tcp {
    fn peer(&self) -> String {
        self.socket.peer().to_string()
    }

    fn peer_address(&self) -> Option<IpAddr> {
        Some(self.socket.peer().ip())
    }

    fn admit(&mut self) {
        self.input.widen(PDU_BYTES_MAX);
    }

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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use riopipe_net::{Listener, SocketOptions, connect};

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn one_turn_drops_a_bounded_number_of_bytes() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().to_string();
        let peer = connect(&address, SOON, &SocketOptions::default()).unwrap();
        let mut tcp = Tcp::new(listener.accept().unwrap().unwrap(), None, 0);
        // A smaller buffer, so that the sockets hold more than one turn takes.
        tcp.input = RecvBuf::with_capacity(0, 0);
        let turn = RECEIVES_MAX * tcp.input.capacity();
        let mut sent = 0;
        loop {
            match peer.send([&[7; 65536][..]]).unwrap() {
                0 => break,
                n => sent += n,
            }
        }
        assert!(sent > turn + turn / 2, "the sockets hold only {sent} bytes");
        assert!(tcp.discard());
        let (mut left, start) = (0, Instant::now());
        while left < sent - turn && start.elapsed() < SOON {
            tcp.input.clear();
            if let Received::Bytes(n) = tcp.fill(&mut [], 0).unwrap().received {
                left += n;
            }
        }
        assert!(left >= sent - turn, "one turn took {} bytes", sent - left);
        // The end of the connection is seen in a later turn.
        drop(peer);
        while tcp.discard() {
            assert!(start.elapsed() < SOON);
        }
    }
}
