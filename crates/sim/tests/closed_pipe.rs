//! A reader that goes away ends the program quietly.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_rio-sim"))
        .args(["--seed", "1", "--trace"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program was built for this test");
    let mut first = String::new();
    let stdout = child.stdout.take().expect("it is a pipe");
    // The trace is longer than what a pipe and a buffer hold.
    BufReader::with_capacity(64, stdout).read_line(&mut first).expect("it says something");
    assert!(first.ends_with('\n'), "{first:?}");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(141), "{output:?}");
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}
