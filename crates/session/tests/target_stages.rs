//! The time of an ordered write in each stage at the target: on a clock that the test moves, every
//! traced write must have been where the test has kept it.

mod world;

use peer::{Digests, Sqe};
use riopipe_order::attribute::Flags;
use riopipe_order::gate::Cause;
use riopipe_session::stages::{ONE_IN, Spent, Stage};
use riopipe_testkit::peer;
use world::{Owner, World, attribute, block, ordered};

const ROUNDS: u64 = 3_000;
/// More writes than are traced because they are the first ones of their stream.
const FIRST: u64 = 300;

/// Time in the gate, the log, the drive, the second half of the log, and in transit to the socket.
fn spent(spent: &Spent) -> [u64; 5] {
    let all = Stage::TARGET.map(|stage| spent.of(stage));
    assert_eq!(all.iter().sum::<u64>(), spent.total(), "only the target's stages");
    all
}

/// The traces are the expected ones, each shape often enough.
fn all_seen(w: &World, writes: u64, shapes: &[[u64; 5]]) {
    assert_eq!(w.host.ordered, writes);
    let traced = w.host.traced.len() as u64;
    assert!(
        traced > writes / ONE_IN / 2 && traced < writes / ONE_IN * 2 + FIRST,
        "{traced} of {writes}"
    );
    let mut counts = vec![0; shapes.len()];
    for seen in w.host.traced.iter().map(spent) {
        match shapes.iter().position(|shape| *shape == seen) {
            Some(shape) => counts[shape] += 1,
            None => panic!("{seen:?} is none of {shapes:?}"),
        }
    }
    assert!(counts.iter().all(|count| *count >= 5), "{counts:?}");
}

/// A target with a bound queue, whose drive ends its operations when the test asks for it.
fn holding(volatile: bool) -> (World, usize) {
    let mut w = World::new(&[volatile]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    (w, io)
}

/// Two writes of a round, commands 1 and 2: of block 7, and of `lba` with `flags`. All rounds before
/// are released.
fn pair(round: u64, lba: u64, flags: Flags) -> [Sqe; 2] {
    let before = 2 * round;
    let mut second = attribute(before + 2, lba);
    second.flags = second.flags.with(flags);
    [ordered(1, &attribute(before + 1, 7), before), ordered(2, &second, before)]
}

#[test]
fn a_write_waits_at_the_gate_for_blocks_that_overlap_and_takes_its_flush_along() {
    let (mut w, io) = holding(true);
    for round in 0..ROUNDS {
        let [first, flushed] = pair(round, 7, Flags::FLUSH);
        w.command(io, first, &block(1));
        w.host.now += 10;
        w.command(io, flushed, &block(2));
        w.host.now += 100;
        w.complete(0, 0);
        w.host.now += 1_000;
        w.complete(0, 0);
        w.host.now += 10_000;
        // The host takes its time to take the answer.
        w.links[io].reading = false;
        w.complete(0, 0);
        w.host.now += 7;
        w.resume_reading(io);
        assert_eq!(w.completions(io).len(), 2);
    }
    all_seen(&w, 2 * ROUNDS, &[[0, 0, 110, 0, 0], [100, 0, 11_000, 0, 7]]);
}

#[test]
fn a_write_waits_at_the_gate_for_those_before_it() {
    let (mut w, io) = holding(false);
    for round in 0..ROUNDS {
        let [first, second] = pair(round, 8, Flags(0));
        w.command(io, second, &block(2));
        w.host.now += 5;
        w.command(io, first, &block(1));
        w.host.now += 100;
        w.complete_all(0);
        assert_eq!(w.completions(io).len(), 2);
    }
    all_seen(&w, 2 * ROUNDS, &[[0, 0, 100, 0, 0], [5, 0, 100, 0, 0]]);
}

#[test]
fn a_flush_waits_at_the_gate_for_the_writes_that_it_is_to_cover() {
    let (mut w, io) = holding(true);
    for round in 0..ROUNDS {
        let [first, flushed] = pair(round, 8, Flags::FLUSH);
        w.command(io, first, &block(1));
        w.command(io, flushed, &block(2));
        w.host.now += 10;
        w.complete(0, 1);
        w.host.now += 100;
        w.complete(0, 0);
        w.host.now += 1_000;
        w.complete(0, 0);
        assert_eq!(w.completions(io).len(), 2);
    }
    all_seen(&w, 2 * ROUNDS, &[[0, 0, 110, 0, 0], [100, 0, 1_010, 0, 0]]);
}

#[test]
fn data_in_transit_is_waited_for_at_the_gate() {
    let (mut w, io) = holding(false);
    for seq in 1..=ROUNDS {
        w.command(io, ordered(1, &attribute(seq, 7), seq - 1).transport(4096), &[]);
        let ttag = w.next(io).unwrap().u16(10);
        w.host.now += 50;
        w.send(io, &peer::h2c_data(Digests::default(), 1, ttag, 0, &block(1), true));
        w.host.now += 100;
        w.complete(0, 0);
        assert_eq!(w.completions(io).len(), 1);
    }
    all_seen(&w, ROUNDS, &[[50, 0, 100, 0, 0]]);
}

/// A batch is one receive, and one instant on this clock. The point is that all of its writes may
/// be traced.
#[test]
fn every_write_of_a_batch_may_be_the_one() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    for round in 0..ROUNDS / 8 {
        let mut bytes = Vec::new();
        for at in 1..=16u64 {
            let seq = round * 16 + at;
            let sqe = ordered(at as u16, &attribute(seq, seq % 9_000), round * 16);
            bytes.extend(peer::capsule(Digests::default(), &sqe.0, &block(1)));
        }
        w.send(io, &bytes);
        assert_eq!(w.completions(io).len(), 16);
        w.host.now += 1;
    }
    all_seen(&w, ROUNDS * 2, &[[0; 5]]);
}

#[test]
fn a_stream_that_fails_is_reported_once() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    // Nothing is ever released: the log fills.
    for seq in 1..=200 {
        w.call(io, ordered(1, &attribute(seq, seq), 0), &block(1));
    }
    assert_eq!(w.host.stopped, [Cause::LogFull]);
    w.hang_up(io);
    assert_eq!(w.host.stopped.len(), 1);
}

#[test]
fn a_stream_that_ends_has_not_failed() {
    let (mut w, io) = holding(false);
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    w.hang_up(io);
    w.complete_all(0);
    assert_eq!(w.host.stopped, []);
}

/// The drive has finished the write, and others of its batch take their time.
#[test]
fn a_write_that_is_back_from_its_drive_waits_for_the_log() {
    let (mut w, io) = holding(false);
    for seq in 1..=ROUNDS {
        w.command(io, ordered(1, &attribute(seq, 7), seq - 1), &block(1));
        w.host.now += 100;
        let op = w.host.drives[0].pending.remove(0).op;
        let World { host, links, .. } = &mut w;
        let link = &mut links[io];
        link.conn.device_done(op, Ok(None), host, &mut link.out);
        host.now += 7;
        link.conn.batch_ended(host, &mut link.out);
        w.resume_reading(io);
        assert_eq!(w.completions(io).len(), 1);
    }
    all_seen(&w, ROUNDS, &[[0, 0, 100, 7, 0]]);
}
