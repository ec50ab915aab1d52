//! The thread of one connection.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use riopipe_media::{BLOCK_BYTES, BlockDevice, Data, Done, Submitted};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::protocol::{Command, Protocol, Request};
use crate::drive::VolumeQueue;

/// The most requests of a connection in flight. Further ones wait in the socket.
pub(super) const DEPTH: usize = 128;
/// With more data of requests in flight than this, no further one is taken.
const IN_FLIGHT_BYTES_MAX: u64 = 32 << 20;
/// With more bytes to send than this, no further request is taken.
const TO_SEND_MAX: usize = 8 << 20;
/// The bytes of one receive.
const RECEIVE_BYTES: usize = 256 << 10;
/// The time in which a client must choose the export.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// How often a connection checks whether the server stops.
const CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A socket of either kind.
pub(super) trait Socket: Read + Write + AsFd + Send {}
impl<S: Read + Write + AsFd + Send> Socket for S {}

/// Serves a connection until its client ends it, or the server stops and nothing is in flight. The
/// socket does not block.
pub(super) fn serve(
    mut socket: impl Socket,
    mut protocol: Protocol,
    queue: VolumeQueue,
    stops: &AtomicBool,
) {
    let mut served =
        Served { queue, in_flight: HashMap::new(), bytes: 0, next_op: 0, done: Vec::new() };
    let begun = Instant::now();
    let mut buf = vec![0; RECEIVE_BYTES];
    loop {
        served.take_results(&mut protocol);
        while served.takes_more()
            && protocol.unsent().len() < TO_SEND_MAX
            && let Some(request) = protocol.next_request()
        {
            served.begin(request, &mut protocol);
        }
        if send(&mut socket, protocol.unsent()).is_err() {
            return;
        }
        let is_over = protocol.has_ended() || stops.load(Ordering::Acquire);
        if is_over && served.in_flight.is_empty() {
            return;
        }
        if !protocol.is_transmitting() && begun.elapsed() > HANDSHAKE {
            return;
        }
        let takes_more = !is_over && served.takes_more() && protocol.unsent().len() < TO_SEND_MAX;
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, takes_more);
        flags.set(PollFlags::OUT, !protocol.unsent().is_empty());
        let mut polled =
            [PollFd::new(&socket, flags), PollFd::new(served.queue.event(), PollFlags::IN)];
        // The result does not matter: everything is checked after any wait.
        let _ = poll(&mut polled, Some(&CHECK));
        let ready = polled[0].revents();
        // A client that has gone gets no answer. Its requests in flight end without it.
        let has_gone = ready.contains(PollFlags::HUP) && !takes_more;
        if has_gone || ready.intersects(PollFlags::ERR | PollFlags::NVAL) {
            return;
        }
        if takes_more && ready.intersects(PollFlags::IN | PollFlags::HUP) {
            match socket.read(&mut buf) {
                Ok(0) => return,
                Ok(count) => protocol.receive(&buf[..count]),
                Err(error) if is_passing(error.kind()) => {}
                Err(_) => return,
            }
        }
    }
}

const fn is_passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Sends as much as the socket takes, and removes it.
fn send(socket: &mut impl Socket, bytes: &mut Vec<u8>) -> std::io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        match socket.write(&bytes[sent..]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => sent += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    bytes.drain(..sent);
    Ok(())
}

/// The operations of a connection.
struct Served {
    queue: VolumeQueue,
    /// The handle of each operation, and the bytes of its data.
    in_flight: HashMap<u64, (u64, u64)>,
    /// The bytes of data of all operations in flight.
    bytes: u64,
    next_op: u64,
    /// Empty between two calls.
    done: Vec<Done>,
}

impl Served {
    /// Whether another request may be taken.
    fn takes_more(&self) -> bool {
        self.in_flight.len() < DEPTH && self.bytes < IN_FLIGHT_BYTES_MAX
    }

    fn begin(&mut self, request: Request, protocol: &mut Protocol) {
        let Request { handle, command, lba, blocks, is_fua, data } = request;
        // Two requests may have one handle, so it is no name for an operation.
        let op = self.next_op;
        self.next_op += 1;
        let queue = &mut self.queue;
        let submitted = match (command, data) {
            (Command::Write, Some(data)) => queue.write_through(op, lba, Data::Owned(data), is_fua),
            (Command::Read, _) => queue.read(op, lba, blocks),
            (Command::Deallocate, _) => queue.deallocate_through(op, lba, blocks, is_fua),
            (Command::WriteZeroes, _) => queue.zero_through(op, lba, blocks, is_fua),
            (Command::Flush | Command::Write, _) => queue.flush(op),
        };
        match submitted {
            Submitted::Pending => {
                let has_data = matches!(command, Command::Read | Command::Write);
                let bytes = if has_data { blocks * BLOCK_BYTES as u64 } else { 0 };
                self.bytes += bytes;
                self.in_flight.insert(op, (handle, bytes));
            }
            Submitted::Done(Ok(data)) => protocol.reply(handle, Ok(data.as_deref())),
            Submitted::Done(Err(error)) => {
                tracing::warn!(%error, "an NBD request failed");
                protocol.reply(handle, Err(()));
            }
        }
    }

    fn take_results(&mut self, protocol: &mut Protocol) {
        self.queue.event().clear();
        let mut done = std::mem::take(&mut self.done);
        self.queue.poll(0, &mut done);
        for Done { op, result } in done.drain(..) {
            let Some((handle, bytes)) = self.in_flight.remove(&op) else { continue };
            self.bytes -= bytes;
            if let Err(error) = &result {
                tracing::warn!(%error, "an NBD request failed");
            }
            let result = result.as_ref().map(Option::as_deref).map_err(|_| ());
            protocol.reply(handle, result);
        }
        self.done = done;
    }
}
