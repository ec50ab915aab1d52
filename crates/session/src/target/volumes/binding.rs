//! Binds streams to connections, and takes their logs back when the connections end.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::entry::{Origin, PartitionId};
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::ordering_log::{BindError, StreamLog};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::Region;

use super::Volumes;
use super::refusal::Refusal;
use super::volume::{Partition, TargetLog};
use crate::target::ids::ConnId;
use crate::target::namespace::Namespaces;
use crate::wire;

/// The request to bind a stream.
#[derive(Clone, Copy, Debug)]
pub(in crate::target) struct Binding {
    /// The stream goes on with the entries that its log has (P7). Otherwise it starts anew, with an
    /// empty log.
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
    /// The volume's namespaces on this target.
    pub(in crate::target) members: Vec<MemberNamespace>,
    /// The incarnation of the target.
    pub(in crate::target) incarnation: u32,
}

impl<R: Region> Volumes<R> {
    /// Binds stream `id` of a volume to connection `conn`, so that the connection can append to the
    /// stream's log.
    ///
    /// First come the checks of the volume: the owner and its generation, the log, and whether
    /// recovery has ended for all streams. Then come those of the stream's own partition. Nothing
    /// has changed before all of them pass.
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
        let Some(volume) = self.list.iter_mut().find(|v| v.id == id.volume) else {
            return refuse(wire::status::UNKNOWN_VOLUME);
        };
        // This check comes before the next one, so that a fenced owner receives the reason (T8).
        if generation < volume.generation {
            probe::hit(Rare::FencedOwner);
            return refuse(wire::status::STALE_GENERATION);
        }
        if !volume.is_owned_by(association) {
            return refuse(wire::status::NOT_OWNER);
        }
        if generation != volume.generation {
            return refuse(wire::status::STALE_GENERATION);
        }
        if volume.lost {
            return refuse(wire::status::LOG_LOST);
        }
        if volume.partitions.is_empty() {
            return refuse(wire::status::NO_LOG);
        }
        // Operations that were in flight at the claim have not all come back. One of them may still
        // write, so the claim is not answered yet (T8).
        if !volume.drained {
            return Err(Refusal::retry_later(wire::status::STREAM_BUSY));
        }
        // To find the blocks to undo, recovery lists the entries of all streams of the volume. A
        // stream that starts before that would change them. So no stream starts before all of them
        // are recovered (T9, T20).
        let skips_recovery_check = probe::planted(Plant::T9RestartEarly);
        if !volume.recovered && !skips_recovery_check {
            if volume.has_failed_log() {
                return Err(Refusal::retry_later(wire::status::LOG_FAILED));
            }
            return refuse(wire::status::UNRECOVERED);
        }
        let Some(partition) = volume.partitions.get_mut(usize::from(id.stream.0)) else {
            return refuse(wire::status::NO_SUCH_STREAM);
        };
        let unsettled_entries = partition.unsettled_entries();
        let in_place_entries = partition.in_place_entries();
        let log = match partition {
            Partition::Bound { .. } => {
                probe::hit(Rare::BindWaited);
                return Err(Refusal::retry_later(wire::status::STREAM_BUSY));
            }
            Partition::Damaged => return refuse(wire::status::LOG_LOST),
            Partition::AtRest { log, .. } => log,
        };
        if in_place_entries > 0 {
            return refuse(wire::status::IN_PLACE_PENDING);
        }
        if resume && log.is_settled() {
            return refuse(wire::status::SETTLED);
        }
        if !resume && unsettled_entries > 0 && !skips_recovery_check {
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
                probe::hit(Rare::LogFailed);
                return Err(Refusal::retry_later(wire::status::LOG_FAILED));
            }
        }
        // The owner may have released more entries than the log knows. Their slots become free.
        log.release(released);
        let bound = Partition::Bound { conn, released: log.released() };
        let Partition::AtRest { log, .. } = core::mem::replace(partition, bound) else {
            unreachable!("matched as `AtRest` above, and not changed since then");
        };
        self.listing = None;
        Ok(Bound { log, members: volume.members.clone(), incarnation })
    }

    /// The connection that carries a stream; `None` if the stream is bound to none.
    pub(in crate::target) fn carrier(&self, id: PartitionId) -> Option<ConnId> {
        match self.find(id.volume)?.partitions.get(usize::from(id.stream.0))? {
            Partition::Bound { conn, .. } => Some(*conn),
            Partition::AtRest { .. } | Partition::Damaged => None,
        }
    }

    /// Takes the log of a stream back from a connection that carried the stream. `entries`: how many
    /// entries of the log are not released ([`live_entries`]).
    pub(in crate::target) fn return_log(
        &mut self,
        conn: ConnId,
        log: StreamLog<R>,
        entries: u32,
        namespaces: &Namespaces,
    ) {
        let PartitionId { volume, stream } = log.id();
        let Some(volume) = self.list.iter_mut().find(|v| v.id == volume) else {
            return;
        };
        if let Some(partition) = volume.partitions.get_mut(usize::from(stream.0))
            && matches!(partition, Partition::Bound { conn: c, .. } if *c == conn)
        {
            *partition = Partition::AtRest { log, entries };
            volume.update_recovered();
            // A volume without an owner may now be free.
            if volume.lease.owner().is_none() {
                self.update_guards(namespaces);
            }
        }
    }
}

/// The number of entries of a log that are not released.
pub(in crate::target) fn live_entries<R: Region>(log: &StreamLog<R>) -> u32 {
    if log.free() == log.slots() {
        return 0;
    }
    // Not all slots in use have an unreleased entry, so the entries are counted. In a log that
    // can't be read any more, each slot in use counts as an entry that waits for recovery.
    log.scan().map_or(log.slots() - log.free(), |scan| scan.entries.len() as u32)
}
