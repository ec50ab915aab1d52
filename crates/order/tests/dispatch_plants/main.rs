//! Each plant removes a defence of the host's half of an order that drives keep. An oracle must
//! see a broken promise.

#[path = "../dispatch/pinning.rs"]
mod pinning;
#[path = "../dispatch/scheduler.rs"]
mod scheduler;

use riopipe_order::probe::{self, DispatchPlant};

/// Number of seeds within which each plant must be caught.
const SEEDS: u64 = 1_000;

/// One test, because a plant is set for the whole process.
#[test]
fn every_plant_is_caught() {
    let mut missed = Vec::new();
    for plant in DispatchPlant::ALL.iter().copied() {
        probe::plant_in_dispatch(Some(plant));
        let caught = (0..SEEDS).find_map(|seed| {
            let broken = scheduler::check(seed).and_then(|()| pinning::check(seed));
            broken.err().map(|promise| (seed, promise))
        });
        probe::plant_in_dispatch(None);
        match caught {
            Some((seed, promise)) => println!("{plant}: after {} seeds: {promise}", seed + 1),
            None => missed.push(plant),
        }
    }
    assert!(missed.is_empty(), "not caught in {SEEDS} seeds: {missed:?}");
}
