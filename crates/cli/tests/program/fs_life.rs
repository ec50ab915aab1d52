//! The life of a mount: in the background, its figures, its unmount, and its end without one.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command},
};

use riopipe_fs::mkfs::find_e2fs_program;
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    serve::{served, signal},
    site::{Done, finish, rio_in, start_in},
};

/// A folder with the image `disk.img`, and the directory `mnt`.
pub(crate) struct Image(TempDir);

impl Image {
    pub(crate) fn new() -> Self {
        let image = Self(tempfile::tempdir().unwrap());
        fs::create_dir(image.path("mnt")).unwrap();
        image.fs(&["mkfs", "disk.img", "--size", "128M"]).ok();
        image
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `rio fs …`
    pub(crate) fn fs(&self, words: &[&str]) -> Done {
        rio_in(self.0.path(), &[&["fs"], words, &["-o", "json"]].concat())
    }

    /// A mount in the background.
    fn mount(&self, words: &[&str]) -> Value {
        let words = [&["mount", "disk.img", "mnt", "--daemon", "--log", "log"], words].concat();
        self.fs(&words).ok()
    }

    /// A mount in the foreground.
    fn serve(&self, words: &[&str]) -> Child {
        let args = [&["fs", "mount", "disk.img", "mnt", "-o", "json"], words].concat();
        let (child, printed) = served(start_in(self.0.path(), &args));
        assert_eq!(printed["schema"], "rio-fs-mount/1");
        child
    }

    /// Any ext4 may use it, and e2fsck finds nothing.
    pub(crate) fn is_clean(&self) {
        assert!(!self.path("disk.img.rio").exists());
        check_with_e2fsck(&self.path("disk.img"));
    }
}

pub(crate) fn check_with_e2fsck(image: &Path) {
    let e2fsck = find_e2fs_program("e2fsck").unwrap();
    let done = Done::of(Command::new(e2fsck).arg("-fn").arg(image).output().unwrap());
    assert_eq!(done.code, 0, "{done:?}");
}

fn synced(path: &Path, content: &str) -> File {
    let mut file = File::create(path).unwrap();
    file.write_all(content.as_bytes()).unwrap();
    file.sync_all().unwrap();
    file
}

#[test]
fn a_mount_in_the_background_answers_and_is_unmounted_when_all_is_durable() {
    let image = Image::new();
    let mounted = image.mount(&["--dirty-limit", "16"]);
    let canonical = image.path("disk.img").canonicalize().unwrap();
    assert_eq!(mounted["place"], canonical.to_str().unwrap());
    drop(synced(&image.path("mnt/file"), "durable"));
    fs::write(image.path("mnt/other"), "not yet durable").unwrap();
    fs::rename(image.path("mnt/other"), image.path("mnt/moved")).unwrap();
    File::open(image.path("mnt/moved")).unwrap().sync_all().unwrap();

    for place in ["mnt", "disk.img"] {
        let stat = image.fs(&["stat", place]).ok();
        assert_eq!((&stat["schema"], &stat["state"]), (&"rio-fs-stat/2".into(), &"mounted".into()));
        assert_eq!((&stat["fsyncs"], &stat["records"]), (&2.into(), &1.into()));
        let fallbacks = stat["fallbacks"].as_array().unwrap();
        let of = |reason: &str| fallbacks.iter().find(|entry| entry["reason"] == reason).unwrap();
        assert_eq!((&of("inode")["count"], &of("area")["count"]), (&1.into(), &0.into()));
        assert_eq!(stat["total"][0]["count"], 2);
        let stages = stat["stages"].as_array().unwrap();
        assert!(stages.iter().any(|stage| stage["stage"] == "wait_record"), "{stages:?}");
        assert_eq!((&stat["read_only"], &stat["errors"]), (&false.into(), &0.into()));
        let pages = stat["pages"].as_u64().unwrap();
        assert!(pages >= stat["dirty_pages"].as_u64().unwrap() && pages <= 2, "{stat:?}");
        assert_eq!(stat["pages_max"], 4096);
        assert!(stat["areas"][0]["blocks"].as_u64().unwrap() > 1_000);
    }
    let text = rio_in(image.0.path(), &["fs", "stat", "mnt"]);
    assert!(text.stdout.contains("2 fsyncs were measured"), "{text:?}");

    let done = image.fs(&["umount", "mnt"]).ok();
    assert_eq!(done["place"], canonical.to_str().unwrap());
    // No process has to be waited for.
    image.is_clean();
    assert_eq!(image.fs(&["stat", "disk.img"]).ok()["state"], "unmounted");
    image.fs(&["stat", "mnt"]).failed(1, &["no file system", "findmnt"]);
    image.fs(&["umount", "mnt"]).failed(1, &["no file system"]);

    for mode in ["horae", "ext4"] {
        image.mount(&["--mode", mode]);
        assert_eq!(fs::read_to_string(image.path("mnt/moved")).unwrap(), "not yet durable");
        assert_eq!(image.fs(&["stat", "mnt"]).ok()["mode"], mode);
        image.fs(&["umount", "disk.img"]).ok();
        image.is_clean();
    }
}

#[test]
fn a_mount_that_fails_in_the_background_has_its_message_and_its_code() {
    let image = Image::new();
    let mount = |words: &[&str]| image.fs(&[&["mount"], words, &["--daemon"]].concat());
    mount(&["disk.img", "missing", "--log", "log"]).failed(1, &["missing", "mkdir"]);
    mount(&["disk.img", "mnt", "--log", "no/log"]).failed(1, &["can't open the log no/log"]);
    image.is_clean();
    image.mount(&[]);
    fs::create_dir(image.path("second")).unwrap();
    mount(&["disk.img", "second", "--log", "log"]).failed(7, &["in use", "rio fs umount"]);
    image.fs(&["fsck", "disk.img"]).failed(7, &["in use", "rio fs umount"]);
    image.fs(&["mkfs", "disk.img", "--force"]).failed(7, &["in use"]);
    image.fs(&["umount", "mnt"]).ok();
}

/// A file keeps no order, so the mode has no effect there and is refused.
#[test]
fn the_modes_of_drives_with_an_order_are_refused_for_an_image() {
    let image = Image::new();
    let mount = ["mount", "disk.img", "mnt", "--mode"];
    let words = |mode| [&mount[..], &[mode]].concat();
    image.fs(&words("barrier")).failed(4, &["engine barrier", "no cache barrier"]);
    image.fs(&words("opimq")).failed(4, &["engine opimq"]);
    image.mount(&[]);
    image.fs(&["umount", "mnt"]).ok();
    image.is_clean();
}

#[test]
fn a_mount_in_use_is_unmounted_only_by_force_and_without_loss() {
    let image = Image::new();
    image.mount(&[]);
    let mut file = File::create(image.path("mnt/file")).unwrap();
    file.write_all(b"written").unwrap();
    image.fs(&["umount", "mnt"]).failed(1, &["in use", "--force"]);
    file.write_all(b" twice").unwrap();
    image.fs(&["umount", "mnt", "--force"]).ok();
    assert!(file.write_all(b"too late").is_err());
    drop(file);
    image.is_clean();
    let log = fs::read_to_string(image.path("log")).unwrap();
    assert!(log.contains("programs still used files there"), "{log}");
    image.mount(&[]);
    assert_eq!(fs::read_to_string(image.path("mnt/file")).unwrap(), "written twice");
    image.fs(&["umount", "mnt"]).ok();
}

#[test]
fn sigterm_unmounts_also_what_is_in_use() {
    let image = Image::new();
    let child = image.serve(&[]);
    let mut file = File::create(image.path("mnt/file")).unwrap();
    file.write_all(b"written").unwrap();
    signal(&child, "-TERM");
    let done = finish(child);
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stderr.contains("SIGTERM: unmounting"), "{done:?}");
    assert!(file.sync_all().is_err());
    image.is_clean();
}

#[test]
fn a_killed_process_is_reported_and_its_files_are_handed_back() {
    for mode in ["rio", "horae"] {
        is_handed_back_after_a_kill(mode);
    }
}

fn is_handed_back_after_a_kill(mode: &str) {
    let image = Image::new();
    let mut child = image.serve(&["--mode", mode]);
    drop(synced(&image.path("mnt/file"), "durable"));
    child.kill().unwrap();
    child.wait().unwrap();

    assert_eq!(image.fs(&["stat", "disk.img"]).ok()["state"], "unrecovered");
    image.fs(&["stat", "mnt"]).failed(3, &["no process", "recovers"]);
    image.fs(&["mount", "disk.img", "mnt"]).failed(1, &["rio fs umount"]);
    image.fs(&["umount", "mnt"]).failed(3, &["no process", "taken off"]);
    image.fs(&["umount", "mnt"]).failed(1, &["no file system"]);

    let done = image.fs(&["fsck", "disk.img", "--hand-back"]).ok();
    assert_eq!((&done["schema"], &done["handed_back"]), (&"rio-fs-fsck/2".into(), &true.into()));
    assert_eq!(done["recovered"]["records"], 1);
    assert!(done.get("clean").is_none());
    image.is_clean();
    image.mount(&[]);
    assert_eq!(fs::read_to_string(image.path("mnt/file")).unwrap(), "durable");
    image.fs(&["umount", "mnt"]).ok();
}

#[test]
fn an_unmount_whose_process_is_killed_is_not_reported_as_done() {
    let image = Image::new();
    let mut child = image.serve(&[]);
    drop(synced(&image.path("mnt/file"), "durable"));
    // It does not answer, and so it does not end either.
    signal(&child, "-STOP");
    let args = ["fs", "umount", "disk.img", "-o", "json"];
    let waiting = start_in(image.0.path(), &args);
    // Once it is off the tree, nothing is left to do for the process that waits.
    let is_mounted = || {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts.contains(image.path("mnt").to_str().unwrap())
    };
    while is_mounted() {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    finish(waiting).failed(6, &["has ended before it was done", "recovers"]);
    assert_eq!(image.fs(&["stat", "disk.img"]).ok()["state"], "unrecovered");
    assert_eq!(image.fs(&["fsck", "disk.img"]).ok()["recovered"]["records"], 1);
    image.is_clean();
}

#[test]
fn prometheus_reads_the_figures_of_a_mount() {
    let image = Image::new();
    let mounted = image.mount(&["--metrics", "127.0.0.1:0"]);
    drop(synced(&image.path("mnt/file"), "durable"));
    let address = mounted["metrics"].as_str().unwrap();
    let get = |path: &str| {
        let mut socket = TcpStream::connect(address).unwrap();
        write!(socket, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    };
    let page = get("/metrics");
    for line in ["rio_fs_fsyncs_total 1", "rio_fs_records_total 1", "rio_fs_fsync_seconds_count"] {
        assert!(page.contains(line), "no {line:?} in {page}");
    }
    assert!(get("/healthz").starts_with("HTTP/1.1 200"));
    assert!(get("/stat").contains("\"fsyncs\":1"));
    image.fs(&["umount", "mnt"]).ok();
    let wrong = ["mount", "disk.img", "mnt", "--metrics", "192.0.2.1:1"];
    image.fs(&wrong).failed(2, &["other machines"]);
}

/// An error that a mount has recorded stays until a check of all structures finds no damage.
#[test]
fn a_recorded_error_is_shown_until_a_check_clears_it() {
    let image = Image::new();
    let debugfs = |requests: &str| {
        fs::write(image.path("requests"), requests).unwrap();
        let program = find_e2fs_program("debugfs").unwrap();
        let [requests, disk] = [image.path("requests"), image.path("disk.img")];
        let output = Command::new(program).arg("-wf").arg(requests).arg(disk).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let record = "ssv state 2\nssv error_count 3\nssv first_error_time 1700000000\n\
                  ssv first_error_func some\nssv last_error_time 1700000000\n";
    let errors = || image.fs(&["stat", "disk.img"]).ok()["errors"].clone();
    let text_of = |words: &[&str]| rio_in(image.0.path(), &[&["fs"], words].concat()).stdout;

    // A mount, and a recovery without a check, keep it.
    debugfs(record);
    assert_eq!(errors(), 3);
    let text = text_of(&["stat", "disk.img"]);
    assert!(text.contains("3 errors recorded: `rio fs fsck` checks it, and clears"), "{text}");
    image.mount(&[]);
    assert_eq!(image.fs(&["stat", "mnt"]).ok()["errors"], 3);
    image.fs(&["umount", "mnt"]).ok();
    let text = text_of(&["fsck", "disk.img", "--hand-back"]);
    assert!(text.contains("3 errors recorded: a check clears"), "{text}");
    assert_eq!(errors(), 3);

    // So does a check that finds damage: a block that no file has is in use.
    debugfs("setb 30000\n");
    image.fs(&["fsck", "disk.img"]).failed(5, &["`e2fsck -f disk.img` repairs it"]);
    assert_eq!(errors(), 3);
    debugfs("freeb 30000\n");

    let checked = image.fs(&["fsck", "disk.img"]).ok();
    assert_eq!((&checked["clean"], &checked["errors"]), (&true.into(), &3.into()));
    assert_eq!(checked["errors_cleared"], true);
    assert_eq!(errors(), 0);
    let dumpe2fs = find_e2fs_program("dumpe2fs").unwrap();
    let output = Command::new(dumpe2fs).arg("-h").arg(image.path("disk.img")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!text.contains("error time") && !text.contains("with errors"), "{text}");
    assert_eq!(image.fs(&["fsck", "disk.img"]).ok()["errors_cleared"], false);
    image.is_clean();
    debugfs(record);
    let text = text_of(&["fsck", "disk.img"]);
    assert!(text.contains("clean; nothing to recover; 3 recorded errors cleared"), "{text}");
}

/// e2fsck refuses a file that was not recovered. So the command that the message names must lead on.
#[test]
fn a_recovery_that_damage_makes_impossible_can_be_given_up() {
    let image = Image::new();
    let mut child = image.serve(&[]);
    drop(synced(&image.path("mnt/file"), "durable"));
    child.kill().unwrap();
    child.wait().unwrap();
    image.fs(&["umount", "mnt"]).failed(3, &["taken off"]);
    let disk = File::options().read(true).write(true).open(image.path("disk.img")).unwrap();
    let mut found = 0;
    for at in (0..disk.metadata().unwrap().len()).step_by(4096) {
        let mut header = [0; 8];
        disk.read_exact_at(&mut header, at).unwrap();
        // The superblock of the journal.
        if header == [0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 4] {
            disk.write_all_at(b"damage", at + 24).unwrap();
            found += 1;
        }
    }
    assert_eq!(found, 1);

    let words = ["journal's superblock", "`rio fs fsck --accept-lost-log`"];
    image.fs(&["mount", "disk.img", "mnt"]).failed(4, &words);
    image.fs(&["fsck", "disk.img"]).failed(4, &words);
    image.fs(&["fsck", "disk.img", "--hand-back", "--accept-lost-log"]).failed(4, &words);
    assert_eq!(image.fs(&["stat", "disk.img"]).ok()["state"], "unrecovered");
    let given_up = image.fs(&["fsck", "disk.img", "--accept-lost-log"]);
    given_up.failed(5, &["given up", "`e2fsck -f disk.img` repairs it"]);
    image.fs(&["mount", "disk.img", "mnt"]).failed(4, &["journal's superblock", "run e2fsck"]);
    let e2fsck = Command::new(find_e2fs_program("e2fsck").unwrap())
        .arg("-fy")
        .arg(image.path("disk.img"))
        .output()
        .unwrap();
    assert_eq!(e2fsck.status.code(), Some(1), "{e2fsck:?}");
    image.mount(&[]);
    image.fs(&["umount", "mnt"]).ok();
    image.is_clean();
}

/// As `mount` and `umount` call the helpers.
#[test]
fn the_helpers_of_mount_and_umount_pass_on_what_they_get() {
    let image = Image::new();
    let program = Path::new(env!("CARGO_BIN_EXE_rio")).parent().unwrap();
    let helper = |name: &str, words: &[&str]| {
        let script = format!("{}/../../contrib/riofs/{name}", env!("CARGO_MANIFEST_DIR"));
        let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("sh");
        command.arg(script).args(words).current_dir(image.0.path());
        Done::of(command.env("PATH", path).env("RIO_VOLUMES", "").output().unwrap())
    };
    let options = "rw,nofail,x-systemd.automount,mode=ext4,commit=9,log=log";
    let done = helper("mount.riofs", &["disk.img", "mnt", "-n", "-o", options]);
    assert_eq!((done.code, done.stdout.as_str()), (0, ""), "{done:?}");
    assert_eq!(image.fs(&["stat", "mnt"]).ok()["mode"], "ext4");
    let file = File::create(image.path("mnt/file")).unwrap();
    assert_eq!(helper("umount.fuse.riofs", &["mnt", "-n"]).code, 1, "it is in use");
    assert_eq!(helper("umount.fuse.riofs", &["mnt", "-f", "-t", "fuse.riofs"]).code, 0);
    image.is_clean();
    drop(file);
    let done = helper("mount.riofs", &["disk.img", "mnt", "-o", "ro,log=log"]);
    assert_eq!(done.code, 0, "{done:?}");
    assert_eq!(image.fs(&["stat", "mnt"]).ok()["read_only"], true);
    assert_eq!(helper("umount.fuse.riofs", &["mnt"]).code, 0);
    let done = helper("mount.riofs", &["disk.img", "mnt", "-o", "data=writeback"]);
    assert!(done.code == 1 && done.stderr.contains("data=writeback"), "{done:?}");
    assert_eq!(helper("mount.riofs", &["disk.img", "mnt", "-f", "-o", "rw"]).code, 0);
    image.is_clean();
}
