//! RioFS on the simulated volume, under all faults of the cluster.
//!
//! The file system is the real one, and the program on it is a random one
//! ([`riopipe_fs_testkit`]). When the file system waits for its storage, events are handled until
//! the wait ends, so faults strike in the middle of its calls. When its process dies, or a stream
//! fails, the instance is dead: the volume is opened again, by this initiator or by another one, and
//! recovered; the file system is mounted, and recovers; and the model judges what is there. Then the
//! program goes on.
//!
//! The oracle of the cluster judges each block meanwhile. The duties that the file system has as a
//! caller of the volume (traps T11 and T15) are checked at each submission.

mod counts;
mod image;
mod storage;
mod watch;

use std::sync::Arc;

use riopipe_fs_core::BLOCK_BYTES;
use riopipe_fs_core::Block;
use riopipe_fs_core::FsError;
use riopipe_fs_core::file_journal::record::Epoch;
use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Fs, JournalMode, MountOptions, mode};
use riopipe_fs_testkit::check::check;
use riopipe_fs_testkit::model::{Model, read_all};
use riopipe_fs_testkit::path::resolve;
use riopipe_fs_testkit::program::Call;
use riopipe_fs_testkit::random::Random;
use riopipe_platform::crc32c;

pub use self::counts::FsCounts;
pub use self::image::{BLOCKS, image};
use self::storage::{ClusterStorage, cluster, enter, leave};
use crate::core::{MS, US};
use crate::oracle::Promise;
use crate::rng::Rng;
use crate::scenario::{Engine, FsSpec, Scenario};
use crate::world::{Outcome, World};

/// The calls of the program after the faults.
const LAST_CALLS: u32 = 12;
/// The longest pause of the program, ns.
const PAUSE_NS: u64 = 20 * MS;
/// The file that has most of the space. No call has its name.
const FILL: &str = "/fill";
/// The blocks that this file gets at once.
const FILL_BLOCKS: u64 = 512;
/// The blocks that the model does not count: those of large directories and extent trees, and those
/// of a call's own transaction.
const SPARE_BLOCKS: u64 = 12;
/// The number of drawings for one call. Some drawings give no call.
const DRAWS_MAX: u32 = 50;

/// Runs a scenario with a file system. Returns the content of the volume at the end, too.
pub(crate) fn run(mut world: World, scenario: &Scenario) -> (Outcome, Vec<u8>) {
    let Some(spec) = scenario.fs else { return (world.outcome(), Vec::new()) };
    if world.core().map.len() < BLOCKS {
        // A scenario that was made smaller, too small for the file system.
        return (world.outcome(), Vec::new());
    }
    for (at, block) in image::blocks() {
        world.preset(at, &block[..]);
    }
    world.core_mut().program_runs = true;
    world.begin();
    enter(world);
    let mut user = User {
        random: Random(spec.seed),
        rng: Rng::new(spec.seed ^ 0x66_735f_7069_7065),
        model: Model::default(),
        next: Vec::new(),
        left: spec.calls,
        is_last_phase: false,
        is_clean: true,
        counts: FsCounts::default(),
        mode: match (spec.like_ext4, scenario.volume.engine) {
            (true, _) => JournalMode::Ext4,
            (false, Engine::Barrier) => JournalMode::Barrier,
            (false, Engine::Opimq) => JournalMode::Opimq,
            (false, _) => JournalMode::Rio,
        },
        spec,
    };
    user.run();
    let world = leave();
    (Outcome { fs: user.counts, ..world.outcome() }, world.image())
}

/// The end of a mounted file system.
enum End {
    /// The storage has failed.
    Storage(String),
    /// It was unmounted.
    Unmounted,
    /// The run is over.
    Over,
}

/// The program and its state.
struct User {
    spec: FsSpec,
    mode: JournalMode,
    /// The choices of the program.
    random: Random,
    /// All other choices.
    rng: Rng,
    model: Model,
    /// The next calls, the last one first. The others are drawn.
    next: Vec<Call>,
    /// The number of calls that are left.
    left: u32,
    /// The faults have stopped, and the program does its last calls.
    is_last_phase: bool,
    /// The file system was unmounted, or never mounted.
    is_clean: bool,
    counts: FsCounts,
}

fn trace(what: impl FnOnce() -> String) {
    cluster(|world| world.core_mut().trace(what));
}

fn broken(promise: Promise, what: String) -> End {
    cluster(|world| world.broken(promise, what));
    End::Over
}

/// The time for the file system: a second of it is a millisecond of the cluster.
fn now() -> Time {
    let now = cluster(|world| world.core().now);
    Time { seconds: 1_700_000_000 + (now / MS) as i64, nanos: (now % MS) as u32 * 1000 }
}

impl User {
    fn run(&mut self) {
        while let Some((client, incarnation)) = self.wait_for_owner() {
            let end = self.use_volume(client, incarnation);
            let down_us = *self.rng.pick(&[10, 200, 5_000]);
            match end {
                End::Over => return,
                End::Storage(why) => {
                    self.counts.failures += 1;
                    trace(|| format!("the file system has failed: {why}"));
                    cluster(|world| world.end_process(client, incarnation, down_us));
                }
                End::Unmounted if self.is_last_phase && self.left == 0 => {
                    cluster(|world| world.core_mut().program_runs = false);
                    return self.finish();
                }
                End::Unmounted => cluster(|world| {
                    if world.is_running(client, incarnation) {
                        world.release(client, down_us);
                    }
                    while world.is_releasing(client, incarnation) && world.step() {}
                    // Another owner may have taken the volume meanwhile.
                    world.end_process(client, incarnation, down_us);
                }),
            }
        }
    }

    /// Handles events until an initiator has opened the volume.
    fn wait_for_owner(&self) -> Option<(usize, u32)> {
        loop {
            let (owner, steps) = cluster(|world| {
                world.end_failed_owner();
                let owner = world.usable_owner();
                (owner, owner.is_some() || world.step())
            });
            if owner.is_some() {
                return owner;
            }
            if !steps {
                if !cluster(|world| world.is_over()) {
                    broken(Promise::P8, "no initiator opens the volume".into());
                }
                return None;
            }
        }
    }

    /// The file system was unmounted for the last time: the volume is closed.
    fn finish(&self) {
        let image = cluster(|world| {
            while world.step() {}
            world.image()
        });
        if cluster(|world| world.core().oracle.violation().is_some()) {
            return;
        }
        if !cluster(|world| world.is_over()) {
            broken(Promise::P8, "the volume is not closed".into());
        } else if let Err(why) = check_image(&image) {
            broken(Promise::P5, format!("the image after the last unmount: {why}"));
        }
    }

    fn use_volume(&mut self, client: usize, incarnation: u32) -> End {
        let delays = Rng::new(self.rng.u64());
        let spec = &self.spec;
        let storage = ClusterStorage::new((client, incarnation), spec.delays, delays);
        let storage = match storage {
            Ok(storage) => Arc::new(storage),
            Err(error) => return End::Storage(error.0),
        };
        let end = self.use_storage(client, &storage);
        self.counts += storage.ended();
        end
    }

    fn use_storage(&mut self, client: usize, storage: &Arc<ClusterStorage>) -> End {
        let mut epoch = [0; 16];
        epoch
            .chunks_exact_mut(8)
            .for_each(|part| part.copy_from_slice(&self.rng.u64().to_le_bytes()));
        let options = MountOptions {
            mode: self.mode,
            atime: false,
            area_blocks_max: self.spec.area_blocks,
            dirty_pages_max: self.spec.dirty_pages as usize,
            crc32c,
            ..MountOptions::new(Epoch(epoch))
        };
        let (fs, report) = match Fs::mount(storage.clone(), options, now()) {
            Ok(mounted) => mounted,
            Err(error) if storage.has_failed() => {
                self.counts.cut_recoveries += u64::from(!self.is_clean);
                self.is_clean = false;
                return End::Storage(error.to_string());
            }
            Err(error) => return broken(Promise::P1, format!("RioFS can't mount: {error}")),
        };
        self.is_clean = false;
        self.counts.mounts += 1;
        self.counts.recoveries += u64::from(report.replayed > 0 || report.records > 0);
        self.counts.transactions += report.replayed;
        self.counts.records += report.records;
        trace(|| format!("initiator {client} has mounted the file system: {report:?}"));
        match read_all(&fs, now()) {
            Ok(found) => {
                if let Err(why) = self.model.judge(&found) {
                    return broken(Promise::P2, format!("after a mount ({report:?}): {why}"));
                }
                // All of it is durable.
                self.model = Model::of(&found);
                self.next.clear();
            }
            Err(error) if storage.has_failed() => return End::Storage(error.to_string()),
            Err(error) => {
                return broken(Promise::P5, format!("a tree can't be read: {error}"));
            }
        }
        let end = match self.fill(&fs, storage) {
            Ok(()) => self.use_file_system(&fs, storage),
            Err(end) => end,
        };
        let stat = fs.stat();
        self.counts.commits += stat.commits;
        self.counts.barriers += stat.barriers;
        self.counts.fallbacks += stat.fallbacks.iter().map(|(_, count)| count).sum::<u64>();
        if let End::Storage(why) = &end {
            self.check_failure(&fs, why);
        }
        end
    }

    fn use_file_system(&mut self, fs: &Fs, storage: &ClusterStorage) -> End {
        loop {
            if self.left == 0 {
                if self.is_last_phase {
                    return self.unmount(fs, storage);
                }
                cluster(World::end_faults);
            }
            if !self.is_last_phase && cluster(|world| world.have_faults_stopped()) {
                self.is_last_phase = true;
                self.left = LAST_CALLS;
            }
            self.left -= 1;
            if let Err(end) = self.call(fs, storage) {
                return end;
            }
            if self.rng.percent(self.spec.pauses.into()) {
                self.pause();
            }
            if self.rng.percent(self.spec.remounts.into()) {
                return self.unmount(fs, storage);
            }
        }
    }

    /// Gives most of the space to a file, so that the program uses the same blocks again and again.
    fn fill(&mut self, fs: &Fs, storage: &ClusterStorage) -> Result<(), End> {
        let space = u64::from(self.spec.space);
        if space == 0 || fs.statfs().blocks_available <= space {
            return Ok(());
        }
        let path = FILL.to_owned();
        if self.model.node(&path).is_none() {
            self.do_call(&Call::Create(path.clone()), fs, storage)?;
        }
        let fill = || {
            let ino = resolve(fs, &path)?;
            let mut at = 0;
            // Unwritten blocks behind the end of the file: nothing reads them.
            while let more @ 1.. = fs.statfs().blocks_available.saturating_sub(space) {
                let len = more.min(FILL_BLOCKS) * BLOCK_BYTES as u64;
                fs.fallocate(ino, mode::KEEP_SIZE, at, len, now())?;
                at += len;
            }
            Ok(())
        };
        fill().map_err(|error: FsError| match storage.has_failed() {
            true => End::Storage(error.to_string()),
            false => broken(Promise::P9, format!("filling the file system: {error}")),
        })?;
        self.do_call(&Call::Sync, fs, storage)
    }

    /// Whether there is space for all that the program has after a call.
    fn has_space(&self, call: &Call) -> bool {
        let space = u64::from(self.spec.space);
        if space == 0 {
            return true;
        }
        let mut after = self.model.clone();
        call.apply(&mut after);
        after.blocks() <= self.model.blocks() || after.blocks() + SPARE_BLOCKS <= space
    }

    /// Does the next call.
    fn call(&mut self, fs: &Fs, storage: &ClusterStorage) -> Result<(), End> {
        if self.next.is_empty() && self.rng.percent(self.spec.ordered.into()) {
            self.next = Call::draw_ordered(&self.model, FILL, &mut self.random);
            self.next.reverse();
        }
        if self.next.is_empty() && self.rng.percent(self.spec.reuse.into()) {
            self.next = Call::draw_reuse(&self.model, FILL, &mut self.random);
            self.next.reverse();
        }
        let drawn = self.next.pop().or_else(|| {
            let mut draws = 0..DRAWS_MAX;
            draws.find_map(|_| Call::draw(&self.model, &mut self.random))
        });
        match drawn.filter(|call| self.has_space(call)) {
            Some(call) => self.do_call(&call, fs, storage),
            None => Ok(()),
        }
    }

    fn do_call(&mut self, call: &Call, fs: &Fs, storage: &ClusterStorage) -> Result<(), End> {
        trace(|| format!("the program calls {call:?}"));
        cluster(|world| world.core_mut().note_call());
        let mut after = self.model.clone();
        call.apply(&mut after);
        match call.run(fs, &self.model, now()) {
            Ok(()) => {
                self.counts.calls += 1;
                self.model = after;
                Ok(())
            }
            Err(failed) if storage.has_failed() => {
                // The call may have had its effect, or not.
                self.model = self.model.during(&after);
                Err(End::Storage(failed.to_string()))
            }
            Err(failed) => {
                let (space, load) = (fs.statfs(), fs.load());
                let used = self.model.blocks();
                let what = format!("{call:?}: {failed}; {space:?}; {load:?}; the model has {used}");
                Err(broken(Promise::P9, what))
            }
        }
    }

    /// A program can know that what it has written is lost: all later syncs fail.
    fn check_failure(&self, fs: &Fs, why: &str) {
        let synced = fs.sync(now());
        if fs.is_read_only() && synced.is_ok() {
            let what = format!("the file system has failed ({why}), and a sync of it succeeds");
            broken(Promise::P6, what);
        }
    }

    fn pause(&mut self) {
        let ns = self.rng.below(PAUSE_NS);
        trace(|| format!("the program pauses for {} us", ns / US));
        cluster(|world| {
            let until = world.core().now + ns;
            while world.core().now < until && world.step() {}
        });
    }

    fn unmount(&mut self, fs: &Fs, storage: &ClusterStorage) -> End {
        trace(|| "the program unmounts".into());
        // An unmount is a sync, and its end may be reached.
        let mut after = self.model.clone();
        after.sync_all();
        match fs.unmount(now()) {
            Ok(()) => {
                self.model = after;
                self.is_clean = true;
                if !storage.wait_home() {
                    // A crash cut it off. Recovery brings the blocks home.
                    return End::Unmounted;
                }
                let image = cluster(|world| world.image());
                match check_image(&image) {
                    Ok(()) => End::Unmounted,
                    Err(why) => broken(Promise::P5, format!("the image after an unmount: {why}")),
                }
            }
            Err(error) if storage.has_failed() => {
                self.counts.cut_unmounts += 1;
                self.model = self.model.during(&after);
                End::Storage(error.to_string())
            }
            Err(error) => broken(Promise::P5, format!("an unmount: {error}")),
        }
    }
}

/// Checks the structures of an image that was unmounted.
fn check_image(image: &[u8]) -> Result<(), String> {
    let (blocks, _): (&[Block], _) = image.as_chunks::<BLOCK_BYTES>();
    check(blocks, crc32c).map(drop)
}
