//! Real targets in this process, and the program as a user starts it.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use riopipe_media::Blocking;
use riopipe_target::{Config, Running, Target};
use serde_json::Value;
use tempfile::TempDir;

use crate::serve::signal;

/// Longest time for any one command: far above the usual, even on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// Targets with a log and a drive each.
pub(crate) struct Site {
    pub(crate) targets: Vec<Option<Running>>,
    pub(crate) folder: TempDir,
}

impl Site {
    /// `count` targets with drives of this kind, each with a log.
    pub(crate) fn new(count: usize, drive: &str) -> Self {
        Self::with(count, drive, "2M")
    }

    /// As [`new`](Self::new), with logs of this size; empty: no log.
    pub(crate) fn with(count: usize, drive: &str, log_size: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut site = Self { targets: Vec::new(), folder };
        for number in 0..count {
            let log = site.folder.path().join(format!("log-{number}"));
            let mut config = Config::on_loopback(&[drive]);
            config.subnqn = Some(format!("nqn.2026-11.com.example:test-{number}"));
            config.reactors = Some(1);
            if !log_size.is_empty() {
                config.log = Some(format!("file:{},size={log_size}", log.display()));
            }
            site.add(&config);
        }
        site
    }

    pub(crate) fn add(&mut self, config: &Config) {
        self.targets.push(Some(Target::start(config).unwrap()));
    }

    /// Waits until a copy has well begun: 8 MiB into this target's drive a block was written.
    /// Not for `mem:`, of which the target has the only queue.
    pub(crate) fn wait_until_written(&self, number: usize) {
        let drive = &self.targets[number].as_ref().unwrap().drives()[0];
        let mut queue = Blocking::new(drive.as_ref()).unwrap();
        let begun = Instant::now();
        while queue.read(2048, 1).unwrap().iter().all(|byte| *byte == 0) {
            assert!(begun.elapsed() < LIMIT, "nothing is ever written");
        }
    }

    /// `-m` for each target, in this order.
    pub(crate) fn members_in(&self, order: &[usize]) -> Vec<String> {
        let address = |&i: &usize| self.address(i);
        order.iter().flat_map(|i| ["-m".to_owned(), address(i)]).collect()
    }

    pub(crate) fn members(&self) -> Vec<String> {
        self.members_in(&(0..self.targets.len()).collect::<Vec<_>>())
    }

    pub(crate) fn address(&self, number: usize) -> String {
        self.targets[number].as_ref().unwrap().addresses()[0].to_string()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A file of that name with `length` bytes that are pseudo-random and the same each time.
    pub(crate) fn file(&self, name: &str, length: usize) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content(length)).unwrap();
        path
    }

    /// `rio volume VERB …WORDS -m …` with all members.
    pub(crate) fn volume(&self, verb: &str, words: &[&str]) -> Done {
        self.volume_with(verb, words, &self.members())
    }

    pub(crate) fn volume_with(&self, verb: &str, words: &[&str], members: &[String]) -> Done {
        let mut args = vec!["volume", verb];
        args.extend(words);
        args.extend(members.iter().map(String::as_str));
        args.extend(["-o", "json", "--timeout", "60"]);
        rio_in(self.folder.path(), &args)
    }

    /// A volume named `v` over all targets.
    pub(crate) fn create(&self) {
        self.volume("create", &["v"]).ok();
    }
}

pub(crate) fn content(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Done {
    pub(crate) fn of(output: Output) -> Self {
        Self {
            // A signal would be a crash, which no test expects.
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The result, which must exist.
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.code, 0, "{self:?}");
        self.json()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The error's message and hint, which must come with this exit code and contain these words.
    pub(crate) fn failed(&self, code: i32, words: &[&str]) -> String {
        assert_eq!(self.code, code, "{self:?}");
        let line = self.stderr.lines().find(|line| line.starts_with("{\"error\""));
        let error: Value =
            serde_json::from_str(line.unwrap_or_else(|| panic!("{self:?}"))).unwrap();
        assert_eq!(error["error"]["code"], code);
        let hint = error["error"]["hint"].as_str().unwrap_or_default();
        let text = format!("{} {hint}", error["error"]["message"].as_str().unwrap());
        for word in words {
            assert!(text.contains(word), "no {word:?} in {text:?}");
        }
        text
    }
}

pub(crate) fn rio(args: &[&str]) -> Done {
    rio_in(Path::new("/"), args)
}

pub(crate) fn rio_in(folder: &Path, args: &[&str]) -> Done {
    finish(start_in(folder, args))
}

/// The program. It uses no file of known volumes, so that no test depends on the user's own or
/// changes it.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rio"));
    command.env("RIO_VOLUMES", "");
    command
}

pub(crate) fn start_in(folder: &Path, args: &[&str]) -> Child {
    program()
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Reads the output of a command until `enough`, interrupts it, and waits for its end.
pub(crate) fn watch_until(mut child: Child, enough: impl Fn(&str) -> bool) -> Done {
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let (sender, lines) = mpsc::channel();
    let reader = thread::spawn(move || {
        let mut line = String::new();
        while stdout.read_line(&mut line).unwrap() > 0 {
            let _ = sender.send(std::mem::take(&mut line));
        }
    });
    let mut text = String::new();
    while !enough(&text) {
        match lines.recv_timeout(LIMIT) {
            Ok(line) => text += &line,
            Err(error) => panic!("{error}: {text}, {:?}", child.kill()),
        }
    }
    signal(&child, "-INT");
    let done = finish(child);
    reader.join().unwrap();
    text.extend(lines);
    Done { stdout: text, ..done }
}

/// Waits for a command, at most [`LIMIT`].
pub(crate) fn finish(mut child: Child) -> Done {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > LIMIT {
            let threads = threads_of(child.id());
            child.kill().unwrap();
            panic!("hangs: {:?}{threads}", Done::of(child.wait_with_output().unwrap()));
        }
        thread::sleep(Duration::from_millis(5));
    }
    Done::of(child.wait_with_output().unwrap())
}

/// The state of each thread of a process, a line each: it shows where a hang is.
fn threads_of(pid: u32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let describe = |task: std::fs::DirEntry| {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let stat = read("stat");
        // Behind the name in brackets: the state, and as the 12th and 13th, the used CPU time.
        let stat: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        let of = |place: usize| stat.get(place).copied().unwrap_or("?");
        let (comm, wchan, call) = (read("comm"), read("wchan"), read("syscall"));
        format!(
            "\n  {}: {} {wchan}, {} + {} ticks, call {}",
            comm.trim_end(),
            of(0),
            of(11),
            of(12),
            call.trim_end()
        )
    };
    tasks.map(describe).collect()
}

pub(crate) fn keys(value: &Value) -> String {
    let mut keys: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys.join(" ")
}
