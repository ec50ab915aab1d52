//! The output of the program. If the reader of standard output closes it (`| head`), the program
//! ends quietly. If standard error can't be written, nothing fails.

use std::{
    fmt,
    io::{self, ErrorKind, Write},
    process,
};

use super::FAILED;

/// The exit code if standard output is closed. A shell reports the same code for a program that
/// SIGPIPE ends.
pub(super) const OUTPUT_CLOSED: u8 = 141;

/// Prints a line on standard output.
pub(super) fn line(text: fmt::Arguments<'_>) {
    if let Err(error) = put(&mut io::stdout().lock(), text) {
        let code = ends_with(error.kind());
        if code == FAILED {
            note(format_args!("rio sim: can't write to standard output: {error}\n"));
        }
        process::exit(code.into());
    }
}

/// Prints a text on standard error, as it is.
pub(super) fn note(text: fmt::Arguments<'_>) {
    // An error on standard error cannot be reported anywhere.
    let _ = io::stderr().lock().write_fmt(text);
}

fn put(to: &mut impl Write, text: fmt::Arguments<'_>) -> io::Result<()> {
    to.write_fmt(text)?;
    to.write_all(b"\n")?;
    to.flush()
}

/// The exit code of the program when standard output can't be written.
fn ends_with(kind: ErrorKind) -> u8 {
    if kind == ErrorKind::BrokenPipe { OUTPUT_CLOSED } else { FAILED }
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
    fn a_line_to_a_closed_output_is_an_error_and_no_panic() {
        for (kind, code) in
            [(ErrorKind::BrokenPipe, OUTPUT_CLOSED), (ErrorKind::StorageFull, FAILED)]
        {
            let error = put(&mut Closed(kind), format_args!("a line")).unwrap_err();
            assert_eq!(ends_with(error.kind()), code);
        }
        let mut all = Vec::new();
        put(&mut all, format_args!("a {}", "line")).unwrap();
        assert_eq!(all, b"a line\n");
    }
}
