//! Figures of something that runs: what they look like, and an HTTP endpoint that tells them.
//!
//! Targets and open volumes tell the same way: `/metrics` is OpenMetrics text for Prometheus,
//! `/stat` is JSON, both for this machine only. Whoever tells implements [`Source`] and starts an
//! [`Endpoint`]; what all have in common is here: the stages of ordered writes ([`StageStat`]) and
//! how they are encoded ([`exposition`]).

mod address;
mod client;
mod endpoint;
pub mod exposition;
mod http;
mod source;
mod stage;

pub use address::{AddressError, check_address};
pub use endpoint::{Endpoint, MetricsError};
pub use source::{Source, Start, Untold, to_json};
pub use stage::{StageStat, since, with_shares};
