//! The counters of a reactor. The reactor's thread counts, and the metrics of the target show the
//! sums over all reactors.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counted event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Counter {
    OrderedRequests,
    Writes,
    WrittenBytes,
    Reads,
    ReadBytes,
    Flushes,
    Discards,
    DriveErrors,
    Connections,
    ConnectsRefused,
    AuthenticationsFailed,
    ConnectionsDisplaced,
    ConnectionsTimedOut,
    HeaderDigestErrors,
    DataDigestErrors,
    Claims,
    StreamsFailed,
    LogFull,
    LogFailed,
}

impl Counter {
    /// All counters, each at the index of its own number.
    pub(crate) const ALL: [Self; 19] = [
        Self::OrderedRequests,
        Self::Writes,
        Self::WrittenBytes,
        Self::Reads,
        Self::ReadBytes,
        Self::Flushes,
        Self::Discards,
        Self::DriveErrors,
        Self::Connections,
        Self::ConnectsRefused,
        Self::AuthenticationsFailed,
        Self::ConnectionsDisplaced,
        Self::ConnectionsTimedOut,
        Self::HeaderDigestErrors,
        Self::DataDigestErrors,
        Self::Claims,
        Self::StreamsFailed,
        Self::LogFull,
        Self::LogFailed,
    ];

    /// The counters of a drive. Those of the target are sums over its drives.
    pub(crate) const OF_DRIVE: [Self; 7] = [
        Self::Writes,
        Self::WrittenBytes,
        Self::Reads,
        Self::ReadBytes,
        Self::Flushes,
        Self::Discards,
        Self::DriveErrors,
    ];

    /// The counter's name in JSON; metrics put `rio_` before it and `_total` behind.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::OrderedRequests => "ordered_requests",
            Self::Writes => "writes",
            Self::WrittenBytes => "written_bytes",
            Self::Reads => "reads",
            Self::ReadBytes => "read_bytes",
            Self::Flushes => "flushes",
            Self::Discards => "discards",
            Self::DriveErrors => "drive_errors",
            Self::Connections => "connections_accepted",
            Self::ConnectsRefused => "connects_refused",
            Self::AuthenticationsFailed => "authentications_failed",
            Self::ConnectionsDisplaced => "connections_displaced",
            Self::ConnectionsTimedOut => "connections_timed_out",
            Self::HeaderDigestErrors => "header_digest_errors",
            Self::DataDigestErrors => "data_digest_errors",
            Self::Claims => "claims",
            Self::StreamsFailed => "streams_failed",
            Self::LogFull => "log_full",
            Self::LogFailed => "log_failed",
        }
    }

    /// The counter's description in the metrics.
    pub(crate) const fn help(self) -> &'static str {
        match self {
            Self::OrderedRequests => "Writes, discards and FLUSHes with an ordering attribute",
            Self::Writes => "Writes handed to drives, ordered or not",
            Self::WrittenBytes => "Bytes of these writes",
            Self::Reads => "Reads handed to drives",
            Self::ReadBytes => "Bytes of these reads",
            Self::Flushes => "FLUSHes handed to drives",
            Self::Discards => "Discards and writes of zeroes handed to drives",
            Self::DriveErrors => "Operations that a drive failed",
            Self::Connections => "Queues that hosts have connected",
            Self::ConnectsRefused => "Connects that were refused",
            Self::AuthenticationsFailed => "Authentications of hosts that failed",
            Self::ConnectionsDisplaced => {
                "Connections that gave way to others before they were admitted"
            }
            Self::ConnectionsTimedOut => {
                "Connections that were not admitted within the time for it"
            }
            Self::HeaderDigestErrors => "PDUs of hosts with a wrong header digest",
            Self::DataDigestErrors => "PDUs of hosts with a wrong data digest",
            Self::Claims => "Times that a volume got a new owner",
            Self::StreamsFailed => "Ordered streams that failed, for any reason",
            Self::LogFull => "Of these, because their ordering log was full",
            Self::LogFailed => "Of these, because their ordering log could not be written",
        }
    }
}

/// The counters of one reactor, or of one reactor for one drive. Only the reactor's thread writes them, so it needs no locked
/// instruction. Every thread may read them.
///
/// The alignment gives each reactor cache lines of its own: CPUs fetch lines of 64 bytes in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counters([AtomicU64; Counter::ALL.len()]);

impl Counters {
    /// Adds to a counter. Only the reactor's own thread may call it.
    #[inline]
    pub(crate) fn add(&self, counter: Counter, count: u64) {
        let value = &self.0[counter as usize];
        value.store(value.load(Relaxed).wrapping_add(count), Relaxed);
    }

    /// The value of a counter.
    pub(crate) fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reactor_has_its_own_counters() {
        let counters = Counters::default();
        for (i, counter) in (0..).zip(Counter::ALL) {
            assert_eq!(counter as usize, i);
            counters.add(counter, i as u64);
            counters.add(counter, 1);
        }
        assert!(Counter::ALL.iter().all(|counter| counters.get(*counter) == *counter as u64 + 1));
    }
}
