//! Machines: network namespaces on one bridge, with a shell each.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::page::Step;

/// Longest time for any one command: far above the usual, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);
/// Begins the line that a shell prints after a command, before the exit code.
const END: char = '\u{1e}';

/// The address of each machine, and its name on the others.
const ADDRESSES: [(&str, &str); 4] = [
    ("app", "192.0.2.1"),
    ("disk0", "192.0.2.10"),
    ("disk1", "192.0.2.11"),
    ("disk2", "192.0.2.12"),
];

/// The machines of one page. They end when this is dropped.
pub(crate) struct Network {
    folder: TempDir,
    machines: BTreeMap<String, Machine>,
}

impl Network {
    pub(crate) fn new() -> Self {
        // A bridge of an earlier page is used again.
        let _ = Command::new("ip").args(["link", "add", "walk", "type", "bridge"]).output();
        ip(&["link", "set", "walk", "up"]);
        Self { folder: tempfile::tempdir().unwrap(), machines: BTreeMap::new() }
    }

    /// The machine of this name, which is started if it is new.
    pub(crate) fn machine(&mut self, name: &str) -> &mut Machine {
        let folder = &self.folder;
        self.machines.entry(name.to_owned()).or_insert_with(|| Machine::start(name, folder.path()))
    }

    /// The machines whose last command has failed, and that command.
    pub(crate) fn unchecked_failures(&self) -> Vec<(&str, &str)> {
        self.machines
            .iter()
            .filter_map(|(name, machine)| Some((name.as_str(), machine.failed.as_deref()?)))
            .collect()
    }
}

/// A network namespace with a shell in a folder of its own.
pub(crate) struct Machine {
    shell: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    /// The last command, if it has failed and its exit code was not shown since.
    failed: Option<String>,
    /// The lines that the last command has printed.
    last_printed: Vec<String>,
}

impl Machine {
    fn start(name: &str, folder: &Path) -> Self {
        let address = ADDRESSES.iter().find(|(machine, _)| *machine == name);
        let (_, address) = address.unwrap_or_else(|| panic!("no machine is called {name}"));
        let home = folder.join(name);
        fs::create_dir(&home).unwrap();
        let mut shell = Command::new("unshare")
            .args(["--net", "bash", "--noprofile", "--norc"])
            .current_dir(&home)
            .env_clear()
            .env("HOME", &home)
            .env("LC_ALL", "C.UTF-8")
            .env("PATH", path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = shell.stdin.take().unwrap();
        let output = shell.stdout.take().unwrap();
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The machine has ended.
                let Ok(()) = sender.send(line) else { return };
            }
        });
        writeln!(input, "exec 2>&1; echo started").unwrap();
        assert_eq!(lines.recv_timeout(LIMIT).as_deref(), Ok("started"), "no shell for {name}");
        // `unshare` has become the shell, which is in its network namespace by now.
        let pid = shell.id().to_string();
        let outer = format!("to-{name}");
        // The namespace of an earlier page ends a little later than its shell.
        let _ = Command::new("ip").args(["link", "del", &outer]).output();
        let peer = ["type", "veth", "peer", "name", "eth0", "netns", &pid];
        ip(&[&["link", "add", &outer][..], &peer].concat());
        ip(&["link", "set", &outer, "master", "walk", "up"]);
        let mut machine = Self { shell, input, lines, failed: None, last_printed: Vec::new() };
        let address = format!("{address}/24");
        for words in [
            &["link", "set", "lo", "up"][..],
            &["addr", "add", &address, "dev", "eth0"],
            &["link", "set", "eth0", "up"],
        ] {
            let (printed, code) = machine.carry_out(&format!("ip {}", words.join(" "))).unwrap();
            assert_eq!(code, 0, "{name}: ip {words:?}: {printed:?}");
        }
        machine
    }

    /// Carries out a command, and compares what it prints with what the page shows.
    pub(crate) fn run(&mut self, step: &Step) -> Result<(), String> {
        if step.goes_on() {
            writeln!(self.input, "{}", step.command).unwrap();
            return self.wait_for(step);
        }
        if let Some(command) = self.failed.take()
            && step.command != "echo $?"
        {
            return Err(format!("the command before it failed: {command}"));
        }
        let (printed, code) = self.carry_out(&step.command)?;
        if code != 0 {
            self.failed = Some(format!("{} (exit code {code})", step.command));
        }
        let result = match step.is_shown_as(&printed) {
            true => Ok(()),
            false => Err(difference(step, &printed)),
        };
        self.last_printed = printed;
        result
    }

    /// The lines that the last command has printed.
    pub(crate) fn last_printed(&self) -> &[String] {
        &self.last_printed
    }

    /// Waits until a command that goes on has printed what the page shows. Lines before that are of
    /// earlier commands that go on.
    fn wait_for(&mut self, step: &Step) -> Result<(), String> {
        let begun = Instant::now();
        let mut printed = Vec::new();
        while !(0..=printed.len()).any(|first| step.is_shown_as(&printed[first..])) {
            match self.lines.recv_timeout(LIMIT.saturating_sub(begun.elapsed())) {
                Ok(line) => printed.push(line),
                Err(_) => return Err(difference(step, &printed)),
            }
        }
        self.last_printed = printed;
        Ok(())
    }

    /// Carries out a command. Returns the printed lines and the exit code.
    fn carry_out(&mut self, command: &str) -> Result<(Vec<String>, i32), String> {
        // The exit code stays the value of `$?` for the next command.
        let end = format!("code=$?; printf '\\n{END}%s\\n' $code; (exit $code)");
        writeln!(self.input, "{command}\n{end}").map_err(|error| format!("no shell: {error}"))?;
        let begun = Instant::now();
        let mut printed = Vec::new();
        loop {
            match self.lines.recv_timeout(LIMIT.saturating_sub(begun.elapsed())) {
                Ok(line) => match line.strip_prefix(END) {
                    Some(code) => return Ok((printed, code.parse().unwrap_or(-1))),
                    None => printed.push(line),
                },
                Err(RecvTimeoutError::Timeout) => return Err(format!("hangs after {printed:?}")),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(format!("the shell has ended after {printed:?}"));
                }
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Its children first: a shell does not end what it has started.
        let _ = writeln!(self.input, "kill -9 $(jobs -p) 2>/dev/null; exit");
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

fn difference(step: &Step, printed: &[String]) -> String {
    format!(
        "The page shows:\n  {}\nThe command prints:\n  {}",
        step.printed.join("\n  "),
        printed.join("\n  ")
    )
}

/// Carries out `ip` outside of the machines.
fn ip(words: &[&str]) {
    let output = Command::new("ip").args(words).output().unwrap();
    assert!(output.status.success(), "ip {words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The search path of the machines: the program and the examples, then the system's.
fn path() -> String {
    let rio = PathBuf::from(env!("CARGO_BIN_EXE_rio"));
    let built = rio.parent().unwrap().display();
    format!("{built}:{built}/examples:{}", std::env::var("PATH").unwrap_or_default())
}
