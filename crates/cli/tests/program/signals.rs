//! SIGINT, SIGTERM and SIGHUP end writers and targets in order; a second one ends them at once.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    serve::{serve, served, signal},
    site::{Done, LIMIT, content, finish, rio, rio_in, start_in},
};

const SIGNALS: [&str; 3] = ["-INT", "-TERM", "-HUP"];

/// Whether the tests may send SIGHUP. If they were started by `nohup`, each process that they start
/// ignores it.
fn has_hang_up() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let is_ignored = mask.is_some_and(|mask| mask & 1 == 1);
    if is_ignored {
        eprintln!("not tested here: SIGHUP is ignored");
    }
    !is_ignored
}

/// The signals that the processes of this test do not ignore.
fn signals() -> impl Iterator<Item = &'static str> {
    let has_hang_up = has_hang_up();
    SIGNALS.into_iter().filter(move |name| has_hang_up || *name != "-HUP")
}

/// A volume `v` on one served target, and a large file.
struct Scene {
    folder: tempfile::TempDir,
    target: Child,
    member: String,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let words = ["--drive", "ssd:flash,size=1G,lazy", "--log", "file:l,size=2M"];
        let (target, printed) = serve(folder.path(), &words);
        let member = printed["addresses"][0].as_str().unwrap().to_owned();
        File::create(folder.path().join("a")).unwrap().set_len(1000 << 20).unwrap();
        let scene = Self { folder, target, member };
        scene.volume("create", &["v"]).ok();
        scene
    }

    fn start(&self, verb: &str, words: &[&str]) -> Child {
        let args = [&["volume", verb], words, &["-m", &self.member, "-o", "json"]].concat();
        start_in(self.folder.path(), &args)
    }

    fn volume(&self, verb: &str, words: &[&str]) -> Done {
        finish(self.start(verb, words))
    }

    /// Starts a copy, and waits until it is at work.
    fn start_write(&self, words: &[&str]) -> Child {
        let writer = self.start("write", &[&["v", "a"], words].concat());
        wait_until_written(self.folder.path());
        writer
    }

    /// The log, as its medium has it.
    fn log(&self) -> Value {
        log_of(self.folder.path())
    }
}

/// Waits until some groups of a copy are in the log of its target, which is `l` in this folder.
pub(crate) fn wait_until_written(folder: &Path) {
    let begun = Instant::now();
    let count = |value: &Value| value.as_u64().unwrap_or_default();
    loop {
        // The log is being written meanwhile.
        let dumped = rio_in(folder, &["log", "dump", "file:l", "--summary", "-o", "json"]);
        let log: Value = serde_json::from_str(&dumped.stdout).unwrap_or_default();
        let partition = &log["volumes"][0]["partitions"][0];
        if count(&partition["live"]) + count(&partition["released"]) > 8 {
            return;
        }
        assert!(begun.elapsed() < LIMIT, "the copy was never seen at work: {dumped:?}");
    }
}

fn log_of(folder: &Path) -> Value {
    rio_in(folder, &["log", "dump", "file:l", "--summary", "-o", "json"]).ok()
}

#[test]
fn each_signal_ends_a_write_in_order() {
    for name in signals() {
        let scene = Scene::new();
        let writer = scene.start_write(&[]);
        signal(&writer, name);
        let done = finish(writer);
        done.failed(130, &["interrupted"]);
        let note = format!("interrupted by SIG{}: nothing more is submitted", &name[1..]);
        for words in [&note[..], "rio waits ", "A second signal (Ctrl-C) ends the program at once"]
        {
            assert!(done.stderr.contains(words), "no {words:?} in {done:?}");
        }
        assert_eq!(scene.volume("show", &[]).ok()["state"], "free", "{name}");
        assert_eq!(scene.log()["volumes"][0]["state"], "closed", "{name}");
        scene.volume("verify", &["v"]).failed(5, &["no file"]);
        signal(&scene.target, "-TERM");
        assert_eq!(finish(scene.target).code, 0);
    }
}

#[test]
fn each_signal_ends_a_target_in_order() {
    for name in signals() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), content(50_000)).unwrap();
        let words = ["--drive", "file:d,size=16M", "--log", "file:l,size=1M"];
        let words = [&words[..], &["-n", "nqn.2026-11.com.example:signals"]].concat();
        let (target, printed) = serve(folder.path(), &words);
        let member = printed["addresses"][0].as_str().unwrap();
        let volume = |words: &[&str]| {
            rio_in(folder.path(), &[&["volume"], words, &["-m", member, "-o", "json"]].concat())
        };
        volume(&["create", "v"]).ok();
        volume(&["write", "v", "a"]).ok();
        signal(&target, name);
        let done = finish(target);
        assert_eq!(done.code, 0, "{name}: {done:?}");
        assert!(done.stderr.contains(&format!("SIG{}", &name[1..])), "{done:?}");
        let log = log_of(folder.path());
        assert_eq!((&log["served"], &log["trusted"]), (&false.into(), &true.into()), "{log}");
        assert_eq!(log["volumes"][0]["state"], "closed");
    }
}

/// Reads lines from standard error until one contains these words; returns them.
pub(crate) fn read_until(child: &mut Child, words: &str) -> String {
    let mut text = String::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        text += &(line.unwrap() + "\n");
        if text.contains(words) {
            return text;
        }
    }
    panic!("no {words:?} in {text:?}");
}

/// Sends a signal until the process has ended, and returns its exit code. The limits of the process
/// itself are far longer.
pub(crate) fn signal_until_it_ends(mut child: Child, name: &str) -> Option<i32> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(begun.elapsed() < LIMIT, "it does not end: {:?}", child.kill());
        signal(&child, name);
        thread::sleep(Duration::from_millis(20));
    }
}

const HOURS: [&str; 6] = ["--loss-timeout", "36000", "--io-timeout", "36000", "--timeout", "36000"];

#[test]
fn a_second_signal_ends_a_write_that_waits_for_a_stopped_target_at_once() {
    let hang_up = if has_hang_up() { "-HUP" } else { "-INT" };
    for [first, second] in [["-INT", "-INT"], [hang_up, "-TERM"], ["-TERM", hang_up]] {
        let scene = Scene::new();
        let mut writer = scene.start_write(&HOURS);
        signal(&scene.target, "-STOP");
        signal(&writer, first);
        read_until(&mut writer, "A second signal");
        assert!(writer.try_wait().unwrap().is_none(), "it waits for the target");
        assert_eq!(signal_until_it_ends(writer, second), Some(130), "{first} {second}");
        signal(&scene.target, "-CONT");
        signal(&scene.target, "-KILL");
        finish(scene.target);
    }
}

#[test]
fn a_second_signal_ends_a_target_at_once() {
    let hang_up = if has_hang_up() { "-HUP" } else { "-TERM" };
    for [first, second] in [[hang_up, hang_up], ["-INT", "-TERM"]] {
        let scene = Scene::new();
        let words = ["--drive", "mem:1M", "--log", "file:l", "--lock-wait", "36000"];
        let args = [&["target", "serve", "-s", "0"], &words[..]].concat();
        // It waits for the log that the other one serves, before it can stop in order.
        let mut other = start_in(scene.folder.path(), &args);
        read_until(&mut other, "waiting up to");
        signal(&other, first);
        assert_eq!(signal_until_it_ends(other, second), Some(130), "{first} {second}");
        signal(&scene.target, "-TERM");
        finish(scene.target);
    }
}

#[test]
fn a_hang_up_that_was_ignored_at_the_start_stays_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let child = Command::new("sh")
        .args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_rio")])
        .args(["target", "serve", "-s", "0", "--drive", "mem:16M,lazy", "-o", "json"])
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut target, printed) = served(child);
    signal(&target, "-HUP");
    let (host, port) = printed["addresses"][0].as_str().unwrap().rsplit_once(':').unwrap();
    rio(&["discover", "-a", host, "-s", port, "-o", "json"]).ok();
    signal(&target, "-TERM");
    let mut stderr = String::new();
    target.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(finish(target).code, 0, "{stderr}");
    assert!(stderr.contains("SIGTERM") && !stderr.contains("SIGHUP"), "{stderr}");
}
