//! Peers without rights: many connections that are opened and go no further.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::Child,
};

use riopipe_platform::raise_descriptors_max;
use riopipe_testkit::peer::{Digests, icreq};
use serde_json::Value;

use crate::{
    serve::{serve, signal},
    site::{content, finish, rio_in},
};

/// The connections that a peer opens, if this process may have as many descriptors.
const CONNECTIONS: usize = 10_000;
/// Descriptors that this process needs for other things.
const OTHER_DESCRIPTORS: usize = 200;
/// The most memory of the target for a connection that goes no further, in bytes. The kernel's memory for
/// its socket comes on top.
const BYTES_MAX: usize = 4 << 10;

/// The number of connections to open.
fn connections() -> usize {
    let descriptors = raise_descriptors_max().unwrap_or(1024) as usize;
    let count = CONNECTIONS.min(descriptors.saturating_sub(OTHER_DESCRIPTORS));
    if count < CONNECTIONS {
        eprintln!("only {count} connections: RLIMIT_NOFILE is {descriptors}");
    }
    count
}

/// Opens a connection, and goes as far as no host without rights can be kept from: in turn not at all, to
/// the end of the ICReq, and to the middle of a Connect.
fn half_open(address: &str, number: usize) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    if !number.is_multiple_of(3) {
        let _ = stream.write_all(&icreq(Digests::default(), 0));
    }
    if number % 3 > 1 {
        // The header of a command capsule with 1024 bytes of data, and half of them.
        let mut begin = vec![4, 0, 72, 72];
        begin.extend((72u32 + 1024).to_le_bytes());
        begin.resize(72 + 512, 0);
        let _ = stream.write_all(&begin);
    }
    stream
}

fn memory_bytes(child: &Child) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

fn descriptors(child: &Child) -> usize {
    fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap().count()
}

fn serve_with(folder: &Path, keys: &str) -> (Child, Value, String) {
    let config = format!("{keys}\n[[namespaces]]\ndrive = \"mem:16M\"\n");
    fs::write(folder.join("target.toml"), config).unwrap();
    let words = ["-c", "target.toml", "--log", "mem:2M", "--metrics", "127.0.0.1:0"];
    let words = [&words[..], &["--allow-host", HOST]].concat();
    let (child, printed) = serve(folder, &words);
    let address = printed["addresses"][0].as_str().unwrap().to_owned();
    (child, printed, address)
}

const HOST: &str = "nqn.2026-11.com.example:good";

/// An allowed host creates a volume, writes it, and reads it back.
fn works(folder: &Path, address: &str, nqn: &str) {
    fs::write(folder.join("a"), content(50_000)).unwrap();
    let member = format!("{address},nqn={nqn}");
    for words in [&["create", "v"][..], &["write", "v", "a"], &["verify", "v", "a"]] {
        let args = [&["volume"], words, &["-m", &member, "-q", HOST, "-o", "json"]].concat();
        rio_in(folder, &args).ok();
    }
}

/// T28: with the usual limits, most of them are gone, and a host with rights works as if they were not
/// there.
#[test]
fn t28_an_allowed_host_works_beside_ten_thousand_half_open_connections() {
    let folder = tempfile::tempdir().unwrap();
    let (child, printed, address) = serve_with(folder.path(), "");
    let count = connections();
    let streams: Vec<TcpStream> = (0..count).map(|number| half_open(&address, number)).collect();
    works(folder.path(), &address, printed["subnqn"].as_str().unwrap());
    // Among the first, every one is closed: its place went to a later one.
    let limit = 1024;
    let displaced = count.saturating_sub(limit);
    for stream in &streams[..displaced.min(100)] {
        let mut rest = Vec::new();
        let mut stream = stream;
        // The end, or a reset because it had sent something.
        let _ = stream.read_to_end(&mut rest);
    }
    assert!(descriptors(&child) < limit + OTHER_DESCRIPTORS, "{}", descriptors(&child));
    signal(&child, "-TERM");
    let log = finish(child).stderr;
    let lines = log.lines().filter(|line| line.contains("gave way to another one")).count();
    assert!((1..200).contains(&lines), "{lines} lines");
}

/// T28: each costs next to nothing.
#[test]
fn t28_a_half_open_connection_costs_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    let keys = "connections = 20000\npending_connections = 20000\n\
                pending_connections_per_address = 20000";
    let (child, printed, address) = serve_with(folder.path(), keys);
    let nqn = printed["subnqn"].as_str().unwrap();
    works(folder.path(), &address, nqn);
    let (memory_before, descriptors_before) = (memory_bytes(&child), descriptors(&child));
    let (mut memory, mut open) = (0, 0);
    let mut streams = Vec::new();
    for number in 0..connections() {
        streams.push(half_open(&address, number));
        if number % 500 == 499 {
            // On a slow machine the first may have been closed for their time limit.
            memory = memory.max(memory_bytes(&child).saturating_sub(memory_before));
            open = open.max(descriptors(&child).saturating_sub(descriptors_before));
        }
    }
    assert!(open > 400, "{open} were open at once");
    println!("{} bytes each, {open} open at once", memory / open);
    assert!(memory / open < BYTES_MAX, "{memory} bytes for {open} connections");
    works_again(folder.path(), &address, nqn);
    signal(&child, "-TERM");
    finish(child);
}

fn works_again(folder: &Path, address: &str, nqn: &str) {
    let member = format!("{address},nqn={nqn}");
    let args = ["volume", "verify", "v", "a", "-m", &member, "-q", HOST, "-o", "json"];
    rio_in(folder, &args).ok();
}
