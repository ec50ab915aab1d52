//! Refusals name the option and the cause, come at once, and leave nothing behind.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::Instant,
};

use riopipe::crc32c;
use riopipe_media::boot_id;
use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::log_region::{HEADER_BYTES, LogKind, LogRegion, MemberNamespace, NewVolume};
use riopipe_order::region::MemRegion;

use crate::{
    serve::{serve, served, signal},
    site::{Done, LIMIT, Site, finish, rio, rio_in},
};

/// `rio target VERB` with these words, on a free port, and with a wait for locks that no test
/// outlasts.
fn target(folder: &Path, verb: &str, words: &[&str]) -> Done {
    let begin = ["target", verb, "-s", "0", "-o", "json", "--create", "--lock-wait", "3600"];
    rio_in(folder, &[&begin, words].concat())
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().count() == 0
}

#[test]
fn a_comma_in_a_path_is_written_twice() {
    let folder = tempfile::tempdir().unwrap();
    for verb in ["check", "serve"] {
        let done = target(folder.path(), verb, &["--drive", "file:a,b,size=1M"]);
        let text = format!("{}{}", done.stdout, done.stderr);
        assert!(done.code == 2 && text.contains("written twice: file:a,,b"), "{done:?}");
    }
    assert!(is_empty(folder.path()));
    let words = ["--drive", "file:a,,b,size=1M", "--log", "file:l,,g,size=1M"];
    assert_eq!(target(folder.path(), "check", &words).ok()["ok"], true);
    let (child, _) = serve(folder.path(), &words);
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);
    assert_eq!(fs::metadata(folder.path().join("a,b")).unwrap().len(), 1 << 20);
    rio_in(folder.path(), &["log", "dump", "file:l,,g", "-o", "json"]).ok();
}

#[test]
fn check_finds_what_serve_refuses_and_repeats_what_was_given() {
    let folder = tempfile::tempdir().unwrap();
    for (drive, log, words) in [
        ("mem:1000", "", &["\"mem:1000\"", "4096"][..]),
        ("ssd:flash,size=8E", "", &["\"ssd:flash,size=8E\"", "\"8E\" is not a size"]),
        ("file:d,size=8E", "", &["\"file:d,size=8E\"", "\"8E\" is not a size"]),
        ("file:d,size=1M,bogus", "", &["unknown option \"bogus\""]),
        // More than any file system takes, and more than this one has.
        ("file:d,size=4194304T", "", &["d: "]),
        ("file:no/d,size=1M", "", &["no is no directory"]),
        ("mem:1M", "mem:4K", &["4096 bytes are too small"]),
        ("file:d,size=1M", "file:l,size=4K", &["4096 bytes are too small", "2M"]),
        ("mem:1M", "block:l,size=8K", &["8192 bytes are too small", "2M"]),
        ("mem:1M", "dax:l,size=8E", &["\"8E\" is not a size"]),
    ] {
        let log: &[&str] = if log.is_empty() { &[] } else { &["--log", log] };
        let args = [&["--drive", drive], log].concat();
        let checked = target(folder.path(), "check", &args);
        assert_eq!(checked.json()["ok"], false, "{args:?}");
        let what = checked.json()["problems"][0]["what"].as_str().unwrap().to_owned();
        let served = target(folder.path(), "serve", &args);
        assert!([2, 7].contains(&served.code), "{served:?}");
        assert_eq!(checked.code, served.code, "{args:?}");
        for word in words {
            assert!(what.contains(word), "no {word:?} in {what:?}");
        }
        assert!(is_empty(folder.path()), "{args:?} left a file");
    }
    // A modelled drive in a file that does not exist yet.
    let args = ["--drive", "ssd:flash,size=1M,file=d"];
    assert_eq!(target(folder.path(), "check", &args).ok()["ok"], true);
    assert!(is_empty(folder.path()));
}

#[test]
fn t8_one_file_given_twice_is_reported_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("d"), [0; 1 << 20]).unwrap();
    std::os::unix::fs::symlink("d", path("soft")).unwrap();
    fs::hard_link(path("d"), path("hard")).unwrap();
    for (one, option, other) in [
        ("file:d", "--drive", "file:d"),
        ("file:d", "--drive", "file:soft"),
        ("file:hard", "--drive", "ssd:optane,file=d"),
        ("file:d", "--log", "dax:hard"),
        ("file:new,size=1M", "--log", "block:new,size=1M"),
    ] {
        let args = ["--drive", one, option, other];
        let words = [one, other, "same file"];
        target(folder.path(), "serve", &args).failed(2, &words);
        let checked = target(folder.path(), "check", &args);
        assert_eq!(checked.code, 2, "{checked:?}");
        assert!(words.iter().all(|word| checked.stdout.contains(word)), "{checked:?}");
    }
    assert!(!path("new").exists());
}

#[test]
fn a_fifo_is_no_log_and_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new("mkfifo").arg(folder.path().join("fifo")).status().unwrap();
    assert!(made.success());
    for kind in ["file", "dax", "block"] {
        let spec = format!("{kind}:fifo");
        rio_in(folder.path(), &["log", "dump", &spec, "-o", "json"])
            .failed(7, &["fifo", "neither"]);
        target(folder.path(), "serve", &["--drive", "mem:1M", "--log", &spec]).failed(7, &["fifo"]);
    }
}

/// The header announces gigabytes, in a file with holes.
#[test]
fn t18_a_crafted_log_costs_bounded_memory() {
    const SLOTS: u32 = 1 << 24;
    let folder = tempfile::tempdir().unwrap();
    let len = 16 << 30;
    let boot = boot_id().unwrap();
    let header = MemRegion::new(HEADER_BYTES);
    let mut log = LogRegion::create(header, len, [3; 16], boot, LogKind::Block, crc32c).unwrap();
    let id = VolumeId([7; 16]);
    let members = vec![MemberNamespace { member: Member(0), nsid: 1 }];
    let volume = NewVolume { id, streams: 8, slots: SLOTS, members };
    log.add_volume(volume, |_, _| Ok(())).unwrap();
    let path = folder.path().join("log");
    fs::write(&path, log.into_region().bytes()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(len as u64).unwrap();
    // With 512 MiB of address space, reading one partition would fail.
    let command = format!(
        "ulimit -v 524288; exec {} log dump file:{} -o json",
        env!("CARGO_BIN_EXE_rio"),
        path.display()
    );
    let done = Done::of(Command::new("sh").args(["-c", &command]).output().unwrap());
    done.failed(5, &["stream 0 is not read", "16777216 slots", "7 more"]);
    assert_eq!(done.json()["volumes"][0]["slots"], SLOTS);
}

#[test]
fn numbers_beyond_a_volume_are_named_with_their_option() {
    let site = Site::new(1, "mem:16M,lazy");
    for (option, value) in [("--slots", "1"), ("--slots", "1000000"), ("--streams", "0")] {
        let done = site.volume("create", &["v", option, value]);
        assert!(done.code == 2 && done.stderr.contains(option), "{done:?}");
    }
    for value in ["0", "-1", "nan", "1e9"] {
        let done = site.volume("create", &["v", &format!("--io-timeout={value}")]);
        assert!(done.code == 2 && done.stderr.contains("above 0, at most 86400"), "{done:?}");
    }
    site.volume("create", &["v", "--streams", "2"]).ok();
    let bench = ["bench", "run", "--volume", "v", "--overwrite", "--threads", "3", "--time", "0.1"];
    let member = site.address(0);
    let args = [&bench[..], &["-m", &member, "-o", "json"]].concat();
    rio(&args).failed(2, &["--threads 3", "2 streams", "--streams"]);
    assert_eq!(site.volume("show", &[]).ok()["state"], "free");
}

/// A loop device, which is detached when this is dropped.
struct LoopDevice(String);

impl LoopDevice {
    /// `None` if this process can't have one.
    fn on(file: &Path, block_bytes: &str) -> Option<Self> {
        let mut attach = Command::new("losetup");
        let output = attach.args(["-f", "--show", "-b", block_bytes]).arg(file).output().ok()?;
        if !output.status.success() {
            return None;
        }
        let device = Self(String::from_utf8(output.stdout).unwrap().trim().to_owned());
        // It has no cache of its own, as a drive with power-loss protection reports.
        let name = device.0.rsplit('/').next().unwrap();
        let attribute = format!("/sys/block/{name}/queue/write_cache");
        fs::write(attribute, "write through").ok().map(|()| device)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

#[test]
fn m1_a_device_with_a_smaller_atomic_unit_is_not_protected() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, vec![0; 8 << 20]).unwrap();
    for (block_bytes, plp, is_protected) in
        [("512", "", false), ("512", ",plp", true), ("4096", "", true)]
    {
        let Some(device) = LoopDevice::on(&file, block_bytes) else {
            eprintln!("not tested here: no loop device with a write cache of its own");
            return;
        };
        let spec = format!("block:{}{plp}", device.0);
        for words in [&["--drive", &spec][..], &["--drive", "mem:1M", "--log", &spec]] {
            let (child, printed) = serve(folder.path(), words);
            let serves = printed["serves"].to_string();
            assert_eq!(
                serves.contains("power-loss protection"),
                is_protected,
                "{words:?} {serves}"
            );
            signal(&child, "-TERM");
            assert_eq!(finish(child).code, 0);
            let checked = target(folder.path(), "check", words).ok();
            let notes = checked["notes"].to_string();
            assert_eq!(notes.contains("no atomic writes of 4096"), !is_protected, "{notes}");
        }
    }
}

/// `rio` with these words and a limit on its descriptors.
fn start_with_descriptors(folder: &Path, most: u32, words: &[&str]) -> Child {
    let limited = format!("ulimit -n {most}; exec \"$0\" \"$@\"");
    Command::new("sh")
        .args(["-c", &limited, env!("CARGO_BIN_EXE_rio")])
        .args(words)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_limit_on_descriptors_is_named_and_does_not_end_the_service() {
    let folder = tempfile::tempdir().unwrap();
    let words = [
        "target",
        "serve",
        "-s",
        "0",
        "--create",
        "--reactors",
        "1",
        "--drive",
        "file:d,size=16M",
        "-o",
        "json",
    ];
    // Which one of its descriptors is the first too many is not fixed, and so is the exit code.
    let done = finish(start_with_descriptors(folder.path(), 8, &words));
    let failure = done.stderr.lines().last().unwrap();
    assert!([1, 7].contains(&done.code), "{done:?}");
    assert!(failure.contains("8 descriptors") && failure.contains("RLIMIT_NOFILE"), "{done:?}");
    let words = [&words[..], &["--log", "mem:2M", "-v"]].concat();
    let (mut child, printed) = served(start_with_descriptors(folder.path(), 32, &words));
    let address = printed["addresses"][0].as_str().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let idle: Vec<_> = (0..32).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut text = String::new();
    while !text.contains("accept failed") {
        assert!(log.read_line(&mut text).unwrap() > 0, "{text}");
    }
    assert!(text.contains("32 descriptors") && text.contains("RLIMIT_NOFILE"), "{text}");
    drop(idle);
    rio_in(folder.path(), &["volume", "create", "v", "-m", address, "-o", "json"]).ok();
    let words = ["volume", "show", "-m", address, "-o", "json"];
    finish(start_with_descriptors(folder.path(), 6, &words))
        .failed(3, &["6 descriptors", "RLIMIT_NOFILE"]);
    signal(&child, "-TERM");
    log.read_to_string(&mut text).unwrap();
    assert_eq!(finish(child).code, 0);
    assert_eq!(text.matches("accept failed").count(), 1, "{text}");
    assert!(text.contains("accepted again"), "{text}");
}

#[test]
fn a_deleted_drive_is_named_at_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["--drive", "file:d,size=16M", "--log", "mem:2M"];
    let (child, printed) = serve(folder.path(), &words);
    let member = printed["addresses"][0].as_str().unwrap();
    let volume = |verb: &str| {
        rio_in(folder.path(), &["volume", verb, "v", "-m", member, "--timeout", "60", "-o", "json"])
    };
    volume("create").ok();
    fs::remove_file(folder.path().join("d")).unwrap();
    let begun = Instant::now();
    let done = loop {
        let done = volume("verify");
        // Without a copied file, it is another failure.
        if done.code != 5 {
            break done;
        }
        assert!(begun.elapsed() < LIMIT, "{done:?}");
    };
    let text = done.failed(4, &["drive is gone", "deleted"]);
    assert!(!text.contains("06h"), "{text}");
    signal(&child, "-TERM");
    let log = finish(child).stderr;
    assert!(log.contains("file:d: the file has been deleted"), "{log}");
}
