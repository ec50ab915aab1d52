//! File systems on volumes of real target processes: a target that is lost, one that is full, and the
//! check of a volume.

use std::{
    fs::{self, File},
    io::{ErrorKind, Write},
    os::unix::fs::FileExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
};

use riopipe::{OpenOptions, Place, StreamOptions, Until, Volume};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    serve::{serve, served, signal},
    signals::{read_until, signal_until_it_ends},
    site::{Done, Site, finish, rio_in, start_in},
};

/// A target process, and the volume `v` on it with a file system.
struct Scene {
    folder: TempDir,
    target: Child,
    address: String,
}

/// The NQN is given, so that the target is the same one after a restart.
const TARGET: [&str; 8] = [
    "--drive",
    "file:drive,size=256M",
    "--log",
    "file:log,size=8M",
    "-n",
    "nqn.2026-11.com.example:files",
    "--reactors",
    "1",
];

impl Scene {
    fn new() -> Self {
        Self::with(|folder| serve(folder, &TARGET))
    }

    /// A scene whose target `serve` starts.
    fn with(serve: impl FnOnce(&Path) -> (Child, Value)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (target, printed) = serve(folder.path());
        let address = printed["addresses"][0].as_str().unwrap().to_owned();
        let scene = Self { folder, target, address };
        rio_in(scene.folder.path(), &["volume", "create", "v", "-m", &scene.address, "-o", "json"])
            .ok();
        scene.fs(&["mkfs", "v"]).ok();
        fs::create_dir(scene.folder.path().join("mnt")).unwrap();
        scene
    }

    /// `rio fs … -m …`
    fn fs(&self, words: &[&str]) -> Done {
        finish(self.start(words))
    }

    fn start(&self, words: &[&str]) -> Child {
        let args = [&["fs"], words, &["-m", &self.address, "-o", "json"]].concat();
        start_in(self.folder.path(), &args)
    }

    /// `rio fs …` of a mount.
    fn ask(&self, words: &[&str]) -> Done {
        rio_in(self.folder.path(), &[&["fs"], words, &["-o", "json"]].concat())
    }

    fn mount(&self, words: &[&str]) -> Value {
        self.fs(&[&["mount", "v", "mnt", "--daemon", "--log", "mount.log"], words].concat()).ok()
    }

    fn kill_target(&mut self) {
        self.target.kill().unwrap();
        self.target.wait().unwrap();
    }

    /// The target again, at the same address.
    fn restart_target(&mut self) {
        self.restart_target_with(&[]);
    }

    fn restart_target_with(&mut self, words: &[&str]) {
        let args = ["target", "serve", "-o", "json", "-a", "127.0.0.1", "-s"];
        let (_, port) = self.address.rsplit_once(':').unwrap();
        let args = [&args[..], &[port], &TARGET, words].concat();
        self.target = served(start_in(self.folder.path(), &args)).0;
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // After a test that has failed.
        let mnt = self.folder.path().join("mnt");
        let _ = Command::new("umount").args(["-q", "-l"]).arg(mnt).status();
        let _ = self.target.kill();
        let _ = self.target.wait();
    }
}

#[test]
fn mode_barrier_mounts_a_volume_whose_drive_keeps_the_order() {
    mounts_in_mode("barrier", "ssd:flash,size=256M,order=barrier");
}

#[test]
fn mode_opimq_mounts_a_volume_whose_drive_keeps_the_order() {
    mounts_in_mode("opimq", "ssd:flash,size=256M,order=op");
}

fn mounts_in_mode(mode: &str, drive: &str) {
    let words = ["--drive", drive, "--log", "file:log,size=8M"];
    let scene = Scene::with(|folder| serve(folder, &words));
    scene.mount(&["--mode", mode]);
    let mut file = File::create(scene.folder.path().join("mnt/file")).unwrap();
    file.write_all(b"durable").unwrap();
    file.sync_all().unwrap();
    drop(file);
    let stat = scene.ask(&["stat", "mnt"]).ok();
    assert_eq!((&stat["mode"], &stat["records"]), (&mode.into(), &0.into()));
    assert!(stat["commits"].as_u64().unwrap() >= 1, "{stat:?}");
    scene.ask(&["umount", "mnt"]).ok();
    assert_eq!(scene.fs(&["fsck", "v"]).ok()["clean"], true);
    scene.mount(&["--mode", "ext4"]);
    assert_eq!(fs::read(scene.folder.path().join("mnt/file")).unwrap(), b"durable");
    scene.ask(&["umount", "mnt"]).ok();
}

#[test]
fn a_target_that_is_lost_makes_the_files_read_only_with_the_reason() {
    let mut scene = Scene::new();
    scene.mount(&["--loss-timeout", "1"]);
    let folder = scene.folder.path().to_owned();
    let synced = |name: &str| {
        let mut file = File::create(folder.join("mnt").join(name))?;
        file.write_all(b"content")?;
        file.sync_all()
    };
    synced("before").unwrap();
    scene.kill_target();
    let error = synced("after").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "EIO: {error}");
    assert_eq!(synced("later").unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    // What is in the cache is still there.
    assert_eq!(fs::read(folder.join("mnt/before")).unwrap(), b"content");
    let stat = scene.ask(&["stat", "mnt"]).ok();
    assert_eq!(stat["read_only"], true);
    let why = stat["failure"].as_str().unwrap();
    assert!(why.contains(&scene.address), "{why}");
    let text = scene.ask(&["umount", "mnt"]).failed(6, &["recovers"]);
    assert!(text.contains(&scene.address), "{text}");

    scene.restart_target();
    let checked = scene.fs(&["fsck", "v", "--take-over"]).ok();
    assert_eq!(checked["clean"], true);
    scene.mount(&[]);
    assert!(folder.join("mnt/before").exists() && !folder.join("mnt/later").exists());
    scene.ask(&["umount", "mnt"]).ok();
}

/// A target whose file system is full behaves like this one, whose drive may not be written beyond a
/// limit.
#[test]
fn a_full_target_makes_the_files_read_only_and_loses_nothing_durable() {
    let mut scene = Scene::with(|folder| {
        let rio = env!("CARGO_BIN_EXE_rio");
        // In units of 512 bytes: 160 MiB.
        let script = format!(
            "truncate -s 256M drive && ulimit -f 327680 && exec {rio} target serve -s 0 --create \
             -o json {}",
            TARGET.join(" ")
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]).current_dir(folder).env("RIO_VOLUMES", "");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        served(command.spawn().unwrap())
    });
    scene.mount(&[]);
    let folder = scene.folder.path().join("mnt");
    let write = |n: u32| {
        let mut file = File::create(folder.join(n.to_string()))?;
        file.write_all(&vec![n as u8; 1 << 20])?;
        file.sync_all()
    };
    let (durable, error) =
        (0..).find_map(|n| write(n).err().map(|error| (n, error))).expect("the drive has an end");
    assert_eq!(error.raw_os_error(), Some(5), "EIO: {error}");
    assert_eq!(write(1_000).unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    assert_eq!(scene.ask(&["stat", "mnt"]).ok()["read_only"], true);
    scene.ask(&["umount", "mnt"]).failed(6, &["recovers"]);
    scene.kill_target();
    // It has space again.
    scene.restart_target();
    assert_eq!(scene.fs(&["fsck", "v", "--take-over"]).ok()["clean"], true);
    scene.mount(&[]);
    for n in 0..durable {
        assert_eq!(fs::read(folder.join(n.to_string())).unwrap(), vec![n as u8; 1 << 20], "{n}");
    }
    write(1_000).unwrap();
    scene.ask(&["umount", "mnt"]).ok();
}

#[test]
fn a_volume_is_checked_after_a_crash_and_damage_is_found() {
    let site = Site::with(2, "mem:128M", "8M");
    site.create();
    let members = site.members();
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    let folder = site.path("");
    let start =
        |words: &[&str]| start_in(&folder, &[&["fs"], words, &members, &["-o", "json"]].concat());
    let fs_of = |words: &[&str]| finish(start(words));
    fs_of(&["mkfs", "v"]).ok();
    fs::create_dir(folder.join("mnt")).unwrap();
    let (mut child, _) = served(start(&["mount", "v", "mnt"]));
    for n in 0..40 {
        let file = File::create(folder.join(format!("mnt/{n}"))).unwrap();
        file.write_all_at(&[n; 9_000], 0).unwrap();
        file.sync_all().unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    take_off(&folder);
    // The owner has not closed it.
    fs_of(&["fsck", "v"]).failed(4, &["--take-over"]);
    let checked = fs_of(&["fsck", "v", "--take-over"]).ok();
    assert_eq!((&checked["clean"], &checked["handed_back"]), (&true.into(), &true.into()));
    assert!(checked["recovered"]["records"].as_u64().unwrap() > 0);
    let output = checked["e2fsck"].as_str().unwrap();
    assert!(output.contains("51/"), "the files are among the inodes in use: {output}");
    let done = fs_of(&["fsck", "v", "--hand-back"]).ok();
    assert!(done.get("e2fsck").is_none());

    // The bitmap of the blocks of the first group: all are free.
    let addresses: Vec<_> = members.iter().filter(|word| **word != "-m").collect();
    let addresses: Vec<_> = addresses.iter().map(|address| address.parse().unwrap()).collect();
    let (volume, _) = Volume::open("v", &addresses, &OpenOptions::default()).unwrap();
    let mut descriptors = [0; 4096];
    volume.reader(&Default::default()).read(1, &mut descriptors, None).unwrap();
    let bitmap = u64::from(u32::from_le_bytes(descriptors[..4].try_into().unwrap()));
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let buf = stream.buf(4096).unwrap();
    let group = stream.group().write(bitmap, buf, Place::InPlace);
    let seq = group.submit_durable_or_wait(None).unwrap();
    stream.wait(Until::Durable(seq), None).unwrap();
    stream.close().unwrap();
    volume.close().unwrap();
    let done = fs_of(&["fsck", "v"]);
    done.failed(5, &["damage"]);
    assert!(done.json()["e2fsck"].as_str().unwrap().contains("bitmap"), "{done:?}");
}

/// Takes off the mount of a process that was killed.
fn take_off(folder: &Path) {
    rio_in(folder, &["fs", "umount", "mnt", "-o", "json"]).failed(3, &["taken off"]);
}

#[test]
fn wrong_names_are_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let fs_of = |words: &[&str]| rio_in(folder.path(), &[&["fs"], words, &["-o", "json"]].concat());
    fs::create_dir(folder.path().join("mnt")).unwrap();
    // No file, so it is the name of a volume, which is not known.
    fs_of(&["mount", "disk.img", "mnt"]).failed(2, &["disk.img", "-m"]);
    fs_of(&["mount", "./disk.img", "mnt"]).failed(1, &["./disk.img", "No such file"]);
    fs_of(&["mount", "mnt", "mnt"]).failed(1, &["not a file"]);
    fs_of(&["fsck", "disk.img"]).failed(2, &["disk.img", "-m"]);
    fs_of(&["fsck", "./disk.img"]).failed(1, &["No such file"]);
    fs_of(&["stat", "./disk.img"]).failed(1, &["no file system"]);
    fs::write(folder.path().join("empty"), vec![0; 1 << 20]).unwrap();
    fs_of(&["mount", "empty", "mnt"]).failed(4, &["rio fs mkfs"]);
    fs_of(&["stat", "empty"]).failed(4, &["rio fs mkfs"]);
    fs_of(&["stat", "mnt", "--watch", "1"]).failed(1, &["no file system"]);

    fs_of(&["mkfs", "disk", "--size", "128M"]).ok();
    fs_of(&["stat", "disk", "--watch", "1"]).failed(2, &["not mounted"]);
    let (mut child, _) =
        served(start_in(folder.path(), &["fs", "mount", "disk", "mnt", "-o", "json"]));
    signal(&child, "-KILL");
    child.wait().unwrap();
    take_off(folder.path());
    fs::rename(folder.path().join("disk.rio"), folder.path().join("elsewhere")).unwrap();
    for command in ["mount", "fsck"] {
        let words: &[&str] =
            if command == "mount" { &[command, "disk", "mnt"] } else { &[command, "disk"] };
        fs_of(words).failed(4, &["disk.rio", "put the folder beside the image"]);
    }
    fs::rename(folder.path().join("elsewhere"), folder.path().join("disk.rio")).unwrap();
    fs_of(&["fsck", "disk"]).ok();
}

#[test]
fn programs_do_not_notice_a_target_that_comes_back() {
    let mut scene = Scene::new();
    scene.mount(&["--loss-timeout", "600"]);
    let path = scene.folder.path().join("mnt/log");
    let record = |n: u32| format!("record {n:06}\n");
    let (sender, progress) = mpsc::channel();
    let own = path.clone();
    let writer = thread::spawn(move || {
        let mut file = File::create(&own).unwrap();
        for n in 0..900 {
            file.write_all(record(n).as_bytes()).unwrap();
            file.sync_data().unwrap();
            // An overwrite, and a new file.
            if n % 50 == 0 {
                file.write_all_at(record(n).as_bytes(), u64::from(n) * 14).unwrap();
                fs::write(own.with_extension(n.to_string()), record(n)).unwrap();
            }
            let _ = sender.send(n);
        }
    });
    for loss in [200, 500] {
        while progress.recv().unwrap() < loss {}
        scene.kill_target();
        // The figures do not need the target.
        assert_eq!(scene.ask(&["stat", "mnt"]).ok()["state"], "mounted");
        scene.restart_target();
    }
    writer.join().unwrap();
    let stat = scene.ask(&["stat", "mnt"]).ok();
    assert_eq!(
        (&stat["read_only"], &stat["targets"][0]["connected"]),
        (&false.into(), &true.into())
    );
    scene.ask(&["umount", "mnt"]).ok();
    assert_eq!(scene.fs(&["fsck", "v"]).ok()["clean"], true);
    scene.mount(&[]);
    let expected: String = (0..900).map(record).collect();
    assert_eq!(fs::read_to_string(&path).unwrap(), expected);
    assert_eq!(fs::read_to_string(path.with_extension("850")).unwrap(), record(850));
    scene.ask(&["umount", "mnt"]).ok();
}

/// The device number of a mount is free as soon as it has ended, while its process may still wait
/// for a target. Questions about the next mount with this number do not reach that process.
#[test]
fn a_process_that_still_closes_does_not_answer_for_the_next_mount() {
    let scene = Scene::new();
    scene.mount(&["--loss-timeout", "600"]);
    let folder = scene.folder.path();
    let device = |mnt: &str| {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let path = folder.canonicalize().unwrap().join(mnt);
        let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let device =
            |fields: Vec<&str>| (Path::new(fields[4]) == path).then(|| fields[2].to_owned());
        fields.filter_map(device).next().unwrap()
    };
    rio_in(folder, &["fs", "mkfs", "disk.img", "--size", "128M"]);
    fs::create_dir(folder.join("next")).unwrap();
    fs::write(folder.join("mnt/file"), "not durable yet").unwrap();
    let first = device("mnt");
    signal(&scene.target, "-STOP");
    assert!(Command::new("umount").arg(folder.join("mnt")).status().unwrap().success());

    let image = folder.join("disk.img").canonicalize().unwrap();
    let next = ["mount", "disk.img", "next", "--daemon", "--log", "next.log"];
    scene.ask(&next).ok();
    // Another test may have taken the number. Then this one shows nothing.
    println!("devices: {first}, {}", device("next"));
    let stat = scene.ask(&["stat", "next"]).ok();
    assert_eq!(stat["place"], image.to_str().unwrap());
    scene.ask(&["umount", "next"]).ok();

    signal(&scene.target, "-CONT");
    assert_eq!(scene.fs(&["fsck", "v", "--wait", "60"]).ok()["clean"], true);
}

#[test]
fn a_second_signal_ends_a_mount_that_waits_for_a_target_and_the_next_one_recovers() {
    const HOURS: [&str; 4] = ["--loss-timeout", "36000", "--io-timeout", "36000"];
    // SIGTERM begins the unmount, or comes while one is in progress.
    for is_unmounted_before in [false, true] {
        let scene = Scene::new();
        let mnt = scene.folder.path().join("mnt");
        let (mut mount, _) = served(scene.start(&[&["mount", "v", "mnt"], &HOURS[..]].concat()));
        let mut synced = File::create(mnt.join("synced")).unwrap();
        synced.write_all(b"content").unwrap();
        synced.sync_all().unwrap();
        drop(synced);
        fs::write(mnt.join("lost"), "not durable").unwrap();
        signal(&scene.target, "-STOP");
        if is_unmounted_before {
            assert!(Command::new("umount").arg(&mnt).status().unwrap().success());
        }
        signal(&mount, "-TERM");
        read_until(&mut mount, "SIGTERM: unmounting");
        assert!(mount.try_wait().unwrap().is_none(), "it waits for the target");
        assert_eq!(signal_until_it_ends(mount, "-TERM"), Some(130));
        assert_eq!(fs::read_dir(&mnt).unwrap().count(), 0, "it is unmounted");

        signal(&scene.target, "-CONT");
        assert_eq!(scene.fs(&["fsck", "v", "--take-over"]).ok()["clean"], true);
        scene.mount(&[]);
        assert_eq!(fs::read(mnt.join("synced")).unwrap(), b"content");
        scene.ask(&["umount", "mnt"]).ok();
    }
}

/// A part of a volume that a recovery needs, and that is lost for good.
#[derive(Clone, Copy, PartialEq)]
enum Lost {
    /// The ordering log of the target.
    Log,
    /// The table of RioFS's journal, without which no file-level record can be read.
    Table,
}

impl Lost {
    fn lose(self, folder: &Path) {
        if self == Self::Log {
            fs::remove_file(folder.join("log")).unwrap();
            return;
        }
        let drive = File::options().read(true).write(true).open(folder.join("drive")).unwrap();
        let mut found = 0;
        for at in (0..drive.metadata().unwrap().len()).step_by(4096) {
            let mut magic = [0; 8];
            drive.read_exact_at(&mut magic, at).unwrap();
            if magic == *b"RIOFSTAB" {
                drive.write_all_at(b"damage", at + 16).unwrap();
                found += 1;
            }
        }
        assert_eq!(found, 1, "the table");
    }
}

#[test]
fn a_lost_log_and_a_damaged_journal_are_accepted_only_on_request() {
    for lost in [Lost::Log, Lost::Table] {
        let mut scene = Scene::new();
        let folder = scene.folder.path().to_owned();
        let mnt = folder.join("mnt");
        let (mut mount, _) = served(scene.start(&["mount", "v", "mnt"]));
        let synced = |name: &str| {
            let mut file = File::create(mnt.join(name)).unwrap();
            file.write_all(name.as_bytes()).unwrap();
            file.sync_all().unwrap();
        };
        synced("committed");
        // A directory is synced by a main commit, the next file by a record.
        File::open(&mnt).unwrap().sync_all().unwrap();
        synced("recorded");
        mount.kill().unwrap();
        mount.wait().unwrap();
        take_off(&folder);
        scene.kill_target();
        lost.lose(&folder);
        scene.restart_target_with(&["--create"]);

        let mount = ["mount", "v", "mnt", "--take-over", "--daemon", "--log", "mount.log"];
        let fsck = ["fsck", "v", "--take-over"];
        let words: &[&str] = match lost {
            Lost::Log => &["--accept-lost-log"],
            Lost::Table => &["damaged table", "`rio fs fsck --accept-lost-log`"],
        };
        scene.fs(&mount).failed(4, words);
        scene.fs(&fsck).failed(4, words);
        let checked = scene.fs(&[&fsck[..], &["--accept-lost-log"]].concat()).ok();
        assert_eq!((&checked["clean"], &checked["handed_back"]), (&true.into(), &true.into()));
        // All of it was durable, and no log is needed to read it.
        let records = if lost == Lost::Log { 1 } else { 0 };
        assert_eq!(checked["recovered"]["records"], records);
        // That was for good.
        scene.mount(&[]);
        assert_eq!(fs::read(mnt.join("committed")).unwrap(), b"committed");
        assert_eq!(mnt.join("recorded").exists(), lost == Lost::Log);
        synced("later");
        scene.ask(&["umount", "mnt"]).ok();
        assert_eq!(scene.fs(&["fsck", "v"]).ok()["clean"], true);
    }
}
