//! The proof of crash consistency by enumeration: small programs are cut at every write, in every
//! state that the storage promises; each state is recovered, and judged by an oracle.
//!
//! Here are the parts. The programs are in `sequences` and `named`, and in the test `plants`.

#[path = "enumerate/judge.rs"]
mod judge;
#[path = "enumerate/mapped.rs"]
pub(crate) mod mapped;
#[path = "enumerate/oracle.rs"]
mod oracle;
#[path = "enumerate/program.rs"]
pub(crate) mod program;
#[path = "enumerate/recorder.rs"]
pub(crate) mod recorder;
#[path = "enumerate/script.rs"]
pub(crate) mod script;
#[path = "enumerate/setup.rs"]
pub(crate) mod setup;
#[path = "enumerate/tree.rs"]
pub(crate) mod tree;
#[path = "enumerate/world.rs"]
pub(crate) mod world;

use riopipe_fs_core::Ino;
use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Fs, NewInode};

pub(crate) use riopipe_fs_testkit::random;

use self::program::Change;

pub(crate) const NOW: Time = Time { seconds: 1_700_000_000, nanos: 5 };
/// A time at which a commit is due.
pub(crate) const LATER: Time = Time { seconds: 1_700_000_060, nanos: 5 };

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

/// The same files on an image on which few blocks and inodes are free.
pub(crate) fn prepare_full(fs: &Fs) {
    prepare(fs);
    let root = program::root();
    let new = NewInode { mode: 0o100_644, rdev: 0, target: b"" };
    let fill = fs.create(&root, Ino::ROOT, b"fill", &new, NOW).unwrap().ino;
    let keep = riopipe_fs_core::fs::mode::KEEP_SIZE;
    // Unwritten blocks behind the end of a file: nothing reads them.
    let mut at = 0;
    let mut len = 1 << 12;
    while len > 0 {
        match fs.fallocate(fill, keep, at << 12, len << 12, NOW) {
            Ok(()) => at += len,
            Err(_) => len /= 2,
        }
    }
    fs.fallocate(fill, riopipe_fs_core::fs::mode::PUNCH_HOLE | keep, 0, 6 << 12, NOW).unwrap();
    // Two inodes are left.
    let names: Vec<String> = (0..64).map(|number| format!("n{number}")).collect();
    let made = names
        .iter()
        .take_while(|name| fs.create(&root, Ino::ROOT, name.as_bytes(), &new, NOW).is_ok());
    let made = made.count();
    for name in &names[made - 2..made] {
        fs.unlink(&root, Ino::ROOT, name.as_bytes(), NOW).unwrap();
    }
    fs.sync(NOW).unwrap();
}
