//! Many schedules of one scenario, and its judgement.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Caller, Fs, MountOptions, NewInode};
use riopipe_fs_core::{FsError, Ino};
use riopipe_fs_testkit::check::check;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

use crate::enumerate::recorder::{Overlay, Whole};
use crate::enumerate::tree::{Node, Tree};
use crate::enumerate::world::{Counts, Effort, World, options};
use crate::enumerate::{NOW, crc32c};
use crate::sticky::Sticky;
use crate::storage::Scheduled;

/// The schedules of one seed.
const SCHEDULES: usize = 20;

/// A number from the environment.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    let text = std::env::var(name);
    text.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

fn config() -> Config {
    let mut config = Config::new();
    // Blocks lie on the stack.
    config.stack_size = 1 << 20;
    config.max_steps = MaxSteps::FailAfter(3_000_000);
    config.silence_warnings = true;
    // The seed repeats it.
    config.failure_persistence = FailurePersistence::None;
    config.ungraceful_shutdown_config.immediately_return_on_panic = true;
    config
}

/// Calls `make` in a schedule of one thread.
fn alone<T: Send + 'static>(make: impl Fn() -> T + Send + Sync + 'static) -> T {
    let made = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&made);
    let run = move || *slot.lock().unwrap() = Some(make());
    Runner::new(RandomScheduler::new_from_seed(1, 1), config()).run(run);
    made.lock().unwrap().take().expect("it has run")
}

/// A world whose image is what `prepare` leaves.
pub(crate) fn world(prepare: fn(&Fs)) -> Arc<World> {
    alone(move || World::new(Effort { nested: u64::MAX, ..Effort::USUAL }, prepare))
}

/// The number of an inode in a world.
pub(crate) fn find_alone(world: &Arc<World>, path: &'static str) -> Ino {
    let world = Arc::clone(world);
    alone(move || Run::new(&world, 0, options(1)).find(path))
}

/// The usual world: directories `a` and `b`, files `a/x` and `b/y` of 6000 bytes.
pub(crate) fn usual() -> &'static Arc<World> {
    static WORLD: OnceLock<Arc<World>> = OnceLock::new();
    WORLD.get_or_init(|| {
        world(|fs| {
            for (parent, name) in [(&b"a"[..], b"x"), (b"b", b"y")] {
                let dir = fs.create(&root(), Ino::ROOT, parent, &dir(), NOW).unwrap().ino;
                let file = fs.create(&root(), dir, name, &file(), NOW).unwrap().ino;
                fs.write(&root(), file, 0, &[1; 6000], NOW).unwrap();
            }
        })
    })
}

pub(crate) fn root() -> Caller {
    Caller::default()
}

pub(crate) fn file() -> NewInode<'static> {
    NewInode { mode: 0o100_644, rdev: 0, target: b"" }
}

pub(crate) fn dir() -> NewInode<'static> {
    NewInode { mode: 0o040_755, rdev: 0, target: b"" }
}

/// A moment `seconds` later than [`NOW`].
pub(crate) fn later(seconds: i64) -> Time {
    Time { seconds: NOW.seconds + seconds, nanos: 0 }
}

/// One schedule: a mounted file system, and the storage below it.
pub(crate) struct Run {
    pub(crate) fs: Fs,
    pub(crate) storage: Arc<Scheduled>,
    pub(crate) world: Arc<World>,
    /// The number of this schedule.
    number: u64,
}

/// The program of a thread.
pub(crate) type Thread<'a> = &'a (dyn Fn() + Sync);

impl Run {
    fn new(world: &Arc<World>, number: u64, options: MountOptions) -> Self {
        let storage = Scheduled::new(&world.base, options.mode);
        let (fs, _) = Fs::mount(storage.clone(), options, NOW).unwrap();
        Self { fs, storage, world: Arc::clone(world), number }
    }

    /// The inode at a path of two names.
    pub(crate) fn find(&self, path: &str) -> Ino {
        self.try_find(path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// As [`find`](Self::find); the inode is referenced.
    pub(crate) fn try_find(&self, path: &str) -> Result<Ino, FsError> {
        path.split('/').try_fold(Ino::ROOT, |dir, name| {
            self.fs.lookup(&root(), dir, name.as_bytes()).map(|found| found.ino)
        })
    }

    /// Runs threads, and below them the storage, until all have ended.
    pub(crate) fn threads(&self, threads: &[Thread<'_>]) {
        self.storage.set_eager(false);
        let storage = Arc::clone(&self.storage);
        let advancing = shuttle::thread::spawn(move || storage.advance());
        self.threads_on_eager(threads);
        self.storage.stop();
        advancing.join().expect("the storage");
        self.storage.set_eager(!self.storage.has_failed());
    }

    /// As [`threads`](Self::threads), on a storage that needs no thread.
    pub(crate) fn threads_on_eager(&self, threads: &[Thread<'_>]) {
        shuttle::thread::scope(|scope| {
            let all: Vec<_> = threads.iter().map(|thread| scope.spawn(thread)).collect();
            for thread in all {
                thread.join().expect("a thread's checks");
            }
        });
    }

    /// The file system after a crash in one of these states.
    pub(crate) fn recover(&self, state: &Overlay) -> Arc<Tree> {
        let counts = Counts::default();
        self.world.recover(state, 0, &counts).unwrap_or_else(|why| panic!("after a crash: {why}"))
    }

    /// Judges what is left if a crash comes now.
    pub(crate) fn crash(&self, judge: &dyn Fn(&Tree)) {
        for state in self.storage.crash(4) {
            judge(&self.recover(&state));
        }
    }

    /// Judges what crashes have left that came at any moment of the schedule.
    pub(crate) fn judge_cuts(&self, judge: &dyn Fn(&Tree)) {
        for state in self.storage.take_cuts() {
            judge(&self.recover(&state));
        }
    }

    /// The byte with which a page of a file begins.
    pub(crate) fn byte(&self, tree: &Tree, path: &str, page: usize) -> u8 {
        let file = node(tree, path).unwrap_or_else(|| panic!("{path} is not there"));
        self.world.contents.get(file.blocks[page])[0]
    }

    /// Unmounts, and judges the image.
    pub(crate) fn end(self) {
        self.fs.unmount(later(1_000_000)).unwrap();
        assert_eq!(self.fs.failure(), None);
        self.check();
    }

    /// Judges the image after an unmount.
    pub(crate) fn check(&self) {
        let left = self.storage.current();
        let checked = check(&Whole { base: &self.world.base, state: &left }, crc32c);
        // e2fsck is another program, and slow.
        let judged = checked.and_then(|_| match self.number % 500 {
            7 => self.world.with_judge(|judge| judge.is_clean(&self.world.base, &left)),
            _ => Ok(()),
        });
        judged.unwrap_or_else(|why| panic!("the image after an unmount: {why}"));
    }
}

/// The node at a path of a tree.
pub(crate) fn node<'t>(tree: &'t Tree, path: &str) -> Option<&'t Node> {
    tree.values().find(|node| node.paths.iter().any(|other| other.strip_prefix('/') == Some(path)))
}

/// A number below `n` that belongs to the schedule.
pub(crate) fn below(n: u64) -> u64 {
    thread_rng().gen_range(0..n)
}

/// Prints the seed if the scenario fails.
struct Report<'a>(&'a str, u64);

impl Drop for Report<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{} fails with RIOFS_SEED={} RIOFS_SEEDS=1", self.0, self.1);
        }
    }
}

/// Runs a scenario with many schedules: those of `shuttle`'s random scheduler, those of PCT with 1 to
/// 4 changes of priority, and [`Sticky`] ones. `RIOFS_SEED` is the first seed, `RIOFS_SEEDS` their
/// number; usually it is `effort`.
pub(crate) fn explore(name: &'static str, world: &Arc<World>, effort: u64, scenario: fn(Run)) {
    explore_with(name, world, options(1), effort, scenario);
}

/// As [`explore`], with options of the mount.
pub(crate) fn explore_with(
    name: &'static str,
    world: &Arc<World>,
    options: MountOptions,
    effort: u64,
    scenario: fn(Run),
) {
    let first = number("RIOFS_SEED", 1);
    let seeds = number("RIOFS_SEEDS", effort);
    let began = Instant::now();
    let count = Arc::new(AtomicU64::new(0));
    let longest = Arc::new(AtomicU64::new(0));
    for seed in first..first + seeds {
        let report = Report(name, seed);
        let (world, options, count) = (Arc::clone(world), options.clone(), Arc::clone(&count));
        let longest = Arc::clone(&longest);
        let run = move || {
            let number = count.fetch_add(1, Ordering::Relaxed);
            scenario(Run::new(&world, seed * SCHEDULES as u64 + number, options.clone()));
            let switches = shuttle::current::context_switches() as u64;
            longest.fetch_max(switches, Ordering::Relaxed);
        };
        match seed % 4 {
            0 => Runner::new(RandomScheduler::new_from_seed(seed, SCHEDULES), config()).run(run),
            1 => {
                let depth = 2 + seed as usize / 4 % 4;
                let scheduler = PctScheduler::new_from_seed(seed, depth, SCHEDULES);
                Runner::new(scheduler, config()).run(run)
            }
            _ => Runner::new(Sticky::new(seed, SCHEDULES), config()).run(run),
        };
        drop(report);
    }
    let schedules = count.load(Ordering::Relaxed);
    let (states, time) = (world.distinct(), began.elapsed());
    let longest = longest.load(Ordering::Relaxed);
    println!("{name}: {schedules} schedules of up to {longest} switches, {time:.1?}");
    if states > 0 {
        println!("{states} states after crashes so far");
    }
}
