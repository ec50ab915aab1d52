//! Credits: how many slots of each server's ordering log the stream may still take (T13).

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::Bound;
use crate::attribute::Seq;
use crate::probe::{self, Plant, Rare};
use crate::topology::Topology;

#[derive(Debug)]
struct ServerCredits {
    slots: u32,
    /// Slots that only a forced flush may take: as many as the server has volatile members.
    reserve: u32,
    /// Last seq of each entry in the log, oldest first.
    used: VecDeque<Seq>,
}

/// What the stream holds in each server's log.
///
/// An entry is given back when the released mark has passed it: each command carries the mark, and
/// the target takes it in before it appends, so a slot freed here is free there by the time it is
/// needed. A replayed entry keeps its slot there, and so its credit here.
#[derive(Debug)]
pub(super) struct Credits {
    servers: Vec<ServerCredits>,
}

impl Credits {
    pub(super) fn new(topology: &Topology) -> Self {
        let servers = topology
            .servers()
            .iter()
            .enumerate()
            .map(|(i, server)| ServerCredits {
                slots: server.slots,
                reserve: topology.volatile_on(i as u16),
                used: VecDeque::with_capacity(server.slots.min(1 << 16) as usize),
            })
            .collect();
        Self { servers }
    }

    /// Whether `wanted[server]` more entries fit beside what is used, without the reserve.
    pub(super) fn check(&self, wanted: &[u32]) -> Result<(), (Bound, bool)> {
        for (i, (server, wanted)) in self.servers.iter().zip(wanted).enumerate() {
            let bound = Bound::Log { server: i as u16 };
            let reserve = if probe::planted(Plant::T13NoReserve) { 0 } else { server.reserve };
            let usable = server.slots.saturating_sub(reserve);
            if *wanted > usable {
                return Err((bound, true));
            }
            let full = *wanted > 0 && server.used.len() as u32 + wanted > usable;
            if full && !probe::planted(Plant::T13NoCredits) {
                probe::hit(Rare::LogFull);
                return Err((bound, false));
            }
        }
        Ok(())
    }

    /// An entry that ends with `seq` goes to `server`.
    pub(super) fn take(&mut self, server: u16, seq: Seq) {
        let server = &mut self.servers[usize::from(server)];
        let planted = probe::planted(Plant::T13NoCredits) || probe::planted(Plant::T13NoReserve);
        debug_assert!(
            (server.used.len() as u32) < server.slots || planted,
            "T13: within the partition"
        );
        server.used.push_back(seq);
    }

    /// The last entry that went to `server` now ends with `seq`: a group was merged into it.
    pub(super) fn stretch(&mut self, server: u16, seq: Seq) {
        if let Some(last) = self.servers[usize::from(server)].used.back_mut() {
            *last = seq;
        }
    }

    /// Entries up to `mark` are released.
    pub(super) fn release(&mut self, mark: Seq) {
        for server in &mut self.servers {
            while server.used.front().is_some_and(|seq| *seq <= mark) {
                server.used.pop_front();
            }
        }
    }

    /// Whether some server's log is half full or more: time to make room before it is needed.
    pub(super) fn half_used(&self) -> bool {
        self.servers
            .iter()
            .any(|s| s.slots > 0 && s.used.len() as u32 * 2 >= s.slots.saturating_sub(s.reserve))
    }
}
