//! The listener of an NBD server.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use riopipe_media::{BLOCK_BYTES, Drive};

use super::connection::{self, DEPTH, Socket};
use super::protocol::Protocol;
use crate::device::Device;
use crate::drive::VolumeDrive;

/// The most connections at the same time. Further ones are closed at once.
const CONNECTIONS_MAX: usize = 16;
/// How often the listener checks for a connection, and whether the server stops.
const CHECK: Duration = Duration::from_millis(20);
/// The port of NBD, which IANA has assigned.
const DEFAULT_PORT: u16 = 10809;

/// The place at which an NBD server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    /// A TCP address, as host and port.
    Tcp(String, u16),
    /// A Unix socket.
    Unix(PathBuf),
}

impl NbdAddress {
    /// The address with a host, and with NBD's port if `port` is `None`.
    #[must_use]
    pub fn tcp(host: &str, port: Option<u16>) -> Self {
        Self::Tcp(host.to_owned(), port.unwrap_or(DEFAULT_PORT))
    }

    /// The URI by which clients find the export `name` there.
    #[must_use]
    pub fn uri(&self, name: &str) -> String {
        // Everything but what a URI takes as it is.
        let escape = |text: &str, kept: &str| -> String {
            let byte = |byte: u8| match byte {
                byte if byte.is_ascii_alphanumeric() || kept.as_bytes().contains(&byte) => {
                    char::from(byte).to_string()
                }
                byte => format!("%{byte:02X}"),
            };
            text.bytes().map(byte).collect()
        };
        let name = escape(name, "-._~");
        match self {
            Self::Tcp(host, port) if host.contains(':') => format!("nbd://[{host}]:{port}/{name}"),
            Self::Tcp(host, port) => format!("nbd://{host}:{port}/{name}"),
            Self::Unix(path) => {
                let path = escape(&path.to_string_lossy(), "-._~/");
                format!("nbd+unix:///{name}?socket={path}")
            }
        }
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why an NBD server did not start.
#[derive(Debug, thiserror::Error)]
#[error("can't listen on {address} for NBD: {source}")]
pub struct NbdError {
    /// The address.
    pub address: NbdAddress,
    /// The system's error.
    #[source]
    pub source: io::Error,
}

/// A server of a device over NBD. Dropping it stops it.
pub struct NbdServer {
    address: NbdAddress,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl NbdServer {
    /// Listens, and starts to serve the device as the export with the volume's name; the empty name
    /// stands for it, too.
    ///
    /// # Errors
    /// [`NbdError`]
    pub fn start(device: &Device, address: &NbdAddress) -> Result<Self, NbdError> {
        let failed = |source| NbdError { address: address.clone(), source };
        let (listener, address) = listen(address).map_err(failed)?;
        let stops = Arc::new(AtomicBool::new(false));
        let shared = Arc::new(Exported {
            name: device.info().name.clone(),
            drive: device.drive(),
            stops: Arc::clone(&stops),
            connections: AtomicUsize::new(0),
        });
        let run = move || accept_all(&listener, &shared);
        let thread = thread::Builder::new().name("nbd".into()).spawn(run);
        let thread = thread.map_err(|source| NbdError { address: address.clone(), source })?;
        Ok(Self { address, stops, thread: Some(thread) })
    }

    /// The address, with the real port.
    #[must_use]
    pub const fn address(&self) -> &NbdAddress {
        &self.address
    }

    /// Stops: takes no more connections and requests, and waits until the requests in flight are
    /// answered.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stops.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic was reported when it happened.
            let _ = thread.join();
            if let NbdAddress::Unix(path) = &self.address {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Listens. Returns the address with the real port.
fn listen(address: &NbdAddress) -> io::Result<(Listener, NbdAddress)> {
    match address {
        NbdAddress::Tcp(host, port) => {
            let addresses: Vec<_> = (host.as_str(), *port).to_socket_addrs()?.collect();
            let listener = TcpListener::bind(&addresses[..])?;
            listener.set_nonblocking(true)?;
            let bound = listener.local_addr()?;
            Ok((Listener::Tcp(listener), NbdAddress::Tcp(bound.ip().to_string(), bound.port())))
        }
        NbdAddress::Unix(path) => {
            remove_unused(path)?;
            let listener = UnixListener::bind(path)?;
            listener.set_nonblocking(true)?;
            Ok((Listener::Unix(listener), address.clone()))
        }
    }
}

/// Removes the socket of a process that was killed. One that a process listens on stays, and so does
/// any other file.
fn remove_unused(path: &Path) -> io::Result<()> {
    let is_socket =
        std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let is_refused = |error: &io::Error| error.kind() == ErrorKind::ConnectionRefused;
    if is_socket && UnixStream::connect(path).err().as_ref().is_some_and(is_refused) {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// The state that the connections share.
struct Exported {
    name: String,
    drive: Arc<VolumeDrive>,
    stops: Arc<AtomicBool>,
    connections: AtomicUsize,
}

fn accept_all(listener: &Listener, shared: &Arc<Exported>) {
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    while !shared.stops.load(Ordering::Acquire) {
        threads.retain(|thread| !thread.is_finished());
        let accepted = match listener {
            Listener::Tcp(listener) => listener.accept().and_then(|(socket, peer)| {
                socket.set_nodelay(true)?;
                socket.set_nonblocking(true)?;
                let peer = peer.to_string();
                Ok(begin::<TcpStream>(socket, peer, shared))
            }),
            Listener::Unix(listener) => listener.accept().and_then(|(socket, _)| {
                socket.set_nonblocking(true)?;
                Ok(begin::<UnixStream>(socket, "a local process".to_owned(), shared))
            }),
        };
        match accepted {
            Ok(thread) => threads.extend(thread),
            // Also when no descriptors are left: some may be soon.
            Err(_) => thread::sleep(CHECK),
        }
    }
    for thread in threads {
        // A panic was reported when it happened.
        let _ = thread.join();
    }
}

/// Starts the thread of a connection. `None`: there are too many, or no thread can be started.
fn begin<S: Socket + 'static>(
    socket: S,
    peer: String,
    shared: &Arc<Exported>,
) -> Option<JoinHandle<()>> {
    if shared.connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        tracing::warn!(peer, "{CONNECTIONS_MAX} NBD connections are open: a further one is closed");
        return None;
    }
    let exported = Arc::clone(shared);
    let run = move || {
        match exported.drive.queue(DEPTH) {
            Ok(queue) => {
                tracing::info!(peer, "NBD connection");
                let bytes = exported.drive.geometry().blocks * BLOCK_BYTES as u64;
                let protocol = Protocol::new(&exported.name, bytes);
                connection::serve(socket, protocol, queue, &exported.stops);
                tracing::info!(peer, "NBD connection ended");
            }
            Err(error) => tracing::warn!(peer, %error, "NBD connection refused"),
        }
        exported.connections.fetch_sub(1, Ordering::AcqRel);
    };
    let started = thread::Builder::new().name("nbd-connection".into()).spawn(run);
    if let Err(error) = &started {
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        tracing::warn!(%error, "no thread for an NBD connection");
    }
    started.ok()
}
