//! `rio completions`

use clap_complete::Shell;

use crate::{args, failure::Failure, output::Output};

pub(super) fn run(shell: Shell, output: &Output) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut args::command(), "rio", &mut script);
    output.raw(&script)
}
