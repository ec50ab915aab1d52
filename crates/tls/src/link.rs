//! One connection of a [`Relay`](crate::Relay): the socket to the network, the socket to the program, and
//! the bytes between them.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use riopipe_net::Interest;
use riopipe_session::auth::tls::{Demand, KeyOwner};
use socket2::SockRef;

use crate::door::Door;
use crate::error::TlsError;
use crate::stream::{HANDSHAKE_RECORD, Step, TlsStream};

/// The number of bytes that one direction moves at once. It is also the most that waits in a link, for each
/// direction, because nothing more is read before those are written.
pub(crate) const MOVED_BYTES_MAX: usize = 64 << 10;
/// How often one direction moves bytes before it is another connection's turn.
const MOVES_MAX: usize = 4;

/// The time for which a peer may take no bytes: a little longer than the program allows it (30 s), which then
/// names the reason.
const UNSENT_MAX: Duration = Duration::from_secs(35);

/// The facts of a connection besides its bytes. The program's socket and the relay share them.
#[derive(Debug)]
pub struct LinkEnd {
    failure: OnceLock<String>,
    admitted: OnceLock<KeyOwner>,
}

impl LinkEnd {
    /// The host that has proved that it has its key; `None` before, and on a connection without TLS.
    #[must_use]
    pub fn admitted(&self) -> Option<&KeyOwner> {
        self.admitted.get()
    }
}

impl riopipe_net::Relay for LinkEnd {
    fn failure(&self) -> Option<String> {
        self.failure.get().cloned()
    }
}

/// The side of the network.
#[derive(Debug)]
enum Outer {
    /// The host has not sent its first byte.
    Waiting(TcpStream, Arc<Door>, Demand),
    /// The handshake has begun.
    Handshake(TlsStream),
    /// The session.
    Tls(TlsStream),
    /// A connection without TLS, where that is allowed.
    Plain(TcpStream),
}

/// The events that a link waits for, on the side of the network and on that of the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Watched {
    pub(crate) outer: Option<Interest>,
    pub(crate) inner: Option<Interest>,
}

/// The state of a link after its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It waits for an event.
    Waits,
    /// It can go on at once, and has let the others have their turn.
    HasMore,
    /// It is over.
    Over,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Link {
    /// `None` only while one state replaces the other, and after a failure.
    outer: Option<Outer>,
    inner: UnixStream,
    end: Arc<LinkEnd>,
    peer: SocketAddr,
    /// Bytes for the program that it has not taken.
    up: Vec<u8>,
    /// Bytes for the network that it has not taken.
    down: Vec<u8>,
    /// The peer has ended its direction.
    has_outer_ended: bool,
    /// The program has been informed of that.
    is_inner_told: bool,
    /// The program has ended its direction, or is gone.
    has_inner_ended: bool,
    /// The program takes no more bytes.
    is_inner_gone: bool,
    /// The peer has been informed that nothing more comes.
    is_outer_told: bool,
    /// The events for which the relay's poller watches the link.
    pub(crate) watched: Watched,
}

/// Ends the connection when its peer takes no bytes for [`UNSENT_MAX`]. The program ends it earlier, but
/// its end reaches the link behind the bytes that the peer does not take (trap T28).
fn limit_unsent(outer: BorrowedFd<'_>) {
    // Without the option the bytes of such a peer stay longer.
    let _ = SockRef::from(&outer).set_tcp_user_timeout(Some(UNSENT_MAX));
}

impl Link {
    /// A connection to a target, whose host has not sent anything.
    pub(crate) fn waiting(
        stream: TcpStream,
        door: Arc<Door>,
        demand: Demand,
        inner: UnixStream,
        end: (SocketAddr, Arc<LinkEnd>),
    ) -> Self {
        Self::new(Outer::Waiting(stream, door, demand), inner, end)
    }

    /// A connection with a session.
    pub(crate) fn open(tls: TlsStream, inner: UnixStream, end: (SocketAddr, Arc<LinkEnd>)) -> Self {
        Self::new(Outer::Tls(tls), inner, end)
    }

    fn new(outer: Outer, inner: UnixStream, (peer, end): (SocketAddr, Arc<LinkEnd>)) -> Self {
        if let Outer::Waiting(stream, ..) | Outer::Plain(stream) = &outer {
            limit_unsent(stream.as_fd());
        } else if let Outer::Handshake(tls) | Outer::Tls(tls) = &outer {
            limit_unsent(tls.as_fd());
        }
        Self {
            outer: Some(outer),
            inner,
            end,
            peer,
            up: Vec::new(),
            down: Vec::new(),
            has_outer_ended: false,
            is_inner_told: false,
            has_inner_ended: false,
            is_inner_gone: false,
            is_outer_told: false,
            watched: Watched::default(),
        }
    }

    pub(crate) fn new_end() -> Arc<LinkEnd> {
        Arc::new(LinkEnd { failure: OnceLock::new(), admitted: OnceLock::new() })
    }

    pub(crate) fn inner_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }

    pub(crate) fn outer_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(match self.outer.as_ref()? {
            Outer::Waiting(stream, ..) | Outer::Plain(stream) => stream.as_fd(),
            Outer::Handshake(tls) | Outer::Tls(tls) => tls.as_fd(),
        })
    }

    /// Whether the program has ended its direction. The rest of the connection has a time limit then.
    pub(crate) const fn is_ending(&self) -> bool {
        self.has_inner_ended
    }

    /// The events that the link waits for.
    pub(crate) fn interest(&self) -> Watched {
        let (outer_reads, outer_writes) = match &self.outer {
            Some(Outer::Waiting(..)) => (true, false),
            Some(Outer::Handshake(tls)) => {
                let writes = tls.awaited() == Interest::Write;
                (!writes, writes)
            }
            Some(Outer::Tls(_) | Outer::Plain(_)) => {
                (self.up.is_empty() && !self.has_outer_ended, self.owes_outer())
            }
            None => (false, false),
        };
        let inner_reads = self.down.is_empty() && !self.has_inner_ended;
        Watched {
            outer: interest(outer_reads, outer_writes),
            inner: interest(inner_reads, !self.up.is_empty()),
        }
    }

    /// Whether something for the network waits: bytes, or the end of the direction.
    fn owes_outer(&self) -> bool {
        !self.down.is_empty() || (self.has_inner_ended && !self.is_outer_told)
    }

    /// Moves what can be moved now. `scratch` has [`MOVED_BYTES_MAX`] bytes.
    pub(crate) fn turn(&mut self, scratch: &mut [u8]) -> Turn {
        match self.try_turn(scratch) {
            Ok(turn) => turn,
            Err(error) => {
                self.fail(&error);
                Turn::Over
            }
        }
    }

    /// Notes the reason of the end for the program, and for the operator if a handshake has failed.
    fn fail(&mut self, error: &TlsError) {
        let is_handshake = matches!(self.outer, Some(Outer::Waiting(..) | Outer::Handshake(_)));
        if is_handshake {
            tracing::warn!(peer = %self.peer, "TLS refused: {error}");
        }
        let _ = self.end.failure.set(error.to_string());
    }

    fn try_turn(&mut self, scratch: &mut [u8]) -> Result<Turn, TlsError> {
        if self.step_handshake(scratch)? == Turn::Over {
            return Ok(Turn::Over);
        }
        if matches!(self.outer, Some(Outer::Waiting(..) | Outer::Handshake(_))) {
            return Ok(Turn::Waits);
        }
        let has_more_up = self.move_up(scratch)?;
        let has_more_down = self.move_down(scratch)?;
        let is_over = self.is_outer_told && (self.has_outer_ended || self.is_inner_gone);
        Ok(match is_over {
            true => Turn::Over,
            false if has_more_up || has_more_down => Turn::HasMore,
            false => Turn::Waits,
        })
    }

    /// Takes the steps before the session. [`Turn::Over`]: one of the ends has closed the connection.
    fn step_handshake(&mut self, scratch: &mut [u8]) -> Result<Turn, TlsError> {
        if let Some(Outer::Waiting(stream, door, demand)) = &self.outer {
            let mut first = [0];
            match stream.peek(&mut first) {
                Ok(0) => return Ok(Turn::Over),
                Ok(_) if first[0] == HANDSHAKE_RECORD => {
                    // The state is replaced before the session can fail, so that a failure is one of a handshake.
                    let door = Arc::clone(door);
                    if let Some(Outer::Waiting(stream, ..)) = self.outer.take() {
                        self.outer = Some(Outer::Handshake(door.session(stream)?));
                    }
                }
                Ok(_) if *demand == Demand::Required => {
                    // Unread bytes would make the kernel reset the connection, which hosts report as a
                    // failure of the network.
                    let _ = (&mut &*stream).read(scratch);
                    return Err(TlsError::PlainHost);
                }
                Ok(_) => {
                    if let Some(Outer::Waiting(stream, ..)) = self.outer.take() {
                        self.outer = Some(Outer::Plain(stream));
                    }
                }
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(TlsError::Io(error)),
            }
        }
        if let Some(Outer::Handshake(tls)) = &mut self.outer
            && let Step::Done(admitted) = Door::handshake(tls)?
        {
            let _ = self.end.admitted.set(admitted);
            if let Some(Outer::Handshake(tls)) = self.outer.take() {
                self.outer = Some(Outer::Tls(tls));
            }
        }
        if matches!(self.outer, Some(Outer::Waiting(..) | Outer::Handshake(_))) {
            // The program sends nothing before the host has. It may give up the connection.
            self.read_inner(scratch)?;
            if self.has_inner_ended {
                return Ok(Turn::Over);
            }
        }
        Ok(Turn::Waits)
    }

    /// Moves bytes from the network to the program. Returns whether there may be more at once.
    fn move_up(&mut self, scratch: &mut [u8]) -> Result<bool, TlsError> {
        for _ in 0..MOVES_MAX {
            self.write_inner();
            if !self.up.is_empty() {
                return Ok(false);
            }
            if self.has_outer_ended {
                if !std::mem::replace(&mut self.is_inner_told, true) {
                    // The only failure is "not connected", which is the intended result.
                    let _ = self.inner.shutdown(Shutdown::Write);
                }
                return Ok(false);
            }
            match self.recv_outer(scratch)? {
                Step::Blocked => return Ok(false),
                Step::Done(0) => self.has_outer_ended = true,
                // Bytes for a program that takes none are dropped: unread bytes would make the kernel reset the connection, and
                // the peer would lose the last bytes.
                Step::Done(_) if self.is_inner_gone => {}
                Step::Done(count) => self.up.extend_from_slice(&scratch[..count]),
            }
        }
        Ok(true)
    }

    /// Moves bytes from the program to the network. Returns whether there may be more at once.
    fn move_down(&mut self, scratch: &mut [u8]) -> Result<bool, TlsError> {
        for _ in 0..MOVES_MAX {
            while !self.down.is_empty() {
                match self.send_outer()? {
                    Step::Blocked => return Ok(false),
                    Step::Done(count) => drop(self.down.drain(..count)),
                }
            }
            if self.has_inner_ended {
                if !self.is_outer_told && self.finish_outer()? == Step::Done(()) {
                    self.is_outer_told = true;
                }
                return Ok(false);
            }
            if !self.read_inner(scratch)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads from the program into `down`. Returns whether there was anything, or the end.
    fn read_inner(&mut self, scratch: &mut [u8]) -> Result<bool, TlsError> {
        if !self.down.is_empty() || self.has_inner_ended {
            return Ok(false);
        }
        match self.inner.read(scratch) {
            Ok(0) => self.has_inner_ended = true,
            Ok(count) => self.down.extend_from_slice(&scratch[..count]),
            Err(error) if is_passing(&error) => return Ok(false),
            // The program has closed its socket, and has not read all.
            Err(_) => self.has_inner_ended = true,
        }
        Ok(true)
    }

    /// Writes `up` to the program, as far as it takes it.
    fn write_inner(&mut self) {
        let mut written = 0;
        while written < self.up.len() {
            match self.inner.write(&self.up[written..]) {
                Ok(count) => written += count,
                Err(error) if is_passing(&error) => break,
                Err(_) => {
                    self.is_inner_gone = true;
                    written = self.up.len();
                }
            }
        }
        self.up.drain(..written);
    }

    fn recv_outer(&mut self, into: &mut [u8]) -> Result<Step<usize>, TlsError> {
        match &mut self.outer {
            Some(Outer::Tls(tls)) => tls.recv(into),
            Some(Outer::Plain(stream)) => plain(stream.read(into)),
            _ => Ok(Step::Blocked),
        }
    }

    fn send_outer(&mut self) -> Result<Step<usize>, TlsError> {
        match &mut self.outer {
            Some(Outer::Tls(tls)) => tls.send(&self.down),
            Some(Outer::Plain(stream)) => plain(stream.write(&self.down)),
            _ => Ok(Step::Blocked),
        }
    }

    fn finish_outer(&mut self) -> Result<Step<()>, TlsError> {
        match &mut self.outer {
            Some(Outer::Tls(tls)) => tls.finish(),
            Some(Outer::Plain(stream)) => {
                let _ = stream.shutdown(Shutdown::Write);
                Ok(Step::Done(()))
            }
            _ => Ok(Step::Blocked),
        }
    }
}

const fn interest(reads: bool, writes: bool) -> Option<Interest> {
    match (reads, writes) {
        (true, true) => Some(Interest::Both),
        (true, false) => Some(Interest::Read),
        (false, true) => Some(Interest::Write),
        (false, false) => None,
    }
}

/// The result of a call on a socket without TLS.
fn plain(result: io::Result<usize>) -> Result<Step<usize>, TlsError> {
    match result {
        Ok(count) => Ok(Step::Done(count)),
        Err(error) if is_passing(&error) => Ok(Step::Blocked),
        Err(error) => Err(TlsError::Io(error)),
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn t28_a_peer_may_take_no_bytes_for_a_limited_time_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (outer, peer) = listener.accept().unwrap();
        let (inner, _program) = UnixStream::pair().unwrap();
        let link = Link::new(Outer::Plain(outer), inner, (peer, Link::new_end()));
        let outer = link.outer_fd().unwrap();
        assert_eq!(SockRef::from(&outer).tcp_user_timeout().unwrap(), Some(UNSENT_MAX));
    }
}
