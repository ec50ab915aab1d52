//! Groups that another stream follows: what a stream's driver takes, refuses and reports. The targets
//! are scripts.

mod stream_rig;

use std::sync::Arc;

use peer::target::{Command, Script};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Bound, Cause, Refusal};
use riopipe_order::following::FollowWay;
use riopipe_session::initiator::stream_driver::{
    StartStep, StreamDriver, StreamShared, StreamSpec, StreamStart, Until, WaitEnd,
};
use riopipe_testkit::peer;
use stream_rig::{Followings, MS, Piece, Shape, all, new_queue, stream_shared, write};

const NOW: u64 = 1 << 40;

/// A stream that is bound on its target.
struct Rig {
    driver: StreamDriver<Piece>,
    script: Script,
}

/// Carries bytes between a stream and its target, until none moves.
fn carry(driver: &mut StreamDriver<Piece>, script: &mut Script) {
    loop {
        driver.pump(NOW);
        let bytes = all(driver.outbox(0));
        script.take(&bytes);
        let input = std::mem::take(&mut script.output);
        if bytes.is_empty() && input.is_empty() {
            return;
        }
        driver.received(0, NOW, &input, &mut |_, _| ()).unwrap();
    }
}

impl Rig {
    fn new(shape: &Shape, stream: u16, shared: StreamShared) -> Self {
        let spec = StreamSpec {
            config: shape.config(stream, 1),
            topology: shape.topology(),
            kept_bytes_max: 1 << 20,
            merge: shape.merge,
            qids: vec![5],
            reads_only: false,
        };
        let mut start = StreamStart::new(spec, shared, 10_000 * MS, NOW);
        assert!(matches!(start.step(NOW), StartStep::Connect(_)));
        start.connected(0, new_queue(shape), NOW);
        let mut script = Script::default();
        carry(start.driver().unwrap(), &mut script);
        for bind in std::mem::take(&mut script.commands) {
            script.answer(&bind, 0, u64::from(shape.slots) | 1 << 32);
        }
        carry(start.driver().unwrap(), &mut script);
        assert_eq!(start.step(NOW), StartStep::Ready);
        Self { driver: start.into_driver().unwrap(), script }
    }

    fn take_one(&mut self) -> Command {
        carry(&mut self.driver, &mut self.script);
        let mut commands = std::mem::take(&mut self.script.commands);
        assert_eq!(commands.len(), 1, "one command, not {commands:x?}");
        commands.remove(0)
    }

    fn answer(&mut self, command: &Command) {
        self.script.answer(command, 0, 0);
        carry(&mut self.driver, &mut self.script);
    }

    fn submit(&mut self, lba: u64) -> Seq {
        self.driver.admit(&mut [write(lba, lba)], 0, false).unwrap()
    }
}

/// Streams 3 and 4 of a volume on one drive with power-loss protection, and the streams that were
/// woken.
fn two_streams() -> (Rig, Rig, Arc<Followings>) {
    let (shape, followings) = (Shape::of(1, false), Arc::default());
    let shared = stream_shared(&shape, &followings);
    let leader = Rig::new(&shape, 3, shared.clone());
    (leader, Rig::new(&shape, 4, shared), followings)
}

fn woken(followings: &Followings) -> Vec<StreamId> {
    std::mem::take(&mut *followings.woken.lock().unwrap())
}

const FOLLOWED: Refusal = Refusal::Full(Bound::Followed);

#[test]
fn a_follower_takes_no_group_before_the_group_is_durable() {
    let (mut leader, mut follower, followings) = two_streams();
    let mut group = [write(1, 1)];
    let admitted = leader.driver.admit_followed(&mut group, 0, false, StreamId(4)).unwrap();
    assert_eq!(admitted, (Seq(1), FollowWay::Waits));
    assert!(leader.driver.should_send(), "the follower waits for it");
    assert_eq!(follower.driver.admit(&mut [write(2, 2)], 0, false), Err(FOLLOWED));
    let mut group = [write(2, 2)];
    let refused = follower.driver.admit_followed(&mut group, 0, false, StreamId(3));
    assert_eq!(refused, Err(FOLLOWED));
    // It is idle, and yet there is no space.
    follower.driver.begin_wait(Until::Space).unwrap();
    assert_eq!(follower.driver.wait_step(Until::Space, None, || 0), None);
    let command = leader.take_one();
    leader.answer(&command);
    assert_eq!(woken(&followings), []);
    leader.driver.marks().unwrap();
    assert_eq!(woken(&followings), [StreamId(4)]);
    assert_eq!(follower.driver.wait_step(Until::Space, None, || 0), Some(WaitEnd::Reached));
    assert_eq!(follower.submit(2), Seq(1));
}

#[test]
fn p6_a_follower_fails_with_the_stream_whose_group_is_not_durable() {
    for is_dropped in [false, true] {
        let (mut leader, mut follower, followings) = two_streams();
        leader.driver.admit_followed(&mut [write(1, 1)], 0, false, StreamId(4)).unwrap();
        match is_dropped {
            true => drop(leader),
            false => leader.driver.give_up(0, Cause::Disconnected),
        }
        assert_eq!(woken(&followings), [StreamId(4)]);
        // Also a group that is submitted before the next poll is behind the failure.
        let refused = follower.driver.admit(&mut [write(2, 2)], 0, false).unwrap_err();
        let Refusal::Poisoned(failure) = refused else { panic!("{refused:?}") };
        assert_eq!((failure.cause, failure.seq), (Cause::OtherStream, Seq(1)));
        assert_eq!(follower.driver.marks(), Err(failure));
    }
}

#[test]
fn a_follower_goes_on_if_the_group_was_durable_when_its_stream_failed() {
    let (mut leader, mut follower, followings) = two_streams();
    leader.driver.admit_followed(&mut [write(1, 1)], 0, false, StreamId(4)).unwrap();
    let command = leader.take_one();
    leader.answer(&command);
    // Its marks were not read since.
    leader.driver.give_up(0, Cause::Disconnected);
    assert_eq!(woken(&followings), [StreamId(4)]);
    assert_eq!(follower.submit(2), Seq(1));
}

#[test]
fn a_stream_goes_on_when_the_follower_of_a_flushed_group_has_failed() {
    let (mut leader, mut follower, followings) = two_streams();
    leader.driver.admit_followed(&mut [write(1, 1)], 0, false, StreamId(4)).unwrap();
    follower.driver.give_up(0, Cause::Disconnected);
    assert_eq!(woken(&followings), []);
    let command = leader.take_one();
    leader.answer(&command);
    leader.driver.marks().unwrap();
    let mut group = [write(2, 2)];
    let refused = leader.driver.admit_followed(&mut group, 0, false, StreamId(4));
    assert_eq!(refused, Err(Refusal::NoFollower), "it has failed");
    assert_eq!(leader.submit(3), Seq(2), "the refusal has changed nothing");
}

#[test]
fn a_stream_that_is_being_closed_or_started_follows_nothing() {
    let (mut leader, mut follower, _) = two_streams();
    let mut follow = |stream: u16| {
        let admitted = leader.driver.admit_followed(&mut [write(1, 1)], 0, false, StreamId(stream));
        admitted.map(|(_, way)| way)
    };
    assert_eq!(follow(5), Err(Refusal::NoFollower), "there is none");
    assert_eq!(follow(3), Err(Refusal::NoFollower), "itself");
    follower.driver.begin_close();
    assert_eq!(follow(4), Err(Refusal::NoFollower));
    follower.driver.give_up_close();
    assert_eq!(follow(4), Ok(FollowWay::Waits));
}
