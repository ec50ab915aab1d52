//! The counters of the namespaces, each of all reactors.

use std::sync::Arc;

use crate::counters::{Counter, Counters};

/// The counters of the namespaces that are served, and the sums of those that were.
#[derive(Debug, Default)]
pub(crate) struct DriveCounters {
    /// The namespaces, in the configuration's order.
    served: Vec<NamespaceCounters>,
    /// The sums of the removed namespaces, in the order of [`Counter::OF_DRIVE`]. So the counters
    /// of the target never go back.
    former: [u64; Counter::OF_DRIVE.len()],
}

/// The counters of one namespace.
#[derive(Debug)]
struct NamespaceCounters {
    nsid: u32,
    /// By reactor.
    reactors: Vec<Arc<Counters>>,
}

impl NamespaceCounters {
    fn get(&self, counter: Counter) -> u64 {
        self.reactors.iter().map(|counters| counters.get(counter)).sum()
    }
}

impl DriveCounters {
    /// Adds a namespace. Returns its counters of each reactor.
    pub(crate) fn add(&mut self, nsid: u32, reactors: usize) -> Vec<Arc<Counters>> {
        let reactors: Vec<Arc<Counters>> = (0..reactors).map(|_| Arc::default()).collect();
        self.served.push(NamespaceCounters { nsid, reactors: reactors.clone() });
        reactors
    }

    /// Ends a namespace whose drive gets no operation any more. If the id was used again, the
    /// earlier namespace ends.
    pub(crate) fn remove(&mut self, nsid: u32) {
        let Some(at) = self.served.iter().position(|namespace| namespace.nsid == nsid) else {
            return;
        };
        let namespace = self.served.remove(at);
        for (sum, counter) in self.former.iter_mut().zip(Counter::OF_DRIVE) {
            *sum += namespace.get(counter);
        }
    }

    /// The counters of a reactor for each namespace.
    pub(crate) fn of_reactor(&self, reactor: usize) -> Vec<Arc<Counters>> {
        self.served.iter().map(|namespace| Arc::clone(&namespace.reactors[reactor])).collect()
    }

    /// Each namespace, with the values of its counters in the order of [`Counter::OF_DRIVE`].
    pub(crate) fn namespaces(&self) -> impl Iterator<Item = (u32, [u64; Counter::OF_DRIVE.len()])> {
        let values = |namespace: &NamespaceCounters| {
            (namespace.nsid, Counter::OF_DRIVE.map(|counter| namespace.get(counter)))
        };
        self.served.iter().map(values)
    }

    /// The sums of the namespaces that are not served any more.
    pub(crate) const fn former(&self) -> &[u64; Counter::OF_DRIVE.len()] {
        &self.former
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_namespace_stays_in_the_sums() {
        let mut all = DriveCounters::default();
        let first = all.add(1, 2);
        all.add(2, 2)[0].add(Counter::Writes, 7);
        first[0].add(Counter::Writes, 3);
        first[1].add(Counter::Writes, 4);
        all.remove(1);
        all.remove(9);
        let left: Vec<_> = all.namespaces().map(|(nsid, values)| (nsid, values[0])).collect();
        assert_eq!((left, all.former()[0]), (vec![(2, 7)], 7));
        assert_eq!(all.of_reactor(1).len(), 1);
    }
}
