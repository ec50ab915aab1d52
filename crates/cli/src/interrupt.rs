//! Ctrl-C and SIGTERM: the first asks to stop, the second stops.
//!
//! A stream that is simply cut off leaves entries in the targets' logs, and its volume closed to
//! everybody until they are recovered. So what writes to a volume stops in order: it submits no
//! more, waits for what is under way, and closes.

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

/// Whether somebody wants this process to stop.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Watches for SIGINT and SIGTERM; a second one ends the process at once.
    ///
    /// # Errors
    /// If the system refuses the handlers.
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

    /// Fails once a signal came: for loops that stop between two steps.
    ///
    /// # Errors
    /// If a signal came.
    pub fn check(&self) -> Result<(), Failure> {
        match self.requested() {
            true => Err(Failure::new(Code::Interrupted, "interrupted")),
            false => Ok(()),
        }
    }

    /// Whether a signal came.
    #[must_use]
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// For servers: the signal that ends them.
#[derive(Debug)]
pub struct Stop(Signals);

impl Stop {
    /// Watches for SIGINT and SIGTERM.
    ///
    /// # Errors
    /// If the system refuses the handlers.
    pub fn watch() -> Result<Self, Failure> {
        Signals::new([SIGINT, SIGTERM]).map(Self).map_err(|error| refused(&error))
    }

    /// Waits until one comes, and returns its name; `None` once `alive` says no.
    pub fn wait_while(mut self, alive: impl Fn() -> bool) -> Option<&'static str> {
        loop {
            if let Some(signal) = self.0.pending().next() {
                return Some(if signal == SIGINT { "SIGINT" } else { "SIGTERM" });
            }
            if !alive() {
                return None;
            }
            thread::sleep(LOOK);
        }
    }
}

/// How often a server looks whether it should end.
const LOOK: Duration = Duration::from_millis(100);

fn refused(error: &io::Error) -> Failure {
    Failure::new(Code::Failed, "can't watch for SIGINT and SIGTERM").because(error)
}
