//! The times of stages: a target reports them, and the program shows them.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::Instant,
};

use riopipe::{CreateOptions, OpenOptions, Place, StreamOptions, Until, Volume, stages::Stage};
use serde_json::Value;

use crate::{
    serve::{serve, signal},
    site::{finish, keys, rio, rio_in, start_in, watch_until},
};

const GROUPS: u64 = 5_000;

/// Writes blocks through an ordered volume on the target at `address`. Returns the stages that the
/// initiator has traced: number of writes and total time.
fn write(address: &str) -> Vec<(Stage, u64, u64)> {
    let members = [address.parse().unwrap()];
    Volume::create("v", &members, &CreateOptions::default()).unwrap();
    let (volume, _) = Volume::open("v", &members, &OpenOptions::default()).unwrap();
    // Merged, they would be fewer requests.
    let options = StreamOptions { merge: false, ..StreamOptions::default() };
    let mut stream = volume.stream(0, &options).unwrap();
    for group in 0..GROUPS {
        while stream.last().0 - stream.poll().unwrap().complete.0 >= 64 {
            stream.wait(Until::Complete(riopipe::Seq(stream.last().0 - 32)), None).unwrap();
        }
        let block = stream.buf(4096).unwrap();
        stream.group().write(group % 1000, block, Place::InPlace).submit().unwrap();
    }
    stream.wait(Until::Durable(stream.last()), None).unwrap();
    stream.close().unwrap();
    let seen = volume.stages();
    volume.close().unwrap();
    seen.into_iter().map(|(stage, seen)| (stage, seen.count(), seen.sum())).collect()
}

/// The whole answer to an HTTP request.
fn http(address: &str, request: &str) -> String {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

pub(crate) fn get(address: &str, path: &str) -> String {
    http(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n"))
}

#[test]
fn every_stage_of_an_ordered_write_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (child, printed) = serve(
        folder.path(),
        &["--drive", "mem:16M", "--log", "file:l,size=2M", "--metrics", "127.0.0.1:0"],
    );
    let address = printed["metrics"].as_str().unwrap();
    let stat = || rio(&["target", "stat", address, "-o", "json"]).ok();

    let idle = stat();
    assert_eq!(
        keys(&idle),
        "address connections counters hosts is_interval log namespaces reactors sampled_one_in \
         schema stages started_unix_ms subnqn uptime_s version volumes"
    );
    assert_eq!(idle["schema"], "rio-target-stat/1");
    assert_eq!((&idle["counters"]["writes"], &idle["connections"]), (&0.into(), &0.into()));
    let text = rio(&["target", "stat", address]);
    assert_eq!(text.code, 0, "{text:?}");
    assert!(text.stdout.contains("one in 256"), "{text:?}");

    let initiator = write(printed["addresses"][0].as_str().unwrap());
    let samples = initiator[0].1;
    assert!(samples > 0, "{initiator:?}");
    assert!(initiator.iter().all(|(_, count, _)| *count == samples), "{initiator:?}");
    let spent = |stage| initiator.iter().find(|found| found.0 == stage).unwrap().2;
    for stage in [Stage::Submit, Stage::OrderQueue, Stage::Wire] {
        assert!(spent(stage) > 0, "{initiator:?}");
    }

    let now = stat();
    assert_eq!(idle["log"]["bytes"], 2 << 20);
    let log = &now["log"];
    let volume = &log["volumes"][0];
    assert_eq!(keys(volume), "bytes fullest_stream_slots slots stream_slots used_slots volume");
    let used = log["used_bytes"].as_u64().unwrap();
    assert_eq!(used, volume["bytes"].as_u64().unwrap() + 8192);

    let stages = now["stages"].as_array().unwrap();
    let names: Vec<&str> = stages.iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
    assert_eq!(names, ["gate", "log_append", "device", "persist", "completion"]);
    let samples = stages[0]["count"].as_u64().unwrap();
    // The first ones, and then one in 256: neither all nor few.
    assert!((64..500).contains(&samples), "{now}");
    let mut shares = 0.0;
    for stage in stages {
        let of = |key: &str| stage[key].as_u64().unwrap();
        assert_eq!(
            keys(stage),
            "buckets count max_ns p50_ns p999_ns p99_ns share stage sum_ns",
            "{now}"
        );
        assert_eq!(of("count"), samples);
        assert!(of("p50_ns") <= of("p99_ns") && of("p99_ns") <= of("p999_ns"), "{stage}");
        assert!(of("p999_ns") <= of("max_ns") && of("max_ns") <= of("sum_ns"), "{stage}");
        let buckets = stage["buckets"].as_array().unwrap();
        let in_buckets: u64 = buckets.iter().map(|bucket| bucket[1].as_u64().unwrap()).sum();
        assert_eq!(in_buckets, samples);
        shares += stage["share"].as_f64().unwrap();
    }
    assert!((shares - 1.0).abs() < 1e-6, "{now}");
    for stage in ["log_append", "device", "persist", "completion"] {
        let found = stages.iter().find(|found| found["stage"] == stage).unwrap();
        assert!(found["sum_ns"].as_u64() > Some(0), "{now}");
    }
    let counter = |name: &str| now["counters"][name].as_u64().unwrap();
    // The last flush is a request of its own.
    assert!(counter("ordered_requests") >= GROUPS, "{now}");
    assert!(counter("writes") >= GROUPS && counter("written_bytes") >= GROUPS * 4096, "{now}");
    assert!(counter("connections_accepted") > 1 && counter("claims") > 0, "{now}");
    assert_eq!((counter("streams_failed"), counter("drive_errors")), (0, 0), "{now}");

    let parts = |key: &str| now[key].as_array().unwrap().clone();
    let (namespaces, volumes, hosts) = (parts("namespaces"), parts("volumes"), parts("hosts"));
    assert_eq!((namespaces.len(), volumes.len(), hosts.len()), (1, 1, 1), "{now}");
    assert_eq!(keys(&namespaces[0]), "counters name");
    assert_eq!(keys(&volumes[0]), "connections counters name");
    for part in [&namespaces[0], &volumes[0]] {
        assert_eq!(part["counters"]["written_bytes"], counter("written_bytes"), "{now}");
    }
    let of_host = |name: &str| hosts[0]["counters"][name].as_u64().unwrap();
    assert!(hosts[0]["name"].as_str().unwrap().starts_with("nqn."), "{now}");
    assert_eq!(of_host("connections_accepted"), counter("connections_accepted"), "{now}");
    assert!(of_host("received_bytes") >= GROUPS * 4096 && of_host("sent_bytes") > 0, "{now}");
    assert_eq!((&hosts[0]["connections"], of_host("problems")), (&now["connections"], 0), "{now}");
    assert!(get(address, "/healthz").ends_with("\r\n\r\nok\n"));

    let text = rio(&["target", "stat", address]).stdout;
    for word in [
        "log append",
        "p99.9",
        "written bytes",
        "per s",
        " %",
        "namespace 1 ",
        "volume ",
        "host nqn.",
    ] {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
    prometheus(address, samples);

    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);
    rio(&["target", "stat", address, "-o", "json"]).failed(3, &["no program listens", "--metrics"]);
}

/// The page that Prometheus reads from the same target.
fn prometheus(address: &str, samples: u64) {
    let page = get(address, "/metrics");
    let (head, body) = page.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("Content-Type: application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    assert!(body.ends_with("# EOF\n"), "{body}");
    for stage in Stage::TARGET {
        let line = format!("rio_stage_seconds_count{{stage=\"{}\"}} {samples}\n", stage.name());
        assert!(body.contains(&line), "no {line:?} in\n{body}");
    }
    let json: Value = {
        let page = get(address, "/stat?pretty");
        serde_json::from_str(page.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    let writes = json["counters"]["writes"].as_u64().unwrap();
    assert!(body.contains(&format!("rio_writes_total {writes}\n")), "{body}");

    let only_head = http(address, "HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    assert!(only_head.starts_with("HTTP/1.1 200") && only_head.ends_with("\r\n\r\n"));
    assert!(get(address, "/").starts_with("HTTP/1.1 404 "));
    let posted = http(address, "POST /stat HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}");
    assert!(posted.starts_with("HTTP/1.1 405 ") && posted.contains("Allow: GET"), "{posted}");
    assert!(http(address, "what?\r\n\r\n").starts_with("HTTP/1.1 400 "));
    let long = format!("GET /stat HTTP/1.1\r\nCookie: {}\r\n\r\n", "x".repeat(10_000));
    assert!(http(address, &long).starts_with("HTTP/1.1 431 "));
    // An idle client does not delay others.
    let idle = TcpStream::connect(address).unwrap();
    assert!(get(address, "/stat").starts_with("HTTP/1.1 200 "));
    drop(idle);
}

#[test]
fn watching_shows_the_difference_since_the_last_reading() {
    let folder = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let (child, printed) = serve(folder.path(), &["--drive", "mem:1M", "--metrics", "[::1]:0"]);
    let address = printed["metrics"].as_str().unwrap();
    let watcher =
        start_in(folder.path(), &["target", "stat", address, "--watch", "0.05", "-o", "json"]);
    // It asks over HTTP, which is not a connection of the target.
    while !get(address, "/stat").contains("\"connections\":0") {}
    let intervals = |text: &str| text.matches("\"is_interval\": true").count();
    let done = watch_until(watcher, |text| intervals(text) > 2);
    assert_eq!(done.code, 0, "{done:?}");
    let all: Vec<Value> = serde_json::Deserializer::from_str(&done.stdout)
        .into_iter()
        .collect::<Result<_, _>>()
        .unwrap();
    assert!(all.len() > 2, "{done:?}");
    assert_eq!(all[0]["is_interval"], false);
    assert!(all[1..].iter().all(|stat| stat["is_interval"] == true), "{done:?}");
    // The first one is since the start, each other since the one before.
    let of_all: f64 = all.iter().map(|stat| stat["uptime_s"].as_f64().unwrap()).sum();
    assert!(of_all <= begun.elapsed().as_secs_f64(), "{done:?}");
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);
}

#[test]
fn invalid_addresses_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let of = |words: &[&str]| rio_in(folder.path(), &[words, &["-o", "json"]].concat());
    for (metrics, words) in [
        ("0.0.0.0:0", ["metrics", "other machines", "127.0.0.1:9420"]),
        ("127.0.0.1:x", ["metrics", "no address", "127.0.0.1:9420"]),
    ] {
        of(&["target", "serve", "--drive", "mem:1M", "--metrics", metrics]).failed(2, &words);
        let checked = of(&["target", "check", "--drive", "mem:1M", "--metrics", metrics]);
        checked.failed(2, &["mistake"]);
        assert_eq!(checked.json()["problems"][0]["place"], "metrics");
    }
    // Its listener is gone at once.
    let closed_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    of(&["target", "stat", "9420"]).failed(2, &["no address", "a port without a host"]);

    // The drives' port, another HTTP server, and a closed port.
    let (child, printed) = serve(folder.path(), &["--drive", "mem:1M"]);
    assert!(printed.get("metrics").is_none(), "{printed}");
    let drives = printed["addresses"][0].as_str().unwrap();
    of(&["target", "stat", drives]).failed(3, &["not a Rio target's --metrics", drives]);
    signal(&child, "-TERM");
    finish(child);
    of(&["target", "stat", &closed_port]).failed(3, &["no program listens", &closed_port]);

    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    for (answer, word) in [
        ("HTTP/1.1 404 Not Found\r\n\r\n", "HTTP status 404"),
        ("HTTP/1.1 200 OK\r\n\r\n<html>", "can't be understood"),
        ("220 mail.example.com\r\n", "doesn't speak HTTP"),
        ("", "closed the connection"),
    ] {
        let asking = start_in(folder.path(), &["target", "stat", &address, "-o", "json"]);
        let (mut socket, _) = other.accept().unwrap();
        let mut asked = Vec::new();
        while !asked.ends_with(b"\r\n\r\n") {
            let mut some = [0; 1024];
            let read = socket.read(&mut some).unwrap();
            asked.extend(&some[..read]);
        }
        socket.write_all(answer.as_bytes()).unwrap();
        drop(socket);
        finish(asking).failed(3, &["not a Rio target's --metrics", word]);
    }
}

/// Both sides of a measurement in one process, where both can be read.
#[test]
fn bench_shows_both_sides() {
    let words = "bench run --engine rio,none --depth 32 --time 0.3 --rounds 2 --stages \
                 --drive mem:64M,lazy --log-size 1M";
    let args: Vec<_> = words.split_whitespace().collect();
    let json = rio(&[&args[..], &["-o", "json"]].concat()).ok();
    let [rio_, none] = &json["stages"].as_array().unwrap()[..] else { panic!("{json}") };
    let count = |stages: &Value| stages[0]["count"].as_u64().unwrap();
    assert_eq!((&rio_["engine"], &rio_["queue_depth"]), (&"rio".into(), &32.into()));
    assert!(count(&rio_["initiator"]) > 0 && count(&rio_["target"]) > 0, "{json}");
    // The target sees no order, so it traces nothing.
    assert!(count(&none["initiator"]) > 0 && count(&none["target"]) == 0, "{json}");
    let text = rio(&args).stdout;
    for head in ["rio at depth 32: initiator", "rio at depth 32: targets", "none at depth 32: init"]
    {
        assert!(text.contains(head), "no {head:?} in {text}");
    }
}
