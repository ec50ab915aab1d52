//! How many lines of one kind are logged: what a peer can cause without end must not fill the log,
//! nor push everything else out of it. Pure: the time is an argument.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Lines of one kind within one period.
pub(super) const LINES: u32 = 50;
/// How long a period is, ns. It begins with its first line.
pub(super) const PERIOD_NS: u64 = 10_000_000_000;

/// What becomes of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is logged. So many like it were left out before, and nobody has been told yet.
    Log {
        /// How many.
        left_out: u64,
    },
    /// It is counted, and left out.
    LeaveOut,
}

/// What one kind of line has used up.
#[derive(Clone, Copy, Debug, Default)]
struct Quota {
    /// When the period began, ns.
    since: Option<u64>,
    logged: u32,
    left_out: u64,
}

impl Quota {
    /// One more line, at `now` ns.
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

/// All kinds of lines, by what they have in common.
#[derive(Debug)]
pub(super) struct Quotas<K>(Mutex<HashMap<K, Kind>>);

#[derive(Debug, Default)]
struct Kind {
    quota: Quota,
    /// The last line that was left out.
    last: Vec<u8>,
}

impl<K: Eq + Hash> Quotas<K> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    /// One more line of kind `kind`, at `now` ns.
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

    /// What was left out in periods that are over at `now` ns, or in all of them (`None`): the last
    /// line of each kind, and how many more there were. Each is told once.
    pub(super) fn overdue(&self, now: Option<u64>) -> Vec<(u64, Vec<u8>)> {
        let mut kinds = self.lock();
        let overdue = kinds.values_mut().filter(|kind| {
            kind.quota.left_out > 0 && now.is_none_or(|now| kind.quota.is_over(now))
        });
        let told = overdue.map(|kind| {
            let left_out = std::mem::take(&mut kind.quota.left_out);
            (left_out - 1, std::mem::take(&mut kind.last))
        });
        told.collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, Kind>> {
        // Whole after each statement that could panic: only memory could run out.
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
        assert_eq!(quota.ask(PERIOD_NS), LOG, "told once");
        assert_eq!(quota.ask(0), LOG, "a clock that goes back harms nobody");
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
    fn what_was_left_out_is_told_though_no_such_line_follows() {
        let quotas = Quotas::new();
        for n in 0..LINES + 3 {
            quotas.ask("refused", format!("peer {n}").as_bytes(), 7);
        }
        assert_eq!(quotas.overdue(Some(PERIOD_NS)), []);
        let last = format!("peer {}", LINES + 2).into_bytes();
        assert_eq!(quotas.overdue(Some(PERIOD_NS + 7)), [(2, last)]);
        assert_eq!(quotas.overdue(None), [], "told once");
        assert_eq!(quotas.ask("refused", b"", PERIOD_NS + 8), LOG);
    }
}
