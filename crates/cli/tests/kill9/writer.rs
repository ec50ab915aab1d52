//! The writer's process, which is killed: `kill9 writer FOLDER GROUPS MEMBER…`.
//!
//! It opens the volume (which recovers it if necessary), prints the last group of each stream, and
//! continues from there up to group GROUPS. It records in files that outlive it: each group before
//! it is begun (`begun`), and each group whose durability was confirmed, requested or not (`acks`).

use std::{
    collections::VecDeque, fs::File, os::unix::fs::FileExt, path::Path, thread, time::Duration,
};

use riopipe::{
    ConnectOptions, OpenOptions, Place, Seq, Stream, StreamOptions, SubmitError, SubmitErrorKind,
    Until, Volume,
};

use crate::formula::{AREA, BLOCK, KEPT_BYTES, STREAMS, Walk, fill};

pub(crate) fn main(args: &[String]) {
    let (folder, groups) = (Path::new(&args[0]), args[1].parse().unwrap());
    let members: Vec<_> = args[2..].iter().map(|m| m.parse().unwrap()).collect();
    let options = OpenOptions {
        // A busy machine, or an emulated one, may take long to answer.
        connect: ConnectOptions {
            timeout: Duration::from_secs(60),
            loss_timeout: Duration::from_secs(60),
            ..Default::default()
        },
        // An owner that was killed never released the volume (T8).
        take_over: true,
        ..OpenOptions::default()
    };
    let (volume, recovery) =
        Volume::open("ordeal", &members, &options).unwrap_or_else(|error| panic!("{error}"));
    let tags: Vec<u64> = recovery.streams.iter().map(|stream| stream.tag).collect();
    for stream in &recovery.streams {
        if stream.acknowledge {
            volume.acknowledge(stream.stream.0).unwrap();
        }
    }
    let options = StreamOptions { kept_bytes_max: KEPT_BYTES, ..StreamOptions::default() };
    let streams: Vec<_> = (0..STREAMS)
        .map(|id| volume.stream(id, &options).unwrap_or_else(|e| panic!("{e}")))
        .collect();
    // The parent reads this line: from here on groups are written, and a target may be unreachable for a
    // while.
    println!("recovered {tags:?}");
    thread::scope(|scope| {
        for (id, stream) in (0..STREAMS).zip(streams) {
            let notes = Notes { id, begun: file(folder, "begun"), acks: file(folder, "acks") };
            let last = tags[usize::from(id)];
            scope.spawn(move || write(stream, last, groups, &notes));
        }
    });
    volume.close().unwrap();
    println!("closed");
}

fn file(folder: &Path, name: &str) -> File {
    let mut options = File::options();
    options.create(true).truncate(false).read(true).write(true).open(folder.join(name)).unwrap()
}

/// The places of one stream in the files. Data in another process or in the kernel survives this
/// process's death.
struct Notes {
    id: u16,
    begun: File,
    acks: File,
}

impl Notes {
    /// The last group that any run has begun.
    fn begun_before(&self) -> u64 {
        let mut n = [0; 8];
        // The file is shorter if no run began a group.
        match self.begun.read_exact_at(&mut n, u64::from(self.id) * 8) {
            Ok(()) => u64::from_le_bytes(n),
            Err(_) => 0,
        }
    }

    /// Records that group `n` will be written: further than in any run before.
    fn begun(&self, n: u64) {
        self.note(&self.begun, n);
    }

    fn confirmed(&self, n: u64) {
        self.note(&self.acks, n);
    }

    fn note(&self, file: &File, n: u64) {
        file.write_all_at(&n.to_le_bytes(), u64::from(self.id) * 8).unwrap();
    }
}

/// Interval in groups between two checks for durable groups.
const CHECK_INTERVAL: u64 = 16;

fn write(mut stream: Stream, last: u64, groups: u64, notes: &Notes) {
    let id = notes.id;
    let mut walk = Walk::after(id, last);
    let mut writes = Vec::new();
    let mut in_flight: VecDeque<(Seq, u64)> = VecDeque::new();
    let begun_before = notes.begun_before();
    while walk.n < groups {
        walk.next(id, &mut writes);
        if walk.n > begun_before {
            notes.begun(walk.n);
        }
        loop {
            let mut bufs: Vec<_> = writes
                .iter()
                .map(|write| {
                    let mut buf = stream.buf(write.blocks as usize * BLOCK).unwrap();
                    for (i, block) in buf.chunks_exact_mut(BLOCK).enumerate() {
                        fill(id, walk.n, write.block + i as u64, block);
                    }
                    buf
                })
                .collect();
            let mut group = stream.group().tag(walk.n);
            for (write, buf) in writes.iter().zip(bufs.drain(..)) {
                let place = if write.in_place { Place::InPlace } else { Place::Fresh };
                group = group.write(u64::from(id) * AREA + write.block, buf, place);
            }
            let durable = Walk::durable(id, walk.n);
            let submitted = if durable { group.submit_durable() } else { group.submit() };
            match submitted {
                Ok(seq) => {
                    in_flight.push_back((seq, walk.n));
                    let marks = match durable {
                        true => Some(stream.wait(Until::Durable(seq), None).unwrap()),
                        // On drives with power-loss protection, groups become durable without a
                        // request.
                        false if walk.n.is_multiple_of(CHECK_INTERVAL) => {
                            Some(stream.poll().unwrap())
                        }
                        false => None,
                    };
                    let mut confirmed = None;
                    while let (Some(marks), Some((seq, n))) = (marks, in_flight.front().copied())
                        && seq <= marks.durable
                    {
                        confirmed = Some(n);
                        in_flight.pop_front();
                    }
                    confirmed.into_iter().for_each(|n| notes.confirmed(n));
                    break;
                }
                Err(SubmitError { kind: SubmitErrorKind::Full(_), .. }) => {
                    stream.wait(Until::Space, None).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    stream.close().unwrap();
    notes.confirmed(walk.n);
}
