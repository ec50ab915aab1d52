//! T8 at the media: a file or a device is locked by the process that serves it, until the last of
//! its writes has landed, even if it was killed.

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::LoopDevice;
use riopipe_media::{
    AlignedBuf, Blocking, Data, Drive, OpenError, Submitted, open_drive, open_drive_within,
    open_log, open_log_within,
};
use riopipe_order::region::Region;
use riopipe_platform::now_ns;

/// Longer than anything here takes; a test that waits so long fails.
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn t8_a_lock_is_waited_for_as_long_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let device = LoopDevice::over(&path("under-the-device"), 16);
    let block = device.as_ref().map(|device| format!("block:{}", device.name()));
    let drive = format!("file:{},size=64K", path("drive"));
    let log = format!("file:{},size=64K", path("log"));
    let block_log = format!("block:{},size=64K", path("block-log"));
    for spec in [Some(drive), block.clone()].into_iter().flatten() {
        held_for_a_while(&spec, |spec, wait| open_drive_within(spec, wait).map(drop));
        let held = open_drive(&spec).unwrap();
        let refused = open_drive_within(&spec, Duration::from_millis(1)).err();
        assert!(matches!(refused, Some(OpenError::Locked { .. })), "{spec}: {refused:?}");
        drop(held);
    }
    for spec in [Some(log), Some(block_log), block].into_iter().flatten() {
        held_for_a_while(&spec, |spec, wait| open_log_within(spec, wait).map(drop));
        let held = open_log(&spec).unwrap();
        let refused = open_log_within(&spec, Duration::from_millis(1)).err();
        assert!(matches!(refused, Some(OpenError::Locked { .. })), "{spec}: {refused:?}");
        // A part keeps the lock as well as the whole log does.
        let part = held.part(0..4096).unwrap();
        drop(held);
        assert!(open_log(&spec).is_err(), "{spec}: a part is still out");
        drop(part);
    }
}

/// Runs `open` while the medium is locked for longer than the default wait.
fn held_for_a_while(spec: &str, open: impl Fn(&str, Duration) -> Result<(), OpenError> + Sync) {
    let held: Box<dyn Send> = match open_log(spec) {
        Ok(log) => Box::new(log),
        Err(error) => panic!("{spec}: {error}"),
    };
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| open(spec, TIMEOUT));
        std::thread::sleep(Duration::from_millis(400));
        drop(held);
        waiting.join().unwrap().unwrap_or_else(|error| panic!("{spec}: {error}"));
    });
}

/// The kernel keeps a lock as long as anything uses the open file that it was taken on, including a
/// write in flight. So this file must be the one that is written through.
#[test]
fn t8_the_lock_is_on_the_open_file_that_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("medium");
    let name = path.display();
    let drives = ["", ",io=threads"].map(|option| format!("file:{name},size=64K{option}"));
    for spec in drives.iter().cloned().chain([format!("ssd:flash,file={name},size=64K")]) {
        let drive = open_drive(&spec).unwrap();
        let _queue = drive.open_queue(4).unwrap();
        only_locked_descriptor(&path, &spec);
    }
    for spec in [format!("file:{name}"), format!("dax:{name}"), format!("block:{name}")] {
        let log = open_log(&spec).unwrap();
        let _part = log.part(0..4096).unwrap();
        only_locked_descriptor(&path, &spec);
    }
}

/// Checks that this process has one descriptor for the file, with the lock on it.
fn only_locked_descriptor(path: &Path, spec: &str) {
    let ours = descriptors(path);
    assert_eq!(ours.len(), 1, "{spec}: {ours:?}");
    let info = Path::new("/proc/self/fdinfo").join(&ours[0]);
    let info = std::fs::read_to_string(info).unwrap();
    assert!(info.contains("FLOCK") && info.contains("WRITE"), "{spec}: {info}");
}

/// This process's descriptors for the file.
fn descriptors(path: &Path) -> Vec<std::ffi::OsString> {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let ours = all.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path));
    ours.map(|fd| fd.file_name()).collect()
}

#[test]
fn t8_a_file_that_lost_its_name_during_the_wait_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive");
    let spec = format!("file:{},size=64K", path.display());
    let held = open_drive(&spec).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| open_drive_within(&spec, TIMEOUT).err());
        // It has opened the file, and waits for the lock.
        let begun = Instant::now();
        while descriptors(&path).len() < 2 {
            assert!(begun.elapsed() < TIMEOUT, "it never opens the file");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::remove_file(&path).unwrap();
        drop(held);
        assert!(matches!(waiting.join().unwrap(), Some(OpenError::NoSuchFile { .. })));
    });
}

/// The directory in which the other process finds its media.
const CHILD: &str = "RIO_TEST_SERVES_IN";
const PIECES: u64 = 16;
const PIECE_BLOCKS: u64 = 1024;

fn drive_spec(dir: &Path, io: &str) -> String {
    format!("file:{},size=64M,io={io}", dir.join("drive").display())
}

fn log_spec(dir: &Path) -> String {
    format!("block:{},size=64K", dir.join("log").display())
}

/// The other process of the test below; without that test it does nothing.
#[test]
fn serves_until_it_is_killed() {
    let Some(dir) = std::env::var_os(CHILD) else {
        return;
    };
    let io = std::env::var("RIO_TEST_IO").unwrap();
    let drive = open_drive(&drive_spec(Path::new(&dir), &io)).unwrap();
    let log = open_log(&log_spec(Path::new(&dir))).unwrap();
    let mut part = log.part(0..8192).unwrap();
    let mut queue = drive.open_queue(PIECES as usize).unwrap();
    let mut done = Vec::new();
    for round in 0u64.. {
        for piece in 0..PIECES {
            let mut data = AlignedBuf::zeroed(PIECE_BLOCKS as usize * 4096);
            data.fill(0x11);
            let _ = queue.write(piece, piece * PIECE_BLOCKS, Data::Owned(data));
        }
        queue.kick(now_ns());
        println!("\nin flight");
        part.write_word(0, round);
        part.fence().unwrap();
        while queue.in_flight() > 0 {
            queue.poll(now_ns(), &mut done);
        }
        done.clear();
    }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn t8_a_restart_right_after_a_kill_waits_for_the_last_writes() {
    for io in ["uring", "threads"] {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Killed(
            Command::new(std::env::current_exe().unwrap())
                .args(["serves_until_it_is_killed", "--exact", "--nocapture"])
                .env(CHILD, dir.path())
                .env("RIO_TEST_IO", io)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap(),
        );
        let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "in flight"), "it ended by itself");
        child.0.kill().unwrap();
        // At once, as a supervisor would start the next process.
        let drive = open_drive_within(&drive_spec(dir.path(), io), TIMEOUT).unwrap();
        let log = open_log_within(&log_spec(dir.path()), TIMEOUT).unwrap();
        overwrite(&*drive);
        let mut part = log.part(0..8192).unwrap();
        part.write(0, &[0xff; 8192]);
        part.fence().unwrap();
        // A late write would land now.
        std::thread::sleep(Duration::from_millis(200));
        let mut drive = Blocking::new(&*drive).unwrap();
        for piece in 0..PIECES {
            let there = drive.read(piece * PIECE_BLOCKS, PIECE_BLOCKS).unwrap();
            assert!(there.iter().all(|byte| *byte == 0x22), "{io}: a late write in piece {piece}");
        }
        drop((log, part));
        let mut there = [0; 8192];
        open_log(&log_spec(dir.path())).unwrap().part(0..8192).unwrap().read(0, &mut there);
        assert_eq!(there, [0xff; 8192], "{io}: a late write in the log");
    }
}

fn overwrite(drive: &dyn Drive) {
    let mut queue = drive.open_queue(PIECES as usize).unwrap();
    let mut done = Vec::new();
    for piece in 0..PIECES {
        let mut data = AlignedBuf::zeroed(PIECE_BLOCKS as usize * 4096);
        data.fill(0x22);
        let submitted = queue.write(piece, piece * PIECE_BLOCKS, Data::Owned(data));
        assert!(matches!(submitted, Submitted::Pending));
    }
    queue.kick(now_ns());
    while queue.in_flight() > 0 {
        queue.poll(now_ns(), &mut done);
    }
    done.drain(..).for_each(|done| drop(done.result.unwrap()));
}
