//! The connections of a stream: they send and receive bytes for its [`StreamDriver`].

use std::sync::Arc;

use riopipe_net::{Interest, PollerError, Received, RecvBuf, Socket, current_core, now_ns};
use riopipe_session::initiator::stream::ReadSink;
use riopipe_session::initiator::stream_driver::StreamDriver;
use riopipe_session::initiator::volume::error::Nonsense;

use crate::call_error::CallError;
use crate::failure::Exhausted;
use crate::lock::lock;
use crate::piece::Piece;
use crate::sockets::PDU_BYTES_MAX;
use crate::stream_handle::StreamHandle;

/// The connection of one link: its socket, and the received bytes that are not used yet.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    recv_buf: RecvBuf,
    /// Whether the poller watches for space in the send buffer.
    is_write_watched: bool,
}

/// An error of the connection of one link.
#[derive(Debug)]
pub(crate) struct ConnectionError {
    /// The link.
    pub(crate) link: usize,
    pub(crate) error: CallError,
}

/// The sockets of a stream, one for each [link](riopipe_session::initiator::stream) that is
/// connected.
#[derive(Debug)]
pub(crate) struct Connections {
    pub(crate) links: Vec<Option<Connection>>,
    pub(crate) handle: Arc<StreamHandle>,
}

impl Connections {
    pub(crate) fn new(links: usize, handle: Arc<StreamHandle>) -> Self {
        // The present messages are for an earlier incarnation, whose connections are closed.
        lock(&handle.messages).clear();
        Self { links: (0..links).map(|_| None).collect(), handle }
    }

    /// Adds the connected socket of a link.
    pub(crate) fn open(&mut self, link: usize, socket: Socket) -> Result<(), PollerError> {
        self.handle.poller().add(&socket, link as u64, Interest::Read)?;
        let recv_buf = RecvBuf::new(PDU_BYTES_MAX);
        self.links[link] = Some(Connection { socket, recv_buf, is_write_watched: false });
        Ok(())
    }

    /// Closes the socket of a link. The poller stops watching a socket when it is closed.
    pub(crate) fn close(&mut self, link: usize) {
        self.links[link] = None;
    }

    pub(crate) fn close_all(&mut self) {
        self.links.fill_with(|| None);
    }

    /// Receives once from each target, then sends all that may be sent after that. Returns whether any
    /// byte was received or sent. `read_sink` gets the data of reads.
    pub(crate) fn receive_and_send(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
        read_sink: &mut ReadSink<'_>,
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
        read_sink: &mut ReadSink<'_>,
    ) -> Result<bool, ConnectionError> {
        let mut has_received = false;
        for link in 0..self.links.len() {
            let received = self.receive(driver, link, now, read_sink);
            has_received |= received.map_err(|error| ConnectionError { link, error })?;
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
        note_core(driver);
        driver.pump(now);
        report_time(driver);
        for link in 0..self.links.len() {
            let sent = self.send(driver, link);
            has_sent |= sent.map_err(|error| ConnectionError { link, error })?;
        }
        Ok(has_sent)
    }

    /// Receives once over a link, and passes the bytes to the driver. Returns whether any byte was
    /// received.
    fn receive(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        link: usize,
        now: u64,
        read_sink: &mut ReadSink<'_>,
    ) -> Result<bool, CallError> {
        let Some(connection) = &mut self.links[link] else { return Ok(false) };
        let link_number = link as u16;
        if !driver.is_open(link_number) {
            return Ok(false);
        }
        match connection.recv_buf.fill(&connection.socket)? {
            Received::WouldBlock => return Ok(false),
            Received::Closed => return Err(CallError::Closed),
            Received::Bytes(_) => {
                let server = driver.server_of(link_number);
                self.handle.record_received(usize::from(server), now);
            }
        }
        let consumed = driver.received(link_number, now, connection.recv_buf.data(), read_sink);
        let consumed_bytes = match consumed {
            Ok(bytes) => bytes,
            Err(error) => {
                // The outbox ends with a PDU that contains the reason. The connection is closed
                // in any case, so an error of this send does not matter.
                let _ = connection.socket.send(driver.outbox(link_number).slices());
                return Err(error.into());
            }
        };
        connection.recv_buf.consume(consumed_bytes);
        let needed_bytes = driver.need(link_number, connection.recv_buf.data());
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
        link: usize,
    ) -> Result<bool, CallError> {
        let Some(connection) = &mut self.links[link] else { return Ok(false) };
        let outbox = driver.outbox(link as u16);
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
            let modified = poller.modify(&connection.socket, link as u64, interest);
            modified.map_err(poll_error)?;
        }
        Ok(has_sent)
    }
}

/// Reports the core of this thread to the driver, if the engine has a queue for each core.
#[inline]
pub(crate) fn note_core(driver: &mut StreamDriver<Piece>) {
    if driver.wants_core() {
        driver.set_core(current_core());
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
