//! `rio bench wal`

use std::time::Duration;

use clap::Args;

use super::Link;
use crate::args::{connect::Connect, values};

/// Measure a log of records.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Producers append records to a log, each waiting until its record is durable before it appends the next, as
a database's transactions do. The log packs all records that came in the meantime into one group.

The same log is kept in two ways in turns, on the same drives. `wal` uses engine rio: a group is sent while
the one before is in flight. `flush` uses engine sync: a group is written, the drive is flushed if it has a
volatile cache, and only then comes the next group. Figures are medians; ratios are of the same round.

Examples:
  rio bench wal --quick                                    in under a minute
  rio bench wal --producers 1,64 --record 128,4096 -o json
  rio bench wal --drive ssd:optane,size=1G
  rio bench wal --quick --rtt 100us")]
pub struct Wal {
    /// 1, 8 and 64 producers, in under a minute
    #[arg(long, conflicts_with = "producers")]
    pub quick: bool,
    /// Threads that append [default: 1,2,4,8,16,32,64]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub producers: Option<Vec<u32>>,
    /// Bytes of a record
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "256")]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub record: Vec<u32>,
    /// Seconds per contender, point and round [default: 1; quick: 0.5]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub time: Option<Duration>,
    /// Rounds in which the two take turns, at each point; from 6 on intervals hold with 95 %
    /// [default: 6; quick: 4]
    #[arg(long, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Groups of `wal` that may be in flight before records wait to be written together
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub groups: u32,
    /// FLUSHes of it in flight; over a slow network a second one saves a round trip
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub flushes: u32,
    /// Drive of each target; `rio target serve --help` lists the kinds
    #[arg(long, value_name = "DRIVE", default_value = "ssd:flash,size=1G", help_heading = "Media")]
    pub drive: String,
    /// Number of targets, each with one drive
    #[arg(long, value_name = "COUNT", default_value_t = 1, help_heading = "Media")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub targets: u32,
    /// Size of each target's ordering log
    #[arg(long, value_name = "SIZE", default_value = "2M", help_heading = "Media")]
    #[arg(value_parser = values::size)]
    pub log_size: u64,
    /// The modelled link.
    #[command(flatten)]
    pub link: Link,
    /// The connection's options.
    #[command(flatten)]
    pub connect: Connect,
}
