//! Metrics of a running target, volume or file system, as OpenMetrics text for Prometheus and as
//! JSON.
//!
//! A target, an open volume and a mounted file system implement [`StatSource`]; the program serves it
//! over HTTP. This crate has the parts that they share: the stages of ordered writes ([`StageStat`]),
//! their encoding ([`exposition`]), and the rule that only this machine may ask ([`check_address`]).

mod address;
pub mod exposition;
mod process;
mod stage;
mod stat_source;

pub use address::{AddressError, FS_PORT, TARGET_PORT, VOLUME_PORT, check_address};
pub use stage::{StageStat, since, with_shares};
pub use stat_source::{Start, StatError, StatSource, to_json};
