//! Up to which time a reactor has read all input: the decision from the polls of its poller.
//!
//! A poll returns a limited number of events, so one poll need not report every socket with input. The
//! kernel reports the sockets in turn (epoll, level-triggered): after as many events as there are
//! sockets, each socket with input has been reported at least once.

use riopipe_net::EVENTS_MAX;

/// A series of polls that together report every socket with input.
#[derive(Debug, Default)]
pub(crate) struct Sweep {
    /// The time of the first poll, ns; `None` before the first poll.
    since_ns: Option<u64>,
    /// Events that the polls have reported.
    events: usize,
}

impl Sweep {
    /// Notes a poll that began at `now` (ns) and has reported `events` events, of a poller with `sockets`
    /// sockets. Returns the time up to which all input is reported, if the series is complete.
    pub(crate) fn polled(&mut self, now: u64, events: usize, sockets: usize) -> Option<u64> {
        let since_ns = *self.since_ns.get_or_insert(now);
        self.events += events;
        let is_complete = events < EVENTS_MAX || self.events >= sockets + EVENTS_MAX;
        is_complete.then(|| {
            *self = Self::default();
            since_ns
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poll_that_is_not_full_has_reported_all() {
        let mut sweep = Sweep::default();
        assert_eq!(sweep.polled(7, 0, 1000), Some(7));
        assert_eq!(sweep.polled(8, EVENTS_MAX - 1, 1000), Some(8));
        assert_eq!(sweep.polled(9, EVENTS_MAX, 1000), None);
        assert_eq!(sweep.polled(10, 1, 1000), Some(9), "the time of the first poll");
        assert_eq!(sweep.polled(11, 1, 1000), Some(11));
    }

    /// Otherwise hosts that always send would keep half-open connections from ever running out of time.
    #[test]
    fn t28_full_polls_are_complete_after_as_many_events_as_sockets() {
        let mut sweep = Sweep::default();
        let sockets = 3 * EVENTS_MAX;
        let polls = (0..9).map(|at| sweep.polled(at, EVENTS_MAX, sockets));
        let complete: Vec<u64> = polls.flatten().collect();
        assert_eq!(complete, [0, 4]);
    }
}
