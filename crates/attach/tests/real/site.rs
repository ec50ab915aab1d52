//! Two targets in this process with modelled drives that have a volatile cache, a volume on them, and a
//! host that knows which content each block may have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use riopipe::{
    BLOCK_BYTES, ConnectOptions, CreateOptions, EngineKind, MemberAddr, OpenOptions, Volume,
};
use riopipe_attach::{Device, DeviceOptions, VolumeQueue};
use riopipe_media::{AlignedBuf, BlockDevice, Data, Done, Drive, IoError, Submitted};
use riopipe_target::{Config, Running, Target};
use riopipe_testkit::Random;
use tempfile::TempDir;

/// Longest time that anything may take.
pub(crate) const SOON: Duration = Duration::from_secs(120);
const NAME: &str = "plain";

pub(crate) struct Site {
    targets: Vec<Option<Running>>,
    configs: Vec<Config>,
    /// The drives of the targets that are not running.
    drives: Vec<Vec<Arc<dyn Drive>>>,
    members: Vec<MemberAddr>,
    _dir: TempDir,
}

impl Site {
    /// A volume of this engine on two drives `drive` of different targets. Each target has a log of
    /// `log` bytes, such as `1M`; empty: none.
    pub(crate) fn new(engine: EngineKind, drive: &str, log: &str) -> Self {
        static SITES: AtomicU32 = AtomicU32::new(0);
        let dir = TempDir::new().unwrap();
        let number = SITES.fetch_add(1, Ordering::Relaxed);
        let mut site = Self {
            targets: Vec::new(),
            configs: Vec::new(),
            drives: vec![Vec::new(); 2],
            members: Vec::new(),
            _dir: dir,
        };
        for index in 0..2 {
            let mut config = Config::on_loopback(&[&drive.replace('#', &index.to_string())]);
            config.subnqn = Some(format!("nqn.2026-01.org.example:attach-{number}-{index}"));
            let path = site._dir.path().display();
            let with_log = !log.is_empty();
            config.log = with_log.then(|| format!("file:{path}/log{index},size={log}"));
            let running = Target::start(&config).expect("the target starts");
            // It comes back at the same address.
            config.listen = vec![running.addresses()[0].to_string()];
            site.members.push(format!("{},ns=1", config.listen[0]).parse().unwrap());
            site.targets.push(Some(running));
            site.configs.push(config);
        }
        let options = CreateOptions {
            streams: 3,
            unit_blocks: 16,
            engine: Some(engine),
            connect: connect(),
            ..CreateOptions::default()
        };
        Volume::create(NAME, &site.members, &options).unwrap();
        site
    }

    pub(crate) fn open(&self, connect: ConnectOptions) -> Device {
        let options = OpenOptions { connect, take_over: true, ..OpenOptions::default() };
        let since = Instant::now();
        let volume = loop {
            match Volume::open(NAME, &self.members, &options) {
                Ok((volume, _)) => break volume,
                Err(error) if error.is_retryable() && since.elapsed() < SOON => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => panic!("{error}"),
            }
        };
        Device::open(volume, &DeviceOptions::default()).unwrap()
    }

    pub(crate) fn members(&self) -> &[MemberAddr] {
        &self.members
    }

    /// Stops a target as if its process had died.
    pub(crate) fn kill(&mut self, index: usize) {
        let running = self.targets[index].take().expect("it runs");
        self.drives[index] = running.drives().to_vec();
        running.kill();
    }

    /// Cuts the power of a target with a modelled drive.
    pub(crate) fn cut_power(&mut self, index: usize, seed: u64) {
        self.drives[index] = self.targets[index].take().expect("it runs").power_cut(seed);
    }

    pub(crate) fn start(&mut self, index: usize) {
        let drives = std::mem::take(&mut self.drives[index]);
        let started = Target::start_on(&self.configs[index], &drives);
        self.targets[index] = Some(started.expect("the target starts again"));
    }
}

pub(crate) fn connect() -> ConnectOptions {
    ConnectOptions { timeout: Duration::from_secs(20), ..ConnectOptions::default() }
}

/// A host of a device: random requests, several in flight, and the contents that each block may have.
pub(crate) struct Host {
    pub(crate) random: Random,
    queue: VolumeQueue,
    blocks: u64,
    next_op: u64,
    in_flight: BTreeMap<u64, Request>,
    /// For each block, the versions that it may have after a crash. Without an entry it may have
    /// version 0 only. The version of a block is the number of the write.
    possible: BTreeMap<u64, BTreeSet<u64>>,
    /// For each block, the version that was written last.
    last: BTreeMap<u64, u64>,
    /// The changes that have ended, and no flush has covered.
    ended: BTreeSet<u64>,
    effects: BTreeMap<u64, (u64, u64, bool)>,
    pub(crate) errors: u64,
    pub(crate) flushed: u64,
}

#[derive(Clone, Debug)]
enum Request {
    Change { is_fua: bool },
    Flush { covers: BTreeSet<u64> },
}

/// The most requests in flight.
const DEPTH: usize = 48;

impl Host {
    pub(crate) fn new(device: &Device, seed: u64) -> Self {
        let drive = device.drive();
        Self {
            random: Random(seed),
            queue: drive.queue(DEPTH).unwrap(),
            blocks: drive.geometry().blocks,
            next_op: 1,
            in_flight: BTreeMap::new(),
            possible: BTreeMap::new(),
            last: BTreeMap::new(),
            ended: BTreeSet::new(),
            effects: BTreeMap::new(),
            errors: 0,
            flushed: 0,
        }
    }

    /// Goes on with a new device after a crash: the requests in flight are lost.
    pub(crate) fn go_on(&mut self, device: &Device) {
        self.queue = device.drive().queue(DEPTH).unwrap();
        self.in_flight.clear();
        self.ended.clear();
    }

    /// Goes on with a new device, as a host that has lived on: what had completed still counts.
    pub(crate) fn reconnect(&mut self, device: &Device) {
        self.queue = device.drive().queue(DEPTH).unwrap();
    }

    /// Flushes, and waits for that.
    pub(crate) fn flush(&mut self) {
        let (op, covers) = (self.next_op, self.ended.clone());
        self.next_op += 1;
        self.begin(op, Request::Flush { covers }, |queue| queue.flush(op));
        self.settle();
    }

    /// Submits a random request. Changes in flight together have different blocks.
    pub(crate) fn request(&mut self) {
        while self.in_flight.len() >= DEPTH {
            self.poll();
        }
        let op = self.next_op;
        self.next_op += 1;
        if self.random.one_in(12) {
            let covers = self.ended.clone();
            self.begin(op, Request::Flush { covers }, |queue| queue.flush(op));
            return;
        }
        let most = if self.random.one_in(8) { 300 } else { 8 };
        let blocks = 1 + self.random.below(most);
        let near = (1 + self.random.below(self.blocks / 1024 - 1)) * 1024;
        let lba = match self.random.one_in(2) {
            true => near - self.random.below(blocks.min(8)),
            false => self.random.below(self.blocks - blocks),
        };
        let blocks = blocks.min(self.blocks - lba);
        let is_busy = |other: &u64| {
            let (at, count, _) = self.effects[other];
            at < lba + blocks && lba < at + count
        };
        let changes = |(op, request): (&u64, &Request)| {
            matches!(request, Request::Change { .. }).then_some(*op)
        };
        if self.in_flight.iter().filter_map(changes).any(|other| is_busy(&other)) {
            return;
        }
        let (is_zero, is_fua) = (self.random.one_in(8), self.random.one_in(10));
        for block in lba..lba + blocks {
            let possible = self.possible.entry(block).or_insert_with(|| BTreeSet::from([0]));
            possible.insert(op);
            self.last.insert(block, op);
        }
        self.effects.insert(op, (lba, blocks, is_zero));
        let request = Request::Change { is_fua };
        match is_zero {
            true => self.begin(op, request, |queue| queue.zero_through(op, lba, blocks, is_fua)),
            false => {
                let mut data = AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES);
                for (index, block) in data.chunks_mut(BLOCK_BYTES).enumerate() {
                    fill(block, lba + index as u64, op);
                }
                let data = Data::Owned(data);
                self.begin(op, request, |queue| queue.write_through(op, lba, data, is_fua));
            }
        }
    }

    fn begin(
        &mut self,
        op: u64,
        request: Request,
        submit: impl FnOnce(&mut VolumeQueue) -> Submitted,
    ) {
        self.in_flight.insert(op, request);
        if let Submitted::Done(result) = submit(&mut self.queue) {
            self.on_done(op, &result);
        }
    }

    /// Takes the results that have come.
    pub(crate) fn poll(&mut self) {
        let mut done: Vec<Done> = Vec::new();
        self.queue.poll(0, &mut done);
        if done.is_empty() {
            std::thread::sleep(Duration::from_micros(100));
        }
        for Done { op, result } in done {
            self.on_done(op, &result);
        }
    }

    /// Waits until nothing is in flight.
    pub(crate) fn settle(&mut self) {
        let since = Instant::now();
        while !self.in_flight.is_empty() {
            self.poll();
            assert!(since.elapsed() < SOON, "these hang: {:?}", self.in_flight);
        }
    }

    fn on_done(&mut self, op: u64, result: &Result<Option<AlignedBuf>, IoError>) {
        let request = self.in_flight.remove(&op).expect("it ends once");
        if let Err(error) = result {
            assert!(error.to_string().contains("volume"), "it names the device: {error}");
            self.errors += 1;
            return;
        }
        assert_eq!(self.errors, 0, "after an error nothing is done: {request:?}");
        match request {
            Request::Change { is_fua: true } => self.confirm(op),
            Request::Change { is_fua: false } => drop(self.ended.insert(op)),
            Request::Flush { covers } => {
                self.flushed += 1;
                for op in covers {
                    self.ended.remove(&op);
                    self.confirm(op);
                }
            }
        }
    }

    /// The blocks of a change are durable: older versions can't come back.
    fn confirm(&mut self, op: u64) {
        let (lba, blocks, _) = self.effects[&op];
        for block in lba..lba + blocks {
            if let Some(possible) = self.possible.get_mut(&block) {
                possible.retain(|version| *version >= op);
            }
        }
    }

    /// Reads all blocks that were ever written, and checks that each has a content that it may have.
    /// With `is_last`, that is the one that was written last.
    pub(crate) fn check(&mut self, is_last: bool) {
        self.settle();
        let blocks: Vec<u64> = self.possible.keys().copied().collect();
        for lba in blocks {
            let found = self.read(lba);
            let possible = self.possible.get_mut(&lba).expect("it is a key");
            let is_found = |version: &u64| {
                let mut should = [0; BLOCK_BYTES];
                let is_zero = *version == 0 || self.effects[version].2;
                if !is_zero {
                    fill(&mut should, lba, *version);
                }
                found[..] == should
            };
            let number = u64::from_le_bytes(found[8..16].try_into().unwrap());
            match is_last {
                true => assert!(is_found(&self.last[&lba]), "block {lba} has version {number}"),
                false => {
                    assert!(
                        possible.iter().any(is_found),
                        "block {lba} has version {number}, not one of {possible:?}"
                    );
                    // From now on it has what was found.
                    possible.retain(is_found);
                    let last = possible.last().expect("one was found");
                    self.last.insert(lba, *last);
                }
            }
        }
    }

    fn read(&mut self, lba: u64) -> AlignedBuf {
        let Submitted::Pending = self.queue.read(u64::MAX, lba, 1) else { panic!("it is pending") };
        let (mut done, since) = (Vec::<Done>::new(), Instant::now());
        while done.is_empty() {
            self.queue.poll(0, &mut done);
            assert!(since.elapsed() < SOON, "the read of block {lba} hangs");
            std::thread::yield_now();
        }
        done.remove(0).result.unwrap().expect("a read brings a buffer")
    }
}

/// The content of a block after write number `version`.
fn fill(block: &mut [u8], lba: u64, version: u64) {
    block.fill((lba as u8).wrapping_mul(31) ^ version as u8);
    block[..8].copy_from_slice(&lba.to_le_bytes());
    block[8..16].copy_from_slice(&version.to_le_bytes());
}
