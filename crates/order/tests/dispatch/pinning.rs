//! Epochs and queues of migrating streams against what a drive needs to see.

use std::collections::BTreeMap;

use riopipe_order::dispatch::epoch_numbers::{EpochNumbers, Taken};
use riopipe_order::dispatch::epoch_pinning::EpochPinning;
use riopipe_order::write_order::EpochId;
use riopipe_testkit::Random;

const STREAMS: [u16; 4] = [1, 2, 3, 300];
const QUEUES: usize = 3;

/// An epoch that has begun.
#[derive(Clone, Copy)]
struct Open {
    taken: Taken,
    /// Number of writes of the epoch that are left.
    left: u64,
}

/// A dispatched write.
struct Dispatched {
    taken: Taken,
    queue: usize,
    is_last: bool,
}

/// Streams write and move from core to core. Checks what goes into the queues.
pub(crate) fn check(seed: u64) -> Result<(), String> {
    let mut random = Random(seed | 1);
    let mut numbers = EpochNumbers::default();
    let first_epoch = [0, 65_534, (1 << 40) - 1][random.index(3)];
    for stream in STREAMS {
        numbers.start(stream, first_epoch);
    }
    let mut pins: BTreeMap<u16, EpochPinning> = BTreeMap::new();
    let mut open: BTreeMap<u16, Open> = BTreeMap::new();
    let mut dispatched: Vec<Dispatched> = Vec::new();
    let mut epochs: BTreeMap<u16, u64> = STREAMS.map(|stream| (stream, first_epoch)).into();
    let mut taken_order: Vec<Taken> = Vec::new();
    let mut steps = 0;
    while steps < 40 || !open.is_empty() {
        steps += 1;
        let stream = STREAMS[random.index(STREAMS.len())];
        if steps >= 40 && !open.contains_key(&stream) {
            continue;
        }
        let epoch = match open.get(&stream) {
            Some(epoch) => *epoch,
            None => {
                let other = STREAMS[random.index(STREAMS.len())];
                let follower = (random.one_in(2) && other != stream).then_some(other);
                let left = 1 + random.below(3);
                let taken = numbers.take(stream, follower, left as u32);
                let taken = taken.ok_or_else(|| format!("stream {stream} has no number"))?;
                check_epochs(&mut epochs, (stream, follower), taken)?;
                taken_order.push(taken);
                Open { taken, left }
            }
        };
        let is_last = epoch.left == 1;
        let queue = pins.entry(stream).or_default().dispatch(is_last, random.index(QUEUES));
        dispatched.push(Dispatched { taken: epoch.taken, queue, is_last });
        match is_last {
            true => open.remove(&stream),
            false => open.insert(stream, Open { left: epoch.left - 1, ..epoch }),
        };
    }
    check_queues(&dispatched)?;
    check_siblings(&taken_order)
}

/// Checks that an epoch has the numbers that are next in its streams.
fn check_epochs(
    epochs: &mut BTreeMap<u16, u64>,
    (stream, follower): (u16, Option<u16>),
    taken: Taken,
) -> Result<(), String> {
    let mut next = |stream| {
        let epoch = epochs.entry(stream).or_default();
        *epoch += 1;
        EpochId { stream, epoch: (*epoch - 1) as u16 }
    };
    let expected = Taken { own: next(stream), follower: follower.map(next) };
    match taken == expected {
        true => Ok(()),
        false => Err(format!("{expected:?} became {taken:?}")),
    }
}

/// Checks that each epoch is in one queue, and that its barrier is its last write.
fn check_queues(dispatched: &[Dispatched]) -> Result<(), String> {
    let ids = |of: &Dispatched| [Some(of.taken.own), of.taken.follower].into_iter().flatten();
    let mut ended: Vec<EpochId> = Vec::new();
    for (at, write) in dispatched.iter().enumerate() {
        for id in ids(write) {
            if ended.contains(&id) {
                return Err(format!("{id:?} goes on behind its barrier"));
            }
            let mut earlier =
                dispatched[..at].iter().filter(|it| ids(it).any(|earlier| earlier == id));
            if earlier.any(|earlier| earlier.queue != write.queue) {
                return Err(format!("{id:?} is in two queues"));
            }
        }
        if write.is_last {
            ended.extend(ids(write));
        }
    }
    Ok(())
}

/// Checks that two epochs have the same order in each stream that they share.
fn check_siblings(taken: &[Taken]) -> Result<(), String> {
    let ids = |of: &Taken| [Some(of.own), of.follower].into_iter().flatten();
    for (at, later) in taken.iter().enumerate() {
        for earlier in &taken[..at] {
            for (a, b) in ids(earlier).flat_map(|a| ids(later).map(move |b| (a, b))) {
                if a.stream == b.stream && (b.epoch.wrapping_sub(a.epoch) as i16) <= 0 {
                    return Err(format!("{b:?} was taken after {a:?}"));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn an_epoch_stays_where_it_began() {
    let mut pin = EpochPinning::default();
    let writes = [(0, false), (0, false), (1, true), (1, false), (0, true), (0, true)];
    let queues = writes.map(|(core, is_last)| pin.dispatch(is_last, core));
    assert_eq!(queues, [0, 0, 0, 1, 1, 0]);
}
