//! File systems mounted through FUSE, on images.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;

use riopipe_fs::backing::{Backing, FsOptions};
use riopipe_fs::fuse::{FuseOptions, Mount, Unmounter};
use riopipe_fs::image::{ImageOptions, side_folder};
use riopipe_fs::mkfs::find_e2fs_program;
use riopipe_fs_core::fs::{Fs, MountReport};

use crate::support::new_image;

/// The variables that make [`the_process_that_is_killed`] mount an image.
const IMAGE: &str = "RIOFS_TEST_MOUNT_IMAGE";
const DIRECTORY: &str = "RIOFS_TEST_MOUNT_DIRECTORY";

/// Whether file systems can be mounted here. If not, the reason is printed.
pub(crate) fn can_mount() -> bool {
    if let Err(error) = File::options().read(true).write(true).open("/dev/fuse") {
        eprintln!("skipped: /dev/fuse: {error}");
        return false;
    }
    // The system mounts for root only, and this program for others.
    let may = rustix::process::geteuid().is_root() || has_program("fusermount3", "--version");
    if !may {
        eprintln!("skipped: only root may mount without fusermount3");
    }
    may
}

/// Whether a program can be run.
pub(crate) fn has_program(program: &str, argument: &str) -> bool {
    Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success())
}

/// A mounted image.
pub(crate) struct Mounted {
    pub(crate) directory: PathBuf,
    pub(crate) fs: Arc<Fs>,
    unmounter: Unmounter,
    server: JoinHandle<()>,
    report: MountReport,
}

impl Mounted {
    pub(crate) fn new(image: &Path) -> Self {
        let directory = image.with_extension("mnt");
        fs::create_dir_all(&directory).unwrap();
        let (backing, _) = Backing::of_image(image, &ImageOptions::default()).unwrap();
        let (fs, report) = backing.mount(&FsOptions::default()).unwrap();
        let options = FuseOptions {
            source: image.display().to_string(),
            read_only: false,
            allow_other: false,
            threads: 4,
        };
        let mount = Mount::new(Arc::clone(&fs), &directory, &options).unwrap();
        let unmounter = mount.unmounter();
        let server = std::thread::spawn(move || {
            mount.serve(|| ()).unwrap();
            backing.close().unwrap();
        });
        Self { directory, fs, unmounter, server, report }
    }

    /// Unmounts it. Returns whether it was in use.
    pub(crate) fn unmount(self) -> bool {
        let was_in_use = self.unmounter.unmount().unwrap();
        self.server.join().unwrap();
        was_in_use
    }
}

/// Checks an unmounted image: `e2fsck` finds nothing.
pub(crate) fn check(image: &Path) {
    assert!(!side_folder(image).exists());
    let output = Command::new(find_e2fs_program("e2fsck").unwrap()).arg("-fn").arg(image).output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn files_are_there_after_the_next_mount() {
    if !can_mount() {
        return;
    }
    let (_dir, image) = new_image();
    let mounted = Mounted::new(&image);
    let root = mounted.directory.clone();
    fs::create_dir(root.join("many")).unwrap();
    for n in 0..700 {
        fs::write(root.join(format!("many/file {n}")), n.to_string().repeat(n)).unwrap();
    }
    let file = File::create(root.join("big")).unwrap();
    file.write_all_at(&[7; 300_000], 5_000_000).unwrap();
    file.sync_all().unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5_300_000);
    assert!(file.metadata().unwrap().blocks() < 2000, "it has a hole");
    drop(file);
    fs::rename(root.join("many/file 699"), root.join("renamed")).unwrap();
    fs::hard_link(root.join("renamed"), root.join("linked")).unwrap();
    symlink("many/file 1", root.join("symlink")).unwrap();
    fs::remove_file(root.join("many/file 0")).unwrap();
    assert!(!root.join("nothing").exists());
    fs::write(root.join("nothing"), "something").unwrap();
    assert!(!mounted.unmount());
    check(&image);

    let mounted = Mounted::new(&image);
    assert_eq!(mounted.report, MountReport::default());
    let mut names: Vec<_> = fs::read_dir(root.join("many"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    let mut expected: Vec<_> = (1..699).map(|n| format!("file {n}")).collect();
    expected.sort_unstable();
    assert_eq!(names, expected);
    for n in [1, 50, 698] {
        let text = fs::read_to_string(root.join(format!("many/file {n}"))).unwrap();
        assert_eq!(text, n.to_string().repeat(n));
    }
    let big = fs::read(root.join("big")).unwrap();
    assert!(big[..5_000_000].iter().all(|byte| *byte == 0));
    assert!(big[5_000_000..].iter().all(|byte| *byte == 7));
    assert_eq!(fs::metadata(root.join("linked")).unwrap().nlink(), 2);
    assert_eq!(fs::read_to_string(root.join("symlink")).unwrap(), "1");
    assert_eq!(fs::read_to_string(root.join("nothing")).unwrap(), "something");
    fs::remove_dir_all(root.join("many")).unwrap();
    assert!(!mounted.unmount());
    check(&image);
}

#[test]
fn a_file_system_in_use_is_unmounted_without_loss() {
    if !can_mount() {
        return;
    }
    let (_dir, image) = new_image();
    let mounted = Mounted::new(&image);
    let path = mounted.directory.join("open");
    let mut file = File::create(&path).unwrap();
    file.write_all(b"written").unwrap();
    assert!(mounted.unmount(), "it was in use");
    assert!(file.write_all(b"more").is_err());
    drop(file);
    check(&image);
    let mounted = Mounted::new(&image);
    assert_eq!(fs::read_to_string(&path).unwrap(), "written");
    assert!(!mounted.unmount());
}

/// Starts a process that has the image mounted.
pub(crate) fn spawn(image: &Path, directory: &Path) -> Child {
    fs::create_dir_all(directory).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["mount::the_process_that_is_killed", "--exact", "--nocapture"])
        .env(IMAGE, image)
        .env(DIRECTORY, directory)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line == "mounted"));
    // The harness of the test writes more if it takes long, and ends if it can't.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

#[test]
fn a_killed_process_keeps_what_was_made_durable() {
    if !can_mount() {
        return;
    }
    let (_dir, image) = new_image();
    let directory = image.with_extension("mnt");
    let mut child = spawn(&image, &directory);
    let append = |name: &str, count: usize| {
        let mut file =
            File::options().create(true).append(true).open(directory.join(name)).unwrap();
        for n in 0..count {
            file.write_all(format!("record {n}\n").as_bytes()).unwrap();
            file.sync_data().unwrap();
        }
    };
    append("log", 500);
    fs::create_dir(directory.join("folder")).unwrap();
    append("folder/new", 20);
    fs::write(directory.join("not durable"), vec![1; 100_000]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // The directory is that of a dead mount.
    let status = Command::new("umount").arg("-l").arg(&directory).status().unwrap();
    assert!(status.success());

    let mounted = Mounted::new(&image);
    for (name, count) in [("log", 500), ("folder/new", 20)] {
        let text = fs::read_to_string(directory.join(name)).unwrap();
        let expected: String = (0..count).map(|n| format!("record {n}\n")).collect();
        assert_eq!(text, expected, "{name}");
    }
    assert!(!mounted.unmount());
    check(&image);
}

/// Not a test of its own: [`a_killed_process_keeps_what_was_made_durable`] runs it in another
/// process.
#[test]
fn the_process_that_is_killed() {
    let (Some(image), Some(directory)) = (std::env::var_os(IMAGE), std::env::var_os(DIRECTORY))
    else {
        return;
    };
    let image = PathBuf::from(image);
    assert_eq!(image.with_extension("mnt"), PathBuf::from(directory));
    let mounted = Mounted::new(&image);
    println!("mounted");
    mounted.server.join().unwrap();
}
