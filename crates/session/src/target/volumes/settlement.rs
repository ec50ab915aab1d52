//! The settle command, at the end of a recovery: the log of each stream records the recovered seq
//! durably, and only then forgets the entries (trap T9).

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
    /// Settles some streams of a volume. Checks all of them before it changes the first one. The
    /// settlement is durable when this function returns. An interrupted settlement may be repeated.
    pub(in crate::target) fn settle(&mut self, settle: &Settle, assoc: u64) -> Result<(), Refusal> {
        let refuse = |status: Status| Err(Refusal::do_not_retry(status));
        let Some(volume) = self.list.iter_mut().find(|volume| volume.id == settle.volume) else {
            return refuse(wire::status::UNKNOWN_VOLUME);
        };
        // An old generation is checked before the owner, so that a fenced owner receives the status
        // for a fenced owner (trap T8).
        if settle.generation < volume.generation {
            probe::count_rare(Rare::FencedOwner);
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
        if !volume.is_drained {
            return Err(Refusal::retry_later(wire::status::STREAM_BUSY));
        }
        check_streams(volume, settle)?;
        self.listing = None;
        let mut outcome = Ok(());
        for stream in &settle.streams {
            let partition = volume.partitions.get_mut(usize::from(stream.stream.0));
            let Some(Partition::AtRest { log, entry_count }) = partition else {
                unreachable!("`check_streams` has found every partition at rest");
            };
            match settle_one(log, stream) {
                Ok(in_place_entry_count) => *entry_count = in_place_entry_count,
                Err(_) => {
                    probe::count_rare(Rare::LogFailed);
                    outcome = Err(Refusal::retry_later(wire::status::LOG_FAILED));
                    break;
                }
            }
        }
        volume.update_recovered();
        outcome
    }
}

/// Checks whether every stream may be settled at the seq that the command names.
fn check_streams<R: Region>(volume: &Volume<R>, settle: &Settle) -> Result<(), Refusal> {
    let refuse = |status: Status| Err(Refusal::do_not_retry(status));
    for (i, SettleStream { stream, k, .. }) in settle.streams.iter().enumerate() {
        let Some(partition) = volume.partitions.get(usize::from(stream.0)) else {
            return refuse(wire::status::NO_SUCH_STREAM);
        };
        if settle.streams[..i].iter().any(|other| other.stream == *stream) {
            return refuse(Status::INVALID_FIELD);
        }
        match partition {
            Partition::Bound { .. } => return Err(Refusal::retry_later(wire::status::STREAM_BUSY)),
            Partition::Damaged => return refuse(wire::status::LOG_LOST),
            // A settled partition keeps its recovered seq. There is one exception: after the log
            // was given up, the recorded seq may be from content that is not valid any more.
            Partition::AtRest { log, .. }
                if log.is_settled() && log.released() != *k && !volume.is_in_doubt(log) =>
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

/// Why a stream could not be settled: the log store could not be written, or not be read.
#[derive(Debug, thiserror::Error)]
enum StoreError {
    #[error(transparent)]
    Settle(#[from] SettleError),
    #[error(transparent)]
    Read(#[from] LogError),
    #[error(transparent)]
    Forget(#[from] ForgetError),
}

/// Settles one stream at the recovered seq `stream.k`. Returns how many entries of in-place writes
/// the log keeps until the owner has acknowledged them.
fn settle_one<R: Region>(log: &mut StreamLog<R>, stream: &SettleStream) -> Result<u32, StoreError> {
    if !log.is_settled() {
        log.settle(stream.k, stream.tag)?;
    } else if log.released() != stream.k {
        log.settle_later(stream.k, stream.tag)?;
    }
    let in_place_entry_count = log.scan()?.entries.len() as u32;
    if stream.keep && in_place_entry_count > 0 && !probe::is_bug_planted(Plant::T9ForgetInPlace) {
        return Ok(in_place_entry_count);
    }
    log.remove_entries()?;
    Ok(0)
}

impl Settle {
    /// The partitions of the streams that the command names.
    pub(in crate::target) fn partitions(&self) -> impl Iterator<Item = PartitionId> {
        self.streams
            .iter()
            .map(|settled| PartitionId { volume: self.volume, stream: settled.stream })
    }
}
