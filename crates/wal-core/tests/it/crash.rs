//! Any sequence of appends, group commits, trims and crashes, compared with the model.

use proptest::prelude::*;
use riopipe_testkit::Random;
use riopipe_wal_core::record::Kind;

use super::world::{Below, World, bytes};

#[derive(Clone, Debug)]
enum Step {
    Append(usize),
    Checkpoint(usize),
    Commit(bool),
    Advance(u64, u64, u64),
    Settle,
    Trim(u64),
    Crash { seed: u64, power: bool },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0usize..200).prop_map(Step::Append),
        3 => (0usize..14_000).prop_map(Step::Append),
        1 => (0usize..6_000).prop_map(Step::Checkpoint),
        6 => any::<bool>().prop_map(Step::Commit),
        4 => (0u64..4, 0u64..3, 0u64..3).prop_map(|(c, d, r)| Step::Advance(c, d, r)),
        1 => Just(Step::Settle),
        2 => (0u64..100).prop_map(Step::Trim),
        2 => (any::<u64>(), any::<bool>()).prop_map(|(seed, power)| Step::Crash { seed, power }),
    ]
}

fn run(blocks: u64, below: Below, steps: &[Step]) {
    let mut world = World::new(blocks, below);
    for (number, step) in steps.iter().enumerate() {
        match *step {
            // The waiting bytes are bounded, as the product's queue is.
            Step::Append(len) if world.queue.len() < 40_000 => {
                world.append(Kind::Data, &bytes(len, number as u64));
            }
            Step::Checkpoint(len) if world.queue.len() < 40_000 => {
                world.append(Kind::Checkpoint, &bytes(len, number as u64));
            }
            Step::Append(_) | Step::Checkpoint(_) => {}
            Step::Commit(waits) => {
                world.waits = waits;
                world.commit();
            }
            Step::Advance(complete, durable, released) => {
                world.advance(complete, durable, released);
            }
            Step::Settle => world.settle(),
            Step::Trim(percent) => {
                // Anywhere in the durable part, also within a record.
                let (from, to) = (world.trim, world.confirmed);
                let lsn = from.0 + (to.0 - from.0) * percent / 99;
                world.trim(riopipe_wal_core::Lsn(lsn));
            }
            Step::Crash { seed, power } => {
                world.crash(&mut Random(seed), power);
                world.reopen();
            }
        }
    }
    // After any of that the log works: everything is trimmed, and a large record fits.
    world.settle();
    let confirmed = world.confirmed;
    world.trim(confirmed);
    let lsn = world.append(Kind::Data, &bytes(world.ring.record_bytes_max().min(60_000), 1));
    world.settle();
    if world.queue.is_empty() {
        assert!(world.confirmed > lsn);
    } else {
        // The records that waited for space have it now.
        let confirmed = world.confirmed;
        world.trim(confirmed);
        world.settle();
    }
    world.crash(&mut Random(steps.len() as u64), true);
    world.reopen();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn on_ordered_drives_a_crash_leaves_a_prefix_of_the_records(
        blocks in 16u64..60,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        run(blocks, Below::Rio, &steps);
    }

    #[test]
    fn on_drives_that_keep_any_block_a_crash_leaves_a_prefix_of_the_records(
        blocks in 16u64..60,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        run(blocks, Below::Any, &steps);
    }
}
