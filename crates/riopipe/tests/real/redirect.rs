//! Updates in place with engine `horae` on a volume with a prepare area: they are rolled back behind
//! the last joint FLUSH, whatever dies.

use riopipe::{
    CreateError, CreateOptions, EngineKind, MemberAddr, OpenOptions, Place, ReaderOptions, Stream,
    StreamOptions, Until, Volume,
};

use crate::crash::{Node, SOON, holds, members_of, open_soon, put};
use crate::recovery::taking_over;
use crate::site::{create_options, open_options};

fn options(prepare_blocks: Option<u32>) -> CreateOptions {
    let engine = Some(EngineKind::Horae);
    CreateOptions { unit_blocks: 4, engine, prepare_blocks, ..create_options() }
}

fn volume_on(nodes: &[Node], prepare_blocks: Option<u32>) -> Vec<MemberAddr> {
    let members = members_of(nodes);
    Volume::create("v", &members, &options(prepare_blocks)).unwrap();
    members
}

/// Updates blocks 2 to 9, which lie on both drives.
fn update(stream: &mut Stream, version: u64, durable: bool) {
    let seq = put(stream, 2, 8, version, Place::InPlace, durable);
    let until = if durable { Until::Durable(seq) } else { Until::Complete(seq) };
    stream.wait(until, Some(SOON)).unwrap();
}

/// Opens the volume, and returns the version of the blocks; the tag of stream 0 is the same.
fn found(members: &[MemberAddr], options: &OpenOptions) -> u64 {
    let (volume, recovery) = open_soon(members, options);
    let found = recovery.stream(0).unwrap();
    assert!(!found.acknowledge && found.in_place.is_empty(), "{found}");
    let tag = found.tag;
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    assert_eq!(holds(&mut stream, 2, 8, tag), Some(true), "wholly there: version {tag}");
    stream.close().unwrap();
    volume.close().unwrap();
    tag
}

#[test]
fn an_update_behind_the_joint_flush_is_rolled_back_whatever_dies() {
    for (kills_target, kills_owner_first) in [(false, false), (true, false), (true, true)] {
        let mut nodes = [Node::new(), Node::protected()];
        let members = volume_on(&nodes, None);
        let (volume, _) = open_soon(&members, &open_options());
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        update(&mut stream, 1, true);
        update(&mut stream, 2, true);
        update(&mut stream, 3, false);
        // All readers of the volume find what is delivered.
        let mut other = volume.stream(1, &StreamOptions::default()).unwrap();
        assert_eq!(holds(&mut other, 2, 8, 3), Some(true));
        let reader = volume.reader(&ReaderOptions::default());
        let (mut is, mut should) = (vec![0; 8 * 4096], vec![0; 8 * 4096]);
        reader.read(2, &mut is, Some(SOON)).unwrap();
        crate::site::fill(&mut should, 2, 3);
        assert!(is == should);
        if kills_owner_first {
            drop((reader, other, stream, volume));
            nodes.iter_mut().for_each(Node::kill);
        } else {
            if kills_target {
                nodes.iter_mut().for_each(Node::kill);
            }
            drop((reader, other, stream, volume));
        }
        if kills_target {
            nodes.iter_mut().for_each(Node::start);
        }
        assert_eq!(found(&members, &taking_over()), 2);
        assert_eq!(found(&members, &open_options()), 2, "and again");
    }
}

#[test]
fn a_stream_that_is_reopened_is_rolled_back_for_all_readers() {
    let nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes, None);
    let (volume, _) = open_soon(&members, &open_options());
    let mut other = volume.stream(1, &StreamOptions::default()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    update(&mut stream, 1, true);
    update(&mut stream, 2, false);
    assert_eq!(holds(&mut other, 2, 8, 2), Some(true));
    // The stream ends without a close, and is recovered when it is opened again.
    drop(stream);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    assert_eq!(holds(&mut other, 2, 8, 1), Some(true));
    assert_eq!(holds(&mut stream, 2, 8, 1), Some(true));
    update(&mut stream, 3, true);
    assert_eq!(holds(&mut other, 2, 8, 3), Some(true));
    stream.close().unwrap();
    other.close().unwrap();
    volume.close().unwrap();
    assert_eq!(found(&members, &open_options()), 3);
}

#[test]
fn many_updates_pass_through_a_small_area() {
    let mut nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes, Some(4 * 64));
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut other = volume.stream(1, &StreamOptions::default()).unwrap();
    for version in 1..=120 {
        update(&mut stream, version, version % 7 == 0);
        let reader = if version % 2 == 0 { &mut stream } else { &mut other };
        assert_eq!(holds(reader, 2, 8, version), Some(true));
    }
    nodes.iter_mut().for_each(Node::kill);
    drop((stream, other, volume));
    nodes.iter_mut().for_each(Node::start);
    let version = found(&members, &taking_over());
    assert!((119..=120).contains(&version), "group 119 was durable: {version}");
}

#[test]
fn without_an_area_updates_are_listed_as_with_rio() {
    let nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes, Some(0));
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    update(&mut stream, 1, true);
    update(&mut stream, 2, false);
    drop((stream, volume));
    let (_volume, recovery) = open_soon(&members, &taking_over());
    let found = recovery.stream(0).unwrap();
    let listed: u64 = found.in_place.iter().map(|update| update.range.blocks).sum();
    assert_eq!((found.tag, found.acknowledge, listed), (1, true, 8), "{found}");
}

#[test]
fn an_area_that_is_too_small_or_useless_is_refused() {
    let nodes = [Node::new()];
    let members = members_of(&nodes);
    let error = Volume::create("v", &members, &options(Some(255))).unwrap_err();
    assert!(matches!(error, CreateError::PrepareAreaTooSmall { blocks: 255, needed: 256 }));
    let engine = Some(EngineKind::Rio);
    let useless = CreateOptions { engine, ..options(Some(256)) };
    let error = Volume::create("v", &members, &useless).unwrap_err();
    assert_eq!(error.to_string(), "only engine horae has a prepare area, not rio");
    // The area is taken from the data area.
    let blocks = |prepare_blocks| {
        let create = CreateOptions { force: true, ..options(Some(prepare_blocks)) };
        Volume::create("v", &members, &create).unwrap().blocks
    };
    assert_eq!(blocks(0) - blocks(256), 256);
}
