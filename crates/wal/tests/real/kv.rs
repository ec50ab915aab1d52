//! The example `kv`, killed again and again: every confirmed change is there.

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

/// The path of an example of this package, which Cargo puts beside its tests.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(|deps| deps.parent()).unwrap();
    profile.join("examples").join(name)
}

#[test]
fn a_killed_store_has_all_confirmed_changes() {
    let site = Site::rio();
    let mut model = BTreeMap::new();
    for run in 0..6u32 {
        let mut kv = Kv::start(&site);
        assert_eq!(kv.ask("keys"), model.len().to_string(), "run {run}");
        for (key, value) in &model {
            assert_eq!(&kv.ask(&format!("get {key}")), value, "run {run}, {key}");
        }
        for number in 0..300u32 {
            let (key, value) = (format!("key{}", number % 70), format!("{run}-{number}"));
            // Some long values, so that the log wraps around.
            let value = if number % 10 == 0 { value + &"x".repeat(9000) } else { value };
            if number % 13 == 5 {
                assert_eq!(kv.ask(&format!("del {key}")), "ok");
                model.remove(&key);
            } else {
                assert_eq!(kv.ask(&format!("set {key} {value}")), "ok");
                model.insert(key, value);
            }
        }
        // In the middle of a change without a confirmation.
        let key = format!("open{run}");
        kv.send(&format!("set {key} {run}"));
        kv.kill();
        let mut kv = Kv::start(&site);
        let found = kv.ask(&format!("get {key}"));
        assert!(found == "none" || found == run.to_string());
        if found != "none" {
            model.insert(key, found);
        }
        kv.kill();
    }
}
