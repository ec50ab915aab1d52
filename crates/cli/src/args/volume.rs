//! `rio volume …`

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use super::{
    attach::Attach,
    connect::Connect,
    values,
    volume_life::{Delete, Grow, List, Rename, Wipe},
};

/// The operations on volumes.
#[derive(Debug, Subcommand)]
pub enum Volume {
    /// Make a volume of one drive or several
    Create(Create),
    /// Show the labels and logs of a volume's members; claims nothing
    Show(Show),
    /// List the volumes of targets, and the space in their logs
    List(List),
    /// Delete a volume: free its logs, erase its labels
    Delete(Delete),
    /// Erase the label of a drive that was left over from a volume
    Wipe(Wipe),
    /// Give a volume another name
    Rename(Rename),
    /// Grow a volume whose drives have become larger
    Grow(Grow),
    /// Serve a volume as a plain block device, to any NVMe/TCP host or NBD client
    Attach(Box<Attach>),
    /// Show the progress of an open volume, and the time of its groups in each stage
    Stat(Stat),
    /// Recover a volume after a crash, or show what that would do
    Recover(Recover),
    /// Show blocks that a recovery has undone and saved, or write them back
    #[command(subcommand, arg_required_else_help = true)]
    Undone(Undone),
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
    /// Without nqn= the target is asked; without ns= it is namespace 1 [default: those that the
    /// file of known volumes has]
    #[arg(short = 'm', long = "member", value_name = "DRIVE")]
    pub members: Vec<String>,
    /// The file of known volumes [default: RIO_VOLUMES, or else ~/.config/rio/volumes.toml, and
    /// after it /etc/rio/volumes.toml, which is only read]
    #[arg(long, value_name = "FILE")]
    pub volumes_file: Option<PathBuf>,
    /// The connection's options.
    #[command(flatten)]
    pub connect: Connect,
}

/// The volume, and the way to open it.
#[derive(Args, Clone, Debug)]
pub struct Open {
    /// The volume's name
    pub name: String,
    /// Its drives.
    #[command(flatten)]
    pub members: Members,
    /// Take the volume from an owner that is still there, or may still come back. That owner fails;
    /// its unfinished writes are undone
    #[arg(long)]
    pub take_over: bool,
    /// Seconds to wait for a volume with an owner. An owner that has lost its connection keeps its
    /// volume for its --loss-timeout and 15 s more
    #[arg(long, value_name = "SECONDS", default_value = "0", hide_default_value = true)]
    #[arg(value_parser = values::seconds_or_none)]
    pub wait: Duration,
    /// Give up an ordering log that is missing, damaged, or older than the volume's labels, and
    /// with it the record of the last writes. Nothing is undone then, and the writes in doubt are
    /// listed. The volume gets space in the log that the target has now. If it has none, the volume
    /// has engine sync until this option is given when there is a log
    #[arg(long)]
    pub accept_lost_log: bool,
}

const MEMBERS_OF_NEW: &str = "\
A drive, `ADDR[:PORT][,nqn=NQN][,ns=N]`. Once for each, in the order of the stripes. Without nqn= \
the target is asked; without ns= it is namespace 1";

/// Create a volume.
#[derive(Args, Clone, Debug)]
#[command(mut_arg("members", |members| members.required(true).help(MEMBERS_OF_NEW)))]
#[command(after_help = "\
Each drive gets a label that names the volume, all its members and their order; each target's
ordering log gets partitions for its streams. A drive that holds anything is refused: a label, a file
system, a partition table, a member of a RAID, swap space, or any bytes that are not zero in its first
256 KiB. The message names what was found. --force erases it, its signatures included.

The drives, and the options to connect to them, are kept in the file of known volumes. So later
commands need only the name. An empty RIO_VOLUMES, or --no-volumes-file, keeps nothing.

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
    /// Default engine of the volume: rio, horae, barrier, opimq, sync, linux or none [default: rio if every target supports it,
    /// else sync]
    #[arg(long, value_name = "ENGINE", value_parser = super::bench::engine)]
    pub engine: Option<riopipe::EngineKind>,
    /// Stripe unit: bytes on one drive before the next one follows
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = values::block_size)]
    pub unit: u32,
    /// Streams that can be used at the same time; each has its partition of the log
    #[arg(long, value_name = "COUNT", default_value_t = 8)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub streams: u16,
    /// Log entries per stream on each target [default: as many as fit]
    #[arg(long, value_name = "COUNT", default_value = "0", hide_default_value = true)]
    #[arg(value_parser = values::slots)]
    pub slots: u32,
    /// Space on each drive to which engine horae redirects updates in place, 0 for none; the streams
    /// share it [default: 4M per stream, at most a sixteenth of the drive]
    #[arg(long, value_name = "SIZE", value_parser = values::prepare_area)]
    pub prepare_area: Option<u32>,
    /// Erase what the drives hold: another volume, a file system, or anything else. A volume that has
    /// an owner is refused all the same
    #[arg(long)]
    pub force: bool,
    /// Don't keep the drives in the file of known volumes
    #[arg(long, conflicts_with = "volumes_file")]
    pub no_volumes_file: bool,
}

/// Inspect a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Of a volume whose members are not all given, it shows what the labels of the given ones tell: the
volume's name and all its members, those that are missing among them.

Examples:
  rio volume show journal
  rio volume show journal --keep -m 192.0.2.20 -m 192.0.2.21     after its drives have moved
  rio volume show -m 192.0.2.10 -m 192.0.2.11
  rio volume show -m 192.0.2.10                      one member: what does its label tell?
  rio volume show -m 192.0.2.10 -m 192.0.2.11 -o json | jq .generation")]
pub struct Show {
    /// The volume's name. Without it, -m names the drives
    #[arg(required_unless_present = "members")]
    pub name: Option<String>,
    /// Its drives.
    #[command(flatten)]
    pub members: Members,
    /// Keep the drives of -m in the file of known volumes
    #[arg(long, requires = "members")]
    pub keep: bool,
}

/// The open volume to ask, and the interval.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Asks the program that has the volume open: `rio bench run --metrics ADDR:PORT`, or one that serves
Volume::stat_source of the library. It shows the volume's targets, the marks of each open stream, and
the time of each stage. One group in 256 is traced, which costs well under 1 %; a traced group is in exactly one
stage at any moment:

  submit         checked, cut at stripes, numbered and merged with adjacent ones
  order queue    waits until it is turned into a command
  wire           sent, until its answer is back; the target's work is part of it, and `rio target
                 stat` shows its stages
  in order wait  done, and waits until all groups before it are

Percentiles are exact to 3 %. With --watch, a volume that is closed is waited for.

Examples:
  rio volume stat 127.0.0.1:9421                 since it was opened
  rio volume stat 127.0.0.1:9421 --watch 5       and then for every 5 seconds
  rio volume stat 127.0.0.1:9421 -o json         with all buckets
Prometheus reads the same from http://127.0.0.1:9421/metrics.")]
pub struct Stat {
    /// The metrics address of the program that has the volume open; its port is 9421 if none is given
    #[arg(value_name = "ADDR[:PORT]")]
    pub addr: String,
    /// Repeat, and show every so many seconds the difference since the last time
    #[arg(short, long, value_name = "SECONDS", value_parser = values::seconds)]
    pub watch: Option<Duration>,
}

/// Recover a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Every command that opens a volume recovers it first. This one does nothing else, and shows all
results: for each stream its last group with the writer's tag, the number of log entries found, the
numbers of groups kept and dropped, and the zeroed blocks.

In-place updates of dropped groups can't be undone: their blocks may hold the old content or the new.
They are listed, and the stream stays closed until the list is confirmed with --acknowledge.

It may be stopped at any point and run again; the result is the same. With --save-undone, name
another file then: the first one may be the only copy of blocks that are zeroed by now.
`rio volume undone` shows such a file, and writes its blocks back.

Examples:
  rio volume recover journal -m 192.0.2.10 -m 192.0.2.11 --dry-run         changes nothing
  rio volume recover journal -m 192.0.2.10 -m 192.0.2.11 --save-undone lost.rio
  rio volume recover journal -m 192.0.2.10 -m 192.0.2.11 --acknowledge -o json")]
pub struct Recover {
    /// The volume.
    #[command(flatten)]
    pub open: Open,
    /// Only show what would be done. Nothing is changed, not even the volume's generation
    #[arg(short = 'n', long, conflicts_with_all = ["save_undone", "acknowledge"])]
    pub dry_run: bool,
    /// Save the blocks that will be zeroed in this file, which must not exist
    #[arg(long, value_name = "FILE")]
    pub save_undone: Option<PathBuf>,
    /// Confirm the lists of in-place updates, so that their streams can be opened again
    #[arg(long)]
    pub acknowledge: bool,
}

/// The operations on saved undone blocks.
#[derive(Debug, Subcommand)]
pub enum Undone {
    /// Show which blocks a file has, and check it
    Show(UndoneShow),
    /// Write the blocks of a file back to their volume
    Apply(Box<UndoneApply>),
}

/// Show a file of undone blocks.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The file is one of `rio volume recover --save-undone`. All its checksums are verified.

Examples:
  rio volume undone show lost.rio
  rio volume undone show lost.rio -o json | jq '.extents[] | select(.stream == 0)'")]
pub struct UndoneShow {
    /// The file
    pub file: PathBuf,
}

/// Write undone blocks back.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Opens the volume, and writes the saved content to the blocks that still read as zeroes, as ordered
groups of the streams that wrote them first. Blocks that have the saved content already stay. Nothing
is written if the file is of another volume, if the drives are older than the file, or if one of the
blocks was written since; --force accepts the last two.

The recovery had undone these blocks because writes before them were lost. So look at the file first,
and at what the blocks mean to the program that wrote them.

Examples:
  rio volume undone apply lost.rio --dry-run
  rio volume undone apply lost.rio -m 192.0.2.10 -m 192.0.2.11")]
pub struct UndoneApply {
    /// The file
    pub file: PathBuf,
    /// The volume's name, by which its drives are found [default: the one in the file]
    #[arg(long, value_name = "NAME")]
    pub volume: Option<String>,
    /// Its drives.
    #[command(flatten)]
    pub members: Members,
    /// Only show what would be written. The volume is opened and read, and no block is written.
    /// Since it was opened, writing over zeroes then needs --force
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Write also over blocks that were written since, or that read as zeroes and may have been
    /// written so, and to drives that are older than the file
    #[arg(long)]
    pub force: bool,
    /// Seconds to wait for a volume with an owner
    #[arg(long, value_name = "SECONDS", default_value = "0", hide_default_value = true)]
    #[arg(value_parser = values::seconds_or_none)]
    pub wait: Duration,
}

/// Copy a file into a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
A volume holds one file. An older one is first marked as gone. Then the data follow as ordered
groups, none waiting for the one before. The last group is a header with name, length and checksum,
and is durable. So after any failure, the volume holds the whole file or none.

With - as FILE, standard input is read to its end. A pipe ends in the same way if its writer fails,
so make the shell report that, as with bash's pipefail.

Examples:
  rio volume write journal ledger.db -m 192.0.2.10 -m 192.0.2.11
  rio volume write journal ledger.db -m 192.0.2.10 --group 1M -o json
  tar c /srv/data | rio volume write journal - --name data.tar -m 192.0.2.10")]
pub struct Write {
    /// The volume.
    #[command(flatten)]
    pub open: Open,
    /// The file to copy: a regular file, or - for standard input
    pub file: PathBuf,
    /// The file's name in the volume [default: its own name; "stdin" for standard input]
    #[arg(long = "name", value_name = "NAME")]
    pub stored_name: Option<OsString>,
    /// Bytes of the file per group
    #[arg(long, value_name = "SIZE", default_value = "256K", value_parser = values::block_size)]
    pub group: u32,
    /// Overwrite the volume even if its content is not a copied file
    #[arg(long)]
    pub force: bool,
}

/// Copy a file back.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The copy is written under a temporary name and gets its own only when its checksum is right. Only
a regular file is replaced: never a device, a pipe, a socket, a folder, or a link to one of them.

With - as FILE, standard output gets the bytes, and nothing else: the result, JSON too, goes to
standard error. The checksum is known only at the end. If it is wrong, the command fails (exit code
5) when the bytes are out.

Examples:
  rio volume read journal restored.db -m 192.0.2.10 -m 192.0.2.11
  rio volume read journal - -m 192.0.2.10 | tar t
  rio volume read journal -m 192.0.2.10 -m 192.0.2.11     under the name it had, in this folder")]
pub struct Read {
    /// The volume.
    #[command(flatten)]
    pub open: Open,
    /// Destination; - is standard output [default: the file's name, in this folder]
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
  rio volume verify journal ledger.db -m 192.0.2.10 -m 192.0.2.11    each byte
  zstdcat ledger.zst | rio volume verify journal - -m 192.0.2.10")]
pub struct Verify {
    /// The volume.
    #[command(flatten)]
    pub open: Open,
    /// The local file to compare with; - is standard input
    pub file: Option<PathBuf>,
}
