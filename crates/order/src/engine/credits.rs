//! Credits: how many slots of each server's ordering log the stream may still take (T13).

use alloc::vec::Vec;

use super::{Bound, Refusal};
use crate::probe::{self, Plant, Rare};
use crate::topology::Topology;

/// The part of one server's log that belongs to this stream.
#[derive(Debug)]
struct Partition {
    /// All slots of the partition.
    slots: u32,
    /// Slots that only a forced flush may take: as many as the server has volatile members.
    reserve: u32,
}

/// The number of slots that the stream may hold in each server's log.
/// A slot is taken for every request that waits to be sent or was sent, until the request is
/// released. Each command carries the released mark, and the target reads it before it appends. So
/// a slot that is freed here is free there by the time it is needed. A replayed entry keeps its
/// slot there, and counts once here.
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
            .map(|(i, server)| Partition {
                slots: server.slots,
                reserve: topology.volatile_on(i as u16),
            })
            .collect();
        Self { partitions }
    }

    /// Checks whether `wanted[server]` more entries fit beside the `used` ones, without the reserve.
    ///
    /// # Errors
    /// [`Refusal::TooLarge`] if they would not even fit into an empty log, else [`Refusal::Full`].
    pub(super) fn check(
        &self,
        wanted: &[u32],
        used: impl Fn(usize) -> usize,
    ) -> Result<(), Refusal> {
        for (i, (partition, wanted)) in self.partitions.iter().zip(wanted).enumerate() {
            let bound = Bound::Log { server: i as u16 };
            let reserve = if probe::planted(Plant::T13NoReserve) { 0 } else { partition.reserve };
            let usable = partition.slots.saturating_sub(reserve);
            if *wanted > usable {
                return Err(Refusal::TooLarge(bound));
            }
            let full = *wanted > 0 && used(i) as u32 + wanted > usable;
            if full && !probe::planted(Plant::T13NoCredits) {
                probe::hit(Rare::LogFull);
                return Err(Refusal::Full(bound));
            }
        }
        Ok(())
    }

    /// Whether the `used` entries, those of forced flushes included, fit into every partition.
    pub(super) fn are_kept(&self, used: impl Fn(usize) -> usize) -> bool {
        let is_planted = probe::planted(Plant::T13NoCredits) || probe::planted(Plant::T13NoReserve);
        let within = |(i, partition): (usize, &Partition)| used(i) <= partition.slots as usize;
        is_planted || self.partitions.iter().enumerate().all(within)
    }

    /// Whether some server's log is half full or more. Then it is time to free space before it is
    /// needed.
    pub(super) fn half_used(&self, used: impl Fn(usize) -> usize) -> bool {
        self.partitions
            .iter()
            .enumerate()
            .any(|(i, p)| p.slots > 0 && used(i) as u32 * 2 >= p.slots.saturating_sub(p.reserve))
    }
}
