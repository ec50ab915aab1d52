//! Workloads, measurements and figures: how fast it is, and how sure that is.
//!
//! A figure here is a median over several rounds in which the contenders take turns, with a
//! confidence interval that assumes nothing about how the noise is distributed; what is claimed
//! are *ratios* of contenders in the same round, since a machine's absolute speed drifts by more
//! than what is to be shown. The [`floor`] stands beside every engine: the same bytes between the
//! same threads with nothing of Rio between.
//!
//! Nothing here decides anything about storage: a workload only says what to write.

pub mod bars;
pub mod compare;
pub mod demo_report;
pub mod floor;
pub mod full_log;
pub mod generator;
pub mod harness;
pub mod latency;
pub mod link;
pub mod machine;
mod permutation;
pub mod plot;
pub mod report;
pub mod retakes;
pub mod rounds;
pub mod sample;
pub mod stats;
pub mod steal;
pub mod sweep;
pub mod table;
pub mod terminal;
pub mod units;
pub mod wal_load;
pub mod workload;
