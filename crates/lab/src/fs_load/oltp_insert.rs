//! The writes of MySQL's InnoDB under `oltp_insert` of sysbench.
//!
//! - A transaction adds a record to the redo log, and waits for the `fsync` of the log. Threads that
//!   come meanwhile share the next one: one of them, the *leader*, writes for all (group commit).
//! - After 64 transactions, the thread that has made the last one writes 8 changed pages of 16 KiB: to
//!   the doublewrite area, `fsync`, to their places in the table, `fsync`; and the checkpoint into the
//!   log's header, `fsync`. InnoDB has threads for this, and its users do it, too, when those lag.
//!
//! Log, doublewrite area and table have their size from the beginning, and are overwritten. The binary
//! log is off. The CPU time of MySQL is missing.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::barrier_files::{preallocate, write_pages};
use super::group_commit::GroupCommit;
use super::{BarrierFiles, FsLoad, Guarantee, Numbers};
use crate::harness::{self, SideCpu, Worker};
use crate::latency::Latencies;
use crate::sample::Sample;

/// The bytes of a transaction in the redo log.
const RECORD_BYTES: usize = 600;
/// The unit in which the log is written.
const LOG_BLOCK_BYTES: u64 = 512;
/// The size of the log, and of its header.
const LOG_BYTES: usize = 1 << 20;
const LOG_HEADER_BYTES: u64 = 4096;
/// The transactions after which pages are written.
const TRANSACTIONS_OF_CLEANING: u64 = 64;
/// The pages that are written then, and the size of a page.
const PAGES_OF_CLEANING: u64 = 8;
const PAGE_BYTES: usize = 16 << 10;
/// The pages of the table.
const TABLE_PAGES: u64 = 128;

/// A database with its files.
struct Database<'a, F: BarrierFiles> {
    data: &'a F,
    log_files: &'a F,
    guarantee: Guarantee,
    log: F::File,
    doublewrite: F::File,
    table: F::File,
    /// The bytes that were ever written to the log.
    written: GroupCommit<u64>,
    /// The transactions so far.
    transactions: AtomicU64,
    /// Which pages are written next. One thread writes pages at a time.
    cleaning: Mutex<Numbers>,
}

impl<'a, F: BarrierFiles> Database<'a, F> {
    fn new(data: &'a F, log_files: &'a F, guarantee: Guarantee, seed: u64) -> io::Result<Self> {
        Ok(Self {
            data,
            log_files,
            guarantee,
            log: preallocate(log_files, "ib_logfile0", LOG_BYTES)?,
            doublewrite: preallocate(data, "ibdata1", PAGES_OF_CLEANING as usize * PAGE_BYTES)?,
            table: preallocate(data, "sbtest1.ibd", TABLE_PAGES as usize * PAGE_BYTES)?,
            written: GroupCommit::new(0),
            transactions: AtomicU64::new(0),
            cleaning: Mutex::new(Numbers::new(seed)),
        })
    }

    /// One transaction.
    fn insert(&self) -> io::Result<()> {
        self.commit()?;
        let number = self.transactions.fetch_add(1, Ordering::Relaxed) + 1;
        if number.is_multiple_of(TRANSACTIONS_OF_CLEANING) {
            self.clean()?;
        }
        Ok(())
    }

    /// Adds a record to the log, and returns when the call for it has returned.
    fn commit(&self) -> io::Result<()> {
        self.written.commit(|written, count| {
            let from = *written;
            let bytes = count * RECORD_BYTES;
            *written += bytes as u64;
            self.write_log(from, bytes)
        })
    }

    /// Writes the log's blocks that have these bytes.
    fn write_log(&self, from: u64, bytes: usize) -> io::Result<()> {
        let begin = from / LOG_BLOCK_BYTES * LOG_BLOCK_BYTES;
        let end = (from + bytes as u64).next_multiple_of(LOG_BLOCK_BYTES);
        // The log is a ring.
        let ring = LOG_BYTES as u64 - LOG_HEADER_BYTES;
        let (at, length) = (begin % ring, end - begin);
        let first = length.min(ring - at);
        write_pages(self.log_files, &self.log, LOG_HEADER_BYTES + at, first as usize)?;
        if first < length {
            let rest = (length - first) as usize;
            write_pages(self.log_files, &self.log, LOG_HEADER_BYTES, rest)?;
        }
        self.guarantee.end(self.log_files, &self.log, false)
    }

    /// Writes changed pages, and moves the checkpoint.
    fn clean(&self) -> io::Result<()> {
        let mut numbers = self.cleaning.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = PAGES_OF_CLEANING as usize * PAGE_BYTES;
        write_pages(self.data, &self.doublewrite, 0, bytes)?;
        self.guarantee.between(self.data, &self.doublewrite, false)?;
        for _ in 0..PAGES_OF_CLEANING {
            let page = numbers.below(TABLE_PAGES);
            write_pages(self.data, &self.table, page * PAGE_BYTES as u64, PAGE_BYTES)?;
        }
        self.guarantee.between(self.data, &self.table, false)?;
        write_pages(self.log_files, &self.log, 0, LOG_BLOCK_BYTES as usize)?;
        self.guarantee.between(self.log_files, &self.log, false)
    }
}

/// All threads insert into one database, whose redo log has files of its own. An operation is one
/// transaction.
///
/// # Errors
/// The file system fails.
pub fn oltp_insert<F: BarrierFiles>(
    data: &F,
    log: &F,
    load: &FsLoad,
    guarantee: Guarantee,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    let database = Database::new(data, log, guarantee, 1)?;
    run(load, cpu, |_| &database)
}

/// Each thread inserts into a database of its own in a directory of its own, as in containers.
///
/// # Errors
/// The file system fails.
pub fn oltp_insert_each<F: BarrierFiles>(
    files: &F,
    load: &FsLoad,
    guarantee: Guarantee,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    let directory = |thread: u32| files.directory(&format!("container-{thread}"));
    let directories = (0..load.threads).map(directory).collect::<io::Result<Vec<F>>>()?;
    let seeds = 1..;
    let new = |(files, seed)| Database::new(files, files, guarantee, seed);
    let databases = directories.iter().zip(seeds).map(new).collect::<io::Result<Vec<_>>>()?;
    run(load, cpu, |thread| &databases[thread as usize])
}

fn run<'a, F: BarrierFiles + 'a>(
    load: &FsLoad,
    cpu: impl Fn() -> SideCpu,
    of_thread: impl Fn(u32) -> &'a Database<'a, F> + Sync,
) -> io::Result<Sample> {
    let work = |thread: u32, worker: &Worker<'_>| -> io::Result<Latencies> {
        let database = of_thread(thread);
        worker.repeat(
            || Ok(()),
            || {
                database.insert()?;
                Ok(RECORD_BYTES as u64)
            },
        )
    };
    harness::run(load.window, load.threads, cpu, work)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::recorded_files::{Call, Recorded};
    use super::*;
    use crate::harness::Window;

    fn short(threads: u32, ms: u64) -> FsLoad {
        let window = Window { warm_up: Duration::ZERO, duration: Duration::from_millis(ms) };
        FsLoad { threads, window }
    }

    #[test]
    fn a_transaction_waits_for_the_log_and_the_64th_writes_pages() {
        let (data, log) = (Recorded::default(), Recorded::default());
        let database = Database::new(&data, &log, Guarantee::DurableAtEnd, 1).unwrap();
        let made = (data.calls().len(), log.calls().len());
        for _ in 0..64 {
            database.insert().unwrap();
        }
        let log = &log.calls()[made.1..];
        let name = "ib_logfile0".to_owned();
        assert_eq!(log[..2], [Call::Write(name.clone(), 4096, 4096), Call::Sync(name.clone())]);
        let syncs = log.iter().filter(|call| matches!(call, Call::Sync(_))).count();
        assert_eq!(syncs, 64);
        assert_eq!(log[log.len() - 2..], [Call::Write(name.clone(), 0, 4096), Call::Barrier(name)]);
        let data = &data.calls()[made.0..];
        assert_eq!(data[0], Call::Write("ibdata1".to_owned(), 0, 8 * PAGE_BYTES));
        assert_eq!(data[1], Call::Barrier("ibdata1".to_owned()));
        assert_eq!(data.len(), 1 + 1 + 8 + 1);
        assert_eq!(data[10], Call::Barrier("sbtest1.ibd".to_owned()));
    }

    #[test]
    fn the_log_is_a_ring_within_its_file() {
        let files = Recorded::default();
        let database = Database::new(&files, &files, Guarantee::Ordered, 1).unwrap();
        for _ in 0..2 * LOG_BYTES / RECORD_BYTES {
            database.insert().unwrap();
        }
        for call in files.calls() {
            if let Call::Write(name, at, bytes) = call
                && name == "ib_logfile0"
            {
                assert!(at + bytes as u64 <= LOG_BYTES as u64, "{at} {bytes}");
            }
        }
    }

    #[test]
    fn threads_share_a_database_or_have_one_each() {
        let files = Recorded::default();
        let shared =
            oltp_insert(&files, &files, &short(3, 5), Guarantee::Durable, SideCpu::default);
        assert!(shared.unwrap().writes > 0);
        let files = Recorded::default();
        let load = short(3, 5);
        let each = oltp_insert_each(&files, &load, Guarantee::Durable, SideCpu::default);
        assert!(each.unwrap().writes > 0);
        for thread in 0..3 {
            let log = format!("container-{thread}/ib_logfile0");
            assert!(files.calls().contains(&Call::Create(log)));
        }
    }

    #[test]
    fn a_failure_ends_all_threads() {
        let files = Recorded::failing_after(5);
        let load = short(3, 60_000);
        let result = oltp_insert(&files, &files, &load, Guarantee::Ordered, SideCpu::default);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
