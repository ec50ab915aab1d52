//! The socket through which other processes of this machine command a running target.
//!
//! It is a Unix socket in the file system, whose permissions are the access check. It belongs to the
//! target's user, and only that user and root may connect. The metrics' HTTP has no such check, so it
//! takes no commands.
//!
//! A client sends one [`Request`], a line of JSON. The target sends [`Answer`]s, a line each, and
//! closes the connection after the last one.

use std::{
    fs,
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    os::unix::{
        fs::FileTypeExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{fs::Mode, process::umask};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::failure::{Code, Failure};

/// Longest time for a client to send its request, and to take an answer. The target serves its
/// hosts meanwhile, but takes no other command.
const CLIENT_TIME: Duration = Duration::from_secs(2);
/// Largest request or answer in bytes.
const LINE_BYTES_MAX: u64 = 4 << 20;

/// A request to a running target.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Take over the configuration.
    Reload {
        /// Change nothing.
        dry_run: bool,
        /// Remove namespaces also from volumes that need them.
        force: bool,
    },
    /// Set the ANA state of a port, if there is one, and report all.
    Ana {
        /// The port and the state, if one is to be set.
        set: Option<(u16, String)>,
        /// The group; all if absent.
        group: Option<u32>,
    },
    /// End once all volumes are closed.
    Drain {
        /// Longest wait for that, in ms.
        limit_ms: u64,
    },
}

/// The open volumes for which a running target waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waiting {
    /// A sentence for each thing.
    pub(crate) waits_for: Vec<String>,
    /// The rest of the time, in ms.
    pub(crate) left_ms: u64,
}

/// An answer of a running target.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer<T> {
    /// The request is not done yet.
    Waiting(Waiting),
    /// The request is done.
    Done {
        /// The result.
        result: T,
    },
    /// The request has failed.
    Failed {
        /// The failure, for the client to report.
        failure: FailureLine,
    },
}

/// A failure, as a client reports it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FailureLine {
    code: u8,
    message: String,
    hint: Option<String>,
}

impl FailureLine {
    pub(crate) fn of(failure: &Failure) -> Self {
        let Failure { code, message, hint, .. } = failure.clone();
        Self { code: code as u8, message, hint }
    }

    pub(crate) fn into_failure(self) -> Failure {
        let code = Code::ALL.into_iter().find(|code| *code as u8 == self.code);
        let failure = Failure::new(code.unwrap_or(Code::Failed), self.message);
        Failure { hint: self.hint, ..failure }
    }
}

/// The socket of a running target.
pub(crate) struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
}

/// A client that waits for answers.
pub(crate) struct Client(UnixStream);

impl ControlSocket {
    /// Makes the socket. One that a process has left that was killed is replaced.
    ///
    /// # Errors
    /// Another process has the socket, or the path can't be used.
    pub(crate) fn at(path: &Path) -> Result<Self, Failure> {
        remove_stale(path)?;
        let refused = |error: &io::Error| {
            Failure::new(Code::Media, format!("control socket {}", path.display())).because(error)
        };
        // Without a moment in which others could connect. Other threads that make files meanwhile
        // get fewer permissions, not more; there are none at the start.
        let before = umask(Mode::from_raw_mode(0o177));
        let bound = UnixListener::bind(path);
        umask(before);
        let listener = bound.map_err(|error| refused(&error))?;
        listener.set_nonblocking(true).map_err(|error| refused(&error))?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The next request, if one has come. Waits only for a client that has connected and sends its
    /// request slowly.
    pub(crate) fn request(&self) -> Option<(Request, Client)> {
        let (stream, _) = self.listener.accept().ok()?;
        match read_request(&stream) {
            Ok(request) => Some((request, Client(stream))),
            Err(error) => {
                tracing::warn!(%error, "a request at the control socket can't be read");
                let failure = Failure::new(Code::Usage, "the target can't read the request")
                    .because(&error)
                    .hint("use the `rio` with which the target was started");
                Client(stream).fail(&failure);
                None
            }
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // A later start would replace it anyway.
        let _ = fs::remove_file(&self.path);
    }
}

fn read_request(stream: &UnixStream) -> io::Result<Request> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(CLIENT_TIME))?;
    stream.set_write_timeout(Some(CLIENT_TIME))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

impl Client {
    /// Sends an answer. Returns whether the client is still there.
    pub(crate) fn answer<T: Serialize>(&self, answer: &Answer<T>) -> bool {
        // Plain values: serialisation can't fail.
        let mut line = serde_json::to_string(answer).unwrap_or_default();
        line.push('\n');
        (&self.0).write_all(line.as_bytes()).is_ok()
    }

    /// Reports what the request waits for. Returns whether the client is still there.
    pub(crate) fn waiting(&self, waiting: Waiting) -> bool {
        self.answer(&Answer::<()>::Waiting(waiting))
    }

    /// Sends the result of the request.
    pub(crate) fn done<T: Serialize>(&self, result: T) -> bool {
        self.answer(&Answer::Done { result })
    }

    /// Sends a failure.
    pub(crate) fn fail(&self, failure: &Failure) -> bool {
        self.answer(&Answer::<()>::Failed { failure: FailureLine::of(failure) })
    }
}

/// Removes a socket that no process has any more.
fn remove_stale(path: &Path) -> Result<(), Failure> {
    let refused = |why: &str| {
        Failure::new(Code::Media, format!("control socket {}: {why}", path.display()))
            .hint("give each target a path of its own with --control, or `control` in its file")
    };
    match fs::symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(found) if !found.file_type().is_socket() => Err(refused("there is another file")),
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => Err(refused("another process serves it")),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(|error| refused("").because(&error))
            }
            Err(error) => Err(refused("").because(&error)),
        },
    }
}

/// Sends a request to the target at a control socket, and returns its result. Until then,
/// `on_waiting` gets what the target waits for.
///
/// # Errors
/// No target is there, or the request has failed.
pub(crate) fn ask<T: DeserializeOwned>(
    path: &Path,
    request: &Request,
    mut on_waiting: impl FnMut(&Waiting),
) -> Result<T, Failure> {
    let shown = path.display();
    let stream = UnixStream::connect(path).map_err(|error| unreachable_at(path, &error))?;
    let failed = |error: &io::Error| {
        Failure::new(Code::Connection, format!("the target at {shown} has given no answer"))
            .because(error)
            .hint("it may have ended: its log has the reason")
    };
    // Plain values: serialisation can't fail.
    let mut line = serde_json::to_string(request).unwrap_or_default();
    line.push('\n');
    (&stream).write_all(line.as_bytes()).map_err(|error| failed(&error))?;
    let mut answers = BufReader::new(&stream);
    loop {
        let mut answer = String::new();
        let mut next = (&mut answers).take(LINE_BYTES_MAX);
        let count = next.read_line(&mut answer).map_err(|error| failed(&error))?;
        if count == 0 {
            return Err(failed(&ErrorKind::UnexpectedEof.into()));
        }
        match serde_json::from_str(&answer) {
            Ok(Answer::Waiting(waiting)) => on_waiting(&waiting),
            Ok(Answer::Done { result }) => return Ok(result),
            Ok(Answer::Failed { failure }) => return Err(failure.into_failure()),
            Err(error) => {
                return Err(Failure::new(
                    Code::Connection,
                    format!("the answer of the target at {shown} can't be understood"),
                )
                .because(&error)
                .hint("it is of another version; use the `rio` that serves it"));
            }
        }
    }
}

fn unreachable_at(path: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(Code::Connection, format!("no target at {}", path.display()));
    let failure = failure.because(error);
    match error.kind() {
        ErrorKind::PermissionDenied => failure.hint("only the target's user and root may ask it"),
        _ => failure.hint(
            "a target has the socket that `rio target serve --control PATH` names (`control` in \
             its configuration); SIGHUP reaches it without a socket",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_the_user_may_connect_and_a_stale_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let socket = ControlSocket::at(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let taken = ControlSocket::at(&path).err().unwrap();
        assert!(taken.message.contains("another process serves it"), "{taken}");
        // As a killed process leaves it.
        let left = path.with_file_name("left");
        drop(UnixListener::bind(&left).unwrap());
        drop(ControlSocket::at(&left).unwrap());
        assert!(!left.exists(), "an orderly end removes it");
        drop(socket);
        fs::write(&path, "precious").unwrap();
        let file = ControlSocket::at(&path).err().unwrap();
        assert!(file.message.contains("another file"), "{file}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_client_that_sends_nonsense_or_nothing_stops_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let socket = ControlSocket::at(&path).unwrap();
        assert!(socket.request().is_none(), "no client");
        for bytes in [&b"{\"request\":\"fly\"}\n"[..], b"\n", b"", &[b'x'; 100_000]] {
            let mut client = UnixStream::connect(&path).unwrap();
            client.write_all(bytes).unwrap();
            client.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(socket.request().is_none());
            let mut answer = String::new();
            // Bytes that were not read may reset the connection.
            let _ = client.read_to_string(&mut answer);
            assert!(answer.is_empty() || answer.contains("can't read the request"), "{answer}");
        }
        drop(UnixStream::connect(&path).unwrap());
        assert!(socket.request().is_none());
        let asked = std::thread::spawn({
            let path = path.clone();
            move || {
                let mut waiting = Vec::new();
                let request = Request::Reload { dry_run: true, force: false };
                let result = ask::<u32>(&path, &request, |now| waiting.push(now.clone()));
                (result.unwrap(), waiting)
            }
        });
        let client = loop {
            if let Some((Request::Reload { dry_run: true, force: false }, client)) =
                socket.request()
            {
                break client;
            }
        };
        let waiting = Waiting { waits_for: vec!["a volume".into()], left_ms: 9 };
        assert!(client.waiting(waiting.clone()) && client.done(7));
        assert_eq!(asked.join().unwrap(), (7, vec![waiting]));
        drop(socket);
        let gone = ask::<u32>(&path, &Request::Drain { limit_ms: 0 }, |_| {});
        assert_eq!(gone.unwrap_err().code, Code::Connection);
    }
}
