//! T27: a drive keeps its identity wherever it is served from, and a copy does not get it.

use std::{fs, path::Path, process::Command};

use riopipe::{MemberAddr, OpenOptions, Volume};
use riopipe_media::{Attribute, open_drive};
use riopipe_target::{Config, NamespaceOptions, Target};

use crate::site::{Done, Site, rio_in};

/// An NQN, and the UUID that a drive without an identity of its own gets there as namespace 1.
const NQN: &str = "nqn.2026-01.io.example:a";
const UUID_OF_POSITION: &str = "ab69a942-055e-82c4-ab63-7291487b9e31";
/// The NQN that another machine, address or port would make.
const OTHER_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:8f4a5dd0-0e43-8000-9111-0123456789ab";

/// A site, unless its file system can't store the identity of a drive.
fn site() -> Option<Site> {
    let site = Site::new(0, "");
    let probe = open_drive(&format!("file:{},size=4K", site.path("probe").display())).unwrap();
    if probe.carrier().unwrap().attribute().unwrap() == Attribute::Unsupported {
        eprintln!("not tested here: the file system has no user attributes");
        return None;
    }
    Some(site)
}

/// The configuration of a target with this NQN, address and drives, and the site's log, which is
/// moved with the drives.
fn config(site: &Site, nqn: &str, address: &str, drives: &[&str]) -> Config {
    let in_folder =
        |drive: &&str| drive.replace('@', &format!("{}/", site.folder.path().display()));
    let drives: Vec<String> = drives.iter().map(in_folder).collect();
    let drives: Vec<&str> = drives.iter().map(String::as_str).collect();
    let moved = site.path("moved");
    let log = if moved.exists() { moved.join("log") } else { site.path("log") };
    Config {
        listen: vec![address.to_owned()],
        subnqn: Some(nqn.to_owned()),
        log: Some(format!("file:{},size=2M", log.display())),
        reactors: Some(1),
        ..Config::on_loopback(&drives)
    }
}

/// Stops the site's targets, and starts this one.
fn restart(site: &mut Site, nqn: &str, address: &str, drives: &[&str]) {
    let config = config(site, nqn, address, drives);
    start(site, &config);
}

fn start(site: &mut Site, config: &Config) {
    for target in site.targets.drain(..).flatten() {
        target.stop().unwrap();
    }
    site.add(config);
}

/// `rio volume VERB …` with these namespaces of the only target.
fn volume(site: &Site, verb: &str, words: &[&str], nsids: &[u32]) -> Done {
    let member = |nsid: &u32| ["-m".to_owned(), format!("{},ns={nsid}", site.address(0))];
    site.volume_with(verb, words, &nsids.iter().flat_map(member).collect::<Vec<_>>())
}

fn identity(site: &Site, drive: &str, words: &[&str]) -> Done {
    let args = [&["target", "identity", drive, "-o", "json"], words].concat();
    rio_in(site.folder.path(), &args)
}

#[test]
fn t27_a_volume_opens_whatever_address_position_nqn_and_path_its_drives_have() {
    let Some(mut site) = site() else { return };
    let drives = ["file:@a,size=16M", "ssd:flash,size=16M,file=@b"];
    restart(&mut site, NQN, "127.0.0.1:0", &drives);
    volume(&site, "create", &["v"], &[1, 2]).ok();
    site.file("data", 100_000);
    volume(&site, "write", &["v", "data"], &[1, 2]).ok();
    let shown = volume(&site, "show", &[], &[1, 2]).ok();

    // Another address, and another NQN.
    restart(&mut site, OTHER_NQN, "127.0.0.2:0", &drives);
    volume(&site, "verify", &["v", "data"], &[1, 2]).ok();

    // Other paths, a drive in front of them, and the members the other way round. What was made for
    // the log's directory is at other namespaces now, and the volume is written there.
    fs::create_dir(site.path("moved")).unwrap();
    for name in ["a", "b", "log"] {
        fs::rename(site.path(name), site.path("moved").join(name)).unwrap();
    }
    let drives = ["file:@c,size=16M", "ssd:flash,file=@moved/b", "file:@moved/a"];
    restart(&mut site, OTHER_NQN, "127.0.0.1:0", &drives);
    volume(&site, "verify", &["v", "data"], &[2, 3]).failed(4, &["member 0", "order"]);
    volume(&site, "verify", &["v", "data"], &[1, 2]).failed(4, &["no Rio label"]);
    site.file("data", 200_000);
    volume(&site, "write", &["v", "data"], &[3, 2]).ok();
    volume(&site, "verify", &["v", "data"], &[3, 2]).ok();
    let moved = volume(&site, "show", &[], &[3, 2]).ok();
    for member in 0..2 {
        assert_eq!(moved["members"][member]["nguid"], shown["members"][member]["nguid"]);
    }

    // Its owner vanishes, and the drives change places again. The log names the places where the
    // members are, so the volume can be claimed, and deleted.
    let addresses: Vec<MemberAddr> =
        [3, 2].map(|nsid| format!("{},ns={nsid}", site.address(0)).parse().unwrap()).into();
    let (owner, _) = Volume::open("v", &addresses, &OpenOptions::default()).unwrap();
    std::mem::forget(owner);
    let drives = ["ssd:flash,file=@moved/b", "file:@moved/a"];
    restart(&mut site, OTHER_NQN, "127.0.0.1:0", &drives);
    volume(&site, "delete", &["v", "--force"], &[1]).ok();
    assert_eq!(volume(&site, "list", &[], &[1]).ok()["volumes"], serde_json::json!([]));
}

#[test]
fn t27_a_copied_drive_is_refused_until_it_adopts_the_identity_of_the_original() {
    let Some(mut site) = site() else { return };
    let serve = |site: &mut Site, drive: &str| restart(site, NQN, "127.0.0.1:0", &[drive]);
    serve(&mut site, "file:@a,size=16M");
    volume(&site, "create", &["v"], &[1]).ok();
    serve(&mut site, "file:@a");
    let original = volume(&site, "show", &[], &[1]).ok();
    restart(&mut site, NQN, "127.0.0.1:0", &["file:@other,size=4K"]);

    let folder = site.folder.path().to_owned();
    let copy = |how: &str| {
        let done = Command::new("cp").args([how, "a", "copy"]).current_dir(&folder).status();
        assert!(done.unwrap().success());
    };
    for how in ["--preserve=mode", "--preserve=mode,xattr"] {
        copy(how);
        serve(&mut site, "file:@copy");
        volume(&site, "verify", &["v"], &[1])
            .failed(4, &["member 0", "another drive's", "rio target identity DRIVE --adopt"]);
        serve(&mut site, "file:@other");
        fs::remove_file(site.path("copy")).unwrap();
    }

    // The copy that has all of the original's attributes is named as such.
    copy("--preserve=mode,xattr");
    let shown = identity(&site, "file:copy", &[]).ok();
    assert!(shown["identity"].as_str().unwrap().contains("another drive's"), "{shown}");
    let check = ["target", "check", "-s", "0", "--drive", "file:copy", "-o", "json"];
    let checked = rio_in(site.folder.path(), &check).ok();
    assert!(checked["notes"][0]["what"].as_str().unwrap().contains("--adopt"), "{checked}");
    let adopted = identity(&site, "file:copy", &["--adopt"]).ok();
    assert_eq!(adopted["identity"], "stored with the drive");
    assert_eq!(adopted["nguid"], original["members"][0]["nguid"]);

    // Both at once contradict each other.
    let both = config(&site, NQN, "127.0.0.1:0", &["file:@a", "file:@copy"]);
    let error = Target::start(&both).err().unwrap().to_string();
    assert!(error.contains("namespace 2") && error.contains("of namespace 1"), "{error}");
    let report = riopipe_target::check(&both);
    assert!(report.problems.iter().any(|problem| problem.what.contains("copy")), "{report}");

    fs::remove_file(site.path("a")).unwrap();
    serve(&mut site, "file:@copy");
    volume(&site, "verify", &["v"], &[1]).failed(5, &["holds no file"]);

    // A drive without a label has nothing to adopt.
    identity(&site, "file:probe", &["--adopt"]).failed(7, &["carries no identity"]);
}

/// A volume that was made when a drive's identity followed from NQN and namespace id.
#[test]
fn t27_an_old_volume_is_taken_over_where_it_was_and_moves_freely_then() {
    let Some(mut site) = site() else { return };
    let serve =
        |site: &mut Site, nqn: &str, drive: &str| restart(site, nqn, "127.0.0.1:0", &[drive]);
    let mut old = config(&site, NQN, "127.0.0.1:0", &["file:@a,size=16M"]);
    old.namespaces = vec![NamespaceOptions {
        uuid: Some(UUID_OF_POSITION.to_owned()),
        ..old.namespaces.remove(0)
    }];
    start(&mut site, &old);
    volume(&site, "create", &["v"], &[1]).ok();
    let opens = |site: &Site| {
        volume(site, "verify", &["v"], &[1]).failed(5, &["holds no file"]);
    };
    opens(&site);
    serve(&mut site, NQN, "file:@other,size=4K");
    fs::copy(site.path("a"), site.path("before")).unwrap();

    serve(&mut site, NQN, "file:@a");
    opens(&site);
    serve(&mut site, OTHER_NQN, "file:@a");
    opens(&site);
    serve(&mut site, OTHER_NQN, "file:@other");
    let taken = identity(&site, "file:a", &[]).ok();
    assert_eq!(
        (&taken["uuid"], &taken["identity"]),
        (&UUID_OF_POSITION.into(), &"stored with the drive".into())
    );

    // A copy at the place where the drive was.
    fs::copy(site.path("a"), site.path("copy")).unwrap();
    serve(&mut site, NQN, "file:@copy");
    volume(&site, "verify", &["v"], &[1]).failed(4, &["another drive's"]);

    // A drive that was served elsewhere at once after the upgrade: the same step as for a moved one.
    serve(&mut site, OTHER_NQN, "file:@before");
    volume(&site, "verify", &["v"], &[1]).failed(4, &["another drive's"]);
    serve(&mut site, OTHER_NQN, "file:@other");
    identity(&site, "file:before", &["--adopt"]).ok();
    serve(&mut site, OTHER_NQN, "file:@before");
    opens(&site);
}

/// A plain host knows a drive by its UUID, and a new one must not get the UUID of another.
#[test]
fn t27_a_drive_with_content_keeps_the_uuid_of_its_position() {
    let Some(mut site) = site() else { return };
    let write = |path: &Path| fs::write(path, vec![7; 1 << 20]).unwrap();
    write(&site.path("a"));
    let uuid_of = |site: &Site, number: usize| {
        site.targets[0].as_ref().unwrap().promises()[number].identity.clone().unwrap().uuid
    };
    restart(&mut site, NQN, "127.0.0.1:0", &["file:@a"]);
    assert_eq!(uuid_of(&site, 0), UUID_OF_POSITION);
    write(&site.path("b"));
    restart(&mut site, NQN, "127.0.0.1:0", &["file:@b", "file:@a"]);
    assert_ne!(uuid_of(&site, 0), UUID_OF_POSITION);
    assert_eq!(uuid_of(&site, 1), UUID_OF_POSITION);
}

/// A loop device, detached in the end.
struct LoopDevice(String);

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// A device that reports nothing unique: the configuration gives its identity at another position.
#[test]
fn t27_a_device_without_an_identity_gets_one_by_the_configuration() {
    let mut site = Site::new(0, "");
    fs::write(site.path("disk"), vec![0; 16 << 20]).unwrap();
    let attached =
        Command::new("losetup").args(["--find", "--show"]).arg(site.path("disk")).output();
    let Some(attached) = attached.ok().filter(|output| output.status.success()) else {
        eprintln!("not tested here: no loop device can be attached");
        return;
    };
    let device = LoopDevice(String::from_utf8(attached.stdout).unwrap().trim().to_owned());
    let drive = format!("block:{}", device.0);
    restart(&mut site, NQN, "127.0.0.1:0", &[&drive]);
    let made = volume(&site, "create", &["v"], &[1]).ok();
    restart(&mut site, OTHER_NQN, "127.0.0.1:0", &[&drive]);
    volume(&site, "verify", &["v"], &[1]).failed(4, &["another drive's"]);
    site.targets.clear();
    let check = ["target", "check", "-s", "0", "--drive", &drive, "-o", "json"];
    let checked = rio_in(site.folder.path(), &check).ok();
    assert!(checked["notes"][0]["what"].as_str().unwrap().contains("nguid"), "{checked}");
    identity(&site, &drive, &["--adopt"]).failed(7, &["no identity can be stored", "nguid"]);
    let mut named = config(&site, OTHER_NQN, "127.0.0.1:0", &[&drive]);
    named.namespaces[0].nguid = made["members"][0]["nguid"].as_str().map(str::to_owned);
    start(&mut site, &named);
    volume(&site, "verify", &["v"], &[1]).failed(5, &["holds no file"]);
    site.targets.clear();
}

/// A mounted file system, unmounted in the end.
struct Mounted(std::path::PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// Mounts a file system in a new folder of the site; `None` if this machine does not allow it.
fn mounted(site: &Site, folder: &str, args: &[&str]) -> Option<Mounted> {
    let path = site.path(folder);
    fs::create_dir(&path).unwrap();
    let mount = Command::new("mount").args(args).arg(&path).output();
    if mount.is_ok_and(|output| output.status.success()) {
        return Some(Mounted(path));
    }
    eprintln!("not tested here: no file system can be mounted");
    None
}

/// The first file of every file system has the same inode number, and an ext4 of 128-byte inodes
/// reports no birth times.
#[test]
fn t27_a_backup_on_another_file_system_is_not_the_original() {
    let mut site = Site::new(0, "");
    let mut mounts = Vec::new();
    for (name, inode_bytes) in [("here", "256"), ("there", "128")] {
        let image = site.path(&format!("{name}.img"));
        fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let mut make = Command::new("mkfs.ext4");
        let made = make.args(["-q", "-F", "-I", inode_bytes]).arg(&image).output();
        let is_made = made.is_ok_and(|output| output.status.success());
        if !is_made {
            eprintln!("not tested here: no ext4 can be made");
            return;
        }
        let image = image.to_str().unwrap().to_owned();
        let Some(mount) = mounted(&site, name, &["-o", "loop", &image]) else { return };
        mounts.push(mount);
    }
    restart(&mut site, NQN, "127.0.0.1:0", &["file:@here/a,size=16M"]);
    volume(&site, "create", &["v"], &[1]).ok();
    site.targets.clear();
    let mut copy = Command::new("cp");
    let copied = copy.args(["-a", "here/a", "there/a"]).current_dir(site.folder.path()).status();
    assert!(copied.unwrap().success());
    let shown = identity(&site, "file:there/a", &[]).ok();
    assert!(shown["identity"].as_str().unwrap().contains("another drive's"), "{shown}");
    // What is adopted there is recognised there.
    identity(&site, "file:there/a", &["--adopt"]).ok();
    restart(&mut site, NQN, "127.0.0.1:0", &["file:@there/a"]);
    volume(&site, "verify", &["v"], &[1]).failed(5, &["holds no file"]);
    site.targets.clear();
}

/// A plain host can write anything to its own drive, also where a target would store its identity.
#[test]
fn t19_a_stored_identity_that_is_damaged_stops_no_target_and_ends_with_the_volume() {
    let mut site = Site::new(0, "");
    let Some(mount) = mounted(&site, "ram", &["-t", "ramfs", "none"]) else { return };
    let forge = || {
        let file = fs::OpenOptions::new().write(true).open(drive_of(&mount)).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"RIODRIVE, not quite", 8192).unwrap();
    };
    let is_blank = || fs::read(drive_of(&mount)).unwrap()[8192..12288].iter().all(|b| *b == 0);
    restart(&mut site, NQN, "127.0.0.1:0", &["file:@ram/a,size=16M"]);
    forge();
    volume(&site, "create", &["v"], &[1]).ok();
    assert!(is_blank(), "a creation keeps only the identity of the drive");
    forge();
    restart(&mut site, NQN, "127.0.0.1:0", &["file:@ram/a"]);
    volume(&site, "verify", &["v"], &[1]).failed(5, &["holds no file"]);
    volume(&site, "delete", &["v"], &[1]).ok();
    assert!(is_blank(), "a deletion ends it");
    site.targets.clear();
}

fn drive_of(mount: &Mounted) -> std::path::PathBuf {
    mount.0.join("a")
}

#[test]
fn the_identity_of_a_file_that_does_not_exist_makes_no_file() {
    let site = Site::new(0, "");
    for words in [&[][..], &["--adopt"]] {
        identity(&site, "file:nothing,size=1M", words).failed(7, &["does not exist, or is empty"]);
    }
    assert!(!site.path("nothing").exists());
}
