//! Logs that are older than the ones that the last owner wrote, after a power cut or by an operator
//! (T24). None of them counts as a log with nothing to undo.

use std::fs;
use std::path::Path;
use std::time::Duration;

use riopipe::{ClaimError, OpenError, OpenOptions, Place, StreamOptions, Until, Volume, WaitError};

use crate::crash::{Node, SOON, holds, impatient, put, volume_on, with_loss_timeout};

/// Changes the log as if a target had served it last in another boot.
fn of_another_boot(log: &Path) {
    let mut bytes = fs::read(log).unwrap();
    for copy in bytes[..8192].chunks_exact_mut(4096) {
        copy[40..56].fill(0x5a);
        let check = riopipe::crc32c(0, &copy[12..]);
        copy[8..12].copy_from_slice(&check.to_le_bytes());
    }
    fs::write(log, bytes).unwrap();
}

/// The last owner was killed, and its lease may not be over.
fn taking_over() -> OpenOptions {
    OpenOptions { take_over: true, ..impatient() }
}

/// Opens and closes the volume: its generation rises.
fn open_and_close(members: &[riopipe::MemberAddr]) {
    let (volume, _) = Volume::open("v", members, &impatient()).unwrap();
    volume.close().unwrap();
}

#[test]
fn t24_an_older_copy_of_the_log_is_refused() {
    for kind in ["file", "block"] {
        let mut nodes = [Node::with_log(kind)];
        let members = volume_on(&nodes);
        open_and_close(&members);
        let older = fs::read(nodes[0].path("log")).unwrap();
        let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        let seq = put(&mut stream, 100, 1, 2, Place::Fresh, false);
        stream.wait(Until::Complete(seq), Some(SOON)).unwrap();
        nodes[0].kill();
        drop((stream, volume));
        fs::write(nodes[0].path("log"), older).unwrap();
        nodes[0].start();
        let error = Volume::open("v", &members, &taking_over()).unwrap_err();
        let OpenError::Claim { error: ClaimError::LogBehind { have: 2, label: 3, .. }, .. } = error
        else {
            panic!("{kind}: {error}")
        };
        let text = error.to_string();
        assert!(text.contains("older") && text.contains("accept_lost_log"), "{kind}: {text}");
        let info = Volume::inspect(&members, &crate::site::connect()).unwrap();
        assert!(info.members[0].log_lost, "{kind}");
    }
}

/// After a clean stop of its target, a mapped log survives a boot. Without one it is lost, even if the
/// volume was closed: its pages may be of different times.
#[test]
fn t24_a_mapped_log_survives_a_boot_only_if_it_was_synced() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let write = |version: u64| {
        let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        let seq = put(&mut stream, 10 * version, 1, version, Place::Fresh, true);
        stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
        (volume, stream)
    };
    let (volume, stream) = write(1);
    stream.close().unwrap();
    volume.close().unwrap();
    nodes[0].stop();
    of_another_boot(&nodes[0].path("log"));
    nodes[0].start();
    // A target serves it again, so the stamp is cleared.
    let (volume, mut stream) = write(2);
    assert_eq!(holds(&mut stream, 10, 1, 1), Some(true));
    stream.close().unwrap();
    volume.close().unwrap();
    nodes[0].kill();
    of_another_boot(&nodes[0].path("log"));
    nodes[0].start();
    let error = Volume::open("v", &members, &impatient()).unwrap_err();
    assert!(
        matches!(error, OpenError::Claim { error: ClaimError::LogLost { .. }, .. }),
        "closed, and yet lost: {error}"
    );
    assert!(Volume::inspect(&members, &crate::site::connect()).unwrap().members[0].log_lost);
}

/// A crash of everything, and then a clean stop and another boot: exactly the entries of the log are
/// undone.
#[test]
fn t24_a_log_that_was_synced_is_recovered_in_the_next_boot() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let durable = put(&mut stream, 1, 1, 1, Place::Fresh, true);
    stream.wait(Until::Durable(durable), Some(SOON)).unwrap();
    let complete = put(&mut stream, 2, 1, 2, Place::Fresh, false);
    stream.wait(Until::Complete(complete), Some(SOON)).unwrap();
    nodes[0].kill();
    drop((stream, volume));
    nodes[0].start();
    nodes[0].stop();
    of_another_boot(&nodes[0].path("log"));
    nodes[0].start();
    let (volume, recovery) = Volume::open("v", &members, &taking_over()).unwrap();
    assert_eq!(recovery.stream(0).unwrap().tag, 1, "{recovery}");
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    assert_eq!(holds(&mut stream, 1, 1, 1), Some(true));
    assert_eq!(holds(&mut stream, 2, 1, 2), Some(false));
}

/// The owner stays alive while its target is down and its log is replaced by an older copy.
#[test]
fn t24_an_owner_gets_the_error_that_its_log_went_back_in_time() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    open_and_close(&members);
    let older = fs::read(nodes[0].path("log")).unwrap();
    let options = with_loss_timeout(Duration::from_secs(60));
    let (volume, _) = Volume::open("v", &members, &options).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 100, 1, 2, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    nodes[0].kill();
    fs::write(nodes[0].path("log"), older).unwrap();
    nodes[0].start();
    let seq = put(&mut stream, 101, 1, 3, Place::Fresh, true);
    let WaitError::Failed(failure) = stream.wait(Until::Durable(seq), Some(SOON)).unwrap_err()
    else {
        panic!("not in time")
    };
    let text = failure.to_string();
    assert!(text.contains("older than it was"), "{text}");
}
