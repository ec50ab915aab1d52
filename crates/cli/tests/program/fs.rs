//! File systems: made, mounted, checked, in a file and on a volume.

use std::fs;

use crate::site::{Site, rio_in, start_in, watch_until};

#[test]
fn a_file_system_in_a_file_is_made_mounted_and_checked() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let json = |words: &[&str]| rio_in(folder, &[&["fs"], words, &["-o", "json"]].concat());
    json(&["mkfs", "disk.img"]).failed(2, &["disk.img"]);
    json(&["mkfs", "./disk.img"]).failed(2, &["--size"]);
    let made = json(&["mkfs", "disk.img", "--size", "128M", "--label", "data"]).ok();
    assert_eq!((&made["bytes"], &made["journal_bytes"]), (&(128 << 20).into(), &(32 << 20).into()));
    json(&["mkfs", "disk.img"]).failed(4, &["ext4", "--force"]);
    json(&["mount", "disk.img", "missing"]).failed(1, &["missing"]);
    assert_eq!(json(&["stat", "disk.img"]).ok()["state"], "unmounted");

    fs::create_dir(folder.join("mnt")).unwrap();
    let is_used = |text: &str| {
        let is_mounted = text.contains("is mounted on mnt");
        if is_mounted {
            fs::write(folder.join("mnt/file"), "content").unwrap();
            assert_eq!(json(&["stat", "disk.img"]).ok()["state"], "mounted");
            json(&["fsck", "disk.img"]).failed(7, &["in use", "rio fs umount"]);
        }
        is_mounted
    };
    let done = watch_until(start_in(folder, &["fs", "mount", "disk.img", "mnt"]), is_used);
    assert_eq!(done.code, 0, "{done:?}");
    assert!(!folder.join("mnt/file").exists() && !folder.join("disk.img.rio").exists());
    let checked = json(&["fsck", "disk.img"]).ok();
    assert_eq!((&checked["clean"], &checked["recovered"]["records"]), (&true.into(), &0.into()));
}

#[test]
fn a_file_system_on_a_volume_is_made_and_mounted() {
    let site = Site::with(2, "mem:128M", "4M");
    site.create();
    let members = site.members();
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    let folder = site.path("");
    let made = rio_in(&folder, &[&["fs", "mkfs", "v", "-o", "json"], &members[..]].concat()).ok();
    assert!(made["bytes"].as_u64().unwrap() > 250 << 20);
    fs::create_dir(folder.join("mnt")).unwrap();
    for content in ["first", "second"] {
        let path = folder.join("mnt/file");
        let is_used = |text: &str| {
            let is_mounted = text.contains("is mounted on mnt");
            if is_mounted {
                assert_eq!(path.exists(), content == "second");
                fs::write(&path, content).unwrap();
            }
            is_mounted
        };
        let args = [&["fs", "mount", "v", "mnt"], &members[..]].concat();
        let done = watch_until(start_in(&folder, &args), is_used);
        assert_eq!(done.code, 0, "{done:?}");
    }
}
