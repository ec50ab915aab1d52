//! The program `rio`; all of its code is in the library of this crate.

use std::process::ExitCode;

fn main() -> ExitCode {
    riopipe_cli::main()
}
