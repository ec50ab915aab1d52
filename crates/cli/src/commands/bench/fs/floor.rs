//! The floor of an `fsync`: two groups of one block each on a stream, as data and record are, and
//! one wait until they are durable. No file system, and no stream that threads share.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use riopipe::{BLOCK_BYTES, Place, Stream, StreamOptions, Until, Volume};
use riopipe_lab::{
    fs_load::FsLoad,
    harness::{self, Worker},
    latency::Latencies,
    sample::Sample,
};

use super::cpu::side_cpu;
use crate::{connect::stream_failure, failure::Failure};

/// The blocks that a thread writes, one after the other, and again from the first one on: half of
/// them data, half records.
const BLOCKS: u64 = 8192;

/// Runs the load on a volume that has a data stream for each thread. Returns the number of all
/// operations, too, also of those before and after the measured window.
pub(super) fn run(volume: &Volume, load: &FsLoad) -> Result<(Sample, u64), Failure> {
    let all = AtomicU64::new(0);
    let streams = (0..load.threads)
        .map(|thread| {
            let id = u16::try_from(1 + thread).unwrap_or(u16::MAX);
            let opened = volume.stream(id, &StreamOptions::default());
            opened.map(|stream| Mutex::new(Some(stream))).map_err(|error| stream_failure(&error))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let sample = harness::run(load.window, load.threads, side_cpu, |thread, worker| {
        let slot = &streams[thread as usize];
        let stream = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Each worker is started once, with a number below the number of streams.
        let mut stream = stream.expect("a stream for each worker");
        let result = write(&mut stream, u64::from(thread) * BLOCKS, worker, &all);
        let closed = stream.close().map_err(|error| Failure::storage(&error));
        result.and_then(|latencies| closed.map(|_| latencies))
    })?;
    Ok((sample, all.into_inner()))
}

fn write(
    stream: &mut Stream,
    first: u64,
    worker: &Worker<'_>,
    all: &AtomicU64,
) -> Result<Latencies, Failure> {
    let mut next = 0;
    let write = || {
        let mut buf = || {
            let mut buf = stream.buf(BLOCK_BYTES).map_err(|error| Failure::storage(&error))?;
            buf.fill(0x5a);
            Ok::<_, Failure>(buf)
        };
        let (data, record) = (buf()?, buf()?);
        // The block was released long before it is written again.
        let at = first + next % (BLOCKS / 2);
        next += 1;
        let group = stream.group().write(at, data, Place::Fresh);
        group.submit_or_wait(None).map_err(|error| Failure::storage(&error))?;
        let group = stream.group().write(at + BLOCKS / 2, record, Place::Fresh);
        let seq = group.submit_durable_or_wait(None).map_err(|error| Failure::storage(&error))?;
        stream.wait(Until::Durable(seq), None).map_err(|error| Failure::storage(&error))?;
        Ok(BLOCK_BYTES as u64)
    };
    let latencies = worker.repeat(|| Ok(()), write)?;
    all.fetch_add(next, Ordering::Relaxed);
    Ok(latencies)
}
