//! The example `kv`, killed again and again: what it said was done is there.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::site::{NAME, Site};

struct Kv {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Kv {
    fn start(site: &Site) -> Self {
        let mut process = Command::new(example("kv"))
            .args([NAME, &site.member().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the example starts");
        let input = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut kv = Self { process, input, output };
        let ready = kv.line();
        assert!(ready.starts_with("ready "), "{ready}");
        kv
    }

    fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.line()
    }

    /// `kill -9`.
    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// Where Cargo has put an example of this package: beside its tests.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(|deps| deps.parent()).unwrap();
    profile.join("examples").join(name)
}

#[test]
fn a_store_that_is_killed_has_all_that_it_said_was_done() {
    let site = Site::rio();
    let mut model = BTreeMap::new();
    for life in 0..6u32 {
        let mut kv = Kv::start(&site);
        assert_eq!(kv.ask("keys"), model.len().to_string(), "life {life}");
        for (key, value) in &model {
            assert_eq!(&kv.ask(&format!("get {key}")), value, "life {life}, {key}");
        }
        for number in 0..300u32 {
            let (key, value) = (format!("key{}", number % 70), format!("{life}-{number}"));
            // Long ones now and then, so that the log goes round.
            let value = if number % 10 == 0 { value + &"x".repeat(9000) } else { value };
            if number % 13 == 5 {
                assert_eq!(kv.ask(&format!("del {key}")), "ok");
                model.remove(&key);
            } else {
                assert_eq!(kv.ask(&format!("set {key} {value}")), "ok");
                model.insert(key, value);
            }
        }
        // In the middle of a change, whose outcome nobody was told.
        let key = format!("open{life}");
        kv.send(&format!("set {key} {life}"));
        kv.kill();
        let mut kv = Kv::start(&site);
        let found = kv.ask(&format!("get {key}"));
        assert!(found == "none" || found == life.to_string());
        if found != "none" {
            model.insert(key, found);
        }
        kv.kill();
    }
}
