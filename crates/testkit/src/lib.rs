//! Fixtures that the tests of several crates share. A dev-dependency only: no program contains it.
//!
//! Of the workspace it uses `order` alone, for attributes and the trait of drives, so that its tests
//! and those of every crate above can use it. It knows no other crate's wire formats, so that the scripted [`peer`]
//! is a second opinion on them.

mod attribute;
mod counting;
mod drive;
mod hex;
pub mod peer;
mod random;
mod wakers;

pub use attribute::attribute;
pub use counting::{Counting, allocations};
pub use drive::NullDrive;
pub use hex::hex;
pub use random::Random;
pub use wakers::{Flag, Panicking, Task, poll};
