//! A log that is gone for good, or replaced: each state has a way that leads out of it, and `show`
//! names the state and the way (T19, T24, T26). The steps are those of docs/operators-guide.md.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Child,
    time::Duration,
};

use riopipe::{BLOCK_BYTES, ConnectOptions, OpenOptions, Place, StreamOptions, Until, Volume};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    serve::{serve, signal},
    site::{Done, content, finish, rio_in, start_in},
};

/// Targets with a drive each, as processes, and a volume `v` over all of them.
pub(crate) struct Nodes {
    pub(crate) folder: TempDir,
    nodes: Vec<Option<(Child, String)>>,
}

impl Nodes {
    /// `count` targets with logs, and a volume with a copy of the file `a`.
    pub(crate) fn with_volume(count: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), content(2_000_000)).unwrap();
        let mut nodes = Self { folder, nodes: (0..count).map(|_| None).collect() };
        for node in 0..count {
            nodes.start(node, &["--log", &log(node)]);
        }
        nodes.volume("create", &["--unit", "16K"]).ok();
        nodes.volume("write", &["a"]).ok();
        nodes
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn words(node: usize, drive: &str, words: &[&str]) -> Vec<String> {
        let nqn = format!("nqn.2026-11.com.example:node-{node}");
        let own = ["--drive", drive, "-n", &nqn, "--reactors", "1", "--lock-wait", "60"];
        own.iter().chain(words).map(|word| (*word).to_owned()).collect()
    }

    /// Starts a target that is stopped, on its usual drive.
    pub(crate) fn start(&mut self, node: usize, words: &[&str]) {
        self.start_on(node, &drive(node), words);
    }

    /// Starts a target that is stopped, on this drive.
    pub(crate) fn start_on(&mut self, node: usize, drive: &str, words: &[&str]) {
        let words = Self::words(node, drive, words);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let (child, printed) = serve(self.folder.path(), &words);
        let address = printed["addresses"][0].as_str().unwrap().to_owned();
        self.nodes[node] = Some((child, address));
    }

    /// The failure of a target that does not start.
    fn start_fails(&self, node: usize, words: &[&str]) -> Done {
        let words = Self::words(node, &drive(node), words);
        let mut args = vec!["target", "serve", "-s", "0", "-o", "json", "--create"];
        args.extend(words.iter().map(String::as_str));
        finish(start_in(self.folder.path(), &args))
    }

    /// Stops a target in order.
    pub(crate) fn stop(&mut self, node: usize) {
        let (child, _) = self.nodes[node].take().unwrap();
        signal(&child, "-TERM");
        assert_eq!(finish(child).code, 0);
    }

    /// Kills a target.
    fn kill(&mut self, node: usize) {
        let (mut child, _) = self.nodes[node].take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub(crate) fn address(&self, node: usize) -> &str {
        &self.nodes[node].as_ref().unwrap().1
    }

    /// `rio volume VERB v …WORDS -m …`.
    pub(crate) fn volume(&self, verb: &str, words: &[&str]) -> Done {
        let mut args = vec!["volume", verb, "v"];
        args.extend(words);
        for node in 0..self.nodes.len() {
            args.extend(["-m", self.address(node)]);
        }
        args.extend(["-o", "json", "--timeout", "60"]);
        rio_in(self.folder.path(), &args)
    }

    /// The state that `show` prints. If opening fails, both report the same failure.
    pub(crate) fn state(&self) -> String {
        let shown = self.volume("show", &[]).ok();
        let state = shown["state"].as_str().unwrap().to_owned();
        let opened = self.volume("verify", &["a"]);
        match &shown["refusal"] {
            Value::Null => {
                opened.ok();
            }
            refusal => {
                let text = opened.failed(4, &[]);
                let (message, hint) = (&refusal["message"], &refusal["hint"]);
                let refusal =
                    format!("{} {}", message.as_str().unwrap(), hint.as_str().unwrap_or_default());
                assert_eq!(refusal, text, "show and verify differ");
            }
        }
        state
    }

    /// Accepts the loss. Nothing is undone, and the file is there as before.
    fn accept(&self) -> Value {
        let recovered = self.volume("recover", &["--accept-lost-log"]).ok();
        for stream in recovered["streams"].as_array().unwrap() {
            assert_eq!(stream["undone_blocks"], 0, "{recovered}");
            assert_eq!(stream["log_given_up"], true, "{recovered}");
        }
        assert_eq!(self.state(), "free");
        recovered
    }

    /// The engine with which the volume is opened now.
    pub(crate) fn engine(&self) -> String {
        let shown = self.volume("show", &[]).ok();
        let written = self.volume("write", &["a"]).ok();
        assert_eq!(written["engine"], shown["opens_with"], "{shown}");
        assert_eq!(self.state(), "free");
        written["engine"].as_str().unwrap().to_owned()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for (mut child, _) in self.nodes.drain(..).flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn drive(node: usize) -> String {
    format!("file:drive-{node},size=16M")
}

/// The usual log of a target.
pub(crate) fn log(node: usize) -> String {
    format!("file:log-{node},size=1M")
}

/// The dead end of before: the target has no log at all, and none to replace it.
#[test]
fn t19_a_lost_log_without_a_new_one() {
    let mut nodes = Nodes::with_volume(1);
    nodes.stop(0);
    fs::remove_file(nodes.path("log-0")).unwrap();
    nodes.start(0, &[]);
    assert_eq!(nodes.state(), "no log");
    let text = nodes.volume("verify", &["a"]).failed(4, &["no ordering log", "serve --log"]);
    assert!(text.contains("recover NAME --accept-lost-log"), "{text}");
    nodes.volume("recover", &["--accept-lost-log", "--dry-run"]).ok();
    assert_eq!(nodes.state(), "no log", "a dry run changes nothing");
    nodes.accept();
    assert_eq!(nodes.engine(), "sync");
    let shown = nodes.volume("show", &[]).ok();
    assert!(shown["fallback"].as_str().unwrap().contains("serve --log"), "{shown}");

    // A log again: used once that is accepted, and not before.
    nodes.stop(0);
    nodes.start(0, &["--log", "file:new,size=1M"]);
    assert_eq!(nodes.state(), "free");
    assert_eq!(nodes.engine(), "sync");
    let shown = nodes.volume("show", &[]).ok();
    assert!(shown["fallback"].as_str().unwrap().contains("recover NAME --accept"), "{shown}");
    nodes.accept();
    assert_eq!(nodes.engine(), "rio");
    // And it stays so.
    nodes.stop(0);
    nodes.start(0, &["--log", "file:new,size=1M"]);
    assert_eq!(nodes.engine(), "rio");
}

#[test]
fn t19_a_lost_log_of_one_target_of_two() {
    for new in [&[][..], &["--log", "file:new,size=1M"]] {
        let mut nodes = Nodes::with_volume(2);
        nodes.stop(1);
        fs::remove_file(nodes.path("log-1")).unwrap();
        nodes.start(1, new);
        let (state, engine) = match new.is_empty() {
            true => ("no log", "sync"),
            false => ("another log is due", "rio"),
        };
        assert_eq!(nodes.state(), state);
        nodes.accept();
        assert_eq!(nodes.engine(), engine);
        if engine == "sync" {
            nodes.stop(1);
            nodes.start(1, &["--log", "file:new,size=1M"]);
            nodes.accept();
            assert_eq!(nodes.engine(), "rio");
        }
    }
}

/// A log that is lost, and then found again.
#[test]
fn t24_a_log_that_was_given_up_and_is_back() {
    let mut nodes = Nodes::with_volume(1);
    nodes.stop(0);
    fs::rename(nodes.path("log-0"), nodes.path("kept")).unwrap();
    nodes.start(0, &[]);
    nodes.accept();
    assert_eq!(nodes.engine(), "sync");
    nodes.stop(0);
    fs::rename(nodes.path("kept"), nodes.path("log-0")).unwrap();
    nodes.start(0, &["--log", &log(0)]);
    assert_eq!((nodes.state().as_str(), nodes.engine().as_str()), ("free", "sync"));
    nodes.volume("recover", &["--accept-lost-log"]).ok();
    assert_eq!(nodes.engine(), "rio");
}

/// As before, and the log that is back has entries of groups that were in flight.
#[test]
fn t26_a_log_with_entries_that_was_given_up_and_is_back() {
    let mut nodes = Nodes::with_volume(1);
    let members = [nodes.address(0).parse().unwrap()];
    let connect = ConnectOptions { loss_timeout: Duration::ZERO, ..ConnectOptions::default() };
    let options = OpenOptions { connect, ..OpenOptions::default() };
    let (volume, _) = Volume::open("v", &members, &options).unwrap();
    let mut stream = volume.stream(3, &StreamOptions::default()).unwrap();
    for lba in 1000..1010 {
        let buf = stream.buf(BLOCK_BYTES).unwrap();
        stream.group().write(lba, buf, Place::Fresh).submit_or_wait(None).unwrap();
    }
    let last = stream.last();
    stream.wait(Until::Complete(last), None).unwrap();
    nodes.kill(0);
    drop((stream, volume));

    fs::rename(nodes.path("log-0"), nodes.path("kept")).unwrap();
    nodes.start(0, &[]);
    nodes.accept();
    assert_eq!(nodes.engine(), "sync");
    nodes.stop(0);
    fs::rename(nodes.path("kept"), nodes.path("log-0")).unwrap();
    nodes.start(0, &["--log", &log(0)]);
    assert_eq!(nodes.state(), "log given up");
    nodes.volume("verify", &["a"]).failed(4, &["it is back", "recover NAME --accept-lost-log"]);
    let recovered = nodes.volume("recover", &["--accept-lost-log", "--acknowledge"]).ok();
    let stream = &recovered["streams"][3];
    assert_eq!((&stream["undone_blocks"], &stream["log_given_up"]), (&0.into(), &true.into()));
    assert_eq!(nodes.engine(), "rio");
}

#[test]
fn t19_a_damaged_log() {
    // Both copies of the header: the target does not start with it.
    let mut nodes = Nodes::with_volume(1);
    nodes.stop(0);
    overwrite(&nodes.path("log-0"), 100, &[0xff; 200]);
    overwrite(&nodes.path("log-0"), 4196, &[0xff; 200]);
    let own = log(0);
    nodes.start_fails(0, &["--log", &own]).failed(7, &["damaged", "--accept-lost-log"]);
    nodes.start(0, &["--log", &own, "--accept-lost-log"]);
    assert_eq!(nodes.state(), "another log is due");
    nodes.accept();
    assert_eq!(nodes.engine(), "rio");

    // Both copies of the mark of stream 0.
    nodes.stop(0);
    overwrite(&nodes.path("log-0"), 8192 + 4, &[0xff; 200]);
    nodes.start(0, &["--log", &own]);
    assert_eq!(nodes.state(), "log damaged");
    let text = nodes.volume("verify", &["a"]).failed(4, &["recover NAME --accept-lost-log"]);
    assert!(text.contains("damaged"), "{text}");
    nodes.volume("recover", &["--accept-lost-log"]).ok();
    assert_eq!(nodes.engine(), "rio");
}

/// A `file:` log after a power cut: it is of another boot.
#[test]
fn t19_a_log_of_another_boot() {
    let mut nodes = Nodes::with_volume(1);
    nodes.kill(0);
    let path = nodes.path("log-0");
    for copy in [0, 4096] {
        let mut header = vec![0; 4096];
        let file = fs::File::open(&path).unwrap();
        file.read_exact_at(&mut header, copy).unwrap();
        header[40] ^= 1;
        let checksum = riopipe::crc32c(0, &header[12..]);
        header[8..12].copy_from_slice(&checksum.to_le_bytes());
        overwrite(&path, copy, &header);
    }
    let own = log(0);
    nodes.start(0, &["--log", &own]);
    assert_eq!(nodes.state(), "log lost");
    // The option of the volume alone is not enough, and the message names the one of the target.
    let advice = ["start the target once with --accept-lost-log", "recover NAME --accept-lost-log"];
    nodes.volume("recover", &["--accept-lost-log"]).failed(4, &advice);
    nodes.stop(0);
    nodes.start(0, &["--log", &own, "--accept-lost-log"]);
    assert_eq!(nodes.state(), "another log is due");
    nodes.accept();
    assert_eq!(nodes.engine(), "rio");
}

#[test]
fn t24_an_older_copy_of_a_log() {
    let mut nodes = Nodes::with_volume(1);
    nodes.stop(0);
    fs::copy(nodes.path("log-0"), nodes.path("older")).unwrap();
    let own = log(0);
    nodes.start(0, &["--log", &own]);
    nodes.volume("write", &["a"]).ok();
    nodes.stop(0);
    fs::rename(nodes.path("older"), nodes.path("log-0")).unwrap();
    nodes.start(0, &["--log", &own]);
    assert_eq!(nodes.state(), "log lost");
    nodes.volume("verify", &["a"]).failed(4, &["older", "recover NAME --accept-lost-log"]);
    nodes.accept();
    assert_eq!(nodes.engine(), "rio");
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, at).unwrap();
}
