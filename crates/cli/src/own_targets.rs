//! Targets in this process, on loopback, with an ordered volume over them: for the demo and for
//! measuring. Nothing is left behind.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use riopipe::{ConnectOptions, CreateOptions, EngineKind, MemberAddr, Volume};
use riopipe_target::{Config, Running, Target};
use tempfile::TempDir;

use crate::{
    commands::start_failure,
    connect::create_failure,
    failure::{Code, Failure},
};

/// What to start.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// The volume's name.
    pub volume: &'a str,
    /// Targets, each with one drive and one ordering log.
    pub targets: u32,
    /// The drive of each.
    pub drive: String,
    /// The size of each ordering log, bytes.
    pub log_bytes: u64,
    /// The volume's stripe unit, bytes.
    pub unit_bytes: u32,
    /// The volume's streams.
    pub streams: u32,
    /// Whether targets and writers get cores of their own.
    pub pin: bool,
    /// How the volume is reached.
    pub connect: ConnectOptions,
}

/// Running targets and their volume.
pub struct OwnTargets {
    // Stopped before their logs' folder goes: fields are dropped in this order.
    targets: Vec<Running>,
    _logs: TempDir,
    volume: String,
    members: Vec<MemberAddr>,
    server_cores: Vec<usize>,
    writer_cores: Vec<usize>,
}

impl OwnTargets {
    /// Starts them, and makes the volume.
    ///
    /// # Errors
    /// If a target doesn't start or the volume can't be made of their drives.
    pub fn start(plan: &Plan<'_>) -> Result<Self, Failure> {
        let logs =
            tempfile::Builder::new().prefix("rio-").tempdir_in(folder()).map_err(|error| {
                Failure::new(Code::Failed, "can't make a folder for the ordering logs")
                    .because(&error)
            })?;
        let (server_cores, writer_cores) = if plan.pin { cores() } else { Default::default() };
        let mut targets = Vec::new();
        let mut members = Vec::new();
        for number in 0..plan.targets {
            let target = Target::start(&config(plan, number, logs.path(), &server_cores))
                .map_err(|error| start_failure(&error))?;
            // One address was given, so there is one.
            let address = target.addresses()[0];
            members.push(MemberAddr {
                host: address.ip().to_string(),
                port: address.port(),
                nqn: Some(target.subnqn().to_owned()),
                nsid: 1,
            });
            targets.push(target);
        }
        let options = CreateOptions {
            unit_blocks: plan.unit_bytes / riopipe::BLOCK_BYTES as u32,
            streams: u16::try_from(plan.streams).unwrap_or(u16::MAX),
            engine: Some(EngineKind::Rio),
            connect: plan.connect.clone(),
            ..CreateOptions::default()
        };
        Volume::create(plan.volume, &members, &options)
            .map_err(|error| create_failure(plan.volume, &error))?;
        let volume = plan.volume.to_owned();
        Ok(Self { targets, _logs: logs, volume, members, server_cores, writer_cores })
    }

    /// The volume's name.
    #[must_use]
    pub fn volume(&self) -> &str {
        &self.volume
    }

    /// Its drives, in order.
    #[must_use]
    pub fn members(&self) -> &[MemberAddr] {
        &self.members
    }

    /// The targets.
    #[must_use]
    pub fn targets(&self) -> &[Running] {
        &self.targets
    }

    /// Cores of the targets; empty if they may run anywhere.
    #[must_use]
    pub fn server_cores(&self) -> &[usize] {
        &self.server_cores
    }

    /// Cores that are left to writers; empty if they may run anywhere.
    #[must_use]
    pub fn writer_cores(&self) -> &[usize] {
        &self.writer_cores
    }

    /// CPU time that the targets' threads have used, ns, where the kernel tells.
    #[must_use]
    pub fn cpu_ns(&self) -> Option<u64> {
        let mut sum = None;
        for task in fs::read_dir("/proc/self/task").ok()?.flatten() {
            let read = |name| fs::read_to_string(task.path().join(name)).ok();
            if read("comm").is_some_and(|name| name.starts_with("reactor-")) {
                let on_cpu = read("schedstat")?.split(' ').next()?.parse::<u64>().ok()?;
                sum = Some(sum.unwrap_or(0) + on_cpu);
            }
        }
        sum
    }
}

fn config(plan: &Plan<'_>, number: u32, logs: &Path, cores: &[usize]) -> Config {
    let (number, targets) = (number as usize, plan.targets as usize);
    let log = logs.join(format!("log-{number}"));
    let mut config = Config::on_loopback(&[&plan.drive]);
    // Targets on one machine would otherwise make the same names of the same things.
    config.subnqn = Some(format!(
        "nqn.2014-08.org.nvmexpress:rio:{}:{}:{number}",
        plan.volume,
        std::process::id()
    ));
    config.log = Some(format!("file:{},size={}", log.display(), plan.log_bytes));
    if cores.is_empty() {
        config.reactors = Some(1);
    } else {
        let each = (cores.len() / targets).max(1);
        config.cores = (0..each).map(|i| cores[(number * each + i) % cores.len()]).collect();
    }
    config
}

/// The first half of the cores for targets, the second for writers; with one core, no pinning.
fn cores() -> (Vec<usize>, Vec<usize>) {
    let all = riopipe_net::allowed_cores();
    match all.len() {
        0 | 1 => Default::default(),
        n => (all[..n / 2].to_vec(), all[n / 2..].to_vec()),
    }
}

/// Where the logs are: in memory where that is easily had, since writing back a mapped file of a
/// disk now and then holds up who writes to it.
fn folder() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let is_ours = |path: &Path| tempfile::tempfile_in(path).is_ok();
    match env::var_os("TMPDIR") {
        None if is_ours(&memory) => memory,
        _ => env::temp_dir(),
    }
}
