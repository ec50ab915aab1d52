//! The output of a command: its result on standard output, as text or JSON; notes and progress on
//! standard error, if they are wanted.

use std::io::{self, ErrorKind, IsTerminal, Write};

use riopipe_lab::terminal::Terminal;
use serde::Serialize;

use crate::{
    args::{Format, Global},
    failure::{Code, Failure},
    logging,
};

/// The result of a command. The JSON (its serialisation) has all that the text has, and more.
pub trait Report: Serialize {
    /// The text. A newline at its end may be left out.
    fn text(&self, terminal: &Terminal) -> String;
}

/// The destination and the format of output.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    format: Format,
    quiet: bool,
    terminal: Terminal,
}

impl Output {
    /// The output as set by the command line and the environment.
    #[must_use]
    pub fn new(global: &Global) -> Self {
        Self { format: global.output, quiet: global.quiet, terminal: Terminal::of_stdout() }
    }

    /// Prints the result.
    ///
    /// # Errors
    /// Standard output can't be written. A reader that has gone (`
    /// head`) is [`Code::Unread`], which is not reported.
    pub fn result(&self, report: &impl Report) -> Result<(), Failure> {
        match self.format {
            Format::Normal => {
                let mut text = report.text(&self.terminal);
                if !text.ends_with('\n') {
                    text.push('\n');
                }
                self.raw(text.as_bytes())
            }
            Format::Json => {
                let mut text = serde_json::to_string_pretty(report).map_err(|error| {
                    Failure::new(Code::Failed, "can't write the result as JSON").because(&error)
                })?;
                text.push('\n');
                self.raw(text.as_bytes())
            }
        }
    }

    /// Prints the result on standard error, because standard output has other bytes: text as a
    /// note, JSON as one line.
    pub fn result_beside_bytes(&self, report: &impl Report) {
        match self.format {
            // It is for standard error, and never painted.
            Format::Normal => self.note(report.text(&Terminal::PLAIN).trim_end()),
            Format::Json => {
                // Strings and numbers: serialisation can't fail.
                logging::print_object(serde_json::to_string(report).unwrap_or_default());
            }
        }
    }

    /// Prints bytes unchanged.
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

    /// Prints a note on standard error.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            logging::print_line(text.as_ref().to_owned());
        }
    }

    /// Prints a failure on standard error.
    pub fn failure(&self, failure: &Failure) {
        if failure.is_reported {
            return;
        }
        match (failure.code, self.format) {
            (Code::Unread, _) => {}
            _ if logging::is_json() => {
                logging::print_failure(&failure.message, failure.to_json_value());
            }
            (_, Format::Normal) => logging::print_line(format!("rio: {failure}")),
            (_, Format::Json) => logging::print_object(failure.to_json()),
        }
    }

    /// Whether progress bars are shown: standard error is a terminal, and they are not disabled.
    #[must_use]
    pub fn shows_progress(&self) -> bool {
        !self.quiet && !logging::is_json() && io::stderr().is_terminal()
    }

    /// Whether the result is requested as JSON.
    #[must_use]
    pub fn is_json(&self) -> bool {
        self.format == Format::Json
    }
}
