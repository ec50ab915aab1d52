//! Figures over HTTP, for this machine only.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riopipe_net::{
    Interest, ListenError, Listener, Poller, PollerError, Received, Socket, Waker, wait_readable,
    wait_writable,
};

use crate::address::{AddressError, check_address};
use crate::http::{HEAD_BYTES_MAX, respond};
use crate::source::Source;

/// Who asks has so long, from the connection to the answer's last byte: the next one waits.
const PATIENCE: Duration = Duration::from_secs(1);
/// When accepting fails for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why figures can't be served at an address.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// It is none for metrics.
    #[error("metrics: {0}; {advice}", advice = .0.advice())]
    Address(AddressError),
    /// It can't be listened on.
    #[error("metrics: {0}")]
    Listen(#[from] ListenError),
    /// No descriptors left, or no thread could be started.
    #[error("metrics: {0}")]
    Poller(#[from] PollerError),
}

/// Serves figures until it is dropped: one thread, one request at a time, nothing kept.
#[derive(Debug)]
pub struct Endpoint {
    address: SocketAddr,
    /// Woken to end.
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Serves at `address`, which is `host:port` and must be a loopback address; port 0 takes a
    /// free one.
    ///
    /// # Errors
    /// [`MetricsError`].
    pub fn bind(address: &str, source: Arc<dyn Source>) -> Result<Self, MetricsError> {
        check_address(address).map_err(MetricsError::Address)?;
        Ok(Self::start(Listener::bind(address)?, source)?)
    }

    /// Serves whom `listener` accepts; it has to be on an address that was
    /// [checked](check_address).
    ///
    /// # Errors
    /// No descriptors left, or no thread could be started.
    pub fn start(listener: Listener, source: Arc<dyn Source>) -> Result<Self, PollerError> {
        let poller = Poller::new()?;
        poller.add(&listener, 0, Interest::Read)?;
        let (address, waker) = (listener.local_addr(), poller.waker());
        let thread = std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || serve(&listener, &poller, source.as_ref()))
            .map_err(|source| PollerError { what: "start the thread for metrics", source })?;
        Ok(Self { address, waker, thread: Some(thread) })
    }

    /// Where it serves, with the real port.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.waker.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for metrics panicked");
        }
    }
}

fn serve(listener: &Listener, poller: &Poller, source: &dyn Source) {
    let mut events = Vec::new();
    loop {
        match poller.wait(&mut events, None) {
            Ok(false) => {}
            Ok(true) => return,
            Err(error) => {
                tracing::error!(%error, "metrics are no longer served");
                return;
            }
        }
        // One, then a look whether to end: those who wait are told of again.
        match listener.accept() {
            Ok(Some(socket)) => {
                if answer(&socket, source).is_none() {
                    tracing::debug!(peer = %socket.peer(), "somebody asked for metrics and left");
                }
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "metrics");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Reads one request and answers it; `None` if there was nobody to answer.
fn answer(socket: &Socket, source: &dyn Source) -> Option<()> {
    let deadline = Instant::now() + PATIENCE;
    let left = || deadline.checked_duration_since(Instant::now());
    let mut head = [0; HEAD_BYTES_MAX];
    let mut len = 0;
    let bytes = loop {
        // A head that is full has an answer in any case.
        if let Some(bytes) = respond(&head[..len], source) {
            break bytes;
        }
        match socket.recv(&mut head[len..]).ok()? {
            Received::Bytes(more) => len += more,
            Received::Closed => return None,
            Received::WouldBlock => {
                wait_readable(socket.as_fd(), left()?).ok()?;
            }
        }
    };
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        match socket.send([rest]).ok()? {
            0 => {
                wait_writable(socket.as_fd(), left()?).ok()?;
            }
            sent => rest = &rest[sent..],
        }
    }
    socket.finish_sending();
    // Closing it over unread input would take the answer back.
    loop {
        match socket.recv(&mut head).ok()? {
            Received::Bytes(_) => {
                left()?;
            }
            Received::Closed => return Some(()),
            Received::WouldBlock => {
                wait_readable(socket.as_fd(), left()?).ok()?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;
    use crate::source::Untold;

    /// Has so many bytes to tell.
    struct Thing(usize);

    impl Source for Thing {
        fn about(&self) -> &str {
            "A thing's metrics"
        }

        fn open_metrics(&self) -> Result<String, Untold> {
            Ok("m".repeat(self.0))
        }

        fn json(&self) -> Result<String, Untold> {
            Ok("{}".to_owned())
        }
    }

    fn endpoint(bytes: usize) -> Endpoint {
        Endpoint::bind("127.0.0.1:0", Arc::new(Thing(bytes))).unwrap()
    }

    fn connect(endpoint: &Endpoint) -> TcpStream {
        let socket = TcpStream::connect(endpoint.address()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket
    }

    fn get(endpoint: &Endpoint, path: &str) -> String {
        let mut socket = connect(endpoint);
        socket.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn only_loopback_addresses_are_served() {
        let error = Endpoint::bind("0.0.0.0:0", Arc::new(Thing(0))).unwrap_err().to_string();
        assert!(error.contains("other machines; metrics know no auth"), "{error}");
        let first = endpoint(0);
        let taken = Endpoint::bind(&first.address().to_string(), Arc::new(Thing(0))).unwrap_err();
        assert!(matches!(taken, MetricsError::Listen(_)), "{taken}");
    }

    #[test]
    fn dropping_it_ends_it_whoever_is_connected() {
        let endpoint = endpoint(0);
        let mut silent = connect(&endpoint);
        let address = endpoint.address();
        drop(endpoint);
        assert!(!matches!(silent.read(&mut [0; 1]), Ok(1)));
        assert!(TcpStream::connect(address).is_err());
    }
}
