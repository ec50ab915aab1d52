//! The parts that the tests of RioFS and the simulated cluster share: [random programs](program), a
//! [model](model::Model) that judges the state after a crash, and a [checker](check) of images.

#![forbid(unsafe_code)]

pub mod check;
pub mod hash;
pub mod model;
pub mod path;
pub mod program;
pub mod random;
