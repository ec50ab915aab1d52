//! Addresses: every option reads them alike, and every message about a peer has its own.

use std::fs;

use riopipe::{OpenOptions, Volume};

use crate::{
    serve::{serve, served, signal},
    site::{Site, finish, rio, rio_in, start_in},
};

#[test]
fn every_option_reads_the_same_addresses() {
    let folder = tempfile::tempdir().unwrap();
    let nqn = ["-n", "nqn.2026-11.com.example:alike"];
    fs::write(folder.path().join("t.toml"), "listen = [\"::1\"]\nmetrics = \"[::1]:0\"\n").unwrap();
    for words in [
        &["-a", "[::1]:0", "--metrics", "[::1]:0"][..],
        &["-a", "::1", "-s", "0", "--metrics", "[::1]:0"],
        &["-c", "t.toml", "-s", "0"],
    ] {
        let options = ["--drive", "mem:16M", "--log", "mem:2M", "-o", "json"];
        let args = [&["target", "serve"], words, &nqn, &options].concat();
        let (child, printed) = served(start_in(folder.path(), &args));
        let address = printed["addresses"][0].as_str().unwrap();
        let port = address.strip_prefix("[::1]:").unwrap_or_else(|| panic!("{printed}"));
        for words in
            [&["-a", address][..], &["-a", "::1", "-s", port], &["-a", "[::1]", "-s", port]]
        {
            let found = rio(&[&["discover", "-o", "json"], words].concat()).ok();
            assert_eq!(found["records"].as_array().map(Vec::len), Some(1), "{words:?}: {found}");
        }
        rio(&["volume", "create", "v", "-m", address, "-o", "json"]).ok();
        let metrics = printed["metrics"].as_str().unwrap();
        rio(&["target", "stat", metrics, "-o", "json"]).ok();
        rio(&["target", "stat", &format!("http://{metrics}/stat"), "-o", "json"]).ok();
        signal(&child, "-TERM");
        assert_eq!(finish(child).code, 0);
    }
    for words in [
        &["target", "serve", "--drive", "mem:1M", "-a", "[::1"][..],
        &["target", "serve", "--drive", "mem:1M", "-a", "4420"],
        &["target", "check", "--drive", "mem:1M", "-a", "::1:::4420"],
        &["discover", "-a", "a:b:c"],
        &["discover", "-a", "localhost:x"],
        &["discover", "-a", "localhost:1", "-s", "2", "-o", "json"],
        &["target", "stat", "[::1"],
        &["volume", "stat", "a:b:c"],
        &["volume", "show", "-m", "a:b:c"],
    ] {
        assert_eq!(rio(words).code, 2, "{words:?}");
    }
}

#[test]
fn discovery_names_both_ports_when_both_fail() {
    // A loopback address at which nothing listens.
    let done = rio(&["discover", "-a", "127.94.3.7", "-o", "json"]);
    done.failed(3, &["127.94.3.7:8009", "127.94.3.7:4420", "-s"]);
    let done = rio(&["discover", "-a", "127.94.3.7:4421", "-o", "json"]);
    assert!(!done.failed(3, &["127.94.3.7:4421"]).contains("8009"));
}

#[test]
fn every_line_about_a_host_has_its_address() {
    let folder = tempfile::tempdir().unwrap();
    let nqn = "nqn.2026-11.com.example:peers";
    let words = [
        "--drive",
        "mem:16M",
        "--log",
        "mem:2M",
        "-n",
        nqn,
        "-v",
        "--allow-host",
        "nqn.2026-11.com.example:good",
    ];
    let (child, printed) = serve(folder.path(), &words);
    let address = printed["addresses"][0].as_str().unwrap();
    let member = format!("{address},nqn={nqn}");
    let create = |host: &str| {
        let args = ["volume", "create", "v", "-m", &member, "-q", host, "-o", "json"];
        rio_in(folder.path(), &args)
    };
    create("nqn.2026-11.com.example:good").ok();
    // Refused by the volume that is there, and by the list of hosts.
    create("nqn.2026-11.com.example:good").failed(4, &[]);
    create("nqn.2026-11.com.example:bad").failed(3, &[]);
    signal(&child, "-TERM");
    let log = finish(child).stderr;
    for what in [" connected", "connect refused", "connection closed", "volume claimed"] {
        let lines: Vec<_> = log.lines().filter(|line| line.contains(what)).collect();
        assert!(!lines.is_empty(), "no {what:?} in {log}");
        for line in lines {
            assert!(line.contains("peer=\"127.0.0.1:"), "{line}");
        }
    }
}

#[test]
fn the_owner_of_a_volume_is_named_with_its_address() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    let member = site.address(0).parse().unwrap();
    let (volume, _) = Volume::open("v", &[member], &OpenOptions::default()).unwrap();
    let shown = site.volume("show", &[]).ok();
    let member = &shown["members"][0];
    let address = member["owner_address"].as_str().unwrap_or_else(|| panic!("{shown}"));
    assert!(address.starts_with("127.0.0.1:"), "{shown}");
    let owner = member["owner"].as_str().unwrap();
    let text = format!("owned by {owner} at {address}");
    let host = ["-q", "nqn.2026-11.com.example:other"];
    site.volume("verify", &[&["v"], &host[..]].concat()).failed(4, &[&text]);
    site.volume("create", &[&["w", "--force"], &host[..]].concat()).failed(4, &[&text]);
    volume.close().unwrap();
    assert_eq!(
        site.volume("show", &[]).ok()["members"][0]["owner_address"],
        serde_json::Value::Null
    );
}
