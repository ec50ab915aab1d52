//! Opening and making volumes, and recovering their streams, against this project's own targets.

mod cluster;
mod creation;
mod deletion;
mod opening;
mod streams;
#[path = "../world/mod.rs"]
mod world;

use riopipe_testkit::peer;
