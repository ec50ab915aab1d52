//! The oracle of the cluster, and the model of the program, see each planted bug of RioFS.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use riopipe_sim::attempt::RUN_LIMIT;
use riopipe_sim::draw::draw_file_system;
use riopipe_sim::runner::{Plan, PlantedBug, User, try_plant};

/// Plants are set for the whole process, so this is one test.
#[test]
fn each_plant_of_a_file_system_is_caught() {
    let plan = Plan {
        first: 1,
        seeds: 600,
        jobs: std::thread::available_parallelism().map_or(1, usize::from),
        time: None,
        run_limit: RUN_LIMIT,
        stop: Arc::new(AtomicBool::new(false)),
        draw: draw_file_system,
        options: "--fs ",
    };
    for plant in PlantedBug::all(User::FileSystem) {
        let result = try_plant(plant, &plan, &|_| ());
        println!("{}: {:?} after {:?}", plant.name(), result.failure, result.caught_after);
        assert!(result.caught_after.is_some(), "{} in {} seeds", plant.name(), result.seeds);
    }
}
