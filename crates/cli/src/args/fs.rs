//! `rio fs …`

use std::{path::PathBuf, time::Duration};

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
    /// Unmount a file system, and wait until everything is durable
    Umount(Umount),
    /// Recover a file system, and check it with e2fsck, or hand it back to any ext4
    Fsck(Fsck),
    /// Show the figures of a mounted file system, or the state of a file
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
    /// The same on streams of engine `horae`, to compare: ordering metadata goes before the data
    Horae,
    /// As BarrierFS, to compare: commits in flight on streams of engine `barrier`, which needs drives
    /// that keep the order
    Barrier,
    /// As OPEXT4, to compare: commits in flight behind data on streams of engine `opimq`, which needs
    /// drives that keep the order of epochs
    Opimq,
    /// As ext4 with jbd2: a commit of the journal for each fsync
    Ext4,
}

/// Mount a file system.
#[derive(Args, Clone, Debug)]
#[command(mut_arg("name", |name| name.index(1).value_name("VOLUME|FILE").help(PLACE)))]
#[command(after_help = "\
The file system is served through FUSE, by this process, until it is unmounted: by `rio fs umount DIR`,
by `umount DIR` (`fusermount3 -u DIR` for users other than root), by SIGTERM or Ctrl-C. Then everything
is made durable. `rio fs umount` returns after that; the others don't wait, so wait for the end of this
process before the file or the volume is used elsewhere.

After SIGTERM or Ctrl-C programs that still use files get errors, and the process ends when all is
durable: a target that is unreachable has until --loss-timeout. A second signal ends the process at
once, as a crash: what was not durable is lost, and the next mount recovers the rest.

With --daemon it goes to the background. The exit code is then 0 once the file system is mounted, and
that of the failure if it is not.

A file is served by a target in this process. Its label and its ordering log are in the folder FILE.rio
beside it, which is removed when the file system is unmounted. After a crash the next mount recovers
the file system; until then the folder must stay beside the file, and no other program takes the file
for an ext4 file system.

If a part of the file system's journal is damaged, it is not mounted. --accept-lost-log leaves out the
records that are damaged: some of what fsync made durable is lost then.

Root's mounts are for all users, as their permissions allow. Other users need the program fusermount3
(package fuse3). Their mounts are theirs alone, and have no device nodes and no set-user-ID programs.

Programs that call fsync, fdatasync or O_SYNC have the guarantees that they expect, and wait less.
`rio fs stat DIR` shows where the time of an fsync goes.

Exit codes: 0 it was mounted and unmounted, 4 the file system or the volume is refused, 6 it was not
unmounted in order (the next mount recovers it), 7 the file is in use, 130 a second signal has ended
the process.

Examples:
  rio fs mount disk.img /mnt
  rio fs mount files /srv/files -m 192.0.2.10 -m 192.0.2.11
  rio fs mount disk.img /mnt --daemon --log /var/log/riofs.log
  rio fs mount disk.img /mnt --metrics 127.0.0.1:9422
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
    /// MiB of file data in memory that is not written yet. At this limit a write waits until half of it
    /// is written
    #[arg(long, value_name = "MIB", default_value_t = riopipe_fs::backing::DIRTY_LIMIT_MIB)]
    #[arg(value_parser = clap::value_parser!(u32).range(16..=65_536))]
    pub dirty_limit: u32,
    /// Threads that serve requests. As many calls of fsync wait at the same time
    #[arg(long, value_name = "N", default_value_t = riopipe_fs::fuse::DEFAULT_THREADS)]
    pub threads: usize,
    /// Return when the file system is mounted, and serve it in the background
    #[arg(long)]
    pub daemon: bool,
    /// With --daemon: the log, a file to which lines are added, or `syslog` [default: syslog]
    #[arg(long, value_name = "FILE|syslog", requires = "daemon")]
    pub log: Option<PathBuf>,
    /// Loopback address of metrics over HTTP: /metrics for Prometheus, /stat as JSON, and /healthz.
    /// The port is 9422 if none is given; 0 takes a free one [default: none]
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub metrics: Option<String>,
}

/// Unmount a file system.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
`umount` returns before the process that serves the file system has made everything durable, because
the kernel does not wait for it. This command does: when it returns 0, all is durable, the volume is
closed, and any ext4 may use the file.

It is for root, and for the user that has mounted the file system. Ctrl-C ends the waiting, not the
unmount.

Exit codes: 0 unmounted, 1 programs still use files there (--force unmounts even so), 3 no process
serves it any more (it was taken off, and the next mount recovers it), 6 it was not unmounted in order
(the next mount recovers it).

Examples:
  rio fs umount /mnt
  rio fs umount disk.img
  rio fs umount /mnt --force")]
pub struct Umount {
    /// The directory, the file, or the name of the volume
    #[arg(value_name = "DIR|FILE|VOLUME")]
    pub place: String,
    /// Unmount even if programs use files there. Their next calls fail; what they have written
    /// becomes durable
    #[arg(long)]
    pub force: bool,
}

/// Check a file system.
#[derive(Args, Clone, Debug)]
#[command(mut_arg("name", |name| name.index(1).value_name("VOLUME|FILE").help(PLACE)))]
#[command(after_help = "\
First the volume and the file system are recovered, as a mount does it. What programs made durable is
then in its place, the journals are empty, and the bit in the superblock that keeps every other ext4
from the file system is cleared.

Without an option `e2fsck -fn` then reads all structures, and changes nothing. It needs the package
e2fsprogs, and reads a volume through a mount of its own (/dev/fuse). If it finds no damage, the record
of errors in the superblock is cleared, as e2fsck itself does it. If the file system is so damaged that
it can't be recovered, and nothing waits for a recovery, e2fsck checks it as it is.

With --hand-back nothing is checked: the command ends when any ext4 can use the file system, with all
that the journals had. It is the part of a mount and an unmount that an administrator needs before
`mount -o loop`, e2fsck or a move to another machine.

If a part of the journal is damaged, --accept-lost-log recovers the rest. If the damage makes a
recovery impossible, it is given up: the bit is cleared, so that e2fsck can repair what is there.
Some of what fsync made durable is lost then.

It is not for a file system that is mounted.

Exit codes: 0 clean, or handed back; 4 it can't be recovered, with the reason; 5 e2fsck has found
damage, or the recovery was given up (`e2fsck -f FILE` repairs a file); 7 the file is in use.

Examples:
  rio fs fsck disk.img
  rio fs fsck disk.img --hand-back
  rio fs fsck files -m 192.0.2.10 -m 192.0.2.11
  rio fs fsck disk.img -o json")]
pub struct Fsck {
    /// The volume or the file.
    #[command(flatten)]
    pub open: Open,
    /// Recover it so that any ext4 can use it, and check nothing
    #[arg(long)]
    pub hand_back: bool,
}

/// Show a file system.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
For a mounted file system it asks the process that serves it, which answers to its own user and to root.
It does not go through the file system, so it works while a target is away.

  fsyncs            calls of fsync and fdatasync, and synchronous writes
  records           those that waited once, for a file-level record
  fallbacks         those that needed a commit of the main journal, by reason (docs/riofs.md)
  dispatch data     the time in which dirty pages get their blocks, and are submitted
  dispatch record   the time in which the record is made and submitted
  wait record       the time until both are durable: one round trip
  wait data, dispatch journal, wait journal, flush journal, dispatch commit, wait commit
                    the stages of a commit of the main journal

For a file that is not mounted it shows the state. `unmounted`: any ext4 may mount it. `unrecovered`: it
was not unmounted, and the next mount or `rio fs fsck` recovers it. `mounted`: a process has it locked
that does not answer here.

Examples:
  rio fs stat /mnt
  rio fs stat /mnt --watch 1       the figures, and then the differences every second
  rio fs stat disk.img -o json
With `rio fs mount --metrics ADDR` Prometheus reads the same from http://ADDR/metrics.")]
pub struct Stat {
    /// The directory, the file, or the name of the volume
    #[arg(value_name = "DIR|FILE|VOLUME")]
    pub place: String,
    /// Repeat, and show every so many seconds the difference since the last time
    #[arg(short, long, visible_alias = "every", value_name = "SECONDS")]
    #[arg(value_parser = values::seconds)]
    pub watch: Option<Duration>,
}
