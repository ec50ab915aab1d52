//! The locks of blocks, as connections request and release them ([`block_locks`] has their queue).
//!
//! [`block_locks`]: crate::target::block_locks

use alloc::vec::Vec;
use core::ops::Range;

use riopipe_order::region::Region;

use super::Shared;
use super::notices::{FenceEnd, Notice};
use crate::target::block_locks::{GrantedLock, LockKind, LockTicket};
use crate::target::ids::ConnId;

/// An exclusive lock that was requested.
#[derive(Clone, Copy, Debug)]
pub(in crate::target) struct RequestedLock {
    pub(in crate::target) ticket: LockTicket,
    /// The lock is held, and no other operation on its blocks is in flight. Otherwise the connection
    /// gets a [`Notice::BlocksLocked`] later.
    pub(in crate::target) is_ready: bool,
}

impl<R: Region> Shared<R> {
    /// Requests an exclusive lock of blocks for a command of `conn`. `is_clear`: no operation of
    /// `conn` itself is in flight that may change the blocks.
    pub(in crate::target) fn lock_blocks(
        &mut self,
        conn: ConnId,
        ns_index: usize,
        blocks: Range<u64>,
        is_clear: bool,
    ) -> RequestedLock {
        let ticket = self.next_ticket();
        let locks = self.block_locks.entry(ns_index).or_default();
        let is_granted = locks.request(ticket, conn, blocks.clone());
        // Before it is known which connections have operations in flight.
        self.publish_lock_count(ns_index);
        let is_ready = is_granted && {
            let end = FenceEnd::Lock { conn, ticket };
            self.raise_drain(ns_index, &blocks, end, |other, _| !is_clear || other != conn)
                .is_none()
        };
        RequestedLock { ticket, is_ready }
    }

    /// Notes that a command of `conn` is about to change blocks. If another command has locked them,
    /// returns the ticket with which the command waits: the connection gets a
    /// [`Notice::BlocksLocked`].
    pub(in crate::target) fn await_blocks(
        &mut self,
        conn: ConnId,
        ns_index: usize,
        blocks: Range<u64>,
    ) -> Option<LockTicket> {
        let ticket = self.next_ticket();
        self.block_locks.get_mut(&ns_index)?.must_wait(ticket, conn, blocks).then_some(ticket)
    }

    /// Releases a lock, held or waited for.
    pub(in crate::target) fn unlock_blocks(&mut self, ns_index: usize, ticket: LockTicket) {
        let Some(locks) = self.block_locks.get_mut(&ns_index) else { return };
        let granted = locks.release(ticket);
        self.after_release(ns_index, granted);
    }

    /// Releases the locks of a connection that is drained.
    pub(super) fn unlock_all_of(&mut self, conn: ConnId) {
        let all: Vec<usize> = self.block_locks.keys().copied().collect();
        for ns_index in all {
            let Some(locks) = self.block_locks.get_mut(&ns_index) else { continue };
            let granted = locks.remove(conn);
            self.after_release(ns_index, granted);
        }
    }

    fn after_release(&mut self, ns_index: usize, granted: Vec<GrantedLock>) {
        self.publish_lock_count(ns_index);
        for GrantedLock { ticket, kind, blocks, conn } in granted {
            let end = FenceEnd::Lock { conn, ticket };
            // Commands that had begun before the lock was requested may still be in flight.
            let must_drain = kind == LockKind::Exclusive
                && self.raise_drain(ns_index, &blocks, end, |_, _| true).is_some();
            if !must_drain {
                self.leave_notice(conn, Notice::BlocksLocked { ticket });
            }
        }
    }

    fn publish_lock_count(&self, ns_index: usize) {
        let count = self.block_locks.get(&ns_index).map_or(0, |locks| locks.exclusive_count());
        self.namespaces.at(ns_index).state.set_lock_count(count);
    }

    pub(super) fn next_ticket(&mut self) -> LockTicket {
        let ticket = LockTicket::new(self.next_lock);
        self.next_lock += 1;
        ticket
    }
}
