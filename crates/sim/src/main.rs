//! `rio-sim`, which `rio sim` starts. It is a separate program, so that `rio` contains no planted
//! bug.

mod program;

use std::process::ExitCode;

fn main() -> ExitCode {
    program::main()
}
