//! Stolen time: on a virtual machine a processor may stop while another guest uses it, and
//! measurements of that time are too slow.
//!
//! Linux counts that time ("steal") if the hypervisor reports it; otherwise the count stays 0.

use std::fs;

use riopipe_net::now_ns;

/// One tick of the kernel's counter, in ns. `sysconf(_SC_CLK_TCK)` is 100 on every relevant Linux:
/// it is a constant of the system call interface, independent of the kernel's own rate.
pub const TICK_NS: u64 = 10_000_000;

/// Share of the machine's time above which a run counts as disturbed. With 30 % stolen, a run makes
/// a third of the writes.
const DISTURBS: f64 = 0.02;

/// The counter at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Time of the monotonic clock, in ns.
    at_ns: u64,
    counter: Option<Counter>,
}

/// The kernel's counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counter {
    /// Sum over all processors, in ns, in steps of [`TICK_NS`].
    stolen_ns: u64,
    /// Number of present processors: the counter is their sum.
    processors: u64,
}

/// The time that the host took between two readings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stolen {
    /// Processor time in ns.
    pub ns: u64,
    /// Share of the machine's time, which is the time between the readings on all processors: 0 to
    /// 1.
    pub share: f64,
}

impl Reading {
    /// A reading now. Without a counter, nothing is known.
    #[must_use]
    pub fn now() -> Self {
        let counter = fs::read_to_string("/proc/stat").ok().and_then(|stat| counter(&stat));
        Self { at_ns: now_ns(), counter }
    }

    /// The time taken since `before`; `None` if it is not known.
    #[must_use]
    pub fn since(&self, before: &Self) -> Option<Stolen> {
        let (now, then) = (self.counter?, before.counter?);
        // Some hypervisors count backwards when the guest is migrated.
        let ns = now.stolen_ns.saturating_sub(then.stolen_ns);
        let machine_ns = self.at_ns.saturating_sub(before.at_ns).checked_mul(now.processors)?;
        if machine_ns == 0 {
            return None;
        }
        // A tick that began before the first reading may be counted between the two.
        Some(Stolen { ns, share: (ns as f64 / machine_ns as f64).min(1.0) })
    }
}

impl Stolen {
    /// Whether so much time was taken that the run should be repeated. A single tick proves
    /// nothing, since it may have begun before the first reading.
    #[must_use]
    pub fn disturbs(&self) -> bool {
        self.share > DISTURBS && self.ns > TICK_NS
    }
}

/// Parses `/proc/stat`: the eighth number of the line of all processors, and the number of
/// processors with a line of their own.
fn counter(stat: &str) -> Option<Counter> {
    let ticks = stat
        .lines()
        .map(str::split_whitespace)
        .find_map(|mut words| (words.next() == Some("cpu")).then_some(words))?
        .nth(7)?
        .parse::<u64>()
        .ok()?;
    let is_one = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let processors = stat.lines().filter(is_one).count() as u64;
    let stolen_ns = ticks.checked_mul(TICK_NS)?;
    (processors > 0).then_some(Counter { stolen_ns, processors })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "\
cpu  4162932 1075517 806411 1669759 10775 1 56739 74816 2 3
cpu0 2082302 537214 403205 834879 5387 0 28369 37408 0 0
cpu1 2080630 538303 403206 834880 5388 0 28370 37408 0 0
intr 17 0 9
ctxt 1990473
";

    fn reading(at_ms: u64, ticks: u64) -> Reading {
        let counter = Some(Counter { stolen_ns: ticks * TICK_NS, processors: 2 });
        Reading { at_ns: at_ms * 1_000_000, counter }
    }

    #[test]
    fn reads_what_the_kernel_writes() {
        let read = counter(STAT);
        assert_eq!(read, Some(Counter { stolen_ns: 748_160_000_000, processors: 2 }));
    }

    #[test]
    fn a_missing_counter_gives_no_reading() {
        for stat in [
            "",
            "intr 17 0 9\n",
            // Before Linux 2.6.11: seven numbers.
            "cpu  1 2 3 4 5 6 7\ncpu0 1 2 3 4 5 6 7\n",
            "cpu  1 2 3 4 5 6 7 many 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n",
            "cpu  1 2 3 4 5 6 7 18446744073709551615\ncpu0 1 2 3 4 5 6 7 8\n",
            // No processor has a line of its own.
            "cpu  1 2 3 4 5 6 7 8 9 10\ncpufreq 1\n",
            "cpu0 1 2 3 4 5 6 7 8 9 10\n",
        ] {
            assert_eq!(counter(stat), None, "{stat:?}");
        }
        let unknown = Reading { at_ns: 7, counter: None };
        assert_eq!(reading(100, 3).since(&unknown), None);
        assert_eq!(unknown.since(&reading(0, 3)), None);
        assert_eq!(reading(100, 3).since(&reading(100, 3)), None, "no time between");
    }

    #[test]
    fn the_share_is_of_all_processors_time() {
        let stolen = reading(1_500, 30).since(&reading(1_000, 20));
        assert_eq!(stolen, Some(Stolen { ns: 10 * TICK_NS, share: 0.1 }));
        let none = reading(1_500, 20).since(&reading(1_000, 30));
        assert_eq!(none, Some(Stolen { ns: 0, share: 0.0 }), "backwards");
        let all = reading(1_001, 21).since(&reading(1_000, 20));
        assert_eq!(all.map(|stolen| stolen.share), Some(1.0), "at most the whole time");
    }

    #[test]
    fn a_run_is_disturbed_from_two_percent_and_more_than_a_tick() {
        for (ticks, share, disturbs) in
            [(100, 0.02, false), (100, 0.021, true), (1, 0.5, false), (2, 0.5, true)]
        {
            let stolen = Stolen { ns: ticks * TICK_NS, share };
            assert_eq!(stolen.disturbs(), disturbs, "{stolen:?}");
        }
    }
}
