//! The life of a volume: listed, shown from one member, deleted; labels erased, logs freed.

use riopipe_target::Config;

use crate::site::{Site, finish, keys, rio, start_in};

/// A target with so many drives and a log of 2 MiB.
fn site(drives: usize) -> Site {
    let mut site = Site::with(0, "", "");
    let mut config = Config::on_loopback(&vec!["mem:16M,lazy"; drives]);
    config.log = Some(format!("file:{},size=2M", site.path("log").display()));
    config.reactors = Some(1);
    site.add(&config);
    site
}

fn member(site: &Site, nsid: usize) -> Vec<String> {
    vec!["-m".to_owned(), format!("{},ns={nsid}", site.address(0))]
}

fn list(site: &Site) -> serde_json::Value {
    site.volume("list", &[]).ok()
}

/// Before, four volumes filled a log of 2 MiB for good.
#[test]
fn a_log_that_is_full_of_volumes_is_free_again_after_they_are_deleted() {
    let site = site(8);
    let mut names = Vec::new();
    let refused = loop {
        let name = format!("v{}", names.len());
        let done = site.volume_with("create", &[&name], &member(&site, names.len() + 1));
        if done.code != 0 {
            break done;
        }
        names.push(name);
    };
    assert!(names.len() >= 2, "{names:?}");
    let text = refused.failed(4, &["too small", "bytes", "rio volume delete", "rio volume list"]);
    let shown = list(&site);
    assert_eq!(shown["schema"], "rio-volume-list/1");
    assert_eq!(keys(&shown), "schema targets volumes");
    let volumes = shown["volumes"].as_array().unwrap();
    assert_eq!(volumes.len(), names.len());
    for (volume, name) in volumes.iter().zip(&names) {
        assert_eq!((&volume["name"], &volume["state"]), (&name.as_str().into(), &"free".into()));
        assert!(text.contains(volume["id"].as_str().unwrap()), "{text}");
    }
    let free = |list: &serde_json::Value| list["targets"][0]["log_gap_bytes"].as_u64().unwrap();
    let before = free(&shown);
    let deleted = site.volume("delete", &["v0"]).ok();
    assert_eq!(deleted["schema"], "rio-volume-delete/1");
    assert_eq!(keys(&deleted), "drives id logs missing name schema");
    assert_eq!(deleted["drives"].as_array().unwrap().len(), 1);
    assert!(free(&list(&site)) > before);
    site.volume_with("show", &[], &member(&site, 1)).failed(4, &["no Rio label"]);
    // The drive is unused again.
    site.volume_with("create", &["again", "--slots", "64"], &member(&site, 1)).ok();
    site.volume("delete", &["v0"]).failed(4, &["no volume \"v0\"", "rio volume list"]);
}

/// A drive was replaced: the log still has the partitions of its volume.
#[test]
fn partitions_of_a_volume_without_a_label_are_listed_and_freed() {
    let site = site(2);
    let made = site.volume_with("create", &["v"], &member(&site, 1)).ok();
    let id = made["id"].as_str().unwrap();
    site.volume_with("wipe", &[], &member(&site, 1)).failed(4, &["is a member", "--force"]);
    let wiped = site.volume_with("wipe", &["--force"], &member(&site, 1)).ok();
    assert_eq!((&wiped["name"], &wiped["schema"]), (&"v".into(), &"rio-volume-wipe/1".into()));
    let shown = list(&site);
    let volume = &shown["volumes"][0];
    assert_eq!((&volume["id"], &volume["state"]), (&id.into(), &"no label".into()));
    assert!(volume["name"].is_null());
    site.volume("delete", &[id]).failed(4, &["no label of it", "--force"]);
    let deleted = site.volume("delete", &[id, "--force"]).ok();
    assert!(deleted["logs"][0]["bytes"].as_u64().unwrap() > 0);
    assert_eq!(list(&site)["volumes"].as_array().unwrap().len(), 0);
    site.volume_with("wipe", &[], &member(&site, 1)).failed(4, &["has no label"]);
}

#[test]
fn a_volume_with_an_owner_is_deleted_only_by_force() {
    let site = Site::new(1, "ssd:flash,size=512M,lazy");
    site.create();
    site.file("a", 400 << 20);
    let members = site.members();
    let mut args = vec!["volume", "write", "v", "a", "-o", "json"];
    args.extend(members.iter().map(String::as_str));
    let child = start_in(site.folder.path(), &args);
    site.wait_until_written(0);
    assert_eq!(list(&site)["volumes"][0]["state"], "owned");
    site.volume("delete", &["v"]).failed(4, &["owned by", "--force"]);
    site.volume("delete", &["v", "--force"]).ok();
    assert_ne!(finish(child).code, 0, "its owner is displaced");
    assert_eq!(list(&site)["volumes"].as_array().unwrap().len(), 0);
}

#[test]
fn one_member_shows_its_volume_and_which_members_are_missing() {
    let site = Site::new(2, "mem:16M,lazy");
    let made = site.volume("create", &["v"]).ok();
    let part = site.volume_with("show", &[], &site.members_in(&[1])).ok();
    assert_eq!((&part["schema"], &part["name"]), (&"rio-volume-part/1".into(), &"v".into()));
    assert_eq!((&part["id"], &part["state"]), (&made["id"], &"incomplete".into()));
    assert!(part["members"][0]["addr"].is_null());
    assert_eq!(part["members"][0]["nguid"], made["members"][0]["nguid"]);
    assert_eq!(part["members"][1]["addr"], made["members"][1]["addr"]);
    let mut args = vec!["volume".to_owned(), "show".into()];
    args.extend(site.members_in(&[1]));
    let text = rio(&args.iter().map(String::as_str).collect::<Vec<_>>()).stdout;
    assert!(text.contains("1 of 2 members are here") && text.contains("missing"), "{text}");
    // All members in another order are an error, as before.
    site.volume_with("show", &[], &site.members_in(&[1, 0])).failed(4, &["order"]);
    // Nor is a volume deleted by a part of it.
    let delete = |words: &[&str]| site.volume_with("delete", words, &site.members_in(&[1]));
    delete(&["v"]).failed(4, &["member 0 is not on these targets", "--force"]);
    assert_eq!(delete(&["v", "--force"]).ok()["missing"], serde_json::json!([0]));
    site.volume("show", &[]).failed(4, &["no Rio label"]);
}

#[test]
fn a_renamed_volume_keeps_its_file() {
    let site = Site::new(2, "mem:16M,lazy");
    site.create();
    site.file("a", 100_000);
    site.volume("write", &["v", "a"]).ok();
    let renamed = site.volume("rename", &["v", "w"]).ok();
    assert_eq!((&renamed["schema"], &renamed["name"]), (&"rio-volume/1".into(), &"w".into()));
    site.volume("verify", &["v", "a"]).failed(4, &["\"w\""]);
    site.volume("verify", &["w", "a"]).ok();
    site.volume("rename", &["w", ""]).failed(2, &["1 to 64 bytes"]);
}

/// The drive of the first member is a file, which is enlarged while its target is down.
#[test]
fn a_volume_grows_with_its_drives() {
    let mut site = Site::with(0, "", "");
    let path = site.path("drive");
    let config = |size: &str| {
        let mut config = Config::on_loopback(&[&format!("file:{},size={size}", path.display())]);
        config.subnqn = Some("nqn.2026-11.com.example:grown".to_owned());
        config.log = Some(format!("file:{},size=2M", path.with_extension("log").display()));
        config
    };
    site.add(&config("16M"));
    let made = site.volume("create", &["v"]).ok();
    site.file("a", 10_000_000);
    site.volume("write", &["v", "a"]).ok();
    site.volume("grow", &["v"]).failed(4, &["can't grow", "4096 blocks"]);
    drop(site.targets.remove(0));
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(64 << 20).unwrap();
    site.add(&config("64M"));
    let grown = site.volume("grow", &["v"]).ok();
    assert_eq!(grown["bytes"], made["bytes"].as_u64().unwrap() + (48 << 20));
    site.volume("verify", &["v", "a"]).ok();
    site.file("b", 40_000_000);
    site.volume("write", &["v", "b"]).ok();
    site.volume("verify", &["v", "b"]).ok();
}
