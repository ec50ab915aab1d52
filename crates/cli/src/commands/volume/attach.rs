//! `rio volume attach`

use std::net::SocketAddr;

use riopipe::Volume;
use riopipe_attach::{
    Acknowledged, Device, DeviceError, DeviceOptions, NbdServer, NvmeOptions, NvmeTarget, StopError,
};
use riopipe_lab::terminal::{Colour, Terminal};
use riopipe_metrics::TARGET_PORT;
use riopipe_platform::raise_descriptors_max;
use riopipe_target::DhchapOptions;
use serde::Serialize;

use super::super::target::in_a_file;
use super::{note_recovery, open_options};
use crate::{
    args::attach::{Attach, DEFAULT_PORT},
    connect::{members_and_options, open_failure, stream_failure},
    failure::{Code, Failure, start_failure},
    interrupt::Stop,
    metrics_server::{MetricsAddress, MetricsError, MetricsServer},
    output::{Output, Report},
};

pub(super) fn run(args: &Attach, output: &Output) -> Result<(), Failure> {
    check_options(args)?;
    // Before the volume: a path that is a secret is refused at once.
    secrets(args)?;
    raise_descriptors_max();
    // The wait for another owner may be long, and there is nothing to close before its end: a signal ends
    // it at once.
    let early = args.open.wait.is_zero().then(Stop::watch).transpose()?;
    let device = open(args, output)?;
    let signals = early.map_or_else(Stop::watch, Ok)?;
    let served = serve(args, &device, signals, output);
    // The first failure is the cause; that of closing is its consequence.
    let closed = device.close().map_err(|error| {
        Failure::new(Code::Storage, format!("volume {:?}", args.open.name)).because(&error)
    });
    served?;
    closed?;
    output.note("rio: all writes are durable, and the volume is closed");
    Ok(())
}

/// Opens the volume, and makes a device of it.
fn open(args: &Attach, output: &Output) -> Result<Device, Failure> {
    let (addresses, connect) = members_and_options(Some(&args.open.name), &args.open.members)?;
    let options = open_options(&args.open, connect);
    let (volume, recovery) = Volume::open(&args.open.name, &addresses, &options)
        .map_err(|error| open_failure(&error))?;
    note_recovery(&volume, &recovery, output);
    let options = DeviceOptions {
        streams: args.streams,
        readers: args.readers.into(),
        timeout: args.open.members.connect.io_timeout,
    };
    let device = Device::open(volume, &options).map_err(|error| device_failure(&error))?;
    for Acknowledged { stream, blocks } in device.acknowledged() {
        output.note(format!(
            "note: stream {stream}: {blocks} blocks were being overwritten when the volume was not \
             closed. They were not flushed, so they may have the old content or the new; their list is \
             acknowledged"
        ));
    }
    Ok(device)
}

/// The servers of a device.
struct Servers {
    nvme: Option<NvmeTarget>,
    nbd: Option<NbdServer>,
    metrics: Option<MetricsServer>,
}

/// The address of NVMe/TCP hosts, if the device is served to them.
fn nvme_address(args: &Attach) -> Option<String> {
    match (&args.listen, &args.nbd) {
        (Some(listen), _) => Some(listen.with_port(DEFAULT_PORT)),
        (None, Some(_)) => None,
        (None, None) => Some(format!("127.0.0.1:{DEFAULT_PORT}")),
    }
}

/// The options that concern NVMe/TCP hosts alone.
fn check_options(args: &Attach) -> Result<(), Failure> {
    if nvme_address(args).is_some() {
        return Ok(());
    }
    let has_secrets = !args.dhchap_hosts.is_empty() || args.export_ctrl_secret.is_some();
    let option = match (&args.metrics, has_secrets, args.allow_hosts.is_empty()) {
        (Some(_), _, _) => "--metrics",
        (None, true, _) => "--dhchap-host and --export-ctrl-secret",
        (None, false, false) => "--allow-host",
        (None, false, true) => return Ok(()),
    };
    let message = format!("{option}: only for NVMe/TCP hosts, and there is only --nbd");
    Err(Failure::new(Code::Usage, message).hint("add --listen, or leave the option out"))
}

/// The secrets of the options.
fn secrets(args: &Attach) -> Result<DhchapOptions, Failure> {
    let mut dhchap = DhchapOptions::default();
    for (host, source) in &args.dhchap_hosts {
        dhchap.hosts.insert(host.clone(), in_a_file(source)?);
    }
    dhchap.controller = args.export_ctrl_secret.as_ref().map(in_a_file).transpose()?;
    Ok(dhchap)
}

impl Servers {
    fn start(args: &Attach, device: &Device) -> Result<Self, Failure> {
        let take = |address: &String| MetricsAddress::take(address, TARGET_PORT);
        let metrics = args.metrics.as_ref().map(take).transpose();
        let metrics = metrics.map_err(MetricsError::into_failure)?;
        let dhchap = secrets(args)?;
        let start = |listen| {
            let options = NvmeOptions {
                listen,
                subnqn: args.nqn.clone(),
                hosts: (!args.allow_hosts.is_empty()).then(|| args.allow_hosts.clone()),
                dhchap,
                reactors: None,
            };
            NvmeTarget::start(device, &options).map_err(|error| start_failure(&error))
        };
        let nvme = nvme_address(args).map(start).transpose()?;
        let start = |address| {
            NbdServer::start(device, address)
                .map_err(|error| Failure::new(Code::Media, error.to_string()))
        };
        let nbd = args.nbd.as_ref().map(start).transpose()?;
        let metrics = match (metrics, &nvme) {
            (Some(address), Some(nvme)) => Some(address.serve(nvme.stat_source())),
            _ => None,
        };
        let metrics = metrics.transpose().map_err(MetricsError::into_failure)?;
        Ok(Self { nvme, nbd, metrics })
    }

    fn are_alive(&self) -> bool {
        self.nvme.as_ref().is_none_or(NvmeTarget::is_alive)
    }

    /// Stops both. Requests in flight are answered first.
    fn stop(self) -> Result<(), Failure> {
        if let Some(nbd) = self.nbd {
            nbd.stop();
        }
        match self.nvme {
            Some(nvme) => nvme.stop().map_err(|error| stop_failure(&error)),
            None => Ok(()),
        }
    }
}

/// Serves the device until a signal comes.
fn serve(
    args: &Attach,
    device: &Device,
    mut signals: Stop,
    output: &Output,
) -> Result<(), Failure> {
    let servers = Servers::start(args, device)?;
    let info = device.info();
    let printed = output.result(&Attached {
        schema: "rio-volume-attach/1",
        volume: info.name.clone(),
        bytes: info.blocks * riopipe::BLOCK_BYTES as u64,
        nvme: servers.nvme.as_ref().map(NvmeView::of),
        nbd: servers.nbd.as_ref().map(|nbd| nbd.address().uri(&info.name)),
        metrics: servers.metrics.as_ref().map(MetricsServer::address),
    });
    let ended = match printed {
        // The caller may not read the address; hosts still use it.
        Err(failure) if failure.code != Code::Unread => Err(failure),
        _ => wait(device, &servers, &mut signals, output),
    };
    let stopped = servers.stop();
    ended.and(stopped)
}

/// Waits for a signal. A device that fails meanwhile is reported, and goes on to answer.
fn wait(
    device: &Device,
    servers: &Servers,
    signals: &mut Stop,
    output: &Output,
) -> Result<(), Failure> {
    let mut is_reported = false;
    loop {
        // A failure ends the wait once.
        let received = signals
            .wait_while(|| servers.are_alive() && (is_reported || device.failure().is_none()));
        if !is_reported && let Some(why) = device.failure() {
            is_reported = true;
            output.note(format!(
                "rio: the device has failed: {why}. Every write and flush now gets an error, and so \
                 do reads of blocks whose newest content may be lost. When the cause is gone, end this \
                 program (Ctrl-C), attach the volume again, and check what is on it"
            ));
        }
        if let Some(signal) = received {
            output.note(format!(
                "rio: {signal}: commands in flight end, and rio waits until all writes are durable, and \
                 closes the volume. A second signal (Ctrl-C) ends the program at once; what was flushed \
                 is kept, and the volume must then be recovered"
            ));
            return Ok(());
        }
        if !servers.are_alive() {
            return Err(Failure::new(Code::Failed, "a reactor has ended; the log has the reason"));
        }
    }
}

fn device_failure(error: &DeviceError) -> Failure {
    match error {
        DeviceError::Stream { source, .. } => stream_failure(source),
        DeviceError::Acknowledge { .. } => Failure::storage(error),
        DeviceError::Thread(_) => Failure::new(Code::Failed, error.to_string()),
        _ => Failure::new(Code::Volume, error.to_string()),
    }
}

fn stop_failure(error: &StopError) -> Failure {
    let message = "not all writes are known to be durable: those that were not flushed may be lost";
    Failure::new(Code::Storage, message).because(error)
}

/// The command by which a Linux host connects.
fn connect_command(address: SocketAddr, subnqn: &str) -> String {
    let host = match address.ip() {
        ip if ip.is_unspecified() => "ADDRESS".to_owned(),
        ip => ip.to_string(),
    };
    format!("nvme connect -t tcp -a {host} -s {} -n {subnqn}", address.port())
}

/// A volume that is served.
#[derive(Debug, Serialize)]
struct Attached {
    schema: &'static str,
    volume: String,
    bytes: u64,
    /// For NVMe/TCP hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    nvme: Option<NvmeView>,
    /// The URI for NBD clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    nbd: Option<String>,
    /// With `--metrics` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<SocketAddr>,
}

#[derive(Debug, Serialize)]
struct NvmeView {
    address: SocketAddr,
    subnqn: String,
    nsid: u32,
    /// The command by which a Linux host connects.
    connect: String,
}

impl NvmeView {
    fn of(target: &NvmeTarget) -> Self {
        Self {
            address: target.address(),
            subnqn: target.subnqn().to_owned(),
            nsid: 1,
            connect: connect_command(target.address(), target.subnqn()),
        }
    }
}

impl Report for Attached {
    fn text(&self, terminal: &Terminal) -> String {
        let mut text =
            format!("volume {} is a block device of {} MiB\n", self.volume, self.bytes >> 20);
        if let Some(nvme) = &self.nvme {
            let connect = terminal.paint(Colour::Bold, &nvme.connect);
            text += &format!("NVMe/TCP at {}: as root,\n  {connect}\n", nvme.address);
        }
        if let Some(uri) = &self.nbd {
            text += &format!("NBD: {}\n", terminal.paint(Colour::Bold, uri));
        }
        if let Some(address) = self.metrics {
            text += &format!(
                "metrics at http://{address}/metrics; `rio target stat {address}` shows them\n"
            );
        }
        text + "READY\n"
    }
}
