//! The procedures of docs/operators-guide.md, "Replacing", command by command. A lost log is in
//! `lost_log`.

use std::{fs, process::Command};

use riopipe_target::Config;

use crate::{
    known::rio_at,
    lost_log::{Nodes, log},
    site::{Done, Site, rio_in},
};

/// `rio volume …WORDS` with a file of known volumes.
fn volume(nodes: &Nodes, words: &[&str]) -> Done {
    let words = [&["volume"], words].concat();
    rio_at(nodes.folder.path(), &words, &[("RIO_VOLUMES", "known.toml")])
}

/// `rio volume show v --keep -m …`
fn keep(nodes: &Nodes) {
    let addresses = ["-m", nodes.address(0), "-m", nodes.address(1)];
    volume(nodes, &[&["show", "v", "--keep"], &addresses[..]].concat()).ok();
}

#[test]
fn a_log_is_replaced_on_purpose() {
    let mut nodes = Nodes::with_volume(2);
    keep(&nodes);
    assert_eq!(volume(&nodes, &["show", "v"]).ok()["state"], "free");
    nodes.stop(1);
    nodes.start(1, &["--log", "file:new.log,size=2M"]);
    keep(&nodes);
    let recovered = volume(&nodes, &["recover", "v", "--accept-lost-log"]).ok();
    for stream in recovered["streams"].as_array().unwrap() {
        assert_eq!((&stream["undone_blocks"], &stream["acknowledge"]), (&0.into(), &false.into()));
    }
    assert_eq!(nodes.engine(), "rio");
    volume(&nodes, &["verify", "v", "a"]).ok();
}

#[test]
fn a_target_moves_with_its_drives_and_its_log() {
    let mut nodes = Nodes::with_volume(2);
    keep(&nodes);
    volume(&nodes, &["verify", "v", "a"]).ok();
    let before = nodes.address(1).to_owned();
    nodes.stop(1);
    // All files of the target move, those beside its drive and its log among them.
    fs::create_dir(nodes.path("moved")).unwrap();
    for entry in fs::read_dir(nodes.folder.path()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.starts_with("drive-1") || name.starts_with("log-1") {
            fs::rename(nodes.path(&name), nodes.path("moved").join(&name)).unwrap();
        }
    }
    nodes.start_on(1, "file:moved/drive-1", &["--log", "file:moved/log-1"]);
    if nodes.address(1) != before {
        volume(&nodes, &["verify", "v", "a"]).failed(3, &[&before]);
    }
    keep(&nodes);
    assert_eq!(volume(&nodes, &["show", "v"]).ok()["state"], "free");
    volume(&nodes, &["verify", "v", "a"]).ok();
    assert_eq!(nodes.engine(), "rio");
}

#[test]
fn unequal_members_show_what_is_not_used() {
    let mut site = Site::new(0, "");
    site.add(&Config::on_loopback(&["mem:16M,lazy", "mem:48M,lazy"]));
    let address = site.address(0);
    let members = [1, 2].map(|nsid| format!("{address},ns={nsid}"));
    let members = ["-m", &members[0], "-m", &members[1]];
    for verb in [&["volume", "create", "v"][..], &["volume", "show"]] {
        let done = rio_in(site.folder.path(), &[verb, &members].concat());
        assert_eq!(done.code, 0, "{done:?}");
        let unused = "member 1: 32 MiB of its 48 MiB are not used";
        assert!(done.stdout.contains(unused), "{done:?}");
        assert!(!done.stdout.contains("member 0:"), "{done:?}");
    }
}

#[test]
fn a_drive_is_replaced_by_a_larger_one() {
    let mut nodes = Nodes::with_volume(2);
    keep(&nodes);
    assert_eq!(volume(&nodes, &["show", "v"]).ok()["state"], "free");
    nodes.stop(0);
    let copy = ["if=drive-0", "of=drive-new", "bs=1M", "conv=fsync", "status=none"];
    let copied = Command::new("dd").args(copy).current_dir(nodes.folder.path()).status().unwrap();
    assert!(copied.success());
    let new = fs::OpenOptions::new().write(true).open(nodes.path("drive-new")).unwrap();
    new.set_len(24 << 20).unwrap();
    fs::remove_file(nodes.path("drive-0")).unwrap();
    let own = log(0);
    // Without the step in which it adopts the identity, the new drive is a copy. A file system that
    // stores no identity does not show that.
    nodes.start_on(0, "file:drive-new", &["--log", &own]);
    keep(&nodes);
    let state = volume(&nodes, &["show", "v"]).ok()["state"].as_str().unwrap().to_owned();
    assert!(["copied label", "free"].contains(&state.as_str()), "{state}");
    assert_eq!(nodes.state(), state);
    nodes.stop(0);
    let adopt = ["target", "identity", "file:drive-new", "--adopt", "-o", "json"];
    let adopted = rio_in(nodes.folder.path(), &adopt);
    assert!(adopted.code == 0 || state == "free", "{adopted:?}");
    nodes.start_on(0, "file:drive-new", &["--log", &own]);
    keep(&nodes);
    let shown = volume(&nodes, &["show", "v"]).ok();
    assert_eq!(shown["state"], "free", "{shown}");
    let unused = |member: usize| shown["members"][member]["unused_blocks"].as_u64().unwrap();
    assert_eq!(unused(0) - unused(1), (8 << 20) / 4096, "{shown}");
    volume(&nodes, &["verify", "v", "a"]).ok();
    assert_eq!(nodes.engine(), "rio");
}
