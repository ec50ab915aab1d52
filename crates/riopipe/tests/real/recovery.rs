//! Recovery after a crash of the initiator: finding the prefix, undoing, reporting, saving.

use std::fs;

use riopipe::{
    AcknowledgeError, BLOCK_BYTES, BlockRange, OpenOptions, Place, RecoverOptions, Recovery, Seq,
    StreamError, StreamOptions, Until, Volume, undone,
};

use crate::crash::{Node, SOON, holds, open_soon, put, volume_on};
use crate::site::{connect, open_options};

/// Writes groups of two blocks, one after the other, each with its number as its tag. Then the owner
/// crashes.
fn crash(members: &[riopipe::MemberAddr], first: u64, groups: u64) {
    let (volume, _) = open_soon(members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    for group in first..first + groups {
        put(&mut stream, 2 * group, 2, group, Place::Fresh, group == first + groups / 2);
    }
    stream.wait(Until::Durable(Seq(first + groups / 2)), Some(SOON)).unwrap();
    stream.poll().unwrap();
}

/// For a volume whose owner's lease may still run (T25).
pub(crate) fn taking_over() -> OpenOptions {
    OpenOptions { take_over: true, ..open_options() }
}

fn recover(members: &[riopipe::MemberAddr], options: RecoverOptions) -> Recovery {
    let options = RecoverOptions { take_over: true, connect: connect(), ..options };
    let mut steps = Vec::new();
    let recovery =
        Volume::recover("v", members, &options, &mut |progress| steps.push(progress.step)).unwrap();
    assert!(steps.contains(&"list"), "{steps:?}");
    recovery
}

#[test]
fn p1_p2_after_a_crash_of_the_initiator_there_is_a_prefix() {
    let nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    let mut first = 1;
    for round in 0..4 {
        crash(&members, first, 40);
        let (volume, recovery) = open_soon(&members, &open_options());
        let found = recovery.stream(0).unwrap();
        assert_eq!(found.last, Seq(found.tag), "round {round}: the tag is the last group's");
        assert!(found.last >= Seq(first + 20), "round {round}: durable groups are there");
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        for group in 1..first + 40 {
            let whole = holds(&mut stream, 2 * group, 2, group);
            assert_eq!(whole, Some(group <= found.tag), "round {round}, group {group}: {found}");
        }
        stream.close().unwrap();
        volume.close().unwrap();
        first = found.tag + 1;
    }
    let (volume, recovery) = open_soon(&members, &open_options());
    assert!(recovery.is_nothing(), "{recovery}");
    assert_eq!(recovery.stream(0).unwrap().tag, first - 1, "the tag outlives a clean close");
    assert!(recovery.to_string().contains("nothing to recover"), "{recovery}");
    volume.close().unwrap();
}

/// The same owner, the same process: only the stream crashes.
#[test]
fn a_dropped_stream_is_recovered_when_it_is_opened_again() {
    let nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut other = volume.stream(1, &StreamOptions::default()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    for group in 1..=30 {
        put(&mut stream, 2 * group, 2, group, Place::Fresh, group == 10);
    }
    stream.wait(Until::Durable(Seq(10)), Some(SOON)).unwrap();
    drop(stream);
    put(&mut other, 1000, 1, 1, Place::Fresh, false);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let found = stream.recovery().unwrap().clone();
    assert!(found.last >= Seq(10) && found.found > 0, "{found}");
    for group in 1..=30 {
        let whole = holds(&mut stream, 2 * group, 2, group);
        assert_eq!(whole, Some(group <= found.last.0), "group {group}: {found}");
    }
    let seq = put(&mut stream, 2 * (found.last.0 + 1), 2, 77, Place::Fresh, true);
    assert_eq!(seq, found.last.next(), "seqs continue after the last group");
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    stream.close().unwrap();
    other.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn t9_in_place_lists_stay_until_they_are_acknowledged() {
    let nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 8, 1, 1, Place::InPlace, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    put(&mut stream, 8, 1, 2, Place::InPlace, false);
    let last = put(&mut stream, 16, 1, 3, Place::Fresh, false);
    stream.wait(Until::Complete(last), Some(SOON)).unwrap();
    drop((stream, volume));
    for _ in 0..2 {
        // Read, but not acknowledged: the next owner gets the list, too.
        let (volume, recovery) = open_soon(&members, &open_options());
        let found = recovery.stream(0).unwrap();
        assert!(found.acknowledge && found.last == seq, "{found}");
        let range = BlockRange { lba: 8, blocks: 1 };
        assert_eq!(found.in_place.iter().map(|u| u.range).collect::<Vec<_>>(), [range]);
        assert_eq!(volume.in_place(0), found.in_place);
        let error = volume.stream(0, &StreamOptions::default()).unwrap_err();
        assert!(matches!(error, StreamError::InPlacePending { updates: 1, .. }), "{error}");
        assert!(error.to_string().contains("acknowledge"), "{error}");
        let error = volume.acknowledge(1).unwrap_err();
        assert!(matches!(error, AcknowledgeError::NotPending { .. }), "{error}");
        volume.close().unwrap();
    }
    let (volume, _) = open_soon(&members, &open_options());
    volume.acknowledge(0).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    assert_eq!(holds(&mut stream, 8, 1, 2), Some(true), "left as it was (T11)");
    assert_eq!(holds(&mut stream, 16, 1, 3), Some(false), "undone");
    stream.close().unwrap();
    volume.close().unwrap();
    let (volume, recovery) = open_soon(&members, &open_options());
    assert!(recovery.is_nothing(), "{recovery}");
    volume.close().unwrap();
}

#[test]
fn a_dry_run_changes_no_byte_and_no_generation() {
    let mut nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    crash(&members, 1, 40);
    for node in &mut nodes {
        node.kill();
        node.start();
    }
    let bytes = |nodes: &[Node]| -> Vec<Vec<u8>> {
        nodes.iter().flat_map(Node::files).map(|file| fs::read(file).unwrap()).collect()
    };
    let generation = || Volume::inspect(&members, &connect()).unwrap().generation;
    let (before, generation_before) = (bytes(&nodes), generation());
    let options = RecoverOptions { dry_run: true, connect: connect(), ..RecoverOptions::default() };
    let options = RecoverOptions { take_over: true, ..options };
    let dry = Volume::recover("v", &members, &options, &mut |_| ()).unwrap();
    assert!(dry.dry_run && !dry.is_nothing() && dry.to_string().contains("dry run"), "{dry}");
    assert!(bytes(&nodes) == before, "not a byte has changed");
    assert_eq!(generation(), generation_before);
    // The real recovery has the same findings.
    let (volume, recovery) = Volume::open("v", &members, &taking_over()).unwrap();
    assert_eq!(recovery.streams, dry.streams);
    volume.close().unwrap();
}

#[test]
fn zeroed_data_can_be_saved() {
    let nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut last = Seq::ZERO;
    for group in 1..=10 {
        last = put(&mut stream, 6 * group, 6, group, Place::Fresh, false);
    }
    stream.wait(Until::Complete(last), Some(SOON)).unwrap();
    drop((stream, volume));
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("undone");
    fs::write(&path, b"precious").unwrap();
    let options = RecoverOptions {
        save_undone: Some(path.clone()),
        take_over: true,
        connect: connect(),
        ..RecoverOptions::default()
    };
    let error = Volume::recover("v", &members, &options, &mut |_| ()).unwrap_err();
    assert!(error.to_string().contains("exists already"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    fs::remove_file(&path).unwrap();

    let recovery = recover(&members, RecoverOptions { save_undone: Some(path.clone()), ..options });
    let found = recovery.stream(0).unwrap();
    assert!(found.undone_blocks() > 0, "nothing was flushed, so some blocks are undone: {found}");
    assert_eq!(recovery.saved.as_deref(), Some(&*path));
    let saved = undone::read(&path).unwrap();
    assert_eq!(saved.blocks(), found.undone_blocks());
    let (volume, recovery) = open_soon(&members, &open_options());
    assert!(recovery.is_nothing(), "{recovery}");
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    for group in found.last.0 + 1..=10 {
        assert_eq!(holds(&mut stream, 6 * group, 6, group), Some(false));
        for lba in 6 * group..6 * group + 6 {
            let mut group_bytes = vec![0; 6 * BLOCK_BYTES];
            crate::site::fill(&mut group_bytes, 6 * group, group);
            let at = (lba - 6 * group) as usize * BLOCK_BYTES;
            let kept = saved.block(lba).unwrap().expect("the file has every undone block");
            assert!(kept == group_bytes[at..at + BLOCK_BYTES], "block {lba}");
        }
    }
    stream.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn t20_without_one_of_its_targets_nothing_is_recovered() {
    let mut nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    crash(&members, 1, 40);
    nodes[1].kill();
    // Started again, a target has no requests left from before the crash. They change its log.
    nodes[0].kill();
    nodes[0].start();
    let before = fs::read(&nodes[0].files()[1]).unwrap();
    let error = Volume::open("v", &members, &open_options()).unwrap_err().to_string();
    assert!(error.contains(&nodes[1].addr().to_string()), "the missing one is named: {error}");
    assert!(Volume::open("v", &members[..1], &taking_over()).is_err());
    assert!(fs::read(&nodes[0].files()[1]).unwrap() == before, "the log is as it was");
    nodes[1].start();
    let (volume, recovery) = Volume::open("v", &members, &taking_over()).unwrap();
    assert!(!recovery.is_nothing());
    volume.close().unwrap();
}
