//! The program `rio`: its command line and its output.
//!
//! [`args`] is the command tree with its help, [`commands`] has one module per command, [`output`]
//! prints results (text or JSON), and [`failure`] reports errors with their exit codes.
//! [`file_copy`] keeps a file in an ordered volume. This crate makes no decision about order: that
//! is done by the library.

pub mod args;
pub mod commands;
pub mod connect;
mod control_socket;
pub mod failure;
pub mod file_copy;
pub mod file_header;
pub mod interrupt;
pub mod known_volumes;
mod limits;
pub mod live;
pub mod load;
mod logging;
mod metrics_server;
pub mod output;
pub mod own_targets;
pub mod progress;
mod service_manager;
pub mod stage_table;
mod standard_stream;
mod terminal;
pub mod volume_store;

use std::{process::ExitCode, sync::Arc};

use clap::FromArgMatches;
use signal_hook::consts::SIGXFSZ;

use crate::{args::Cli, output::Output};

/// Parses the command line, executes it, and returns the exit code.
#[must_use]
pub fn main() -> ExitCode {
    let parsed =
        args::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are not errors and go to standard output.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    logging::start(&cli);
    // A write beyond a limit on the size of files is then an error of that write (EFBIG). The
    // signal's default ends the process. Without the handler only that default remains.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    let output = Output::new(&cli.global);
    let code = match commands::run(cli.command, &output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let failure = limits::with_limits(failure);
            output.failure(&failure);
            failure.exit_code()
        }
    };
    logging::finish();
    code
}
