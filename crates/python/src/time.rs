//! Marks, time limits, and waits that Ctrl-C ends.

use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use riopipe_capi::{Failure, RIOP_FULL, RIOP_TIMEOUT};

use crate::error::raise;

/// How long a call waits before it lets the interpreter handle signals.
const SLICE: Duration = Duration::from_millis(200);

/// The marks of a stream.
#[pyclass(frozen, get_all, eq, hash, module = "riopipe")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Marks {
    /// Each group up to this one is complete on all targets.
    complete: u64,
    /// Each group up to this one is durable.
    durable: u64,
}

impl From<riopipe::Marks> for Marks {
    fn from(marks: riopipe::Marks) -> Self {
        Self { complete: marks.complete.0, durable: marks.durable.0 }
    }
}

#[pymethods]
impl Marks {
    fn __repr__(&self) -> String {
        format!("Marks(complete={}, durable={})", self.complete, self.durable)
    }
}

/// A time limit in seconds; `None` for no limit.
pub(crate) fn limit(timeout: Option<f64>) -> PyResult<Option<Duration>> {
    timeout.map(seconds).transpose()
}

/// A time in seconds.
pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        PyValueError::new_err(format!(
            "{seconds} is no time in seconds: from 0 on; None is no limit"
        ))
    })
}

/// Waits with `wait`, which gets a limit for each attempt. Between two attempts the interpreter handles signals, so that
/// Ctrl-C ends the wait. Each attempt ends as soon as its condition is true, so no latency depends on this.
pub(crate) fn sliced<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut wait: impl FnMut(Duration) -> Result<T, Failure> + Send,
) -> PyResult<T> {
    let begun = Instant::now();
    loop {
        let left = timeout.map_or(SLICE, |timeout| timeout.saturating_sub(begun.elapsed()));
        match py.detach(|| wait(left.min(SLICE))) {
            Err(failure) if left > SLICE || timeout.is_none() => match failure.code {
                RIOP_TIMEOUT | RIOP_FULL => py.check_signals()?,
                _ => return Err(raise(failure)),
            },
            result => return result.map_err(raise),
        }
    }
}
