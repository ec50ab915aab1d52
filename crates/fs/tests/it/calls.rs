//! The calls that other file systems do not have, through FUSE, by the files of `contrib/riofs`;
//! and writes that are durable when they return.

use std::fs::{self, File};
use std::io::{IoSlice, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use riopipe_fs_core::fs::Fs;

use crate::mount::{Mounted, can_mount, check, has_program, spawn};
use crate::support::new_image;

#[path = "../../../../contrib/riofs/riofs.rs"]
#[allow(unreachable_pub)]
mod riofs;

use riofs::Done;

/// How barriers are done on RioFS.
fn by_barrier() -> Done {
    match riofs::pages_can_be_written() {
        true => Done::RioFs,
        false => Done::Durable,
    }
}

/// A process that has an image mounted. It is killed when this is dropped.
struct Victim {
    child: Child,
    directory: PathBuf,
}

impl Victim {
    fn new(image: &Path) -> Self {
        let directory = image.with_extension("mnt");
        Self { child: spawn(image, &directory), directory }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let unmounted = Command::new("umount").arg("-l").arg(&self.directory).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            let _ = Command::new("fusermount3").arg("-uz").arg(&self.directory).status();
        }
    }
}

/// A shared mapping of the first `len` bytes of a file.
struct Mapping {
    start: *mut libc::c_void,
    len: usize,
}

impl Mapping {
    fn new(file: &File, len: usize) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the place.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start, len }
    }

    fn fill(&mut self, byte: u8) {
        // SAFETY: the mapping has `len` bytes, and this is its only user.
        unsafe { std::ptr::write_bytes(self.start.cast::<u8>(), byte, self.len) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and no reference to it is left.
        unsafe { libc::munmap(self.start, self.len) };
    }
}

fn read_write(path: PathBuf) -> File {
    File::options().read(true).write(true).create(true).truncate(true).open(path).unwrap()
}

#[test]
fn a_barrier_is_no_fsync() {
    if !can_mount() {
        return;
    }
    let (_dir, image) = new_image();
    let mounted = Mounted::new(&image);
    let before = mounted.fs.stat();
    for n in 0..20 {
        let file = File::create(mounted.directory.join(format!("file {n}"))).unwrap();
        file.write_all_at(&[n; 10_000], 0).unwrap();
        assert_eq!(riofs::fbarrier(&file).unwrap(), by_barrier());
        file.write_all_at(&[n; 10_000], 5000).unwrap();
        assert_eq!(riofs::fdatabarrier(&file).unwrap(), by_barrier());
    }
    if by_barrier() == Done::RioFs {
        assert_eq!(mounted.fs.stat().fsyncs, before.fsyncs);
    }
    let root = File::open(&mounted.directory).unwrap();
    let commits = mounted.fs.stat().commits;
    assert_eq!(riofs::syncfs(&root).unwrap(), Done::RioFs);
    assert!(mounted.fs.stat().commits > commits);
    assert_eq!(riofs::fbarrier(&root).unwrap(), by_barrier());
    drop(root);
    assert!(!mounted.unmount());
    check(&image);
}

#[test]
fn an_unknown_ioctl_is_refused() {
    if !can_mount() {
        return;
    }
    let (_dir, image) = new_image();
    let mounted = Mounted::new(&image);
    let file = File::create(mounted.directory.join("file")).unwrap();
    let commands: [libc::Ioctl; 4] = [0x72a3, 0x7200, 0, libc::TCGETS];
    for command in commands {
        let mut space = [0_u8; 256];
        // SAFETY: no driver knows the commands, and the largest answer has 256 bytes.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), command, space.as_mut_ptr()) };
        let error = std::io::Error::last_os_error();
        assert_eq!((result, error.raw_os_error()), (-1, Some(libc::ENOTTY)), "{command:#x}");
    }
    assert_eq!(riofs::fbarrier(&file).unwrap(), by_barrier(), "others are still known");
    drop(file);
    mounted.unmount();
}

#[test]
fn other_file_systems_make_it_durable() {
    let file = tempfile::tempfile().unwrap();
    for call in [riofs::fbarrier, riofs::fdatabarrier, riofs::syncfs] {
        assert_eq!(call(&file).unwrap(), Done::Durable);
    }
    let (reader, _writer) = std::io::pipe().unwrap();
    assert!(riofs::fbarrier(&reader).is_err());
}

#[test]
fn what_is_behind_a_barrier_is_not_durable_alone() {
    if !can_mount() {
        return;
    }
    let (_dir, image) = new_image();
    let victim = Victim::new(&image);
    let path = |name: &str| victim.directory.join(name);
    for round in 1..=20_u8 {
        // `write`, on several streams.
        for name in ["a", "b", "c"] {
            let file = File::create(path(&format!("{name} {round}"))).unwrap();
            file.write_all_at(&[round; 50_000], 0).unwrap();
            riofs::fbarrier(&file).unwrap();
        }
        // A mapping.
        let mapped = read_write(path(&format!("mapped {round}")));
        mapped.set_len(3 << 20).unwrap();
        let mut mapping = Mapping::new(&mapped, 3 << 20);
        mapping.fill(round);
        riofs::fdatabarrier(&mapped).unwrap();
        // What is changed later has no part in it.
        let last = File::create(path(&format!("last {round}"))).unwrap();
        last.write_all_at(&[round; 100], 0).unwrap();
        last.sync_all().unwrap();
    }
    drop(victim);
    let mounted = Mounted::new(&image);
    for round in 1..=20 {
        for (name, len) in [("a", 50_000), ("b", 50_000), ("c", 50_000), ("mapped", 3 << 20)] {
            let found = fs::read(mounted.directory.join(format!("{name} {round}"))).unwrap();
            assert_eq!(found.len(), len, "{name} {round}");
            assert!(found.iter().all(|byte| *byte == round), "{name} {round}");
        }
    }
    assert!(!mounted.unmount());
    check(&image);
}

#[test]
fn a_synced_file_system_is_durable() {
    if !can_mount() {
        return;
    }
    let (_dir, image) = new_image();
    let victim = Victim::new(&image);
    for n in 0..200 {
        fs::write(victim.directory.join(format!("file {n}")), [n; 20_000]).unwrap();
    }
    let mapped = read_write(victim.directory.join("mapped"));
    mapped.set_len(3 << 20).unwrap();
    let mut mapping = Mapping::new(&mapped, 3 << 20);
    mapping.fill(77);
    assert_eq!(riofs::syncfs(&mapped).unwrap(), Done::RioFs);
    drop(victim);
    let mounted = Mounted::new(&image);
    for n in 0..200 {
        let found = fs::read(mounted.directory.join(format!("file {n}"))).unwrap();
        assert_eq!(found, [n; 20_000]);
    }
    let found = fs::read(mounted.directory.join("mapped")).unwrap();
    assert_eq!((found.len(), found.iter().all(|byte| *byte == 77)), (3 << 20, true));
    assert!(!mounted.unmount());
    check(&image);
}

/// The ways to write that are durable when they return: the flags of the file, and whether the
/// write itself has `RWF_DSYNC`.
const SYNCED: [(i32, bool); 6] = [
    (libc::O_WRONLY | libc::O_SYNC, false),
    (libc::O_WRONLY | libc::O_DSYNC, false),
    (libc::O_WRONLY, true),
    (libc::O_RDWR | libc::O_SYNC, false),
    (libc::O_RDWR | libc::O_DSYNC, false),
    (libc::O_RDWR, true),
];

/// Opens a file with such flags.
fn open_synced(path: &Path, flags: i32) -> File {
    let mut options = File::options();
    options.write(true).read(flags & libc::O_ACCMODE == libc::O_RDWR).create(true);
    options.custom_flags(flags & !libc::O_ACCMODE).open(path).unwrap()
}

/// Appends to a file in such a way.
fn write_synced(file: &mut File, data: &[u8], is_flagged: bool) {
    if !is_flagged {
        return file.write_all(data).unwrap();
    }
    let slice = [IoSlice::new(data)];
    // SAFETY: an `IoSlice` is an `iovec`, and -1 is the position of the file.
    let written =
        unsafe { libc::pwritev2(file.as_raw_fd(), slice.as_ptr().cast(), 1, -1, libc::RWF_DSYNC) };
    assert_eq!(written, data.len() as isize);
}

#[test]
fn a_synced_write_is_one_fsync() {
    if !can_mount() {
        return;
    }
    let (_dir, image) = new_image();
    let mounted = Mounted::new(&image);
    let fsyncs = |fs: &Fs| fs.stat().fsyncs;
    for (index, (flags, is_flagged)) in SYNCED.into_iter().enumerate() {
        // The kernel asks for a new file, and opens it by itself the second time.
        for attempt in ["new", "old"] {
            let mut file = open_synced(&mounted.directory.join(index.to_string()), flags);
            let before = fsyncs(&mounted.fs);
            for _ in 0..5 {
                write_synced(&mut file, &[3; 5000], is_flagged);
            }
            let count = fsyncs(&mounted.fs) - before;
            assert_eq!(count, 5, "flags {flags:#x}, {is_flagged}, {attempt} file");
        }
        // Without the flags.
        let before = fsyncs(&mounted.fs);
        let mut file = open_synced(&mounted.directory.join(index.to_string()), libc::O_WRONLY);
        write_synced(&mut file, &[3; 5000], false);
        assert_eq!(fsyncs(&mounted.fs), before);
    }
    assert!(!mounted.unmount());
    check(&image);
}

#[test]
fn a_synced_write_survives_a_kill() {
    if !can_mount() {
        return;
    }
    let (_dir, image) = new_image();
    let victim = Victim::new(&image);
    for (index, (flags, is_flagged)) in SYNCED.into_iter().enumerate() {
        let mut file = open_synced(&victim.directory.join(index.to_string()), flags);
        for n in 0..50_u8 {
            write_synced(&mut file, &[n; 1000], is_flagged);
        }
        // More than one request.
        write_synced(&mut file, &[9; 3 << 20], is_flagged);
    }
    drop(victim);
    let mounted = Mounted::new(&image);
    for index in 0..SYNCED.len() {
        let found = fs::read(mounted.directory.join(index.to_string())).unwrap();
        assert_eq!(found.len(), 50_000 + (3 << 20), "{index}");
        for (n, record) in found[..50_000].chunks(1000).enumerate() {
            assert!(record.iter().all(|byte| usize::from(*byte) == n), "{index}");
        }
        assert!(found[50_000..].iter().all(|byte| *byte == 9), "{index}");
    }
    assert!(!mounted.unmount());
    check(&image);
}

/// The folder of the files for programs.
fn contrib() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/riofs")
}

/// Runs a program on RioFS and on another file system. It prints the numbers that the calls return.
fn check_program(command: &dyn Fn() -> Command) {
    let run = |directory: &Path| {
        let output = command().arg(directory).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let (dir, image) = new_image();
    assert_eq!(run(dir.path()), "1 1 1 EBADF\n");
    let victim = Victim::new(&image);
    let expected = if by_barrier() == Done::RioFs { "0 0 0 EBADF\n" } else { "1 1 0 EBADF\n" };
    assert_eq!(run(&victim.directory), expected);
    drop(victim);
    let mounted = Mounted::new(&image);
    let a = fs::read(mounted.directory.join("a")).unwrap();
    assert_eq!((a.len(), &a[4090..4100]), (8192, &b"by mapping"[..]));
    assert_eq!(fs::read(mounted.directory.join("b")).unwrap(), b"b");
    assert!(!mounted.unmount());
    check(&image);
}

fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/calls").join(name)
}

#[test]
fn a_program_in_c_makes_the_calls() {
    if !has_program("cc", "--version") {
        return eprintln!("skipped: there is no cc");
    }
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("program");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"]).arg(contrib());
    cc.arg("-o").arg(&binary).arg(program("program.c"));
    let output = cc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    if can_mount() {
        check_program(&|| Command::new(&binary));
    }
}

#[test]
fn a_program_in_python_makes_the_calls() {
    if !has_program("python3", "--version") {
        return eprintln!("skipped: there is no python3");
    }
    if can_mount() {
        check_program(&|| {
            let mut python = Command::new("python3");
            python.arg("-B").arg(program("program.py")).env("PYTHONPATH", contrib());
            python
        });
    }
}
