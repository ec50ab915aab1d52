//! `rio log …`

use clap::{Args, Subcommand};

/// The operations on ordering logs.
#[derive(Debug, Subcommand)]
pub enum Log {
    /// Read an ordering log and show its content; changes nothing
    Dump(Dump),
}

/// Read a log region.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Reads the log from its medium, without a target: its header, its volumes, and for each stream the
released mark and the entries beyond it, which recovery uses. Nothing is written, and nothing is
locked. A log that is being served may change while it is read; a note reports it. A drive's memory
(pci:) is enabled if it is not, since it has no content to read before.

A damaged partition is named with its damage, the others are shown, and the exit code is 5.

Examples:
  rio log dump file:/srv/d0.log
  rio log dump block:/dev/nvme1n1 --summary
  rio log dump pci:0000:41:00.0
  rio log dump file:/srv/d0.log --volume 01234567 --stream 3
  rio log dump dax:/mnt/pmem/log -o json | jq '.volumes[].partitions[].released'")]
pub struct Dump {
    /// The log, as it is given to `rio target serve --log`: file:PATH, dax:PATH, block:PATH
    /// or pci:ADDRESS
    #[arg(value_name = "REGION")]
    pub region: String,
    /// Only this volume: its id, or the beginning of it
    #[arg(long, value_name = "ID")]
    pub volume: Option<String>,
    /// Only this stream
    #[arg(long, value_name = "NUMBER")]
    pub stream: Option<u16>,
    /// The streams only, not their entries
    #[arg(long)]
    pub summary: bool,
}
