//! `rio sim`: starts `rio-sim`, a separate program, so that this one contains no planted bug.

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
/// The folder in which the build profile of the simulator puts it, beside that of this program.
const PROFILE: &str = "sim";

/// The help without that program.
const HELP: &str = "\
Runs a whole cluster from a seed, crashes it, and checks every promise

Usage: rio sim [OPTIONS]

This needs the program rio-sim; `make build` builds rio alone, `make sim` both.

Examples:
  rio sim --for 10m
  rio sim --seed 4711 --trace
  rio sim --plant all
";

pub(super) fn run(args: &[OsString], output: &Output) -> Result<(), Failure> {
    let program = find().unwrap_or_else(|| PathBuf::from(PROGRAM));
    let mut command = Command::new(&program);
    command.args(args).stdin(Stdio::null());
    if output.is_json() && !args.iter().any(|arg| arg == "json") {
        command.args(["-o", "json"]);
    }
    // Replaces this process; it only returns on an error.
    let error = command.exec();
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        return output.raw(HELP.as_bytes());
    }
    let failure = Failure::new(Code::Failed, format!("can't start {}", program.display()));
    Err(match error.kind() {
        ErrorKind::NotFound => failure
            .because(&error)
            .hint("it is built by `make sim`, or by `cargo build --profile sim -p riopipe-sim`"),
        _ => failure.because(&error),
    })
}

/// The path where `make sim` puts it (with its assertions), or beside this program; otherwise the
/// shell must find it.
fn find() -> Option<PathBuf> {
    let own = env::current_exe().ok()?;
    let folder = own.parent()?;
    let built = folder.with_file_name(PROFILE).join(PROGRAM);
    [built, folder.join(PROGRAM)].into_iter().find(|path| path.exists())
}
