//! Serving a device to NVMe/TCP hosts.

use std::net::SocketAddr;
use std::sync::Arc;

use riopipe::VolumeInfo;
use riopipe_media::Drive;
use riopipe_target::{
    Config, DhchapOptions, NamespaceOptions, Running, StartError, StatSource, StopError, Target,
};

use crate::device::Device;

/// How a device is served to NVMe/TCP hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeOptions {
    /// The address to listen on, with a port or without.
    pub listen: String,
    /// The subsystem's NQN; `None`: it is made from the volume's id, so that it stays the same.
    pub subnqn: Option<String>,
    /// The hosts that may connect; `None`: all.
    pub hosts: Option<Vec<String>>,
    /// The secrets of hosts that must authenticate, and that of the target.
    pub dhchap: DhchapOptions,
    /// The threads that serve; `None`: half as many as there are cores, at most 4.
    pub reactors: Option<usize>,
}

/// A target in this process that serves a device as its namespace 1.
pub struct NvmeTarget {
    running: Running,
}

impl NvmeTarget {
    /// Starts to serve the device. The namespace has the volume's id as its UUID and NGUID, so a host
    /// that comes back after a restart finds the same namespace.
    ///
    /// # Errors
    /// [`StartError`]
    pub fn start(device: &Device, options: &NvmeOptions) -> Result<Self, StartError> {
        let VolumeInfo { id, name, .. } = device.info();
        let id = id.to_string();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let config = Config {
            listen: vec![options.listen.clone()],
            subnqn: Some(match &options.subnqn {
                Some(subnqn) => subnqn.clone(),
                None => format!("nqn.2014-08.org.nvmexpress:uuid:{id}"),
            }),
            model: "Rio volume".to_owned(),
            namespaces: vec![NamespaceOptions {
                drive: format!("volume {name:?}"),
                nsid: Some(1),
                nguid: Some(id.replace('-', "")),
                uuid: Some(id),
                ..NamespaceOptions::default()
            }],
            hosts: options.hosts.clone(),
            dhchap: options.dhchap.clone(),
            reactors: Some(options.reactors.unwrap_or((cores / 2).clamp(1, 4))),
            ..Config::default()
        };
        let drive: Arc<dyn Drive> = device.drive();
        Ok(Self { running: Target::start_on(&config, &[drive])? })
    }

    /// The address, with the real port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.running.addresses()[0]
    }

    /// The subsystem's NQN.
    #[must_use]
    pub fn subnqn(&self) -> &str {
        self.running.subnqn()
    }

    /// The numbers of the subsystem: its connections, and its operations on the device.
    #[must_use]
    pub fn stat_source(&self) -> Arc<dyn StatSource> {
        self.running.stat_source()
    }

    /// Whether all its threads still run.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.running.is_alive()
    }

    /// Stops in order: commands in flight finish, connections end, and the device is flushed.
    ///
    /// # Errors
    /// [`StopError`]. The target has stopped even so.
    pub fn stop(self) -> Result<(), StopError> {
        self.running.stop()
    }
}
