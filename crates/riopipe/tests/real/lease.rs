//! Ownership is a lease: an owner that is disconnected for a moment keeps its volume (T25).

use std::time::{Duration, Instant};

use riopipe::{ClaimError, OpenError, OpenOptions, Place, RecoverOptions, StreamOptions, Until};
use riopipe::{MemberAddr, Volume};

use crate::crash::{
    Node, Proxy, SOON, holds, impatient, open_soon, put, soon, volume_on, with_loss_timeout,
};
use crate::site::{connect, open_options};

/// Checks that opening the volume without taking it over is refused, and that the error contains what
/// to do. `disconnected` is whether the target has lost the owner's connection.
fn is_refused(members: &[MemberAddr], disconnected: bool) {
    match Volume::open("v", members, &impatient()) {
        Err(error @ OpenError::Claim { error: ClaimError::Owned { lease_left_ms, .. }, .. }) => {
            let text = error.to_string();
            assert!(text.contains("take_over"), "{text}");
            assert_eq!(
                (lease_left_ms > 0, text.contains("wait_for_lease")),
                (disconnected, disconnected),
                "{text}"
            );
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("a live owner was fenced without a take-over"),
    }
}

/// Whether the target has detected that its owner is disconnected.
fn is_disconnected(members: &[MemberAddr]) -> bool {
    let opened = Volume::open("v", members, &impatient()).map(|_| ());
    matches!(
        opened,
        Err(OpenError::Claim { error: ClaimError::Owned { lease_left_ms: 1.., .. }, .. })
    )
}

#[test]
fn t25_a_live_owner_keeps_its_volume_while_its_target_restarts() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &with_loss_timeout(Duration::from_secs(30)));
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 0, 1, 1, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    is_refused(&members, false);
    nodes[0].kill();
    nodes[0].start();
    // The other initiator comes before the owner, or after it.
    assert!(Volume::open("v", &members, &impatient()).is_err());
    let seq = put(&mut stream, 1, 1, 2, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    assert_eq!(holds(&mut stream, 0, 1, 1), Some(true));
    stream.close().unwrap();
    volume.close().unwrap();
    let (volume, _) = Volume::open("v", &members, &impatient()).expect("the owner has closed it");
    volume.close().unwrap();
}

#[test]
fn t25_a_live_owner_keeps_its_volume_while_its_connections_are_broken() {
    let nodes = [Node::new(), Node::new()];
    let direct = volume_on(&nodes);
    let proxy = Proxy::to(nodes[1].addr());
    let members = [direct[0].clone(), proxy.member()];
    let (volume, _) = open_soon(&members, &with_loss_timeout(Duration::from_secs(30)));
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    // A block on each target, durable: the owner is idle.
    let seq = put(&mut stream, 0, 8, 1, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    is_refused(&direct, false);
    proxy.shut();
    // The first target has its owner, the second has lost it: neither accepts another initiator.
    for _ in 0..20 {
        is_refused(&direct, false);
    }
    proxy.open();
    let seq = put(&mut stream, 0, 8, 2, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    assert_eq!(holds(&mut stream, 0, 8, 2), Some(true));
    stream.close().unwrap();
    volume.close().unwrap();
}

/// A stream's connection breaks, and connecting again takes long. The owner sends Keep Alive
/// meanwhile.
#[test]
fn t25_a_live_owner_keeps_its_volume_while_a_connection_is_being_made() {
    let nodes = [Node::new()];
    let direct = volume_on(&nodes);
    let proxy = Proxy::to(nodes[0].addr());
    let mut options = with_loss_timeout(Duration::from_secs(30));
    options.connect.keep_alive = Duration::from_secs(1);
    let (volume, _) = open_soon(&[proxy.member()], &options);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 0, 1, 1, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    let stall = proxy.stall();
    // The connection of the stream was made last.
    proxy.cut_last();
    let seq = put(&mut stream, 1, 1, 2, Place::Fresh, true);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        stream.poll().unwrap();
        is_refused(&direct, false);
        assert!(volume.stat().targets[0].connected);
    }
    assert!(stream.poll().unwrap().durable < seq, "the stream has no connection");
    drop(stall);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    assert_eq!(holds(&mut stream, 0, 1, 1), Some(true));
    stream.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn t25_an_initiator_waits_for_a_lost_owner_or_takes_over() {
    let nodes = [Node::new()];
    let direct = volume_on(&nodes);
    let proxy = Proxy::to(nodes[0].addr());
    let members = [proxy.member()];
    let (volume, _) = open_soon(&members, &with_loss_timeout(Duration::from_secs(30)));
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 0, 1, 1, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    proxy.shut();
    soon("the target detects it", || is_disconnected(&direct));
    is_refused(&direct, true);
    let wait = OpenOptions { wait_for_lease: Duration::from_millis(50), ..open_options() };
    assert!(Volume::open("v", &direct, &wait).is_err(), "the lease is longer than that");
    // A dry run with take_over inspects the volume, and changes nothing.
    let dry = RecoverOptions { dry_run: true, connect: connect(), ..RecoverOptions::default() };
    assert!(Volume::recover("v", &direct, &dry, &mut |_| ()).is_err());
    let dry = RecoverOptions { take_over: true, ..dry };
    assert!(Volume::recover("v", &direct, &dry, &mut |_| ()).is_ok());
    is_refused(&direct, true);
    let take = OpenOptions { take_over: true, ..open_options() };
    let (next, recovery) = Volume::open("v", &direct, &take).unwrap();
    assert_eq!(recovery.stream(0).unwrap().last, seq);
    next.close().unwrap();
}

#[test]
fn t25_a_waiting_initiator_gets_the_volume_when_its_owner_closes_it() {
    let nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let wait = OpenOptions { wait_for_lease: SOON, ..open_options() };
            Volume::open("v", &members, &wait).map(|(volume, _)| volume.close())
        });
        volume.close().unwrap();
        waiting.join().unwrap().unwrap().unwrap();
    });
}
