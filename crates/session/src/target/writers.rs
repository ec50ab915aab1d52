//! The connections that may have writes in flight, by namespace. A claim waits for these (T8).
//!
//! A claim asks no others, so its cost does not grow with connections that never write there (T28).
//! That is safe only if no write gets to a drive from a connection that the claim did not ask.
//! Therefore a connection is noted here before it reads the guard for the first time, and a claim
//! changes the guard before it reads which connections are noted. Noting, and a claim as a whole,
//! are done inside [`Shared`](super::Shared), so one of them comes first:
//!
//! - The claim: its guard was set before the lock was released, and the connection reads the guard
//!   after it had the lock. It sees the guard, and its write is refused.
//! - The noting: the claim finds the connection here, and asks it. The connection answers between
//!   two commands, once all operations that it had begun have come back. It takes the lock to read
//!   the question. So an operation that it begins after that sees the guard.
//!
//! So the lock orders all of it (`tests/writers.rs` checks this with a model checker), and a later
//! write only reads the connection's own memory. A connection that carries a stream is noted for
//! the stream's namespaces when it is bound, also inside of the lock: before the claim, or it is
//! refused by generation.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::ids::ConnId;

/// Connections that have written, or carried a stream, by namespace. A connection stays in it until
/// it is drained.
#[derive(Debug, Default)]
pub(super) struct Writers(BTreeMap<usize, BTreeSet<ConnId>>);

impl Writers {
    /// `conn` is about to write to namespace `ns` for the first time.
    pub(super) fn note(&mut self, ns: usize, conn: ConnId) {
        self.0.entry(ns).or_default().insert(conn);
    }

    /// Notes that `conn` has nothing in flight any more, and begins nothing new.
    pub(super) fn remove(&mut self, conn: ConnId) {
        self.0.retain(|_, conns| {
            conns.remove(&conn);
            !conns.is_empty()
        });
    }

    /// The connections that may have writes in flight to one of these namespaces.
    pub(super) fn of(&self, namespaces: impl Iterator<Item = usize>) -> BTreeSet<ConnId> {
        namespaces.filter_map(|ns| self.0.get(&ns)).flatten().copied().collect()
    }
}

/// A connection's own copy of the namespaces for which it is noted.
#[derive(Debug, Default)]
pub(super) struct Noted(Vec<bool>);

impl Noted {
    /// Whether the connection may write to a namespace now. `guard_allows` reads its guard; `note`
    /// notes the connection in [`Writers`], inside of the lock. A connection that may not write is
    /// not noted, so it cannot make claims costlier.
    #[inline(always)]
    pub(super) fn may_write(
        &mut self,
        ns: usize,
        guard_allows: impl Fn() -> bool,
        note: impl FnOnce(),
    ) -> bool {
        guard_allows() && (self.0.get(ns) == Some(&true) || self.begin(ns, guard_allows, note))
    }

    /// The same for the connection's first write there.
    #[cold]
    fn begin(&mut self, ns: usize, guard_allows: impl Fn() -> bool, note: impl FnOnce()) -> bool {
        note();
        self.add(ns);
        // The first check may have been before a claim that has not found this connection.
        guard_allows()
    }

    fn add(&mut self, ns: usize) {
        if self.0.len() <= ns {
            self.0.resize(ns + 1, false);
        }
        self.0[ns] = true;
    }
}
