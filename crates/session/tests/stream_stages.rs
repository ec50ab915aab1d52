//! The time of a group in each stage at the initiator: on a clock that the test moves, every traced
//! group must have been where the test has kept it.

mod stream_rig;

use riopipe_session::stages::{ONE_IN, Spent, Stage};
use riopipe_testkit::peer;
use stream_rig::{Rig, Shape, write};

/// Submits a write, which takes 5 ns.
fn submit(rig: &mut Rig, lba: u64) {
    let traced = rig.session.traces_next();
    let since = rig.now;
    rig.now += 5;
    let seq = rig.session.admit(&mut [write(lba, 1)], 0, false).unwrap();
    if traced {
        rig.session.trace(seq, since, rig.now);
    }
}

/// Sends and receives; gives the time if it is wanted, and collects the traces.
fn carry(rig: &mut Rig, traced: &mut Vec<Spent>) {
    rig.carry();
    if rig.session.wants_instant() {
        rig.session.instant(rig.now);
        assert!(!rig.session.wants_instant());
    }
    rig.marks();
    if rig.session.has_traced() {
        traced.push(rig.session.traced(rig.now));
        assert!(!rig.session.has_traced());
    }
}

#[test]
fn a_group_waits_to_be_sent_is_sent_and_waits_for_those_before_it() {
    // One command at a time on each server.
    let mut rig = Rig::new(Shape { depth: 1, ..Shape::of(2, false) });
    let mut traced = Vec::new();
    const ROUNDS: u64 = 3_000;
    for _ in 0..ROUNDS {
        // To servers 0, 0 and 1.
        for lba in [0, 2, 1] {
            submit(&mut rig, lba);
        }
        carry(&mut rig, &mut traced);
        let (first, third) = (rig.take(0).remove(0), rig.take(1).remove(0));
        rig.now += 100;
        rig.scripts[1].answer(&third, 0, 0);
        carry(&mut rig, &mut traced);
        rig.now += 1_000;
        rig.scripts[0].answer(&first, 0, 0);
        carry(&mut rig, &mut traced);
        rig.now += 10_000;
        let second = rig.take(0).remove(0);
        rig.scripts[0].answer(&second, 0, 0);
        carry(&mut rig, &mut traced);
        assert!(rig.session.engine().is_idle());
    }
    let expected = [[5, 10, 1_100, 0], [5, 1_105, 10_000, 0], [5, 0, 100, 11_000]];
    let mut counts = [0u64; 3];
    for spent in &traced {
        let seen = Stage::INITIATOR.map(|stage| spent.of(stage));
        assert_eq!(seen.iter().sum::<u64>(), spent.total(), "only the initiator's stages");
        let shape = expected.iter().position(|shape| *shape == seen);
        counts[shape.unwrap_or_else(|| panic!("{seen:?} is none of {expected:?}"))] += 1;
    }
    let due = 3 * ROUNDS / ONE_IN;
    assert!((due / 2..due * 2 + 300).contains(&(traced.len() as u64)), "{} of {due}", traced.len());
    assert!(counts.iter().all(|count| *count >= 4), "{counts:?}");
}

/// A group that is merged into the request of another one is in transit with it. A group on several
/// servers is in transit until the last one is back.
#[test]
fn merged_and_scattered_groups_are_followed() {
    let mut rig = Rig::new(Shape { merge: true, ..Shape::of(1, false) });
    let mut traced = Vec::new();
    for _ in 0..2_000 {
        submit(&mut rig, 4);
        submit(&mut rig, 5);
        carry(&mut rig, &mut traced);
        let commands = rig.take(0);
        assert_eq!(commands.len(), 1, "they are one request");
        rig.now += 70;
        rig.scripts[0].answer(&commands[0], 0, 0);
        carry(&mut rig, &mut traced);
    }
    let spent = |stage| traced.iter().map(|spent: &Spent| spent.of(stage)).collect::<Vec<_>>();
    assert!(traced.len() > 5 && spent(Stage::Wire).iter().all(|ns| *ns == 70), "{traced:?}");
    assert!(spent(Stage::OrderQueue).contains(&5) && spent(Stage::OrderQueue).contains(&0));

    let mut rig = Rig::new(Shape::of(2, false));
    let mut traced = Vec::new();
    for _ in 0..2_000 {
        let due = rig.session.traces_next();
        let seq = rig.session.admit(&mut [write(0, 1), write(1, 1)], 0, false).unwrap();
        if due {
            rig.session.trace(seq, rig.now, rig.now);
        }
        carry(&mut rig, &mut traced);
        for server in [1, 0] {
            rig.now += 30;
            let command = rig.take(server).remove(0);
            rig.scripts[server].answer(&command, 0, 0);
            carry(&mut rig, &mut traced);
        }
    }
    // The last one sent is that to server 1.
    let seen: Vec<_> =
        traced.iter().map(|s| (s.of(Stage::Wire), s.of(Stage::InOrderWait))).collect();
    assert!(seen.len() > 2 && seen.iter().all(|seen| *seen == (30, 30)), "{seen:?}");
}

#[test]
fn what_is_refused_or_lost_with_its_stream_is_not_traced() {
    let mut rig = Rig::new(Shape { loss_ns: 0, ..Shape::of(1, false) });
    while !rig.session.traces_next() {}
    let seq = rig.session.admit(&mut [write(0, 1)], 0, false).unwrap();
    rig.session.trace(seq, rig.now, rig.now);
    rig.carry();
    rig.cut(0);
    assert!(rig.session.poll().is_err());
    assert!(!rig.session.has_traced());
    assert!((0..3 * ONE_IN).all(|_| !rig.session.traces_next()), "it is never over");
}
