//! Requests of streams for connections to one server, and the pause of each before it is served.

use alloc::vec::Vec;

use riopipe_order::attribute::StreamId;

/// The request of a stream for a connection to one of its servers, with a queue on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The stream.
    pub stream: StreamId,
    /// The server, by its number in the volume's topology.
    pub server: u16,
    /// The queue to create.
    pub qid: u16,
    /// The number of commands for which the queue must have space.
    pub depth: usize,
    /// The number of failed connections since the stream was last bound there: each makes the pause
    /// before the next one longer.
    pub attempts: u32,
}

/// The pauses before an action is tried again: longer each time, and slightly different for each
/// initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// The pause after the first attempt, ns.
    pub first_ns: u64,
    /// The longest pause, ns.
    pub max_ns: u64,
}

impl Default for BackOff {
    fn default() -> Self {
        Self { first_ns: 10_000_000, max_ns: 1_000_000_000 }
    }
}

impl BackOff {
    /// The pause after this number of failed attempts, ns. It doubles with each, and `chance`, any
    /// number that differs from process to process, shortens it by up to a quarter.
    #[must_use]
    pub fn after(&self, attempts: u32, chance: u64) -> u64 {
        let wait = self.first_ns.saturating_mul(1 << attempts.saturating_sub(1).min(20));
        let wait = wait.min(self.max_ns);
        wait - wait / 4 * (chance % 1024) / 1024
    }
}

/// The waiting requests. Times are nanoseconds of one monotonic clock.
#[derive(Debug)]
pub struct ReconnectQueue {
    back_off: BackOff,
    /// Each with the time before which it is not served; one for each stream.
    waiting: Vec<(u64, ConnectRequest)>,
}

impl ReconnectQueue {
    /// A queue without requests.
    #[must_use]
    pub const fn new(back_off: BackOff) -> Self {
        Self { back_off, waiting: Vec::new() }
    }

    /// The pauses of requests.
    #[must_use]
    pub const fn back_off(&self) -> &BackOff {
        &self.back_off
    }

    /// A stream requests a connection. It is served at once if no connection of the stream has
    /// failed. An earlier request of a stream with that id is dropped. `chance` is as for
    /// [`BackOff::after`].
    pub fn request(&mut self, request: ConnectRequest, chance: u64, now: u64) {
        let wait = match request.attempts {
            0 => 0,
            attempts => self.back_off.after(attempts, chance),
        };
        self.waiting.retain(|(_, other)| other.stream != request.stream);
        self.waiting.push((now.saturating_add(wait), request));
    }

    /// The connection for a request could not be made: the request is served again later.
    pub fn failed(&mut self, request: ConnectRequest, chance: u64, now: u64) {
        let attempts = request.attempts.saturating_add(1);
        self.request(ConnectRequest { attempts, ..request }, chance, now);
    }

    /// A request that must be served now. It is no longer in the queue.
    pub fn next(&mut self, now: u64) -> Option<ConnectRequest> {
        let at = self.waiting.iter().position(|(due, _)| *due <= now)?;
        Some(self.waiting.remove(at).1)
    }

    /// When the first request must be served, ns.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.waiting.iter().map(|(due, _)| *due).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(stream: u16, attempts: u32) -> ConnectRequest {
        ConnectRequest { stream: StreamId(stream), server: 1, qid: 2, depth: 8, attempts }
    }

    #[test]
    fn waits_grow_and_are_bounded() {
        let back_off = BackOff::default();
        for attempts in 1..100 {
            let wait = back_off.after(attempts, u64::from(attempts) * 77);
            let bounds = back_off.first_ns * 3 / 4..=back_off.max_ns;
            assert!(bounds.contains(&wait), "{attempts}: {wait}");
        }
        assert!(back_off.after(50, 1023) > 70 * back_off.first_ns);
        assert_eq!(back_off.after(3, 0), 40_000_000);
        // Half of the range of `chance` shortens the pause by half of a quarter.
        assert_eq!(back_off.after(3, 512), 35_000_000);
        assert_eq!(back_off.after(3, 1024 + 512), 35_000_000, "`chance` is any number");
    }

    #[test]
    fn a_stream_is_served_at_once_unless_its_connection_failed() {
        let mut queue = ReconnectQueue::new(BackOff::default());
        queue.request(request(0, 0), 0, 7);
        queue.request(request(1, 1), 0, 7);
        assert_eq!(queue.next(7), Some(request(0, 0)));
        assert_eq!(queue.next(7), None);
        assert_eq!(queue.deadline(), Some(10_000_007));
        assert_eq!(queue.next(10_000_007), Some(request(1, 1)));
        queue.failed(request(1, 1), 0, 0);
        assert_eq!(queue.deadline(), Some(20_000_000), "twice as long");
        queue.request(request(1, 0), 0, 9);
        assert_eq!(queue.next(9), Some(request(1, 0)), "a stream has one request");
        assert_eq!((queue.next(u64::MAX), queue.deadline()), (None, None));
    }
}
