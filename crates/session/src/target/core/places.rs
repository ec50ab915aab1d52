//! Two counters that all cores share: how many connections are open on all cores together (trap
//! T28), and how many I/O queues each core has.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::super::ids::ConnId;

/// The places for connections, of all cores of a target together.
///
/// `Ordering::Relaxed` is enough for every counter here, because the counters order no other memory
/// access, and atomic updates of them are never lost.
#[derive(Debug)]
pub struct Places {
    taken_count: AtomicUsize,
    max_count: usize,
    next_id: AtomicU64,
}

/// The place of one connection. Dropping it frees the place, on any core.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    id: ConnId,
}

impl Places {
    /// Places for `max` connections at a time.
    #[must_use]
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            taken_count: AtomicUsize::new(0),
            max_count: max,
            next_id: AtomicU64::new(1),
        })
    }

    /// Takes a place; `None` if none is free.
    pub(super) fn take(self: &Arc<Self>) -> Option<Place> {
        let add_one = |taken_count| (taken_count < self.max_count).then_some(taken_count + 1);
        self.taken_count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add_one).ok()?;
        Some(Place {
            places: Arc::clone(self),
            id: ConnId(self.next_id.fetch_add(1, Ordering::Relaxed)),
        })
    }

    pub(super) const fn max(&self) -> usize {
        self.max_count
    }
}

impl Place {
    /// The id of the connection that has this place, unique in an incarnation of the target.
    #[must_use]
    pub const fn id(&self) -> ConnId {
        self.id
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken_count.fetch_sub(1, Ordering::Relaxed);
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

    /// The number of cores.
    pub(super) fn core_count(&self) -> usize {
        self.0.len()
    }

    /// Chooses the core with the fewest queues, and counts one more queue for it.
    pub(super) fn add_to_least_loaded(&self) -> usize {
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
        assert_eq!(places.taken_count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_queue_goes_to_the_core_with_the_fewest() {
        let counts = QueueCounts::new(3);
        assert_eq!(
            [
                counts.add_to_least_loaded(),
                counts.add_to_least_loaded(),
                counts.add_to_least_loaded()
            ],
            [0, 1, 2]
        );
        counts.remove(1);
        assert_eq!(counts.add_to_least_loaded(), 1);
        counts.add(0);
        assert_eq!(
            [
                counts.add_to_least_loaded(),
                counts.add_to_least_loaded(),
                counts.add_to_least_loaded()
            ],
            [1, 2, 0]
        );
    }
}
