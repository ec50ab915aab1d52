//! The oracle of the cluster, and the model of the host, see each planted bug of a plain block device.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use riopipe_sim::attempt::RUN_LIMIT;
use riopipe_sim::draw::draw_device;
use riopipe_sim::runner::{Plan, PlantedBug, User, try_plant};

/// Plants are set for the whole process, so this is one test.
#[test]
fn each_plant_of_a_device_is_caught() {
    let plan = Plan {
        first: 1,
        seeds: 4_000,
        jobs: std::thread::available_parallelism().map_or(1, usize::from),
        time: None,
        run_limit: RUN_LIMIT,
        stop: Arc::new(AtomicBool::new(false)),
        draw: draw_device,
        options: "--device ",
    };
    for plant in PlantedBug::all(User::Device) {
        let result = try_plant(plant, &plan, &|_| ());
        println!("{}: {:?} after {:?}", plant.name(), result.failure, result.caught_after);
        assert!(result.caught_after.is_some(), "{} in {} seeds", plant.name(), result.seeds);
    }
}
