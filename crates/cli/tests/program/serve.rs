//! `rio target serve` and `check` as processes.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command},
    time::Instant,
};

use crate::site::{LIMIT, content, finish, keys, rio, rio_in, start_in};
use serde_json::Value;

/// A served target: the process, and its output once ready.
pub(crate) fn serve(folder: &std::path::Path, words: &[&str]) -> (Child, Value) {
    let mut args = vec!["target", "serve", "-s", "0", "-o", "json", "--create"];
    args.extend(words);
    served(start_in(folder, &args))
}

/// A target that was just started with `-o json`, and its output once ready.
pub(crate) fn served(mut child: Child) -> (Child, Value) {
    let mut text = String::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        text += &line;
        // The object's last line is the only one that begins with a closing brace.
        if line.starts_with('}') {
            break;
        }
    }
    match serde_json::from_str(&text) {
        Ok(printed) => (child, printed),
        Err(error) => panic!("{error}: {text:?}, {:?}", finish(child)),
    }
}

pub(crate) fn signal(child: &Child, name: &str) {
    Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
}

#[test]
fn serves_until_asked_to_stop_and_keeps_its_data() {
    for log in ["file:l,size=1M", "block:l,size=1M"] {
        serves_and_keeps_what_it_has(log);
    }
}

fn serves_and_keeps_what_it_has(log: &str) {
    let folder = tempfile::tempdir().unwrap();
    let words = ["--drive", "file:d,size=16M", "--log", log, "--reactors", "1"];
    fs::write(folder.path().join("a"), content(50_000)).unwrap();
    let volume = |verb: &str, printed: &Value, words: &[&str]| {
        let mut args = vec!["volume", verb];
        args.extend(words);
        args.extend(["-m", printed["addresses"][0].as_str().unwrap(), "-o", "json"]);
        rio_in(folder.path(), &args)
    };
    // The NQN is part of a namespace's identifiers and derived from the address, so it is given.
    let words = [&words[..], &["-n", "nqn.2026-11.com.example:served"]].concat();

    let (child, printed) = serve(folder.path(), &words);
    assert_eq!(
        keys(&printed),
        "addresses created discovery_addresses promises schema serves subnqn"
    );
    assert_eq!(
        keys(&printed["promises"][0]),
        "drive gain identity log nguid nsid power_cut process_kill uuid"
    );
    volume("create", &printed, &["v"]).ok();
    volume("write", &printed, &["v", "a"]).ok();
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);

    let (child, printed) = serve(folder.path(), &words);
    volume("verify", &printed, &["v", "a"]).ok();
    signal(&child, "-INT");
    assert_eq!(finish(child).code, 0);
}

/// A target that is stopped like this keeps its connections: only a timeout detects it.
#[test]
fn a_target_that_stalls_in_the_middle_of_a_write() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["--drive", "ssd:flash,size=1G,lazy", "--log", "file:l,size=2M"];
    let (child, printed) = serve(folder.path(), &words);
    let member = printed["addresses"][0].as_str().unwrap();
    let volume = |words: &[&str]| {
        let args = [&["volume"], words, &["-m", member, "-o", "json"]].concat();
        start_in(folder.path(), &args)
    };
    finish(volume(&["create", "v"])).ok();
    fs::File::create(folder.path().join("a")).unwrap().set_len(1000 << 20).unwrap();
    let writer = volume(&["write", "v", "a", "--io-timeout", "5"]);
    // The copy owns the volume from before its first write until after its last.
    let begun = Instant::now();
    while finish(volume(&["show"])).ok()["state"] != "owned" {
        assert!(begun.elapsed() < LIMIT, "the copy was never seen at work");
    }
    signal(&child, "-STOP");
    let done = finish(writer);
    signal(&child, "-CONT");
    signal(&child, "-TERM");
    finish(child);
    // If it was stopped while the stream was still being opened, the code is that of a connection.
    assert!([3, 6].contains(&done.code), "{done:?}");
    assert!(done.stderr.contains("stalls"), "{done:?}");
}

#[test]
fn check_reports_all_errors_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("target.toml");
    fs::write(
        &path,
        "listen = [\"127.0.0.1:0\"]\nsubnqn = \"disk\"\nlog = \"tape:0\"\n\
         [[namespaces]]\ndrive = \"mem:1000\"\n",
    )
    .unwrap();
    let path = path.to_str().unwrap();
    let done = rio(&["target", "check", "-c", path, "-o", "json"]);
    done.failed(2, &["mistakes"]);
    let checked = done.json();
    assert_eq!(keys(&checked), "notes ok problems promises schema subnqn");
    assert_eq!(checked["ok"], false);
    let places: Vec<_> = checked["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| problem["place"].as_str().unwrap())
        .collect();
    for place in ["subnqn", "log", "namespaces[0]"] {
        assert!(places.iter().any(|p| p.starts_with(place)), "{place}: {places:?}");
    }
    // Options take precedence, so all of it can be corrected by them.
    let fixed = ["-n", "nqn.2026-11.com.example:d", "--drive", "mem:1M", "--log", "file:l,size=1M"];
    let args = [&["target", "check", "-c", path, "-o", "json"][..], &fixed].concat();
    rio_in(folder.path(), &args).failed(7, &["one mistake"]);
    let checked = rio_in(folder.path(), &[&args[..], &["--create"]].concat()).ok();
    assert_eq!(checked["ok"], true);
    assert!(checked["promises"][0]["process_kill"].as_str().unwrap().contains("memory"));
    assert!(!folder.path().join("l").exists(), "check creates nothing");
}

#[test]
fn an_error_in_a_configuration_file_has_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, text: &str| {
        fs::write(folder.path().join(name), text).unwrap();
        rio_in(folder.path(), &["target", "check", "-c", name, "-o", "json"])
    };
    of("a.toml", "listen = []\nlgo = 1\n").failed(2, &["line 2", "lgo"]);
    of("b.json", "{\"subsystems\": []}").failed(2, &["b.json", "subsystems"]);
    rio(&["target", "check", "-c", "/no/such/file", "-o", "json"]).failed(1, &["/no/such/file"]);
    rio(&["target", "serve", "-o", "json"]).failed(2, &["namespaces", "mem:1G"]);
}

/// A file system that is not mounted and a first start are the same to a target. Nothing is created
/// without `--create`, and each creation is reported.
#[test]
fn a_missing_file_is_created_only_on_request_and_then_reported() {
    let folder = tempfile::tempdir().unwrap();
    let start = |words: &[&str]| {
        let args = ["target", "serve", "-s", "0", "-o", "json", "--reactors", "1"];
        start_in(folder.path(), &[&args[..], words].concat())
    };
    let drives = ["file:d,size=1M", "ssd:flash,size=1M,file=d", "ssd:optane,size=1M,file=d"];
    let logs = ["file:l,size=1M", "dax:l,size=1M", "block:l,size=1M"];
    for (drive, log) in drives.into_iter().zip(logs) {
        let words = ["--drive", drive, "--log", log];
        finish(start(&words)).failed(7, &["namespace 1: d does not exist", "--create"]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{words:?}");
        let (child, printed) = served(start(&[&words[..], &["--create"]].concat()));
        assert_eq!(printed["created"], serde_json::json!(["d", "l"]));
        signal(&child, "-TERM");
        let done = finish(child);
        assert_eq!((done.code, done.stderr.matches("is created").count()), (0, 2), "{done:?}");

        // From the second start on it is not needed, as in a unit file.
        let (child, printed) = served(start(&words));
        assert_eq!(printed["created"], serde_json::json!([]));
        signal(&child, "-TERM");
        assert_eq!(finish(child).code, 0);

        // A log that is missing is not created beside its drive, and a drive not beside its log.
        fs::remove_file(folder.path().join("l")).unwrap();
        finish(start(&words)).failed(7, &["ordering log: l does not exist"]);
        fs::remove_file(folder.path().join("d")).unwrap();
        fs::write(folder.path().join("target.toml"), format!("create = true\nlog = \"{log}\"\n"))
            .unwrap();
        let (child, printed) = served(start(&["-c", "target.toml", "--drive", drive]));
        assert_eq!(printed["created"], serde_json::json!(["d", "l"]));
        signal(&child, "-TERM");
        assert_eq!(finish(child).code, 0);
        for name in ["d", "l", "target.toml"] {
            fs::remove_file(folder.path().join(name)).unwrap();
        }
    }
    // An empty file counts as one that does not exist. A check fills nothing.
    for name in ["d", "l"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    let words = ["--drive", drives[0], "--log", logs[0]];
    let check = |more: &[&str]| {
        let words = [&["target", "check", "-s", "0"], &words[..], more].concat();
        finish(start_in(folder.path(), &words))
    };
    finish(start(&words)).failed(7, &["namespace 1: d is empty", "--create"]);
    let done = check(&[]);
    assert!(done.code != 0 && done.stdout.contains("d is empty; "), "{done:?}");
    let done = check(&["--create"]);
    assert_eq!(done.code, 0, "{done:?}");
    let sizes = || ["d", "l"].map(|name| fs::metadata(folder.path().join(name)).unwrap().len());
    assert_eq!(sizes(), [0, 0]);
    let (child, printed) = served(start(&[&words[..], &["--create"]].concat()));
    assert_eq!(printed["created"], serde_json::json!(["d", "l"]));
    signal(&child, "-TERM");
    let done = finish(child);
    assert_eq!((done.code, done.stderr.matches("is empty, and is filled").count()), (0, 2));
    assert_eq!(sizes(), [1 << 20, 1 << 20]);
    // A directory is never created.
    let done = finish(start(&["--drive", "file:no/d,size=1M", "--create"]));
    done.failed(7, &["no/d", "No such file or directory"]);
}
