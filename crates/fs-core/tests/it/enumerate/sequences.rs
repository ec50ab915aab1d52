//! All sequences of one change and a sync, and those of two and three, or a sample.
//!
//! The defaults take seconds. `RIOFS_PROGRAMS` is the number of programs of each length that are
//! tried (`all`: every one), `RIOFS_SEED` chooses them, `RIOFS_THREADS` is the number of threads,
//! and `RIOFS_BROKEN` the number of broken promises after which a test ends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::enumerate::prepare;
use crate::enumerate::program::{CHANGES, COLLIDING, Change, Step, Sync};
use crate::enumerate::random::Random;
use crate::enumerate::recorder::Progress;
use crate::enumerate::world::{Broken, Effort, World};

/// All steps of the changes.
fn steps(changes: &'static [Change]) -> Vec<Step> {
    changes.iter().flat_map(|&change| Sync::ALL.map(|sync| (change, sync))).collect()
}

/// Program `number` of `len` steps.
fn program(steps: &[Step], len: u32, mut number: usize) -> Vec<Step> {
    (0..len)
        .map(|_| {
            let step = steps[number % steps.len()];
            number /= steps.len();
            step
        })
        .collect()
}

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// The numbers of the programs to be tried, of `all`.
fn chosen(all: usize, usual: usize) -> Vec<usize> {
    let wanted = match std::env::var("RIOFS_PROGRAMS") {
        Ok(text) if text == "all" => all,
        Ok(text) => text.parse().unwrap(),
        Err(_) => usual,
    };
    if wanted >= all {
        return (0..all).collect();
    }
    let mut random = Random(variable("RIOFS_SEED").unwrap_or(1));
    (0..wanted).map(|_| random.below(all as u64) as usize).collect()
}

/// Runs programs on some threads. Panics with the broken promises, if there are any.
fn run_all(world: &Arc<World>, programs: impl Iterator<Item = Vec<Step>> + Send, what: &str) {
    let threads = variable("RIOFS_THREADS").unwrap_or(2);
    let programs = Mutex::new(programs);
    let broken: Mutex<Vec<Broken>> = Mutex::default();
    let most = variable("RIOFS_BROKEN").unwrap_or(1);
    let ran = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while broken.lock().unwrap().len() < most {
                    let Some(steps) = programs.lock().unwrap().next() else { return };
                    for progress in [Progress::Lazy, Progress::Eager] {
                        match world.run(&steps, progress) {
                            Ok(possible) => drop(ran.fetch_add(possible.into(), Ordering::Relaxed)),
                            Err(found) => broken.lock().unwrap().push(found),
                        }
                    }
                }
            });
        }
    });
    println!(
        "{what}: {} programs, {} states judged, {} distinct states recovered, {} of them cuts of a \
         recovery; {} judged by e2fsck too",
        ran.into_inner(),
        world.judged.load(Ordering::Relaxed),
        world.distinct(),
        world.nested.load(Ordering::Relaxed),
        world.e2fsck.load(Ordering::Relaxed),
    );
    let broken = broken.into_inner().unwrap();
    for Broken { program, why, .. } in &broken {
        println!("BROKEN {program}: {why}");
    }
    if let Some(Broken { program, why, state }) = broken.into_iter().next() {
        let kept = std::env::temp_dir().join("riofs-broken.img");
        if let Some(state) = state {
            state.save(&world.base, &kept);
        }
        panic!("{program}: {why} (the image: {})", kept.display());
    }
}

#[test]
fn every_cut_of_one_change_keeps_the_promises() {
    let world = World::new(Effort::USUAL, prepare);
    let steps = steps(CHANGES);
    let all = (0..steps.len()).map(|number| program(&steps, 1, number));
    run_all(&world, all, "one change");
}

#[test]
fn cuts_of_two_changes_keep_the_promises() {
    let world = World::new(Effort::USUAL, prepare);
    let steps = steps(CHANGES);
    let chosen = chosen(steps.len().pow(2), 50);
    run_all(&world, chosen.into_iter().map(|number| program(&steps, 2, number)), "two changes");
}

#[test]
fn cuts_of_three_changes_of_the_same_names_keep_the_promises() {
    let world = World::new(Effort::USUAL, prepare);
    let steps = steps(COLLIDING);
    let chosen = chosen(steps.len().pow(3), 400);
    run_all(&world, chosen.into_iter().map(|number| program(&steps, 3, number)), "three changes");
}
