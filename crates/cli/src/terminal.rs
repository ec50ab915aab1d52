//! The terminal of a progress bar, on standard error. It never waits: a terminal that has been
//! stopped (Ctrl-S), or whose other end reads nothing, gets no further picture until it has taken
//! the last one.

use std::{
    io::{self, Write as _},
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use indicatif::TermLike;

use crate::logging;

/// Width and height of a terminal that does not report them.
const DEFAULT_SIZE: (u16, u16) = (80, 24);

/// Standard error, through the thread that writes it.
#[derive(Debug, Default)]
pub(crate) struct Terminal {
    /// The part of the next picture that was drawn so far.
    picture: Mutex<Vec<u8>>,
}

impl Terminal {
    fn picture(&self) -> MutexGuard<'_, Vec<u8>> {
        // Bytes of a picture are complete after each call.
        self.picture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the control sequence (ECMA-48) that moves the cursor.
    fn move_cursor(&self, distance: usize, direction: char) -> io::Result<()> {
        match distance {
            0 => Ok(()),
            _ => write!(self.picture(), "\x1b[{distance}{direction}"),
        }
    }
}

/// Width and height of the terminal, in characters.
fn size() -> (u16, u16) {
    match rustix::termios::tcgetwinsize(io::stderr()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col, size.ws_row),
        _ => DEFAULT_SIZE,
    }
}

impl TermLike for Terminal {
    fn width(&self) -> u16 {
        size().0
    }

    fn height(&self) -> u16 {
        size().1
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        writeln!(self.picture(), "{text}")
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.picture().write_all(text.as_bytes())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.picture().write_all(b"\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let picture = mem::take(&mut *self.picture());
        if !picture.is_empty() {
            logging::print_picture(picture);
        }
        Ok(())
    }
}
