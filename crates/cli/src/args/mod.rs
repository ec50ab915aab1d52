//! The command line: nouns, verbs, options, and the help.

pub mod attach;
pub mod bench;
pub mod connect;
pub mod demo;
pub mod fs;
pub mod lab;
pub mod log;
pub mod target;
pub mod values;
pub mod volume;
pub mod volume_life;

use clap::{ArgAction, Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

/// Ordered storage over the network, without waiting.
///
/// A target serves drives to any NVMe/TCP host. A volume is one drive or several, on one target
/// or several, on which groups of writes keep their order: after a crash a prefix of them is
/// there, never a hole.
#[derive(Debug, Parser)]
#[command(name = "rio", version, propagate_version = true)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = AFTER_HELP)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
}

const AFTER_HELP: &str = "\
Examples:
  rio demo                                                   its purpose, in under a minute
  rio target serve --drive file:/srv/d0,size=8G --log file:/srv/log,size=2M --create
  rio discover -a 192.0.2.10                                 what does a target offer?
  rio volume create journal -m 192.0.2.10 -m 192.0.2.11      one volume over two targets
  rio volume write journal ledger.db -m 192.0.2.10 -m 192.0.2.11
  rio fs mkfs disk.img --size 8G                             a file system for any program
  rio fs mount disk.img /mnt
  rio bench compare --quick                                  how fast is it here?

Sizes take K, M, G or T (powers of 1024) and are in bytes without one.
`rio COMMAND --help` explains a command; `rio completions SHELL` completes them.

Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 no connection, 4 volume refused,
5 not what was written, 6 I/O failed on an open volume, 7 drive, log or address can't be
served,
130 interrupted, 141 no program reads the output.";

/// Options of every command.
#[derive(Args, Clone, Debug)]
pub struct Global {
    /// Format of the result; JSON has all that the text has, and more
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Normal)]
    #[arg(value_name = "FORMAT", display_order = 900)]
    pub output: Format,
    /// Format of the log, notes and errors on standard error; JSON is one object a line
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Normal)]
    #[arg(value_name = "FORMAT", display_order = 903)]
    pub log_format: LogFormat,
    /// Log more on standard error: -v events, -vv reasons, -vvv everything (RIO_LOG filters)
    #[arg(short, long, global = true, action = ArgAction::Count, display_order = 901)]
    pub verbose: u8,
    /// No notes and no progress: results and errors only
    #[arg(long, global = true, conflicts_with = "verbose", display_order = 902)]
    pub quiet: bool,
}

/// The format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Normal,
    /// One JSON object a line, for collectors
    Json,
}

/// The format of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people
    Normal,
    /// JSON for programs; an error is a JSON object on standard error
    Json,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve drives over NVMe/TCP
    #[command(subcommand, arg_required_else_help = true)]
    Target(target::Target),
    /// List the subsystems of a target
    Discover(connect::Discover),
    /// Create, inspect and use ordered volumes
    #[command(subcommand, arg_required_else_help = true)]
    Volume(volume::Volume),
    /// Make, mount and check file systems on volumes and in files
    #[command(subcommand, arg_required_else_help = true)]
    Fs(fs::Fs),
    /// Inspect ordering logs
    #[command(subcommand, arg_required_else_help = true)]
    Log(log::Log),
    /// Measure how fast ordered writes are
    #[command(subcommand, arg_required_else_help = true)]
    Bench(bench::Bench),
    /// Measure the papers' figures again, and make a report of them
    #[command(subcommand, arg_required_else_help = true)]
    Lab(lab::Lab),
    /// Run a whole cluster from a seed, crash it, and check every promise
    #[command(disable_help_flag = true)]
    Sim {
        /// Options, as listed by `rio sim --help`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
        args: Vec<std::ffi::OsString>,
    },
    /// Two targets, a file copied and verified, three engines compared
    Demo(demo::Demo),
    /// Print a script that completes rio's commands in your shell
    #[command(after_help = "\
Examples:
  rio completions bash > /etc/bash_completion.d/rio
  rio completions zsh  > \"${fpath[1]}/_rio\"
  rio completions fish > ~/.config/fish/completions/rio.fish")]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages of all commands into a folder, for packages
    #[command(after_help = "\
Examples:
  rio manual /usr/local/share/man/man1
  rio manual .     then: man ./rio-target-serve.1")]
    Manual {
        /// The folder
        folder: std::path::PathBuf,
    },
}

/// The command tree as it is offered here: without `sim` where the simulator is not installed.
#[must_use]
pub fn command() -> clap::Command {
    let is_hidden = !crate::commands::sim::is_installed();
    Cli::command().mut_subcommand("sim", |sim| sim.hide(is_hidden))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Code;

    #[test]
    fn the_command_tree_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_exit_code_is_in_the_help() {
        for code in Code::ALL {
            assert!(AFTER_HELP.contains(&format!("{} ", code as u8)), "{code:?}");
        }
    }
}
