//! Standard error: the log, one line per event; notes; and why a command failed.
//!
//! None of it waits for a reader, and none of it fails for want of one: reactors and the threads that
//! keep a volume's connections alive log, too. What can't be written is lost and counted. Of the lines
//! of one kind, which peers may cause without end, only so many are logged in a time.

mod lines;
mod quota;

use std::{
    fs::File,
    io::{self, IsTerminal, Write},
    os::fd::AsFd,
    sync::{Arc, OnceLock},
    time::Duration,
};

use riopipe_net::now_ns;
use tracing::{Level, Metadata, callsite::Identifier, level_filters::LevelFilter};
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use self::{
    lines::Lines,
    quota::{Quotas, Verdict},
};
use crate::args::{Cli, Command, target::Target};

/// The variable that says in detail what to log: `RIO_LOG=riopipe_target=debug`.
const VARIABLE: &str = "RIO_LOG";
/// How long the end of the process waits for a reader that doesn't go on reading.
const PATIENCE: Duration = Duration::from_secs(2);

/// Starts logging as the command line and `RIO_LOG` have it.
pub(crate) fn start(cli: &Cli) {
    let level = match (cli.global.verbose, cli.global.quiet) {
        (_, true) => LevelFilter::ERROR,
        (0, _) => quietest(&cli.command),
        (1, _) => LevelFilter::INFO,
        (2, _) => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let builder = EnvFilter::builder().with_default_directive(level.into()).with_env_var(VARIABLE);
    let filter = builder.from_env().unwrap_or_else(|error| {
        say(format!("rio: {VARIABLE} is ignored: {error}"));
        builder.parse_lossy("")
    });
    let colour = io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    // Fails only if somebody set a logger before, and nobody did.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(ToLog)
        .with_ansi(colour)
        // These would be printed in the way that may wait and fail.
        .log_internal_errors(false)
        .try_init();
}

/// Says something on standard error, whatever else is logged.
pub(crate) fn say(line: String) {
    log().lines.say(line + "\n");
}

/// Before the process ends: what was said is written, unless nobody reads it.
pub(crate) fn finish() {
    let Some(log) = LOG.get() else { return };
    for text in overdue(&log.quotas, None) {
        log.lines.say(text);
    }
    log.lines.drain(PATIENCE);
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

struct Log {
    lines: Lines,
    /// By where in the code a line comes from.
    quotas: Arc<Quotas<Identifier>>,
}

static LOG: OnceLock<Log> = OnceLock::new();

fn log() -> &'static Log {
    LOG.get_or_init(|| {
        let quotas = Arc::new(Quotas::new());
        let of_lines = Arc::clone(&quotas);
        Log { lines: Lines::start(stderr(), move || overdue(&of_lines, Some(now_ns()))), quotas }
    })
}

/// Not Rust's own, whose lock would be held for as long as a write waits.
fn stderr() -> Box<dyn Write + Send> {
    match io::stderr().as_fd().try_clone_to_owned() {
        Ok(fd) => Box::new(File::from(fd)),
        Err(_) => Box::new(io::stderr()),
    }
}

/// Lines about lines that were left out.
fn overdue(quotas: &Quotas<Identifier>, now: Option<u64>) -> Vec<Vec<u8>> {
    let told = quotas.overdue(now).into_iter();
    told.map(|(more, last)| [left_out(more).into_bytes(), last].concat()).collect()
}

/// Says that `more` lines were left out before the next.
fn left_out(more: u64) -> String {
    match more {
        0 => String::new(),
        more => format!("rio: {more} more lines like the next one were left out\n"),
    }
}

/// For the logger: where it writes.
struct ToLog;

impl<'a> MakeWriter<'a> for ToLog {
    type Writer = OneLine;

    fn make_writer(&'a self) -> OneLine {
        OneLine { kind: None }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> OneLine {
        // Who asks for more wants to see all of it.
        OneLine { kind: (*event.level() <= Level::INFO).then(|| event.callsite()) }
    }
}

/// One event's line, written at once.
struct OneLine {
    /// What it has in common with others; `None` if there may be any number of them.
    kind: Option<Identifier>,
}

impl Write for OneLine {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let log = log();
        let verdict = match self.kind.clone() {
            Some(kind) => log.quotas.ask(kind, text, now_ns()),
            None => Verdict::Log { left_out: 0 },
        };
        if let Verdict::Log { left_out: more } = verdict {
            log.lines.say([left_out(more).as_bytes(), text].concat());
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
