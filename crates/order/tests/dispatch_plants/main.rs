//! Each plant removes a defence of the host's half of an order that drives keep. An oracle must
//! see a broken promise.

#[path = "../dispatch/pinning.rs"]
mod pinning;
#[path = "../dispatch/scheduler.rs"]
mod scheduler;

use riopipe_order::probe::{self, DispatchPlant, Plant};

/// Number of seeds within which each plant must be caught.
const SEEDS: u64 = 1_000;

/// The plants of the epoch scheduler. The simulator must notice them, too, through engine `barrier`.
const SCHEDULER: [Plant; 3] =
    [Plant::EpochNotBlocked, Plant::BarrierNotReassigned, Plant::EpochsMixed];

/// The first of the seeds that shows a broken promise, with that promise.
fn caught() -> Option<(u64, String)> {
    (0..SEEDS).find_map(|seed| {
        let broken = scheduler::check(seed).and_then(|()| pinning::check(seed));
        broken.err().map(|promise| (seed, promise.to_string()))
    })
}

/// One test, because a plant is set for the whole process.
#[test]
fn every_plant_is_caught() {
    let mut missed = Vec::new();
    let mut judge = |plant: &str, caught: Option<(u64, String)>| match caught {
        Some((seed, promise)) => println!("{plant}: after {} seeds: {promise}", seed + 1),
        None => missed.push(plant.to_owned()),
    };
    for plant in SCHEDULER {
        probe::plant(Some(plant));
        let caught = caught();
        probe::plant(None);
        judge(&plant.to_string(), caught);
    }
    for plant in DispatchPlant::ALL.iter().copied() {
        probe::plant_in_dispatch(Some(plant));
        let caught = caught();
        probe::plant_in_dispatch(None);
        judge(&plant.to_string(), caught);
    }
    assert!(missed.is_empty(), "not caught in {SEEDS} seeds: {missed:?}");
}
