//! The messages from one connection to another: notices, and the fences that wait for
//! acknowledgements (trap T8).
//!
//! A connection that needs something from another one leaves a [`Notice`] here. The environment
//! then wakes the other connection, which may belong to another core.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_nvme::command::AbortTarget;
use riopipe_order::attribute::VolumeId;
use riopipe_order::probe::{self, Plant};
use riopipe_order::region::Region;

use super::{ConnEntry, Controller, Shared};
use crate::target::block_locks::LockTicket;
use crate::target::ids::ConnId;

/// A request to a connection, because of an event on another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The connection must be closed, for this reason.
    Close(&'static str),
    /// The connection must end its stream if the stream belongs to this volume. It must acknowledge
    /// the fence when every device operation that is in flight now has come back (trap T8).
    Fence {
        /// The fence to acknowledge.
        id: u64,
        /// The volume that gets a new owner, is released or is forgotten.
        volume: VolumeId,
        /// The connections that must acknowledge the fence.
        scope: FenceScope,
    },
    /// The connection must acknowledge the fence when the device operations that are in flight now
    /// and may change these blocks have come back. Its stream goes on.
    Drain {
        /// The fence to acknowledge.
        id: u64,
        /// The index of the namespace.
        ns_index: usize,
        /// The blocks.
        blocks: Range<u64>,
    },
    /// A command of this connection may use the blocks for which it has waited.
    BlocksLocked {
        /// The command's lock of the blocks.
        ticket: LockTicket,
    },
    /// The controller of this admin queue may have an event for its host.
    Event,
    /// All connections have acknowledged a fence that this connection has raised.
    Fenced {
        /// The fence.
        id: u64,
    },
    /// The connection must abort a command if the command waits, and then end the Abort.
    Abort {
        /// The number of the Abort.
        id: u64,
        /// The command to abort.
        cid: u16,
        /// The connection with the Abort command.
        admin: ConnId,
    },
    /// An Abort command of this connection has ended.
    AbortEnded {
        /// The number of the Abort.
        id: u64,
        /// Whether the command was aborted.
        is_aborted: bool,
    },
    /// A drive has changed in a way for which this connection waits.
    DriveChanged(DriveChange),
    /// The target is being drained. For admin queues.
    Draining,
    /// Namespaces have come or gone.
    NamespacesChanged {
        /// The number of the change, to acknowledge when the connection uses no namespace any more
        /// that is gone.
        number: u64,
    },
}

/// A change of a drive for which connections wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DriveChange {
    /// A round of FLUSHes has ended. The success of a FLUSH may be certain from now on (trap T29).
    FlushRound,
    /// The sequence of epochs has ended or begun. An ordered write may have waited for that.
    Sequence,
}

/// The connections that must acknowledge a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceScope {
    /// Those of all associations, because the volume gets a new owner or is forgotten.
    AllAssociations,
    /// Those of the owner, because the owner releases the volume.
    OwnerOnly,
}

/// A fence that has been raised. Someone waits until others have acknowledged it (trap T8).
#[derive(Debug)]
pub(super) struct Fence {
    /// The connections that have not acknowledged the fence yet.
    waiting_for: BTreeSet<ConnId>,
    /// The consequence of its end.
    end: FenceEnd,
}

/// The consequence of the end of a fence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FenceEnd {
    /// The connection that raised it, the *claimant*, may go on.
    Claimant(ConnId),
    /// No operation that began before the lock uses its blocks any more.
    Lock {
        /// The connection whose command has locked the blocks.
        conn: ConnId,
        /// The lock.
        ticket: LockTicket,
    },
    /// No operation of a host that has lost access by reservations of a namespace may change a block
    /// of it any more.
    Reservation {
        /// The index of the namespace.
        ns_index: usize,
        /// The commands that complete then: the connection of each, and its ticket.
        waiting: Vec<(ConnId, LockTicket)>,
    },
}

impl<R: Region> Shared<R> {
    /// Leaves a notice for a connection.
    pub(in crate::target) fn leave_notice(&mut self, conn: ConnId, notice: Notice) {
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.notices.push(notice);
            self.conns_to_wake.push(conn);
        }
    }

    /// Takes the notices that were left for a connection.
    pub(in crate::target) fn take_notices(&mut self, conn: ConnId) -> Vec<Notice> {
        self.conns
            .get_mut(&conn)
            .map(|entry| core::mem::take(&mut entry.notices))
            .unwrap_or_default()
    }

    /// Raises a fence for `claimant`: asks the connections that may have writes in flight to the
    /// volume's namespaces to drain. With `only_of`, asks only the connections of that association.
    /// Returns the id of the fence; `None` if there is no connection to wait for.
    ///
    /// The claimant's own I/O queues are asked, too, because an earlier recovery that the claimant
    /// has given up may have left a late write (trap T8).
    pub(in crate::target) fn raise_fence(
        &mut self,
        claimant: ConnId,
        volume: VolumeId,
        only_of: Option<u64>,
    ) -> Option<u64> {
        let Self { conns, controllers, namespaces, volumes, writers, .. } = self;
        let scope = match only_of {
            None => FenceScope::AllAssociations,
            Some(_) => FenceScope::OwnerOnly,
        };
        let members = volumes.find(volume).into_iter().flat_map(|volume| &volume.members);
        let namespaces_of_members = members.filter_map(|member| namespaces.find(member.nsid));
        let mut waiting_for = writers.of(namespaces_of_members.map(|(ns_index, _)| ns_index));
        let is_in_scope = |entry: &ConnEntry| match only_of {
            None => true,
            Some(association) => {
                let controller = controllers.get(&entry.cntlid);
                controller.is_some_and(|controller| controller.association == association)
            }
        };
        waiting_for.retain(|conn| *conn != claimant && conns.get(conn).is_some_and(is_in_scope));
        if waiting_for.is_empty() {
            return None;
        }
        let id = self.next_fence_id;
        self.next_fence_id += 1;
        for conn in &waiting_for {
            self.leave_notice(*conn, Notice::Fence { id, volume, scope });
        }
        if scope == FenceScope::AllAssociations && probe::is_bug_planted(Plant::T8ClaimNoWait) {
            return None;
        }
        let end = FenceEnd::Claimant(claimant);
        self.fences.insert(id, Fence { waiting_for, end });
        if scope == FenceScope::AllAssociations {
            self.volumes.on_fence_raised(volume, id, &self.namespaces);
        }
        Some(id)
    }

    /// Notes that `conn` has acknowledged fence `id`: none of its operations for which the fence
    /// waits is in flight. If no other connection is awaited, the fence ends and the claimant is
    /// informed.
    pub(in crate::target) fn acknowledge(&mut self, id: u64, conn: ConnId) {
        let Some(fence) = self.fences.get_mut(&id) else {
            return;
        };
        fence.waiting_for.remove(&conn);
        if fence.waiting_for.is_empty()
            && let Some(Fence { end, .. }) = self.fences.remove(&id)
        {
            match end {
                FenceEnd::Claimant(claimant) => {
                    self.volumes.on_fence_ended(id, &self.namespaces);
                    self.leave_notice(claimant, Notice::Fenced { id });
                }
                FenceEnd::Lock { conn, ticket } => {
                    self.leave_notice(conn, Notice::BlocksLocked { ticket });
                }
                FenceEnd::Reservation { waiting, .. } => {
                    for (conn, ticket) in waiting {
                        self.leave_notice(conn, Notice::BlocksLocked { ticket });
                    }
                }
            }
        }
    }

    /// The newest fence of the reservations of a namespace that has not ended. It waits for every
    /// operation for which an earlier one waits, apart from those of hosts that have got access again.
    pub(super) fn fence_of_reservations(
        &mut self,
        of: usize,
    ) -> Option<&mut Vec<(ConnId, LockTicket)>> {
        self.fences.values_mut().rev().find_map(|fence| match &mut fence.end {
            FenceEnd::Reservation { ns_index, waiting } if *ns_index == of => Some(waiting),
            _ => None,
        })
    }

    /// Drops the commands of a drained connection that wait for fences.
    pub(super) fn forget_waiting_commands(&mut self, conn: ConnId) {
        for fence in self.fences.values_mut() {
            if let FenceEnd::Reservation { waiting, .. } = &mut fence.end {
                waiting.retain(|(other, _)| *other != conn);
            }
        }
    }

    /// Raises a fence that ends when no operation which has begun before may change these blocks
    /// any more. `concerns`: whether a connection may have any. Returns the id of the fence; `None` if
    /// there is no connection to wait for.
    pub(super) fn raise_drain(
        &mut self,
        ns_index: usize,
        blocks: &Range<u64>,
        end: FenceEnd,
        concerns: impl Fn(ConnId, &Controller) -> bool,
    ) -> Option<u64> {
        let mut waiting_for = self.writers.of([ns_index].into_iter());
        waiting_for.retain(|conn| {
            let controller =
                self.conns.get(conn).and_then(|entry| self.controllers.get(&entry.cntlid));
            controller.is_some_and(|controller| concerns(*conn, controller))
        });
        if waiting_for.is_empty() {
            return None;
        }
        let id = self.next_fence_id;
        self.next_fence_id += 1;
        for conn in &waiting_for {
            let blocks = blocks.clone();
            self.leave_notice(*conn, Notice::Drain { id, ns_index, blocks });
        }
        self.fences.insert(id, Fence { waiting_for, end });
        Some(id)
    }

    /// Asks an I/O queue of a controller to abort a command. Returns the number of the Abort, which
    /// ends with [`Notice::AbortEnded`] for `admin`; `None` if there is no such queue.
    pub(in crate::target) fn request_abort(
        &mut self,
        admin: ConnId,
        cntlid: u16,
        target: AbortTarget,
    ) -> Option<u64> {
        let AbortTarget { sqid, cid } = target;
        let queue = *self.controllers.get(&cntlid)?.queues.get(&sqid)?;
        let id = self.next_abort_id;
        self.next_abort_id += 1;
        self.leave_notice(queue, Notice::Abort { id, cid, admin });
        Some(id)
    }

    /// Notes that an Abort has ended, and informs the connection with the Abort command.
    pub(in crate::target) fn end_abort(&mut self, admin: ConnId, id: u64, is_aborted: bool) {
        self.leave_notice(admin, Notice::AbortEnded { id, is_aborted });
    }

    /// The ids of the fences that `conn` has to acknowledge.
    pub(super) fn fences_of(&self, conn: ConnId) -> Vec<u64> {
        self.fences
            .iter()
            .filter(|(_, fence)| fence.waiting_for.contains(&conn))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Notes that `conn` waits for a change of a drive, so that it receives a notice then.
    pub(in crate::target) fn await_change(
        &mut self,
        ns_index: usize,
        change: DriveChange,
        conn: ConnId,
    ) {
        let conns = self.conns_awaiting_change.entry((ns_index, change)).or_default();
        if !conns.contains(&conn) {
            conns.push(conn);
        }
    }

    /// Notes a change of a drive. Informs the connections that wait for it.
    pub(in crate::target) fn drive_changed(&mut self, ns_index: usize, change: DriveChange) {
        let conns = self.conns_awaiting_change.remove(&(ns_index, change));
        for conn in conns.unwrap_or_default() {
            self.leave_notice(conn, Notice::DriveChanged(change));
        }
    }

    /// Takes the list of the connections for which a notice was left, and which must be woken.
    pub fn take_conns_to_wake(&mut self) -> Vec<ConnId> {
        core::mem::take(&mut self.conns_to_wake)
    }

    /// Leaves a notice for every connection that it must be closed, for the reason `why`. Returns
    /// the connections to wake.
    pub fn close_all(&mut self, why: &'static str) -> Vec<ConnId> {
        let all_conns: Vec<ConnId> = self.conns.keys().copied().collect();
        for conn in all_conns {
            self.leave_notice(conn, Notice::Close(why));
        }
        self.take_conns_to_wake()
    }
}
