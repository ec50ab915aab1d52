//! A million files in a directory: a measurement of a minute that takes 2 GB of memory, not a check.
//! It runs with `RIOFS_MANY` only.
//!
//! ```text
//! RIOFS_MANY=1 cargo test --release -p riopipe-fs-core --test it many -- --nocapture
//! ```

use std::fs::File;
use std::ops::ControlFlow;
use std::sync::Arc;

use riopipe_fs_core::Ino;
use riopipe_fs_core::dir::DirItem;
use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::Fs;
use rustix::time::{ClockId, clock_gettime};

use crate::calls::{NOW, dir, file, options, root};
use crate::memory::{Image, Memory};

const FILES: u64 = 1_000_000;
/// The files of one figure.
const WINDOW: u64 = 1000;
const MIB: u64 = 3000;

/// The CPU time of this thread, which other programs do not change, in seconds.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn name(n: u64) -> Vec<u8> {
    format!("file-with-a-longer-name-{n}").into_bytes()
}

/// Makes a call for each file, and the work of the background after each window. Prints the rates.
fn run(fs: &Fs, what: &str, seconds: &mut i64, call: impl Fn(u64)) {
    let mut rates = Vec::new();
    for window in 0..FILES / WINDOW {
        let begun = cpu();
        (window * WINDOW..(window + 1) * WINDOW).for_each(&call);
        *seconds += 1;
        fs.tick(Time { seconds: *seconds, nanos: 0 }).unwrap();
        rates.push(WINDOW as f64 / (cpu() - begun));
    }
    let mean = |rates: &[f64]| {
        (rates.len() as f64 / rates.iter().map(|rate| 1.0 / rate).sum::<f64>()).round()
    };
    let tenths: Vec<f64> = rates.chunks(rates.len() / 10).map(mean).collect();
    let (first, last) = (mean(&rates[..1]), mean(&rates[rates.len() - 1..]));
    println!("{what}: first 1000 {first}/s, last 1000 {last}/s; by tenths {tenths:?}");
}

#[test]
fn a_million_files_in_a_directory() {
    if std::env::var_os("RIOFS_MANY").is_none() {
        return;
    }
    let made = crate::image::Image::new(MIB, &["-N", "1100000", "-J", "size=256"]);
    let image = Image::from_file(&File::open(made.path()).unwrap());
    let memory = Arc::new(Memory::new(image, MIB << 8, 3));
    let (fs, _) = Fs::mount(memory.clone(), options(), NOW).unwrap();
    let d = fs.create(&root(), Ino::ROOT, b"d", &dir(0o755), NOW).unwrap().ino;
    let mut seconds = NOW.seconds;
    run(&fs, "create", &mut seconds, |n| {
        fs.create(&root(), d, &name(n), &file(0o644), NOW).unwrap();
    });
    let (begun, mut entries) = (cpu(), 0);
    let count = &mut |_: DirItem<'_>| {
        entries += 1;
        ControlFlow::Continue(())
    };
    fs.read_dir(d, 0, count).unwrap();
    println!("read_dir: {entries} entries in {:.2} s", cpu() - begun);
    run(&fs, "lookup", &mut seconds, |n| {
        fs.lookup(&root(), d, &name(n * 7919 % FILES)).unwrap();
    });
    run(&fs, "unlink", &mut seconds, |n| {
        let f = fs.lookup(&root(), d, &name(n)).unwrap();
        fs.unlink(&root(), d, &name(n), NOW).unwrap();
        // All references of the calls so far.
        fs.forget(f.ino, 3);
    });
    fs.unmount(NOW).unwrap();
}
