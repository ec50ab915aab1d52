//! The connections that may have writes in flight, by namespace. A claim waits for them (trap T8).
//!
//! A claim does not wait for any other connection, so its cost does not grow with connections that
//! never write (trap T28). This is safe only if every connection that writes a namespace is noted
//! here:
//!
//! - A connection is noted before it reads the guard of the namespace for the first time.
//! - A claim changes the guard before it reads which connections are noted.
//!
//! Both happen under the lock of [`Shared`](super::Shared), so one of them comes first:
//!
//! - The claim comes first: it has set the guard before it releases the lock. The connection reads
//!   the guard after it had the lock, so its write is refused.
//! - The note comes first: the claim finds the connection here and leaves a notice for it. The
//!   connection takes the lock to read the notice. It acknowledges when all operations that it had
//!   begun have come back. Every later operation sees the new guard.
//!
//! `tests/writers.rs` checks this with a model checker. A later write of the connection reads only
//! the connection's own memory. A connection that carries a stream is noted when the stream is
//! bound, also under the lock: either before the claim, or the bind is refused because of its
//! generation.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::ids::ConnId;

/// The connections that have written or carried a stream, by namespace index. A connection stays in
/// the table until it is drained.
#[derive(Debug, Default)]
pub(super) struct Writers(BTreeMap<usize, BTreeSet<ConnId>>);

impl Writers {
    /// Notes that `conn` is about to write to a namespace for the first time.
    pub(super) fn note(&mut self, ns_index: usize, conn: ConnId) {
        self.0.entry(ns_index).or_default().insert(conn);
    }

    /// Removes a connection that has no operation in flight and begins none any more.
    pub(super) fn remove(&mut self, conn: ConnId) {
        self.0.retain(|_, conns| {
            conns.remove(&conn);
            !conns.is_empty()
        });
    }

    /// The connections that may have writes in flight to one of these namespaces.
    pub(super) fn of(&self, namespaces: impl Iterator<Item = usize>) -> BTreeSet<ConnId> {
        namespaces.filter_map(|ns_index| self.0.get(&ns_index)).flatten().copied().collect()
    }
}

/// A connection's own copy of the namespaces for which it is noted, by namespace index.
#[derive(Debug, Default)]
pub(super) struct NotedNamespaces(Vec<bool>);

impl NotedNamespaces {
    /// Whether the connection may write to a namespace now. `guard_allows` reads the guard of the
    /// namespace. `note` notes the connection in [`Writers`] under the lock. A connection that may
    /// not write is not noted, so that it can't make claims more expensive.
    #[inline(always)]
    pub(super) fn may_write(
        &mut self,
        ns_index: usize,
        guard_allows: impl Fn() -> bool,
        note: impl FnOnce(),
    ) -> bool {
        guard_allows()
            && (self.0.get(ns_index) == Some(&true)
                || self.may_write_first(ns_index, guard_allows, note))
    }

    /// Like [`may_write`](Self::may_write), for the first write of the connection to the namespace.
    #[cold]
    fn may_write_first(
        &mut self,
        ns_index: usize,
        guard_allows: impl Fn() -> bool,
        note: impl FnOnce(),
    ) -> bool {
        note();
        self.set_noted(ns_index);
        // The guard must be read again, because the first check may have come before a claim that
        // has not found this connection.
        guard_allows()
    }

    fn set_noted(&mut self, ns_index: usize) {
        if self.0.len() <= ns_index {
            self.0.resize(ns_index + 1, false);
        }
        self.0[ns_index] = true;
    }
}
