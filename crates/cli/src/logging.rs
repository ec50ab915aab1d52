//! The log, on standard error: one line per event.

use std::io::{self, IsTerminal};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command, target::Target};

/// The variable that says in detail what to log: `RIO_LOG=riopipe_target=debug`.
const VARIABLE: &str = "RIO_LOG";

/// Starts logging as the command line and `RIO_LOG` have it.
pub(crate) fn start(cli: &Cli) {
    let level = match (cli.global.verbose, cli.global.quiet) {
        (_, true) => LevelFilter::ERROR,
        (0, _) => quietest(&cli.command),
        (1, _) => LevelFilter::INFO,
        (2, _) => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let filter = EnvFilter::builder()
        .with_default_directive(level.into())
        .with_env_var(VARIABLE)
        .from_env_lossy();
    let colour = io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    // Fails only if somebody set a logger before, and nobody did.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(colour)
        .try_init();
}

/// What is logged without `-v`: a server tells what it does; a demonstration on drives that are
/// modelled anyway doesn't warn that they are.
fn quietest(command: &Command) -> LevelFilter {
    match command {
        Command::Target(Target::Serve(_)) => LevelFilter::INFO,
        Command::Demo(_) | Command::Bench(_) => LevelFilter::ERROR,
        _ => LevelFilter::WARN,
    }
}
