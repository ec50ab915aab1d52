//! Figures over HTTP, for this machine only.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riopipe_net::{Event, Interest, ListenError, Listener, Poller, PollerError, Waker};

use crate::address::{AddressError, check_address};
use crate::client::Client;
use crate::source::Source;

/// Who asks has so long, from the connection to the answer's last byte.
const PATIENCE: Duration = Duration::from_secs(1);
/// So many may be asking at a time. The next one takes the place of the oldest: whoever means to
/// ask has done so long before as many others have come.
const CLIENTS_MAX: usize = 16;
/// When accepting fails for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The listener's name at the poller; clients count up from it.
const LISTENER: u64 = 0;

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

/// Serves figures until it is dropped: one thread, a few clients at a time, nothing kept.
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
        Self::start_patiently(listener, source, PATIENCE)
    }

    fn start_patiently(
        listener: Listener,
        source: Arc<dyn Source>,
        patience: Duration,
    ) -> Result<Self, PollerError> {
        let poller = Poller::new()?;
        poller.add(&listener, LISTENER, Interest::Read)?;
        let (address, waker) = (listener.local_addr(), poller.waker());
        let clients = VecDeque::new();
        let desk = Desk { listener, poller, source, patience, clients, next_token: LISTENER + 1 };
        let thread = std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || desk.serve())
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

/// What the thread has.
struct Desk {
    listener: Listener,
    poller: Poller,
    source: Arc<dyn Source>,
    /// What each client is given.
    patience: Duration,
    /// In the order in which they came, hence also in that of their deadlines.
    clients: VecDeque<Client>,
    next_token: u64,
}

impl Desk {
    fn serve(mut self) {
        let mut events = Vec::new();
        loop {
            let due = self.clients.front().map(|oldest| oldest.deadline);
            let left = due.map(|due| due.saturating_duration_since(Instant::now()));
            match self.poller.wait(&mut events, left) {
                Ok(false) => {}
                Ok(true) => return,
                Err(error) => {
                    tracing::error!(%error, "metrics are no longer served");
                    return;
                }
            }
            for event in &events {
                self.go_on(event);
            }
            let now = Instant::now();
            while self.clients.front().is_some_and(|oldest| oldest.deadline <= now) {
                self.give_up_oldest();
            }
            // One, then a look whether to end: those who wait are told of again.
            if events.iter().any(|event| event.token == LISTENER) {
                self.accept(now);
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        match self.listener.accept() {
            Ok(Some(socket)) => {
                if self.clients.len() == CLIENTS_MAX {
                    self.give_up_oldest();
                }
                let token = self.next_token;
                self.next_token += 1;
                let deadline = now + self.patience;
                match self.poller.add(&socket, token, Interest::Read) {
                    Ok(()) => self.clients.push_back(Client::new(socket, token, deadline)),
                    Err(error) => tracing::warn!(%error, "metrics"),
                }
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "metrics");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }

    /// Something has happened to a client; others have a token that nobody has, or had.
    fn go_on(&mut self, event: &Event) {
        let Some(at) = self.clients.iter().position(|client| client.token == event.token) else {
            return;
        };
        let client = &mut self.clients[at];
        let waits_for = client.go_on(self.source.as_ref()).unwrap_or_else(|error| {
            tracing::debug!(%error, "somebody asked for metrics and left");
            None
        });
        let watched = waits_for.map(|interest| {
            let Client { socket, token, .. } = &*client;
            self.poller.modify(socket, *token, interest)
        });
        if !matches!(watched, Some(Ok(()))) {
            self.clients.remove(at);
        }
    }

    fn give_up_oldest(&mut self) {
        if let Some(Client { socket, .. }) = self.clients.pop_front() {
            tracing::debug!(peer = %socket.peer(), "somebody asked for metrics too slowly");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
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

    /// Longer than any test takes, on however busy a machine.
    const FOR_EVER: Duration = Duration::from_secs(3600);

    fn endpoint(bytes: usize) -> Endpoint {
        patient(bytes, FOR_EVER)
    }

    fn patient(bytes: usize, patience: Duration) -> Endpoint {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        Endpoint::start_patiently(listener, Arc::new(Thing(bytes)), patience).unwrap()
    }

    fn connect(endpoint: &Endpoint) -> TcpStream {
        let socket = TcpStream::connect(endpoint.address()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
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

    /// Served one after another, each of the silent ones would cost an hour.
    #[test]
    fn silent_clients_keep_nobody_waiting() {
        let endpoint = endpoint(10);
        let silent: Vec<_> = (0..3 * CLIENTS_MAX).map(|_| connect(&endpoint)).collect();
        for _ in 0..5 {
            assert!(get(&endpoint, "/metrics").ends_with("mmmmmmmmmm"));
        }
        // The first were dropped for the last ones.
        for mut socket in silent.into_iter().take(2 * CLIENTS_MAX) {
            is_dropped(&mut socket);
        }
    }

    #[test]
    fn silent_clients_are_dropped_when_their_time_is_up() {
        let patience = Duration::from_millis(300);
        let endpoint = patient(10, patience);
        let began = Instant::now();
        let mut silent: Vec<_> = (0..CLIENTS_MAX).map(|_| connect(&endpoint)).collect();
        silent.iter_mut().for_each(is_dropped);
        assert!(began.elapsed() >= patience, "{:?}", began.elapsed());
    }

    fn is_dropped(socket: &mut TcpStream) {
        let read = socket.read(&mut [0; 1]);
        let waits = |error: &std::io::Error| {
            matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
        };
        assert!(!matches!(&read, Ok(1)) && !read.as_ref().is_err_and(waits), "{read:?}");
    }

    #[test]
    fn who_speaks_slowly_and_who_reads_slowly_are_served_beside_others() {
        // More than the kernel takes at once.
        let bytes = 16 << 20;
        let endpoint = endpoint(bytes);
        let mut reader = connect(&endpoint);
        reader.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut speaker = connect(&endpoint);
        for part in ["GET /st", "at HTTP/1.1\r", "\n\r\n"] {
            speaker.write_all(part.as_bytes()).unwrap();
            assert!(get(&endpoint, "/").starts_with("HTTP/1.1 404 "));
        }
        let mut answer = String::new();
        speaker.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with("{}"), "{answer}");
        let mut answer = Vec::new();
        reader.read_to_end(&mut answer).unwrap();
        assert!(answer.len() > bytes, "{} of {bytes} bytes", answer.len());
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
