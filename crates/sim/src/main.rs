//! `rio-sim`, which `rio sim` starts: a program of its own, so that no planted bug is in `rio`.

mod program;

use std::process::ExitCode;

fn main() -> ExitCode {
    program::main()
}
