//! The file copy at its edges: standard input and output, destinations that are no files, and
//! options that don't fit.

use std::{
    fs,
    io::{Read, Write, pipe},
    os::unix::fs::{FileTypeExt, PermissionsExt, chown},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::{
    serve::signal,
    site::{Done, Site, content, finish, keys},
};

/// `rio volume …` with standard input and output as pipes.
fn command(site: &Site, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rio"));
    command.arg("volume").args(words).args(site.members());
    command.args(["-o", "json", "--timeout", "60"]).current_dir(site.folder.path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs it with these bytes as its input, and returns its output as bytes.
fn piped(site: &Site, words: &[&str], input: &[u8]) -> (Done, Vec<u8>) {
    let mut child = command(site, words).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let (done, bytes) = std::thread::scope(|scope| {
        // The program need not read all of its input.
        scope.spawn(move || drop(stdin.write_all(input)));
        let reader = scope.spawn(move || {
            let mut bytes = Vec::new();
            stdout.read_to_end(&mut bytes).unwrap();
            bytes
        });
        (finish(child), reader.join().unwrap())
    });
    (done, bytes)
}

#[test]
fn a_pipe_is_copied_in_and_out_and_compared() {
    let site = Site::new(2, "mem:16M,lazy");
    site.create();
    let bytes = content(3_000_001);
    let (done, out) = piped(&site, &["write", "v", "-", "--name", "data.tar"], &bytes);
    assert_eq!(done.code, 0, "{done:?}");
    let written: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(keys(&written), "bytes_per_s engine file groups path schema seconds volume");
    assert_eq!((&written["path"], &written["file"]["name"]), (&"-".into(), &"data.tar".into()));
    assert_eq!(written["file"]["bytes"], bytes.len());

    let (done, out) = piped(&site, &["read", "v", "-"], b"");
    assert_eq!(done.code, 0, "{done:?}");
    assert!(out == bytes, "standard output has the bytes and nothing else");
    let read: Value = serde_json::from_str(&done.stderr).unwrap();
    assert_eq!((keys(&read), &read["file"]), (keys(&written), &written["file"]));
    assert_eq!((&read["schema"], &read["path"]), (&"rio-volume-read/1".into(), &"-".into()));

    let (done, out) = piped(&site, &["verify", "v", "-"], &bytes);
    assert_eq!(done.code, 0, "{done:?}");
    let verified: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(
        (&verified["verified"], &verified["local_bytes"]),
        (&true.into(), &3_000_001.into())
    );
    let (done, out) = piped(&site, &["verify", "v", "-"], &bytes[..3_000_000]);
    done.failed(5, &["differ from byte 3000000"]);
    assert!(serde_json::from_slice::<Value>(&out).unwrap()["verified"] == false);

    // Without a name, and read back under the one that it got.
    piped(&site, &["write", "v", "-"], b"short");
    site.volume("read", &["v"]).ok();
    assert_eq!(fs::read(site.path("stdin")).unwrap(), b"short");
}

#[test]
fn a_reader_that_goes_ends_a_copy_to_standard_output_quietly() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    site.file("a", 4_000_000);
    site.volume("write", &["v", "a"]).ok();
    let child = command(&site, &["read", "v", "-"]).stdout(pipe().unwrap().1).spawn().unwrap();
    let done = finish(child);
    assert_eq!((done.code, done.stderr.as_str()), (141, ""), "{done:?}");
    assert_eq!(site.volume("show", &[]).ok()["state"], "free");
}

/// Neither a read from a silent pipe nor a write into a full one keeps the program from stopping.
#[test]
fn ctrl_c_stops_a_copy_that_waits_for_the_other_end_of_a_pipe() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    let (silent, mut writer) = pipe().unwrap();
    let (mut reader, unread) = pipe().unwrap();
    let child = command(&site, &["write", "v", "-"]).stdin(silent).spawn().unwrap();
    // More than a pipe keeps: the program has read some of it, so it is at work.
    writer.write_all(&content(300_000)).unwrap();
    signal(&child, "-INT");
    finish(child).failed(130, &["interrupted"]);
    assert_eq!(site.volume("show", &[]).ok()["state"], "free");

    site.file("a", 4_000_000);
    site.volume("write", &["v", "a"]).ok();
    let child = command(&site, &["read", "v", "-"]).stdout(unread).spawn().unwrap();
    reader.read_exact(&mut [0; 1]).unwrap();
    signal(&child, "-INT");
    finish(child).failed(130, &["interrupted"]);
    assert_eq!(site.volume("show", &[]).ok()["state"], "free");
}

#[test]
fn groups_that_do_not_fit_leave_the_stored_file_alone() {
    let site = Site::new(1, "mem:64M,lazy");
    site.volume("create", &["v", "--slots", "8"]).ok();
    site.file("a", 100_000);
    site.volume("write", &["v", "a"]).ok();
    site.file("b", 9_000_000);
    site.volume("write", &["v", "b", "--group", "16M"])
        .failed(2, &["nothing was written", "--group"]);
    site.volume("verify", &["v", "a"]).ok();
    let (done, _) = piped(&site, &["write", "v", "-", "--group", "16M"], &content(9_000_000));
    let text = done.failed(2, &["nothing was written"]);
    site.volume("verify", &["v", "a"]).ok();
    let fits = text.split("--group ").nth(1).unwrap().split(' ').next().unwrap();
    site.volume("write", &["v", "b", "--group", fits]).ok();
    site.volume("verify", &["v", "b"]).ok();
}

#[test]
fn a_device_is_never_replaced() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    site.file("a", 1_000);
    site.volume("write", &["v", "a"]).ok();
    for force in [&["read", "v", "/dev/null"][..], &["read", "v", "/dev/null", "--force"]] {
        site.volume(force[0], &force[1..]).failed(1, &["not a regular file", "- > /dev/null"]);
    }
    assert!(fs::symlink_metadata("/dev/null").unwrap().file_type().is_char_device());
    site.volume("write", &["v", "/dev/null"]).failed(1, &["not a regular file", "- < /dev/null"]);
}

/// A folder that can be written and not read can't be opened to make a name durable. The message
/// reports that the file is there.
#[test]
fn a_folder_without_read_permission_keeps_the_file_and_the_message_reports_it() {
    const NOBODY: u32 = 65_534;
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    let path = site.file("a", 100_000);
    site.volume("write", &["v", "a"]).ok();
    let folder = site.path("drop");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o300)).unwrap();
    let is_root = fs::read_dir(&folder).is_ok();
    let mut read_as = command(&site, &["read", "v", "drop/b"]);
    if is_root {
        chown(&folder, Some(NOBODY), Some(NOBODY)).unwrap();
        fs::set_permissions(site.folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let program = read_as.get_program().to_owned();
        let can_run = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&program)
            .arg("--version")
            .stdout(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !can_run {
            println!("not tested here: another user can't run the program");
            return;
        }
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
        command.args(read_as.get_args()).current_dir(site.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        read_as = command;
    }
    let done = finish(read_as.spawn().unwrap());
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
    let text = done.failed(1, &["it is there, with the right checksum"]);
    assert!(!text.contains("nothing was left"), "{text}");
    assert!(fs::read(folder.join("b")).unwrap() == fs::read(path).unwrap());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}
