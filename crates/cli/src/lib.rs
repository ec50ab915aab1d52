//! The program `rio`: what a person types, and what it answers.
//!
//! [`args`] is the command tree with its help, [`commands`] has one module per command, [`output`]
//! prints results (text or JSON) and [`failure`] tells of errors, each with its exit code.
//! [`file_copy`] keeps a real file in an ordered volume. Nothing here decides about order: that is
//! what the library underneath is for.

pub mod args;
pub mod commands;
pub mod connect;
pub mod failure;
pub mod file_copy;
pub mod file_header;
pub mod interrupt;
pub mod live;
pub mod load;
mod logging;
pub mod output;
pub mod own_targets;
pub mod progress;
pub mod stage_table;
pub mod volume_store;

use std::process::ExitCode;

use clap::Parser;

use crate::{args::Cli, output::Output};

/// Reads the command line, does what it says, and answers with the exit code.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors and go to standard output; clap knows.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    logging::start(&cli);
    let output = Output::new(&cli.global);
    let code = match commands::run(cli.command, &output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output.failure(&failure);
            failure.exit_code()
        }
    };
    logging::finish();
    code
}
