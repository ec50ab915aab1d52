//! A whole cluster in one thread, from one seed.
//!
//! The *same* sessions, engines and logs that run on real sockets and drives run here on a
//! simulated clock, network and media. A seed decides the topology, the workload and the faults;
//! an oracle far simpler than the code checks the promises P1 to P9 (`docs/ordering-contract.md`).
//!
//! The crate reads no clock, and its order of events depends only on the seed. So a seed that
//! fails, fails again everywhere.

pub mod attempt;
pub mod block;
pub mod client;
pub mod core;
pub mod crash_injector;
pub mod device;
pub mod draw;
pub mod drive;
pub mod drive_queue;
pub mod env;
pub mod foreign;
pub mod fs;
pub mod log_store;
pub mod machine;
pub mod network;
pub mod oracle;
pub mod payload;
pub mod rng;
pub mod runner;
pub mod scenario;
pub mod shrink;
pub mod world;
