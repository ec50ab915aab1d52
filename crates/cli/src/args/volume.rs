//! `rio volume …`

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use super::{connect::Connect, values};

/// What can be done with volumes.
#[derive(Debug, Subcommand)]
pub enum Volume {
    /// Make a volume of one drive or several
    Create(Create),
    /// Show what the labels and logs of a volume's members say; takes nothing
    Show(Show),
    /// Show what an open volume is doing, and where the time of its groups goes
    Stat(Stat),
    /// Bring a volume back after a crash, or look what that would do
    Recover(Recover),
    /// Copy a file into a volume, as ordered groups
    Write(Write),
    /// Copy the file in a volume back, and check it
    Read(Read),
    /// Check the file in a volume, alone or byte by byte against a local one
    Verify(Verify),
}

/// The drives of a volume, in order.
#[derive(Args, Clone, Debug)]
pub struct Members {
    /// A drive, `ADDR[:PORT][,nqn=NQN][,ns=N]`. Once for each, in the order of the stripes.
    /// Without nqn= the target is asked; without ns= it is namespace 1
    #[arg(short = 'm', long = "member", value_name = "DRIVE", required = true)]
    pub members: Vec<String>,
    /// How to connect.
    #[command(flatten)]
    pub connect: Connect,
}

/// Which volume, and how it is opened.
#[derive(Args, Clone, Debug)]
pub struct Open {
    /// The volume's name
    pub name: String,
    /// Its drives.
    #[command(flatten)]
    pub members: Members,
    /// Take the volume from an owner that is still there, or may still come back. The other one
    /// fails; what it had not finished is undone
    #[arg(long)]
    pub take_over: bool,
    /// Seconds to wait for a volume that is owned. When an owner's connection is lost, it keeps its
    /// volume for its --loss-timeout and 15 s more
    #[arg(long, value_name = "SECONDS", default_value = "0", hide_default_value = true)]
    #[arg(value_parser = values::seconds_or_none)]
    pub wait: Duration,
    /// Give up an ordering log that is not there any more, is damaged, or is older than the volume's
    /// labels, and with it the knowledge of what was under way last. Nothing is undone then, and
    /// what is in doubt is listed
    #[arg(long)]
    pub accept_lost_log: bool,
}

/// Make a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Each drive gets a label that names the volume, all its members and their order; each target's
ordering log gets room for its streams. Drives that carry a label already are refused.

Examples:
  rio volume create journal -m 192.0.2.10
  rio volume create journal -m 192.0.2.10:4420,ns=2 -m 192.0.2.11:4420,ns=1
  rio volume create plain --engine sync -m 192.0.2.10,nqn=nqn.2026-11.com.example:disk0")]
pub struct Create {
    /// The volume's name
    pub name: String,
    /// Its drives.
    #[command(flatten)]
    pub members: Members,
    /// How order is kept unless somebody asks for another way: rio, sync or none [default: rio
    /// where every target can, else sync]
    #[arg(long, value_name = "ENGINE", value_parser = super::bench::engine)]
    pub engine: Option<riopipe::EngineKind>,
    /// How much lies on one drive before the next one follows
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = values::block_size)]
    pub unit: u32,
    /// Streams that can be used at the same time; each has its part of the log
    #[arg(long, value_name = "COUNT", default_value_t = 8)]
    pub streams: u16,
    /// Log entries per stream on each target [default: as many as fit]
    #[arg(long, value_name = "COUNT", default_value_t = 0, hide_default_value = true)]
    pub slots: u32,
    /// Make it even if a drive carries the label of another volume, which is thereby destroyed
    #[arg(long)]
    pub force: bool,
}

/// Look at a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rio volume show -m 192.0.2.10 -m 192.0.2.11
  rio volume show -m 192.0.2.10 -m 192.0.2.11 -o json | jq .generation")]
pub struct Show {
    /// Its drives.
    #[command(flatten)]
    pub members: Members,
}

/// Which open volume to ask, and how often.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Asks whoever has the volume open: `rio bench run --metrics ADDR:PORT`, or a program that calls
Volume::serve_metrics of the library. It tells of its targets, of how far each open stream is, and where
the time went. One group in 256 is traced, which costs well under 1 %; a traced group is in exactly one
stage at any moment:

  submit         checked, cut at stripes, numbered and merged with its neighbours
  order queue    waits until it is turned into a command
  wire           on its way until its answer is back; all that the target does is in it, and `rio
                 target stat` takes it apart
  in order wait  done, and waits until all before it are

Percentiles are exact to 3 %. With --watch, a volume that is closed is waited for.

Examples:
  rio volume stat 127.0.0.1:9421                 since it was opened
  rio volume stat 127.0.0.1:9421 --watch 5       and then of every 5 seconds
  rio volume stat 127.0.0.1:9421 -o json         with all buckets
Prometheus reads the same from http://127.0.0.1:9421/metrics.")]
pub struct Stat {
    /// What the program that has the volume open was given for its metrics
    #[arg(value_name = "ADDR:PORT")]
    pub addr: String,
    /// Go on, and show every so many seconds what came in between
    #[arg(short, long, value_name = "SECONDS", value_parser = values::seconds)]
    pub watch: Option<Duration>,
}

/// Recover a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Every command that opens a volume recovers it first. This one does nothing else, and tells all: for
each stream how far it reaches (the last group and the writer's tag of it), how many log entries were
found, how many groups are kept and dropped, and which blocks were zeroed.

In-place updates of dropped groups can't be undone: their blocks may hold the old content or the new.
They are listed, and the stream stays closed until somebody has seen the list: --acknowledge says so.

It may be stopped at any point and run again; the result is the same.

Examples:
  rio volume recover journal -m 192.0.2.10 -m 192.0.2.11 --dry-run         changes nothing
  rio volume recover journal -m 192.0.2.10 -m 192.0.2.11 --save-undone lost.rio
  rio volume recover journal -m 192.0.2.10 -m 192.0.2.11 --acknowledge -o json")]
pub struct Recover {
    /// Which volume.
    #[command(flatten)]
    pub open: Open,
    /// Only say what would be done. Nothing is changed, not even the volume's generation
    #[arg(short = 'n', long, conflicts_with_all = ["save_undone", "acknowledge"])]
    pub dry_run: bool,
    /// Keep what is about to be zeroed in this file, which must not exist
    #[arg(long, value_name = "FILE")]
    pub save_undone: Option<PathBuf>,
    /// Say that the lists of in-place updates have been seen, so that their streams open again
    #[arg(long)]
    pub acknowledge: bool,
}

/// Copy a file into a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
A volume holds one file. An older one is first declared gone; then the data follow as ordered
groups, none waiting for the one before; last comes a header with name, length and checksum, as
one durable group. So whatever happens, the volume holds the whole file or none.

Examples:
  rio volume write journal ledger.db -m 192.0.2.10 -m 192.0.2.11
  rio volume write journal ledger.db -m 192.0.2.10 --group 1M -o json")]
pub struct Write {
    /// Which volume.
    #[command(flatten)]
    pub open: Open,
    /// The file to copy; a regular file
    pub file: PathBuf,
    /// How much of the file makes one group
    #[arg(long, value_name = "SIZE", default_value = "256K", value_parser = values::block_size)]
    pub group: u32,
    /// Overwrite what is in the volume even if no file copy wrote it
    #[arg(long)]
    pub force: bool,
}

/// Copy a file back.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The copy is written under a temporary name and gets its own only when its checksum is right.

Examples:
  rio volume read journal restored.db -m 192.0.2.10 -m 192.0.2.11
  rio volume read journal -m 192.0.2.10 -m 192.0.2.11     under the name it had, in this folder")]
pub struct Read {
    /// Which volume.
    #[command(flatten)]
    pub open: Open,
    /// Where to [default: the file's name, in this folder]
    pub file: Option<PathBuf>,
    /// Replace a file that is already there
    #[arg(long)]
    pub force: bool,
}

/// Check a file.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rio volume verify journal -m 192.0.2.10 -m 192.0.2.11              its checksum
  rio volume verify journal ledger.db -m 192.0.2.10 -m 192.0.2.11    each byte")]
pub struct Verify {
    /// Which volume.
    #[command(flatten)]
    pub open: Open,
    /// The local file that it should equal
    pub file: Option<PathBuf>,
}
