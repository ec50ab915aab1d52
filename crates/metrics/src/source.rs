//! Whoever has figures to tell.

use std::time::{Instant, SystemTime};

use serde::Serialize;

/// Where an endpoint's figures come from. Asked in the endpoint's thread; must not take long, nor
/// any lock that somebody holds who has work to do.
pub trait Source: Send + Sync {
    /// Whose figures they are, as a few words of an error page: `A Rio target's metrics`.
    fn about(&self) -> &str;

    /// The figures now, as OpenMetrics text.
    ///
    /// # Errors
    /// [`Untold`].
    fn open_metrics(&self) -> Result<String, Untold>;

    /// The figures now, as JSON.
    ///
    /// # Errors
    /// [`Untold`].
    fn json(&self) -> Result<String, Untold>;
}

/// Why there are no figures.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Untold {
    /// What they were of is not there. The sentence is for who asks.
    #[error("{0}")]
    Gone(&'static str),
    /// They can't be put into words.
    #[error("the figures can't be encoded")]
    Unspeakable,
}

impl From<std::fmt::Error> for Untold {
    fn from(_: std::fmt::Error) -> Self {
        Self::Unspeakable
    }
}

/// `figures` as JSON.
///
/// # Errors
/// [`Untold::Unspeakable`]: on a bug only.
pub fn to_json(figures: &impl Serialize) -> Result<String, Untold> {
    serde_json::to_string(figures).map_err(|_| Untold::Unspeakable)
}

/// When somebody who tells of himself began to run.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    at: Instant,
    /// Milliseconds since 1970: tells one life from the next.
    pub unix_ms: u64,
}

impl Start {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        let unix = SystemTime::UNIX_EPOCH.elapsed();
        Self {
            at: Instant::now(),
            unix_ms: unix.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    /// How long ago it is, seconds; of a clock that is never set.
    #[must_use]
    pub fn uptime_s(&self) -> f64 {
        self.at.elapsed().as_secs_f64()
    }
}
