//! The requests of streams for connections to one server. A request is served at once, or after a
//! pause if earlier connections of the stream have failed.

use alloc::vec::Vec;

use riopipe_order::attribute::StreamId;

/// The request of a stream for a connection to one of its servers, with a queue on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The stream.
    pub stream: StreamId,
    /// The server, by its number in the volume's topology.
    pub server: u16,
    /// The link of the stream that needs the connection; see
    /// [`stream`](crate::initiator::stream).
    pub link: u16,
    /// The queue to create.
    pub qid: u16,
    /// The number of commands for which the queue must have space.
    pub depth: usize,
    /// The number of failed connections since the stream was last bound there. Each makes the pause
    /// before the next connection longer.
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
    /// The pause after this number of failed attempts, ns. The pause doubles with each attempt, up
    /// to the longest one. `random`, any number that differs from process to process, shortens it
    /// by up to a quarter, so that initiators do not try again all at once.
    #[must_use]
    pub fn after(&self, attempts: u32, random: u64) -> u64 {
        /// The shift is bounded so that it cannot overflow.
        const DOUBLINGS_MAX: u32 = 20;
        /// `random` chooses one of this number of lengths.
        const LENGTHS: u64 = 1024;
        let doublings = attempts.saturating_sub(1).min(DOUBLINGS_MAX);
        let pause_ns = self.first_ns.saturating_mul(1 << doublings).min(self.max_ns);
        pause_ns - pause_ns / 4 * (random % LENGTHS) / LENGTHS
    }
}

/// A request that waits until its pause has ended.
#[derive(Debug)]
struct WaitingRequest {
    request: ConnectRequest,
    /// The time before which the request is not served, ns.
    due: u64,
}

/// The waiting requests. Times are nanoseconds of one monotonic clock.
#[derive(Debug)]
pub struct ReconnectQueue {
    back_off: BackOff,
    /// At most one request for each stream.
    waiting: Vec<WaitingRequest>,
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

    /// Adds the request of a stream. It is served at once if no connection of the stream has
    /// failed. An earlier request of a stream with the same id is dropped. `random` is as for
    /// [`BackOff::after`].
    pub fn request(&mut self, request: ConnectRequest, random: u64, now: u64) {
        let pause_ns = match request.attempts {
            0 => 0,
            attempts => self.back_off.after(attempts, random),
        };
        self.waiting.retain(|other| other.request.stream != request.stream);
        self.waiting.push(WaitingRequest { request, due: now.saturating_add(pause_ns) });
    }

    /// Adds a request again, because its connection could not be made. It is served after a pause.
    pub fn failed(&mut self, request: ConnectRequest, random: u64, now: u64) {
        let attempts = request.attempts.saturating_add(1);
        self.request(ConnectRequest { attempts, ..request }, random, now);
    }

    /// Removes a request that must be served now, and returns it.
    pub fn next(&mut self, now: u64) -> Option<ConnectRequest> {
        let index = self.waiting.iter().position(|waiting| waiting.due <= now)?;
        Some(self.waiting.remove(index).request)
    }

    /// When the first request must be served, ns.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.waiting.iter().map(|waiting| waiting.due).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(stream: u16, attempts: u32) -> ConnectRequest {
        ConnectRequest { stream: StreamId(stream), server: 1, link: 1, qid: 2, depth: 8, attempts }
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
        // Half of the range of `random` shortens the pause by half of a quarter.
        assert_eq!(back_off.after(3, 512), 35_000_000);
        assert_eq!(back_off.after(3, 1024 + 512), 35_000_000, "`random` is any number");
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
