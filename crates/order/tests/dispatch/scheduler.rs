//! The epoch scheduler against a list of requests.

use riopipe_order::dispatch::epoch_scheduler::{EpochScheduler, Wish};
use riopipe_testkit::Random;

/// A request, with its epoch in the order of the caller.
#[derive(Clone, Copy, Debug)]
struct Asked {
    epoch: u32,
}

/// Requests come and leave in a random order. Checks what has left.
pub(crate) fn check(seed: u64) -> Result<(), String> {
    let mut random = Random(seed | 1);
    let mut scheduler = EpochScheduler::default();
    let mut asked = Vec::new();
    let mut left = Vec::new();
    let mut epoch = 0;
    for _ in 0..random.below(60) {
        if random.one_in(2) {
            let wish = [Wish::Ordered, Wish::Barrier][random.index(2)];
            scheduler.insert(asked.len(), wish);
            asked.push(Asked { epoch });
            epoch += u32::from(wish == Wish::Barrier);
        } else if scheduler.ready().len() > 0 {
            let place = random.index(scheduler.ready().len());
            left.extend(scheduler.take(place));
        }
    }
    while scheduler.ready().len() > 0 {
        let place = random.index(scheduler.ready().len());
        left.extend(scheduler.take(place));
    }
    if left.len() != asked.len() || scheduler.waiting() > 0 {
        return Err(format!("{} of {} requests left", left.len(), asked.len()));
    }

    // The drive counts the barriers that it gets.
    let mut drive_epoch = 0;
    let mut epochs = vec![None; asked.len()];
    for scheduled in &left {
        let at = scheduled.request;
        if epochs[at].replace(drive_epoch).is_some() {
            return Err(format!("request {at} left twice"));
        }
        drive_epoch += u32::from(scheduled.order == Wish::Barrier);
    }
    for (earlier, first) in asked.iter().enumerate() {
        for (later, second) in asked.iter().enumerate() {
            if first.epoch < second.epoch && epochs[earlier] >= epochs[later] {
                return Err(format!("request {later} is not behind request {earlier}"));
            }
        }
    }
    Ok(())
}
