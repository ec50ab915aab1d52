//! A target in this process, with a drive in memory and a log in a file.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use riopipe::{CreateOptions, DhchapSecret, Volume};
use riopipe_target::{Config, Running, SecretSource, Target};
use tempfile::TempDir;

pub(crate) struct Site {
    running: Option<Running>,
    member: String,
    /// The directory of the log; it is removed last.
    dir: TempDir,
}

/// The host NQN of the programs that authenticate.
pub(crate) const HOST: &str = "nqn.2026-01.org.example:host";

/// The files that [`Site::that_demands_authentication`] makes. Each text is in the secret of that name.
pub(crate) const SECRETS: [(&str, u8, u32); 4] =
    [("host", 1, 0o600), ("targets", 2, 0o600), ("wrong", 3, 0o600), ("shared", 1, 0o644)];

impl Site {
    pub(crate) fn new() -> Self {
        Self::with(|_, _| ())
    }

    /// A target that admits only [`HOST`], if it has the secret of the file `host`. The target's own secret is in the
    /// file `targets`.
    pub(crate) fn that_demands_authentication() -> Self {
        Self::with(|dir, config| {
            for (name, byte, mode) in SECRETS {
                let secret = DhchapSecret::new(&[byte; 32], None).unwrap();
                let path = dir.join(name);
                std::fs::write(&path, &*secret.to_text()).unwrap();
                std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            }
            let source = |name: &str| SecretSource::file(dir.join(name).to_str().unwrap());
            config.dhchap.hosts.insert(HOST.to_owned(), source("host"));
            config.dhchap.controller = Some(source("targets"));
        })
    }

    fn with(change: impl FnOnce(&Path, &mut Config)) -> Self {
        static SITES: AtomicU32 = AtomicU32::new(0);
        let dir = TempDir::new().unwrap();
        let mut config = Config::on_loopback(&["mem:64M"]);
        change(dir.path(), &mut config);
        let number = SITES.fetch_add(1, Ordering::Relaxed);
        config.subnqn = Some(format!("nqn.2026-01.org.example:c-{number}"));
        config.log = Some(format!("file:{}/log,size=1M", dir.path().display()));
        let running = Target::start(&config).expect("the target starts");
        let member = format!("{},ns=1", running.addresses()[0]);
        Self { running: Some(running), member, dir }
    }

    /// The path of a file beside the log.
    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
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
