//! Many threads call at once, on a storage that delays completion and durability.
//!
//! Each thread has a directory of its own, which it compares with a model, and all use a shared
//! directory, where calls may fail because of the other threads. At the end `e2fsck` judges.
//! `RIOFS_SEED`, `RIOFS_SEEDS`, `RIOFS_THREADS` and `RIOFS_STEPS` change the size of the test.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Fs, RENAME_EXCHANGE, RENAME_NOREPLACE, SetAttr, mode};
use riopipe_fs_core::xattr::SetMode;
use riopipe_fs_core::{FsError, Ino};

use crate::calls::{NOW, dir, file, options, root};
use crate::delayed::Delayed;
use crate::enumerate::random::Random;
use crate::fsx::number;
use crate::memory::{Image, Memory, check_clean, image_of};

/// The call in which a thread is, for the watchdog.
#[derive(Default)]
struct Doing {
    steps: AtomicU64,
    call: Mutex<String>,
}

struct Shared {
    fs: Fs,
    seconds: AtomicI64,
    doing: Vec<Doing>,
    is_done: AtomicBool,
    dir: Ino,
    /// A file of which each thread has a part.
    common: Ino,
}

/// The bytes of the common file that a thread has. They share pages with those of others.
const PART: u64 = 3000;

/// A file in the directory of a thread.
struct Own {
    ino: Ino,
    content: Vec<u8>,
    attribute: Option<Vec<u8>>,
}

struct Thread<'s> {
    number: usize,
    shared: &'s Shared,
    random: Random,
    dirs: [Ino; 2],
    /// By directory and name.
    files: BTreeMap<(usize, u64), Own>,
    part: Vec<u8>,
    /// References to shared inodes.
    refs: Vec<Ino>,
    how: How,
}

/// The kind of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Usual,
    /// There may be no space.
    Full,
    /// All threads use two names, and inodes leave the memory all the time.
    Hot,
}

fn name(n: u64) -> Vec<u8> {
    // Some names are long, so that directories have several blocks.
    let mut name = format!("n{n}").into_bytes();
    name.resize(name.len() + (n as usize * 37) % 150, b'x');
    name
}

impl Thread<'_> {
    fn now(&self) -> Time {
        Time { seconds: self.shared.seconds.fetch_add(1, Ordering::Relaxed), nanos: 0 }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random.below(n)
    }

    /// The number of shared names.
    fn names(&self) -> u64 {
        if self.how == How::Hot { 2 } else { 8 }
    }

    fn doing(&self, call: String) {
        let doing = &self.shared.doing[self.number];
        doing.steps.fetch_add(1, Ordering::Relaxed);
        *doing.call.lock().unwrap() = call;
    }

    /// Whether a call was done. Only a full file system may keep it from that.
    fn is_done<T>(&self, what: &str, result: Result<T, FsError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(FsError::NoSpace) if self.how == How::Full => None,
            Err(error) => panic!("thread {}: {what}: {error:?}", self.number),
        }
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            let kind = self.below(10);
            match (self.how, kind) {
                (How::Hot, 0) => self.own_step(),
                (How::Hot, 1..8) => self.shared_step(),
                (How::Usual | How::Full, 0..6) => self.own_step(),
                (How::Usual | How::Full, 6..9) => self.shared_step(),
                _ => self.whole_step(),
            }
        }
        for key in self.files.keys().copied().collect::<Vec<_>>() {
            self.compare(key);
        }
        self.compare_part();
        for ino in std::mem::take(&mut self.refs) {
            self.shared.fs.forget(ino, 1);
        }
    }

    fn compare(&mut self, key: (usize, u64)) {
        let now = self.now();
        let fs = &self.shared.fs;
        let own = &self.files[&key];
        let context = format!("file {key:?} (inode {}) of thread {}", own.ino, self.number);
        let mut data = vec![0xee; own.content.len() + 100];
        let read = fs.read(own.ino, 0, &mut data, now).unwrap();
        assert_eq!(read, own.content.len(), "the size of {context}");
        let wrong = (0..read).find(|&at| data[at] != own.content[at]);
        assert_eq!(wrong, None, "the first wrong byte of {context}");
        let value = fs.get_xattr(own.ino, b"user.a");
        assert_eq!(value.ok(), own.attribute, "the attribute of {context}");
    }

    fn compare_part(&mut self) {
        let now = self.now();
        let mut data = vec![0xee; PART as usize];
        let at = self.number as u64 * PART;
        let read = self.shared.fs.read(self.shared.common, at, &mut data, now).unwrap();
        assert_eq!(read, PART as usize);
        assert!(data == self.part, "the part of thread {}", self.number);
    }

    /// A step on files that only this thread uses.
    fn own_step(&mut self) {
        let now = self.now();
        let key = (self.below(2) as usize, self.below(12));
        let (parent, text) = (self.dirs[key.0], name(key.1));
        let what = self.below(16);
        self.doing(format!("own step {what} of {key:?}"));
        let fs = &self.shared.fs;
        let Some(own) = self.files.get_mut(&key) else {
            let made = fs.create(&root(), parent, &text, &file(0o644), now);
            if let Some(made) = self.is_done("create", made) {
                let own = Own { ino: made.ino, content: Vec::new(), attribute: None };
                self.files.insert(key, own);
            }
            return;
        };
        let ino = own.ino;
        match what {
            0..5 => {
                let at = self.random.below(60_000);
                let len = [10, 4096, 30_000][self.random.below(3) as usize];
                let byte = self.random.below(255) as u8;
                let done = fs.write(&root(), ino, at, &vec![byte; len], now);
                let content = &mut own.content;
                match done {
                    Ok(done) => {
                        let end = at as usize + done;
                        content.resize(content.len().max(end), 0);
                        content[at as usize..end].fill(byte);
                    }
                    Err(FsError::NoSpace) if self.how == How::Full => {}
                    Err(error) => panic!("write: {error:?}"),
                }
            }
            5 | 6 => self.compare(key),
            7 => {
                let size = self.random.below(50_000);
                own.content.resize(size as usize, 0);
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                let attr = fs.set_attr(&root(), ino, &set, now).unwrap();
                assert_eq!(attr.size, size);
            }
            8 | 9 => {
                let done = fs.fsync(ino, what == 8, now);
                self.is_done("fsync", done);
            }
            10 => {
                let value = vec![7; self.random.below(3000) as usize];
                let done = fs.set_xattr(&root(), ino, b"user.a", &value, SetMode::Any, now);
                if done.is_ok() {
                    own.attribute = Some(value);
                }
                self.is_done("set_xattr", done);
            }
            11 => {
                // Long enough for a truncate of several steps.
                let size = own.content.len() as u64;
                let done = fs.fallocate(ino, mode::KEEP_SIZE, 0, 40_000_000, now);
                self.is_done("fallocate", done);
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                fs.set_attr(&root(), ino, &set, now).unwrap();
            }
            12 => {
                let to = (self.random.below(2) as usize, self.random.below(12));
                let (to_parent, to_text) = (self.dirs[to.0], name(to.1));
                fs.rename(&root(), parent, &text, to_parent, &to_text, 0, now).unwrap();
                if to != key {
                    let own = self.files.remove(&key).unwrap();
                    if let Some(replaced) = self.files.insert(to, own) {
                        fs.forget(replaced.ino, 1);
                    }
                }
            }
            13 => {
                // The file is gone, then its name; or the other way.
                let is_open = self.random.below(2) == 0;
                if !is_open {
                    fs.forget(ino, 1);
                }
                fs.unlink(&root(), parent, &text, now).unwrap();
                if is_open {
                    self.compare(key);
                    fs.forget(ino, 1);
                }
                self.files.remove(&key);
            }
            14 => {
                // Idle inodes may leave the memory meanwhile.
                fs.forget(ino, 1);
                std::thread::yield_now();
                let found = fs.lookup(&root(), parent, &text).unwrap();
                assert_eq!(found.size, own.content.len() as u64);
                own.ino = found.ino;
            }
            _ => {
                let mut names = Vec::new();
                fs.read_dir(parent, 0, &mut |item| {
                    names.push(item.name.to_vec());
                    ControlFlow::Continue(())
                })
                .unwrap();
                names.retain(|found| found != b"." && found != b"..");
                names.sort();
                let mut expected: Vec<_> =
                    self.files.keys().filter(|k| k.0 == key.0).map(|k| name(k.1)).collect();
                expected.sort();
                assert_eq!(names, expected);
            }
        }
    }

    /// A step on names that all threads use. Any of the usual errors may be the result.
    fn shared_step(&mut self) {
        let now = self.now();
        let what = self.below(14);
        self.doing(format!("shared step {what}"));
        let shared = self.shared;
        let fs = &shared.fs;
        let dir_ino = self.random_shared_dir();
        let other = self.random_shared_dir();
        let names = self.names();
        let (from, to) = (name(self.below(names)), name(self.below(names)));
        let result = match what {
            0 | 1 => fs.create(&root(), dir_ino, &from, &file(0o600), now).map(|made| {
                self.refs.push(made.ino);
            }),
            2 => fs.create(&root(), dir_ino, &from, &dir(0o700), now).map(|made| {
                self.refs.push(made.ino);
            }),
            3 => fs.unlink(&root(), dir_ino, &from, now),
            4 => fs.rmdir(&root(), dir_ino, &from, now),
            5 | 6 => {
                let flags = [0, 0, RENAME_EXCHANGE, RENAME_NOREPLACE][self.below(4) as usize];
                fs.rename(&root(), dir_ino, &from, other, &to, flags, now)
            }
            7 => match self.refs.last().copied() {
                Some(ino) => fs.link(&root(), ino, dir_ino, &from, now).map(|made| {
                    self.refs.push(made.ino);
                }),
                None => Ok(()),
            },
            8 | 9 => fs.lookup(&root(), dir_ino, &from).map(|found| {
                assert!(found.links > 0, "a file without names was found");
                self.refs.push(found.ino);
            }),
            10 => match self.refs.last().copied() {
                // It may have no name any more.
                Some(ino) => {
                    let at = self.below(30_000);
                    let written = fs.write(&root(), ino, at, &[1; 5000], now);
                    written.and_then(|_| fs.fsync(ino, false, now))
                }
                None => Ok(()),
            },
            11 => fs.read_dir(dir_ino, 0, &mut |_| ControlFlow::Continue(())),
            12 => {
                let at = self.below(PART);
                let end = (at + 1 + self.below(1000)).min(PART);
                let byte = self.below(255) as u8;
                let data = vec![byte; (end - at) as usize];
                let place = self.number as u64 * PART + at;
                let done = fs.write(&root(), shared.common, place, &data, now);
                if let Ok(done) = done {
                    self.part[at as usize..at as usize + done].fill(byte);
                }
                done.map(drop)
            }
            _ => {
                self.compare_part();
                fs.fsync(shared.common, false, now)
            }
        };
        while self.refs.len() > if self.how == How::Hot { 1 } else { 6 } {
            let at = self.below(self.refs.len() as u64) as usize;
            let ino = self.refs.swap_remove(at);
            fs.forget(ino, 1);
        }
        match result {
            Ok(()) => {}
            Err(FsError::NoSpace) if self.how == How::Full => {}
            Err(
                FsError::Exists
                | FsError::NotFound
                | FsError::NotDirectory
                | FsError::IsDirectory
                | FsError::NotEmpty
                | FsError::Stale(_),
            ) => {}
            // A directory into itself; a directory written or linked.
            Err(FsError::Invalid) if matches!(what, 5 | 6) => {}
            Err(FsError::NotPermitted) if what == 7 => {}
            Err(error) => panic!("thread {}: shared step {what}: {error:?}", self.number),
        }
    }

    /// The shared directory or one below it. It may be gone when it is used.
    fn random_shared_dir(&mut self) -> Ino {
        let mut ino = self.shared.dir;
        for _ in 0..self.below(3) {
            let names = self.names();
            let next = name(self.below(names));
            match self.shared.fs.lookup(&root(), ino, &next) {
                Ok(found) => {
                    self.refs.push(found.ino);
                    if found.mode & 0xf000 == 0x4000 {
                        ino = found.ino;
                    }
                }
                Err(FsError::NotFound | FsError::Stale(_)) => {}
                Err(error) => panic!("lookup: {error:?}"),
            }
        }
        ino
    }

    /// A step on the whole file system.
    fn whole_step(&mut self) {
        let mut now = self.now();
        let what = self.below(8);
        self.doing(format!("whole step {what}"));
        let fs = &self.shared.fs;
        let done = match what {
            0 => fs.sync(now),
            1..4 => {
                now.seconds = self.shared.seconds.fetch_add(6, Ordering::Relaxed) + 6;
                fs.tick(now).map(drop)
            }
            4 => fs.barrier(self.shared.common, false, now),
            _ => {
                let figures = fs.statfs();
                assert!(figures.blocks_free <= figures.blocks);
                Ok(())
            }
        };
        self.is_done("sync", done);
    }
}

/// Ends the process if no thread goes on.
fn watch(shared: &Shared) {
    let sum = || shared.doing.iter().map(|d| d.steps.load(Ordering::Relaxed)).sum::<u64>();
    let (mut last, mut since) = (0, Instant::now());
    while !shared.is_done.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
        if sum() != last {
            (last, since) = (sum(), Instant::now());
        } else if since.elapsed() > Duration::from_secs(60) {
            for (number, doing) in shared.doing.iter().enumerate() {
                let call = doing.call.try_lock().map(|call| call.clone());
                eprintln!("thread {number} waits in {call:?}");
            }
            eprintln!("no thread goes on: a deadlock");
            std::process::abort();
        }
    }
}

fn run(seed: u64, image: &Image, blocks: u64, threads: usize, steps: u64, how: How) {
    let (storage, advancing) = Delayed::new(image.clone(), blocks, 3, seed);
    let (fs, _) = Fs::mount(storage.clone(), options(), NOW).unwrap();
    let shared_dir = fs.create(&root(), Ino::ROOT, b"shared", &dir(0o755), NOW).unwrap().ino;
    let common = fs.create(&root(), Ino::ROOT, b"common", &file(0o644), NOW).unwrap().ino;
    let set = SetAttr { size: Some(threads as u64 * PART), ..SetAttr::default() };
    fs.set_attr(&root(), common, &set, NOW).unwrap();
    let shared = Shared {
        fs,
        seconds: AtomicI64::new(NOW.seconds + 1),
        doing: (0..threads).map(|_| Doing::default()).collect(),
        is_done: AtomicBool::new(false),
        dir: shared_dir,
        common,
    };
    let trees: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|number| {
                let shared = &shared;
                scope.spawn(move || {
                    let made = |text: String| {
                        let new = dir(0o755);
                        shared.fs.create(&root(), Ino::ROOT, text.as_bytes(), &new, NOW).unwrap()
                    };
                    let dirs = [made(format!("a{number}")).ino, made(format!("b{number}")).ino];
                    let mut thread = Thread {
                        number,
                        shared,
                        random: Random(seed << 8 | number as u64),
                        dirs,
                        files: BTreeMap::new(),
                        part: vec![0; PART as usize],
                        refs: Vec::new(),
                        how,
                    };
                    thread.run(steps);
                    let Thread { files, part, .. } = thread;
                    (files, part)
                })
            })
            .collect();
        scope.spawn(|| watch(&shared));
        let results: Vec<_> = handles.into_iter().map(|handle| handle.join()).collect();
        shared.is_done.store(true, Ordering::Relaxed);
        results.into_iter().map(|result| result.expect("the thread's checks")).collect()
    });
    shared.fs.unmount(Time { seconds: NOW.seconds + 1_000_000, nanos: 0 }).unwrap();
    assert_eq!(shared.fs.failure(), None);
    storage.stop();
    advancing.join().unwrap();
    check_clean(&storage.image(), blocks);

    let memory = Arc::new(Memory::new(storage.image(), blocks, 3));
    let (fs, _) = Fs::mount(memory, options(), NOW).unwrap();
    for (number, (files, part)) in trees.into_iter().enumerate() {
        let dirs = [format!("a{number}"), format!("b{number}")]
            .map(|text| fs.lookup(&root(), Ino::ROOT, text.as_bytes()).unwrap().ino);
        for ((parent, n), own) in files {
            let found = fs.lookup(&root(), dirs[parent], &name(n)).unwrap();
            let mut data = vec![0; own.content.len()];
            fs.read(found.ino, 0, &mut data, NOW).unwrap();
            assert_eq!(found.size, own.content.len() as u64);
            assert!(data == own.content, "file {n} of thread {number} after the mount");
        }
        let mut data = vec![0; PART as usize];
        fs.read(common, number as u64 * PART, &mut data, NOW).unwrap();
        assert!(data == part, "the part of thread {number} after the mount");
    }
}

fn pause_at_locks(_seed: u64) {
    #[cfg(debug_assertions)]
    riopipe_fs_core::sync::pause_at_locks(_seed);
}

fn run_seeds(image: &Image, blocks: u64, seeds: u64, steps: u64, how: How) {
    let first = number("RIOFS_SEED", 1);
    let threads = number("RIOFS_THREADS", 6) as usize;
    for seed in first..first + number("RIOFS_SEEDS", seeds) {
        println!("seed {seed}");
        pause_at_locks(seed);
        run(seed, image, blocks, threads, number("RIOFS_STEPS", steps), how);
        pause_at_locks(0);
    }
}

#[test]
fn threads_do_not_disturb_one_another() {
    const BLOCKS: u64 = 262_144;
    run_seeds(&image_of(BLOCKS, &[]), BLOCKS, 2, 400, How::Usual);
}

#[test]
fn threads_share_a_full_file_system() {
    const BLOCKS: u64 = 32_768;
    run_seeds(&image_of(BLOCKS, &["-m", "0", "-N", "128"]), BLOCKS, 2, 400, How::Full);
}

#[test]
fn threads_find_and_remove_the_same_files() {
    const BLOCKS: u64 = 262_144;
    run_seeds(&image_of(BLOCKS, &[]), BLOCKS, 2, 500, How::Hot);
}

#[test]
fn a_write_during_a_long_truncate_brings_no_old_data_back() {
    const BLOCKS: u64 = 65_536;
    const LEN: usize = 48 << 20;
    let memory = Arc::new(Memory::new(image_of(BLOCKS, &[]), BLOCKS, 3));
    let (fs, _) = Fs::mount(memory.clone(), options(), NOW).unwrap();
    let f = fs.create(&root(), Ino::ROOT, b"file", &file(0o644), NOW).unwrap().ino;
    for round in 1..6 {
        for at in (0..LEN).step_by(1 << 20) {
            fs.write(&root(), f, at as u64, &[7; 1 << 20], NOW).unwrap();
        }
        fs.sync(NOW).unwrap();
        pause_at_locks(round);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while fs.attr(f).unwrap().size > 0 {
                    std::thread::yield_now();
                }
                // The truncate removes the blocks from the end on, in several steps.
                fs.write(&root(), f, LEN as u64 / 2, b"new", NOW).unwrap();
            });
            let set = SetAttr { size: Some(0), ..SetAttr::default() };
            fs.set_attr(&root(), f, &set, NOW).unwrap();
        });
        pause_at_locks(0);
        let mut data = vec![0xee; LEN];
        assert_eq!(fs.read(f, 0, &mut data, NOW), Ok(LEN / 2 + 3));
        assert!(data[..LEN / 2].iter().all(|&byte| byte == 0), "old data");
    }
    fs.unmount(NOW).unwrap();
    check_clean(&memory.image(), BLOCKS);
}
