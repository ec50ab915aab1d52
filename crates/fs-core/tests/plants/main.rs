//! Each plant is caught by the oracle of the crash states, and without it the same program keeps
//! all promises.

#[expect(dead_code, reason = "the test `it` uses the rest")]
#[path = "../it/enumerate.rs"]
mod enumerate;
#[expect(dead_code, reason = "the test `it` uses the rest")]
#[path = "../it/image.rs"]
mod image;

use enumerate::program::Change::{self, *};
use enumerate::program::Sync;
use enumerate::recorder::{Device, Release};
use enumerate::script::Script;
use enumerate::setup::Setup;
use enumerate::world::{Effort, World, caught};
use riopipe_fs_core::probe::{self, Plant};
use riopipe_fs_testkit::path::resolve;

fn fsync(script: &Script, change: Change) {
    script.change(change).sync(change.path(), Sync::Fsync);
}

/// The program that is made for a plant.
fn run(plant: Plant, script: &Script) {
    match plant {
        Plant::RecordOnOtherStream
        | Plant::NoPrivateBit
        | Plant::TableEmptyEarly
        | Plant::EntryWithoutInode => fsync(script, New("a/n")),
        Plant::CommitBeforeData | Plant::CheckpointBeforeCommit => {
            script.change(New("a/n")).sync("a/n", Sync::All);
        }
        Plant::RecordWithoutParents => {
            script.change(Mkdir("b/e/f"));
            fsync(script, New("b/e/f/g"));
        }
        Plant::RecordWithoutInFlight => {
            script.change(New("a/n"));
            script.in_wait(0, 1, |other| {
                other.sync("a/n", Sync::Fsync);
            });
            script.sync("a/n", Sync::FsyncDir);
        }
        Plant::InodeAlwaysFit => fsync(script, Rename("a/x", "b/x")),
        Plant::ReuseBeforeCommit => {
            // The blocks of the second file lie behind those of the first, which grows over them.
            script.change(New("a/n")).sync("a/n", Sync::Fsync).change(New("b/x"));
            script.sync("", Sync::All).change(Unlink("b/x"));
            fsync(script, Write("a/n", 8192, 4096));
        }
        Plant::NameAlwaysFit => {
            fsync(script, New("a/n"));
            script.change(Unlink("a/n"));
            fsync(script, New("a/n"));
        }
        Plant::MovesIgnored => {
            script.change(Rename("a", "b/a"));
            fsync(script, Write("b/a/x", 6000, 5000));
        }
        Plant::OverwriteFresh => fsync(script, Write("a/x", 0, 100)),
        Plant::TailBeforeCheckpoint => {
            script.change(New("a/n")).sync("a/n", Sync::All).unmount();
        }
        Plant::EpochIgnored => (0..3).for_each(|at| fsync(script, Write("a/x", at * 5000, 4000))),
        Plant::PrivateBitClearedEarly => {
            fsync(script, New("a/n"));
            script.unmount();
        }
        Plant::ConvertedBeforeData => {
            script.change(Fallocate("a/x", 0, 8192, 8192)).sync("", Sync::All);
            script.change(Write("a/x", 8192, 4096)).sync("", Sync::All);
        }
        Plant::ObsoleteApplied => {
            fsync(script, New("a/n"));
            script.change(Unlink("a/n")).sync("", Sync::All);
        }
        Plant::RevokeForgotten => {
            // The block of the directory lies behind the file, and becomes a part of it.
            fsync(script, New("a/n"));
            script.change(Mkdir("a/d")).sync("", Sync::All);
            script.change(Rmdir("a/d")).sync("", Sync::All);
            fsync(script, Write("a/n", 8192, 4096));
        }
        Plant::OlderIdWins => {
            fsync(script, New("a/n"));
            fsync(script, Write("a/n", 5000, 5000));
        }
        Plant::OrphanForgotten => {
            let ino = resolve(&script.fs, "a/x").unwrap();
            script.fs.open(ino).unwrap();
            script.change(Unlink("a/x")).sync("", Sync::All);
        }
        Plant::SizeForgotten => {
            script.change(Write("a/x", 6000, 500)).sync("a/x", Sync::Fdatasync);
        }
        Plant::StreamPerWrite => (0..2).for_each(|at| fsync(script, Write("a/x", at, 100))),
        Plant::ReuseBeforeReleased => {
            // The first file grows over the blocks of the second one, on another stream.
            fsync(script, New("b/x"));
            fsync(script, New("a/n"));
            script.change(Unlink("a/n")).sync("", Sync::All);
            fsync(script, Write("b/x", 8192, 8192));
        }
        Plant::DirectoryFieldsApplied => {
            script.change(Mkdir("a/n")).change(Mkdir("a/n/s"));
            script.in_wait(0, 1, |other| fsync(other, New("a/n/f")));
            script.sync("a/n", Sync::Fsync);
        }
        Plant::BlocksNotClaimed => fsync(script, Write("a/x", 8192, 4096)),
        Plant::CheckpointFresh => {
            script.change(New("a/n")).sync("a/n", Sync::All).unmount();
        }
        // These two files are on two streams.
        Plant::BarrierNotHeld => {
            script.change(Write("a/x", 0, 100)).sync("a/x", Sync::Barrier);
            script.change(Mode("b/y", 0o600)).sync("b/y", Sync::Barrier);
        }
        Plant::BarrierNotAwaited => {
            script.change(Write("a/x", 0, 100)).sync("a/x", Sync::Barrier);
            fsync(script, Write("b/y", 0, 100));
        }
        Plant::OverwriteBeforeBarrier => {
            script.change(Write("a/x", 0, 100)).sync("a/x", Sync::Barrier);
            // In mode `opimq` it only matters on another stream.
            let path = if script.setup == Setup::Opimq { "b/y" } else { "a/x" };
            fsync(script, Write(path, 4096, 100));
        }
        Plant::CommitBlockBeforeFlush => {
            script.change(New("a/n")).sync("a/n", Sync::All);
        }
        Plant::CommitBlockWithOthers | Plant::HomeBeforeCommitBlock => {
            script.change(New("a/n")).sync("a/n", Sync::All);
        }
        Plant::RetiredBeforeDurable => fsync(script, New("a/n")),
        Plant::BarrierWithoutCommit => {
            // The second file is overwritten, which needs no commit.
            script.change(Write("a/x", 6000, 5000)).sync("a/x", Sync::Barrier);
            script.change(Write("b/y", 0, 4096)).sync("b/y", Sync::Fdatasync);
        }
        Plant::DataWithoutFollower => fsync(script, New("a/n")),
        Plant::CommitWhenComplete | Plant::BarrierWhenComplete => {
            unreachable!("`rio sim --fs` catches it")
        }
    }
}

/// The setups in which a plant must be caught.
fn setups(plant: Plant) -> &'static [Setup] {
    match plant {
        Plant::CommitBlockBeforeFlush => &[Setup::Ext4],
        Plant::CommitBlockWithOthers
        | Plant::HomeBeforeCommitBlock
        | Plant::RetiredBeforeDurable
        | Plant::BarrierWithoutCommit => &[Setup::Barrier, Setup::Opimq],
        Plant::DataWithoutFollower => &[Setup::Opimq],
        Plant::OverwriteBeforeBarrier => &[Setup::Lazy, Setup::Opimq],
        Plant::ReuseBeforeCommit
        | Plant::RevokeForgotten
        | Plant::OrphanForgotten
        | Plant::SizeForgotten => &[Setup::Lazy, Setup::Barrier, Setup::Opimq],
        _ => &[Setup::Lazy],
    }
}

fn broken(plant: Plant, setup: Setup, is_planted: bool) -> Result<(), String> {
    // Only this one is seen when a recovery is cut.
    let nested = if plant == Plant::TableEmptyEarly { 1 } else { 64 };
    let effort = Effort { nested, ..Effort::USUAL };
    let world = World::new(effort, enumerate::prepare);
    probe::plant(is_planted.then_some(plant));
    let ran = caught(|| {
        // The oracle must find a file with old data, and not the checker of T15.
        let device = match plant {
            Plant::StreamPerWrite | Plant::ReuseBeforeReleased => {
                Device { release: Release::Late, checks_owners: false, ..setup.device() }
            }
            _ => setup.device(),
        };
        let script = Script::on(&world, setup, device);
        run(plant, &script);
        script.judge().map_err(|broken| broken.why)
    });
    probe::plant(None);
    ran
}

/// Plants are set for the whole process, so this is one test.
#[test]
fn each_plant_is_caught() {
    let mut missed = Vec::new();
    for &plant in Plant::ALL.iter().filter(|plant| !plant.needs_cluster()) {
        for &setup in setups(plant) {
            if let Err(why) = broken(plant, setup, false) {
                panic!("without {plant:?}: {why}");
            }
            match broken(plant, setup, true) {
                Ok(()) => missed.push((plant, setup)),
                Err(why) => println!("{plant:?}, {setup:?}: {why}"),
            }
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
