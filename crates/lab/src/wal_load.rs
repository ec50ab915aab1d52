//! Producers that append records to a log and wait until each is durable, as the transactions of a
//! database do.

use std::time::Duration;

use riopipe_wal::{AppendError, DurableError, TrimError, Wal};
use serde::Serialize;

use crate::harness::{self, SideCpu, Window, Worker};
use crate::latency::Latencies;

/// The parameters of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalLoad {
    /// Number of threads, each of which appends one record at a time.
    pub producers: u32,
    /// Length of a record in bytes.
    pub record_bytes: usize,
    /// Duration of the run.
    pub window: Window,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct WalSample {
    /// Durable records per second.
    pub records_per_s: f64,
    /// Time from the call of `append` until the record was known to be durable.
    pub latencies: Latencies,
}

/// The figures of a log over all rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WalFigures {
    /// Durable records per second: median.
    pub records_per_s: f64,
    /// Median of the time to durability in µs, over all rounds.
    pub p50_us: f64,
    /// 99th percentile of that time in µs, over all rounds.
    pub p99_us: f64,
}

/// The reason why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum WalLoadError {
    /// A record was not accepted.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// A record did not become durable.
    #[error(transparent)]
    Durable(#[from] DurableError),
    /// Records were not dropped.
    #[error(transparent)]
    Trim(#[from] TrimError),
    /// No record became durable in the measured time.
    #[error("no record became durable within {0:?}: measure for longer")]
    Nothing(Duration),
}

/// Longest time for one record.
const RECORD_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs all producers, each of which appends again as soon as its record is durable. Durable
/// records are trimmed whenever half of the log is used.
///
/// # Errors
/// [`WalLoadError`].
pub fn run(wal: &Wal, load: &WalLoad) -> Result<WalSample, WalLoadError> {
    let produce = |_, worker: &Worker<'_>| -> Result<Latencies, WalLoadError> {
        let record = vec![0x5a; load.record_bytes];
        let trim = || {
            let stat = wal.stat();
            if stat.free_blocks < stat.blocks / 2 {
                wal.trim(stat.durable)?;
            }
            Ok(())
        };
        worker.repeat(trim, || {
            let lsn = wal.append(&record)?;
            wal.wait_durable(lsn, Some(RECORD_TIMEOUT))?;
            Ok(record.len() as u64)
        })
    };
    let sample = harness::run(load.window, load.producers, SideCpu::default, produce)?;
    if sample.writes == 0 || sample.latencies.summary().count == 0 {
        return Err(WalLoadError::Nothing(load.window.duration));
    }
    Ok(WalSample { records_per_s: sample.writes_per_s(), latencies: sample.latencies })
}

impl WalFigures {
    /// The figures of all rounds.
    #[must_use]
    pub fn of(records_per_s: f64, samples: &[WalSample]) -> Self {
        let mut latencies = Latencies::new();
        samples.iter().for_each(|sample| latencies.add(&sample.latencies));
        let summary = latencies.summary();
        let us = |ns: u64| ns as f64 / 1e3;
        Self { records_per_s, p50_us: us(summary.p50_ns), p99_us: us(summary.p99_ns) }
    }
}
