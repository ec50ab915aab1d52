//! Which connections may have writes under way, by namespace: those that a claim waits for (T8).
//!
//! A claim asks nobody else, so what it costs does not grow with connections that never write
//! there (T28). That is safe only if no write gets to a drive from a connection that the claim did
//! not ask. A connection therefore is noted here before it looks at the guard for the first time,
//! and a claim changes the guard before it reads who is noted. Noting, and a claim as a whole, are
//! done inside [`Shared`](super::Shared), so one of them comes first:
//!
//! - The claim: its guard was set before the lock was given back, and the connection looks at the
//!   guard after it had the lock. It sees the guard, and its write is refused.
//! - The noting: the claim finds the connection here, and asks it. The connection answers between
//!   two commands, once all it had begun has come back. What it begins after that it begins after it
//!   had the lock to take the question, and sees the guard.
//!
//! So the lock orders all of it (`tests/writers.rs` has it model-checked), and a write after the first needs nothing but a look at the
//! connection's own memory. Who carries a stream is noted for the stream's namespaces when it is
//! bound, also inside of the lock: before the claim, or it is refused by generation.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::shared::ConnId;

/// Connections that have written, or carried a stream, by namespace. One is in it until it is
/// drained.
#[derive(Debug, Default)]
pub(super) struct Writers(BTreeMap<usize, BTreeSet<ConnId>>);

impl Writers {
    /// `conn` is about to write to namespace `ns` for the first time.
    pub(super) fn note(&mut self, ns: usize, conn: ConnId) {
        self.0.entry(ns).or_default().insert(conn);
    }

    /// Nothing of `conn` is under way any more, nor will be.
    pub(super) fn gone(&mut self, conn: ConnId) {
        self.0.retain(|_, conns| {
            conns.remove(&conn);
            !conns.is_empty()
        });
    }

    /// Who may have writes under way to one of these namespaces.
    pub(super) fn of(&self, namespaces: impl Iterator<Item = usize>) -> BTreeSet<ConnId> {
        namespaces.filter_map(|ns| self.0.get(&ns)).flatten().copied().collect()
    }
}

/// The namespaces for which a connection is noted, as it knows itself.
#[derive(Debug, Default)]
pub(super) struct Noted(Vec<bool>);

impl Noted {
    /// Whether the connection may write to a namespace now: `is_welcome` looks at its guard, `note`
    /// has the connection noted among [`Writers`], inside of the lock. Who is kept out anyway is not
    /// noted: it can't make claims costlier.
    #[inline(always)]
    pub(super) fn may_write(
        &mut self,
        ns: usize,
        is_welcome: impl Fn() -> bool,
        note: impl FnOnce(),
    ) -> bool {
        is_welcome() && (self.0.get(ns) == Some(&true) || self.begin(ns, is_welcome, note))
    }

    /// The same for the connection's first write there.
    #[cold]
    fn begin(&mut self, ns: usize, is_welcome: impl Fn() -> bool, note: impl FnOnce()) -> bool {
        note();
        self.add(ns);
        // The first look may have been before a claim that has not found this connection.
        is_welcome()
    }

    fn add(&mut self, ns: usize) {
        if self.0.len() <= ns {
            self.0.resize(ns + 1, false);
        }
        self.0[ns] = true;
    }
}
