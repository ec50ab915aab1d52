//! What crosses from one connection to another: notices, and the fences that wait for answers (T8).

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use riopipe_order::attribute::VolumeId;
use riopipe_order::probe::{self, Plant};
use riopipe_order::region::Region;

use super::shared::{ConnId, Shared};

/// Something that a connection must do, because of what happened on another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The association ends.
    Close(&'static str),
    /// Give up the stream of this volume if bound to one, and say so once every device operation
    /// that is under way now has come back (T8).
    Fence {
        /// The fence to acknowledge.
        id: u64,
        /// The volume that changes hands, or is given back.
        volume: VolumeId,
        /// It changes hands.
        claimed: bool,
    },
    /// Everything that a fence of this connection waited for has come back.
    Fenced {
        /// The fence.
        id: u64,
    },
    /// FLUSHes of a drive have been accounted for: one of this connection's may be believed (T29).
    Flushes,
}

/// What a connection waits for (T8).
#[derive(Debug)]
pub(super) struct Fence {
    /// Connections that have not been drained yet.
    waiting: BTreeSet<ConnId>,
    /// The connection that waits.
    pub(super) claimant: ConnId,
}

impl<R: Region> Shared<R> {
    /// Leaves a notice for a connection.
    pub(super) fn leave(&mut self, conn: ConnId, notice: Notice) {
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.notices.push(notice);
            self.wake.push(conn);
        }
    }

    /// The notices left for a connection.
    pub(super) fn take_notices(&mut self, conn: ConnId) -> Vec<Notice> {
        self.conns.get_mut(&conn).map(|e| core::mem::take(&mut e.notices)).unwrap_or_default()
    }

    /// Has every connection of association `of` drained that may have writes under way to the
    /// volume's namespaces, for `claimant`; of all associations if `None`, the claimant's own queues
    /// among them: what an earlier attempt of its own to recover has begun is a ghost, too (T8).
    /// Returns the fence, or `None` if there is nothing to wait for.
    pub(super) fn raise_fence(
        &mut self,
        claimant: ConnId,
        volume: VolumeId,
        of: Option<u64>,
    ) -> Option<u64> {
        let Self { conns, controllers, namespaces, volumes, writers, .. } = self;
        let members = volumes.find(volume).into_iter().flat_map(|v| &v.members);
        let members = members.filter_map(|m| namespaces.find(m.nsid)).map(|(ns, _)| ns);
        let mut waiting = writers.of(members);
        waiting.retain(|conn| {
            *conn != claimant
                && conns.get(conn).is_some_and(|entry| match of {
                    None => true,
                    Some(assoc) => controllers.get(&entry.cntlid).is_some_and(|c| c.assoc == assoc),
                })
        });
        if waiting.is_empty() {
            return None;
        }
        let id = self.next_fence;
        self.next_fence += 1;
        for conn in &waiting {
            self.leave(*conn, Notice::Fence { id, volume, claimed: of.is_none() });
        }
        if of.is_none() && probe::planted(Plant::T8ClaimNoWait) {
            return None;
        }
        self.fences.insert(id, Fence { waiting, claimant });
        Some(id)
    }

    /// `conn` has nothing left that fence `id` waits for.
    pub(super) fn acknowledge(&mut self, id: u64, conn: ConnId) {
        let Some(fence) = self.fences.get_mut(&id) else {
            return;
        };
        fence.waiting.remove(&conn);
        if fence.waiting.is_empty() {
            let claimant = fence.claimant;
            self.fences.remove(&id);
            self.leave(claimant, Notice::Fenced { id });
        }
    }

    pub(super) fn fences_of(&self, conn: ConnId) -> Vec<u64> {
        self.fences.iter().filter(|(_, f)| f.waiting.contains(&conn)).map(|(id, _)| *id).collect()
    }

    /// `conn` is to look again at the next end of a round of FLUSHes of a drive (T29).
    pub(super) fn await_flushes(&mut self, ns: usize, conn: ConnId) {
        let conns = self.doubting.entry(ns).or_default();
        if !conns.contains(&conn) {
            conns.push(conn);
        }
    }

    /// A round of FLUSHes of a drive has ended.
    pub(super) fn flushes_accounted(&mut self, ns: usize) {
        for conn in self.doubting.remove(&ns).unwrap_or_default() {
            self.leave(conn, Notice::Flushes);
        }
    }

    /// The connections to wake because of what was just done.
    pub(super) fn take_wake(&mut self) -> Vec<ConnId> {
        core::mem::take(&mut self.wake)
    }

    /// Every connection of every association, to end them all.
    pub fn close_all(&mut self, why: &'static str) -> Vec<ConnId> {
        let all: Vec<ConnId> = self.conns.keys().copied().collect();
        for conn in all {
            self.leave(conn, Notice::Close(why));
        }
        self.take_wake()
    }
}
