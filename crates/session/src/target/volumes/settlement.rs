//! The end of a recovery: the log records the recovered seq of each stream, durably, before it
//! forgets any entry (T9).

use riopipe_nvme::command::Status;
use riopipe_order::entry::PartitionId;
use riopipe_order::ordering_log::{ForgetError, LogError, SettleError, StreamLog};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::Region;

use super::Volumes;
use super::refusal::Refusal;
use super::volume::{Partition, Volume};
use crate::wire;
use crate::wire::list::{Settle, SettleStream};

impl<R: Region> Volumes<R> {
    /// Settles some streams of a volume. All are checked before the first is changed. The
    /// settlement is durable before this returns. If it was interrupted, it may be repeated.
    pub(in crate::target) fn settle(&mut self, settle: &Settle, assoc: u64) -> Result<(), Refusal> {
        let refuse = |status: Status| Err(Refusal::do_not_retry(status));
        let Some(volume) = self.list.iter_mut().find(|v| v.id == settle.volume) else {
            return refuse(wire::status::UNKNOWN_VOLUME);
        };
        // This check comes before the next one, so that a fenced owner receives the reason (T8).
        if settle.generation < volume.generation {
            probe::hit(Rare::FencedOwner);
            return refuse(wire::status::STALE_GENERATION);
        }
        if !volume.is_owned_by(assoc) {
            return refuse(wire::status::NOT_OWNER);
        }
        if settle.generation != volume.generation {
            return refuse(wire::status::STALE_GENERATION);
        }
        if volume.partitions.is_empty() {
            return refuse(wire::status::NO_LOG);
        }
        if !volume.drained {
            return Err(Refusal::retry_later(wire::status::STREAM_BUSY));
        }
        check(volume, settle)?;
        self.listing = None;
        let mut result = Ok(());
        for stream in &settle.streams {
            let partition = volume.partitions.get_mut(usize::from(stream.stream.0));
            let Some(Partition::AtRest { log, entries }) = partition else {
                unreachable!("`check` has found every partition at rest");
            };
            match settle_one(log, stream) {
                Ok(in_place_entries) => *entries = in_place_entries,
                Err(_) => {
                    probe::hit(Rare::LogFailed);
                    result = Err(Refusal::retry_later(wire::status::LOG_FAILED));
                    break;
                }
            }
        }
        volume.update_recovered();
        result
    }
}

/// Checks whether every stream may be settled as requested.
fn check<R: Region>(volume: &Volume<R>, settle: &Settle) -> Result<(), Refusal> {
    let refuse = |status: Status| Err(Refusal::do_not_retry(status));
    for (i, SettleStream { stream, k, .. }) in settle.streams.iter().enumerate() {
        let Some(partition) = volume.partitions.get(usize::from(stream.0)) else {
            return refuse(wire::status::NO_SUCH_STREAM);
        };
        if settle.streams[..i].iter().any(|other| other.stream == *stream) {
            return refuse(Status::INVALID_FIELD);
        }
        match partition {
            // Only partitions at rest may be settled.
            Partition::Bound { .. } => return Err(Refusal::retry_later(wire::status::STREAM_BUSY)),
            Partition::Damaged => return refuse(wire::status::LOG_LOST),
            // A settled partition keeps its recovered seq. After its log was given up, the seq may
            // come from the log that is not valid any more, so another one is accepted.
            Partition::AtRest { log, .. }
                if log.is_settled() && log.released() != *k && !volume.in_doubt(log) =>
            {
                return refuse(wire::status::SETTLED);
            }
            Partition::AtRest { log, .. } if *k < log.released() => {
                return refuse(Status::INVALID_FIELD);
            }
            Partition::AtRest { .. } => {}
        }
    }
    Ok(())
}

/// The log store could not record the settlement of a stream, or could not be read.
#[derive(Debug, thiserror::Error)]
enum StoreError {
    #[error(transparent)]
    Settle(#[from] SettleError),
    #[error(transparent)]
    Read(#[from] LogError),
    #[error(transparent)]
    Forget(#[from] ForgetError),
}

/// Settles one stream. Returns how many entries of in-place writes its log keeps until the owner has
/// acknowledged them.
fn settle_one<R: Region>(log: &mut StreamLog<R>, stream: &SettleStream) -> Result<u32, StoreError> {
    if !log.is_settled() {
        log.settle(stream.k, stream.tag)?;
    } else if log.released() != stream.k {
        log.settle_later(stream.k, stream.tag)?;
    }
    let in_place_entries = log.scan()?.entries.len() as u32;
    if stream.keep && in_place_entries > 0 && !probe::planted(Plant::T9ForgetInPlace) {
        return Ok(in_place_entries);
    }
    log.remove_entries()?;
    Ok(0)
}

impl Settle {
    /// The partitions that are named.
    pub(in crate::target) fn partitions(&self) -> impl Iterator<Item = PartitionId> {
        self.streams.iter().map(|s| PartitionId { volume: self.volume, stream: s.stream })
    }
}
