//! Each plant removes a defence of the modelled drive. The oracle must see a broken promise.

#[path = "../orders/names.rs"]
mod names;
#[path = "../orders/oracle.rs"]
mod oracle;
#[path = "../orders/scenario.rs"]
mod scenario;
#[path = "../orders/world.rs"]
mod world;

use riopipe_model::probe::{self, Plant};
use riopipe_order::write_order::DriveOrder;

/// Number of seeds within which each plant must be caught.
const SEEDS: u64 = 3_000;

/// One test, because a plant is set for the whole process.
#[test]
fn every_plant_is_caught() {
    let mut missed = Vec::new();
    for plant in Plant::ALL.iter().copied() {
        probe::plant(Some(plant));
        let caught = (0..SEEDS).find_map(|seed| {
            let kinds = [DriveOrder::Barrier, DriveOrder::Epochs];
            let broken =
                kinds.into_iter().find_map(|kind| world::check(&scenario::draw(kind, seed)).err());
            broken.map(|promise| (seed, promise))
        });
        probe::plant(None);
        match caught {
            Some((seed, promise)) => println!("{plant:?}: after {} seeds: {promise}", seed + 1),
            None => missed.push(plant),
        }
    }
    assert!(missed.is_empty(), "not caught in {SEEDS} seeds: {missed:?}");
}
