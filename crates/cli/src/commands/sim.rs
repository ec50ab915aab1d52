//! `rio sim`: starts `rio-sim`, a program of its own, so that no planted bug is in this one.

use std::{
    env,
    ffi::OsString,
    io::ErrorKind,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::{
    failure::{Code, Failure},
    output::Output,
};

const PROGRAM: &str = "rio-sim";

pub(super) fn run(args: &[OsString], output: &Output) -> Result<(), Failure> {
    // Beside this program, where one build puts both; else wherever the shell would find it.
    let beside = env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    let program = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from(PROGRAM));
    let mut command = Command::new(&program);
    command.args(args).stdin(Stdio::null());
    if output.is_json() && !args.iter().any(|arg| arg == "json") {
        command.args(["-o", "json"]);
    }
    // Replaces this process; comes back only if it can't.
    let error = command.exec();
    let failure = Failure::new(Code::Failed, format!("can't start {}", program.display()));
    Err(match error.kind() {
        ErrorKind::NotFound => failure
            .because(&error)
            .hint("it is built with `make build`, or by `cargo build --release -p riopipe-sim`"),
        _ => failure.because(&error),
    })
}
