//! All sequences of one change and a sync, those of two, and those of three whose names collide; or
//! a sample. On a small image, and on one that is nearly full.
//!
//! The defaults take seconds. With `RIOFS_PROGRAMS=all` every program is tried: hours.
//!
//! | variable | meaning |
//! |---|---|
//! | `RIOFS_PROGRAMS` | the programs of each length that are tried, or `all` |
//! | `RIOFS_LONGER` | the random programs of many changes |
//! | `RIOFS_SEED` | chooses them; for longer ones the first seed |
//! | `RIOFS_SETUPS` | the setups, such as `lazy,ext4` |
//! | `RIOFS_STATES`, `RIOFS_NESTED`, `RIOFS_E2FSCK`, `RIOFS_REPLAYED` | the fields of `Effort` |
//! | `RIOFS_THREADS` | the number of threads |
//! | `RIOFS_BROKEN` | the number of broken promises after which a test ends |

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::enumerate::program::{CHANGES, COLLIDING, Change, Step, Sync};
use crate::enumerate::random::Random;
use crate::enumerate::setup::Setup;
use crate::enumerate::world::{Broken, Effort, World};
use crate::enumerate::{prepare, prepare_full};

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn effort() -> Effort {
    let usual = Effort::USUAL;
    Effort {
        states: variable("RIOFS_STATES").unwrap_or(usual.states),
        nested: variable("RIOFS_NESTED").unwrap_or(usual.nested),
        e2fsck: variable("RIOFS_E2FSCK").unwrap_or(usual.e2fsck),
        replayed: variable("RIOFS_REPLAYED").unwrap_or(usual.replayed),
        ..usual
    }
}

/// The world that all tests share, so that equal states are recovered once.
fn world() -> &'static Arc<World> {
    static WORLD: OnceLock<Arc<World>> = OnceLock::new();
    WORLD.get_or_init(|| World::new(effort(), prepare))
}

fn full_world() -> &'static Arc<World> {
    static WORLD: OnceLock<Arc<World>> = OnceLock::new();
    WORLD.get_or_init(|| World::new(effort(), prepare_full))
}

fn setups() -> Vec<Setup> {
    let wanted = std::env::var("RIOFS_SETUPS").unwrap_or_default().to_lowercase();
    let wanted: Vec<&str> = wanted.split(',').filter(|name| !name.is_empty()).collect();
    let is_wanted = |setup: &Setup| {
        wanted.is_empty() || wanted.contains(&format!("{setup:?}").to_lowercase().as_str())
    };
    Setup::ALL.into_iter().filter(is_wanted).collect()
}

/// Programs of a length, as numbers.
struct Programs {
    steps: Vec<Step>,
    len: u32,
}

impl Programs {
    fn new(changes: &[Change], len: u32) -> Self {
        let all = |&change| Sync::ALL.map(|sync| (change, sync));
        Self { steps: changes.iter().flat_map(all).collect(), len }
    }

    fn count(&self) -> usize {
        self.steps.len().pow(self.len)
    }

    /// The programs that begin with the same steps follow one another.
    fn get(&self, mut number: usize) -> Vec<Step> {
        let mut program = Vec::new();
        for _ in 0..self.len {
            program.push(self.steps[number % self.steps.len()]);
            number /= self.steps.len();
        }
        program.reverse();
        program
    }

    /// How many programs begin with the first `steps` steps of a program.
    fn with_prefix(&self, steps: u32) -> usize {
        self.steps.len().pow(self.len - steps)
    }
}

/// Tries `usual` programs, or as many as are wanted. If it is all, only the last step of each is
/// judged: the others are programs of their own.
fn run(world: &Arc<World>, programs: &Programs, usual: usize, what: &str) {
    let all = programs.count();
    let wanted = match std::env::var("RIOFS_PROGRAMS") {
        Ok(text) if text == "all" => all,
        Ok(text) => text.parse().unwrap(),
        Err(_) => usual,
    };
    let is_all = wanted >= all;
    let mut random = Random(variable("RIOFS_SEED").unwrap_or(1));
    let chosen: Vec<usize> = (0..wanted.min(all))
        .map(|n| if is_all { n } else { random.below(all as u64) as usize })
        .collect();
    let first = if is_all { programs.len as usize - 1 } else { 0 };
    let setups = setups();
    let next = AtomicUsize::new(0);
    let broken: Mutex<Vec<Broken>> = Mutex::default();
    // The ends of ranges of programs that begin with steps that are not possible.
    let impossible: Mutex<BTreeSet<(usize, usize)>> = Mutex::default();
    let most = variable("RIOFS_BROKEN").unwrap_or(1);
    std::thread::scope(|scope| {
        for _ in 0..variable("RIOFS_THREADS").unwrap_or(2) {
            scope.spawn(|| {
                while broken.lock().unwrap().len() < most {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&number) = chosen.get(index) else { return };
                    if index > 0 && index.is_multiple_of(5000) {
                        println!("{what}: {index} of {} tried; {}", chosen.len(), summary(world));
                    }
                    let is_known = impossible
                        .lock()
                        .unwrap()
                        .range(..=(number, usize::MAX))
                        .next_back()
                        .is_some_and(|&(_, end)| number < end);
                    if is_known {
                        continue;
                    }
                    let steps = programs.get(number);
                    for &setup in &setups {
                        match world.run(&steps, first, setup) {
                            Ok(None) => {}
                            Ok(Some(step)) => {
                                let len = programs.with_prefix(step as u32 + 1);
                                let start = number - number % len;
                                impossible.lock().unwrap().insert((start, start + len));
                                break;
                            }
                            Err(found) => {
                                println!("BROKEN {}: {}", found.program, found.why);
                                broken.lock().unwrap().push(found);
                            }
                        }
                    }
                }
            });
        }
    });
    report(world, what, broken.into_inner().unwrap());
}

/// Prints the counts. Panics with the first broken promise, if there is one.
fn report(world: &World, what: &str, broken: Vec<Broken>) {
    println!("{what}: done; {}", summary(world));
    for setup in Setup::ALL {
        let [programs, judged, distinct, nested, e2fsck, again, replayed] =
            world.counts[setup as usize].values();
        println!(
            "  {setup:?}: {programs} programs, {judged} states judged, {distinct} distinct, {nested} \
             of cut recoveries, {e2fsck} images judged by e2fsck and {again} again, {replayed} states \
             recovered by it"
        );
    }
    if let Some(Broken { program, why, state }) = broken.into_iter().next() {
        let kept = std::env::temp_dir().join("riofs-broken.img");
        if let Some(state) = state {
            state.save(&world.base, &kept);
        }
        panic!("{program}: {why} (the image: {})", kept.display());
    }
}

/// The counts of all setups together.
fn summary(world: &World) -> String {
    let mut all = [0; 7];
    for counts in &world.counts {
        all.iter_mut().zip(counts.values()).for_each(|(sum, value)| *sum += value);
    }
    let [programs, judged, _, nested, e2fsck, again, replayed] = all;
    let distinct = world.distinct();
    format!(
        "{programs} programs, {judged} states judged, {distinct} distinct states recovered, \
         {nested} of cut recoveries, {e2fsck} different images judged by e2fsck, {again} again, \
         {replayed} states recovered by it"
    )
}

#[test]
fn every_cut_of_one_change_keeps_the_promises() {
    let programs = Programs::new(CHANGES, 1);
    run(world(), &programs, programs.count(), "one change");
}

#[test]
fn cuts_of_two_changes_keep_the_promises() {
    run(world(), &Programs::new(CHANGES, 2), 50, "two changes");
}

#[test]
fn cuts_of_three_changes_of_the_same_names_keep_the_promises() {
    // All sequences of two are judged first: these are judged in their last step.
    run(world(), &Programs::new(COLLIDING, 1), 0, "one change of the same names");
    run(world(), &Programs::new(COLLIDING, 2), 0, "two changes of the same names");
    run(world(), &Programs::new(COLLIDING, 3), 200, "three changes of the same names");
}

#[test]
fn cuts_on_a_nearly_full_image_keep_the_promises() {
    let world = full_world();
    let programs = Programs::new(CHANGES, 1);
    run(world, &programs, programs.count(), "one change on a nearly full image");
    run(world, &Programs::new(CHANGES, 2), 100, "two changes on a nearly full image");
}

/// Random programs of eight changes: their steps are possible one after the other.
#[test]
fn cuts_of_random_programs_keep_the_promises() {
    let steps = Programs::new(&[CHANGES, COLLIDING].concat(), 1).steps;
    let first: u64 = variable("RIOFS_SEED").unwrap_or(1);
    let programs = variable("RIOFS_LONGER").unwrap_or(12);
    let setups = setups();
    let (next, broken) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let most = variable("RIOFS_BROKEN").unwrap_or(1);
    std::thread::scope(|scope| {
        for _ in 0..variable("RIOFS_THREADS").unwrap_or(2) {
            scope.spawn(|| {
                while broken.lock().unwrap().len() < most {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= programs {
                        return;
                    }
                    if number > 0 && number.is_multiple_of(20) {
                        println!("random programs: {number} tried; {}", summary(world()));
                    }
                    for &setup in &setups {
                        let world = if number % 4 == 3 { full_world() } else { world() };
                        if let Err(found) = world.run_random(&steps, 8, first + number, setup) {
                            println!("BROKEN {}: {}", found.program, found.why);
                            broken.lock().unwrap().push(found);
                        }
                    }
                }
            });
        }
    });
    report(full_world(), "random programs on a nearly full image", Vec::new());
    report(world(), "random programs", broken.into_inner().unwrap());
}
