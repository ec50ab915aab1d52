//! A target under a service manager (`Type=notify` of systemd), with a socket in its place; and the
//! unit that comes with the project.

use std::{
    ffi::OsStr,
    net::TcpStream,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::{
    serve::{served, signal},
    site::{LIMIT, finish, program},
};

/// The socket of a service manager.
struct Manager(UnixDatagram);

impl Manager {
    fn at(path: &Path) -> Self {
        Self::of(UnixDatagram::bind(path).unwrap())
    }

    fn of(socket: UnixDatagram) -> Self {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self(socket)
    }

    fn next(&self) -> String {
        let mut message = [0; 4096];
        let length = self.0.recv(&mut message).expect("a message in time");
        String::from_utf8(message[..length].to_vec()).unwrap()
    }

    /// The next message that begins with this.
    fn next_with(&self, start: &str) -> String {
        loop {
            let message = self.next();
            if message.starts_with(start) {
                return message;
            }
        }
    }

    /// Everything that has arrived.
    fn rest(&self) -> Vec<String> {
        self.0.set_nonblocking(true).unwrap();
        let mut message = [0; 4096];
        let mut rest = Vec::new();
        while let Ok(length) = self.0.recv(&mut message) {
            rest.push(String::from_utf8(message[..length].to_vec()).unwrap());
        }
        rest
    }
}

fn start(folder: &Path, socket: &OsStr, watchdog: Option<&str>, words: &[&str]) -> Child {
    let mut command = program();
    command.args(["target", "serve", "-s", "0", "-o", "json"]).args(words);
    command.env("NOTIFY_SOCKET", socket).current_dir(folder);
    if let Some(time) = watchdog {
        command.env("WATCHDOG_USEC", time);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// The address in a status.
fn address(message: &str) -> &str {
    let from = message.find(" at ").unwrap_or_else(|| panic!("{message:?}")) + 4;
    message[from..].split(',').next().unwrap()
}

#[test]
fn a_target_reports_that_it_is_ready_once_it_serves_and_that_it_stops() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = Manager::at(&path);
    let words = ["--drive", "mem:16M", "--drive", "mem:16M"];
    let child = start(folder.path(), path.as_os_str(), None, &words);
    let ready = manager.next();
    assert!(ready.starts_with("READY=1\nSTATUS=serving 2 namespaces at 127.0.0.1:"), "{ready:?}");
    let host = TcpStream::connect(address(&ready)).unwrap();
    let (child, _) = served(child);
    signal(&child, "-TERM");
    let stopping = manager.next_with("STOPPING=1\n");
    assert!(stopping.contains("STATUS=stopping"), "{stopping:?}");
    assert_eq!(finish(child).code, 0);
    assert_eq!(manager.rest(), [""; 0], "nothing after that, and no sign of life unasked");
    drop(host);
}

#[test]
fn a_target_that_does_not_start_is_never_ready() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = Manager::at(&path);
    let child =
        start(folder.path(), path.as_os_str(), Some("100000"), &["--drive", "file:missing"]);
    assert_eq!(finish(child).code, 7);
    assert_eq!(manager.rest(), [""; 0]);
}

#[test]
fn signs_of_life_come_as_long_as_the_reactors_run() {
    let folder = tempfile::tempdir().unwrap();
    // An abstract name, as systemd uses in containers.
    let name = format!("rio-test-{}-{}", std::process::id(), folder.path().display());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = Manager::of(UnixDatagram::bind_addr(&address).unwrap());
    let socket = format!("@{name}");
    let words = ["--drive", "mem:16M", "--reactors", "2"];
    let child = start(folder.path(), OsStr::new(&socket), Some("200000"), &words);
    let (child, _) = served(child);
    for _ in 0..3 {
        assert_eq!(manager.next_with("WATCHDOG=1"), "WATCHDOG=1\n");
    }
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);
}

/// A thread of another process that is stopped, as one that hangs, until this is dropped.
struct StoppedThread(libc::pid_t);

impl StoppedThread {
    /// Stops the thread. `None` if this system lets no process do that.
    fn new(thread: libc::pid_t) -> Option<Self> {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the requests take no memory of this process. The kernel checks the thread.
        let seized = unsafe {
            libc::ptrace(libc::PTRACE_SEIZE, thread, none, none) == 0
                && libc::ptrace(libc::PTRACE_INTERRUPT, thread, none, none) == 0
        };
        if !seized {
            eprintln!("not tested: {}", std::io::Error::last_os_error());
            return None;
        }
        let mut status = 0;
        // SAFETY: `status` has the place for the result.
        assert_eq!(unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) }, thread);
        Some(Self(thread))
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the thread is stopped by this one, and the request takes no memory.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, none, none) };
    }
}

/// The threads of a process that have this name.
fn threads(process: u32, name: &str) -> Vec<libc::pid_t> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let tasks = tasks.map(|task| task.unwrap().path());
    let named =
        tasks.filter(|task| std::fs::read_to_string(task.join("comm")).unwrap().trim() == name);
    named.map(|task| task.file_name().unwrap().to_str().unwrap().parse().unwrap()).collect()
}

#[test]
fn a_reactor_that_hangs_ends_the_signs_of_life() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = Manager::at(&path);
    let words = ["--drive", "mem:16M", "--reactors", "2"];
    // A sign is due each 25 ms.
    let child = start(folder.path(), path.as_os_str(), Some("100000"), &words);
    let (child, _) = served(child);
    manager.next_with("WATCHDOG=1");
    let reactors = threads(child.id(), "reactor-1");
    assert_eq!(reactors.len(), 1);
    if let Some(stopped) = StoppedThread::new(reactors[0]) {
        // Signs for answers from before are on their way.
        std::thread::sleep(Duration::from_millis(200));
        manager.rest();
        std::thread::sleep(Duration::from_secs(1));
        let later = manager.rest();
        // At most one more, if this machine did not let the target run before.
        let signs = later.iter().filter(|message| *message == "WATCHDOG=1\n").count();
        assert!(signs <= 1, "{later:?}");
        drop(stopped);
        manager.0.set_nonblocking(false).unwrap();
        manager.next_with("WATCHDOG=1");
    }
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);
}

#[test]
fn a_socket_that_is_not_there_stops_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for socket in ["/nowhere/notify", "relative", "@rio-nobody"] {
        let child = start(folder.path(), OsStr::new(socket), Some("100"), &["--drive", "mem:16M"]);
        let (child, _) = served(child);
        signal(&child, "-TERM");
        assert_eq!(finish(child).code, 0, "{socket}");
    }
}

/// The unit that comes with the project.
fn unit() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/systemd/rio-target.service")
}

/// The highest exposure that the unit may have, of 100, as systemd computes it. What is left comes
/// from what a target needs: the network, devices, and the user's own group.
const EXPOSURE_MAX: &str = "20";

#[test]
fn the_unit_keeps_the_target_in() {
    let analysis = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", "--threshold", EXPOSURE_MAX])
        .arg(unit())
        .stdin(Stdio::null())
        .output();
    let analysis = match analysis {
        Ok(analysis) => analysis,
        Err(error) => {
            eprintln!("not tested here: systemd-analyze: {error}");
            return;
        }
    };
    let text = String::from_utf8_lossy(&analysis.stdout);
    assert!(analysis.status.success(), "{text}{}", String::from_utf8_lossy(&analysis.stderr));
    assert!(text.contains("Overall exposure level"), "{text}");
}
