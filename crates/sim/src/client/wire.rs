//! The initiator's end of a connection.

use riopipe_session::outbox::Outbox;

use crate::core::Core;
use crate::network::Direction;
use crate::payload::Payload;

/// A connection as an initiator uses it.
#[derive(Debug)]
pub(super) struct Wire {
    /// The network's number.
    pub(super) conn: usize,
    rx: Vec<u8>,
}

impl Wire {
    /// A connection on which nothing was received yet.
    #[must_use]
    pub(super) const fn new(conn: usize) -> Self {
        Self { conn, rx: Vec::new() }
    }

    /// Receives bytes. `take` gets all bytes that are not consumed, and returns the number that it
    /// has used.
    ///
    /// # Errors
    /// The error of `take`.
    pub(super) fn feed<E>(
        &mut self,
        bytes: &[u8],
        mut take: impl FnMut(&[u8]) -> Result<usize, E>,
    ) -> Result<(), E> {
        if self.rx.is_empty() {
            let used = take(bytes)?;
            self.rx.extend_from_slice(&bytes[used..]);
        } else {
            self.rx.extend_from_slice(bytes);
            let used = take(&self.rx)?;
            self.rx.drain(..used);
        }
        Ok(())
    }

    /// Sends the pending bytes.
    pub(super) fn send(&self, out: &mut Outbox<Payload>, core: &mut Core) {
        if out.is_empty() {
            return;
        }
        let mut bytes = Vec::with_capacity(out.len_bytes());
        out.slices().for_each(|slice| bytes.extend_from_slice(slice));
        out.consume(bytes.len());
        core.send(self.conn, Direction::Up, bytes);
    }

    /// Closes it.
    pub(super) fn close(&self, core: &mut Core) {
        core.net.conn_mut(self.conn).client = None;
        core.end(self.conn, Direction::Up);
    }
}
