//! Messages to the service manager that has started this process, as `sd_notify(3)` of systemd
//! describes them: datagrams of `KEY=value` lines to the socket that `NOTIFY_SOCKET` names.
//!
//! A message never waits, because a manager that hangs must not stop a target. So this module does
//! not use a crate: the ones there are send in blocking mode.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    process,
    time::Duration,
};

use riopipe_platform::now_ns;

/// The variable with the socket's path, or with its abstract name behind an `@`.
const SOCKET: &str = "NOTIFY_SOCKET";
/// The variable with the time in which the manager expects a sign of life, in µs.
const WATCHDOG_TIME: &str = "WATCHDOG_USEC";
/// The variable with the process that the manager watches.
const WATCHDOG_PROCESS: &str = "WATCHDOG_PID";

/// The service manager. Without one, messages go nowhere.
#[derive(Debug, Default)]
pub(crate) struct ServiceManager {
    socket: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
    /// The status that was sent last.
    status: String,
}

impl ServiceManager {
    /// The manager that the environment names. One whose socket can't be used is logged, and gets
    /// no messages.
    pub(crate) fn from_environment() -> Self {
        let Some(name) = env::var_os(SOCKET) else { return Self::default() };
        match connect(&name) {
            Ok(socket) => {
                Self { socket: Some(socket), watchdog: watchdog(), status: String::new() }
            }
            Err(error) => {
                tracing::warn!(%error, ?name, "{SOCKET} can't be used: no messages are sent there");
                Self::default()
            }
        }
    }

    /// The time in which the manager expects a [sign of life](Self::is_alive), if it does.
    pub(crate) const fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// The service has started, or has reloaded its configuration.
    pub(crate) fn is_ready(&mut self, status: &str) {
        self.send_with_status("READY=1\n", status);
    }

    /// The service begins to reload its configuration. [`is_ready`](Self::is_ready) ends that.
    pub(crate) fn is_reloading(&mut self) {
        let now_us = now_ns() / 1000;
        self.send_with_status(
            &format!("RELOADING=1\nMONOTONIC_USEC={now_us}\n"),
            "reading the configuration again",
        );
    }

    /// The service begins to stop.
    pub(crate) fn is_stopping(&mut self, status: &str) {
        self.send_with_status("STOPPING=1\n", status);
    }

    /// The service works.
    pub(crate) fn is_alive(&self) {
        self.send("WATCHDOG=1\n");
    }

    /// The state of the service, for people. The same state is not sent twice.
    pub(crate) fn status(&mut self, status: &str) {
        if self.socket.is_some() && self.status != status {
            self.send_with_status("", status);
        }
    }

    fn send_with_status(&mut self, state: &str, status: &str) {
        self.status = status.to_owned();
        // A line break would end the status.
        self.send(&format!("{state}STATUS={}\n", status.replace('\n', " ")));
    }

    fn send(&self, message: &str) {
        let Some((socket, address)) = &self.socket else { return };
        if let Err(error) = socket.send_to_addr(message.as_bytes(), address) {
            tracing::debug!(%error, "the service manager has not taken a message");
        }
    }
}

/// A socket for messages, and the address of the manager's.
fn connect(name: &OsStr) -> io::Result<(UnixDatagram, SocketAddr)> {
    let address = match name.as_bytes() {
        [b'@', abstract_name @ ..] => SocketAddr::from_abstract_name(abstract_name)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "neither an absolute path nor an abstract name",
            ));
        }
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok((socket, address))
}

/// The time in which the manager expects a sign of life, if it watches this process.
fn watchdog() -> Option<Duration> {
    let value = |name: &str| env::var(name).ok();
    watchdog_of(value(WATCHDOG_TIME).as_deref(), value(WATCHDOG_PROCESS).as_deref(), process::id())
}

/// As [`watchdog`], from the variables' values, for the process `own`.
fn watchdog_of(time: Option<&str>, watched: Option<&str>, own: u32) -> Option<Duration> {
    let is_watched = watched.is_none_or(|watched| watched.parse() == Ok(own));
    let time: u64 = time.filter(|_| is_watched)?.parse().ok()?;
    (time > 0).then(|| Duration::from_micros(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_watched_process_gives_signs_of_life() {
        let second = Some(Duration::from_secs(1));
        assert_eq!(watchdog_of(Some("1000000"), None, 7), second);
        assert_eq!(watchdog_of(Some("1000000"), Some("7"), 7), second);
        assert_eq!(watchdog_of(Some("1000000"), Some("8"), 7), None);
        for none in [None, Some("0"), Some(""), Some("-1"), Some("1s")] {
            assert_eq!(watchdog_of(none, None, 7), None, "{none:?}");
        }
    }

    #[test]
    fn a_manager_that_hangs_or_is_gone_stops_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixDatagram::bind(&path).unwrap();
        let socket = Some(connect(path.as_os_str()).unwrap());
        let mut manager = ServiceManager { socket, ..ServiceManager::default() };
        // More than the socket's queue takes: the first message that does not fit would wait.
        for number in 0..10_000 {
            manager.status(&number.to_string());
        }
        drop(listener);
        manager.is_alive();
        for wrong in ["relative", ""] {
            assert!(connect(OsStr::new(wrong)).is_err(), "{wrong:?}");
        }
    }
}
