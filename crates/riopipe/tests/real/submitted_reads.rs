//! Reads that the owner submits and goes on without.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use riopipe::{
    BLOCK_BYTES, ReadEnd, ReadError, ReadId, ReadMemory, ReopenError, Stream, StreamError,
    StreamOptions, Until, Volume,
};

use crate::crash::{Node, SOON, impatient, soon, volume_on, with_loss_timeout};
use crate::late::Late;
use crate::site::{fill, write};

/// Opens a new volume on these targets.
fn open(nodes: &[Node]) -> Volume {
    let members = volume_on(nodes);
    Volume::open("v", &members, &with_loss_timeout(SOON)).unwrap().0
}

fn expected(lba: u64, version: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK_BYTES];
    fill(&mut block, lba, version);
    block
}

/// Submits reads of one block each.
fn submit(stream: &mut Stream, lbas: impl IntoIterator<Item = u64>) -> BTreeMap<ReadId, u64> {
    let mut submitted = BTreeMap::new();
    for lba in lbas {
        let id = stream.submit_read(lba, vec![0_u8; BLOCK_BYTES], None).unwrap();
        assert!(submitted.insert(id, lba).is_none(), "{id:?} has been used");
    }
    submitted
}

/// Takes the next end, and waits for it.
fn next_end(stream: &mut Stream) -> ReadEnd {
    loop {
        if let Some(end) = stream.take_read() {
            return end;
        }
        stream.wait(Until::ReadEnded, Some(SOON)).unwrap();
    }
}

/// Checks that each read ends once, with a version of its block.
fn all_end(stream: &mut Stream, mut submitted: BTreeMap<ReadId, u64>, version: u64) {
    while !submitted.is_empty() {
        let end = next_end(stream);
        let lba = submitted.remove(&end.id).expect("one end for each read");
        let block: Vec<u8> = end.into_memory().unwrap().unwrap();
        assert!(block == expected(lba, version), "block {lba}");
    }
    assert!(stream.take_read().is_none());
    // Without a read in flight the wait is over at once.
    stream.wait(Until::ReadEnded, None).unwrap();
}

#[test]
fn many_reads_are_in_flight_at_once() {
    let nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    let late = [Late::to(nodes[0].addr()), Late::to(nodes[1].addr())];
    let both = [late[0].member(), late[1].member()];
    let (volume, _) = Volume::open("v", &both, &with_loss_timeout(SOON)).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 64, 1, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    late.iter().for_each(Late::hold);
    let submitted = submit(&mut stream, 0..64);
    // The 64th has sent all of them. No answer passes before both targets have one.
    soon("both have answered", || late.iter().all(Late::is_waited_for));
    assert!(stream.take_read().is_none());
    late.iter().for_each(Late::open);
    all_end(&mut stream, submitted, 1);
    stream.close().unwrap();
}

#[test]
fn p9_a_submitted_read_returns_the_streams_own_writes() {
    let nodes = [Node::new()];
    let volume = open(&nodes);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    for version in 1..50 {
        // Nothing has been sent of either.
        write(&mut stream, 0, 4, version, false);
        let submitted = submit(&mut stream, 0..4);
        all_end(&mut stream, submitted, version);
    }
    stream.close().unwrap();
}

/// The background thread receives what the owner has submitted, and the descriptor shows it.
#[test]
fn reads_end_while_their_owner_makes_no_call() {
    let nodes = [Node::new()];
    let volume = open(&nodes);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 8, 1, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    stream.wait(Until::Idle, Some(SOON)).unwrap();
    let fd = stream.event_fd().unwrap();
    let submitted = submit(&mut stream, 0..8);
    let id = stream.id();
    // It takes the stream over: nothing sends what was submitted before that.
    soon("the reads have been sent and answered", || {
        let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: it is one descriptor.
        unsafe { libc::poll(&raw mut poll, 1, 1000) == 1 }
    });
    soon("all have ended", || {
        stream.poll().unwrap();
        stream.wait(Until::ReadEnded, Some(Duration::ZERO)).is_ok()
    });
    all_end(&mut stream, submitted, 1);
    assert_eq!(stream.id(), id);
    stream.close().unwrap();
}

#[test]
fn p7_reads_go_on_when_their_target_comes_back() {
    let mut nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    let members = nodes.each_ref().map(Node::member);
    let (volume, _) = Volume::open("v", &members, &with_loss_timeout(SOON)).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 16, 1, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    nodes[1].kill();
    let submitted = submit(&mut stream, 0..16);
    // This one has no time for that. Blocks 4 to 7 are on the second target.
    let hasty =
        stream.submit_read(4, vec![0; BLOCK_BYTES], Some(Duration::from_millis(50))).unwrap();
    let mut found = Vec::new();
    let error = loop {
        let end = next_end(&mut stream);
        match end.id == hasty {
            true => break end.result.unwrap_err(),
            false => found.push(end),
        }
    };
    assert!(matches!(error, ReadError::Deadline(_)) && error.is_retryable(), "{error}");
    nodes[1].start();
    while found.len() < submitted.len() {
        found.push(next_end(&mut stream));
    }
    for end in found {
        let lba = submitted[&end.id];
        assert!(end.into_memory::<Vec<u8>>().unwrap().unwrap() == expected(lba, 1));
    }
    stream.close().unwrap();
}

#[test]
fn p6_a_failed_stream_ends_its_reads() {
    let mut nodes = [Node::new()];
    let _ = volume_on(&nodes);
    let (volume, _) = Volume::open("v", &[nodes[0].member()], &impatient()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 8, 1, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    nodes[0].kill();
    let submitted = submit(&mut stream, 0..8);
    let error = stream.wait(Until::Idle, Some(SOON)).and_then(|_| {
        // It was idle, and has not noticed the loss.
        stream.wait(Until::Woken, Some(SOON))
    });
    error.unwrap_err();
    let mut ended = 0;
    while let Some(end) = stream.take_read() {
        assert!(submitted.contains_key(&end.id));
        let error = end.result.unwrap_err();
        assert!(matches!(error, ReadError::Failed(_)), "{error}");
        ended += 1;
    }
    assert_eq!(ended, submitted.len());
    let refused = stream.submit_read(0, vec![0; BLOCK_BYTES], None).unwrap_err();
    assert!(matches!(refused.error, ReadError::Failed(_)), "{refused}");
    assert_eq!(refused.memory.len(), BLOCK_BYTES, "the memory comes back");
}

#[test]
fn a_reopened_stream_reads_again_and_uses_no_id_again() {
    let mut nodes = [Node::new()];
    let volume = open(&nodes);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 8, 1, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    let submitted = submit(&mut stream, 0..8);
    all_end(&mut stream, submitted.clone(), 1);
    // Its end is taken after the stream was reopened.
    let early = submit(&mut stream, [3]);
    stream.wait(Until::ReadEnded, Some(SOON)).unwrap();
    let (drive, copy) = (nodes[0].path("drive"), nodes[0].path("copy"));
    std::fs::copy(&drive, &copy).unwrap();
    std::fs::remove_file(&drive).unwrap();
    let flushed = write(&mut stream, 9, 1, 1, true);
    stream.wait(Until::Durable(flushed), Some(SOON)).unwrap_err();
    nodes[0].kill();
    std::fs::rename(&copy, &drive).unwrap();
    riopipe_target::drive_identity(&format!("file:{}", drive.display()), true).unwrap();
    nodes[0].start();
    let found = loop {
        match stream.reopen() {
            Ok(found) => break found,
            Err(ReopenError::Stream(StreamError::InPlacePending { .. })) => {
                volume.acknowledge(0).unwrap();
            }
            // The target has not been found again yet.
            Err(error) if error.is_retryable() => std::thread::sleep(Duration::from_millis(10)),
            Err(error) => panic!("{error}"),
        }
    };
    assert!(found.last >= seq, "{found}");
    let again = submit(&mut stream, 0..8);
    assert!(again.keys().all(|id| !submitted.contains_key(id) && !early.contains_key(id)));
    let mut both = again;
    both.extend(early);
    all_end(&mut stream, both, 1);
    stream.close().unwrap();
}

/// Memory that notices bytes that arrive when it is not the stream's any more.
struct Watched {
    is_returned: Arc<AtomicBool>,
}

impl ReadMemory for Watched {
    fn length(&self) -> usize {
        BLOCK_BYTES
    }

    fn put(&mut self, _: usize, _: &[u8]) {
        assert!(!self.is_returned.load(Ordering::SeqCst), "the caller has the memory back");
    }
}

#[test]
fn a_cancelled_read_ends_at_once_and_leaves_its_memory_alone() {
    let nodes = [Node::new()];
    let _ = volume_on(&nodes);
    let late = Late::to(nodes[0].addr());
    let (volume, _) = Volume::open("v", &[late.member()], &with_loss_timeout(SOON)).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 8, 1, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    late.hold();
    let is_returned = Arc::new(AtomicBool::new(false));
    let memory = Watched { is_returned: Arc::clone(&is_returned) };
    let cancelled = stream.submit_read(0, memory, None).unwrap();
    let kept = submit(&mut stream, [1]);
    stream.send().unwrap();
    soon("the target has answered", || late.is_waited_for());
    assert!(stream.cancel_read(cancelled));
    assert!(!stream.cancel_read(cancelled), "it has ended");
    is_returned.store(true, Ordering::SeqCst);
    let end = next_end(&mut stream);
    assert_eq!(end.id, cancelled);
    assert!(matches!(end.result, Err(ReadError::Cancelled)));
    late.open();
    all_end(&mut stream, kept, 1);
    let unknown = ReadId(u64::MAX);
    assert!(!stream.cancel_read(unknown));
    // The late answer has arrived before this one.
    let last = submit(&mut stream, [2]);
    all_end(&mut stream, last, 1);
    stream.close().unwrap();
}

#[test]
fn the_number_of_reads_is_bounded_and_ends_count() {
    let nodes = [Node::new()];
    let volume = open(&nodes);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 1, 1, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    let submitted = submit(&mut stream, std::iter::repeat_n(0, 1024));
    for _ in 0..2 {
        let refused = stream.submit_read(0, vec![0; BLOCK_BYTES], None).unwrap_err();
        assert!(matches!(refused.error, ReadError::Full(1024)), "{refused}");
        assert!(refused.error.is_retryable());
        stream.wait(Until::Idle, Some(SOON)).unwrap();
        stream.wait(Until::ReadEnded, Some(SOON)).unwrap();
    }
    all_end(&mut stream, submitted, 1);
    let one = submit(&mut stream, [0]);
    all_end(&mut stream, one, 1);
    // None of these is a read of blocks of the volume.
    for (lba, bytes) in [(0, 5), (u64::MAX, BLOCK_BYTES)] {
        let refused = stream.submit_read(lba, vec![0; bytes], None).unwrap_err();
        assert!(matches!(refused.error, ReadError::OutOfRange { .. }), "{refused}");
    }
    let nothing = stream.submit_read(0, Vec::new(), None).unwrap();
    let end = next_end(&mut stream);
    assert!(end.id == nothing && end.result.is_ok());
    stream.close().unwrap();
}

/// A drive that lacks the end of its file fails to read there, and only there.
#[test]
fn a_read_that_the_drive_fails_names_its_block() {
    let nodes = [Node::new()];
    let volume = open(&nodes);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let blocks = volume.info().blocks;
    write(&mut stream, 0, 1, 1, true);
    let seq = write(&mut stream, blocks - 4, 4, 1, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    let drive = std::fs::OpenOptions::new().write(true).open(nodes[0].path("drive")).unwrap();
    drive.set_len(drive.metadata().unwrap().len() - 2 * BLOCK_BYTES as u64).unwrap();
    let submitted = submit(&mut stream, [0, blocks - 1, blocks - 3]);
    let two = stream.submit_read(blocks - 4, vec![0; 4 * BLOCK_BYTES], None).unwrap();
    let mut failed = 0;
    for _ in 0..4 {
        let end = next_end(&mut stream);
        let lba = submitted.get(&end.id).copied();
        match end.result {
            Ok(()) => assert!(lba == Some(0) || lba == Some(blocks - 3)),
            Err(ReadError::Status { lba: at, .. }) => {
                assert!(lba == Some(blocks - 1) || end.id == two, "{at}");
                assert!(at >= blocks - 4, "{at}");
                failed += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(failed, 2);
}

/// After the end of the stream no thread has the memory.
#[test]
fn the_end_of_a_stream_drops_its_reads() {
    for closes in [true, false] {
        let nodes = [Node::new()];
        let _ = volume_on(&nodes);
        let late = Late::to(nodes[0].addr());
        let (volume, _) = Volume::open("v", &[late.member()], &with_loss_timeout(SOON)).unwrap();
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        let is_returned = Arc::new(AtomicBool::new(false));
        if !closes {
            late.hold();
        }
        for lba in 0..8 {
            let memory = Watched { is_returned: Arc::clone(&is_returned) };
            stream.submit_read(lba, memory, None).unwrap();
        }
        stream.send().unwrap();
        match closes {
            true => drop(stream.close().unwrap()),
            false => drop(stream),
        }
        assert_eq!(Arc::strong_count(&is_returned), 1);
        is_returned.store(true, Ordering::SeqCst);
        late.open();
    }
}
