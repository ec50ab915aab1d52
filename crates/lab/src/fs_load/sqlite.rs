//! The writes of SQLite for single inserts: figure 14 of the BarrierFS paper.
//!
//! Each transaction inserts a row into the last page of a table. These are the writes and calls of
//! SQLite 3.40 with `synchronous=FULL`, as a trace of its system calls shows them:
//!
//! | `PERSIST` | call |
//! |---|---|
//! | journal: header and the old content of two pages | `fdatasync`, order |
//! | journal: the number of pages in the header | `fdatasync`, order |
//! | database: the first page and the page with the row | `fdatasync`, order |
//! | journal: a header of zeroes, which ends the transaction | `fdatasync`, durable |
//!
//! | `WAL` | call |
//! |---|---|
//! | log: a frame with the new content of the page | `fdatasync`, durable |
//! | after 1000 frames: | `fdatasync` of the log, order |
//! | database: all pages that the log has | `fdatasync`, order |
//!
//! The log has its size from the beginning: SQLite writes it from its first frame on again after each
//! thousand. SQLite also syncs the directory when it opens the journal again. That call finds nothing to write,
//! and is not among the four of the paper. The CPU time of SQLite is missing.

use std::io;

use super::barrier_files::{PAGE_BYTES, preallocate, write_pages};
use super::{BarrierFiles, FsLoad, Guarantee};
use crate::harness::{self, SideCpu, Worker};
use crate::latency::Latencies;
use crate::sample::Sample;

/// The journal of SQLite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SqliteJournal {
    /// A journal of old content, which stays and gets a header of zeroes.
    Persist,
    /// A log of new content.
    Wal,
}

/// The bytes of the journal's header, and of a page in it: number, content, checksum.
const HEADER_BYTES: usize = 512;
const RECORD_BYTES: usize = 4 + PAGE_BYTES + 4;
/// The bytes of the log's header, and of a frame in it.
const WAL_HEADER_BYTES: usize = 32;
const FRAME_BYTES: usize = 24 + PAGE_BYTES;
/// The frames after which SQLite writes the pages home.
const FRAMES_MAX: u64 = 1000;
/// The rows of a page.
const ROWS_OF_PAGE: u64 = 32;
/// The pages of a database at most, so that the drive does not fill up. Then rows go to the first ones
/// again.
const PAGES_MAX: u64 = 8192;

/// One database.
struct Database<'a, F: BarrierFiles> {
    files: &'a F,
    guarantee: Guarantee,
    database: F::File,
    journal: F::File,
    /// The rows that were inserted.
    rows: u64,
    /// The frames in the log.
    frames: u64,
}

impl<'a, F: BarrierFiles> Database<'a, F> {
    fn new(
        files: &'a F,
        number: u32,
        journal: SqliteJournal,
        guarantee: Guarantee,
    ) -> io::Result<Self> {
        let database = files.create(&format!("{number}.db"))?;
        let journal_bytes = match journal {
            SqliteJournal::Persist => HEADER_BYTES + 2 * RECORD_BYTES,
            SqliteJournal::Wal => WAL_HEADER_BYTES + FRAMES_MAX as usize * FRAME_BYTES,
        };
        let journal = preallocate(files, &format!("{number}.db-journal"), journal_bytes)?;
        Ok(Self { files, guarantee, database, journal, rows: 0, frames: 0 })
    }

    /// The page with a row. The first page has the schema.
    const fn page_of(row: u64) -> u64 {
        1 + row / ROWS_OF_PAGE % (PAGES_MAX - 1)
    }

    fn write_page(&self, page: u64) -> io::Result<()> {
        write_pages(self.files, &self.database, page * PAGE_BYTES as u64, PAGE_BYTES)
    }

    fn order(&self, file: &F::File) -> io::Result<()> {
        self.guarantee.between(self.files, file, true)
    }

    fn insert(&mut self, journal: SqliteJournal) -> io::Result<()> {
        match journal {
            SqliteJournal::Persist => self.insert_with_old_pages()?,
            SqliteJournal::Wal => self.insert_into_log()?,
        }
        self.rows += 1;
        Ok(())
    }

    fn insert_with_old_pages(&self) -> io::Result<()> {
        let (files, journal) = (self.files, &self.journal);
        write_pages(files, journal, 0, HEADER_BYTES + 2 * RECORD_BYTES)?;
        self.order(journal)?;
        write_pages(files, journal, 0, HEADER_BYTES)?;
        self.order(journal)?;
        self.write_page(0)?;
        self.write_page(Self::page_of(self.rows))?;
        self.order(&self.database)?;
        write_pages(files, journal, 0, HEADER_BYTES)?;
        self.guarantee.end(files, journal, true)
    }

    fn insert_into_log(&mut self) -> io::Result<()> {
        let at = WAL_HEADER_BYTES as u64 + self.frames * FRAME_BYTES as u64;
        write_pages(self.files, &self.journal, at, FRAME_BYTES)?;
        self.guarantee.end(self.files, &self.journal, true)?;
        self.frames += 1;
        if self.frames == FRAMES_MAX {
            self.checkpoint()?;
        }
        Ok(())
    }

    /// Writes the pages of the log home. The log begins at its first frame again.
    fn checkpoint(&mut self) -> io::Result<()> {
        self.order(&self.journal)?;
        let first = self.rows + 1 - self.frames;
        for page in Self::page_of(first)..=Self::page_of(self.rows) {
            self.write_page(page)?;
        }
        self.order(&self.database)?;
        self.frames = 0;
        Ok(())
    }
}

/// Each thread inserts rows into a database of its own. An operation is one transaction.
///
/// # Errors
/// The file system fails.
pub fn sqlite(
    files: &impl BarrierFiles,
    load: &FsLoad,
    journal: SqliteJournal,
    guarantee: Guarantee,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    let work = |thread: u32, worker: &Worker<'_>| -> io::Result<Latencies> {
        let mut database = Database::new(files, thread, journal, guarantee)?;
        worker.repeat(
            || Ok(()),
            || {
                database.insert(journal)?;
                Ok(PAGE_BYTES as u64)
            },
        )
    };
    harness::run(load.window, load.threads, cpu, work)
}

#[cfg(test)]
mod tests {
    use super::super::recorded_files::{Call, Recorded};
    use super::*;

    fn calls(journal: SqliteJournal, guarantee: Guarantee, rows: u64) -> Vec<Call> {
        let files = Recorded::default();
        let mut database = Database::new(&files, 0, journal, guarantee).unwrap();
        let made = files.calls().len();
        for _ in 0..rows {
            database.insert(journal).unwrap();
        }
        files.calls()[made..].to_vec()
    }

    fn write(name: &str, at: u64, bytes: usize) -> Call {
        Call::Write(name.to_owned(), at, bytes)
    }

    #[test]
    fn a_transaction_has_four_syncs_and_three_of_them_may_be_barriers() {
        let journal = "0.db-journal".to_owned();
        let expected = |between: fn(String) -> Call, end: fn(String) -> Call| {
            vec![
                write(&journal, 0, 12_288),
                between(journal.clone()),
                write(&journal, 0, 4096),
                between(journal.clone()),
                write("0.db", 0, 4096),
                write("0.db", 4096, 4096),
                between("0.db".to_owned()),
                write(&journal, 0, 4096),
                end(journal.clone()),
            ]
        };
        let one = |guarantee| calls(SqliteJournal::Persist, guarantee, 1);
        assert_eq!(one(Guarantee::Durable), expected(Call::Sync, Call::Sync));
        assert_eq!(one(Guarantee::DurableAtEnd), expected(Call::Barrier, Call::Sync));
        assert_eq!(one(Guarantee::Ordered), expected(Call::Barrier, Call::Barrier));
    }

    #[test]
    fn a_log_has_one_sync_for_each_row_and_is_written_home_after_1000_frames() {
        let calls = calls(SqliteJournal::Wal, Guarantee::DurableAtEnd, 1001);
        let count = |is: fn(&&Call) -> bool| calls.iter().filter(is).count();
        assert_eq!(count(|call| matches!(call, Call::Sync(_))), 1001);
        assert_eq!(count(|call| matches!(call, Call::Barrier(_))), 2);
        let home = |call: &&Call| matches!(call, Call::Write(name, ..) if name == "0.db");
        assert_eq!(calls.iter().filter(home).count() as u64, 1000u64.div_ceil(ROWS_OF_PAGE));
        // A frame is in two pages, and the first one is where the log begins again.
        let frames: Vec<&Call> = calls
            .iter()
            .filter(|call| matches!(call, Call::Write(name, ..) if name == "0.db-journal"))
            .collect();
        assert_eq!((frames[0], frames[1000]), (frames[1000], frames[0]));
        assert_eq!(*frames[1], write("0.db-journal", 4096, 8192));
    }
}
