//! The times at which an initiator sends Keep Alive (Base §3.9), and the explanation of a loss:
//! whether the target may have dropped the association because it got no command in time.

use core::fmt;

/// The Keep Alive commands of one association. Times are nanoseconds of one monotonic clock.
///
/// By default a command goes out each third of the time after which the target gives up. So two
/// commands may come late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    /// The time after which the target gives up (KATO), ns; 0: never.
    timeout_ns: u64,
    /// The interval of the commands, ns; `None`: none is sent.
    interval_ns: Option<u64>,
    /// The start of the association, ns.
    started_at: u64,
    /// When the last command was sent, ns.
    last_sent: u64,
    /// The longest recent time between two commands, ns. The target may have dropped the
    /// association because of this silence, although the initiator has not noticed the end yet.
    silence_ns: u64,
    /// When that silence ended, ns.
    silence_end: u64,
}

/// An association that a target has dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The lifetime of the association, ns.
    pub lifetime_ns: u64,
    /// The longest recent time for which no command was sent to the target, ns.
    pub silence_ns: u64,
    /// The time for which the target waits for a command, ns.
    pub timeout_ns: u64,
}

impl KeepAlive {
    /// The commands of an association that exists from `now` on. Its target gives up after
    /// `timeout_ms` milliseconds (KATO); never if that is 0.
    #[must_use]
    pub fn new(timeout_ms: u32, now: u64) -> Self {
        let timeout_ns = u64::from(timeout_ms) * 1_000_000;
        let interval_ns = (timeout_ns > 0).then_some(timeout_ns / 3);
        Self {
            timeout_ns,
            interval_ns,
            started_at: now,
            last_sent: now,
            silence_ns: 0,
            silence_end: now,
        }
    }

    /// Sends a command every `interval_ns` nanoseconds instead, also to a target that never gives
    /// up, because its answers show that it runs.
    #[must_use]
    pub const fn every(self, interval_ns: u64) -> Self {
        Self { interval_ns: Some(interval_ns), ..self }
    }

    /// Sends a command every `interval_ns` nanoseconds at least.
    pub fn speed_up(&mut self, interval_ns: u64) {
        self.interval_ns = Some(self.interval_ns.map_or(interval_ns, |own| own.min(interval_ns)));
    }

    /// When the next command is due, ns; `None`: never.
    #[must_use]
    pub fn next_due(&self) -> Option<u64> {
        self.interval_ns.map(|interval_ns| self.last_sent.saturating_add(interval_ns))
    }

    /// Whether a command is due.
    #[must_use]
    pub fn is_due(&self, now: u64) -> bool {
        self.next_due().is_some_and(|next| now >= next)
    }

    /// Records that a command is sent at `now`, ns.
    pub fn record_sent(&mut self, now: u64) {
        let silence_ns = now.saturating_sub(self.last_sent);
        if silence_ns >= self.longest_silence_ns(now) {
            self.silence_ns = silence_ns;
            self.silence_end = now;
        }
        self.last_sent = now;
    }

    /// The loss of an association that the target has dropped, noticed at `now`.
    #[must_use]
    pub fn loss_at(&self, now: u64) -> Loss {
        Loss {
            lifetime_ns: now.saturating_sub(self.started_at),
            silence_ns: self.longest_silence_ns(now),
            timeout_ns: self.timeout_ns,
        }
    }

    /// The longest recent time without a command, ns, up to `now`.
    fn longest_silence_ns(&self, now: u64) -> u64 {
        // If the association still exists a whole timeout after a silence, the target has not
        // dropped it because of that silence.
        let was_survived = now.saturating_sub(self.silence_end) > self.timeout_ns;
        let past_silence_ns = if was_survived { 0 } else { self.silence_ns };
        let present_silence_ns = now.saturating_sub(self.last_sent);
        past_silence_ns.max(present_silence_ns)
    }
}

impl Loss {
    /// Whether the target may have waited for a command for its whole timeout.
    #[must_use]
    pub fn ran_out(&self) -> bool {
        self.timeout_ns > 0 && self.silence_ns >= self.timeout_ns
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |ns: u64| ns / 1_000_000_000;
        write!(f, "the target dropped the connection after {} s", seconds(self.lifetime_ns))?;
        if self.ran_out() {
            write!(
                f,
                ": its keep-alive ran out, since this program sent nothing for {} s and the target \
                 waits for {} s; was the program or its machine stopped? Try again",
                seconds(self.silence_ns),
                seconds(self.timeout_ns)
            )
        } else {
            f.write_str(
                "; the target's own messages may show the cause: check that it runs, and try again",
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    const S: u64 = 1_000_000_000;

    #[test]
    fn keep_alive_is_sent_three_times_as_often_as_required() {
        let mut keep = KeepAlive::new(15_000, 100 * S);
        assert_eq!(keep.next_due(), Some(105 * S));
        assert!(!keep.is_due(105 * S - 1) && keep.is_due(105 * S));
        keep.record_sent(106 * S);
        assert_eq!(keep.next_due(), Some(111 * S));
        assert!(!keep.loss_at(120 * S).ran_out());
        assert!(keep.loss_at(121 * S).ran_out());
    }

    #[test]
    fn without_a_timeout_no_keep_alive_is_sent() {
        let keep = KeepAlive::new(0, 0);
        assert_eq!(keep.next_due(), None);
        assert!(!keep.is_due(u64::MAX) && !keep.loss_at(u64::MAX).ran_out());
        assert_eq!(keep.every(5).next_due(), Some(5));
    }

    #[test]
    fn a_loss_reports_whether_the_keep_alive_ran_out() {
        let mut keep = KeepAlive::new(15_000, 0);
        keep.record_sent(5 * S);
        let text = keep.loss_at(7 * S).to_string();
        assert!(text.contains("after 7 s") && !text.contains("keep-alive"), "{text}");
        // A program that was stopped continues to send commands, and notices the loss only then.
        keep.record_sent(22 * S);
        let text = keep.loss_at(23 * S).to_string();
        for words in ["after 23 s", "keep-alive ran out", "nothing for 17 s", "waits for 15 s"] {
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn a_silence_that_the_association_survived_is_no_cause() {
        let mut keep = KeepAlive::new(15_000, 0);
        keep.record_sent(16 * S);
        for at in 4..720 {
            keep.record_sent(5 * at * S);
        }
        assert!(!keep.loss_at(3601 * S).ran_out());
    }
}
