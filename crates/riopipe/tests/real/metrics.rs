//! An open volume tells what it is doing, and does not wait for who asks.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use riopipe::{MetricsError, StreamOptions, Until, Volume, VolumeStat};
use tempfile::TempDir;

use crate::site::{create_options, members, open_options, target, write};

/// The body of the page, with its HTTP status.
fn get(address: SocketAddr, path: &str) -> (String, String) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap();
    (status.to_owned(), body.to_owned())
}

#[test]
fn two_endpoints_tell_of_an_open_volume_and_of_its_end() {
    let log = TempDir::new().unwrap();
    let target = target(&["mem:16M", "mem:16M"], Some(&log));
    let members = members(&[&target], 2);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();

    let refused = volume.serve_metrics("0.0.0.0:0").unwrap_err();
    assert!(matches!(refused, MetricsError::Address(_)), "{refused}");
    assert!(refused.to_string().contains("give a loopback address"), "{refused}");
    let first = volume.serve_metrics("127.0.0.1:0").unwrap();
    let second = volume.serve_metrics("127.0.0.1:0").unwrap();
    assert_ne!(first.address(), second.address());
    let taken = volume.serve_metrics(&first.address().to_string()).unwrap_err();
    assert!(matches!(taken, MetricsError::Listen(_)), "{taken}");

    let idle = volume.stat();
    assert_eq!((idle.volume.as_str(), idle.engine.as_str()), ("v", "rio"));
    assert!(idle.streams.is_empty() && idle.opened_unix_ms > 0, "{idle:?}");
    let [link] = &idle.targets[..] else { panic!("{idle:?}") };
    assert_eq!(link.address, target.addresses()[0].to_string());
    assert_eq!((link.subnqn.as_str(), link.connected), (target.subnqn(), true));

    let options = StreamOptions { merge: false, ..StreamOptions::default() };
    let mut stream = volume.stream(2, &options).unwrap();
    let mut last = stream.last();
    for step in 0..2_000 {
        last = write(&mut stream, step % 1_000, 1, step, false);
    }
    let marks = stream.wait(Until::Durable(last), None).unwrap();
    let stat = volume.stat();
    assert_eq!(stat.streams.len(), 1);
    assert_eq!(
        (stat.streams[0].id, stat.streams[0].complete, stat.streams[0].durable),
        (2, marks.complete.0, marks.durable.0)
    );
    assert!(!stat.streams[0].failed);
    assert!(stat.stages.iter().any(|stage| stage.count > 0), "{stat:?}");
    assert!(stat.uptime_s > idle.uptime_s && stat.is_same_life(&idle));

    for endpoint in [&first, &second] {
        let (status, json) = get(endpoint.address(), "/stat");
        assert_eq!(status, "200");
        assert!(json.contains(&format!("\"schema\":\"{}\"", VolumeStat::SCHEMA)), "{json}");
        assert!(json.contains(&format!("\"complete\":{}", marks.complete.0)), "{json}");
        let (status, page) = get(endpoint.address(), "/metrics");
        assert_eq!(status, "200");
        let line = format!("rio_stream_durable_group{{stream=\"2\"}} {}\n", marks.durable.0);
        assert!(page.contains(&line), "no {line:?} in\n{page}");
        assert!(page.contains("rio_volume_info{volume=\"v\",engine=\"rio\""), "{page}");
    }
    let figures = volume.figures();
    assert!(figures.open_metrics().unwrap().contains("rio_stage_seconds_count{stage=\"wire\"}"));

    drop(second);
    stream.close().unwrap();
    assert!(volume.stat().streams.is_empty());
    volume.close().unwrap();
    // The background thread may still be looking around.
    let began = Instant::now();
    let (status, said) = loop {
        let answer = get(first.address(), "/metrics");
        if answer.0 != "200" {
            break answer;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "the endpoint keeps the volume open");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!((status.as_str(), said.as_str()), ("410", "the volume has been closed\n"));
    assert_eq!(get(first.address(), "/").0, "404");
    assert!(figures.json().is_err());

    // Given back: whoever comes next needs no permission of the endpoint.
    let (volume, recovery) = Volume::open("v", &members, &open_options()).unwrap();
    assert!(recovery.is_nothing(), "{recovery}");
    assert!(!volume.stat().is_same_life(&stat));
    volume.close().unwrap();
    target.stop().unwrap();
}
