//! `rio sim`: starts `rio-sim`, a separate program, so that this one contains no planted bug.

use std::{
    env,
    ffi::OsString,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
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
    let Some(program) = find() else {
        if args.iter().any(|arg| arg == "--help" || arg == "-h") {
            return output.raw(HELP.as_bytes());
        }
        return Err(Failure::new(
            Code::Usage,
            format!(
                "the simulator is not installed here: {PROGRAM} is neither beside rio nor in PATH"
            ),
        )
        .hint("it is built by `make sim`, or by `cargo build --profile sim -p riopipe-sim`"));
    };
    let mut command = Command::new(&program);
    command.args(args).stdin(Stdio::null());
    if output.is_json() && !args.iter().any(|arg| arg == "json") {
        command.args(["-o", "json"]);
    }
    // Replaces this process; it only returns on an error.
    let error = command.exec();
    Err(Failure::new(Code::Failed, format!("can't start {}", program.display())).because(&error))
}

/// Whether the simulator is installed. Without it, the help and the completions do not offer it.
pub(crate) fn is_installed() -> bool {
    find().is_some()
}

/// Where the simulator is: where `make sim` puts it (with its assertions), beside this program, or in
/// `PATH`.
fn find() -> Option<PathBuf> {
    let own = env::current_exe().ok();
    let folder = own.as_deref().and_then(Path::parent);
    let beside = folder
        .into_iter()
        .flat_map(|folder| [folder.with_file_name(PROFILE).join(PROGRAM), folder.join(PROGRAM)]);
    let path = env::var_os("PATH").unwrap_or_default();
    let in_path = env::split_paths(&path).map(|folder| folder.join(PROGRAM));
    beside.chain(in_path).find(|path| path.is_file())
}
