//! Epochs and queues of migrating streams against what a drive needs to see.

use std::collections::BTreeMap;

use riopipe_order::dispatch::epoch_pinning::{DispatchError, EpochPinning, NextWrite, Pinned};
use riopipe_order::write_order::EpochId;
use riopipe_testkit::Random;

const STREAMS: [u16; 4] = [1, 2, 3, 300];
const QUEUES: usize = 3;

/// The next write of a stream, until it is dispatched.
#[derive(Clone, Copy)]
struct Plan {
    follower: Option<u16>,
    /// The epoch has begun.
    is_open: bool,
    /// Number of writes of the epoch that are left.
    left: u64,
}

/// Streams write and move from core to core. Checks what goes into the queues.
pub(crate) fn check(seed: u64) -> Result<(), String> {
    let mut random = Random(seed | 1);
    let mut pinning = EpochPinning::default();
    let first_epoch = [0, 65_534, (1 << 40) - 1][random.index(3)];
    for stream in STREAMS {
        pinning.start(stream, first_epoch);
    }
    let mut plans: BTreeMap<u16, Plan> = BTreeMap::new();
    let mut dispatched: Vec<(NextWrite, Pinned)> = Vec::new();
    let mut epochs: BTreeMap<u16, u64> = STREAMS.map(|stream| (stream, first_epoch)).into();
    let mut steps = 0;
    while steps < 40 || !plans.is_empty() {
        steps += 1;
        if steps > 10_000 {
            return Err("streams wait for one another for ever".into());
        }
        let stream = STREAMS[random.index(STREAMS.len())];
        if steps >= 40 && !plans.contains_key(&stream) {
            continue;
        }
        let plan = *plans.entry(stream).or_insert_with(|| {
            let other = STREAMS[random.index(STREAMS.len())];
            let follower = (random.one_in(2) && other != stream).then_some(other);
            Plan { follower, is_open: false, left: 1 + random.below(3) }
        });
        let is_last = plan.left == 1;
        // Not every write of an epoch is a dual-stream write, but the first and the last one are.
        let follower = plan.follower.filter(|_| is_last || !plan.is_open || random.one_in(2));
        let core_queue = random.index(QUEUES);
        let write = NextWrite { stream, follower, is_last, core_queue };
        match pinning.dispatch(write) {
            Ok(pinned) => {
                check_epochs(&epochs, write, pinned)?;
                dispatched.push((write, pinned));
                match is_last {
                    true => {
                        plans.remove(&stream);
                        for id in pinned.order.epochs() {
                            *epochs.entry(id.stream).or_default() += 1;
                        }
                    }
                    false => {
                        let left = plan.left - 1;
                        plans.insert(stream, Plan { is_open: true, left, ..plan });
                    }
                }
            }
            Err(DispatchError::FollowerOpen(_) | DispatchError::Following(_)) => {}
            Err(error) => return Err(error.to_string()),
        }
        if pinning.next_epoch(stream).epoch != epochs[&stream] as u16 {
            return Err(format!("the next epoch of stream {stream}"));
        }
    }
    check_queues(&dispatched)
}

/// Checks that a write has the epochs that are next in its streams.
fn check_epochs(
    epochs: &BTreeMap<u16, u64>,
    write: NextWrite,
    pinned: Pinned,
) -> Result<(), String> {
    let id = |stream| EpochId { stream, epoch: epochs[&stream] as u16 };
    let is_right = pinned.order.own == id(write.stream)
        && pinned.order.follower == write.follower.map(id)
        && pinned.order.barrier == write.is_last;
    match is_right {
        true => Ok(()),
        false => Err(format!("{write:?} became {pinned:?}")),
    }
}

/// Checks that each epoch is in one queue, that its barrier is its last write, and that it begins
/// when the one before it has ended.
fn check_queues(dispatched: &[(NextWrite, Pinned)]) -> Result<(), String> {
    let mut ended: Vec<EpochId> = Vec::new();
    for (at, (_, pinned)) in dispatched.iter().enumerate() {
        for id in pinned.order.epochs() {
            if ended.contains(&id) {
                return Err(format!("{id:?} goes on behind its barrier"));
            }
            let mut earlier = dispatched[..at]
                .iter()
                .filter(|(_, earlier)| earlier.order.epochs().any(|earlier| earlier == id));
            if earlier.any(|(_, earlier)| earlier.queue != pinned.queue) {
                return Err(format!("{id:?} is in two queues"));
            }
        }
        // The last write ends both epochs of an epoch with a follower.
        if pinned.order.barrier {
            ended.extend(pinned.order.epochs());
        }
    }
    Ok(())
}

#[test]
fn an_epoch_stays_where_it_began() {
    let mut pinning = EpochPinning::default();
    let mut write = |core_queue, is_last| {
        let write = NextWrite { stream: 9, follower: None, is_last, core_queue };
        let pinned = pinning.dispatch(write).unwrap();
        (pinned.queue, pinned.order.own.epoch)
    };
    let writes = [(0, false), (0, false), (1, true), (1, false), (0, true), (0, true)];
    let pinned = writes.map(|(core, is_last)| write(core, is_last));
    assert_eq!(pinned, [(0, 0), (0, 0), (0, 0), (1, 1), (1, 1), (0, 2)]);
}

#[test]
fn an_epoch_has_one_follower_that_is_between_epochs() {
    let mut pinning = EpochPinning::default();
    let mut write = |stream, follower, is_last| {
        pinning
            .dispatch(NextWrite { stream, follower, is_last, core_queue: 0 })
            .map(|pinned| pinned.order.epochs().map(|id| (id.stream, id.epoch)).collect::<Vec<_>>())
    };
    for (stream, follower) in [(0, None), (1, Some(1)), (1, Some(0))] {
        assert_eq!(write(stream, follower, true), Err(DispatchError::BadStream(stream)));
    }
    assert_eq!(write(1, Some(9), false), Ok(vec![(1, 0), (9, 0)]));
    assert_eq!(write(1, None, false), Ok(vec![(1, 0)]));
    assert_eq!(write(1, Some(8), false), Err(DispatchError::OtherFollower(1)));
    assert_eq!(write(1, None, true), Err(DispatchError::OtherFollower(1)));
    assert_eq!(write(9, None, true), Err(DispatchError::Following(9)));
    assert_eq!(write(2, Some(9), true), Err(DispatchError::FollowerOpen(9)));
    assert_eq!(write(1, Some(9), true), Ok(vec![(1, 0), (9, 0)]));
    assert_eq!(write(2, Some(9), true), Ok(vec![(2, 0), (9, 1)]));
    assert_eq!(write(9, None, false), Ok(vec![(9, 2)]));
    assert_eq!(write(9, Some(1), true), Err(DispatchError::OtherFollower(9)));
    assert_eq!(write(2, Some(9), true), Err(DispatchError::FollowerOpen(9)));
    assert_eq!(write(9, None, true), Ok(vec![(9, 2)]));
    assert_eq!(write(2, Some(9), true), Ok(vec![(2, 1), (9, 3)]));
}
