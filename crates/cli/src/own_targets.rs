//! Targets in this process, on loopback, with an ordered volume on them: for the demo and for
//! measurements. They leave nothing behind.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use riopipe::{ConnectOptions, CreateOptions, EngineKind, MemberAddr, Volume};
use riopipe_lab::link::{Link, LinkModel};
use riopipe_media::{Drive, spec::escape_commas};
use riopipe_net::SpinPolicy;
use riopipe_platform::CpuClock;
use riopipe_target::{Config, Running, Target};
use tempfile::TempDir;

use crate::{
    connect::create_failure,
    failure::{Code, Failure, start_failure},
};

/// The usual value of [`Plan::log`]: a mapped file of this size.
#[must_use]
pub fn file_log(bytes: u64) -> String {
    format!("file:{{}},size={bytes}")
}

/// The targets and the volume to start.
#[derive(Clone)]
pub struct Plan<'a> {
    /// The volume's name.
    pub volume: &'a str,
    /// Number of targets, each with an ordering log.
    pub targets: u32,
    /// Number of drives of each target.
    pub drives: u32,
    /// Specification of the drives; `{}` stands for a path of its own for each.
    pub drive: String,
    /// Specification of the ordering logs; `{}` stands for a path of its own for each.
    pub log: String,
    /// Stripe unit of the volume in bytes.
    pub unit_bytes: u32,
    /// Number of streams of the volume.
    pub streams: u32,
    /// Blocks on each drive for the prepare area of engine `horae`; 0: none.
    pub prepare_blocks: u32,
    /// Whether targets and writers have cores of their own.
    pub pin: bool,
    /// Options of the volume's connections.
    pub connect: ConnectOptions,
    /// How the targets wait.
    pub spin: SpinPolicy,
    /// The modelled link to the writers; `None`: loopback alone.
    pub link: Option<LinkModel>,
    /// Drives that are open already, target by target, instead of `drive`. Their content is lost.
    pub open: Vec<Arc<dyn Drive>>,
}

impl Default for Plan<'_> {
    /// One target without cores of its own, one volume of one stream; no name and no drive.
    fn default() -> Self {
        Self {
            volume: "",
            targets: 1,
            drives: 1,
            drive: String::new(),
            log: file_log(2 << 20),
            unit_bytes: 64 << 10,
            streams: 1,
            prepare_blocks: 0,
            pin: false,
            connect: ConnectOptions::default(),
            spin: SpinPolicy::HYBRID,
            link: None,
            open: Vec::new(),
        }
    }
}

/// Running targets and their volume.
pub struct OwnTargets {
    // The targets stop before the folder of their logs is removed: fields are dropped in this
    // order.
    targets: Vec<Running>,
    configs: Vec<Config>,
    logs: TempDir,
    /// In front of the targets: one each, or none.
    _links: Vec<Link>,
    volume: String,
    members: Vec<MemberAddr>,
    server_cores: Vec<usize>,
    writer_cores: Vec<usize>,
}

impl OwnTargets {
    /// Starts the targets, and creates the volume.
    ///
    /// # Errors
    /// A target doesn't start, or the volume can't be created on their drives.
    pub fn start(plan: &Plan<'_>) -> Result<Self, Failure> {
        let logs =
            tempfile::Builder::new().prefix("rio-").tempdir_in(folder()).map_err(|error| {
                Failure::new(Code::Failed, "can't make a folder for the ordering logs")
                    .because(&error)
            })?;
        let (server_cores, writer_cores) = if plan.pin { cores() } else { Default::default() };
        let mut targets = Vec::new();
        let mut configs = Vec::new();
        let mut links = Vec::new();
        let mut open = plan.open.chunks(plan.drives.max(1) as usize);
        for number in 0..plan.targets {
            let mut config = config(plan, number, logs.path(), &server_cores);
            let drives = open.next().unwrap_or_default();
            let target =
                Target::start_on(&config, drives).map_err(|error| start_failure(&error))?;
            if let Some(model) = plan.link {
                links.push(Link::start(model, target.addresses()[0]).map_err(|error| {
                    Failure::new(Code::Failed, "no modelled link").because(&error)
                })?);
            }
            // It comes back at the same address.
            config.listen = vec![target.addresses()[0].to_string()];
            configs.push(config);
            targets.push(target);
        }
        // Adjacent stripes are on different targets.
        let member = |nsid: u32, number: usize| {
            let target: &Running = &targets[number];
            let address = links.get(number).map_or(target.addresses()[0], Link::address);
            MemberAddr {
                host: address.ip().to_string(),
                port: address.port(),
                nqn: Some(target.subnqn().to_owned()),
                nsid,
            }
        };
        let numbers = 0..targets.len();
        let members: Vec<_> = (1..=plan.drives)
            .flat_map(|nsid| numbers.clone().map(move |number| (nsid, number)))
            .map(|(nsid, number)| member(nsid, number))
            .collect();
        let options = CreateOptions {
            unit_blocks: plan.unit_bytes / riopipe::BLOCK_BYTES as u32,
            streams: u16::try_from(plan.streams).unwrap_or(u16::MAX),
            // The default only: each load names its engine.
            engine: Some(match plan.prepare_blocks {
                0 => EngineKind::Rio,
                _ => EngineKind::Horae,
            }),
            prepare_blocks: Some(plan.prepare_blocks),
            connect: plan.connect.clone(),
            force: !plan.open.is_empty(),
            ..CreateOptions::default()
        };
        Volume::create(plan.volume, &members, &options)
            .map_err(|error| create_failure(plan.volume, &error))?;
        let volume = plan.volume.to_owned();
        Ok(Self {
            targets,
            configs,
            logs,
            _links: links,
            volume,
            members,
            server_cores,
            writer_cores,
        })
    }

    /// Name of the volume.
    #[must_use]
    pub fn volume(&self) -> &str {
        &self.volume
    }

    /// Its drives, in order.
    #[must_use]
    pub fn members(&self) -> &[MemberAddr] {
        &self.members
    }

    /// The running targets.
    #[must_use]
    pub fn targets(&self) -> &[Running] {
        &self.targets
    }

    /// The path of each target's ordering log.
    #[must_use]
    pub fn logs(&self) -> Vec<PathBuf> {
        (0..self.configs.len()).map(|number| log_path(self.logs.path(), number)).collect()
    }

    /// Cuts the power of all targets and their drives, as far as these model it, and starts them
    /// again. The logs keep their content: they stand for persistent memory.
    ///
    /// # Errors
    /// A target doesn't start again.
    pub fn power_cut(&mut self, seed: u64) -> Result<(), Failure> {
        self.down(|index, target| target.power_cut(seed.wrapping_add(index as u64 * 1000))).up()
    }

    /// Ends all targets as if they were killed, calls `change`, and starts them again. Only drives
    /// in files outlive that.
    ///
    /// # Errors
    /// The failure of `change`, or of a target that doesn't start again.
    pub fn killed(
        &mut self,
        change: impl FnOnce(&[PathBuf]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let logs = self.logs();
        let down = self.down(|_, target| {
            target.kill();
            Vec::new()
        });
        change(&logs)?;
        down.up()
    }

    fn down(&mut self, end: impl Fn(usize, Running) -> Vec<Arc<dyn Drive>>) -> Down<'_> {
        let ended = self.targets.drain(..).enumerate();
        let drives = ended.map(|(index, target)| end(index, target)).collect();
        Down { own: self, drives }
    }

    /// Cores of the targets; empty: any.
    #[must_use]
    pub fn server_cores(&self) -> &[usize] {
        &self.server_cores
    }

    /// Cores of the writers; empty: any.
    #[must_use]
    pub fn writer_cores(&self) -> &[usize] {
        &self.writer_cores
    }

    /// CPU time that the targets' threads have used, in ns, if the kernel reports it.
    #[must_use]
    pub fn cpu_ns(&self) -> Option<u64> {
        let mut sum = None;
        for task in fs::read_dir("/proc/self/task").ok()?.flatten() {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            if name.starts_with("reactor-") {
                // Not the kernel's statistics, which are up to a tick old.
                let tid = task.file_name().to_str()?.parse().ok()?;
                sum = Some(sum.unwrap_or(0) + CpuClock::of_thread(tid).used_ns()?);
            }
        }
        sum
    }
}

/// The state in which all targets are down.
struct Down<'a> {
    own: &'a mut OwnTargets,
    /// The drives with which each will start again.
    drives: Vec<Vec<Arc<dyn Drive>>>,
}

impl Down<'_> {
    fn up(self) -> Result<(), Failure> {
        for (config, drives) in self.own.configs.iter().zip(&self.drives) {
            let target = Target::start_on(config, drives).map_err(|error| start_failure(&error))?;
            self.own.targets.push(target);
        }
        Ok(())
    }
}

fn log_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("log-{number}"))
}

fn config(plan: &Plan<'_>, number: u32, logs: &Path, cores: &[usize]) -> Config {
    let (number, targets) = (number as usize, plan.targets as usize);
    let log = log_path(logs, number);
    let drives: Vec<String> = (0..plan.drives as usize)
        .map(|drive| {
            let path = logs.join(format!("drive-{number}-{drive}"));
            plan.drive.replace("{}", &escape_commas(&path.to_string_lossy()))
        })
        .collect();
    let mut config = Config::on_loopback(&drives.iter().map(String::as_str).collect::<Vec<_>>());
    // Targets on one machine would otherwise have the same identifiers.
    config.subnqn = Some(format!(
        "nqn.2014-08.org.nvmexpress:rio:{}:{}:{number}",
        plan.volume,
        std::process::id()
    ));
    config.log = Some(plan.log.replace("{}", &escape_commas(&log.to_string_lossy())));
    // SpinPolicy::HYBRID is the target's own default.
    config.spin_us = Some(plan.spin.spin_ns / 1_000);
    if cores.is_empty() {
        config.reactors = Some(1);
    } else {
        let each = (cores.len() / targets).max(1);
        config.cores = (0..each).map(|i| cores[(number * each + i) % cores.len()]).collect();
    }
    config
}

/// The first half of the cores for targets, the second for writers; with one core, no pinning.
pub(crate) fn cores() -> (Vec<usize>, Vec<usize>) {
    let all = riopipe_net::allowed_cores();
    match all.len() {
        0 | 1 => Default::default(),
        n => (all[..n / 2].to_vec(), all[n / 2..].to_vec()),
    }
}

/// The folder of the logs: in memory if possible, since the write-back of a mapped file on a disk
/// sometimes delays its writers.
fn folder() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let is_ours = |path: &Path| tempfile::tempfile_in(path).is_ok();
    match env::var_os("TMPDIR") {
        None if is_ours(&memory) => memory,
        _ => env::temp_dir(),
    }
}
