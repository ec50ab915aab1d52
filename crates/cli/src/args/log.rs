//! `rio log …`

use clap::{Args, Subcommand};

/// What can be done with ordering logs.
#[derive(Debug, Subcommand)]
pub enum Log {
    /// Read an ordering log and say what it knows; changes nothing
    Dump(Dump),
}

/// Read a log region.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Reads the log where it lies, without a target: its header, its volumes, and for each stream the
released mark and the entries beyond it, which are what recovery works with. Nothing is written, and
nothing is locked; a log that is being served may change while it is read, which is said.

A partition that is damaged is named with what is wrong, the others are shown all the same, and the
exit code is 5.

Examples:
  rio log dump file:/srv/d0.log
  rio log dump block:/dev/nvme1n1 --summary
  rio log dump file:/srv/d0.log --volume 01234567 --stream 3
  rio log dump dax:/mnt/pmem/log -o json | jq '.volumes[].partitions[].released'")]
pub struct Dump {
    /// The log, as it is given to `rio target serve --log`: file:PATH, dax:PATH or block:PATH
    #[arg(value_name = "REGION")]
    pub region: String,
    /// Only this volume: its id, or how it begins
    #[arg(long, value_name = "ID")]
    pub volume: Option<String>,
    /// Only this stream
    #[arg(long, value_name = "NUMBER")]
    pub stream: Option<u16>,
    /// The streams only, not their entries
    #[arg(long)]
    pub summary: bool,
}
