//! Metrics of an open volume: the program that has it open serves them, and `rio volume stat` shows
//! them.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    net::TcpListener,
    path::Path,
    process::Child,
};

use riopipe::stages::Stage;
use serde_json::Value;

use crate::{
    serve::{serve, signal},
    site::{finish, keys, rio, rio_in, start_in, watch_until},
    stat::get,
};

/// `rio bench run` on targets of its own with the metrics of its volume, and their address.
fn bench(words: &str) -> (Child, String) {
    let args = format!(
        "bench run --drive mem:64M,lazy --log-size 1M --merge off --metrics 127.0.0.1:0 {words}"
    );
    let mut child = start_in(Path::new("/"), &args.split_whitespace().collect::<Vec<_>>());
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut printed = String::new();
    errors.read_line(&mut printed).unwrap();
    let address =
        printed.split_once("rio volume stat ").and_then(|(_, rest)| rest.split(',').next());
    let address = address.unwrap_or_else(|| panic!("no address in {printed:?}")).to_owned();
    child.stderr = Some(errors.into_inner());
    (child, address)
}

/// The volume's metrics, once it is open and has traced groups.
fn busy(address: &str, streams: usize) -> Value {
    loop {
        let done = rio(&["volume", "stat", address, "-o", "json"]);
        if done.code != 0 {
            done.failed(3, &[address, "not been opened yet"]);
            continue;
        }
        let stat = done.ok();
        let traced = |stage: &Value| stage["count"].as_u64() > Some(0);
        if stat["streams"].as_array().unwrap().len() == streams
            && stat["stages"].as_array().unwrap().iter().all(traced)
        {
            return stat;
        }
    }
}

#[test]
fn a_volume_serves_metrics_while_it_is_written_to() {
    let (child, address) = bench("--engine rio --depth 32 --threads 2 --time 60 --rounds 1");
    let stat = busy(&address, 2);
    assert_eq!(
        keys(&stat),
        "address engine generation is_interval opened_unix_ms sampled_one_in schema stages \
         streams targets uptime_s version volume"
    );
    assert_eq!(stat["schema"], "rio-volume-stat/1");
    assert_eq!((&stat["volume"], &stat["engine"]), (&"bench".into(), &"rio".into()));
    assert_eq!(stat["is_interval"], false);
    assert_eq!(keys(&stat["streams"][0]), "complete durable failed id");
    assert_eq!(keys(&stat["targets"][0]), "address connected subnqn");
    assert_eq!(stat["targets"][0]["connected"], true);
    let stages = stat["stages"].as_array().unwrap();
    let names: Vec<_> = stages.iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
    assert_eq!(names, Stage::INITIATOR.map(Stage::name));

    let page = get(&address, "/metrics");
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("# EOF\n"), "{page}");
    for part in [
        "rio_volume_info{volume=\"bench\",engine=\"rio\",generation=\"",
        "\nrio_uptime_seconds ",
        "\nrio_stream_complete_group{stream=\"0\"} ",
        "\nrio_stream_durable_group{stream=\"1\"} ",
        "\nrio_stream_failed{stream=\"1\"} 0\n",
        "\nrio_target_connected{target=\"127.0.0.1:",
        "\nrio_stage_seconds_count{stage=\"order_queue\"} ",
    ] {
        assert!(page.contains(part), "no {part:?} in\n{page}");
    }
    let json = get(&address, "/stat");
    let json: Value = serde_json::from_str(json.split_once("\r\n\r\n").unwrap().1).unwrap();
    let complete = |stat: &Value| stat["streams"][0]["complete"].as_u64().unwrap();
    assert!(complete(&json) >= complete(&stat), "{json}");
    assert!(get(&address, "/").contains("A Rio volume's metrics: /metrics"));

    let watcher = start_in(Path::new("/"), &["volume", "stat", &address, "--watch", "0.2"]);
    // It continues, and several readings see it.
    while complete(&busy(&address, 2)) < complete(&json) + 5_000 {}
    let parts = ["open for", "engine rio", "the last", "groups/s", "in order wait", "p99.9", " %"];
    let done = watch_until(watcher, |text| parts.iter().all(|part| text.contains(part)));
    assert_eq!(done.code, 0, "{done:?}");

    // A target is asked with another command, which the error names.
    rio(&["target", "stat", &address, "-o", "json"])
        .failed(3, &["not a Rio target's --metrics", "a volume", "rio volume stat"]);
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 130);
    rio(&["volume", "stat", &address, "-o", "json"])
        .failed(3, &["no program listens", "bench run"]);
}

/// Each run opens the volume again; a watch shows one after the other.
#[test]
fn all_runs_serve_their_metrics_at_the_same_address() {
    let (child, address) = bench("--engine rio,none --depth 8 --time 0.4 --rounds 3");
    let watch = ["volume", "stat", &address, "--watch", "0.05", "-o", "json"];
    let mut watcher = start_in(Path::new("/"), &watch);
    // Read at once: the output is larger than a pipe.
    let printed = watcher.stdout.take().unwrap();
    let printed = std::thread::spawn(|| std::io::read_to_string(printed).unwrap());
    let measured = finish(child);
    assert_eq!(measured.code, 0, "{measured:?}");
    // It ends when there is no server any more, or with the server that it was asking.
    let text = finish(watcher).failed(3, &[]);
    let ends = ["no program listens", "it closed the connection"];
    assert!(ends.iter().any(|end| text.contains(end)), "{text}");
    let printed = printed.join().unwrap();
    let runs: BTreeSet<(u64, String)> = serde_json::Deserializer::from_str(&printed)
        .into_iter::<Value>()
        .map(|stat| {
            let stat = stat.unwrap();
            (stat["generation"].as_u64().unwrap(), stat["engine"].to_string())
        })
        .collect();
    assert!(runs.len() > 1, "{runs:?}: {printed}");
}

#[test]
fn invalid_addresses_are_reported() {
    let stat = |address: &str| rio(&["volume", "stat", address, "-o", "json"]);
    stat("9421").failed(2, &["no address", "rio volume stat"]);
    let closed_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    stat(&closed_port).failed(3, &["no program listens", &closed_port, "stat_source"]);

    let folder = tempfile::tempdir().unwrap();
    let (target, printed) =
        serve(folder.path(), &["--drive", "mem:1M", "--metrics", "127.0.0.1:0"]);
    let metrics = printed["metrics"].as_str().unwrap();
    let command = format!("rio target stat {metrics}");
    stat(metrics)
        .failed(3, &["not a Rio volume's metrics", "a target serves metrics there", &command]);
    let bench = |metrics: &str| {
        let words = "bench run --time 0.05 --rounds 1 -o json --drive mem:16M,lazy --metrics";
        rio_in(folder.path(), &words.split(' ').chain([metrics]).collect::<Vec<_>>())
    };
    bench("0.0.0.0:0").failed(2, &["other machines", "127.0.0.1:9420"]);
    bench("127.0.0.1:x").failed(2, &["no address"]);
    bench(metrics).failed(7, &["the port is taken"]);
    signal(&target, "-TERM");
    assert_eq!(finish(target).code, 0);
}
