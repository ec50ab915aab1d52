//! Standard error and standard output without a reader, with a blocked one, or on a full disk:
//! nothing stops, and only lines are lost.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, ErrorKind, PipeReader, PipeWriter, Read, Write, pipe},
    iter::repeat_with,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
    process::{Child, Command, Stdio},
};

use riopipe::ConnectOptions;

use crate::{
    serve::{serve, served, signal},
    site::{Site, content, finish, rio_in, start_in},
};

/// The defect of standard error.
#[derive(Clone, Copy, Debug)]
enum Broken {
    /// A full pipe with a reader that doesn't read.
    Unread,
    /// A pipe whose reader has gone.
    Gone,
    /// A full disk.
    Full,
    /// Closed before the program was started.
    Closed,
}

impl Broken {
    const ALL: [Self; 4] = [Self::Unread, Self::Gone, Self::Full, Self::Closed];

    /// Starts `rio` with such a standard error. The reader must be kept while the process runs.
    fn start(self, folder: &Path, args: &[&str]) -> (Child, Option<PipeReader>) {
        let rio = env!("CARGO_BIN_EXE_rio");
        let mut command = Command::new(rio);
        let mut unread = None;
        match self {
            Self::Unread => {
                let (reader, writer) = full_pipe();
                command.stderr(writer);
                unread = Some(reader);
            }
            Self::Gone => drop(command.stderr(pipe().unwrap().1)),
            Self::Full => {
                command.stderr(File::options().write(true).open("/dev/full").unwrap());
            }
            Self::Closed => {
                command = Command::new("sh");
                command.args(["-c", "exec \"$0\" \"$@\" 2>&-", rio]);
            }
        }
        command.args(args).current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped());
        (command.spawn().unwrap(), unread)
    }
}

fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = pipe().unwrap();
    // The same pipe, opened again: only this descriptor doesn't wait for space.
    let mut filler = File::options()
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(format!("/proc/self/fd/{}", writer.as_raw_fd()))
        .unwrap();
    for size in [4096, 1] {
        let mut writes = repeat_with(|| filler.write(&vec![b'\n'; size]));
        let error = writes.find_map(Result::err).unwrap();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
    }
    (reader, writer)
}

fn discover(address: &str, times: u32) {
    let (host, port) = address.rsplit_once(':').unwrap();
    for _ in 0..times {
        riopipe::discover(host, port.parse().unwrap(), &ConnectOptions::default()).unwrap();
    }
}

#[test]
fn a_target_continues_without_its_standard_error() {
    for broken in Broken::ALL {
        let folder = tempfile::tempdir().unwrap();
        let drive = ["--drive", "mem:64M,lazy", "--log", "file:l,size=2M", "--reactors", "2"];
        let args = [&["target", "serve", "-s", "0", "-o", "json", "-vvv", "--create"], &drive[..]]
            .concat();
        let (child, _unread) = broken.start(folder.path(), &args);
        let (child, printed) = served(child);
        let address = printed["addresses"][0].as_str().unwrap();
        let volume = |words: &[&str]| {
            let args = [&["volume"], words, &["-m", address, "-o", "json"]].concat();
            start_in(folder.path(), &args)
        };
        fs::write(folder.path().join("a"), content(20 << 20)).unwrap();
        finish(volume(&["create", "v"])).ok();
        let writer = volume(&["write", "v", "a"]);
        discover(address, 200);
        finish(writer).ok();
        finish(volume(&["verify", "v", "a"])).ok();
        signal(&child, "-TERM");
        assert_eq!(finish(child).code, 0, "{broken:?}");
    }
}

#[test]
fn an_initiators_commands_continue_without_it() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    site.file("a", 1 << 20);
    let members = site.members();
    let members: Vec<_> = members.iter().map(String::as_str).collect();
    for broken in Broken::ALL {
        let run = |words: &[&str]| {
            let args = [&["volume"], words, &["-o", "json", "-vvv"]].concat();
            let (child, _unread) = broken.start(site.folder.path(), &args);
            finish(child)
        };
        run(&[&["write", "v", "a"], &members[..]].concat()).ok();
        run(&[&["verify", "v", "a"], &members[..]].concat()).ok();
        // A failure is not printed, but the exit code reports it.
        let done = run(&[&["verify", "other"], &members[..]].concat());
        assert_eq!(done.code, 4, "{broken:?}: {done:?}");
    }
}

#[test]
fn lines_that_peers_cause_are_logged_up_to_a_limit_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, printed) = serve(folder.path(), &["--drive", "mem:1M"]);
    let mut stderr = child.stderr.take().unwrap();
    discover(printed["addresses"][0].as_str().unwrap(), 150);
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);
    let mut text = String::new();
    stderr.read_to_string(&mut text).unwrap();
    let mut lines = text.lines();
    let (mut logged, mut left_out) = (0, 0);
    while let Some(line) = lines.next() {
        let more = match line.strip_prefix("rio: ") {
            Some(more) => more.split(' ').next().unwrap().parse().unwrap(),
            None => 0,
        };
        let line = if more > 0 { lines.next().unwrap() } else { line };
        if line.contains("riopipe_target") && line.contains(" connected ") {
            logged += 1;
            left_out += more;
        }
    }
    // The numbers depend on the time that it took.
    assert_eq!(logged + left_out, 150, "{logged} logged:\n{text}");
    assert!(logged >= 50, "{text}");
}

#[test]
fn output_without_a_reader_ends_commands_that_only_print() {
    let folder = tempfile::tempdir().unwrap();
    let drive = ["--drive", "mem:1M", "--metrics", "127.0.0.1:0"];
    let (child, printed) = serve(folder.path(), &drive);
    let (host, port) = printed["addresses"][0].as_str().unwrap().rsplit_once(':').unwrap();
    let metrics = printed["metrics"].as_str().unwrap();
    let run = |stdout: Stdio, args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rio"));
        command.args(args).current_dir(folder.path()).stdin(Stdio::null()).stdout(stdout);
        finish(command.stderr(Stdio::piped()).spawn().unwrap())
    };
    let gone = || pipe().unwrap().1.into();
    let ask = ["discover", "-a", host, "-s", port];
    for args in [&ask[..], &["target", "stat", metrics, "--watch", "0.01"]] {
        let done = run(gone(), args);
        assert_eq!((done.code, done.stderr.as_str()), (141, ""), "{args:?}");
    }
    let full = File::options().write(true).open("/dev/full").unwrap();
    let done = run(full.into(), &ask);
    assert_eq!(done.code, 1);
    assert!(done.stderr.contains("can't write to standard output: No space left"), "{done:?}");
    signal(&child, "-TERM");
    finish(child);
}

#[test]
fn a_target_serves_without_a_reader_of_its_output() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_rio"))
        .args(["target", "serve", "-s", "0", "--drive", "mem:1M"])
        .stdin(Stdio::null())
        .stdout(pipe().unwrap().1)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let serving = log.find(|line| line.contains("serving address=")).unwrap();
    let address = serving.split("address=").nth(1).unwrap().split(' ').next().unwrap();
    // It has tried to print its result by the time it is asked to stop, or does so before it stops.
    discover(address, 20);
    let (host, port) = address.rsplit_once(':').unwrap();
    let asked = rio_in(Path::new("/"), &["discover", "-a", host, "-s", port, "-o", "json"]);
    asked.ok();
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);
    drop(log);
}

/// A pseudo-terminal whose other end reads nothing, and which takes no more bytes.
fn full_terminal() -> (File, File) {
    let (mut master, mut slave) = (-1, -1);
    let null = std::ptr::null_mut();
    // SAFETY: two places for descriptors; the name, the attributes and the size are optional.
    let opened =
        unsafe { libc::openpty(&raw mut master, &raw mut slave, null, null.cast(), null.cast()) };
    assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call has just opened them for this function alone.
    let (master, slave) = unsafe { (File::from_raw_fd(master), File::from_raw_fd(slave)) };
    let mut filler = File::options()
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(format!("/proc/self/fd/{}", slave.as_raw_fd()))
        .unwrap();
    let mut writes = repeat_with(|| filler.write(&[b'x'; 1024]));
    let error = writes.find_map(Result::err).unwrap();
    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
    (master, slave)
}

#[test]
fn a_stopped_terminal_delays_no_progress() {
    let site = Site::new(1, "mem:64M,lazy");
    site.create();
    site.file("a", 50 << 20);
    let members = site.members();
    for verb in ["write", "verify", "recover"] {
        let (_master, slave) = full_terminal();
        let mut command = Command::new(env!("CARGO_BIN_EXE_rio"));
        command.args(["volume", verb, "v"]).args(&members);
        command.args((verb != "recover").then_some("a")).current_dir(site.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(slave);
        let done = finish(command.spawn().unwrap());
        assert_eq!(done.code, 0, "{verb}: {done:?}");
    }
}
