//! Crashes: random programs are cut anywhere, in any state that the storage promises. Then the file
//! system is mounted again, and judged: by e2fsck, and by a model of what was synced.

use std::sync::Arc;

use riopipe_fs_core::fs::{Fs, JournalMode, MountOptions};
use riopipe_fs_testkit::model::{Model, read_all};
use riopipe_fs_testkit::program::Call;
use riopipe_fs_testkit::random::Random;

use crate::calls::{NOW, options};
use crate::memory::{Image, Memory, check_clean, image_of};

/// The storage for a mode: what its engine promises of a crash.
fn storage_of(mode: JournalMode, image: &Image) -> Arc<Memory> {
    let memory = Memory::new(image.clone(), BLOCKS, 3);
    let has_barriers = matches!(mode, JournalMode::Barrier | JournalMode::Opimq);
    Arc::new(if has_barriers { memory.with_barriers() } else { memory })
}

/// A crash state, and what must be there.
struct Cut {
    image: Image,
    model: Model,
    step: usize,
}

const BLOCKS: u64 = 65_536;

fn run(seed: u64, image: &Image, steps: usize, mount: &MountOptions) -> u64 {
    let mut random = Random(seed);
    let memory = storage_of(mount.mode, image);
    let (fs, _) = Fs::mount(memory.clone(), mount.clone(), NOW).unwrap();
    let mut model = Model::default();
    let mut cuts: Vec<Cut> = Vec::new();
    for number in 0..steps {
        let mut seeds = Random(random.below(u64::MAX));
        // States in the middle of a call are judged by what was synced before it.
        memory.record_cuts(2, seeds.below(u64::MAX));
        if let Some(call) = Call::draw(&model, &mut random) {
            // Shown when the test fails.
            println!("{call:?}");
            let before = model.clone();
            call.apply(&mut model);
            if let Err(why) = call.run(&fs, &before, NOW) {
                panic!("seed {seed}, step {number}: {call:?}: {why:?}");
            }
            let during = before.during(&model);
            for image in memory.take_cuts() {
                cuts.push(Cut { image, model: during.clone(), step: number });
            }
        }
        if random.below(4) == 0 {
            let image = memory.crash(&mut |n| seeds.below(n));
            cuts.push(Cut { image, model: model.clone(), step: number });
        }
    }
    let judged = cuts.len() as u64;
    for (number, cut) in cuts.into_iter().enumerate() {
        let memory = storage_of(mount.mode, &cut.image);
        let context = format!("seed {seed}, step {}, cut {number}", cut.step);
        let fail = |why: String| {
            let kept = std::env::temp_dir().join("riofs-cut.img");
            cut.image.save(&kept, BLOCKS);
            panic!("{context}: {why} (the image: {})", kept.display());
        };
        let mut options = mount.clone();
        options.epoch.0[0] ^= 0xff;
        let (fs, report) = match Fs::mount(memory.clone(), options, NOW) {
            Ok(mounted) => mounted,
            Err(error) => return fail(format!("mount: {error}")),
        };
        let found = read_all(&fs, NOW).map_err(|error| error.to_string());
        if let Err(why) = found.and_then(|found| cut.model.judge(&found)) {
            return fail(format!("{why}, after {report:?}"));
        }
        if let Err(error) = fs.unmount(NOW) {
            return fail(format!("unmount: {error}"));
        }
        // e2fsck takes most of the time.
        if number % 8 == 0 {
            check_clean(&memory.image(), BLOCKS);
        }
    }
    judged
}

#[test]
fn what_was_synced_is_there_after_any_crash() {
    run_seeds(JournalMode::Rio);
}

#[test]
fn what_was_synced_is_there_after_any_crash_in_mode_ext4() {
    run_seeds(JournalMode::Ext4);
}

#[test]
fn what_was_synced_is_there_after_any_crash_in_mode_barrier() {
    run_seeds(JournalMode::Barrier);
}

#[test]
fn what_was_synced_is_there_after_any_crash_in_mode_opimq() {
    run_seeds(JournalMode::Opimq);
}

fn run_seeds(mode: JournalMode) {
    let image = image_of(BLOCKS, &[]);
    let first = std::env::var("RIOFS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let seeds = std::env::var("RIOFS_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    let mut judged = 0;
    for seed in first..first + seeds {
        judged += run(seed, &image, 60, &MountOptions { mode, ..options() });
    }
    println!("{judged} states");
    assert!(judged > 0);
}
