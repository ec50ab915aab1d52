//! One TCP connection, non-blocking.

use std::{
    io::{self, IoSlice, IoSliceMut, Read},
    mem::MaybeUninit,
    net::{Shutdown, SocketAddr, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    slice,
    sync::Arc,
};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use socket2::SockRef;

/// The largest number of slices in one call: the kernel's own limit (`UIO_MAXIOV`). The array of slices
/// takes 16 KiB of the stack (16 bytes for each slice), of which only the used part is touched.
const IOV_MAX: usize = 1024;

/// The reason why a connection is unusable. All are final.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer, or a device in between, has reset the connection.
    #[error("connection to {peer} was reset: the peer died, restarted or refused to go on")]
    Reset {
        /// The other end.
        peer: SocketAddr,
    },
    /// The peer has closed the connection; nothing can be sent.
    #[error("connection to {peer} was closed by the peer")]
    Closed {
        /// The other end.
        peer: SocketAddr,
    },
    /// The kernel has stopped resending.
    #[error("connection to {peer} timed out: no answer from the machine or the network")]
    TimedOut {
        /// The other end.
        peer: SocketAddr,
    },
    /// The relay between this connection and the network has ended it.
    #[error("connection to {peer}: {reason}")]
    Relay {
        /// The other end.
        peer: SocketAddr,
        /// The relay's reason.
        reason: String,
    },
    /// Any other failure.
    #[error("connection to {peer} failed: {source}")]
    Other {
        /// The other end.
        peer: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
}

/// A relay between a [`Socket`] and the network, such as one that encrypts.
pub trait Relay: std::fmt::Debug + Send + Sync {
    /// Why the relay has ended the connection; `None` if one of the ends has closed it.
    fn failure(&self) -> Option<String>;
}

/// The outcome of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// This number of bytes was received, at least one.
    Bytes(usize),
    /// Nothing can be received now.
    WouldBlock,
    /// The peer has closed its side in order; nothing more will arrive.
    Closed,
}

/// The reason why the congestion control could not be set.
#[derive(Debug, thiserror::Error)]
#[error(
    "congestion control {name:?} cannot be used: {source}; the kernel permits those in \
     /proc/sys/net/ipv4/tcp_allowed_congestion_control"
)]
pub struct SetCongestionError {
    /// The requested name.
    pub name: String,
    /// The kernel's error: `NotFound` (unknown) or `PermissionDenied`.
    pub source: io::Error,
}

/// Options of a connection. `TCP_NODELAY` is not among them. It is always on: without it a small
/// answer waits for the peer's delayed acknowledgement, 40 ms.
#[derive(Clone, Debug, Default)]
pub struct SocketOptions {
    /// Congestion control by its kernel name (`cubic`, `reno`, …); `None` keeps the system's, except
    /// that `bbr` becomes `reno` on loopback. `bbr` paces, which costs throughput at high queue depth
    /// on a fast network.
    pub congestion: Option<String>,
}

impl SocketOptions {
    pub(crate) fn apply(&self, socket: &impl AsFd) -> Result<(), SetCongestionError> {
        let Some(name) = &self.congestion else {
            return Ok(());
        };
        SockRef::from(socket)
            .set_tcp_congestion(name.as_bytes())
            .map_err(|source| SetCongestionError { name: name.clone(), source })
    }
}

/// A connected, non-blocking TCP socket with `TCP_NODELAY`, or this end of a [`Relay`] that has one.
#[derive(Debug)]
pub struct Socket {
    /// The TCP socket, or the Unix socket to the relay: both are streams of bytes, and the calls are the same.
    stream: TcpStream,
    peer: SocketAddr,
    relayed: Option<Relayed>,
}

/// The facts of a relayed connection that its own socket does not have.
#[derive(Debug)]
struct Relayed {
    relay: Arc<dyn Relay>,
    local: SocketAddr,
}

impl Socket {
    pub(crate) fn from_stream(stream: TcpStream, peer: SocketAddr) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        if peer.ip().is_loopback() {
            unpace(&stream);
        }
        Ok(Self { stream, peer, relayed: None })
    }

    /// A connection whose bytes a relay passes on: `stream` leads to the relay, which has taken the place of
    /// this socket towards the network ([`into_std`](Self::into_std)). The addresses stay those of the
    /// network.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn relayed(
        stream: UnixStream,
        peer: SocketAddr,
        local: SocketAddr,
        relay: Arc<dyn Relay>,
    ) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let stream = TcpStream::from(OwnedFd::from(stream));
        Ok(Self { stream, peer, relayed: Some(Relayed { relay, local }) })
    }

    /// The socket itself, non-blocking, for a relay.
    #[must_use]
    pub fn into_std(self) -> TcpStream {
        self.stream
    }

    /// Sends the slices in order, as far as the kernel takes them now, in one system call: at most
    /// 1024 slices (call again for the rest). Empty slices are skipped.
    ///
    /// Returns the number of bytes taken: 0 if there was nothing to send or if the kernel takes
    /// nothing now (wait for *writable*).
    ///
    /// # Errors
    /// [`LinkError`], if the connection is gone. It is unknown whether bytes of earlier calls have
    /// arrived.
    pub fn send<'a>(&self, slices: impl IntoIterator<Item = &'a [u8]>) -> Result<usize, LinkError> {
        let mut iovs = [const { MaybeUninit::<IoSlice<'a>>::uninit() }; IOV_MAX];
        let mut count = 0;
        let nonempty_slices = slices.into_iter().filter(|slice| !slice.is_empty());
        for (iov, slice) in iovs.iter_mut().zip(nonempty_slices) {
            iov.write(IoSlice::new(slice));
            count += 1;
        }
        if count == 0 {
            return Ok(0);
        }
        // SAFETY: the loop above has written the first `count` elements.
        let iovs = unsafe { slice::from_raw_parts(iovs.as_ptr().cast::<IoSlice<'a>>(), count) };
        // NOSIGNAL: Rust's runtime ignores SIGPIPE, but a host program in C may die of it.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match sendmsg(&self.stream, iovs, &mut SendAncillaryBuffer::default(), flags) {
                Ok(sent) => return Ok(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(0),
                Err(error) => return Err(self.link_error(error.into())),
            }
        }
    }

    /// Receives the bytes that have arrived, at most `into.len()`.
    ///
    /// # Errors
    /// [`LinkError`], if the connection is gone.
    pub fn recv(&self, into: &mut [u8]) -> Result<Received, LinkError> {
        debug_assert!(!into.is_empty(), "an empty buffer would read as a closed peer");
        loop {
            match (&self.stream).read(into) {
                Ok(0) => return self.end(),
                Ok(count) => return Ok(Received::Bytes(count)),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Ok(Received::WouldBlock),
                    _ => return Err(self.link_error(error)),
                },
            }
        }
    }

    /// Receives the bytes that have arrived: first into `first`, then into `second`, in one system
    /// call. The two may not both be empty.
    ///
    /// # Errors
    /// [`LinkError`], if the connection is gone.
    pub fn recv_into_both(
        &self,
        first: &mut [u8],
        second: &mut [u8],
    ) -> Result<Received, LinkError> {
        if first.is_empty() {
            return self.recv(second);
        }
        loop {
            let mut slices = [IoSliceMut::new(first), IoSliceMut::new(second)];
            match (&self.stream).read_vectored(&mut slices) {
                Ok(0) => return self.end(),
                Ok(count) => return Ok(Received::Bytes(count)),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Ok(Received::WouldBlock),
                    _ => return Err(self.link_error(error)),
                },
            }
        }
    }

    /// Address of the peer, as it was when connected.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Address of this end.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.relayed {
            Some(relayed) => Ok(relayed.local),
            None => self.stream.local_addr(),
        }
    }

    /// Whether `TCP_NODELAY` is on (it always is).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn nodelay(&self) -> io::Result<bool> {
        self.stream.nodelay()
    }

    /// The congestion control in use, by its kernel name.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn congestion(&self) -> io::Result<String> {
        let name = SockRef::from(&self.stream).tcp_congestion()?;
        // The kernel fills the rest of the array with zeroes.
        let len = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..len]).into_owned())
    }

    /// Closes the sending direction: all sent bytes still arrive, then the peer sees the end.
    /// Receiving goes on. A second call, or one on a dead connection, is harmless.
    pub fn finish_sending(&self) {
        // The only failure is "not connected", which is the intended result.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Ends the connection in both directions: a thread that waits on it wakes up. A second call,
    /// or one on a dead connection, is harmless.
    pub fn shutdown(&self) {
        // The only failure is "not connected", which is the intended result.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// The end of the incoming bytes.
    #[cold]
    fn end(&self) -> Result<Received, LinkError> {
        match self.relay_failure() {
            Some(error) => Err(error),
            None => Ok(Received::Closed),
        }
    }

    /// The error of a relay that has ended the connection.
    fn relay_failure(&self) -> Option<LinkError> {
        let reason = self.relayed.as_ref()?.relay.failure()?;
        Some(LinkError::Relay { peer: self.peer, reason })
    }

    /// The error of this connection for an error of the kernel.
    #[cold]
    fn link_error(&self, source: io::Error) -> LinkError {
        if let Some(error) = self.relay_failure() {
            return error;
        }
        let peer = self.peer;
        match Errno::from_io_error(&source) {
            Some(Errno::CONNRESET | Errno::CONNABORTED) => LinkError::Reset { peer },
            Some(Errno::PIPE) => LinkError::Closed { peer },
            Some(Errno::TIMEDOUT) => LinkError::TimedOut { peer },
            _ => LinkError::Other { peer, source },
        }
    }
}

/// Replaces congestion control that paces by `reno`, which every kernel has and permits. On loopback there
/// is no queue that pacing would keep short, and its timers cost a third of the throughput of large
/// reads. Without the option the connection works as well, only slower.
fn unpace(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    if socket.tcp_congestion().is_ok_and(|name| name.starts_with(b"bbr")) {
        let _ = socket.set_tcp_congestion(b"reno");
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        connect::connect,
        listener::Listener,
        poller::{wait_readable, wait_writable},
    };

    const SOON: Duration = Duration::from_secs(60);

    /// Both ends of one loopback connection.
    pub(crate) fn pair() -> (Socket, Socket) {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().to_string();
        let near = connect(&address, SOON, &SocketOptions::default()).unwrap();
        let far = listener.accept().unwrap().unwrap();
        (near, far)
    }

    fn recv_soon(socket: &Socket, into: &mut [u8]) -> Result<Received, LinkError> {
        assert!(wait_readable(socket.as_fd(), SOON).unwrap(), "nothing came");
        socket.recv(into)
    }

    #[test]
    fn gathers_slices_from_anywhere() {
        let (near, far) = pair();
        let parts: [&[u8]; 5] = [b"one ", b"", b"two ", &[b'3'; 4000], b" four"];
        let total = parts.iter().map(|p| p.len()).sum::<usize>();
        assert_eq!(near.send(parts).unwrap(), total);
        let mut got = Vec::new();
        let mut chunk = [0; 1000];
        while got.len() < total {
            match recv_soon(&far, &mut chunk).unwrap() {
                Received::Bytes(n) => got.extend_from_slice(&chunk[..n]),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(got, parts.concat());
        assert_eq!(far.recv(&mut chunk).unwrap(), Received::WouldBlock);
    }

    #[test]
    fn sending_nothing_sends_nothing() {
        let (near, _far) = pair();
        assert_eq!(near.send([]).unwrap(), 0);
        assert_eq!(near.send([&[][..]; 3]).unwrap(), 0);
    }

    #[test]
    fn more_slices_than_one_call_takes_are_left_for_the_next() {
        let (near, _far) = pair();
        let slices = vec![&b"x"[..]; IOV_MAX + 7];
        assert_eq!(near.send(slices.iter().copied()).unwrap(), IOV_MAX);
        assert_eq!(near.send(slices[IOV_MAX..].iter().copied()).unwrap(), 7);
    }

    #[test]
    fn partial_sends_lose_and_repeat_nothing() {
        // The peer does not read at first, so the kernel takes a part, then nothing.
        let (near, far) = pair();
        let data: Vec<u8> = (0..24_000_000u32).map(|i| (i / 3) as u8).collect();
        let mut sent = 0;
        loop {
            match near.send(data[sent..].chunks(100_000)).unwrap() {
                0 => break,
                n => sent += n,
            }
        }
        assert!(sent > 0 && sent < data.len(), "no partial send: {sent}");

        let whole = data.clone();
        let reader = std::thread::spawn(move || {
            let mut got = Vec::new();
            let mut chunk = vec![0; 70_001];
            loop {
                match recv_soon(&far, &mut chunk).unwrap() {
                    Received::Bytes(n) => got.extend_from_slice(&chunk[..n]),
                    Received::WouldBlock => {}
                    Received::Closed => break,
                }
            }
            assert!(got == whole, "{} of {} bytes", got.len(), whole.len());
        });
        while sent < data.len() {
            assert!(wait_writable(near.as_fd(), SOON).unwrap());
            sent += near.send(data[sent..].chunks(100_000)).unwrap();
        }
        near.finish_sending();
        reader.join().unwrap();
    }

    #[test]
    fn an_orderly_end_is_closed() {
        let (near, far) = pair();
        near.send([&b"last"[..]]).unwrap();
        drop(near);
        let mut chunk = [0; 16];
        assert_eq!(
            recv_soon(&far, &mut chunk).unwrap(),
            Received::Bytes(4),
            "sent bytes still arrive"
        );
        assert_eq!(recv_soon(&far, &mut chunk).unwrap(), Received::Closed);
    }

    #[test]
    fn a_dead_peer_is_reported_as_a_reset() {
        let (near, far) = pair();
        // Closing with unread bytes makes the kernel send RST, as when a process is killed.
        near.send([&b"unread"[..]]).unwrap();
        assert!(wait_readable(far.as_fd(), SOON).unwrap());
        drop(far);
        let error = recv_soon(&near, &mut [0; 16]).unwrap_err();
        assert!(matches!(error, LinkError::Reset { .. }), "{error}");
        assert!(error.to_string().contains(&near.peer().to_string()));
        // Sending afterwards fails too, and does not kill the process with SIGPIPE.
        let error = near.send([&b"more"[..]]).unwrap_err();
        assert!(matches!(error, LinkError::Closed { .. }), "{error}");
    }

    #[test]
    fn shutdown_is_visible_at_both_ends() {
        let (near, _far) = pair();
        near.shutdown();
        near.shutdown();
        assert_eq!(near.recv(&mut [0; 16]).unwrap(), Received::Closed);
    }

    /// Where the system's is `bbr`, the next test covers this, too.
    #[test]
    fn only_pacing_is_replaced_on_loopback() {
        let (near, _far) = pair();
        let socket = SockRef::from(&near.stream);
        let permitted =
            std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control").unwrap();
        for name in permitted.split_whitespace() {
            socket.set_tcp_congestion(name.as_bytes()).unwrap();
            unpace(&near.stream);
            let expected = if name.starts_with("bbr") { "reno" } else { name };
            assert_eq!(near.congestion().unwrap(), expected);
        }
    }

    #[test]
    fn congestion_control_is_the_systems_by_default() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().to_string();
        let system = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap();
        let socket = connect(&address, SOON, &SocketOptions::default()).unwrap();
        let expected = if system.starts_with("bbr") { "reno" } else { system.trim() };
        assert_eq!(socket.congestion().unwrap(), expected);
        let accepted = listener.accept().unwrap().unwrap();
        assert_eq!(accepted.congestion().unwrap(), expected);

        // reno always exists and is always permitted.
        let reno = SocketOptions { congestion: Some("reno".to_owned()) };
        let socket = connect(&address, SOON, &reno).unwrap();
        assert_eq!(socket.congestion().unwrap(), "reno");

        let none = SocketOptions { congestion: Some("no-such-cc".to_owned()) };
        let error = connect(&address, SOON, &none).unwrap_err().to_string();
        assert!(error.contains("no-such-cc") && error.contains("tcp_allowed"), "{error}");
    }
}
