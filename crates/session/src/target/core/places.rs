//! The number of connections that all cores together have open (T28), and the number of I/O queues
//! of each core.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::super::ids::ConnId;

/// Places for connections, of all cores of a target together.
///
/// Relaxed is enough for every count here: it orders nothing else, and no change of it gets lost.
#[derive(Debug)]
pub struct Places {
    taken: AtomicUsize,
    max: usize,
    next_id: AtomicU64,
}

/// The place of one connection. Dropping it frees the place, on any core.
#[derive(Debug)]
pub struct Place {
    of: Arc<Places>,
    id: ConnId,
}

impl Places {
    /// Places for `max` connections at a time.
    #[must_use]
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { taken: AtomicUsize::new(0), max, next_id: AtomicU64::new(1) })
    }

    /// A place, if one is free.
    pub(super) fn take(self: &Arc<Self>) -> Option<Place> {
        let one_more = |taken| (taken < self.max).then_some(taken + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Place {
            of: Arc::clone(self),
            id: ConnId(self.next_id.fetch_add(1, Ordering::Relaxed)),
        })
    }

    pub(super) const fn max(&self) -> usize {
        self.max
    }
}

impl Place {
    /// The id of the connection that takes it: unique in an incarnation of the target.
    #[must_use]
    pub const fn id(&self) -> ConnId {
        self.id
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How many I/O queues each core of a target carries.
#[derive(Debug)]
pub struct QueueCounts(Box<[AtomicUsize]>);

impl QueueCounts {
    /// The counts of this many cores. No core has a queue.
    #[must_use]
    pub fn new(cores: usize) -> Arc<Self> {
        Arc::new(Self((0..cores).map(|_| AtomicUsize::new(0)).collect()))
    }

    /// How many cores there are.
    pub(super) fn cores(&self) -> usize {
        self.0.len()
    }

    /// Chooses the core with the fewest queues for one more.
    pub(super) fn choose(&self) -> usize {
        let load = |core: &usize| self.0[*core].load(Ordering::Relaxed);
        let core = (0..self.0.len()).min_by_key(load).unwrap_or(0);
        self.add(core);
        core
    }

    /// Counts one more queue for a core.
    pub(super) fn add(&self, core: usize) {
        self.0[core].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one queue less for a core.
    pub(super) fn remove(&self, core: usize) {
        self.0[core].fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t28_there_are_never_more_places_than_allowed() {
        let places = Places::new(2);
        let (first, second) = (places.take().unwrap(), places.take().unwrap());
        assert_ne!(first.id(), second.id());
        assert!(places.take().is_none() && places.take().is_none());
        let ids = (first.id(), second.id());
        drop(first);
        let third = places.take().unwrap();
        assert!(third.id() != ids.0 && third.id() != ids.1, "an id is never used again");
        assert!(places.take().is_none());
        drop((second, third));
        assert_eq!(places.taken.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_queue_goes_to_the_core_with_the_fewest() {
        let counts = QueueCounts::new(3);
        assert_eq!([counts.choose(), counts.choose(), counts.choose()], [0, 1, 2]);
        counts.remove(1);
        assert_eq!(counts.choose(), 1);
        counts.add(0);
        assert_eq!([counts.choose(), counts.choose(), counts.choose()], [1, 2, 0]);
    }
}
