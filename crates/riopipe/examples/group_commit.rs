//! Group commit: many threads append records, and each waits until its own record is durable. One
//! thread writes all records that have come meanwhile as one group. No thread polls, and no thread
//! waits for a timer.
//!
//! ```text
//! rio target serve -a 127.0.0.1 -s 4420 --drive mem:64M --log file:/tmp/rio.log,size=2M --create &
//! rio volume create logs -m 127.0.0.1:4420
//! cargo run --release --example group_commit -- logs 127.0.0.1:4420
//! ```

use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;

use riopipe::{
    BLOCK_BYTES, MemberAddr, OpenOptions, Place, Seq, Stream, StreamOptions, StreamWaker, Until,
    Volume, Watch,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const THREADS: u64 = 8;
const RECORDS: u64 = 50;

/// A record, and the channel for the seq of its group.
struct Append {
    record: u64,
    reply: Sender<Seq>,
}

/// The handles of an appending thread to the log.
struct Log {
    /// `None` only while this is dropped.
    queue: Option<Sender<Append>>,
    waker: StreamWaker,
    watch: Watch,
}

impl Log {
    /// Appends a record, and returns when it is durable.
    fn append(&self, record: u64) -> Result<()> {
        let (reply, group) = channel();
        self.queue.as_ref().ok_or("the log has been dropped")?.send(Append { record, reply })?;
        // The committer sleeps on its stream: this ends that sleep, or the next one.
        self.waker.wake();
        self.watch.wait_durable(group.recv()?, None)?;
        Ok(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // Wakes the committer, which ends when no thread has the queue any more.
        self.queue = None;
        self.waker.wake();
    }
}

/// The committer, the thread that owns the stream: writes the queued records, until no thread is left
/// that appends. Returns the number of groups.
fn commit(stream: &mut Stream, queue: &Receiver<Append>) -> Result<u64> {
    let (mut lba, mut groups) = (0, 0);
    let mut waiting = Vec::new();
    loop {
        match queue.try_recv() {
            Ok(append) => {
                waiting.push(append);
                continue;
            }
            Err(TryRecvError::Empty) if waiting.is_empty() => {
                // Sleeps on the queue and on the stream at once: the marks move meanwhile.
                stream.wait(Until::Woken, None)?;
                continue;
            }
            Err(TryRecvError::Disconnected) if waiting.is_empty() => return Ok(groups),
            Err(_) => {}
        }
        let mut data = stream.buf(waiting.len().div_ceil(BLOCK_BYTES / 8) * BLOCK_BYTES)?;
        data.fill(0);
        for (place, append) in data.chunks_mut(8).zip(&waiting) {
            place.copy_from_slice(&append.record.to_le_bytes());
        }
        let blocks = (data.len() / BLOCK_BYTES) as u64;
        // Waits for space if the replay memory or a log is full. If a target stays unreachable, the
        // stream fails, and the wait ends.
        let seq = stream.group().write(lba, data, Place::Fresh).submit_durable_or_wait(None)?;
        lba += blocks;
        groups += 1;
        for append in waiting.drain(..) {
            // A thread that has ended needs no answer.
            let _ = append.reply.send(seq);
        }
    }
}

/// Appends all records to a new log at the beginning of a volume. Returns the number of records and
/// the number of groups.
pub(crate) fn run(name: &str, members: &[MemberAddr]) -> Result<(u64, u64)> {
    let (volume, _) = Volume::open(name, members, &OpenOptions::default())?;
    let mut stream = volume.stream(0, &StreamOptions::default())?;
    let (sender, queue) = channel();
    let groups = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let queue = Some(sender.clone());
                let log = Log { queue, waker: stream.waker(), watch: stream.watch() };
                scope.spawn(move || {
                    (0..RECORDS).try_for_each(|at| log.append(number * RECORDS + at))
                })
            })
            .collect();
        drop(sender);
        let groups = commit(&mut stream, &queue);
        // Threads that still wait get an error, and not an endless wait.
        drop(queue);
        for thread in threads {
            thread.join().map_err(|_| "an appending thread has panicked")??;
        }
        groups
    })?;
    stream.close()?;
    volume.close()?;
    Ok((THREADS * RECORDS, groups))
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let name = args.next().ok_or("usage: group_commit VOLUME MEMBER...")?;
    let members = args.map(|m| m.parse()).collect::<std::result::Result<Vec<_>, _>>()?;
    let (records, groups) = run(&name, &members)?;
    println!("{records} records of {THREADS} threads are durable, in {groups} groups");
    Ok(())
}
