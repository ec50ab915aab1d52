//! Fixtures that the tests of several crates share. A dev-dependency only: no program contains it.
//!
//! It depends on no other crate of the workspace, so that every crate's tests can use it, and so that
//! the scripted [`peer`] is a second opinion on the wire formats.

mod counting;
pub mod peer;
mod random;

pub use counting::{Counting, allocations};
pub use random::Random;
