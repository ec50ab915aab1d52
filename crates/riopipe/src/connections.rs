//! The connections of a stream: they send and receive bytes for its [`StreamDriver`].

use std::sync::Arc;

use riopipe_net::{Interest, PollerError, Received, RecvBuf, Socket, now_ns};
use riopipe_session::initiator::stream_driver::StreamDriver;
use riopipe_session::initiator::volume::error::Nonsense;

use crate::call_error::CallError;
use crate::failure::Exhausted;
use crate::lock::lock;
use crate::piece::Piece;
use crate::sockets::PDU_BYTES_MAX;
use crate::stream_handle::StreamHandle;

/// A connection to one server: its socket, and the received bytes that are not used yet.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    recv_buf: RecvBuf,
    /// Whether the poller watches for space in the send buffer.
    is_write_watched: bool,
}

/// An error of the connection to one server.
#[derive(Debug)]
pub(crate) struct ConnectionError {
    /// The number of the server in the volume.
    pub(crate) server: usize,
    pub(crate) error: CallError,
}

/// The sockets of a stream, one for each server that it is connected to.
#[derive(Debug)]
pub(crate) struct Connections {
    pub(crate) servers: Vec<Option<Connection>>,
    pub(crate) handle: Arc<StreamHandle>,
}

impl Connections {
    pub(crate) fn new(servers: usize, handle: Arc<StreamHandle>) -> Self {
        // The present messages are for an earlier incarnation, whose connections are closed.
        lock(&handle.messages).clear();
        Self { servers: (0..servers).map(|_| None).collect(), handle }
    }

    /// Adds a connected socket to a server.
    pub(crate) fn open(&mut self, server: usize, socket: Socket) -> Result<(), PollerError> {
        self.handle.poller().add(&socket, server as u64, Interest::Read)?;
        let recv_buf = RecvBuf::new(PDU_BYTES_MAX);
        self.servers[server] = Some(Connection { socket, recv_buf, is_write_watched: false });
        Ok(())
    }

    /// Closes the socket to a server. The poller stops watching a socket when it is closed.
    pub(crate) fn close(&mut self, server: usize) {
        self.servers[server] = None;
    }

    pub(crate) fn close_all(&mut self) {
        self.servers.fill_with(|| None);
    }

    /// Receives once from each target, then sends all that may be sent after that. Returns whether any
    /// byte was received or sent. `read_sink` gets the data of reads: an offset in the whole read, and
    /// the bytes there.
    pub(crate) fn receive_and_send(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
        read_sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, ConnectionError> {
        let has_received = self.receive_all(driver, now, read_sink)?;
        Ok(self.send_all(driver, now)? || has_received)
    }

    /// Receives once from each target. Returns whether any byte was received.
    #[inline]
    pub(crate) fn receive_all(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
        read_sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, ConnectionError> {
        let mut has_received = false;
        for server in 0..self.servers.len() {
            let received = self.receive(driver, server, now, read_sink);
            has_received |= received.map_err(|error| ConnectionError { server, error })?;
        }
        report_time(driver);
        Ok(has_received)
    }

    /// Sends all that may be sent to each target. Returns whether any byte was sent.
    #[inline]
    pub(crate) fn send_all(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
    ) -> Result<bool, ConnectionError> {
        let mut has_sent = false;
        driver.pump(now);
        report_time(driver);
        for server in 0..self.servers.len() {
            let sent = self.send(driver, server);
            has_sent |= sent.map_err(|error| ConnectionError { server, error })?;
        }
        Ok(has_sent)
    }

    /// Receives once from a server, and passes the bytes to the driver. Returns whether any byte was
    /// received.
    fn receive(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        server: usize,
        now: u64,
        read_sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, CallError> {
        let Some(connection) = &mut self.servers[server] else { return Ok(false) };
        let server_number = server as u16;
        if !driver.is_open(server_number) {
            return Ok(false);
        }
        match connection.recv_buf.fill(&connection.socket)? {
            Received::WouldBlock => return Ok(false),
            Received::Closed => return Err(CallError::Closed),
            Received::Bytes(_) => self.handle.record_received(server, now),
        }
        let consumed = driver.received(server_number, now, connection.recv_buf.data(), read_sink);
        let consumed_bytes = match consumed {
            Ok(bytes) => bytes,
            Err(error) => {
                // The outbox ends with a PDU that contains the reason. The connection is closed
                // in any case, so an error of this send does not matter.
                let _ = connection.socket.send(driver.outbox(server_number).slices());
                return Err(error.into());
            }
        };
        connection.recv_buf.consume(consumed_bytes);
        let needed_bytes = driver.need(server_number, connection.recv_buf.data());
        if connection.recv_buf.reserve(needed_bytes).is_err() {
            return Err(CallError::Nonsense(Nonsense::LargePdu));
        }
        Ok(true)
    }

    /// Sends the outbox as far as the kernel accepts it. If some of it is left, the poller reports when
    /// the kernel accepts more. Returns whether any byte was sent.
    pub(crate) fn send(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        server: usize,
    ) -> Result<bool, CallError> {
        let Some(connection) = &mut self.servers[server] else { return Ok(false) };
        let outbox = driver.outbox(server as u16);
        let mut has_sent = false;
        while !outbox.is_empty() {
            let sent_bytes = connection.socket.send(outbox.slices())?;
            if sent_bytes == 0 {
                break;
            }
            outbox.consume(sent_bytes);
            has_sent = true;
        }
        let must_watch_write = !outbox.is_empty();
        if must_watch_write != connection.is_write_watched {
            connection.is_write_watched = must_watch_write;
            let interest = if must_watch_write { Interest::Both } else { Interest::Read };
            let poller = self.handle.poller();
            let modified = poller.modify(&connection.socket, server as u64, interest);
            modified.map_err(poll_error)?;
        }
        Ok(has_sent)
    }
}

/// Reports the time to the driver if a traced group has entered a stage. The driver asks for the time,
/// because it has no clock.
#[inline]
pub(crate) fn report_time(driver: &mut StreamDriver<Piece>) {
    if driver.wants_instant() {
        driver.instant(now_ns());
    }
}

/// The error of a call for an error of the poller. The poller only fails if this process has no
/// resources left.
pub(crate) fn poll_error(error: PollerError) -> CallError {
    tracing::error!(%error, "cannot watch a connection");
    Exhausted::Descriptors.into()
}
