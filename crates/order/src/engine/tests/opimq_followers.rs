//! Engine `opimq`: groups that another stream follows.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use std::sync::Mutex;

use super::opimq_epochs::{end, step};
use super::*;
use crate::attribute::StreamId;
use crate::engine::opimq::Opimq;
use crate::following::{FollowWay, Following, FollowingShell, SharedFollowing};

#[derive(Debug, Default)]
struct Shell(Mutex<Following>);

impl FollowingShell for Shell {
    fn with(&self, act: &mut dyn FnMut(&mut Following)) {
        act(&mut self.0.lock().unwrap());
    }

    fn wake(&self, _: StreamId) {}
}

/// Streams with these numbers, which share their state.
fn streams<const N: usize>(volatile: &[bool], numbers: [u16; N]) -> [Opimq<Piece>; N] {
    let shared = Arc::new(SharedFollowing::new(Box::<Shell>::default()));
    numbers.map(|stream_number| {
        let limits = Limits { stream_number, ..Limits::default() };
        let mut engine = Opimq::new(topology(volatile, 1, 0, 4), limits);
        engine.share(&shared);
        engine
    })
}

/// Lets the target of each drive know the stream.
fn begin(engine: &mut Opimq<Piece>, lbas: &[u64]) {
    for lba in lbas {
        engine.admit(&mut [write(*lba, 1)], 0, true).unwrap();
        let (_, ids) = step(engine);
        end(engine, &ids);
    }
}

fn follow(engine: &mut Opimq<Piece>, group: &mut [Write<Piece>], follower: u16) -> FollowWay {
    engine.admit_followed(group, 0, false, follower).unwrap().1
}

fn texts(engine: &mut Opimq<Piece>) -> Vec<String> {
    step(engine).0
}

#[test]
fn a_followed_group_has_an_epoch_of_the_follower_from_its_admission() {
    let [mut a, mut b] = streams(&[true], [5, 9]);
    begin(&mut b, &[0]);
    a.admit(&mut [write(0, 1)], 0, false).unwrap();
    // Admitted before, and not sent yet: it may be behind the group, too.
    b.admit(&mut [write(1, 1)], 0, false).unwrap();
    assert_eq!(follow(&mut a, &mut [write(2, 1), write(20, 1)], 9), FollowWay::Dual);
    b.admit(&mut [write(3, 1)], 0, true).unwrap();
    assert_eq!(texts(&mut b), ["q0 9@9.2|", "q0 11@9.3|", "q0 flush<9.4"]);
    assert_eq!(texts(&mut a), ["q0 8@0|", "q0 10@1&9.1", "q0 28@1&9.1|"]);
}

#[test]
fn a_followed_group_with_an_overlap_has_an_order_in_both_streams() {
    let [mut a, mut b] = streams(&[true], [5, 9]);
    begin(&mut b, &[0]);
    let mut group = [write(0, 1), write(0, 1), write(7, 1)];
    assert_eq!(follow(&mut a, &mut group, 9), FollowWay::Dual);
    assert_eq!(texts(&mut a), ["q0 8@0&9.1|", "q0 8@1&9.2", "q0 15@1&9.2|"]);
}

/// Streams that follow each other: whichever thread comes first, the drive never waits for each of
/// two groups before the other.
#[test]
fn two_groups_have_the_same_order_in_the_streams_that_they_share() {
    let [mut a, mut b] = streams(&[true], [5, 9]);
    begin(&mut a, &[0]);
    begin(&mut b, &[1]);
    assert_eq!(follow(&mut a, &mut [write(2, 1)], 9), FollowWay::Dual);
    assert_eq!(follow(&mut b, &mut [write(3, 1)], 5), FollowWay::Dual);
    // The later one is sent first.
    assert_eq!(texts(&mut b), ["q0 11@9.2&5.2|"]);
    assert_eq!(texts(&mut a), ["q0 10@1&9.1|"]);
}

#[test]
fn what_the_drive_cannot_order_is_waited_for() {
    let discard = Write { lba: 2, blocks: 1, op: Op::Discard };
    let [mut a, mut b] = streams(&[true, true], [5, 9]);
    assert_eq!(follow(&mut a, &mut [write(0, 1)], 9), FollowWay::Waits, "no target knows it");
    // Such a group is flushed at once.
    let (sent, ids) = step(&mut a);
    assert_eq!(sent, ["q0 8@0|", "q0 flush<1"]);
    end(&mut a, &ids);
    begin(&mut b, &[0]);
    assert_eq!(follow(&mut a, &mut [write(0, 1)], 9), FollowWay::Dual);
    // On another drive than the group before it, on several, with a discard, without writes.
    assert_eq!(follow(&mut a, &mut [write(4, 1)], 9), FollowWay::Waits);
    for group in [vec![write(0, 1), write(4, 1)], vec![write(0, 1), discard]] {
        let [mut a, mut b] = streams(&[true, true], [5, 9]);
        begin(&mut b, &[0, 4]);
        assert_eq!(follow(&mut a, &mut group.clone(), 9), FollowWay::Waits);
    }
    let [mut a, mut b] = streams(&[true], [5, 9]);
    begin(&mut b, &[0]);
    assert_eq!(a.admit_followed(&mut [], 0, true, 9).unwrap().1, FollowWay::Waits);
}

#[test]
fn a_follower_flushes_what_it_follows_before_it_goes_to_another_drive() {
    for (mut group, sent) in [
        (vec![write(4, 1)], "q2 8@9.0|"),
        (vec![Write { lba: 2, blocks: 1, op: Op::Discard }], "q0 discard 10"),
    ] {
        let [mut a, mut b] = streams(&[true, true], [5, 9]);
        begin(&mut b, &[0]);
        follow(&mut a, &mut [write(1, 1)], 9);
        // All groups of the follower are durable, and yet it waits.
        b.admit(&mut group, 0, false).unwrap();
        let (texts, ids) = step(&mut b);
        assert_eq!(texts, ["q0 flush<9.2"]);
        end(&mut b, &ids);
        assert_eq!(step(&mut b).0, [sent]);
    }
}

#[test]
fn a_follower_on_another_drive_than_the_group_flushes_there() {
    let [mut a, mut b] = streams(&[true, true], [5, 9]);
    begin(&mut b, &[0, 4]); // it is on drive 1 now
    follow(&mut a, &mut [write(1, 1)], 9);
    b.admit(&mut [write(5, 1)], 0, false).unwrap();
    let (texts, ids) = step(&mut b);
    assert_eq!(texts, ["q0 flush<9.2"]);
    end(&mut b, &ids);
    assert_eq!(step(&mut b).0, ["q2 9@9.1|"]);
}

#[test]
fn an_empty_durable_group_covers_what_the_stream_follows() {
    for (volatile, flush) in [(true, "q0 flush<9.2"), (false, "q0 flush<9.2")] {
        let [mut a, mut b] = streams(&[volatile], [5, 9]);
        begin(&mut b, &[0]);
        follow(&mut a, &mut [write(1, 1)], 9);
        let seq = b.admit(&mut [], 0, true).unwrap();
        assert!(b.poll().durable < seq);
        let (texts, ids) = step(&mut b);
        assert_eq!(texts, [flush]);
        end(&mut b, &ids);
        assert_eq!(b.poll().durable, seq);
    }
}

#[test]
fn a_stream_that_closes_makes_durable_what_it_follows() {
    let [mut a, mut b] = streams(&[true], [5, 9]);
    begin(&mut b, &[0]);
    b.set_closing(true);
    assert!(b.is_idle());
    b.set_closing(false);
    follow(&mut a, &mut [write(1, 1)], 9);
    b.set_closing(true);
    assert!(!b.is_idle());
    let (texts, ids) = step(&mut b);
    assert_eq!(texts, ["q0 flush<9.2"]);
    end(&mut b, &ids);
    assert!(b.is_idle() && step(&mut b).0.is_empty());
}

/// The target may keep back the answer to a FLUSH until another FLUSH of the drive has ended, which
/// may wait for the group (trap T29).
#[test]
fn a_group_behind_a_flush_is_waited_for() {
    let [mut a, mut b] = streams(&[true], [5, 9]);
    begin(&mut b, &[0]);
    a.admit(&mut [write(0, 1)], 0, true).unwrap();
    assert_eq!(follow(&mut a, &mut [write(1, 1)], 9), FollowWay::Waits);
    let (texts, ids) = step(&mut a);
    assert_eq!(texts, ["q0 8@0|", "q0 flush<1", "q0 9@1|", "q0 flush<2"]);
    end(&mut a, &ids);
    assert_eq!(follow(&mut a, &mut [write(2, 1)], 9), FollowWay::Dual);
    // A FLUSH behind it has its number from the same moment.
    a.admit(&mut [], 0, true).unwrap();
    assert_eq!(step(&mut a).0, ["q0 10@2&9.1|", "q0 flush<3"]);
}
