//! Binds the streams of a volume to connections, and takes the logs of the streams back when the
//! connections end.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::entry::{Origin, PartitionId};
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::ordering_log::{BindError, StreamLog};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::Region;

use super::Volumes;
use super::fill::SharedFill;
use super::refusal::Refusal;
use super::volume::{Partition, TargetLog};
use crate::target::ids::ConnId;
use crate::target::namespace::Namespaces;
use crate::wire;

/// The request to bind a stream.
#[derive(Clone, Copy, Debug)]
pub(in crate::target) struct Binding {
    /// Whether the stream continues with the entries that its log has (promise P7). Otherwise the
    /// stream starts anew with an empty log.
    pub(in crate::target) resume: bool,
    /// The owner's generation.
    pub(in crate::target) generation: u32,
    /// The owner's released mark.
    pub(in crate::target) released: Seq,
}

/// The result of a bind.
pub(in crate::target) struct Bound<R> {
    /// The log of the stream. It belongs to the connection from now on.
    pub(in crate::target) log: StreamLog<R>,
    /// The place where the connection publishes how full the log is.
    pub(in crate::target) fill: SharedFill,
    /// The volume's namespaces on this target.
    pub(in crate::target) members: Vec<MemberNamespace>,
    /// The incarnation of the target.
    pub(in crate::target) incarnation: u32,
}

impl<R: Region> Volumes<R> {
    /// Binds stream `id` of a volume to the connection `conn`, which gets the log of the stream.
    ///
    /// First checks the volume: its owner and generation, its log, and whether recovery has ended
    /// for all streams. Then checks the partition of the stream. Changes nothing before all checks
    /// have passed.
    pub(in crate::target) fn bind(
        &mut self,
        conn: ConnId,
        association: u64,
        id: PartitionId,
        binding: Binding,
    ) -> Result<Bound<R>, Refusal> {
        let Binding { resume, generation, released } = binding;
        let refuse = |status: Status| Err(Refusal::do_not_retry(status));
        let incarnation = match &self.target_log {
            TargetLog::Live { region, .. } => region.incarnation(),
            TargetLog::None => return refuse(wire::status::NO_LOG),
            TargetLog::Lost(_) => return refuse(wire::status::LOG_LOST),
        };
        let Some(volume) = self.list.iter_mut().find(|volume| volume.id == id.volume) else {
            return refuse(wire::status::UNKNOWN_VOLUME);
        };
        // An old generation is checked before the owner, so that a fenced owner receives the status
        // for a fenced owner (trap T8).
        if generation < volume.generation {
            probe::count_rare(Rare::FencedOwner);
            return refuse(wire::status::STALE_GENERATION);
        }
        if !volume.is_owned_by(association) {
            return refuse(wire::status::NOT_OWNER);
        }
        // The owner has never claimed the volume with a higher generation here.
        if generation != volume.generation {
            return refuse(wire::status::STALE_GENERATION);
        }
        if volume.is_log_lost {
            return refuse(wire::status::LOG_LOST);
        }
        // The volume was claimed for an engine that keeps no log.
        if volume.partitions.is_empty() {
            return refuse(wire::status::NO_LOG);
        }
        // Operations that were in flight at the claim may still write. The claim has no completion
        // yet (trap T8).
        if !volume.is_drained {
            return Err(Refusal::retry_later(wire::status::STREAM_BUSY));
        }
        // Recovery lists the entries of all streams of the volume, to find the blocks to undo. A
        // stream that starts earlier would change these entries. So no stream starts before all
        // streams are recovered (traps T9, T20).
        let skips_recovery_check = probe::is_bug_planted(Plant::T9RestartEarly);
        if !volume.is_recovered && !skips_recovery_check {
            if volume.has_failed_log() {
                return Err(Refusal::retry_later(wire::status::LOG_FAILED));
            }
            return refuse(wire::status::UNRECOVERED);
        }
        let Some(partition) = volume.partitions.get_mut(usize::from(id.stream.0)) else {
            return refuse(wire::status::NO_SUCH_STREAM);
        };
        let unsettled_entry_count = partition.unsettled_entry_count();
        let in_place_entry_count = partition.in_place_entry_count();
        let log = match partition {
            Partition::Bound { .. } => {
                probe::count_rare(Rare::BindWaited);
                return Err(Refusal::retry_later(wire::status::STREAM_BUSY));
            }
            Partition::Damaged => return refuse(wire::status::LOG_LOST),
            Partition::AtRest { log, .. } => log,
        };
        // The caller has not acknowledged the in-place updates of dropped groups (trap T9).
        if in_place_entry_count > 0 {
            return refuse(wire::status::IN_PLACE_PENDING);
        }
        // Recovery has cut the log meanwhile, so the entries to continue with are gone.
        if resume && log.is_settled() {
            return refuse(wire::status::SETTLED);
        }
        if !resume && unsettled_entry_count > 0 && !skips_recovery_check {
            return refuse(wire::status::UNRECOVERED);
        }
        let origin = Origin { generation, incarnation };
        let bound = if resume { log.resume(origin) } else { log.start(origin, released) };
        match bound {
            Ok(()) => {}
            Err(BindError::Settled { .. }) => return refuse(wire::status::SETTLED),
            Err(BindError::Generation { .. } | BindError::Incarnation { .. }) => {
                return refuse(wire::status::STALE_GENERATION);
            }
            Err(BindError::Region(_)) => {
                probe::count_rare(Rare::LogFailed);
                return Err(Refusal::retry_later(wire::status::LOG_FAILED));
            }
        }
        // The owner may have released more entries than the log knows. The slots of these entries
        // become free.
        log.release(released);
        let fill = SharedFill::default();
        fill.publish(log);
        let bound = Partition::Bound { conn, released: log.released(), fill: fill.clone() };
        let Partition::AtRest { log, .. } = core::mem::replace(partition, bound) else {
            unreachable!("matched as `AtRest` above, and not changed since then");
        };
        self.listing = None;
        Ok(Bound { log, fill, members: volume.members.clone(), incarnation })
    }

    /// The connection that carries a stream; `None` if the stream is bound to none.
    pub(in crate::target) fn carrier(&self, id: PartitionId) -> Option<ConnId> {
        match self.find(id.volume)?.partitions.get(usize::from(id.stream.0))? {
            Partition::Bound { conn, .. } => Some(*conn),
            Partition::AtRest { .. } | Partition::Damaged => None,
        }
    }

    /// Takes the log of a stream back from the connection that carried the stream. `entry_count` is
    /// the number of entries of the log that are not released ([`count_live_entries`]).
    pub(in crate::target) fn return_log(
        &mut self,
        conn: ConnId,
        log: StreamLog<R>,
        entry_count: u32,
        namespaces: &Namespaces,
    ) {
        let PartitionId { volume, stream } = log.id();
        let Some(volume) = self.find_mut(volume) else {
            return;
        };
        if let Some(partition) = volume.partitions.get_mut(usize::from(stream.0))
            && matches!(partition, Partition::Bound { conn: c, .. } if *c == conn)
        {
            *partition = Partition::AtRest { log, entry_count };
            volume.update_recovered();
            // Without this stream, a volume without an owner may be free now.
            if volume.lease.owner().is_none() {
                self.update_guards(namespaces);
            }
        }
    }
}

/// Counts the entries of a log that are not released.
pub(in crate::target) fn count_live_entries<R: Region>(log: &StreamLog<R>) -> u32 {
    if log.free_slots() == log.slots() {
        return 0;
    }
    // A slot in use may have an entry that is released already, so the entries are counted one by
    // one. In a log that can't be read, each slot in use counts as an entry that waits for
    // recovery.
    log.scan().map_or(log.slots() - log.free_slots(), |scan| scan.entries.len() as u32)
}
