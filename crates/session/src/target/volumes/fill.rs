//! How full the logs are, for the metrics of the target. While a connection carries a stream, the
//! connection has the log, and publishes the number of its used slots ([`SharedFill`]).

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use riopipe_order::attribute::VolumeId;
use riopipe_order::log_region::HEADER_BYTES;
use riopipe_order::ordering_log::StreamLog;
use riopipe_order::region::Region;

use super::Volumes;
use super::volume::Partition;

/// The number of used slots of a log that a connection has. It is only shown, so it orders nothing.
#[derive(Clone, Debug, Default)]
pub(in crate::target) struct SharedFill(Arc<AtomicU32>);

impl SharedFill {
    /// Publishes the number of used slots of the log.
    #[inline(always)]
    pub(in crate::target) fn publish<R: Region>(&self, log: &StreamLog<R>) {
        self.0.store(used_slots(log), Ordering::Relaxed);
    }

    fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How full a target's log region is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogFill {
    /// The size of the region, bytes; 0 if the target has no log that is valid.
    pub bytes: u64,
    /// The bytes that the header and the partitions of volumes have.
    pub used_bytes: u64,
    /// The volumes, at most 16.
    pub volumes: Vec<VolumeFill>,
}

/// How full the partitions of a volume are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeFill {
    /// The volume.
    pub id: VolumeId,
    /// The bytes of its partitions.
    pub bytes: u64,
    /// The slots of all its streams together.
    pub slots: u64,
    /// How many of these are in use.
    pub used_slots: u64,
    /// The slots of one stream.
    pub stream_slots: u32,
    /// How many slots the stream uses that uses the most.
    pub fullest_stream_slots: u32,
}

impl<R: Region> Volumes<R> {
    /// How full the log region and its partitions are.
    #[must_use]
    pub fn log_fill(&self) -> LogFill {
        let Some(header) = self.live_log_header() else { return LogFill::default() };
        let volumes = header.volumes.iter().map(|record| {
            let partitions = self.find(record.id).map_or(&[][..], |volume| &volume.partitions);
            let used = partitions.iter().map(Partition::used_slots);
            VolumeFill {
                id: record.id,
                bytes: record.extent().len() as u64,
                slots: u64::from(record.streams) * u64::from(record.slots),
                used_slots: used.clone().map(u64::from).sum(),
                stream_slots: record.slots,
                fullest_stream_slots: used.max().unwrap_or(0),
            }
        });
        let volumes: Vec<VolumeFill> = volumes.collect();
        let used_bytes: u64 = volumes.iter().map(|volume| volume.bytes).sum();
        LogFill { bytes: header.len, used_bytes: HEADER_BYTES as u64 + used_bytes, volumes }
    }
}

impl<R: Region> Partition<R> {
    /// The number of its slots that are in use; 0 if it can't be read.
    fn used_slots(&self) -> u32 {
        match self {
            Self::AtRest { log, .. } => used_slots(log),
            Self::Bound { fill, .. } => fill.get(),
            Self::Damaged => 0,
        }
    }
}

fn used_slots<R: Region>(log: &StreamLog<R>) -> u32 {
    log.slots() - log.free_slots()
}
