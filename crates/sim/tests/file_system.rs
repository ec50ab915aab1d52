//! RioFS on the simulated volume: some seeds, with e2fsck as another judge of what they leave.

use std::path::Path;
use std::process::{Command, Output};

use riopipe_sim::attempt::{Bounded, RUN_LIMIT};
use riopipe_sim::core::Trace;
use riopipe_sim::draw::draw_file_system;
use riopipe_sim::fs::{FsCounts, image};
use riopipe_sim::world::run_file_system;

/// Runs a program of e2fsprogs, from `PATH` or from `/usr/sbin`.
fn run(program: &str, arguments: &[&str]) -> Output {
    let start = |name: &str| {
        Command::new(name)
            .args(arguments)
            .env("LC_ALL", "C")
            .env("E2FSPROGS_FAKE_TIME", "1700000000")
            .output()
    };
    start(program)
        .or_else(|_| start(&format!("/usr/sbin/{program}")))
        .unwrap_or_else(|e| panic!("{program} of e2fsprogs, which scripts/setup installs: {e}"))
}

/// e2fsck finds nothing in an image.
fn assert_sound(image: &[u8], name: &str) {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, image).unwrap();
    let ended = run("e2fsck", &["-f", "-n", path.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert_eq!(ended.status.code(), Some(0), "{name}: {text}");
}

/// With `RIO_MAKE_IMAGE=1` the image is made anew, for an e2fsprogs that makes other ones.
#[test]
fn the_first_image_is_one_of_mke2fs() {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/fs/image.txt");
    if std::env::var_os("RIO_MAKE_IMAGE").is_some() {
        std::fs::write(text, make_image()).unwrap();
        return;
    }
    assert_sound(image().as_flattened(), "the image before the first mount");
}

/// An empty file system as the text that the simulator reads.
fn make_image() -> String {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("image");
    std::fs::File::create(&path).unwrap().set_len(image().as_flattened().len() as u64).unwrap();
    let id = "6a7b1c3e-9d44-4a7e-8f10-2b5c7d9e0f13";
    let seed = format!("hash_seed={id}");
    let options = "-q -F -t ext4 -b 4096 -I 256 -J size=8 -N 256 -m 0 -O ^resize_inode -U";
    let mut all: Vec<&str> = options.split(' ').collect();
    all.extend([id, "-E", &seed, path.to_str().unwrap()]);
    let ended = run("mke2fs", &all);
    assert!(ended.status.success(), "mke2fs: {}", String::from_utf8_lossy(&ended.stderr));
    let bytes = std::fs::read(&path).unwrap();
    let (mut text, mut at) = (String::new(), 0);
    while let Some(skipped) = bytes[at..].iter().position(|byte| *byte != 0) {
        at += skipped;
        let same = |from: usize| bytes[from..].iter().take_while(|b| **b == bytes[from]).count();
        let repeated = same(at);
        if repeated >= 16 {
            text += &format!("{at} {:02x} {repeated}\n", bytes[at]);
            at += repeated;
            continue;
        }
        let is_end = |place: &usize| bytes[*place..][..8] == [0; 8] || same(*place) >= 16;
        let end = (at..at + 32).find(is_end).unwrap_or(at + 32);
        let hex: Vec<String> = bytes[at..end].iter().map(|byte| format!("{byte:02x}")).collect();
        text += &format!("{at} {}\n", hex.concat());
        at = end;
    }
    text
}

#[test]
fn some_seeds_run_clean() {
    let mut bounded = Bounded::new(RUN_LIMIT);
    let (mut all, mut crashes) = (FsCounts::default(), 0);
    for seed in 1..=60 {
        let (outcome, fault) = bounded.run(&draw_file_system(seed), None);
        assert_eq!(fault, None, "seed {seed}");
        all += outcome.fs;
        crashes += outcome.crashes;
    }
    assert!(all.calls > 60 * 10, "a program has real work in it: {all:?}");
    assert!(crashes > 60, "there are crashes: {crashes}");
    assert!(all.transactions > 10 && all.records > 10, "journals are replayed: {all:?}");
    let cuts = [all.cut_records, all.cut_commits, all.cut_checkpoints, all.cut_recoveries];
    assert!(cuts.iter().all(|cut| *cut > 0), "failures come at all times: {all:?}");
    assert!(all.replays > 5 && all.handed_blocks > 0, "blocks change streams: {all:?}");
}

#[test]
fn e2fsck_finds_nothing_in_what_a_run_leaves() {
    for seed in 101..=112 {
        let (outcome, image) = run_file_system(&draw_file_system(seed), None);
        assert_eq!(outcome.violation, None, "seed {seed}");
        assert_sound(&image, &format!("seed {seed}"));
    }
}

#[test]
fn a_seed_is_always_the_same_run() {
    for seed in [3, 5, 8] {
        let scenario = draw_file_system(seed);
        let [one, other] = [(), ()].map(|()| {
            let trace = Trace::default();
            let (outcome, image) = run_file_system(&scenario, Some(trace.clone()));
            (trace.take(), image, outcome.events)
        });
        assert!(one.0.len() > 100 && one == other, "seed {seed}");
    }
}
