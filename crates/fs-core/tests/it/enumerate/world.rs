//! Runs programs, cuts them everywhere, recovers every state, and judges what is left.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use riopipe_fs_core::file_journal::record::Epoch;
use riopipe_fs_core::format::features::incompat;
use riopipe_fs_core::format::superblock::Superblock;
use riopipe_fs_core::fs::{Fs, JournalMode, MountOptions};
use riopipe_fs_testkit::check::{check, free_blocks};

use super::judge::Judge;
use super::oracle::Expected;
use super::program::Step;
use super::random::Random;
use super::recorder::{Base, Boundary, Device, Overlay, Recorder, Whole};
use super::script::Script;
use super::setup::{STREAMS, Setup};
use super::tree::{Contents, Tree, read_tree};
use super::{NOW, crc32c};

/// The result of a recovery: what is there, or why it has failed.
type Outcome = Result<Arc<Tree>, Arc<str>>;

/// How many states are taken of what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// The states of one moment.
    pub(crate) states: u64,
    /// One of so many recoveries is cut everywhere itself.
    pub(crate) nested: u64,
    /// How deep cuts of recoveries of cuts go.
    pub(crate) depth: u32,
    /// e2fsck judges one of so many different images.
    pub(crate) e2fsck: u64,
    /// In modes without records, e2fsck also recovers one of so many states itself.
    pub(crate) replayed: u64,
}

impl Effort {
    pub(crate) const USUAL: Self =
        Self { states: 24, nested: 64, depth: 1, e2fsck: 16, replayed: 512 };
    /// For programs that were made for their cuts.
    pub(crate) const THOROUGH: Self =
        Self { states: 2000, nested: 8, depth: 1, e2fsck: 4, replayed: 64 };
}

/// e2fsck judges one of so many recovered states although it has seen the same metadata.
const AGAIN: u64 = 32;

/// The steps that a random program tries.
const TRIES: usize = 100;

/// A mode in which the image is mounted before the programs, and what is done there.
pub(crate) type Mount<'a> = (JournalMode, &'a dyn Fn(&Fs));

/// A broken promise.
#[derive(Clone, Debug)]
pub(crate) struct Broken {
    pub(crate) program: String,
    pub(crate) why: String,
    pub(crate) state: Option<Overlay>,
}

/// The work of one setup.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) programs: AtomicU64,
    /// The judgements of a state at a moment.
    pub(crate) judged: AtomicU64,
    /// The states that were recovered: no two are equal.
    pub(crate) distinct: AtomicU64,
    /// The judgements of states after a cut of a recovery.
    pub(crate) nested: AtomicU64,
    /// The images that e2fsck has judged: no two have the same metadata.
    pub(crate) e2fsck: AtomicU64,
    /// The images that e2fsck has judged although it had seen their metadata.
    pub(crate) again: AtomicU64,
    /// The states of modes without records that e2fsck has recovered.
    pub(crate) replayed: AtomicU64,
}

impl Counts {
    fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// The counts, in the order of the fields.
    pub(crate) fn values(&self) -> [u64; 7] {
        let Self { programs, judged, distinct, nested, e2fsck, again, replayed } = self;
        [programs, judged, distinct, nested, e2fsck, again, replayed]
            .map(|counter| counter.load(Ordering::Relaxed))
    }
}

/// All that programs share: the image on which they run, and the states that were recovered.
pub(crate) struct World {
    pub(crate) base: Arc<Base>,
    pub(crate) contents: Contents,
    /// Each state that was recovered, by its hash.
    outcomes: Mutex<HashMap<u64, Outcome>>,
    /// Equal trees are kept once.
    trees: Mutex<HashSet<Arc<Tree>>>,
    /// The metadata that e2fsck has judged, by its hash.
    clean: Mutex<HashSet<u64>>,
    judges: Mutex<Vec<Judge>>,
    pub(crate) counts: [Counts; Setup::ALL.len()],
    pub(crate) effort: Effort,
}

pub(crate) fn options(epoch: u64) -> MountOptions {
    let mut bytes = *b"epoch of a mount";
    bytes[..8].copy_from_slice(&epoch.to_le_bytes());
    MountOptions { atime: false, area_blocks_max: 128, crc32c, ..MountOptions::new(Epoch(bytes)) }
}

/// The text of a panic.
pub(crate) fn caught<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

impl World {
    /// A world whose image is what `prepare` leaves after an unmount.
    pub(crate) fn new(effort: Effort, prepare: impl Fn(&Fs)) -> Arc<Self> {
        Self::after(effort, &[(JournalMode::Rio, &prepare)])
    }

    /// A world whose image was mounted, changed and unmounted several times.
    pub(crate) fn after(effort: Effort, mounts: &[Mount<'_>]) -> Arc<Self> {
        let id = "6a7b1c3e-9d44-4a7e-8f10-2b5c7d9e0f13";
        let seed = format!("hash_seed={id}");
        // No smaller journal has space for the areas of five streams, and mke2fs makes no smaller
        // image for it.
        let tools =
            ["-J", "size=7", "-N", "32", "-O", "^resize_inode", "-m", "0", "-U", id, "-E", &seed];
        let image = crate::image::Image::new(15, &tools);
        let mut base = Arc::new(Base::from_bytes(&std::fs::read(image.path()).unwrap()));
        for (number, (mode, prepare)) in mounts.iter().enumerate() {
            let device = Device::lazy(STREAMS);
            let recorder = Recorder::new(&base, Overlay::default(), device);
            let mount = MountOptions { mode: *mode, ..options(1_000_000 + number as u64) };
            let (fs, _) = Fs::mount(recorder.clone(), mount, NOW).unwrap();
            prepare(&fs);
            fs.unmount(NOW).unwrap();
            base = Arc::new(base.with(&recorder.current()));
        }
        let state = Overlay::default();
        let free = free_blocks(&Whole { base: &base, state: &state }, crc32c);
        Self::of(Arc::new(base.with_garbage(&free)), effort)
    }

    /// A world with this image, which must be one after an unmount.
    pub(crate) fn of(base: Arc<Base>, effort: Effort) -> Arc<Self> {
        check(&Whole { base: &base, state: &Overlay::default() }, crc32c).unwrap();
        Arc::new(Self {
            base,
            contents: Contents::default(),
            outcomes: Mutex::default(),
            trees: Mutex::default(),
            clean: Mutex::default(),
            judges: Mutex::default(),
            counts: Default::default(),
            effort,
        })
    }

    /// The states that were recovered.
    pub(crate) fn distinct(&self) -> usize {
        self.outcomes.lock().unwrap().len()
    }

    /// Recovers a state, and unmounts it. Equal states are recovered once.
    pub(crate) fn recover(&self, state: &Overlay, depth: u32, counts: &Counts) -> Outcome {
        if let Some(outcome) = self.outcomes.lock().unwrap().get(&state.hash()) {
            return outcome.clone();
        }
        let is_nested = depth > 0 && state.hash().is_multiple_of(self.effort.nested);
        let recovered = caught(|| self.recover_once(state, is_nested, depth, counts));
        let outcome = recovered.map(|tree| self.shared(tree)).map_err(Arc::from);
        let before = self.outcomes.lock().unwrap().insert(state.hash(), outcome.clone());
        if before.is_none() {
            Counts::add(&counts.distinct);
        }
        outcome
    }

    fn shared(&self, tree: Tree) -> Arc<Tree> {
        let mut trees = self.trees.lock().unwrap();
        if let Some(shared) = trees.get(&tree) {
            return Arc::clone(shared);
        }
        let shared = Arc::new(tree);
        trees.insert(Arc::clone(&shared));
        shared
    }

    fn recover_once(
        &self,
        state: &Overlay,
        is_nested: bool,
        depth: u32,
        counts: &Counts,
    ) -> Result<Tree, String> {
        // A volume may have another number of streams at the next mount, and another mode.
        let streams = STREAMS + (state.hash() >> 32) as usize % 3;
        let mode = match (state.hash() >> 40) % 5 {
            0 => JournalMode::Ext4,
            1 => JournalMode::Barrier,
            2 => JournalMode::Opimq,
            _ => JournalMode::Rio,
        };
        let device = Device::of_mode(mode, streams);
        let recorder = Recorder::new(&self.base, state.clone(), device);
        if is_nested {
            recorder.record();
        }
        let mount = MountOptions { mode, ..options(state.hash()) };
        let (fs, _) =
            Fs::mount(recorder.clone(), mount, NOW).map_err(|error| format!("mount: {error}"))?;
        let tree = read_tree(&fs, &self.contents)?;
        fs.unmount(NOW).map_err(|error| format!("unmount: {error}"))?;
        self.hand_back(&recorder.current(), state.hash(), counts)?;
        if is_nested {
            let mut random = Random(state.hash());
            for boundary in recorder.boundaries() {
                let mut broken = None;
                boundary.states(&self.base, self.effort.states / 2, &mut random, &mut |cut| {
                    Counts::add(&counts.nested);
                    let why = match self.recover(&cut, depth - 1, counts) {
                        Ok(again) if *again == tree => return,
                        Ok(again) => differences(&tree, &again),
                        Err(why) => why.to_string(),
                    };
                    broken = Some(format!("after a cut of the recovery or unmount: {why}"));
                });
                if let Some(broken) = broken {
                    return Err(broken);
                }
            }
        }
        Ok(tree)
    }

    /// An image that was unmounted is clean: the checker finds nothing, and e2fsck nothing to
    /// repair. It sees the same in all images with the same metadata, so it judges one of them, and
    /// some of the others.
    fn hand_back(&self, left: &Overlay, hash: u64, counts: &Counts) -> Result<(), String> {
        let checked = check(&Whole { base: &self.base, state: left }, crc32c);
        let metadata = checked.map_err(|why| format!("the image after an unmount: {why}"))?;
        let is_again = hash.is_multiple_of(AGAIN * self.effort.e2fsck);
        let is_chosen = metadata.is_multiple_of(self.effort.e2fsck);
        let is_new = is_chosen && self.clean.lock().unwrap().insert(metadata);
        if is_new || is_again {
            Counts::add(if is_new { &counts.e2fsck } else { &counts.again });
            return self.with_judge(|judge| judge.is_clean(&self.base, left));
        }
        Ok(())
    }

    /// Lets one of the judges do something. There are as many as threads that want one.
    pub(crate) fn with_judge<T>(&self, run: impl FnOnce(&mut Judge) -> T) -> T {
        let judge = self.judges.lock().unwrap().pop();
        let mut judge = judge.unwrap_or_else(|| Judge::new(&self.base));
        let result = run(&mut judge);
        self.judges.lock().unwrap().push(judge);
        result
    }

    /// Runs a program of steps, and judges its cuts in the steps from `first` on. Returns how many
    /// steps were possible, if not all: then it is not a program.
    pub(crate) fn run(
        self: &Arc<Self>,
        steps: &[Step],
        first: usize,
        setup: Setup,
    ) -> Result<Option<usize>, Broken> {
        let ran = caught(|| {
            let script = Script::new(self, setup);
            for (number, &(change, sync)) in steps.iter().enumerate() {
                if number == first {
                    script.judge_from_here();
                }
                if !script.try_change(change) || !script.try_sync(change.path(), sync) {
                    return Ok(Ok(Some(number)));
                }
            }
            Counts::add(&self.counts[setup as usize].programs);
            Ok(script.judge().map(|()| None))
        });
        let program = format!("{steps:?}, {setup:?}");
        match ran {
            Ok(Ok(ran)) => Ok(ran),
            Ok(Err(broken)) => Err(Broken { program, ..broken }),
            Err(why) => Err(Broken { program, why, state: None }),
        }
    }

    /// Runs a random program of `len` steps that are possible one after the other, or fewer if few
    /// are possible.
    pub(crate) fn run_random(
        self: &Arc<Self>,
        steps: &[Step],
        len: usize,
        seed: u64,
        setup: Setup,
    ) -> Result<(), Broken> {
        let mut random = Random(seed);
        let mut done: Vec<Step> = Vec::new();
        let ran = caught(|| {
            let script = Script::new(self, setup);
            for _ in 0..TRIES {
                if done.len() == len {
                    break;
                }
                let step = steps[random.below(steps.len() as u64) as usize];
                if script.try_change(step.0) {
                    done.push(step);
                    script.sync(step.0.path(), step.1);
                }
            }
            Counts::add(&self.counts[setup as usize].programs);
            Ok(script.judge())
        });
        let program = format!("seed {seed}: {done:?}, {setup:?}");
        match ran {
            Ok(ran) => ran.map_err(|broken| Broken { program, ..broken }),
            Err(why) => Err(Broken { program, why, state: None }),
        }
    }

    /// Judges all states of all moments from phase `first` on. `phases` has what each phase of the
    /// program expects.
    pub(crate) fn judge(
        &self,
        boundaries: &[Boundary],
        phases: &[Expected],
        first: usize,
        setup: Setup,
    ) -> Result<(), Broken> {
        let counts = &self.counts[setup as usize];
        let mut seen = HashSet::new();
        let mut random = Random(1);
        let mut broken = None;
        let moments = boundaries.iter().enumerate().filter(|(_, moment)| moment.step >= first);
        for (number, boundary) in moments {
            boundary.states(&self.base, self.effort.states, &mut random, &mut |state| {
                if broken.is_some() || !seen.insert((boundary.step, state.hash())) {
                    return;
                }
                Counts::add(&counts.judged);
                let expected = &phases[boundary.step];
                let judged = match self.recover(&state, self.effort.depth, counts) {
                    Ok(tree) => expected.judge(&tree, &self.contents),
                    Err(why) => Err(why.to_string()),
                };
                let judged = judged.and_then(|()| match setup.mode() {
                    JournalMode::Ext4 | JournalMode::Barrier | JournalMode::Opimq => {
                        self.judge_without_riofs(&state, expected, counts)
                    }
                    JournalMode::Rio | JournalMode::Horae => Ok(()),
                });
                if let Err(why) = judged {
                    let why = format!("phase {}, moment {number}: {why}", boundary.step);
                    broken = Some(Broken { program: String::new(), why, state: Some(state) });
                }
            });
        }
        broken.map_or(Ok(()), Err)
    }

    /// The modes without file-level transactions never set the private bit, so others may recover a
    /// state. e2fsck does it.
    fn judge_without_riofs(
        &self,
        state: &Overlay,
        expected: &Expected,
        counts: &Counts,
    ) -> Result<(), String> {
        let superblock = Superblock::decode(state.read(&self.base, 0), crc32c)
            .map_err(|error| error.to_string())?;
        let is_private = superblock.features().has_incompat(incompat::RIOFS_DIRTY);
        if is_private {
            return Err("the private bit is set in a mode without records".to_owned());
        }
        if !state.hash().is_multiple_of(self.effort.replayed) {
            return Ok(());
        }
        Counts::add(&counts.replayed);
        let left = self.with_judge(|judge| judge.replayed(&self.base, state))?;
        let recorder = Recorder::new(&self.base, left, Device::lazy(STREAMS));
        let (fs, _) = Fs::mount(recorder, options(2), NOW).map_err(|error| error.to_string())?;
        let tree = read_tree(&fs, &self.contents)?;
        expected.judge(&tree, &self.contents).map_err(|why| format!("e2fsck recovered: {why}"))
    }
}

fn differences(first: &Tree, second: &Tree) -> String {
    let ids: HashSet<_> = first.keys().chain(second.keys()).collect();
    let differ = ids.into_iter().filter(|id| first.get(id) != second.get(id));
    let text = differ.map(|id| format!("{:?} is {:?}", first.get(id), second.get(id)));
    text.collect::<Vec<_>>().join("; ")
}
