//! A drive that holds something else than a volume.

use std::fs::File;
use std::process::Command;

use riopipe_target::Config;

use crate::site::Site;

/// A target whose drive is this file, which exists.
fn site_on(make: impl FnOnce(&std::path::Path)) -> Site {
    let mut site = Site::with(0, "", "");
    let path = site.path("drive");
    File::create(&path).unwrap().set_len(64 << 20).unwrap();
    make(&path);
    let mut config = Config::on_loopback(&[&format!("file:{}", path.display())]);
    config.log = Some(format!("file:{},size=2M", site.path("log").display()));
    config.reactors = Some(1);
    site.add(&config);
    site
}

/// The type of content that blkid finds, if the machine has blkid.
fn blkid(site: &Site) -> String {
    let path = site.path("drive");
    let found = Command::new("blkid").args(["-p", "-o", "value", "-s", "TYPE"]).arg(path).output();
    String::from_utf8(found.map(|output| output.stdout).unwrap_or_default()).unwrap()
}

#[test]
fn a_file_system_is_not_made_a_volume_without_force() {
    let mut is_made = false;
    let site = site_on(|path| {
        let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(path).status();
        is_made = made.is_ok_and(|status| status.success());
    });
    if !is_made {
        eprintln!("not tested here: there is no mkfs.ext4");
        return;
    }
    let refused = site.volume("create", &["v"]);
    refused.failed(4, &["can't create volume", "an ext4 file system", "--force", "right drive"]);
    site.volume("create", &["v", "--force"]).ok();
    assert_eq!(blkid(&site), "");
    site.volume("show", &[]).ok();
}

#[test]
fn unknown_content_is_not_made_a_volume_without_force() {
    let site = site_on(|path| std::fs::write(path, vec![7; 64 << 20]).unwrap());
    site.volume("create", &["v"]).failed(4, &["data of an unknown kind", "--force"]);
    site.volume("create", &["v", "--force"]).ok();
    site.volume("show", &[]).ok();
}
