//! `rio bench fs`

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};

use crate::args::{connect::Connect, values};

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Workload {
    /// Append 4 KiB to a file of the thread, and fsync (figures 13 and 14 of the paper)
    #[value(name = "append_fsync")]
    AppendFsync,
    /// The mail server of Filebench: remove, create, append, fsync, read (figure 15a)
    #[value(name = "varmail")]
    Varmail,
    /// Durable puts into RocksDB, 16-byte keys and 1-KiB values (figure 15b)
    #[value(name = "rocksdb_fillsync")]
    RocksdbFillsync,
}

impl Workload {
    /// All loads.
    pub const ALL: [Self; 3] = [Self::AppendFsync, Self::Varmail, Self::RocksdbFillsync];

    /// Its name on the command line and in the result.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AppendFsync => "append_fsync",
            Self::Varmail => "varmail",
            Self::RocksdbFillsync => "rocksdb_fillsync",
        }
    }
}

/// The path of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Through {
    /// Calls of the file system in this process, without FUSE
    Calls,
    /// System calls on a directory where the file system is mounted through FUSE
    Mount,
}

impl Through {
    /// Its name on the command line and in the result.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Mount => "mount",
        }
    }
}

/// Measure a file system.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Starts a target of its own with a modelled drive, and makes the loads of the Rio paper (EuroSys '23, 6.3 and
6.4) on it. The modes of RioFS take turns, on the same drives and the same code, each on a new file system:

  ext4  waits as ext4 with jbd2: for the data, for the journal's blocks, for the commit block
  horae as rio, on streams of engine horae: ordering metadata goes before data and record (HoraeFS)
  barrier  data, the journal's blocks and the commit block in order without a wait between them, on a drive
        with a cache barrier of its own (BarrierFS); not with the drive mem
  rio   data and a file-level record on an ordered stream, and one wait

Three loads:

  append_fsync      each thread appends 4 KiB to a file of its own and calls fsync, again and again
  varmail           Filebench's list of 13 calls on 1000 mails in one directory; an operation is the list
  rocksdb_fillsync  what RocksDB does with a file system while threads put records, each durable: a log whose
                    fdatasync the threads share, and flushes of 4-MiB memtables. With --through mount it is
                    RocksDB's own db_bench, if that is on the PATH (package rocksdb-tools)

The floor stands beside append_fsync: two groups of one block each on a stream, as data and record are, and
one wait until they are durable. This is all that an fsync has to wait for: one round trip, one write of the
drive, and one FLUSH unless the drive has power-loss protection. `rio / floor` compares the medians.

The second table shows for the smallest number of threads where the time of an fsync goes (figure 14): what
it dispatches and waits for, step by step. The steps of a mode add up to the time of its fsync. `waits` is how
often an fsync waits for something that has not arrived, one after the other.

With --kernel the kernel's own ext4 takes part, too: on a loop device on a file in memory, beside the drive
`mem` without a round trip. It needs root. Its calls are system calls, so compare it with --through mount.

CPU time is that of both sides, and of each. All threads of one side are counted, not only the calling ones.
Figures are medians; ratios are of the same round. A full run takes about an hour.

Examples:
  rio bench fs --quick                                     in under three minutes
  rio bench fs --quick --plot plots                        with pictures
  rio bench fs --workload append_fsync --profile optane --rtt 100us --threads 1,2
  rio bench fs --workload rocksdb_fillsync --through mount --threads 4 --time 5
  rio bench fs --workload append_fsync --profile mem --rtt 0us --through mount --kernel
  rio bench fs --quick -o json | jq '.points[] | {workload, profile, rtt_us, threads, ratios}'
  rio bench fs --quick -o json | jq '.points[0].modes.rio.fsync | {serial_waits, breakdown, trace}'")]
pub struct Fs {
    /// Fewer points and rounds, in under three minutes: the round trips 0 and 100us, and varmail and
    /// rocksdb_fillsync only at the longest one with the most threads
    #[arg(long)]
    pub quick: bool,
    /// Loads [default: all]
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',')]
    pub workload: Option<Vec<Workload>>,
    /// Make the calls in this process, or through FUSE
    #[arg(long, value_enum, value_name = "HOW", default_value = "calls")]
    pub through: Through,
    /// Measure the kernel's ext4, too, where it can be compared
    #[arg(long)]
    pub kernel: bool,
    /// Threads [default: 1,2,4,8; quick: 1,2]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: Option<Vec<u32>>,
    /// Modelled drives: optane (with power-loss protection), flash (without), or mem
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "optane,flash")]
    #[arg(value_parser = ["optane", "flash", "mem"])]
    pub profile: Vec<String>,
    /// Modelled round trips [default: 0us,30us,100us; quick: 0us,100us]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = values::span_ns)]
    pub rtt: Option<Vec<u64>>,
    /// Seconds per mode, point and round [default: 1; quick: 0.3]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub time: Option<Duration>,
    /// Rounds in which the modes take turns, at each point; from 6 on intervals hold with 95 %
    /// [default: 6; quick: 3]
    #[arg(long, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Draw figures 13 to 15 of the paper into this folder, for each load, drive and round trip
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// The connection's options.
    #[command(flatten)]
    pub connect: Connect,
}
