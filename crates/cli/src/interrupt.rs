//! Ctrl-C and SIGTERM: the first requests a stop, the second ends the process.
//!
//! A stream without a close leaves entries in the targets' logs, and its volume unusable until they
//! are recovered. So a command that writes to a volume stops in order: it submits nothing more,
//! waits for the operations in flight, and closes.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
    iterator::Signals,
};

use crate::failure::{Code, Failure};

/// Whether a signal has requested a stop.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Watches for SIGINT and SIGTERM; a second one ends the process at once.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn watch() -> Result<Self, Failure> {
        let interrupt = Self::default();
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(
                signal,
                Code::Interrupted as i32,
                Arc::clone(&interrupt.0),
            )
            .and_then(|_| flag::register(signal, Arc::clone(&interrupt.0)))
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
        self.0.load(Ordering::Relaxed)
    }
}

/// The signal that ends a server.
#[derive(Debug)]
pub struct Stop(Signals);

impl Stop {
    /// Watches for SIGINT and SIGTERM; a second one ends the process at once, also while the server
    /// starts or stops.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn watch() -> Result<Self, Failure> {
        Interrupt::watch()?;
        Signals::new([SIGINT, SIGTERM]).map(Self).map_err(|error| refused(&error))
    }

    /// Waits for a signal, and returns its name; `None` once `alive` returns false.
    pub fn wait_while(mut self, alive: impl Fn() -> bool) -> Option<&'static str> {
        loop {
            if let Some(signal) = self.0.pending().next() {
                return Some(if signal == SIGINT { "SIGINT" } else { "SIGTERM" });
            }
            if !alive() {
                return None;
            }
            thread::sleep(CHECK_INTERVAL);
        }
    }
}

/// Interval in which a server checks whether it should end.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

fn refused(error: &io::Error) -> Failure {
    Failure::new(Code::Failed, "can't watch for SIGINT and SIGTERM").because(error)
}
