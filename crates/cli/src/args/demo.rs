//! `rio demo`

use std::{path::PathBuf, time::Duration};

use clap::Args;

use super::values;

/// Run the demo.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Starts two targets in this process, on loopback, each with a modelled flash drive (in memory)
and an ordering log (a temporary file), and makes one ordered volume of both. Then
  1. copies a real file through the volume and compares each byte,
  2. writes a journal as file systems do (the paper's workload: a group of two 4 KiB blocks, then
     a group of one, repeated) with three engines, in turns: sync waits for a FLUSH between any
     two groups, rio keeps order without waiting, none keeps no order,
  3. cuts the power of both targets in the middle of writing, with rio and with none, starts them
     again, recovers, and reads what is there: a prefix, or one with holes.
Nothing is left behind. docs/performance.md derives the ratios to expect.

Examples:
  rio demo
  rio demo --file /usr/bin/python3
  rio demo -o json | jq .ratios")]
pub struct Demo {
    /// The file to copy [default: this program]
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Seconds per engine and round
    #[arg(long, value_name = "SECONDS", default_value = "0.7", value_parser = values::seconds)]
    pub time: Duration,
    /// Rounds in which the engines take turns
    #[arg(long, value_name = "COUNT", default_value_t = 11)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
}
