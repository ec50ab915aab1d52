//! Accepting connections.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::fd::{AsFd, BorrowedFd},
};

use riopipe_platform::descriptors_max;
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, Type};

use crate::address::socket_addresses;
use crate::socket::{Socket, SocketOptions};

/// The number of connections that the kernel queues until they are accepted. After a restart of a
/// target, all streams of all initiators connect at the same time. The kernel lowers the number to
/// `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// The reason why a port can't be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The text is not an address of this machine.
    #[error(
        "cannot listen on {address:?}: {source}; give an address, as in 0.0.0.0:4420 or [::]:4420"
    )]
    Address {
        /// The address as given.
        address: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// Another program listens on the port.
    #[error(
        "cannot listen on {address}: the port is taken; stop the program that has it \
         (`ss -ltnp`) or choose another"
    )]
    Taken {
        /// Address and port.
        address: SocketAddr,
    },
    /// The address does not belong to this machine.
    #[error("cannot listen on {address}: this machine has no such address (see `ip address`)")]
    NotHere {
        /// Address and port.
        address: SocketAddr,
    },
    /// The port needs privileges.
    #[error(
        "cannot listen on {address}: not permitted; choose a port from 1024 up or grant \
         CAP_NET_BIND_SERVICE"
    )]
    NotPermitted {
        /// Address and port.
        address: SocketAddr,
    },
    /// Any other failure.
    #[error("cannot listen on {address}: {source}")]
    Other {
        /// Address and port.
        address: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The reason why no connection could be accepted. The listener itself stays usable.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The process or the machine has no descriptor or memory left. The connection stays in the
    /// kernel's queue and the listener stays readable: wait before the next call.
    #[error(
        "cannot accept connections on {address}: {source}; {}", advice(.source)
    )]
    Exhausted {
        /// Address of the listener.
        address: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
    /// The connection, or the listener, failed.
    #[error("cannot accept a connection on {address}: {source}")]
    Other {
        /// Address of the listener.
        address: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The remedy for an exhausted resource.
fn advice(source: &io::Error) -> String {
    match (Errno::from_io_error(source), descriptors_max()) {
        (Some(Errno::MFILE), Some(most)) => format!(
            "this process may have {most} descriptors open (RLIMIT_NOFILE): allow more (`ulimit -n`, \
             LimitNOFILE= of its unit) or fewer connections"
        ),
        (Some(Errno::NFILE), _) => {
            "the machine has no descriptors left: allow more (sysctl fs.file-max)".to_owned()
        }
        _ => "the machine has no memory left for connections".to_owned(),
    }
}

/// A non-blocking listening socket.
#[derive(Debug)]
pub struct Listener {
    inner: TcpListener,
    address: SocketAddr,
    options: SocketOptions,
}

impl Listener {
    /// Listens on `address` (`host:port`; port 0 takes a free one: see
    /// [`local_addr`](Listener::local_addr)). A name must stand for one of this machine's
    /// addresses; the first is taken.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn bind(address: &str) -> Result<Self, ListenError> {
        Self::bind_to(address, None, BACKLOG)
    }

    /// As [`bind`](Self::bind), on `default_port` if `address` has no port.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn bind_with_port(address: &str, default_port: u16) -> Result<Self, ListenError> {
        Self::bind_to(address, Some(default_port), BACKLOG)
    }

    #[cfg(test)]
    pub(crate) fn bind_with_backlog(address: &str, backlog: i32) -> Result<Self, ListenError> {
        Self::bind_to(address, None, backlog)
    }

    fn bind_to(
        address: &str,
        default_port: Option<u16>,
        backlog: i32,
    ) -> Result<Self, ListenError> {
        let addresses = socket_addresses(address, default_port)
            .map_err(|source| ListenError::Address { address: address.to_owned(), source })?;
        // `socket_addresses` never returns an empty list.
        let requested = addresses[0];
        let inner = listen(requested, backlog).map_err(|source| classify(requested, source))?;
        // If the requested port is 0, this has the port that the kernel has chosen.
        let address = inner
            .local_addr()
            .map_err(|source| ListenError::Other { address: requested, source })?;
        Ok(Self { inner, address, options: SocketOptions::default() })
    }

    /// Sets the options of sockets that are accepted from now on.
    pub fn set_options(&mut self, options: SocketOptions) {
        self.options = options;
    }

    /// The socket itself, non-blocking, for a server outside of this crate. Queued connections stay
    /// in its queue.
    #[must_use]
    pub fn into_std(self) -> TcpListener {
        self.inner
    }

    /// The address of the listener, with the real port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The next connection, or `None` if none is queued.
    ///
    /// # Errors
    /// [`AcceptError`]. A connection that its peer closed before it was accepted is not an error:
    /// the next one is taken.
    pub fn accept(&self) -> Result<Option<Socket>, AcceptError> {
        loop {
            let (stream, peer) = match self.inner.accept() {
                Ok(stream_and_peer) => stream_and_peer,
                Err(source) if source.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(source) => match Errno::from_io_error(&source) {
                    // The call was interrupted, or the peer has closed this connection already.
                    Some(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => continue,
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                        return Err(AcceptError::Exhausted { address: self.address, source });
                    }
                    _ => return Err(self.other_error(source)),
                },
            };
            stream.set_nonblocking(true).map_err(|source| self.other_error(source))?;
            let socket =
                Socket::from_stream(stream, peer).map_err(|source| self.other_error(source))?;
            if let Err(error) = self.options.apply(&socket) {
                // The option only affects speed; the connection works without it.
                tracing::warn!(%peer, %error, "option not set on an accepted connection");
            }
            return Ok(Some(socket));
        }
    }

    fn other_error(&self, source: io::Error) -> AcceptError {
        AcceptError::Other { address: self.address, source }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

fn listen(address: SocketAddr, backlog: i32) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(
        Domain::for_address(address),
        Type::STREAM.nonblocking().cloexec(),
        Some(Protocol::TCP),
    )?;
    // After a restart of a target, its old connections are in state TIME_WAIT. Without this option they
    // would keep the target from listening on its port.
    socket.set_reuse_address(true)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(backlog)?;
    Ok(socket.into())
}

/// The error for an error of the kernel.
fn classify(address: SocketAddr, source: io::Error) -> ListenError {
    match source.kind() {
        io::ErrorKind::AddrInUse => ListenError::Taken { address },
        io::ErrorKind::AddrNotAvailable => ListenError::NotHere { address },
        io::ErrorKind::PermissionDenied => ListenError::NotPermitted { address },
        _ => ListenError::Other { address, source },
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::connect::connect;

    #[test]
    fn a_queued_connection_is_accepted() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        assert!(listener.accept().unwrap().is_none());
        assert_ne!(listener.local_addr().port(), 0);
        let near = connect(
            &listener.local_addr().to_string(),
            Duration::from_secs(60),
            &SocketOptions::default(),
        )
        .unwrap();
        let far = listener.accept().unwrap().expect("connected, so queued");
        assert_eq!(far.peer(), near.local_addr().unwrap());
        assert!(far.nodelay().unwrap());
        assert!(listener.accept().unwrap().is_none());
    }

    #[test]
    fn a_taken_port_is_reported() {
        let first = Listener::bind("127.0.0.1:0").unwrap();
        let error = Listener::bind(&first.local_addr().to_string()).unwrap_err();
        assert!(matches!(error, ListenError::Taken { .. }), "{error}");
        assert!(error.to_string().contains(&first.local_addr().to_string()));
    }

    #[test]
    fn an_address_of_another_machine_is_reported() {
        // TEST-NET-1: never an address of this machine.
        let error = Listener::bind("192.0.2.1:0").unwrap_err();
        assert!(matches!(error, ListenError::NotHere { .. }), "{error}");
    }

    #[test]
    fn a_wrong_address_is_answered_with_the_right_form() {
        let error = Listener::bind("4420").unwrap_err();
        assert!(matches!(error, ListenError::Address { .. }), "{error}");
        assert!(error.to_string().contains("0.0.0.0:4420"));
    }
}
