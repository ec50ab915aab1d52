//! A session of TLS on a TCP socket, non-blocking.

use std::ffi::{c_int, c_void};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::task::{Poll, Waker};

use riopipe_net::Interest;
use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, Mode, Version};
use s2n_tls::error::ErrorType;

use crate::error::TlsError;

/// The type of a record with a handshake message, the first byte of a session (RFC 8446 §5.1).
pub(crate) const HANDSHAKE_RECORD: u8 = 22;
/// The type of a record with an alert.
const ALERT_RECORD: u8 = 21;
/// The alert for a key that is not the right one: *decrypt_error* (RFC 8446 §4.2.11).
pub(crate) const DECRYPT_ERROR: u8 = 51;
/// The alert for an identity that the target does not know: *unknown_psk_identity*.
pub(crate) const UNKNOWN_PSK_IDENTITY: u8 = 115;
/// No byte has been received.
const NO_BYTE: u16 = u16::MAX;

/// The result of a call that may have to wait.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step<T> {
    Done(T),
    /// Nothing more is possible until the socket can be read or written.
    Blocked,
}

/// The socket of a session, to which the library's calls lead.
#[derive(Debug)]
struct Io {
    stream: TcpStream,
    /// The first byte that the peer has sent, or [`NO_BYTE`].
    first_byte: AtomicU16,
    /// Whether the last call that had to wait was one that sends.
    waits_to_send: AtomicBool,
}

/// A session. The order of the fields is that of their end: the library's connection has a pointer to `io`.
#[derive(Debug)]
pub(crate) struct TlsStream {
    connection: Connection,
    io: Arc<Io>,
}

impl TlsStream {
    /// A session whose handshake has not begun. `stream` is not blocking.
    pub(crate) fn new(mode: Mode, config: Config, stream: TcpStream) -> Result<Self, TlsError> {
        let first_byte = AtomicU16::new(NO_BYTE);
        let io = Arc::new(Io { stream, first_byte, waits_to_send: AtomicBool::new(false) });
        let mut connection = Connection::new(mode);
        connection.set_config(config)?;
        // After an error the library would wait for up to 30 s, to hide how long the check of a record took.
        // A relay must not wait, and the records of TLS 1.3 are checked in constant time.
        connection.set_blinding(Blinding::SelfService)?;
        // The library asks for one before it runs a callback. None of ours waits, so nothing wakes it.
        connection.set_waker(Some(Waker::noop()))?;
        connection.prefer_throughput()?;
        connection.set_receive_buffering(true)?;
        connection.set_receive_callback(Some(receive))?;
        connection.set_send_callback(Some(send))?;
        let context = Arc::as_ptr(&io).cast_mut().cast::<c_void>();
        // SAFETY: `io` lives longer than `connection`, as the order of the fields has it, and an `Arc` does
        // not move its content. The callbacks only read it, or change its atomics.
        unsafe {
            connection.set_receive_context(context)?;
            connection.set_send_context(context)?;
        }
        Ok(Self { connection, io })
    }

    pub(crate) fn connection(&mut self) -> &mut Connection {
        &mut self.connection
    }

    /// Goes on with the handshake. When it is done, both ends have proved that they have the same key.
    pub(crate) fn handshake(&mut self) -> Result<Step<()>, TlsError> {
        match self.connection.poll_negotiate() {
            Poll::Ready(Ok(_)) => {}
            Poll::Pending => return Ok(Step::Blocked),
            Poll::Ready(Err(error)) => {
                let alert = self.connection.alert().filter(|_| error.kind() == ErrorType::Alert);
                return Err(alert.map_or_else(|| error.into(), TlsError::Alert));
            }
        }
        // The configuration permits nothing else. This is a second lock.
        let is_tls13 = self.connection.actual_protocol_version()? == Version::TLS13;
        if !is_tls13 || self.identity()?.is_empty() {
            return Err(TlsError::NoPsk);
        }
        Ok(Step::Done(()))
    }

    /// The identity of the key that the handshake has used; empty if it has used none.
    pub(crate) fn identity(&self) -> Result<Vec<u8>, TlsError> {
        let mut identity = vec![0; self.connection.negotiated_psk_identity_length()?];
        if !identity.is_empty() {
            self.connection.negotiated_psk_identity(&mut identity)?;
        }
        Ok(identity)
    }

    /// Whether the peer has sent something that is no TLS.
    pub(crate) fn is_peer_plain(&self) -> bool {
        let records = [HANDSHAKE_RECORD, ALERT_RECORD].map(u16::from);
        let first = self.io.first_byte.load(Ordering::Relaxed);
        first != NO_BYTE && !records.contains(&first)
    }

    /// The event that the last call has waited for, of those that had to wait.
    pub(crate) fn awaited(&self) -> Interest {
        match self.io.waits_to_send.load(Ordering::Relaxed) {
            true => Interest::Write,
            false => Interest::Read,
        }
    }

    /// Receives decrypted bytes. 0: the peer has ended its direction.
    pub(crate) fn recv(&mut self, into: &mut [u8]) -> Result<Step<usize>, TlsError> {
        match self.connection.poll_recv(into) {
            Poll::Ready(Ok(count)) => Ok(Step::Done(count)),
            Poll::Pending => Ok(Step::Blocked),
            Poll::Ready(Err(error)) => match error.kind() {
                // Kernels end a connection without TLS's notice. Nothing is lost by that: each PDU has its
                // length, and the bytes before are authentic.
                ErrorType::ConnectionClosed => Ok(Step::Done(0)),
                ErrorType::Alert => Err(TlsError::Alert(self.connection.alert().unwrap_or(0))),
                _ => Err(error.into()),
            },
        }
    }

    /// Encrypts and sends bytes; returns how many. If it is blocked, the next call must begin with the same
    /// bytes.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<Step<usize>, TlsError> {
        match self.connection.poll_send(bytes) {
            Poll::Ready(Ok(count)) => Ok(Step::Done(count)),
            Poll::Pending => Ok(Step::Blocked),
            Poll::Ready(Err(error)) => Err(error.into()),
        }
    }

    /// Ends the sending direction with TLS's notice.
    pub(crate) fn finish(&mut self) -> Result<Step<()>, TlsError> {
        match self.connection.poll_shutdown_send() {
            Poll::Ready(Ok(_)) => {
                // The only failure is "not connected", which is the intended result.
                let _ = self.io.stream.shutdown(Shutdown::Write);
                Ok(Step::Done(()))
            }
            Poll::Pending => Ok(Step::Blocked),
            Poll::Ready(Err(error)) => Err(error.into()),
        }
    }

    /// Sends an alert to a peer whose handshake has failed before any key was agreed. Best effort.
    pub(crate) fn alert(&self, code: u8) {
        // A record of TLS 1.2's version, as all of TLS 1.3, with a fatal alert.
        let record = [ALERT_RECORD, 3, 3, 0, 2, 2, code];
        let _ = io::Write::write(&mut &self.io.stream, &record);
    }
}

impl AsFd for TlsStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.io.stream.as_fd()
    }
}

/// Receives bytes for the library.
///
/// # Safety
/// `context` points to an [`Io`], and `into` to `len` bytes.
unsafe extern "C" fn receive(context: *mut c_void, into: *mut u8, len: u32) -> c_int {
    // SAFETY: the caller's promise.
    let io = unsafe { &*context.cast_const().cast::<Io>() };
    // SAFETY: the descriptor is that of a socket, and `into` has `len` bytes.
    let received = unsafe { libc::recv(io.stream.as_raw_fd(), into.cast(), len as usize, 0) };
    if received > 0 && io.first_byte.load(Ordering::Relaxed) == NO_BYTE {
        // SAFETY: the first byte has just been received.
        io.first_byte.store(u16::from(unsafe { *into }), Ordering::Relaxed);
    }
    if received < 0 {
        io.waits_to_send.store(false, Ordering::Relaxed);
    }
    received as c_int
}

/// Sends bytes for the library.
///
/// # Safety
/// `context` points to an [`Io`], and `from` to `len` bytes.
unsafe extern "C" fn send(context: *mut c_void, from: *const u8, len: u32) -> c_int {
    // SAFETY: the caller's promise.
    let io = unsafe { &*context.cast_const().cast::<Io>() };
    let (fd, flags) = (io.stream.as_raw_fd(), libc::MSG_NOSIGNAL);
    // SAFETY: the descriptor is that of a socket, and `from` has `len` bytes.
    let sent = unsafe { libc::send(fd, from.cast(), len as usize, flags) };
    if sent < 0 {
        io.waits_to_send.store(true, Ordering::Relaxed);
    }
    sent as c_int
}
