//! The waits of an `fsync`.

use std::path::Path;

use riopipe_fs::JournalMode;
use riopipe_fs::backing::{Backing, FsOptions};
use riopipe_fs::core::Ino;
use riopipe_fs::core::fs::{Caller, NewInode};
use riopipe_fs::fsync_stages::FsyncStage::{
    DispatchCommit, DispatchData, DispatchJournal, DispatchRecord, FlushJournal, WaitCommit,
    WaitData, WaitJournal, WaitRecord,
};
use riopipe_fs::fsync_stages::{FsyncStage, FsyncTimesSnapshot, FsyncTrace, measured, traced};
use riopipe_fs::fuse::now;
use riopipe_fs::image::ImageOptions;

use crate::support::new_image;

/// Appends to a file and makes it durable, five times. Returns the stages of the last `fsync`, and
/// the sums of all.
fn appends(image: &Path, mode: JournalMode) -> (FsyncTrace, FsyncTimesSnapshot) {
    let (backing, _) = Backing::of_image(image, &ImageOptions::default()).unwrap();
    let found = appends_on(&backing, mode);
    backing.close().unwrap();
    found
}

/// As [`appends`], in a file system on `backing`.
pub(crate) fn appends_on(backing: &Backing, mode: JournalMode) -> (FsyncTrace, FsyncTimesSnapshot) {
    let options = FsOptions { mode, ..FsOptions::default() };
    let (fs, _) = backing.mount(&options).unwrap();
    let before = backing.fsync_times().snapshot();
    let new = NewInode { mode: 0o100_644, rdev: 0, target: b"" };
    let file = fs.create(&Caller::default(), Ino::ROOT, b"file", &new, now()).unwrap().ino;
    let append = |at: u64| {
        fs.write(&Caller::default(), file, at * 4096, &[1; 4096], now()).map(drop).unwrap()
    };
    for at in 0..4 {
        append(at);
        measured(|| fs.fsync(file, false, now())).unwrap();
    }
    append(4);
    let (result, trace) = traced(|| fs.fsync(file, false, now()));
    result.unwrap();
    let times = backing.fsync_times().snapshot().since(&before);
    fs.unmount(now()).unwrap();
    (trace, times)
}

pub(crate) fn stages(trace: &FsyncTrace) -> Vec<FsyncStage> {
    trace.steps.iter().map(|step| step.stage).collect()
}

pub(crate) fn serial_waits(trace: &FsyncTrace) -> Vec<FsyncStage> {
    trace.steps.iter().filter(|step| step.is_serial_wait).map(|step| step.stage).collect()
}

/// One after the other: data, journal, its FLUSH, commit block. The drive of an image has no
/// power-loss protection.
#[test]
fn an_fsync_as_ext4_waits_four_times() {
    let (_dir, image) = new_image();
    let (trace, times) = appends(&image, JournalMode::Ext4);
    let waits = [WaitData, WaitJournal, FlushJournal, WaitCommit];
    assert_eq!(serial_waits(&trace), waits);
    let all = [
        DispatchData,
        WaitData,
        DispatchJournal,
        WaitJournal,
        FlushJournal,
        DispatchCommit,
        WaitCommit,
    ];
    assert_eq!(stages(&trace), all);
    // The first commit of a mount also writes the journal's superblock.
    assert_eq!(times.serial_waits()[4..6], [4, 1]);
}

#[test]
fn an_fsync_of_riofs_waits_once() {
    let (_dir, image) = new_image();
    let (trace, times) = appends(&image, JournalMode::Rio);
    assert_eq!(stages(&trace), [DispatchData, DispatchRecord, WaitRecord]);
    assert_eq!(serial_waits(&trace), [WaitRecord]);
    assert_eq!(times.serial_waits()[1], 5);
    assert_eq!(times.total().count(), 5);
    let sum: u64 = times.stages().map(|(_, seen)| seen.sum()).sum();
    assert_eq!(sum, times.total().sum());
    assert_eq!(times.stage(WaitJournal).count(), 0);
}
