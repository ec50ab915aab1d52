//! Hosts that may connect, and hosts that may not.

use crate::{
    serve::{serve, signal},
    site::{finish, rio, rio_in},
};

const NQN: &str = "nqn.2026-11.com.example:drives";
const GOOD: &str = "nqn.2026-11.com.example:good";
const BAD: &str = "nqn.2026-11.com.example:bad";
const WORDS: [&str; 6] = ["--drive", "mem:16M", "--log", "mem:2M", "-n", NQN];

#[test]
fn a_refused_host_is_named_on_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let (child, printed) = serve(folder.path(), &[&WORDS[..], &["--allow-host", GOOD]].concat());
    let address = printed["addresses"][0].as_str().unwrap();
    let named = format!("{address},nqn={NQN}");
    let create = |member: &str, host: &str| {
        let args = ["volume", "create", "v", "-m", member, "-q", host, "-o", "json"];
        rio_in(folder.path(), &args)
    };
    create(&named, BAD).failed(3, &[&format!("host {BAD}"), "allowed hosts", "--allow-host"]);
    // Discovery lists nothing for such a host.
    create(address, BAD).failed(3, &[&format!("no subsystem to host {BAD}"), "allowed hosts"]);
    create(address, GOOD).ok();
    signal(&child, "-TERM");
    let log = finish(child).stderr;
    let refused: Vec<_> = log.lines().filter(|line| line.contains("connect refused")).collect();
    assert_eq!(refused.len(), 1, "{log}");
    for word in [BAD, "peer=\"127.0.0.1:", "allowed hosts"] {
        assert!(refused[0].contains(word), "no {word:?} in {log}");
    }
    assert_eq!(log.matches("which nothing proves").count(), 1, "{log}");
    let args = [&["target", "check", "-s", "0", "--allow-host", GOOD, "-o", "json"], &WORDS[..]];
    let notes = rio(&args.concat()).ok()["notes"].to_string();
    assert!(notes.contains("which nothing proves"), "{notes}");
}

#[test]
fn an_open_target_warns_once() {
    let folder = tempfile::tempdir().unwrap();
    for (words, is_warned) in [
        (&["-a", "0.0.0.0"][..], true),
        (&["-a", "[::]"], true),
        (&["-a", "127.0.0.1"], false),
        (&["-a", "0.0.0.0", "--allow-host", GOOD], false),
    ] {
        let words = [&WORDS[..], words].concat();
        let (child, _) = serve(folder.path(), &words);
        signal(&child, "-TERM");
        let log = finish(child).stderr;
        let count = log.matches("neither authentication nor encryption").count();
        assert_eq!(count, usize::from(is_warned), "{words:?} {log}");
        let args = [&["target", "check", "-s", "0", "-o", "json"], &words[..]].concat();
        let notes = rio(&args).ok()["notes"].to_string();
        assert_eq!(notes.contains("neither authentication"), is_warned, "{notes}");
    }
}
