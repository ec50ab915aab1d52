//! The load that RocksDB puts on a file system in `fillsync` of `db_bench`: 16-byte keys and 1-KiB
//! values, each durable when its put returns.
//!
//! - Puts go to a write-ahead log, with one append and one `fdatasync`. Threads that come meanwhile
//!   wait, and share the next ones: one of them, the *leader*, writes for all.
//! - When a memtable is full, the log ends and the next one begins. A thread of the background writes
//!   the memtable into a table file, in steps of 1 MiB, and makes it durable, then its name, then an
//!   entry in the manifest. Then the old log is removed.
//!
//! A memtable has 4 MiB here, so that a short run sees the flushes of some. RocksDB's own has 64 MiB.
//! Compactions and the CPU time of RocksDB are missing. `db_bench` itself has them.

use std::io;
use std::sync::mpsc;
use std::thread;

use super::group_commit::GroupCommit;
use super::{Files, FsLoad};
use crate::harness::{self, SideCpu, Worker};
use crate::latency::Latencies;
use crate::sample::Sample;

/// The bytes of a put in the log: key, value, and the headers of the batch and of the record.
pub const RECORD_BYTES: usize = 16 + 1024 + 23;
/// The bytes of a memtable.
const MEMTABLE_BYTES: usize = 4 << 20;
/// The bytes of a step in which a table file is written.
const TABLE_STEP_BYTES: usize = 1 << 20;
/// The bytes of an entry in the manifest.
const MANIFEST_ENTRY_BYTES: usize = 150;
/// The table files that are kept: compactions would remove the older ones.
const TABLES_MAX: u64 = 32;
/// The memtables that wait for their flush. Puts wait for the oldest one then.
const FLUSHES_MAX: usize = 1;

/// The log of the present memtable.
struct Log<F> {
    file: F,
    number: u64,
    /// The bytes in the log.
    bytes: usize,
}

/// A full memtable, with the number of its log.
struct Memtable {
    number: u64,
    bytes: usize,
}

fn log_name(number: u64) -> String {
    format!("{number:06}.log")
}

fn table_name(number: u64) -> String {
    format!("{number:06}.sst")
}

impl<F> Log<F> {
    /// Appends `count` records, and makes them durable. If the memtable is full then, the next log
    /// begins.
    fn write(
        &mut self,
        files: &impl Files<File = F>,
        records: &[u8],
        count: usize,
        full: &mpsc::SyncSender<Memtable>,
    ) -> io::Result<()> {
        let bytes = count * RECORD_BYTES;
        files.append(&self.file, &records[..bytes])?;
        files.sync(&self.file, true)?;
        self.bytes += bytes;
        if self.bytes >= MEMTABLE_BYTES {
            let old = Memtable { number: self.number, bytes: self.bytes };
            let file = switch(files, old, full)?;
            *self = Self { file, number: self.number + 1, bytes: 0 };
        }
        Ok(())
    }
}

/// Begins the next log, and passes the full memtable on.
fn switch<F>(
    files: &impl Files<File = F>,
    old: Memtable,
    full: &mpsc::SyncSender<Memtable>,
) -> io::Result<F> {
    let next = files.create(&log_name(old.number + 1))?;
    files.sync_directory()?;
    // The receiver ends after an error only, which is reported there.
    let _ = full.send(old);
    Ok(next)
}

/// Writes full memtables into table files.
fn flush_all(files: &impl Files, full: &mpsc::Receiver<Memtable>) -> io::Result<()> {
    let manifest = files.create("MANIFEST")?;
    let step = vec![0x6b; TABLE_STEP_BYTES];
    while let Ok(Memtable { number, bytes }) = full.recv() {
        let table = files.create(&table_name(number))?;
        let mut left = bytes;
        while left > 0 {
            let now = left.min(TABLE_STEP_BYTES);
            files.append(&table, &step[..now])?;
            left -= now;
        }
        files.sync(&table, false)?;
        drop(table);
        files.sync_directory()?;
        files.append(&manifest, &step[..MANIFEST_ENTRY_BYTES])?;
        files.sync(&manifest, false)?;
        files.remove(&log_name(number))?;
        if let Some(old) = number.checked_sub(TABLES_MAX) {
            files.remove(&table_name(old))?;
        }
    }
    Ok(())
}

/// Runs the load. An operation is one put of one thread.
///
/// # Errors
/// The file system fails.
pub fn fillsync(
    files: &impl Files,
    load: &FsLoad,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    let log = Log { file: files.create(&log_name(0))?, number: 0, bytes: 0 };
    let log = GroupCommit::new(log);
    let records = vec![0x5a; load.threads as usize * RECORD_BYTES];
    let (full, receiver) = mpsc::sync_channel(FLUSHES_MAX);
    thread::scope(|scope| {
        let flusher = thread::Builder::new()
            .name("flusher".to_owned())
            .spawn_scoped(scope, || flush_all(files, &{ receiver }))?;
        let work = |_, worker: &Worker<'_>| -> io::Result<Latencies> {
            let full = full.clone();
            worker.repeat(
                || Ok(()),
                || {
                    log.commit(|log, count| log.write(files, &records, count, &full))?;
                    Ok(RECORD_BYTES as u64)
                },
            )
        };
        let sample = harness::run(load.window, load.threads, cpu, work);
        drop(full);
        let flushed = flusher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // The first failure is the cause.
        sample.and_then(|sample| flushed.map(|()| sample))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::fs_load::PathFiles;
    use crate::harness::Window;

    /// Counts calls of `fdatasync`, and fails from a number of them on.
    struct Counting {
        files: PathFiles,
        syncs: AtomicUsize,
        fails_from: usize,
    }

    impl Files for Counting {
        type File = std::fs::File;

        fn create(&self, name: &str) -> io::Result<Self::File> {
            self.files.create(name)
        }

        fn open(&self, name: &str) -> io::Result<Self::File> {
            self.files.open(name)
        }

        fn remove(&self, name: &str) -> io::Result<()> {
            self.files.remove(name)
        }

        fn append(&self, file: &Self::File, data: &[u8]) -> io::Result<()> {
            self.files.append(file, data)
        }

        fn read_all(&self, file: &Self::File, into: &mut Vec<u8>) -> io::Result<usize> {
            self.files.read_all(file, into)
        }

        fn cut(&self, file: &Self::File) -> io::Result<()> {
            self.files.cut(file)
        }

        fn sync(&self, _: &Self::File, data_only: bool) -> io::Result<()> {
            let before = self.syncs.fetch_add(usize::from(data_only), Ordering::Relaxed);
            if before >= self.fails_from { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }

        fn sync_directory(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn run(
        threads: u32,
        ms: u64,
        fails_from: usize,
    ) -> (tempfile::TempDir, io::Result<Sample>, usize) {
        let dir = tempfile::tempdir().unwrap();
        let files = PathFiles::new(dir.path()).unwrap();
        let files = Counting { files, syncs: AtomicUsize::new(0), fails_from };
        let window = Window { warm_up: Duration::ZERO, duration: Duration::from_millis(ms) };
        let result = fillsync(&files, &FsLoad { threads, window }, SideCpu::default);
        (dir, result, files.syncs.into_inner())
    }

    #[test]
    fn threads_share_the_sync_of_the_log_and_lose_no_record() {
        let (dir, sample, syncs) = run(4, 30, usize::MAX);
        let sample = sample.unwrap();
        assert!(sample.writes > 0);
        // All puts, also those outside of the window, are in the logs and in the tables.
        let files: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap()).collect();
        let is_counted = |name: &str| name.ends_with(".log") || name.ends_with(".sst");
        let bytes: u64 = files
            .iter()
            .filter(|file| is_counted(&file.file_name().to_string_lossy()))
            .map(|file| file.metadata().unwrap().len())
            .sum();
        assert_eq!(bytes % RECORD_BYTES as u64, 0);
        let logs =
            files.iter().filter(|f| f.file_name().to_string_lossy().ends_with(".log")).count();
        assert_eq!(logs, 1, "the logs of flushed memtables are removed");
        let records = bytes / RECORD_BYTES as u64;
        assert!(records >= sample.writes && syncs as u64 <= records, "{records} {syncs}");
    }

    #[test]
    fn a_failure_ends_all_threads() {
        let (_dir, result, _) = run(3, 60_000, 5);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
