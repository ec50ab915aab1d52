//! `fillsync` of RocksDB's own `db_bench`, on a mounted directory.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use riopipe_lab::{fs_load::FsLoad, harness::SideCpu, latency::Latencies, sample::Sample};
use riopipe_platform::process_cpu_ns;

use super::cpu::side_cpu;
use crate::failure::{Code, Failure};

/// Its name on the PATH; it is in Debian's package rocksdb-tools.
const NAME: &str = "db_bench";
/// How often the CPU time of the running program is read.
const CPU_STEP: Duration = Duration::from_millis(10);
/// The parts of a bucket of its histogram that get equal shares of its values, as the program itself
/// assumes for its percentiles.
const PARTS: u64 = 32;

/// The program, if it is installed.
pub(super) fn find() -> Option<PathBuf> {
    let folders = env::var_os("PATH")?;
    env::split_paths(&folders).map(|folder| folder.join(NAME)).find(|path| path.is_file())
}

/// Runs it on a database in `directory`.
pub(super) fn run(program: &Path, directory: &Path, load: &FsLoad) -> Result<Sample, Failure> {
    let failed = |what: String| Failure::new(Code::Failed, format!("{NAME}: {what}"));
    // It takes whole seconds.
    let seconds = load.window.duration.as_secs_f64().ceil().max(1.0);
    let mut command = Command::new(program);
    command.args(["--benchmarks=fillsync", "--key_size=16", "--value_size=1024"]);
    command.args(["--histogram=1", "--num=1000000000"]);
    command.arg(format!("--db={}", directory.join("db").display()));
    command.arg(format!("--threads={}", load.threads));
    command.arg(format!("--duration={seconds}"));
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let before = side_cpu();
    let child = command.spawn().map_err(|error| failed(error.to_string()))?;
    let watched = child.id();
    let watcher = thread::spawn(move || cpu_until_its_end(watched));
    let output = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    let after = side_cpu();
    let own_cpu = watcher.join().unwrap_or(0);
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        return Err(failed(format!("{}: {}", output.status, text.trim())));
    }
    let Some(sample) = parse(&text) else {
        return Err(failed(format!("its output has no result: {}", text.trim())));
    };
    let SideCpu { initiator_ns, target_ns } = after;
    Ok(Sample {
        initiator_cpu_ns: own_cpu + initiator_ns.saturating_sub(before.initiator_ns),
        target_cpu_ns: target_ns
            .zip(before.target_ns)
            .map(|(after, before)| after.saturating_sub(before)),
        ..sample
    })
}

/// The CPU time that a process has used, a moment before its end.
fn cpu_until_its_end(process: u32) -> u64 {
    let mut last = 0;
    while let Ok(used) = process_cpu_ns(process) {
        // An ended process that was not waited for yet has used no more, or none.
        last = last.max(used);
        thread::sleep(CPU_STEP);
    }
    last
}

/// The result in the output of the program: operations, time, and the histogram of latencies.
fn parse(text: &str) -> Option<Sample> {
    // fillsync     :     270.660 micros/op 7169 ops/sec 1.116 seconds 7998 operations; …
    let line = text.lines().find(|line| line.starts_with("fillsync"))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let before = |unit: &str| {
        let at = words.iter().position(|word| word.trim_end_matches(';') == unit)?;
        words.get(at.checked_sub(1)?)?.parse::<f64>().ok()
    };
    let (writes, seconds) = (before("operations")?, before("seconds")?);
    let mut latencies = Latencies::new();
    for line in text.lines() {
        // (       4,       6 ]     2791  34.896%  36.922% #######
        let Some((low, rest)) = line.strip_prefix(['(', '[']).and_then(|l| l.split_once(','))
        else {
            continue;
        };
        let Some((high, rest)) = rest.split_once([']', ')']) else { continue };
        let count = rest.split_whitespace().next().and_then(|count| count.parse::<u64>().ok());
        let us = |text: &str| text.trim().parse::<u64>().ok();
        let (Some(low), Some(high), Some(count)) = (us(low), us(high), count) else { continue };
        let width = high.saturating_sub(low) * 1000;
        for part in 0..PARTS {
            let share = count * (part + 1) / PARTS - count * part / PARTS;
            latencies.record_n(low * 1000 + width * (2 * part + 1) / (2 * PARTS), share);
        }
    }
    let bytes = writes as u64 * (16 + 1024);
    Some(Sample {
        writes: writes as u64,
        groups: writes as u64,
        bytes,
        wall_ns: (seconds * 1e9) as u64,
        latencies,
        ..Sample::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_and_its_histogram_are_read() {
        let text = "\
Initializing RocksDB Options from command-line flags
fillsync     :     270.660 micros/op 7169 ops/sec 1.250 seconds 1000 operations;    7.1 MB/s (100000 ops)
Microseconds per write:
Count: 1000 Average: 271.4179  StdDev: 5191.65
Percentiles: P50: 6.99 P75: 8.89 P99: 27.88 P99.9: 86678.33 P99.99: 218008.00
------------------------------------------------------
(       4,       6 ]      400  40.000%  40.000% #######
(       6,      10 ]      590  59.000%  99.000% ###########
(     110,     170 ]       10   1.000% 100.000%
";
        let sample = parse(text).unwrap();
        assert_eq!((sample.writes, sample.wall_ns), (1000, 1_250_000_000));
        assert_eq!(sample.writes_per_s(), 800.0);
        let summary = sample.latencies.summary();
        assert_eq!(summary.count, 1000);
        // A sixth of the second bucket.
        assert!((6_500..6_900).contains(&summary.p50_ns), "{summary:?}");
        assert!((9_800..10_000).contains(&summary.p99_ns), "{summary:?}");
        assert!(summary.max_ns > 110_000, "{summary:?}");
        assert!(parse("fillsync : no").is_none());
    }
}
