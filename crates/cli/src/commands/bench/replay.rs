//! The time of a replay: the targets crash alone, and the initiator sends again what they may have
//! lost (promise P7).

use std::thread;
use std::time::{Duration, Instant};

use riopipe::{
    BLOCK_BYTES, OpenOptions, Place, Stream, StreamOptions, SubmitErrorKind, Until, Volume,
};
use riopipe_order::entry::ENTRY_BYTES;

use crate::{
    args::bench::Recovery as Args,
    connect::{open_failure, stream_failure},
    failure::{Code, Failure},
    own_targets::{OwnTargets, Plan, file_log},
};

/// The longest that a replay may take.
const LIMIT: Duration = Duration::from_secs(120);

/// A replay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replay {
    /// From the moment in which the targets begin to start again until all groups are durable.
    pub(super) time: Duration,
    /// The requests that were sent again.
    pub(super) requests: u64,
}

/// The targets with drives that have volatile caches, so that an initiator keeps what is not durable.
pub(super) fn targets(args: &Args) -> Result<OwnTargets, Failure> {
    OwnTargets::start(&Plan {
        volume: "replay",
        targets: args.targets,
        drives: args.drives,
        drive: args.replay_drive.clone(),
        log: file_log(args.log_size),
        streams: args.streams,
        ..Plan::default()
    })
}

/// Writes with all streams until the logs are nearly full, ends the targets as if they were killed,
/// and starts them again.
pub(super) fn once(own: &mut OwnTargets, args: &Args) -> Result<Replay, Failure> {
    let opened = Volume::open(own.volume(), own.members(), &OpenOptions::default());
    let (volume, _) = opened.map_err(|error| open_failure(&error))?;
    let mut streams = (0..args.streams)
        .map(|id| volume.stream(id as u16, &StreamOptions::default()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| stream_failure(&error))?;
    let share = volume.blocks() / u64::from(args.streams);
    of_each(&mut streams, |number, stream| fill(stream, number * share, share, args))?;

    let mut begun = Instant::now();
    own.killed(|_| {
        begun = Instant::now();
        Ok(())
    })?;
    of_each(&mut streams, |_, stream| {
        let last = stream.last();
        let durable = stream.wait(Until::Durable(last), Some(LIMIT));
        durable.map(drop).map_err(|error| Failure::storage(&error))
    })?;
    let time = begun.elapsed();

    let requests = streams.iter().map(Stream::replayed).sum();
    for stream in streams {
        stream.close().map_err(|error| Failure::storage(&error))?;
    }
    volume.close().map_err(|error| Failure::storage(&error))?;
    if requests == 0 {
        return Err(Failure::new(
            Code::Differs,
            "the targets had lost nothing: nothing was replayed",
        ));
    }
    Ok(Replay { time, requests })
}

/// Runs `work` for each stream, in a thread of its own.
fn of_each(
    streams: &mut [Stream],
    work: impl Fn(u64, &mut Stream) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            (0..).zip(streams).map(|(at, one)| scope.spawn(move || work(at, one))).collect();
        let ends = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        // All are joined before the first failure is returned.
        ends.collect::<Vec<_>>().into_iter().collect()
    })
}

/// Submits groups of one block in the stream's share of the volume, and waits until they are
/// complete. No two are adjacent, so none are merged. They take a quarter of the stream's part of the
/// logs: a stream flushes before that is full.
fn fill(stream: &mut Stream, first: u64, blocks: u64, args: &Args) -> Result<(), Failure> {
    let entries = args.log_size / ENTRY_BYTES as u64 * u64::from(args.targets);
    let groups = (entries / u64::from(args.streams) / 4).min(blocks / 2).max(1);
    for group in 0..groups {
        loop {
            let buf = stream.buf(BLOCK_BYTES).map_err(|error| Failure::storage(&error))?;
            let lba = first + 2 * group;
            match stream.group().write(lba, buf, Place::Fresh).submit() {
                Ok(_) => break,
                Err(error) if matches!(error.kind, SubmitErrorKind::Full(_)) => {
                    let space = stream.wait(Until::Space, Some(LIMIT));
                    space.map_err(|error| Failure::storage(&error))?;
                }
                Err(error) => return Err(Failure::storage(&error)),
            }
        }
    }
    let complete = stream.wait(Until::Complete(stream.last()), Some(LIMIT));
    complete.map(drop).map_err(|error| Failure::storage(&error))
}
