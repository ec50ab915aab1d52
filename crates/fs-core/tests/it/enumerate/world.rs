//! Runs programs, cuts them everywhere, recovers every state, and judges what is left.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use riopipe_fs_core::file_journal::record::Epoch;
use riopipe_fs_core::fs::{Fs, MountOptions};

use super::check::{check, free_blocks};
use super::oracle::Expected;
use super::program::Step;
use super::random::Random;
use super::recorder::{Base, Boundary, Overlay, Progress, Recorder};
use super::script::Script;
use super::tree::{Contents, Tree, read_tree};
use super::{NOW, crc32c};

/// The streams: that of the main journal, and two for data.
pub(crate) const STREAMS: usize = 3;

/// The result of a recovery: what is there, or why it has failed.
type Outcome = Result<Arc<Tree>, Arc<str>>;

/// How many states are taken of what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// The states of one moment.
    pub(crate) states: u64,
    /// One of so many recoveries is cut everywhere itself.
    pub(crate) nested: u64,
    /// One of so many recovered images is judged by e2fsck too.
    pub(crate) e2fsck: u64,
}

impl Effort {
    pub(crate) const USUAL: Self = Self { states: 24, nested: 64, e2fsck: 512 };
    /// For programs that were made for their cuts.
    pub(crate) const THOROUGH: Self = Self { states: 2000, nested: 8, e2fsck: 64 };
}

/// A broken promise.
#[derive(Clone, Debug)]
pub(crate) struct Broken {
    pub(crate) program: String,
    pub(crate) why: String,
    pub(crate) state: Option<Overlay>,
}

/// All that programs share: the image on which they run, and the states that were recovered.
pub(crate) struct World {
    pub(crate) base: Arc<Base>,
    pub(crate) contents: Contents,
    outcomes: Mutex<HashMap<u64, Outcome>>,
    pub(crate) judged: AtomicU64,
    pub(crate) nested: AtomicU64,
    pub(crate) e2fsck: AtomicU64,
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
    pub(crate) fn new(effort: Effort, prepare: impl FnOnce(&Fs)) -> Arc<Self> {
        let id = "6a7b1c3e-9d44-4a7e-8f10-2b5c7d9e0f13";
        let seed = format!("hash_seed={id}");
        let options =
            ["-J", "size=8", "-N", "64", "-O", "^resize_inode", "-m", "0", "-U", id, "-E", &seed];
        let image = crate::image::Image::new(24, &options);
        let base = Arc::new(Base::from_bytes(&std::fs::read(image.path()).unwrap()));
        let recorder = Recorder::new(&base, Overlay::default(), STREAMS, Progress::Lazy);
        let (fs, _) = Fs::mount(recorder.clone(), self::options(0), NOW).unwrap();
        prepare(&fs);
        fs.unmount(NOW).unwrap();
        let base = base.with(&recorder.current());
        let base = Arc::new(base.with_garbage(&free_blocks(&base)));
        check(&base, &Overlay::default()).unwrap();
        Arc::new(Self {
            base,
            contents: Contents::default(),
            outcomes: Mutex::default(),
            judged: AtomicU64::new(0),
            nested: AtomicU64::new(0),
            e2fsck: AtomicU64::new(0),
            effort,
        })
    }

    /// The states that were recovered.
    pub(crate) fn distinct(&self) -> usize {
        self.outcomes.lock().unwrap().len()
    }

    /// Recovers a state, and unmounts it. Equal states are recovered once.
    pub(crate) fn recover(&self, state: &Overlay, depth: u32) -> Outcome {
        if let Some(outcome) = self.outcomes.lock().unwrap().get(&state.hash()) {
            return outcome.clone();
        }
        let is_nested = depth > 0 && state.hash().is_multiple_of(self.effort.nested);
        let recovered = caught(|| self.recover_once(state, is_nested, depth));
        let outcome = recovered.map(Arc::new).map_err(Arc::from);
        self.outcomes.lock().unwrap().insert(state.hash(), outcome.clone());
        outcome
    }

    fn recover_once(&self, state: &Overlay, is_nested: bool, depth: u32) -> Result<Tree, String> {
        // A volume may have another number of streams at the next mount.
        let streams = STREAMS + (state.hash() >> 32) as usize % 3;
        let recorder = Recorder::new(&self.base, state.clone(), streams, Progress::Lazy);
        if is_nested {
            recorder.record();
        }
        let (fs, _) = Fs::mount(recorder.clone(), options(state.hash()), NOW)
            .map_err(|error| format!("mount: {error}"))?;
        let tree = read_tree(&fs, &self.contents)?;
        fs.unmount(NOW).map_err(|error| format!("unmount: {error}"))?;
        let left = recorder.current();
        check(&self.base, &left).map_err(|why| format!("the image after an unmount: {why}"))?;
        if state.hash() % self.effort.e2fsck == 1 {
            self.e2fsck.fetch_add(1, Ordering::Relaxed);
            self.e2fsck(&left)?;
        }
        if is_nested {
            let mut random = Random(state.hash());
            for boundary in recorder.boundaries() {
                let mut broken = None;
                boundary.states(&self.base, self.effort.states / 2, &mut random, &mut |cut| {
                    self.nested.fetch_add(1, Ordering::Relaxed);
                    let why = match self.recover(&cut, depth - 1) {
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

    /// `e2fsck -fy` on a copy finds nothing.
    pub(crate) fn e2fsck(&self, state: &Overlay) -> Result<(), String> {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("image");
        state.save(&self.base, &path);
        let ended = crate::image::run("e2fsck", &["-f", "-y", path.to_str().unwrap()], None);
        if ended.code == 0 { Ok(()) } else { Err(format!("e2fsck: {}", ended.output)) }
    }

    /// Runs a program of steps, and judges all its cuts. Returns whether all its calls were
    /// possible; otherwise it is not a program.
    pub(crate) fn run(
        self: &Arc<Self>,
        steps: &[Step],
        progress: Progress,
    ) -> Result<bool, Broken> {
        let ran = caught(|| {
            let script = Script::new(self, progress);
            let is_possible = steps.iter().all(|&(change, sync)| {
                let is_possible = script.try_change(change);
                if is_possible {
                    script.sync(change.path(), sync);
                }
                is_possible
            });
            Ok(if is_possible { script.judge() } else { Ok(()) }.map(|()| is_possible))
        });
        let program = format!("{steps:?}, {progress:?}");
        match ran {
            Ok(Ok(ran)) => Ok(ran),
            Ok(Err(broken)) => Err(Broken { program, ..broken }),
            Err(why) => Err(Broken { program, why, state: None }),
        }
    }

    /// Judges all states of all moments. `phases` has what each phase of the program expects.
    pub(crate) fn judge(&self, boundaries: &[Boundary], phases: &[Expected]) -> Result<(), Broken> {
        let mut seen = HashSet::new();
        let mut random = Random(1);
        let mut broken = None;
        for (number, boundary) in boundaries.iter().enumerate() {
            boundary.states(&self.base, self.effort.states, &mut random, &mut |state| {
                if broken.is_some() || !seen.insert((boundary.step, state.hash())) {
                    return;
                }
                self.judged.fetch_add(1, Ordering::Relaxed);
                let judged = match self.recover(&state, 1) {
                    Ok(tree) => phases[boundary.step].judge(&tree, &self.contents),
                    Err(why) => Err(why.to_string()),
                };
                if let Err(why) = judged {
                    let why = format!("phase {}, moment {number}: {why}", boundary.step);
                    broken = Some(Broken { program: String::new(), why, state: Some(state) });
                }
            });
        }
        broken.map_or(Ok(()), Err)
    }
}

fn differences(first: &Tree, second: &Tree) -> String {
    let ids: HashSet<_> = first.keys().chain(second.keys()).collect();
    let differ = ids.into_iter().filter(|id| first.get(id) != second.get(id));
    let text = differ.map(|id| format!("{:?} is {:?}", first.get(id), second.get(id)));
    text.collect::<Vec<_>>().join("; ")
}
