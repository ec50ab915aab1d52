//! `rio target …`

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use riopipe_media::{DRIVE_HELP, LOG_HELP};
use riopipe_net::HostPort;
use riopipe_target::{SecretSource, TlsMode};

use super::{connect::Transport, values};

/// The operations on targets.
#[derive(Debug, Subcommand)]
pub enum Target {
    /// Serve drives until SIGTERM or Ctrl-C
    #[command(after_help = serve_help())]
    Serve(Serve),
    /// Check a configuration, and show what its media survive; serves nothing
    #[command(after_help = CHECK_HELP)]
    Check(Serve),
    /// Show the identity that is stored with a drive, or let a drive that was moved adopt it
    #[command(after_help = IDENTITY_HELP)]
    Identity(Identity),
    /// Show a target's counters, and the time of its ordered writes in each stage
    #[command(after_help = STAT_HELP)]
    Stat(Stat),
    /// Have a running target read its configuration again: namespaces and hosts come and go
    #[command(after_help = RELOAD_HELP)]
    Reload(Reload),
    /// Show or set how well the ports of a running target reach its namespaces (ANA)
    #[command(after_help = ANA_HELP)]
    Ana(Ana),
    /// End a running target once its hosts have closed their volumes; it takes no new hosts
    #[command(after_help = DRAIN_HELP)]
    Drain(Drain),
}

/// The configuration of a target.
#[derive(Args, Clone, Debug)]
pub struct Serve {
    /// Configuration file: TOML, or nvmetcli's JSON. Options take precedence over it
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Transport
    #[arg(short, long, value_enum, value_name = "NAME", default_value = "tcp")]
    pub transport: Transport,
    /// Address to listen on [default: 127.0.0.1, this machine only]. Without --tls-host there is no encryption, and
    /// without --tls-host or --dhchap-host no authentication: with 0.0.0.0, every machine that can reach it may connect
    #[arg(short = 'a', long, value_name = "ADDR[:PORT]", value_parser = values::address)]
    pub traddr: Option<HostPort>,
    /// Port to listen on, if it is not in the address; 0 takes a free one [default: 4420]
    #[arg(short = 's', long, value_name = "PORT")]
    pub trsvcid: Option<u16>,
    /// Also answer discovery on this port (8009 is the standard's); the other one does in any case
    #[arg(long, value_name = "PORT")]
    pub discovery_port: Option<u16>,
    /// The subsystem's NQN [default: made from the machine's id and the address]
    #[arg(short = 'n', long, value_name = "NQN", value_parser = values::nqn)]
    pub nqn: Option<String>,
    /// A drive to serve, as the next namespace; once for each
    #[arg(long = "drive", value_name = "DRIVE")]
    pub drives: Vec<String>,
    /// Bytes of a logical block of the drives given by --drive, 4096 or 512: 512 is for plain hosts
    /// that need it; such a drive can't be a member of a volume [default: 4096]
    #[arg(long, value_name = "BYTES", requires = "drives")]
    pub lba_size: Option<u32>,
    /// The ordering log; without one, the drives are plain NVMe drives only
    #[arg(long, value_name = "LOG")]
    pub log: Option<String>,
    /// Create files of drives and of the log that have a size= and do not exist. Leave it out after
    /// the first start, as in a unit file: then a missing file is an error, for example because
    /// its file system is not mounted
    #[arg(long)]
    pub create: bool,
    /// Replace a log that is lost or damaged: its state of volumes that were not closed is lost
    #[arg(long)]
    pub accept_lost_log: bool,
    /// Wait at the start for another process that has a drive or the log locked. A killed process
    /// keeps its locks until its last write has landed [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub lock_wait: Option<Duration>,
    /// Host that may connect; once for each [default: any]
    #[arg(long = "allow-host", value_name = "HOSTNQN", value_parser = values::nqn)]
    pub allow_hosts: Vec<String>,
    /// Host that may connect and must authenticate (DH-HMAC-CHAP), and the file with its secret
    /// (`DHHC-1:…`, as `nvme gen-dhchap-key` makes it); once for each. Only its owner may read the file
    #[arg(long = "dhchap-host", value_name = "HOSTNQN=FILE", value_parser = values::host_secret)]
    pub dhchap_hosts: Vec<(String, SecretSource)>,
    /// File with the secret by which the target authenticates to hosts that ask for that
    #[arg(long, value_name = "FILE", value_parser = values::secret_source)]
    pub dhchap_ctrl_secret: Option<SecretSource>,
    /// Host that may connect and must use TLS, and the file with its key (`NVMeTLSkey-1:…`, as `nvme gen-tls-key`
    /// makes it); once for each. Only its owner may read the file
    #[arg(long = "tls-host", value_name = "HOSTNQN=FILE", value_parser = values::host_secret)]
    pub tls_hosts: Vec<(String, SecretSource)>,
    /// Whether hosts must use TLS; with allowed, those without a key need not [default: required, if a host has a key]
    #[arg(long, value_name = "MODE", value_parser = values::tls_mode)]
    pub tls: Option<TlsMode>,
    /// Refuse connections without header digests
    #[arg(long)]
    pub require_hdr_digest: bool,
    /// Refuse connections without data digests
    #[arg(long)]
    pub require_data_digest: bool,
    /// Threads that serve [default: one per core]
    #[arg(long, value_name = "COUNT")]
    pub reactors: Option<usize>,
    /// Cores to pin them to, separated by commas [default: none are pinned]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cores: Vec<usize>,
    /// Microseconds to poll before sleeping; 0 sleeps at once [default: 200]
    #[arg(long, value_name = "COUNT")]
    pub spin_us: Option<u64>,
    /// Loopback address of the target's metrics over HTTP: /metrics for Prometheus, /stat as JSON,
    /// which `rio target stat` shows, and /healthz. The port is 9420 if none is given; 0 takes a free one
    /// [default: none]
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub metrics: Option<String>,
    /// Socket at which `rio target reload` reaches the target; only its user and root may use it
    /// [default: target.sock in the folder of the unit's RuntimeDirectory=, else none]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The path of a running target's control socket.
#[derive(Args, Clone, Debug)]
pub struct Control {
    /// The socket that was given to `rio target serve --control`
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL)]
    pub control: PathBuf,
}

/// The control socket of the target that the unit of this project starts.
pub const DEFAULT_CONTROL: &str = "/run/rio/target.sock";

/// The target to reload, and how.
#[derive(Args, Clone, Debug)]
pub struct Reload {
    /// The target.
    #[command(flatten)]
    pub control: Control,
    /// Only show what would change, and whether that is possible
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Remove namespaces also from volumes that are open, reserved or unrecovered, and addresses through
    /// which owners are connected. The owners lose their connections, and the volumes can't be opened
    /// until the drives are back
    #[arg(long)]
    pub force: bool,
}

/// The drive, and what to do with its identity.
#[derive(Args, Clone, Debug)]
pub struct Identity {
    /// The drive, as `rio target serve --drive` takes it; no target may serve it now
    #[arg(value_name = "DRIVE")]
    pub drive: String,
    /// Make the identity that it carries its own: that of its label, else the stored one. The drive
    /// from which it was moved or copied must be gone for good
    #[arg(long)]
    pub adopt: bool,
}

/// The target to ask, and the interval.
#[derive(Args, Clone, Debug)]
pub struct Stat {
    /// The address given to `rio target serve --metrics`; its port is 9420 if none is given
    #[arg(value_name = "ADDR[:PORT]")]
    pub addr: String,
    /// Repeat, and show every so many seconds the difference since the last time
    #[arg(short, long, value_name = "SECONDS", value_parser = values::seconds)]
    pub watch: Option<Duration>,
}

/// The target whose ANA states are shown, or one of them set.
#[derive(Args, Clone, Debug)]
pub struct Ana {
    /// The target.
    #[command(flatten)]
    pub control: Control,
    /// Port: the place of its address in `listen`, counted from 1
    #[arg(long, value_name = "NUMBER", requires = "state")]
    pub port: Option<u16>,
    /// Its new state: optimized, non-optimized, inaccessible, persistent-loss or change
    #[arg(long, value_name = "STATE", requires = "port")]
    pub state: Option<String>,
    /// Only for this ANA group [default: all]
    #[arg(long, value_name = "NUMBER", requires = "port")]
    pub group: Option<u32>,
}

/// The target to drain, and for how long.
#[derive(Args, Clone, Debug)]
pub struct Drain {
    /// The target.
    #[command(flatten)]
    pub control: Control,
    /// Longest wait for volumes to be closed. Then the target ends even so
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds, default_value = "60")]
    pub limit: Duration,
}

fn serve_help() -> String {
    format!(
        "\
Drives and logs are written as kind:what[,option=value…].

{}

{}

A configuration file has the same in TOML:
  listen = [\"0.0.0.0:4420\"]
  log = \"file:/srv/d0.log,size=2M\"
  [[namespaces]]
  drive = \"block:/dev/nvme0n1\"

Examples:
  rio target serve --drive mem:1G
  rio target serve -a 0.0.0.0 --drive block:/dev/nvme0n1 --log file:/srv/d0.log,size=2M --create
  rio target serve --drive block:/dev/nvme0n1 --log block:/dev/nvme1n1     a small PLP drive
  rio target serve --drive block:/dev/nvme0n1 --log pci:0000:41:00.0     a drive's memory (PMR)
  rio target serve --drive ssd:flash,size=4G --log mem:2M     a modelled drive
  rio target serve --drive mem:1G --log mem:2M --metrics 127.0.0.1:9420
  rio target serve -c /etc/rio/target.toml -v
The Linux kernel connects with: nvme connect -t tcp -a ADDR -s 4420 -n NQN",
        capital(DRIVE_HELP),
        capital(LOG_HELP)
    )
}

const CHECK_HELP: &str = "\
Takes the options of `rio target serve`. Nothing is created; existing drives and logs are opened,
inspected and not changed.

Examples:
  rio target check -c /etc/rio/target.toml
  rio target check --drive file:/srv/d0,size=8G --log file:/srv/d0.log,size=2M --create";

const IDENTITY_HELP: &str = "\
A drive has an identity of its own (NGUID and UUID). It stays the same whatever address, port,
position, NQN or machine the drive is served from. A volume knows its members by it.

  file:, ssd:,file=   stored in the file's attribute user.rio.id; moving the file keeps it
  block:              the device's WWID or serial number; a partition: with its start
  mem:, ssd:          made from NQN and namespace id, as for media that can store nothing

A copy does not get the identity of its original. A file that was moved to another file system, or
a device whose blocks were moved to another one, can't be told from a copy: it is served with an
identity of its own until it adopts the one that it carries.

Examples:
  rio target identity file:/srv/d0
  rio target identity file:/mnt/new/d0 --adopt      moved there, and the original is gone";

const STAT_HELP: &str = "\
Asks a target that was started with `--metrics`. Of the ordered writes of a busy stream one in 256
is traced, which costs well under 1 %; of the first writes of a stream, and of a stream with few
writes in a second, more are. A traced write is in exactly one stage at any moment:

  gate        held back by a gap before it, overlapping blocks, a FLUSH, or because its data is
              still on the way
  log append  its attribute is written to the ordering log, and fenced with those of its batch
  device      at the drive, with the FLUSH that belongs to it
  persist     marked as persistent in the log, and fenced
  completion  answered, and the answer passed to the socket

A slow log shows in log append and persist, a slow drive in device, dependent writes in gate.
Percentiles are exact to 3 %.

Examples:
  rio target stat 127.0.0.1:9420                 since the start
  rio target stat 127.0.0.1:9420 --watch 5       and then for every 5 seconds
  rio target stat 127.0.0.1:9420 -o json         with all buckets
Prometheus reads the same from http://127.0.0.1:9420/metrics.";

const RELOAD_HELP: &str = "\
The target reads its configuration file again, with the options that it was started with. What has
changed is done while it serves: namespaces come and go, and so do hosts that may connect, and addresses.
Hosts see a namespace come or go at once (Namespace Attribute Changed). A host that may not connect any
more loses its connections, and so do those at an address that goes.

Everything is done, or nothing is. Nothing is done if
  - the configuration is wrong, a drive that comes can't be opened, or an address can't be listened on,
  - anything else has changed, such as the log: only a restart does that,
  - a namespace that goes is a member of a volume that is open, reserved for its owner, or not
    recovered (--force does it even so),
  - the owner of an open volume is connected through an address that goes (--force does it even so).

SIGHUP does the same. Its result is in the target's log.

Examples:
  rio target reload --dry-run
  rio target reload
  rio target reload --control /run/rio/second.sock -o json";

const ANA_HELP: &str = "\
A host with paths through several ports uses an optimized one, and a non-optimized one if no other is
left. A port in another state refuses every I/O command, and the host sends it through another port.
Admin commands go on. The hosts are informed.

The state stays until the target ends, or `rio target reload` sets those of the configuration.

Examples:
  rio target ana                                     what is not optimized
  rio target ana --port 2 --state inaccessible       before work at the network of port 2
  rio target ana --port 2 --state optimized
  rio target ana --port 1 --group 2 --state non-optimized";

const DRAIN_HELP: &str = "\
From now on the target takes no new hosts: their Connect gets the status Controller Busy. Hosts that
are connected go on. They are told as of a normal shutdown of the NVM subsystem: CSTS.SHST, and the
event, if they have enabled it. A host that has a volume open may connect again to close it.

When no volume is open, the target ends in order: commands in flight finish, drives are flushed, and
the log is written back. Plain hosts (the kernel's) then lose their connections, and connect again
when the target is back. The command returns when the target has ended:

  0   all volumes were closed
  4   volumes were still open when the time was over; the message names them. Their owners notice a
      target that is away, and go on when it is back within their loss timeout

The target ends with the same code. Its unit does not start it again then. Ctrl-C ends this command
only, not the draining.

Examples:
  rio target drain
  rio target drain --limit 600";

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
