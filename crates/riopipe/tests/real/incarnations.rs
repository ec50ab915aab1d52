//! Streams and volumes that end without a close and are opened again, or that conflict.

use std::time::Duration;

use riopipe::{
    BLOCK_BYTES, ConnectOptions, CreateOptions, EngineKind, OpenOptions, Place, StreamOptions,
    Until, Volume,
};
use tempfile::TempDir;

use crate::crash::impatient;
use crate::site::{create_options, fill, members, open_options, target, write};

fn synchronous() -> CreateOptions {
    CreateOptions { engine: Some(EngineKind::Sync), ..create_options() }
}

#[test]
fn t8_an_earlier_incarnation_of_a_stream_never_writes_over_a_later_one() {
    for round in 0..6u64 {
        let target = target(&["ssd:flash,size=16M"], None);
        let members = members(&[&target], 1);
        Volume::create("v", &members, &synchronous()).unwrap();
        let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
        let options = StreamOptions { queue_depth: 240, ..StreamOptions::default() };
        // Another stream's queue is free when this stream is opened again. This stream must not use
        // that queue.
        let zero = volume.stream(0, &options).unwrap();
        let mut stream = volume.stream(1, &options).unwrap();
        zero.close().unwrap();
        let bufs: Vec<_> = (0..220)
            .map(|_| {
                let mut buf = stream.buf(BLOCK_BYTES).unwrap();
                fill(&mut buf, 500, 1);
                buf
            })
            .collect();
        let group = bufs.into_iter().fold(stream.group(), |g, b| g.write(500, b, Place::InPlace));
        group.submit().unwrap();
        for _ in 0..=round % 2 {
            stream.poll().unwrap();
        }
        drop(stream);
        let mut stream = volume.stream(1, &options).unwrap();
        let seq = write(&mut stream, 500, 1, 2, true);
        stream.wait(Until::Durable(seq), None).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        crate::site::check(&mut stream, 500, 1, 2);
        stream.close().unwrap();
        volume.close().unwrap();
        target.stop().unwrap();
    }
}

#[test]
fn a_stream_that_is_reopened_at_once_is_open_once() {
    let target = target(&["ssd:flash,size=16M"], None);
    let members = members(&[&target], 1);
    Volume::create("v", &members, &synchronous()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    for _ in 0..10 {
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        let buf = stream.buf(40 * BLOCK_BYTES).unwrap();
        stream.group().write(0, buf, Place::InPlace).submit().unwrap();
        stream.poll().unwrap();
        drop(stream); // its writes are still at the drive
        let stream = volume.stream(0, &StreamOptions::default()).unwrap();
        let again = volume.stream(0, &StreamOptions::default()).unwrap_err();
        assert!(again.to_string().contains("open already"), "{again}");
        drop(stream);
    }
    let _open = volume.stream(0, &StreamOptions::default()).unwrap();
    assert!(volume.close().unwrap_err().to_string().contains("still open"));
}

#[test]
fn p6_each_read_of_a_failed_stream_returns_the_failure() {
    let logs = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let targets = [target(&["mem:16M"], Some(&logs[0])), target(&["mem:16M"], Some(&logs[1]))];
    let members = members(&[&targets[0], &targets[1]], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 40, 1, true);
    stream.wait(Until::Durable(seq), None).unwrap();
    let [one, two] = targets;
    two.stop().unwrap();
    while stream.poll().is_ok() {}
    let failure = stream.poll().unwrap_err();
    let mut page = vec![0; 40 * BLOCK_BYTES];
    for _ in 0..3 {
        assert_eq!(stream.read(0, &mut page, None).unwrap_err().to_string(), failure.to_string());
    }
    one.stop().unwrap();
}

#[test]
fn a_target_that_stops_during_a_read_ends_it() {
    for round in 0..6u64 {
        let logs = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let targets =
            [target(&["ssd:flash,size=16M"], Some(&logs[0])), target(&["mem:16M"], Some(&logs[1]))];
        let members = members(&[&targets[0], &targets[1]], 1);
        Volume::create("v", &members, &create_options()).unwrap();
        let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        let [one, two] = targets;
        let stopper = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(700 * round));
            two.stop().unwrap();
        });
        let mut page = vec![0; 4000 * BLOCK_BYTES];
        while stream.read(0, &mut page, None).is_ok() {}
        // Bytes that still come from the other target belong to no read.
        for _ in 0..100 {
            assert!(stream.poll().is_err());
            std::thread::sleep(Duration::from_micros(50));
        }
        stopper.join().unwrap();
        one.stop().unwrap();
    }
}

#[test]
fn of_two_creators_at_most_one_succeeds() {
    for _ in 0..10 {
        let target = target(&["mem:16M"], None);
        let members = members(&[&target], 1);
        let start = std::sync::Barrier::new(2);
        let create = |name: &str| {
            start.wait();
            Volume::create(name, &members, &synchronous()).is_ok()
        };
        let made = std::thread::scope(|scope| {
            let (create_a, create_b) = (&create, &create);
            let other = scope.spawn(move || create_a("a"));
            usize::from(create_b("b")) + usize::from(other.join().unwrap())
        });
        assert!(made <= 1, "both succeeded, on one drive, without force");
    }
}

#[test]
fn a_drive_that_has_shrunk_is_refused() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("drive");
    let spec = |size: &str| format!("file:{}{size}", path.display());
    let first = target(&[&spec(",size=32M")], None);
    let name = first.subnqn().to_owned();
    Volume::create("v", &members(&[&first], 1), &synchronous()).unwrap();
    first.stop().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(16 << 20).unwrap();
    let second = crate::site::target_named(&name, &[&spec("")], None);
    let error = Volume::open("v", &members(&[&second], 1), &open_options()).unwrap_err();
    assert!(error.to_string().contains("fewer"), "{error}");
    second.stop().unwrap();
}

#[test]
fn an_endless_timeout_is_a_timeout() {
    let log = TempDir::new().unwrap();
    let target = target(&["mem:16M"], Some(&log));
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let connect = ConnectOptions { timeout: Duration::MAX, ..ConnectOptions::default() };
    let options = OpenOptions { connect, ..OpenOptions::default() };
    let (volume, _) = Volume::open("v", &members, &options).unwrap();
    let options = StreamOptions { timeout: Duration::MAX, ..StreamOptions::default() };
    let mut stream = volume.stream(0, &options).unwrap();
    let seq = write(&mut stream, 0, 1, 1, true);
    stream.wait(Until::Durable(seq), Some(Duration::MAX)).unwrap();
    stream.close().unwrap();
    volume.close().unwrap();
    target.stop().unwrap();
}

/// An owner that dies while idle, with all groups durable and delivered, leaves nothing to recover
/// (T1: an idle stream sends its mark alone).
#[test]
fn t1_an_idle_owner_leaves_a_log_at_rest() {
    let log = TempDir::new().unwrap();
    let target = target(&["ssd:flash,size=16M"], Some(&log));
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 1, 1, true);
    stream.wait(Until::Durable(seq), None).unwrap();
    for _ in 0..40 {
        std::thread::sleep(Duration::from_millis(5));
        stream.poll().unwrap();
    }
    drop(stream);
    drop(volume);
    let options = OpenOptions { take_over: true, ..open_options() };
    let (volume, recovery) = Volume::open("v", &members, &options).unwrap();
    assert!(recovery.streams[0].last >= seq);
    volume.close().unwrap();
    target.stop().unwrap();
}

/// A lost log never counts as one with nothing to undo; it is given up only with an option.
#[test]
fn t19_a_lost_log_is_given_up_only_on_demand() {
    let (old, new) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let dir = TempDir::new().unwrap();
    let spec = format!("file:{}/drive,size=16M", dir.path().display());
    let first = target(&[&spec], Some(&old));
    let name = first.subnqn().to_owned();
    Volume::create("v", &members(&[&first], 1), &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members(&[&first], 1), &open_options()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    write(&mut stream, 7, 1, 1, false);
    stream.close().unwrap();
    volume.close().unwrap();
    first.stop().unwrap();

    let second = crate::site::target_named(&name, &[&spec], Some(&new));
    let members = members(&[&second], 1);
    let error = Volume::open("v", &members, &open_options()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("another ordering log") && text.contains("accept_lost_log"), "{text}");
    let accept = OpenOptions { accept_lost_log: true, ..open_options() };
    let (volume, _) = Volume::open("v", &members, &accept).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    crate::site::check(&mut stream, 7, 1, 1);
    write(&mut stream, 8, 1, 2, false);
    stream.close().unwrap();
    volume.close().unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    volume.close().unwrap();
    second.stop().unwrap();
}

#[test]
fn a_volume_made_anew_shows_nothing_of_the_old_one() {
    let log = TempDir::new().unwrap();
    let target = target(&["mem:16M"], Some(&log));
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    write(&mut stream, 0, 1, 1, false);
    stream.close().unwrap();
    volume.close().unwrap();
    let force = CreateOptions { force: true, ..create_options() };
    Volume::create("w", &members, &force).unwrap();
    let (volume, _) = Volume::open("w", &members, &open_options()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut block = vec![1; BLOCK_BYTES];
    stream.read(0, &mut block, None).unwrap();
    assert!(block.iter().all(|byte| *byte == 0));
    stream.close().unwrap();
    volume.close().unwrap();
    target.stop().unwrap();
}
