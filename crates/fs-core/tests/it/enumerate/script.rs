//! A program in progress, and the expectations that belong to each of its moments.

use std::sync::{Arc, Mutex};

use riopipe_fs_core::fs::Fs;
use riopipe_fs_core::storage::StreamNo;

use super::NOW;
use super::oracle::Expected;
use super::program::{Change, Sync, resolve, split};
use super::recorder::{Overlay, Progress, Recorder};
use super::tree::{Id, Tree, read_tree};
use super::world::{Broken, STREAMS, World, options};

/// The expectations now, and those of each phase. A phase is a change or a sync: in the middle of
/// it the result of the change may be there, and what is synced need not be.
#[derive(Debug)]
struct Phases {
    now: Expected,
    all: Vec<Expected>,
    writes: usize,
}

/// A program in progress. Clones are the same program.
#[derive(Clone)]
pub(crate) struct Script {
    pub(crate) world: Arc<World>,
    pub(crate) fs: Arc<Fs>,
    recorder: Arc<Recorder>,
    phases: Arc<Mutex<Phases>>,
}

impl Script {
    /// Mounts the image. The moments of the mount count, too.
    pub(crate) fn new(world: &Arc<World>, progress: Progress) -> Self {
        let recorder = Recorder::new(&world.base, Overlay::default(), STREAMS, progress);
        recorder.record();
        let (fs, _) = Fs::mount(recorder.clone(), options(1), NOW).unwrap();
        let mut now = Expected::new(read_tree(&fs, &world.contents).unwrap());
        // It was unmounted before.
        now.sync();
        let phases = Phases { all: vec![now.clone()], now, writes: 0 };
        let (fs, phases) = (Arc::new(fs), Arc::new(Mutex::new(phases)));
        Self { world: Arc::clone(world), fs, recorder, phases }
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

    /// Does a change, and returns whether it was possible.
    pub(crate) fn try_change(&self, change: Change) -> bool {
        let phase = self.begin();
        let mut after = || {
            let tree = read_tree(&self.fs, &self.world.contents).unwrap();
            let mut phases = self.phases.lock().unwrap();
            phases.now.push(tree);
            phases.all[phase] = phases.all[phase].with_trees_of(&phases.now);
        };
        let number = {
            let mut phases = self.phases.lock().unwrap();
            phases.writes += 1;
            phases.writes
        };
        let is_possible = change.run(&self.fs, number, &mut after).is_ok();
        self.begin();
        is_possible
    }

    /// Does a change, which must be possible.
    pub(crate) fn change(&self, change: Change) -> &Self {
        assert!(self.try_change(change), "{change:?} is not possible");
        self
    }

    /// Syncs a path, as `how` has it.
    pub(crate) fn sync(&self, path: &str, how: Sync) -> &Self {
        self.begin();
        let now = self.now();
        let done = self.do_sync(path, how, &now);
        if let Some(done) = done {
            // Changes may have come in the middle, so what was synced is from before.
            done(&mut self.phases.lock().unwrap().now, &now);
            self.begin();
        }
        self
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
        if how == Sync::Barrier {
            fs.barrier(ino, false, NOW).unwrap();
            return Some(Box::new(move |expected, before| expected.barrier(id, before)));
        }
        fs.fsync(ino, data_only, NOW).unwrap();
        let dir = format!("/{path}");
        match (data_only, is_file) {
            (_, true) => {
                Some(Box::new(move |expected, before| expected.fsync(id, data_only, before)))
            }
            (false, false) => {
                Some(Box::new(move |expected, before| expected.fsync_dir(id, &dir, before)))
            }
            (true, false) => None,
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

    /// Judges the states of all moments.
    pub(crate) fn judge(&self) -> Result<(), Broken> {
        let boundaries = self.recorder.boundaries();
        self.world.judge(&boundaries, &self.phases.lock().unwrap().all)
    }
}
