//! The fuzzed functions: plain functions over bytes that panic when a property does not hold (T18).

pub mod fs;
pub mod nvme;
pub mod session;
