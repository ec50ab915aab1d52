//! Workloads, measurements and figures with their confidence.
//!
//! A figure is a median over several rounds in which the contenders take turns, with a confidence
//! interval that assumes nothing about the distribution of the noise. Claims are *ratios* of
//! contenders in the same round, since a machine's absolute speed varies more than the differences
//! to be shown. The [`floor`] accompanies every engine: the same bytes between the same threads
//! without Rio.
//!
//! This crate decides nothing about storage: a workload only describes the writes.

pub mod access;
pub mod bars;
pub mod compare;
pub mod demo_report;
pub mod figures;
pub mod floor;
pub mod fs_load;
pub mod fs_plot;
pub mod full_log;
pub mod generator;
pub mod harness;
pub mod latency;
pub mod link;
pub mod machine;
mod permutation;
pub mod plot;
pub mod queue_depth;
pub mod report;
pub mod retakes;
pub mod rounds;
pub mod sample;
pub mod stats;
pub mod steal;
mod steps;
pub mod sweep;
pub mod table;
pub mod terminal;
pub mod units;
pub mod wal_load;
pub mod workload;
