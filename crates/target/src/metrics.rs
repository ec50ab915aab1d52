//! The target's figures over HTTP, for this machine only.

use std::fmt::Write as _;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riopipe_net::{
    Interest, Listener, Poller, PollerError, Received, Socket, Waker, wait_readable, wait_writable,
};

use crate::exposition;
use crate::stat::Figures;

/// A request and all its header fields may have so many bytes.
const HEAD_BYTES_MAX: usize = 8 << 10;
const FIELDS_MAX: usize = 64;
/// Who asks has so long, from the connection to the answer's last byte: the next one waits.
const PATIENCE: Duration = Duration::from_secs(1);
/// When accepting fails for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why an address is none for metrics.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddressError {
    #[error("{0:?} is no address with a port")]
    Senseless(String),
    #[error("{0:?} can be reached from other machines")]
    Reachable(String),
}

impl AddressError {
    /// What to do about it.
    pub(crate) const fn advice(&self) -> &'static str {
        match self {
            Self::Senseless(_) => "give one, such as 127.0.0.1:9420",
            Self::Reachable(_) => {
                "metrics know no authentication: give a loopback address, such as 127.0.0.1:9420, \
                 and have an agent on this machine read it"
            }
        }
    }
}

/// Whether only this machine can reach `address`.
pub(crate) fn check_address(address: &str) -> Result<(), AddressError> {
    let senseless = || AddressError::Senseless(address.to_owned());
    let mut found = address.to_socket_addrs().map_err(|_| senseless())?.peekable();
    found.peek().ok_or_else(senseless)?;
    match found.all(|address| address.ip().to_canonical().is_loopback()) {
        true => Ok(()),
        false => Err(AddressError::Reachable(address.to_owned())),
    }
}

/// Serves the figures until it is dropped: one thread, one request at a time, nothing kept.
pub(crate) struct Endpoint {
    address: SocketAddr,
    /// Woken to end.
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    pub(crate) fn start(listener: Listener, figures: Arc<Figures>) -> Result<Self, PollerError> {
        let poller = Poller::new()?;
        poller.add(&listener, 0, Interest::Read)?;
        let (address, waker) = (listener.local_addr(), poller.waker());
        let thread = std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || serve(&listener, &poller, &figures))
            .map_err(|source| PollerError { what: "start the thread for metrics", source })?;
        Ok(Self { address, waker, thread: Some(thread) })
    }

    pub(crate) const fn address(&self) -> SocketAddr {
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

fn serve(listener: &Listener, poller: &Poller, figures: &Figures) {
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
                if answer(&socket, figures).is_none() {
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
fn answer(socket: &Socket, figures: &Figures) -> Option<()> {
    let deadline = Instant::now() + PATIENCE;
    let left = || deadline.checked_duration_since(Instant::now());
    let mut head = [0; HEAD_BYTES_MAX];
    let mut len = 0;
    let page = loop {
        if let Some(page) = respond(&head[..len], figures) {
            break page;
        }
        if len == head.len() {
            break Page::error(Status::TooLarge);
        }
        match socket.recv(&mut head[len..]).ok()? {
            Received::Bytes(more) => len += more,
            Received::Closed => return None,
            Received::WouldBlock => {
                wait_readable(socket.as_fd(), left()?).ok()?;
            }
        }
    };
    let bytes = page.bytes();
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

/// What a request that begins like this is answered with; `None` if more of it must come first.
fn respond(head: &[u8], figures: &Figures) -> Option<Page> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(head) {
        Ok(status) if status.is_partial() => return None,
        Ok(_) => {}
        Err(httparse::Error::TooManyHeaders) => return Some(Page::error(Status::TooLarge)),
        Err(_) => return Some(Page::error(Status::BadRequest)),
    }
    let has_body = match request.method {
        Some("GET") => true,
        Some("HEAD") => false,
        _ => return Some(Page::error(Status::NotAllowed)),
    };
    // A query means nothing here.
    let path = request.path.unwrap_or_default().split('?').next().unwrap_or_default();
    let page = match path {
        "/metrics" => exposition::metrics(figures.stat())
            .map(|body| Page::new(exposition::CONTENT_TYPE, body))
            .unwrap_or_else(|_| Page::error(Status::Internal)),
        "/stat" => serde_json::to_string(&figures.stat())
            .map(|body| Page::new("application/json", body))
            .unwrap_or_else(|_| Page::error(Status::Internal)),
        _ => Page::error(Status::NotFound),
    };
    Some(Page { has_body, ..page })
}

#[derive(Clone, Copy)]
enum Status {
    Ok,
    BadRequest,
    NotFound,
    NotAllowed,
    TooLarge,
    Internal,
}

impl Status {
    const fn line(self) -> &'static str {
        match self {
            Self::Ok => "200 OK",
            Self::BadRequest => "400 Bad Request",
            Self::NotFound => "404 Not Found",
            Self::NotAllowed => "405 Method Not Allowed\r\nAllow: GET, HEAD",
            Self::TooLarge => "431 Request Header Fields Too Large",
            Self::Internal => "500 Internal Server Error",
        }
    }
}

struct Page {
    status: Status,
    content_type: &'static str,
    body: String,
    /// Else only its length is told.
    has_body: bool,
}

impl Page {
    const fn new(content_type: &'static str, body: String) -> Self {
        Self { status: Status::Ok, content_type, body, has_body: true }
    }

    fn error(status: Status) -> Self {
        let body = "A Rio target's metrics: /metrics for Prometheus, /stat as JSON.\n".to_owned();
        Self { status, content_type: "text/plain; charset=utf-8", body, has_body: true }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut text = String::with_capacity(self.body.len() + 256);
        // Writing to a string can't fail.
        let _ = write!(
            text,
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
             Connection: close\r\n\r\n",
            self.status.line(),
            self.content_type,
            self.body.len()
        );
        if self.has_body {
            text += &self.body;
        }
        text.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_may_ask() {
        for address in ["127.0.0.1:0", "127.9.9.9:9420", "[::1]:9420", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(check_address(address), Ok(()), "{address}");
        }
        for address in ["0.0.0.0:9420", "[::]:9420", "192.0.2.1:9420", "[::ffff:192.0.2.1]:1"] {
            let error = check_address(address).unwrap_err();
            assert_eq!(error, AddressError::Reachable(address.into()));
            assert!(error.advice().contains("127.0.0.1"));
        }
        for address in ["", "9420", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999"] {
            let error = check_address(address).unwrap_err();
            assert_eq!(error, AddressError::Senseless(address.into()));
        }
    }
}
