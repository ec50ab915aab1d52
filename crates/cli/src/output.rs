//! What a command prints: its result on standard output, as text or JSON; notes and progress on
//! standard error, and only where they are wanted.

use std::io::{self, ErrorKind, IsTerminal, Write};

use riopipe_lab::terminal::Terminal;
use serde::Serialize;

use crate::{
    args::{Format, Global},
    failure::{Code, Failure},
    logging,
};

/// A command's result. The JSON (its serialisation) says all that the text says, and more.
pub trait Report: Serialize {
    /// The text, each line ended.
    fn text(&self, terminal: &Terminal) -> String;
}

/// Where and how to print.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    format: Format,
    quiet: bool,
    terminal: Terminal,
}

impl Output {
    /// As the command line and the environment have it.
    #[must_use]
    pub fn new(global: &Global) -> Self {
        Self { format: global.output, quiet: global.quiet, terminal: Terminal::of_stdout() }
    }

    /// Prints the result.
    ///
    /// # Errors
    /// If standard output can't be written. A reader that has gone away (`| head`) is
    /// [`Code::Unread`], of which nobody is told.
    pub fn result(&self, report: &impl Report) -> Result<(), Failure> {
        match self.format {
            Format::Normal => self.raw(report.text(&self.terminal).as_bytes()),
            Format::Json => {
                let mut text = serde_json::to_string_pretty(report).map_err(|error| {
                    Failure::new(Code::Failed, "can't write the result as JSON").because(&error)
                })?;
                text.push('\n');
                self.raw(text.as_bytes())
            }
        }
    }

    /// Prints bytes as they are.
    ///
    /// # Errors
    /// As [`Output::result`].
    pub fn raw(&self, bytes: &[u8]) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|error| {
            let code = match error.kind() {
                ErrorKind::BrokenPipe => Code::Unread,
                _ => Code::Failed,
            };
            Failure::new(code, "can't write to standard output").because(&error)
        })
    }

    /// Says something in passing, on standard error.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            logging::say(text.as_ref().to_owned());
        }
    }

    /// Tells of a failure, on standard error.
    pub fn failure(&self, failure: &Failure) {
        match (failure.code, self.format) {
            (Code::Unread, _) => {}
            (_, Format::Normal) => logging::say(format!("rio: {failure}")),
            (_, Format::Json) => logging::say(failure.to_json()),
        }
    }

    /// Whether progress bars make sense: somebody watches, and wants to.
    #[must_use]
    pub fn shows_progress(&self) -> bool {
        !self.quiet && io::stderr().is_terminal()
    }

    /// Whether the result is asked for as JSON.
    #[must_use]
    pub fn is_json(&self) -> bool {
        self.format == Format::Json
    }
}
