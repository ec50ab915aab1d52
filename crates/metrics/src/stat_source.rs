//! The sources of metrics.

use std::time::{Instant, SystemTime};

use serde::Serialize;

/// The metrics of a running target or volume. A server of any kind may ask for them, at any time
/// and from any thread: an implementation answers at once and takes no lock that is held during
/// work.
pub trait StatSource: Send + Sync {
    /// The owner of the metrics, in a few words for an error page: `A Rio target's metrics`.
    fn about(&self) -> &str;

    /// The current values, as OpenMetrics text.
    ///
    /// # Errors
    /// [`StatError`].
    fn open_metrics(&self) -> Result<String, StatError>;

    /// The current values, as JSON.
    ///
    /// # Errors
    /// [`StatError`].
    fn json(&self) -> Result<String, StatError>;

    /// Whether the source works.
    ///
    /// # Errors
    /// [`StatError::Gone`], or [`StatError::Unhealthy`] with the reason.
    fn health(&self) -> Result<(), StatError>;
}

/// The reason why there are no metrics.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatError {
    /// The described target or volume is gone. The sentence is for the client.
    #[error("{0}")]
    Gone(&'static str),
    /// The target or volume needs help. The sentence is for the client.
    #[error("{0}")]
    Unhealthy(String),
    /// The values can't be encoded.
    #[error("the figures can't be encoded")]
    Encoding,
}

impl From<std::fmt::Error> for StatError {
    fn from(_: std::fmt::Error) -> Self {
        Self::Encoding
    }
}

/// `figures` as JSON.
///
/// # Errors
/// [`StatError::Encoding`], on a bug only.
pub fn to_json(figures: &impl Serialize) -> Result<String, StatError> {
    serde_json::to_string(figures).map_err(|_| StatError::Encoding)
}

/// The time at which a source began to run.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    at: Instant,
    /// Milliseconds since 1970; it distinguishes one run from the next.
    pub unix_ms: u64,
}

impl Start {
    /// The current time.
    #[must_use]
    pub fn now() -> Self {
        let unix = SystemTime::UNIX_EPOCH.elapsed();
        Self {
            at: Instant::now(),
            unix_ms: unix.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    /// Time since then in seconds, on a clock that is never set.
    #[must_use]
    pub fn uptime_s(&self) -> f64 {
        self.at.elapsed().as_secs_f64()
    }
}
