//! What the host takes away: on a virtual machine a processor may stand still while another guest
//! has it, and whatever was measured in that time is too slow.
//!
//! Linux counts that time ("steal") where the hypervisor tells it; elsewhere the count stays 0.

use std::fs;

use riopipe_net::now_ns;

/// One tick of the kernel's counter, ns. `sysconf(_SC_CLK_TCK)` is 100 on every Linux that matters
/// (it is a constant of the system call interface, whatever rate the kernel ticks at itself).
pub const TICK_NS: u64 = 10_000_000;

/// Above this share of the machine's time a run says more about the host than about us: one of
/// which 30 % was taken makes a third of the writes.
const DISTURBS: f64 = 0.02;

/// The counter at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Of the monotonic clock, ns.
    at_ns: u64,
    counter: Option<Counter>,
}

/// What the kernel counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counter {
    /// Summed over all processors, ns, in steps of [`TICK_NS`].
    stolen_ns: u64,
    /// Those that are there; all of them, since the counter is of all.
    processors: u64,
}

/// What the host took between two looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stolen {
    /// Processor time, ns.
    pub ns: u64,
    /// Of the machine's time, which is the time between the looks on each processor: 0 to 1.
    pub share: f64,
}

impl Look {
    /// Now. Where the system doesn't count, nothing is known.
    #[must_use]
    pub fn now() -> Self {
        let counter = fs::read_to_string("/proc/stat").ok().and_then(|stat| counter(&stat));
        Self { at_ns: now_ns(), counter }
    }

    /// What was taken since `before`; `None` where nothing is known.
    #[must_use]
    pub fn since(&self, before: &Self) -> Option<Stolen> {
        let (now, then) = (self.counter?, before.counter?);
        // Some hypervisors count backwards when the guest is moved.
        let ns = now.stolen_ns.saturating_sub(then.stolen_ns);
        let machine_ns = self.at_ns.saturating_sub(before.at_ns).checked_mul(now.processors)?;
        if machine_ns == 0 {
            return None;
        }
        // A tick that began before the first look may be counted between them.
        Some(Stolen { ns, share: (ns as f64 / machine_ns as f64).min(1.0) })
    }
}

impl Stolen {
    /// Whether so much was taken that the run should be taken again. One tick alone says nothing:
    /// it may have been stolen before the first look.
    #[must_use]
    pub fn disturbs(&self) -> bool {
        self.share > DISTURBS && self.ns > TICK_NS
    }
}

/// From the text of `/proc/stat`: the eighth number of the line of all processors, and how many
/// have a line of their own.
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

    fn look(at_ms: u64, ticks: u64) -> Look {
        let counter = Some(Counter { stolen_ns: ticks * TICK_NS, processors: 2 });
        Look { at_ns: at_ms * 1_000_000, counter }
    }

    #[test]
    fn reads_what_the_kernel_writes() {
        let read = counter(STAT);
        assert_eq!(read, Some(Counter { stolen_ns: 748_160_000_000, processors: 2 }));
    }

    #[test]
    fn what_is_not_told_is_not_known() {
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
        let unknown = Look { at_ns: 7, counter: None };
        assert_eq!(look(100, 3).since(&unknown), None);
        assert_eq!(unknown.since(&look(0, 3)), None);
        assert_eq!(look(100, 3).since(&look(100, 3)), None, "no time between");
    }

    #[test]
    fn the_share_is_of_all_processors_time() {
        let stolen = look(1_500, 30).since(&look(1_000, 20));
        assert_eq!(stolen, Some(Stolen { ns: 10 * TICK_NS, share: 0.1 }));
        let none = look(1_500, 20).since(&look(1_000, 30));
        assert_eq!(none, Some(Stolen { ns: 0, share: 0.0 }), "backwards");
        let all = look(1_001, 21).since(&look(1_000, 20));
        assert_eq!(all.map(|stolen| stolen.share), Some(1.0), "more than there was");
    }

    #[test]
    fn two_percent_and_more_than_a_tick_disturb() {
        for (ticks, share, disturbs) in
            [(100, 0.02, false), (100, 0.021, true), (1, 0.5, false), (2, 0.5, true)]
        {
            let stolen = Stolen { ns: ticks * TICK_NS, share };
            assert_eq!(stolen.disturbs(), disturbs, "{stolen:?}");
        }
    }
}
