//! The description of the machine that was measured.

use std::fs;

use serde::{Deserialize, Serialize};

/// The properties of a machine that explain a figure. Nothing in it identifies its owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Processor model.
    pub cpu: String,
    /// Number of cores that this process may use.
    pub cores: usize,
    /// Size of the memory in bytes.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Congestion control of TCP.
    pub congestion: String,
    /// Load average of the last minute when the run began. Well above 0, other programs were
    /// running, and absolute figures are too low.
    pub load: f64,
}

impl Machine {
    /// This machine, now. A value that the system does not report is empty or 0.
    #[must_use]
    pub fn this() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self {
            cpu: cpu_model(&read("/proc/cpuinfo")),
            cores: riopipe_net::allowed_cores().len(),
            memory_bytes: memory_bytes(&read("/proc/meminfo")),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            congestion: read("/proc/sys/net/ipv4/tcp_congestion_control").trim().to_owned(),
            load: load(&read("/proc/loadavg")),
        }
    }

    /// The description on one line.
    #[must_use]
    pub fn line(&self) -> String {
        let cores = match self.cores {
            1 => "1 core".to_owned(),
            n => format!("{n} cores"),
        };
        format!(
            "{}, {cores}, {}, Linux {}, TCP {}",
            self.cpu,
            crate::units::bytes(self.memory_bytes >> 30 << 30),
            self.kernel,
            self.congestion
        )
    }

    /// A warning if the machine was busy before the run.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        (self.load > 0.3).then(|| {
            format!(
                "the machine was not quiet (load {:.1}): absolute figures are too low, ratios less so",
                self.load
            )
        })
    }
}

fn cpu_model(cpuinfo: &str) -> String {
    field(cpuinfo, "model name").unwrap_or("unknown processor").to_owned()
}

fn memory_bytes(meminfo: &str) -> u64 {
    field(meminfo, "MemTotal")
        .and_then(|value| value.trim_end_matches(" kB").parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

fn load(loadavg: &str) -> f64 {
    loadavg.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0)
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_writes() {
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: AMD EPYC\n"), "AMD EPYC");
        assert_eq!(cpu_model(""), "unknown processor");
        assert_eq!(memory_bytes("MemTotal:       24684084 kB\n"), 24_684_084 << 10);
        assert_eq!(load("0.52 0.58 0.59 1/97 1234\n"), 0.52);
    }

    #[test]
    fn this_machine_has_a_description() {
        let machine = Machine::this();
        assert!(machine.cores > 0);
        assert!(machine.memory_bytes > 0);
        assert!(!machine.kernel.is_empty());
        assert!(machine.line().contains(&machine.kernel));
    }

    #[test]
    fn a_busy_machine_gets_a_warning() {
        let with = |load| Machine { load, ..Machine::default() };
        assert_eq!(with(0.1).warning(), None);
        assert!(with(1.5).warning().unwrap().contains("load 1.5"));
    }
}
