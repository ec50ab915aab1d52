//! `rio volume attach`

use clap::Args;
use riopipe_attach::NbdAddress;
use riopipe_net::HostPort;
use riopipe_target::SecretSource;

use super::{values, volume::Open};

/// The volume to attach, and the hosts to serve.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Opens the volume, recovers it if it was not closed, and serves it as the only namespace of a target in
this process, or over NBD, or both. When it prints READY, connect to it with the printed command; then
make a file system on it, and mount that. Before Ctrl-C or SIGTERM, unmount and disconnect.

What a host may count on:
  a flush, or a write with FUA, that was confirmed: the data survives any crash that the drives and
    logs of the volume survive (`rio target check` shows that of a target)
  a write that was only completed: it may be lost in such a crash, as on any drive with a cache
  a target that crashes and comes back: the host waits; if it stays away for --loss-timeout, the device
    fails: every later write and flush gets an error, and reads go on
  a crash of this process: the volume keeps its lease for --loss-timeout and 15 s more. Attach it again
    with --wait 60, or at once with --take-over. It is then recovered, and the host connects again

Exit codes: 0 after a signal, if all is durable; 6 if the device has failed, or not all is durable.

Examples:
  rio volume attach journal
  rio volume attach journal -m 192.0.2.10 -m 192.0.2.11 --wait 60
  rio volume attach journal --listen 192.0.2.1:4421 --allow-host nqn.2026-11.com.example:host0
  rio volume attach journal --nbd unix:/run/journal.nbd
  nvme connect -t tcp -a 127.0.0.1 -s 4421 -n NQN        as root, with the NQN that is printed
  mkfs.ext4 /dev/nvme0n1 && mount /dev/nvme0n1 /mnt")]
pub struct Attach {
    /// The volume.
    #[command(flatten)]
    pub open: Open,
    /// Address to listen on for NVMe/TCP hosts, and port; port 0 takes a free one. On another address than
    /// a loopback one, every machine that can reach it may connect, unless --allow-host or --dhchap-host names
    /// the hosts
    /// [default: 127.0.0.1:4421, without --nbd]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = values::address)]
    pub listen: Option<HostPort>,
    /// Address to listen on for NBD clients, or `unix:PATH`; the port is 10809 if none is given. NBD has
    /// no access rights: every machine that can reach the address, or user that can reach the socket, may
    /// connect
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = nbd_address)]
    pub nbd: Option<NbdAddress>,
    /// NQN of the subsystem that has the volume [default: made from the volume's id, so it stays the
    /// same]
    #[arg(long, value_name = "NQN", value_parser = values::nqn)]
    pub nqn: Option<String>,
    /// Host that may connect; once for each [default: any]
    #[arg(long = "allow-host", value_name = "HOSTNQN", value_parser = values::nqn)]
    pub allow_hosts: Vec<String>,
    /// Host that may connect and must authenticate (DH-HMAC-CHAP), and the file with its secret
    /// (`DHHC-1:…`, as `nvme gen-dhchap-key` makes it); once for each. Only its owner may read the file
    #[arg(long = "dhchap-host", value_name = "HOSTNQN=FILE", value_parser = values::host_secret)]
    pub dhchap_hosts: Vec<(String, SecretSource)>,
    /// File with the secret by which this program authenticates to hosts that ask for that. (--dhchap-secret and
    /// --dhchap-ctrl-secret are for the targets of the volume)
    #[arg(long, value_name = "FILE", value_parser = values::secret_source)]
    pub export_ctrl_secret: Option<SecretSource>,
    /// Loopback address of the metrics of the NVMe/TCP side over HTTP: /metrics for Prometheus, /stat as
    /// JSON, which `rio target stat` shows, and /healthz. The port is 9420 if none is given; 0 takes a free
    /// one [default: none]
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub metrics: Option<String>,
    /// Streams to use; each has a thread, and a connection to every target [default: all of the volume,
    /// at most 8]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub streams: Option<u16>,
    /// Reads at the same time; each has a thread, and a connection to every target
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub readers: u8,
}

/// The port of `--listen`, if it has none.
pub const DEFAULT_PORT: u16 = 4421;

/// The address of `--nbd`.
fn nbd_address(text: &str) -> Result<NbdAddress, String> {
    match text.strip_prefix("unix:") {
        Some("") => Err("no path: write unix:/path/to/socket".to_owned()),
        Some(path) => Ok(NbdAddress::Unix(path.into())),
        None => values::address(text).map(|address| NbdAddress::tcp(&address.host, address.port)),
    }
}
