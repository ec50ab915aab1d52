//! The figures that `rio bench fs` and `rio bench recovery` measure.

use clap::Parser;
use riopipe_lab::{
    figures::{
        catalogue::{Entry, FileSystem, FileSystemView},
        figure::Figure,
        file_system::{self, Conditions, Replay},
    },
    machine::Machine,
};

use crate::{
    args::{
        bench::{Recovery, fs::Fs},
        lab::Run as Args,
    },
    commands::bench::{fs, recovery as bench_recovery},
    failure::Failure,
    interrupt::Interrupt,
    output::Output,
};

/// The options of `rio bench fs`, as its command line has them.
#[derive(Parser)]
struct FsWords {
    #[command(flatten)]
    fs: Fs,
}

/// The options of `rio bench recovery`.
#[derive(Parser)]
struct RecoveryWords {
    #[command(flatten)]
    recovery: Recovery,
}

/// A load on the file system, on the paper's kind of drive.
pub(super) fn file_system(
    entry: &Entry,
    load: &FileSystem,
    args: &Args,
    interrupt: &Interrupt,
    output: &Output,
) -> Result<Figure, Failure> {
    // These words are fixed, and a test parses them.
    let words = FsWords::parse_from(words(load, args.quick));
    let conditions = Conditions {
        machine: Machine::this(),
        quick: args.quick,
        setup: format!(
            "One target on loopback with a modelled {} drive; RioFS in the process of the load, in all \
             modes in turns, each time on a new file system",
            load.drive.profile()
        ),
    };
    let measured = fs::measure(&words.fs, output, interrupt)?;
    Ok(file_system::figure(entry, load, &measured.marks(), &conditions))
}

/// The options of `rio bench fs` for a figure.
fn words(load: &FileSystem, quick: bool) -> Vec<&'static str> {
    let mut words = vec!["rio", "--workload", load.load, "--rtt", "0us"];
    words.extend(["--profile", load.drive.profile()]);
    if load.shows == FileSystemView::Percentiles {
        words.extend(["--threads", "1"]);
    }
    words.extend(if quick { &["--quick"][..] } else { &["--rounds", "6"] });
    // All figures together take no more than an hour. High percentiles need the usual time.
    if !quick && load.shows != FileSystemView::Percentiles {
        words.extend(["--time", "0.3"]);
    }
    words
}

/// The recovery of full logs, with the paper's number of threads and targets (§6.5).
pub(super) fn recovery(
    entry: &Entry,
    args: &Args,
    interrupt: &Interrupt,
    output: &Output,
) -> Result<Figure, Failure> {
    let rounds = if args.quick { "3" } else { "30" };
    let words = RecoveryWords::parse_from(["rio", "--rounds", rounds]);
    let options = &words.recovery;
    let conditions = Conditions {
        machine: Machine::this(),
        quick: args.quick,
        setup: format!(
            "{} targets on loopback with {} modelled Optane drives each, {} streams, logs of 2 MiB that are full; \
             medians of {rounds} recoveries; for the replay, modelled flash drives",
            options.targets, options.drives, options.streams
        ),
    };
    let measured = bench_recovery::measure(options, output, interrupt)?;
    let (times, entries) = measured.times();
    let (replay_ms, requests) = measured.replay();
    let replay = Replay { ms: replay_ms, requests };
    Ok(file_system::recovery(entry, times, entries, replay, &conditions))
}

#[cfg(test)]
mod tests {
    use riopipe_lab::figures::catalogue::{self, Experiment};

    use super::*;

    #[test]
    fn the_words_are_those_of_the_benchmarks() {
        for entry in catalogue::all() {
            if let Experiment::FileSystem(load) = &entry.experiment {
                for quick in [true, false] {
                    assert!(FsWords::try_parse_from(words(load, quick)).is_ok(), "{}", entry.id);
                }
            }
        }
        assert!(RecoveryWords::try_parse_from(["rio", "--rounds", "30"]).is_ok());
    }
}
