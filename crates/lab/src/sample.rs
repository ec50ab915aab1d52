//! The result of one run of one contender.

use crate::{latency::Latencies, retakes::Disturbance};

/// One run, measured from the end of its warm-up to its last counted completion.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Number of completed writes.
    pub writes: u64,
    /// Number of completed groups.
    pub groups: u64,
    /// Payload bytes of these writes.
    pub bytes: u64,
    /// Wall time, ns.
    pub wall_ns: u64,
    /// CPU time of the writing threads in that time, ns.
    pub initiator_cpu_ns: u64,
    /// CPU time of the target's threads in that time, ns, where it is known.
    pub target_cpu_ns: Option<u64>,
    /// Latency from submission to completion, per write.
    pub latencies: Latencies,
    /// The same with both sides sleeping while they wait, if that was run. Polling uses CPU time
    /// that no write needs, so CPU time is then taken from here.
    pub blocking: Option<Box<Self>>,
    /// The host's effect on this run and the one with sleeping together.
    pub disturbance: Disturbance,
}

impl Sample {
    /// Adds the results of another thread in the same run and time.
    pub fn add_thread(&mut self, other: &Self) {
        self.writes += other.writes;
        self.groups += other.groups;
        self.bytes += other.bytes;
        self.wall_ns = self.wall_ns.max(other.wall_ns);
        self.initiator_cpu_ns += other.initiator_cpu_ns;
        self.target_cpu_ns = match (self.target_cpu_ns, other.target_cpu_ns) {
            (Some(a), Some(b)) => Some(a + b),
            (one, other) => one.or(other),
        };
        self.latencies.add(&other.latencies);
    }

    /// Writes per second.
    #[must_use]
    pub fn writes_per_s(&self) -> f64 {
        per_second(self.writes, self.wall_ns)
    }

    /// Groups per second.
    #[must_use]
    pub fn groups_per_s(&self) -> f64 {
        per_second(self.groups, self.wall_ns)
    }

    /// Payload bytes per second.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        per_second(self.bytes, self.wall_ns)
    }

    /// CPU time per write on the initiator's side, in ns; of the [`blocking`](Self::blocking) run
    /// if there is one.
    #[must_use]
    pub fn initiator_cpu_ns_per_write(&self) -> f64 {
        let run = self.for_cpu();
        per_write(run.initiator_cpu_ns, run.writes)
    }

    /// CPU time per write on the target's side, in ns; of the [`blocking`](Self::blocking) run if
    /// there is one.
    #[must_use]
    pub fn target_cpu_ns_per_write(&self) -> Option<f64> {
        let run = self.for_cpu();
        Some(per_write(run.target_cpu_ns?, run.writes))
    }

    fn for_cpu(&self) -> &Self {
        self.blocking.as_deref().unwrap_or(self)
    }
}

fn per_second(count: u64, wall_ns: u64) -> f64 {
    if wall_ns == 0 {
        return 0.0;
    }
    count as f64 * 1e9 / wall_ns as f64
}

fn per_write(cpu_ns: u64, writes: u64) -> f64 {
    if writes == 0 {
        return 0.0;
    }
    cpu_ns as f64 / writes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_add_up_over_one_wall_time() {
        let thread = |writes, wall_ns, target_cpu_ns| Sample {
            writes,
            groups: writes / 2,
            bytes: writes * 4096,
            wall_ns,
            initiator_cpu_ns: 1000 * writes,
            target_cpu_ns,
            ..Sample::default()
        };
        let mut run = thread(600, 1_000_000_000, Some(60_000));
        run.add_thread(&thread(400, 999_000_000, None));
        assert_eq!(run.writes_per_s(), 1000.0);
        assert_eq!(run.groups_per_s(), 500.0);
        assert_eq!(run.bytes_per_s(), 4_096_000.0);
        assert_eq!(run.initiator_cpu_ns_per_write(), 1000.0);
        assert_eq!(run.target_cpu_ns_per_write(), Some(60.0));
    }

    #[test]
    fn cpu_time_is_taken_from_the_blocking_run() {
        let asleep = Sample {
            writes: 10,
            initiator_cpu_ns: 70,
            target_cpu_ns: Some(50),
            ..Sample::default()
        };
        let spinning = Sample {
            writes: 1000,
            wall_ns: 1_000_000_000,
            initiator_cpu_ns: 1_000_000_000,
            target_cpu_ns: Some(1_000_000_000),
            blocking: Some(Box::new(asleep)),
            ..Sample::default()
        };
        assert_eq!(spinning.writes_per_s(), 1000.0);
        assert_eq!(spinning.initiator_cpu_ns_per_write(), 7.0);
        assert_eq!(spinning.target_cpu_ns_per_write(), Some(5.0));
    }

    #[test]
    fn an_empty_run_is_zero_not_infinite() {
        let none = Sample::default();
        assert_eq!(none.writes_per_s(), 0.0);
        assert_eq!(none.initiator_cpu_ns_per_write(), 0.0);
        assert_eq!(none.target_cpu_ns_per_write(), None);
    }
}
