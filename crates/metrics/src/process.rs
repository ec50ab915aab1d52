//! The resources that this process takes, under the names that Prometheus's client libraries use.
//!
//! All of them come from `/proc`. What can't be read is left out.

use std::fmt;
use std::fs;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Unit;

use crate::exposition::gauge;

/// Ticks in a second of the times in `/proc`: the same on every Linux (`USER_HZ`).
const TICKS_PER_S: f64 = 100.0;

/// The resources of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Process {
    /// Processor time of all threads, user and system, in s.
    cpu_s: Option<f64>,
    /// The start of the process, in s since 1970.
    start_unix_s: Option<f64>,
    resident_bytes: Option<f64>,
    virtual_bytes: Option<f64>,
    threads: Option<f64>,
    open_fds: Option<f64>,
    max_fds: Option<f64>,
}

impl Process {
    /// Reads the resources of this process.
    fn read() -> Self {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        let mut process =
            Self::parse(&text("/proc/self/stat"), &text("/proc/self/status"), &text("/proc/stat"));
        process.max_fds = max_fds(&text("/proc/self/limits"));
        // One of them reads the directory.
        let fds = fs::read_dir("/proc/self/fd").map(Iterator::count);
        process.open_fds = fds.ok().map(|fds| fds.saturating_sub(1) as f64);
        process
    }

    /// Parses `/proc/self/stat`, `/proc/self/status` and `/proc/stat`.
    fn parse(stat: &str, status: &str, system: &str) -> Self {
        // The second field is the name in parentheses, which may contain anything.
        let fields: Vec<f64> = stat
            .rsplit_once(')')
            .map_or("", |(_, rest)| rest)
            .split_whitespace()
            .map(|field| field.parse().unwrap_or(f64::NAN))
            .collect();
        // By the numbers in proc_pid_stat(5). The first field here is the third one.
        let field = |number: usize| fields.get(number - 3).copied().filter(|field| !field.is_nan());
        let boot_unix_s: Option<f64> = system
            .lines()
            .find_map(|line| line.strip_prefix("btime "))
            .and_then(|seconds| seconds.trim().parse().ok());
        let kibibytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<f64>().ok().map(|kib| kib * 1024.0)
        };
        Self {
            cpu_s: field(14).zip(field(15)).map(|(user, system)| (user + system) / TICKS_PER_S),
            start_unix_s: boot_unix_s.zip(field(22)).map(|(boot, at)| boot + at / TICKS_PER_S),
            resident_bytes: kibibytes("VmRSS:"),
            virtual_bytes: kibibytes("VmSize:"),
            threads: field(20),
            ..Self::default()
        }
    }
}

/// The soft limit of open files in `/proc/self/limits`; none if it is unlimited.
fn max_fds(limits: &str) -> Option<f64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Encodes the resources of this process: `process_cpu_seconds_total` and others.
///
/// # Errors
/// None when writing to memory.
pub fn process(to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    encode(to, &Process::read())
}

fn encode(to: &mut DescriptorEncoder<'_>, process: &Process) -> fmt::Result {
    if let Some(seconds) = process.cpu_s {
        let help = "Processor time of all threads, user and system";
        let unit = Some(&Unit::Seconds);
        let encoder = to.encode_descriptor("process_cpu", help, unit, MetricType::Counter)?;
        ConstCounter::new(seconds).encode(encoder)?;
    }
    let gauges = [
        ("process_start_time_seconds", "Start of the process, since 1970", process.start_unix_s),
        ("process_resident_memory_bytes", "Memory in RAM", process.resident_bytes),
        ("process_virtual_memory_bytes", "Size of the address space", process.virtual_bytes),
        ("process_threads", "Threads", process.threads),
        ("process_open_fds", "Open file descriptors", process.open_fds),
        ("process_max_fds", "Most file descriptors that may be open", process.max_fds),
    ];
    for (name, help, value) in gauges {
        if let Some(value) = value {
            gauge(to, name, help, value)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use prometheus_client::collector::Collector;

    use super::*;

    #[test]
    fn the_files_of_proc_are_understood() {
        let stat =
            "7 (a) b) c) S 1 7 7 0 -1 4194560 101 0 2 0 250 50 0 0 20 0 5 0 1200 9000 80 1 2";
        let status = "Name:\ta\nVmSize:\t   9000 kB\nVmRSS:\t     80 kB\nThreads:\t5\n";
        let process = Process::parse(stat, status, "cpu 1 2\nbtime 1700000000\nprocesses 3\n");
        let expected = Process {
            cpu_s: Some(3.0),
            start_unix_s: Some(1_700_000_012.0),
            resident_bytes: Some(81_920.0),
            virtual_bytes: Some(9_216_000.0),
            threads: Some(5.0),
            ..Process::default()
        };
        assert_eq!(process, expected);
        assert_eq!(Process::parse("", "", ""), Process::default());
        assert_eq!(Process::parse("no parenthesis", "VmRSS:", "btime x"), Process::default());
        let limits =
            "Limit    Soft Limit  Hard Limit  Units\nMax open files   1024   4096  files\n";
        assert_eq!(max_fds(limits), Some(1024.0));
        assert_eq!(max_fds("Max open files   unlimited   unlimited  files\n"), None);
    }

    #[derive(Debug)]
    struct Page;

    impl Collector for Page {
        fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
            process(&mut to)
        }
    }

    #[test]
    fn this_process_is_described() {
        let page = crate::exposition::text(Page).unwrap();
        let value = |name: &str| {
            let line = page.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
            line.unwrap_or_else(|| panic!("no {name} in\n{page}")).parse::<f64>().unwrap()
        };
        assert!(value("process_cpu_seconds_total") < 1e6);
        assert!(value("process_start_time_seconds") > 1e9);
        assert!(value("process_resident_memory_bytes") > 1e5);
        assert!(value("process_virtual_memory_bytes") > value("process_resident_memory_bytes"));
        assert!(value("process_threads") >= 1.0);
        let file = std::fs::File::open("/proc/self/stat").unwrap();
        assert!((1.0..=value("process_max_fds")).contains(&value("process_open_fds")), "{file:?}");
    }
}
