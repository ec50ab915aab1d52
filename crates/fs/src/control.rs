//! Questions to the process that serves a mount: its figures, and the end of an unmount.
//!
//! They do not go through the file system, whose threads may all wait for a target. The process
//! listens on a socket with an abstract name, `riofs/MAJOR:MINOR` with the device of the mount: there
//! is no file that could be left over. The number of a device is used again as soon as its mount has
//! ended, while the process may still write for a long time. So the process stops to listen then
//! ([`Listening::stop`]), and answers only those that wait already. A client asks with one line, and
//! gets one line of JSON:
//!
//! | question | answer |
//! |---|---|
//! | `stat` | the [figures](MountStat) |
//! | `wait` | once the file system is unmounted and its volume closed: the [`Outcome`] |
//! | `unmount` | the same; the process unmounts it, also if programs use it |
//!
//! Both sides check the other one by the user that the kernel reports (`SO_PEERCRED`). A process
//! answers to its own user and to root. A client accepts the user that has mounted the file system.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use serde::{Deserialize, Serialize};

use crate::mount_stat::{MountStat, MountStatSource};
use crate::mounts::MountPoint;

/// The longest time for a question, and for an answer that needs no wait.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The interval in which a client checks whether it should still wait.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The interval in which a client that waits is checked: it may have left.
const CLIENT_INTERVAL: Duration = Duration::from_secs(1);
/// The largest number of clients at a time. Others are turned off.
const CLIENTS_MAX: usize = 64;
/// The largest question and the largest answer, bytes.
const LINE_BYTES_MAX: u64 = 4 << 20;

/// How a mount has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Why it was not unmounted in order; the next mount recovers it. `None`: all is durable, and
    /// any ext4 may use it.
    pub error: Option<String>,
}

/// The listening end of a process. Dropping it ends it; clients that wait get no answer then.
pub struct Control {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    source: Arc<MountStatSource>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_unmount_requested: bool,
    outcome: Option<Outcome>,
    is_stopped: bool,
    /// Clients that have asked before are still answered.
    is_closed: bool,
    clients: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers one client.
    fn answer(&self, stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let own = rustix::process::geteuid();
        let client = socket_peercred(&stream)?.uid;
        if !client.is_root() && client != own {
            return Ok(());
        }
        let mut question = String::new();
        BufReader::new((&stream).take(64)).read_line(&mut question)?;
        let answer = match question.trim_end() {
            "stat" => serde_json::to_string(&self.source.stat())?,
            "wait" => serde_json::to_string(&self.outcome(&stream))?,
            "unmount" => {
                self.lock().is_unmount_requested = true;
                serde_json::to_string(&self.outcome(&stream))?
            }
            _ => return Ok(()),
        };
        (&stream).write_all(format!("{answer}\n").as_bytes())
    }

    /// Waits for the outcome; `None`: there will be none, or the client has left.
    fn outcome(&self, client: &UnixStream) -> Option<Outcome> {
        let is_open = |state: &mut State| state.outcome.is_none() && !state.is_stopped;
        loop {
            let waited = self.changed.wait_timeout_while(self.lock(), CLIENT_INTERVAL, is_open);
            let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if !timeout.timed_out() || has_left(client) {
                return state.outcome.clone();
            }
        }
    }
}

impl Control {
    /// Listens for questions about a mount of this process. It waits for a process whose mount had
    /// the same device, and has ended this moment.
    ///
    /// # Errors
    /// The system refuses; also if another process keeps the name.
    pub fn listen(mount: &MountPoint, source: Arc<MountStatSource>) -> io::Result<Self> {
        let address = address_of(mount)?;
        let since = Instant::now();
        let listener = loop {
            match UnixListener::bind_addr(&address) {
                Err(error) if error.kind() == ErrorKind::AddrInUse && since.elapsed() < TIMEOUT => {
                    thread::sleep(CHECK_INTERVAL);
                }
                bound => break bound?,
            }
        };
        let shared =
            Arc::new(Shared { source, state: Mutex::default(), changed: Condvar::default() });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("riofs-control".to_owned())
            .spawn(move || accept(&listener, &own))?;
        Ok(Self { address, shared, thread: Some(thread) })
    }

    /// The handle that ends the listening, for the thread that serves the mount.
    #[must_use]
    pub fn listening(&self) -> Listening {
        Listening { address: self.address.clone(), shared: Arc::clone(&self.shared) }
    }

    /// Whether a client has asked for an unmount.
    #[must_use]
    pub fn is_unmount_requested(&self) -> bool {
        self.shared.lock().is_unmount_requested
    }

    /// Answers all clients that wait for the end, and stops.
    pub fn end(self, outcome: Outcome) {
        self.shared.lock().outcome = Some(outcome);
        self.shared.changed.notify_all();
        // A client that reads no answer must not keep this process.
        let is_busy = |state: &mut State| state.clients > 0;
        let state = self.shared.lock();
        drop(self.shared.changed.wait_timeout_while(state, TIMEOUT, is_busy));
    }
}

/// Ends the listening of a [`Control`].
#[derive(Clone)]
pub struct Listening {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Listening {
    /// The mount has ended: the name is for the next mount with its device. Clients that have asked
    /// are still answered.
    pub fn stop(&self) {
        self.shared.lock().is_closed = true;
        self.wake();
    }

    /// Wakes the thread that listens. Without a connection it would wait for the next client.
    fn wake(&self) -> bool {
        UnixStream::connect_addr(&self.address).is_ok()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let is_closed = {
            let mut state = self.shared.lock();
            state.is_stopped = true;
            state.is_closed
        };
        self.shared.changed.notify_all();
        // Another process may have the name of one that has closed.
        if (is_closed || self.listening().wake())
            && let Some(thread) = self.thread.take()
        {
            // A panic has been reported already.
            let _ = thread.join();
        }
    }
}

fn has_left(client: &UnixStream) -> bool {
    let mut ends = [PollFd::new(client, PollFlags::RDHUP)];
    // An error counts as an end, too.
    poll(&mut ends, Some(&Timespec::default())).is_ok_and(|found| found > 0)
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    loop {
        let accepted = listener.accept();
        let mut state = shared.lock();
        if state.is_stopped {
            return;
        }
        // Those that have connected before are accepted, and then no one is waited for.
        if state.is_closed && listener.set_nonblocking(true).is_err() {
            return;
        }
        let stream = match accepted {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Ok((stream, _)) if state.clients < CLIENTS_MAX => stream,
            Ok(_) => continue,
            Err(error) => {
                drop(state);
                tracing::warn!(%error, "can't answer questions about the mount");
                thread::sleep(CHECK_INTERVAL);
                continue;
            }
        };
        state.clients += 1;
        drop(state);
        let own = Arc::clone(shared);
        let client = move || {
            if let Err(error) = own.answer(stream) {
                tracing::debug!(%error, "a client has asked, and left");
            }
            own.lock().clients -= 1;
            own.changed.notify_all();
        };
        if thread::Builder::new().name("riofs-client".to_owned()).spawn(client).is_err() {
            shared.lock().clients -= 1;
        }
    }
}

/// Why a process did not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// There is no process.
    #[error(
        "no process serves {directory} any more: `fusermount3 -u {directory}` takes it off, and the \
         next mount recovers the file system"
    )]
    NotServed {
        /// The directory of the mount.
        directory: String,
    },
    /// Only another user may ask.
    #[error(
        "{directory} was mounted by the user with number {owner}: only that user and root may ask"
    )]
    NotAllowed {
        /// The directory of the mount.
        directory: String,
        /// The user.
        owner: u32,
    },
    /// The process that answers does not belong to the user that has mounted the file system.
    #[error(
        "a process of the user with number {user} answers for {directory}, which it did not mount"
    )]
    Foreign {
        /// The directory of the mount.
        directory: String,
        /// The user.
        user: u32,
    },
    /// The answer can't be understood.
    #[error(
        "the process that serves {directory} is of another version: use the `rio` that serves it"
    )]
    Version {
        /// The directory of the mount.
        directory: String,
    },
    /// The connection has failed.
    #[error("the process that serves {directory} does not answer: {source}")]
    Io {
        /// The directory of the mount.
        directory: String,
        /// The reason.
        source: io::Error,
    },
}

/// Asks for the figures of a mount.
///
/// # Errors
/// [`AskError`].
pub fn ask_stat(mount: &MountPoint) -> Result<MountStat, AskError> {
    let directory = mount.directory.display().to_string();
    let stream = ask(mount, "stat")?;
    let mut answer = String::new();
    let read = BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut answer);
    read.map_err(|source| AskError::Io { directory: directory.clone(), source })?;
    if answer.is_empty() {
        return Err(refused(mount));
    }
    match serde_json::from_str::<MountStat>(&answer) {
        Ok(stat) if stat.schema == MountStat::SCHEMA => Ok(stat),
        _ => Err(AskError::Version { directory }),
    }
}

/// A client that waits for the end of a mount.
#[derive(Debug)]
pub struct Waiting {
    stream: UnixStream,
    mount: MountPoint,
}

impl Waiting {
    /// Begins to wait. With `unmount` the process is asked to unmount the file system, even if
    /// programs use it.
    ///
    /// # Errors
    /// [`AskError`].
    pub fn begin(mount: &MountPoint, unmount: bool) -> Result<Self, AskError> {
        let stream = ask(mount, if unmount { "unmount" } else { "wait" })?;
        Ok(Self { stream, mount: mount.clone() })
    }

    /// Waits until the file system is unmounted and its volume closed, or until `is_given_up`.
    /// `None`: it was given up.
    ///
    /// # Errors
    /// [`AskError`]: [`AskError::NotServed`] if the process has ended without an answer.
    pub fn wait(self, is_given_up: impl Fn() -> bool) -> Result<Option<Outcome>, AskError> {
        let directory = || self.mount.directory.display().to_string();
        let failed = |source| AskError::Io { directory: directory(), source };
        self.stream.set_read_timeout(Some(CHECK_INTERVAL)).map_err(failed)?;
        let mut answer = Vec::new();
        let mut stream = BufReader::new((&self.stream).take(LINE_BYTES_MAX));
        loop {
            match stream.read_until(b'\n', &mut answer) {
                Ok(_) => break,
                // The process has ended before it accepted this client.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(failed(error)),
            }
            if is_given_up() {
                return Ok(None);
            }
        }
        if answer.is_empty() {
            return Err(refused(&self.mount));
        }
        match serde_json::from_slice::<Option<Outcome>>(&answer) {
            Ok(Some(outcome)) => Ok(Some(outcome)),
            Ok(None) => Err(AskError::NotServed { directory: directory() }),
            Err(_) => Err(AskError::Version { directory: directory() }),
        }
    }
}

/// Connects to the process of a mount, and asks.
fn ask(mount: &MountPoint, question: &str) -> Result<UnixStream, AskError> {
    let directory = || mount.directory.display().to_string();
    let failed = |source: io::Error| match source.kind() {
        ErrorKind::ConnectionRefused => AskError::NotServed { directory: directory() },
        // The process has turned this client off.
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => refused(mount),
        _ => AskError::Io { directory: directory(), source },
    };
    let mut stream =
        address_of(mount).and_then(|address| UnixStream::connect_addr(&address)).map_err(failed)?;
    let user = socket_peercred(&stream).map_err(|error| failed(error.into()))?.uid.as_raw();
    if user != mount.owner {
        return Err(AskError::Foreign { directory: directory(), user });
    }
    stream.set_read_timeout(Some(TIMEOUT)).map_err(failed)?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(failed)?;
    stream.write_all(format!("{question}\n").as_bytes()).map_err(failed)?;
    Ok(stream)
}

/// The reason for a closed connection.
fn refused(mount: &MountPoint) -> AskError {
    let directory = mount.directory.display().to_string();
    let own = rustix::process::geteuid();
    match own.is_root() || own.as_raw() == mount.owner {
        true => AskError::NotServed { directory },
        false => AskError::NotAllowed { directory, owner: mount.owner },
    }
}

fn address_of(mount: &MountPoint) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("riofs/{}", mount.device))
}
