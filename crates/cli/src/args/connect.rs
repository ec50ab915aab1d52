//! The options of a connection, with nvme-cli's letters.

use std::time::Duration;

use clap::{Args, ValueEnum};
use riopipe_net::HostPort;
use riopipe_target::SecretSource;

use super::values;

/// The supported transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// NVMe over TCP
    Tcp,
}

/// The use of data digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Digest {
    /// Except over loopback
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

/// The identity of this host, and the options of its connections.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Connection")]
pub struct Connect {
    /// Transport
    #[arg(short, long, value_enum, value_name = "NAME", default_value = "tcp")]
    pub transport: Transport,
    /// NVMe qualified name of this host [default: /etc/nvme/hostnqn, or one made from the machine's
    /// id]
    #[arg(short = 'q', long, value_name = "NQN", value_parser = values::nqn)]
    pub hostnqn: Option<String>,
    /// Host id of this host, a UUID [default: /etc/nvme/hostid, or one made from the machine's id]
    #[arg(short = 'I', long, value_name = "UUID", value_parser = values::host_id)]
    pub hostid: Option<[u8; 16]>,
    /// File with the secret of this host (`DHHC-1:…`), for targets that demand authentication. Only its owner
    /// may read it
    #[arg(long, value_name = "FILE", value_parser = values::secret_source, env = "RIO_DHCHAP_SECRET")]
    #[arg(hide_env_values = true)]
    pub dhchap_secret: Option<SecretSource>,
    /// File with the secret of the targets: each must prove its own identity, too
    #[arg(long, value_name = "FILE", value_parser = values::secret_source, env = "RIO_DHCHAP_CTRL_SECRET")]
    #[arg(hide_env_values = true, requires = "dhchap_secret")]
    pub dhchap_ctrl_secret: Option<SecretSource>,
    /// File with the key of TLS that this host shares with the targets (`NVMeTLSkey-1:…`): every connection is one with
    /// TLS 1.3. Only its owner may read it
    #[arg(long, value_name = "FILE", value_parser = values::secret_source, env = "RIO_TLS_PSK")]
    #[arg(hide_env_values = true)]
    pub tls_psk: Option<SecretSource>,
    /// Protect headers by a CRC32C
    #[arg(short = 'g', long)]
    pub hdr_digest: bool,
    /// Protect data by a CRC32C; auto: except over loopback
    #[arg(short = 'G', long, value_enum, value_name = "WHEN", default_value = "auto")]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "on")]
    pub data_digest: Digest,
    /// Seconds to wait for a connection and its set-up
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = values::seconds)]
    pub timeout: Duration,
    /// Seconds within which a target must answer a read, write or FLUSH
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = values::seconds)]
    pub io_timeout: Duration,
    /// Seconds for which a target may be unreachable before writes to it fail, from its last sign of
    /// life on; when it is back, unconfirmed writes are sent again. 0 fails at once. A silence counts
    /// from 3 s on
    #[arg(long, value_name = "SECONDS", default_value = "30")]
    #[arg(value_parser = values::seconds_or_none)]
    pub loss_timeout: Duration,
}

/// Ask a target for its subsystems.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rio discover -a 192.0.2.10
  rio discover -a 192.0.2.10:4421
  rio discover -a ::1 -s 4421 -o json")]
pub struct Discover {
    /// The target's address: a name, an IPv4 or an IPv6 address
    #[arg(short = 'a', long, value_name = "ADDR[:PORT]", value_parser = values::address)]
    pub traddr: HostPort,
    /// Its port, if it is not in the address [default: 8009, the standard's for discovery; if it is closed, 4420, where a rio
    /// target answers, too]
    #[arg(short = 's', long, value_name = "PORT")]
    pub trsvcid: Option<u16>,
    /// The connection's options.
    #[command(flatten)]
    pub connect: Connect,
}
