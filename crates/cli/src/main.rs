//! The program `rio`; all of it is in the library beside.

use std::process::ExitCode;

fn main() -> ExitCode {
    riopipe_cli::main()
}
