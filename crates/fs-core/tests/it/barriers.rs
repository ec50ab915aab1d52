//! Barriers order files also across streams, and do not wait.

use std::sync::Arc;

use riopipe_fs_core::Ino;
use riopipe_fs_core::fs::{Fs, JournalMode, MountOptions};

use crate::calls::{NOW, file, options, root};
use crate::enumerate::random::Random;
use crate::memory::{Image, Memory, image_of};

const BLOCKS: u64 = 65_536;

/// A mount in mode `barrier`, on a storage with its engine's promise.
fn mount_in_mode_barrier() -> (Arc<Memory>, Fs) {
    mount_on(Memory::new(image_of(BLOCKS, &[]), BLOCKS, 4), JournalMode::Barrier)
}

fn mount_on(memory: Memory, mode: JournalMode) -> (Arc<Memory>, Fs) {
    let has_barriers = matches!(mode, JournalMode::Barrier | JournalMode::Opimq);
    let memory = Arc::new(if has_barriers { memory.with_barriers() } else { memory });
    let (fs, _) = Fs::mount(memory.clone(), MountOptions { mode, ..options() }, NOW).unwrap();
    (memory, fs)
}

/// The generation that a file has after a crash.
fn generation(image: &Image, name: &str) -> u8 {
    let memory = Arc::new(Memory::new(image.clone(), BLOCKS, 4));
    let mut options = options();
    options.epoch.0[0] ^= 1;
    let (fs, _) = Fs::mount(memory, options, NOW).unwrap();
    let file = fs.lookup(&root(), Ino::ROOT, name.as_bytes()).unwrap();
    let mut data = [0; 8192];
    assert_eq!(fs.read(file.ino, 0, &mut data, NOW), Ok(8192));
    data[4096]
}

#[test]
fn a_write_after_a_barrier_is_never_there_without_the_one_before_it() {
    order_is_kept(JournalMode::Rio);
}

#[test]
fn a_write_after_a_barrier_is_never_there_without_the_one_before_it_in_mode_barrier() {
    order_is_kept(JournalMode::Barrier);
}

#[test]
fn a_write_after_a_barrier_is_never_there_without_the_one_before_it_in_mode_opimq() {
    order_is_kept(JournalMode::Opimq);
}

fn order_is_kept(mode: JournalMode) {
    let image = image_of(BLOCKS, &[]);
    for seed in 0..12 {
        let mut random = Random(seed);
        let (memory, fs) = mount_on(Memory::new(image.clone(), BLOCKS, 4), mode);
        // Three files on three streams.
        let names = ["a", "b", "c"];
        let files = names.map(|name| {
            fs.create(&root(), Ino::ROOT, name.as_bytes(), &file(0o644), NOW).unwrap().ino
        });
        for ino in files {
            fs.write(&root(), ino, 0, &[0; 8192], NOW).unwrap();
        }
        fs.sync(NOW).unwrap();
        let mut cuts = Vec::new();
        for generation in 1..=20_u8 {
            for ino in files {
                memory.record_cuts(1, random.below(u64::MAX));
                fs.write(&root(), ino, 4096, &[generation; 4096], NOW).unwrap();
                let data_only = random.below(2) == 0;
                match random.below(8) {
                    0 => fs.fsync(ino, data_only, NOW).unwrap(),
                    1 => {
                        fs.barrier(ino, data_only, NOW).unwrap();
                        fs.tick(NOW).unwrap();
                    }
                    _ => fs.barrier(ino, data_only, NOW).unwrap(),
                }
                cuts.extend(memory.take_cuts());
                if random.below(3) == 0 {
                    cuts.push(memory.crash(&mut |n| random.below(n)));
                }
            }
        }
        for (number, cut) in cuts.iter().enumerate() {
            let [a, b, c] = names.map(|name| generation(cut, name));
            assert!(a >= b && b >= c && c + 1 >= a, "seed {seed}, cut {number}: {a} {b} {c}");
        }
    }
}

#[test]
fn a_barrier_does_not_wait() {
    let memory = Arc::new(Memory::new(image_of(BLOCKS, &[]), BLOCKS, 4));
    let (fs, _) = Fs::mount(memory.clone(), options(), NOW).unwrap();
    let files = ["a", "b", "c"]
        .map(|name| fs.create(&root(), Ino::ROOT, name.as_bytes(), &file(0o644), NOW).unwrap().ino);
    fs.sync(NOW).unwrap();
    let before = memory.waits();
    for round in 0..5_u64 {
        fs.write(&root(), files[0], round * 4096, &[1; 4096], NOW).unwrap();
        fs.barrier(files[0], false, NOW).unwrap();
        fs.write(&root(), files[1 + round as usize % 2], 0, &[1; 4096], NOW).unwrap();
        if round == 0 {
            fs.barrier(files[1], false, NOW).unwrap();
            assert_eq!(memory.waits(), before, "a barrier and a held one");
        }
    }
    fs.unmount(NOW).unwrap();
}

/// Commits follow one another without a wait, and one FLUSH makes all of them durable, with the data
/// on other streams.
#[test]
fn many_commits_are_in_flight_in_modes_barrier_and_opimq() {
    for mode in [JournalMode::Barrier, JournalMode::Opimq] {
        many_commits_are_in_flight(mode);
    }
}

fn many_commits_are_in_flight(mode: JournalMode) {
    let (memory, fs) = mount_on(Memory::new(image_of(BLOCKS, &[]), BLOCKS, 4), mode);
    let names: Vec<String> = (0..20).map(|number| format!("f{number}")).collect();
    fs.sync(NOW).unwrap();
    let (waits, commits) = (memory.waits(), fs.stat().commits);
    for name in &names {
        let new = fs.create(&root(), Ino::ROOT, name.as_bytes(), &file(0o644), NOW).unwrap().ino;
        fs.write(&root(), new, 0, &[1; 5000], NOW).unwrap();
        fs.barrier(new, false, NOW).unwrap();
    }
    assert_eq!((memory.waits(), fs.stat().commits - commits), (waits, 20));
    let last = fs.lookup(&root(), Ino::ROOT, b"f19").unwrap().ino;
    fs.fsync(last, false, NOW).unwrap();
    assert_eq!((memory.waits(), fs.stat().commits - commits), (waits + 1, 20));

    let (_, fs) = mount_on(Memory::new(memory.crash(&mut |_| 0), BLOCKS, 4), mode);
    for name in &names {
        assert_eq!(fs.lookup(&root(), Ino::ROOT, name.as_bytes()).unwrap().size, 5000, "{name}");
    }
}

/// An `fsync` submits data, journal and commit block, and waits once.
#[test]
fn an_fsync_waits_once_in_mode_barrier() {
    let (memory, fs) = mount_in_mode_barrier();
    let new = fs.create(&root(), Ino::ROOT, b"new", &file(0o644), NOW).unwrap().ino;
    fs.sync(NOW).unwrap();
    for round in 0..3 {
        let waits = memory.waits();
        fs.write(&root(), new, round * 4096, &[1; 4096], NOW).unwrap();
        fs.fsync(new, false, NOW).unwrap();
        assert_eq!(memory.waits(), waits + 1);
    }
}

/// A data barrier commits only if it has no data, or if the data needs a commit to be read.
#[test]
fn a_data_barrier_without_data_commits_in_mode_barrier() {
    let (memory, fs) = mount_in_mode_barrier();
    let [log, other] = ["log", "other"]
        .map(|name| fs.create(&root(), Ino::ROOT, name.as_bytes(), &file(0o644), NOW).unwrap().ino);
    fs.write(&root(), log, 0, &[1; 8192], NOW).unwrap();
    fs.sync(NOW).unwrap();
    let (waits, commits) = (memory.waits(), fs.stat().commits);
    let commits = || fs.stat().commits - commits;
    // An overwrite.
    fs.write(&root(), log, 0, &[2; 4096], NOW).unwrap();
    fs.barrier(log, true, NOW).unwrap();
    assert_eq!(commits(), 0);
    // New data.
    fs.write(&root(), log, 8192, &[3; 4096], NOW).unwrap();
    fs.barrier(log, true, NOW).unwrap();
    assert_eq!(commits(), 1);
    // No data.
    fs.set_xattr(&root(), other, b"user.k", b"v", riopipe_fs_core::xattr::SetMode::Any, NOW)
        .unwrap();
    fs.barrier(log, true, NOW).unwrap();
    assert_eq!((commits(), memory.waits()), (2, waits));
}

/// Barriers fill the log again and again. A commit that finds no space waits for those in flight.
#[test]
fn barriers_never_wait_for_a_full_log_for_ever() {
    let (memory, fs) =
        mount_on(Memory::new(image_of(BLOCKS, &["-J", "size=8"]), BLOCKS, 4), JournalMode::Barrier);
    let new = fs.create(&root(), Ino::ROOT, b"new", &file(0o644), NOW).unwrap().ino;
    let waits = memory.waits();
    for round in 0..1500 {
        fs.write(&root(), new, round % 7 * 4096, &[round as u8; 4096], NOW).unwrap();
        fs.barrier(new, false, NOW).unwrap();
    }
    // The log has 2047 blocks, and a commit 5 at least.
    let waits = memory.waits() - waits;
    assert!((6..60).contains(&waits), "{waits}");
    fs.unmount(NOW).unwrap();
    crate::memory::check_clean(&memory.image(), BLOCKS);
}

/// The entries of a directory are its data.
#[test]
fn a_data_barrier_of_a_directory_orders_its_entries() {
    let memory = Arc::new(Memory::new(image_of(BLOCKS, &[]), BLOCKS, 4));
    let (fs, _) = Fs::mount(memory.clone(), options(), NOW).unwrap();
    let [gone, other] = ["gone", "other"]
        .map(|name| fs.create(&root(), Ino::ROOT, name.as_bytes(), &file(0o644), NOW).unwrap().ino);
    assert_ne!(gone, other);
    fs.sync(NOW).unwrap();
    fs.unlink(&root(), Ino::ROOT, b"gone", NOW).unwrap();
    fs.barrier(Ino::ROOT, true, NOW).unwrap();
    fs.write(&root(), other, 0, b"later", NOW).unwrap();
    fs.fsync(other, false, NOW).unwrap();

    let memory = Arc::new(Memory::new(memory.crash(&mut |_| 0), BLOCKS, 4));
    let (fs, _) = Fs::mount(memory, options(), NOW).unwrap();
    assert_eq!(fs.lookup(&root(), Ino::ROOT, b"other").unwrap().size, 5);
    assert!(fs.lookup(&root(), Ino::ROOT, b"gone").is_err(), "removed before the barrier");
}
