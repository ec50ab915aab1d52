//! Metrics of a running target or volume, as OpenMetrics text for Prometheus and as JSON.
//!
//! A target and an open volume implement [`StatSource`]; the program serves it over HTTP. This
//! crate has the parts that both share: the stages of ordered writes ([`StageStat`]), their
//! encoding ([`exposition`]), and the rule that only this machine may ask ([`check_address`]).

mod address;
pub mod exposition;
mod process;
mod stage;
mod stat_source;

pub use address::{AddressError, TARGET_PORT, VOLUME_PORT, check_address};
pub use stage::{StageStat, since, with_shares};
pub use stat_source::{Start, StatError, StatSource, to_json};
