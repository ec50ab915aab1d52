//! How full the ordering log of a target is, as statistics and as metrics.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use riopipe_metrics::exposition::{gauge, gauges};
use riopipe_session::target::{LogFill, VolumeFill};
use serde::{Deserialize, Serialize};

/// How full a target's log region is. A region has 16 volumes at most.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogStat {
    /// The size of the region, bytes; 0 without a log.
    pub bytes: u64,
    /// The bytes that the header and the partitions of volumes have.
    pub used_bytes: u64,
    /// The volumes in the log.
    pub volumes: Vec<LogVolumeStat>,
}

/// How full the partitions of a volume are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogVolumeStat {
    /// The volume's id.
    pub volume: String,
    /// The bytes of its partitions.
    pub bytes: u64,
    /// The slots of all its streams together.
    pub slots: u64,
    /// How many of these are in use.
    pub used_slots: u64,
    /// The slots of one stream.
    pub stream_slots: u32,
    /// How many slots the fullest stream uses.
    pub fullest_stream_slots: u32,
}

impl From<LogFill> for LogStat {
    fn from(fill: LogFill) -> Self {
        let LogFill { bytes, used_bytes, volumes, .. } = fill;
        Self { bytes, used_bytes, volumes: volumes.into_iter().map(Into::into).collect() }
    }
}

impl From<VolumeFill> for LogVolumeStat {
    fn from(fill: VolumeFill) -> Self {
        Self {
            volume: fill.id.to_string(),
            bytes: fill.bytes,
            slots: fill.slots,
            used_slots: fill.used_slots,
            stream_slots: fill.stream_slots,
            fullest_stream_slots: fill.fullest_stream_slots,
        }
    }
}

/// Encodes the statistics as metrics.
pub(crate) fn encode(log: &LogStat, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    if log.bytes == 0 {
        return Ok(());
    }
    let (bytes, used) = (log.bytes as f64, log.used_bytes as f64);
    gauge(to, "rio_log_bytes", "The size of the log region", bytes)?;
    let help = "The bytes of it that volumes have, and its header";
    gauge(to, "rio_log_used_bytes", help, used)?;
    let mut by_volume = |name: &str, help: &str, value: fn(&LogVolumeStat) -> f64| {
        let values =
            log.volumes.iter().map(|volume| ([("volume", volume.volume.as_str())], value(volume)));
        gauges(to, name, help, values)
    };
    by_volume("rio_log_volume_bytes", "The bytes of a volume's partitions", |v| v.bytes as f64)?;
    by_volume("rio_log_slots", "The log slots of all streams of a volume", |v| v.slots as f64)?;
    let help = "The log slots of a volume that are in use";
    by_volume("rio_log_used_slots", help, |v| v.used_slots as f64)?;
    let help = "The used share of the slots of the stream that uses the most, 0 to 1";
    by_volume("rio_log_fullest_stream_ratio", help, |v| {
        f64::from(v.fullest_stream_slots) / f64::from(v.stream_slots.max(1))
    })
}
