//! The program ends quietly when the reader of its output closes the pipe.

use std::io;
use std::process::{Command, Stdio};

#[test]
fn a_closed_output_ends_the_program_quietly() {
    let (reader, writer) = io::pipe().expect("a machine has pipes");
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_rio-sim"))
        .args(["--seed", "1", "--trace"])
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .expect("the program was built for this test");
    assert_eq!(output.status.code(), Some(141), "{output:?}");
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}
