//! Connecting. [`connect`] blocks until a connection is made. [`Connecting`] is for callers with an event
//! loop: it starts a connection, and reports later whether it is made. Each error names a remedy.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use riopipe_platform::now_ns;
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, Type};

use crate::{
    address::socket_addresses,
    poller::wait_writable,
    socket::{SetCongestionError, Socket, SocketOptions},
};

/// The reason why there is no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The text is not an address, or its name is unknown.
    #[error(
        "cannot find {address:?}: {source}; give an address and a port, as in 192.0.2.1:4420, \
         [2001:db8::1]:4420 or storage.example:4420"
    )]
    Address {
        /// The address as given.
        address: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// The machine answered, but no program listens on the port.
    #[error(
        "cannot connect to {peer}: refused, nothing listens there; check the port and that the \
         target is running"
    )]
    Refused {
        /// Address and port tried.
        peer: SocketAddr,
    },
    /// The network has no route to the machine.
    #[error(
        "cannot connect to {peer}: unreachable ({source}); check the address, the network and \
         the firewall"
    )]
    Unreachable {
        /// Address and port tried.
        peer: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
    /// There was no answer in time.
    #[error(
        "cannot connect to {peer}: no answer within {} ms; check the address, that the machine is \
         up and that no firewall drops the packets, or allow more time",
        .after.as_millis()
    )]
    TimedOut {
        /// Address and port tried.
        peer: SocketAddr,
        /// Duration of the attempt.
        after: Duration,
    },
    /// The connection was made, and the relay that it needs could not be set up.
    #[error("cannot connect to {peer}: {reason}")]
    Relay {
        /// Address and port tried.
        peer: SocketAddr,
        /// The relay's reason.
        reason: String,
        /// Whether another attempt may succeed, if only time passes.
        may_pass: bool,
    },
    /// A socket option could not be set.
    #[error("cannot connect to {peer}: {source}")]
    Option {
        /// Address and port tried.
        peer: SocketAddr,
        /// The option, and the reason.
        source: SetCongestionError,
    },
    /// Any other failure.
    #[error("cannot connect to {peer}: {source}")]
    Other {
        /// Address and port tried.
        peer: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Connects to `address` (`host:port`, name or number), waiting at most `timeout` in all. The
/// addresses of a name are tried in the resolver's order, each for its share of the time that is
/// left: one that does not answer leaves time for the others. The error is that of the last one.
/// (The resolver has a time limit of its own.)
///
/// # Errors
/// [`ConnectError`], naming the address.
pub fn connect(
    address: &str,
    timeout: Duration,
    options: &SocketOptions,
) -> Result<Socket, ConnectError> {
    connect_to_one(&resolve(address)?, timeout, options)
}

/// Connects to the first of these addresses that accepts. There is at least one.
fn connect_to_one(
    peers: &[SocketAddr],
    timeout: Duration,
    options: &SocketOptions,
) -> Result<Socket, ConnectError> {
    let deadline = now_ns().saturating_add(saturating_ns(timeout));
    let mut last_error = None;
    for (index, peer) in peers.iter().enumerate() {
        let remaining_ns = deadline.saturating_sub(now_ns());
        if remaining_ns == 0 && last_error.is_some() {
            break;
        }
        let untried_count = (peers.len() - index) as u64;
        let share = Duration::from_nanos(remaining_ns / untried_count);
        let connected = Connecting::start(*peer, options).and_then(|it| it.wait(share));
        match connected {
            Ok(socket) => return Ok(socket),
            // The share is a little shorter than `timeout`, because some time passed before the attempt.
            // The caller expects its own timeout in the error.
            Err(ConnectError::TimedOut { peer, .. }) if peers.len() == 1 => {
                last_error = Some(ConnectError::TimedOut { peer, after: timeout });
            }
            Err(error) => last_error = Some(error),
        }
    }
    // `resolve` never returns an empty list, so the loop ran.
    Err(last_error.expect("at least one address was tried"))
}

/// The socket addresses that `address` (`host:port`) stands for; never empty.
///
/// # Errors
/// [`ConnectError::Address`].
pub fn resolve(address: &str) -> Result<Vec<SocketAddr>, ConnectError> {
    socket_addresses(address, None)
        .map_err(|source| ConnectError::Address { address: address.to_owned(), source })
}

/// A connection that is being established. Register its descriptor for *writable* and call
/// [`check`](Connecting::check) when it is, or call [`wait`](Connecting::wait).
#[derive(Debug)]
pub struct Connecting {
    stream: TcpStream,
    peer: SocketAddr,
}

impl Connecting {
    /// Sends the first packet and returns.
    ///
    /// # Errors
    /// [`ConnectError`], if it is known at once (no route; on loopback also a refusal).
    pub fn start(peer: SocketAddr, options: &SocketOptions) -> Result<Self, ConnectError> {
        let other = |source| ConnectError::Other { peer, source };
        let socket = socket2::Socket::new(
            Domain::for_address(peer),
            Type::STREAM.nonblocking().cloexec(),
            Some(Protocol::TCP),
        )
        .map_err(other)?;
        options.apply(&socket).map_err(|source| ConnectError::Option { peer, source })?;
        match socket.connect(&SockAddr::from(peer)) {
            Ok(()) => {}
            Err(e) if Errno::from_io_error(&e) == Some(Errno::INPROGRESS) => {}
            Err(e) => return Err(classify(peer, e)),
        }
        Ok(Self { stream: socket.into(), peer })
    }

    /// The address that it connects to.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Checks without blocking whether the connection is made. Returns the socket if it is, and
    /// `Ok(Err(self))` if it is not made yet.
    ///
    /// # Errors
    /// [`ConnectError`], if connecting has failed.
    pub fn check(self) -> Result<Result<Socket, Self>, ConnectError> {
        let peer = self.peer;
        match self.stream.take_error() {
            Ok(None) => {}
            Ok(Some(e)) | Err(e) => return Err(classify(peer, e)),
        }
        match self.stream.peer_addr() {
            // A TCP port may connect to itself when the destination is an unused ephemeral port of
            // this machine. The kernel reports success, but there is no target.
            Ok(_) if self.stream.local_addr().is_ok_and(|own| own == peer) => {
                Err(ConnectError::Refused { peer })
            }
            Ok(_) => Socket::from_stream(self.stream, peer)
                .map(Ok)
                .map_err(|source| ConnectError::Other { peer, source }),
            Err(e) if e.kind() == io::ErrorKind::NotConnected => Ok(Err(self)),
            Err(e) => Err(classify(peer, e)),
        }
    }

    /// Waits at most `timeout` until the connection is established.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn wait(self, timeout: Duration) -> Result<Socket, ConnectError> {
        let peer = self.peer;
        let deadline = now_ns().saturating_add(saturating_ns(timeout));
        let mut connecting = self;
        loop {
            let remaining = Duration::from_nanos(deadline.saturating_sub(now_ns()));
            let is_writable = wait_writable(connecting.stream.as_fd(), remaining)
                .map_err(|source| ConnectError::Other { peer, source })?;
            connecting = match connecting.check()? {
                Ok(socket) => return Ok(socket),
                Err(not_yet) => not_yet,
            };
            if !is_writable && now_ns() >= deadline {
                return Err(ConnectError::TimedOut { peer, after: timeout });
            }
        }
    }
}

impl AsFd for Connecting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The kernel's own time limit for a connection. With the default `net.ipv4.tcp_syn_retries` of 6, Linux
/// gives up after 127 s.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(127);

/// The error for an error of the kernel.
fn classify(peer: SocketAddr, source: io::Error) -> ConnectError {
    match Errno::from_io_error(&source) {
        Some(Errno::CONNREFUSED) => ConnectError::Refused { peer },
        Some(Errno::TIMEDOUT) => ConnectError::TimedOut { peer, after: KERNEL_TIMEOUT },
        Some(
            Errno::NETUNREACH
            | Errno::HOSTUNREACH
            | Errno::NETDOWN
            | Errno::HOSTDOWN
            | Errno::ADDRNOTAVAIL
            | Errno::ACCESS
            | Errno::PERM,
        ) => ConnectError::Unreachable { peer, source },
        _ => ConnectError::Other { peer, source },
    }
}

/// The duration in nanoseconds; 584 years at most.
fn saturating_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::Listener;

    const SOON: Duration = Duration::from_secs(60);

    fn try_connect(address: &str, timeout: Duration) -> Result<Socket, ConnectError> {
        connect(address, timeout, &SocketOptions::default())
    }

    #[test]
    fn connects_by_number_and_by_name() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().port();
        for host in ["127.0.0.1", "localhost"] {
            let socket = try_connect(&format!("{host}:{port}"), SOON).unwrap();
            assert_eq!(socket.peer(), listener.local_addr());
            assert_eq!(socket.nodelay().ok(), Some(true));
        }
    }

    /// A listener that does not answer, and the connections that fill its queue: it drops further
    /// first packets, as a firewall does, but on loopback. Also the error of the last attempt, for
    /// 200 ms.
    fn silent() -> (Listener, Vec<Socket>, ConnectError) {
        let listener = Listener::bind_with_backlog("127.0.0.1:0", 0).unwrap();
        let address = listener.local_addr().to_string();
        let mut queued = Vec::new();
        let error = loop {
            match try_connect(&address, Duration::from_millis(200)) {
                Ok(socket) => queued.push(socket),
                Err(error) => break error,
            }
            assert!(queued.len() < 16, "the queue of length 0 never fills");
        };
        (listener, queued, error)
    }

    #[test]
    fn an_address_without_an_answer_leaves_time_for_the_next() {
        let (silent, _queued, _) = silent();
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let peers = [silent.local_addr(), listener.local_addr()];
        let time = Duration::from_secs(4);
        let socket = connect_to_one(&peers, time, &SocketOptions::default()).unwrap();
        assert_eq!(socket.peer(), listener.local_addr());
    }

    #[test]
    fn a_port_without_listener_is_refused_by_name() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr();
        drop(listener);
        let error = try_connect(&address.to_string(), SOON).unwrap_err();
        assert!(matches!(&error, ConnectError::Refused { peer } if *peer == address), "{error}");
        assert!(error.to_string().contains(&address.to_string()));
        assert!(error.to_string().contains("nothing listens"));
    }

    #[test]
    fn a_wrong_address_is_answered_with_the_right_form() {
        for address in ["", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", ":::"] {
            let error = try_connect(address, SOON).unwrap_err();
            assert!(matches!(error, ConnectError::Address { .. }), "{error}");
            assert!(error.to_string().contains("192.0.2.1:4420"));
        }
    }

    #[test]
    fn a_broadcast_address_is_unreachable() {
        // The kernel refuses TCP to the limited broadcast address without sending anything.
        let error = try_connect("255.255.255.255:4420", SOON).unwrap_err();
        assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
    }

    #[test]
    fn a_missing_answer_ends_at_the_time_limit() {
        let (_listener, _queued, error) = silent();
        assert!(
            matches!(&error, ConnectError::TimedOut { after, .. } if *after == Duration::from_millis(200)),
            "{error}"
        );
        assert!(error.to_string().contains("within 200 ms"));
    }

    #[test]
    fn a_socket_connected_to_itself_is_refused() {
        // It happens by chance when the tried port is the one that the kernel picks for our end.
        let socket = socket2::Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let any = "127.0.0.1:0".parse::<SocketAddr>().unwrap();
        socket.bind(&any.into()).unwrap();
        let own = socket.local_addr().unwrap();
        socket.connect(&own).unwrap();
        let connecting = Connecting { stream: socket.into(), peer: own.as_socket().unwrap() };
        let error = connecting.check().unwrap_err();
        assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
    }

    #[test]
    fn in_steps_without_blocking() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let mut connecting =
            Connecting::start(listener.local_addr(), &SocketOptions::default()).unwrap();
        let socket = loop {
            match connecting.check().unwrap() {
                Ok(socket) => break socket,
                Err(later) => connecting = later,
            }
            std::thread::yield_now();
        };
        assert_eq!(socket.peer(), listener.local_addr());
    }
}
