//! A log that is lost or damaged is given up on demand: nothing is undone then, on any target, and the
//! writes in doubt are listed until the caller has acknowledged them (T26).

use std::fs;
use std::os::unix::fs::FileExt;

use riopipe::{OpenError, OpenOptions, Place, Recovery, StreamOptions, Until, Volume};

use crate::crash::{Node, SOON, holds, impatient, put, volume_on};

fn accept() -> OpenOptions {
    OpenOptions { accept_lost_log: true, ..impatient() }
}

/// Acknowledges the list of stream 0, opens it, and returns whether blocks hold their groups.
fn there(volume: &Volume, recovery: &Recovery, blocks: &[(u64, u64)]) -> Vec<Option<bool>> {
    let found = recovery.stream(0).unwrap();
    assert!(found.log_given_up && found.undone.is_empty(), "{recovery}");
    if found.acknowledge {
        assert!(volume.stream(0, &StreamOptions::default()).is_err());
        volume.acknowledge(0).unwrap();
    }
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let there = blocks.iter().map(|(lba, version)| holds(&mut stream, *lba, 1, *version)).collect();
    // The stream works as any other.
    let seq = put(&mut stream, 40, 1, 99, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    stream.close().unwrap();
    there
}

#[test]
fn t26_giving_up_one_log_leaves_durable_blocks_on_the_other_target() {
    let mut nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    // Stripes of four blocks: 0 to 3 on the first node, 4 to 7 on the second.
    let blocks = [(4, 1), (0, 2), (1, 3)];
    for (lba, version) in blocks {
        put(&mut stream, lba, 1, version, Place::Fresh, true);
    }
    let last = stream.last();
    stream.wait(Until::Durable(last), Some(SOON)).unwrap();
    nodes.iter_mut().for_each(Node::kill);
    drop(stream);
    drop(volume);
    fs::remove_file(nodes[1].path("log")).unwrap();
    nodes.iter_mut().for_each(Node::start);

    let error = Volume::open("v", &members, &impatient()).unwrap_err();
    assert!(error.to_string().contains("accept_lost_log"), "{error}");
    let (volume, recovery) = Volume::open("v", &members, &accept()).unwrap();
    assert_eq!(there(&volume, &recovery, &blocks), [Some(true); 3], "{recovery}");
    volume.close().unwrap();
    let (volume, recovery) = Volume::open("v", &members, &impatient()).unwrap();
    assert!(recovery.is_nothing(), "{recovery}");
    volume.close().unwrap();
}

#[test]
fn t26_an_older_log_is_given_up_without_a_new_one() {
    let mut nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
    volume.close().unwrap();
    let older = fs::read(nodes[1].path("log")).unwrap();
    let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let blocks = [(4, 1), (0, 2), (1, 3)];
    for (lba, version) in blocks {
        put(&mut stream, lba, 1, version, Place::Fresh, true);
    }
    let last = stream.last();
    stream.wait(Until::Durable(last), Some(SOON)).unwrap();
    nodes.iter_mut().for_each(Node::kill);
    drop(stream);
    drop(volume);
    fs::write(nodes[1].path("log"), older).unwrap();
    nodes.iter_mut().for_each(Node::start);

    let error = Volume::open("v", &members, &impatient()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("older") && text.contains("accept_lost_log"), "{text}");
    let (volume, recovery) = Volume::open("v", &members, &accept()).unwrap();
    assert_eq!(there(&volume, &recovery, &blocks), [Some(true); 3], "{recovery}");
    volume.close().unwrap();
    let (volume, recovery) = Volume::open("v", &members, &impatient()).unwrap();
    assert!(recovery.is_nothing(), "{recovery}");
    volume.close().unwrap();
}

/// Flips a bit in an entry of a stream's partition.
fn damage(node: &Node, partition: u64, entry: u64) {
    let log = fs::OpenOptions::new().read(true).write(true).open(node.path("log")).unwrap();
    let at = 8192 + partition + 256 + 64 * entry + 40;
    let mut byte = [0];
    log.read_exact_at(&mut byte, at).unwrap();
    byte[0] ^= 1;
    log.write_all_at(&byte, at).unwrap();
}

#[test]
fn t26_damaged_partitions_are_given_up_when_the_volume_is_opened() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
    let mut streams = [0, 1].map(|id| volume.stream(id, &StreamOptions::default()).unwrap());
    let blocks: Vec<(u64, u64)> = (0..8).map(|n| (4 * n, n + 1)).collect();
    for (id, stream) in streams.iter_mut().enumerate() {
        for (lba, version) in &blocks {
            let seq = put(stream, lba + 100 * id as u64, 1, *version, Place::Fresh, false);
            stream.wait(Until::Complete(seq), Some(SOON)).unwrap();
        }
    }
    nodes[0].kill();
    drop(streams);
    drop(volume);
    // The second partition comes right after the first; its length depends on the space in the log.
    let second = stride_of(&nodes[0]);
    for partition in [0, second] {
        damage(&nodes[0], partition, 2);
    }
    nodes[0].start();
    let error = Volume::open("v", &members, &impatient()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, OpenError::Claim { .. }), "{text}");
    assert!(text.contains("damaged") && text.contains("accept_lost_log"), "{text}");
    let (volume, recovery) = Volume::open("v", &members, &accept()).unwrap();
    assert!(there(&volume, &recovery, &blocks).iter().all(|there| *there == Some(true)));
    assert!(recovery.stream(1).unwrap().log_given_up);
    drop(volume);
}

/// The distance of two partitions in bytes, from the log's directory: 256, and 64 for each slot,
/// rounded up to whole pages.
fn stride_of(node: &Node) -> u64 {
    let log = fs::read(node.path("log")).unwrap();
    let slots = u32::from_le_bytes(log[128 + 24..128 + 28].try_into().unwrap());
    (256 + 64 * u64::from(slots)).next_multiple_of(4096)
}
