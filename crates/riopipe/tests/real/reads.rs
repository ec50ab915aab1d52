//! Reads: with a deadline, several at once, and from threads that have no stream.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use riopipe::{
    BLOCK_BYTES, BufError, CreateOptions, ReadError, ReadExtent, ReaderOptions, Seq, StreamOptions,
    Until, Volume,
};

use crate::crash::{Node, SOON, soon, volume_on, with_loss_timeout};
use crate::late::Late;
use crate::site::{check, create_options, fill, members, open_options, target, write};

/// Long enough for the answers of a live target.
const MOMENT: Duration = Duration::from_millis(300);

fn expected(lba: u64, version: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK_BYTES];
    fill(&mut block, lba, version);
    block
}

#[test]
fn a_read_ends_at_its_deadline_when_its_target_dies_meanwhile() {
    let mut nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    let late = Late::to(nodes[1].addr());
    let both = [nodes[0].member(), late.member()];
    let (volume, _) = Volume::open("v", &both, &with_loss_timeout(SOON)).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let reader = volume.reader(&ReaderOptions::default());
    // Blocks 4 to 7 are on the second target.
    write(&mut stream, 0, 8, 1, true);
    stream.wait(Until::Durable(Seq(1)), Some(SOON)).unwrap();
    let mut block = vec![0; BLOCK_BYTES];
    reader.read(4, &mut block, Some(SOON)).unwrap();
    assert!(block == expected(4, 1));

    late.hold();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let error = reader.read(5, &mut [0; BLOCK_BYTES], Some(2 * MOMENT)).unwrap_err();
            assert!(matches!(error, ReadError::Deadline(_)) && error.is_retryable(), "{error}");
        });
        let began = Instant::now();
        let killer = scope.spawn(|| {
            soon("the target has answered", || late.is_waited_for());
            nodes[1].kill();
        });
        let error = stream.read(4, &mut block, Some(2 * MOMENT)).unwrap_err();
        assert!(matches!(error, ReadError::Deadline(_)) && error.is_retryable(), "{error}");
        assert!(began.elapsed() >= 2 * MOMENT);
        killer.join().unwrap();
        other.join().unwrap();
    });
    // The other target is not affected.
    stream.read(0, &mut block, Some(SOON)).unwrap();
    assert!(block == expected(0, 1));
    // When the target is back, the stream and the reader read from it again.
    late.open();
    nodes[1].start();
    stream.read(4, &mut block, Some(SOON)).unwrap();
    assert!(block == expected(4, 1));
    let began = Instant::now();
    while let Err(error) = reader.read(5, &mut block, Some(SOON)) {
        assert!(error.is_retryable() && began.elapsed() < SOON, "{error}");
    }
    assert!(block == expected(5, 1));
    write(&mut stream, 4, 1, 2, true);
    check(&mut stream, 4, 1, 2);
    stream.close().unwrap();
    volume.close().unwrap();
    let error = reader.read(4, &mut block, None).unwrap_err();
    assert!(matches!(error, ReadError::Closed) && !error.is_retryable(), "{error}");
}

#[test]
fn extents_on_two_targets_are_requested_at_once() {
    let nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    let late = [Late::to(nodes[0].addr()), Late::to(nodes[1].addr())];
    let both = [late[0].member(), late[1].member()];
    let (volume, _) = Volume::open("v", &both, &with_loss_timeout(SOON)).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let reader = volume.reader(&ReaderOptions::default());
    let seq = write(&mut stream, 0, 16, 1, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    reader.read(0, &mut [0; BLOCK_BYTES], Some(SOON)).unwrap();
    let lbas = [9, 4, 0, 12];
    for by_stream in [true, false] {
        let mut blocks = lbas.map(|_| vec![0; BLOCK_BYTES]);
        let zipped = lbas.iter().zip(&mut blocks);
        let mut extents: Vec<_> =
            zipped.map(|(lba, into)| ReadExtent { lba: *lba, into }).collect();
        late.iter().for_each(Late::hold);
        std::thread::scope(|scope| {
            let opens = scope.spawn(|| {
                // No answer passes before both targets have one.
                soon("both have answered", || late.iter().all(Late::is_waited_for));
                late.iter().for_each(Late::open);
            });
            match by_stream {
                true => stream.read_many(&mut extents, Some(SOON)).unwrap(),
                false => reader.read_many(&mut extents, Some(SOON)).unwrap(),
            }
            opens.join().unwrap();
        });
        for (lba, block) in lbas.iter().zip(&blocks) {
            assert!(*block == expected(*lba, 1), "block {lba}");
        }
    }
    stream.close().unwrap();
}

#[test]
fn readers_in_four_threads_see_complete_groups_beside_a_writer() {
    let targets = [target(&["mem:16M"], None), target(&["mem:16M"], None)];
    let members = members(&[&targets[0], &targets[1]], 1);
    let options = CreateOptions { unit_blocks: 4, ..create_options() };
    Volume::create("v", &members, &options).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    // Fewer connections than threads: they take turns.
    let options = ReaderOptions { concurrent: 2, ..ReaderOptions::default() };
    let reader = volume.reader(&options);
    const ROUNDS: u64 = 200;
    const AREA: u64 = 16;
    let complete = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let (reader, complete) = (reader.clone(), &complete);
                scope.spawn(move || {
                    let mut lba = thread;
                    let mut reads = 0;
                    loop {
                        let known = complete.load(Ordering::Acquire);
                        let far = (lba + 7) % AREA;
                        let (mut a, mut b) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
                        let mut extents = [
                            ReadExtent { lba, into: &mut a },
                            ReadExtent { lba: far, into: &mut b },
                        ];
                        reader.read_many(&mut extents, Some(SOON)).unwrap();
                        for (lba, block) in [(lba, &a), (far, &b)] {
                            let version = u64::from_le_bytes(block[8..16].try_into().unwrap());
                            assert!(version >= known, "block {lba}: {version}, not {known}");
                            assert!(version == 0 || *block == expected(lba, version), "torn");
                        }
                        reads += 1;
                        if known == ROUNDS {
                            return reads;
                        }
                        lba = (lba + 1) % AREA;
                    }
                })
            })
            .collect();
        for version in 1..=ROUNDS {
            let seq = write(&mut stream, 0, AREA as usize, version, false);
            stream.wait(Until::Complete(seq), Some(SOON)).unwrap();
            complete.store(version, Ordering::Release);
        }
        for thread in threads {
            assert!(thread.join().unwrap() > 0);
        }
    });
    let last = stream.last();
    stream.wait(Until::Durable(last), Some(SOON)).unwrap();
    assert_eq!(stream.watch().released(), stream.released());
    assert_eq!(stream.released(), last, "durable and delivered");
    stream.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn buffers_of_other_lengths_than_whole_blocks_are_refused() {
    let target = target(&["mem:16M"], None);
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let options =
        StreamOptions { kept_bytes_max: 2 * BLOCK_BYTES as u64, ..StreamOptions::default() };
    let mut stream = volume.stream(0, &options).unwrap();
    for len in [0, 100, BLOCK_BYTES + 1] {
        assert_eq!(stream.buf(len).unwrap_err(), BufError::NotBlocks { len });
    }
    assert_eq!(stream.buf(2 * BLOCK_BYTES).unwrap().len(), 2 * BLOCK_BYTES);
    let error = stream.buf(3 * BLOCK_BYTES).unwrap_err();
    assert!(matches!(error, BufError::TooLarge { .. }) && error.to_string().contains("8192"));
    let reader = volume.reader(&ReaderOptions::default());
    for lba in [volume.blocks(), u64::MAX] {
        let error = reader.read(lba, &mut [0; BLOCK_BYTES], None).unwrap_err();
        assert!(matches!(error, ReadError::OutOfRange { .. }) && !error.is_retryable());
    }
    reader.read(0, &mut [], None).unwrap();
    stream.close().unwrap();
}

/// A stream without a bound of its own has the bound of the memory.
#[test]
fn a_buffer_without_memory_for_it_is_refused() {
    let target = target(&["mem:16M"], None);
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let options = StreamOptions { kept_bytes_max: u64::MAX, ..StreamOptions::default() };
    let mut stream = volume.stream(0, &options).unwrap();
    for len in [1 << 60, usize::MAX - (BLOCK_BYTES - 1)] {
        assert_eq!(stream.buf(len).unwrap_err(), BufError::NoMemory { len });
    }
    write(&mut stream, 0, 1, 1, true);
    stream.close().unwrap();
    volume.close().unwrap();
}
