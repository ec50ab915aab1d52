//! A run that a signal ends reports the number of seeds that it ran.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

#[test]
fn a_run_that_is_ended_by_a_signal_prints_its_count() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_rio-sim"))
        .args(["--for", "1h", "--jobs", "1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program was built for this test");
    let mut out = BufReader::new(child.stdout.take().expect("it is a pipe"));
    let mut first = String::new();
    out.read_line(&mut first).expect("the pipe works");
    assert!(first.starts_with("the first seed is "), "{first}");
    // From here on the handler is installed.
    let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(killed.expect("a system has kill").success());
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("the pipe works");
    assert_eq!(child.wait().expect("it is a child").code(), Some(130), "{rest}");
    assert!(rest.contains(" seeds from "), "{rest}");
}
