//! Modes `barrier` and `opimq` on volumes of modelled drives that keep the order of barriers, or of
//! epochs.

use riopipe::{EngineKind, OpenOptions};
use riopipe_fs::backing::{Backing, FsOptions, engine_of};
use riopipe_fs::fsync_stages::FsyncStage::{
    DispatchCommit, DispatchData, DispatchJournal, WaitCommit,
};
use riopipe_fs::fuse::now;
use riopipe_fs::mkfs::{MkfsOptions, make_on_volume};
use riopipe_fs_core::Ino;
use riopipe_fs_core::error::FsError;
use riopipe_fs_core::fs::{Caller, Fs, JournalMode, NewInode};

use crate::fsync_stages::{appends_on, serial_waits, stages};
use crate::volume::Scene;

/// A scene of a mode, with an empty file system.
fn scene_of(mode: JournalMode, drives: &[&str]) -> Scene {
    let scene = Scene::with_engine(drives, engine_of(mode).unwrap());
    let volume = scene.open();
    assert_eq!(Some(volume.engine()), engine_of(mode));
    make_on_volume(&volume, &MkfsOptions::default(), &mut |_, _| ()).unwrap();
    volume.close().unwrap();
    scene
}

fn create(fs: &Fs, name: &str) -> Ino {
    let new = NewInode { mode: 0o100_644, rdev: 0, target: b"" };
    fs.create(&Caller::default(), Ino::ROOT, name.as_bytes(), &new, now()).unwrap().ino
}

fn content(fs: &Fs, name: &str) -> Vec<u8> {
    let attr = fs.lookup(&Caller::default(), Ino::ROOT, name.as_bytes()).unwrap();
    let mut data = vec![0; attr.size as usize];
    fs.read(attr.ino, 0, &mut data, now()).unwrap();
    data
}

/// Files are synced and ordered by several threads, the owner is gone without a word, and the next
/// one finds what was synced, and with it all that was ordered before.
fn survives(mode: JournalMode, drives: &[&str]) {
    let options = FsOptions { mode, ..FsOptions::default() };
    let scene = scene_of(mode, drives);
    let backing = Backing::of_volume(scene.open()).unwrap();
    let (fs, _) = backing.mount(&options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3_u8 {
            let fs = &fs;
            scope.spawn(move || {
                let log = create(fs, &format!("log{thread}"));
                let table = create(fs, &format!("table{thread}"));
                for round in 0..20_u8 {
                    let record = [round; 3000];
                    let at = u64::from(round) * record.len() as u64;
                    fs.write(&Caller::default(), log, at, &record, now()).unwrap();
                    fs.barrier(log, round % 2 == 0, now()).unwrap();
                    fs.write(&Caller::default(), table, 0, &[round; 9000], now()).unwrap();
                    if round % 5 == thread {
                        fs.fsync(table, round % 2 == 1, now()).unwrap();
                    } else {
                        fs.barrier(table, true, now()).unwrap();
                    }
                }
                fs.fsync(table, false, now()).unwrap();
            });
        }
    });
    // No thread waits for these.
    let late = create(&fs, "late");
    fs.write(&Caller::default(), late, 0, &[1; 5000], now()).unwrap();
    fs.barrier(late, false, now()).unwrap();
    drop(fs);
    drop(backing);

    let backing = Backing::of_volume(scene.open()).unwrap();
    let (fs, report) = backing.mount(&options).unwrap();
    assert!(report.replayed > 0, "{report:?}");
    for thread in 0..3 {
        assert_eq!(content(&fs, &format!("table{thread}")), vec![19; 9000]);
        let log = content(&fs, &format!("log{thread}"));
        assert_eq!(log.len(), 60_000);
        assert!(log.chunks(3000).zip(0..).all(|(part, round)| part == [round; 3000]));
    }
    fs.unmount(now()).unwrap();
    drop(fs);
    backing.close().unwrap();
    scene.stop();
}

#[test]
fn what_was_synced_and_what_was_ordered_before_survives_the_owner() {
    survives(JournalMode::Barrier, &["ssd:flash,size=200M,lazy,order=barrier"]);
}

#[test]
fn mode_opimq_keeps_what_was_synced_and_what_was_ordered_before() {
    survives(JournalMode::Opimq, &["ssd:flash,size=200M,lazy,order=op"]);
    survives(JournalMode::Opimq, &["ssd:optane,size=200M,lazy,order=op"]);
}

/// The engine orders the drives by FLUSHes.
#[test]
fn several_drives_keep_the_order_too() {
    survives(
        JournalMode::Barrier,
        &["ssd:optane,size=100M,lazy,order=barrier", "ssd:flash,size=100M,lazy,order=barrier"],
    );
    survives(
        JournalMode::Opimq,
        &["ssd:optane,size=100M,lazy,order=op", "ssd:flash,size=100M,lazy,order=op"],
    );
}

/// Data, journal and commit block are submitted one behind the other, and one FLUSH makes all durable.
#[test]
fn an_fsync_waits_once() {
    for (mode, order) in [(JournalMode::Barrier, "barrier"), (JournalMode::Opimq, "op")] {
        let scene = scene_of(mode, &[&format!("ssd:flash,size=200M,lazy,order={order}")]);
        let backing = Backing::of_volume(scene.open()).unwrap();
        let (trace, times) = appends_on(&backing, mode);
        assert_eq!(stages(&trace), [DispatchData, DispatchJournal, DispatchCommit, WaitCommit]);
        assert_eq!(serial_waits(&trace), [WaitCommit], "{mode:?}");
        assert_eq!(times.serial_waits()[1], 5);
        backing.close().unwrap();
        scene.stop();
    }
}

/// All that a failed stream may have lost is reported: the files are read-only, with the reason.
#[test]
fn a_lost_target_makes_the_files_of_mode_opimq_read_only() {
    let scene = scene_of(JournalMode::Opimq, &["ssd:flash,size=200M,lazy,order=op"]);
    let backing = Backing::of_volume(scene.open()).unwrap();
    let options = FsOptions { mode: JournalMode::Opimq, ..FsOptions::default() };
    let (fs, _) = backing.mount(&options).unwrap();
    let file = create(&fs, "file");
    fs.write(&Caller::default(), file, 0, &[1; 5000], now()).unwrap();
    fs.fsync(file, false, now()).unwrap();
    scene.stop();
    fs.write(&Caller::default(), file, 5000, &[1; 5000], now()).unwrap();
    let first = fs.fsync(file, false, now()).unwrap_err();
    assert!(matches!(first, FsError::Io(_)), "{first}");
    assert_eq!(fs.fsync(file, false, now()), Err(FsError::ReadOnly));
    let failure = fs.failure().expect("there is a reason");
    assert!(failure.contains("stream"), "{failure}");
}

#[test]
fn a_volume_without_such_drives_is_refused() {
    let scene = Scene::with_engine(&["mem:100M,lazy"], EngineKind::Rio);
    let refusals = [
        (JournalMode::Barrier, "no cache barrier"),
        (JournalMode::Opimq, "order of streams and epochs"),
    ];
    for (mode, text) in refusals {
        let wanted = OpenOptions { engine: engine_of(mode), ..OpenOptions::default() };
        let error = scene.try_open(&wanted).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    scene.stop();
}
