//! The limit on lines of one kind: lines that a peer can cause without limit must not fill the log,
//! nor displace others. Pure: the time is an argument.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Number of lines of one kind within one period.
pub(super) const LINES: u32 = 50;
/// Length of a period in ns. It begins with its first line.
pub(super) const PERIOD_NS: u64 = 10_000_000_000;

/// The decision about a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is logged. This number of similar lines was omitted before and not reported yet.
    Log {
        /// Number of omitted lines.
        left_out: u64,
    },
    /// It is counted and omitted.
    LeaveOut,
}

/// The use of one kind's quota.
#[derive(Clone, Copy, Debug, Default)]
struct Quota {
    /// Begin of the period in ns.
    since: Option<u64>,
    logged: u32,
    left_out: u64,
}

impl Quota {
    /// Counts a line at `now` ns.
    fn ask(&mut self, now: u64) -> Verdict {
        if self.is_over(now) {
            let left_out = self.left_out;
            *self = Self { since: Some(now), logged: 1, left_out: 0 };
            return Verdict::Log { left_out };
        }
        if self.logged < LINES {
            self.logged += 1;
            return Verdict::Log { left_out: 0 };
        }
        self.left_out += 1;
        Verdict::LeaveOut
    }

    fn is_over(&self, now: u64) -> bool {
        self.since.is_none_or(|since| now.saturating_sub(since) >= PERIOD_NS)
    }
}

/// The quotas of all kinds of lines.
#[derive(Debug)]
pub(super) struct Quotas<K>(Mutex<HashMap<K, Kind>>);

#[derive(Debug, Default)]
struct Kind {
    quota: Quota,
    /// The last omitted line.
    last: Vec<u8>,
}

impl<K: Eq + Hash> Quotas<K> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    /// Counts a line of kind `kind` at `now` ns.
    pub(super) fn ask(&self, kind: K, line: &[u8], now: u64) -> Verdict {
        let mut kinds = self.lock();
        let kind = kinds.entry(kind).or_default();
        let verdict = kind.quota.ask(now);
        kind.last.clear();
        if verdict == Verdict::LeaveOut {
            kind.last.extend_from_slice(line);
        }
        verdict
    }

    /// The omitted lines of periods that are over at `now` ns, or of all (`None`): the last line of
    /// each kind, and the number of others. Each is reported once.
    pub(super) fn overdue(&self, now: Option<u64>) -> Vec<(u64, Vec<u8>)> {
        let mut kinds = self.lock();
        let overdue = kinds.values_mut().filter(|kind| {
            kind.quota.left_out > 0 && now.is_none_or(|now| kind.quota.is_over(now))
        });
        let reports = overdue.map(|kind| {
            let left_out = std::mem::take(&mut kind.quota.left_out);
            (left_out - 1, std::mem::take(&mut kind.last))
        });
        reports.collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, Kind>> {
        // The value is consistent after each statement that could panic: only memory could run out.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: Verdict = Verdict::Log { left_out: 0 };

    #[test]
    fn beyond_the_quota_lines_are_counted_until_the_period_is_over() {
        let mut quota = Quota::default();
        for at in 0..u64::from(LINES) {
            assert_eq!(quota.ask(at), LOG);
        }
        for at in 0..1000 {
            assert_eq!(quota.ask(PERIOD_NS - 1000 + at), Verdict::LeaveOut);
        }
        assert_eq!(quota.ask(PERIOD_NS), Verdict::Log { left_out: 1000 });
        assert_eq!(quota.ask(PERIOD_NS), LOG, "reported once");
        assert_eq!(quota.ask(0), LOG, "a clock that goes back is harmless");
    }

    #[test]
    fn each_kind_has_a_quota_of_its_own() {
        let quotas = Quotas::new();
        for _ in 0..LINES {
            assert_eq!(quotas.ask("refused", b"", 7), LOG);
        }
        assert_eq!(quotas.ask("refused", b"", 7), Verdict::LeaveOut);
        assert_eq!(quotas.ask("a drive failed", b"", 7), LOG);
    }

    #[test]
    fn omitted_lines_are_reported_even_if_no_similar_line_follows() {
        let quotas = Quotas::new();
        for n in 0..LINES + 3 {
            quotas.ask("refused", format!("peer {n}").as_bytes(), 7);
        }
        assert_eq!(quotas.overdue(Some(PERIOD_NS)), []);
        let last = format!("peer {}", LINES + 2).into_bytes();
        assert_eq!(quotas.overdue(Some(PERIOD_NS + 7)), [(2, last)]);
        assert_eq!(quotas.overdue(None), [], "reported once");
        assert_eq!(quotas.ask("refused", b"", PERIOD_NS + 8), LOG);
    }
}
