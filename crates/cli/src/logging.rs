//! Standard error: the log, one line per event; notes; and the failure of a command.
//!
//! Nothing of it waits for a reader, and nothing fails without one: reactors and the threads of a
//! volume's connections log, too. A line that can't be written is lost and counted. Lines of a kind
//! that peers can cause without limit are logged up to a number per period.
//!
//! With `--log-format json` each line is a JSON object, notes and failures included.

mod json;
mod lines;
mod quota;

use std::{
    fs::File,
    io::{self, IsTerminal, Write},
    os::fd::AsFd,
    sync::{
        Arc, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use riopipe_net::now_ns;
use tracing::{Level, Metadata, callsite::Identifier, level_filters::LevelFilter};
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use self::{
    lines::Lines,
    quota::{Quotas, Verdict},
};
use crate::args::{
    Cli, Command, LogFormat,
    fs::{Fs, Mount},
    target::Target,
};

/// The variable with the log filter: `RIO_LOG=riopipe_target=debug`.
const VARIABLE: &str = "RIO_LOG";
/// Longest wait at the end of the process for a reader that does not read on.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts logging, as set by the command line and `RIO_LOG`.
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
        print_line(format!("rio: {VARIABLE} is ignored: {error}"));
        builder.parse_lossy("")
    });
    // The log of the background is no terminal.
    let is_json = cli.global.log_format == LogFormat::Json;
    IS_JSON.store(is_json, Ordering::Relaxed);
    let colour = io::stderr().is_terminal()
        && !matches!(&cli.command, Command::Fs(Fs::Mount(Mount { daemon: true, .. })))
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let logger = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(ToLog)
        .with_ansi(colour)
        // Printing these may wait and fail.
        .log_internal_errors(false);
    // This fails only if a logger was set before, and none was.
    let _ = match is_json {
        true => {
            let logger = logger.json().flatten_event(true);
            logger.with_current_span(false).with_span_list(false).try_init()
        }
        false => logger.try_init(),
    };
}

/// Whether each line is a JSON object.
pub(crate) fn is_json() -> bool {
    IS_JSON.load(Ordering::Relaxed)
}

static IS_JSON: AtomicBool = AtomicBool::new(false);

/// Prints a line on standard error, independently of the log level.
pub(crate) fn print_line(line: String) {
    let line = match is_json() {
        true => json::line("INFO", line.trim_start_matches(OWN).trim_end(), &[]),
        false => line + "\n",
    };
    log().lines.push(line);
}

/// Prints a JSON object on standard error, which is the whole line in both formats.
pub(crate) fn print_object(line: String) {
    log().lines.push(line + "\n");
}

/// Prints a failure on standard error as an object of a JSON log: `error` is the failure's own
/// object.
pub(crate) fn print_failure(message: &str, error: serde_json::Value) {
    log().lines.push(json::line("ERROR", message, &[("error", error)]));
}

/// The beginning of the program's own lines.
const OWN: &str = "rio: ";

/// A line of the program itself, in the format of the log. `count` is a number in the message, by
/// name.
fn own_line(message: &str, count: (&str, u64)) -> String {
    match is_json() {
        true => json::line("WARN", message, &[(count.0, count.1.into())]),
        false => format!("{OWN}{message}\n"),
    }
}

/// Prints a picture of a progress bar, unless standard error has not taken all lines before. The
/// next picture replaces it.
pub(crate) fn print_picture(picture: Vec<u8>) {
    let log = log();
    if log.lines.is_idle() {
        log.lines.push(picture);
    }
}

/// Writes all pending lines before the process ends, unless nothing reads them.
pub(crate) fn finish() {
    let Some(log) = LOG.get() else { return };
    for text in overdue(&log.quotas, None) {
        log.lines.push(text);
    }
    log.lines.drain(DRAIN_TIMEOUT);
}

/// The log level without `-v`. A server reports its events; a demonstration does not warn that its
/// drives are modelled.
fn quietest(command: &Command) -> LevelFilter {
    match command {
        Command::Target(Target::Serve(_)) => LevelFilter::INFO,
        Command::Demo(_) | Command::Bench(_) | Command::Lab(_) => LevelFilter::ERROR,
        _ => LevelFilter::WARN,
    }
}

struct Log {
    lines: Lines,
    /// By the place in the code that a line comes from.
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

/// From now on all lines go to `file`. Nothing of this module keeps standard error open any more.
pub(crate) fn redirect(file: File) {
    // Lines that wait are for the reader of the others.
    log().lines.drain(DRAIN_TIMEOUT);
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(file));
}

/// The destination of all lines. Not Rust's own handle, whose lock would be held while a write waits.
static SINK: RwLock<Option<Arc<File>>> = RwLock::new(None);

/// A copy of standard error, until it is [redirected](redirect).
fn stderr() -> Box<dyn Write + Send> {
    match io::stderr().as_fd().try_clone_to_owned() {
        Ok(fd) => {
            *SINK.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(File::from(fd)));
            Box::new(Sink)
        }
        Err(_) => Box::new(io::stderr()),
    }
}

/// Writes to [`SINK`].
struct Sink;

impl Write for Sink {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let file = SINK.read().unwrap_or_else(PoisonError::into_inner).clone();
        file.map_or(Ok(text.len()), |file| (&*file).write(text))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines about omitted lines.
fn overdue(quotas: &Quotas<Identifier>, now: Option<u64>) -> Vec<Vec<u8>> {
    let reports = quotas.overdue(now).into_iter();
    reports.map(|(more, last)| [left_out(more).into_bytes(), last].concat()).collect()
}

/// The line that `more` lines were omitted before the next.
fn left_out(more: u64) -> String {
    match more {
        0 => String::new(),
        more => {
            let message = format!("{more} more lines like the next one were left out");
            own_line(&message, ("left_out", more))
        }
    }
}

/// The logger's destination.
struct ToLog;

impl<'a> MakeWriter<'a> for ToLog {
    type Writer = OneLine;

    fn make_writer(&'a self) -> OneLine {
        OneLine { kind: None }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> OneLine {
        // With a higher log level, all lines are logged.
        OneLine { kind: (*event.level() <= Level::INFO).then(|| event.callsite()) }
    }
}

/// The line of one event, written at once.
struct OneLine {
    /// Its kind; `None` if the number of lines is not limited.
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
            log.lines.push([left_out(more).as_bytes(), text].concat());
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
