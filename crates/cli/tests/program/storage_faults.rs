//! A target whose host fails it: full disks, limits on files, and a log's file that is cut short.
//! The target does not end, and nothing that was durable is lost.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use riopipe::{MemberAddr, OpenOptions, Place, StreamOptions, Until, Volume};
use serde_json::Value;

use crate::{
    serve::{served, signal},
    site::{Done, content, finish, rio_in, start_in},
};

/// Bytes of the file system or of the file that a target may write.
const SPACE: usize = 24 << 20;

fn volume(folder: &Path, printed: &Value, words: &[&str]) -> Done {
    rio_in(folder, &volume_args(printed, words))
}

fn volume_args<'a>(printed: &'a Value, words: &[&'a str]) -> Vec<&'a str> {
    let member = printed["addresses"][0].as_str().unwrap();
    [&["volume"], words, &["-m", member, "-o", "json"]].concat()
}

/// Ends a target. Returns its log.
fn stop(target: Child) -> String {
    signal(&target, "-TERM");
    let done = finish(target);
    assert_eq!(done.code, 0, "{done:?}");
    done.stderr
}

/// A target on a drive of 64 MiB that takes [`SPACE`] at most, in each way that it may be short of
/// space. `None` if this process may not make such a place.
fn start_short_of_space(folder: &Path, drive: &str, by_limit: bool) -> Option<Child> {
    fs::create_dir(folder.join("m")).unwrap();
    let rio = env!("CARGO_BIN_EXE_rio");
    let serve = format!(
        "exec {rio} target serve -s 0 --reactors 1 --drive {drive} --log file:log,size=1M --create \
         -o json"
    );
    let (program, script) = match by_limit {
        // In units of 512 bytes, as dash and POSIX have it. The file is long enough already.
        true => ("sh", format!("truncate -s 64M m/d && ulimit -f {} && {serve}", SPACE / 512)),
        false => {
            let mount = format!("mount -t tmpfs -o size={SPACE} none m");
            ("unshare", format!("{mount} && truncate -s 64M m/d && {serve}"))
        }
    };
    if !by_limit {
        let may = Command::new("unshare").args(["-m", "true"]).stderr(Stdio::null()).status();
        if !may.is_ok_and(|status| status.success()) {
            eprintln!("not tested, this process may not mount: a full file system");
            return None;
        }
    }
    let mut command = Command::new(program);
    match by_limit {
        true => command.args(["-c", &script]),
        false => command.args(["-m", "sh", "-c", &script]),
    };
    command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // In a process group of its own, so that signals of a terminal do not reach it.
    Some(command.process_group(0).spawn().unwrap())
}

#[test]
fn a_full_disk_is_named_and_everything_written_before_stays() {
    for drive in ["file:m/d", "ssd:optane,file=m/d", "ssd:flash,file=m/d"] {
        for by_limit in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let folder = folder.path();
            let Some(target) = start_short_of_space(folder, drive, by_limit) else { continue };
            let (target, printed) = served(target);
            fs::write(folder.join("a"), content(10 << 20)).unwrap();
            fs::write(folder.join("b"), content(40 << 20)).unwrap();
            volume(folder, &printed, &["create", "v"]).ok();
            volume(folder, &printed, &["write", "v", "a"]).ok();
            volume(folder, &printed, &["verify", "v", "a"]).ok();
            let words = ["write", "v", "b", "--loss-timeout", "300"];
            volume(folder, &printed, &words).failed(6, &["no space left", "free space"]);
            // The undo needs no space.
            let recovered = volume(folder, &printed, &["recover", "v", "--take-over"]).ok();
            assert!(
                recovered["streams"][0]["undone_blocks"].as_u64().unwrap() > 0,
                "{drive}: {recovered}"
            );
            volume(folder, &printed, &["write", "v", "a"]).ok();
            volume(folder, &printed, &["verify", "v", "a"]).ok();
            let log = stop(target);
            assert!(log.contains("no space left for the file"), "{drive}: {log}");
        }
    }
}

#[test]
fn groups_before_a_full_disk_can_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let Some(target) = start_short_of_space(folder, "file:m/d", true) else { return };
    let (target, printed) = served(target);
    volume(folder, &printed, &["create", "v"]).ok();
    let member: MemberAddr = printed["addresses"][0].as_str().unwrap().parse().unwrap();
    let (opened, _) =
        Volume::open("v", std::slice::from_ref(&member), &OpenOptions::default()).unwrap();
    let mut stream = opened.stream(0, &StreamOptions::default()).unwrap();
    let bytes = 64 << 10;
    let mut durable = 0;
    // One durable group after the other, until the disk is full.
    let failure = (0..1000).find_map(|group| {
        let mut buf = stream.buf(bytes).unwrap();
        buf.fill(byte_of(group));
        let submitted = stream.group().write(group * 16, buf, Place::Fresh).submit_durable();
        let seq = match submitted {
            Ok(seq) => seq,
            Err(error) => return Some(error.to_string()),
        };
        match stream.wait(Until::Durable(seq), None) {
            Ok(_) => durable = group + 1,
            Err(error) => return Some(error.to_string()),
        }
        None
    });
    let failure = failure.expect("the disk becomes full");
    assert!(failure.contains("no space left"), "{failure}");
    assert!(durable > 100, "only {durable} groups were written");
    drop((stream, opened));
    let options = OpenOptions { take_over: true, ..OpenOptions::default() };
    let (opened, recovery) = Volume::open("v", &[member], &options).unwrap();
    assert!(recovery.streams[0].last.0 >= durable, "{recovery:?}");
    let mut stream = opened.stream(0, &StreamOptions::default()).unwrap();
    for group in 0..durable {
        let mut read = vec![0; bytes];
        stream.read(group * 16, &mut read, None).unwrap();
        assert!(read.iter().all(|byte| *byte == byte_of(group)), "group {group} is lost");
    }
    drop(stream);
    opened.close().unwrap();
    stop(target);
}

/// A store to a mapped page that the file does not have any more is SIGBUS, as on a full
/// copy-on-write file system.
#[test]
fn a_mapped_log_that_loses_its_pages_fails_its_streams_and_not_the_target() {
    for log in ["file:log,size=1M", "dax:log,size=1M"] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let args = ["target", "serve", "-s", "0", "--drive", "ssd:flash,size=512M,lazy"];
        let args = [&args[..], &["--log", log, "--create", "-o", "json"]].concat();
        let (mut target, printed) = served(start_in(folder, &args));
        fs::write(folder.join("a"), content(1 << 20)).unwrap();
        fs::write(folder.join("b"), content(200 << 20)).unwrap();
        volume(folder, &printed, &["create", "v"]).ok();
        volume(folder, &printed, &["write", "v", "a"]).ok();
        // The header's first page stays, and the partitions lose theirs.
        File::options().write(true).open(folder.join("log")).unwrap().set_len(8192).unwrap();
        let done = volume(folder, &printed, &["write", "v", "b"]);
        assert!([4, 6].contains(&done.code), "{log}: {done:?}");
        let done = volume(folder, &printed, &["recover", "v", "--take-over"]);
        assert_eq!(done.code, 4, "{log}: a list without pages was believed: {done:?}");
        let (host, port) = printed["addresses"][0].as_str().unwrap().rsplit_once(':').unwrap();
        rio_in(folder, &["discover", "-a", host, "-s", port, "-o", "json"]).ok();
        assert!(target.try_wait().unwrap().is_none(), "{log}: the target has ended");
        signal(&target, "-TERM");
        let done = finish(target);
        assert!(done.stderr.contains("cut short") || done.stderr.contains("cut to"), "{done:?}");
    }
}

/// The content of a group's blocks.
fn byte_of(group: u64) -> u8 {
    (group % 251) as u8 + 1
}
