//! Random operations on the content of a few files, compared with a model byte for byte, as `fsx`
//! of the file system tests does it. Among them are remounts and crashes. A crash behind a sync must
//! leave all. A crash in a call must leave what was synced, and in each other block a content that
//! the file had since. The test goes on with what it finds.
//!
//! `RIOFS_SEED` is the first seed, `RIOFS_SEEDS` the number of seeds, `RIOFS_STEPS` the number of
//! operations of each. A failure prints the shortest list of operations that was found for it.

mod step;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Attr, Fs, JournalMode, MountOptions, SeekTo, SetAttr, mode};
use riopipe_fs_core::storage::Storage;
use riopipe_fs_core::{FsError, Ino};

use self::step::{Call, Step, steps};
use crate::calls::{NOW, file, options, root};
use crate::enumerate::random::Random;
use crate::memory::{Image, Memory, check_clean, image_of};

const BLOCKS: u64 = 32_768;
const FILES: usize = 3;
const PAGE: u64 = 4096;

/// The mounted file system and its model.
struct Test {
    memory: Arc<Memory>,
    fs: Fs,
    inos: [Ino; FILES],
    model: [Vec<u8>; FILES],
    now: Time,
    mounts: u64,
    mount: MountOptions,
    /// The contents of each file since it was synced, the current one last; none without a watch.
    since: Option<[Vec<Vec<u8>>; FILES]>,
    counts: Counts,
}

/// The numbers of a run.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    steps: u64,
    remounts: u64,
    /// Crashes behind a sync.
    crashes: u64,
    /// Crashes in a call, or without a sync.
    cuts: u64,
    /// Those of them in which the storage has failed the call.
    failed: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.remounts += other.remounts;
        self.crashes += other.crashes;
        self.cuts += other.cuts;
        self.failed += other.failed;
    }
}

/// A watch with more steps ends without a cut: it keeps each content of the files.
const WATCHED_MAX: usize = 40;

fn name(file: usize) -> [u8; 2] {
    [b'f', b'0' + file as u8]
}

impl Test {
    fn new(image: &Image, mount: &MountOptions) -> Self {
        let memory = Arc::new(Memory::new(image.clone(), BLOCKS, 3));
        let (fs, _) = Fs::mount(memory.clone(), mount.clone(), NOW).unwrap();
        let inos = std::array::from_fn(|n| {
            fs.create(&root(), Ino::ROOT, &name(n), &file(0o644), NOW).unwrap().ino
        });
        let model = std::array::from_fn(|_| Vec::new());
        let counts = Counts::default();
        Self {
            memory,
            fs,
            inos,
            model,
            now: NOW,
            mounts: 0,
            mount: mount.clone(),
            since: None,
            counts,
        }
    }

    fn mount(&mut self, image: Image) {
        self.mount_unjudged(image);
        for n in 0..FILES {
            self.compare(n);
        }
    }

    fn mount_unjudged(&mut self, image: Image) {
        self.since = None;
        self.memory = Arc::new(Memory::new(image, BLOCKS, 3));
        self.mounts += 1;
        let mut options = self.mount.clone();
        // Each mount needs another one, and the first has that of the options.
        options.epoch.0[8..].copy_from_slice(&self.mounts.to_le_bytes());
        (self.fs, _) = Fs::mount(self.memory.clone(), options, self.now).unwrap();
        for n in 0..FILES {
            self.inos[n] = self.fs.lookup(&root(), Ino::ROOT, &name(n)).unwrap().ino;
        }
    }

    /// Compares all of a file.
    fn compare(&self, n: usize) {
        self.read(n, 0, self.model[n].len() as u64 + PAGE);
    }

    fn read(&self, n: usize, at: u64, len: u64) {
        let model = &self.model[n];
        let mut data = vec![0xee; len as usize];
        let read = self.fs.read(self.inos[n], at, &mut data, self.now).unwrap();
        let end = model.len().min((at + len) as usize);
        let expected = model.get(at as usize..end).unwrap_or_default();
        assert_eq!(read, expected.len(), "the length read from {at}");
        let data = &data[..read];
        if let Some(first) = (0..read).find(|&i| data[i] != expected[i]) {
            let wrong = (0..read).filter(|&i| data[i] != expected[i]).count();
            panic!(
                "file {n}: byte {} is {} and not {}; {wrong} bytes are wrong",
                at as usize + first,
                data[first],
                expected[first]
            );
        }
    }

    fn attr(&self, n: usize) -> Attr {
        let attr = self.fs.attr(self.inos[n]).unwrap();
        assert_eq!(attr.size, self.model[n].len() as u64, "the size of file {n}");
        assert!(attr.sectors < 8 * BLOCKS, "{} sectors", attr.sectors);
        attr
    }

    fn fill(&mut self, n: usize, at: u64, len: u64, byte: u8) {
        let end = (at + len) as usize;
        let model = &mut self.model[n];
        model.resize(model.len().max(end), 0);
        // The blocks differ, so that moved data is noticed.
        for (index, to) in model[at as usize..end].iter_mut().enumerate() {
            *to = byte ^ (index / 512) as u8;
        }
        let written = self.fs.write(&root(), self.inos[n], at, &model[at as usize..end], self.now);
        assert_eq!(written, Ok(len as usize));
    }

    fn step(&mut self, step: Step) {
        self.now.seconds += 1;
        let now = self.now;
        match step {
            Step::Write { file, at, len, byte } => self.fill(file, at, len, byte),
            Step::WriteApart { file, at, pages, byte } => {
                for page in 0..pages {
                    self.fill(file, at + page * 2 * PAGE, 700, byte);
                }
            }
            Step::Read { file, at, len } => self.read(file, at, len),
            Step::Truncate { file, size } => {
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                let attr = self.fs.set_attr(&root(), self.inos[file], &set, now).unwrap();
                assert_eq!(attr.size, size);
                self.model[file].resize(size as usize, 0);
            }
            Step::Fallocate { file, how, at, len } => self.fallocate(file, how, at, len),
            Step::Seek { file, at } => self.seek(file, at),
            Step::Fsync { file, data_only } => {
                self.fs.fsync(self.inos[file], data_only, now).unwrap();
                self.synced(file);
            }
            Step::Barrier { file } => self.fs.barrier(self.inos[file], false, now).unwrap(),
            Step::Sync => {
                self.fs.sync(now).unwrap();
                (0..FILES).for_each(|n| self.synced(n));
            }
            Step::Tick => {
                self.now.seconds += 10;
                self.fs.tick(self.now).unwrap();
            }
            Step::Forget { file } => {
                self.fs.forget(self.inos[file], 1);
                self.now.seconds += 10;
                self.fs.tick(self.now).unwrap();
                self.inos[file] = self.fs.lookup(&root(), Ino::ROOT, &name(file)).unwrap().ino;
            }
            Step::Renew { file: n, open } => {
                if !open {
                    self.fs.forget(self.inos[n], 1);
                }
                self.fs.unlink(&root(), Ino::ROOT, &name(n), now).unwrap();
                if open {
                    self.fill(n, 5000, 5000, 77);
                    self.compare(n);
                    self.fs.forget(self.inos[n], 1);
                }
                self.model[n].clear();
                // After a crash now, the file may be missing.
                self.since = None;
                let made = self.fs.create(&root(), Ino::ROOT, &name(n), &file(0o644), now);
                self.inos[n] = made.unwrap().ino;
            }
            Step::Remount => {
                self.fs.unmount(now).unwrap();
                self.mount(self.memory.image());
                self.counts.remounts += 1;
            }
            Step::Crash { each, seed } => {
                if each {
                    let all = self.inos;
                    for (n, ino) in all.into_iter().enumerate() {
                        self.fs.fsync(ino, (seed >> n) % 2 == 0, now).unwrap();
                    }
                } else {
                    self.fs.sync(now).unwrap();
                }
                let mut random = Random(seed);
                let image = self.memory.crash(&mut |n| random.below(n));
                self.mount(image);
                self.counts.crashes += 1;
            }
            Step::Watch => {
                self.fs.sync(now).unwrap();
                self.since = Some(std::array::from_fn(|n| vec![self.model[n].clone()]));
            }
            Step::Cut { during, groups, seed } => self.cut(during, groups, seed),
        }
        self.counts.steps += 1;
        for n in 0..FILES {
            self.attr(n);
        }
        if let Some(since) = &mut self.since {
            for (contents, now) in since.iter_mut().zip(&self.model) {
                if contents.last() != Some(now) {
                    contents.push(now.clone());
                }
            }
            if since.iter().map(Vec::len).sum::<usize>() > WATCHED_MAX {
                self.since = None;
            }
        }
    }

    /// File `n` has its current content after a crash.
    fn synced(&mut self, n: usize) {
        if let Some(since) = &mut self.since {
            since[n] = vec![self.model[n].clone()];
        }
    }

    /// A crash in a call or behind it. Without a watch, all is synced before.
    fn cut(&mut self, during: Call, groups: Option<u64>, seed: u64) {
        if self.since.is_none() {
            self.step(Step::Watch);
            self.counts.steps -= 1;
        }
        let mut random = Random(seed);
        if let Some(groups) = groups {
            self.memory.fail_after(groups);
        } else {
            self.memory.record_cuts(1, random.below(u64::MAX));
        }
        let done = match during {
            Call::Fsync { file } => self.fs.fsync(self.inos[file], false, self.now),
            Call::Sync => self.fs.sync(self.now),
            Call::Tick => {
                self.now.seconds += 10;
                self.fs.tick(self.now).map(drop)
            }
        };
        let image = match self.memory.take_cuts().pop() {
            Some(in_the_call) => in_the_call,
            None => {
                match (during, &done) {
                    (Call::Fsync { file }, Ok(())) => self.synced(file),
                    (Call::Sync, Ok(())) => (0..FILES).for_each(|n| self.synced(n)),
                    _ => {}
                }
                self.memory.crash(&mut |n| random.below(n))
            }
        };
        assert!(done.is_ok() || groups.is_some(), "{done:?}");
        self.counts.cuts += 1;
        self.counts.failed += u64::from(done.is_err());
        let since = self.since.take().unwrap();
        self.mount_unjudged(image);
        for (n, contents) in since.into_iter().enumerate() {
            self.model[n] = self.find(n, &contents);
        }
    }

    /// The content of a file after a crash: its size, and each of its blocks, are of one of
    /// `contents`. If it is one only, the file has it.
    fn find(&self, n: usize, contents: &[Vec<u8>]) -> Vec<u8> {
        let size = self.fs.attr(self.inos[n]).unwrap().size as usize;
        let sizes: Vec<_> = contents.iter().map(Vec::len).collect();
        // A write may be there in part.
        let is_between = sizes.windows(2).any(|pair| (pair[0]..=pair[1]).contains(&size));
        let is_known = is_between || sizes.contains(&size);
        assert!(is_known, "file {n} has {size} bytes, and not one of {sizes:?}");
        let mut data = vec![0xee; size];
        assert_eq!(self.fs.read(self.inos[n], 0, &mut data, self.now), Ok(size));
        for (index, block) in data.chunks(PAGE as usize).enumerate() {
            let at = index * PAGE as usize;
            let is_of = |content: &Vec<u8>| {
                let end = content.len().min(at + block.len());
                let part = content.get(at..end).unwrap_or_default();
                // Behind the end of a content are zeroes.
                block[..part.len()] == *part && block[part.len()..].iter().all(|&byte| byte == 0)
            };
            let is_known = contents.iter().any(is_of);
            assert!(is_known, "block {index} of file {n} has a content that it never had");
        }
        data
    }

    fn fallocate(&mut self, n: usize, how: i32, at: u64, len: u64) {
        let done = self.fs.fallocate(self.inos[n], how, at, len, self.now);
        let model = &mut self.model[n];
        let size = model.len();
        let (from, end) = (at as usize, (at + len) as usize);
        let is_aligned = at.is_multiple_of(PAGE) && len.is_multiple_of(PAGE);
        let keeps = how & mode::KEEP_SIZE != 0;
        match how & !mode::KEEP_SIZE {
            0 => {}
            mode::PUNCH_HOLE | mode::ZERO_RANGE => {
                model[from.min(size)..end.min(size)].fill(0);
            }
            mode::COLLAPSE_RANGE => {
                if !is_aligned || end >= size {
                    assert_eq!(done, Err(FsError::Invalid));
                    return;
                }
                model.drain(from..end);
            }
            mode::INSERT_RANGE => {
                if !is_aligned || from >= size {
                    assert_eq!(done, Err(FsError::Invalid));
                    return;
                }
                model.splice(from..from, std::iter::repeat_n(0, len as usize));
            }
            other => unreachable!("mode {other}"),
        }
        if !keeps && matches!(how, 0 | mode::ZERO_RANGE) {
            model.resize(size.max(end), 0);
        }
        assert_eq!(done, Ok(()));
    }

    fn seek(&self, n: usize, at: u64) {
        let model = &self.model[n];
        let size = model.len() as u64;
        let seek = |at, to| self.fs.seek(self.inos[n], at, to);
        let is_zero =
            |from: u64, to: u64| model[from as usize..to as usize].iter().all(|b| *b == 0);
        if at >= size {
            assert_eq!(seek(at, SeekTo::Data), Err(FsError::NoDataOrHole));
            assert_eq!(seek(at, SeekTo::Hole), Err(FsError::NoDataOrHole));
            return;
        }
        match seek(at, SeekTo::Data) {
            Ok(data) => {
                assert!(at <= data && data < size && is_zero(at, data), "data at {data}");
            }
            Err(error) => {
                assert_eq!(error, FsError::NoDataOrHole);
                assert!(is_zero(at, size), "no data from {at} on");
            }
        }
        let hole = seek(at, SeekTo::Hole).unwrap();
        assert!(at <= hole && hole <= size, "a hole at {hole}");
        if hole < size {
            let next = seek(hole, SeekTo::Data).unwrap_or(size);
            assert!(next > hole && is_zero(hole, next), "a hole from {hole} to {next}");
        }
    }

    fn end(self) -> Counts {
        for n in 0..FILES {
            self.compare(n);
        }
        self.fs.sync(self.now).unwrap();
        let sectors: Vec<u64> = (0..FILES).map(|n| self.attr(n).sectors).collect();
        self.fs.unmount(self.now).unwrap();
        let image = self.memory.image();
        check_clean(&image, self.memory.blocks());
        let mut again = Self { memory: self.memory, ..self };
        again.mount(image);
        for (n, before) in sectors.into_iter().enumerate() {
            assert_eq!(again.attr(n).sectors, before, "the sectors of file {n}");
        }
        again.counts
    }
}

/// A failed run: the number of operations that had begun, and the text of the panic.
#[derive(Debug)]
struct Failed {
    begun: usize,
    text: String,
}

/// Runs operations.
fn run(image: &Image, mount: &MountOptions, steps: &[Step]) -> Result<Counts, Failed> {
    let mut begun = 0;
    catch_unwind(AssertUnwindSafe(|| {
        let mut test = Test::new(image, mount);
        for step in steps {
            begun += 1;
            test.step(*step);
        }
        test.end()
    }))
    .map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Failed { begun, text: text.unwrap_or_default() }
    })
}

/// A shorter list of operations that fails, too.
fn shorten(image: &Image, mount: &MountOptions, mut steps: Vec<Step>) -> Vec<Step> {
    let mut part = steps.len() / 2;
    let mut tries = 0;
    while part > 0 && tries < 600 {
        let mut from = 0;
        while from < steps.len() {
            let mut fewer = steps.clone();
            fewer.drain(from..steps.len().min(from + part));
            tries += 1;
            if let Err(failed) = run(image, mount, &fewer) {
                fewer.truncate(failed.begun);
                steps = fewer;
            } else {
                from += part;
            }
        }
        part = part.min(steps.len()) / 2;
    }
    steps
}

pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn run_seeds(image: &Image, mount: &MountOptions, seeds: u64, count: usize) {
    let first = number("RIOFS_SEED", 1);
    let seeds = number("RIOFS_SEEDS", seeds);
    let mut all = Counts::default();
    for seed in first..first + seeds {
        let mut steps = steps(seed, number("RIOFS_STEPS", count as u64) as usize);
        match run(image, mount, &steps) {
            Ok(counts) => all += counts,
            Err(failed) => {
                println!("{:?}: seed {seed} fails: {failed:?}", mount.mode);
                steps.truncate(failed.begun);
                let short = shorten(image, mount, steps);
                let again = run(image, mount, &short).map(|_| ());
                panic!("seed {seed}: {}\n{short:?}\nfails with: {again:?}", failed.text);
            }
        }
        let done = seed - first + 1;
        if done.is_multiple_of(50) || done == seeds {
            println!("{:?}: {done} seeds from {first} on: {all:?}", mount.mode);
        }
    }
}

/// Runs operations in mode `rio`.
fn check(steps: &[Step]) {
    run(&image_of(BLOCKS, &[]), &options(), steps).unwrap();
}

#[test]
fn a_truncate_is_in_the_record_of_the_next_fsync() {
    let steps = [
        Step::Write { file: 2, at: 3115, len: 217_253, byte: 15 },
        Step::Sync,
        Step::Truncate { file: 2, size: 0 },
        Step::Crash { each: true, seed: 3 },
    ];
    check(&steps);
}

#[test]
fn a_recovery_allocates_no_block_of_a_later_record() {
    // The record of file 1 splits the root of its extent tree. The new node must not get a block of
    // the next extent.
    let steps = [
        Step::Write { file: 1, at: 1_847_296, len: 7464, byte: 156 },
        Step::Fallocate { file: 1, how: mode::ZERO_RANGE, at: 1_814_528, len: 4096 },
        Step::Write { file: 1, at: 1_335_296, len: 2675, byte: 101 },
        Step::Write { file: 1, at: 868_911, len: 5859, byte: 41 },
        Step::Sync,
        Step::Write { file: 1, at: 819_200, len: 574_165, byte: 20 },
        Step::Truncate { file: 1, size: 1_105_920 },
        Step::Crash { each: true, seed: 182 },
    ];
    check(&steps);
}

#[test]
fn a_file_keeps_its_size_if_its_last_pages_are_punched_before_they_are_written() {
    let how = mode::PUNCH_HOLE | mode::KEEP_SIZE;
    let steps = [
        Step::Write { file: 1, at: 851, len: 28_672, byte: 93 },
        Step::Fallocate { file: 1, how, at: 6107, len: 53_248 },
        Step::Remount,
    ];
    check(&steps);
}

#[test]
fn a_file_with_a_barrier_may_be_deleted() {
    let steps = [
        Step::Barrier { file: 1 },
        Step::Barrier { file: 2 },
        Step::Renew { file: 2, open: false },
        Step::Sync,
    ];
    check(&steps);
}

#[test]
fn files_have_the_content_of_their_models() {
    run_seeds(&image_of(BLOCKS, &[]), &options(), 4, 2000);
}

#[test]
fn files_have_the_content_of_their_models_in_mode_ext4() {
    let mut options = options();
    options.mode = JournalMode::Ext4;
    // Most writes begin a write-back.
    options.dirty_pages_max = 3;
    run_seeds(&image_of(BLOCKS, &["-O", "^64bit,^metadata_csum"]), &options, 2, 1500);
}
