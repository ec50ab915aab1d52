//! A target in this process with a drive and a log that outlive it, and a volume on it.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use riopipe::{
    BLOCK_BYTES, ConnectOptions, CreateOptions, EngineKind, MemberAddr, OpenOptions, Recovery,
    Volume,
};
use riopipe_target::{Config, Running, Target};
use riopipe_wal::{Found, Lsn, Wal, WalOptions, WalPlace};
use tempfile::TempDir;

/// Longest time that anything may take.
pub(crate) const SOON: Duration = Duration::from_secs(120);
pub(crate) const NAME: &str = "logs";

/// The durability of a target's drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drive {
    /// Completed writes are durable.
    Protected,
    /// Flushed writes are durable.
    Volatile,
    /// As `Volatile`, with a cache barrier.
    Barrier,
}

pub(crate) struct Site {
    running: Option<Running>,
    config: Config,
    /// The directory of its drive and log; it is removed last.
    dir: TempDir,
}

impl Site {
    /// A target, and a volume of this engine on its drive.
    pub(crate) fn new(drive: Drive, engine: EngineKind) -> Self {
        Self::with_slots(drive, engine, 0)
    }

    /// As [`new`](Self::new), with so many log slots for each stream.
    pub(crate) fn with_slots(drive: Drive, engine: EngineKind, slots: u32) -> Self {
        static SITES: AtomicU32 = AtomicU32::new(0);
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("drive").display().to_string();
        let drive = match drive {
            Drive::Protected => format!("ssd:optane,size=64M,file={path}"),
            Drive::Volatile => format!("file:{path},size=64M"),
            Drive::Barrier => format!("ssd:flash,size=64M,order=barrier,file={path}"),
        };
        let mut config = Config::on_loopback(&[&drive]);
        // The system chooses the ports, so the address can't be part of the name.
        let number = SITES.fetch_add(1, Ordering::Relaxed);
        config.subnqn = Some(format!("nqn.2026-01.org.example:wal-{number}"));
        config.log = Some(format!("file:{}/log,size=1M", dir.path().display()));
        let running = Target::start(&config).expect("the target starts");
        // It comes back at the same address.
        config.listen = vec![running.addresses()[0].to_string()];
        let site = Self { running: Some(running), config, dir };
        let options = CreateOptions {
            streams: 4,
            slots,
            engine: Some(engine),
            connect: connect(),
            ..CreateOptions::default()
        };
        Volume::create(NAME, &[site.member()], &options).unwrap();
        site
    }

    pub(crate) fn rio() -> Self {
        Self::new(Drive::Protected, EngineKind::Rio)
    }

    pub(crate) fn member(&self) -> MemberAddr {
        format!("{},ns=1", self.config.listen[0]).parse().unwrap()
    }

    pub(crate) fn open(&self) -> (Volume, Recovery) {
        self.open_with(&OpenOptions { connect: connect(), ..OpenOptions::default() })
    }

    pub(crate) fn open_with(&self, options: &OpenOptions) -> (Volume, Recovery) {
        Volume::open(NAME, &[self.member()], options).unwrap()
    }

    /// As [`open`](Self::open), after the volume was dropped: the target may not have noticed yet.
    pub(crate) fn open_again(&self) -> (Volume, Recovery) {
        let options = OpenOptions { connect: connect(), ..OpenOptions::default() };
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

    /// Flips a bit of each block of the drive that holds these bytes, in the block's first byte; a
    /// second call undoes that.
    pub(crate) fn damage(&self, bytes: &[u8]) {
        self.damage_at(bytes, 0);
    }

    /// As [`damage`](Self::damage), in this byte of the block, which is not one of these bytes.
    pub(crate) fn damage_at(&self, bytes: &[u8], at: usize) {
        let path = self.dir.path().join("drive");
        let content = std::fs::read(&path).unwrap();
        let drive = std::fs::File::options().write(true).open(&path).unwrap();
        let mut damaged = 0;
        for (number, block) in content.chunks_exact(BLOCK_BYTES).enumerate() {
            if block.windows(bytes.len()).any(|window| window == bytes) {
                let place = (number * BLOCK_BYTES + at) as u64;
                drive.write_all_at(&[block[at] ^ 1], place).unwrap();
                damaged += 1;
            }
        }
        assert!(damaged > 0, "the drive holds these bytes");
    }

    /// Removes the target's ordering log while the target is down.
    pub(crate) fn lose_log(&self) {
        std::fs::remove_file(self.dir.path().join("log")).unwrap();
    }

    /// Starts the target again.
    pub(crate) fn start(&mut self) {
        self.running = Some(Target::start(&self.config).expect("the target starts again"));
    }
}

pub(crate) fn connect() -> ConnectOptions {
    ConnectOptions { timeout: Duration::from_secs(20), ..ConnectOptions::default() }
}

pub(crate) const PLACE: WalPlace = WalPlace { stream: 0, lba: 0, blocks: 1024 };

pub(crate) fn options() -> WalOptions {
    WalOptions::default()
}

/// Opens a log, and compares the result with reading it.
pub(crate) fn reopen(volume: &Volume, recovery: &Recovery, place: WalPlace) -> (Wal, Found) {
    let (wal, found) = Wal::open(volume, recovery, place, &options()).unwrap();
    assert_eq!(wal.stat().end, found.end);
    assert_eq!(wal.stat().durable, found.end, "all that was found is durable");
    (wal, found)
}

pub(crate) fn read(wal: &Wal, from: Lsn) -> Vec<(Lsn, Vec<u8>)> {
    let records = wal.records(from).map(|record| record.unwrap());
    records.map(|record| (record.lsn, record.bytes)).collect()
}

/// Waits until a condition holds.
pub(crate) fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < SOON, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
