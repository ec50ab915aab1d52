//! Group commit: many threads append records, and each waits until its own is durable; one thread
//! writes all records that have come meanwhile as one group. Nobody polls, and nobody sleeps for a
//! while.
//!
//! ```text
//! rio target serve -a 127.0.0.1 -s 4420 --drive mem:64M --log file:/tmp/rio.log,size=2M &
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

/// A record, and whom to tell which group it goes into.
struct Append {
    record: u64,
    reply: Sender<Seq>,
}

/// What an appending thread has of the log.
struct Log {
    /// `None` only on the way out.
    queue: Option<Sender<Append>>,
    waker: StreamWaker,
    watch: Watch,
}

impl Log {
    /// Appends a record, and returns when it is durable.
    fn append(&self, record: u64) -> Result<()> {
        let (reply, group) = channel();
        self.queue.as_ref().ok_or("the log is there")?.send(Append { record, reply })?;
        // The committer sleeps on its stream; this ends that, or its next sleep.
        self.waker.wake();
        self.watch.wait_durable(group.recv()?, None)?;
        Ok(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // The committer learns that one thread less appends.
        self.queue = None;
        self.waker.wake();
    }
}

/// The thread that has the stream: writes what has come, until nobody is left who appends. Returns
/// how many groups that took.
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
                // On the queue and on the stream at once: meanwhile other threads see marks move.
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
        // Waits for room if the memory or a log is full; a target that stays away ends that.
        let seq = stream.group().write(lba, data, Place::Fresh).submit_durable_or_wait(None)?;
        lba += blocks;
        groups += 1;
        for append in waiting.drain(..) {
            // A thread that is gone needs no answer.
            let _ = append.reply.send(seq);
        }
    }
}

/// Has all records appended to a new log at the beginning of a volume; returns their number and that
/// of the groups.
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
        // Whoever still waits learns that nobody answers.
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
