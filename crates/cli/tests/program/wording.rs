//! The words of results, and what is offered.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    serve::{serve, signal},
    site::{Done, finish, rio_in},
};

#[test]
fn memory_is_called_memory_and_texts_end_with_a_newline() {
    let folder = tempfile::tempdir().unwrap();
    let (child, printed) = serve(folder.path(), &["--drive", "mem:16M", "--log", "mem:2M"]);
    let member = printed["addresses"][0].as_str().unwrap();
    fs::write(folder.path().join("a"), [7; 5000]).unwrap();
    let volume = |words: &[&str]| {
        let done = rio_in(folder.path(), &[&["volume"], words, &["-m", member]].concat());
        assert_eq!(done.code, 0, "{done:?}");
        assert!(done.stdout.ends_with('\n') && !done.stdout.ends_with("\n\n"), "{done:?}");
        done.stdout
    };
    let created = volume(&["create", "v"]);
    assert!(created.contains("  mem ") && created.contains("volatile cache"), "{created}");
    assert!(!created.contains("safe"), "{created}");
    let args = ["volume", "show", "v", "-m", member, "-o", "json"];
    assert_eq!(rio_in(folder.path(), &args).ok()["members"][0]["log"], "mem");
    volume(&["write", "v", "a"]);
    volume(&["verify", "v", "a"]);
    volume(&["recover", "v"]);
    volume(&["recover", "v", "--dry-run"]);
    volume(&["read", "v", "b"]);
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);
}

/// `rio`, installed in `folder` and without `PATH`.
fn installed(folder: &Path, words: &[&str]) -> Done {
    let output = Command::new(folder.join("rio"))
        .args(words)
        .env("PATH", "")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Done::of(output)
}

#[test]
fn the_simulator_is_offered_where_it_is_installed() {
    let folder = tempfile::tempdir().unwrap();
    // Its own folder, for programs are also found beside the folder of their build.
    let bin = folder.path().join("bin");
    fs::create_dir(&bin).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_rio"), bin.join("rio")).unwrap();
    let has_sim = |text: &str| text.lines().any(|line| line.trim_start().starts_with("sim "));
    let help = installed(&bin, &["--help"]);
    assert!(help.code == 0 && !has_sim(&help.stdout), "{help:?}");
    let done = installed(&bin, &["sim", "--seeds", "1", "-o", "json"]);
    assert!(done.code == 2 && done.stderr.contains("not installed"), "{done:?}");
    assert_eq!(installed(&bin, &["sim", "--help"]).code, 0);

    let sim = bin.join("rio-sim");
    fs::write(&sim, "#!/bin/sh\necho \"simulates $*\"\n").unwrap();
    fs::set_permissions(&sim, PermissionsExt::from_mode(0o755)).unwrap();
    assert!(has_sim(&installed(&bin, &["--help"]).stdout));
    let done = installed(&bin, &["sim", "--seeds", "1"]);
    assert_eq!((done.code, done.stdout.as_str()), (0, "simulates --seeds 1\n"), "{done:?}");
}
