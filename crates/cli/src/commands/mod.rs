//! The commands, one module each.

mod bench;
mod completions;
mod demo;
mod discover;
mod fs;
mod lab;
mod log;
mod manual;
pub(crate) mod sim;
mod target;
mod volume;

use crate::{args::Command, failure::Failure, output::Output};

/// Executes the command line.
///
/// # Errors
/// The failure, with the exit code.
pub fn run(command: Command, output: &Output) -> Result<(), Failure> {
    match command {
        Command::Target(target) => target::run(target, output),
        Command::Discover(args) => discover::run(&args, output),
        Command::Volume(volume) => volume::run(volume, output),
        Command::Fs(fs) => fs::run(fs, output),
        Command::Log(log) => log::run(log, output),
        Command::Bench(bench) => bench::run(bench, output),
        Command::Lab(lab) => lab::run(lab, output),
        Command::Sim { args } => sim::run(&args, output),
        Command::Demo(args) => demo::run(&args, output),
        Command::Completions { shell } => completions::run(shell, output),
        Command::Manual { folder } => manual::run(&folder, output),
    }
}
