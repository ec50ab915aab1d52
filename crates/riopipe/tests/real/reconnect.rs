//! Targets that become unreachable and come back, connections that break, owners that are not calling.

use std::time::Duration;

use riopipe::{
    CreateOptions, EngineKind, OpenOptions, Place, Seq, StreamOptions, Until, Volume, WaitError,
};

use crate::crash::{
    Node, Proxy, SOON, holds, impatient, open_soon, put, soon, volume_on, with_loss_timeout,
};
use crate::site::{connect, create_options, open_options};

/// Nothing is lost, although nothing was flushed when the target died: all of it is replayed.
#[test]
fn p7_a_target_that_dies_and_comes_back_costs_time_not_data() {
    let mut nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut group = 0;
    for round in 0..3 {
        for _ in 0..50 {
            group += 1;
            put(&mut stream, 3 * group, 3, group, Place::Fresh, false);
        }
        stream.poll().unwrap();
        nodes[round % 2].kill();
        // Groups that are submitted meanwhile wait.
        for _ in 0..20 {
            group += 1;
            put(&mut stream, 3 * group, 3, group, Place::Fresh, false);
            stream.poll().unwrap();
        }
        nodes[round % 2].start();
        let seq = put(&mut stream, 3 * group + 3, 3, group + 1, Place::Fresh, true);
        group += 1;
        stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    }
    assert!(stream.replayed() > 0);
    for group in 1..=group {
        assert_eq!(holds(&mut stream, 3 * group, 3, group), Some(true), "group {group}");
    }
    stream.close().unwrap();
    volume.close().unwrap();
    let (volume, recovery) = open_soon(&members, &open_options());
    assert!(recovery.is_nothing(), "{recovery}");
    volume.close().unwrap();
}

/// Both sides stay alive; only the connections break, again and again, while writes are in flight.
#[test]
fn p7_broken_connections_are_made_again() {
    let node = Node::new();
    let proxy = Proxy::to(node.addr());
    let members = [proxy.member()];
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    for group in 1..=200 {
        put(&mut stream, group, 1, group, Place::Fresh, group % 17 == 0);
        stream.poll().unwrap();
        if group % 40 == 0 {
            proxy.cut();
        }
        if group % 70 == 0 {
            let mut block = [0; 4096];
            stream.read(group, &mut block, None).unwrap();
            assert_eq!(block[..8], group.to_le_bytes(), "reads wait for the replay (P9)");
        }
    }
    let seq = put(&mut stream, 201, 1, 201, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    for group in 1..=201 {
        assert_eq!(holds(&mut stream, group, 1, group), Some(true), "group {group}");
    }
    stream.close().unwrap();
    volume.close().unwrap();
}

/// While the owner is not calling, the background thread reconnects the stream.
#[test]
fn a_stream_that_is_not_polled_comes_back_too() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let watch = stream.watch();
    let mut last = Seq::ZERO;
    for group in 1..=20 {
        last = put(&mut stream, group, 1, group, Place::Fresh, group == 20);
    }
    nodes[0].kill();
    nodes[0].start();
    soon("the groups become durable without a call of the owner", || watch.marks().durable >= last);
    for group in 1..=20 {
        assert_eq!(holds(&mut stream, group, 1, group), Some(true), "group {group}");
    }
    stream.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn t1_an_idle_stream_leaves_its_log_at_rest_without_being_polled() {
    let nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let watch = stream.watch();
    // Submitted, but not sent, and without a FLUSH.
    let seq = put(&mut stream, 5, 1, 1, Place::Fresh, false);
    soon("the group is flushed in the background", || watch.marks().durable >= seq);
    let live = || Volume::inspect(&members, &connect()).unwrap().members[0].unrecovered;
    soon("the log drops its entry", || live() == 0);
    assert_eq!(stream.poll().unwrap().durable, stream.last());
    // The owner calls again, and the stream works.
    let seq = put(&mut stream, 6, 1, 2, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    stream.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn p6_a_target_that_is_unreachable_too_long_is_given_up_and_its_stream_can_be_reopened() {
    let mut nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    let options = with_loss_timeout(Duration::from_millis(300));
    let (volume, _) = open_soon(&members, &options);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 4, 8, 1, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    nodes[1].kill();
    put(&mut stream, 100, 40, 2, Place::Fresh, false);
    let error = stream.wait(Until::Durable(stream.last()), Some(SOON)).unwrap_err();
    let WaitError::Failed(failure) = error else { panic!("{error}") };
    let text = failure.to_string();
    assert!(text.contains(&nodes[1].addr().port().to_string()), "{text}");
    assert!(stream.watch().has_failed());
    let stat = volume.stat();
    assert!(stat.streams[0].failed, "{stat:?}");
    assert_eq!(stat.targets.iter().map(|t| t.connected).collect::<Vec<_>>(), [true, false]);
    let error = stream.reopen().unwrap_err().to_string();
    let (address, unreachable) = (nodes[1].addr().to_string(), "is unreachable");
    assert!(error.contains(unreachable) && error.contains(&address), "{error}");
    nodes[1].start();
    soon("the target is reached again, and the stream reopened", || stream.reopen().is_ok());
    assert!(stream.recovery().unwrap().last >= seq);
    assert!(!stream.watch().has_failed());
    assert_eq!(holds(&mut stream, 4, 8, 1), Some(true));
    assert_eq!(holds(&mut stream, 100, 40, 2), Some(false), "undone on the target that stayed");
    let seq = put(&mut stream, 100, 40, 3, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    stream.close().unwrap();
    volume.close().unwrap();
}

/// The loss timeout is the whole time, also where another limit is longer.
#[test]
fn opening_a_stream_and_closing_the_volume_wait_for_a_lost_target_no_longer_than_the_loss_timeout()
{
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let mut options = with_loss_timeout(Duration::from_millis(200));
    let hours = Duration::from_secs(36_000);
    options.connect.timeout = hours;
    let (volume, _) = open_soon(&members, &options);
    nodes[0].kill();
    let stream_options = StreamOptions { timeout: hours, ..StreamOptions::default() };
    let error = volume.stream(0, &stream_options).unwrap_err();
    assert!(error.is_retryable() && error.to_string().contains("refused"), "{error}");
    let not_closed = volume.close_within(hours).unwrap_err();
    assert!(not_closed.is_retryable(), "{not_closed}");
    let volume = not_closed.back;
    nodes[0].start();
    soon("the target is reached again", || volume.stream(0, &stream_options).is_ok());
}

/// If the target is unreachable when the volume is closed, the reason is not a missing keep-alive: the
/// connection ended before.
#[test]
fn a_close_while_the_target_is_unreachable_does_not_blame_the_keep_alive() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let mut options = open_options();
    options.connect.keep_alive = Duration::from_millis(300);
    let (volume, _) = open_soon(&members, &options);
    nodes[0].kill();
    std::thread::sleep(Duration::from_secs(1));
    let error = volume.close().unwrap_err().to_string();
    assert!(!error.contains("keep-alive ran out"), "{error}");
}

/// With a loss timeout of zero, a lost target is a failure at once, and is not tried again.
#[test]
fn p6_without_time_a_lost_target_is_a_failure_at_once() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &impatient());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    nodes[0].kill();
    nodes[0].start();
    let mut failed = false;
    for group in 1..=100 {
        let buf = stream.buf(4096).unwrap();
        failed |= stream.group().write(group, buf, Place::Fresh).submit().is_err();
        failed |= stream.wait(Until::Idle, Some(SOON)).is_err();
    }
    assert!(failed);
}

#[test]
fn t8_an_owner_fenced_while_its_connections_are_broken_gets_the_reason_and_writes_nothing() {
    let node = Node::new();
    let proxy = Proxy::to(node.addr());
    let direct = [node.member()];
    Volume::create("v", &direct, &create_options()).unwrap();
    let (first, _) = open_soon(&[proxy.member()], &open_options());
    let mut stale = first.stream(0, &StreamOptions::default()).unwrap();
    let mut idle = first.stream(1, &StreamOptions::default()).unwrap();
    let seq = put(&mut stale, 0, 1, 1, Place::Fresh, true);
    stale.wait(Until::Durable(seq), Some(SOON)).unwrap();
    proxy.shut();
    // Submitted while the target is unreachable.
    put(&mut stale, 1, 1, 2, Place::Fresh, false);
    let options = OpenOptions { take_over: true, ..open_options() };
    let (second, recovery) = open_soon(&direct, &options);
    assert_eq!(recovery.stream(0).unwrap().last, seq);
    let mut stream = second.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 1, 1, 3, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    proxy.open();
    let error = stale.wait(Until::Idle, Some(SOON)).unwrap_err();
    assert!(error.to_string().contains("newer owner"), "{error}");
    soon("an idle stream gets the reason, too", || idle.poll().is_err());
    let error = stale.reopen().unwrap_err();
    assert!(error.to_string().contains("newer owner"), "{error}");
    assert_eq!(holds(&mut stream, 1, 1, 3), Some(true));
    stream.close().unwrap();
    second.close().unwrap();
}

/// A target without a log of the volume does not know the owners after a restart. The labels have
/// the generation of the last one.
#[test]
fn t8_without_a_log_a_fenced_owner_finds_the_newer_one_in_the_labels() {
    let mut node = Node::new();
    let proxy = Proxy::to(node.addr());
    let direct = [node.member()];
    let synchronous = CreateOptions { engine: Some(EngineKind::Sync), ..create_options() };
    Volume::create("v", &direct, &synchronous).unwrap();
    let (first, _) = open_soon(&[proxy.member()], &open_options());
    let mut stale = first.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stale, 0, 1, 1, Place::Fresh, true);
    stale.wait(Until::Durable(seq), Some(SOON)).unwrap();
    proxy.shut();
    let options = OpenOptions { take_over: true, ..open_options() };
    let (second, _) = open_soon(&direct, &options);
    second.close().unwrap();
    node.kill();
    node.start();
    proxy.open();
    soon("the stream fails", || stale.poll().is_err());
    soon("the error names the newer owner", || match stale.reopen() {
        Ok(_) => panic!("a fenced owner writes again"),
        Err(error) => error.to_string().contains("newer owner"),
    });
    let (third, _) = open_soon(&direct, &open_options());
    third.close().unwrap();
}

/// A drive that comes back empty is not accepted as the one before.
#[test]
fn t19_a_target_that_comes_back_without_its_drive_is_refused() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 0, 1, 1, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    nodes[0].kill();
    std::fs::remove_file(&nodes[0].files()[0]).unwrap();
    nodes[0].start();
    soon("the stream fails", || stream.poll().is_err());
    let error = stream.poll().unwrap_err().to_string();
    // The file that the target has made is another drive. A file system that stores no identity does
    // not show that, but the label is missing.
    let expected = ["another drive as namespace 1", "does not hold the volume"];
    assert!(expected.iter().any(|what| error.contains(what)), "{error}");
    drop((stream, volume));
}

/// If a drive comes back with a volatile cache, no write counts as durable without a FLUSH: the streams
/// fail with this reason, and work after the volume has been opened again.
#[test]
fn t27_a_drive_that_comes_back_without_power_loss_protection_is_refused() {
    let mut node = Node::protected();
    let members = volume_on(std::slice::from_ref(&node));
    let (volume, _) = open_soon(&members, &with_loss_timeout(SOON));
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut idle = volume.stream(1, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 0, 1, 1, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    node.kill();
    node.lose_protection();
    node.start();
    // No later group is reported durable.
    let buf = stream.buf(4096).unwrap();
    let later = stream.group().write(1, buf, Place::Fresh).submit_durable();
    let text = match later {
        Ok(seq) => stream.wait(Until::Durable(seq), Some(SOON)).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    for part in ["namespace 1", "volatile write cache", "Open the volume again"] {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
    soon("an idle stream fails, too", || idle.poll().is_err());
    let again = stream.reopen().unwrap_err().to_string();
    assert!(again.contains("volatile write cache"), "{again}");
    drop((stream, idle, volume));

    let (volume, recovery) =
        open_soon(&members, &OpenOptions { take_over: true, ..open_options() });
    assert!(recovery.stream(0).unwrap().last >= seq, "durable groups are there");
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let before = node.flushes();
    let seq = put(&mut stream, 2, 1, 3, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    assert!(node.flushes() > before, "now a FLUSH is needed");
    stream.close().unwrap();
    volume.close().unwrap();
}
