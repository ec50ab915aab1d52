//! Volumes on real targets: regular use, and the JSON that scripts rely on.

use std::fs;

use crate::site::{Site, content, finish, keys, rio, rio_in, start_in};

#[test]
fn a_file_is_copied_in_and_out_and_compared() {
    let site = Site::new(2, "ssd:flash,size=64M,lazy");
    let made = site.volume("create", &["v"]).ok();
    assert_eq!((made["name"].as_str(), made["engine"].as_str()), (Some("v"), Some("rio")));
    assert_eq!(made["members"].as_array().unwrap().len(), 2);

    let length = 3_000_001;
    let path = site.file("ledger.db", length);
    let written = site.volume("write", &["v", "ledger.db"]).ok();
    assert_eq!(keys(&written), "bytes_per_s engine file groups path schema seconds volume");
    assert_eq!(keys(&written["file"]), "bytes checksum name");
    assert_eq!(written["schema"], "rio-volume-write/1");
    assert_eq!(written["file"]["bytes"], length);
    assert_eq!(written["groups"], 2 + length.div_ceil(256 << 10));

    let read = site.volume("read", &["v", "back.db"]).ok();
    assert_eq!(keys(&read), keys(&written));
    assert_eq!(read["schema"], "rio-volume-read/1");
    assert_eq!(read["file"], written["file"]);
    assert!(fs::read(site.path("back.db")).unwrap() == content(length));

    let verified = site.volume("verify", &["v", "ledger.db"]).ok();
    assert_eq!(
        keys(&verified),
        "checksum_ok differing_bytes file first_difference local_bytes path schema verified volume"
    );
    assert_eq!(verified["verified"], true);

    // Another file replaces it, in larger groups, and is read back under its own name.
    fs::write(&path, b"short").unwrap();
    site.volume("write", &["v", "ledger.db", "--group", "1M"]).ok();
    fs::remove_file(&path).unwrap();
    site.volume("read", &["v"]).ok();
    assert_eq!(fs::read(&path).unwrap(), b"short");

    let shown = site.volume("show", &[]).ok();
    assert_eq!(shown["state"], "free");
    assert!(shown["generation"].as_u64() > made["generation"].as_u64());
}

#[test]
fn a_difference_is_shown_and_is_an_error() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    let path = site.file("a", 100_000);
    site.volume("write", &["v", "a"]).ok();
    let mut bytes = content(100_000);
    bytes[77_777] ^= 1;
    fs::write(&path, bytes).unwrap();
    let done = site.volume("verify", &["v", "a"]);
    done.failed(5, &["differ from byte 77777"]);
    let json = done.json();
    assert_eq!(json["verified"], false);
    assert_eq!((&json["differing_bytes"], &json["first_difference"]), (&1.into(), &77_777.into()));
    assert_eq!(json["checksum_ok"], true);
    site.volume("verify", &["v"]).ok();
}

#[test]
fn every_engine_copies_a_file() {
    for engine in ["none", "sync", "rio"] {
        let site = Site::new(2, "ssd:optane,size=32M,lazy");
        site.volume("create", &["v", "--engine", engine, "--unit", "16K"]).ok();
        site.file("a", 1_000_000);
        assert_eq!(site.volume("write", &["v", "a"]).ok()["engine"], engine);
        site.volume("verify", &["v", "a"]).ok();
    }
}

/// T17: a target without a log is used without ordering, with a note.
#[test]
fn without_a_log_sync_is_used_with_a_note() {
    let site = Site::with(1, "mem:16M,lazy", "");
    assert_eq!(site.volume("create", &["v"]).ok()["engine"], "sync");
    site.file("a", 10_000);
    assert_eq!(site.volume("write", &["v", "a"]).ok()["engine"], "sync");
    site.volume("verify", &["v", "a"]).ok();
}

#[test]
fn discovery_shows_the_subsystem() {
    let site = Site::new(1, "mem:16M,lazy");
    let address = site.address(0);
    let port = address.rsplit_once(':').unwrap().1;
    let found = rio(&["discover", "-a", "127.0.0.1", "-s", port, "-o", "json"]).ok();
    assert_eq!(keys(&found), "address port records");
    let record = found["records"]
        .as_array()
        .unwrap()
        .iter()
        .find(|record| record["subnqn"] == "nqn.2026-11.com.example:test-0")
        .unwrap();
    assert_eq!(
        keys(record),
        "adrfam asqsz portid sectype subnqn subtype traddr treq trsvcid trtype"
    );
    assert_eq!((&record["trtype"], &record["trsvcid"]), (&"tcp".into(), &port.into()));
    let text = rio(&["discover", "-a", "127.0.0.1", "-s", port]).stdout;
    assert!(text.contains("nqn.2026-11.com.example:test-0"), "{text}");
}

#[test]
fn the_text_has_the_content_of_the_json() {
    let site = Site::new(1, "mem:16M,lazy");
    let members = site.members();
    let with = |words: &[&str]| {
        let mut args = words.to_vec();
        args.extend(members.iter().map(String::as_str));
        let done = rio_in(site.folder.path(), &args);
        assert_eq!(done.code, 0, "{done:?}");
        assert!(!done.stderr.contains('\r'), "a progress bar without a terminal: {done:?}");
        done.stdout
    };
    site.file("a", 10_000);
    assert!(with(&["volume", "create", "v"]).contains("Volume \"v\" is made"));
    assert!(with(&["volume", "show"]).contains("not in use"));
    assert!(with(&["volume", "write", "v", "a"]).contains("3 ordered groups"));
    assert!(with(&["volume", "verify", "v", "a"]).contains("equal, byte for byte"));
    assert!(with(&["volume", "read", "v", "b"]).contains("checksum right"));
}

/// A stream without a close would leave a volume that needs recovery.
#[test]
fn ctrl_c_leaves_a_clean_volume() {
    let site = Site::new(1, "ssd:flash,size=512M,lazy");
    site.create();
    site.file("a", 400 << 20);
    let members = site.members();
    let mut args = vec!["volume", "write", "v", "a", "-o", "json"];
    args.extend(members.iter().map(String::as_str));
    let child = start_in(site.folder.path(), &args);
    let pid = child.id().to_string();
    site.wait_until_written(0);
    assert_eq!(site.volume("show", &[]).ok()["state"], "owned");
    std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap();
    finish(child).failed(130, &["interrupted"]);
    assert_eq!(site.volume("show", &[]).ok()["state"], "free");
    let error = site.volume("verify", &["v"]);
    error.failed(5, &["holds no file"]);
    site.file("a", 1000);
    site.volume("write", &["v", "a"]).ok();
    site.volume("verify", &["v", "a"]).ok();
}
