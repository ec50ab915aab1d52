//! Random overwrites with `fsync`, as FIO makes them: the latency of `fsync` in the OPIMQ paper.

use std::io;

use super::barrier_files::{PAGE_BYTES, preallocate, write_pages};
use super::{BarrierFiles, FsLoad, Guarantee, Numbers};
use crate::harness::{self, SideCpu, Worker};
use crate::latency::Latencies;
use crate::sample::Sample;

/// The size of the file of a thread.
const FILE_BYTES: usize = 8 << 20;

/// Each thread overwrites a page of a file of its own, and calls `fsync`. An operation is both calls.
///
/// # Errors
/// The file system fails.
pub fn overwrite_fsync(
    files: &impl BarrierFiles,
    load: &FsLoad,
    guarantee: Guarantee,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    let work = |thread: u32, worker: &Worker<'_>| -> io::Result<Latencies> {
        let file = preallocate(files, &format!("overwrite-{thread}"), FILE_BYTES)?;
        let mut numbers = Numbers::new(1 + u64::from(thread));
        worker.repeat(
            || Ok(()),
            || {
                let page = numbers.below((FILE_BYTES / PAGE_BYTES) as u64);
                write_pages(files, &file, page * PAGE_BYTES as u64, PAGE_BYTES)?;
                guarantee.end(files, &file, false)?;
                Ok(PAGE_BYTES as u64)
            },
        )
    };
    harness::run(load.window, load.threads, cpu, work)
}
