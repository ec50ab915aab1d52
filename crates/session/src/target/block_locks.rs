//! Locks of blocks, for an operation that must be atomic with regard to all other commands on its
//! blocks: the fused operation Compare and Write (NVM §3.1).
//!
//! ```text
//! lock requested → granted → all connections drained → read, compare, write → lock released
//! ```
//!
//! A command without such a lock costs nothing: it only reads whether its namespace has any lock
//! ([`NamespaceState::has_locks`](super::NamespaceState)). If there is one on its blocks, the command
//! waits in the same queue. So the rule is the one of [`writers`](super::writers):
//!
//! - A lock is noted before it asks which connections may have writes in flight, under the lock of
//!   [`Shared`](super::Shared). Each of them acknowledges when its operations on the blocks have come
//!   back.
//! - A connection reads whether there are locks after it is noted as a writer, and before each
//!   operation that changes blocks.
//!
//! The queue is first come, first served, so no command waits without end (promise P8).
//! `tests/block_locks.rs` checks this with a model checker.

use alloc::vec::Vec;
use core::ops::Range;

use super::ids::ConnId;

/// The number of a lock, unique in an incarnation of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockTicket(u64);

/// How a command uses the blocks that it locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockKind {
    /// No other command may change the blocks meanwhile.
    Exclusive,
    /// The command has found an exclusive lock and waits for its end. It excludes only later
    /// exclusive locks.
    Shared,
}

/// A lock, held or waited for.
#[derive(Debug)]
struct BlockLock {
    ticket: LockTicket,
    kind: LockKind,
    blocks: Range<u64>,
    conn: ConnId,
    is_granted: bool,
}

/// A lock that was granted after a wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GrantedLock {
    pub(super) ticket: LockTicket,
    pub(super) kind: LockKind,
    pub(super) blocks: Range<u64>,
    pub(super) conn: ConnId,
}

/// The locks of one namespace, in the order in which they were requested. There is at most one
/// exclusive lock for each connection, and one shared lock for each command in flight.
#[derive(Debug, Default)]
pub(super) struct BlockLocks {
    locks: Vec<BlockLock>,
}

impl BlockLocks {
    /// Requests an exclusive lock. Returns whether it is granted at once.
    pub(super) fn request(&mut self, ticket: LockTicket, conn: ConnId, blocks: Range<u64>) -> bool {
        self.add(ticket, conn, blocks, LockKind::Exclusive)
    }

    /// Notes that a command is about to change these blocks. Returns whether it must wait for an
    /// exclusive lock. If it need not, nothing is noted.
    pub(super) fn must_wait(
        &mut self,
        ticket: LockTicket,
        conn: ConnId,
        blocks: Range<u64>,
    ) -> bool {
        let is_locked =
            |lock: &BlockLock| lock.kind == LockKind::Exclusive && overlap(&lock.blocks, &blocks);
        let must_wait = self.locks.iter().any(is_locked);
        if must_wait {
            self.add(ticket, conn, blocks, LockKind::Shared);
        }
        must_wait
    }

    fn add(
        &mut self,
        ticket: LockTicket,
        conn: ConnId,
        blocks: Range<u64>,
        kind: LockKind,
    ) -> bool {
        self.locks.push(BlockLock { ticket, kind, blocks, conn, is_granted: false });
        self.grant(self.locks.len() - 1)
    }

    /// Removes a lock, held or waited for. Returns the locks that are granted by that.
    pub(super) fn release(&mut self, ticket: LockTicket) -> Vec<GrantedLock> {
        self.locks.retain(|lock| lock.ticket != ticket);
        self.grant_next()
    }

    /// Removes the locks of a connection that is drained. Returns the locks that are granted by
    /// that.
    pub(super) fn remove(&mut self, conn: ConnId) -> Vec<GrantedLock> {
        self.locks.retain(|lock| lock.conn != conn);
        self.grant_next()
    }

    fn grant_next(&mut self) -> Vec<GrantedLock> {
        let mut granted = Vec::new();
        for at in 0..self.locks.len() {
            if !self.locks[at].is_granted && self.grant(at) {
                let BlockLock { ticket, kind, ref blocks, conn, .. } = self.locks[at];
                granted.push(GrantedLock { ticket, kind, blocks: blocks.clone(), conn });
            }
        }
        granted
    }

    /// Grants the lock at this place in the queue, if no earlier one stands against it.
    fn grant(&mut self, at: usize) -> bool {
        let (earlier, from_here) = self.locks.split_at_mut(at);
        let lock = &mut from_here[0];
        let stands_against = |other: &BlockLock| {
            overlap(&other.blocks, &lock.blocks)
                && (other.kind == LockKind::Exclusive || lock.kind == LockKind::Exclusive)
        };
        lock.is_granted = !earlier.iter().any(stands_against);
        lock.is_granted
    }

    /// How many exclusive locks are held or waited for.
    pub(super) fn exclusive_count(&self) -> usize {
        self.locks.iter().filter(|lock| lock.kind == LockKind::Exclusive).count()
    }
}

/// Whether two ranges of blocks have a block in common.
const fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl LockTicket {
    /// The ticket with this number.
    pub(super) const fn new(number: u64) -> Self {
        Self(number)
    }
}
