//! The file of known volumes: a volume's drives are given once, when it is created.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use riopipe_target::Config;

use crate::site::{Done, Site, finish, program};

/// `rio …` with this home, and without the variable that the other tests set.
pub(crate) fn rio_at(home: &Path, words: &[&str], variables: &[(&str, &str)]) -> Done {
    let mut command = program();
    command.args(words).args(["-o", "json"]).env("HOME", home).current_dir(home);
    command.env_remove("RIO_VOLUMES").env_remove("XDG_CONFIG_HOME");
    command.envs(variables.iter().copied()).stdin(std::process::Stdio::null());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    finish(command.spawn().unwrap())
}

#[test]
fn the_drives_are_given_once() {
    let site = Site::new(2, "mem:16M,lazy");
    let home = site.path("home");
    fs::create_dir(&home).unwrap();
    let members = site.members();
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    let run = |words: &[&str]| rio_at(&home, words, &[]);
    let create = |words: &[&'static str]| [&["volume", "create"], words, &members].concat();

    let done = run(&create(&["v", "--data-digest=on", "-g"]));
    done.ok();
    let file = home.join(".config/rio/volumes.toml");
    assert!(done.stderr.contains(&file.display().to_string()), "{done:?}");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("[volumes.v]") && text.contains("data-digest = \"on\""), "{text}");

    // From here on the name is enough.
    fs::write(home.join("a"), vec![7; 100_000]).unwrap();
    let shown = run(&["volume", "show", "v"]).ok();
    assert_eq!(shown["members"][1]["addr"], format!("{},ns=1", site.address(1)));
    run(&["volume", "write", "v", "a"]).ok();
    run(&["volume", "read", "v", "b"]).ok();
    run(&["volume", "verify", "v", "b"]).ok();
    run(&["volume", "recover", "v", "--dry-run"]).ok();
    let bench =
        ["bench", "run", "--volume", "v", "--overwrite", "--engine", "rio", "--time", "0.1"];
    run(&[&bench[..], &["--rounds", "1"]].concat()).ok();
    // What -m names comes first.
    let swapped = site.members_in(&[1, 0]);
    let swapped: Vec<&str> = swapped.iter().map(String::as_str).collect();
    run(&[&["volume", "verify", "v"], &swapped[..]].concat()).failed(4, &["order"]);

    // The same name on other drives: it is replaced, with a note.
    let done = run(&create(&["v", "--force"]));
    done.ok();
    assert!(done.stderr.contains("another volume \"v\""), "{done:?}");

    let error = run(&["volume", "show", "w"]).failed(2, &["\"w\"", "volumes.toml", "-m"]);
    assert!(error.contains("/etc/rio/volumes.toml"), "{error}");
    let done = run(&["volume", "show"]);
    assert!(done.code == 2 && done.stderr.contains("<NAME>"), "{done:?}");
}

/// The options that are needed to connect are kept, too.
#[test]
fn the_options_to_connect_are_given_once() {
    let mut site = Site::new(0, "");
    let mut config = Config::on_loopback(&["mem:16M,lazy"]);
    (config.require_header_digest, config.require_data_digest) = (true, true);
    let host = "nqn.2026-11.com.example:friend";
    config.hosts = Some(vec![host.to_owned()]);
    site.add(&config);
    let nqn = site.targets[0].as_ref().unwrap().subnqn().to_owned();
    let member = format!("{},nqn={nqn}", site.address(0));
    let home = site.path("home");
    fs::create_dir(&home).unwrap();
    let run = |words: &[&str]| rio_at(&home, words, &[]);
    let options = ["-g", "--data-digest=on", "-q", host, "-I", "00112233445566778899aabbccddeeff"];
    run(&[&["volume", "create", "v", "-m", &member][..], &options].concat()).ok();
    run(&["volume", "show", "v"]).ok();
    // With -m, the file is not read.
    assert_eq!(run(&["volume", "show", "v", "-m", &member]).code, 3);
    // An option of the command comes first.
    let other = "nqn.2026-11.com.example:other";
    run(&["volume", "show", "v", "-q", other]).failed(3, &["does not admit host"]);
}

#[test]
fn another_file_or_none() {
    let site = Site::new(1, "mem:16M,lazy");
    let home = site.path("home");
    fs::create_dir(&home).unwrap();
    let members = site.members();
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    let create =
        |words: &[&'static str]| [&["volume", "create", "v", "--force"], words, &members].concat();
    let none = [("RIO_VOLUMES", "")];

    rio_at(&home, &create(&["--no-volumes-file"]), &[]).ok();
    rio_at(&home, &create(&[]), &none).ok();
    assert!(!home.join(".config").exists());
    rio_at(&home, &["volume", "show", "v"], &none).failed(2, &["RIO_VOLUMES is empty", "-m"]);

    let xdg = home.join("xdg").display().to_string();
    rio_at(&home, &create(&[]), &[("XDG_CONFIG_HOME", &xdg)]).ok();
    assert!(home.join("xdg/rio/volumes.toml").exists());
    rio_at(&home, &create(&[]), &[("RIO_VOLUMES", "by-variable")]).ok();
    let by_variable = [("RIO_VOLUMES", "by-variable")];
    rio_at(&home, &["volume", "show", "v"], &by_variable).ok();
    rio_at(&home, &create(&["--volumes-file", "by-option"]), &none).ok();
    rio_at(&home, &["volume", "show", "v", "--volumes-file", "by-option"], &none).ok();

    // A damaged file: an error of the commands that need it, a note of the others.
    fs::write(home.join("by-variable"), "[volumes.v]\nmembers = 3\n").unwrap();
    rio_at(&home, &["volume", "show", "v"], &by_variable)
        .failed(2, &["by-variable, line 2, column 11"]);
    let done = rio_at(&home, &create(&[]), &by_variable);
    done.ok();
    assert!(done.stderr.contains("by-variable, line 2, column 11"), "{done:?}");
    let shown = [&["volume", "show", "v"], &members[..]].concat();
    rio_at(&home, &shown, &by_variable).ok();

    // A place that can't be written is a note, too.
    fs::write(home.join("flat"), "").unwrap();
    let done = rio_at(&home, &create(&["--volumes-file", "flat/volumes.toml"]), &none);
    done.ok();
    assert!(done.stderr.contains("not kept") && done.stderr.contains("flat"), "{done:?}");
}

#[test]
fn volumes_created_at_the_same_time_are_all_kept() {
    let site = Site::new(4, "mem:16M,lazy");
    let home = site.path("home");
    fs::create_dir(&home).unwrap();
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (site, home) = (&site, &home);
            scope.spawn(move || {
                let (name, member) = (format!("v{number}"), site.address(number));
                rio_at(home, &["volume", "create", &name, "-m", &member], &[]).ok();
            });
        }
    });
    for number in 0..4 {
        let shown = rio_at(&home, &["volume", "show", &format!("v{number}")], &[]).ok();
        assert_eq!(shown["members"][0]["addr"], format!("{},ns=1", site.address(number)));
    }
    let mode = fs::metadata(home.join(".config/rio/volumes.toml")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
}

/// The address of a volume may have another volume of its name by now. It has another
/// id than the entry in the file, so nothing is done to it.
#[test]
fn another_volume_of_the_name_is_not_touched() {
    let site = Site::new(1, "mem:16M,lazy");
    let home = site.path("home");
    fs::create_dir(&home).unwrap();
    let member = site.address(0);
    let run = |words: &[&str]| rio_at(&home, words, &[]);
    let first = run(&["volume", "create", "v", "-m", &member]).ok();
    let again = ["volume", "create", "v", "--force", "--no-volumes-file", "-m", &member];
    let second = run(&again).ok();
    fs::write(home.join("a"), vec![7; 100_000]).unwrap();
    run(&["volume", "write", "v", "a", "-m", &member]).ok();

    let ids = [first["id"].as_str().unwrap(), second["id"].as_str().unwrap()];
    let words = [ids[0], ids[1], "nothing is done", "show NAME --keep", "-m"];
    for command in [
        &["volume", "delete", "v"][..],
        &["volume", "delete", "v", "--force"],
        &["volume", "write", "v", "a"],
        &["volume", "read", "v", "b"],
        &["volume", "recover", "v"],
        &["volume", "rename", "v", "w"],
        &["volume", "grow", "v"],
        &["volume", "show", "v"],
        &["bench", "run", "--volume", "v", "--overwrite", "--engine", "rio", "--time", "0.1"],
    ] {
        run(command).failed(4, &words);
    }
    run(&["volume", "verify", "v", "a", "-m", &member]).ok();

    // The remedy.
    run(&["volume", "show", "v", "--keep", "-m", &member]).ok();
    run(&["volume", "verify", "v", "a"]).ok();
    assert_eq!(run(&["volume", "delete", "v"]).ok()["id"], second["id"]);
    run(&["volume", "show", "v"]).failed(2, &["are not known"]);
}

/// A rename that was cut off between the labels and the file of known volumes is completed by the
/// same command.
#[test]
fn a_rename_that_was_cut_off_before_the_file_is_completed() {
    let site = Site::new(1, "mem:16M,lazy");
    let home = site.path("home");
    fs::create_dir(&home).unwrap();
    let member = site.address(0);
    let run = |words: &[&str]| rio_at(&home, words, &[]);
    run(&["volume", "create", "v", "-m", &member]).ok();
    // As if cut off: the labels have the new name, the file has the old one.
    let in_labels = ["volume", "rename", "v", "w", "-m", &member];
    rio_at(&home, &in_labels, &[("RIO_VOLUMES", "")]).ok();
    run(&["volume", "show", "w"]).failed(2, &["are not known"]);
    run(&["volume", "rename", "v", "x"]).failed(4, &["\"w\""]);

    assert_eq!(run(&["volume", "rename", "v", "w"]).ok()["name"], "w");
    assert_eq!(run(&["volume", "show", "w"]).ok()["name"], "w");
    run(&["volume", "show", "v"]).failed(2, &["are not known"]);
}
