//! The sockets of an association's control queues: they send and receive bytes, and are closed when
//! their queue has ended.

use riopipe_net::{Interest, LinkError, Poller, PollerError, Received, RecvBuf, Socket};
use riopipe_session::initiator::association::{ConnectionEnd, ControlQueue};
use riopipe_session::initiator::endpoint::Endpoint;
use riopipe_session::outbox::Outbox;
use std::sync::Arc;

/// The data written over an association's own queues: a label, or a claim.
pub(crate) type Page = Arc<[u8]>;

/// Bytes that one PDU may have at most: the largest read and its header.
const RX_MAX: usize = (4 << 20) + 4096;

#[derive(Debug)]
struct ControlSocket {
    socket: Socket,
    rx: RecvBuf,
    /// Whether the poller watches for space in the send buffer.
    wants_write: bool,
}

/// The sockets, by [`ControlQueue`].
#[derive(Debug, Default)]
pub(crate) struct ControlSockets([Option<ControlSocket>; 3]);

impl ControlSockets {
    /// Assigns a connection to a queue.
    ///
    /// # Errors
    /// The poller cannot watch it.
    pub(crate) fn put(
        &mut self,
        queue: ControlQueue,
        socket: Socket,
        poller: &Poller,
    ) -> Result<(), PollerError> {
        poller.add(&socket, queue as u64, Interest::Read)?;
        let rx = RecvBuf::new(RX_MAX);
        self.0[queue as usize] = Some(ControlSocket { socket, rx, wants_write: false });
        Ok(())
    }

    /// Receives the bytes that have arrived; returns whether there were any, or a connection ended.
    /// The admin queue comes first, because its answers explain why the others end.
    pub(crate) fn receive(&mut self, endpoint: &mut impl Endpoint<Piece = Page>, now: u64) -> bool {
        let mut came = false;
        for queue in ControlQueue::ALL {
            let Some(ControlSocket { socket, rx, .. }) = &mut self.0[queue as usize] else {
                continue;
            };
            if !endpoint.is_open(queue) {
                continue;
            }
            let filled = rx.fill(socket);
            came |= !matches!(filled, Ok(Received::WouldBlock));
            match filled {
                Ok(Received::WouldBlock) => continue,
                Ok(Received::Bytes(_)) => {}
                Ok(Received::Closed) => {
                    endpoint.closed(queue, ConnectionEnd::Closed, now);
                    continue;
                }
                Err(error) => {
                    endpoint.closed(queue, broken(&error), now);
                    continue;
                }
            }
            let used = endpoint.received(queue, rx.data(), now);
            rx.consume(used);
            if rx.reserve(endpoint.need(queue, rx.data())).is_err() {
                let why = "a PDU larger than any that was requested".into();
                endpoint.closed(queue, ConnectionEnd::Broken(why), now);
            }
        }
        came
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
            let slot = &mut self.0[queue as usize];
            let Some(control) = slot else { continue };
            if let Err(error) = control.flush(endpoint.outbox(queue)) {
                endpoint.closed(queue, broken(&error), now);
            }
            if !endpoint.is_open(queue) {
                // Closing it ends the poller's watch.
                *slot = None;
                continue;
            }
            let wants_write = !endpoint.outbox(queue).is_empty();
            if wants_write != control.wants_write {
                control.wants_write = wants_write;
                let interest = if wants_write { Interest::Both } else { Interest::Read };
                // It has been added, so this can't fail.
                let _ = poller.modify(&control.socket, queue as u64, interest);
            }
        }
    }
}

impl ControlSocket {
    fn flush(&self, out: &mut Outbox<Page>) -> Result<(), LinkError> {
        while !out.is_empty() {
            let sent = self.socket.send(out.slices())?;
            out.consume(sent);
            if sent == 0 {
                break;
            }
        }
        Ok(())
    }
}

fn broken(error: &LinkError) -> ConnectionEnd {
    ConnectionEnd::Broken(error.to_string())
}
