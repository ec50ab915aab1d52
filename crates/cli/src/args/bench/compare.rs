//! `rio bench compare`

use std::{fmt, path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use riopipe_net::SpinPolicy;

use super::Link;
use crate::args::{connect::Connect, values};

/// A participant of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Contender {
    /// The same bytes without Rio (drives in memory only)
    Floor,
    /// No order: the upper bound
    None,
    /// Rio, without merging, its log a mapped file
    Rio,
    /// Rio, its log in mapped persistent memory
    #[value(name = "rio_dax")]
    RioDax,
    /// Rio, its log on a block device
    #[value(name = "rio_block")]
    RioBlock,
    /// Rio, with merging
    #[value(name = "rio_merged")]
    RioMerged,
    /// Waiting for each write, and a FLUSH if the drive needs one
    Sync,
    /// As HORAE: ordering metadata first, then the data
    Horae,
    /// The drive's cache barrier keeps the order (ssd: drives only; it gets drives of its own, with
    /// order=barrier and the cost of that)
    Barrier,
    /// As a journal on Linux: waiting for each write, and a FLUSH before the next if the drive needs
    /// one
    Linux,
    /// The drive keeps the order of epochs, as with OPIMQ (ssd: drives only; it gets drives of its own,
    /// with order=op and the cost of that)
    Opimq,
    /// None on sequential writes: the denominator for rio_merged where that has to write so. It is
    /// added when it is needed
    #[value(name = "none_seq", hide = true)]
    NoneSeq,
}

impl Contender {
    /// Its name on the command line and in the report.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::None => "none",
            Self::Rio => "rio",
            Self::RioDax => "rio_dax",
            Self::RioBlock => "rio_block",
            Self::RioMerged => "rio_merged",
            Self::Sync => "sync",
            Self::Linux => "linux",
            Self::Horae => "horae",
            Self::Barrier => "barrier",
            Self::Opimq => "opimq",
            Self::NoneSeq => "none_seq",
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Compare all engines.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Random writes, each a group of its own, to one target (or more) of its own on loopback. At each point the
contenders take turns, in several rounds; figures are medians, ratios are of the same round. All write to
the same drives, but barrier and opimq have their own. Each run is made twice: as --wait demands, and with both sides sleeping while they wait. The
CPU time per write comes from the second run, since polling uses time that no write needs.

On a virtual machine, a run during which the host took more than 2 % of the machine's time is discarded and
repeated, up to twice, for at most 40 % more runs in all (25 % with --quick), or two.

A list of one value holds for all points, a longer one is an axis. Along each axis the others have their
usual values: depth 32, 1 thread, 4K, batch 1 (or their smallest). With none given, all four axes are
measured: depths 1-128, threads 1-12, sizes 4K-64K, batches 1-16, as in the paper's Figures 10 to 12. This
takes a quarter of an hour.

rio_merged writes sequentially if batches have only one write, and is then compared with none on the same
sequential writes (none_seq). Otherwise it writes the same batches as all others.

The dax: log is a file in memory unless --dax-log names one on persistent memory. In memory it shows the
cost of its instructions (cache lines written back and fenced). The block: log is a file in memory, too,
unless --block-log names a device. In memory it shows the cost of its system calls.

Examples:
  rio bench compare --quick                                    under a minute
  rio bench compare --plot plots -o json > compare.json
  rio bench compare --depth 32 --size 4K,8K,16K,32K,64K --engine none,rio,rio_dax
  rio bench compare --depth 32 --drive ssd:flash,size=1G --log-size 2M --engine none,rio,sync
  rio bench compare --depth 32 --drive ssd:optane,size=1G --log-size 2M --engine none,rio,sync
  rio bench compare --depth 1,32 --drive ssd:flash,size=1G --engine none,rio,barrier,opimq
  rio bench compare --depth 1,32,128 --wait block
  rio bench compare --quick --rtt 100us --jitter 10us --bandwidth 25Gbit
  rio bench compare --depth 32 --block-log block:/dev/nvme1n1,plp --engine none,rio,rio_block")]
pub struct Compare {
    /// The 4 KiB points at queue depths 1, 32 and 128, in under a minute
    #[arg(long, conflicts_with_all = ["depth", "threads", "size", "batch"])]
    pub quick: bool,
    /// Contenders [default: all that the drive allows]
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',')]
    pub engine: Vec<Contender>,
    /// Writes in flight at a time, per thread
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub depth: Option<Vec<u32>>,
    /// Threads, each with its own stream and its own part of the volume
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: Option<Vec<u32>>,
    /// Bytes per write
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = values::block_size)]
    pub size: Option<Vec<u32>>,
    /// Adjacent writes before the next place: the material for merging
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub batch: Option<Vec<u32>>,
    /// Seconds per contender, point and round; half of it again with sleeping [default: 0.5; quick:
    /// 0.2]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub time: Option<Duration>,
    /// Rounds in which the contenders take turns, at each point; from 6 on intervals hold with 95 %
    /// [default: 6; quick: 4]
    #[arg(long, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Seed of the random places
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// How both sides wait: hybrid, block, or the microseconds to poll before sleeping
    #[arg(long, value_name = "HOW", default_value = "hybrid", value_parser = values::waiting)]
    pub wait: SpinPolicy,
    /// Draw a picture of each axis into this folder: depth.svg, threads.svg, …
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,

    /// Drive of each target; `rio target serve --help` lists the kinds
    #[arg(long, value_name = "DRIVE", default_value = "mem:1G", help_heading = "Media")]
    pub drive: String,
    /// Number of targets, each with one drive
    #[arg(long, value_name = "COUNT", default_value_t = 1, help_heading = "Media")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub targets: u32,
    /// Stripe unit: bytes on one drive before the next one follows
    #[arg(long, value_name = "SIZE", default_value = "64K", help_heading = "Media")]
    #[arg(value_parser = values::block_size)]
    pub unit: u32,
    /// Size of each target's ordering log, of any kind
    #[arg(long, value_name = "SIZE", default_value = "2M", help_heading = "Media")]
    #[arg(value_parser = values::size)]
    pub log_size: u64,
    /// Log of rio_dax; {} stands for a temporary file's path [default: dax:{} of that size]
    #[arg(long, value_name = "LOG", help_heading = "Media")]
    pub dax_log: Option<String>,
    /// Log of rio_block; a device must be blank [default: block:{} of that size]
    #[arg(long, value_name = "LOG", help_heading = "Media")]
    pub block_log: Option<String>,
    /// The modelled link.
    #[command(flatten)]
    pub link: Link,
    /// The connection's options.
    #[command(flatten)]
    pub connect: Connect,
}
