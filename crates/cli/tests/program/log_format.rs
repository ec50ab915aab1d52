//! `--log-format json`: each line on standard error is a JSON object.

use std::{io::BufRead, net::TcpStream};

use serde_json::Value;

use crate::{
    serve::{serve, signal},
    site::{Site, finish, rio, rio_in, start_in},
};

/// Each line as an object with the keys that all lines have.
fn objects(stderr: &str) -> Vec<Value> {
    let object = |line: &str| -> Value {
        let value: Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        for key in ["timestamp", "level", "message", "target"] {
            assert!(value[key].is_string(), "no {key} in {line}");
        }
        value
    };
    stderr.lines().map(object).collect()
}

#[test]
fn events_of_a_target_have_their_fields() {
    let folder = tempfile::tempdir().unwrap();
    let (child, printed) = serve(folder.path(), &["--drive", "mem:16M", "--log-format", "json"]);
    let address = printed["addresses"][0].as_str().unwrap();
    rio(&["discover", "-a", address, "-o", "json"]).ok();
    signal(&child, "-TERM");
    let done = finish(child);
    assert_eq!(done.code, 0);
    let events = objects(&done.stderr);
    let find = |message: &str| {
        let found = events.iter().find(|event| event["message"] == message);
        found.unwrap_or_else(|| panic!("no {message:?} in {events:?}"))
    };
    let serving = find("serving");
    assert_eq!((&serving["level"], &serving["address"]), (&"INFO".into(), &address.into()));
    assert!(serving["target"].as_str().unwrap().starts_with("riopipe_target"), "{serving}");
    let connected = find("connected");
    assert_eq!(connected["qid"], 0, "a number: {connected}");
    assert!(find("stopping; a second signal ends the target at once")["signal"] == "SIGTERM");
}

#[test]
fn a_failure_and_its_notes_are_objects_too() {
    let folder = tempfile::tempdir().unwrap();
    for format in ["normal", "json"] {
        let words = ["target", "serve", "--drive", "file:missing,size=1M", "-o", format];
        let done = rio_in(folder.path(), &[&words[..], &["--log-format", "json"]].concat());
        assert_eq!(done.code, 7);
        let events = objects(&done.stderr);
        let failure = events.last().unwrap();
        assert_eq!((&failure["level"], &failure["error"]["code"]), (&"ERROR".into(), &7.into()));
        assert_eq!(failure["error"]["kind"], "media");
        assert!(failure["message"].as_str().unwrap().contains("missing"), "{failure}");
        assert!(failure["error"]["hint"].as_str().unwrap().contains("--create"), "{failure}");
    }
    // A note: that the copy was interrupted.
    let site = Site::new(1, "ssd:flash,size=1G,lazy");
    site.create();
    let large = std::fs::File::options().write(true).open(site.file("a", 16 << 20)).unwrap();
    large.set_len(1000 << 20).unwrap();
    let words = ["volume", "write", "v", "a", "--log-format", "json", "-o", "json"];
    let members = site.members();
    let words: Vec<&str> = words.into_iter().chain(members.iter().map(String::as_str)).collect();
    let writer = start_in(site.folder.path(), &words);
    site.wait_until_written(0);
    signal(&writer, "-INT");
    let done = finish(writer);
    assert_eq!(done.code, 130, "{done:?}");
    let events = objects(&done.stderr);
    let note = events.iter().find(|event| event["level"] == "INFO").expect("a note");
    let message = note["message"].as_str().unwrap();
    assert!(message.starts_with("interrupted by SIGINT"), "{message}");
}

#[test]
fn lines_that_are_left_out_are_counted_in_an_object() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, printed) =
        serve(folder.path(), &["--drive", "mem:16M", "--log-format", "json"]);
    let address = printed["addresses"][0].as_str().unwrap();
    let mut stderr = std::io::BufReader::new(child.stderr.take().unwrap());
    // Each connection that ends logs a line of the same kind.
    for _ in 0..200 {
        drop(TcpStream::connect(address).unwrap());
    }
    let mut text = String::new();
    let left_out = loop {
        text.clear();
        assert!(stderr.read_line(&mut text).unwrap() > 0, "the target has ended");
        let event = objects(&text).remove(0);
        if event["left_out"].is_u64() {
            break event;
        }
    };
    assert_eq!(left_out["level"], "WARN", "{left_out}");
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
