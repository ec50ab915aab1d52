//! A target in this process with a drive and a log that outlive it, and a volume on it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use riopipe::{
    ConnectOptions, CreateOptions, EngineKind, MemberAddr, OpenOptions, Recovery, Volume,
};
use riopipe_store::{Store, StoreOptions, StorePlace};
use riopipe_target::{Config, Running, Target};
use tempfile::TempDir;

/// Longest time that anything may take.
pub(crate) const SOON: Duration = Duration::from_secs(120);
const NAME: &str = "objects";

pub(crate) const ENGINES: [EngineKind; 4] =
    [EngineKind::Rio, EngineKind::Horae, EngineKind::Sync, EngineKind::Linux];

pub(crate) const PLACE: StorePlace = StorePlace {
    log_stream: 0,
    log_lba: 0,
    log_blocks: 512,
    data_stream: 1,
    data_lba: 512,
    data_blocks: 4096,
};

pub(crate) struct Site {
    running: Option<Running>,
    config: Config,
    /// The directory of its drive and log; it is removed last.
    _dir: TempDir,
}

impl Site {
    /// A target with a drive that has a volatile cache, and a volume of this engine.
    pub(crate) fn new(engine: EngineKind) -> Self {
        static SITES: AtomicU32 = AtomicU32::new(0);
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("drive").display().to_string();
        let mut config = Config::on_loopback(&[&format!("file:{path},size=64M")]);
        let number = SITES.fetch_add(1, Ordering::Relaxed);
        config.subnqn = Some(format!("nqn.2026-01.org.example:store-{number}"));
        config.log = Some(format!("file:{}/log,size=1M", dir.path().display()));
        let running = Target::start(&config).expect("the target starts");
        // It comes back at the same address.
        config.listen = vec![running.addresses()[0].to_string()];
        let site = Self { running: Some(running), config, _dir: dir };
        let options = CreateOptions {
            streams: 4,
            engine: Some(engine),
            connect: connect(),
            ..CreateOptions::default()
        };
        Volume::create(NAME, &[site.member()], &options).unwrap();
        site
    }

    fn member(&self) -> MemberAddr {
        format!("{},ns=1", self.config.listen[0]).parse().unwrap()
    }

    pub(crate) fn open(&self) -> (Volume, Recovery) {
        self.open_with(connect())
    }

    /// Opens the volume, also if the target has not noticed the end of its owner yet.
    pub(crate) fn open_with(&self, connect: ConnectOptions) -> (Volume, Recovery) {
        let options = OpenOptions { connect, take_over: true, ..OpenOptions::default() };
        let since = Instant::now();
        loop {
            match Volume::open(NAME, &[self.member()], &options) {
                Ok(opened) => return opened,
                Err(error) if error.is_retryable() && since.elapsed() < SOON => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Stops the target without notice, as if its process had died.
    pub(crate) fn kill(&mut self) {
        self.running.take().expect("it runs").kill();
    }

    /// Starts the target again.
    pub(crate) fn start(&mut self) {
        self.running = Some(Target::start(&self.config).expect("the target starts again"));
    }
}

pub(crate) fn connect() -> ConnectOptions {
    ConnectOptions { timeout: Duration::from_secs(20), ..ConnectOptions::default() }
}

pub(crate) fn reopen(volume: &Volume, recovery: &Recovery) -> Store {
    Store::open(volume, recovery, PLACE, &StoreOptions::default()).unwrap()
}

pub(crate) fn create(volume: &Volume) -> Store {
    Store::create(volume, PLACE, &StoreOptions::default()).unwrap()
}
