//! The main journal and the kernel's ext4: each replays the journal of the other. These tests need
//! root and loop devices; without them they print the reason and pass.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use riopipe_fs_core::BLOCK_BYTES;
use riopipe_fs_core::journal::recovery::LogEnd;

use crate::image::Image;
use crate::journal::{Fixture, commit, content, run, unmount};

/// The longest time until a busy file system is unmounted.
const UNMOUNT_LIMIT: Duration = Duration::from_secs(120);

/// An image that the kernel has mounted. It is unmounted at the end.
struct Mounted {
    directory: PathBuf,
}

impl Mounted {
    fn new(image: &Path, options: &str) -> Result<Self, String> {
        let directory = image.with_extension("kernel");
        fs::create_dir_all(&directory).expect("a directory");
        let output = Command::new("mount")
            .args(["-t", "ext4", "-o", options])
            .args([image, &directory])
            .output()
            .map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(Self { directory })
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    fn file(&self, path: &str) -> PathBuf {
        self.directory.join(path)
    }

    /// Makes all changes durable: they are in the journal, and most are not home.
    fn sync(&self) {
        let synced = Command::new("sync").arg("-f").arg(&self.directory).status().expect("sync");
        assert!(synced.success());
    }
}

impl Drop for Mounted {
    /// Waits until the file system is unmounted. It is busy for a moment if another thread starts a
    /// process just now: until its exec the new process has the files of this one.
    fn drop(&mut self) {
        let begun = Instant::now();
        loop {
            let done = Command::new("umount").arg(&self.directory).output().expect("umount");
            if done.status.success() {
                return;
            }
            let why = String::from_utf8_lossy(&done.stderr);
            let is_busy = why.contains("busy") && begun.elapsed() < UNMOUNT_LIMIT;
            // A second panic would end the process without a message.
            assert!(is_busy || std::thread::panicking(), "{why}");
            if !is_busy {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Whether the kernel can mount images here.
fn can_mount() -> bool {
    let image = Image::new(16, &[]);
    match Mounted::new(&image.path(), "loop") {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: the kernel can't mount an image here: {error}");
            false
        }
    }
}

fn assert_file(mounted: &Mounted, expected: &BTreeMap<usize, u64>) {
    let data = fs::read(mounted.file("file")).expect("the file");
    for (&index, &value) in expected {
        let block = &data[index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES];
        assert!(block == content(value), "block {index} of the file has version {value}");
    }
}

#[test]
fn the_kernel_replays_what_was_written() {
    if !can_mount() {
        return;
    }
    for options in crate::journal::OPTIONS {
        // With the full journal, and with a part of it.
        for maxlen in [None, Some(1200)] {
            let fixture = Fixture::new(&[options, &["-J", "size=8"]].concat());
            let mut journal = fixture.mount();
            if let Some(maxlen) = maxlen {
                fixture.write([journal.set_maxlen(maxlen).expect("long enough")]);
                journal.on_tail_released();
            }
            let behind = &fixture.journal[maxlen.unwrap_or(2048) as usize..];
            for &at in behind {
                fixture.image.write(at, &[0xa5; BLOCK_BYTES]);
            }
            let mut expected = run(&fixture, &mut journal, 12);
            fixture.set_needs_recovery(true);
            {
                let mounted = Mounted::new(&fixture.image.path(), "loop").expect("mounted");
                assert_file(&mounted, &expected);
                // The kernel goes on from there, for more than a lap.
                for n in 0..400 {
                    let path = mounted.file(&format!("new{}", n % 50));
                    fs::write(&path, content(n)).expect("written");
                    fs::File::open(&path).expect("opened").sync_all().expect("durable");
                }
            }
            fixture.image.assert_clean();
            // And RioFS after the kernel.
            let mut journal = fixture.mount();
            commit(&fixture, &mut journal, &[(1, 77)], &[]);
            expected.insert(1, 77);
            unmount(&fixture, &mut journal);
            fixture.image.assert_clean();
            let mounted = Mounted::new(&fixture.image.path(), "loop,ro").expect("mounted");
            assert_file(&mounted, &expected);
            assert!(behind.iter().all(|&at| *fixture.image.read(at) == [0xa5; BLOCK_BYTES]));
        }
    }
}

/// Changes of all kinds of metadata. Directories that are deleted have blocks that are revoked.
fn change(mounted: &Mounted, round: u64) {
    let top = mounted.file(&format!("round{round}"));
    for n in 0..8 {
        let directory = top.join(format!("directory{n}"));
        fs::create_dir_all(&directory).expect("made");
        for k in 0..20 {
            let data: Vec<u8> = (0..k).flat_map(|k| content(5 * (round + k))).collect();
            fs::write(directory.join(format!("file{k}")), data).expect("written");
        }
        fs::rename(directory.join("file1"), top.join(format!("moved{n}"))).expect("renamed");
        fs::remove_file(directory.join("file7")).expect("removed");
        std::os::unix::fs::symlink("x".repeat(200), directory.join("link")).expect("linked");
    }
    mounted.sync();
    if round >= 2 {
        let old = mounted.file(&format!("round{}", round - 2));
        fs::remove_dir_all(old).expect("removed");
    }
    mounted.sync();
}

/// e2fsck replays the journal if it must, and finds only the numbers of free blocks and inodes in
/// the superblock wrong: the kernel updates these seldom.
fn repair(fixture: &Fixture) {
    let ended = fixture.image.repair();
    let fixed = ended.output.matches("Fix?").count();
    let counts = ["Free blocks count wrong (", "Free inodes count wrong ("];
    let expected: usize = counts.map(|count| ended.output.matches(count).count()).iter().sum();
    assert_eq!(fixed, expected, "{}", ended.output);
    fixture.image.assert_clean();
}

#[test]
fn a_journal_of_the_kernel_is_replayed() {
    if !can_mount() {
        return;
    }
    let cases: [(&[&str], &str); 5] = [
        (&[], "loop"),
        (&[], "loop,data=journal"),
        (&["-O", "^64bit"], "loop"),
        (&["-O", "^metadata_csum"], "loop,data=journal"),
        (&["-O", "^metadata_csum,^64bit"], "loop,journal_checksum"),
    ];
    for (options, mount_options) in cases {
        let fixture = Fixture::new(options);
        let mut snapshots = Vec::new();
        {
            let mounted = Mounted::new(&fixture.image.path(), mount_options).expect("mounted");
            for round in 0..8 {
                change(&mounted, round);
                if round % 4 == 3 {
                    // All is in the image's file, as after a power cut.
                    snapshots.push(fs::read(fixture.image.path()).expect("the image"));
                }
            }
        }
        for snapshot in snapshots {
            fs::write(fixture.image.path(), &snapshot).expect("written");
            repair(&fixture);
            let by_e2fsck = fs::read(fixture.image.path()).expect("the image");

            fs::write(fixture.image.path(), &snapshot).expect("written");
            let recovery = fixture.recover().expect("recovered");
            assert!(recovery.transactions > 0 && !recovery.homes.is_empty(), "{mount_options}");
            assert_eq!(recovery.end, LogEnd::Clean);
            fixture.mount();
            fixture.set_needs_recovery(false);
            repair(&fixture);
            let by_riofs = fs::read(fixture.image.path()).expect("the image");
            // They differ in the superblock, with its times, and in the journal.
            let is_excepted =
                |at: usize| at == 0 || fixture.journal.iter().any(|journal| journal.0 == at as u64);
            let blocks = by_e2fsck.chunks(BLOCK_BYTES).zip(by_riofs.chunks(BLOCK_BYTES));
            for (at, (one, other)) in blocks.enumerate() {
                assert!(one == other || is_excepted(at), "block {at}, {options:?} {mount_options}");
            }
        }
    }
}
