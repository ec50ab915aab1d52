//! SIGINT (Ctrl-C), SIGTERM and SIGHUP: the first requests a stop, the second ends the process.
//!
//! A stream without a close leaves entries in the targets' logs, and its volume unusable until they
//! are recovered. So a command that writes to a volume stops in order: it submits nothing more,
//! waits for the operations in flight, and closes. It prints what it waits for.
//!
//! A SIGHUP that was ignored when the program was started stays ignored: `nohup` relies on that.

use std::{
    ffi::c_int,
    fs, io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use riopipe_lab::units;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
    iterator::Signals,
};

use crate::{
    failure::{Code, Failure},
    output::Output,
};

/// Whether a signal has requested a stop.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<State>);

#[derive(Debug, Default)]
struct State {
    requested: Arc<AtomicBool>,
    /// Bytes that were submitted and are not durable yet; 0 if that is not known.
    backlog: AtomicU64,
}

impl Interrupt {
    /// Watches for the signals. The first one prints a note on what the program still waits for;
    /// a second one ends the process at once.
    ///
    /// # Errors
    /// The system refuses the handlers, or a thread.
    pub fn watch(output: &Output) -> Result<Self, Failure> {
        let interrupt = Self::watch_silently()?;
        let mut signals = Signals::new(watched()).map_err(|error| refused(&error))?;
        let (own, output) = (interrupt.clone(), *output);
        let notes = move || {
            let Some(signal) = signals.forever().next() else { return };
            output.note(own.note(name(signal)));
            loop {
                thread::sleep(NOTE_INTERVAL);
                output.note(own.waits());
            }
        };
        let thread = thread::Builder::new().name("rio-signals".into()).spawn(notes);
        thread.map_err(|error| refused(&error))?;
        Ok(interrupt)
    }

    /// As [`watch`](Self::watch), without a note: for commands that end at once.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn watch_silently() -> Result<Self, Failure> {
        Self::watch_only(&watched())
    }

    /// As [`watch_silently`](Self::watch_silently), for these signals.
    fn watch_only(signals: &[c_int]) -> Result<Self, Failure> {
        let interrupt = Self::default();
        let requested = &interrupt.0.requested;
        for &signal in signals {
            let code = Code::Interrupted as i32;
            flag::register_conditional_shutdown(signal, code, Arc::clone(requested))
                .and_then(|_| flag::register(signal, Arc::clone(requested)))
                .map_err(|error| refused(&error))?;
        }
        Ok(interrupt)
    }

    /// Fails once a signal has come: for loops that may stop between two steps.
    ///
    /// # Errors
    /// A signal has come.
    pub fn check(&self) -> Result<(), Failure> {
        match self.requested() {
            true => Err(Failure::new(Code::Interrupted, "interrupted")),
            false => Ok(()),
        }
    }

    /// Whether a signal has come.
    #[must_use]
    pub fn requested(&self) -> bool {
        self.0.requested.load(Ordering::Relaxed)
    }

    /// Sets the number of bytes that were submitted and are not durable yet, for the note.
    pub fn set_backlog(&self, bytes: u64) {
        self.0.backlog.store(bytes, Ordering::Relaxed);
    }

    fn note(&self, signal: &str) -> String {
        format!(
            "rio: interrupted by {signal}: nothing more is submitted. {}. A second signal (Ctrl-C) \
             ends the program at once; a volume that it has open must then be recovered",
            self.waits()
        )
    }

    fn waits(&self) -> String {
        match self.0.backlog.load(Ordering::Relaxed) {
            0 => "rio waits for what is in flight, and closes".to_owned(),
            bytes => format!(
                "rio waits until {} that were submitted are durable, and closes the volume",
                units::bytes(bytes)
            ),
        }
    }
}

/// The signal that ends a server.
#[derive(Debug)]
pub struct Stop {
    signals: Signals,
    /// SIGHUP does not end the server.
    reloads: bool,
}

/// A signal that a server has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// It ends the server. Its name.
    Stop(&'static str),
    /// SIGHUP, which makes the server read its configuration again.
    Reload,
}

impl Stop {
    /// Watches for the signals; a second one ends the process at once, also while the server starts
    /// or stops.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn watch() -> Result<Self, Failure> {
        Interrupt::watch_silently()?;
        let signals = Signals::new(watched()).map_err(|error| refused(&error))?;
        Ok(Self { signals, reloads: false })
    }

    /// As [`watch`](Self::watch), for a server that reads its configuration again on SIGHUP, even
    /// if that was ignored at the start.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn watch_with_reload() -> Result<Self, Failure> {
        Interrupt::watch_only(&[SIGINT, SIGTERM])?;
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(|error| refused(&error))?;
        Ok(Self { signals, reloads: true })
    }

    /// The next signal that has come; `None` if none has.
    pub fn received(&mut self) -> Option<Received> {
        let signal = self.signals.pending().next()?;
        Some(match signal {
            SIGHUP if self.reloads => Received::Reload,
            signal => Received::Stop(name(signal)),
        })
    }

    /// Waits for a signal, and returns its name; `None` once `alive` returns false.
    pub fn wait_while(&mut self, alive: impl Fn() -> bool) -> Option<&'static str> {
        loop {
            if let Some(signal) = self.signals.pending().next() {
                return Some(name(signal));
            }
            if !alive() {
                return None;
            }
            thread::sleep(CHECK_INTERVAL);
        }
    }

    /// For a server that stops without a signal: prints `note` when a signal comes meanwhile.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn note_next(mut self, output: &Output, note: &'static str) -> Result<(), Failure> {
        let output = *output;
        let notes = move || {
            if let Some(signal) = self.signals.forever().next() {
                output.note(format!("rio: {}: {note}", name(signal)));
            }
        };
        let thread = thread::Builder::new().name("rio-signals".into()).spawn(notes);
        thread.map(drop).map_err(|error| refused(&error))
    }
}

/// Interval in which a server checks whether it should end, and what else it has to do.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Interval in which an interrupted command prints what it waits for.
const NOTE_INTERVAL: Duration = Duration::from_secs(5);

/// The signals that end the program in order.
fn watched() -> Vec<c_int> {
    let hang_up = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    [SIGINT, SIGTERM].into_iter().chain(hang_up).collect()
}

/// Whether the process ignores a signal. A handler of this program ends that, so only the first
/// call has the state at the start.
fn is_ignored(signal: c_int) -> bool {
    // Without /proc, which is not the usual case, nothing counts as ignored.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

fn name(signal: c_int) -> &'static str {
    match signal {
        SIGINT => "SIGINT",
        SIGHUP => "SIGHUP",
        _ => "SIGTERM",
    }
}

fn refused(error: &io::Error) -> Failure {
    Failure::new(Code::Failed, "can't watch for SIGINT, SIGTERM and SIGHUP").because(error)
}
