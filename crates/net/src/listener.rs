//! Accepting connections.

use std::{
    io,
    net::{SocketAddr, TcpListener, ToSocketAddrs},
    os::fd::{AsFd, BorrowedFd},
};

use socket2::{Domain, Protocol, SockAddr, Type};

use crate::socket::{Socket, SocketOptions};

/// Connections the kernel queues until they are accepted. Every stream of every initiator
/// connects at once after a restart of the target; the kernel caps this at `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// Why nobody can listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The text is no address of this machine.
    #[error(
        "cannot listen on {address:?}: {source}; give an address and a port, as in 0.0.0.0:4420"
    )]
    Address {
        /// What was given.
        address: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// Somebody else listens there.
    #[error(
        "cannot listen on {address}: the port is taken; stop the program that has it \
         (`ss -ltnp`) or choose another"
    )]
    Taken {
        /// Address and port.
        address: SocketAddr,
    },
    /// Not an address of this machine.
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
    /// Anything else.
    #[error("cannot listen on {address}: {source}")]
    Other {
        /// Address and port.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Why no connection could be accepted. The listener itself stays good.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The process or the machine has no descriptor or memory left. The connection stays in the
    /// kernel's queue and the listener stays readable: wait before asking again.
    #[error(
        "cannot accept connections on {address}: {source}; allow more open files (`ulimit -n`, \
         LimitNOFILE=) or fewer connections"
    )]
    Exhausted {
        /// Where it listens.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// The one connection failed, or the listener did.
    #[error("cannot accept a connection on {address}: {source}")]
    Other {
        /// Where it listens.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
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
        Self::bind_with_backlog(address, BACKLOG)
    }

    pub(crate) fn bind_with_backlog(address: &str, backlog: i32) -> Result<Self, ListenError> {
        let fail = |source| ListenError::Address { address: address.to_owned(), source };
        let first = address.to_socket_addrs().map_err(fail)?.next();
        let wanted = first.ok_or_else(|| {
            fail(io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
        })?;
        let inner = listen(wanted, backlog).map_err(|source| classify(wanted, source))?;
        let address =
            inner.local_addr().map_err(|source| ListenError::Other { address: wanted, source })?;
        Ok(Self { inner, address, options: SocketOptions::default() })
    }

    /// Options for the sockets accepted from now on.
    pub fn set_options(&mut self, options: SocketOptions) {
        self.options = options;
    }

    /// Where it listens, with the real port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The next connection, or `None` when none waits.
    ///
    /// # Errors
    /// [`AcceptError`]. A connection that its peer gave up before it was accepted is no error: the
    /// next one is taken.
    pub fn accept(&self) -> Result<Option<Socket>, AcceptError> {
        loop {
            let (stream, peer) = match self.inner.accept() {
                Ok(pair) => pair,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR | libc::ECONNABORTED | libc::EPROTO) => continue,
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                        return Err(AcceptError::Exhausted { address: self.address, source: e });
                    }
                    _ => return Err(self.other(e)),
                },
            };
            stream.set_nonblocking(true).map_err(|e| self.other(e))?;
            let socket = Socket::from_stream(stream, peer).map_err(|e| self.other(e))?;
            if let Err(error) = self.options.apply(&socket) {
                // Speed only; the connection works without.
                tracing::warn!(%peer, %error, "option not set on an accepted connection");
            }
            return Ok(Some(socket));
        }
    }

    fn other(&self, source: io::Error) -> AcceptError {
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
    // A target restarted at once finds its old connections in TIME_WAIT; they must not keep the
    // port from it.
    socket.set_reuse_address(true)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(backlog)?;
    Ok(socket.into())
}

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
    fn none_waits_then_one() {
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
    fn a_taken_port_says_so() {
        let first = Listener::bind("127.0.0.1:0").unwrap();
        let error = Listener::bind(&first.local_addr().to_string()).unwrap_err();
        assert!(matches!(error, ListenError::Taken { .. }), "{error}");
        assert!(error.to_string().contains(&first.local_addr().to_string()));
    }

    #[test]
    fn another_machines_address_says_so() {
        // TEST-NET-1: never this machine's.
        let error = Listener::bind("192.0.2.1:0").unwrap_err();
        assert!(matches!(error, ListenError::NotHere { .. }), "{error}");
    }

    #[test]
    fn nonsense_says_what_an_address_looks_like() {
        let error = Listener::bind("4420").unwrap_err();
        assert!(matches!(error, ListenError::Address { .. }), "{error}");
        assert!(error.to_string().contains("0.0.0.0:4420"));
    }
}
