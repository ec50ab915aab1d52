//! Credits: the count of the slots that the stream takes in each server's ordering log.
//!
//! A target cannot append to a full log, so the initiator must not send it an entry without a free
//! slot. The initiator counts the slots itself: a request takes a slot from its admission until it
//! is released (trap T13).
//!
//! The last slots of each log are a reserve for the engine's own flush. Without it, a log full of
//! unflushed writes could not be freed any more.

use alloc::vec::Vec;

use super::{Bound, Refusal};
use crate::probe::{self, Plant, Rare};
use crate::topology::Topology;

/// The part of one server's log that belongs to this stream.
#[derive(Debug)]
struct Partition {
    /// The number of slots of the partition.
    slots: u32,
    /// The number of slots that only a forced flush may take: as many as the server has volatile
    /// members.
    reserve: u32,
}

impl Partition {
    /// The number of slots that a group of the caller may take.
    fn usable_slots(&self) -> u32 {
        self.slots.saturating_sub(self.reserve)
    }
}

/// The number of slots that the stream may take in each server's log.
///
/// Each command carries the released mark, and the target reads the mark before it appends. So a
/// slot that is free by this count is free in the log by the time a later command needs it. A
/// replayed entry keeps its slot in the log, so this count includes it once.
#[derive(Debug)]
pub(super) struct Credits {
    partitions: Vec<Partition>,
}

impl Credits {
    pub(super) fn new(topology: &Topology) -> Self {
        let partitions = topology
            .servers()
            .iter()
            .enumerate()
            .map(|(index, server)| Partition {
                slots: server.slots,
                reserve: topology.volatile_count_on(index as u16),
            })
            .collect();
        Self { partitions }
    }

    /// The slots for an engine whose own FLUSH needs no entry, so that it needs no reserve.
    pub(super) fn without_reserve(topology: &Topology) -> Self {
        let partition = |slots: u32| Partition { slots, reserve: 0 };
        let servers = topology.servers().iter();
        Self { partitions: servers.map(|server| partition(server.slots)).collect() }
    }

    /// Checks whether `new_entries[server]` more entries fit into each log beside the
    /// `used_slots(server)` entries there, without the reserve.
    ///
    /// # Errors
    /// [`Refusal::TooLarge`] if they would not even fit into an empty log, else [`Refusal::Full`].
    pub(super) fn check_space(
        &self,
        new_entries: &[u32],
        used_slots: impl Fn(usize) -> usize,
    ) -> Result<(), Refusal> {
        for (server, (partition, &new)) in self.partitions.iter().zip(new_entries).enumerate() {
            let bound = Bound::Log { server: server as u16 };
            let usable = if probe::is_bug_planted(Plant::T13NoReserve) {
                partition.slots
            } else {
                partition.usable_slots()
            };
            if new > usable {
                return Err(Refusal::TooLarge(bound));
            }
            let is_full = new > 0 && used_slots(server) as u32 + new > usable;
            if is_full && !probe::is_bug_planted(Plant::T13NoCredits) {
                probe::count_rare(Rare::LogFull);
                return Err(Refusal::Full(bound));
            }
        }
        Ok(())
    }

    /// Whether the `used_slots(server)` entries, those of forced flushes included, fit into each
    /// log.
    pub(super) fn are_respected(&self, used_slots: impl Fn(usize) -> usize) -> bool {
        let is_planted = probe::is_bug_planted(Plant::T13NoCredits)
            || probe::is_bug_planted(Plant::T13NoReserve);
        let fits = |(server, partition): (usize, &Partition)| {
            used_slots(server) <= partition.slots as usize
        };
        is_planted || self.partitions.iter().enumerate().all(fits)
    }

    /// Whether half of the usable slots of some log are taken. Then it is time to free slots,
    /// before the log is full.
    pub(super) fn is_any_log_half_full(&self, used_slots: impl Fn(usize) -> usize) -> bool {
        let is_half_full = |(server, partition): (usize, &Partition)| {
            partition.slots > 0 && used_slots(server) as u32 * 2 >= partition.usable_slots()
        };
        self.partitions.iter().enumerate().any(is_half_full)
    }
}
