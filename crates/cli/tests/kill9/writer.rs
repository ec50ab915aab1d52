//! The process that writes, and is killed: `kill9 writer FOLDER GROUPS MEMBER…`.
//!
//! It opens the volume (which recovers it, if need be), says how far each stream reaches, goes on
//! from there up to group GROUPS, and notes in a file each group whose durability was confirmed.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use riopipe::{
    ClaimError, ConnectOptions, OpenError, OpenOptions, Place, StreamOptions, SubmitError, Until,
    Volume, Why,
};

use crate::formula::{AREA, BLOCK, KEPT_BYTES, STREAMS, Walk, fill};

pub(crate) fn main(args: &[String]) {
    let (folder, groups) = (Path::new(&args[0]), args[1].parse().unwrap());
    let members: Vec<_> = args[2..].iter().map(|m| m.parse().unwrap()).collect();
    let options = OpenOptions {
        connect: ConnectOptions { loss_timeout: Duration::from_secs(30), ..Default::default() },
        ..OpenOptions::default()
    };
    let begun = Instant::now();
    let (volume, recovery) = loop {
        match Volume::open("ordeal", &members, &options) {
            Ok(opened) => break opened,
            // A target may not have seen yet that the owner has been killed (T8).
            Err(OpenError::Claim { error: ClaimError::Owned { .. }, .. })
                if begun.elapsed() < Duration::from_secs(10) =>
            {
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    };
    let tags: Vec<u64> = recovery.streams.iter().map(|stream| stream.tag).collect();
    for stream in &recovery.streams {
        if stream.acknowledge {
            volume.acknowledge(stream.stream.0).unwrap();
        }
    }
    // The parent reads this line: from here on groups go out.
    println!("recovered {tags:?}");
    let acks =
        File::options().create(true).truncate(false).write(true).open(folder.join("acks")).unwrap();
    thread::scope(|scope| {
        for id in 0..STREAMS {
            let (volume, acks, last) = (&volume, &acks, tags[usize::from(id)]);
            scope.spawn(move || stream(volume, id, last, groups, acks));
        }
    });
    volume.close().unwrap();
    println!("closed");
}

fn stream(volume: &Volume, id: u16, last: u64, groups: u64, acks: &File) {
    let options = StreamOptions { kept_bytes_max: KEPT_BYTES, ..StreamOptions::default() };
    let mut stream = volume.stream(id, &options).unwrap();
    let mut walk = Walk::after(id, last);
    let mut writes = Vec::new();
    while walk.n < groups {
        walk.next(id, &mut writes);
        loop {
            let mut bufs: Vec<_> = writes
                .iter()
                .map(|write| {
                    let mut buf = stream.buf(write.blocks as usize * BLOCK);
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
                    if durable {
                        stream.wait(Until::Durable(seq), None).unwrap();
                        // What another process has been told survives this one's death.
                        acks.write_all_at(&walk.n.to_le_bytes(), u64::from(id) * 8).unwrap();
                    }
                    break;
                }
                Err(SubmitError { why: Why::Full(_), .. }) => {
                    stream.wait(Until::Room, None).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    stream.close().unwrap();
    acks.write_all_at(&walk.n.to_le_bytes(), u64::from(id) * 8).unwrap();
}
