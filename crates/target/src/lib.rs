//! The NVMe-oF target: listeners, reactors, namespaces on drives, the ordering log, access control.
//!
//! Any NVMe/TCP host can use it as plain drives; a Rio initiator gets ordered writes from it.
//! `riopipe_session::target` implements the protocol of a connection. This crate gives it sockets,
//! drives, a clock and threads: one reactor per core, each with its own connections and its own
//! queue to every drive.
//!
//! ```no_run
//! use riopipe_target::{Config, Target};
//! let target = Target::start(&Config::on_loopback(&["mem:64M"]))?;
//! println!("{} at {:?}", target.subnqn(), target.addresses());
//! target.stop()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
mod check;
mod checked_config;
mod config;
mod control;
mod counters;
mod devices;
mod difference;
mod drive_counters;
mod drive_identity;
mod exponents;
mod exposition;
mod heartbeat;
mod hosts;
mod identity;
mod lba_size;
mod load;
mod log;
mod log_fill;
mod mail;
mod nvmetcli;
mod ports;
mod queue_requests;
mod reactor;
mod removed_drive;
mod same_media;
mod secrets;
mod shared;
mod stat;
mod sweep;
mod sync;
mod target;
mod tcp;
mod tls;

pub use check::{Problem, ProblemKind, Promise, Report, check};
pub use config::{
    AnaOptions, Config, DEFAULT_LISTEN, DEFAULT_LOCK_WAIT_MS, DEFAULT_PORT, DEFAULT_SPIN_US,
    NamespaceOptions,
};
pub use difference::{Difference, ServedDrive};
pub use drive_identity::{IdentityError, ShownIdentity, drive_identity};
pub use lba_size::LbaSizeError;
pub use load::LoadError;
pub use log::LogOpenError;
pub use log_fill::{LogStat, LogVolumeStat};
pub use nvmetcli::JsonError;
pub use ports::{PortAddress, PortsError};
pub use riopipe_metrics::{StageStat, StatSource, with_shares};
pub use riopipe_nvme::ana::AnaState;
pub use riopipe_session::drive_identity::Origin;
pub use riopipe_session::target::limits::{LOG_SLOTS_MAX, STREAM_SLOTS_MAX};
pub use riopipe_session::target::{ANA_GROUP_MAX, PortState};
pub use riopipe_session::target::{OpenVolume, PortInUse, VolumeInUse, VolumeUse};
pub use secrets::{DhchapOptions, SecretSource};
pub use stat::{LABELS_MAX, OTHER, PartStat, Stat};
pub use target::{
    AnaError, ReloadError, ReloadOptions, Reloaded, Running, StartError, StopError, Target,
};
pub use tls::{TlsMode, TlsOptions};
