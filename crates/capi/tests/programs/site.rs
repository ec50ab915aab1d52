//! A target in this process, with a drive in memory and a log in a file.

use std::sync::atomic::{AtomicU32, Ordering};

use riopipe::{CreateOptions, Volume};
use riopipe_target::{Config, Running, Target};
use tempfile::TempDir;

pub(crate) struct Site {
    running: Option<Running>,
    member: String,
    /// The directory of the log; it is removed last.
    _dir: TempDir,
}

impl Site {
    pub(crate) fn new() -> Self {
        static SITES: AtomicU32 = AtomicU32::new(0);
        let dir = TempDir::new().unwrap();
        let mut config = Config::on_loopback(&["mem:64M"]);
        let number = SITES.fetch_add(1, Ordering::Relaxed);
        config.subnqn = Some(format!("nqn.2026-01.org.example:c-{number}"));
        config.log = Some(format!("file:{}/log,size=1M", dir.path().display()));
        let running = Target::start(&config).expect("the target starts");
        let member = format!("{},ns=1", running.addresses()[0]);
        Self { running: Some(running), member, _dir: dir }
    }

    /// The address of the drive.
    pub(crate) fn member(&self) -> String {
        self.member.clone()
    }

    /// Creates a volume on the drive.
    pub(crate) fn create(&self, name: &str) {
        let options = CreateOptions { streams: 4, ..CreateOptions::default() };
        Volume::create(name, &[self.member.parse().unwrap()], &options).unwrap();
    }

    /// Stops the target without notice, as if its process had died.
    pub(crate) fn kill(&mut self) {
        self.running.take().expect("it runs").kill();
    }
}
