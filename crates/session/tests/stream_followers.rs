//! Groups that another stream follows: what a stream's driver takes, refuses and reports. The targets
//! are scripts.

mod stream_rig;

use std::sync::Arc;

use peer::target::{Command, Script};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Bound, Cause, EngineKind, Op, Place, Refusal, Write};
use riopipe_order::following::FollowWay;
use riopipe_session::initiator::stream_driver::{
    StartStep, StreamDriver, StreamShared, StreamSpec, StreamStart, Until, WaitEnd,
};
use riopipe_testkit::peer;
use stream_rig::{Followings, MS, Piece, Shape, all, new_queue, piece, stream_shared, write};

const NOW: u64 = 1 << 40;

/// A stream that is bound on its target.
struct Rig {
    driver: StreamDriver<Piece>,
    /// The target's part of each connection.
    scripts: Vec<Script>,
}

/// Carries bytes between a stream and its target, until none moves.
fn carry(driver: &mut StreamDriver<Piece>, scripts: &mut [Script]) {
    let mut moved = true;
    while std::mem::take(&mut moved) {
        driver.pump(NOW);
        for (link, script) in (0..).zip(&mut *scripts) {
            let bytes = all(driver.outbox(link));
            script.take(&bytes);
            let input = std::mem::take(&mut script.output);
            moved |= !bytes.is_empty() || !input.is_empty();
            driver.received(link, NOW, &input, &mut |_, _, _| ()).unwrap();
        }
    }
}

impl Rig {
    fn new(shape: &Shape, stream: u16, shared: StreamShared) -> Self {
        let spec = StreamSpec {
            config: shape.config(stream, 1),
            topology: shape.topology(),
            kept_bytes_max: 1 << 20,
            merge: shape.merge,
            merge_from: 0,
            qids: (5..5 + shape.engine.capabilities().queues_per_server).collect(),
            reads_only: false,
        };
        let mut start = StreamStart::new(spec, shared, 10_000 * MS, NOW);
        let mut scripts = Vec::new();
        while let StartStep::Connect(request) = start.step(NOW) {
            start.connected(request.link, new_queue(shape), NOW);
            scripts.push(Script::default());
        }
        carry(start.driver().unwrap(), &mut scripts);
        for script in &mut scripts {
            for bind in std::mem::take(&mut script.commands) {
                script.answer(&bind, 0, u64::from(shape.slots) | 1 << 32);
            }
        }
        carry(start.driver().unwrap(), &mut scripts);
        assert_eq!(start.step(NOW), StartStep::Ready);
        Self { driver: start.into_driver().unwrap(), scripts }
    }

    /// The commands that have come over the first connection.
    fn take(&mut self) -> Vec<Command> {
        carry(&mut self.driver, &mut self.scripts);
        std::mem::take(&mut self.scripts[0].commands)
    }

    fn take_one(&mut self) -> Command {
        let mut commands = self.take();
        assert_eq!(commands.len(), 1, "one command, not {commands:x?}");
        commands.remove(0)
    }

    fn answer(&mut self, command: &Command) {
        self.scripts[0].answer(command, 0, 0);
        carry(&mut self.driver, &mut self.scripts);
    }

    fn submit(&mut self, lba: u64) -> Seq {
        self.driver.admit(&mut [write(lba, lba)], 0, false).unwrap()
    }
}

/// Streams 3 and 4 of a volume on one drive with power-loss protection, and the streams that were
/// woken.
fn two_streams() -> (Rig, Rig, Arc<Followings>) {
    two_streams_of(&Shape::of(1, false))
}

fn two_streams_of(shape: &Shape) -> (Rig, Rig, Arc<Followings>) {
    let followings = Arc::default();
    let shared = stream_shared(shape, &followings);
    let leader = Rig::new(shape, 3, shared.clone());
    (leader, Rig::new(shape, 4, shared), followings)
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
fn p8_a_stream_is_driven_while_its_follower_waits() {
    let (mut leader, mut follower, _) = two_streams();
    assert!(!leader.driver.owner_call_ends(), "no group has a follower");
    leader.driver.admit_followed(&mut [write(1, 1)], 0, false, StreamId(4)).unwrap();
    let command = leader.take_one();
    assert!(leader.driver.owner_call_ends(), "a thread must read the answer");
    assert!(!follower.driver.owner_call_ends());
    leader.answer(&command);
    leader.driver.marks().unwrap();
    assert!(!leader.driver.owner_call_ends());
}

/// Streams 3 and 4 of engine `opimq` on one drive. The target knows both.
fn two_opimq_streams() -> (Rig, Rig, Arc<Followings>) {
    let shape = Shape { engine: EngineKind::Opimq, depth: 2, ..Shape::of(1, false) };
    let (mut leader, mut follower, followings) = two_streams_of(&shape);
    for stream in [&mut leader, &mut follower] {
        stream.submit(0);
        let command = stream.take_one();
        stream.answer(&command);
        stream.driver.marks().unwrap();
    }
    (leader, follower, followings)
}

/// With power-loss protection a dual-stream write completes when all that is before it in both
/// streams has come. So neither owner need call for that.
#[test]
fn p8_streams_that_share_a_dual_stream_write_are_driven_until_all_is_sent() {
    let (mut leader, mut follower, followings) = two_opimq_streams();
    // The epoch has begun, and the queue has no space for its last write.
    let mut group = [write(1, 1), write(3, 3), write(5, 5)];
    follower.driver.admit(&mut group, 0, false).unwrap();
    let behind = follower.take();
    assert_eq!(behind.len(), 2);
    assert!(!follower.driver.owner_call_ends(), "nothing waits for it");

    let mut group = [write(2, 2), write(4, 4), write(6, 6)];
    let admitted = leader.driver.admit_followed(&mut group, 0, false, StreamId(4)).unwrap();
    assert_eq!(admitted.1, FollowWay::Dual);
    assert_eq!(woken(&followings), [StreamId(4)], "the drive waits for the rest of its epoch");
    assert!(follower.driver.owner_call_ends());
    let first = leader.take();
    assert_eq!(first.len(), 2);
    assert!(leader.driver.owner_call_ends(), "one write has not left");

    follower.answer(&behind[0]);
    assert_eq!(follower.take().len(), 1);
    assert!(!follower.driver.owner_call_ends(), "all is sent");
    leader.answer(&first[0]);
    assert_eq!(leader.take().len(), 1);
    assert!(!leader.driver.owner_call_ends());
}

#[test]
fn p8_a_stream_is_driven_until_the_target_has_its_data() {
    let (mut leader, mut follower, _) = two_opimq_streams();
    // The data is too long for the command, so the target must ask for it.
    let op = Op::Write(Place::Fresh, piece(2, 3));
    let mut group = [Write { lba: 2, blocks: 3, op }];
    leader.driver.admit_followed(&mut group, 0, false, StreamId(4)).unwrap();
    leader.driver.pump(NOW);
    assert!(leader.driver.owner_call_ends(), "the socket has not taken the command");
    let command = leader.take_one();
    assert!(leader.driver.owner_call_ends(), "the target has not asked for the data");
    leader.scripts[0].ask_for_data(&command, 3 * 4096);
    leader.take();
    assert!(!leader.driver.owner_call_ends() && !follower.driver.owner_call_ends());
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
