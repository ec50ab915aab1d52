//! What the program prints. A reader that goes away (`| head`) ends it quietly, one that doesn't read
//! standard error makes nothing fail.

use std::{
    fmt,
    io::{self, ErrorKind, Write},
    process,
};

use super::FAILED;

/// Nobody reads standard output any more; what a shell makes of a program that SIGPIPE ends.
pub(super) const UNREAD: u8 = 141;

/// A line on standard output.
pub(super) fn line(text: fmt::Arguments<'_>) {
    if let Err(error) = put(&mut io::stdout().lock(), text) {
        let code = ends_with(error.kind());
        if code == FAILED {
            note(format_args!("rio sim: can't write to standard output: {error}\n"));
        }
        process::exit(code.into());
    }
}

/// Something in passing, on standard error, as it is.
pub(super) fn note(text: fmt::Arguments<'_>) {
    // There is nobody to be told that nobody is told.
    let _ = io::stderr().lock().write_fmt(text);
}

fn put(to: &mut impl Write, text: fmt::Arguments<'_>) -> io::Result<()> {
    to.write_fmt(text)?;
    to.write_all(b"\n")?;
    to.flush()
}

/// With which code the program ends when standard output can't be written.
fn ends_with(kind: ErrorKind) -> u8 {
    if kind == ErrorKind::BrokenPipe { UNREAD } else { FAILED }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Closed(ErrorKind);

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_that_nobody_reads_is_an_error_and_no_panic() {
        for (kind, code) in [(ErrorKind::BrokenPipe, UNREAD), (ErrorKind::StorageFull, FAILED)] {
            let error = put(&mut Closed(kind), format_args!("a line")).unwrap_err();
            assert_eq!(ends_with(error.kind()), code);
        }
        let mut all = Vec::new();
        put(&mut all, format_args!("a {}", "line")).unwrap();
        assert_eq!(all, b"a line\n");
    }
}
