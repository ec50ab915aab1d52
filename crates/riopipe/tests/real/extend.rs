//! The tail of a log, written again as it fills: after any crash it is not zeroed, and needs no
//! acknowledgement (T11).

use riopipe::{EngineKind, OpenOptions, Place, Seq, Stream, StreamOptions, Until, Volume};

use crate::crash::{Node, SOON, holds, open_soon, put, volume_on};
use crate::recovery::taking_over;
use crate::site::open_options;

/// Writes block 8 with one record, which is durable, and then with more records, which may not be
/// durable. Returns the seq of the durable group, and that of the last one.
fn fill(stream: &mut Stream) -> (Seq, Seq) {
    let durable = put(stream, 8, 1, 1, Place::Fresh, true);
    stream.wait(Until::Durable(durable), Some(SOON)).unwrap();
    let mut last = durable;
    for version in 2..=5 {
        last = put(stream, 8, 1, version, Place::Extend, false);
    }
    // A block that is fresh beyond the prefix, and extended there.
    put(stream, 9, 1, 6, Place::Fresh, false);
    last = last.max(put(stream, 9, 1, 7, Place::Extend, false));
    (durable, last)
}

/// Opens the volume and checks it; `least` is a group that was durable.
fn check_volume(members: &[riopipe::MemberAddr], options: &OpenOptions, least: Seq) -> Seq {
    let (volume, recovery) = open_soon(members, options);
    let found = recovery.stream(0).unwrap();
    assert!(found.last >= least, "P2: {found}");
    assert!(
        !found.acknowledge && found.in_place.is_empty() && found.in_doubt.is_empty(),
        "{found}"
    );
    assert!(volume.in_place(0).is_empty());
    assert!(found.undone.iter().all(|range| range.lba == 9), "{found}");
    // The stream opens without an acknowledgement.
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let version = (1..=5).find(|version| holds(&mut stream, 8, 1, *version) == Some(true));
    let version = version.expect("not zeroed, and not torn");
    assert!(version >= found.tag.min(5), "version {version}, of group {} on", found.tag);
    let next = (6..=7).find(|version| holds(&mut stream, 9, 1, *version) == Some(true));
    match found.tag {
        6.. => assert!(next >= Some(found.tag)),
        _ => assert_eq!(
            holds(&mut stream, 9, 1, 0),
            Some(false),
            "undone with the block that it extends"
        ),
    }
    let last = found.last;
    // The stream works after that.
    let seq = put(&mut stream, 8, 1, 9, Place::Extend, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    stream.close().unwrap();
    volume.close().unwrap();
    last
}

#[test]
fn t11_an_extended_block_survives_the_process_that_extended_it() {
    for protected in [false, true] {
        let nodes = [if protected { Node::protected() } else { Node::new() }];
        let members = volume_on(&nodes);
        let (volume, _) = open_soon(&members, &open_options());
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        let (durable, last) = fill(&mut stream);
        stream.wait(Until::Complete(last), Some(SOON)).unwrap();
        drop((stream, volume));
        let found = check_volume(&members, &open_options(), durable);
        // On a drive with a volatile cache only flushed writes count: there the extensions are beyond.
        assert!(!protected || found == last, "with PLP, a completed write is durable");
    }
}

#[test]
fn t11_an_extended_block_survives_the_target_and_the_process() {
    for wait in [false, true] {
        let mut nodes = [Node::new()];
        let members = volume_on(&nodes);
        let (volume, _) = open_soon(&members, &open_options());
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        let (durable, last) = fill(&mut stream);
        if wait {
            stream.wait(Until::Complete(last), Some(SOON)).unwrap();
        }
        // Groups that were not sent before are never sent.
        nodes[0].kill();
        drop((stream, volume));
        nodes[0].start();
        check_volume(&members, &taking_over(), durable);
    }
}

#[test]
fn t11_a_target_that_comes_back_gets_the_extensions_again() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let (_, last) = fill(&mut stream);
    stream.poll().unwrap();
    nodes[0].kill();
    nodes[0].start();
    let seq = put(&mut stream, 9, 1, 8, Place::Extend, true);
    assert!(seq > last);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    assert_eq!(holds(&mut stream, 8, 1, 5), Some(true));
    assert_eq!(holds(&mut stream, 9, 1, 8), Some(true));
    stream.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn t11_a_reopened_stream_keeps_extended_blocks() {
    let nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let (durable, last) = fill(&mut stream);
    stream.wait(Until::Complete(last), Some(SOON)).unwrap();
    drop(stream);
    // The volume stays open; the stream that was dropped is recovered when it is opened again.
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let found = stream.recovery().expect("it was recovered").clone();
    assert!(found.last >= durable && found.in_place.is_empty() && !found.acknowledge, "{found}");
    let version = (1..=5).find(|version| holds(&mut stream, 8, 1, *version) == Some(true));
    assert!(version >= Some(found.tag.min(5)), "{version:?}, of group {} on", found.tag);
    stream.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn t11_the_caller_s_duty_is_checked_for_extensions_too() {
    let nodes = [Node::new()];
    let members = volume_on(&nodes);
    let options = OpenOptions { check_ownership: true, ..open_options() };
    let (volume, _) = open_soon(&members, &options);
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut other = volume.stream(1, &StreamOptions::default()).unwrap();
    put(&mut stream, 8, 1, 1, Place::Fresh, false);
    put(&mut stream, 8, 1, 2, Place::Extend, false);
    let buf = stream.buf(4096).unwrap();
    let error = stream.group().write(8, buf, Place::Fresh).submit().unwrap_err();
    assert!(error.to_string().contains("as fresh"), "{error}");
    let buf = other.buf(4096).unwrap();
    let error = other.group().write(8, buf, Place::Extend).submit().unwrap_err();
    assert!(error.to_string().contains("was written by stream 0"), "{error}");
    stream.close().unwrap();
    // All groups of the stream are released now.
    put(&mut other, 8, 1, 3, Place::Extend, false);
    other.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn engines_without_an_ordering_log_extend_a_block_too() {
    for engine in [EngineKind::Sync, EngineKind::None] {
        let nodes = [Node::new()];
        let members = volume_on(&nodes);
        let options = OpenOptions { engine: Some(engine), ..open_options() };
        let (volume, _) = Volume::open("v", &members, &options).unwrap();
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        put(&mut stream, 8, 1, 1, Place::Fresh, true);
        for version in 2..5 {
            let seq = put(&mut stream, 8, 1, version, Place::Extend, true);
            stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
            assert_eq!(holds(&mut stream, 8, 1, version), Some(true), "{engine}");
        }
        stream.close().unwrap();
        volume.close().unwrap();
    }
}
