//! The messages from one connection to another: notices, and the fences that wait for
//! acknowledgements (T8).

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use riopipe_order::attribute::VolumeId;
use riopipe_order::probe::{self, Plant};
use riopipe_order::region::Region;

use super::Shared;
use crate::target::ids::ConnId;

/// A request to a connection, because of an event on another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The association ends.
    Close(&'static str),
    /// End the stream if it belongs to this volume. Acknowledge once every device operation that is
    /// in flight now has come back (T8).
    Fence {
        /// The fence to acknowledge.
        id: u64,
        /// The volume that gets a new owner, is released or is forgotten.
        volume: VolumeId,
        /// The volume gets a new owner or is forgotten, so the connections of all associations are
        /// asked. Otherwise its owner releases it, and only connections of the owner are asked.
        claimed: bool,
    },
    /// Every operation for which a fence of this connection waited has come back.
    Fenced {
        /// The fence.
        id: u64,
    },
    /// A round of FLUSHes of a drive has ended. So the success of a FLUSH of this connection may be
    /// certain now (T29).
    FlushRoundEnded,
}

/// A fence that has been raised: a connection, the *claimant*, waits for others (T8).
#[derive(Debug)]
pub(super) struct Fence {
    /// The connections that have not acknowledged the fence yet.
    waiting_for: BTreeSet<ConnId>,
    /// The connection that waits.
    claimant: ConnId,
}

impl<R: Region> Shared<R> {
    /// Leaves a notice for a connection.
    pub(in crate::target) fn leave_notice(&mut self, conn: ConnId, notice: Notice) {
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.notices.push(notice);
            self.wake.push(conn);
        }
    }

    /// The notices left for a connection.
    pub(in crate::target) fn take_notices(&mut self, conn: ConnId) -> Vec<Notice> {
        self.conns.get_mut(&conn).map(|e| core::mem::take(&mut e.notices)).unwrap_or_default()
    }

    /// Raises a fence for `claimant`: asks connections that may have writes in flight to the volume's
    /// namespaces to drain. With `only_of`, asks only those of that association. The I/O queues of
    /// the claimant are asked, too: an earlier attempt of the claimant to recover may have left a
    /// late write (T8). Returns the id of the fence; `None` if there is nothing to wait for.
    pub(in crate::target) fn raise_fence(
        &mut self,
        claimant: ConnId,
        volume: VolumeId,
        only_of: Option<u64>,
    ) -> Option<u64> {
        let Self { conns, controllers, namespaces, volumes, writers, .. } = self;
        let members = volumes.find(volume).into_iter().flat_map(|v| &v.members);
        let members = members.filter_map(|m| namespaces.find(m.nsid)).map(|(ns_index, _)| ns_index);
        let mut waiting_for = writers.of(members);
        waiting_for.retain(|conn| {
            *conn != claimant
                && conns.get(conn).is_some_and(|entry| match only_of {
                    None => true,
                    Some(association) => {
                        controllers.get(&entry.cntlid).is_some_and(|c| c.association == association)
                    }
                })
        });
        if waiting_for.is_empty() {
            return None;
        }
        let id = self.next_fence;
        self.next_fence += 1;
        for conn in &waiting_for {
            self.leave_notice(*conn, Notice::Fence { id, volume, claimed: only_of.is_none() });
        }
        if only_of.is_none() && probe::planted(Plant::T8ClaimNoWait) {
            return None;
        }
        self.fences.insert(id, Fence { waiting_for, claimant });
        if only_of.is_none() {
            self.volumes.fence_raised(volume, id, &self.namespaces);
        }
        Some(id)
    }

    /// Notes that `conn` has no operation left for which fence `id` waits.
    pub(in crate::target) fn acknowledge(&mut self, id: u64, conn: ConnId) {
        let Some(fence) = self.fences.get_mut(&id) else {
            return;
        };
        fence.waiting_for.remove(&conn);
        if fence.waiting_for.is_empty() {
            let claimant = fence.claimant;
            self.fences.remove(&id);
            self.volumes.fence_ended(id, &self.namespaces);
            self.leave_notice(claimant, Notice::Fenced { id });
        }
    }

    /// The fences that `conn` has to acknowledge.
    pub(super) fn fences_of(&self, conn: ConnId) -> Vec<u64> {
        self.fences
            .iter()
            .filter(|(_, f)| f.waiting_for.contains(&conn))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Notes that `conn` is to check again at the next end of a round of FLUSHes of a drive (T29).
    pub(in crate::target) fn await_flush_round(&mut self, ns_index: usize, conn: ConnId) {
        let conns = self.in_doubt.entry(ns_index).or_default();
        if !conns.contains(&conn) {
            conns.push(conn);
        }
    }

    /// Notes that a round of FLUSHes of a drive has ended: the connections that wait for it check
    /// again.
    pub(in crate::target) fn flush_round_ended(&mut self, ns_index: usize) {
        for conn in self.in_doubt.remove(&ns_index).unwrap_or_default() {
            self.leave_notice(conn, Notice::FlushRoundEnded);
        }
    }

    /// The connections to wake because of the last changes.
    pub(in crate::target) fn take_conns_to_wake(&mut self) -> Vec<ConnId> {
        core::mem::take(&mut self.wake)
    }

    /// Leaves a notice for every connection that it is to close. Returns the connections to wake.
    pub fn close_all(&mut self, why: &'static str) -> Vec<ConnId> {
        let all: Vec<ConnId> = self.conns.keys().copied().collect();
        for conn in all {
            self.leave_notice(conn, Notice::Close(why));
        }
        self.take_conns_to_wake()
    }
}
