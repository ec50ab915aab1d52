//! Targets, writers and judges as processes in a folder of their own.

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// Longest time for a target to start, or for a recovery: far above the usual, even on a busy
/// machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// The media and the reactors of a target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    /// `{}` stands for its folder.
    drive: &'static str,
    log: &'static str,
    reactors: &'static str,
}

impl Setup {
    /// Number of setups.
    pub(crate) const COUNT: usize = 12;

    /// Drives without and with power-loss protection (where a completed write is durable), each
    /// kind of log in a file, one reactor and several. `dax:` is mapped memory here, too: it uses
    /// the instructions of persistent memory, which suffices for a killed process.
    pub(crate) fn number(n: usize) -> Self {
        let n = n % Self::COUNT;
        Self {
            drive: ["file:{},size=24M", "ssd:optane,size=24M,file={}"][n / 3 % 2],
            log: ["file:{},size=1M", "dax:{},size=1M", "block:{},size=1M"][n % 3],
            reactors: ["1", "3"][n / 6],
        }
    }
}

/// Two targets with a drive and a log each, and a volume over both.
pub(crate) struct Scene {
    name: String,
    setup: Setup,
    folder: TempDir,
    targets: Vec<Option<Process>>,
    ports: Vec<u16>,
}

impl Scene {
    pub(crate) fn new(name: &str, setup: Setup) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut scene = Self {
            name: format!("{name}, {setup:?}"),
            setup,
            folder,
            targets: (0..2).map(|_| None).collect(),
            ports: vec![0, 0],
        };
        scene.revive();
        let members = scene.members();
        let mut create = Command::new(RIO);
        create.args(["volume", "create", "ordeal", "--streams", "2", "--slots", "256"]);
        create.arg("--no-volumes-file");
        for member in &members {
            create.args(["-m", member]);
        }
        let created = create.stdout(Stdio::null()).status().unwrap();
        assert!(created.success(), "{}", scene.name);
        scene
    }

    /// Starts every target that is not running.
    pub(crate) fn revive(&mut self) {
        for number in 0..self.targets.len() {
            if self.targets[number].is_some() {
                continue;
            }
            let folder = self.folder.path().display();
            let at = |what: &str, name| what.replace("{}", &format!("{folder}/{name}-{number}"));
            let mut serve = Command::new(RIO);
            serve.args(["target", "serve", "--reactors", self.setup.reactors, "--quiet"]);
            serve.args(["-s", &self.ports[number].to_string()]);
            serve.args(["-n", &format!("nqn.2026-11.com.example:kill9-{number}")]);
            // A killed process keeps its locks until its last write has landed.
            serve.args(["--lock-wait", "120", "-o", "json", "--create"]);
            serve.args(["--drive", &at(self.setup.drive, "drive")]);
            serve.args(["--log", &at(self.setup.log, "log")]);
            let (process, printed) = Process::start(serve, |line| line.starts_with('}'));
            let printed: serde_json::Value = serde_json::from_str(&printed)
                .unwrap_or_else(|error| panic!("{}: {error}: {printed:?}", self.name));
            let address = printed["addresses"][0].as_str().unwrap();
            self.ports[number] = address.rsplit(':').next().unwrap().parse().unwrap();
            self.targets[number] = Some(process);
        }
    }

    pub(crate) fn kill_target(&mut self, number: usize) {
        if let Some(mut target) = self.targets[number].take() {
            target.kill();
        }
    }

    fn members(&self) -> Vec<String> {
        self.ports.iter().map(|port| format!("127.0.0.1:{port}")).collect()
    }

    /// A writer that has printed nothing yet.
    pub(crate) fn start_writer(&self, groups: u64) -> Process {
        Process::start(self.writer(groups), |_| true).0
    }

    fn writer(&self, groups: u64) -> Command {
        let mut writer = Command::new(std::env::current_exe().unwrap());
        writer.arg("writer").arg(self.folder.path()).arg(groups.to_string()).args(self.members());
        writer
    }

    /// A writer that has recovered the volume and writes up to group `groups`, and the last group
    /// of each stream before.
    pub(crate) fn write(&self, groups: u64) -> (Process, Vec<u64>) {
        let (process, printed) =
            Process::start(self.writer(groups), |line| line.starts_with("recovered"));
        let printed = printed.lines().last().unwrap_or_default();
        let tags = printed.strip_prefix("recovered ").unwrap_or_else(|| {
            panic!("{}: the writer ended before the volume was recovered: {printed}", self.name)
        });
        (process, serde_json::from_str(tags).unwrap())
    }

    /// Whether the drives hold exactly this prefix of each stream, according to a judge's process;
    /// with a corrupted block, or without.
    pub(crate) fn judge(&self, tags: &[u64], corrupt: Option<u64>) -> (bool, String) {
        let mut judge = Command::new(std::env::current_exe().unwrap());
        judge.envs(corrupt.map(|n| ("CORRUPT", n.to_string())));
        judge.arg("judge").arg(self.folder.path());
        judge.args(tags.iter().map(u64::to_string)).arg("--");
        judge.args((0..self.targets.len()).map(|n| self.folder.path().join(format!("drive-{n}"))));
        let output = judge.output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Opens the volume, closes it, and runs the judge.
    pub(crate) fn recover_and_judge(&mut self) -> Vec<u64> {
        let (mut recovery, tags) = self.write(0);
        recovery.finish(LIMIT);
        let (clean, printed) = self.judge(&tags, None);
        if !clean {
            // The files are kept for inspection.
            let folder = self.folder.path().display().to_string();
            self.folder.disable_cleanup(true);
            panic!(
                "{}: the judge reports (drives and logs are in {folder}):\n{printed}",
                self.name
            );
        }
        tags
    }
}

const RIO: &str = env!("CARGO_BIN_EXE_rio");

/// A process that does not outlive its owner.
pub(crate) struct Process {
    child: Child,
    /// Kept open: a process that prints more must not fail.
    stdout: BufReader<ChildStdout>,
}

impl Process {
    /// Starts a process, and reads its output up to the wanted line, or to its end.
    fn start(mut command: Command, until: impl Fn(&str) -> bool) -> (Self, String) {
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut process = Self { child, stdout };
        let mut printed = String::new();
        loop {
            let mut line = String::new();
            let enough = until("") || process.stdout.read_line(&mut line).unwrap() == 0;
            printed += &line;
            if enough || until(&line) {
                return (process, printed);
            }
        }
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for its end, which must be successful.
    pub(crate) fn finish(&mut self, limit: Duration) {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "the writer failed: {status}");
                return;
            }
            assert!(begun.elapsed() < limit, "the writer hangs");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Random moments.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % n
    }

    pub(crate) fn sleep(&mut self, from_ms: u64, to_ms: u64) {
        thread::sleep(Duration::from_micros(from_ms * 1000 + self.below((to_ms - from_ms) * 1000)));
    }
}
