//! T8 for an administrator: a locked medium is waited for, for a limited time, with a message.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::serve::signal;
use crate::site::rio_in;

const SERVE: [&str; 11] = [
    "target",
    "serve",
    "-s",
    "0",
    "--reactors",
    "1",
    "--drive",
    "file:drive,size=16M",
    "--log",
    "block:log,size=1M",
    "--create",
];

/// A target that ends with the test.
struct Served(Child);

impl Served {
    fn start(folder: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rio"));
        command.args(SERVE).current_dir(folder).stdin(Stdio::null());
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Waits for a line on standard error that contains `what`.
    fn waits_for_line(&mut self, what: &str) {
        let mut lines = BufReader::new(self.0.stderr.as_mut().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains(what)), "it never prints {what:?}");
    }

    /// Waits until it serves.
    fn serves(&mut self) {
        let mut lines = BufReader::new(self.0.stdout.as_mut().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains(" at 127.0.0.1:")), "it never serves");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn t8_a_target_waits_for_a_locked_medium_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["drive", "log"] {
        let file = File::create(folder.path().join(name)).unwrap();
        file.lock().unwrap();
        let refused =
            rio_in(folder.path(), &[&SERVE[..], &["--lock-wait", "0.3", "-o", "json"]].concat());
        refused.failed(7, &[name, "in use by another process"]);
        assert!(refused.stderr.contains("waiting up to"), "{refused:?}");
        let mut target = Served::start(folder.path());
        target.waits_for_line("waiting up to");
        drop(file);
        target.serves();
    }
}

#[test]
fn a_second_signal_ends_a_target_that_is_still_starting() {
    let folder = tempfile::tempdir().unwrap();
    let file = File::create(folder.path().join("drive")).unwrap();
    file.lock().unwrap();
    let mut target = Served::start(folder.path());
    target.waits_for_line("waiting up to");
    let ended = loop {
        signal(&target.0, "-TERM");
        std::thread::sleep(Duration::from_millis(20));
        if let Some(ended) = target.0.try_wait().unwrap() {
            break ended;
        }
    };
    assert_eq!(ended.code(), Some(130));
}

#[test]
fn t8_a_target_comes_back_right_after_it_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut target = Served::start(folder.path());
    target.serves();
    // While it runs, no other target gets its media.
    let second =
        rio_in(folder.path(), &[&SERVE[..], &["--lock-wait", "0.1", "-o", "json"]].concat());
    second.failed(7, &["in use by another process"]);
    for _ in 0..3 {
        target.0.kill().unwrap();
        // At once, as a supervisor would.
        let mut next = Served::start(folder.path());
        next.serves();
        target = next;
    }
    Command::new("kill").arg(target.0.id().to_string()).status().unwrap();
    assert!(target.0.wait().unwrap().success());
}
