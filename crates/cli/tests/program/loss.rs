//! A target that is lost while a file is written: the loss timeout is the whole time, for each kind of
//! loss. And a volume that is closed in order: no target is lost.

use std::{
    fs::File,
    path::Path,
    process::{Child, Command},
    time::Instant,
};

use crate::{
    serve::{serve, served, signal},
    signals::wait_until_written,
    site::{Done, Site, finish, start_in},
};

/// Limits that would delay the end for longer than the test waits.
const HOURS: [&str; 4] = ["--io-timeout", "36000", "--timeout", "36000"];

/// A copy that owns its volume.
struct Copy<'a> {
    folder: &'a Path,
    member: &'a str,
    writer: Child,
}

impl<'a> Copy<'a> {
    fn start(folder: &'a Path, member: &'a str, loss_timeout: &str) -> Self {
        let volume = |words: &[&str]| {
            start_in(folder, &[&["volume"], words, &["-m", member, "-o", "json"]].concat())
        };
        finish(volume(&["create", "v"])).ok();
        File::create(folder.join("a")).unwrap().set_len(1000 << 20).unwrap();
        let words = ["write", "v", "a", "--loss-timeout", loss_timeout];
        let writer = volume(&[&words[..], &HOURS].concat());
        wait_until_written(folder);
        Self { folder, member, writer }
    }

    /// Loses the target by `lose`. Checks the times in the log and in the error of the copy: none
    /// is below `least` s, or longer than the copy really waited.
    fn loses_its_target(self, least: f64, lose: impl FnOnce()) -> Done {
        let begun = Instant::now();
        lose();
        let done = finish(self.writer);
        // Keep Alive is sent each second: the last sign of life is not older.
        let most = begun.elapsed().as_secs_f64() + 1.1;
        let text = done.failed(6, &["stream 0", self.member]);
        let times = [time_after(&text, "; for "), time_after(&done.stderr, "unreachable=")];
        // Without a loss timeout the stream may notice the loss first, and fail at once.
        assert!(least == 0.0 || times[0].is_some(), "{text}");
        for time in times.into_iter().flatten() {
            assert!((least..=most).contains(&time), "{time} s, not {least} to {most}: {done:?}");
        }
        assert!(self.folder.join("a").exists());
        done
    }
}

/// The time, in seconds, that follows these words.
fn time_after(text: &str, words: &str) -> Option<f64> {
    let (_, rest) = text.split_once(words)?;
    let mut parts = rest.split(|c: char| c.is_whitespace() || matches!(c, ';' | ':' | ')'));
    let number = parts.next()?;
    let number: f64 = number.parse().unwrap_or_else(|error| panic!("{error}: {rest:?}"));
    Some(match parts.next() {
        Some("s") => number,
        Some("ms") => number / 1e3,
        Some("µs") => number / 1e6,
        unit => panic!("{unit:?}: {rest:?}"),
    })
}

const TARGET: [&str; 4] = ["--drive", "ssd:flash,size=1G,lazy", "--log", "file:l,size=2M"];

/// Its connections stay, and nothing comes over them.
#[test]
fn a_target_that_falls_silent_is_given_up_after_the_loss_timeout() {
    // A silence of less than 3 s is none.
    for (loss_timeout, least) in [("5", 5.0), ("1", 3.0)] {
        let folder = tempfile::tempdir().unwrap();
        let (target, printed) = serve(folder.path(), &TARGET);
        let member = printed["addresses"][0].as_str().unwrap();
        let copy = Copy::start(folder.path(), member, loss_timeout);
        let done = copy.loses_its_target(least, || signal(&target, "-STOP"));
        let silence = time_after(&done.stderr, "has sent nothing for ");
        assert!(silence.is_some_and(|silence| silence >= 3.0), "{done:?}");
        signal(&target, "-KILL");
        finish(target);
    }
}

#[test]
fn without_a_loss_timeout_a_silent_target_is_lost_soon() {
    let folder = tempfile::tempdir().unwrap();
    let (target, printed) = serve(folder.path(), &TARGET);
    let member = printed["addresses"][0].as_str().unwrap();
    let copy = Copy::start(folder.path(), member, "0");
    copy.loses_its_target(3.0, || signal(&target, "-STOP"));
    signal(&target, "-KILL");
    finish(target);
}

#[test]
fn a_target_that_is_killed_is_given_up_after_the_loss_timeout() {
    for (loss_timeout, least) in [("2", 2.0), ("0", 0.0)] {
        let folder = tempfile::tempdir().unwrap();
        let (target, printed) = serve(folder.path(), &TARGET);
        let member = printed["addresses"][0].as_str().unwrap();
        let copy = Copy::start(folder.path(), member, loss_timeout);
        copy.loses_its_target(least, || signal(&target, "-KILL"));
        finish(target);
    }
}

/// A network namespace with a link to this one. Both end when this is dropped.
struct Namespace {
    name: String,
    link: String,
    address: String,
}

impl Namespace {
    /// Returns `None` where this process may not make one.
    fn new() -> Option<Self> {
        let id = std::process::id();
        let (name, link) = (format!("rio-test-{id}"), format!("rt{id}"));
        let network = format!("10.199.{}", id % 250);
        let address = format!("{network}.2");
        let namespace = Self { name, link, address };
        let Self { name, link, address } = &namespace;
        let inside = format!("{link}i");
        let steps = [
            format!("netns add {name}"),
            format!("link add {link} type veth peer name {inside} netns {name}"),
            format!("addr add {network}.1/24 dev {link}"),
            format!("link set {link} up"),
            format!("-n {name} addr add {address}/24 dev {inside}"),
            format!("-n {name} link set {inside} up"),
        ];
        steps.iter().all(|step| ip(step)).then_some(namespace)
    }

    fn cut(&self) {
        assert!(ip(&format!("-n {} link set {}i down", self.name, self.link)));
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        ip(&format!("link del {}", self.link));
        ip(&format!("netns del {}", self.name));
    }
}

fn ip(words: &str) -> bool {
    let output = Command::new("ip").args(words.split(' ')).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn a_target_behind_a_cut_link_is_given_up_after_the_loss_timeout() {
    let Some(namespace) = Namespace::new() else {
        eprintln!("not tested here: no permission for network namespaces");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let rio = env!("CARGO_BIN_EXE_rio");
    let child = Command::new("ip")
        .args(["netns", "exec", &namespace.name, rio, "target", "serve", "-s", "0", "-o", "json"])
        .arg("--create")
        .args(["-a", &namespace.address])
        .args(TARGET)
        .current_dir(folder.path())
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let (target, printed) = served(child);
    let member = printed["addresses"][0].as_str().unwrap();
    let copy = Copy::start(folder.path(), member, "5");
    copy.loses_its_target(5.0, || namespace.cut());
    // `ip netns exec` becomes the program, so this is the target.
    signal(&target, "-KILL");
    finish(target);
}

#[test]
fn volumes_that_are_closed_in_order_warn_of_nothing() {
    let site = Site::new(2, "mem:16M,lazy");
    site.create();
    site.file("a", 3 << 20);
    for _ in 0..20 {
        for (verb, words) in [("write", ["v", "a"]), ("verify", ["v", "a"])] {
            let done = site.volume(verb, &words);
            done.ok();
            assert_eq!(done.stderr, "", "{verb}");
        }
    }
}
