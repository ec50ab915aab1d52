//! The connections of a stream: they send and receive bytes for its [`StreamDriver`].

use std::sync::Arc;

use riopipe_net::{Interest, PollerError, Received, RecvBuf, Socket, now_ns};
use riopipe_session::initiator::stream_driver::StreamDriver;
use riopipe_session::initiator::volume::error::Nonsense;

use crate::call_error::CallError;
use crate::failure::Exhausted;
use crate::lock::lock;
use crate::piece::Piece;
use crate::stream_handle::StreamHandle;

/// A connection to one server: its socket, and the received bytes that are not used yet.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    rx: RecvBuf,
    /// Whether the poller watches for space in the send buffer.
    wants_write: bool,
}

/// Bytes that one PDU may have at most: the largest read and its header.
const RX_MAX: usize = (4 << 20) + 4096;

/// The sockets of a stream, one for each server that it is connected to.
#[derive(Debug)]
pub(crate) struct Connections {
    pub(crate) servers: Vec<Option<Connection>>,
    pub(crate) handle: Arc<StreamHandle>,
}

impl Connections {
    pub(crate) fn new(servers: usize, handle: Arc<StreamHandle>) -> Self {
        // Messages for an earlier incarnation are about connections that are closed.
        lock(&handle.messages).clear();
        Self { servers: (0..servers).map(|_| None).collect(), handle }
    }

    /// Adds a connected socket to a server.
    pub(crate) fn open(&mut self, server: usize, socket: Socket) -> Result<(), PollerError> {
        self.handle.poller().add(&socket, server as u64, Interest::Read)?;
        let rx = RecvBuf::new(RX_MAX);
        self.servers[server] = Some(Connection { socket, rx, wants_write: false });
        Ok(())
    }

    /// Closes the socket to a server; that ends the poller's watch.
    pub(crate) fn close(&mut self, server: usize) {
        self.servers[server] = None;
    }

    pub(crate) fn close_all(&mut self) {
        self.servers.fill_with(|| None);
    }

    /// Receives once from each target, then sends all that may be sent after that. Returns whether any
    /// byte was received or sent.
    pub(crate) fn round(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, (usize, CallError)> {
        let received = self.receive_all(driver, now, sink)?;
        Ok(self.send_all(driver, now)? || received)
    }

    /// Receives once from each target. Returns whether any byte was received.
    #[inline]
    pub(crate) fn receive_all(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, (usize, CallError)> {
        let mut received = false;
        for server in 0..self.servers.len() {
            received |= self.receive(driver, server, now, sink).map_err(|e| (server, e))?;
        }
        report_time(driver);
        Ok(received)
    }

    /// Sends all that may be sent to each target. Returns whether any byte was sent.
    #[inline]
    pub(crate) fn send_all(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
    ) -> Result<bool, (usize, CallError)> {
        let mut sent = false;
        driver.pump(now);
        report_time(driver);
        for server in 0..self.servers.len() {
            sent |= self.send(driver, server).map_err(|e| (server, e))?;
        }
        Ok(sent)
    }

    fn receive(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        server: usize,
        now: u64,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, CallError> {
        let Some(connection) = &mut self.servers[server] else { return Ok(false) };
        let at = server as u16;
        if !driver.is_open(at) {
            return Ok(false);
        }
        match connection.rx.fill(&connection.socket)? {
            Received::WouldBlock => return Ok(false),
            Received::Closed => return Err(CallError::Closed),
            Received::Bytes(_) => {}
        }
        let used = match driver.received(at, now, connection.rx.data(), sink) {
            Ok(used) => used,
            Err(error) => {
                // Sends the reason, if the target still receives.
                let _ = connection.socket.send(driver.outbox(at).slices());
                return Err(error.into());
            }
        };
        connection.rx.consume(used);
        let need = driver.need(at, connection.rx.data());
        if connection.rx.reserve(need).is_err() {
            return Err(CallError::Nonsense(Nonsense::LargePdu));
        }
        Ok(true)
    }

    /// Sends the outbox as far as the kernel accepts it.
    pub(crate) fn send(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        server: usize,
    ) -> Result<bool, CallError> {
        let Some(connection) = &mut self.servers[server] else { return Ok(false) };
        let out = driver.outbox(server as u16);
        let mut sent_any = false;
        while !out.is_empty() {
            let sent = connection.socket.send(out.slices())?;
            if sent == 0 {
                break;
            }
            out.consume(sent);
            sent_any = true;
        }
        let wants_write = !out.is_empty();
        if wants_write != connection.wants_write {
            connection.wants_write = wants_write;
            let interest = if wants_write { Interest::Both } else { Interest::Read };
            let poller = self.handle.poller();
            let modified = poller.modify(&connection.socket, server as u64, interest);
            modified.map_err(poll_error)?;
        }
        Ok(sent_any)
    }
}

/// Reports the time to the driver if a traced group has entered a stage: the session has no clock.
#[inline]
pub(crate) fn report_time(driver: &mut StreamDriver<Piece>) {
    if driver.wants_instant() {
        driver.instant(now_ns());
    }
}

pub(crate) fn poll_error(error: PollerError) -> CallError {
    tracing::error!(%error, "cannot watch a connection");
    Exhausted::Descriptors.into()
}
