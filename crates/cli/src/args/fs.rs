//! `rio fs …`

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{
    values,
    volume::{Members, Open},
};

/// The operations on file systems.
#[derive(Debug, Subcommand)]
pub enum Fs {
    /// Make a file system on a volume or in a file
    Mkfs(Mkfs),
    /// Mount a file system, and serve it until it is unmounted
    Mount(Mount),
    /// Recover the file system in a file, and check it with e2fsck
    Fsck(Fsck),
    /// Show the state of the file system in a file
    Stat(Stat),
}

/// The help of a place.
const PLACE: &str = "\
The name of a volume, or the path of a file. Without -m, a name with a slash, or that of a file that \
exists, is a path";

/// Make a file system.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The file system is ext4, made by mke2fs (package e2fsprogs), with blocks of 4096 bytes. Its journal
takes 32M, and more on a larger one: a 64th, up to 1G. The smallest file system has 128M. The root
directory belongs to the user that makes it.

A file stays a plain ext4 image: while it is not mounted, `mount -o loop`, e2fsck and debugfs use it,
too. A volume is discarded first, so that blocks that are not written read as zeroes.

Examples:
  rio fs mkfs disk.img --size 8G
  rio fs mkfs ./disk.img --force
  rio fs mkfs files -m 192.0.2.10 -m 192.0.2.11")]
pub struct Mkfs {
    /// The name of a volume, or the path of a file. Without -m, a name with a slash, that of a file
    /// that exists, or one with --size, is a path
    #[arg(value_name = "VOLUME|FILE")]
    pub place: String,
    /// The size of a file. A new file is sparse; an old one is cut or made longer
    #[arg(long, value_name = "SIZE", value_parser = values::size)]
    pub size: Option<u64>,
    /// Make it over existing content, which is lost
    #[arg(long)]
    pub force: bool,
    /// The label, at most 16 bytes
    #[arg(long, value_name = "LABEL")]
    pub label: Option<String>,
    /// Take the volume from an owner that is still there, or may still come back
    #[arg(long)]
    pub take_over: bool,
    /// The drives of a volume.
    #[command(flatten)]
    pub members: Members,
}

/// How `fsync` keeps order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// File-level transactions on ordered streams: an fsync waits once
    #[default]
    Rio,
    /// As ext4 with jbd2: a commit of the journal for each fsync
    Ext4,
}

/// Mount a file system.
#[derive(Args, Clone, Debug)]
#[command(mut_arg("name", |name| name.index(1).value_name("VOLUME|FILE").help(PLACE)))]
#[command(after_help = "\
The file system is served through FUSE, by this process, until it is unmounted: by `umount DIR`
(`fusermount3 -u DIR` for users other than root), by SIGTERM or Ctrl-C. Then everything is made
durable. Wait for the end of this process before the file or the volume is used elsewhere.

A file is served by a target in this process. Its label and its ordering log are in the folder FILE.rio
beside it, which is removed when the file system is unmounted. After a crash the next mount recovers
the file system; until then the folder must stay beside the file, and no other program takes the file
for an ext4 file system.

Programs that call fsync, fdatasync or O_SYNC have the guarantees that they expect, and wait less.

Examples:
  rio fs mount disk.img /mnt
  rio fs mount files /srv/files -m 192.0.2.10 -m 192.0.2.11
  rio fs mount disk.img /mnt --mode ext4")]
pub struct Mount {
    /// The volume or the file.
    #[command(flatten)]
    pub open: Open,
    /// The directory
    #[arg(value_name = "DIR", index = 2)]
    pub directory: PathBuf,
    /// How fsync keeps order
    #[arg(long, value_enum, default_value_t = Mode::Rio)]
    pub mode: Mode,
    /// Refuse all changes
    #[arg(long)]
    pub read_only: bool,
    /// Let all users use the files, as their permissions allow; root's mounts always do. Others
    /// need user_allow_other in /etc/fuse.conf
    #[arg(long)]
    pub allow_other: bool,
    /// Seconds between two commits of the background
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=300))]
    pub commit: u32,
    /// Threads that serve requests. As many calls of fsync wait at the same time
    #[arg(long, value_name = "N", default_value_t = riopipe_fs::fuse::DEFAULT_THREADS)]
    pub threads: usize,
}

/// Check a file system.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
After a crash the file system is recovered first, as a mount does it. Then `e2fsck -fn` checks it, and
changes nothing. It is not for a file system that is mounted.

Exit code 5: e2fsck has found damage. `e2fsck -f FILE` repairs it.

Examples:
  rio fs fsck disk.img
  rio fs fsck disk.img -o json")]
pub struct Fsck {
    /// The file
    pub file: PathBuf,
    /// Do without an ordering log that is lost: the order of the last writes is then not known
    #[arg(long)]
    pub accept_lost_log: bool,
}

/// Show a file system.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
States: `unmounted`: any ext4 may mount the file. `mounted`: a process serves it. `unrecovered`: it was
not unmounted, and the next mount or `rio fs fsck` recovers it.

Examples:
  rio fs stat disk.img
  rio fs stat disk.img -o json")]
pub struct Stat {
    /// The file
    pub file: PathBuf,
}
