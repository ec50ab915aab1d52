//! `rio bench fs`

use std::time::Duration;

use clap::Args;

use crate::args::{connect::Connect, values};

/// Measure a file system.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Threads append 4 KiB to a file of their own and call fsync, again and again (figure 13 of the paper). The
two modes of RioFS take turns, on the same drives and the same code:

  ext4  waits as ext4 with jbd2: for the data, for the journal's blocks, for the commit block
  rio   data and a file-level record on an ordered stream, and one wait

The calls are made in this process. FUSE adds the same time to each mode. Figures are medians; ratios
are of the same round.

Examples:
  rio bench fs --quick                                     in under three minutes
  rio bench fs --profile optane --rtt 100us --threads 1,2
  rio bench fs --quick -o json | jq '.points[] | {profile, rtt_us, threads, ratios}'")]
pub struct Fs {
    /// Fewer points and rounds, in under three minutes
    #[arg(long)]
    pub quick: bool,
    /// Threads, each with a file [default: 1,2,4,8; quick: 1,2]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: Option<Vec<u32>>,
    /// Modelled drives: optane (with power-loss protection), flash (without), or mem
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "optane,flash")]
    #[arg(value_parser = ["optane", "flash", "mem"])]
    pub profile: Vec<String>,
    /// Modelled round trips
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0us,30us,100us")]
    #[arg(value_parser = values::span_ns)]
    pub rtt: Vec<u64>,
    /// Seconds per mode, point and round [default: 1; quick: 0.4]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub time: Option<Duration>,
    /// Rounds in which the modes take turns, at each point; from 6 on intervals hold with 95 %
    /// [default: 6; quick: 4]
    #[arg(long, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// The connection's options.
    #[command(flatten)]
    pub connect: Connect,
}
