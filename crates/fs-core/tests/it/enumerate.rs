//! The proof of crash consistency by enumeration: small programs are cut at every write, in every
//! state that the storage promises; each state is recovered, and judged by an oracle.
//!
//! The defaults take seconds. `RIOFS_PROGRAMS` is the number of programs of each length that are
//! taken (`all`: every one), `RIOFS_SEED` chooses them, `RIOFS_THREADS` is the number of threads.

#[path = "enumerate/check.rs"]
mod check;
#[path = "enumerate/named.rs"]
mod named;
#[path = "enumerate/oracle.rs"]
mod oracle;
#[path = "enumerate/program.rs"]
pub(crate) mod program;
#[path = "enumerate/random.rs"]
pub(crate) mod random;
#[path = "enumerate/recorder.rs"]
pub(crate) mod recorder;
#[path = "enumerate/script.rs"]
pub(crate) mod script;
#[path = "enumerate/tree.rs"]
pub(crate) mod tree;
#[path = "enumerate/world.rs"]
pub(crate) mod world;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use riopipe_fs_core::Ino;
use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Fs, NewInode};

use self::program::{CHANGES, COLLIDING, Change, Step, Sync};
use self::random::Random;
use self::recorder::Progress;
use self::world::{Broken, Effort, World};

pub(crate) const NOW: Time = Time { seconds: 1_700_000_000, nanos: 5 };

/// The function for checksums.
pub(crate) fn crc32c(crc: u32, data: &[u8]) -> u32 {
    riopipe_nvme::digest::soft(crc, data)
}

/// # Panics
/// The product has broken a promise that it makes to the storage.
pub(crate) fn promise(is_kept: bool, text: impl FnOnce() -> String) {
    assert!(is_kept, "{}", text());
}

/// The files that all programs find. Journal, areas and free blocks have old content.
pub(crate) fn prepare(fs: &Fs) {
    let root = program::root();
    for (name, byte) in [(&b"g"[..], 0xee), (b"h", 0xdd)] {
        let new = NewInode { mode: 0o100_644, rdev: 0, target: b"" };
        let old = fs.create(&root, Ino::ROOT, name, &new, NOW).unwrap().ino;
        // Each ring comes around.
        for round in 0..200 {
            fs.write(&root, old, round % 60 * 4096, &[byte; 4096], NOW).unwrap();
            fs.fsync(old, false, NOW).unwrap();
            fs.sync(NOW).unwrap();
        }
        fs.forget(old, 1);
        fs.unlink(&root, Ino::ROOT, name, NOW).unwrap();
    }
    fs.sync(NOW).unwrap();
    let changes = [
        Change::Mkdir("a"),
        Change::Mkdir("b"),
        Change::Mkdir("b/e"),
        Change::New("a/x"),
        Change::Write("a/x", 5000, 1000),
        Change::New("b/y"),
        Change::Write("b/y", 5000, 4000),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        change.run(fs, 16 + number, &mut || ()).unwrap();
        fs.sync(NOW).unwrap();
    }
}

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
