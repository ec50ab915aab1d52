//! The sockets of an association's control queues: they send and receive bytes, and are closed when
//! their queue has ended.

use riopipe_net::{Interest, LinkError, Poller, PollerError, Received, RecvBuf, Socket};
use riopipe_session::initiator::association::{ConnectionEnd, ControlQueue};
use riopipe_session::initiator::endpoint::Endpoint;
use riopipe_session::outbox::Outbox;
use std::sync::Arc;

use crate::association::READ_BYTES_MAX;

/// The data written over an association's own queues: a label, or a claim.
pub(crate) type Page = Arc<[u8]>;

/// The largest PDU: the data of the largest read (4 MiB), and at most one page for its header and
/// digests.
pub(crate) const PDU_BYTES_MAX: usize = READ_BYTES_MAX as usize + 4096;

#[derive(Debug)]
struct ControlSocket {
    socket: Socket,
    recv_buf: RecvBuf,
    /// Whether the poller watches for space in the send buffer.
    is_write_watched: bool,
}

/// The sockets, by [`ControlQueue`].
#[derive(Debug, Default)]
pub(crate) struct ControlSockets([Option<ControlSocket>; 3]);

impl ControlSockets {
    /// Assigns a connection to a queue.
    ///
    /// # Errors
    /// The poller cannot watch it.
    pub(crate) fn insert(
        &mut self,
        queue: ControlQueue,
        socket: Socket,
        poller: &Poller,
    ) -> Result<(), PollerError> {
        poller.add(&socket, queue as u64, Interest::Read)?;
        let recv_buf = RecvBuf::new(PDU_BYTES_MAX);
        self.0[queue as usize] = Some(ControlSocket { socket, recv_buf, is_write_watched: false });
        Ok(())
    }

    /// Receives the bytes that have arrived, and passes them to the endpoint. Returns whether any byte
    /// arrived or a connection ended. `ControlQueue::ALL` begins with the admin queue, because its answers
    /// explain why the other queues end.
    pub(crate) fn receive(&mut self, endpoint: &mut impl Endpoint<Piece = Page>, now: u64) -> bool {
        let mut has_changed = false;
        for queue in ControlQueue::ALL {
            let Some(ControlSocket { socket, recv_buf, .. }) = &mut self.0[queue as usize] else {
                continue;
            };
            if !endpoint.is_open(queue) {
                continue;
            }
            let received = recv_buf.fill(socket);
            has_changed |= !matches!(received, Ok(Received::WouldBlock));
            match received {
                Ok(Received::WouldBlock) => continue,
                Ok(Received::Bytes(_)) => {}
                Ok(Received::Closed) => {
                    endpoint.closed(queue, ConnectionEnd::Closed, now);
                    continue;
                }
                Err(error) => {
                    endpoint.closed(queue, broken_connection(&error), now);
                    continue;
                }
            }
            let consumed_bytes = endpoint.received(queue, recv_buf.data(), now);
            recv_buf.consume(consumed_bytes);
            let needed_bytes = endpoint.need(queue, recv_buf.data());
            if recv_buf.reserve(needed_bytes).is_err() {
                let why = "a PDU larger than any that was requested".into();
                endpoint.closed(queue, ConnectionEnd::Broken(why), now);
            }
        }
        has_changed
    }

    /// Sends the outboxes as far as the kernel accepts them, and closes the sockets of queues that have
    /// ended.
    pub(crate) fn send(
        &mut self,
        endpoint: &mut impl Endpoint<Piece = Page>,
        poller: &Poller,
        now: u64,
    ) {
        for queue in ControlQueue::ALL {
            let queue_socket = &mut self.0[queue as usize];
            let Some(control) = queue_socket else { continue };
            if let Err(error) = control.send(endpoint.outbox(queue)) {
                endpoint.closed(queue, broken_connection(&error), now);
            }
            if !endpoint.is_open(queue) {
                // The poller stops watching a socket when it is closed.
                *queue_socket = None;
                continue;
            }
            let must_watch_write = !endpoint.outbox(queue).is_empty();
            if must_watch_write != control.is_write_watched {
                control.is_write_watched = must_watch_write;
                let interest = if must_watch_write { Interest::Both } else { Interest::Read };
                // This can't fail, because the poller watches the socket.
                let _ = poller.modify(&control.socket, queue as u64, interest);
            }
        }
    }
}

impl ControlSocket {
    /// Sends the outbox as far as the kernel accepts it.
    fn send(&self, outbox: &mut Outbox<Page>) -> Result<(), LinkError> {
        while !outbox.is_empty() {
            let sent_bytes = self.socket.send(outbox.slices())?;
            outbox.consume(sent_bytes);
            if sent_bytes == 0 {
                break;
            }
        }
        Ok(())
    }
}

fn broken_connection(error: &LinkError) -> ConnectionEnd {
    ConnectionEnd::Broken(error.to_string())
}
