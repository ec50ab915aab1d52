//! Appends with `fsync`: figure 13 of the paper.

use std::io;

use super::{BarrierFiles, Files, FsLoad, Guarantee};
use crate::harness::{self, SideCpu, Worker};
use crate::latency::Latencies;
use crate::sample::Sample;

/// The bytes of an append.
pub const APPEND_BYTES: usize = 4096;
/// The size at which a file is cut to nothing, so that the drive does not fill up.
const FILE_BYTES_MAX: usize = 32 << 20;

/// Each thread appends 4 KiB to a file of its own, and waits for its `fsync`. An operation is both
/// calls.
///
/// # Errors
/// The file system fails.
pub fn append_fsync(
    files: &impl Files,
    load: &FsLoad,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    append_with(files, load, cpu, |file| files.sync(file, false))
}

/// As [`append_fsync`], with the call of a guarantee.
///
/// # Errors
/// The file system fails.
pub fn append(
    files: &impl BarrierFiles,
    load: &FsLoad,
    guarantee: Guarantee,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    append_with(files, load, cpu, |file| guarantee.end(files, file, false))
}

fn append_with<F: Files>(
    files: &F,
    load: &FsLoad,
    cpu: impl Fn() -> SideCpu,
    sync: impl Fn(&F::File) -> io::Result<()> + Sync,
) -> io::Result<Sample> {
    let work = |thread: u32, worker: &Worker<'_>| -> io::Result<Latencies> {
        let file = files.create(&format!("append-{thread}"))?;
        let data = [0x5a; APPEND_BYTES];
        let mut size = 0;
        let cut = || {
            if size >= FILE_BYTES_MAX {
                files.cut(&file)?;
                size = 0;
            }
            size += APPEND_BYTES;
            Ok(())
        };
        worker.repeat(cut, || {
            files.append(&file, &data)?;
            sync(&file)?;
            Ok(APPEND_BYTES as u64)
        })
    };
    harness::run(load.window, load.threads, cpu, work)
}
