//! The load of a mail server: Filebench's `varmail`, with its usual parameters.
//!
//! A directory has places for 1000 files, and 800 of them exist at the beginning. Their sizes have a
//! gamma distribution with a mean of 16 KiB. An operation is one pass of Filebench's list of 13
//! calls:
//!
//! 1. remove a file;
//! 2. make a new one, append, `fsync`, close;
//! 3. open a file, read it, append, `fsync`, close;
//! 4. open a file, read it, close.
//!
//! Filebench draws the size of an append evenly from 1 byte to 16 KiB (`appendfilerand`). It counts
//! each of the 13 calls as an operation.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{BarrierFiles, Files, FsLoad, Guarantee, Numbers};
use crate::harness::{self, SideCpu, Worker};
use crate::latency::Latencies;
use crate::sample::Sample;

/// Places for files, and how many files exist at the beginning.
const PLACES: u32 = 1000;
const FILES_AT_FIRST: u32 = 800;
/// The same of a container, so that those of all containers fit on the drive.
const PLACES_EACH: u32 = 50;
const FILES_AT_FIRST_EACH: u32 = 40;
/// The mean size of a file at the beginning, bytes.
const FILE_BYTES_MEAN: f64 = 16_384.0;
/// The largest append.
const APPEND_BYTES_MAX: u64 = 16 << 10;

/// The files that exist and are used by no thread, and those that do not exist.
#[derive(Debug)]
struct Places {
    existing: Vec<u32>,
    missing: Vec<u32>,
}

/// Which files a thread takes.
#[derive(Clone, Copy, Debug)]
enum Which {
    Existing,
    Missing,
}

#[derive(Debug)]
struct Mailbox(Mutex<Places>);

impl Mailbox {
    /// Makes the files of the beginning.
    fn fill(files: &impl Files, places: u32, at_first: u32) -> io::Result<Self> {
        let mut numbers = Numbers::new(0);
        let zeroes = vec![0; 1 << 20];
        for file in 0..at_first {
            let open = files.create(&name(file))?;
            files.append(&open, &zeroes[..file_bytes(&mut numbers).min(zeroes.len())])?;
        }
        let (existing, missing) = ((0..at_first).collect(), (at_first..places).collect());
        Ok(Self(Mutex::new(Places { existing, missing })))
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a file, so that no other thread uses it.
    fn take(&self, which: Which, numbers: &mut Numbers) -> io::Result<u32> {
        let places = &mut *self.lock();
        let from = match which {
            Which::Existing => &mut places.existing,
            Which::Missing => &mut places.missing,
        };
        if from.is_empty() {
            // Each thread has one file at a time, and there are fewer threads than files.
            return Err(io::Error::other("more threads than files"));
        }
        let at = numbers.below(from.len() as u64) as usize;
        Ok(from.swap_remove(at))
    }

    fn put(&self, which: Which, file: u32) {
        let places = &mut *self.lock();
        match which {
            Which::Existing => places.existing.push(file),
            Which::Missing => places.missing.push(file),
        }
    }
}

/// A size with a gamma distribution of shape 1.5: the sum of an exponential value, and half of the
/// square of a normal value.
fn file_bytes(numbers: &mut Numbers) -> usize {
    let exponential = -numbers.share().ln();
    let normal =
        (-2.0 * numbers.share().ln()).sqrt() * (std::f64::consts::TAU * numbers.share()).cos();
    let sum = exponential + normal * normal / 2.0;
    (sum * FILE_BYTES_MEAN / 1.5) as usize
}

fn name(file: u32) -> String {
    format!("mail-{file:04}")
}

/// Runs the load. An operation is one pass of the 13 calls, with two `fsync`.
///
/// # Errors
/// The file system fails, or there are more than some hundred threads.
pub fn varmail(files: &impl Files, load: &FsLoad, cpu: impl Fn() -> SideCpu) -> io::Result<Sample> {
    let mailbox = Mailbox::fill(files, PLACES, FILES_AT_FIRST)?;
    run(load, cpu, |_| (files, &mailbox), |file| files.sync(file, false))
}

/// As [`varmail`], with the call of a guarantee.
///
/// # Errors
/// As [`varmail`].
pub fn varmail_with(
    files: &impl BarrierFiles,
    load: &FsLoad,
    guarantee: Guarantee,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    let mailbox = Mailbox::fill(files, PLACES, FILES_AT_FIRST)?;
    run(load, cpu, |_| (files, &mailbox), |file| guarantee.end(files, file, false))
}

/// As [`varmail`], with a directory of its own for each thread, as in containers. It has 50 places and
/// 40 files at the beginning.
///
/// # Errors
/// The file system fails.
pub fn varmail_each(
    files: &impl BarrierFiles,
    load: &FsLoad,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    let container = |thread| -> io::Result<_> {
        let files = files.directory(&format!("container-{thread}"))?;
        let mailbox = Mailbox::fill(&files, PLACES_EACH, FILES_AT_FIRST_EACH)?;
        Ok((files, mailbox))
    };
    let containers = (0..load.threads).map(container).collect::<io::Result<Vec<_>>>()?;
    let of_thread = |thread: u32| {
        let (files, mailbox) = &containers[thread as usize];
        (files, mailbox)
    };
    run(load, cpu, of_thread, |file| files.sync(file, false))
}

fn run<'a, F: Files + 'a>(
    load: &FsLoad,
    cpu: impl Fn() -> SideCpu,
    of_thread: impl Fn(u32) -> (&'a F, &'a Mailbox) + Sync,
    sync: impl Fn(&F::File) -> io::Result<()> + Sync,
) -> io::Result<Sample> {
    let work = |thread: u32, worker: &Worker<'_>| -> io::Result<Latencies> {
        let (files, mailbox) = of_thread(thread);
        let mut numbers = Numbers::new(1 + u64::from(thread));
        let mut buf = Vec::new();
        let data = vec![0x5a; APPEND_BYTES_MAX as usize];
        worker.repeat(|| Ok(()), || pass(files, mailbox, &mut numbers, &data, &mut buf, &sync))
    };
    harness::run(load.window, load.threads, cpu, work)
}

/// Makes the 13 calls. Returns the bytes that were appended.
fn pass<F: Files>(
    files: &F,
    mailbox: &Mailbox,
    numbers: &mut Numbers,
    data: &[u8],
    buf: &mut Vec<u8>,
    sync: &impl Fn(&F::File) -> io::Result<()>,
) -> io::Result<u64> {
    let removed = mailbox.take(Which::Existing, numbers)?;
    files.remove(&name(removed))?;
    mailbox.put(Which::Missing, removed);

    let made = mailbox.take(Which::Missing, numbers)?;
    let file = files.create(&name(made))?;
    let first = 1 + numbers.below(data.len() as u64) as usize;
    files.append(&file, &data[..first])?;
    sync(&file)?;
    drop(file);
    mailbox.put(Which::Existing, made);

    let changed = mailbox.take(Which::Existing, numbers)?;
    let file = files.open(&name(changed))?;
    files.read_all(&file, buf)?;
    let second = 1 + numbers.below(data.len() as u64) as usize;
    files.append(&file, &data[..second])?;
    sync(&file)?;
    drop(file);
    mailbox.put(Which::Existing, changed);

    let read = mailbox.take(Which::Existing, numbers)?;
    let file = files.open(&name(read))?;
    files.read_all(&file, buf)?;
    drop(file);
    mailbox.put(Which::Existing, read);
    Ok((first + second) as u64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fs_load::PathFiles;
    use crate::harness::Window;

    #[test]
    fn sizes_have_the_mean_of_filebench() {
        let mut numbers = Numbers::new(7);
        let sizes: Vec<usize> = (0..20_000).map(|_| file_bytes(&mut numbers)).collect();
        let mean = sizes.iter().sum::<usize>() as f64 / sizes.len() as f64;
        assert!((mean - FILE_BYTES_MEAN).abs() < 300.0, "{mean}");
        // The median of this distribution is 0.79 of the mean.
        let below = sizes.iter().filter(|size| **size < 12_920).count();
        assert!((9_700..10_300).contains(&below), "{below}");
    }

    #[test]
    fn each_place_has_one_file_or_none_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let files = PathFiles::new(dir.path()).unwrap();
        let window = Window { warm_up: Duration::ZERO, duration: Duration::from_millis(20) };
        let load = FsLoad { threads: 3, window };
        let sample = varmail(&files, &load, SideCpu::default).unwrap();
        assert!(sample.writes >= 2 && sample.bytes >= 2 * sample.writes, "{sample:?}");
        let found = std::fs::read_dir(dir.path()).unwrap().count();
        // Each pass removes one and makes one.
        assert_eq!(found, FILES_AT_FIRST as usize);
    }

    #[test]
    fn a_file_is_taken_by_one_thread_at_a_time() {
        let mailbox = Mailbox(Mutex::new(Places { existing: vec![4, 9], missing: vec![] }));
        let mut numbers = Numbers::new(1);
        let mut taken = [0; 2].map(|_| mailbox.take(Which::Existing, &mut numbers).unwrap());
        taken.sort_unstable();
        assert_eq!(taken, [4, 9]);
        mailbox.take(Which::Existing, &mut numbers).unwrap_err();
        mailbox.put(Which::Existing, 9);
        assert_eq!(mailbox.take(Which::Existing, &mut numbers).unwrap(), 9);
    }
}
