//! How many connections all reactors together have open (T28).

use std::sync::Arc;

use crate::sync::{AtomicUsize, Ordering};

/// Places for connections. Whoever takes one gives it back by dropping it, on whichever reactor.
pub(crate) struct Places {
    taken: AtomicUsize,
    max: usize,
}

/// The place of one connection.
pub(crate) struct Place(Arc<Places>);

impl Places {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { taken: AtomicUsize::new(0), max })
    }

    /// A place, if one is free.
    ///
    /// Relaxed is enough: the count orders nothing else, and no change of it gets lost.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Place> {
        let one_more = |taken| (taken < self.max).then_some(taken + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Place(Arc::clone(self)))
    }

    pub(crate) const fn max(&self) -> usize {
        self.max
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t28_there_are_never_more_places_than_said() {
        let places = Places::new(2);
        let (first, second) = (places.take(), places.take());
        assert!(first.is_some() && second.is_some());
        assert!(places.take().is_none() && places.take().is_none());
        drop(first);
        let third = places.take();
        assert!(third.is_some() && places.take().is_none());
        drop((second, third));
        assert_eq!(places.taken.load(Ordering::Relaxed), 0);
    }
}
