//! The binding of streams to connections, and the return of their logs.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::entry::{Origin, PartitionId};
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::ordering_log::{BindError, StreamLog};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::Region;

use super::Volumes;
use super::volume::{Log, Partition, Refusal};
use crate::target::ids::ConnId;
use crate::target::namespace::Namespaces;
use crate::wire;

/// The request to bind a stream.
#[derive(Clone, Copy, Debug)]
pub(in crate::target) struct Binding {
    /// Resume with the content of the log (P7), instead of starting anew.
    pub(in crate::target) resume: bool,
    /// The owner's generation.
    pub(in crate::target) generation: u32,
    /// The owner's released mark.
    pub(in crate::target) released: Seq,
}

/// A stream that was bound.
pub(in crate::target) struct Bound<R> {
    /// Its log, which the connection has from now on.
    pub(in crate::target) log: StreamLog<R>,
    /// The volume's namespaces on this target.
    pub(in crate::target) members: Vec<MemberNamespace>,
    /// The incarnation of the target.
    pub(in crate::target) incarnation: u32,
}

impl<R: Region> Volumes<R> {
    /// Hands the log of a stream to a connection.
    pub(in crate::target) fn bind(
        &mut self,
        conn: ConnId,
        assoc: u64,
        id: PartitionId,
        binding: Binding,
    ) -> Result<Bound<R>, Refusal> {
        let Binding { resume, generation, released } = binding;
        let refuse = |status: Status| Err((status.with_dnr(), 0));
        let incarnation = match &self.log {
            Log::Live { region, .. } => region.incarnation(),
            Log::None => return refuse(wire::status::NO_LOG),
            Log::Lost(_) => return refuse(wire::status::LOG_LOST),
        };
        let Some(volume) = self.list.iter_mut().find(|v| v.id == id.volume) else {
            return refuse(wire::status::UNKNOWN_VOLUME);
        };
        // An owner that was fenced gets this answer first (T8).
        if generation < volume.generation {
            probe::hit(Rare::FencedOwner);
            return refuse(wire::status::STALE_GENERATION);
        }
        if !volume.is_owned_by(assoc) {
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
        // The claim is not answered yet: a late write may still land (T8).
        if !volume.drained {
            return Err((wire::status::STREAM_BUSY, 0));
        }
        // Undo needs the lists of all streams at rest. A stream that is not recovered keeps the
        // others from starting (T9, T20).
        let is_early = probe::planted(Plant::T9RestartEarly);
        if !volume.recovered && !is_early {
            if volume.has_failed_log() {
                return Err((wire::status::LOG_FAILED, 0));
            }
            return refuse(wire::status::UNRECOVERED);
        }
        let Some(partition) = volume.partitions.get_mut(usize::from(id.stream.0)) else {
            return refuse(wire::status::NO_SUCH_STREAM);
        };
        let (unsettled, kept) = (partition.unsettled(), partition.kept());
        let log = match partition {
            Partition::Bound { .. } => {
                probe::hit(Rare::BindWaited);
                return Err((wire::status::STREAM_BUSY, 0));
            }
            Partition::Damaged => return refuse(wire::status::LOG_LOST),
            Partition::Home { log, .. } => log,
        };
        if kept > 0 {
            return refuse(wire::status::IN_PLACE_PENDING);
        }
        if resume && log.is_settled() {
            return refuse(wire::status::SETTLED);
        }
        if !resume && unsettled > 0 && !is_early {
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
                return Err((wire::status::LOG_FAILED, 0));
            }
        }
        // Entries that the owner has released since then free their slots.
        log.release(released);
        let carried = Partition::Bound { conn, released: log.released() };
        let Partition::Home { log, .. } = core::mem::replace(partition, carried) else {
            unreachable!("matched as Home above, and nothing came between");
        };
        self.listing = None;
        Ok(Bound { log, members: volume.members.clone(), incarnation })
    }

    /// The connection that carries a stream.
    pub(in crate::target) fn carrier(&self, id: PartitionId) -> Option<ConnId> {
        match self.find(id.volume)?.partitions.get(usize::from(id.stream.0))? {
            Partition::Bound { conn, .. } => Some(*conn),
            Partition::Home { .. } | Partition::Damaged => None,
        }
    }

    /// Takes the log of a stream back from a connection, with its live `entries`.
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
            *partition = Partition::Home { log, entries };
            volume.note_recovered();
            // A volume without an owner may now be free.
            if volume.lease.owner().is_none() {
                self.reguard(namespaces);
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
