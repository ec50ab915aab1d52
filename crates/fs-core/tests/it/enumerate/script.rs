//! A program in progress, and the expectations that belong to each of its moments.

use std::sync::{Arc, Mutex};

use riopipe_fs_core::fs::Fs;
use riopipe_fs_core::storage::StreamNo;
use riopipe_fs_testkit::path::{resolve, split};

use super::mapped::Mapped;
use super::oracle::Expected;
use super::program::{Change, Sync};
use super::recorder::{Device, Overlay, Recorder};
use super::setup::Setup;
use super::tree::{Id, Tree, read_tree};
use super::world::{Broken, World, options};
use super::{LATER, NOW};

/// The expectations now, and those of each phase. A phase is a change or a sync: in the middle of
/// it the result of the change may be there, and what is synced need not be.
#[derive(Debug)]
struct Phases {
    now: Expected,
    all: Vec<Expected>,
    /// The first phase that is judged.
    first: usize,
    writes: usize,
}

/// A program in progress. Clones are the same program.
#[derive(Clone)]
pub(crate) struct Script {
    pub(crate) world: Arc<World>,
    pub(crate) fs: Arc<Fs>,
    pub(crate) setup: Setup,
    recorder: Arc<Recorder>,
    phases: Arc<Mutex<Phases>>,
    mapped: Arc<Mutex<Mapped>>,
}

impl Script {
    /// Mounts the image. The moments of the mount count, too.
    pub(crate) fn new(world: &Arc<World>, setup: Setup) -> Self {
        Self::on(world, setup, setup.device())
    }

    /// As [`new`](Self::new), on a particular storage.
    pub(crate) fn on(world: &Arc<World>, setup: Setup, device: Device) -> Self {
        let recorder = Recorder::new(&world.base, Overlay::default(), device);
        recorder.record();
        let (fs, _) = Fs::mount(recorder.clone(), setup.options(options(1)), NOW).unwrap();
        let first = read_tree(&fs, &world.contents).unwrap();
        let mut now = Expected::new(first, setup);
        // It was unmounted before.
        now.sync();
        let phases = Phases { all: vec![now.clone()], now, first: 0, writes: 0 };
        let (fs, phases) = (Arc::new(fs), Arc::new(Mutex::new(phases)));
        Self { world: Arc::clone(world), fs, setup, recorder, phases, mapped: Arc::default() }
    }

    fn begin(&self) -> usize {
        let mut phases = self.phases.lock().unwrap();
        let number = phases.all.len();
        let now = phases.now.clone();
        phases.all.push(now);
        self.recorder.set_step(number);
        number
    }

    fn now(&self) -> Expected {
        self.phases.lock().unwrap().now.clone()
    }

    /// The moments before this one are not judged.
    pub(crate) fn judge_from_here(&self) {
        let mut phases = self.phases.lock().unwrap();
        phases.first = phases.all.len();
    }

    /// Records what is there after a call of phase `phase`.
    fn called(&self, phase: usize) {
        let tree = read_tree(&self.fs, &self.world.contents).unwrap();
        let mut phases = self.phases.lock().unwrap();
        phases.now.push(tree);
        phases.all[phase] = phases.all[phase].with_trees_of(&phases.now);
    }

    /// Does a change, and returns whether it was possible. On a full image, a change may be done in
    /// part.
    pub(crate) fn try_change(&self, change: Change) -> bool {
        let waiting = self.mapped.lock().unwrap().all();
        if matches!(change, Change::Fallocate(..)) {
            // The kernel writes the pages back first.
            self.write_mapped(&waiting);
        }
        let phase = self.begin();
        let number = {
            let mut phases = self.phases.lock().unwrap();
            phases.writes += 1;
            phases.writes
        };
        let mut after = || self.called(phase);
        let is_possible = match change {
            Change::Store(path, back) => {
                self.mapped.lock().unwrap().store(&self.fs, path, number, back)
            }
            _ => {
                let done = change.run(&self.fs, number, &mut after);
                let is_full = done == Err(riopipe_fs_core::FsError::NoSpace);
                if is_full {
                    after();
                }
                done.is_ok() || is_full
            }
        };
        self.begin();
        self.mapped.lock().unwrap().changed(&self.fs, change);
        if let Change::Store(_, back) = change {
            let pages = self.mapped.lock().unwrap().chosen(back);
            self.write_mapped(&pages);
        } else {
            // The background of the kernel writes the others back.
            self.write_mapped(&waiting);
        }
        is_possible
    }

    /// The kernel writes pages of mapped files back that are still dirty, the last one first.
    fn write_mapped(&self, pages: &[(u32, u64)]) {
        for &page in pages.iter().rev() {
            let phase = self.begin();
            if self.mapped.lock().unwrap().write_back(&self.fs, page) {
                self.called(phase);
            }
            self.begin();
        }
    }

    /// Does a change, which must be possible.
    pub(crate) fn change(&self, change: Change) -> &Self {
        assert!(self.try_change(change), "{change:?} is not possible");
        self
    }

    /// Syncs a path, as `how` has it, if there is something to sync.
    pub(crate) fn sync(&self, path: &str, how: Sync) -> &Self {
        self.try_sync(path, how);
        self
    }

    /// Syncs a path, as `how` has it. Returns whether there was something to sync.
    pub(crate) fn try_sync(&self, path: &str, how: Sync) -> bool {
        if let Ok(ino) = resolve(&self.fs, path)
            && matches!(how, Sync::Fsync | Sync::Fdatasync | Sync::Barrier)
        {
            let pages = self.mapped.lock().unwrap().of(ino);
            self.write_mapped(&pages);
        }
        self.begin();
        let now = self.now();
        let Some(done) = self.do_sync(path, how, &now) else { return how == Sync::Nothing };
        // Changes may have come in the middle, so what was synced is from before.
        done(&mut self.phases.lock().unwrap().now, &now);
        self.begin();
        true
    }

    #[allow(clippy::type_complexity)]
    fn do_sync(
        &self,
        path: &str,
        how: Sync,
        now: &Expected,
    ) -> Option<Box<dyn FnOnce(&mut Expected, &Expected)>> {
        let find = |path: &str, tree: &Tree| -> Option<(Id, bool)> {
            let full = format!("/{path}");
            let found = tree.iter().find(|(_, node)| node.paths.contains(&full));
            found.map(|(&id, node)| (id, node.is_file()))
        };
        let path = if how == Sync::FsyncDir { split(path).0 } else { path };
        let fs = &self.fs;
        if how == Sync::Nothing {
            if self.setup == Setup::Background {
                fs.tick(LATER).unwrap();
            }
            return None;
        }
        if how == Sync::All {
            fs.sync(NOW).unwrap();
            return Some(Box::new(|expected, before| expected.sync_as(before)));
        }
        let (id, is_file) = find(path, now.tree())?;
        if !now.tree()[&id].target.is_empty() {
            return None;
        }
        let ino = resolve(fs, path).unwrap();
        let data_only = how == Sync::Fdatasync;
        if how == Sync::Barrier && self.setup.has_barriers() {
            fs.barrier(ino, false, NOW).unwrap();
            return Some(Box::new(move |expected, before| expected.barrier(id, before)));
        }
        if how == Sync::Barrier {
            fs.barrier(ino, false, NOW).unwrap();
        } else {
            fs.fsync(ino, data_only, NOW).unwrap();
        }
        let dir = format!("/{path}");
        if is_file {
            Some(Box::new(move |expected, before| expected.fsync(id, data_only, before)))
        } else {
            Some(Box::new(move |expected, before| expected.fsync_dir(id, &dir, before)))
        }
    }

    /// Runs a part of the program in the middle of wait `number` of a stream, as another thread
    /// would.
    pub(crate) fn in_wait(
        &self,
        stream: u16,
        number: u32,
        part: impl FnOnce(&Self) + Send + 'static,
    ) -> &Self {
        let script = self.clone();
        self.recorder.on_wait(StreamNo(stream), number, Box::new(move || part(&script)));
        self
    }

    /// Unmounts.
    pub(crate) fn unmount(&self) -> &Self {
        self.begin();
        let now = self.now();
        self.fs.unmount(NOW).unwrap();
        self.phases.lock().unwrap().now.sync_as(&now);
        self.begin();
        self
    }

    /// Whether all parts in waits have run.
    pub(crate) fn has_run(&self) -> bool {
        self.recorder.has_run()
    }

    /// The numbers of the inodes that the program has seen.
    pub(crate) fn ids(&self) -> Vec<Id> {
        self.phases.lock().unwrap().now.ids()
    }

    /// Judges the states of all moments, or of those that were chosen.
    pub(crate) fn judge(&self) -> Result<(), Broken> {
        let waiting = self.mapped.lock().unwrap().all();
        self.write_mapped(&waiting);
        let boundaries = self.recorder.boundaries();
        let phases = self.phases.lock().unwrap();
        self.world.judge(&boundaries, &phases.all, phases.first, self.setup)
    }
}
