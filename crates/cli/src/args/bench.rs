//! `rio bench …`

pub mod compare;
pub mod fs;
pub mod wal;

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use riopipe::EngineKind;
use riopipe_lab::{access::Access, link::LinkModel};
use riopipe_net::SpinPolicy;

use super::{connect::Connect, values};

/// The measurements.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// All engines beside one another and beside the machine's floor, with ratios and plots
    Compare(Box<compare::Compare>),
    /// Write as fast as possible, with one engine or several in turns
    Run(Box<Run>),
    /// Exchange the same bytes without Rio: the floor of this machine
    Floor(Floor),
    /// Recover full ordering logs in the worst case, and show the time of each step
    Recovery(Recovery),
    /// Keep a log of records, compared with the same log kept with write and FLUSH
    Wal(Box<wal::Wal>),
    /// Append and fsync on a file system, compared with the way of ext4
    Fs(Box<fs::Fs>),
}

/// Measure recovery.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Starts targets of its own on loopback, fills their ordering logs to the last slot as a crash in the
worst moment would leave them (the first entry of every stream is the hole, so that everything
after it must be undone), starts them again and opens the volume. The clock runs from the first
connection until every stream can be written again.

Then the replay: the targets crash alone while the initiator lives. All streams have written as much
as they may without a FLUSH. The clock runs from the start of the targets until all is durable.

The paper's figures (EuroSys '23, 6.5; two servers with four drives, 36 threads) are shown, too:
55 ms to reconstruct the order, 125 ms to discard.

Examples:
  rio bench recovery
  rio bench recovery --rounds 30 -o json | jq .total_ms
  rio bench recovery --drive ssd:flash,size=1G,lazy,file={}")]
pub struct Recovery {
    /// Streams, each with its part of every log
    #[arg(long, value_name = "COUNT", default_value_t = 36)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub streams: u32,
    /// Targets
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=16))]
    pub targets: u32,
    /// Drives of each target
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=8))]
    pub drives: u32,
    /// Their specification; {} stands for the path of a temporary file, since the drives must
    /// outlive their target
    #[arg(long, value_name = "DRIVE", default_value = "ssd:optane,size=1G,lazy,file={}")]
    pub drive: String,
    /// The drives of the replay, which have a volatile cache: what is not durable is sent again
    #[arg(long, value_name = "DRIVE", default_value = "ssd:flash,size=1G,lazy,file={}")]
    pub replay_drive: String,
    /// Size of each target's ordering log
    #[arg(long, value_name = "SIZE", default_value = "2M", value_parser = values::size)]
    pub log_size: u64,
    /// Number of crashes and recoveries, and of replays
    #[arg(long, value_name = "COUNT", default_value_t = 11)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
}

/// The places of the writes, and their groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// Anywhere, each place once before any repeats
    Rand,
    /// One behind the other
    Seq,
    /// The paper's metadata journal: a group of two 4 KiB blocks, then a group of one
    Journal,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes
    On,
    /// No
    Off,
}

/// The engine of this name.
///
/// # Errors
/// The names there are.
pub fn engine(name: &str) -> Result<EngineKind, String> {
    EngineKind::from_name(name).ok_or_else(|| {
        let known = EngineKind::ALL.map(|kind| format!("{kind} ({})", kind.promise()));
        format!("no engine {name:?}; there are: {}", known.join(", "))
    })
}

/// The writes, and the duration.
#[derive(Args, Clone, Debug)]
pub struct Writes {
    /// Writes in flight at a time, per thread; several separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "32")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub depth: Vec<u32>,
    /// Threads, each with its own stream and its own part of the volume
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: u32,
    /// Places of the writes
    #[arg(long, value_enum, default_value = "rand")]
    pub pattern: Pattern,
    /// Bytes per write or read, up to 4M
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = values::transfer_size)]
    pub size: u32,
    /// Writes per group
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub group: u32,
    /// Adjacent writes before the next place: the material for merging
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub batch: u32,
    /// Seconds per contender, depth and round
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = values::seconds)]
    pub time: Duration,
    /// Rounds in which the contenders take turns, at each depth
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Seed of the random places
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
}

/// The modelled link between writer and target.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Modelled link")]
pub struct Link {
    /// Round-trip time, as in 100us. A relay in this process delays everything by it, in order; it
    /// needs a third core, or takes its time from both sides (of the floor's, too)
    #[arg(long, value_name = "TIME", value_parser = values::span_ns)]
    pub rtt: Option<u64>,
    /// Largest deviation of a round trip
    #[arg(long, value_name = "TIME", value_parser = values::span_ns)]
    pub jitter: Option<u64>,
    /// Bandwidth in each direction, as in 25Gbit [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = values::bits_per_s)]
    pub bandwidth: Option<u64>,
}

impl Link {
    /// The link's model; `None` without one.
    #[must_use]
    pub fn model(&self) -> Option<LinkModel> {
        let model = LinkModel {
            rtt_ns: self.rtt.unwrap_or(0),
            jitter_ns: self.jitter.unwrap_or(0),
            bits_per_s: self.bandwidth.unwrap_or(0),
        };
        (!model.is_nothing()).then_some(model)
    }
}

/// Measure the floor.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
One thread sends 72 bytes and a payload, another copies the payload into a drive in memory and answers
with 24 bytes: the size of a write on the wire, and nothing else. `rio bench compare` compares the
engines with it.

Each round is run twice: as --wait demands, and with both sides sleeping while they wait. The CPU time per
write comes from the second run.

On a virtual machine, a run during which the host took more than 2 % of the machine's time is discarded and
repeated, up to twice, for at most 40 % more runs in all (or two).

Examples:
  rio bench floor
  rio bench floor --depth 1,32,128 --size 16K -o json
  rio bench floor --depth 32 --rtt 100us --jitter 10us --bandwidth 25Gbit")]
pub struct Floor {
    /// The writes, and the duration.
    #[command(flatten)]
    pub writes: Writes,
    /// Destination of the payload: memory
    #[arg(long, value_name = "DRIVE", default_value = "mem:1G")]
    pub drive: String,
    /// How both sides wait: hybrid, block, or the microseconds to poll before sleeping
    #[arg(long, value_name = "HOW", default_value = "hybrid", value_parser = values::waiting)]
    pub wait: SpinPolicy,
    /// The modelled link.
    #[command(flatten)]
    pub link: Link,
}

/// Measure engines.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Without -m, targets of its own on loopback: by default one, with a drive in memory. With -m and
--volume, an existing volume, whose contents are OVERWRITTEN.

At each depth the engines take turns, in several rounds. Figures are medians; ratios are of engines in
the same round, since a machine's speed varies more than the differences to be shown.

On a virtual machine, a run during which the host took more than 2 % of the machine's time is discarded and
repeated, up to twice, for at most 40 % more runs in all (or two).

Examples:
  rio bench run --engine none,rio,sync --depth 1,32,128 --floor
  rio bench run --drive ssd:flash,size=1G --targets 2 --pattern journal --engine sync,rio,none
  rio bench run --engine none,rio --log block:{},size=2M
  rio bench run --pattern seq --batch 16 --merge off
  rio bench run --engine rio --rw read --pattern seq --size 128K --unit 128K
  rio bench run --engine rio,sync --rw mixed:70
  rio bench run --engine rio --depth 32 --stages           where does the time go?
  rio bench run --engine rio --time 60 --metrics 127.0.0.1:9421     watched by `rio volume stat`
  rio bench run --volume scratch -m 192.0.2.10 -m 192.0.2.11 --threads 4 --overwrite")]
pub struct Run {
    /// Engines: none, sync, linux, horae, barrier, opimq, rio; several separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "none,rio,sync")]
    #[arg(value_parser = engine)]
    pub engine: Vec<EngineKind>,
    /// The writes, and the duration.
    #[command(flatten)]
    pub writes: Writes,
    /// Operations: write, read, or mixed:70, of which 70 of 100 are reads. A thread's reads go in one
    /// call, as many as the depth has space for, and it waits for them
    #[arg(long, value_name = "HOW", default_value = "write", conflicts_with = "floor")]
    pub rw: Access,
    /// Merge adjacent writes into one request
    #[arg(long, value_enum, value_name = "SWITCH", default_value = "on")]
    pub merge: Switch,
    /// Also exchange the same bytes over loopback without Rio: the floor
    #[arg(long, conflicts_with = "volume")]
    pub floor: bool,
    /// Also show the time of the writes in each stage, on both sides; other targets report their
    /// own (`rio target stat`)
    #[arg(long)]
    pub stages: bool,
    /// Loopback address of the volume's metrics over HTTP while it is written to, one run after the
    /// other: /metrics for Prometheus, /stat as JSON, which `rio volume stat` shows. The port is 9421
    /// if none is given; 0 takes a free one, printed on standard error [default: none]
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub metrics: Option<String>,
    /// How both sides wait: hybrid, block, or the microseconds to poll before sleeping
    #[arg(long, value_name = "HOW", default_value = "hybrid", value_parser = values::waiting)]
    pub wait: SpinPolicy,
    /// The modelled link.
    #[command(flatten)]
    pub link: Link,

    /// Drive of each target of its own; `rio target serve --help` lists the kinds
    #[arg(long, value_name = "DRIVE", default_value = "mem:1G", help_heading = "Own targets")]
    pub drive: String,
    /// Number of own targets
    #[arg(long, value_name = "COUNT", default_value_t = 1, help_heading = "Own targets")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub targets: u32,
    /// Stripe unit: bytes on one drive before the next one follows
    #[arg(long, value_name = "SIZE", default_value = "64K", help_heading = "Own targets")]
    #[arg(value_parser = values::block_size)]
    pub unit: u32,
    /// Size of each target's ordering log
    #[arg(long, value_name = "SIZE", default_value = "2M", help_heading = "Own targets")]
    #[arg(value_parser = values::size)]
    pub log_size: u64,
    /// Each target's ordering log, instead of a mapped file of that size; {} stands for a temporary
    /// file's path (in TMPDIR; otherwise in memory), a device must be blank
    #[arg(long, value_name = "LOG", conflicts_with = "log_size", help_heading = "Own targets")]
    pub log: Option<String>,

    /// Name of an existing volume
    #[arg(long, value_name = "NAME", requires = "overwrite")]
    #[arg(help_heading = "Existing volume")]
    #[arg(conflicts_with_all = ["drive", "targets", "unit", "log_size", "log"])]
    #[arg(conflicts_with_all = ["rtt", "jitter", "bandwidth", "wait"])]
    pub volume: Option<String>,
    /// Its drives, in order, as for `rio volume` [default: those that the file of known volumes has]
    #[arg(short = 'm', long = "member", value_name = "DRIVE", requires = "volume")]
    #[arg(id = "members", help_heading = "Existing volume")]
    pub members: Vec<String>,
    /// Confirm that the content of that volume is overwritten
    #[arg(long, requires = "volume", help_heading = "Existing volume")]
    pub overwrite: bool,
    /// The connection's options.
    #[command(flatten)]
    pub connect: Connect,
}
