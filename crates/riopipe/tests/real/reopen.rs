//! Streams that have failed, and are reopened beside others that have not failed.

use std::fs;

use riopipe::{
    CreateOptions, EngineKind, MemberAddr, OpenOptions, Place, ReopenError, Seq, StreamOptions,
    Until, Volume, WaitError,
};

use crate::crash::{Node, Proxy, SOON, holds, open_soon, put, soon, volume_on};
use crate::site::{create_options, open_options};

/// A drive under one stream vanishes. Another stream, on the other drive, is not affected (P6, T22).
/// When the drive is back, the first stream is reopened.
#[test]
fn p6_t22_after_a_failed_flush_only_its_streams_stop_and_are_reopened() {
    let mut node = Node::with_drives(&["one", "two"]);
    let member = |nsid| MemberAddr { nsid, ..node.member() };
    let members = [member(1), member(2)];
    let options = CreateOptions { unit_blocks: 4, ..create_options() };
    Volume::create("v", &members, &options).unwrap();
    let (volume, _) = open_soon(&members, &open_options());
    // Blocks 0–3 lie on the first drive, 4–7 on the second, and so on.
    let mut failing = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut healthy = volume.stream(1, &StreamOptions::default()).unwrap();
    let kept = put(&mut failing, 0, 2, 1, Place::Fresh, true);
    failing.wait(Until::Durable(kept), Some(SOON)).unwrap();
    let lost = put(&mut failing, 2, 2, 2, Place::Fresh, false);
    failing.wait(Until::Complete(lost), Some(SOON)).unwrap();

    let (drive, copy) = (node.path("one"), node.path("copy"));
    fs::copy(&drive, &copy).unwrap();
    fs::remove_file(&drive).unwrap();
    let flushed = put(&mut failing, 8, 1, 3, Place::Fresh, true);
    let error = failing.wait(Until::Durable(flushed), Some(SOON)).unwrap_err();
    let WaitError::Failed(failure) = error else { panic!("{error}") };
    assert!(failure.to_string().contains("FLUSH"), "{failure}");
    assert!(failure.seq > kept);
    let seq = put(&mut healthy, 4, 2, 1, Place::Fresh, true);
    healthy.wait(Until::Durable(seq), Some(SOON)).unwrap();

    let error = failing.reopen().unwrap_err();
    assert!(error.to_string().contains("member 0"), "the drive is still missing: {error}");
    assert_eq!(failing.poll().unwrap_err(), failure, "the stream is still failed");
    let seq = put(&mut healthy, 6, 2, 2, Place::Fresh, true);
    healthy.wait(Until::Durable(seq), Some(SOON)).unwrap();

    node.kill();
    fs::rename(&copy, &drive).unwrap();
    // The copy takes the place of the drive for good.
    riopipe_target::drive_identity(&format!("file:{}", drive.display()), true).unwrap();
    node.start();
    let seq = put(&mut healthy, 12, 2, 3, Place::Fresh, true);
    healthy.wait(Until::Durable(seq), Some(SOON)).unwrap();
    let found = failing.reopen().unwrap();
    assert!(found.last >= kept && found.last < flushed, "{found}");
    assert_eq!(holds(&mut failing, 0, 2, 1), Some(true));
    assert_eq!(holds(&mut failing, 2, 2, 2), Some(found.last >= lost), "{found}");
    assert_eq!(holds(&mut failing, 8, 1, 3), Some(false), "{found}");
    for (lba, version) in [(4, 1), (6, 2), (12, 3)] {
        assert_eq!(holds(&mut failing, lba, 2, version), Some(true), "the other's are untouched");
    }
    let seq = put(&mut failing, 8, 1, 4, Place::Fresh, true);
    assert_eq!(seq, found.last.next());
    failing.wait(Until::Durable(seq), Some(SOON)).unwrap();
    assert_eq!(holds(&mut healthy, 8, 1, 4), Some(true));
    failing.close().unwrap();
    healthy.close().unwrap();
    volume.close().unwrap();
    let (volume, recovery) = open_soon(&members, &open_options());
    assert!(recovery.is_nothing(), "{recovery}");
    volume.close().unwrap();
}

#[test]
fn t8_reopening_after_a_take_over_names_the_new_owner() {
    let nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 0, 1, 1, Place::Fresh, false);
    stream.wait(Until::Complete(seq), Some(SOON)).unwrap();
    let take = OpenOptions { take_over: true, ..open_options() };
    let (later, _) = Volume::open("v", &members, &take).unwrap();
    soon("the stream fails", || {
        stream.poll().is_err() || {
            let mut buf = stream.buf(4096).unwrap();
            buf.fill(1);
            let _ = stream.group().write(1, buf, Place::Fresh).submit();
            false
        }
    });
    let text = stream.reopen().unwrap_err().to_string();
    let host = open_options().connect.host_nqn;
    let by = format!("taken over by {host}");
    assert!(text.contains(&by) && text.contains("open it again"), "{text}");
    assert!(!text.contains("zeroing"), "{text}");
    // The later owner loses its connections: now the target would send the lists to any initiator.
    drop(later);
    let text = stream.reopen().unwrap_err().to_string();
    assert!(text.contains("was taken over") && !text.contains("zeroing"), "{text}");
}

#[test]
fn a_healthy_stream_is_not_reopened() {
    let node = Node::new();
    let members = [node.member()];
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    put(&mut stream, 0, 1, 1, Place::Fresh, false);
    assert!(matches!(stream.reopen(), Err(ReopenError::Healthy { .. })));
    let last = stream.last();
    assert_eq!(last, Seq(1));
    stream.wait(Until::Durable(last), Some(SOON)).unwrap();
    stream.close().unwrap();
    volume.close().unwrap();
}

/// Without a log only flushed writes are known to be there. A group that was only complete, on a drive
/// with a volatile cache, does not become durable because the stream is reopened (P2).
#[test]
fn p2_a_reopened_stream_without_a_log_reports_only_durable_groups_durable() {
    let node = Node::new();
    Volume::create("v", &[node.member()], &create_options()).unwrap();
    let proxy = Proxy::to(node.addr());
    let options = OpenOptions { engine: Some(EngineKind::None), ..open_options() };
    let (volume, _) = open_soon(&[proxy.member()], &options);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 0, 1, 1, Place::Fresh, false);
    let before = stream.wait(Until::Complete(seq), Some(SOON)).unwrap();
    proxy.cut();
    let began = std::time::Instant::now();
    while stream.poll().is_ok() {
        assert!(began.elapsed() < SOON, "the stream does not fail");
        std::thread::yield_now();
    }
    let found = loop {
        match stream.reopen() {
            Ok(found) => break found,
            Err(error) => assert!(began.elapsed() < SOON, "{error}"),
        }
    };
    assert_eq!(before.durable, Seq::ZERO, "there was no FLUSH");
    assert_eq!(found.last, Seq::ZERO, "{found}");
    assert_eq!(stream.poll().unwrap().durable, Seq::ZERO);
    stream.close().unwrap();
    volume.close().unwrap();
}
